//! Reads and writes that the lock-free hit did not settle.
//!
//! Each runs in a section, holds a pin on the description, and locks the offset if it uses it. The
//! outcome is either settled here, or left to the kernel: because the file is passed, because the
//! call is one that only the kernel can refuse as the kernel would, or because the engine could
//! not do it (the caller's memory faulted, no frame was free). That is always possible: writes are
//! through, or made to be, so the kernel has every byte; after a write that went past the engine, what the engine
//! has cached of the range is dropped.

use std::os::fd::RawFd;

use millpond::{Error, File};

use crate::description::{Access, Description, Pin};
use crate::offset::{IN_KERNEL, OFFSET_END};
use crate::real::sys;
use crate::report::{self, Reason};
use crate::section;
use crate::table::{self, Slot};
use crate::thread::Record;
use crate::{identity, registry};

/// The kernel transfers at most this much in one call, and so do we.
pub const TRANSFER_BYTES_MAX: usize = 0x7fff_f000;
const IOV_MAX: usize = 1024;

/// What became of a call.
#[derive(Clone, Copy)]
pub enum Outcome {
    /// The result in the kernel's form: bytes, or a negative errno.
    Settled(isize),
    /// For the kernel; bytes count as passed for this reason, if the file counts.
    Kernel(Option<Reason>),
}

/// Where in the file.
#[derive(Clone, Copy)]
pub enum At {
    /// The description's offset, which moves.
    Offset,
    /// This byte.
    Byte(i64),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
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
enum Segments {
    One(*mut u8, usize),
    Many(Vec<libc::iovec>),
}

/// A lock-free read that hits; the fast half of `read` and `pread`.
///
/// # Safety
///
/// As `read`: `dst` is the caller's to give; it may be any address.
#[inline]
pub unsafe fn try_hit(fd: RawFd, dst: *mut u8, len: usize, at: At) -> Option<usize> {
    let record = crate::thread::record();
    if !record.is_warm() {
        return None;
    }
    record.enter();
    // SAFETY: the caller's duty.
    let done = unsafe { try_hit_inner(fd, dst, len, at) };
    record.exit();
    if let Some(bytes) = done {
        record.count_served(bytes as u64);
    }
    done
}

/// The same in a section, by a thread that the engine may not know yet.
unsafe fn try_first_hit(fd: RawFd, memory: Memory, at: At, record: &Record) -> Option<usize> {
    let Memory::One(dst, len) = memory else { return None };
    if record.is_warm() {
        return None;
    }
    table::description(fd)?.hit()?.prepare_thread();
    record.set_warm();
    // SAFETY: the caller's duty.
    unsafe { try_hit_inner(fd, dst, len, at) }
}

#[inline]
unsafe fn try_hit_inner(fd: RawFd, dst: *mut u8, len: usize, at: At) -> Option<usize> {
    let description = table::description(fd)?;
    if len > TRANSFER_BYTES_MAX {
        return None;
    }
    match at {
        At::Byte(offset) => {
            let offset = u64::try_from(offset).ok()?;
            let file = description.hit()?;
            // SAFETY: the caller's duty; a fault in `dst` gives None (see `fault`).
            unsafe { file.try_read_hit_raw(dst, len, offset) }
        }
        At::Offset => loop {
            let offset = description.offset.peek()?;
            // After the offset: one that `pass` left behind is met by no file.
            let file = description.hit()?;
            // SAFETY: as above.
            let bytes = unsafe { file.try_read_hit_raw(dst, len, offset) }?;
            let end = offset + bytes as u64;
            if end >= OFFSET_END {
                return None;
            }
            if description.offset.try_advance(offset, end) {
                return Some(bytes);
            }
        },
    }
}

/// A read by the slow path.
///
/// # Safety
///
/// As `readv`: the memory is the caller's to give; it may be any address.
#[cold]
pub unsafe fn read(fd: RawFd, memory: Memory, at: At) -> Outcome {
    let Some(record) = enterable(fd) else { return Outcome::Kernel(None) };
    if record.is_inside() {
        return Outcome::Kernel(None);
    }
    section::run(|record| {
        let pin = match find(fd) {
            Ok(pin) => pin,
            Err(reason) => return Outcome::Kernel(reason),
        };
        // SAFETY: the caller's duty.
        let outcome = unsafe {
            match try_first_hit(fd, memory, at, record) {
                Some(bytes) => Ok(bytes),
                None => transfer(&pin, memory, at, Direction::Read),
            }
        };
        settle(record, outcome)
    })
}

/// A write.
///
/// # Safety
///
/// As `writev`: the memory is the caller's to give; it may be any address.
pub unsafe fn write(fd: RawFd, memory: Memory, at: At) -> Outcome {
    let Some(record) = enterable(fd) else { return Outcome::Kernel(None) };
    if record.is_inside() {
        return Outcome::Kernel(None);
    }
    section::run(|record| {
        let pin = match find(fd) {
            Ok(pin) => pin,
            Err(reason) => return Outcome::Kernel(reason),
        };
        // SAFETY: the caller's duty.
        let outcome = unsafe { transfer(&pin, memory, at, Direction::Write) };
        settle(record, outcome)
    })
}

/// The thread's record, if `fd` is worth a closer look.
fn enterable(fd: RawFd) -> Option<&'static Record> {
    match table::get(fd) {
        Slot::Foreign | Slot::Internal => None,
        Slot::Unknown | Slot::File(_) => Some(crate::thread::record()),
    }
}

/// The description at `fd`, pinned. Finds out what an unknown number is.
fn find(fd: RawFd) -> Result<Pin, Option<Reason>> {
    if let Some(pin) = Pin::of(fd) {
        return if pin.is_served() { Ok(pin) } else { Err(Some(pin.reason())) };
    }
    if matches!(table::get(fd), Slot::Unknown) && table::is_initialised() {
        return Err(describe_unknown(fd));
    }
    Err(None)
}

/// Describes a number that was not seen opened: a regular file in a served directory is counted as
/// passed, anything else is foreign.
#[cold]
fn describe_unknown(fd: RawFd) -> Option<Reason> {
    let identity = identity::identify(fd)?;
    if !identity.is_regular || !identity::is_in_served_directory(fd) {
        table::note_foreign(fd);
        return None;
    }
    // SAFETY: no memory involved.
    let flags = unsafe { sys!(libc::SYS_fcntl, fd, libc::F_GETFL) };
    let mut registry = registry::lock();
    if matches!(table::get(fd), Slot::Unknown) && flags >= 0 {
        let access = Access::of_flags(flags as i32);
        registry.before_open(identity.id, access, false);
        registry.adopt(fd, identity.id, flags as i32, Some(Reason::Inherited));
    }
    table::description(fd).filter(|d| !d.is_served()).map(Description::reason)
}

fn settle(record: &Record, result: Result<usize, Step>) -> Outcome {
    match result {
        Ok(bytes) => {
            record.count_served(bytes as u64);
            Outcome::Settled(bytes as isize)
        }
        Err(Step::Fail(errno)) => Outcome::Settled(-(errno as isize)),
        Err(Step::Passed(bytes)) => {
            report::count_bytes_passed(Reason::Engine, bytes);
            Outcome::Settled(bytes)
        }
        Err(Step::Kernel(reason)) => Outcome::Kernel(Some(reason)),
    }
}

/// How a transfer went, when not through the engine.
enum Step {
    /// This errno.
    Fail(i32),
    /// The kernel did it in our place, with this result.
    Passed(isize),
    /// The kernel has the file since a moment ago.
    Kernel(Reason),
}

unsafe fn transfer(
    description: &Description,
    memory: Memory,
    at: At,
    direction: Direction,
) -> Result<usize, Step> {
    let file = description.file().ok_or(Step::Kernel(Reason::Engine))?;
    let access = description.access();
    if (direction == Direction::Read && !access.read)
        || (direction == Direction::Write && !access.write)
    {
        return Err(Step::Fail(libc::EBADF));
    }
    if let At::Byte(offset) = at
        && offset < 0
    {
        return Err(Step::Fail(libc::EINVAL));
    }
    // SAFETY: the caller's duty.
    let segments = unsafe { Segments::of(memory) }.map_err(Step::Fail)?;
    let append = direction == Direction::Write && access.append;
    match at {
        At::Byte(offset) => {
            // SAFETY: the caller's duty.
            unsafe { segments.transfer(description, file, offset as u64, direction, append) }
                .map(|(_, bytes)| bytes)
        }
        At::Offset => {
            let locked = description.offset.lock();
            if !description.is_served() {
                description.offset.unlock(locked);
                return Err(Step::Kernel(description.reason()));
            }
            let is_kernels = locked == IN_KERNEL;
            let offset = if is_kernels {
                registry::kernel_offset(description.kernel_fd()).max(0) as u64
            } else {
                locked
            };
            // SAFETY: the caller's duty.
            let result = unsafe { segments.transfer(description, file, offset, direction, append) };
            let moved = match &result {
                Ok((start, bytes)) => start + *bytes as u64,
                Err(Step::Passed(bytes)) if *bytes > 0 && append => file.len().unwrap_or(offset),
                Err(Step::Passed(bytes)) if *bytes > 0 => offset + *bytes as u64,
                Err(_) => offset,
            };
            let moved = moved.min(OFFSET_END - 1);
            if is_kernels && moved != offset {
                registry::push_offset(description.kernel_fd(), moved);
                description.add_moved_in_kernel(moved.saturating_sub(offset));
            }
            description.offset.unlock(if is_kernels { locked } else { moved });
            result.map(|(_, bytes)| bytes)
        }
    }
}

impl Segments {
    unsafe fn of(memory: Memory) -> Result<Self, i32> {
        match memory {
            Memory::One(start, len) => Ok(Segments::One(start, len)),
            Memory::Many(_, count) if count > IOV_MAX => Err(libc::EINVAL),
            Memory::Many(vectors, count) => {
                let mut copy: Vec<libc::iovec> = Vec::with_capacity(count);
                // SAFETY: `copy` has room for `count` vectors; `vectors` may be any address.
                unsafe {
                    if !crate::fault::copy_in(
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
    unsafe fn transfer(
        &self,
        description: &Description,
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
                    Some(file.read_raw_at(*start, *len, offset).map(|bytes| (offset, bytes)))
                }
                (Segments::Many(vectors), Direction::Read, _) => {
                    Some(file.read_vectored_raw_at(vectors, offset).map(|bytes| (offset, bytes)))
                }
                (Segments::One(start, len), Direction::Write, false) => {
                    Some(file.write_raw_at(*start, *len, offset).map(|bytes| (offset, bytes)))
                }
                (Segments::Many(vectors), Direction::Write, false) => {
                    Some(file.write_vectored_raw_at(vectors, offset).map(|bytes| (offset, bytes)))
                }
                (Segments::One(start, len), Direction::Write, true) => {
                    Some(file.append_raw(*start, *len))
                }
                (Segments::Many(vectors), Direction::Write, true) => {
                    Some(file.append_vectored_raw(vectors))
                }
            }
        };
        match result {
            Some(Ok(done)) => Ok(done),
            Some(Err(Error::Io { source, .. })) if direction == Direction::Write => {
                Err(Step::Fail(source.raw_os_error().unwrap_or(libc::EIO)))
            }
            // The kernel answers as the kernel does: EFAULT after the bytes that fit, EINVAL, EFBIG.
            _ => {
                if let Some(file) = description.late_file() {
                    // What fails to be written back stays cached, and is told by a sync.
                    let _ = file.begin_through();
                }
                // SAFETY: the kernel checks the addresses.
                let bytes = unsafe { self.through_kernel(description, offset, direction) };
                if direction == Direction::Write && bytes > 0 {
                    let start = if append { 0 } else { offset };
                    let len = if append { i64::MAX as u64 } else { bytes as u64 };
                    // If it fails, stale bytes would stay: then nobody may be served them.
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
    unsafe fn through_kernel(
        &self,
        description: &Description,
        offset: u64,
        direction: Direction,
    ) -> isize {
        let fd = description.kernel_fd();
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
