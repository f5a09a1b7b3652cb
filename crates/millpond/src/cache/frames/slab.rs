//! Slabs: frames that contain the cores of open files.
//!
//! A slab is a frame of 4 KiB, divided into cores of 64 bytes. So all memory that a cached read
//! accesses, including the core, lies in the cache's address range and counts against the memory
//! limit. Slabs are never freed: their number follows from the maximum number of files that were
//! open at the same time.
//!
//! Locks: one around the free list; a leaf lock.

use std::ptr::NonNull;
use std::sync::Mutex;

use crate::cache::frames::Frames;
#[cfg(doc)]
use crate::cache::frames::class::Class;
use crate::cache::table::FileCore;
use crate::units::{FrameIndex, UNIT_BYTES};

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
    /// Takes a free core, for an empty table; `None` if there is none.
    pub(in crate::cache) fn take(&self, size: u64, page_shift: u32) -> Option<NonNull<FileCore>> {
        let CorePointer(core) = self.free.lock().expect("no panic under the lock").pop()?;
        // SAFETY: the core is ours, and within a slab that is never freed. There is no late reader
        // of the core's former file: handles keep their core alive.
        unsafe { core.write(FileCore::new(size, page_shift)) };
        Some(core)
    }

    /// Divides `frame`, of [`Class::SLAB`], into cores. It belongs to the slab from now on.
    pub(in crate::cache) fn add(&self, frames: &Frames, frame: FrameIndex) {
        let slab = frames.bytes(frame).cast::<FileCore>();
        let mut free = self.free.lock().expect("no panic under the lock");
        free.extend((0..CORES).map(|i| {
            // SAFETY: the frame has room for CORES cores.
            CorePointer(unsafe { NonNull::new_unchecked(slab.add(i)) })
        }));
    }

    /// Takes back a core whose table was torn down.
    pub(crate) fn free(&self, core: NonNull<FileCore>) {
        self.free.lock().expect("no panic under the lock").push(CorePointer(core));
    }
}
