//! Cleanup after a signal: removes the benchmark's files and ends its child processes.
//!
//! - I1. Every file has a name with this process' number, in the measured directory
//!   ([`NamedFile`](super::data::NamedFile) and others), or is a memory cgroup of such a name.
//! - I2. A thread that creates a named file holds the [`creation_lock`](creation_lock()). The cleanup takes it and
//!   keeps it, so no file is created after the cleanup has begun.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use super::creation_lock::creation_lock;
use super::loop_mount::LoopMount;
use crate::descendants::end_children;
use crate::failure::{Context, Result};

/// Makes a signal that ends the process clean up in `dir` first.
pub fn watch(dir: &Path) -> Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).context("catching signals")?;
    let dir = dir.to_owned();
    thread::spawn(move || {
        if let Some(signal) = signals.forever().next() {
            let _shut = creation_lock();
            end_children(std::process::id());
            clean(&dir);
            // The exit status that a shell reports for the signal.
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
        // A directory of programs may contain a mounted file system.
        LoopMount::remove_of(&path, &own);
        // If it is not a file, it is a directory.
        let _ = fs::remove_file(&path).or_else(|_| fs::remove_dir_all(&path));
    }
}
