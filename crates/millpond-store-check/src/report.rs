//! The report of a check, as data and as text.

use std::fmt;

use serde::Serialize;

/// Result for a promise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// No violation was seen.
    Kept,
    /// A violation was seen: see [`Promise::seen`].
    Broken,
    /// The store refuses such requests.
    NotOffered,
    /// The test could not run, or all its attempts were undecided: see [`Promise::seen`].
    NotTried,
}

/// One promise of a store.
#[derive(Debug, Clone, Serialize)]
pub struct Promise {
    /// Stable across versions.
    pub name: &'static str,
    /// Description of the promise.
    pub words: &'static str,
    pub verdict: Verdict,
    /// Number of attempts; for races, of rounds.
    pub tries: u64,
    /// Number of undecided attempts (timeouts, conflicts, errors).
    pub undecided: u64,
    /// The first observations: violations, the reason why it was not tested, or the causes of undecided attempts.
    pub seen: Vec<String>,
}

impl Promise {
    pub(crate) fn new(name: &'static str, words: &'static str) -> Self {
        Self { name, words, verdict: Verdict::Kept, tries: 0, undecided: 0, seen: Vec::new() }
    }

    pub(crate) fn mark_broken(&mut self, what: String) {
        self.verdict = Verdict::Broken;
        if self.seen.len() < 10 {
            self.seen.push(what);
        }
    }

    pub(crate) fn mark_undecided(&mut self, why: String) {
        self.undecided += 1;
        if self.seen.len() < 3 {
            self.seen.push(why);
        }
    }

    /// Sets a verdict and its reason, unless a violation was seen.
    pub(crate) fn set_unless_broken(&mut self, verdict: Verdict, why: String) {
        if self.verdict != Verdict::Broken {
            self.verdict = verdict;
            self.seen = vec![why];
        }
    }

    /// Downgrades the verdict if all attempts were undecided.
    pub(crate) fn finished(mut self) -> Self {
        if self.verdict == Verdict::Kept && self.undecided >= self.tries {
            self.verdict = Verdict::NotTried;
        }
        self
    }
}

/// Results for all promises of a store.
///
/// # Examples
///
/// ```
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
///
/// use millpond_store_check::{Endpoint, Options, Promise, Verdict, check};
///
/// let store = std::sync::Arc::new(object_store::memory::InMemory::new());
/// let endpoints = [Endpoint::new("in memory", store)];
/// let report = check(&endpoints, &Options { racers: 4, rounds: 5, ..Options::default() }).await.unwrap();
/// assert!(!report.has(Verdict::Broken), "{report}");
/// if !report.is_kept("lost_replies") {
///     let found = report.promises.iter().find(|promise: &&Promise| promise.name == "lost_replies");
///     println!("{:?}; {}", found.map(|promise| promise.verdict), report.notes.join(", "));
/// }
/// # });
/// ```
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    pub endpoints: Vec<String>,
    pub promises: Vec<Promise>,
    /// Observations that concern no promise.
    pub notes: Vec<String>,
}

impl Report {
    /// Whether a promise was tested and is kept.
    pub fn is_kept(&self, name: &str) -> bool {
        self.promises.iter().any(|p| p.name == name && p.verdict == Verdict::Kept)
    }

    /// Whether a promise has this verdict.
    pub fn has(&self, verdict: Verdict) -> bool {
        self.promises.iter().any(|promise| promise.verdict == verdict)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "through {}", self.endpoints.join(", "))?;
        for promise in &self.promises {
            let verdict = match promise.verdict {
                Verdict::Kept => "kept",
                Verdict::Broken => "BROKEN",
                Verdict::NotOffered => "not offered",
                Verdict::NotTried => "not tried",
            };
            write!(f, "{verdict:>12}  {}: {}", promise.name, promise.words)?;
            write!(f, " ({} tried", promise.tries)?;
            if promise.undecided > 0 {
                write!(f, ", {} undecided", promise.undecided)?;
            }
            writeln!(f, ")")?;
            for seen in &promise.seen {
                writeln!(f, "{:>14}{seen}", "")?;
            }
        }
        self.notes.iter().try_for_each(|note| writeln!(f, "{:>12}  {note}", "note"))
    }
}
