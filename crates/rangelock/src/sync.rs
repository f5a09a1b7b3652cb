//! Synchronization primitives of the protocols: `std`'s, or loom's or shuttle's under the `cfg` of that name.

#[cfg(not(any(loom, shuttle)))]
mod imp {
    pub(crate) use std::hint::spin_loop as spin_hint;
    pub(crate) use std::sync::Arc;
    pub use std::sync::{Mutex, MutexGuard, atomic};
    pub(crate) use std::thread::yield_now;

    use std::time::Duration;

    use atomic::AtomicU32;
    #[cfg(not(scheduled))]
    use rustix::thread::futex;
    use rustix::time::Timespec;
    #[cfg(scheduled)]
    use std::futex;

    /// Sleeps while `word` is `expected`; spurious returns are possible.
    pub(crate) fn futex_wait(word: &AtomicU32, expected: u32, timeout: Option<Duration>) {
        let timeout = timeout.map(|left| Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        });
        // An error means "changed", "timed out" or "interrupted": the caller checks the word again.
        let _ = futex::wait(word, futex::Flags::PRIVATE, expected, timeout.as_ref());
    }

    /// Waits for another thread that is between two instructions: spins, then yields, then sleeps, in case that thread has
    /// been preempted.
    pub fn relax(tries: &mut u32) {
        *tries += 1;
        match *tries {
            0..=50 => std::hint::spin_loop(),
            51..=200 => std::thread::yield_now(),
            _ => std::thread::sleep(Duration::from_micros(50)),
        }
    }

    /// Wakes one sleeper on `word`.
    pub(crate) fn futex_wake_one(word: &AtomicU32) {
        let _ = futex::wake(word, futex::Flags::PRIVATE, 1);
    }
}

#[cfg(loom)]
mod imp {
    pub(crate) use loom::sync::Arc;
    pub use loom::sync::{Mutex, MutexGuard, atomic};
    pub(crate) use loom::thread::yield_now;

    use std::time::Duration;

    /// Not a yield: loom would run all other threads first, and so skip the interleavings of interest.
    pub(crate) fn spin_hint() {}

    /// Loom has no futex: yields in place of sleeping.
    pub(crate) fn futex_wait(
        _word: &atomic::AtomicU32,
        _expected: u32,
        _timeout: Option<Duration>,
    ) {
        loom::thread::yield_now();
    }

    /// Waits for another thread that is between two instructions.
    pub fn relax(_tries: &mut u32) {
        loom::thread::yield_now();
    }

    pub(crate) fn futex_wake_one(_word: &atomic::AtomicU32) {}
}

#[cfg(shuttle)]
mod imp {
    pub(crate) use shuttle::hint::spin_loop as spin_hint;
    pub(crate) use shuttle::sync::Arc;
    pub use shuttle::sync::{Mutex, MutexGuard, atomic};
    pub(crate) use shuttle::thread::yield_now;

    use std::time::Duration;

    /// Shuttle has no futex: yields in place of sleeping.
    pub(crate) fn futex_wait(
        _word: &atomic::AtomicU32,
        _expected: u32,
        _timeout: Option<Duration>,
    ) {
        yield_now();
    }

    /// Waits for another thread that is between two instructions.
    pub fn relax(_tries: &mut u32) {
        yield_now();
    }

    pub(crate) fn futex_wake_one(_word: &atomic::AtomicU32) {}
}

pub(crate) use imp::{Arc, futex_wait, futex_wake_one, spin_hint, yield_now};
pub use imp::{Mutex, MutexGuard, atomic, relax};

/// Locks a mutex and ignores poisoning: code under these mutexes panics only where the state is valid.
#[inline]
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poison| poison.into_inner())
}
