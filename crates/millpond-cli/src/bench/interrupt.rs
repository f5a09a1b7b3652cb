//! An end by a signal: what a benchmark has made is removed, and what it has started ended.
//!
//! - I1. All that is made has a name with this process' number, in the directory that is measured
//!   ([`NamedFile`](super::data::NamedFile) and others), or is a memory cgroup of such a name.
//! - I2. Whoever makes a name holds the [`gate`](gate()): none is made once the cleaning has begun, for the gate
//!   stays shut until the process ends.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use super::gate::gate;
use super::loop_mount::LoopMount;
use crate::descendants::end_children;
use crate::failure::{Context, Result};

/// From now on a signal that ends the process cleans up in `dir` first.
pub fn watch(dir: &Path) -> Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).context("catching signals")?;
    let dir = dir.to_owned();
    thread::spawn(move || {
        if let Some(signal) = signals.forever().next() {
            let _shut = gate();
            end_children(std::process::id());
            clean(&dir);
            // As a shell tells of it.
            std::process::exit(128 + signal);
        }
    });
    Ok(())
}

fn clean(dir: &Path) {
    let own = std::process::id().to_string();
    let is_own = |path: &PathBuf| {
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
        let name = name.unwrap_or_default();
        let rest = name.strip_prefix("millpond-bench-").unwrap_or_default();
        rest.split(['-', '.']).any(|part| part == own)
    };
    super::mixed::leave_limit();
    LoopMount::remove_of(dir, &own);
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    for path in entries.map(|entry| entry.path()).filter(is_own) {
        // Where programs are measured, a file system may be mounted inside.
        LoopMount::remove_of(&path, &own);
        // What is no file is a directory.
        let _ = fs::remove_file(&path).or_else(|_| fs::remove_dir_all(&path));
    }
}
