//! What the kernel has cached of a file, mapped for hits to copy from.
//!
//! A page that is hit has cost a frame first: a copy, and memory that was not the process's before, which may
//! take ten times as long as the copy (a virtual machine's that gives free memory back to its host: 12 us a
//! page measured, against 1.1 us for the kernel's read). While nobody changes the file none of that is needed: a
//! read that finds no page in the table copies from the mapping, with no lock and no system call. Such a
//! file takes no frames.
//!
//! ```text
//! NONE -> map -> MAPPED -> end -> ENDED
//! ```
//!
//! - **MP1** While it is MAPPED nobody changes the file's bytes or size below this engine: who has it mapped vouches for
//!   it (`millpond run` has a lease). Who has an exclusive guard ends it for good before he does anything
//!   (`CachedFile::lock`), and it begins under one for the whole file: so while it is MAPPED nobody has
//!   changed anything here either, since it began.
//! - **MP2** A reader loads the address, then the size, copies, and after a fence loads the address again. If that is
//!   unchanged, nothing that was copied was written after the end: who ended it has a fence, too, before he writes. So
//!   the read is one of the moment when the address was loaded again, all of it. Who begins to read after
//!   a write has returned finds ENDED.
//! - **MP3** The mapping stays until the file object goes, which readers have a handle of.
//! - **MP4** Where the kernel can't read a page, or somebody has cut the file all the same, the copy faults, and the
//!   read takes the slow path, which says why. So the process has a handler that consults `fault`.
//! - **MP5** A process that locks what it will map (`mlockall(MCL_FUTURE)`) would have the whole file read and kept in memory:
//!   the mapping is made without rights, which nothing is read for, and unlocked before it has them.
//! - **MP6** A child of fork has no mapping, and finds a size of zero before it looks (see `frame`, "Fork").

use std::io;
use std::os::fd::BorrowedFd;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags};

use crate::sync::{AtomicU64, AtomicUsize, fence};

const NONE: usize = 0;
const ENDED: usize = 1;

/// See the module header.
pub(crate) struct Mapped {
    /// Where it is mapped, or [`NONE`] or [`ENDED`].
    at: AtomicUsize,
    /// So many bytes.
    len: AtomicU64,
    mapping: OnceLock<Mapping>,
}

/// What a reader has found.
pub(crate) struct Look<'l> {
    at: usize,
    len: u64,
    mapped: &'l Mapped,
}

struct Mapping {
    at: usize,
    len: usize,
}

impl Default for Mapped {
    fn default() -> Mapped {
        Mapped { at: AtomicUsize::new(NONE), len: AtomicU64::new(0), mapping: OnceLock::new() }
    }
}

impl Mapped {
    /// Maps `len` bytes of the file at `fd`. Whether it is MAPPED now: not if it was before. Caller: has an exclusive
    /// guard for the whole file, and MP1.
    pub(crate) fn map(&self, fd: BorrowedFd<'_>, len: u64) -> bool {
        if self.at.load(Relaxed) != NONE || len == 0 {
            return false;
        }
        let Ok(mapping) = Mapping::of(fd, len) else { return false };
        let mapping = self.mapping.get_or_init(|| mapping);
        self.begin(mapping.at, len);
        true
    }

    fn begin(&self, at: usize, len: u64) {
        self.len.store(len, Relaxed);
        // Release: pairs with the Acquire in `look`, for the length, and for all that was written before.
        self.at.store(at, Release);
    }

    /// MP1. Before anything is changed.
    #[inline]
    pub(crate) fn end(&self) {
        if self.at.load(Relaxed) > ENDED {
            self.end_now();
        }
    }

    #[cold]
    fn end_now(&self) {
        self.at.store(ENDED, Relaxed);
        // Release: pairs with the fence in `is_good`. A reader that has copied a byte of what is written from here
        // on sees the store above.
        fence(Release);
        self.mapping.get().inspect(|mapping| mapping.forget());
    }

    #[inline]
    pub(crate) fn look(&self) -> Option<Look<'_>> {
        // Acquire: see `begin`.
        let at = self.at.load(Acquire);
        (at > ENDED).then(|| Look { at, len: self.len.load(Relaxed), mapped: self })
    }
}

impl Look<'_> {
    /// Where byte `offset` is, if all up to `end` are there. A copy from it may fault (MP4).
    pub(crate) fn bytes(&self, offset: u64, end: u64) -> Option<*const u8> {
        (end <= self.len).then(|| ptr::with_exposed_provenance(self.at + offset as usize))
    }

    /// Whether what was copied counts (MP2).
    pub(crate) fn is_good(&self) -> bool {
        // Acquire: the copy comes before the load below. If it has seen a byte of a later write, the load sees the
        // end.
        fence(Acquire);
        self.mapped.at.load(Relaxed) == self.at
    }
}

impl Mapping {
    /// Private and readable only: it shows what the kernel has cached, and is no reason for it to take the file
    /// for one that is mapped to be written.
    fn of(fd: BorrowedFd<'_>, len: u64) -> io::Result<Mapping> {
        let len = usize::try_from(len).map_err(io::Error::other)?;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let at = unsafe {
            rustix::mm::mmap(ptr::null_mut(), len, ProtFlags::empty(), MapFlags::PRIVATE, fd, 0)
        }?;
        let mapping = Mapping { at: at.expose_provenance(), len };
        // MP5.
        // SAFETY: our own mapping, which nobody has seen.
        unsafe {
            rustix::mm::munlock(at, len)?;
            rustix::mm::mprotect(at, len, MprotectFlags::READ)?;
        }
        // MP6; and a child would keep the description open, with its locks.
        // SAFETY: our own mapping; the advice does not change its contents here.
        unsafe { rustix::mm::madvise(at, len, Advice::LinuxDontFork) }?;
        Ok(mapping)
    }
}

impl Mapping {
    /// Nobody will copy from there again, but for who is about to find out.
    fn forget(&self) {
        let at = ptr::with_exposed_provenance_mut(self.at);
        // SAFETY: our own mapping, of a file and never written to: what is there is there again when it is read.
        let _ = unsafe { rustix::mm::madvise(at, self.len, Advice::LinuxDontNeed) };
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: made by `of`; MP3.
        let _ = unsafe { rustix::mm::munmap(ptr::with_exposed_provenance_mut(self.at), self.len) };
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicU8;
    use loom::sync::atomic::Ordering::Relaxed;
    use loom::thread;

    use super::*;

    const AT: usize = 4096;

    /// A reader of two bytes beside a write of both; `end` before it writes, `is_good` after it has read.
    fn read_beside_a_write(end: fn(&Mapped), is_good: fn(&Look<'_>) -> bool) {
        loom::model(move || {
            let shared = Arc::new((Mapped::default(), [AtomicU8::new(0), AtomicU8::new(0)]));
            shared.0.begin(AT, 2);
            let writer = thread::spawn({
                let shared = Arc::clone(&shared);
                move || {
                    let (mapped, bytes) = &*shared;
                    end(mapped);
                    bytes.iter().for_each(|byte| byte.store(1, Relaxed));
                }
            });
            let (mapped, bytes) = &*shared;
            if let Some(look) = mapped.look() {
                let seen = [bytes[0].load(Relaxed), bytes[1].load(Relaxed)];
                if is_good(&look) {
                    assert_eq!(seen, [0, 0], "torn, or not the last");
                }
            }
            writer.join().unwrap();
            assert!(mapped.look().is_none(), "it has ended for who comes after the write");
        });
    }

    /// Who finds it MAPPED finds how long it is.
    #[test]
    fn a_look_has_the_length() {
        loom::model(|| {
            let mapped = Arc::new(Mapped::default());
            let looker = thread::spawn({
                let mapped = Arc::clone(&mapped);
                move || assert!(mapped.look().is_none_or(|look| look.bytes(0, 2).is_some()))
            });
            mapped.begin(AT, 2);
            looker.join().unwrap();
        });
    }

    /// MP2.
    #[test]
    fn a_read_that_counts_saw_no_write() {
        read_beside_a_write(Mapped::end, |look| look.is_good());
    }

    #[test]
    #[should_panic(expected = "torn")]
    fn twin_without_the_writers_fence() {
        read_beside_a_write(|mapped| mapped.at.store(ENDED, Relaxed), |look| look.is_good());
    }

    #[test]
    #[should_panic(expected = "torn")]
    fn twin_without_the_readers_fence() {
        read_beside_a_write(Mapped::end, |look| look.mapped.at.load(Relaxed) == look.at);
    }
}
