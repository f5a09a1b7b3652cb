//! The descriptors of a backing file, and which of them serves which transfer.
//!
//! A file may be opened several times, for reading, for writing or both; the first descriptor that
//! permits a direction serves it until the last handle is closed. Direct backing adds a separate
//! description with O_DIRECT, so that the caller's flags do not change. Writes that O_DIRECT cannot
//! perform (edges, tails) go through the buffered descriptor; the kernel keeps the two coherent.
//! It does so under the inode's lock, which an asynchronous direct write releases before it ends: a
//! buffered write to a neighbour page may then dirty the folio that the kernel must drop. The folio
//! stays, its other pages are stale, and each description's next sync fails with EIO. So direct
//! writes of a file that also has a buffered writer are plain system calls.
//! Direct backing *in place* has no separate description, but sets the flag on the caller's
//! description while a transfer needs it; see [`in_place`](crate::io::backend::in_place).

mod calls;

mod durable_length;

mod kernel_copy;

mod reopen;

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, OnceLock};

use crossbeam_utils::CachePadded;
use rustix::fs::{AtFlags, FallocateFlags, MemfdFlags, OFlags, SeekFrom, StatxFlags};
use rustix::io::Errno;

use crate::file_id::FileId;
use crate::io::backend::alignment::{Alignment, direct_alignment, no_direct};
use crate::io::backend::allocation::{self, Overwrites, Seek};
use crate::io::backend::descriptors::durable_length::DurableLength;
pub(crate) use crate::io::backend::descriptors::kernel_copy::KernelCopy;
use crate::io::backend::descriptors::reopen::reopen;
use crate::io::backend::in_place::{Gate, Switch, in_place_alignment, set_direct};
use crate::io::backend::untorn_blocks::UntornBlocks;
use crate::io::batch;
use crate::io::transfer::{TransferCounts, retry_interrupted};
use crate::thread::spawn;

/// Ignore O_APPEND (Linux 6.9).
const RWF_NOAPPEND: i32 = 0x20;

/// How the engine reaches the file below its cache.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Backing {
    /// Through the kernel's page cache, which is then a second level (the default).
    #[default]
    Buffered,
    /// The kernel's page cache is the cache: reads copy from a mapping of it, while the file is written, too, and no
    /// frame of the engine holds a second copy. A write is one system call. For [`WriteMode::Through`](crate::WriteMode)
    /// alone.
    ///
    /// The kernel chooses the cached pages. [`EngineBuilder::cache_bytes`](crate::EngineBuilder::cache_bytes) does not
    /// limit them. Changes by other processes are visible at once; a read beside a write of
    /// another process may be torn, as with `read(2)`. Only one process may append: [`File::append`](crate::File::append)
    /// looks up the end of the file before it writes.
    ///
    /// A page that can't be read, or that another process cuts off, raises SIGBUS in the copy. So the first such open
    /// installs a handler ([`fault::install_handler`](crate::fault::install_handler)), which ends the copy and passes any
    /// other fault on to the handler of before. A thread that blocks SIGBUS reads by system calls; it must not
    /// begin to block the signal after its first read. Reads are system
    /// calls, too, of pages that the kernel does not have; on file systems other than ext4, XFS, btrfs, F2FS, JFS and
    /// ReiserFS; with a limit of the address space (`RLIMIT_AS`); and on AArch64.
    Mapped,
    /// `O_DIRECT`: the kernel caches nothing. Whole blocks go straight to the device; unaligned
    /// edges of a write go through the kernel's cache, coherently.
    Direct,
    /// `Direct` without a second description, because opening the file again would break a lease:
    /// `O_DIRECT` is set, by `fcntl`, on the description with which the file was opened, while a
    /// transfer needs it, and cleared afterwards. Other users of the description may see the flag,
    /// unless it is suspended: see [`File::suspend_direct`](crate::File::suspend_direct). Uses plain
    /// system calls with every backend. Like `Buffered` if the file system does not support direct
    /// I/O ([`File::is_direct`](crate::File::is_direct)).
    DirectInPlace,
    /// Through the kernel's page cache, which is asked to drop the bytes immediately
    /// (`RWF_DONTCACHE`, Linux 6.14). Without kernel support, and for batches in a ring, like
    /// `Buffered`. For callers that cannot have the file opened again, as `Direct` does, because
    /// that breaks leases.
    Uncached,
}

/// The purpose for which a descriptor of a file is offered.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OpenedFor {
    pub(crate) read: bool,
    pub(crate) write: bool,
    /// Direct transfers as well, by additional open descriptions of the same file.
    pub(crate) direct: bool,
    /// No other program has the description, or changes its flags.
    pub(crate) is_own: bool,
}

pub(crate) struct Descriptors {
    read: OnceLock<Arc<OwnedFd>>,
    write: OnceLock<Arc<OwnedFd>>,
    /// No other program has the description of `write`, and it does not append.
    write_is_own: AtomicBool,
    /// Another process may have the description of `write`, and a lease does not keep it out.
    may_be_inherited: AtomicBool,
    direct_read: OnceLock<OwnedFd>,
    direct_write: OnceLock<OwnedFd>,
    seek: OnceLock<OwnedFd>,
    /// The cache's own transfers are direct.
    direct: Option<Alignment>,
    /// Handles may make direct transfers.
    handles_direct: OnceLock<Alignment>,
    /// A cached handle has written through the kernel's page cache.
    has_buffered_writer: AtomicBool,
    /// Direct, on the caller's description.
    in_place: Option<Gate>,
    /// Of a file that was opened for untorn writes.
    pub(crate) untorn: Option<UntornBlocks>,
    transfers: Arc<TransferCounts>,
    overwrites: OnceLock<Overwrites>,
    /// A sync writes to it: not in a line that hits read.
    pub(crate) durable_length: CachePadded<DurableLength>,
    kernel_copy: KernelCopy,
    /// The kernel is asked not to cache transferred bytes, and has not refused.
    uncached: AtomicBool,
    /// Device and inode.
    id: FileId,
    /// The last batch in which a read verified that `direct_read` refers to the file.
    checked_in: AtomicU64,
    /// A descriptor refers to another file now. A hint: then no transfer uses a ring, which could
    /// wait for that file.
    is_lost: AtomicBool,
    /// Blocks beyond the end are to be freed when the descriptions are closed.
    frees_blocks_at_close: AtomicBool,
}

impl Drop for Descriptors {
    /// A close may wait for a server, as on network file systems. The last reference may be dropped
    /// by a read on a thread that also reaps other reads (with an open batch): then a separate
    /// thread closes.
    fn drop(&mut self) {
        let frees_blocks = *self.frees_blocks_at_close.get_mut();
        if !batch::is_open() && !frees_blocks {
            return;
        }
        let (read, write, id) = (self.read.take(), self.write.take(), self.id);
        let own = [self.direct_read.take(), self.direct_write.take(), self.seek.take()];
        let kernel_copy = self.kernel_copy.take();
        let close = move || {
            drop((own, kernel_copy, read));
            if let Some(fd) = write.as_deref().filter(|_| frees_blocks) {
                free_blocks_beyond_end(fd, id);
            }
            drop(write);
        };
        if batch::is_open() {
            // Without a thread they are closed here, as the closure is dropped.
            let _ = spawn("millpond-close", close);
        } else {
            close();
        }
    }
}

/// Frees the blocks beyond the end of the file behind `fd`, unless another process has it open. No other description of
/// it may be left here. If it fails, the file has blocks beyond its end, as after `fallocate`.
fn free_blocks_beyond_end(fd: &OwnedFd, id: FileId) {
    let is_ours = |stat: &rustix::fs::Stat| FileId::of(stat) == id;
    let cut = || {
        let stat = rustix::fs::fstat(fd).ok().filter(is_ours)?;
        rustix::fs::ftruncate(fd, stat.st_size as u64).ok()?;
        // The kernel notes a change, and there is none. Permitted to the file's owner.
        let time = |tv_sec, tv_nsec| rustix::fs::Timespec { tv_sec, tv_nsec };
        let times = rustix::fs::Timestamps {
            last_access: time(stat.st_atime, stat.st_atime_nsec as _),
            last_modification: time(stat.st_mtime, stat.st_mtime_nsec as _),
        };
        rustix::fs::futimens(fd, &times).ok()
    };
    allocation::alone(fd.as_fd(), cut);
}

impl Descriptors {
    pub(crate) fn new(
        fd: BorrowedFd<'_>,
        id: FileId,
        backing: Backing,
        untorn_bytes: Option<u32>,
        transfers: &Arc<TransferCounts>,
    ) -> io::Result<Descriptors> {
        let direct = match backing {
            Backing::Buffered | Backing::Mapped | Backing::Uncached => None,
            Backing::Direct => Some(direct_alignment(fd)?),
            Backing::DirectInPlace => in_place_alignment(fd),
        };
        let is_in_place = backing == Backing::DirectInPlace && direct.is_some();
        Ok(Descriptors {
            in_place: is_in_place.then(Gate::default),
            untorn: untorn_bytes.map(UntornBlocks::new),
            transfers: Arc::clone(transfers),
            uncached: AtomicBool::new(backing == Backing::Uncached),
            id,
            checked_in: AtomicU64::new(0),
            is_lost: AtomicBool::new(false),
            frees_blocks_at_close: AtomicBool::new(false),
            read: OnceLock::new(),
            write: OnceLock::new(),
            write_is_own: AtomicBool::new(false),
            may_be_inherited: AtomicBool::new(false),
            direct_read: OnceLock::new(),
            direct_write: OnceLock::new(),
            seek: OnceLock::new(),
            overwrites: OnceLock::new(),
            durable_length: CachePadded::default(),
            kernel_copy: KernelCopy::default(),
            direct,
            handles_direct: OnceLock::new(),
            has_buffered_writer: AtomicBool::new(false),
        })
    }

    /// The steps of [`Descriptors::attach`] that can fail: opening our descriptions.
    pub(crate) fn prepare(&self, fd: BorrowedFd<'_>, opened: OpenedFor) -> io::Result<()> {
        let OpenedFor { read, write, direct, .. } = opened;
        if direct {
            self.attach_direct(fd, read, write)?;
        }
        if self.direct.is_some() && self.in_place.is_none() {
            self.open_direct(fd, read, write)?;
        }
        Ok(())
    }

    /// Offers another descriptor of the file. Returns it unless it is kept for a direction that had
    /// none.
    pub(crate) fn attach(&self, fd: OwnedFd, opened: OpenedFor) -> io::Result<Option<OwnedFd>> {
        self.prepare(fd.as_fd(), opened)?;
        let OpenedFor { read, write, is_own, .. } = opened;
        let wants_read = read && self.read.get().is_none();
        if write && self.write.get().is_none() {
            let flags = rustix::fs::fcntl_getfl(&fd)?;
            let appends = flags.contains(OFlags::APPEND);
            if appends && !can_ignore_append() {
                let _ = self.write.set(Arc::new(reopen(fd.as_fd(), OFlags::WRONLY)?));
                // For reads the caller's descriptor is sufficient.
                if !wants_read {
                    return Ok(Some(fd));
                }
                return Ok(self.read.set(Arc::new(fd)).err().and_then(Arc::into_inner));
            }
            let fd = Arc::new(fd);
            // Before there is a descriptor for writing. Callers are serialised
            // (`CachedFile::open`).
            self.write_is_own.store(is_own && !appends, Relaxed);
            self.may_be_inherited.store(!is_own, Relaxed);
            if wants_read {
                // The same number: a duplicate would take a number that the program expects.
                let _ = self.read.set(Arc::clone(&fd));
            }
            return Ok(self.write.set(fd).err().and_then(Arc::into_inner));
        }
        if wants_read {
            return Ok(self.read.set(Arc::new(fd)).err().and_then(Arc::into_inner));
        }
        Ok(Some(fd))
    }

    /// Opens our descriptions for the directions that the caller's descriptor permits.
    fn open_direct(&self, fd: BorrowedFd<'_>, read: bool, write: bool) -> io::Result<()> {
        if read && self.direct_read.get().is_none() {
            let _ = self.direct_read.set(reopen_direct(fd, OFlags::RDONLY)?);
        }
        if write && self.direct_write.get().is_none() {
            let _ = self.direct_write.set(reopen_direct(fd, OFlags::WRONLY)?);
        }
        Ok(())
    }

    /// Prepares direct transfers. Not called by several threads at once, as `attach` is not
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

    pub(crate) fn alignment(&self, direct: bool) -> Alignment {
        let known = if direct { self.handles_direct.get().copied() } else { self.direct };
        known.unwrap_or(Alignment::NONE)
    }

    /// Whether direct transfers set the flag on the caller's description.
    pub(crate) fn is_in_place(&self) -> bool {
        self.in_place.is_some()
    }

    /// Whether the cache's aligned transfers are direct.
    pub(crate) fn is_direct(&self) -> bool {
        self.direct.is_some() && !self.in_place.as_ref().is_some_and(Gate::is_refused)
    }

    pub(crate) fn any(&self) -> io::Result<BorrowedFd<'_>> {
        self.descriptor(false).ok_or_else(|| io::Error::from_raw_os_error(libc::EBADF))
    }

    /// The descriptor for writes, or else any.
    pub(crate) fn descriptor(&self, writing: bool) -> Option<BorrowedFd<'_>> {
        let fd = if writing { self.write.get() } else { self.read.get().or(self.write.get()) };
        fd.map(|fd| fd.as_fd())
    }

    /// Suspends or resumes transfers that need other flags on the caller's descriptors.
    pub(crate) fn set_plain(&self, on: bool) {
        if let Some(gate) = &self.in_place {
            if on { gate.begin_plain() } else { gate.end_plain() }
        }
    }

    pub(crate) fn permits(&self, writing: bool) -> bool {
        if writing { self.write.get().is_some() } else { self.read.get().is_some() }
    }

    pub(crate) fn len(&self) -> io::Result<u64> {
        let len = rustix::fs::fstat(self.any()?)?.st_size as u64;
        self.durable_length.observe(len);
        Ok(len)
    }

    pub(crate) fn set_len(&self, len: u64) -> io::Result<()> {
        let fd = self.write.get().ok_or_else(|| io::Error::from_raw_os_error(libc::EINVAL))?;
        // Before the call for blocks that are written during it, and after it for a sync that began during it.
        self.durable_length.cut(len);
        rustix::fs::ftruncate(fd, len)?;
        self.durable_length.cut(len);
        Ok(())
    }

    /// Whether the file has a second description of ours, for direct transfers. It looks like another process's.
    pub(crate) fn has_second_description(&self) -> bool {
        self.direct.is_some() && self.in_place.is_none()
    }

    /// Whether another process may have the program's description: a lease does not keep it from appending.
    pub(crate) fn may_be_inherited(&self) -> bool {
        self.may_be_inherited.load(Relaxed)
    }

    /// [`BackingFile::free_blocks_beyond`](crate::io::backend::BackingFile::free_blocks_beyond).
    ///
    /// No call only frees the blocks beyond the end. Truncating the file to its present length does, if no process can
    /// append between the check of the length and that. (Punching a hole beyond the end does nothing on ext4, and on
    /// other file systems may remove the bytes of an append.)
    /// Returns whether they are free now.
    pub(crate) fn free_blocks_beyond(&self, len: u64, leased: bool) -> bool {
        if self.has_second_description() && !self.may_be_inherited() && !leased {
            // Relaxed: the last reference is dropped after it.
            self.frees_blocks_at_close.store(true, Relaxed);
            return false;
        }
        let mut are_free = false;
        self.alone(leased, &mut || {
            // If it fails, the file has blocks beyond its end, as after `fallocate`.
            are_free = self.len().is_ok_and(|now| now == len) && self.set_len(len).is_ok();
        });
        are_free
    }

    /// [`BackingFile::alone`](crate::io::backend::BackingFile::alone).
    pub(crate) fn alone(&self, leased: bool, body: &mut dyn FnMut()) {
        match self.descriptor(true) {
            Some(_) if !leased && self.may_be_inherited() => {}
            Some(fd) if !leased => drop(allocation::alone(fd, body)),
            _ => body(),
        }
    }

    pub(crate) fn overwrites(&self) -> Overwrites {
        let Some(write) = self.write.get() else { return Overwrites::Elsewhere };
        let read = self.read.get().map(|fd| fd.as_fd());
        *self.overwrites.get_or_init(|| allocation::overwrites(read, write.as_fd()))
    }

    pub(crate) fn fallocate(&self, flags: FallocateFlags, offset: u64, len: u64) -> io::Result<()> {
        let fd = self.write.get().ok_or_else(|| io::Error::from_raw_os_error(libc::EBADF))?;
        retry_interrupted(|| rustix::fs::fallocate(fd, flags, offset, len))
    }

    pub(crate) fn seek(&self, offset: u64, to: Seek) -> io::Result<Option<u64>> {
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

    /// A separate description for seeks, as a seek moves the file offset, and the offset of the
    /// caller's description belongs to the caller. Opened by the first seek, and kept.
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
        // NONBLOCK: a lease of another process then causes an error, not a wait.
        let opened = reopen(any, OFlags::RDONLY | OFlags::NONBLOCK)
            .or_else(|_| reopen(any, OFlags::WRONLY | OFlags::NONBLOCK));
        match opened {
            // Another thread may have been faster; its descriptor is used.
            Ok(fd) => Ok(self.seek.get_or_init(|| fd).as_fd()),
            Err(error) => Err(io::Error::new(
                io::ErrorKind::Unsupported,
                format!("the file can't be opened again to look for data and holes: {error}"),
            )),
        }
    }

    /// Syncs by the description that has been open for as long as the file has been written: the
    /// kernel reports to a description the errors since it was opened, and a later one may miss
    /// some.
    pub(crate) fn sync(&self, data_only: bool) -> io::Result<()> {
        let bad = || io::Error::from_raw_os_error(libc::EBADF);
        let fd = self.write.get().or(self.read.get()).ok_or_else(bad)?;
        let covered = self.durable_length.begin_sync(|| {
            let len = self.checked_stat(fd)?.st_size as u64;
            self.durable_length.observe(len);
            Ok(len)
        })?;
        let sync = || if data_only { rustix::fs::fdatasync(fd) } else { rustix::fs::fsync(fd) };
        self.kernel_copy.sync(fd.as_fd(), || retry_interrupted(sync))?;
        self.durable_length.end_sync(covered);
        Ok(())
    }

    /// [`BackingFile::is_beyond_durable_length`](crate::io::backend::BackingFile::is_beyond_durable_length).
    pub(crate) fn is_beyond_durable_length(&self, end: u64) -> bool {
        // A transfer that extends the file stores the new length itself.
        self.kernel_copy.has_failed()
            || !self.durable_length.covers(end) && self.len().map_or(true, |len| end <= len)
    }

    /// Drops the kernel's copy of the file (`kernel_copy`).
    pub(crate) fn drop_kernel_copy(&self) {
        let Some(fd) = self.write.get().or(self.read.get()) else { return };
        if self.check(fd).is_ok() {
            self.durable_length.cut(0);
            // An error that this call receives from the description belongs to the failure that the
            // caller handles: it concerns bytes that the kernel accepted before the caller raises
            // the epoch (generations.G2).
            self.kernel_copy.drop_pages(fd.as_fd());
        }
    }

    /// Whether the descriptor for writes still refers to the file.
    pub(crate) fn verify(&self) -> io::Result<()> {
        let bad = || io::Error::from_raw_os_error(libc::EBADF);
        let buffered = self.write.get().ok_or_else(bad)?.as_fd();
        self.check(buffered)?;
        self.direct_write.get().map_or(Ok(()), |fd| self.check(fd))
    }

    /// Whether all descriptors for transfers still refer to the file.
    pub(crate) fn are_intact(&self) -> bool {
        let own = [self.direct_read.get(), self.direct_write.get()].into_iter().flatten();
        let shared = [self.read.get(), self.write.get()].into_iter().flatten();
        let are_intact = shared.map(Arc::as_ref).chain(own).all(|fd| self.check(fd).is_ok());
        if !are_intact {
            self.is_lost.store(true, Relaxed);
        }
        are_intact
    }

    /// Whether a descriptor was found to refer to another file.
    pub(crate) fn are_lost(&self) -> bool {
        self.is_lost.load(Relaxed)
    }

    /// EBADF unless `fd` is the file.
    fn check(&self, fd: impl AsFd) -> io::Result<()> {
        self.checked_stat(fd).map(drop)
    }

    /// EBADF unless `fd` is the file.
    fn checked_stat(&self, fd: impl AsFd) -> io::Result<rustix::fs::Stat> {
        let stat = rustix::fs::fstat(fd)?;
        if FileId::of(&stat) != self.id {
            return Err(io::Error::from_raw_os_error(libc::EBADF));
        }
        Ok(stat)
    }
}

impl Switch for Descriptors {
    fn set_direct(&self, on: bool) -> io::Result<()> {
        let (read, write) = (self.read.get(), self.write.get());
        // The same descriptor if it was given for both.
        let read = read.filter(|read| !write.is_some_and(|write| Arc::ptr_eq(read, write)));
        for fd in [write, read].into_iter().flatten() {
            self.check(fd)?;
            set_direct(fd.as_fd(), on)?;
        }
        Ok(())
    }
}

/// Receives the errors that closing a descriptor would return: closes a duplicate.
pub(crate) fn flush(fd: BorrowedFd<'_>) -> io::Result<()> {
    let duplicate = rustix::io::fcntl_dupfd_cloexec(fd, 0)?.into_raw_fd();
    // SAFETY: the descriptor is ours, and not used again.
    Ok(unsafe { rustix::io::try_close(duplicate) }?)
}

/// Whether a nondurable write to a file may return an error of earlier writes, as on NFS. Called
/// after an error.
pub(crate) fn reports_foreign_errors(fd: BorrowedFd<'_>) -> bool {
    !is_local_file_system(fd)
}

/// Whether the file system is known to return only errors of the write itself.
pub(crate) fn is_local_file_system(fd: BorrowedFd<'_>) -> bool {
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

/// The creation time of an open file's inode, in seconds and nanoseconds, if it is available.
/// Together with the number it identifies the inode.
pub(crate) fn created_at(fd: BorrowedFd<'_>) -> Option<(i64, u32)> {
    let stat = rustix::fs::statx(fd, "", AtFlags::EMPTY_PATH, StatxFlags::BTIME).ok()?;
    let has_error = stat.stx_mask & StatxFlags::BTIME.bits() != 0;
    has_error.then_some((stat.stx_btime.tv_sec, stat.stx_btime.tv_nsec))
}

fn reopen_direct(fd: BorrowedFd<'_>, flags: OFlags) -> io::Result<OwnedFd> {
    reopen(fd, flags | OFlags::DIRECT).map_err(|error| match error.raw_os_error() {
        Some(libc::EINVAL) => no_direct("it refuses O_DIRECT"),
        _ => error,
    })
}

/// Whether pwritev2 supports RWF_NOAPPEND: tried once, on a file in memory.
fn can_ignore_append() -> bool {
    static CAN: OnceLock<bool> = OnceLock::new();
    *CAN.get_or_init(|| {
        let Ok(file) = rustix::fs::memfd_create("millpond", MemfdFlags::CLOEXEC) else {
            return false;
        };
        let mut byte = 0u8;
        let iovec = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
        // SAFETY: the vector describes `byte`, which is only read. (With an empty vector the kernel
        // would not check the flags.)
        let outcome = unsafe {
            libc::syscall(
                libc::SYS_pwritev2,
                file.as_raw_fd(),
                &raw const iovec,
                1,
                0u64,
                0u64,
                libc::c_long::from(RWF_NOAPPEND),
            )
        };
        outcome == 1
    })
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const READS: OpenedFor = OpenedFor { read: true, write: false, direct: false, is_own: false };
    const WRITES: OpenedFor = OpenedFor { read: false, write: true, direct: false, is_own: false };

    fn buffered(fd: &impl AsFd) -> Descriptors {
        let id = FileId::of_fd(fd);
        Descriptors::new(fd.as_fd(), id, Backing::Buffered, None, &Arc::default()).unwrap()
    }

    /// Goal: syncs use the description by which the file is written. Incident: they used a
    /// description for reading that was opened later, and missed an earlier error that another
    /// description had received. Method: a descriptor that cannot be synced takes the place of the
    /// one for reading.
    #[test]
    fn syncs_go_by_the_description_for_writing() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let write = OwnedFd::from(file.reopen().unwrap());
        let descriptors = buffered(&write);
        let path = rustix::fs::open(file.path(), OFlags::PATH, rustix::fs::Mode::empty()).unwrap();
        assert!(descriptors.attach(path, READS).unwrap().is_none());
        descriptors.sync(true).unwrap_err();
        assert!(descriptors.attach(write, WRITES).unwrap().is_none());
        descriptors.sync(true).unwrap();
        descriptors.sync(false).unwrap();
    }

    /// Goal: operations that need a descriptor for writing never use a read-only one.
    #[test]
    fn the_descriptor_for_writing_permits_it() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let read = OwnedFd::from(std::fs::File::open(file.path()).unwrap());
        let write = OwnedFd::from(file.reopen().unwrap());
        let descriptors = buffered(&read);
        assert!(descriptors.attach(read, READS).unwrap().is_none());
        assert!(descriptors.descriptor(true).is_none());
        assert!(descriptors.attach(write, WRITES).unwrap().is_none());
        let mode = |writing| {
            let fd = descriptors.descriptor(writing).unwrap();
            rustix::fs::fcntl_getfl(fd).unwrap() & OFlags::RWMODE
        };
        assert_eq!((mode(false), mode(true)), (OFlags::RDONLY, OFlags::RDWR));
    }

    /// Goal: the kernel performs no asynchronous direct write beside a buffered writer of the file.
    /// Incident: a buffered write dirtied a folio that a direct write of io_uring had to drop when it
    /// ended; all later syncs reported EIO.
    #[test]
    fn direct_writes_beside_a_buffered_writer_use_no_ring() {
        use crate::io::segment::Segment;
        use crate::io::transfer::{Direction, Transfer};
        const DIRECT: OpenedFor =
            OpenedFor { read: true, write: true, direct: true, is_own: false };
        let exe = std::env::current_exe().unwrap();
        let file = tempfile::NamedTempFile::new_in(exe.parent().unwrap()).unwrap();
        let (descriptors, fd) = (buffered(&file), || OwnedFd::from(file.reopen().unwrap()));
        if descriptors.attach(fd(), DIRECT).is_err() {
            return; // The file system has no direct I/O.
        }
        let no_memory: Vec<Segment<'_>> = Vec::new();
        let uses_ring = |direction, direct| {
            let transfer = Transfer { direct, ..Transfer::new(direction, 0, &no_memory) };
            descriptors.ring_route(&transfer).is_some()
        };
        assert!(descriptors.attach(fd(), READS).unwrap().is_some());
        assert!(uses_ring(Direction::Write, true));
        // A handle that has not written changes nothing.
        descriptors.attach(fd(), WRITES).unwrap();
        assert!(uses_ring(Direction::Write, true));
        assert!(uses_ring(Direction::Write, false));
        assert!(!uses_ring(Direction::Write, true));
        assert!(uses_ring(Direction::Read, true) && uses_ring(Direction::Write, false));
    }

    /// Goal: a sync never syncs another file that has taken the descriptor's number.
    #[test]
    fn a_descriptor_of_another_file_is_not_synced() {
        use std::os::fd::FromRawFd;
        let (file, other) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        let number = OwnedFd::from(file).into_raw_fd();
        // SAFETY: ours, by the line above.
        let write = unsafe { OwnedFd::from_raw_fd(number) };
        let descriptors = buffered(&write);
        assert!(descriptors.attach(write, WRITES).unwrap().is_none());
        descriptors.sync(true).unwrap();
        // SAFETY: no memory involved; the number stays open.
        assert!(unsafe { libc::dup2(other.as_raw_fd(), number) } >= 0);
        let error = descriptors.sync(true).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EBADF));
    }

    /// Goal: a close that waits does not delay the thread that completes other reads. Method: a
    /// socket whose close waits until its peer has received all bytes, or half a minute.
    #[test]
    fn a_close_in_a_batch_keeps_no_other_read_waiting() {
        use std::io::{ErrorKind, Write};
        use std::net::{TcpListener, TcpStream};
        use std::time::{Duration, Instant};
        static LINGER: libc::linger = libc::linger { l_onoff: 1, l_linger: 30 };
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut full = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let peer = listener.accept().unwrap();
        full.set_nonblocking(true).unwrap();
        while full.write(&[0; 1 << 16]).map_err(|error| error.kind()) != Err(ErrorKind::WouldBlock)
        {
        }
        full.set_nonblocking(false).unwrap();
        // SAFETY: the argument is valid for the call.
        let set = unsafe {
            let (linger, len) = (&raw const LINGER, size_of::<libc::linger>() as u32);
            libc::setsockopt(
                full.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_LINGER,
                linger.cast(),
                len,
            )
        };
        assert_eq!(set, 0);
        let number = full.as_raw_fd();
        let file = tempfile::tempfile().unwrap();
        let descriptors = buffered(&file);
        descriptors.read.set(Arc::new(full.into())).unwrap();
        let begun = Instant::now();
        let batch = batch::open();
        drop(descriptors);
        drop(batch);
        assert!(begun.elapsed() < Duration::from_secs(20), "the close has been waited for");
        // It ends when the peer is closed.
        drop(peer);
        let link = format!("/proc/self/fd/{number}");
        let is_socket =
            || std::fs::read_link(&link).is_ok_and(|to| to.to_string_lossy().starts_with("socket"));
        while is_socket() && begun.elapsed() < Duration::from_secs(60) {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(!is_socket(), "it is not closed");
    }
}
