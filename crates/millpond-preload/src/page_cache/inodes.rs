//! The files that descriptor numbers stand for, and their mappings.

use std::collections::BTreeMap;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicUsize};

use millpond::internals::page_cache::{Inode, PAGE_BYTES};

use crate::files::identity::FileId;
use crate::runtime::lock::{Lock, LockGuard};
use crate::runtime::{fault, section};

/// A file that at least one number stands for. Never freed: a reader may have it while its number is closed.
pub struct Entry {
    pub inode: Inode,
    // What follows changes under the lock of `INODES`.
    id: (AtomicUsize, AtomicUsize),
    /// How many numbers stand for it.
    numbers: AtomicU32,
    /// The number whose description the mapping holds (P2); -1: it is not mapped.
    owner: AtomicI32,
}

/// See the module header.
pub struct Inodes {
    entries: BTreeMap<FileId, &'static Entry>,
    free: Vec<&'static Entry>,
}

static INODES: Lock<Inodes> = Lock::new(Inodes::new());
/// Entries in use: zero means that no read depends on a size.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// In a section: the lock is held with signals blocked.
pub fn lock() -> LockGuard<'static, Inodes> {
    INODES.lock()
}

pub fn are_any() -> bool {
    COUNT.load(Relaxed) != 0
}

/// Before a fork: no other thread changes a mapping until [`end_fork`], or [`after_fork`] in the child.
pub fn before_fork() {
    INODES.acquire();
}

pub fn end_fork() {
    INODES.release();
}

/// In a child of fork, which has no mapping, and no number that is known.
pub fn after_fork() {
    // SAFETY: a child of fork has one thread.
    unsafe { INODES.reset(Inodes::new()) };
    COUNT.store(0, Relaxed);
}

pub fn unmap_all() {
    section::run(|_| {
        let inodes = lock();
        for entry in inodes.entries.values() {
            entry.inode.unmap();
            entry.owner.store(-1, Relaxed);
        }
    });
}

/// The file `id`, if a number stands for it.
pub fn find(id: FileId) -> Option<&'static Entry> {
    lock().entries.get(&id).copied()
}

/// What became of a request to map a file.
pub enum Mapped {
    New,
    /// It was mapped, or has no whole page.
    Unchanged,
    /// The kernel, or a limit of the process, refuses it.
    Refused,
}

impl Inodes {
    const fn new() -> Inodes {
        Inodes { entries: BTreeMap::new(), free: Vec::new() }
    }

    /// The entry of the file `id`, for one more number.
    pub fn find_or_make(&mut self, id: FileId) -> &'static Entry {
        let entry = match self.entries.get(&id) {
            Some(entry) => *entry,
            None => {
                let entry = match self.free.pop() {
                    Some(entry) => {
                        entry.inode.reuse(id);
                        entry
                    }
                    None => Box::leak(Box::new(Entry {
                        inode: Inode::new(id),
                        id: (AtomicUsize::new(0), AtomicUsize::new(0)),
                        numbers: AtomicU32::new(0),
                        owner: AtomicI32::new(-1),
                    })),
                };
                entry.id.0.store(id.0 as usize, Relaxed);
                entry.id.1.store(id.1 as usize, Relaxed);
                self.entries.insert(id, entry);
                COUNT.fetch_add(1, Relaxed);
                entry
            }
        };
        entry.numbers.store(entry.numbers.load(Relaxed) + 1, Relaxed);
        entry
    }

    /// The number `fd` does not stand for the file any more.
    pub fn release(&mut self, entry: &'static Entry, fd: RawFd) {
        if fd >= 0 && entry.owner.load(Relaxed) == fd {
            entry.inode.unmap();
            entry.owner.store(-1, Relaxed);
        }
        let numbers = entry.numbers.load(Relaxed).saturating_sub(1);
        entry.numbers.store(numbers, Relaxed);
        if numbers == 0 {
            let id = (entry.id.0.load(Relaxed) as u64, entry.id.1.load(Relaxed) as u64);
            self.entries.remove(&id);
            self.free.push(entry);
            COUNT.fetch_sub(1, Relaxed);
        }
    }

    /// See [`Inode::drop_pages`].
    pub fn drop_pages(&self, id: FileId, offset: u64, len: u64) {
        if let Some(entry) = self.entries.get(&id) {
            entry.inode.drop_pages(offset, len);
        }
    }

    /// Maps the file by `fd`, which is `len` bytes long.
    pub fn map(&mut self, entry: &'static Entry, fd: RawFd, len: u64) -> Mapped {
        if entry.owner.load(Relaxed) >= 0 || len < PAGE_BYTES {
            return Mapped::Unchanged;
        }
        fault::install();
        // SAFETY: the caller's number, which stands for the file while the lock is held.
        let file = unsafe { BorrowedFd::borrow_raw(fd) };
        if !entry.inode.map(file, len) {
            return Mapped::Refused;
        }
        entry.owner.store(fd, Relaxed);
        Mapped::New
    }
}
