//! What the environment says, read once when the library is loaded.
//!
//! | variable | meaning |
//! |---|---|
//! | `MILLPOND_PATHS` | the directories whose files are served: absolute, canonical, `:` between; default: the current one |
//! | `MILLPOND_CACHE_BYTES` | the engine's memory limit; default: the engine's |
//! | `MILLPOND_CACHE_SHARED` | `1`: that limit is for all processes of the run together; see `files::share` |
//! | `MILLPOND_BACKING` | `mapped` (default of mode through), `buffered` (default of mode back) or `direct` |
//! | `MILLPOND_MODE` | `through` (default) or `back`; see `late` |
//! | `MILLPOND_PRESSURE_FILE` | for tests: a file in place of `/proc/pressure/memory` |
//! | `MILLPOND_LOCAL_DEVICE` | the number of a device whose files are served though its kind of file system is not known to be local: whoever sets it knows that it is, and that it has leases |
//! | `MILLPOND_KEEPER` | where the keeper listens that writes back what this process leaves |
//! | `MILLPOND_EAGER` | `1`: files are served from their open on, not only when they show use |
//! | `MILLPOND_ADOPT` | for tests: after how many reads of what was read before a file is adopted; or `random:SEED`: adopted and given back at random moments |
//! | `MILLPOND_HIT_PATH` | `0` switches the lock-free hit path off |
//! | `MILLPOND_QUIET` | `1`: no line on stderr at the end |
//! | `MILLPOND_ACCOUNTS` | the memory file to account for files in; see `report::accounts` |
//! | `MILLPOND_REPORT_FILE` | a file to append one line to at the end; see `report` |

use std::ffi::{CStr, CString};
use std::os::fd::RawFd;
use std::sync::OnceLock;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use millpond::{Backing, WriteMode};

pub struct Config {
    pub paths: Vec<Vec<u8>>,
    pub cache_bytes: Option<u64>,
    pub is_cache_shared: bool,
    pub backing: Backing,
    /// Mode through on the kernel's page cache: no engine.
    pub is_mapped: bool,
    pub mode: WriteMode,
    /// Served, whatever its file system says of itself.
    pub local_device: Option<u64>,
    pub keeper: Option<String>,
    pub hit_path: bool,
    /// In place of the kernel's, for tests.
    pub pressure_file: Option<CString>,
    pub adopt: Adopt,
    pub is_quiet: bool,
    pub report_file: Option<CString>,
    /// Descriptors of the library's own get numbers from here on, so that the program finds the
    /// lowest ones free, as it would without us.
    pub internal_fd_min: RawFd,
}

/// When files are adopted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Adopt {
    /// After so many reads of what was read before.
    After(u32),
    Random(u64),
}

static CONFIG: OnceLock<Config> = OnceLock::new();
/// Files are served from their open on.
static IS_EAGER: AtomicBool = AtomicBool::new(false);
static WRITES_WAIT: AtomicBool = AtomicBool::new(false);
/// [`is_eager`], where files are read from the kernel's page cache.
static IS_EAGER_MAPPED: AtomicBool = AtomicBool::new(false);
static IS_RANDOM: AtomicBool = AtomicBool::new(false);
static IS_EXPLAINED: AtomicBool = AtomicBool::new(false);
/// One of the two above, or eager.
static IS_LOOKED_AT: AtomicBool = AtomicBool::new(false);

#[inline]
pub fn is_eager() -> bool {
    IS_EAGER.load(Relaxed)
}

/// Files are mapped from their first read on.
pub fn is_eager_mapped() -> bool {
    IS_EAGER_MAPPED.load(Relaxed)
}

/// Mode back was asked for.
#[inline]
pub fn writes_wait() -> bool {
    WRITES_WAIT.load(Relaxed)
}

/// Files are adopted and given back at random moments.
#[inline]
pub fn is_random() -> bool {
    IS_RANDOM.load(Relaxed)
}

/// Somebody wants to know of each file.
#[inline]
pub fn is_explained() -> bool {
    IS_EXPLAINED.load(Relaxed)
}

/// When the library is loaded.
pub fn set_explained() {
    IS_EXPLAINED.store(true, Relaxed);
    IS_LOOKED_AT.store(true, Relaxed);
}

/// Each call of a watched file is looked at: files are explained, or adopted whatever they show.
#[inline]
pub fn is_looked_at() -> bool {
    IS_LOOKED_AT.load(Relaxed)
}

pub fn get() -> &'static Config {
    CONFIG.get_or_init(read)
}

/// Reads it, when the library is loaded.
pub fn initialise(reads_again: u32) {
    let config = CONFIG.get_or_init(|| {
        let mut config = read();
        if config.adopt == Adopt::After(0) {
            config.adopt = Adopt::After(reads_again);
        }
        config
    });
    let is_eager = variable(c"MILLPOND_EAGER") == Some(b"1");
    IS_EAGER.store(is_eager && !config.is_mapped, Relaxed);
    IS_EAGER_MAPPED.store(is_eager && config.is_mapped, Relaxed);
    WRITES_WAIT.store(config.mode == WriteMode::Back, Relaxed);
    IS_RANDOM.store(matches!(config.adopt, Adopt::Random(_)), Relaxed);
    IS_LOOKED_AT.store(is_random() || self::is_eager(), Relaxed);
}

fn read() -> Config {
    let paths = match variable(c"MILLPOND_PATHS") {
        Some(list) => {
            list.split(|&byte| byte == b':').map(trim).filter(|p| !p.is_empty()).collect()
        }
        None => current_directory().into_iter().collect(),
    };
    let mode = match variable(c"MILLPOND_MODE") {
        Some(b"back") => WriteMode::Back,
        _ => WriteMode::Through,
    };
    let backing = variable(c"MILLPOND_BACKING");
    let number =
        |name| variable(name).and_then(|text| std::str::from_utf8(text).ok()?.parse::<u64>().ok());
    Config {
        paths,
        cache_bytes: number(c"MILLPOND_CACHE_BYTES"),
        is_cache_shared: variable(c"MILLPOND_CACHE_SHARED") == Some(b"1"),
        backing: match backing {
            Some(b"direct") => Backing::Direct,
            _ => Backing::Buffered,
        },
        is_mapped: mode == WriteMode::Through && !matches!(backing, Some(b"direct" | b"buffered")),
        mode,
        local_device: number(c"MILLPOND_LOCAL_DEVICE"),
        keeper: variable(c"MILLPOND_KEEPER")
            .and_then(|text| std::str::from_utf8(text).ok())
            .filter(|text| !text.is_empty())
            .map(str::to_owned),
        hit_path: variable(c"MILLPOND_HIT_PATH") != Some(b"0"),
        pressure_file: variable(c"MILLPOND_PRESSURE_FILE").and_then(|path| CString::new(path).ok()),
        adopt: match variable(c"MILLPOND_ADOPT").and_then(|text| text.strip_prefix(b"random:")) {
            Some(seed) => Adopt::Random(
                std::str::from_utf8(seed).ok().and_then(|seed| seed.parse().ok()).unwrap_or(0),
            ),
            None => {
                Adopt::After(number(c"MILLPOND_ADOPT").and_then(|n| n.try_into().ok()).unwrap_or(0))
            }
        },
        is_quiet: variable(c"MILLPOND_QUIET") == Some(b"1"),
        report_file: variable(c"MILLPOND_REPORT_FILE").and_then(|path| CString::new(path).ok()),
        internal_fd_min: internal_fd_min(),
    }
}

/// Read through libc and copied at once: std's `env` would take a lock that a thread may hold
/// across fork.
fn variable(name: &CStr) -> Option<&'static [u8]> {
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

/// Half of what the process may open, the lower half being the program's alone; but not so high
/// that the kernel's own table, which fork copies, grows large.
fn internal_fd_min() -> RawFd {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is ours to write.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) } == 0;
    let limit = if known { limit.rlim_cur.min(1 << 20) } else { 1024 };
    (limit / 2).min(1024) as RawFd
}

/// Whether a canonical path lies in one of the served directories.
pub fn is_served_path(path: &[u8]) -> bool {
    get().paths.iter().any(|served| {
        served.as_slice() == b"/"
            || (path.starts_with(served) && matches!(path.get(served.len()), None | Some(&b'/')))
    })
}
