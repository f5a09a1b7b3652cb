//! A FUSE file system of one file, whose answers can be made to fail.
//!
//! The file has two names: `f` meets the faults, and `raw` shows the bytes that the server has. The kernel
//! caches nothing of either (`FOPEN_DIRECT_IO`).

use std::ffi::OsStr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, SystemTime};

use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags,
    Generation, INodeNo, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty,
    ReplyEntry, ReplyOpen, ReplyWrite, Request, TimeOrNow, WriteFlags,
};

use super::common::{Random, skip, temp_dir};

const FILE: u64 = 2;
const RAW: u64 = 3;
/// The kernel asks for attributes each time.
const LIFE: Duration = Duration::ZERO;

/// How often an answer fails, of a thousand.
#[derive(Clone, Copy, Default, Debug)]
pub struct Faults {
    pub read_error: (u64, i32),
    pub read_short: u64,
    pub write_error: (u64, i32),
    /// A part of the bytes is stored, and the answer is an error.
    pub write_part: u64,
    pub write_short: u64,
    pub sync_error: (u64, i32),
    pub late: u64,
}

/// The server's file, and the faults that it meets.
pub struct State {
    pub data: Vec<u8>,
    pub faults: Faults,
    /// The length that the file claims, if not that of its bytes.
    pub claimed_len: Option<u64>,
    random: Random,
}

impl State {
    fn hits(&mut self, per_mille: u64) -> bool {
        self.random.chance(per_mille)
    }

    /// The answer's errno; zero for success.
    fn error(&mut self, (per_mille, errno): (u64, i32)) -> i32 {
        if self.hits(per_mille) { errno } else { 0 }
    }

    fn pause(&mut self) {
        if self.hits(self.faults.late) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

pub struct Server {
    state: Arc<Mutex<State>>,
    dir: tempfile::TempDir,
    session: Option<BackgroundSession>,
}

impl Server {
    /// `None`, with a skip, where FUSE is missing.
    #[track_caller]
    pub fn new(seed: u64, data: Vec<u8>) -> Option<Server> {
        let dir = temp_dir();
        let faults = Faults::default();
        let state = State { data, faults, claimed_len: None, random: Random(seed) };
        let state = Arc::new(Mutex::new(state));
        let mut config = Config::default();
        config.mount_options = vec![MountOption::FSName("failing".into())];
        match fuser::spawn_mount(Files(Arc::clone(&state)), dir.path(), &config) {
            Ok(session) => Some(Server { state, dir, session: Some(session) }),
            Err(error) => {
                skip(format_args!("FUSE: {error}"));
                None
            }
        }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic under the lock")
    }

    pub fn set(&self, faults: Faults) {
        self.state().faults = faults;
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Before the directory below is removed.
        drop(self.session.take());
        // A child that another test starts has our descriptors for a moment, and keeps it mounted.
        let _ = std::process::Command::new("umount").arg("--lazy").arg(self.dir.path()).output();
    }
}

struct Files(Arc<Mutex<State>>);

impl Files {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("no panic under the lock")
    }

    fn attributes(&self, ino: u64) -> FileAttr {
        let state = self.state();
        let claimed = state.claimed_len.filter(|_| ino == FILE);
        let len = claimed.unwrap_or(state.data.len() as u64);
        let (kind, size) = match ino {
            FILE | RAW => (FileType::RegularFile, len),
            _ => (FileType::Directory, 0),
        };
        let time = SystemTime::UNIX_EPOCH;
        FileAttr {
            ino: INodeNo(ino),
            size,
            blocks: size.div_ceil(512),
            atime: time,
            mtime: time,
            ctime: time,
            crtime: time,
            kind,
            perm: 0o755,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }
}

fn done(reply: ReplyEmpty, errno: i32) {
    match errno {
        0 => reply.ok(),
        errno => reply.error(Errno::from_i32(errno)),
    }
}

impl Filesystem for Files {
    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match name.to_str() {
            Some("f") => reply.entry(&LIFE, &self.attributes(FILE), Generation(0)),
            Some("raw") => reply.entry(&LIFE, &self.attributes(RAW), Generation(0)),
            _ => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&LIFE, &self.attributes(ino.0));
    }

    fn setattr(
        &self,
        _: &Request,
        ino: INodeNo,
        _: Option<u32>,
        _: Option<u32>,
        _: Option<u32>,
        size: Option<u64>,
        _: Option<TimeOrNow>,
        _: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<fuser::BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        if let Some(size) = size {
            self.state().data.resize(size as usize, 0);
        }
        reply.attr(&LIFE, &self.attributes(ino.0));
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(0), FopenFlags::FOPEN_DIRECT_IO);
    }

    fn read(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let mut state = self.state();
        let mut len = size as usize;
        if ino.0 == FILE {
            state.pause();
            let faults = state.faults;
            let errno = state.error(faults.read_error);
            if errno != 0 {
                return reply.error(Errno::from_i32(errno));
            }
            if len > 1 && state.hits(faults.read_short) {
                len = 1 + state.random.below(len as u64 - 1) as usize;
            }
        }
        let start = state.data.len().min(offset as usize);
        let end = state.data.len().min(start + len);
        reply.data(&state.data[start..end]);
    }

    fn write(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let mut state = self.state();
        let (mut len, mut errno) = (data.len(), 0);
        if ino.0 == FILE {
            state.pause();
            let faults = state.faults;
            errno = state.error(faults.write_error);
            if errno != 0 {
                return reply.error(Errno::from_i32(errno));
            }
            if state.hits(faults.write_part) {
                errno = libc::EIO;
                len = state.random.below(len as u64 + 1) as usize;
            } else if len > 1 && state.hits(faults.write_short) {
                len = 1 + state.random.below(len as u64 - 1) as usize;
            }
        }
        let (start, end) = (offset as usize, offset as usize + len);
        if state.data.len() < end && len > 0 {
            state.data.resize(end, 0);
        }
        if len > 0 {
            state.data[start..end].copy_from_slice(&data[..len]);
        }
        match errno {
            0 => reply.written(len as u32),
            errno => reply.error(Errno::from_i32(errno)),
        }
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        let mut state = self.state();
        let faults = state.faults;
        done(reply, state.error(faults.sync_error));
    }
}
