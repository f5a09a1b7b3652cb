//! A file that a process handed over, as the keeper writes it: whether it may, and how.
//!
//! - **TG1** The file is written through the description that was handed over, and no other: so with no
//!   more rights than its sender had. Only on known file systems of regular files ([`Medium`]): writes to
//!   pseudo file systems have side effects.
//! - **TG2** No byte is written, truncated or freed unless it is known that no other process has changed
//!   the file since the dead process did ([`Writer::check`]):
//!
//! | the keeper's description has           | another process has changed the file            |
//! |----------------------------------------|-------------------------------------------------|
//! | a write lease, standing                | no: no other process has it open, openers wait  |
//! | none; no change was in flight          | if its times are not those after the last one   |
//! | none; a change was in flight           | if its times are not those of when it was noted |
//!
//! The lease is the program's own (`millpond run`), or one that the keeper takes when the program is dead.
//! Between a check of the times and the following write there are microseconds in which a writer that no
//! lease blocks is missed. A write between a kill in the middle of a write-back and the moment at which the
//! keeper notes the times, which is as soon as it runs, is missed, too. Forked children of the program have
//! the same description, and no lease keeps them out.
//!
//! The times come from the file system. If it reports a changed time without a change, as one of another
//! machine may, the keeper assumes a change by another process, and keeps its pages in a rescue file.

use std::io;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;

use rustix::fs::{AtFlags, FallocateFlags, OFlags, StatxFlags};
use rustix::io::{Errno, ReadWriteFlags, retry_on_intr};

use crate::io::backend::descriptors::KernelCopy;
use crate::recovery::keeper::report::FileReport;
use crate::recovery::layout::{EntryUse, mtime_ns};
use crate::recovery::mark::Mark;
use crate::units::{PAGE_BYTES_MAX, PAGE_SHIFTS, UNIT_BYTES};

/// Maximum bytes per write call. Chosen, not measured.
pub(super) const BUFFER_BYTES: usize = 1 << 20;
/// Don't honour O_APPEND (Linux 6.9).
const RWF_NOAPPEND: ReadWriteFlags = ReadWriteFlags::from_bits_retain(0x20);

#[cfg(all(test, not(loom)))]
thread_local! {
    /// For the files that this thread writes.
    pub(super) static SYNCS_TO_FAIL: std::cell::Cell<u32> = const { std::cell::Cell::new(0) };
}

/// The kind of file system that a file lies on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Medium {
    /// Of this machine only: no other machine changes its files, and its times change with each change.
    Local,
    /// It depends on another program or machine, which may delay writes and closes.
    Remote,
}

impl Medium {
    /// By the magic numbers of statfs(2). Files on other file systems are refused: their writes are written
    /// through.
    fn of(magic: u64) -> Option<Medium> {
        const LOCAL: [u64; 17] = [
            0xEF53,      // ext2, ext3, ext4
            0x5846_5342, // XFS
            0x9123_683E, // btrfs
            0x0102_1994, // tmpfs
            0x794C_7630, // overlay
            0xF2F5_2010, // F2FS
            0x2FC1_2FC1, // ZFS
            0xCA45_1A4E, // bcachefs
            0x3153_464A, // JFS
            0x5265_4973, // ReiserFS
            0x8584_58F6, // ramfs
            0x3434,      // NILFS2
            0x4D44,      // FAT
            0x2011_BAB0, // exFAT
            0x7366_746E, // NTFS
            0x482B,      // HFS+
            0xF15F,      // eCryptfs
        ];
        const REMOTE: [u64; 9] = [
            0x6969,      // NFS
            0xFF53_4D42, // CIFS
            0xFE53_4D42, // SMB2
            0x6573_5546, // FUSE, virtiofs
            0x0102_1997, // 9p
            0x00C3_6400, // Ceph
            0x0116_1970, // GFS2
            0x7461_636F, // OCFS2
            0x5346_414F, // AFS
        ];
        match magic {
            magic if LOCAL.contains(&magic) => Some(Medium::Local),
            magic if REMOTE.contains(&magic) => Some(Medium::Remote),
            _ => None,
        }
    }

    /// Queries the file system, which may block.
    pub(super) fn query_medium(fd: &OwnedFd) -> io::Result<Option<Medium>> {
        Ok(Medium::of(rustix::fs::fstatfs(fd)?.f_type as u64 & 0xFFFF_FFFF))
    }
}

/// The identity of a file, from the kernel, without a query of the file system.
pub(super) struct Identity {
    /// Device and inode.
    pub(super) id: (u64, u64),
    /// A number that is unique among all mounts, past and future (Linux 6.8).
    pub(super) mount: Option<u64>,
}

impl Identity {
    /// EINVAL if it is not a regular file.
    pub(super) fn of(fd: &OwnedFd) -> io::Result<Identity> {
        const MNT_ID_UNIQUE: StatxFlags = StatxFlags::from_bits_retain(0x4000);
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let asked = StatxFlags::TYPE | StatxFlags::INO | MNT_ID_UNIQUE;
        let stat = rustix::fs::statx(fd, c"", flags, asked)?;
        let kind = rustix::fs::FileType::from_raw_mode(stat.stx_mode.into());
        if kind != rustix::fs::FileType::RegularFile {
            return Err(Errno::INVAL.into());
        }
        let device = rustix::fs::makedev(stat.stx_dev_major, stat.stx_dev_minor);
        let told = StatxFlags::from_bits_retain(stat.stx_mask).contains(MNT_ID_UNIQUE);
        Ok(Identity { id: (device, stat.stx_ino), mount: told.then_some(stat.stx_mnt_id) })
    }
}

/// A file that a process handed over.
pub(super) struct Adopted {
    pub(super) entry: EntryUse,
    pub(super) device: u64,
    pub(super) inode: u64,
    pub(super) page_shift: u32,
    pub(super) target: Target,
    /// The file's state when its process was found dead.
    pub(super) noted: Option<Stamp>,
    pub(super) mark: Option<Arc<Mark>>,
}

impl Adopted {
    /// Accepts a file; EINVAL, EBADF or ESTALE if it does not match the request.
    pub(super) fn new(
        fd: OwnedFd,
        medium: Medium,
        entry: EntryUse,
        id: (u64, u64),
        page_shift: u32,
    ) -> Result<Adopted, (OwnedFd, Errno)> {
        if !PAGE_SHIFTS.contains(&page_shift) {
            return Err((fd, Errno::INVAL));
        }
        if Identity::of(&fd).map(|found| found.id).ok() != Some(id) {
            return Err((fd, Errno::STALE));
        }
        let permits = rustix::fs::fcntl_getfl(&fd)
            .is_ok_and(|set| !set.contains(OFlags::PATH) && set & OFlags::RWMODE != OFlags::RDONLY);
        if !permits {
            return Err((fd, Errno::BADF));
        }
        let (device, inode) = id;
        let target = Target { fd, medium };
        Ok(Adopted { entry, device, inode, page_shift, target, noted: None, mark: None })
    }

    /// Its process is dead: later changes of the file are another process's (TG2). Queries no other
    /// machine.
    pub(super) fn note(&mut self) {
        if self.target.medium == Medium::Local {
            self.noted = self.target.stamp().ok();
        }
    }

    /// An empty report.
    pub(super) fn report(&self) -> FileReport {
        FileReport::new(self.device, self.inode, self.target.path())
    }
}

/// The time of the last change, and the length, of a file at some moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Stamp {
    /// [`mtime_ns`].
    pub(super) changed_ns: u64,
    pub(super) size: u64,
}

/// The description through which a file is written (TG1).
pub(super) struct Target {
    fd: OwnedFd,
    pub(super) medium: Medium,
}

impl Target {
    /// Takes over from the dead process. Its last change is at `changed_ns`, unless it died during one.
    pub(super) fn take_over(&self, changed_ns: Option<u64>) -> io::Result<Writer<'_>> {
        let lease = Lease::take(&self.fd);
        let now = self.stamp()?;
        let expected = match changed_ns {
            Some(changed_ns) if !lease.was_standing => Stamp { changed_ns, ..now },
            _ => now,
        };
        let mut writer = Writer {
            target: self,
            lease,
            expected,
            flags: ReadWriteFlags::empty(),
            appends: false,
        };
        writer.set_flags()?;
        Ok(writer)
    }

    pub(super) fn stamp(&self) -> io::Result<Stamp> {
        let stat = rustix::fs::fstat(&self.fd)?;
        Ok(Stamp { changed_ns: mtime_ns(&stat), size: stat.st_size as u64 })
    }

    /// Whether closing it never blocks: it involves no other machine, and frees no blocks.
    pub(super) fn closes_at_once(&self) -> bool {
        self.medium == Medium::Local
            && rustix::fs::fstat(&self.fd).is_ok_and(|stat| stat.st_nlink > 0)
    }

    pub(super) fn path(&self) -> Option<PathBuf> {
        std::fs::read_link(format!("/proc/self/fd/{}", self.fd.as_raw_fd())).ok()
    }
}

/// The write lease on a description, if it has one: while it stands, no other process has the file open.
struct Lease<'a> {
    fd: &'a OwnedFd,
    /// It stood when the process had died: no other process has had the file open.
    was_standing: bool,
    /// The signals that were blocked before, if the keeper took the lease.
    before: Option<libc::sigset_t>,
}

#[repr(C)]
struct OwnerEx {
    kind: libc::c_int,
    pid: libc::c_int,
}

impl<'a> Lease<'a> {
    /// Takes a lease if there is none. It fails if another process has the file open; a process that is not
    /// the file's owner needs a capability; and not all file systems have leases.
    fn take(fd: &'a OwnedFd) -> Lease<'a> {
        const F_SETOWN_EX: libc::c_int = 15;
        const F_OWNER_TID: libc::c_int = 0;
        let was_standing = stands(fd);
        let mut lease = Lease { fd, was_standing, before: None };
        // SAFETY: no memory involved.
        if was_standing || unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETLEASE) } != libc::F_UNLCK
        {
            return lease;
        }
        // An open of the file waits for the lease, and the kernel signals its owner by SIGIO. The owner is
        // this thread, which blocks the signal.
        let owner =
            OwnerEx { kind: F_OWNER_TID, pid: rustix::thread::gettid().as_raw_nonzero().get() };
        let mut before = MaybeUninit::uninit();
        let signals = sigio();
        // SAFETY: sets and owner are valid for the calls.
        let taken = unsafe {
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const signals, before.as_mut_ptr());
            libc::fcntl(fd.as_raw_fd(), F_SETOWN_EX, &raw const owner) == 0
                && libc::fcntl(fd.as_raw_fd(), libc::F_SETLEASE, libc::F_WRLCK) == 0
        };
        // SAFETY: filled by the first call above.
        let before = unsafe { before.assume_init() };
        if taken {
            lease.before = Some(before);
        } else {
            restore(&before);
        }
        lease
    }
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            // SAFETY: no memory involved.
            unsafe { libc::fcntl(self.fd.as_raw_fd(), libc::F_SETLEASE, libc::F_UNLCK) };
            restore(&before);
        }
    }
}

/// Whether a write lease is on the description, and no open waits for its end.
fn stands(fd: &OwnedFd) -> bool {
    // SAFETY: no memory involved.
    unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETLEASE) == libc::F_WRLCK }
}

fn sigio() -> libc::sigset_t {
    let mut set = MaybeUninit::uninit();
    // SAFETY: filled by the first call.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), libc::SIGIO);
        set.assume_init()
    }
}

/// Takes the signal that may be pending, and restores the signal mask.
fn restore(before: &libc::sigset_t) {
    let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    let set = sigio();
    // SAFETY: sets and time are valid for the calls.
    unsafe {
        libc::sigtimedwait(&raw const set, std::ptr::null_mut(), &raw const now);
        libc::pthread_sigmask(libc::SIG_SETMASK, before, std::ptr::null_mut());
    }
}

/// Writes a file; each call is one attempt, and the caller has called [`Writer::check`] before.
pub(super) struct Writer<'a> {
    target: &'a Target,
    lease: Lease<'a>,
    /// The file's state after our last change, or the dead process's.
    expected: Stamp,
    flags: ReadWriteFlags,
    /// O_APPEND was removed, and is to be restored.
    appends: bool,
}

impl Drop for Writer<'_> {
    fn drop(&mut self) {
        // A child of the dead process may have the description, too.
        if self.appends
            && let Ok(set) = rustix::fs::fcntl_getfl(self.fd())
        {
            let _ = rustix::fs::fcntl_setfl(self.fd(), set | OFlags::APPEND);
        }
    }
}

impl Writer<'_> {
    fn fd(&self) -> &OwnedFd {
        &self.target.fd
    }

    /// The description's flags are the program's: removes O_DIRECT, and overrides O_APPEND at each write,
    /// or else removes it, too.
    fn set_flags(&mut self) -> io::Result<()> {
        let set = rustix::fs::fcntl_getfl(self.fd())?;
        if set.contains(OFlags::DIRECT) {
            rustix::fs::fcntl_setfl(self.fd(), set - OFlags::DIRECT)?;
        }
        if set.contains(OFlags::APPEND) {
            // No bytes: checks whether the kernel knows the flag.
            let known = rustix::io::pwritev2(self.fd(), &[], 0, RWF_NOAPPEND);
            if known.is_ok() {
                self.flags = RWF_NOAPPEND;
            } else {
                rustix::fs::fcntl_setfl(self.fd(), set - OFlags::DIRECT - OFlags::APPEND)?;
                self.appends = true;
            }
        }
        Ok(())
    }

    /// Whether no other process can have the file open.
    pub(super) fn is_alone(&self) -> bool {
        stands(self.fd())
    }

    /// TG2; StaleNetworkFileHandle if another process has changed the file.
    pub(super) fn check(&self) -> io::Result<()> {
        // In this order: an open that breaks the lease now changes the file after the check.
        let now = self.target.stamp()?;
        let is_ours = now == self.expected || (self.lease.was_standing && self.is_alone());
        if is_ours {
            return Ok(());
        }
        let kind = io::ErrorKind::StaleNetworkFileHandle;
        Err(io::Error::new(kind, "another process has changed the file since"))
    }

    /// Records the file's state after a change of ours.
    fn changed<T>(&mut self, outcome: T) -> T {
        if let Ok(now) = self.target.stamp() {
            self.expected = now;
        }
        outcome
    }

    /// replay.RP1; false if it is not certain.
    pub(super) fn drain(&mut self) -> bool {
        let drained = retry_on_intr(|| {
            let block = UNIT_BYTES as u64;
            rustix::fs::fallocate(self.fd(), FallocateFlags::KEEP_SIZE, 0, block)
        });
        match drained {
            Ok(()) => return self.changed(true),
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => {}
            // Not by the length: a truncation would free the blocks that are reserved beyond its end for
            // the pages to be written. An allocation that finds no space has waited before it checked.
            Err(error) => return [Errno::NOSPC, Errno::DQUOT].contains(&error),
        }
        // Only if no other process can extend the file in between.
        if self.is_alone()
            && let Ok(len) = self.len()
        {
            let _ = self.set_len(len + 1);
            let _ = self.set_len(len);
        }
        false
    }

    pub(super) fn len(&self) -> io::Result<u64> {
        Ok(self.target.stamp()?.size)
    }

    /// The number of bytes in the file's blocks.
    pub(super) fn allocated(&self) -> io::Result<u64> {
        Ok(rustix::fs::fstat(self.fd())?.st_blocks as u64 * 512)
    }

    pub(super) fn set_len(&mut self, len: u64) -> io::Result<()> {
        let set = retry_on_intr(|| rustix::fs::ftruncate(self.fd(), len));
        Ok(self.changed(set)?)
    }

    pub(super) fn sync(&mut self) -> io::Result<()> {
        #[cfg(all(test, not(loom)))]
        if SYNCS_TO_FAIL.get() > 0 {
            SYNCS_TO_FAIL.set(SYNCS_TO_FAIL.get() - 1);
            return self.lose();
        }
        // The dead process may have met a failed write-back.
        let sync = || Ok(retry_on_intr(|| rustix::fs::fsync(self.fd()))?);
        KernelCopy::after_failure().sync(self.fd().as_fd(), sync)
    }

    /// After a sync that failed (replay.RP4).
    pub(super) fn drop_kernel_copy(&mut self) {
        let is_ours = self.check().is_ok();
        // May change the file's times.
        KernelCopy::after_failure().drop_pages(self.fd().as_fd());
        if is_ours {
            self.changed(());
        }
    }

    /// A sync that fails as on a device that has lost the writes.
    #[cfg(all(test, not(loom)))]
    fn lose(&mut self) -> io::Result<()> {
        let len = self.len()?;
        self.set_len(0)?;
        self.set_len(len)?;
        Err(Errno::IO.into())
    }

    /// Writes some of the bytes, at least one.
    pub(super) fn write(&mut self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        let slices = [io::IoSlice::new(bytes)];
        let moved = if self.flags.is_empty() {
            rustix::io::pwritev(self.fd(), &slices, offset)
        } else {
            rustix::io::pwritev2(self.fd(), &slices, offset, self.flags)
        };
        match self.changed(moved)? {
            0 => Err(Errno::IO.into()),
            moved => Ok(moved),
        }
    }

    /// Frees (PUNCH_HOLE) or zeroes (ZERO_RANGE) bytes within the file; writes zeros if the file system
    /// does not support that.
    pub(super) fn zero(&mut self, how: FallocateFlags, range: Range<u64>) -> io::Result<()> {
        let how = how | FallocateFlags::KEEP_SIZE;
        let zeroed = rustix::fs::fallocate(self.fd(), how, range.start, range.end - range.start);
        match self.changed(zeroed) {
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => {}
            other => return Ok(other?),
        }
        let zeros = vec![0; PAGE_BYTES_MAX as usize];
        let mut at = range.start;
        loop {
            let end = range.end.min(self.len()?);
            let count = (zeros.len() as u64).min(end.saturating_sub(at));
            if count == 0 {
                return Ok(());
            }
            at += self.write(&zeros[..count as usize], at)? as u64;
        }
    }
}
