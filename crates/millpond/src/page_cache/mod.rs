//! Reads of a file from the kernel's page cache, through a shared mapping, with versions for pages that change.
//!
//! The page cache is the frame store. A read copies from the mapping: no system call, no lock, no second copy of
//! the data. A write is the caller's own `pwrite` on its own descriptor, between two counter changes. The kernel
//! always has every byte, so a write by another process, `mmap` or `copy_file_range` is visible at once; the
//! counters only make a read atomic against the writes that pass through this module.
//!
//! ```text
//! read:   counters quiet? -> copy from the mapping -> counters and mapping unchanged? -> size still covers it?
//!         any "no" -> retry, then hold new writers off, then the kernel's `pread` alone
//! write:  begun += 1 -> pwrite -> ended += 1
//! ```
//!
//! Files: `versions` has the counters and the order of accesses, `mapping` the mapping and its
//! address range, `residency` the question whether the kernel has the pages, `file_system` which files are mapped.
//!
//! Protocol:
//!
//! - **Atomicity.** Each page has two counters, writes begun and writes ended (`versions`). Writers do not
//!   exclude each other: the kernel holds the inode's lock for a whole `write` on every file system that is
//!   mapped here. No thread holds a lock across a `pwrite`, so a writer that a signal handler interrupts, that is
//!   stopped, or that leaves by `longjmp` costs other threads time only, never a deadlock.
//! - **Starvation.** A reader that fails a few times announces itself (`Inode::waiting`). A writer that sees the
//!   announcement waits for the reader, at most `WRITER_PATIENCE`; the reader waits for the writes in flight, at
//!   most `READER_PATIENCE`, and then reads as the kernel does.
//! - **Size.** The mapping is used below `readable` alone: whole pages below a size that was seen once. A file that
//!   another process cuts has zeros from the new end to the end of that page, and no pages beyond it. So a copy
//!   that ends in a byte other than zero lies below the end. So does a copy with such a byte behind it on the same
//!   page. Otherwise `fstat` has the size. The last byte is loaded again after the copy: it was there throughout.
//!   All of this precedes the second look at the counters. Otherwise a write that extends a file which another
//!   process has cut could end before `fstat`, and the zeros that were copied before it would count as its bytes.
//! - **The tail.** A read that reaches past `readable` is the kernel's `pread` between two looks at the counters.
//!   An append (`O_APPEND`) has no offset before it is done: it counts in the tail's counters. Where this process
//!   has cut the file, an append counts in the counters of the whole file.
//! - **Truncation, allocation, writes of more than `versions::PAGES_MAX` pages** count in the counters of the
//!   whole file, which each read checks.
//! - **Faults.** A copy that faults (a device error, a cut, a mapping that ended) resumes in the copy routine and
//!   reports failure; the caller then asks the kernel. So the process needs a handler that consults
//!   [`crate::fault::resume_address`].
//! - **Fork.** The counters lie in memory that the kernel zeroes in a child, and the mappings are not inherited. The
//!   child's first use of an inode finds another process number and begins without a mapping.
//! - **Death inside a write** ends the process, its counters and its mapping. Other processes have their own.

pub(crate) mod file_system;
mod mapping;
mod residency;
mod versions;

use std::os::fd::BorrowedFd;
use std::time::Duration;

pub(crate) use file_system::maps_what_it_reads;
use mapping::{MappedView, SharedMapping};
pub use versions::PAGE_BYTES;
use versions::{CounterRange, Span};

use crate::copy::{Source, copy_from};
use crate::process_local;
use crate::sync::{AtomicBool, AtomicU32, AtomicU64, futex};
use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};

/// For how long a read waits for writes in flight before it reads as the kernel does. Chosen.
const READER_PATIENCE: Duration = Duration::from_secs(1);
/// For how long a write waits for a reader that announced itself. Chosen.
const WRITER_PATIENCE: Duration = Duration::from_millis(2);
/// After so long a read looks whether a write that it waits for was abandoned. Chosen.
const ABANDONED_AFTER: Duration = Duration::from_millis(4);
/// How often a read retries before it announces itself.
const TRIES: u32 = 4;
/// Longer reads are the kernel's: at this length its copy costs as much as the mapping's faults and copy.
const COPY_BYTES_MAX: usize = 256 << 10;
/// The bytes before the end of a read that are loaded twice.
const TAIL_BYTES: usize = 32;
/// The bytes behind the end of a read that are searched for one other than zero, before `fstat`. Chosen.
const BEHIND_BYTES: usize = 64;
/// A copy of that many bytes comes from memory rather than from a cache of the processor.
const FAR_BYTES: usize = 4096;

/// A regular file in this process: its counters, and its mapping if it has one.
///
/// One object for each device and inode number, however many descriptors the process has of it.
pub struct Inode {
    mapping: SharedMapping,
    /// Where the file's counters begin in the table.
    salt: AtomicU64,
    /// A write of this process has begun: from then on reads look at the counters.
    is_written: AtomicBool,
    /// This process has cut the file: `readable` may lie beyond its end.
    is_cut: AtomicBool,
    /// Until when new writers make way for a reader, in nanoseconds of the monotonic clock; 0: there is none. A time
    /// and not a count: a reader that a jump has taken away holds nothing for long.
    waiting: AtomicU64,
    /// Rises with each event that a waiting reader or writer waits for: a futex.
    events: AtomicU32,
    /// The process that made the mapping; a child of fork has another number.
    process: AtomicU64,
}

/// The bytes that a write changes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WriteExtent {
    /// `len` bytes from this offset on.
    Range(u64, u64),
    /// Bytes from the end of the file on.
    Append,
    /// Any byte, or the size.
    Whole,
}

/// A write in progress: dropping it ends the write for readers.
#[must_use]
pub struct Writing<'i> {
    inode: &'i Inode,
    marks: [Option<CounterRange>; 2],
    process: u64,
}

impl Inode {
    /// An inode without a mapping. `id`: device and inode number, or another unique pair.
    #[must_use]
    pub fn new(id: (u64, u64)) -> Inode {
        versions::are_wiped_in_children();
        Inode {
            mapping: SharedMapping::none(),
            salt: AtomicU64::new(salt_of(id)),
            is_written: AtomicBool::new(false),
            is_cut: AtomicBool::new(false),
            waiting: AtomicU64::new(0),
            events: AtomicU32::new(0),
            process: AtomicU64::new(process_local::number()),
        }
    }

    /// Gives the object to another file. The caller holds the lock under which mappings change; no descriptor
    /// of the former file is left. A reader that still has the object finds that its mapping has ended.
    pub fn reuse(&self, id: (u64, u64)) {
        self.unmap();
        self.salt.store(salt_of(id), Relaxed);
        self.is_written.store(false, Relaxed);
        self.is_cut.store(false, Relaxed);
        self.process.store(process_local::number(), Relaxed);
    }

    /// Maps the file behind `fd`, which is `size` bytes long, for reads. Whether it is mapped now. The caller holds
    /// the lock under which mappings change.
    ///
    /// The mapping holds the open file description of `fd` until [`Inode::unmap`].
    pub fn map(&self, fd: BorrowedFd<'_>, size: u64) -> bool {
        if !self.is_of_this_process() {
            // Fork: the addresses are not mapped here.
            self.mapping.forget();
            self.process.store(process_local::number(), Relaxed);
        }
        versions::are_wiped_in_children() && self.mapping.begin(fd, size)
    }

    /// Ends the mapping, before the last descriptor of its description is closed. The caller holds the lock under
    /// which mappings change.
    pub fn unmap(&self) {
        if self.is_of_this_process() {
            self.mapping.end();
        } else {
            self.mapping.forget();
        }
    }

    /// Before the kernel is asked to drop the pages of `len` bytes at `offset` from its cache, or, if `len` is 0, all from
    /// there on: it keeps pages that a process maps. The caller holds the lock under which mappings change.
    pub fn drop_pages(&self, offset: u64, len: u64) {
        if self.is_mapped() {
            let end = if len == 0 { u64::MAX } else { offset.saturating_add(len) };
            let end = end.min(self.readable());
            self.mapping.drop_pages(offset, end);
            residency::windows().forget(self.salt.load(Relaxed), offset, end);
        }
    }

    /// Whether reads may be served from a mapping.
    #[must_use]
    pub fn is_mapped(&self) -> bool {
        self.mapping.is_there() && self.is_of_this_process()
    }

    /// Whether a write of this process has begun since the inode is known.
    #[must_use]
    pub fn is_written(&self) -> bool {
        // Acquire: pairs with the fence in `CounterTable::begin`, as the loads of counters do.
        self.is_written.load(Acquire)
    }

    /// Where the use of the mapping ends: whole pages below a size that was seen; 0 without a mapping.
    pub(crate) fn readable(&self) -> u64 {
        self.mapping.readable()
    }

    fn is_of_this_process(&self) -> bool {
        self.process.load(Relaxed) == process_local::number()
    }

    /// Reads `len` bytes at `offset` to `dst` from the mapping, all or none; `false`: the kernel is to be asked.
    /// Takes no lock. `fd` is a descriptor of the file, and is used for residency and size alone.
    ///
    /// # Safety
    ///
    /// `dst` is the caller's for `len` bytes, or may fault where a handler consults
    /// [`crate::fault::resume_address`]. No reference to those bytes exists.
    #[inline]
    pub unsafe fn read(&self, fd: BorrowedFd<'_>, dst: *mut u8, len: usize, offset: u64) -> bool {
        let source = if len >= FAR_BYTES { Source::Far } else { Source::Near };
        // SAFETY: the caller's promise for `dst`. The source is a mapping that may end at any moment; its addresses
        // stay reserved for mappings of this module, so the copy reads one of those or faults.
        self.read_with(fd, len, offset, |bytes| unsafe { copy_from(dst, bytes, len, source) } == 0)
    }

    /// [`Inode::read`] by a copy of the caller's. `copy` gets the address of the first byte, of `len` bytes that may
    /// change or fault under the copy, and returns whether it has copied all.
    #[inline(always)]
    pub(crate) fn read_with(
        &self,
        fd: BorrowedFd<'_>,
        len: usize,
        offset: u64,
        copy: impl FnOnce(*const u8) -> bool,
    ) -> bool {
        let Some(end) = offset.checked_add(len as u64) else { return false };
        let Some(view) = self.mapping.view(end) else { return false };
        if len == 0 || len > COPY_BYTES_MAX || !self.is_of_this_process() {
            return false;
        }
        if !residency::windows().is_resident(
            self.salt.load(Relaxed),
            fd,
            offset,
            end,
            view.readable(),
        ) {
            return false;
        }
        let counters = versions::table();
        let is_written = self.is_written();
        let seen = if is_written {
            match counters.observe(&self.span(offset, end)) {
                Some(seen) => seen,
                None => return false,
            }
        } else {
            0
        };
        if !copy(view.at(offset)) {
            return false;
        }
        // Loaded again: the byte was there while all others were copied. With the bytes before it, where there are any:
        // the copy of a whole register is the fast one.
        let mut tail = [0_u8; TAIL_BYTES];
        let tail_len = if len < TAIL_BYTES { 1 } else { TAIL_BYTES };
        let tail_at = view.at(end - tail_len as u64);
        // SAFETY: the mapping's bytes, which may fault, as in `read`, to bytes of our own.
        if unsafe { copy_from(tail.as_mut_ptr(), tail_at, tail_len, Source::Near) } != 0 {
            return false;
        }
        if tail[tail_len - 1] == 0 && !self.reaches(fd, &view, end) {
            return false;
        }
        let is_unchanged = if is_written {
            counters.is_unchanged(&self.span(offset, end), seen)
        } else {
            counters.is_unchanged_flag(&self.is_written)
        };
        is_unchanged && self.mapping.is_current(&view)
    }

    /// Whether the file has the bytes up to `end`, the last of which is zero.
    fn reaches(&self, fd: BorrowedFd<'_>, view: &MappedView, end: u64) -> bool {
        let left_of_page = end.next_multiple_of(PAGE_BYTES) - end;
        let len = (left_of_page as usize).min(BEHIND_BYTES);
        let mut behind = [0_u8; BEHIND_BYTES];
        // SAFETY: bytes of a page below `readable`, which may fault, as in `read`, to bytes of our own.
        let copied = unsafe { copy_from(behind.as_mut_ptr(), view.at(end), len, Source::Near) };
        (copied == 0 && behind[..len].iter().any(|&byte| byte != 0)) || size_of_file(fd) >= end
    }

    /// The counters of a read of the bytes from `offset` to `end`.
    fn span(&self, offset: u64, end: u64) -> Span {
        let past_tail = end > self.mapping.readable();
        Span::new(self.salt.load(Relaxed), offset, end, past_tail)
    }

    /// Makes `read`, a call of the kernel's for the bytes from `offset` to `end`, atomic against the writes of
    /// this process: repeats it while writes overlap it. Blocks for `READER_PATIENCE` at most, not counting the
    /// calls. `may_wait`: the calling thread has no write in progress, for which it would wait in vain.
    /// `is_any_writing`: whether some thread has one, noted before [`Inode::begin_write`] and until after the drop of
    /// its guard (versions.PV6); its loads are Acquire.
    pub fn read_by<R>(
        &self,
        offset: u64,
        end: u64,
        may_wait: bool,
        is_any_writing: impl Fn() -> bool,
        mut read: impl FnMut() -> R,
    ) -> R {
        let counters = versions::table();
        for _ in 0..TRIES {
            let is_written = self.is_written();
            let span = self.span(offset, end);
            if !is_written {
                let result = read();
                if counters.is_unchanged_flag(&self.is_written) || !may_wait {
                    return result;
                }
            } else if let Some(seen) = counters.observe(&span) {
                let result = read();
                if counters.is_unchanged(&span, seen) || !may_wait {
                    return result;
                }
            } else if !may_wait {
                return read();
            } else {
                std::thread::yield_now();
            }
        }
        self.read_with_writers_held(offset, end, &is_any_writing, read)
    }

    #[cold]
    fn read_with_writers_held<R>(
        &self,
        offset: u64,
        end: u64,
        is_any_writing: &dyn Fn() -> bool,
        mut read: impl FnMut() -> R,
    ) -> R {
        let counters = versions::table();
        let abandoned_after = now_ns() + ABANDONED_AFTER.as_nanos() as u64;
        let patience_end = now_ns() + READER_PATIENCE.as_nanos() as u64;
        let result = loop {
            // SeqCst: versions.PV5. Stored again in each turn, as another reader may have ended its own.
            self.waiting.store(now_ns() + WRITER_PATIENCE.as_nanos() as u64, SeqCst);
            let event = self.events.load(SeqCst);
            let span = self.span(offset, end);
            let seen = counters.observe(&span);
            if seen.is_none() && now_ns() < patience_end {
                if now_ns() >= abandoned_after {
                    counters.end_abandoned(&span, is_any_writing);
                }
                wait_for(&self.events, event, WRITER_PATIENCE);
                continue;
            }
            let result = read();
            let is_whole = seen.is_some_and(|seen| counters.is_unchanged(&span, seen));
            if is_whole || now_ns() >= patience_end {
                break result;
            }
        };
        self.waiting.store(0, SeqCst);
        announce(&self.events);
        result
    }

    /// Begins a write of this process. The caller makes its system call, and then drops the guard.
    /// Waits for `WRITER_PATIENCE` at most, for a reader that could not finish beside writes; `may_wait` as for
    /// [`Inode::read_by`]. Allocates nothing, and may be called in a signal handler.
    #[inline]
    pub fn begin_write(&self, change: WriteExtent, may_wait: bool) -> Writing<'_> {
        if self.waiting.load(Relaxed) != 0 && may_wait {
            self.await_readers();
        }
        let marks = self.marks_of(change);
        versions::table().begin(&self.is_written, &marks);
        Writing { inode: self, marks, process: process_local::number() }
    }

    /// Begins a change of the bytes from `start` to `end` by a caller that excludes other writers and slow reads, and
    /// ends it by [`Inode::end_change`] with the same bytes.
    pub(crate) fn begin_change(&self, start: u64, end: u64) {
        versions::table().begin(&self.is_written, &self.marks_of(change_of(start, end)));
    }

    /// Ends a change.
    pub(crate) fn end_change(&self, start: u64, end: u64) {
        versions::table().end(&self.marks_of(change_of(start, end)));
    }

    fn marks_of(&self, change: WriteExtent) -> [Option<CounterRange>; 2] {
        let salt = self.salt.load(Relaxed);
        match change {
            WriteExtent::Range(offset, len) => match offset.checked_add(len) {
                Some(end) if len.div_ceil(PAGE_BYTES) < versions::PAGES_MAX => {
                    [Some(CounterRange::range(salt, offset, end)), None]
                }
                _ => [Some(CounterRange::whole(salt)), Some(CounterRange::tail(salt))],
            },
            WriteExtent::Append if !self.is_cut.load(Relaxed) => {
                [Some(CounterRange::tail(salt)), None]
            }
            WriteExtent::Append | WriteExtent::Whole => {
                [Some(CounterRange::whole(salt)), Some(CounterRange::tail(salt))]
            }
        }
    }

    /// The file will be cut by this process, to `size` bytes: reads beyond it ask the kernel. Between
    /// [`Inode::begin_write`] and the call that cuts.
    pub fn note_cut(&self, size: u64) {
        self.is_cut.store(true, Relaxed);
        self.mapping.lower_readable(size);
    }

    /// The file was seen to be `size` bytes long at least: by `fstat`, or by a read or write that reached there.
    #[inline]
    pub fn note_size(&self, size: u64) {
        self.mapping.raise_readable(size);
    }

    #[cold]
    fn await_readers(&self) {
        loop {
            let event = self.events.load(SeqCst);
            let end = self.waiting.load(SeqCst);
            let now = now_ns();
            if end == 0 {
                return;
            }
            if now >= end {
                let _ = self.waiting.compare_exchange(end, 0, SeqCst, Relaxed);
                return;
            }
            wait_for(&self.events, event, Duration::from_nanos(end - now));
        }
    }
}

impl Drop for Writing<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.process != process_local::number() {
            // A child of fork, whose counters know nothing of the write.
            return;
        }
        versions::table().end(&self.marks);
        if self.inode.waiting.load(SeqCst) != 0 {
            announce(&self.inode.events);
        }
    }
}

/// The monotonic clock, without a system call.
fn now_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is ours to write.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

fn change_of(start: u64, end: u64) -> WriteExtent {
    WriteExtent::Range(start, end - start)
}

fn salt_of((device, number): (u64, u64)) -> u64 {
    let mixed = (number ^ device.rotate_left(32)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    mixed ^ (mixed >> 29)
}

#[inline]
fn size_of_file(fd: BorrowedFd<'_>) -> u64 {
    rustix::fs::fstat(fd).map_or(0, |stat| stat.st_size as u64)
}

fn wait_for(word: &AtomicU32, value: u32, limit: Duration) {
    let limit = rustix::fs::Timespec {
        tv_sec: limit.as_secs() as i64,
        tv_nsec: i64::from(limit.subsec_nanos()),
    };
    // Woken, interrupted or late: the caller looks again in each case.
    let _ = futex::wait(word, futex::Flags::PRIVATE, value, Some(&limit));
}

fn announce(word: &AtomicU32) {
    word.fetch_add(1, SeqCst);
    let _ = futex::wake(word, futex::Flags::PRIVATE, i32::MAX as u32);
}
