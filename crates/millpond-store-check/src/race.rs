//! Races: concurrent writes, and the check of their outcomes.

use std::sync::Arc;

use object_store::path::Path;
use object_store::{PutMode, UpdateVersion};
use tokio::sync::Barrier;

use crate::open::Endpoint;
use crate::writes::{WriteOutcome, Writer, new_id};

/// Outcome of a race in which no promise was broken.
#[derive(Debug)]
pub(crate) enum RaceOutcome {
    Won(UpdateVersion),
    /// No write succeeded, and some have an unknown outcome, for the contained reason.
    Undecided(String),
    NotOffered(String),
}

/// Starts `racers` concurrent writes of `at`, spread over the endpoints.
pub(crate) async fn race(
    endpoints: &[Endpoint],
    writer: Writer,
    racers: usize,
    at: &Path,
    mode: &PutMode,
) -> Vec<(String, WriteOutcome)> {
    let together = Arc::new(Barrier::new(racers));
    let tasks: Vec<_> = (0..racers)
        .map(|racer| {
            let store = Arc::clone(&endpoints[racer % endpoints.len()].store);
            let (together, at, mode) = (Arc::clone(&together), at.clone(), mode.clone());
            tokio::spawn(async move {
                let id = new_id();
                together.wait().await;
                let outcome = writer.put(&*store, &at, &id, mode).await;
                (id, outcome)
            })
        })
        .collect();
    let mut outcomes = Vec::with_capacity(racers);
    for task in tasks {
        outcomes.push(task.await.expect("a racer does not panic"));
    }
    outcomes
}

/// Compares the outcomes of the writes with the stored object. An error describes the broken promise.
pub(crate) fn judge_race(
    outcomes: &[(String, WriteOutcome)],
    stored: Option<&str>,
) -> Result<RaceOutcome, String> {
    let won: Vec<_> =
        outcomes.iter().filter(|(_, outcome)| matches!(outcome, WriteOutcome::Done(_))).collect();
    let whose = outcomes.iter().find(|(id, _)| Some(id.as_str()) == stored);
    let first = |why: fn(&WriteOutcome) -> Option<String>| {
        outcomes.iter().find_map(|(_, outcome)| why(outcome)).unwrap_or_default()
    };
    match (won.as_slice(), whose) {
        ([], _)
            if outcomes
                .iter()
                .any(|(_, outcome)| matches!(outcome, WriteOutcome::NotOffered(_))) =>
        {
            Ok(RaceOutcome::NotOffered(first(|outcome| match outcome {
                WriteOutcome::NotOffered(why) => Some(why.clone()),
                _ => None,
            })))
        }
        ([], Some((_, WriteOutcome::Refused))) => {
            Err("the stored object is of a refused write".into())
        }
        ([], _) if outcomes.iter().all(|(_, outcome)| matches!(outcome, WriteOutcome::Refused)) => {
            Err("all writes were refused, although the condition held".into())
        }
        ([], _) => Ok(RaceOutcome::Undecided(first(|outcome| match outcome {
            WriteOutcome::Unknown(why) => Some(why.clone()),
            _ => None,
        }))),
        ([(_, WriteOutcome::Done(version))], Some((_, WriteOutcome::Done(_)))) => {
            Ok(RaceOutcome::Won(version.clone()))
        }
        ([_], Some(_)) => {
            Err("one write succeeded, but the stored object is of another write".into())
        }
        ([_], None) => {
            Err("one write succeeded, but the stored object is of none of the writes".into())
        }
        (many, _) => Err(format!("{} of {} writes succeeded", many.len(), outcomes.len())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn done() -> WriteOutcome {
        WriteOutcome::Done(UpdateVersion { e_tag: None, version: None })
    }

    fn judged(outcomes: Vec<WriteOutcome>, stored: Option<&str>) -> Result<RaceOutcome, String> {
        let ids = ["a", "b", "c"].map(String::from);
        judge_race(&ids.into_iter().zip(outcomes).collect::<Vec<_>>(), stored)
    }

    #[test]
    fn a_race_is_judged_by_outcomes_and_stored_object() {
        use WriteOutcome::{Refused, Unknown};
        let lost = || Unknown("reset".into());
        assert!(matches!(
            judged(vec![done(), Refused, lost()], Some("a")),
            Ok(RaceOutcome::Won(_))
        ));
        assert!(matches!(judged(vec![Refused, lost()], Some("b")), Ok(RaceOutcome::Undecided(_))));
        assert!(matches!(judged(vec![lost(), lost()], None), Ok(RaceOutcome::Undecided(_))));
        for (outcomes, stored) in [
            (vec![done(), done(), Refused], Some("a")),
            (vec![done(), Refused], Some("b")),
            (vec![done(), lost()], Some("b")),
            (vec![done(), Refused], None),
            (vec![Refused, lost()], Some("a")),
            (vec![Refused, Refused], None),
        ] {
            assert!(judged(outcomes, stored).is_err(), "{stored:?}");
        }
    }
}
