//! A file that a process handed over, as the keeper writes it.

use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;

use rustix::fs::{FallocateFlags, Mode, OFlags, SeekFrom};
use rustix::io::{Errno, ReadWriteFlags, retry_on_intr};

use crate::cache::frame::{UNIT_BYTES, UNIT_SHIFT};
use crate::survival::layout::FileSlot;
use crate::survival::report::FileReport;

/// Bytes written by one call at most.
pub(super) const BUFFER_BYTES: usize = 1 << 20;
/// Don't honour O_APPEND (Linux 6.9).
const RWF_NOAPPEND: ReadWriteFlags = ReadWriteFlags::from_bits_retain(0x20);

/// A file that a process handed over.
pub(super) struct Adopted {
    pub(super) slot: FileSlot,
    pub(super) device: u64,
    pub(super) inode: u64,
    pub(super) page_shift: u32,
    pub(super) target: Target,
}

impl Adopted {
    /// Takes a file; EINVAL, EBADF or ESTALE where it is not what the request says.
    pub(super) fn new(
        fd: OwnedFd,
        slot: FileSlot,
        id: (u64, u64),
        page_shift: u32,
    ) -> io::Result<Adopted> {
        let stat = rustix::fs::fstat(&fd)?;
        let kind = rustix::fs::FileType::from_raw_mode(stat.st_mode);
        let shifts = UNIT_SHIFT..UNIT_SHIFT + 5;
        if kind != rustix::fs::FileType::RegularFile || !shifts.contains(&page_shift) {
            return Err(Errno::INVAL.into());
        }
        if (stat.st_dev, stat.st_ino) != id {
            return Err(Errno::STALE.into());
        }
        let (device, inode) = id;
        Ok(Adopted { slot, device, inode, page_shift, target: Target::new(fd)? })
    }

    /// To be filled in.
    pub(super) fn report(&self) -> FileReport {
        FileReport::new(self.device, self.inode, self.target.path())
    }
}

/// A description through which a file is written.
pub(super) struct Target {
    fd: OwnedFd,
    /// Ours, and not shared with the program that opened it: buffered, and appending to nothing.
    own: bool,
}

impl Target {
    fn new(fd: OwnedFd) -> io::Result<Target> {
        let flags = rustix::fs::fcntl_getfl(&fd)?;
        let access = flags & OFlags::RWMODE;
        // The descriptor is the sender's right to write; a new description must not go beyond it.
        if flags.contains(OFlags::PATH) || access == OFlags::RDONLY {
            return Err(Errno::BADF.into());
        }
        let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
        // Not waiting for leases.
        let flags = OFlags::WRONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        Ok(match rustix::fs::open(path, flags, Mode::empty()) {
            Ok(fd) => Target { fd, own: true },
            // No /proc, a lease, or a mode that lets only the creator write.
            Err(_) => Target { fd, own: false },
        })
    }

    /// Before the first write: of a shared description, O_DIRECT is taken away, and O_APPEND
    /// overruled at each write.
    pub(super) fn prepare(&self) -> io::Result<Writer<'_>> {
        let mut flags = ReadWriteFlags::empty();
        if !self.own {
            let set = rustix::fs::fcntl_getfl(&self.fd)?;
            if set.contains(OFlags::DIRECT) {
                rustix::fs::fcntl_setfl(&self.fd, set - OFlags::DIRECT)?;
            }
            if set.contains(OFlags::APPEND) {
                flags = RWF_NOAPPEND;
            }
        }
        Ok(Writer { fd: &self.fd, own: self.own, flags })
    }

    pub(super) fn path(&self) -> Option<PathBuf> {
        std::fs::read_link(format!("/proc/self/fd/{}", self.fd.as_raw_fd())).ok()
    }
}

/// Writes a file; each call is one attempt.
pub(super) struct Writer<'a> {
    fd: &'a OwnedFd,
    own: bool,
    flags: ReadWriteFlags,
}

impl Writer<'_> {
    /// R1 of `replay`; false where it can't be sure.
    pub(super) fn drain(&self) -> bool {
        let drained = retry_on_intr(|| {
            let block = UNIT_BYTES as u64;
            rustix::fs::fallocate(self.fd, FallocateFlags::KEEP_SIZE, 0, block)
        });
        if drained.is_ok() {
            return true;
        }
        if let Ok(len) = self.len() {
            let _ = self.set_len(len + 1);
            let _ = self.set_len(len);
        }
        false
    }

    pub(super) fn len(&self) -> io::Result<u64> {
        Ok(rustix::fs::fstat(self.fd)?.st_size as u64)
    }

    pub(super) fn set_len(&self, len: u64) -> io::Result<()> {
        Ok(retry_on_intr(|| rustix::fs::ftruncate(self.fd, len))?)
    }

    pub(super) fn sync(&self) -> io::Result<()> {
        Ok(retry_on_intr(|| rustix::fs::fsync(self.fd))?)
    }

    /// Some of the bytes, at least one.
    pub(super) fn write(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        let slices = [io::IoSlice::new(bytes)];
        let moved = if self.flags.is_empty() {
            rustix::io::pwritev(self.fd, &slices, offset)?
        } else {
            rustix::io::pwritev2(self.fd, &slices, offset, self.flags)?
        };
        if moved == 0 { Err(Errno::IO.into()) } else { Ok(moved) }
    }

    /// Frees (PUNCH_HOLE) or zeroes (ZERO_RANGE) bytes within the file; writes zeros where the file
    /// system can't.
    pub(super) fn zero(&self, how: FallocateFlags, range: Range<u64>) -> io::Result<()> {
        let how = how | FallocateFlags::KEEP_SIZE;
        match rustix::fs::fallocate(self.fd, how, range.start, range.end - range.start) {
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => {}
            other => return Ok(other?),
        }
        let zeros = vec![0; BUFFER_BYTES];
        let mut at = range.start;
        loop {
            // Only where there is something: the file may be as sparse as it is long. (The offset
            // of a description that others share is left alone.)
            if self.own {
                match rustix::fs::seek(self.fd, SeekFrom::Data(at)) {
                    Ok(data) => at = data,
                    Err(Errno::NXIO) => return Ok(()),
                    Err(_) => {}
                }
            }
            let end = range.end.min(self.len()?);
            let count = (zeros.len() as u64).min(end.saturating_sub(at));
            if count == 0 {
                return Ok(());
            }
            at += self.write(&zeros[..count as usize], at)? as u64;
        }
    }
}
