//! Starts runs in child processes, two at a time, and shrinks a failing one.

use std::io::Read;
use std::process::{Child, Command, Stdio};

use crate::spec::Spec;

/// A successful run.
pub struct Run {
    pub steps: usize,
    pub turns: u64,
    pub line: String,
}

/// Schedules that are tried with fewer steps before the left-out steps count as necessary.
const SCHEDULES: u64 = 20;

/// The outcome of each run.
pub fn tries(specs: &[Spec]) -> Vec<(&Spec, Result<Run, String>)> {
    let together = |some: &'_ [Spec]| -> Vec<_> {
        let started: Vec<Child> = some.iter().map(start).collect();
        started.into_iter().map(end).collect()
    };
    specs.iter().zip(specs.chunks(2).flat_map(together)).collect()
}

fn start(spec: &Spec) -> Child {
    Command::new(std::env::current_exe().expect("this program"))
        .args(["one_run", "--exact", "--nocapture", "--test-threads=1"])
        .env(Spec::variable(), spec.to_string())
        .env("RUST_BACKTRACE", "0")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("a process of this program")
}

fn end(mut child: Child) -> Result<Run, String> {
    let (mut said, mut wrong) = (String::new(), String::new());
    // The output on standard error fits into its pipe.
    child.stdout.take().expect("a pipe").read_to_string(&mut said).expect("text");
    child.stderr.take().expect("a pipe").read_to_string(&mut wrong).expect("text");
    let status = child.wait().expect("its end");
    let line = said.lines().find_map(|line| line.find("run: ").map(|at| &line[at..]));
    match (status.success(), line) {
        (true, Some(line)) => {
            let number = |after: &str| -> u64 {
                let rest = &line[line.find(after).expect("a report") + after.len()..];
                rest.split_whitespace().next().and_then(|word| word.parse().ok()).expect("a number")
            };
            let turns =
                line.split(": ").nth(2).and_then(|rest| rest.split(' ').next()?.parse().ok());
            Ok(Run {
                steps: number("run: ") as usize,
                turns: turns.expect("a number"),
                line: line.to_string(),
            })
        }
        _ => Err(format!("{status}\n{said}\n{wrong}")),
    }
}

/// A small set of steps that still fails, with some schedule.
pub fn shrink(failed: &Spec) -> Spec {
    let mut spec = failed.clone();
    // Keeps no step, so the run only counts them.
    let nothing = Spec { keep: Some(vec![usize::MAX]), ..failed.clone() };
    let Ok(run) = end(start(&nothing)) else { return spec };
    let mut keep: Vec<usize> = (0..run.steps).collect();
    let mut piece = keep.len().div_ceil(2);
    while piece > 0 {
        let mut at = 0;
        while at < keep.len() {
            let mut fewer = keep.clone();
            fewer.drain(at..(at + piece).min(keep.len()));
            let candidates: Vec<Spec> = (0..SCHEDULES)
                .map(|more| Spec {
                    schedule: failed.schedule + more,
                    keep: Some(fewer.clone()),
                    ..failed.clone()
                })
                .collect();
            let failing = (!fewer.is_empty())
                .then(|| tries(&candidates).into_iter().find(|(_, tried)| tried.is_err()))
                .flatten()
                .map(|(candidate, _)| candidate.clone());
            match failing {
                Some(candidate) => {
                    println!("fails with {} steps: {candidate}", fewer.len());
                    (spec, keep) = (candidate, fewer);
                }
                None => at += piece,
            }
        }
        piece = if piece == 1 { 0 } else { piece.div_ceil(2) };
    }
    spec
}
