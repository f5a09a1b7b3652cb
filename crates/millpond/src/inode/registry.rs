//! The files that are open in this process, by inode.
//!
//! ```text
//!   find -> OPEN                            another handle of a file that is known
//!        -> OPENING, by the caller          enter -> OPEN;  dropped -> gone
//!        -> OPENING, by another thread      waits for it, and looks again
//!   a file's drop: OPEN -> gone
//! ```
//!
//! - **N1** What asks the kernel is done outside of the lock: it may take as long as somebody's lease, or a
//!   server that does not answer. It holds up who opens the same inode, as there may be one file of an
//!   inode only, and nobody else.
//! - **N2** An entry is OPENING until the thread that made it so has entered a file or given up.
//!
//! Locks: the map's; nothing is called under it, and no file is dropped.
//!
//! Argued: the registry is made once and published by the exchange, and found by an acquire of it;
//! a child of fork has one thread. It is a static, which a model can't make anew.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::AtomicPtr;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};

use crate::inode::CachedFile;

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct FileId {
    pub(crate) device: u64,
    pub(crate) inode: u64,
}

enum Known {
    Open(Weak<CachedFile>),
    Opening(Arc<Opening>),
}

/// Somebody opens the file.
#[derive(Default)]
struct Opening {
    is_over: Mutex<bool>,
    over: Condvar,
}

impl Opening {
    fn wait(&self) {
        let is_over = self.is_over.lock().expect("no panic under the lock");
        drop(self.over.wait_while(is_over, |is_over| !*is_over).expect("no panic under the lock"));
    }

    fn end(&self) {
        *self.is_over.lock().expect("no panic under the lock") = true;
        self.over.notify_all();
    }
}

#[derive(Default)]
struct Registry {
    files: Mutex<HashMap<FileId, Known>>,
}

impl Registry {
    fn files(&self) -> MutexGuard<'_, HashMap<FileId, Known>> {
        self.files.lock().expect("no panic under the lock")
    }
}

/// The registry of this process; null until first used.
static REGISTRY: AtomicPtr<Registry> = AtomicPtr::new(std::ptr::null_mut());

fn registry() -> &'static Registry {
    let mut found = REGISTRY.load(Acquire);
    if found.is_null() {
        let fresh = Box::into_raw(Box::default());
        found = match REGISTRY.compare_exchange(std::ptr::null_mut(), fresh, AcqRel, Acquire) {
            Ok(_) => fresh,
            Err(found) => {
                // SAFETY: made above, and nobody else has seen it.
                drop(unsafe { Box::from_raw(fresh) });
                found
            }
        };
    }
    // SAFETY: registries are never freed.
    unsafe { &*found }
}

/// In a forked child: leaves the parent's registry behind, whatever state its lock is in, so that
/// no file that the child opens is taken for one that the parent had.
pub(crate) fn forget_parent() {
    REGISTRY.store(std::ptr::null_mut(), Release);
}

/// What is known of a file.
pub(crate) enum Found {
    Open(Arc<CachedFile>),
    /// Nothing: the caller is to open it.
    Place(Place),
}

/// Finds the file of an inode, or makes the caller the one who opens it. Waits for who does already.
pub(crate) fn find(id: FileId) -> Found {
    let registry = registry();
    loop {
        let opening = match registry.files().entry(id) {
            Entry::Occupied(mut entry) => match entry.get() {
                Known::Opening(opening) => Arc::clone(opening),
                Known::Open(file) => {
                    if let Some(file) = file.upgrade() {
                        return Found::Open(file);
                    }
                    let opening = Arc::default();
                    entry.insert(Known::Opening(Arc::clone(&opening)));
                    return Found::Place(Place { registry, id, opening });
                }
            },
            Entry::Vacant(entry) => {
                let opening = Arc::default();
                entry.insert(Known::Opening(Arc::clone(&opening)));
                return Found::Place(Place { registry, id, opening });
            }
        };
        opening.wait();
    }
}

/// The right, and the duty, to open a file that is not known (N2).
pub(crate) struct Place {
    registry: &'static Registry,
    id: FileId,
    opening: Arc<Opening>,
}

impl Place {
    /// The file is open, and found from now on.
    pub(crate) fn enter(self, file: &Arc<CachedFile>) {
        self.registry.files().insert(self.id, Known::Open(Arc::downgrade(file)));
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Entry::Occupied(entry) = self.registry.files().entry(self.id)
            && matches!(entry.get(), Known::Opening(opening) if Arc::ptr_eq(opening, &self.opening))
        {
            entry.remove();
        }
        self.opening.end();
    }
}

/// All files that are open, and those that were a moment ago.
pub(crate) fn all() -> Vec<Weak<CachedFile>> {
    let files = registry().files();
    let open = files.values().filter_map(|known| match known {
        Known::Open(file) => Some(Weak::clone(file)),
        Known::Opening(_) => None,
    });
    open.collect()
}

/// The last reference to a file is gone.
pub(crate) fn leave(id: FileId) {
    // It may have been opened anew since.
    if let Entry::Occupied(entry) = registry().files().entry(id)
        && matches!(entry.get(), Known::Open(file) if file.strong_count() == 0)
    {
        entry.remove();
    }
}
