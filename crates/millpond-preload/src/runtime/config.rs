//! What the environment says, read once when the library is loaded.
//!
//! | variable | meaning |
//! |---|---|
//! | `MILLPOND_PATHS` | the directories whose files are served: absolute, canonical, `:` between; default: the current one |
//! | `MILLPOND_CACHE_BYTES` | the engine's memory limit; default: the engine's |
//! | `MILLPOND_BACKING` | `buffered` (default) or `direct` |
//! | `MILLPOND_MODE` | `through` (default) or `back`; see `late` |
//! | `MILLPOND_KEEPER` | where the keeper listens that writes back what this process leaves |
//! | `MILLPOND_HIT_PATH` | `0` switches the lock-free hit path off |
//! | `MILLPOND_QUIET` | `1`: no line on stderr at the end |
//! | `MILLPOND_REPORT_FILE` | a file to append one line to at the end; see `report` |

use std::ffi::{CStr, CString};
use std::os::fd::RawFd;
use std::sync::OnceLock;

use millpond::{Backing, WriteMode};

pub struct Config {
    pub paths: Vec<Vec<u8>>,
    pub cache_bytes: Option<u64>,
    pub backing: Backing,
    pub mode: WriteMode,
    pub keeper: Option<String>,
    pub hit_path: bool,
    pub is_quiet: bool,
    pub report_file: Option<CString>,
    /// What the process runs, for the report.
    pub program: String,
    /// Descriptors of the library's own get numbers from here on, so that the program finds the
    /// lowest ones free, as it would without us.
    pub internal_fd_min: RawFd,
}

static CONFIG: OnceLock<Config> = OnceLock::new();

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
        keeper: variable(c"MILLPOND_KEEPER")
            .and_then(|text| std::str::from_utf8(text).ok())
            .filter(|text| !text.is_empty())
            .map(str::to_owned),
        hit_path: variable(c"MILLPOND_HIT_PATH") != Some(b"0"),
        is_quiet: variable(c"MILLPOND_QUIET") == Some(b"1"),
        report_file: variable(c"MILLPOND_REPORT_FILE").and_then(|path| CString::new(path).ok()),
        program: std::fs::read_link("/proc/self/exe")
            .map(|path| path.to_string_lossy().replace([' ', '\n'], "_"))
            .unwrap_or_default(),
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
