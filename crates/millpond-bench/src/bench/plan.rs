//! Sizes and time limits of a benchmark.
//!
//! - P1. A suite's time is divided among its pairs: each gets an equal part of the remaining time,
//!   so time for preparation shortens the rounds, and the sum does not grow.
//! - P2. A pair takes at least [`Rounds::MIN`] rounds, also after the time is over: fewer have no
//!   quartiles.
//!
//! [`Plan::report_progress`] prints the progress: the present case, and the time that may remain.

use std::cell::Cell;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

/// The options, and the remaining time.
#[derive(Debug)]
pub struct Plan {
    pub dir: PathBuf,
    pub quick: bool,
    shrink: u32,
    only: Option<String>,
    threads_max: u32,
    pace: Cell<Option<Pace>>,
}

/// The time limit of a suite, and its progress.
#[derive(Debug, Clone, Copy)]
pub struct Pace {
    pub name: &'static str,
    pub ends: Instant,
    /// Estimated number of remaining pairs.
    pub pairs: u32,
    /// Time limits of the later suites.
    pub after: Duration,
}

/// The number of rounds of a pair: a maximum, and an end of the time.
#[derive(Debug, Clone, Copy)]
pub struct Rounds {
    max: u32,
    ends: Option<Instant>,
}

impl Rounds {
    const MIN: u32 = 3;

    pub fn exactly(max: u32) -> Self {
        Self { max, ends: None }
    }

    pub fn at_most(self, max: u32) -> Self {
        Self { max: self.max.min(max), ..self }
    }

    pub fn wants_more(&self, taken: u32) -> bool {
        let in_time = || taken < Self::MIN || self.ends.is_none_or(|ends| Instant::now() < ends);
        taken < self.max && in_time()
    }
}

impl Plan {
    pub fn new(dir: PathBuf, quick: bool, shrink: u32, only: Option<String>) -> Self {
        let cores = thread::available_parallelism().map_or(1, |cores| cores.get() as u32);
        Self { dir, quick, shrink, only, threads_max: cores.max(2), pace: Cell::new(None) }
    }

    /// Starts a suite with `pace`. With `--case` there is no time limit.
    pub fn begin(&self, pace: Pace) {
        self.pace.set(Some(pace));
    }

    /// For the next pair.
    pub fn rounds(&self) -> Rounds {
        let max = match (self.shrink, self.quick) {
            (2.., _) => 1,
            (_, true) => 5,
            (_, false) => 15,
        };
        let timed = self.pace.get().filter(|_| self.only.is_none() && self.shrink == 1);
        let Some(pace) = timed else { return Rounds::exactly(max) };
        let now = Instant::now();
        let left = pace.ends.saturating_duration_since(now);
        self.pace.set(Some(Pace { pairs: pace.pairs.saturating_sub(1), ..pace }));
        Rounds { max, ends: Some(now + left / pace.pairs.max(1)) }
    }

    /// Prints the case that is measured, and on a terminal the remaining time.
    pub fn report_progress(&self, what: &str) {
        if !std::io::stderr().is_terminal() {
            return;
        }
        let Some(pace) = self.pace.get() else { return };
        let left = pace.ends.saturating_duration_since(Instant::now()) + pace.after;
        let left = if self.only.is_some() { String::new() } else { about(left) };
        // Overwritten by the next line.
        eprint!("\r\x1b[2K{}: {what}{left}", pace.name);
    }

    /// Ends the progress output.
    pub fn end(&self) {
        if std::io::stderr().is_terminal() {
            eprint!("\r\x1b[2K");
        }
    }

    pub fn wants(&self, case: &str) -> bool {
        self.only.as_ref().is_none_or(|text| case.contains(text.as_str()))
    }

    pub fn slice(&self, full_ms: u64, quick_ms: u64) -> Duration {
        let ms = if self.quick { quick_ms } else { full_ms };
        Duration::from_millis(ms) / self.shrink
    }

    /// Number of operations of a slice.
    pub fn count(&self, full: usize, quick: usize) -> usize {
        (if self.quick { quick } else { full } / self.shrink as usize).max(1)
    }

    /// [`Plan::bytes`] of one of two sizes.
    pub fn bytes_of(&self, full: u64, quick: u64) -> u64 {
        self.bytes(if self.quick { quick } else { full })
    }

    /// A file size; shrunk, still a block for each of many threads.
    pub fn bytes(&self, bytes: u64) -> u64 {
        (bytes / u64::from(self.shrink)).max(1 << 20)
    }

    /// 1, 2, 4, .. threads; two even on a machine with one core.
    pub fn thread_counts(&self) -> impl Iterator<Item = u32> {
        let max = self.threads_max;
        (0..).map(|power| 1 << power).take_while(move |threads| *threads <= max)
    }
}

fn about(left: Duration) -> String {
    match left.as_secs() {
        0 => String::new(),
        left @ 1..90 => format!(" (about {left} s left)"),
        left => format!(" (about {} min left)", (left + 30) / 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paced(plan: &Plan, seconds: u64, pairs: u32) {
        let ends = Instant::now() + Duration::from_secs(seconds);
        plan.begin(Pace { name: "suite", ends, pairs, after: Duration::ZERO });
    }

    /// Goal: each pair gets its part of the time that is left, and three rounds when none is.
    #[test]
    fn pairs_share_the_time_of_a_suite() {
        let plan = Plan::new(PathBuf::new(), true, 1, None);
        assert!(plan.rounds().ends.is_none());
        paced(&plan, 1000, 4);
        let part = |rounds: Rounds| {
            rounds.ends.unwrap().saturating_duration_since(Instant::now()).as_secs_f64()
        };
        assert!((240.0..=250.0).contains(&part(plan.rounds())));
        assert!((320.0..=334.0).contains(&part(plan.rounds())));
        paced(&plan, 0, 0);
        let late = plan.rounds();
        assert!(late.wants_more(2) && !late.wants_more(3), "{late:?}");
        assert!(!late.at_most(2).wants_more(2));
        let some = Plan::new(PathBuf::new(), true, 1, Some("case".into()));
        paced(&some, 0, 0);
        assert!(some.rounds().wants_more(4) && !some.rounds().wants_more(5));
    }

    #[test]
    fn time_left_is_told_roughly() {
        let told = |s| about(Duration::from_secs(s));
        assert_eq!((&*told(0), &*told(45)), ("", " (about 45 s left)"));
        assert_eq!(told(170), " (about 3 min left)");
    }
}
