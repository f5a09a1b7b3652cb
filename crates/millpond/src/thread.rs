//! Threads of the engine.

use std::cell::Cell;
use std::io;
use std::mem::MaybeUninit;
use std::num::NonZero;
use std::sync::OnceLock;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

/// For more processors than that, several share one.
const SHARDS_MAX: usize = 256;

/// Spawns a thread that takes no signals: they belong to the program's own threads. The exception is memory faults,
/// which a copy to a caller's memory may raise here as well ([`crate::fault`]).
pub(crate) fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let mut all = MaybeUninit::uninit();
    let mut old = MaybeUninit::uninit();
    // SAFETY: `all` and `old` are valid for the calls, and initialised by them; the mask of this
    // thread is restored below.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::sigdelset(all.as_mut_ptr(), libc::SIGSEGV);
        libc::sigdelset(all.as_mut_ptr(), libc::SIGBUS);
        libc::pthread_sigmask(libc::SIG_BLOCK, all.as_ptr(), old.as_mut_ptr());
    }
    let spawned = std::thread::Builder::new().name(name.into()).spawn(body);
    // SAFETY: `old` was initialised above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, old.as_ptr(), std::ptr::null_mut()) };
    spawned.map(drop)
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
