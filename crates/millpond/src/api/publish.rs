//! Publishes the engine's statistics for other processes of the same user: a memory file that they find by
//! its name among the descriptors of this process, and read.
//!
//! ```text
//! millpond-stats VERSION LENGTH CHECKSUM, in 64 bytes      lines of NAME VALUE, LENGTH bytes in all
//! ```
//!
//! A separate thread rewrites it every [`PERIOD`], so operations have no cost. Readers are not locked out,
//! so a reader may find half of one text and half of the next: the checksum detects that, and it reads
//! again. The thread writes into a mapping, not by the descriptor, which the program may have closed and
//! reused. The file disappears with the process, however that ends, or a moment after the engine. Other
//! processes can neither change nor truncate it.

use std::fmt::Write as _;
use std::io;
use std::os::fd::{OwnedFd, RawFd};
use std::ptr;
use std::time::Duration;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use rustix::process::Resource;

use crate::latency::LatencyKind;
use crate::stats::Stats;
use crate::thread::spawn;

/// Often enough for a live view; a text takes some tens of microseconds.
const PERIOD: Duration = Duration::from_millis(250);
const NAME: &str = "millpond-stats";
const VERSION: u32 = 1;
const HEADER_BYTES: usize = 64;
/// The length of the file: all buckets of all kinds need a third of it.
const FILE_BYTES: usize = 64 << 10;

/// The published values other than the counts.
pub(crate) struct Gauges {
    pub(crate) limit_bytes: u64,
    pub(crate) dirty_bytes: u64,
    pub(crate) writeback_bytes: u64,
    pub(crate) unsynced_bytes: u64,
    pub(crate) waiting_reads: u64,
    pub(crate) waiting_writers: u64,
}

/// The mapped file. Its descriptor exists to be found.
struct Notice {
    memory: *mut u8,
    fd: OwnedFd,
}

// SAFETY: only this value uses the mapping, which is not bound to a thread.
unsafe impl Send for Notice {}

impl Notice {
    /// With a descriptor number of at least `fd_min`.
    fn new(fd_min: RawFd) -> io::Result<Notice> {
        // Beyond this limit `ftruncate` would end the process by SIGXFSZ.
        let most = rustix::process::getrlimit(Resource::Fsize).current;
        if most.is_some_and(|most| most < FILE_BYTES as u64) {
            return Err(Errno::FBIG.into());
        }
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let low = rustix::fs::memfd_create(NAME, flags)?;
        let fd = rustix::io::fcntl_dupfd_cloexec(&low, fd_min)?;
        rustix::fs::ftruncate(&fd, FILE_BYTES as u64)?;
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a new mapping at an address of the kernel's choice.
        let memory =
            unsafe { rustix::mm::mmap(ptr::null_mut(), FILE_BYTES, access, flags, &fd, 0)? };
        let notice = Notice { memory: memory.cast(), fd };
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&notice.fd, seals)?;
        Ok(notice)
    }

    fn tell(&mut self, text: &str) {
        let bytes = framed(text);
        let len = bytes.len().min(FILE_BYTES);
        // SAFETY: within the mapping, which only this value uses, and to which no reference exists. Other
        // processes that read it concurrently detect an incomplete text.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), self.memory, len) };
    }
}

impl Drop for Notice {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`, which no other code uses.
        let _ = unsafe { rustix::mm::munmap(self.memory.cast(), FILE_BYTES) };
    }
}

/// Starts to publish the result of `text`, until that is empty, in a file with a descriptor number of at
/// least `fd_min`.
pub(crate) fn begin(
    fd_min: RawFd,
    mut text: impl FnMut() -> Option<String> + Send + 'static,
) -> io::Result<()> {
    let mut notice = Notice::new(fd_min)?;
    notice.tell(&text().unwrap_or_default());
    spawn("millpond-stats", move || {
        while let Some(text) = text() {
            notice.tell(&text);
            std::thread::sleep(PERIOD);
        }
    })
}

fn framed(text: &str) -> Vec<u8> {
    let header = format!("{NAME} {VERSION} {} {:016x}\n", text.len(), checksum(text.as_bytes()));
    let mut bytes = header.into_bytes();
    bytes.resize(HEADER_BYTES, 0);
    bytes.extend_from_slice(text.as_bytes());
    bytes
}

/// FNV-1a of 64 bits: against torn reads, not against attackers.
fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum, byte| {
        (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
    })
}

pub(crate) fn text_of(stats: &Stats, gauges: &Gauges) -> String {
    let counts = [
        ("pid", u64::from(std::process::id())),
        ("hits", stats.hits),
        ("misses", stats.misses),
        ("fills", stats.fills),
        ("evictions", stats.evictions),
        ("uncached_reads", stats.uncached_reads),
        ("readahead_used", stats.readahead_used),
        ("readahead_wasted", stats.readahead_wasted),
        ("hit_retries", stats.hit_retries),
        ("bytes_served", stats.bytes_served),
        ("bytes_passed", stats.bytes_passed),
        ("direct_reads", stats.direct_reads),
        ("direct_writes", stats.direct_writes),
        ("plain_reads", stats.plain_reads),
        ("plain_writes", stats.plain_writes),
        ("memory_bytes", stats.memory_bytes),
        ("limit_bytes", gauges.limit_bytes),
        ("dirty_bytes", gauges.dirty_bytes),
        ("writeback_bytes", gauges.writeback_bytes),
        ("unsynced_bytes", gauges.unsynced_bytes),
        ("waiting_reads", gauges.waiting_reads),
        ("waiting_writers", gauges.waiting_writers),
    ];
    let mut text = String::new();
    for (name, count) in counts {
        let _ = writeln!(text, "{name} {count}");
    }
    for kind in LatencyKind::ALL {
        let times = stats.latencies.of(kind);
        let _ = write!(text, "latency {} {} {}", kind.name(), kind.one_in(), times.sum_ns());
        for (upper_ns, count) in times.buckets() {
            let _ = write!(text, " {upper_ns}:{count}");
        }
        text.push('\n');
    }
    text
}
