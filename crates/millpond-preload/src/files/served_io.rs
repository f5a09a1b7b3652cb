//! Reads and writes that the lock-free hit did not settle.
//!
//! Each runs in a section, holds a pin on the description, and locks the offset if it uses it. The
//! outcome is either settled here, or left to the kernel: because the file is passed, because the
//! call is one that only the kernel can refuse as the kernel would, or because the engine could not
//! do it (the caller's memory faulted, no frame was free). That is always possible: writes are
//! through, or made to be, so the kernel has every byte. After a write that went past the engine,
//! the engine's pages of the range are dropped.

use std::os::fd::RawFd;

use crate::files::offset::OFFSET_END;
use crate::files::open_file::{Access, OpenFile};
use crate::files::pin::Pin;
use crate::files::segments::{Direction, Memory, Segments, Step, TRANSFER_BYTES_MAX};
use crate::files::table::{self, NumberState};
use crate::files::{identity, registry, unserved};
use crate::report::accounts::{self, Row};
use crate::report::counts;
use crate::report::reason::Reason;
use crate::runtime::thread::{self, Record};
use crate::runtime::{config, section};

/// The outcome of a call.
#[derive(Clone, Copy)]
pub enum Outcome {
    /// The result in the kernel's form: bytes, or a negative errno.
    Done(isize),
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

impl At {
    /// The offset argument of the kernel's call, which looks at it only if the call has one.
    #[inline(always)]
    pub fn arg(self) -> i64 {
        match self {
            At::Offset => 0,
            At::Byte(offset) => offset,
        }
    }
}

/// A lock-free read that hits; the fast half of `read` and `pread`.
///
/// # Safety
///
/// As `read`: `dst` is the caller's to give; it may be any address.
#[inline]
pub unsafe fn try_hit(fd: RawFd, dst: *mut u8, len: usize, at: At) -> Option<usize> {
    let record = thread::record();
    if !record.is_warm() {
        return None;
    }
    record.enter();
    // SAFETY: the caller's duty.
    let done = unsafe { try_hit_inner(fd, dst, len, at) };
    record.exit();
    if let Some(bytes) = done {
        if accounts::is_kept() {
            explain_hit(fd, bytes);
        }
        record.count_served(bytes as u64);
    }
    done
}

#[cold]
fn explain_hit(fd: RawFd, bytes: usize) {
    row_of(fd).inspect(|row| row.read(bytes, true));
}

/// The file's row in the report by file, where that was asked for.
fn row_of(fd: RawFd) -> Option<&'static Row> {
    match table::get(fd) {
        NumberState::File(description) => description.row(),
        NumberState::Unserved | NumberState::Left => unserved::row(fd),
        _ => None,
    }
}

/// The same in a section, by a thread that the engine may not know yet.
unsafe fn try_first_hit(fd: RawFd, memory: Memory, at: At, record: &Record) -> Option<usize> {
    let Memory::One(dst, len) = memory else { return None };
    if record.is_warm() {
        return None;
    }
    table::description(fd)?.hit()?.raw().prepare_thread();
    record.request().warm_up();
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
            unsafe { file.raw().try_read_hit(dst, len, offset) }
        }
        At::Offset => loop {
            let offset = description.offset.peek()?;
            // After the offset: one that `pass` left behind is met by no file.
            let file = description.hit()?;
            // SAFETY: as above.
            let bytes = unsafe { file.raw().try_read_hit(dst, len, offset) }?;
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

/// A read that did not hit, or a write.
///
/// # Safety
///
/// As `readv` and `writev`: the memory is the caller's to give; it may be any address.
pub unsafe fn read_or_write(fd: RawFd, memory: Memory, at: At, direction: Direction) -> Outcome {
    if !may_be_served(fd) || thread::record().is_inside() {
        return Outcome::Kernel(None);
    }
    section::open(|record| {
        let pin = match find(fd) {
            Ok(pin) => pin,
            Err(reason) => return Outcome::Kernel(reason),
        };
        let is_read = direction == Direction::Read;
        // SAFETY: the caller's duty.
        let hit = is_read.then(|| unsafe { try_first_hit(fd, memory, at, record) }).flatten();
        if let Some(bytes) = hit {
            pin.row().inspect(|row| row.read(bytes, true));
            return outcome_of(record, Ok(bytes));
        }
        // SAFETY: as above.
        let outcome = unsafe { transfer(&pin, memory, at, direction) };
        explain(&pin, &outcome, direction);
        let outcome = outcome_of(record, outcome);
        hand_over_at_random(&pin);
        outcome
    })
}

/// Whether `fd` is worth a closer look.
pub fn may_be_served(fd: RawFd) -> bool {
    matches!(table::get(fd), NumberState::Unserved | NumberState::Claimed | NumberState::File(_))
}

/// The description at `fd`, pinned; else why the kernel has the file, if it is known.
pub fn find(fd: RawFd) -> Result<Pin, Option<Reason>> {
    let pin = Pin::of(fd).ok_or(None)?;
    if pin.is_served() { Ok(pin) } else { Err(Some(pin.reason())) }
}

/// Gives a regular file in a served directory, which the kernel serves, a description.
pub fn describe_passed(fd: RawFd) {
    let Some(identity) = identity::identify(fd).filter(|_| table::is_initialised()) else { return };
    if !identity.is_regular || !identity::is_in_served_directory(fd) {
        table::try_change(fd, NumberState::Unknown, NumberState::Foreign);
        return;
    }
    let flags = identity::status_flags(fd);
    let mut registry = registry::lock();
    if !matches!(table::get(fd), NumberState::File(_) | NumberState::Internal) && flags >= 0 {
        registry.before_open(identity.id, Access::of_flags(flags), false);
        registry.describe(fd, identity.id, flags, Some(Reason::Inherited));
    }
}

/// For tests: hands the file to the kernel at a random moment.
fn hand_over_at_random(description: &OpenFile) {
    if config::random().is_multiple_of(64) {
        // The call's own section has signals open.
        section::run(|_| {
            let mut registry = registry::lock();
            // SAFETY: the registry is locked.
            let id = unsafe { description.cold() }.id;
            registry.pass_file(id, Reason::Changed);
        });
    }
}

/// Counts, by file, a call that was not a hit.
pub fn explain(description: &OpenFile, outcome: &Result<usize, Step>, direction: Direction) {
    let Some(row) = description.row() else { return };
    match (outcome, direction) {
        (Ok(bytes), Direction::Read) => row.read(*bytes, false),
        (Ok(bytes), Direction::Write) => row.written(*bytes),
        (Err(Step::Passed(bytes)), direction) => row.passed(*bytes, direction == Direction::Write),
        (Err(Step::Fail(_) | Step::Kernel(_)), _) => {}
    }
}

pub fn outcome_of(record: &Record, result: Result<usize, Step>) -> Outcome {
    match result {
        Ok(bytes) => {
            record.count_served(bytes as u64);
            Outcome::Done(bytes as isize)
        }
        Err(Step::Fail(errno)) => Outcome::Done(-(errno as isize)),
        Err(Step::Passed(bytes)) => {
            counts::count_bytes_passed(Reason::Engine, bytes);
            Outcome::Done(bytes)
        }
        Err(Step::Kernel(reason)) => Outcome::Kernel(Some(reason)),
    }
}

unsafe fn transfer(
    description: &OpenFile,
    memory: Memory,
    at: At,
    direction: Direction,
) -> Result<usize, Step> {
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
    let transfer = |offset| {
        // SAFETY: the caller's duty.
        unsafe {
            match description.served_file() {
                Some(file) => segments.transfer(description, file, offset, direction, append),
                // `open_file.D7`, or passed since, `D3`.
                None => Err(Step::Passed(segments.through_kernel(description, offset, direction))),
            }
        }
    };
    match at {
        At::Byte(offset) => transfer(offset as u64).map(|(_, bytes)| bytes),
        At::Offset => {
            let offset = description.offset.lock();
            if !description.is_served() {
                description.offset.unlock(offset);
                return Err(Step::Kernel(description.reason()));
            }
            let result = transfer(offset);
            let len = || identity::len(description.kernel_fd());
            let moved = match &result {
                // Nothing appended moves nothing.
                Ok((start, bytes)) if *bytes > 0 => start + *bytes as u64,
                Err(Step::Passed(bytes)) if *bytes > 0 && append => len().unwrap_or(offset),
                Err(Step::Passed(bytes)) if *bytes > 0 => offset + *bytes as u64,
                _ => offset,
            };
            description.offset.unlock(moved.min(OFFSET_END - 1));
            result.map(|(_, bytes)| bytes)
        }
    }
}

/// Counts bytes that the kernel moved to or from `fd`, if its file counts.
pub fn count_passed(fd: RawFd, direction: Direction, result: isize) {
    let reason = match table::get(fd) {
        NumberState::File(description) if description.is_served() => Reason::Changed,
        NumberState::File(description) => description.reason(),
        NumberState::Unserved | NumberState::Left => unserved::reason(fd),
        _ => return,
    };
    counts::count_bytes_passed(reason, result);
    explain_passed(fd, direction, result);
}

/// Counts, by file, the result of a call of the kernel's.
pub fn explain_passed(fd: RawFd, direction: Direction, result: isize) {
    if accounts::is_kept() {
        row_of(fd).inspect(|row| row.passed(result, direction == Direction::Write));
    }
}
