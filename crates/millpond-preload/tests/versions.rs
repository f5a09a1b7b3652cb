//! Reads and writes of one file by several descriptors, while it is handed to the kernel.
//!
//! `MILLPOND_TEST_SEED` replays one seed; `MILLPOND_TEST_SCALE` multiplies the number of runs.

mod common;

use common::{ALL_MODES, Pond, ServedFiles, succeed};

const SEEDS: u64 = 1;
const STEPS: u32 = 12;

fn variable(name: &str) -> Option<f64> {
    std::env::var(name).ok()?.parse().ok()
}

/// Goal: no read returns a version older than that of the last write that had returned before it began.
///
/// Incident: when a file was handed back, its descriptions were bypassed one after the other. A write by a bypassed
/// description went to the kernel, and a read by one that was not yet bypassed returned old cached bytes.
#[test]
fn reads_are_never_older_than_the_last_write() {
    let pond = Pond::new();
    let program = pond.compile("versions.c", &["-O1"]);
    let first = variable("MILLPOND_TEST_SEED").map_or(1, |seed| seed as u64);
    let is_replay = variable("MILLPOND_TEST_SEED").is_some();
    let scale = variable("MILLPOND_TEST_SCALE").unwrap_or(1.0);
    let count = if is_replay { 1 } else { ((SEEDS as f64 * scale) as u64).max(1) };
    let steps = STEPS.to_string();
    let mut served_bytes = 0;
    for seed in first..first + count {
        let arguments = [seed.to_string(), steps.clone()];
        succeed(pond.plain(&program).args(&arguments));
        for mode in ALL_MODES {
            for files in [ServedFiles::Default, ServedFiles::HandOver(seed), ServedFiles::Eager] {
                println!("MILLPOND_TEST_SEED={seed} in {mode:?}, {files:?}");
                let pond = Pond::new().in_mode(mode).serving(files);
                succeed(pond.served(&program).args(&arguments));
                served_bytes += pond.report().served_bytes;
            }
        }
    }
    assert!(served_bytes > 10 << 20, "served {served_bytes} bytes");
}
