//! Attempts of one process to attach: one at a time, and not too often.
//!
//! Locks: the state, a leaf lock.

use std::io;
use std::path::Path;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use millpond::internals::shared::process_number;
use tokio::sync::watch;

use crate::client::kept_forgets::KeptForgets;

/// Time between attempts for writes, after a server that has refused the client, and has logged that. Chosen.
const WRITE_RETRY: Duration = Duration::from_millis(500);

/// The state of attempts to attach, of one process.
pub(crate) struct Gate {
    process: u64,
    state: Mutex<GateState>,
}

#[derive(Default)]
pub(crate) struct GateState {
    /// Ends with the attempt that is under way.
    pub(crate) under_way: Option<watch::Receiver<()>>,
    pub(crate) retry_at: Option<Instant>,
    /// The same for the ends of writes, after a server that has refused the client.
    pub(crate) write_retry_at: Option<Instant>,
    /// The error of the last attempt, if that failed.
    failure: Option<(io::ErrorKind, String)>,
    /// A message about the lack of a server is in the log.
    is_reported: bool,
    /// The next server removes them before the client reads by it.
    pub(crate) kept: KeptForgets,
}

impl GateState {
    /// Whether no server listened at the last attempt. One that starts later has nothing in its cache.
    pub(crate) fn has_no_server(&self) -> bool {
        let kind = self.failure.as_ref().map(|(kind, _)| *kind);
        matches!(kind, Some(io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused))
    }

    /// Whether the server at the last attempt did not greet in time.
    pub(crate) fn is_silent(&self) -> bool {
        self.failure.as_ref().is_some_and(|(kind, _)| *kind == io::ErrorKind::TimedOut)
    }
}

impl Gate {
    pub(crate) fn new() -> Gate {
        Gate { process: process_number(), state: Mutex::default() }
    }

    pub(crate) fn is_own(&self) -> bool {
        self.process == process_number()
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, GateState> {
        self.state.lock().expect("no panic under the lock")
    }

    /// Whether the next read that misses starts an attempt.
    pub(crate) fn is_due(&self) -> bool {
        let state = self.state();
        state.under_way.is_none() && state.retry_at.is_none_or(|at| Instant::now() >= at)
    }

    /// The error of the last attempt, if that failed.
    pub(crate) fn failure(&self) -> Option<io::Error> {
        self.state().failure.clone().map(|(kind, text)| io::Error::new(kind, text))
    }

    pub(crate) fn fail(&self, socket: &Path, error: &io::Error, retry: Duration) {
        let mut state = self.state();
        state.under_way = None;
        state.retry_at = Some(Instant::now() + retry);
        state.failure = Some((error.kind(), error.to_string()));
        let is_refused =
            matches!(error.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::InvalidData);
        state.write_retry_at = is_refused.then(|| Instant::now() + retry.min(WRITE_RETRY));
        if state.has_no_server() {
            state.kept = KeptForgets::default();
        }
        let is_reported = std::mem::replace(&mut state.is_reported, true);
        // A subscriber may panic, or read by a store of its own.
        drop(state);
        if !is_reported {
            tracing::warn!(
                socket = %socket.display(), %error,
                "no cache server: reads go to the store itself until one answers"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Metadata, Subscriber};

    use super::*;

    struct PanicsAtEvents;

    impl Subscriber for PanicsAtEvents {
        fn enabled(&self, _: &Metadata<'_>) -> bool {
            true
        }

        fn new_span(&self, _: &Attributes<'_>) -> Id {
            Id::from_u64(1)
        }

        fn record(&self, _: &Id, _: &Record<'_>) {}

        fn record_follows_from(&self, _: &Id, _: &Id) {}

        fn event(&self, _: &Event<'_>) {
            panic!("a subscriber that panics");
        }

        fn enter(&self, _: &Id) {}

        fn exit(&self, _: &Id) {}
    }

    /// Incident: a subscriber that panicked left a poisoned lock, and each later read that missed panicked.
    #[test]
    fn a_subscriber_that_panics_leaves_the_gate_usable() {
        let gate = Gate::new();
        let fail = || {
            let error = io::Error::from(io::ErrorKind::NotFound);
            gate.fail(Path::new("nowhere"), &error, Duration::from_secs(3600));
        };
        let failed = tracing::subscriber::with_default(PanicsAtEvents, || {
            catch_unwind(AssertUnwindSafe(fail))
        });
        assert!(failed.is_err());
        assert!(!gate.is_due());
        assert_eq!(gate.failure().unwrap().kind(), io::ErrorKind::NotFound);
    }
}
