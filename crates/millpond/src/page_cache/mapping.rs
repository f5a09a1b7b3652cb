//! A shared, read-only mapping of a file, in a range of addresses that never belongs to anything else.
//!
//! A reader may still copy from a mapping while another thread ends it. So the end of a mapping replaces it by
//! memory without rights, and the range is kept for the next file: a late copy faults, or reads a file's bytes
//! that its check refuses. Addresses are never given back to the program.
//!
//! ```text
//! word:  0 | generation      no mapping
//!        address | generation (12 bits)
//! begin: mmap in a kept range, then the word           end: the word, generation + 1, then no rights
//! ```
//!
//! - **PM1** A view is current if the word is unchanged: the generation rises with each end. A view is made of a word
//!   and the length that belongs to it: the word is loaded before the length and again after it.
//! - **PM2** The mapping is made without rights, unlocked, and made readable then: a process that locks its new mappings
//!   (`mlockall(MCL_FUTURE)`) would read the whole file into memory.
//! - **PM3** A child of fork does not inherit the mapping: it would keep the description open, with its locks.
//! - **PM4** With a limit of the address space (`RLIMIT_AS`) nothing is mapped: the program has planned without it.

use std::os::fd::BorrowedFd;
use std::ptr;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags};
#[cfg(not(loom))]
use rustix::process::{Resource, getrlimit};

use super::versions::PAGE_BYTES;
#[cfg(not(loom))]
use crate::sync::Mutex;
use crate::sync::{AtomicU64, AtomicUsize, fence};

const GENERATIONS: usize = PAGE_BYTES as usize;
/// The smallest range, and the unit of ranges.
const RANGE_BYTES_MIN: usize = 2 << 20;
/// The part of a file that is mapped at most: the kernel reads the rest.
const RANGE_BYTES_MAX: usize = 1 << 40;
/// All ranges together, of an address space of 128 TiB.
const RANGES_BYTES_MAX: usize = 16 << 40;
/// The most mappings at a time: the kernel allows a process 65,530 by default.
const MAPPINGS_MAX: usize = 4096;

/// See the module header.
pub(super) struct SharedMapping {
    word: AtomicUsize,
    /// Bytes from the start of the file that may be read there: whole pages below its end.
    readable: AtomicU64,
    /// The length of the range.
    len: AtomicUsize,
}

/// The mapping as a reader found it.
pub(super) struct MappedView {
    word: usize,
    readable: u64,
}

impl MappedView {
    /// The address of byte `offset` of the file.
    #[inline]
    pub(super) fn at(&self, offset: u64) -> *const u8 {
        ptr::with_exposed_provenance((self.word & !(GENERATIONS - 1)) + offset as usize)
    }

    pub(super) fn readable(&self) -> u64 {
        self.readable
    }
}

impl SharedMapping {
    pub(super) fn none() -> SharedMapping {
        SharedMapping {
            word: AtomicUsize::new(0),
            readable: AtomicU64::new(0),
            len: AtomicUsize::new(0),
        }
    }

    pub(super) fn is_there(&self) -> bool {
        self.word.load(Relaxed) >= GENERATIONS
    }

    pub(super) fn readable(&self) -> u64 {
        self.readable.load(Relaxed)
    }

    /// The mapping, if it has the bytes up to `end`.
    #[inline]
    pub(super) fn view(&self, end: u64) -> Option<MappedView> {
        // Acquire: pairs with the Release in `publish`, for the length and for the mapping itself.
        let word = self.word.load(Acquire);
        // Acquire: pairs with the fence in `withdraw`. The length of a later mapping comes with the word that ended
        // this one, so a copy stays within the range of its word.
        let readable = self.readable.load(Acquire);
        let is_of_word = self.word.load(Relaxed) == word;
        (word >= GENERATIONS && end <= readable && is_of_word)
            .then_some(MappedView { word, readable })
    }

    /// PM1. After the copy.
    #[inline]
    pub(super) fn is_current(&self, view: &MappedView) -> bool {
        // Acquire: pairs with the fence in `withdraw`. A copy that has seen a byte of a later mapping in the same range
        // sees the word that came before it.
        fence(Acquire);
        self.word.load(Relaxed) == view.word
    }

    /// Maps `size` bytes and room for more. The caller holds the lock under which mappings change.
    pub(super) fn begin(&self, fd: BorrowedFd<'_>, size: u64) -> bool {
        if self.is_there() {
            self.raise_readable(size);
            return true;
        }
        let wanted = size.saturating_mul(2).min(RANGE_BYTES_MAX as u64) as usize;
        let Some(range) = Range::take(wanted.max(RANGE_BYTES_MIN).next_power_of_two()) else {
            return false;
        };
        if !range.map(fd) {
            range.keep();
            return false;
        }
        self.len.store(range.len, Relaxed);
        self.readable.store(readable_of(size, range.len), Relaxed);
        self.publish(range.at);
        true
    }

    fn publish(&self, at: usize) {
        let generation = self.word.load(Relaxed) & (GENERATIONS - 1);
        // Release: pairs with the Acquire in `view`.
        self.word.store(at | generation, Release);
    }

    /// Ends the mapping. The caller holds the lock under which mappings change.
    pub(super) fn end(&self) {
        if let Some(range) = self.withdraw() {
            range.unmap();
            range.keep();
        }
    }

    /// The mapping is no reader's from here on: its range, which the caller unmaps.
    fn withdraw(&self) -> Option<Range> {
        let range = self.forget()?;
        // Release: pairs with the fence in `is_current`.
        fence(Release);
        Some(range)
    }

    /// Ends the use of the mapping, which the process may not have: it is its parent's.
    pub(super) fn forget(&self) -> Option<Range> {
        let word = self.word.load(Relaxed);
        if word < GENERATIONS {
            return None;
        }
        self.word.store((word + 1) & (GENERATIONS - 1), Relaxed);
        self.readable.store(0, Relaxed);
        Some(Range { at: word & !(GENERATIONS - 1), len: self.len.load(Relaxed) })
    }

    /// Takes the pages of the bytes from `offset` to `end` out of this process's page table; a later copy brings them
    /// back. The caller holds the lock under which mappings change.
    pub(super) fn drop_pages(&self, offset: u64, end: u64) {
        let word = self.word.load(Relaxed);
        let end = end.min(self.len.load(Relaxed) as u64);
        let start = offset & !(PAGE_BYTES - 1);
        if word < GENERATIONS || start >= end {
            return;
        }
        let at = (word & !(GENERATIONS - 1)) + start as usize;
        let at = ptr::with_exposed_provenance_mut(at);
        // SAFETY: addresses of the mapping, which is shared and read-only: its pages are the file's.
        let _ = unsafe { rustix::mm::madvise(at, (end - start) as usize, Advice::LinuxDontNeed) };
    }

    #[inline]
    pub(super) fn raise_readable(&self, size: u64) {
        if size > self.readable.load(Relaxed) + PAGE_BYTES && self.is_there() {
            let readable = readable_of(size, self.len.load(Relaxed));
            self.readable.fetch_max(readable, Relaxed);
        }
    }

    pub(super) fn lower_readable(&self, size: u64) {
        self.readable.fetch_min(size & !(PAGE_BYTES - 1), Relaxed);
    }
}

/// Whole pages below the end.
fn readable_of(size: u64, len: usize) -> u64 {
    size.min(len as u64) & !(PAGE_BYTES - 1)
}

/// Addresses that are a mapping's, or kept for one.
#[derive(Clone, Copy)]
pub(super) struct Range {
    at: usize,
    len: usize,
}

/// Ranges that are free, and how much there is in all.
struct Ranges {
    free: Vec<Range>,
    bytes: usize,
    mapped: usize,
    /// The process that has them; a child of fork begins with none.
    process: u64,
}

#[cfg(not(loom))]
static RANGES: Mutex<Ranges> =
    Mutex::new(Ranges { free: Vec::new(), bytes: 0, mapped: 0, process: 0 });

impl Range {
    #[cfg(loom)]
    fn take(_: usize) -> Option<Range> {
        None
    }

    #[cfg(loom)]
    fn keep(self) {}

    /// A range of at least `len` bytes.
    #[cfg(not(loom))]
    fn take(len: usize) -> Option<Range> {
        if getrlimit(Resource::As).current.is_some() {
            // PM4.
            return None;
        }
        let mut ranges = Ranges::lock();
        if ranges.mapped >= MAPPINGS_MAX {
            return None;
        }
        let fits = |range: &Range| (len..=len.saturating_mul(4)).contains(&range.len);
        let range = match ranges.free.iter().position(fits) {
            Some(found) => ranges.free.swap_remove(found),
            None if ranges.bytes.checked_add(len)? > RANGES_BYTES_MAX => return None,
            None => {
                let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
                // SAFETY: a new mapping at an address of the kernel's choice.
                let at = unsafe {
                    rustix::mm::mmap_anonymous(ptr::null_mut(), len, ProtFlags::empty(), flags)
                };
                let at = at.ok()?;
                // PM3. SAFETY: the mapping above; the advice changes nothing in this process.
                unsafe { rustix::mm::madvise(at, len, Advice::LinuxDontFork) }.ok()?;
                ranges.bytes += len;
                Range { at: at.expose_provenance(), len }
            }
        };
        ranges.mapped += 1;
        Some(range)
    }

    #[cfg(not(loom))]
    fn keep(self) {
        let mut ranges = Ranges::lock();
        ranges.mapped = ranges.mapped.saturating_sub(1);
        ranges.free.push(self);
    }

    /// Maps the file there.
    fn map(self, fd: BorrowedFd<'_>) -> bool {
        let at = ptr::with_exposed_provenance_mut(self.at);
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: the range is this module's, and no mapping of a file is in it.
        unsafe {
            let mapped = rustix::mm::mmap(at, self.len, ProtFlags::empty(), flags, fd, 0).is_ok()
                // PM2, PM3.
                && rustix::mm::munlock(at, self.len).is_ok()
                && rustix::mm::madvise(at, self.len, Advice::LinuxDontFork).is_ok()
                && rustix::mm::mprotect(at, self.len, MprotectFlags::READ).is_ok();
            if !mapped {
                self.unmap();
            }
            mapped
        }
    }

    /// Puts memory without rights in the place of the file, of which nothing is kept open then.
    fn unmap(self) {
        let at = ptr::with_exposed_provenance_mut(self.at);
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        // SAFETY: the range is this module's. Copies from it may be under way: they fault from here on.
        unsafe {
            let free = rustix::mm::mmap_anonymous(at, self.len, ProtFlags::empty(), flags);
            match free {
                Ok(_) => {
                    let _ = rustix::mm::madvise(at, self.len, Advice::LinuxDontFork);
                }
                // The kernel has no memory for the change. Without rights no copy succeeds, at least.
                Err(_) => {
                    let _ = rustix::mm::mprotect(at, self.len, MprotectFlags::empty());
                }
            }
        }
    }
}

#[cfg(not(loom))]
impl Ranges {
    fn lock() -> crate::sync::MutexGuard<'static, Ranges> {
        let mut ranges = RANGES.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let process = crate::process_local::number();
        if ranges.process != process {
            // The parent's ranges are holes here, in which mappings of the program may lie.
            *ranges = Ranges { free: Vec::new(), bytes: 0, mapped: 0, process };
        }
        ranges
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicU8;
    use loom::thread;

    use super::*;

    const AT: usize = GENERATIONS;

    fn mapped() -> SharedMapping {
        let mapping = SharedMapping::none();
        mapping.len.store(GENERATIONS, Relaxed);
        mapping.readable.store(PAGE_BYTES, Relaxed);
        mapping.publish(AT);
        mapping
    }

    /// A reader beside the end of its mapping, whose range becomes another file's, and then its own again.
    fn read_beside_an_end(
        withdraw: fn(&SharedMapping) -> Option<Range>,
        is_current: fn(&SharedMapping, &MappedView) -> bool,
    ) {
        loom::model(move || {
            let shared = Arc::new((mapped(), AtomicU8::new(1)));
            let closer = thread::spawn({
                let shared = Arc::clone(&shared);
                move || {
                    let (mapping, byte) = &*shared;
                    assert!(withdraw(mapping).is_some());
                    byte.store(2, Relaxed);
                    mapping.readable.store(PAGE_BYTES, Relaxed);
                    mapping.publish(AT);
                }
            });
            let (mapping, byte) = &*shared;
            if let Some(view) = mapping.view(1) {
                let seen = byte.load(Relaxed);
                let was_first = view.word & (GENERATIONS - 1) == 0;
                if is_current(mapping, &view) && was_first {
                    assert_eq!(seen, 1, "another file's byte");
                }
            }
            closer.join().unwrap();
        });
    }

    /// A reader beside the end of its mapping, in whose place a longer one begins.
    fn view_beside_a_longer_mapping(view: fn(&SharedMapping, u64) -> Option<MappedView>) {
        loom::model(move || {
            let mapping = Arc::new(mapped());
            let closer = thread::spawn({
                let mapping = Arc::clone(&mapping);
                move || {
                    assert!(mapping.withdraw().is_some());
                    mapping.readable.store(2 * PAGE_BYTES, Relaxed);
                    mapping.publish(AT);
                }
            });
            if let Some(view) = view(&mapping, 2 * PAGE_BYTES) {
                assert_eq!(view.word & (GENERATIONS - 1), 1, "beyond its range");
            }
            closer.join().unwrap();
        });
    }

    #[test]
    fn a_view_has_the_length_of_its_mapping() {
        view_beside_a_longer_mapping(SharedMapping::view);
    }

    #[test]
    #[should_panic(expected = "beyond its range")]
    fn twin_that_loads_the_word_once() {
        view_beside_a_longer_mapping(|mapping, end| {
            let word = mapping.word.load(Acquire);
            let readable = mapping.readable.load(Acquire);
            (word >= GENERATIONS && end <= readable).then_some(MappedView { word, readable })
        });
    }

    #[test]
    #[should_panic(expected = "beyond its range")]
    fn twin_whose_length_is_not_ordered() {
        view_beside_a_longer_mapping(|mapping, end| {
            let word = mapping.word.load(Acquire);
            let readable = mapping.readable.load(Relaxed);
            let is_of_word = mapping.word.load(Relaxed) == word;
            (word >= GENERATIONS && end <= readable && is_of_word)
                .then_some(MappedView { word, readable })
        });
    }

    #[test]
    fn a_read_that_counts_is_of_its_file() {
        read_beside_an_end(SharedMapping::withdraw, SharedMapping::is_current);
    }

    #[test]
    #[should_panic(expected = "another file's byte")]
    fn twin_without_the_closers_fence() {
        read_beside_an_end(|mapping| mapping.forget(), SharedMapping::is_current);
    }

    #[test]
    #[should_panic(expected = "another file's byte")]
    fn twin_without_the_readers_fence() {
        read_beside_an_end(SharedMapping::withdraw, |mapping, view| {
            mapping.word.load(Relaxed) == view.word
        });
    }

    #[test]
    #[should_panic(expected = "another file's byte")]
    fn twin_without_generations() {
        let withdraw = |mapping: &SharedMapping| {
            let range = mapping.withdraw();
            mapping.word.store(0, Relaxed);
            range
        };
        read_beside_an_end(withdraw, SharedMapping::is_current);
    }
}
