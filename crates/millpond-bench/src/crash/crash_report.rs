//! The report, as text and as JSON.

use std::fmt;

use serde::Serialize;

use super::check::CheckFailure;
use super::history::History;
use super::model::Atoms;
use super::search::State;
use super::tree::TreeChange;

/// The number of steps before the cut that are shown. Chosen, not measured.
const STEPS_SHOWN: usize = 40;

pub struct Failed {
    pub state: State,
    pub complaint: CheckFailure,
}

pub struct CrashReport<'a> {
    pub history: &'a History,
    pub atoms: &'a Atoms,
    pub states: usize,
    pub is_all: bool,
    pub seed: u64,
    pub failed: usize,
    pub shortest: Option<Failed>,
}

#[derive(Serialize)]
pub struct Json {
    steps: Vec<String>,
    states: usize,
    all_states: bool,
    seed: u64,
    failed: usize,
    shortest: Option<JsonFailed>,
}

#[derive(Serialize)]
struct JsonFailed {
    /// The number of steps before the cut.
    cut: usize,
    lost: Vec<String>,
    how: String,
    words: String,
}

impl CrashReport<'_> {
    pub fn json(&self) -> Json {
        Json {
            steps: self.history.steps.iter().map(|step| step.text.clone()).collect(),
            states: self.states,
            all_states: self.is_all,
            seed: self.seed,
            failed: self.failed,
            shortest: self.shortest.as_ref().map(|failed| JsonFailed {
                cut: failed.state.cut,
                lost: failed.state.lost.iter().map(|number| self.describe(*number)).collect(),
                how: failed.complaint.how.clone(),
                words: failed.complaint.words.clone(),
            }),
        }
    }

    /// Describes an atom, and its step.
    fn describe(&self, number: usize) -> String {
        let atom = &self.atoms.all[number];
        let text = &self.history.steps[atom.step].text;
        let is_part = self.atoms.all.iter().filter(|other| other.step == atom.step).count() > 1;
        match &atom.change {
            TreeChange::Write { offset, data, .. } if is_part => {
                format!("{text}: {} bytes at {offset} of it", data.len())
            }
            _ => text.clone(),
        }
    }
}

impl fmt::Display for CrashReport<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let steps = self.history.steps.len();
        let which =
            if self.is_all { "all".into() } else { format!("a sample; seed {}", self.seed) };
        writeln!(f, "{steps} steps, {} states ({which}), {} failed", self.states, self.failed)?;
        let Some(Failed { state, complaint }) = &self.shortest else { return Ok(()) };
        writeln!(f, "\nThe smallest loss that fails: a power cut after step {}", state.cut)?;
        let first = state.cut.saturating_sub(STEPS_SHOWN);
        if first > 0 {
            writeln!(f, "         {first} steps before")?;
        }
        for (number, step) in self.history.steps.iter().enumerate().take(state.cut).skip(first) {
            let of_step = |lost: &&usize| self.atoms.all[**lost].step == number;
            let lost: Vec<_> = state.lost.iter().filter(of_step).collect();
            let parts = self.atoms.all.iter().filter(|atom| atom.step == number).count();
            let mark = match lost.len() {
                0 => "    ",
                lost if lost == parts => "LOST",
                _ => "part",
            };
            writeln!(f, "  {mark} {:4}. {}", number + 1, step.text)?;
            if mark == "part" {
                for number in lost {
                    writeln!(f, "  LOST        {}", self.describe(*number))?;
                }
            }
        }
        writeln!(f, "  The check: {}", complaint.how)?;
        complaint.words.lines().try_for_each(|line| writeln!(f, "    {line}"))
    }
}
