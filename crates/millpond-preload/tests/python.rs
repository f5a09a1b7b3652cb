//! python3: random operations against a model, threads, mappings, forks.

mod common;

use std::path::Path;

use common::{ALL_MODES, Mode, Pond, require};

#[test]
fn operations_against_a_model() {
    require("python3", "python3");
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/model.py");
    for (seed, mode) in [1, 2, 3].into_iter().flat_map(|seed| ALL_MODES.map(|mode| (seed, mode))) {
        let cache_bytes = if seed == 1 { 256 << 10 } else { 8 << 20 };
        let pond = Pond::with_cache_bytes(cache_bytes).in_mode(mode);
        pond.run("python3", &["-B", program.to_str().unwrap(), &seed.to_string()]);
        // The program writes the expected bytes to a second file; the kernel reads both here.
        let files = ["data", "expected"].map(|name| std::fs::read(pond.path(name)).unwrap());
        assert!(files[0] == files[1], "seed {seed}");
        let report = pond.report();
        match mode {
            // The kernel serves files with holes and short files.
            Mode::Through => {}
            // In mode back the kernel serves files from their first mapping on, too.
            _ => assert!(report.served_bytes >= 30 << 20, "served too little:\n{}", report.lines),
        }
    }
}
