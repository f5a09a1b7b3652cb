//! Errors of write-back that nobody was told of when the last handle of the file went: the next to
//! open the inode is told, once, by a sync, as the kernel does it. (It keeps them with the inode,
//! and what tells of one there, and a sync in the background is told as well, is not told again.)
//!
//! An inode is known by when it was made, too, as its number is used again. At most [`FILES_MAX`] of them
//! are remembered; of more, the oldest are forgotten.
//!
//! Locks: the one in here is a leaf.
//!
//! Argued: what is remembered is under the lock; the table is published by the exchange, and found
//! by an acquire of it; a child of fork has one thread. A file is opened anew after the registry's
//! lock passed from its last handle, so that ANY is seen. They are statics, which a model can't
//! make anew.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use std::sync::atomic::{AtomicBool, AtomicPtr};
use std::sync::{Mutex, MutexGuard};

use crate::file_id::FileId;
use crate::io::backend::BackingFile;
use crate::io::backend::descriptors::made;
use crate::writeback::failure::Failure;

/// Errors that are remembered. Chosen, not measured.
const FILES_MAX: usize = 1024;

struct UnreportedError {
    id: FileId,
    made: Option<(i64, u32)>,
    failure: Failure,
}

type All = Mutex<VecDeque<UnreportedError>>;

/// Those of this process; null until the first.
static ALL: AtomicPtr<All> = AtomicPtr::new(std::ptr::null_mut());
/// Whether there may be one: what most opens of a file ask.
static ANY: AtomicBool = AtomicBool::new(false);

fn all() -> MutexGuard<'static, VecDeque<UnreportedError>> {
    let mut found = ALL.load(Acquire);
    if found.is_null() {
        let fresh = Box::into_raw(Box::default());
        found = match ALL.compare_exchange(std::ptr::null_mut(), fresh, AcqRel, Acquire) {
            Ok(_) => fresh,
            Err(found) => {
                // SAFETY: made above, and nobody else has seen it.
                drop(unsafe { Box::from_raw(fresh) });
                found
            }
        };
    }
    // SAFETY: they are never freed.
    unsafe { &*found }.lock().expect("no panic under the lock")
}

/// In a forked child: leaves behind the parent's, whatever state their lock is in. It tells of them itself.
pub(crate) fn forget_parent() {
    ANY.store(false, Release);
    ALL.store(std::ptr::null_mut(), Release);
}

pub(crate) fn record(id: FileId, backing: &dyn BackingFile, failure: Failure) {
    let made = backing.descriptor(false).and_then(made);
    let mut all = all();
    all.retain(|known| known.id != id);
    if all.len() == FILES_MAX {
        all.pop_front();
    }
    all.push_back(UnreportedError { id, made, failure });
    // Release: with the Acquire of `take`, of an open after the file's last handle is gone.
    ANY.store(true, Release);
}

pub(crate) fn take(id: FileId, fd: BorrowedFd<'_>) -> Option<Failure> {
    if !ANY.load(Acquire) {
        return None;
    }
    let mut all = all();
    let at = all.iter().position(|known| known.id == id)?;
    let known = all.remove(at).expect("just found");
    ANY.store(!all.is_empty(), Release);
    (known.made == made(fd)).then_some(known.failure)
}
