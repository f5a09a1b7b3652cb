//! A file's record of its place at the keeper (see [`keeping`](crate::inode::keeping)).

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};

use crate::recovery::changes::Changes;

/// The entry of a file in the keeper's tables, if it has one.
#[derive(Default)]
pub(crate) struct KeeperSlot {
    /// As [`EntryUse::word`](crate::recovery::EntryUse::word); 0 is none.
    pub(crate) slot: AtomicU64,
    /// Also: one intent at a time (recovery.K5).
    pub(crate) adopting: Mutex<()>,
    pub(crate) sizes: Mutex<()>,
    pub(crate) changes: Arc<Changes>,
}
