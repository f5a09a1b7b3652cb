//! The files that are open in this process, by inode.
//!
//! ```text
//!   find -> OPEN                            another handle of a file that is known
//!        -> OPENING, by the caller          enter -> OPEN;  dropped -> gone
//!        -> OPENING, by another thread      waits for it, and looks again
//!        -> OPEN, but in its drop         CLOSING: waits for that, and looks again
//!   a file's drop: OPEN or CLOSING -> gone
//! ```
//!
//! - **RG1** System calls are made outside of the lock: they may take as long as another process holds a lease, or a
//!   server does not answer. Only openers of the same inode wait for that, as an inode may have one file only.
//! - **RG2** An entry is OPENING until the thread that made it so has entered a file or given up.
//! - **RG3** A file is opened again only when the drop of its predecessor has called `unregister_file`: that drop keeps its
//!   errors for the next opener (`unreported_errors`).
//!
//! Locks: the map's; nothing is called under it, and no file is dropped.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Condvar, Mutex, Weak};

use crate::file_id::FileId;
use crate::sync::MutexExt;

enum RegistryEntry<F> {
    Open(Weak<F>),
    Opening(Arc<Opening>),
    /// Its drop has begun, and an opener waits for `unregister_file` (RG3).
    Closing(Arc<Opening>),
}

/// An open, or a drop, of a file that is in progress.
#[derive(Default)]
struct Opening {
    is_over: Mutex<bool>,
    over: Condvar,
}

impl Opening {
    fn wait(&self) {
        let is_over = self.is_over.acquire();
        drop(self.over.wait_while(is_over, |is_over| !*is_over).expect("no panic under the lock"));
    }

    /// Caller: has removed the entry from the map, where waiting openers found it.
    fn end(self: &Arc<Self>) {
        if Arc::strong_count(self) > 1 {
            *self.is_over.acquire() = true;
            self.over.notify_all();
        }
    }
}

/// The files of this process.
pub(crate) struct Registry<F> {
    files: Mutex<HashMap<FileId, RegistryEntry<F>>>,
}

impl<F> Default for Registry<F> {
    fn default() -> Self {
        Registry { files: Mutex::default() }
    }
}

/// The state of a file in the registry.
pub(crate) enum Found<'a, F> {
    Open(Arc<F>),
    /// Not in the registry: the caller is to open it.
    Place(RegistryPlace<'a, F>),
}

impl<F> Registry<F> {
    /// Finds the file of an inode, or makes the caller its opener. Waits for another thread that is opening it.
    pub(crate) fn find(&self, id: FileId) -> Found<'_, F> {
        loop {
            let opening = match self.files.acquire().entry(id) {
                Entry::Occupied(mut entry) => match entry.get() {
                    RegistryEntry::Opening(opening) | RegistryEntry::Closing(opening) => {
                        Arc::clone(opening)
                    }
                    RegistryEntry::Open(file) => {
                        if let Some(file) = file.upgrade() {
                            return Found::Open(file);
                        }
                        let closing = Arc::default();
                        entry.insert(RegistryEntry::Closing(Arc::clone(&closing)));
                        closing
                    }
                },
                Entry::Vacant(entry) => {
                    let opening = Arc::default();
                    entry.insert(RegistryEntry::Opening(Arc::clone(&opening)));
                    return Found::Place(RegistryPlace { registry: self, id, opening });
                }
            };
            opening.wait();
        }
    }

    /// All files that are open, and files that were open a moment ago.
    pub(crate) fn all(&self) -> Vec<Weak<F>> {
        let files = self.files.acquire();
        let open = files.values().filter_map(|known| match known {
            RegistryEntry::Open(file) => Some(Weak::clone(file)),
            RegistryEntry::Opening(_) | RegistryEntry::Closing(_) => None,
        });
        open.collect()
    }

    /// The last reference to a file is gone, and its errors are kept. Called once for each file that was entered.
    pub(crate) fn unregister_file(&self, id: FileId) {
        let mut files = self.files.acquire();
        let Entry::Occupied(entry) = files.entry(id) else { return };
        let closing = match entry.get() {
            RegistryEntry::Open(file) if file.strong_count() == 0 => None,
            RegistryEntry::Closing(closing) => Some(Arc::clone(closing)),
            // A file that was never entered: another one is open, or being opened.
            RegistryEntry::Open(_) | RegistryEntry::Opening(_) => return,
        };
        entry.remove();
        drop(files);
        if let Some(closing) = closing {
            closing.end();
        }
    }
}

/// The right, and the duty, to open a file that is not known (RG2).
pub(crate) struct RegistryPlace<'a, F> {
    registry: &'a Registry<F>,
    id: FileId,
    opening: Arc<Opening>,
}

impl<F> RegistryPlace<'_, F> {
    /// The file is open, and found from now on.
    pub(crate) fn enter(self, file: &Arc<F>) {
        self.registry.files.acquire().insert(self.id, RegistryEntry::Open(Arc::downgrade(file)));
    }
}

impl<F> Drop for RegistryPlace<'_, F> {
    fn drop(&mut self) {
        if let Entry::Occupied(entry) = self.registry.files.acquire().entry(self.id)
            && matches!(entry.get(), RegistryEntry::Opening(opening) if Arc::ptr_eq(opening, &self.opening))
        {
            entry.remove();
        }
        self.opening.end();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    /// Goal: an opener waits for the drop of the file before, which keeps errors for it.
    /// Method: a file whose last reference is gone, and which leaves later.
    /// Incident: an opener took the place of a file that was still in its drop, and missed its errors.
    #[test]
    fn an_opener_waits_for_the_drop_of_the_file_before() {
        let registry = Registry::<u8>::default();
        let id = FileId { device: 1, inode: 2 };
        let Found::Place(place) = registry.find(id) else { panic!("no file is open") };
        let file = Arc::new(1);
        place.enter(&file);
        drop(file);
        let (tell, told) = mpsc::channel();
        std::thread::scope(|scope| {
            for _ in 0..2 {
                let (registry, tell) = (&registry, tell.clone());
                scope.spawn(move || {
                    let is_place = matches!(registry.find(id), Found::Place(_));
                    tell.send(is_place).unwrap();
                });
            }
            assert!(told.recv_timeout(Duration::from_millis(100)).is_err(), "it has not left");
            registry.unregister_file(id);
            assert!(told.recv().unwrap() && told.recv().unwrap());
        });
        registry.unregister_file(id);
    }
}
