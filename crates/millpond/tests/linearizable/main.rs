//! Histories of a few threads on one file, recorded and checked for linearizability.
//!
//! `stress` and `coherence` find only errors that their data shows. Here a model of the file
//! (`history`) has to explain every outcome, in some order that respects which operation ended
//! before which. So lengths, offsets of appends, bytes beyond a truncation, views, and reads that
//! end with the file are checked, too.
//!
//! Histories are short, so that the checker can explain them, and many: by default some hundreds of
//! each back end, more with `MILLPOND_TEST_SCALE`. The seed determines the operations, but not
//! their interleaving. To reproduce a failure, repeat the test with the seed.

mod plan;

mod record;

mod call;

mod faces;

mod history;

mod history_tests;

#[path = "../common/mod.rs"]
mod common;

use std::time::{Duration, Instant};

use millpond::BackendChoice;
use millpond::sim::SimOptions;

use common::{Random, back_ends, scaled, temp_dir, within};
use plan::Face;
use record::Setup;

/// Goal: for all operations of a few threads on one file there is an order that explains their
/// outcomes.
/// Method: random histories on every back end, each engine with another page size, cache, backing
/// and write mode.
#[test]
fn histories_are_linearizable() {
    let mut random = Random::from_environment();
    for (name, backend) in back_ends(random.next()) {
        let mut random = random.fork();
        // Back ends with real files take longer.
        let engines = scaled(if matches!(name, "memory" | "sim") { 16 } else { 8 });
        within(Duration::from_secs(60 + u64::from(engines)), name, move || {
            let (dir, started) = (temp_dir(), Instant::now());
            let (mut operations, histories) = (0, 40);
            for _ in 0..engines {
                let setup = Setup::new(&mut random, name, &backend, None, &[Face::File]);
                operations += setup.run(&mut random, histories, dir.path());
            }
            let (count, took) = (engines * histories, started.elapsed());
            println!("{name}: {count} histories, {operations} operations, {took:.1?}");
        });
    }
}

/// Goal: a failed operation has happened, in part or not at all, at one moment. No acknowledged
/// write is lost.
/// Method: the same on a device that fails at random, after any part was transferred.
#[test]
fn histories_with_errors_are_linearizable() {
    let mut random = Random::from_environment();
    let engines = scaled(20);
    within(Duration::from_secs(60 + u64::from(engines)), "errors", move || {
        let dir = temp_dir();
        let mut operations = 0;
        for _ in 0..engines {
            let sim = SimOptions::new(random.next())
                .delay_us_max(random.below(60))
                .short_per_mille(random.below(400))
                .error_per_mille(1 + random.below(200));
            let backend = BackendChoice::Sim(sim.clone());
            let faces = &[Face::File];
            let setup = Setup::new(&mut random, "sim with errors", &backend, Some(&sim), faces);
            operations += setup.run(&mut random, 20, dir.path());
        }
        println!("{} histories, {operations} operations", engines * 20);
    });
}

/// Goal: the same for operations through every API, with any number of requests of a queue or a
/// pipeline in flight. Futures that are dropped change nothing.
#[test]
fn histories_through_all_faces_are_linearizable() {
    let mut random = Random::from_environment();
    for (name, backend) in back_ends(random.next()) {
        let mut random = random.fork();
        let engines = scaled(if matches!(name, "memory" | "sim") { 10 } else { 4 });
        within(Duration::from_secs(60 + u64::from(engines)), name, move || {
            let (dir, started) = (temp_dir(), Instant::now());
            let (mut operations, mut ended) = (0, [0; Face::ALL.len()]);
            for _ in 0..engines {
                let setup = Setup::new(&mut random, name, &backend, None, &Face::ALL);
                operations += setup.run(&mut random, 40, dir.path());
                ended.iter_mut().zip(setup.ended()).for_each(|(all, one)| *all += one);
            }
            let has_pipeline = matches!(name, "memory" | "sim");
            println!("{name}: {operations} operations, {ended:?}, {:.1?}", started.elapsed());
            let least = ended.iter().take(if has_pipeline { 4 } else { 3 }).min();
            assert!(*least.unwrap() > 50, "{name}: some face was not asked: {ended:?}");
        });
    }
}

/// Goal: the same on a device that fails at random.
#[test]
fn histories_through_all_faces_with_errors_are_linearizable() {
    let mut random = Random::from_environment();
    let engines = scaled(20);
    within(Duration::from_secs(60 + u64::from(engines)), "errors", move || {
        let dir = temp_dir();
        for _ in 0..engines {
            let sim = SimOptions::new(random.next())
                .delay_us_max(random.below(60))
                .short_per_mille(random.below(400))
                .error_per_mille(1 + random.below(200));
            let backend = BackendChoice::Sim(sim.clone());
            let name = "sim with errors";
            let setup = Setup::new(&mut random, name, &backend, Some(&sim), &Face::ALL);
            setup.run(&mut random, 20, dir.path());
        }
    });
}
