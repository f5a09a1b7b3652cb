//! Slabs: where the cores of open files live.
//!
//! A slab is a frame of 4 KiB, cut into cores of 64 bytes, so that what a cached read looks at,
//! the core included, lies in the frame reservation and counts in the memory limit. Slabs are
//! never given back: the most files that were open at once decide how many there are.
//!
//! Locks: one around the free list; `Cache` may evict before it is taken, not under it.

use std::ptr::NonNull;
use std::sync::Mutex;

use crate::cache::Cache;
use crate::cache::frame::{Class, UNIT_BYTES};
use crate::cache::table::FileCore;

const CORES: usize = UNIT_BYTES / size_of::<FileCore>();

/// The free cores of a cache.
#[derive(Default)]
pub(crate) struct Slab {
    free: Mutex<Vec<CorePointer>>,
}

#[derive(Clone, Copy)]
struct CorePointer(NonNull<FileCore>);

// SAFETY: a free core is a piece of memory without owner.
unsafe impl Send for CorePointer {}

impl Slab {
    /// A core for an empty table, or `None` if the memory limit has no room.
    pub(crate) fn alloc(cache: &Cache, size: u64, page_shift: u32) -> Option<NonNull<FileCore>> {
        let pop = || cache.slab.free.lock().expect("no panic under the lock").pop();
        let core = loop {
            if let Some(core) = pop() {
                break core.0;
            }
            let slab = cache.frames.bytes(cache.take_frame(Class::SLAB)?).cast::<FileCore>();
            let mut free = cache.slab.free.lock().expect("no panic under the lock");
            free.extend((0..CORES).map(|i| {
                // SAFETY: the frame has room for CORES cores.
                CorePointer(unsafe { NonNull::new_unchecked(slab.add(i)) })
            }));
        };
        // SAFETY: the core is ours, and within a slab that is never given back. A late reader of
        // the core's former file does not exist: handles keep their core alive.
        unsafe { core.write(FileCore::new(size, page_shift)) };
        Some(core)
    }

    /// Takes back a core whose table was torn down.
    pub(crate) fn free(cache: &Cache, core: NonNull<FileCore>) {
        cache.slab.free.lock().expect("no panic under the lock").push(CorePointer(core));
    }
}
