//! A FUSE file system that records changes: a directory over a [`Recorder`].
//!
//! The kernel caches reads. Writes arrive here before they return, except those through a mapping, which
//! arrive when the kernel writes them back. `O_SYNC` and `O_DSYNC` arrive as a sync after the write.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, SystemTime};

use fuser::{
    AccessFlags, BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem,
    FopenFlags, Generation, INodeNo, LockOwner, MountOption, OpenFlags, RenameFlags, ReplyAttr,
    ReplyCreate, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyStatfs, ReplyWrite,
    ReplyXattr, Request, TimeOrNow, WriteFlags,
};

use super::history::Recorder;
use super::tree::{DirEntry, Ino, InodeKind, Tree, TreeChange};
use crate::failure::{Context, Result};

/// The lifetime of the kernel's cached attributes: all changes come through the kernel.
const LIFE: Duration = Duration::from_secs(60);
const BLOCK_BYTES: u32 = 4096;
const FILE_BYTES_MAX: u64 = 1 << 32;

/// Shared with the thread that reads the program's output.
pub type Shared = Arc<Mutex<Option<Recorder>>>;

type Answer<T> = std::result::Result<T, Errno>;

struct Recorded {
    recorder: Shared,
    /// The time stamp of all files.
    time: SystemTime,
    owner: (u32, u32),
}

/// Mounts the recorder over `dir`. The drop of the result unmounts it.
pub fn mount(recorder: Shared, dir: &Path) -> Result<BackgroundSession> {
    let metadata = std::fs::metadata(dir).context(dir.display())?;
    let owner = {
        use std::os::unix::fs::MetadataExt;
        (metadata.uid(), metadata.gid())
    };
    let mut config = Config::default();
    config.mount_options =
        vec![MountOption::FSName("millpond-crash".into()), MountOption::DefaultPermissions];
    let files = Recorded { recorder, time: SystemTime::now(), owner };
    fuser::spawn_mount(files, dir, &config).context(format!(
        "mounting a recorder over {} (FUSE: /dev/fuse, and root or fusermount3)",
        dir.display()
    ))
}

/// No thread panics under this lock.
fn locked(recorder: &Shared) -> MutexGuard<'_, Option<Recorder>> {
    recorder.lock().expect("no panic under the lock")
}

impl Recorded {
    /// Runs a step, unless the program has ended: nothing is recorded after that.
    fn with<T>(&self, step: impl FnOnce(&mut Recorder) -> Answer<T>) -> Answer<T> {
        step(locked(&self.recorder).as_mut().ok_or(Errno::EIO)?)
    }

    fn attributes(&self, tree: &Tree, ino: Ino) -> Answer<FileAttr> {
        let inode = tree.inode(ino).ok_or(Errno::ENOENT)?;
        let (kind, size) = match &inode.kind {
            InodeKind::File(data) => (FileType::RegularFile, data.len() as u64),
            InodeKind::Dir(_) => (FileType::Directory, u64::from(BLOCK_BYTES)),
            InodeKind::Link(target) => (FileType::Symlink, target.as_os_str().len() as u64),
        };
        let time = self.time;
        Ok(FileAttr {
            ino: INodeNo(ino),
            size,
            blocks: size.div_ceil(512),
            atime: time,
            mtime: time,
            ctime: time,
            crtime: time,
            kind,
            perm: inode.mode as u16,
            nlink: inode.links,
            uid: self.owner.0,
            gid: self.owner.1,
            rdev: 0,
            blksize: BLOCK_BYTES,
            flags: 0,
        })
    }

    fn make(&self, dir: INodeNo, name: &OsStr, kind: InodeKind, mode: u32) -> Answer<FileAttr> {
        self.with(|recorder| {
            let at = free(&recorder.now, dir, name)?;
            let ino = recorder.now.next;
            recorder.record_change(TreeChange::Create { at, ino, kind, mode: mode & 0o7777 });
            self.attributes(&recorder.now, ino)
        })
    }

    fn rename(&self, from: DirEntry, to: DirEntry, flags: RenameFlags) -> Answer<()> {
        self.with(|recorder| {
            let tree = &recorder.now;
            let ino = tree.find(from.dir, &from.name).ok_or(Errno::ENOENT)?;
            let replaced = tree.find(to.dir, &to.name);
            if flags.contains(RenameFlags::RENAME_WHITEOUT) {
                return Err(Errno::EINVAL);
            }
            if flags.contains(RenameFlags::RENAME_EXCHANGE) {
                let inos = (ino, replaced.ok_or(Errno::ENOENT)?);
                recorder.record_change(TreeChange::Exchange { one: from, other: to, inos });
                return Ok(());
            }
            if flags.contains(RenameFlags::RENAME_NOREPLACE) && replaced.is_some() {
                return Err(Errno::EEXIST);
            }
            match replaced.and_then(|replaced| tree.entries(replaced)) {
                Some(entries) if !entries.is_empty() => return Err(Errno::ENOTEMPTY),
                _ => {}
            }
            if replaced != Some(ino) {
                recorder.record_change(TreeChange::Rename { from, to, ino, replaced });
            }
            Ok(())
        })
    }

    fn allocate(&self, ino: Ino, offset: u64, len: u64, mode: i32) -> Answer<()> {
        const KEEP_SIZE: i32 = 1;
        const PUNCH: i32 = 2;
        const ZERO: i32 = 16;
        if mode & !(KEEP_SIZE | PUNCH | ZERO) != 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        self.with(|recorder| {
            let size = recorder.now.data(ino).ok_or(Errno::EINVAL)?.len() as u64;
            let end = within(offset, len)?;
            if mode & (PUNCH | ZERO) != 0 && offset < size {
                recorder.record_change(TreeChange::Zero { ino, offset, len });
            }
            if mode & KEEP_SIZE == 0 && end > size {
                recorder.record_change(TreeChange::Resize { ino, len: end });
            }
            Ok(())
        })
    }
}

fn within(offset: u64, len: u64) -> Answer<u64> {
    let end = offset.checked_add(len).filter(|end| *end <= FILE_BYTES_MAX);
    end.ok_or(Errno::EFBIG)
}

fn entry(dir: INodeNo, name: &OsStr) -> DirEntry {
    DirEntry { dir: dir.0, name: name.to_owned() }
}

fn free(tree: &Tree, dir: INodeNo, name: &OsStr) -> Answer<DirEntry> {
    if name.len() > 255 {
        return Err(Errno::ENAMETOOLONG);
    }
    let entries = tree.entries(dir.0).ok_or(Errno::ENOTDIR)?;
    if entries.contains_key(name) {
        return Err(Errno::EEXIST);
    }
    Ok(entry(dir, name))
}

fn kind_of(kind: &InodeKind) -> FileType {
    match kind {
        InodeKind::File(_) => FileType::RegularFile,
        InodeKind::Dir(_) => FileType::Directory,
        InodeKind::Link(_) => FileType::Symlink,
    }
}

fn reply_empty(reply: ReplyEmpty, answer: Answer<()>) {
    match answer {
        Ok(()) => reply.ok(),
        Err(errno) => reply.error(errno),
    }
}

fn reply_entry(reply: ReplyEntry, answer: Answer<FileAttr>) {
    match answer {
        Ok(attributes) => reply.entry(&LIFE, &attributes, Generation(0)),
        Err(errno) => reply.error(errno),
    }
}

impl Filesystem for Recorded {
    fn lookup(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        reply_entry(
            reply,
            self.with(|recorder| {
                let ino = recorder.now.find(parent.0, name).ok_or(Errno::ENOENT)?;
                self.attributes(&recorder.now, ino)
            }),
        );
    }

    fn getattr(&self, _req: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        match self.with(|recorder| self.attributes(&recorder.now, ino.0)) {
            Ok(attributes) => reply.attr(&LIFE, &attributes),
            Err(errno) => reply.error(errno),
        }
    }

    fn setattr(
        &self,
        _req: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        _uid: Option<u32>,
        _gid: Option<u32>,
        size: Option<u64>,
        _atime: Option<TimeOrNow>,
        _mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<fuser::BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let answer = self.with(|recorder| {
            let before = self.attributes(&recorder.now, ino.0)?;
            if let Some(mode) = mode.map(|mode| mode & 0o7777)
                && mode != u32::from(before.perm)
            {
                recorder.record_change(TreeChange::Mode { ino: ino.0, mode });
            }
            if let Some(len) = size
                && len != before.size
            {
                within(0, len)?;
                recorder.record_change(TreeChange::Resize { ino: ino.0, len });
            }
            self.attributes(&recorder.now, ino.0)
        });
        match answer {
            Ok(attributes) => reply.attr(&LIFE, &attributes),
            Err(errno) => reply.error(errno),
        }
    }

    fn readlink(&self, _req: &Request, ino: INodeNo, reply: ReplyData) {
        let answer =
            self.with(|recorder| match recorder.now.inode(ino.0).map(|inode| &inode.kind) {
                Some(InodeKind::Link(target)) => Ok(target.clone()),
                _ => Err(Errno::EINVAL),
            });
        match answer {
            Ok(target) => reply.data(target.as_os_str().as_bytes()),
            Err(errno) => reply.error(errno),
        }
    }

    fn mkdir(
        &self,
        _req: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        reply: ReplyEntry,
    ) {
        reply_entry(
            reply,
            self.make(parent, name, InodeKind::Dir(Default::default()), mode & !umask),
        );
    }

    fn unlink(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let answer = self.with(|recorder| {
            let ino = recorder.now.find(parent.0, name).ok_or(Errno::ENOENT)?;
            if recorder.now.entries(ino).is_some() {
                return Err(Errno::EISDIR);
            }
            recorder.record_change(TreeChange::Remove { at: entry(parent, name) });
            Ok(())
        });
        reply_empty(reply, answer);
    }

    fn rmdir(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let answer = self.with(|recorder| {
            let ino = recorder.now.find(parent.0, name).ok_or(Errno::ENOENT)?;
            if !recorder.now.entries(ino).ok_or(Errno::ENOTDIR)?.is_empty() {
                return Err(Errno::ENOTEMPTY);
            }
            recorder.record_change(TreeChange::Remove { at: entry(parent, name) });
            Ok(())
        });
        reply_empty(reply, answer);
    }

    fn symlink(
        &self,
        _req: &Request,
        parent: INodeNo,
        link_name: &OsStr,
        target: &Path,
        reply: ReplyEntry,
    ) {
        reply_entry(reply, self.make(parent, link_name, InodeKind::Link(target.to_owned()), 0o777));
    }

    fn rename(
        &self,
        _req: &Request,
        parent: INodeNo,
        name: &OsStr,
        newparent: INodeNo,
        newname: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        reply_empty(reply, self.rename(entry(parent, name), entry(newparent, newname), flags));
    }

    fn link(
        &self,
        _req: &Request,
        ino: INodeNo,
        newparent: INodeNo,
        newname: &OsStr,
        reply: ReplyEntry,
    ) {
        let answer = self.with(|recorder| {
            let at = free(&recorder.now, newparent, newname)?;
            recorder.record_change(TreeChange::Link { at, ino: ino.0 });
            self.attributes(&recorder.now, ino.0)
        });
        reply_entry(reply, answer);
    }

    fn read(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        match self.with(|recorder| recorder.now.data(ino.0).cloned().ok_or(Errno::EISDIR)) {
            Ok(data) => {
                let start = data.len().min(offset as usize);
                reply.data(&data[start..data.len().min(start + size as usize)]);
            }
            Err(errno) => reply.error(errno),
        }
    }

    fn write(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let answer = self.with(|recorder| {
            within(offset, data.len() as u64)?;
            recorder.record_change(TreeChange::Write { ino: ino.0, offset, data: data.into() });
            Ok(())
        });
        match answer {
            Ok(()) => reply.written(data.len() as u32),
            Err(errno) => reply.error(errno),
        }
    }

    fn flush(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _lock_owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        reply.ok();
    }

    fn fsync(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        _datasync: bool,
        reply: ReplyEmpty,
    ) {
        reply_empty(
            reply,
            self.with(|recorder| {
                recorder.record_sync(ino.0);
                Ok(())
            }),
        );
    }

    fn fsyncdir(
        &self,
        req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        datasync: bool,
        reply: ReplyEmpty,
    ) {
        self.fsync(req, ino, fh, datasync, reply);
    }

    fn readdir(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let answer = self.with(|recorder| {
            let tree = &recorder.now;
            let entries = tree.entries(ino.0).ok_or(Errno::ENOTDIR)?;
            let mut all = vec![
                (ino.0, FileType::Directory, OsStr::new(".").to_owned()),
                (ino.0, FileType::Directory, OsStr::new("..").to_owned()),
            ];
            for (name, ino) in entries {
                let inode = tree.inode(*ino).ok_or(Errno::EIO)?;
                all.push((*ino, kind_of(&inode.kind), name.clone()));
            }
            Ok(all)
        });
        match answer {
            Ok(all) => {
                for (at, (ino, kind, name)) in all.iter().enumerate().skip(offset as usize) {
                    if reply.add(INodeNo(*ino), at as u64 + 1, *kind, name) {
                        break;
                    }
                }
                reply.ok();
            }
            Err(errno) => reply.error(errno),
        }
    }

    fn statfs(&self, _req: &Request, _ino: INodeNo, reply: ReplyStatfs) {
        let blocks = FILE_BYTES_MAX / u64::from(BLOCK_BYTES);
        reply.statfs(blocks, blocks, blocks, 1 << 20, 1 << 20, BLOCK_BYTES, 255, BLOCK_BYTES);
    }

    fn access(&self, _req: &Request, _ino: INodeNo, _mask: AccessFlags, reply: ReplyEmpty) {
        // `DefaultPermissions`: the kernel has checked.
        reply.ok();
    }

    fn getxattr(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _name: &OsStr,
        _size: u32,
        reply: ReplyXattr,
    ) {
        reply.error(Errno::EOPNOTSUPP);
    }

    fn create(
        &self,
        _req: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        _flags: i32,
        reply: ReplyCreate,
    ) {
        match self.make(parent, name, InodeKind::file(), mode & !umask) {
            Ok(attributes) => {
                let (generation, handle) = (Generation(0), FileHandle(0));
                reply.created(&LIFE, &attributes, generation, handle, FopenFlags::empty());
            }
            Err(errno) => reply.error(errno),
        }
    }

    fn mknod(
        &self,
        _req: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        _rdev: u32,
        reply: ReplyEntry,
    ) {
        const TYPE: u32 = 0o170_000;
        const REGULAR: u32 = 0o100_000;
        if mode & TYPE != REGULAR {
            return reply.error(Errno::EPERM);
        }
        reply_entry(reply, self.make(parent, name, InodeKind::file(), mode & !umask));
    }

    fn fallocate(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        reply_empty(reply, self.allocate(ino.0, offset, length, mode));
    }
}
