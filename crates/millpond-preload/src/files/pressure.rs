//! Memory pressure: the cache shrinks before the machine swaps, or ends processes.
//!
//! The watcher's thread (`lease`), which is there when a file is served, looks once a second at how long tasks
//! have been stalled for want of memory: `memory.pressure` of the process's cgroup, else
//! `/proc/pressure/memory`. It reads, and sets no trigger: that would want privileges, or windows of two
//! seconds, and a descriptor. A kernel without either has no pressure here.
//!
//! - PR1. Stalled for a twentieth of the time since the last look: the limit becomes three quarters of the memory
//!   in use, but not less than a 16th of the configured one. With each further look so again.
//! - PR2. After ten seconds without, it grows by a 16th of the configured one; so again each ten seconds.
//!
//! Locks: `ENGINE`; the registry's may be held.

use std::ffi::{CStr, CString};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use millpond::Engine;

use crate::files::process_locks::read_whole;
use crate::report::counts;
use crate::runtime::config;
use crate::runtime::lock::Lock;

/// How often is looked.
pub const PAUSE: Duration = Duration::from_secs(1);
const STALLED_PART: u32 = 20;
const PARTS: u64 = 16;
const CALM: Duration = Duration::from_secs(10);
const PRESSURE: &CStr = c"/proc/pressure/memory";

/// The process's engine, and the limit it was built with.
static ENGINE: Lock<Option<(Engine, u64)>> = Lock::new(None);
/// The limit that pressure leaves.
static CAP: AtomicU64 = AtomicU64::new(u64::MAX);

/// The engine was made.
pub fn begin(engine: &Engine, most_bytes: u64) {
    *ENGINE.lock() = Some((engine.clone(), most_bytes));
}

/// The engine is given up.
pub fn end() {
    *ENGINE.lock() = None;
}

/// In a forked child: it has no engine yet.
///
/// # Safety
///
/// No other thread exists.
pub unsafe fn after_fork() {
    // SAFETY: the caller's duty.
    unsafe { ENGINE.reset(None) };
    CAP.store(u64::MAX, Relaxed);
}

/// The watcher's state between looks.
pub struct Gauge {
    path: CString,
    seen: Option<(Instant, Duration)>,
    /// The last stall, or growth.
    moved: Instant,
}

impl Gauge {
    /// `None`: the kernel has no pressure information.
    pub fn find() -> Option<Self> {
        let of_cgroup = || of_cgroup().filter(|path| stalled(path).is_some());
        let told = config::get().pressure_file.clone();
        let path = told.or_else(of_cgroup).unwrap_or_else(|| PRESSURE.into());
        stalled(&path)?;
        Some(Self { path, seen: None, moved: Instant::now() })
    }

    /// PR1, PR2.
    pub fn poll_pressure(&mut self) {
        let Some(total) = stalled(&self.path) else { return };
        let now = Instant::now();
        let Some((before, last)) = self.seen else {
            self.seen = Some((now, total));
            return;
        };
        if now - before < PAUSE / 2 {
            // Woken for something else.
            return;
        }
        self.seen = Some((now, total));
        let is_stalled = total.saturating_sub(last) * STALLED_PART >= now - before;
        if !is_stalled && (CAP.load(Relaxed) == u64::MAX || now - self.moved < CALM) {
            return;
        }
        let Some((engine, most)) = ENGINE.lock().clone() else { return };
        self.moved = now;
        let cap = next_cap(is_stalled, CAP.load(Relaxed), most, || engine.stats().memory_bytes);
        if is_stalled {
            counts::count_shrunk();
        }
        CAP.store(cap, Relaxed);
        // The next look evicts the rest.
        let _ = engine.set_cache_bytes(cap.min(most));
    }
}

fn next_cap(is_stalled: bool, cap: u64, most: u64, used: impl FnOnce() -> u64) -> u64 {
    if is_stalled {
        return (used().min(cap) / 4 * 3).max(most / PARTS);
    }
    let grown = cap.saturating_add(most / PARTS);
    if grown >= most { u64::MAX } else { grown }
}

/// For how long some tasks have been stalled, of all time.
fn stalled(path: &CStr) -> Option<Duration> {
    // some avg10=0.00 avg60=0.00 avg300=0.00 total=1234
    let text = read_whole(path)?;
    let text = std::str::from_utf8(&text).ok()?;
    let total = text.lines().next()?.strip_prefix("some ")?.split_once("total=")?.1;
    Some(Duration::from_micros(total.trim().parse().ok()?))
}

/// That of the process's cgroup of version 2.
fn of_cgroup() -> Option<CString> {
    let text = read_whole(c"/proc/self/cgroup")?;
    let text = String::from_utf8_lossy(&text);
    let own = text.lines().find_map(|line| line.strip_prefix("0::"))?;
    CString::new(format!("/sys/fs/cgroup{own}/memory.pressure")).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: down by quarters of the memory in use, to a 16th; up by 16ths, to where there is no bound.
    #[test]
    fn down_and_up() {
        let most = 1600;
        assert_eq!(next_cap(true, u64::MAX, most, || 800), 600);
        assert_eq!(next_cap(true, 600, most, || 800), 450);
        assert_eq!(next_cap(true, 600, most, || 100), 100);
        assert_eq!(next_cap(true, 100, most, || 0), 100);
        assert_eq!(next_cap(false, 100, most, || 0), 200);
        assert_eq!(next_cap(false, 1500, most, || 0), u64::MAX);
    }

    /// Goal: the kernel's text is understood.
    #[test]
    fn what_the_kernel_tells() {
        use std::io::Write;
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let path = CString::new(file.path().to_str().unwrap()).unwrap();
        assert_eq!(stalled(&path), None);
        let full = "full avg10=0.00 avg60=0.00 avg300=0.00 total=36135805";
        writeln!(file, "some avg10=4.92 avg60=2.12 avg300=0.99 total=51229816\n{full}").unwrap();
        assert_eq!(stalled(&path), Some(Duration::from_micros(51_229_816)));
    }
}
