//! Write-back errors that outlive the last handle of a file because no handle has received them.
//!
//! The next sync after the file is opened again returns the error, once. The kernel does the same
//! (see `errseq_t`), but keeps the error with the inode, where it counts as reported after any call
//! has returned it, even a sync in the background.
//!
//! A file is identified by its creation time too, as inode numbers are reused. At most
//! [`FILES_MAX`] errors are kept; then the oldest are dropped.
//!
//! Locks: the lock in this module is a leaf.
//!
//! Argued: the errors are under the lock. The table is published by the exchange, and found by an
//! acquire of it. A child of fork has one thread. A file is opened again after its last handle has
//! released the registry's lock, so the open sees ANY. They are statics, which a loom model cannot
//! create again for each run.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};

use crate::file_id::FileId;
use crate::io::backend::BackingFile;
use crate::io::backend::descriptors::created_at;
use crate::process_local::ProcessStatic;
use crate::sync::MutexExt;
use crate::writeback::state::failure::WritebackFailure;

/// The maximum number of errors. Untuned.
const FILES_MAX: usize = 1024;

struct UnreportedError {
    id: FileId,
    created: Option<(i64, u32)>,
    failure: WritebackFailure,
}

/// The errors of this process.
static ERRORS: ProcessStatic<Mutex<VecDeque<UnreportedError>>> = ProcessStatic::new();
/// Whether there may be an error. This is all that most opens read.
static ANY: AtomicBool = AtomicBool::new(false);

/// Called in a forked child: drops the errors of the parent, as their lock may be held. The parent
/// reports them.
pub(crate) fn forget_parent() {
    ANY.store(false, Release);
    ERRORS.abandon();
}

pub(crate) fn record(id: FileId, backing: &dyn BackingFile, failure: WritebackFailure) {
    let created = backing.descriptor(false).and_then(created_at);
    let mut all = ERRORS.get_or_create().acquire();
    all.retain(|known| known.id != id);
    if all.len() == FILES_MAX {
        all.pop_front();
    }
    all.push_back(UnreportedError { id, created, failure });
    // Release: pairs with the Acquire in `take`, in an open after the last handle is gone.
    ANY.store(true, Release);
}

pub(crate) fn take(id: FileId, fd: BorrowedFd<'_>) -> Option<WritebackFailure> {
    if !ANY.load(Acquire) {
        return None;
    }
    let mut all = ERRORS.get_or_create().acquire();
    let at = all.iter().position(|known| known.id == id)?;
    let known = all.remove(at).expect("just found");
    ANY.store(!all.is_empty(), Release);
    (known.created == created_at(fd)).then_some(known.failure)
}
