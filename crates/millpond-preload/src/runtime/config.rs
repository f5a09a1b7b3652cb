//! The settings in the environment, read once when the library is loaded.
//!
//! | variable | meaning |
//! |---|---|
//! | `MILLPOND_PATHS` | the directories whose files are served: absolute, canonical, `:` between; default: the current one |
//! | `MILLPOND_CACHE_BYTES` | mode back: the engine's memory limit; default: the engine's |
//! | `MILLPOND_BACKING` | mode back: `buffered` (default) or `direct`; mode through is mapped |
//! | `MILLPOND_MODE` | `through` (default) or `back`; see `writeback_policy` |
//! | `MILLPOND_PRESSURE_FILE` | for tests: a file in place of `/proc/pressure/memory` |
//! | `MILLPOND_LOCAL_DEVICE` | the number of a device whose files are served though its kind of file system is not known to be local: the user vouches that it is, and that it has leases |
//! | `MILLPOND_KEEPER` | where the keeper listens that writes back what this process leaves |
//! | `MILLPOND_EAGER` | `1`: mode through maps files from their first read on; mode back also serves files that are open for reading only |
//! | `MILLPOND_HAND_OVER` | for tests: a seed; files are handed to the kernel at random moments |
//! | `MILLPOND_HIT_PATH` | `0` switches the lock-free hit path off |
//! | `MILLPOND_QUIET` | `1`: no line on stderr at the end |
//! | `MILLPOND_ACCOUNTS` | the memory file to account for files in; see `report::accounts` |

use std::ffi::{CStr, CString};
use std::os::fd::RawFd;
use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use millpond::{Backing, WriteMode};

use crate::runtime::sys::sys;

pub struct Config {
    pub paths: Vec<Vec<u8>>,
    pub cache_bytes: Option<u64>,
    pub backing: Backing,
    /// Mode through is on the kernel's page cache: no engine.
    pub mode: WriteMode,
    pub is_eager: bool,
    /// A device that is served even if its file system is not known to be local.
    pub local_device: Option<u64>,
    pub keeper: Option<String>,
    pub hit_path: bool,
    /// A file in place of the kernel's, for tests.
    pub pressure_file: Option<CString>,
    /// For tests.
    pub hand_over_seed: Option<u64>,
    pub is_quiet: bool,
    /// The library's own descriptors get numbers from here on, so that the lowest numbers stay free for
    /// the program.
    pub internal_fd_min: RawFd,
}

static CONFIG: OnceLock<Config> = OnceLock::new();
static RANDOM: AtomicU64 = AtomicU64::new(0);

/// Mode back: files are served from their open on.
#[inline]
pub fn is_eager() -> bool {
    let config = get();
    config.is_eager && config.mode == WriteMode::Back
}

/// For tests that hand files over at random moments; [`u64::MAX`] in a run.
#[inline]
pub fn random() -> u64 {
    let Some(seed) = get().hand_over_seed else { return u64::MAX };
    // SplitMix64.
    const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
    let mut word = RANDOM.fetch_add(STEP, Relaxed).wrapping_add(seed.wrapping_mul(STEP));
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (word ^ (word >> 31)) >> 1
}

/// The settings; read when the library is loaded.
pub fn get() -> &'static Config {
    CONFIG.get_or_init(read)
}

fn read() -> Config {
    let paths = match variable(c"MILLPOND_PATHS") {
        Some(list) => {
            list.split(|&byte| byte == b':').map(trim).filter(|p| !p.is_empty()).collect()
        }
        None => current_directory().into_iter().collect(),
    };
    let number =
        |name| variable(name).and_then(|text| std::str::from_utf8(text).ok()?.parse::<u64>().ok());
    Config {
        paths,
        cache_bytes: number(c"MILLPOND_CACHE_BYTES"),
        backing: match variable(c"MILLPOND_BACKING") {
            Some(b"direct") => Backing::Direct,
            _ => Backing::Buffered,
        },
        mode: match variable(c"MILLPOND_MODE") {
            Some(b"back") => WriteMode::Back,
            _ => WriteMode::Through,
        },
        is_eager: variable(c"MILLPOND_EAGER") == Some(b"1"),
        local_device: number(c"MILLPOND_LOCAL_DEVICE"),
        keeper: variable(c"MILLPOND_KEEPER")
            .and_then(|text| std::str::from_utf8(text).ok())
            .filter(|text| !text.is_empty())
            .map(str::to_owned),
        hit_path: variable(c"MILLPOND_HIT_PATH") != Some(b"0"),
        pressure_file: variable(c"MILLPOND_PRESSURE_FILE").and_then(|path| CString::new(path).ok()),
        hand_over_seed: number(c"MILLPOND_HAND_OVER"),
        is_quiet: variable(c"MILLPOND_QUIET") == Some(b"1"),
        internal_fd_min: internal_fd_min(),
    }
}

/// Read through libc and copied at once: std's `env` would take a lock that a thread may hold
/// across fork.
pub fn variable(name: &CStr) -> Option<&'static [u8]> {
    // SAFETY: `name` is NUL-terminated; the value is NUL-terminated, and nothing changes the
    // environment while the program is being loaded.
    unsafe {
        let value = libc::getenv(name.as_ptr());
        (!value.is_null()).then(|| CStr::from_ptr(value).to_bytes())
    }
}

fn trim(path: &[u8]) -> Vec<u8> {
    let mut path = path.to_vec();
    while path.len() > 1 && path.last() == Some(&b'/') {
        path.pop();
    }
    path
}

fn current_directory() -> Option<Vec<u8>> {
    use std::os::unix::ffi::OsStringExt;
    std::env::current_dir().ok().map(|path| path.into_os_string().into_vec())
}

/// Half of the process's limit on descriptors, the lower half being the program's alone; but not so high
/// that the kernel's own table, which fork copies, grows large.
fn internal_fd_min() -> RawFd {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is ours to write.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) } == 0;
    let limit = if known { limit.rlim_cur.min(1 << 20) } else { 1024 };
    (limit / 2).min(1024) as RawFd
}

/// Gives a descriptor that was just made a number of the library's; `None`: it was not made, or no number is free.
pub fn renumber(made: isize) -> Option<RawFd> {
    // SAFETY: no memory involved; the caller gives the descriptor up.
    let fd = unsafe {
        let fd = sys!(libc::SYS_fcntl, made, libc::F_DUPFD_CLOEXEC, get().internal_fd_min);
        sys!(libc::SYS_close, made);
        fd as RawFd
    };
    (fd >= 0).then_some(fd)
}

/// Whether a canonical path lies in one of the served directories.
pub fn is_served_path(path: &[u8]) -> bool {
    get().paths.iter().any(|served| {
        served.as_slice() == b"/"
            || (path.starts_with(served) && matches!(path.get(served.len()), None | Some(&b'/')))
    })
}
