//! Objects of which somebody asks for the first time: one caller does, and others wait for what it learns.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex};

use tokio::sync::watch;

/// Objects of which somebody asks for the first time.
#[derive(Debug, Default)]
pub(crate) struct SingleFlight(Mutex<HashMap<Box<str>, watch::Receiver<()>>>);

/// The caller asks; ends when it is dropped.
pub(crate) struct Leader {
    flight: Arc<SingleFlight>,
    key: Box<str>,
    _ends: watch::Sender<()>,
}

impl SingleFlight {
    /// A turn, or what tells when another's has ended.
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
