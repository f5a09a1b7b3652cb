//! A file in memory whose operations can be delayed or blocked, and made to fail.

use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;

use crate::io::backend::{BackingFile, OpenedFor, Seek};
use crate::io::batch;
use crate::io::transfer::{BackgroundRead, Direction, Transfer};
use crate::sim::memory_backend::{clear, move_bytes};

/// The operations that can be blocked and made to fail.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Read,
    Write,
    /// Changes of the length and of extents.
    Change,
}

/// The state of operations of one kind.
#[derive(Default)]
struct Line {
    held: Mutex<Held>,
    released: Condvar,
    now: AtomicUsize,
    most: AtomicUsize,
    /// The error with which they end, if not 0.
    errno: AtomicI32,
}

#[derive(Default)]
struct Held {
    on: bool,
    /// The number of operations that pass although they are blocked.
    passes: usize,
}

pub(crate) struct Slow {
    bytes: Mutex<Vec<u8>>,
    delay: Duration,
    lines: [Line; 3],
    /// Refuses background reads.
    refuses: AtomicBool,
    /// Space can be reserved within the file, so that writes may be cached.
    reserves: AtomicBool,
    /// Unreadable bytes.
    bad: Mutex<Range<u64>>,
}

impl Slow {
    pub(crate) fn new(bytes: Vec<u8>, delay: Duration) -> Arc<Slow> {
        Arc::new(Slow {
            bytes: Mutex::new(bytes),
            delay,
            lines: Default::default(),
            refuses: AtomicBool::new(false),
            reserves: AtomicBool::new(false),
            bad: Mutex::new(0..0),
        })
    }

    /// Makes reads of these bytes fail with EIO, and reads that reach them end before.
    pub(crate) fn set_bad(&self, bad: Range<u64>) {
        *self.bad.lock().unwrap() = bad;
    }

    /// The number of bytes of a transfer that can be moved.
    fn good(&self, transfer: &Transfer<'_>) -> io::Result<usize> {
        let (bad, start) = (self.bad.lock().unwrap().clone(), transfer.offset);
        let meets = bad.start < start + transfer.segments.left() && start < bad.end;
        match transfer.direction {
            Direction::Read if meets && bad.start <= start => {
                Err(io::Error::from_raw_os_error(libc::EIO))
            }
            Direction::Read if meets => Ok((bad.start - start) as usize),
            _ => Ok(usize::MAX),
        }
    }

    pub(crate) fn contents(&self) -> Vec<u8> {
        self.bytes.lock().unwrap().clone()
    }

    fn line(&self, kind: Kind) -> &Line {
        &self.lines[kind as usize]
    }

    /// Blocks operations that begin from now on, or unblocks them.
    pub(crate) fn hold(&self, kind: Kind, on: bool) {
        *self.line(kind).held.lock().unwrap() = Held { on, passes: 0 };
        self.line(kind).released.notify_all();
    }

    /// Unblocks one blocked operation, or the next one to be blocked.
    pub(crate) fn release_one(&self, kind: Kind) {
        self.line(kind).held.lock().unwrap().passes += 1;
        self.line(kind).released.notify_all();
    }

    /// Makes operations that end from now on fail. 0: no more.
    pub(crate) fn fail(&self, kind: Kind, errno: i32) {
        self.line(kind).errno.store(errno, SeqCst);
    }

    /// Refuses background reads from now on.
    pub(crate) fn refuse(&self) {
        self.refuses.store(true, SeqCst);
    }

    /// Supports reserving space within the file from now on.
    pub(crate) fn reserve(&self) {
        self.reserves.store(true, SeqCst);
    }

    /// The number of operations in progress.
    pub(crate) fn now(&self, kind: Kind) -> usize {
        self.line(kind).now.load(SeqCst)
    }

    /// Waits until `count` operations are in progress.
    pub(crate) fn wait_for(&self, kind: Kind, count: usize) {
        while self.now(kind) != count {
            thread::sleep(Duration::from_micros(100));
        }
    }

    /// The maximum number of concurrent operations since the last call.
    pub(crate) fn take_max(&self, kind: Kind) -> usize {
        self.line(kind).most.swap(0, SeqCst)
    }

    fn begin(&self, kind: Kind, count: usize) {
        let line = self.line(kind);
        line.most.fetch_max(line.now.fetch_add(count, SeqCst) + count, SeqCst);
    }

    fn end(&self, kind: Kind, count: usize) {
        self.line(kind).now.fetch_sub(count, SeqCst);
    }

    /// Waits while the kind is blocked. Returns whether it fails.
    fn pass(&self, kind: Kind) -> io::Result<()> {
        let line = self.line(kind);
        let is_held = |held: &mut Held| held.on && held.passes == 0;
        let mut held = line.released.wait_while(line.held.lock().unwrap(), is_held).unwrap();
        held.passes = held.passes.saturating_sub(1);
        drop(held);
        match line.errno.load(SeqCst) {
            0 => Ok(()),
            errno => Err(io::Error::from_raw_os_error(errno)),
        }
    }

    fn carry_out(&self, transfer: &mut Transfer<'_>) {
        let outcome = self.pass(kind_of(transfer));
        let outcome = outcome.and_then(|()| self.good(transfer));
        let mut bytes = self.bytes.lock().unwrap();
        transfer.set(outcome.and_then(|limit| move_bytes(&mut bytes, transfer, limit)));
    }

    fn change(&self, change: impl FnOnce(&mut Vec<u8>)) -> io::Result<()> {
        self.begin(Kind::Change, 1);
        let outcome = self.pass(Kind::Change);
        if outcome.is_ok() {
            change(&mut self.bytes.lock().unwrap());
        }
        self.end(Kind::Change, 1);
        outcome
    }
}

fn kind_of(transfer: &Transfer<'_>) -> Kind {
    match transfer.direction {
        Direction::Read => Kind::Read,
        Direction::Write => Kind::Write,
    }
}

impl BackingFile for Slow {
    fn try_all(&self, batch: &mut [Transfer<'_>]) {
        let kind = batch.first().map_or(Kind::Read, kind_of);
        self.begin(kind, batch.len());
        thread::sleep(self.delay);
        batch.iter_mut().for_each(|transfer| self.carry_out(transfer));
        self.end(kind, batch.len());
    }

    fn start(self: Arc<Self>, read: BackgroundRead) -> Result<(), BackgroundRead> {
        if self.refuses.load(SeqCst) {
            return Err(read);
        }
        self.begin(Kind::Read, 1);
        thread::spawn(move || {
            thread::sleep(self.delay);
            let mut transfer = Transfer::new(Direction::Read, read.offset, &*read.segments);
            self.carry_out(&mut transfer);
            self.end(Kind::Read, 1);
            let outcome = transfer.error.map_or(Ok(transfer.moved as usize), Err);
            // inode.CF1.
            drop(self);
            let _batch = batch::open();
            read.done.end(outcome);
        });
        Ok(())
    }

    fn attach(&self, fd: OwnedFd, _: OpenedFor) -> io::Result<Option<OwnedFd>> {
        Ok(Some(fd))
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.bytes.lock().unwrap().len() as u64)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.change(|bytes| bytes.resize(len as usize, 0))
    }

    fn zero(&self, offset: u64, len: u64, keep_space: bool) -> io::Result<()> {
        if keep_space {
            return Err(io::ErrorKind::Unsupported.into());
        }
        self.change(|bytes| clear(bytes, offset, len))
    }

    fn allocate(&self, _offset: u64, _len: u64, keep_size: bool) -> io::Result<()> {
        if keep_size && self.reserves.load(SeqCst) {
            return Ok(());
        }
        Err(io::ErrorKind::Unsupported.into())
    }

    fn seek(&self, _offset: u64, _to: Seek) -> io::Result<Option<u64>> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn sync(&self, _data_only: bool) -> io::Result<()> {
        Ok(())
    }
}
