//! Writes the preload library, which this binary contains, to a file.
//!
//! The dynamic loader needs a path, in the program and in each program that it starts. The file
//! is written once per version of the library, and later runs use it again.
//!
//! - L1. A user that can write the file, or rename another file over it, runs code in each program
//!   started. So the directory is this user's and only this user can write to it. No other user can replace it or a
//!   directory above it (trusted_directory.T1). The loader gets the path without symbolic links.
//! - L2. The name has a hash of the contents, computed when this binary was built. So an older
//!   version is never loaded.
//! - L3. The file appears by rename, complete and on the disk, and is never written in place. A running
//!   program keeps the version that it has mapped.
//! - L4. A completely written file carries a *mark*: the nanoseconds of its modification time are computed
//!   from the contents. A later write removes the mark. So a check of size, owner, mode and mark
//!   is enough. If the mark is missing (in a copy, or on a file system that does not store
//!   it), the contents are compared, and the file is marked again.
//! - L5. Files of other versions are removed a day after their last use (`unused_libraries`).
//!
//! A comparison took 4.7 ms of each run; the check takes four system calls.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::{OFlags, StatVfsMountFlags};

use super::trusted_directory;
use super::unused_libraries::{self, PREFIX, SUFFIX, UNFINISHED};
use crate::failure::{FAILED, Failure, REFUSED, Result};

/// Built by `build.rs`; empty if the build skipped it.
const LIBRARY: &[u8] = include_bytes!(env!("MILLPOND_EMBEDDED_PRELOAD"));
/// Tells versions apart, in 16 digits. L1, not this hash, guards against a planted library.
const HASH: &str = env!("MILLPOND_EMBEDDED_PRELOAD_HASH");

/// The path of the library to preload: `MILLPOND_PRELOAD` if set, else that of the library in this binary.
pub fn library() -> Result<PathBuf> {
    if let Some(path) = env::var_os("MILLPOND_PRELOAD").filter(|path| !path.is_empty()) {
        return chosen(Path::new(&path));
    }
    if LIBRARY.is_empty() {
        return Err(Failure::new(
            REFUSED,
            "this millpond was built without its preload library (MILLPOND_SKIP_PRELOAD); \
             name one with MILLPOND_PRELOAD=FILE",
        ));
    }
    let mut refusals = String::new();
    for directory in candidates() {
        match place(&directory) {
            Ok(path) => return Ok(path),
            Err(why) => refusals += &format!("\n  {}: {why}", directory.display()),
        }
    }
    Err(Failure::new(FAILED, format!("found no safe place for the preload library:{refusals}")))
}

/// `LD_PRELOAD` with the library in front. The loader must find its functions before those of another library that
/// wraps the same calls: the other library then gets only the calls that are left to the kernel.
pub fn prepended(library: &Path, existing: Option<OsString>) -> OsString {
    let mut value = library.as_os_str().to_owned();
    if let Some(existing) = existing.filter(|existing| !existing.is_empty()) {
        let separator = |byte: &u8| matches!(byte, b':' | b' ');
        if existing.as_bytes().split(separator).next() == Some(value.as_bytes()) {
            return existing;
        }
        value.push(":");
        value.push(existing);
    }
    value
}

fn chosen(path: &Path) -> Result<PathBuf> {
    let refuse = |why: &dyn std::fmt::Display| {
        Failure::new(REFUSED, format!("MILLPOND_PRELOAD {}: {why}", path.display()))
    };
    let path = fs::canonicalize(path).map_err(|error| refuse(&error))?;
    if !loadable(path.as_os_str()) {
        return Err(refuse(&UNLOADABLE));
    }
    Ok(path)
}

const UNLOADABLE: &str = "LD_PRELOAD can't name a path with a colon, a space or a dollar sign";

/// The loader separates paths by colons and spaces, and expands names after a dollar sign.
fn loadable(path: &OsStr) -> bool {
    !path.as_bytes().iter().any(|byte| matches!(byte, b':' | b' ' | b'$'))
}

/// Directories to try, best first: one of the login session, then one that any machine
/// has, then one that survives a reboot.
fn candidates() -> Vec<PathBuf> {
    let uid = rustix::process::geteuid();
    let absolute = |name: &str| env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    let mut candidates = Vec::new();
    candidates.extend(absolute("XDG_RUNTIME_DIR").map(|path| path.join("millpond")));
    let shared = [absolute("TMPDIR"), Some("/tmp".into())].into_iter().flatten();
    candidates.extend(shared.map(|path| path.join(format!("millpond-{}", uid.as_raw()))));
    candidates.extend(absolute("HOME").map(|path| path.join(".cache/millpond")));
    candidates
}

/// Puts the library into `directory`, unless it is there already. `Err`: why the directory can't be trusted.
fn place(directory: &Path) -> std::result::Result<PathBuf, String> {
    let directory = secure(directory)?;
    let name = format!("{PREFIX}{HASH}{SUFFIX}");
    let path = directory.join(&name);
    let is_there = match last_use(&path).map_err(|error| error.to_string())? {
        Some(time) if unused_libraries::was_noted(time) => return Ok(path),
        Some(_) => {
            unused_libraries::note_use(&path, set_mark).map_err(|error| error.to_string())?
        }
        None => false,
    };
    if !is_there {
        write(&directory, &path).map_err(|error| error.to_string())?;
    }
    unused_libraries::remove(&directory, &name);
    Ok(path)
}

/// Makes the directory if it is missing, ensures L1, and returns the path for the loader.
fn secure(directory: &Path) -> std::result::Result<PathBuf, String> {
    let (Some(parent), Some(name)) = (directory.parent(), directory.file_name()) else {
        return Err("has no parent".into());
    };
    // Checked before the directory is made: a link of another user must not choose its place.
    let directory = trusted_directory::resolve(parent)?.join(name);
    if !loadable(directory.as_os_str()) {
        return Err(UNLOADABLE.into());
    }
    // 0755: a program that drops root's privileges must still find the library when it execs.
    match DirBuilder::new().mode(0o755).create(&directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            return Err(error.to_string());
        }
        _ => {}
    }
    // Not followed: a symbolic link planted in /tmp is not a directory.
    let own = fs::symlink_metadata(&directory).map_err(|error| error.to_string())?;
    if !own.is_dir() {
        return Err("not a directory".into());
    }
    let uid = rustix::process::geteuid().as_raw();
    if own.uid() != uid {
        return Err(format!("belongs to user {}, not to user {uid}", own.uid()));
    }
    if own.mode() & 0o022 != 0 {
        return Err("others may write in it".into());
    }
    let statvfs = rustix::fs::statvfs(&directory).map_err(|error| error.to_string())?;
    if statvfs.f_flag.contains(StatVfsMountFlags::NOEXEC) {
        return Err("on a file system mounted noexec".into());
    }
    Ok(directory)
}

/// When a run last noted its use of the file. `None`: it does not exist, is not this user's, or has other contents (L4).
fn last_use(path: &Path) -> io::Result<Option<SystemTime>> {
    // Not followed: the rename replaces a symbolic link.
    let metadata = match fs::symlink_metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let is_ours = metadata.is_file()
        && metadata.uid() == rustix::process::geteuid().as_raw()
        && metadata.mode() & 0o022 == 0;
    if !is_ours || metadata.len() != LIBRARY.len() as u64 {
        return Ok(None);
    }
    if metadata.mtime_nsec() == i64::from(mark()) {
        return metadata.modified().map(Some);
    }
    // The time is that of a write, or no run's.
    Ok(has_contents(path)?.then_some(UNIX_EPOCH))
}

/// Compares the whole file, and marks it if it is the library.
fn has_contents(path: &Path) -> io::Result<bool> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = OpenOptions::new().read(true).custom_flags(flags.bits() as i32).open(path)?;
    let mut contents = Vec::with_capacity(LIBRARY.len());
    (&file).take(LIBRARY.len() as u64 + 1).read_to_end(&mut contents)?;
    let is_it = contents == LIBRARY;
    if is_it {
        // If the mark can't be set, the next run compares again.
        let _ = set_mark(&file);
    }
    Ok(is_it)
}

/// L4: the nanoseconds that mark these contents.
fn mark() -> u32 {
    // Never 0, the nanoseconds on coarse file systems.
    1 + u64::from_str_radix(HASH, 16).map_or(0, |hash| (hash % 999_999_999) as u32)
}

fn set_mark(file: &File) -> io::Result<()> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    file.set_modified(UNIX_EPOCH + Duration::new(now.as_secs(), mark()))
}

fn write(directory: &Path, path: &Path) -> io::Result<()> {
    let unfinished = directory.join(format!("{UNFINISHED}{}", std::process::id()));
    // Left by a killed run with the same process id.
    let _ = fs::remove_file(&unfinished);
    let written = (|| {
        let mut options = OpenOptions::new();
        let mut file = options.write(true).create_new(true).mode(0o444).open(&unfinished)?;
        file.write_all(LIBRARY)?;
        set_mark(&file)?;
        // The contents must be on the disk before the name: after a power cut they are not compared.
        file.sync_all()?;
        fs::rename(&unfinished, path)
    })();
    if written.is_err() {
        let _ = fs::remove_file(&unfinished);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::skip;
    use std::os::unix::fs::{PermissionsExt, symlink};

    /// A directory with an acceptable parent, independent of TMPDIR.
    fn parent() -> tempfile::TempDir {
        tempfile::tempdir().unwrap()
    }

    #[test]
    fn the_library_is_written_once_and_repaired() {
        let parent = parent();
        let directory = parent.path().join("millpond");
        let path = place(&directory).unwrap();
        let first = fs::metadata(&path).unwrap();
        assert_eq!(fs::read(&path).unwrap(), LIBRARY);
        assert_eq!(place(&directory).unwrap(), path);
        assert_eq!(fs::metadata(&path).unwrap().ino(), first.ino());

        fs::remove_file(&path).unwrap();
        fs::write(&path, b"cut short").unwrap();
        place(&directory).unwrap();
        assert_eq!(fs::read(&path).unwrap(), LIBRARY);
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 1, "nothing unfinished stays");
    }

    /// Goal: a run sets the time of its library, with the mark, once an hour, and removes unused ones then.
    #[test]
    fn uses_are_noted() {
        let parent = parent();
        let directory = parent.path().join("millpond");
        let path = place(&directory).unwrap();
        let time = || fs::metadata(&path).unwrap().modified().unwrap();
        let unused = directory.join("libmillpond_preload-0000000000000000.so");
        File::create(&unused).unwrap().set_modified(UNIX_EPOCH).unwrap();
        let set_age = |minutes: u64| {
            let noted = SystemTime::now() - Duration::from_secs(minutes * 60);
            let seconds = noted.duration_since(UNIX_EPOCH).unwrap().as_secs();
            let noted = UNIX_EPOCH + Duration::new(seconds, mark());
            File::open(&path).unwrap().set_modified(noted).unwrap();
            noted
        };
        let noted = set_age(50);
        place(&directory).unwrap();
        assert_eq!(time(), noted);
        assert!(unused.exists());
        let (noted, inode) = (set_age(70), fs::metadata(&path).unwrap().ino());
        place(&directory).unwrap();
        assert!(time() > noted + Duration::from_secs(60 * 60));
        let file = fs::metadata(&path).unwrap();
        assert_eq!((file.mtime_nsec(), file.ino()), (i64::from(mark()), inode));
        assert!(!unused.exists());
    }

    /// Goal: a file that was written to later, or that other users can write, is not used, though name and size are
    /// right. A complete file without its mark is kept, and marked.
    #[test]
    fn only_a_whole_library_is_taken() {
        let parent = parent();
        let directory = parent.path().join("millpond");
        let path = place(&directory).unwrap();
        let inode = || fs::metadata(&path).unwrap().ino();
        let has_mark = || fs::metadata(&path).unwrap().mtime_nsec() == i64::from(mark());
        assert!(has_mark());
        let old = inode();
        File::open(&path).unwrap().set_modified(UNIX_EPOCH).unwrap();
        place(&directory).unwrap();
        assert!(has_mark());
        assert_eq!(inode(), old, "compared, and marked");

        fs::set_permissions(&path, PermissionsExt::from_mode(0o644)).unwrap();
        let planted = OpenOptions::new().write(true).open(&path).unwrap();
        (&planted).write_all(b"planted").unwrap();
        place(&directory).unwrap();
        assert_eq!(fs::read(&path).unwrap(), LIBRARY);
        assert_ne!(inode(), old);

        let old = inode();
        fs::set_permissions(&path, PermissionsExt::from_mode(0o666)).unwrap();
        place(&directory).unwrap();
        assert_ne!(inode(), old, "others may have written in it");
    }

    #[test]
    fn a_link_in_place_of_the_library_is_replaced() {
        let parent = parent();
        let directory = parent.path().join("millpond");
        let path = place(&directory).unwrap();
        let planted = parent.path().join("planted");
        fs::rename(&path, &planted).unwrap();
        symlink(&planted, &path).unwrap();
        place(&directory).unwrap();
        assert!(fs::symlink_metadata(&path).unwrap().is_file());
    }

    #[test]
    fn unsafe_directories_are_refused() {
        let parent = parent();
        let directory = parent.path().join("millpond");
        fs::create_dir(&directory).unwrap();
        fs::set_permissions(&directory, PermissionsExt::from_mode(0o777)).unwrap();
        assert!(place(&directory).unwrap_err().contains("others may write"));

        let link = parent.path().join("link");
        symlink(&directory, &link).unwrap();
        assert!(place(&link).unwrap_err().contains("not a directory"));

        fs::set_permissions(&directory, PermissionsExt::from_mode(0o755)).unwrap();
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(&directory, Some(65534), None).unwrap();
            assert!(place(&directory).unwrap_err().contains("belongs to user 65534"));
        }

        fs::set_permissions(parent.path(), PermissionsExt::from_mode(0o777)).unwrap();
        let fresh = parent.path().join("fresh");
        assert!(place(&fresh).unwrap_err().contains("other users may rename"));
    }

    #[test]
    fn a_path_that_the_loader_would_expand_is_refused() {
        let parent = parent();
        for name in ["$ORIGIN", "a:b", "a b"] {
            let odd = parent.path().join(name);
            fs::create_dir(&odd).unwrap();
            assert!(place(&odd.join("millpond")).unwrap_err().contains("can't name"), "{name}");
        }
    }

    /// Goal: the library is only placed where no other user can rename a directory above it.
    /// Incident: only the directory and its parent were checked. The owner of the directory above them renamed the
    /// parent and put a library in its place. The next program that root started loaded that library.
    #[test]
    fn each_directory_up_to_the_root_is_checked() {
        if !rustix::process::geteuid().is_root() {
            return skip::skip("needs to be root, to have another user");
        }
        let chown = |path: &Path| std::os::unix::fs::chown(path, Some(65_534), None).unwrap();
        for levels in 1..5 {
            let parent = parent();
            let foreign = parent.path().join("foreign");
            fs::create_dir(&foreign).unwrap();
            let own = (1..levels).fold(foreign.clone(), |path, level| path.join(level.to_string()));
            fs::create_dir_all(&own).unwrap();
            chown(&foreign);
            let refused = place(&own.join("millpond")).unwrap_err();
            assert!(refused.contains("foreign belongs to user 65534"), "{levels}: {refused}");
            assert!(!own.join("millpond").exists(), "{levels}: made all the same");
        }
    }

    /// Goal: the loader gets a path without symbolic links.
    /// Incident: the write of the library followed another user's link on the path. The link led elsewhere when a
    /// program loaded the library.
    #[test]
    fn a_link_on_the_path_is_resolved() {
        let parent = parent();
        let (behind, link) = (parent.path().join("behind"), parent.path().join("link"));
        fs::create_dir(&behind).unwrap();
        symlink(&behind, &link).unwrap();
        let path = place(&link.join("millpond")).unwrap();
        assert_eq!(path.parent(), Some(&*behind.canonicalize().unwrap().join("millpond")));
    }

    #[test]
    fn an_existing_preload_is_kept_behind_ours() {
        let ours = Path::new("/run/ours.so");
        assert_eq!(prepended(ours, None), "/run/ours.so");
        assert_eq!(prepended(ours, Some("".into())), "/run/ours.so");
        assert_eq!(prepended(ours, Some("a.so b.so".into())), "/run/ours.so:a.so b.so");
        assert_eq!(prepended(ours, Some("/run/ours.so:a.so".into())), "/run/ours.so:a.so");
    }
}
