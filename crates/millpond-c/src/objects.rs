//! The objects behind handles, and a table for each kind.

use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, RwLock};

use millpond::queue::Queue;
use millpond::{Engine, File, View};

use crate::handle::table::{Kind, Table};

/// A view and its file. The view is dropped first.
pub(crate) struct ViewObject {
    pub(crate) _view: View<'static>,
    pub(crate) _file: Arc<File>,
}

/// A queue, with the state that its destruction needs.
pub(crate) struct QueueObject {
    pub(crate) queue: Queue,
    /// The queue is being destroyed. Submitters hold it shared.
    pub(crate) is_over: RwLock<bool>,
    /// The number of waiting threads.
    pub(crate) waiters: AtomicUsize,
}

pub(crate) static ENGINES: Table<Engine> = Table::new(Kind::Engine);
pub(crate) static FILES: Table<Arc<File>> = Table::new(Kind::File);
pub(crate) static QUEUES: Table<Arc<QueueObject>> = Table::new(Kind::Queue);
pub(crate) static VIEWS: Table<Arc<ViewObject>> = Table::new(Kind::View);
