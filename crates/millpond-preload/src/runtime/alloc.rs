//! The library's own heap.
//!
//! `malloc` belongs to the program: a hook may run inside a signal handler that interrupted it, or
//! inside a replacement allocator that opens files. So the library and its engine
//! allocate from this heap: blocks in powers of two from chunks that the kernel maps, and larger
//! blocks directly from the kernel. Blocks are reused by size; chunks are never unmapped.
//!
//! Each size has a lock, as blocks are often freed on another thread than allocated them. The current
//! chunk has its own lock, which is taken under none of them. They are leaves. They are taken with
//! signals blocked: in a [`crate::runtime::section::Section`], or on the engine's own threads,
//! which inherit such a mask.

use std::alloc::{GlobalAlloc, Layout};
use std::cell::UnsafeCell;
use std::ptr::null_mut;

use crate::runtime::lock::Lock;
use crate::runtime::sys::{self, PRIVATE, sys};

#[global_allocator]
pub static HEAP: Heap = Heap::new();

const CLASS_BYTES_MIN: usize = 16;
const CLASSES: usize = 14;
/// Largest block from a chunk; a larger one has its own mapping.
const CLASS_BYTES_MAX: usize = CLASS_BYTES_MIN << (CLASSES - 1);
const CHUNK_BYTES: usize = 256 << 10;
const PAGE_BYTES: usize = 4096;

pub struct Heap {
    free: [Class; CLASSES],
    chunk: Lock<Chunk>,
}

/// The free blocks of one size, on a cache line of their own.
#[repr(align(64))]
struct Class(Lock<Free>);

/// The first free block; its first word is the next one.
struct Free(*mut u8);

/// The memory that blocks are carved from.
struct Chunk {
    start: *mut u8,
    bytes_left: usize,
    /// [`FIRST`] was used.
    has_first: bool,
}

const FIRST_BYTES: usize = 8 << 10;

/// The first chunk, which is enough for processes without a served file.
static FIRST: First = First(UnsafeCell::new([0; FIRST_BYTES]));

#[repr(align(4096))]
struct First(UnsafeCell<[u8; FIRST_BYTES]>);

// SAFETY: only the thread that has taken the memory from `Chunk` accesses it.
unsafe impl Sync for First {}

// SAFETY: the pointers are to memory that only the holder of the lock allocates or frees.
unsafe impl Send for Free {}
// SAFETY: as above.
unsafe impl Send for Chunk {}

impl Heap {
    pub const fn new() -> Self {
        Self {
            free: [const { Class(Lock::new(Free(null_mut()))) }; CLASSES],
            chunk: Lock::new(Chunk { start: null_mut(), bytes_left: 0, has_first: false }),
        }
    }

    /// Before fork: takes all locks, so no change is half done. [`Heap::after_fork`] follows, in parent and child.
    pub fn before_fork(&self) {
        self.free.iter().for_each(|class| class.0.acquire());
        self.chunk.acquire();
    }

    pub fn after_fork(&self) {
        self.chunk.release();
        self.free.iter().for_each(|class| class.0.release());
    }
}

/// The class whose blocks hold `layout`, aligned, or `None` if it needs its own mapping.
fn class(layout: Layout) -> Option<usize> {
    let bytes = layout.size().max(layout.align()).max(CLASS_BYTES_MIN).next_power_of_two();
    (bytes <= CLASS_BYTES_MAX && layout.align() <= PAGE_BYTES)
        .then(|| (bytes / CLASS_BYTES_MIN).trailing_zeros() as usize)
}

impl Free {
    fn take(&mut self) -> Option<*mut u8> {
        let first = self.0;
        if first.is_null() {
            return None;
        }
        // SAFETY: a free block starts with the pointer that `give` stored.
        self.0 = unsafe { first.cast::<*mut u8>().read() };
        Some(first)
    }

    fn return_block(&mut self, block: *mut u8) {
        // SAFETY: the block is at least 16 bytes, aligned, and no longer used.
        unsafe { block.cast::<*mut u8>().write(self.0) };
        self.0 = block;
    }
}

impl Chunk {
    /// A block that is aligned to its own size, up to a page; null if there is no memory.
    fn carve(&mut self, bytes: usize) -> *mut u8 {
        let mut padding = self.start.align_offset(bytes.min(PAGE_BYTES));
        if self.bytes_left < padding + bytes {
            let is_first = !self.has_first && bytes <= FIRST_BYTES;
            (self.start, self.bytes_left) = match is_first {
                true => (FIRST.0.get().cast(), FIRST_BYTES),
                false => (map(CHUNK_BYTES), CHUNK_BYTES),
            };
            self.has_first |= is_first;
            if self.start.is_null() {
                self.bytes_left = 0;
                return self.start;
            }
            padding = 0;
        }
        // SAFETY: `padding + bytes` are left in the chunk.
        let block = unsafe { self.start.add(padding) };
        // SAFETY: as above.
        self.start = unsafe { block.add(bytes) };
        self.bytes_left -= padding + bytes;
        block
    }
}

// SAFETY: blocks are disjoint, as large and as aligned as the class says, and a mapping of its own
// is page-aligned; `dealloc` finds the same class from the same layout.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match class(layout) {
            Some(class) => {
                let block = self.free[class].0.lock().take();
                block.unwrap_or_else(|| self.chunk.lock().carve(CLASS_BYTES_MIN << class))
            }
            None if layout.align() <= PAGE_BYTES => map(layout.size()),
            None => map_aligned(layout.size(), layout.align()),
        }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        match class(layout) {
            Some(class) => self.free[class].0.lock().return_block(block),
            // SAFETY: mapped by `alloc` with this size, and no longer used.
            None => unsafe {
                sys!(libc::SYS_munmap, block, layout.size());
            },
        }
    }
}

fn map(bytes: usize) -> *mut u8 {
    sys::map(bytes, PRIVATE, -1).unwrap_or(null_mut())
}

/// Maps more than needed and unmaps the ends.
fn map_aligned(bytes: usize, align: usize) -> *mut u8 {
    let bytes = bytes.next_multiple_of(PAGE_BYTES);
    let base = map(bytes + align);
    if base.is_null() {
        return base;
    }
    let start = base.addr().next_multiple_of(align);
    let before = start - base.addr();
    // SAFETY: both ends lie in the mapping just made and outside the returned block.
    unsafe {
        if before > 0 {
            sys!(libc::SYS_munmap, base, before);
        }
        if align > before {
            sys!(libc::SYS_munmap, start + bytes, align - before);
        }
        base.add(before)
    }
}
