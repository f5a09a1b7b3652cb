//! Rescue files: pages that a keeper could not or must not write to a file, kept for a user's decision.
//!
//! ```text
//!   millpond rescue 1            followed, up to the empty line, by lines of text
//!   path: /data/table            \xNN for a byte that is not printable ASCII, or a backslash
//!   device: 65024                of the file, as in stat(2)
//!   inode: 131
//!   size: 40960                  the file's intended size
//!   changed: 1732287600000000000 the file's mtime when this was written, in ns since 1970
//!   length: 36864                its length then
//!   process: 4711                the process that wrote the bytes
//!
//!   at 8192 4096                 an extent: offset and length, in bytes of the file
//!   ...                          its bytes
//!   end                          without it, the rescue file is incomplete
//! ```
//!
//! It is created next to the file if that directory belongs to the user; else where the user's programs
//! keep their state; else in the first of `$XDG_RUNTIME_DIR`, `/var/tmp` and `/dev/shm` (memory) that has
//! room. Only its owner may read it.

use std::ffi::{OsStr, OsString};
use std::fs::{DirBuilder, File};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, BufRead, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;

use crate::io::backend::descriptors::KernelCopy;
use crate::memory::{no_memory, try_with_capacity};
use crate::recovery::keeper::report::printable;
use crate::recovery::keeper::target::{BUFFER_BYTES, Stamp};
use crate::recovery::layout::mtime_ns;
use crate::recovery::mark;

const MAGIC: &str = "millpond rescue 1";
/// Our directory, where programs keep their state; it is created if necessary.
const STATE: &str = "millpond";
/// The maximum length of the file's name, so that the suffix fits the 255 bytes of a name.
const NAME_BYTES_MAX: usize = 200;
/// Longer lines are invalid.
const LINE_BYTES_MAX: u64 = 64 << 10;

/// The file that the bytes belong to.
pub(super) struct Origin {
    pub(super) path: Option<PathBuf>,
    pub(super) device: u64,
    pub(super) inode: u64,
    pub(super) size: u64,
    pub(super) stamp: Option<Stamp>,
    pub(super) pid: i32,
}

/// A rescue file being written; removed unless it is finished.
pub(super) struct Rescue {
    file: BufWriter<File>,
    directory: OwnedFd,
    name: OsString,
    path: PathBuf,
    finished: bool,
}

/// Writes a rescue file with the content that `extents` provides, in the first directory that accepts it.
pub(super) fn keep(
    origin: &Origin,
    mut extents: impl FnMut(&mut Rescue) -> io::Result<()>,
) -> io::Result<PathBuf> {
    let mut last = io::Error::from(io::ErrorKind::NotFound);
    for directory in places(origin) {
        if directory.ends_with(STATE) {
            let _ = DirBuilder::new().recursive(true).mode(0o700).create(&directory);
        }
        let kept = Rescue::create(directory, origin).and_then(|mut rescue| {
            extents(&mut rescue)?;
            rescue.finish()
        });
        match kept {
            Ok(path) => return Ok(path),
            Err(error) => last = error,
        }
    }
    Err(last)
}

impl Rescue {
    fn create(directory: PathBuf, origin: &Origin) -> io::Result<Rescue> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::open(&directory, flags, Mode::empty())?;
        let stat = rustix::fs::fstat(&fd)?;
        let is_own = stat.st_uid == rustix::process::geteuid().as_raw();
        let (is_shared, is_sticky) = (stat.st_mode & 0o022 != 0, stat.st_mode & 0o1000 != 0);
        // Whether other users could remove it, or replace it.
        if (is_shared || !is_own) && !is_sticky {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        let base = origin.path.as_deref().and_then(Path::file_name);
        let base =
            base.map_or_else(|| OsString::from(format!("inode-{}", origin.inode)), OsStr::to_owned);
        let base = &base.as_bytes()[..base.len().min(NAME_BYTES_MAX)];
        let random = RandomState::new().hash_one(origin.inode) as u32;
        let mut name = base.to_vec();
        write!(name, ".rescue-{}-{random:08x}", origin.pid)?;
        let name = OsString::from_vec(name);
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&fd, &name, flags, Mode::RUSR | Mode::WUSR)?;
        let path = directory.join(&name);
        let file = BufWriter::new(File::from(file));
        let mut rescue = Rescue { file, directory: fd, name, path, finished: false };
        let stamp = origin.stamp.unwrap_or(Stamp { changed_ns: 0, size: 0 });
        let text = origin.path.as_ref().map_or_else(String::new, |path| escape(path));
        writeln!(rescue.file, "{MAGIC}\npath: {text}")?;
        writeln!(rescue.file, "device: {}\ninode: {}", origin.device, origin.inode)?;
        writeln!(rescue.file, "size: {}\nchanged: {}", origin.size, stamp.changed_ns)?;
        writeln!(rescue.file, "length: {}\nprocess: {}\n", stamp.size, origin.pid)?;
        Ok(rescue)
    }

    pub(super) fn extent(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        writeln!(self.file, "at {offset} {}", bytes.len())?;
        self.file.write_all(bytes)?;
        self.file.write_all(b"\n")
    }

    fn finish(mut self) -> io::Result<PathBuf> {
        self.file.write_all(b"end\n")?;
        self.file.flush()?;
        self.file.get_ref().sync_all()?;
        rustix::fs::fsync(&self.directory)?;
        self.finished = true;
        Ok(self.path.clone())
    }
}

impl Drop for Rescue {
    fn drop(&mut self) {
        if !self.finished {
            let _ = rustix::fs::unlinkat(self.directory.as_fd(), &self.name, AtFlags::empty());
        }
    }
}

/// Directories to try, the best first.
fn places(origin: &Origin) -> Vec<PathBuf> {
    let mut places = Vec::new();
    let own = rustix::process::geteuid().as_raw();
    // Only if the name still leads to the file: it may have been unlinked or renamed.
    if let Some(path) = &origin.path
        && let Ok(stat) = rustix::fs::lstat(path)
        && (stat.st_dev, stat.st_ino) == (origin.device, origin.inode)
        && let Some(parent) = path.parent()
        && rustix::fs::stat(parent).is_ok_and(|stat| stat.st_uid == own)
    {
        places.push(parent.to_owned());
    }
    let absolute =
        |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let state = absolute("XDG_STATE_HOME").or_else(|| Some(absolute("HOME")?.join(".local/state")));
    if let Some(state) = state {
        places.push(state.join(STATE));
    }
    places.extend(absolute("XDG_RUNTIME_DIR"));
    places.extend(["/var/tmp", "/dev/shm"].map(PathBuf::from));
    places
}

fn escape(path: &Path) -> String {
    let mut text = String::new();
    for &byte in path.as_os_str().as_bytes() {
        match byte {
            b' '..=b'~' if byte != b'\\' => text.push(byte.into()),
            _ => text.push_str(&format!("\\x{byte:02x}")),
        }
    }
    text
}

fn unescape(text: &str) -> Option<PathBuf> {
    let mut bytes = Vec::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("\\x") {
        bytes.extend_from_slice(before.as_bytes());
        bytes.push(u8::from_str_radix(after.get(..2)?, 16).ok()?);
        rest = &after[2..];
    }
    bytes.extend_from_slice(rest.as_bytes());
    (!bytes.is_empty()).then(|| OsString::from_vec(bytes).into())
}

/// The result of [`restore`].
#[derive(Debug)]
#[non_exhaustive]
pub struct Restored {
    /// The file that was written.
    pub path: PathBuf,
    /// The number of bytes written.
    pub bytes: u64,
    /// The size that the process had given the file. A shorter file has it now; a longer one was left as it
    /// was.
    pub size: u64,
}

/// Writes the content of the rescue file `rescue` to the file that it belongs to, or to `target`, and syncs
/// that. The rescue file is kept.
///
/// # Errors
///
/// [`io::ErrorKind::InvalidData`]: not a rescue file, or an incomplete one; nothing is written then.
/// [`io::ErrorKind::StaleNetworkFileHandle`]: the file is a different one, or was changed since, and
/// `force` is not set. [`io::ErrorKind::PermissionDenied`]: another user may have written the rescue file,
/// and `force` is not set: it belongs to neither the calling user, nor root, nor the owner of the target
/// file. Otherwise an error of the file system.
///
/// Without `target` no symbolic link is followed to the file: the keeper recorded the kernel's path.
///
/// # Examples
///
/// ```no_run
/// let restored = millpond::keeper::restore("table.rescue-4711-0badcafe".as_ref(), None, false)?;
/// println!("{} bytes are in {} again", restored.bytes, restored.path.display());
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn restore(rescue: &Path, target: Option<&Path>, force: bool) -> io::Result<Restored> {
    let rescue_file = find_regular(rescue, ResolveFlags::empty())?;
    let from = rustix::fs::fstat(&rescue_file)?;
    let mut file = BufReader::new(reopen(&rescue_file, OFlags::RDONLY)?);
    let header = Header::read(&mut file)?;
    let extents = scan(&mut file)?;
    let named = header.path.clone().filter(|_| target.is_none());
    let nameless = || invalid("it names no file: pass the file that it belongs to");
    let path = target.map(Path::to_owned).or(named).ok_or_else(nameless)?;
    let links = if target.is_some() { ResolveFlags::empty() } else { ResolveFlags::NO_SYMLINKS };
    let found = find_regular(&path, links)
        .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", printable(&path))))?;
    let stat = rustix::fs::fstat(&found)?;
    // Before it is opened: an open may have side effects.
    if !force && let Some(why) = distrust(&from, &stat) {
        let text = format!("{why}, and {} belongs to user {}", printable(&path), stat.st_uid);
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
    }
    let target = reopen(&found, OFlags::RDWR)?;
    mark::await_written(&stat, mark::PATIENCE)?;
    let stat = rustix::fs::fstat(&target)?;
    let is_same = (stat.st_dev, stat.st_ino) == (header.device, header.inode);
    let is_unchanged = (mtime_ns(&stat), stat.st_size as u64) == (header.changed, header.length);
    let is_as_it_was = is_same && is_unchanged;
    if !force && !is_as_it_was {
        let what = if is_same { "was changed since" } else { "is not the file that it was" };
        let kind = io::ErrorKind::StaleNetworkFileHandle;
        return Err(io::Error::new(kind, format!("{} {what}", printable(&path))));
    }
    let source = file.into_inner();
    let mut buffer = try_with_capacity(BUFFER_BYTES)?;
    buffer.resize(BUFFER_BYTES, 0);
    let mut bytes = 0;
    for extent in extents {
        let mut done = 0;
        while done < extent.len {
            let count = (extent.len - done).min(buffer.len() as u64) as usize;
            source.read_exact_at(&mut buffer[..count], extent.from + done)?;
            target.write_all_at(&buffer[..count], extent.at + done)?;
            done += count as u64;
        }
        bytes += extent.len;
    }
    if target.metadata()?.len() < header.size {
        target.set_len(header.size)?;
    }
    let kernel_copy = KernelCopy::after_failure();
    if let Err(error) = kernel_copy.sync(target.as_fd(), || target.sync_all()) {
        // As a keeper does (replay.RP4): the next restore writes the same pages.
        kernel_copy.drop_pages(target.as_fd());
        return Err(error);
    }
    Ok(Restored { path, bytes, size: header.size })
}

/// Finds a regular file without opening it: an open of a FIFO waits for its other end, and an open of a
/// device may have side effects.
fn find_regular(path: &Path, resolve: ResolveFlags) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let found = match rustix::fs::openat2(CWD, path, flags, Mode::empty(), resolve) {
        // A kernel before 5.6, or a sandbox.
        Err(Errno::NOSYS | Errno::PERM) if resolve.is_empty() => {
            rustix::fs::open(path, flags, Mode::empty())
        }
        Err(Errno::NOSYS | Errno::PERM) => {
            rustix::fs::open(path, flags | OFlags::NOFOLLOW, Mode::empty())
        }
        found => found,
    }?;
    let kind = rustix::fs::FileType::from_raw_mode(rustix::fs::fstat(&found)?.st_mode);
    if kind != rustix::fs::FileType::RegularFile {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    Ok(found)
}

/// Opens the file that was found, even if its path leads to another file now.
fn reopen(found: &OwnedFd, access: OFlags) -> io::Result<File> {
    let path = format!("/proc/self/fd/{}", found.as_raw_fd());
    Ok(rustix::fs::open(path, access | OFlags::CLOEXEC, Mode::empty())?.into())
}

/// The reason why the bytes and the path in the rescue file `from` may be the choice of a user who could
/// not write `target`.
fn distrust(from: &Stat, target: &Stat) -> Option<String> {
    let trusted = [0, rustix::process::geteuid().as_raw(), target.st_uid];
    if !trusted.contains(&from.st_uid) {
        return Some(format!("the rescue file belongs to user {}", from.st_uid));
    }
    let is_shared = from.st_mode & 0o022 != 0;
    is_shared.then(|| "other users may write to the rescue file".into())
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_string())
}

struct Header {
    path: Option<PathBuf>,
    device: u64,
    inode: u64,
    size: u64,
    changed: u64,
    length: u64,
}

/// A line, without its end.
fn line(file: &mut BufReader<File>) -> io::Result<String> {
    let mut line = String::new();
    file.by_ref().take(LINE_BYTES_MAX).read_line(&mut line)?;
    match line.pop() {
        Some('\n') => Ok(line),
        _ => Err(invalid("an incomplete rescue file")),
    }
}

impl Header {
    fn read(file: &mut BufReader<File>) -> io::Result<Header> {
        if line(file)? != MAGIC {
            return Err(invalid("not a rescue file of this version"));
        }
        let (mut path, mut numbers) = (None, [None; 5]);
        const NAMES: [&str; 5] = ["device", "inode", "size", "changed", "length"];
        loop {
            let line = line(file)?;
            if line.is_empty() {
                break;
            }
            let Some((name, value)) = line.split_once(": ") else { continue };
            if name == "path" {
                path = unescape(value);
            } else if let Some(at) = NAMES.iter().position(|known| *known == name) {
                numbers[at] = value.parse().ok();
            }
        }
        let [Some(device), Some(inode), Some(size), Some(changed), Some(length)] = numbers else {
            return Err(invalid("a line of its header is missing"));
        };
        Ok(Header { path, device, inode, size, changed, length })
    }
}

struct RescueExtent {
    at: u64,
    len: u64,
    /// The position of its bytes in the rescue file.
    from: u64,
}

/// All extents, if the rescue file is complete.
fn scan(file: &mut BufReader<File>) -> io::Result<Vec<RescueExtent>> {
    let end = file.get_ref().metadata()?.len();
    let mut extents = Vec::new();
    loop {
        let line = line(file)?;
        if line == "end" {
            return Ok(extents);
        }
        let numbers = line.strip_prefix("at ").and_then(|rest| rest.split_once(' '));
        let numbers =
            numbers.and_then(|(at, len)| Some((at.parse().ok()?, len.parse::<u64>().ok()?)));
        let from = file.stream_position()?;
        match numbers {
            Some((at, len)) if from.checked_add(len).is_some_and(|to| to < end) => {
                extents.try_reserve(1).map_err(|_| no_memory())?;
                extents.push(RescueExtent { at, len, from });
                // After the line end that follows the bytes.
                file.seek(SeekFrom::Start(from + len + 1))?;
            }
            _ => return Err(invalid("an incomplete rescue file")),
        }
    }
}
