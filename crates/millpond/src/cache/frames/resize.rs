//! A limit that changes while the cache is used.
//!
//! Down it goes in steps, each of which is made up for by eviction before the next: a thread that misses
//! meanwhile, and so has to make room for what is over the limit, does so for one step at most. What is
//! evicted goes back to the system frame by frame ([`Frames::decommit_one`]), a system call for each group:
//! of pages of 4 KiB, 1 GiB takes 262,144 calls.
//!
//! What stays: pages that are pinned or kept by write-back, until they are neither; what is charged for
//! frames' metadata, which is never given back; tables of open files.
//!
//! Locks: `resizing`, over all others that eviction takes.
//!
//! [`Frames::decommit_one`]: crate::cache::frames::Frames::decommit_one

use crate::cache::Cache;

/// How far the limit goes down at once: some hundred evictions.
const STEP_BYTES: u64 = 1 << 20;

impl Cache {
    /// Changes the limit, and gives back memory as it must; never waits for write-back. Returns the limit
    /// that holds now: what was asked for, or the lowest that could be kept to.
    pub(crate) fn set_limit(&self, limit_bytes: u64) -> u64 {
        let _one = self.resizing.lock().expect("no panic under the lock");
        let mut now = self.frames.limit_bytes();
        while now > limit_bytes {
            // Only pages are worth steps: what nobody uses goes at once.
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
        limit_bytes
    }
}
