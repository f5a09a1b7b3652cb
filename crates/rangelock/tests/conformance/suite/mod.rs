//! The conformance suite of all locks: of `Striped` here, and of the locks in `rangelock-peers`.
//!
//! `MILLPOND_OPERATIONS` sets the number of operations of the stress tests (default 200,000; a full run makes
//! 10,000,000), and `MILLPOND_SEED` replays a run.

pub mod model;
pub mod stress;

use millpond_rangelock::RawRangeLock;

/// Which range an implementation locks for a request.
pub trait Subject: RawRangeLock {
    /// Whether every range counts as the whole file.
    const WHOLE: bool = false;
}

/// A small random number generator, so that a seed replays a test.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        // splitmix64
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

fn number_from_env(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(default)
}

fn seed() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let seed = number_from_env("MILLPOND_SEED", now.map_or(1, |now| now.as_nanos() as u64));
    println!("MILLPOND_SEED={seed}");
    seed
}

/// The tests, for each lock.
macro_rules! for_every_lock {
    ($($name:ident: $subject:ty,)*) => {$(
        mod $name {
            use super::suite::{model, stress};
            use super::*;

            #[test]
            fn agrees_with_the_model() {
                model::agrees::<$subject>(model::PAGES);
            }

            #[test]
            fn agrees_with_the_model_within_a_region() {
                model::agrees::<$subject>(model::BYTES);
            }

            #[test]
            fn excludes() {
                stress::excludes::<$subject>(stress::Mix::Blocking);
            }

            #[test]
            fn excludes_with_timeouts() {
                stress::excludes::<$subject>(stress::Mix::Timeouts);
            }

            #[test]
            fn excludes_with_cancelled_futures() {
                stress::excludes::<$subject>(stress::Mix::Futures);
            }

            #[test]
            fn excludes_with_lapsing_offers() {
                stress::excludes::<$subject>(stress::Mix::Lapses);
            }

            #[test]
            fn guards_may_be_released_by_other_threads() {
                stress::released_elsewhere::<$subject>();
            }

            #[test]
            fn overtakes_no_request() {
                stress::overtakes_no_request::<$subject>();
            }

            #[test]
            fn exclusives_do_not_starve() {
                stress::exclusives_do_not_starve::<$subject>();
            }

            #[test]
            fn shareds_do_not_starve() {
                stress::shareds_do_not_starve::<$subject>();
            }
        }
    )*};
}
