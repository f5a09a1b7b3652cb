//! The streams that libc calls back for, by their addresses: see `hooks/stdio`.

use std::collections::BTreeMap;
use std::os::fd::RawFd;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use libc::FILE;

use crate::runtime::lock::Lock;
use crate::runtime::section;

/// Descriptors of our streams, by address.
static STREAMS: Lock<BTreeMap<usize, RawFd>> = Lock::new(BTreeMap::new());
/// How many they are: with none there is nothing to look for.
static COUNT: AtomicUsize = AtomicUsize::new(0);

pub fn before_fork() {
    STREAMS.acquire();
}

pub fn after_fork() {
    STREAMS.release();
}

/// Writes out what our streams hold: their last bytes would otherwise come after the report.
pub fn flush() {
    let streams: Vec<usize> = section::run(|_| STREAMS.lock().keys().copied().collect());
    for stream in &streams {
        // SAFETY: streams leave the map before they end.
        unsafe { libc::fflush(std::ptr::with_exposed_provenance_mut(*stream)) };
    }
    section::run(|_| drop(streams));
}

/// The descriptor of a stream of ours; taken out of the map if `take`.
pub fn lookup(stream: *mut FILE, take: bool) -> Option<RawFd> {
    // Relaxed: a thread that has a stream of ours got it after it was counted.
    if COUNT.load(Relaxed) == 0 {
        return None;
    }
    section::run(|_| {
        let mut streams = STREAMS.lock();
        let found = if take {
            streams.remove(&stream.addr())
        } else {
            streams.get(&stream.addr()).copied()
        };
        COUNT.store(streams.len(), Relaxed);
        found
    })
}

/// `stream` is one of ours.
pub fn insert(stream: *mut FILE, fd: RawFd) {
    section::run(|_| {
        let mut streams = STREAMS.lock();
        streams.insert(stream.expose_provenance(), fd);
        COUNT.store(streams.len(), Relaxed);
    });
}
