//! `read` and `write` of a number, with their positional and vectored forms.

use std::cell::Cell;
use std::os::fd::{BorrowedFd, RawFd};
use std::ptr;

use millpond::internals::page_cache::{Inode, WriteExtent, Writing};

use crate::files::identity;
use crate::files::segments::Direction;
use crate::files::served_io::At;
use crate::page_cache::descriptors::{
    self, APPENDS, FILE, IS_AMBIGUOUS, IS_OUTSIDE, IS_UNMAPPED, KERNEL, Number, OPENED, is_on, kind,
};
use crate::page_cache::inodes::{self, Entry};
use crate::page_cache::position;
use crate::report::accounts;
use crate::report::reason::Reason;
use crate::runtime::c::{Off, c_int, c_void};
use crate::runtime::cancel::point::point;
use crate::runtime::thread::{self, Record, record};
use crate::runtime::{libc_calls, section};

/// A number that is a FILE, as a call has found it.
struct Open {
    fd: RawFd,
    number: &'static Number,
    entry: &'static Entry,
    state: u64,
    record: &'static Record,
}

impl Open {
    /// `None`: the call is the program's own, and nothing else. A number that is not known yet is looked at if it is
    /// to be written, or was read often.
    #[inline(always)]
    fn of(fd: RawFd, direction: Direction) -> Option<Open> {
        let number = descriptors::get(fd)?;
        let state = number.state();
        if kind(state) == KERNEL {
            return None;
        }
        let record = record();
        // A stack for handlers may have no room for more than the kernel's call.
        let is_in_handler = || matches!(direction, Direction::Read) && record.is_on_handler_stack();
        if record.is_inside() || is_in_handler() {
            return None;
        }
        if kind(state) != FILE {
            return Open::first(fd, number, direction, record);
        }
        Some(Open { fd, number, entry: number.entry()?, state, record })
    }

    #[cold]
    #[inline(never)]
    fn first(
        fd: RawFd,
        number: &'static Number,
        direction: Direction,
        record: &'static Record,
    ) -> Option<Open> {
        let is_read = matches!(direction, Direction::Read);
        if is_read && kind(number.state()) == OPENED && !number.count_read() {
            return None;
        }
        if !is_read && number.changes_alone() {
            return None;
        }
        if section::run(|_| descriptors::identify(fd, number)) != FILE {
            return None;
        }
        Some(Open { fd, number, entry: number.entry()?, state: number.state(), record })
    }

    fn inode(&self) -> &'static Inode {
        &self.entry.inode
    }

    /// The number stands for the same file as in the beginning.
    #[inline(always)]
    fn is_same(&self) -> bool {
        self.number.state() == self.state
    }

    /// A read that the mapping serves.
    ///
    /// # Safety
    ///
    /// As `pread`: the memory is the caller's to give; it may be any address.
    #[inline(always)]
    unsafe fn try_mapped(&self, buf: *mut c_void, len: usize, offset: u64) -> bool {
        // SAFETY: the number is open as long as the caller's call lasts, or the result does not count.
        let fd = unsafe { BorrowedFd::borrow_raw(self.fd) };
        !self.number.has(IS_UNMAPPED)
            && self.record.is_ready_to_copy()
            // SAFETY: the caller's duty; a mapping means that the handler of faults is installed.
            && unsafe { self.inode().read(fd, buf.cast(), len, offset) }
            && self.is_same()
    }

    #[inline(always)]
    fn count_served(&self, bytes: usize) {
        self.record.count_served(bytes as u64);
        if let Some(row) = self.number.row() {
            row.read(bytes, true);
        }
    }

    fn count_passed(&self, direction: Direction, result: isize) {
        if result > 0 && !self.number.has(IS_OUTSIDE) {
            self.number.note_passed(result as u64);
            self.record.count_passed(Reason::Once as usize, result as u64);
            let writes = matches!(direction, Direction::Write);
            self.number.row().inspect(|row| row.passed(result, writes));
        }
    }

    /// Before a read that was not served: a cancellation point, and the moment at which a file is mapped.
    #[inline(never)]
    fn prepare_slow(&self, at: At) {
        point();
        self.record.request().warm_up();
        let may_fault = !self.record.is_fault_blocked();
        // A read at an offset that other processes may move is the kernel's.
        let may_be_served = match at {
            At::Byte(_) => true,
            At::Offset => position::is_own(self.number),
        };
        if may_be_served
            && self.number.count_read()
            && !self.inode().is_mapped()
            && !self.number.has(IS_UNMAPPED)
            && may_fault
        {
            section::run(|_| descriptors::try_map(self.fd, self.number, self.entry));
        }
    }

    /// A read by the kernel, `len` bytes at `offset`, atomic against this process's writes.
    fn read_by_kernel(&self, offset: u64, len: usize, call: impl Fn() -> isize) -> isize {
        let end = offset.saturating_add(len as u64);
        let may_wait = !self.record.has_writes();
        let result = self.inode().read_by(offset, end, may_wait, thread::is_any_writing, call);
        if result > 0 {
            self.inode().note_size(offset + result as u64);
        }
        result
    }
}

/// A read of one buffer.
///
/// # Safety
///
/// As `read` and `pread`.
#[inline(always)]
pub unsafe fn read_one(
    fd: c_int,
    buf: *mut c_void,
    len: usize,
    at: At,
    by_libc: impl Fn(c_int, *mut c_void, usize, Off) -> isize,
) -> isize {
    let Some(open) = Open::of(fd, Direction::Read) else {
        let result = by_libc(fd, buf, len, at.arg());
        count_first(fd, Direction::Read, result);
        return result;
    };
    match at {
        At::Byte(offset) if offset >= 0 => {
            // SAFETY: the caller's duty.
            if unsafe { open.try_mapped(buf, len, offset as u64) } {
                open.count_served(len);
                return len as isize;
            }
        }
        At::Offset => {
            if let Some((start, word)) = position::begin_read(fd, open.number)
                // SAFETY: the caller's duty.
                && unsafe { open.try_mapped(buf, len, start) }
                && position::end_read(open.number, word, start + len as u64)
            {
                open.count_served(len);
                return len as isize;
            }
        }
        At::Byte(_) => {}
    }
    read_slow(&open, len, at, |at| match at {
        // SAFETY: the caller's duty.
        At::Byte(offset) => unsafe { libc_calls::pread64(fd, buf, len, offset) },
        At::Offset => by_libc(fd, buf, len, 0),
    })
}

/// Counts the bytes of a read or write of a file that the library has not looked at yet.
#[inline(always)]
fn count_first(fd: RawFd, direction: Direction, result: isize) {
    let is_opened = |number: &&Number| kind(number.state()) == OPENED;
    if result > 0
        && let Some(number) = descriptors::get(fd).filter(is_opened)
    {
        number.note_passed(result as u64);
        record().count_passed(Reason::Once as usize, result as u64);
        if accounts::is_kept() {
            report_first(fd, number, direction, result);
        }
    }
}

#[cold]
#[inline(never)]
fn report_first(fd: RawFd, number: &Number, direction: Direction, result: isize) {
    let record = record();
    // As in `Open::of`.
    if record.is_inside() || record.is_on_handler_stack() {
        return;
    }
    let writes = matches!(direction, Direction::Write);
    descriptors::find_row(fd, number).inspect(|row| row.passed(result, writes));
}

/// A read of several buffers, `len` bytes together.
pub fn read_many(fd: c_int, len: usize, at: At, call: impl Fn(At) -> isize) -> isize {
    match Open::of(fd, Direction::Read) {
        Some(open) => read_slow(&open, len, at, call),
        None => {
            let result = call(at);
            count_first(fd, Direction::Read, result);
            result
        }
    }
}

#[inline(never)]
fn read_slow(open: &Open, len: usize, at: At, call: impl Fn(At) -> isize) -> isize {
    open.prepare_slow(at);
    let result = match at {
        At::Byte(offset) if offset >= 0 => open.read_by_kernel(offset as u64, len, || call(at)),
        At::Byte(_) => call(at),
        At::Offset => loop {
            let Some((start, word)) = position::begin_read(open.fd, open.number) else {
                break call(at);
            };
            let result = open.read_by_kernel(start, len, || call(At::Byte(start as Off)));
            let end = start + result.max(0) as u64;
            if result <= 0 || position::end_read(open.number, word, end) {
                break result;
            }
        },
    };
    open.count_passed(Direction::Read, result);
    result
}

/// A write that a thread has in progress, on its stack, where it stays. A signal handler's writes lie before those that it has
/// interrupted.
pub struct InProgress {
    previous: *const InProgress,
    record: &'static Record,
    /// The number whose offset the write may lock.
    number: Option<&'static Number>,
    writing: Cell<Option<Writing<'static>>>,
}

impl InProgress {
    fn new(record: &'static Record, number: Option<&'static Number>) -> InProgress {
        let previous = record.writes().cast();
        InProgress { previous, record, number, writing: Cell::new(None) }
    }

    /// From here on [`before_jump`] knows of it. It does not move until it is dropped.
    fn enlist(&self) {
        self.record.set_writes(ptr::from_ref(self).cast());
    }

    /// Whether the thread may wait for other writes: it has none of its own, which the call would wait for in vain.
    fn may_wait(&self) -> bool {
        self.previous.is_null()
    }

    /// The owner of the offset's lock.
    fn owner(&self) -> usize {
        ptr::from_ref(self).addr()
    }

    fn end(&self) {
        drop(self.writing.take());
        if let Some(number) = self.number {
            position::unlock(number, self.owner(), None);
        }
    }
}

impl Drop for InProgress {
    fn drop(&mut self) {
        self.end();
        if ptr::eq(self.record.writes().cast(), self) {
            self.record.set_writes(self.previous.cast());
        }
    }
}

/// Before a jump that may leave the frames of writes in progress: they end for readers.
pub fn before_jump() {
    // A thread without a record has no write in progress.
    let Some(record) = thread::try_record() else { return };
    let mut next = record.writes().cast::<InProgress>();
    // SAFETY: the list is this thread's; its frames are there until the jump.
    while let Some(write) = unsafe { next.as_ref() } {
        write.end();
        next = write.previous;
    }
    // After their ends: `Inode::read_by`.
    record.set_writes(ptr::null());
    record.forget_fault_mask();
}

/// A write of `len` bytes.
///
/// The program's own call, `call`, on its own descriptor, between two changes of the counters.
#[inline(always)]
pub fn write(fd: c_int, len: usize, at: At, call: impl FnOnce() -> isize) -> isize {
    match Open::of(fd, Direction::Write) {
        Some(open) if len > 0 => write_file(&open, len as u64, at, call),
        Some(_) => call(),
        None => {
            let result = call();
            count_first(fd, Direction::Write, result);
            result
        }
    }
}

#[inline]
fn write_file(open: &Open, len: u64, at: At, call: impl FnOnce() -> isize) -> isize {
    let number = open.number;
    // It is in the thread's list by its address: it is not moved.
    let in_progress = InProgress::new(open.record, Some(number));
    let may_wait = in_progress.may_wait();
    in_progress.enlist();
    let mut start = None;
    let change = match at {
        _ if number.has(IS_AMBIGUOUS) => WriteExtent::Whole,
        _ if number.has(APPENDS) => WriteExtent::Append,
        At::Byte(offset) => u64::try_from(offset).map_or(WriteExtent::Whole, |offset| {
            start = Some(offset);
            WriteExtent::Range(offset, len)
        }),
        At::Offset => match position::lock(open.fd, number, in_progress.owner(), may_wait) {
            Some(offset) => {
                start = Some(offset);
                WriteExtent::Range(offset, len)
            }
            None => WriteExtent::Whole,
        },
    };
    if matches!(at, At::Offset) && start.is_none() {
        position::release(open.fd);
        position::disturb(number);
    }
    in_progress.writing.set(Some(open.inode().begin_write(change, may_wait)));
    let result = call();
    drop(in_progress.writing.take());
    if result > 0
        && let Some(start) = start
    {
        let end = start + result as u64;
        open.inode().note_size(end);
        if matches!(at, At::Offset) {
            position::unlock(number, in_progress.owner(), Some(end));
        }
    }
    open.count_passed(Direction::Write, result);
    result
}

/// A change of the file at `fd` that is no write: `cut` is the size that it has then at most, if it may get shorter.
pub fn change<R>(fd: c_int, cut: Option<u64>, call: impl FnOnce() -> R) -> R {
    match Open::of(fd, Direction::Write) {
        Some(open) => change_file(open.record, open.inode(), cut, call),
        None => call(),
    }
}

fn change_file<R>(
    record: &'static Record,
    inode: &'static Inode,
    cut: Option<u64>,
    call: impl FnOnce() -> R,
) -> R {
    let in_progress = InProgress::new(record, None);
    let may_wait = in_progress.may_wait();
    in_progress.enlist();
    in_progress.writing.set(Some(inode.begin_write(WriteExtent::Whole, may_wait)));
    if let Some(size) = cut {
        inode.note_cut(size);
    }
    call()
}

/// Before the kernel drops the pages of `len` bytes at `offset` from its cache: it keeps pages that a process maps, and
/// this mapping is not the program's.
pub fn drop_pages(fd: RawFd, offset: u64, len: u64) {
    if is_on() && inodes::are_any() && !record().is_inside() {
        section::run(|_| {
            if let Some(known) = identity::identify(fd) {
                inodes::lock().drop_pages(known.id, offset, len);
            }
        });
    }
}

/// `call` cuts the file at `path`, or makes it longer, to `size` bytes.
pub fn truncate<R>(
    dir: RawFd,
    path: *const libc::c_char,
    size: i64,
    call: impl FnOnce() -> R,
) -> R {
    let record = record();
    if !is_on() || !inodes::are_any() || record.is_inside() {
        return call();
    }
    let find = || identity::identify_path(dir, path, true).and_then(|known| inodes::find(known.id));
    match section::run(|_| find()) {
        Some(entry) => change_file(record, &entry.inode, u64::try_from(size).ok(), call),
        None => call(),
    }
}
