//! Objects of which somebody asks for the first time: one caller does, and others wait for what it learns.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex};

use tokio::sync::watch;

/// Objects of which somebody asks for the first time.
#[derive(Debug, Default)]
pub(crate) struct Opening(Mutex<HashMap<Box<str>, watch::Receiver<()>>>);

/// The caller asks; ends when it is dropped.
pub(crate) struct Turn {
    opening: Arc<Opening>,
    key: Box<str>,
    _ends: watch::Sender<()>,
}

impl Opening {
    /// A turn, or what tells when another's has ended.
    pub(crate) fn enter(
        self: &Arc<Self>,
        key: &str,
    ) -> std::result::Result<Turn, watch::Receiver<()>> {
        let mut opening = self.0.lock().expect("no panic under the lock");
        match opening.entry(key.into()) {
            Entry::Occupied(other) => Err(other.get().clone()),
            Entry::Vacant(free) => {
                let (ends, end) = watch::channel(());
                free.insert(end);
                Ok(Turn { opening: Arc::clone(self), key: key.into(), _ends: ends })
            }
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.opening.0.lock().expect("no panic under the lock").remove(&self.key);
    }
}
