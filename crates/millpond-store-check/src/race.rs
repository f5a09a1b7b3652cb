//! Writes that start together, and what a store must have made of them.

use std::sync::Arc;

use object_store::path::Path;
use object_store::{PutMode, UpdateVersion};
use tokio::sync::Barrier;

use crate::open::Endpoint;
use crate::writes::{Said, Writer, new_id};

/// How a race ended that broke nothing.
#[derive(Debug)]
pub(crate) enum Ended {
    Won(UpdateVersion),
    /// No racer was told that it won, and some not what became of their writes: why.
    Undecided(String),
    NotOffered(String),
}

/// Lets `racers` write at `at` together, each through the next endpoint.
pub(crate) async fn race(
    endpoints: &[Endpoint],
    writer: Writer,
    racers: usize,
    at: &Path,
    mode: &PutMode,
) -> Vec<(String, Said)> {
    let together = Arc::new(Barrier::new(racers));
    let tasks: Vec<_> = (0..racers)
        .map(|racer| {
            let store = Arc::clone(&endpoints[racer % endpoints.len()].store);
            let (together, at, mode) = (Arc::clone(&together), at.clone(), mode.clone());
            tokio::spawn(async move {
                let id = new_id();
                together.wait().await;
                let said = writer.put(&*store, &at, &id, mode).await;
                (id, said)
            })
        })
        .collect();
    let mut said = Vec::with_capacity(racers);
    for task in tasks {
        said.push(task.await.expect("a racer does not panic"));
    }
    said
}

/// What the racers were told, held against what is stored in the end; or what is wrong with it.
pub(crate) fn judge(said: &[(String, Said)], stored: Option<&str>) -> Result<Ended, String> {
    let won: Vec<_> = said.iter().filter(|(_, said)| matches!(said, Said::Done(_))).collect();
    let whose = said.iter().find(|(id, _)| Some(id.as_str()) == stored);
    let first = |why: fn(&Said) -> Option<String>| {
        said.iter().find_map(|(_, said)| why(said)).unwrap_or_default()
    };
    match (won.as_slice(), whose) {
        ([], _) if said.iter().any(|(_, said)| matches!(said, Said::NotOffered(_))) => {
            Ok(Ended::NotOffered(first(|said| match said {
                Said::NotOffered(why) => Some(why.clone()),
                _ => None,
            })))
        }
        ([], Some((_, Said::Refused))) => {
            Err("what is stored is of a racer that was refused".into())
        }
        ([], _) if said.iter().all(|(_, said)| matches!(said, Said::Refused)) => {
            Err("all racers were refused, though nothing stood in their way".into())
        }
        ([], _) => Ok(Ended::Undecided(first(|said| match said {
            Said::Unknown(why) => Some(why.clone()),
            _ => None,
        }))),
        ([(_, Said::Done(version))], Some((_, Said::Done(_)))) => Ok(Ended::Won(version.clone())),
        ([_], Some(_)) => Err("one racer won, and what is stored is another's".into()),
        ([_], None) => Err("one racer won, and what is stored is no racer's".into()),
        (many, _) => {
            Err(format!("{} of {} racers were told that they won", many.len(), said.len()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn done() -> Said {
        Said::Done(UpdateVersion { e_tag: None, version: None })
    }

    fn ended(said: Vec<Said>, stored: Option<&str>) -> Result<Ended, String> {
        let ids = ["a", "b", "c"].map(String::from);
        judge(&ids.into_iter().zip(said).collect::<Vec<_>>(), stored)
    }

    #[test]
    fn a_race_is_judged_by_what_was_said_and_what_is_stored() {
        use Said::{Refused, Unknown};
        let lost = || Unknown("reset".into());
        assert!(matches!(ended(vec![done(), Refused, lost()], Some("a")), Ok(Ended::Won(_))));
        assert!(matches!(ended(vec![Refused, lost()], Some("b")), Ok(Ended::Undecided(_))));
        assert!(matches!(ended(vec![lost(), lost()], None), Ok(Ended::Undecided(_))));
        for (said, stored) in [
            (vec![done(), done(), Refused], Some("a")),
            (vec![done(), Refused], Some("b")),
            (vec![done(), lost()], Some("b")),
            (vec![done(), Refused], None),
            (vec![Refused, lost()], Some("a")),
            (vec![Refused, Refused], None),
        ] {
            assert!(ended(said, stored).is_err(), "{stored:?}");
        }
    }
}
