//! The descriptors of a backing file, and plain system calls on them.
//!
//! A file may be opened several times, for reading, for writing or both; the first descriptor
//! that permits a direction serves it until the last handle is gone. Direct backing adds a
//! description of its own with O_DIRECT, so that the caller's flags are left alone. Writes that
//! O_DIRECT can't do (edges, tails) go through the buffered descriptor; the kernel keeps the two
//! coherent. Direct backing *in place* has no description of its own, but sets the flag on the
//! caller's while a transfer needs it; see [`in_place`](crate::io::backend::in_place).

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, OnceLock};

use rustix::fs::{AtFlags, FallocateFlags, MemfdFlags, Mode, OFlags, SeekFrom, StatxFlags};
use rustix::io::Errno;

use crate::io::backend::aio::{Contexts, Request};
use crate::io::backend::allocation::{self, Blocks, Company, Overwrites};
use crate::io::backend::in_place::{Direct, Gate, Switch, in_place_alignment, set_direct};
use crate::io::backend::{Alignment, BackingFile, Seek};
use crate::io::batch;
use crate::io::request::{BackgroundRead, Direction, Transfer};
use crate::options::Backing;
use crate::stats::Transfers;

/// Segments that one system call takes.
pub(crate) const SEGMENTS_MAX: usize = 1024;
/// Don't honour O_APPEND (Linux 6.9).
const RWF_NOAPPEND: i32 = 0x20;
/// Drop what was moved from the kernel's cache (Linux 6.14).
const RWF_DONTCACHE: i32 = 0x80;

/// A backing file that is a set of descriptors, and who carries out its transfers.
pub(crate) struct DescriptorFile<C> {
    pub(crate) descriptors: Descriptors,
    pub(crate) carrier: C,
}

/// In what a back end on descriptors differs from another.
pub(crate) trait Carrier: Clone + Send + Sync + Sized {
    /// [`BackingFile::try_all`].
    fn try_all(&self, descriptors: &Descriptors, batch: &mut [Transfer<'_>]);

    /// [`BackingFile::transfer_bytes`].
    const TRANSFER_BYTES: u64;

    /// [`BackingFile::start`].
    fn start(file: Arc<DescriptorFile<Self>>, read: BackgroundRead) -> Result<(), BackgroundRead>;
}

impl<C: Carrier> DescriptorFile<C> {
    pub(crate) fn new(
        fd: BorrowedFd<'_>,
        backing: Backing,
        carrier: &C,
        transfers: &Arc<Transfers>,
    ) -> io::Result<DescriptorFile<C>> {
        let descriptors = Descriptors::new(fd, backing, transfers)?;
        Ok(DescriptorFile { descriptors, carrier: carrier.clone() })
    }
}

impl<C: Carrier> BackingFile for DescriptorFile<C> {
    fn try_all(&self, batch: &mut [Transfer<'_>]) {
        self.carrier.try_all(&self.descriptors, batch);
    }

    fn start(self: Arc<Self>, read: BackgroundRead) -> Result<(), BackgroundRead> {
        C::start(self, read)
    }

    fn attach(&self, fd: OwnedFd, read: bool, write: bool) -> io::Result<Option<OwnedFd>> {
        self.descriptors.attach(fd, read, write)
    }

    fn len(&self) -> io::Result<u64> {
        self.descriptors.len()
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.descriptors.set_len(len)
    }

    fn verify(&self) -> io::Result<()> {
        self.descriptors.verify()
    }

    fn punch(&self, offset: u64, len: u64) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        self.descriptors.fallocate(flags, offset, len)
    }

    fn zero(&self, offset: u64, len: u64) -> io::Result<()> {
        let flags = FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE;
        self.descriptors.fallocate(flags, offset, len)
    }

    fn allocate(&self, offset: u64, len: u64, keep_size: bool) -> io::Result<()> {
        let keep = FallocateFlags::KEEP_SIZE;
        let flags = if keep_size { keep } else { FallocateFlags::empty() };
        self.descriptors.fallocate(flags, offset, len)
    }

    fn seek(&self, offset: u64, to: Seek) -> io::Result<Option<u64>> {
        self.descriptors.seek(offset, to)
    }

    fn overwrites(&self) -> Overwrites {
        self.descriptors.overwrites()
    }

    fn blocks(&self, start: u64) -> io::Result<Blocks> {
        allocation::blocks(self.descriptors.any()?, start)
    }

    fn company(&self) -> Company {
        self.descriptors.write.get().map_or(Company::Others, |fd| allocation::company(fd.as_fd()))
    }

    fn give_back(&self, len: u64, leased: bool) {
        self.descriptors.give_back(len, leased);
    }

    fn sync(&self, data_only: bool) -> io::Result<()> {
        self.descriptors.sync(data_only)
    }

    fn flush(&self) -> io::Result<()> {
        self.descriptors.flush()
    }

    fn tells_of_others(&self) -> bool {
        !self.descriptors.any().is_ok_and(is_of_this_machine)
    }

    fn made(&self) -> Option<(i64, u32)> {
        made(self.descriptors.any().ok()?)
    }

    fn write_descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.descriptors.write.get().map(|fd| fd.as_fd())
    }

    fn permits(&self, writing: bool) -> bool {
        self.descriptors.permits(writing)
    }

    fn read_alignment(&self) -> Alignment {
        self.descriptors.read_alignment()
    }

    fn attach_direct(&self, fd: BorrowedFd<'_>, read: bool, write: bool) -> io::Result<()> {
        self.descriptors.attach_direct(fd, read, write)
    }

    fn direct_alignment(&self) -> Alignment {
        self.descriptors.direct_alignment()
    }

    fn descriptors(&self) -> Option<&Descriptors> {
        Some(&self.descriptors)
    }

    fn transfer_bytes(&self) -> u64 {
        C::TRANSFER_BYTES
    }

    fn begin_plain(&self) {
        if let Some(gate) = &self.descriptors.in_place {
            gate.begin_plain();
        }
    }

    fn end_plain(&self) {
        if let Some(gate) = &self.descriptors.in_place {
            gate.end_plain();
        }
    }

    fn is_direct(&self) -> bool {
        self.descriptors.is_direct()
    }
}

pub(crate) struct Descriptors {
    read: OnceLock<Arc<OwnedFd>>,
    write: OnceLock<Arc<OwnedFd>>,
    direct_read: OnceLock<OwnedFd>,
    direct_write: OnceLock<OwnedFd>,
    seek: OnceLock<OwnedFd>,
    /// The cache's own transfers are direct.
    direct: Option<Alignment>,
    /// Handles have direct transfers.
    handles_direct: OnceLock<Alignment>,
    /// Direct, on the caller's own description.
    in_place: Option<Gate>,
    transfers: Arc<Transfers>,
    overwrites: OnceLock<Overwrites>,
    /// The kernel is asked not to keep what it moves, and has not refused.
    uncached: AtomicBool,
    /// Device and inode.
    id: (u64, u64),
    /// The last batch of which a read found `direct_read` to be the file.
    checked_in: AtomicU64,
}

impl Descriptors {
    pub(crate) fn new(
        fd: BorrowedFd<'_>,
        backing: Backing,
        transfers: &Arc<Transfers>,
    ) -> io::Result<Descriptors> {
        let direct = match backing {
            Backing::Buffered | Backing::Uncached => None,
            Backing::Direct => Some(direct_alignment(fd)?),
            Backing::DirectInPlace => in_place_alignment(fd),
        };
        let stat = rustix::fs::fstat(fd)?;
        let is_in_place = backing == Backing::DirectInPlace && direct.is_some();
        Ok(Descriptors {
            in_place: is_in_place.then(Gate::default),
            transfers: Arc::clone(transfers),
            uncached: AtomicBool::new(backing == Backing::Uncached),
            id: (stat.st_dev, stat.st_ino),
            checked_in: AtomicU64::new(0),
            read: OnceLock::new(),
            write: OnceLock::new(),
            direct_read: OnceLock::new(),
            direct_write: OnceLock::new(),
            seek: OnceLock::new(),
            overwrites: OnceLock::new(),
            direct,
            handles_direct: OnceLock::new(),
        })
    }

    /// Offers another descriptor of the file. Gives it back unless it is kept for a direction that
    /// had none.
    pub(crate) fn attach(
        &self,
        fd: OwnedFd,
        read: bool,
        write: bool,
    ) -> io::Result<Option<OwnedFd>> {
        if self.direct.is_some() && self.in_place.is_none() {
            self.open_direct(fd.as_fd(), read, write)?;
        }
        let wants_read = read && self.read.get().is_none();
        if write && self.write.get().is_none() {
            let flags = rustix::fs::fcntl_getfl(&fd)?;
            let appends = flags.contains(OFlags::APPEND);
            if appends && !can_ignore_append() {
                let _ = self.write.set(Arc::new(reopen(fd.as_fd(), OFlags::WRONLY)?));
                // For reads the caller's own serves.
                if !wants_read {
                    return Ok(Some(fd));
                }
                return Ok(self.read.set(Arc::new(fd)).err().and_then(Arc::into_inner));
            }
            let fd = Arc::new(fd);
            if wants_read {
                // The same number: a duplicate would take one that the program expects.
                let _ = self.read.set(Arc::clone(&fd));
            }
            return Ok(self.write.set(fd).err().and_then(Arc::into_inner));
        }
        if wants_read {
            return Ok(self.read.set(Arc::new(fd)).err().and_then(Arc::into_inner));
        }
        Ok(Some(fd))
    }

    /// As many directions as the caller's descriptor permits, each in a description of ours.
    fn open_direct(&self, fd: BorrowedFd<'_>, read: bool, write: bool) -> io::Result<()> {
        if read && self.direct_read.get().is_none() {
            let _ = self.direct_read.set(reopen_direct(fd, OFlags::RDONLY)?);
        }
        if write && self.direct_write.get().is_none() {
            let _ = self.direct_write.set(reopen_direct(fd, OFlags::WRONLY)?);
        }
        Ok(())
    }

    /// Makes ready for direct transfers. Not called by several threads at once, as `attach` is not
    /// (`CachedFile::open`).
    fn attach_direct(&self, fd: BorrowedFd<'_>, read: bool, write: bool) -> io::Result<()> {
        if self.handles_direct.get().is_none() {
            let alignment = match self.direct {
                Some(alignment) => alignment,
                None => direct_alignment(fd)?,
            };
            let _ = self.handles_direct.set(alignment);
        }
        self.open_direct(fd, read, write)
    }

    fn direct_alignment(&self) -> Alignment {
        self.handles_direct.get().copied().unwrap_or(Alignment::NONE)
    }

    /// [`BackingFile::is_direct`].
    pub(crate) fn is_direct(&self) -> bool {
        self.direct.is_some() && !self.in_place.as_ref().is_some_and(Gate::is_refused)
    }

    fn any(&self) -> io::Result<BorrowedFd<'_>> {
        let fd = self.read.get().or(self.write.get());
        fd.map(|fd| fd.as_fd()).ok_or_else(|| io::Error::from_raw_os_error(libc::EBADF))
    }

    pub(crate) fn permits(&self, writing: bool) -> bool {
        if writing { self.write.get().is_some() } else { self.read.get().is_some() }
    }

    pub(crate) fn read_alignment(&self) -> Alignment {
        self.direct.unwrap_or(Alignment::NONE)
    }

    pub(crate) fn len(&self) -> io::Result<u64> {
        Ok(rustix::fs::fstat(self.any()?)?.st_size as u64)
    }

    pub(crate) fn set_len(&self, len: u64) -> io::Result<()> {
        let fd = self.write.get().ok_or_else(|| io::Error::from_raw_os_error(libc::EINVAL))?;
        Ok(rustix::fs::ftruncate(fd, len)?)
    }

    fn overwrites(&self) -> Overwrites {
        let Some(write) = self.write.get() else { return Overwrites::Elsewhere };
        let read = self.read.get().map(|fd| fd.as_fd());
        *self.overwrites.get_or_init(|| allocation::overwrites(read, write.as_fd()))
    }

    /// [`BackingFile::give_back`]. There is no call that cuts what lies beyond the end, and nothing else:
    /// to cut the file to the length it has is one, if nobody can append between the look at the length
    /// and that. (To punch a hole beyond the end does nothing on ext4, and takes an append's bytes
    /// elsewhere.)
    fn give_back(&self, len: u64, leased: bool) {
        let Some(fd) = self.write.get() else { return };
        let cut = || {
            if self.len().is_ok_and(|now| now == len) {
                // Where it fails, the file has blocks beyond its end, as after `fallocate`.
                let _ = self.set_len(len);
            }
        };
        if leased {
            cut();
        } else {
            allocation::alone(fd.as_fd(), cut);
        }
    }

    fn fallocate(&self, flags: FallocateFlags, offset: u64, len: u64) -> io::Result<()> {
        let fd = self.write.get().ok_or_else(|| io::Error::from_raw_os_error(libc::EBADF))?;
        let allocated = rustix::io::retry_on_intr(|| rustix::fs::fallocate(fd, flags, offset, len));
        Ok(allocated?)
    }

    fn seek(&self, offset: u64, to: Seek) -> io::Result<Option<u64>> {
        let from = match to {
            Seek::Data => SeekFrom::Data(offset),
            Seek::Hole => SeekFrom::Hole(offset),
        };
        match rustix::fs::seek(self.for_seeks()?, from) {
            Ok(found) => Ok(Some(found)),
            Err(Errno::NXIO) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// A description that nobody else has, as a seek moves the file offset: the offset of the
    /// caller's is the caller's. Opened by the first seek, and kept.
    fn for_seeks(&self) -> io::Result<BorrowedFd<'_>> {
        let ours = self.direct_read.get().or(self.direct_write.get()).or(self.seek.get());
        if let Some(fd) = ours {
            return Ok(fd.as_fd());
        }
        let any = self.any()?;
        // SAFETY: no memory involved.
        if unsafe { libc::fcntl(any.as_raw_fd(), libc::F_GETLEASE) } != libc::F_UNLCK {
            let what = "the file can't be opened again to look for data and holes: it has a lease";
            return Err(io::Error::new(io::ErrorKind::Unsupported, what));
        }
        // NONBLOCK: where somebody else has a lease on the file that is an error, not a wait.
        let opened = reopen(any, OFlags::RDONLY | OFlags::NONBLOCK)
            .or_else(|_| reopen(any, OFlags::WRONLY | OFlags::NONBLOCK));
        match opened {
            // Another thread may have been faster; its descriptor does.
            Ok(fd) => Ok(self.seek.get_or_init(|| fd).as_fd()),
            Err(error) => Err(io::Error::new(
                io::ErrorKind::Unsupported,
                format!("the file can't be opened again to look for data and holes: {error}"),
            )),
        }
    }

    /// By the description that has been there for as long as the file has been written: the kernel tells
    /// each of the errors since it was opened, and one that was opened later may miss some.
    pub(crate) fn sync(&self, data_only: bool) -> io::Result<()> {
        let bad = || io::Error::from_raw_os_error(libc::EBADF);
        let fd = self.write.get().or(self.read.get()).ok_or_else(bad)?;
        self.check(fd)?;
        let sync = || if data_only { rustix::fs::fdatasync(fd) } else { rustix::fs::fsync(fd) };
        Ok(rustix::io::retry_on_intr(sync)?)
    }

    /// Whether what writes go to is still the file.
    pub(crate) fn verify(&self) -> io::Result<()> {
        let bad = || io::Error::from_raw_os_error(libc::EBADF);
        let buffered = self.write.get().ok_or_else(bad)?.as_fd();
        self.check(buffered)?;
        self.direct_write.get().map_or(Ok(()), |fd| self.check(fd))
    }

    /// EBADF unless `fd` is the file.
    fn check(&self, fd: impl AsFd) -> io::Result<()> {
        let stat = rustix::fs::fstat(fd)?;
        if (stat.st_dev, stat.st_ino) != self.id {
            return Err(io::Error::from_raw_os_error(libc::EBADF));
        }
        Ok(())
    }

    /// Closes a duplicate, for what the file system says about it.
    pub(crate) fn flush(&self) -> io::Result<()> {
        use std::os::fd::IntoRawFd;
        let Some(fd) = self.write.get() else { return Ok(()) };
        let duplicate = rustix::io::fcntl_dupfd_cloexec(fd, 0)?.into_raw_fd();
        // SAFETY: the descriptor is ours, and not used again.
        Ok(unsafe { rustix::io::try_close(duplicate) }?)
    }

    /// The descriptor and flags with which `transfer` goes to the kernel.
    pub(crate) fn route(&self, transfer: &Transfer<'_>) -> io::Result<(RawFd, i32)> {
        let own = match transfer.direction {
            Direction::Read => &self.direct_read,
            Direction::Write => &self.direct_write,
        };
        let alignment = match transfer.direct {
            true => self.handles_direct.get().copied(),
            false => self.direct.filter(|_| self.in_place.is_none()),
        };
        // The last block that a file can have is one byte short (see `Transfer::new`).
        let is_last = transfer.offset + transfer.segments.left() == i64::MAX as u64;
        let is_direct = alignment.is_some_and(|alignment| {
            let is_whole = transfer.direction == Direction::Read && !is_last;
            is_whole || is_aligned(transfer, alignment)
        });
        if !is_direct {
            self.transfers.count(transfer.direction, false);
            return self.plain_route(transfer);
        }
        let fd = own.get().ok_or_else(|| io::Error::from_raw_os_error(libc::EBADF))?;
        if transfer.direction == Direction::Read && !transfer.direct {
            // As for `verify`; once for reads that go out together. Relaxed: a thread finds its own
            // batch's number only if it has left it there itself, after a look.
            let batch = batch::number();
            if batch.is_none_or(|batch| self.checked_in.load(Relaxed) != batch) {
                self.check(fd)?;
                self.checked_in.store(batch.unwrap_or(0), Relaxed);
            }
        }
        self.transfers.count(transfer.direction, true);
        Ok((fd.as_raw_fd(), durable_flag(transfer)))
    }

    /// The same, by the caller's descriptors.
    fn plain_route(&self, transfer: &Transfer<'_>) -> io::Result<(RawFd, i32)> {
        let (fd, flags) = match transfer.direction {
            Direction::Read => (&self.read, 0),
            // O_APPEND may be set at any time, by whoever shares the description.
            Direction::Write if can_ignore_append() => (&self.write, RWF_NOAPPEND),
            Direction::Write => (&self.write, 0),
        };
        let fd = fd.get().ok_or_else(|| io::Error::from_raw_os_error(libc::EBADF))?;
        Ok((fd.as_raw_fd(), flags | durable_flag(transfer)))
    }

    /// One attempt at each transfer, one after the other.
    pub(crate) fn try_each(&self, batch: &mut [Transfer<'_>]) {
        for transfer in batch {
            transfer.set(self.try_one(transfer));
        }
    }

    /// One attempt at each transfer, all at once; false: they are not all direct ones in place, or it
    /// can't be done, and nothing was.
    pub(crate) fn try_at_once(&self, contexts: &Contexts, batch: &mut [Transfer<'_>]) -> bool {
        let (Some(gate), Some(alignment)) = (&self.in_place, self.direct) else { return false };
        if !batch.iter().all(|transfer| is_aligned(transfer, alignment)) {
            return false;
        }
        let Some(_inside) = gate.try_direct(self) else { return false };
        let mut requests = Vec::with_capacity(batch.len());
        for transfer in &*batch {
            let Ok((fd, flags)) = self.plain_route(transfer) else { return false };
            requests.push(Request::new(transfer, fd, flags));
        }
        let Some(outcomes) = contexts.try_all(&requests) else { return false };
        for (transfer, outcome) in batch.iter_mut().zip(outcomes) {
            self.transfers.count(transfer.direction, true);
            transfer.set(outcome.map_err(|error| match error.raw_os_error() {
                // To be tried again, alone, which sees to these.
                Some(libc::EINVAL | libc::EFAULT) => io::Error::from_raw_os_error(libc::EAGAIN),
                _ => error,
            }));
        }
        true
    }

    /// The descriptor and flags with which `read` goes to the kernel as a direct one, and what is to be
    /// kept until the kernel has taken it; `None` if it can't be one. The kernel looks at the flags of
    /// the description as it takes a request, and not again.
    pub(crate) fn direct_route(
        &self,
        read: &Transfer<'_>,
    ) -> Option<(RawFd, i32, Option<Direct<'_, Descriptors>>)> {
        if !is_aligned(read, self.direct?) {
            return None;
        }
        let Some(gate) = &self.in_place else {
            let (fd, flags) = self.route(read).ok()?;
            return Some((fd, flags, None));
        };
        let inside = gate.try_direct(self)?;
        let (fd, flags) = self.plain_route(read).ok()?;
        self.transfers.count(read.direction, true);
        Some((fd, flags, Some(inside)))
    }

    /// One attempt by one system call.
    pub(crate) fn try_one(&self, transfer: &Transfer<'_>) -> io::Result<usize> {
        let (Some(gate), Some(alignment), false) = (&self.in_place, self.direct, transfer.direct)
        else {
            let (fd, flags) = self.route(transfer)?;
            return self.call(transfer, fd, flags);
        };
        let (fd, flags) = self.plain_route(transfer)?;
        if is_aligned(transfer, alignment) && !gate.is_refused() {
            // Without, it goes as the flag happens to be: either will do.
            let inside = gate.try_direct(self);
            match self.call(transfer, fd, flags) {
                // Some file systems take the flag, and then refuse.
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => gate.refuse(),
                // Of memory that is bad in part, the kernel's cache takes the good part.
                Err(error) if error.raw_os_error() == Some(libc::EFAULT) => {}
                moved => {
                    self.transfers.count(transfer.direction, inside.is_some());
                    return moved;
                }
            }
        }
        let _plain = gate.plain();
        self.transfers.count(transfer.direction, false);
        self.call(transfer, fd, flags)
    }

    fn call(&self, transfer: &Transfer<'_>, fd: RawFd, flags: i32) -> io::Result<usize> {
        let front = transfer.segments.front(SEGMENTS_MAX);
        let segments = front.as_slice();
        let (iovecs, count) = (segments.as_ptr().cast::<libc::iovec>(), segments.len());
        let (low, high) = (transfer.offset, 0u64);
        let number = match transfer.direction {
            Direction::Read => libc::SYS_preadv2,
            Direction::Write => libc::SYS_pwritev2,
        };
        let call = |flags: i32| {
            // The raw system call: a library that takes the place of libc's functions sees nothing.
            // SAFETY: the segments describe memory that is valid for the transfer; where it may
            // fault, the kernel says EFAULT.
            let moved = unsafe { libc::syscall(number, fd, iovecs, count, low, high, flags) };
            if moved < 0 { Err(io::Error::last_os_error()) } else { Ok(moved as usize) }
        };
        // The kernel, the file system or a sandbox does not know a flag.
        let is_refused = |moved: &io::Result<usize>| {
            moved.as_ref().is_err_and(|error| error.raw_os_error() == Some(libc::EOPNOTSUPP))
        };
        if self.uncached.load(Relaxed) {
            let moved = call(flags | RWF_DONTCACHE);
            if !is_refused(&moved) {
                return moved;
            }
            self.uncached.store(false, Relaxed);
        }
        let moved = call(flags);
        if transfer.durable && is_refused(&moved) {
            let moved = call(flags & !libc::RWF_DSYNC)?;
            // SAFETY: open for as long as the descriptors, which the caller has.
            let fd = unsafe { BorrowedFd::borrow_raw(fd) };
            rustix::io::retry_on_intr(|| rustix::fs::fdatasync(fd))?;
            return Ok(moved);
        }
        moved
    }
}

impl Switch for Descriptors {
    fn set_direct(&self, on: bool) -> io::Result<()> {
        let (read, write) = (self.read.get(), self.write.get());
        // One and the same where it was given for both.
        let read = read.filter(|read| !write.is_some_and(|write| Arc::ptr_eq(read, write)));
        for fd in [write, read].into_iter().flatten() {
            self.check(fd)?;
            set_direct(fd.as_fd(), on)?;
        }
        Ok(())
    }
}

fn durable_flag(transfer: &Transfer<'_>) -> i32 {
    if transfer.durable { libc::RWF_DSYNC } else { 0 }
}

fn is_aligned(transfer: &Transfer<'_>, alignment: Alignment) -> bool {
    let found = transfer.segments.misalignment();
    (transfer.offset as u32 | found.len) & (alignment.offset_bytes - 1) == 0
        && found.base & (alignment.memory_bytes - 1) == 0
}

/// Whether a file system is known whose writes are told of no errors but their own.
fn is_of_this_machine(fd: BorrowedFd<'_>) -> bool {
    const BCACHEFS: u32 = 0xca45_1a4e;
    const F2FS: u32 = 0xf2f5_2010;
    const ZFS: u32 = 0x2fc1_2fc1;
    let known = [
        libc::EXT4_SUPER_MAGIC as u32,
        libc::XFS_SUPER_MAGIC as u32,
        libc::BTRFS_SUPER_MAGIC as u32,
        libc::TMPFS_MAGIC as u32,
        libc::OVERLAYFS_SUPER_MAGIC as u32,
        BCACHEFS,
        F2FS,
        ZFS,
    ];
    rustix::fs::fstatfs(fd).is_ok_and(|stat| known.contains(&(stat.f_type as u32)))
}

/// [`BackingFile::made`], of an open file.
pub(crate) fn made(fd: BorrowedFd<'_>) -> Option<(i64, u32)> {
    let stat = rustix::fs::statx(fd, "", AtFlags::EMPTY_PATH, StatxFlags::BTIME).ok()?;
    let is_told = stat.stx_mask & StatxFlags::BTIME.bits() != 0;
    is_told.then_some((stat.stx_btime.tv_sec, stat.stx_btime.tv_nsec))
}

/// Another description of the same file, with flags of its own.
fn reopen(fd: BorrowedFd<'_>, flags: OFlags) -> io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let opened = rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty())?;
    if opened.as_raw_fd() > fd.as_raw_fd() {
        return Ok(opened);
    }
    // The lower numbers may be somebody's who expects to get them in order.
    Ok(rustix::io::fcntl_dupfd_cloexec(&opened, fd.as_raw_fd() + 1)?)
}

fn reopen_direct(fd: BorrowedFd<'_>, flags: OFlags) -> io::Result<OwnedFd> {
    reopen(fd, flags | OFlags::DIRECT).map_err(|error| match error.raw_os_error() {
        Some(libc::EINVAL) => no_direct("it refuses O_DIRECT"),
        _ => error,
    })
}

fn no_direct(why: &str) -> io::Error {
    let what = format!("no direct I/O on this file or file system: {why}");
    io::Error::new(io::ErrorKind::InvalidInput, what)
}

/// Whether pwritev2 takes RWF_NOAPPEND: tried once, on a file in memory.
fn can_ignore_append() -> bool {
    static CAN: OnceLock<bool> = OnceLock::new();
    *CAN.get_or_init(|| {
        let Ok(file) = rustix::fs::memfd_create("millpond", MemfdFlags::CLOEXEC) else {
            return false;
        };
        let mut byte = 0u8;
        let iovec = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
        // SAFETY: the vector describes `byte`, which is only read. (An empty vector would do
        // without looking at the flags.)
        let outcome = unsafe {
            libc::syscall(
                libc::SYS_pwritev2,
                file.as_raw_fd(),
                &raw const iovec,
                1,
                0u64,
                0u64,
                RWF_NOAPPEND,
            )
        };
        outcome == 1
    })
}

pub(super) fn direct_alignment(fd: BorrowedFd<'_>) -> io::Result<Alignment> {
    let stat = rustix::fs::statx(fd, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN)?;
    if stat.stx_mask & StatxFlags::DIOALIGN.bits() == 0 {
        // Before Linux 6.1, or a file system that does not tell: a page serves everywhere.
        return Ok(Alignment { memory_bytes: 4096, offset_bytes: 4096 });
    }
    let wanted = stat.stx_dio_offset_align.max(stat.stx_dio_mem_align);
    if stat.stx_dio_offset_align == 0 || wanted > 4096 {
        let (offset, memory) = (stat.stx_dio_offset_align, stat.stx_dio_mem_align);
        let what = format!("its alignment is {offset}, of memory {memory}, and must be 1 to 4096");
        return Err(no_direct(&what));
    }
    Ok(Alignment {
        memory_bytes: stat.stx_dio_mem_align.max(1),
        offset_bytes: stat.stx_dio_offset_align,
    })
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Goal: syncs go by the description that the file is written by.
    /// Incident: once there was another for reading, which was opened later, they went by that, and were
    /// not told of an error from before that somebody else had been told of.
    /// Method: a descriptor that can't be synced takes the place of the one for reading.
    #[test]
    fn syncs_go_by_the_description_for_writing() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let write = OwnedFd::from(file.reopen().unwrap());
        let descriptors =
            Descriptors::new(write.as_fd(), Backing::Buffered, &Arc::default()).unwrap();
        let path = rustix::fs::open(file.path(), OFlags::PATH, Mode::empty()).unwrap();
        assert!(descriptors.attach(path, true, false).unwrap().is_none());
        descriptors.sync(true).unwrap_err();
        assert!(descriptors.attach(write, false, true).unwrap().is_none());
        descriptors.sync(true).unwrap();
        descriptors.sync(false).unwrap();
    }

    /// Goal: a sync is not that of another file which has taken the descriptor's number.
    #[test]
    fn a_descriptor_of_another_file_is_not_synced() {
        use std::os::fd::{FromRawFd, IntoRawFd};
        let (file, other) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        let number = OwnedFd::from(file).into_raw_fd();
        // SAFETY: ours, by the line above.
        let write = unsafe { OwnedFd::from_raw_fd(number) };
        let descriptors =
            Descriptors::new(write.as_fd(), Backing::Buffered, &Arc::default()).unwrap();
        assert!(descriptors.attach(write, false, true).unwrap().is_none());
        descriptors.sync(true).unwrap();
        // SAFETY: no memory involved; the number stays open.
        assert!(unsafe { libc::dup2(other.as_raw_fd(), number) } >= 0);
        let error = descriptors.sync(true).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EBADF));
    }
}
