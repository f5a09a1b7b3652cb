//! The dump of waiting operations, and a thread that reports long waits.

use std::collections::HashSet;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use millpond_rangelock::callback::contain;

use crate::event::event;
use crate::inode::Shared;
use crate::thread::spawn;
use crate::waits::{Dump, Waiting, Watch};

/// The interval of scans: half the limit, within these bounds. The clock of waits has a resolution of
/// milliseconds.
const PERIODS: (Duration, Duration) = (Duration::from_millis(5), Duration::from_secs(1));

pub(crate) fn dump(shared: &Shared) -> Dump {
    let writeback_counts = &shared.cache.writeback_counts;
    let mut waiting = shared.cache.counters.waiting();
    waiting.extend(shared.tasks.snapshot());
    waiting.sort_by_key(|waiting| std::cmp::Reverse(waiting.since));
    let dirty_bytes = writeback_counts.dirty();
    Dump {
        waiting,
        dirty_bytes,
        writeback_bytes: writeback_counts.unwritten().saturating_sub(dirty_bytes),
        unsynced_bytes: writeback_counts.unstable(),
        memory_bytes: shared.cache.frames.committed_bytes(),
        limit_bytes: shared.cache.frames.limit_bytes(),
    }
}

/// Scans until the engine is gone. Each wait is reported once.
pub(crate) fn begin(shared: &Arc<Shared>, watch: Watch) -> io::Result<()> {
    let shared = Arc::downgrade(shared);
    spawn("millpond-watch", move || {
        let mut reported = HashSet::new();
        while let Some(shared) = shared.upgrade() {
            let long: Vec<Waiting> = dump(&shared)
                .waiting
                .into_iter()
                .filter(|waiting| waiting.since >= watch.limit)
                .collect();
            // The callback may be slow, and must not keep the engine alive.
            drop(shared);
            for waiting in &long {
                if !reported.contains(&waiting.key) {
                    event!(warn, "{waiting}");
                    contain(|| (watch.report)(waiting));
                }
            }
            reported = long.iter().map(|waiting| waiting.key).collect();
            std::thread::sleep((watch.limit / 2).clamp(PERIODS.0, PERIODS.1));
        }
    })
}
