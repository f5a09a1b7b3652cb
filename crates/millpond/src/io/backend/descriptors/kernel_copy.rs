//! The kernel's copy of a file after a write-back of the kernel has failed.
//!
//! A file system may not be able to write a page again after its write-back has failed: ext4 leaves the extent
//! unwritten and the page's buffers mapped, so the second write-back reaches the block, and never converts the
//! extent. The sync succeeds, and the bytes read as zeros once the page is gone. A page that was dropped finds its
//! extent again, so the kernel's copy is dropped before the bytes are written again.
//!
//! `fadvise` keeps pages that a process maps, and a direct write drops those as well. It can't
//! drop a tail shorter than a sector, nor a page that a process changes at the same time. So each sync after a failure
//! looks whether it has stored all pages: after a sync, no byte other than zero lies in an unwritten
//! extent.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use rustix::fs::{OFlags, SeekFrom};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use crate::event::event;
use crate::io::backend::allocation::Extents;
use crate::io::backend::descriptors::reopen::reopen;

/// Syncs before bytes of an unwritten extent count as lost. Another program may write there at any time, and its
/// bytes are in such an extent until the next sync.
const SYNCS: usize = 4;
const BUFFER_BYTES: usize = 64 << 10;
/// The alignment of direct writes, at least.
const SECTOR_BYTES: u64 = 512;

/// The kernel's copy of a file, and the descriptions by which it is looked at. They are kept: a close of a description
/// would end the locks that the process has on the file (`fcntl(2)`).
#[derive(Default)]
pub(crate) struct KernelCopy {
    /// A write-back of the kernel has failed.
    has_failed: AtomicBool,
    buffered: OnceLock<OwnedFd>,
    direct: OnceLock<OwnedFd>,
}

impl KernelCopy {
    /// Of a file of which another process may have seen a write-back fail.
    pub(crate) fn after_failure() -> KernelCopy {
        KernelCopy { has_failed: AtomicBool::new(true), ..KernelCopy::default() }
    }

    pub(crate) fn has_failed(&self) -> bool {
        // Relaxed: set by the caller that received the failure, before it raised the epoch (generations.G8).
        self.has_failed.load(Relaxed)
    }

    /// Takes the descriptions, for a thread that may wait in their close.
    pub(crate) fn take(&mut self) -> [Option<OwnedFd>; 2] {
        [self.buffered.take(), self.direct.take()]
    }

    /// Drops the kernel's copy, after a write-back has failed and before the bytes are written again.
    ///
    /// The kernel drops clean pages only. The first call makes it write the dirty ones, and the second drops them.
    /// A large folio that reaches beyond a given range would stay, so the range is the whole file. The wait between
    /// them takes an error from the description.
    pub(crate) fn drop_pages(&self, fd: BorrowedFd<'_>) {
        const SYNC_FILE_RANGE_WAIT_BEFORE: libc::c_long = 1;
        self.has_failed.store(true, Relaxed);
        let drop_clean = || rustix::fs::fadvise(fd, 0, None, rustix::fs::Advice::DontNeed);
        // Advice: if the kernel refuses it, it has no pages to drop.
        let _ = drop_clean();
        // SAFETY: no memory involved.
        let waited = unsafe {
            libc::syscall(
                libc::SYS_sync_file_range,
                fd.as_raw_fd(),
                0u64,
                0u64,
                SYNC_FILE_RANGE_WAIT_BEFORE,
            )
        };
        if waited < 0 {
            let error = io::Error::last_os_error();
            event!(debug, %error, "a wait for failed write-back");
        }
        let _ = drop_clean();
        // If pages stay, the next sync looks whether they are stored.
        if let Err(error) = self.drop_mapped(fd) {
            event!(debug, %error, "dropping mapped pages");
        }
    }

    /// Syncs. After a failure: an error also if the kernel counts a page as clean that is stored nowhere.
    pub(crate) fn sync(
        &self,
        fd: BorrowedFd<'_>,
        sync: impl Fn() -> io::Result<()>,
    ) -> io::Result<()> {
        sync()?;
        if !self.has_failed() {
            return Ok(());
        }
        let Some(file) = self.buffered(fd)? else { return Ok(()) };
        for _ in 1..SYNCS {
            if !has_unstored(file)? {
                return Ok(());
            }
            sync()?;
        }
        if !has_unstored(file)? {
            return Ok(());
        }
        let what = "the kernel can't store pages of a failed write-back that a process maps";
        Err(io::Error::other(what))
    }

    /// Drops cached pages of unwritten extents that processes map.
    ///
    /// A direct write has the kernel unmap and drop the pages of its range first. It then fails, as its source can't
    /// be read, and has written nothing.
    fn drop_mapped(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        let Some(file) = self.buffered(fd)? else { return Ok(()) };
        let mut unreadable = None;
        each_cached(file, |cached| {
            let direct = kept(&self.direct, fd, OFlags::WRONLY | OFlags::DIRECT)?;
            let source = match &unreadable {
                Some(source) => source,
                None => unreadable.insert(Unreadable::new()?),
            };
            // Not beyond the end, which a write would move.
            let len = rustix::fs::fstat(file)?.st_size as u64;
            let end = cached.end.min(len - len % SECTOR_BYTES);
            let start = cached.start - cached.start % SECTOR_BYTES;
            for at in (start..end).step_by(Unreadable::BYTES) {
                let bytes = (end - at).min(Unreadable::BYTES as u64) as usize;
                // SAFETY: the memory has no rights, so the kernel reads nothing of it.
                unsafe {
                    libc::pwrite(direct.as_raw_fd(), source.at.cast_const(), bytes, at as i64)
                };
            }
            Ok(true)
        })
    }

    /// A description of its own, whose offset may change. `None`: no other process maps the file, as it has a lease,
    /// or the file can't be opened again.
    fn buffered(&self, fd: BorrowedFd<'_>) -> io::Result<Option<BorrowedFd<'_>>> {
        // Another open, even our own, would break a lease of this description.
        // SAFETY: no memory involved.
        let lease = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETLEASE) };
        if [libc::F_RDLCK, libc::F_WRLCK].contains(&lease) {
            return Ok(None);
        }
        match kept(&self.buffered, fd, OFlags::RDONLY) {
            Ok(file) => Ok(Some(file)),
            Err(error) => match error.raw_os_error() {
                // A lease of another process; no right to read; no /proc.
                Some(libc::EAGAIN | libc::EACCES | libc::EPERM | libc::ENOENT) => Ok(None),
                _ => Err(error),
            },
        }
    }
}

/// The description in `place`, which is opened by the first call.
fn kept<'k>(
    place: &'k OnceLock<OwnedFd>,
    fd: BorrowedFd<'_>,
    flags: OFlags,
) -> io::Result<BorrowedFd<'k>> {
    if place.get().is_none() {
        // NONBLOCK: a lease causes an error, not a wait. Another thread may have been faster.
        let _ = place.set(reopen(fd, flags | OFlags::NONBLOCK)?);
    }
    Ok(place.get().expect("set above").as_fd())
}

/// Whether an unwritten extent has cached bytes other than zero. `file`: a description of its own, as its
/// offset changes.
fn has_unstored(file: BorrowedFd<'_>) -> io::Result<bool> {
    let mut buffer = vec![0; BUFFER_BYTES];
    let mut has_unstored = false;
    each_cached(file, |mut cached| {
        while cached.start < cached.end && !has_unstored {
            let len = (cached.end - cached.start).min(BUFFER_BYTES as u64) as usize;
            let read = || rustix::io::pread(file, &mut buffer[..len], cached.start);
            let found = rustix::io::retry_on_intr(read)?;
            if found == 0 {
                break;
            }
            has_unstored = buffer[..found].iter().any(|&byte| byte != 0);
            cached.start += found as u64;
        }
        Ok(!has_unstored)
    })?;
    Ok(has_unstored)
}

/// Calls `body` with each range of cached pages in unwritten extents, until it returns false.
fn each_cached(
    file: BorrowedFd<'_>,
    mut body: impl FnMut(Range<u64>) -> io::Result<bool>,
) -> io::Result<()> {
    let mut start = 0;
    loop {
        let found = match Extents::from(file, start) {
            Ok(found) => found,
            Err(error) => match error.raw_os_error() {
                // The file system does not report extents, or a sandbox forbids the call.
                Some(
                    libc::EOPNOTSUPP | libc::ENOTTY | libc::EINVAL | libc::EPERM | libc::EACCES,
                ) => return Ok(()),
                _ => return Err(error),
            },
        };
        let Some(last) = found.as_slice().last() else { return Ok(()) };
        for extent in found.as_slice().iter().filter(|extent| extent.is_unwritten()) {
            let mut at = extent.start;
            while at < extent.end() {
                // In an unwritten extent, cached pages are data.
                let data = match rustix::fs::seek(file, SeekFrom::Data(at)) {
                    Ok(data) if data < extent.end() => data,
                    Ok(_) | Err(Errno::NXIO) => break,
                    Err(error) => return Err(error.into()),
                };
                let hole = rustix::fs::seek(file, SeekFrom::Hole(data)).unwrap_or(extent.end());
                at = hole.clamp(data + 1, extent.end());
                if !body(data..at)? {
                    return Ok(());
                }
            }
        }
        start = last.end().max(start + 1);
    }
}

/// Memory without any rights.
struct Unreadable {
    at: *mut libc::c_void,
}

impl Unreadable {
    const BYTES: usize = 1 << 20;

    fn new() -> io::Result<Unreadable> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let at = unsafe {
            mmap_anonymous(std::ptr::null_mut(), Unreadable::BYTES, ProtFlags::empty(), flags)?
        };
        Ok(Unreadable { at })
    }
}

impl Drop for Unreadable {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and not used again.
        let _ = unsafe { munmap(self.at, Unreadable::BYTES) };
    }
}
