//! Merges concurrent first requests for an object: one caller sends the request, the others wait for its response head.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex};

use tokio::sync::watch;

/// The first requests in progress, by object name.
#[derive(Debug, Default)]
pub(crate) struct SingleFlight(Mutex<HashMap<Box<str>, watch::Receiver<()>>>);

/// Makes its owner the caller that sends the request. Dropping it wakes the waiting callers.
pub(crate) struct Leader {
    flight: Arc<SingleFlight>,
    key: Box<str>,
    _ends: watch::Sender<()>,
}

impl SingleFlight {
    /// Makes the caller the leader, or returns a receiver that changes when the present leader is dropped.
    pub(crate) fn join(
        self: &Arc<Self>,
        key: &str,
    ) -> std::result::Result<Leader, watch::Receiver<()>> {
        let mut leaders = self.0.lock().expect("no panic under the lock");
        match leaders.entry(key.into()) {
            Entry::Occupied(other) => Err(other.get().clone()),
            Entry::Vacant(free) => {
                let (ends, end) = watch::channel(());
                free.insert(end);
                Ok(Leader { flight: Arc::clone(self), key: key.into(), _ends: ends })
            }
        }
    }
}

impl Drop for Leader {
    fn drop(&mut self) {
        self.flight.0.lock().expect("no panic under the lock").remove(&self.key);
    }
}
