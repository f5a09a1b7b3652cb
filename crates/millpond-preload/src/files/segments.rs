//! The caller's buffers of a read or write (one, or a list of vectors), and the transfer of their bytes by the engine or
//! by a system call.

use millpond::{Error, File};

use crate::files::open_file::OpenFile;
use crate::report::reason::Reason;
use crate::runtime::fault::copy_in;
use crate::runtime::sys::sys;

/// The kernel transfers at most this much in one call, and so do we.
pub const TRANSFER_BYTES_MAX: usize = 0x7fff_f000;
const IOV_MAX: usize = 1024;

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    Read,
    Write,
}

/// The caller's memory, as it came.
#[derive(Clone, Copy)]
pub enum Memory {
    One(*mut u8, usize),
    Many(*const libc::iovec, usize),
}

/// The vectors of a call, copied so that they can't change under way.
pub enum Segments {
    One(*mut u8, usize),
    Many(Vec<libc::iovec>),
}

/// How a transfer went, when not through the engine.
pub enum Step {
    /// This errno.
    Fail(i32),
    /// The kernel did it in our place, with this result.
    Passed(isize),
    /// The kernel has the file since a moment ago.
    Kernel(Reason),
}

impl Segments {
    pub fn bytes(&self) -> usize {
        match self {
            Segments::One(_, len) => *len,
            Segments::Many(vectors) => vectors.iter().map(|vector| vector.iov_len).sum(),
        }
    }

    pub unsafe fn of(memory: Memory) -> Result<Self, i32> {
        match memory {
            Memory::One(start, len) => Ok(Segments::One(start, len)),
            Memory::Many(_, count) if count > IOV_MAX => Err(libc::EINVAL),
            Memory::Many(vectors, count) => {
                let mut copy: Vec<libc::iovec> = Vec::new();
                copy.try_reserve_exact(count).map_err(|_| libc::ENOMEM)?;
                // SAFETY: `copy` has room for `count` vectors; `vectors` may be any address.
                unsafe {
                    if !copy_in(
                        copy.as_mut_ptr().cast(),
                        vectors.cast(),
                        count * size_of::<libc::iovec>(),
                    ) {
                        return Err(libc::EFAULT);
                    }
                    copy.set_len(count);
                }
                let mut left = TRANSFER_BYTES_MAX;
                for vector in &mut copy {
                    if vector.iov_len > isize::MAX as usize {
                        return Err(libc::EINVAL);
                    }
                    vector.iov_len = vector.iov_len.min(left);
                    left -= vector.iov_len;
                }
                Ok(Segments::Many(copy))
            }
        }
    }

    /// Reads or writes through the engine, or through the kernel where the engine can't. Returns
    /// where the bytes begin, and how many.
    pub unsafe fn transfer(
        &self,
        description: &OpenFile,
        file: &File,
        offset: u64,
        direction: Direction,
        append: bool,
    ) -> Result<(u64, usize), Step> {
        // SAFETY: the caller's duty; the engine reports memory that faults as `Error::Fault`.
        let result = unsafe {
            match (self, direction, append) {
                // The kernel clips the length, but not before it has checked the whole range.
                (Segments::One(_, len), _, _) if *len > TRANSFER_BYTES_MAX => None,
                (Segments::One(start, len), Direction::Read, _) => {
                    Some(file.raw().read_at(*start, *len, offset).map(|bytes| (offset, bytes)))
                }
                (Segments::Many(vectors), Direction::Read, _) => {
                    Some(file.raw().read_vectored_at(vectors, offset).map(|bytes| (offset, bytes)))
                }
                (Segments::One(start, len), Direction::Write, false) => {
                    Some(file.raw().write_at(*start, *len, offset).map(|bytes| (offset, bytes)))
                }
                (Segments::Many(vectors), Direction::Write, false) => {
                    Some(file.raw().write_vectored_at(vectors, offset).map(|bytes| (offset, bytes)))
                }
                (Segments::One(start, len), Direction::Write, true) => {
                    Some(file.raw().append(*start, *len))
                }
                (Segments::Many(vectors), Direction::Write, true) => {
                    Some(file.raw().append_vectored(vectors))
                }
            }
        };
        match result {
            Some(Ok(done)) => Ok(done),
            Some(Err(Error::Io { source, .. })) if direction == Direction::Write => {
                Err(Step::Fail(source.raw_os_error().unwrap_or(libc::EIO)))
            }
            // The kernel answers as the kernel does: EFAULT after the bytes that fit, EINVAL,
            // EFBIG.
            _ => {
                if let Some(file) = description.late_file() {
                    // A page that fails stays dirty, and a sync returns the error.
                    let _ = file.begin_through();
                }
                // SAFETY: the kernel checks the addresses.
                let bytes = unsafe { self.through_kernel(description, offset, direction) };
                if direction == Direction::Write && bytes > 0 {
                    let start = if append { 0 } else { offset };
                    let len = if append { i64::MAX as u64 } else { bytes as u64 };
                    // If it fails, stale bytes would stay: then they may not be served.
                    if file.invalidate(start, len).is_err() {
                        description.stop_hits();
                    }
                }
                if let Some(file) = description.late_file() {
                    file.end_through();
                }
                Err(Step::Passed(bytes))
            }
        }
    }

    /// The same transfer as one system call on the engine's duplicate.
    pub unsafe fn through_kernel(
        &self,
        description: &OpenFile,
        offset: u64,
        direction: Direction,
    ) -> isize {
        let fd = description.kernel_fd();
        if direction == Direction::Write && description.shares() && description.access().append {
            const RWF_APPEND: i32 = 0x10;
            let one;
            let vectors = match self {
                Segments::One(start, len) => {
                    one = [libc::iovec { iov_base: start.cast(), iov_len: *len }];
                    &one[..]
                }
                Segments::Many(vectors) => vectors,
            };
            let (start, count) = (vectors.as_ptr(), vectors.len());
            // SAFETY: the kernel checks the addresses.
            return unsafe { sys!(libc::SYS_pwritev2, fd, start, count, 0, 0, RWF_APPEND) };
        }
        // SAFETY: the kernel checks the addresses.
        unsafe {
            match (self, direction) {
                (Segments::One(start, len), Direction::Read) => {
                    sys!(libc::SYS_pread64, fd, *start, *len, offset)
                }
                (Segments::One(start, len), Direction::Write) => {
                    sys!(libc::SYS_pwrite64, fd, *start, *len, offset)
                }
                (Segments::Many(vectors), Direction::Read) => {
                    sys!(libc::SYS_preadv, fd, vectors.as_ptr(), vectors.len(), offset, 0)
                }
                (Segments::Many(vectors), Direction::Write) => {
                    sys!(libc::SYS_pwritev, fd, vectors.as_ptr(), vectors.len(), offset, 0)
                }
            }
        }
    }
}
