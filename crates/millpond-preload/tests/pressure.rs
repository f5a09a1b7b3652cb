//! The cache gives memory back under memory pressure.

mod common;

use common::{MODES, Pond, succeed};

/// Goal: when the kernel reports that tasks stall for lack of memory, a process frees most of its cache, and its
/// reads are correct.
#[test]
fn the_cache_shrinks_under_pressure() {
    for mode in MODES {
        let pond = Pond::new().in_mode(mode);
        let program = pond.compile("pressure.c", &["-O1"]);
        let file = pond.aside("stalls");
        std::fs::write(&file, "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\n").unwrap();
        succeed(pond.served(&program).env("MILLPOND_PRESSURE_FILE", &file).arg(&file));
        let report = pond.report();
        assert!(report.shrunk > 0, "{}", report.lines);
    }
}
