//! Random operations on one file, by several descriptors, against a model of it (`programs/operations.c`), while
//! files are handed to the kernel at random moments; also with caches of a few pages.
//!
//! `MILLPOND_TEST_SCALE=100` runs 100,000 operations for each seed.

mod common;

use common::{Mode, Pond, ServedFiles, succeed};

const OPERATIONS: f64 = 1000.0;
const SEEDS: u64 = 4;

fn operations() -> String {
    let scale = std::env::var("MILLPOND_TEST_SCALE").ok().and_then(|scale| scale.parse().ok());
    ((OPERATIONS * scale.unwrap_or(1.0)) as u64).to_string()
}

/// Runs each seed with a cache of a few pages, and with one that holds the whole file.
fn ponds(mode: Mode) -> impl Iterator<Item = (u64, Pond)> {
    let first = std::env::var("MILLPOND_TEST_SEED").ok().and_then(|seed| seed.parse().ok());
    let first = first.unwrap_or(1);
    (first..first + SEEDS).map(move |seed| {
        let cache_bytes = if seed % 2 == 0 { 256 << 10 } else { 8 << 20 };
        let pond = Pond::with_cache_bytes(cache_bytes).in_mode(mode);
        (seed, pond.serving(ServedFiles::HandOver(seed)))
    })
}

fn agree(mode: Mode) {
    for maps in ["nomap", "map"] {
        for (seed, pond) in ponds(mode) {
            println!("MILLPOND_TEST_SEED={seed} in {mode:?}, {maps}");
            let program = pond.compile("operations.c", &["-O1"]);
            let operations = operations();
            let arguments = [&seed.to_string(), &operations, maps];
            let said = succeed(pond.served(&program).args(arguments));
            assert!(said.starts_with(&format!("{operations} operations")), "{said}");
            let report = pond.report();
            assert!(mode == Mode::Through || report.served_bytes > 1000, "{}", report.lines);
        }
    }
}

/// Goal: the model agrees with the kernel.
#[test]
fn the_kernel_agrees_with_the_model() {
    for maps in ["nomap", "map"] {
        for (seed, pond) in ponds(Mode::Through) {
            let program = pond.compile("operations.c", &["-O1"]);
            succeed(pond.plain(&program).args([&seed.to_string(), &operations(), maps]));
        }
    }
}

#[test]
fn the_library_agrees_with_the_model() {
    agree(Mode::Through);
}

#[test]
fn it_does_in_mode_back() {
    agree(Mode::Back);
}

#[test]
fn it_does_with_direct_backing() {
    agree(Mode::BackDirect);
}
