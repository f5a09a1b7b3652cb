//! The whole engine, including its own threads, under one scheduler: each run is determined by a
//! seed.
//!
//! `scripts/schedule` builds this test, the engine and the range locks with `--cfg scheduled`, and
//! runs it. Each run is a separate process, as it must not inherit the contents of a `static`. It
//! prints a line whose trace is a hash of all steps of the scheduler. `scripts/schedule --run
//! KIND:SEED` repeats a run, with the same line byte for byte. A failing run is repeated with fewer
//! and fewer of its steps, and printed with the remaining ones.
//!
//! The checks are those of `linearizable` and `crash`, whose files are included.
#![cfg(scheduled)]

extern crate millpond_schedule as std;

#[path = "../linearizable/plan.rs"]
mod plan;

#[path = "../linearizable/record.rs"]
#[expect(dead_code, reason = "what only its own test uses")]
mod record;

#[path = "../linearizable/call.rs"]
mod call;

#[path = "../linearizable/faces.rs"]
mod faces;

#[path = "../linearizable/history.rs"]
mod history;

#[path = "../crash.rs"]
mod crash;

#[path = "../common/mod.rs"]
mod common;

mod spec;

mod child_runs;

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use millpond::sim::SimOptions;
use millpond::{BackendChoice, Engine, File, WriteMode};

use child_runs::{shrink, tries};
use common::{Random, read_write, run_and_stop, scaled, temp_dir};
use plan::{Face, Plan};
use record::Setup;
use spec::{Kind, Spec};

/// Histories of one engine.
const HISTORIES: u32 = 3;

/// Runs in a child process.
#[test]
fn one_run() {
    let Some(spec) = Spec::from_environment() else { return };
    let (steps, report) = std::run(spec.schedule, || match spec.kind {
        Kind::Crash => crash::run_case_with_steps(spec.seed, |number| spec.keeps(number)),
        kind => histories(kind, &spec),
    });
    println!("run: {steps} steps, {report}");
    assert_eq!(report.left, [""; 0], "threads that do not end");
}

/// Runs the kept steps; returns the number of all steps.
fn histories(kind: Kind, spec: &Spec) -> usize {
    let mut random = Random(spec.seed);
    let mut sim = SimOptions::new(random.next())
        .delay_us_max(random.below(200))
        .short_per_mille(random.below(400));
    let errors = matches!(kind, Kind::FileErrors | Kind::FacesErrors);
    if errors {
        sim = sim.error_per_mille(1 + random.below(200));
    }
    let device = sim.device();
    if errors && random.chance(500) {
        // A range that fails as long as errors are on.
        let at = random.below(96 << 10);
        device.file(0).fail_range(at..at + 1 + random.below(20_000), libc::EIO);
    }
    let faces: &'static [Face] = match kind {
        Kind::Faces | Kind::FacesErrors => &Face::ALL,
        _ => &[Face::File],
    };
    let backend = BackendChoice::Sim(sim.clone());
    let setup = Setup::new(&mut random, "sim", &backend, errors.then_some(&sim), faces);
    let mut plans = setup.plans(&mut random, HISTORIES);
    let count = plans.iter().flat_map(|plan| &plan.threads).map(Vec::len).sum();
    let mut numbers = 0..;
    let steps = plans.iter_mut().flat_map(|plan: &mut Plan| &mut plan.threads);
    steps.for_each(|steps| steps.retain(|_| spec.keeps(numbers.next().expect("no end"))));
    let (dir, over) = (temp_dir(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        if random.chance(500) {
            let (dir, over, random) = (dir.path(), &over, random.fork());
            scope.spawn(|| disturb(setup.engine(), dir, over, random));
        }
        run_and_stop(&over, || setup.run_plans(&plans, dir.path()));
    });
    assert_eq!(device.violations(), [""; 0]);
    count
}

/// Other operations on the engine and on other files, which must have no effect on the tested file.
fn disturb(engine: &Engine, dir: &Path, over: &AtomicBool, mut random: Random) {
    let limit = engine.cache_bytes();
    let mut others: Vec<File> = Vec::new();
    while !over.load(Relaxed) {
        match random.below(7) {
            0 => drop(engine.set_cache_bytes(limit / (1 + random.below(4)))),
            1 => drop(engine.set_cache_bytes(limit)),
            2 if others.len() < 3 => {
                let mode = [WriteMode::Back, WriteMode::Through][random.below(2) as usize];
                let path = dir.join(format!("other {}", random.below(2)));
                others.extend(engine.open(path, &read_write().write_mode(mode)));
            }
            2 | 3 => drop(others.pop()),
            4 => engine.set_hit_path(random.chance(700)),
            5 => drop((engine.stats(), engine.dump())),
            _ => {
                let Some(other) = others.last() else { continue };
                let at = random.below(60_000);
                let mut bytes = vec![7; random.below(20_000) as usize];
                let _ = other.write_at(&bytes, at);
                if let Ok(moved) = other.read_at(&mut bytes, at) {
                    let known = |byte: &u8| matches!(byte, 0 | 7);
                    assert!(bytes[..moved].iter().all(known), "bytes of another file");
                }
            }
        }
        for _ in 0..random.below(20) {
            std::hint::spin_loop();
        }
    }
    let _ = engine.set_cache_bytes(limit);
}

/// Goal: for any schedule of the program's and the engine's threads, there is an order of the
/// operations that explains their outcomes; synced bytes survive a power cut; no thread waits
/// indefinitely; all threads end.
/// Method: runs of each kind, from MILLPOND_TEST_SEED on, as many as CI has time for.
#[test]
fn runs() {
    if Spec::from_environment().is_some() {
        return;
    }
    let first = std::env::var("MILLPOND_TEST_SEED").ok().and_then(|seed| seed.parse().ok());
    let first: u64 = first.unwrap_or(1);
    for kind in Kind::ALL {
        let specs: Vec<Spec> = (first..first + u64::from(scaled(kind.count())))
            .map(|seed| Spec::new(kind, seed))
            .collect();
        let (mut steps, mut turns) = (0, 0);
        for (spec, tried) in tries(&specs) {
            match tried {
                Ok(run) => (steps, turns) = (steps + run.steps, turns + run.turns),
                Err(failed) => {
                    println!("{failed}");
                    let spec = shrink(spec);
                    panic!("{kind:?}: scripts/schedule --run {spec}");
                }
            }
        }
        println!("{kind:?}: {} runs, {steps} steps, {turns} turns", specs.len());
    }
}

/// Goal: a run gives the same trace each time, so that a failure can be analysed.
#[test]
fn a_run_is_the_same_again() {
    if Spec::from_environment().is_some() {
        return;
    }
    for kind in Kind::ALL {
        let specs: Vec<Spec> = (1..=scaled(6)).map(|seed| Spec::new(kind, seed.into())).collect();
        let lines = || -> Vec<String> {
            tries(&specs)
                .into_iter()
                .map(|(spec, tried)| match tried {
                    Ok(run) => run.line,
                    Err(failed) => panic!("{spec}: {failed}"),
                })
                .collect()
        };
        assert_eq!(lines(), lines());
    }
}
