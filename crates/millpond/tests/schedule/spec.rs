//! The specification of a run: its kind and its seeds.

use std::fmt;

const VARIABLE: &str = "MILLPOND_SCHEDULE_RUN";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Histories by `File`.
    File,
    /// By every interface.
    Faces,
    /// On a device that fails.
    FileErrors,
    FacesErrors,
    /// Power cuts.
    Crash,
}

impl Kind {
    pub const ALL: [Kind; 5] =
        [Kind::File, Kind::Faces, Kind::FileErrors, Kind::FacesErrors, Kind::Crash];

    /// The number of runs in CI.
    pub fn count(self) -> u32 {
        40
    }
}

/// `KIND:SEED`, or `KIND:SEED:SCHEDULE:N,N..`: the seed of the operations, the seed of the
/// schedule, and the numbers of the steps to run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spec {
    pub kind: Kind,
    pub seed: u64,
    pub schedule: u64,
    pub keep: Option<Vec<usize>>,
}

impl Spec {
    pub fn new(kind: Kind, seed: u64) -> Spec {
        Spec { kind, seed, schedule: seed, keep: None }
    }

    pub fn variable() -> &'static str {
        VARIABLE
    }

    pub fn from_environment() -> Option<Spec> {
        let text = std::env::var(VARIABLE).ok()?;
        let spec = Spec::parse(&text);
        Some(spec.unwrap_or_else(|| panic!("{VARIABLE}={text}: not KIND:SEED[:SCHEDULE[:N,N..]]")))
    }

    fn parse(text: &str) -> Option<Spec> {
        let mut parts = text.split(':');
        let kind = parts.next()?;
        let kind =
            Kind::ALL.into_iter().find(|known| format!("{known:?}").eq_ignore_ascii_case(kind))?;
        let seed = parts.next()?.parse().ok()?;
        let schedule = parts.next().map_or(Some(seed), |schedule| schedule.parse().ok())?;
        let keep = match parts.next() {
            None => None,
            Some(list) => Some(list.split(',').map(str::parse).collect::<Result<_, _>>().ok()?),
        };
        Some(Spec { kind, seed, schedule, keep })
    }

    pub fn keeps(&self, number: usize) -> bool {
        self.keep.as_ref().is_none_or(|keep| keep.contains(&number))
    }
}

impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}:{}", self.kind, self.seed)?;
        if let Some(keep) = &self.keep {
            let keep: Vec<String> = keep.iter().map(usize::to_string).collect();
            write!(f, ":{}:{}", self.schedule, keep.join(","))?;
        }
        Ok(())
    }
}
