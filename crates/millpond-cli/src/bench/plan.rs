//! How much to measure, and where: what was asked for, and how long each suite may take.
//!
//! - P1. A suite's share of the time is for all its pairs: each gets an equal part of what is left, so what
//!   preparing takes shortens the rounds, and the sum does not grow.
//! - P2. A pair takes [`Rounds::MIN`] rounds, whatever the clock says: fewer have no quartiles.
//!
//! [`Plan::tell`] is what a person who waits sees: at which case it is, and how long it may still take.

use std::cell::Cell;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

/// What is asked for, and the time left for it.
#[derive(Debug)]
pub struct Plan {
    pub dir: PathBuf,
    pub quick: bool,
    shrink: u32,
    only: Option<String>,
    threads_max: u32,
    pace: Cell<Option<Pace>>,
}

/// What a suite may take, and how far it is.
#[derive(Debug, Clone, Copy)]
pub struct Pace {
    pub name: &'static str,
    pub ends: Instant,
    /// Pairs that are still to come, about.
    pub pairs: u32,
    /// What the suites after this one may take.
    pub after: Duration,
}

/// How many rounds a pair takes: at most so many, and no more once the time is up.
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

    /// From now on `pace` holds. Who measures only some cases wants all their rounds.
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

    /// Says what is being measured, and on a terminal what time is left.
    pub fn tell(&self, what: &str) {
        if !std::io::stderr().is_terminal() {
            return;
        }
        let Some(pace) = self.pace.get() else { return };
        let left = pace.ends.saturating_duration_since(Instant::now()) + pace.after;
        let left = if self.only.is_some() { String::new() } else { about(left) };
        // Written over by the next.
        eprint!("\r\x1b[2K{}: {what}{left}", pace.name);
    }

    /// Nothing is being measured any more.
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

    /// How many operations make a slice.
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
