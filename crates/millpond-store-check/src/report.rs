//! What was found out, as data and in words.

use std::fmt;

use serde::Serialize;

/// What was found out about a promise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Nothing was seen that breaks it.
    Kept,
    /// It was seen to be broken: see [`Promise::seen`].
    Broken,
    /// The store refuses such requests.
    NotOffered,
    /// It could not be tried, or nothing came of it: see [`Promise::seen`].
    NotTried,
}

/// One promise of a store.
#[derive(Debug, Clone, Serialize)]
pub struct Promise {
    /// Stays the same across versions.
    pub name: &'static str,
    /// What is promised, in words.
    pub words: &'static str,
    pub verdict: Verdict,
    /// Attempts: of a race, its rounds.
    pub tries: u64,
    /// Attempts whose outcome the store left open (timeouts, conflicts, errors).
    pub undecided: u64,
    /// What broke it, why it was not tried, or what left attempts undecided; the first ones.
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

    /// Unless it was seen to be broken.
    pub(crate) fn set_unless_broken(&mut self, verdict: Verdict, why: String) {
        if self.verdict != Verdict::Broken {
            self.verdict = verdict;
            self.seen = vec![why];
        }
    }

    /// What left everything open shows nothing.
    pub(crate) fn finished(mut self) -> Self {
        if self.verdict == Verdict::Kept && self.undecided >= self.tries {
            self.verdict = Verdict::NotTried;
        }
        self
    }
}

/// What a store was found to promise.
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
    /// What is no promise, and good to know.
    pub notes: Vec<String>,
}

impl Report {
    /// Whether a promise was tried and is kept.
    pub fn is_kept(&self, name: &str) -> bool {
        self.promises.iter().any(|p| p.name == name && p.verdict == Verdict::Kept)
    }

    /// Whether one has this verdict.
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
