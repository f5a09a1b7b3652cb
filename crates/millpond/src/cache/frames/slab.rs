//! Slabs: where the cores of open files live.
//!
//! A slab is a frame of 4 KiB, cut into cores of 64 bytes, so that what a cached read looks at,
//! the core included, lies in the frame reservation and counts in the memory limit. Slabs are
//! never given back: the most files that were open at once decide how many there are.
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
        // SAFETY: the core is ours, and within a slab that is never given back. A late reader of
        // the core's former file does not exist: handles keep their core alive.
        unsafe { core.write(FileCore::new(size, page_shift)) };
        Some(core)
    }

    /// Cuts `frame`, of [`Class::SLAB`], into cores. It belongs to the slab from now on.
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
