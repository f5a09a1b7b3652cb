//! What handles stand for, and the tables of it.

use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, RwLock};

use millpond::{Engine, File, Queue, View};

use crate::handle::table::{Kind, Table};

/// A view, and the file that it is of. Dropped in this order.
pub(crate) struct Viewed {
    pub(crate) _view: View<'static>,
    pub(crate) _file: Arc<File>,
}

/// A queue, and who is at work in it.
pub(crate) struct Queued {
    pub(crate) queue: Queue,
    /// It is being destroyed. Held shared by who submits.
    pub(crate) is_over: RwLock<bool>,
    /// Threads that wait.
    pub(crate) waiters: AtomicUsize,
}

pub(crate) static ENGINES: Table<Engine> = Table::new(Kind::Engine);
pub(crate) static FILES: Table<Arc<File>> = Table::new(Kind::File);
pub(crate) static QUEUES: Table<Arc<Queued>> = Table::new(Kind::Queue);
pub(crate) static VIEWS: Table<Arc<Viewed>> = Table::new(Kind::View);
