//! Threads of the engine.

#[cfg(not(scheduled))]
mod pthread;

use std::cell::Cell;
#[cfg(scheduled)]
use std::io;
use std::num::NonZero;
use std::sync::OnceLock;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

#[cfg(not(scheduled))]
pub(crate) use pthread::spawn;

/// For more processors than that, several share one.
const SHARDS_MAX: usize = 256;

/// Spawns a thread of the scheduler, which decides when it runs.
#[cfg(scheduled)]
pub(crate) fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<()> {
    std::thread::Builder::new().name(name.into()).spawn(body).map(drop)
}

/// The number of shards, a power of two, of structures with one shard for each thread, as far as there are
/// processors.
pub(crate) fn shards() -> usize {
    static SHARDS: OnceLock<usize> = OnceLock::new();
    *SHARDS.get_or_init(|| {
        let processors = std::thread::available_parallelism().map_or(1, NonZero::get);
        processors.next_power_of_two().min(SHARDS_MAX)
    })
}

/// A number of the calling thread's, below `shards`, a power of two. Threads that are started one after the other
/// have different ones.
#[inline]
pub(crate) fn shard_of(shards: usize) -> usize {
    thread_local! {
        static NUMBER: Cell<usize> = const { Cell::new(0) };
    }
    #[cold]
    fn next() -> usize {
        static NEXT: AtomicUsize = AtomicUsize::new(1);
        // Relaxed: a number. 0 is none yet.
        NEXT.fetch_add(1, Relaxed).max(1)
    }
    // `Cell<usize>` has no destructor, so it is there to the thread's end.
    NUMBER.with(|number| {
        if number.get() == 0 {
            number.set(next());
        }
        number.get() & (shards - 1)
    })
}
