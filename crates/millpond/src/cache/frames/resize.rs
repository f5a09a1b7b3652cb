//! Changes of the memory limit while the cache is in use.
//!
//! The limit is lowered in steps, and each step is followed by eviction. So a thread that misses
//! concurrently, and has to make room for bytes beyond the limit, evicts for one step at most.
//! Evicted memory is returned to the system frame by frame ([`Frames::decommit_one`]), with one
//! system call for each group: 262,144 calls for 1 GiB of 4 KiB pages.
//!
//! Some memory stays: pages that are pinned, or that write-back keeps unevictable, until they are
//! neither; the charge for metadata of frames, which is never released; and tables of open files.
//!
//! Locks: `resizing`, over all other locks that eviction acquires.
//!
//! [`Frames::decommit_one`]: crate::cache::frames::Frames::decommit_one

use crate::cache::Cache;
use crate::sync::MutexExt;

/// The size of a step: some hundred evictions.
const STEP_BYTES: u64 = 1 << 20;

impl Cache {
    /// Changes the limit and releases memory as required. Never waits for write-back. Returns the
    /// limit that is in force now: the requested one, or the lowest that could be reached.
    pub(crate) fn set_limit(&self, limit_bytes: u64) -> u64 {
        let _one = self.resizing.acquire();
        let mut now = self.frames.limit_bytes();
        while now > limit_bytes {
            // Only pages need steps: unused room is given up at once.
            let used = self.frames.committed_bytes().min(now);
            let next = used.saturating_sub(STEP_BYTES).max(limit_bytes);
            self.frames.set_limit(next);
            while self.frames.is_overdrawn() {
                if !self.make_room() {
                    return self.finish_resize(self.frames.limit_in_use().clamp(limit_bytes, now));
                }
            }
            now = next;
        }
        self.finish_resize(limit_bytes)
    }

    fn finish_resize(&self, limit_bytes: u64) -> u64 {
        self.frames.set_limit(limit_bytes);
        self.queues().set_limit(limit_bytes);
        self.admission.start_admitting();
        self.frames.decommit_filled_holes();
        limit_bytes
    }
}
