//! The whole engine, its own threads too, under one scheduler: what happens is a function of a seed.
//!
//! `scripts/schedule` builds this, the engine and the range locks with `--cfg scheduled`, and runs it. Each run is a
//! process of its own, as it has to begin with nothing that another one left in a `static`. It prints a line, of
//! which the trace is a hash of all the scheduler did: `scripts/schedule --run KIND:SEED` repeats a run, and it is the
//! same byte for byte. What fails is tried with fewer and fewer of its steps, and printed with those that are left.
//!
//! What is checked is what `linearizable` and `crash` check, whose files these are.
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

mod tried;

use millpond::{BackendChoice, SimOptions};

use common::{Random, scaled, temp_dir};
use plan::{Face, Plan};
use record::Setup;
use spec::{Kind, Spec};
use tried::{shrink, tries};

/// Histories of one engine.
const HISTORIES: u32 = 3;

/// Of a run in a process of its own.
#[test]
fn one_run() {
    let Some(spec) = Spec::from_environment() else { return };
    let (steps, report) = std::run(spec.schedule, || match spec.kind {
        Kind::Crash => crash::carry_out_kept(spec.seed, |number| spec.keeps(number)),
        kind => histories(kind, &spec),
    });
    println!("run: {steps} steps, {report}");
    assert_eq!(report.left, [""; 0], "threads that do not end");
}

/// How many steps there are; and those that are kept of them are carried out.
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
        // A place that is bad for as long as there are errors.
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
    setup.run_plans(&plans, temp_dir().path());
    assert_eq!(device.violations(), [""; 0]);
    count
}

/// Goal: whatever the order in which threads of a program and of the engine run, there is an order of the operations
/// that explains what was seen; what was synced survives a power cut; nobody waits for ever; all threads end.
/// Method: runs of each kind, from MILLPOND_TEST_SEED on, so many that CI has time for.
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

/// Goal: a run is the same whenever it is repeated, so that a failure can be looked into.
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
