//! The files that are open in this process, by inode.
//!
//! ```text
//!   find -> OPEN                            another handle of a file that is known
//!        -> OPENING, by the caller          enter -> OPEN;  dropped -> gone
//!        -> OPENING, by another thread      waits for it, and looks again
//!        -> OPEN, its last reference gone: waits for its drop, and looks again
//!   a file's drop: OPEN -> gone
//! ```
//!
//! - **N1** What asks the kernel is done outside of the lock: it may take as long as somebody's lease, or a
//!   server that does not answer. It holds up other openers of the same inode, as there may be one
//!   file of an inode only, and nobody else.
//! - **N2** An entry is OPENING until the thread that made it so has entered a file or given up.
//! - **N3** A file's drop keeps an unreported error (`writeback::untold`) before its entry is gone, and the
//!   next opener looks for one after that.
//!
//! Locks: the map's; nothing is called under it, and no file is dropped.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};

use crate::file_id::FileId;

enum Known<F> {
    Open(Weak<F>),
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

    /// Caller: it is in the map no more, where who waits has found it.
    fn end(self: &Arc<Self>) {
        if Arc::strong_count(self) > 1 {
            *self.is_over.lock().expect("no panic under the lock") = true;
            self.over.notify_all();
        }
    }
}

/// The files of this process.
pub(crate) struct Registry<F> {
    files: Mutex<HashMap<FileId, Known<F>>>,
    /// A file's entry is gone.
    left: Condvar,
}

impl<F> Default for Registry<F> {
    fn default() -> Self {
        Registry { files: Mutex::default(), left: Condvar::new() }
    }
}

/// What is known of a file.
pub(crate) enum Found<'a, F> {
    Open(Arc<F>),
    /// Nothing: the caller is to open it.
    Place(Place<'a, F>),
}

impl<F> Registry<F> {
    fn files(&self) -> MutexGuard<'_, HashMap<FileId, Known<F>>> {
        self.files.lock().expect("no panic under the lock")
    }

    /// Finds the file of an inode, or makes the caller the one who opens it. Waits for one that does
    /// already.
    pub(crate) fn find(&self, id: FileId) -> Found<'_, F> {
        loop {
            let mut files = self.files();
            let opening = match files.entry(id) {
                Entry::Occupied(entry) => match entry.get() {
                    Known::Opening(opening) => Arc::clone(opening),
                    Known::Open(file) => {
                        if let Some(file) = file.upgrade() {
                            return Found::Open(file);
                        }
                        // N3. The thread that drops it takes this lock only to leave.
                        drop(self.left.wait(files).expect("no panic under the lock"));
                        continue;
                    }
                },
                Entry::Vacant(entry) => {
                    let opening = Arc::default();
                    entry.insert(Known::Opening(Arc::clone(&opening)));
                    return Found::Place(Place { registry: self, id, opening });
                }
            };
            drop(files);
            opening.wait();
        }
    }

    /// All files that are open, and those that were a moment ago.
    pub(crate) fn all(&self) -> Vec<Weak<F>> {
        let files = self.files();
        let open = files.values().filter_map(|known| match known {
            Known::Open(file) => Some(Weak::clone(file)),
            Known::Opening(_) => None,
        });
        open.collect()
    }

    /// The last reference to a file is gone.
    pub(crate) fn leave(&self, id: FileId) {
        if let Entry::Occupied(entry) = self.files().entry(id)
            && matches!(entry.get(), Known::Open(file) if file.strong_count() == 0)
        {
            entry.remove();
            self.left.notify_all();
        }
    }
}

/// The right, and the duty, to open a file that is not known (N2).
pub(crate) struct Place<'a, F> {
    registry: &'a Registry<F>,
    id: FileId,
    opening: Arc<Opening>,
}

impl<F> Place<'_, F> {
    /// The file is open, and found from now on.
    pub(crate) fn enter(self, file: &Arc<F>) {
        self.registry.files().insert(self.id, Known::Open(Arc::downgrade(file)));
    }
}

impl<F> Drop for Place<'_, F> {
    fn drop(&mut self) {
        if let Entry::Occupied(entry) = self.registry.files().entry(self.id)
            && matches!(entry.get(), Known::Opening(opening) if Arc::ptr_eq(opening, &self.opening))
        {
            entry.remove();
        }
        self.opening.end();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::sync::atomic::Ordering::SeqCst;
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::time::Duration;

    use super::*;

    const ID: FileId = FileId { device: 1, inode: 2 };

    struct Dropped {
        registry: Arc<Registry<Dropped>>,
        begins: Sender<()>,
        goes_on: Mutex<Receiver<()>>,
        has_kept: Arc<AtomicBool>,
    }

    impl Drop for Dropped {
        fn drop(&mut self) {
            self.begins.send(()).unwrap();
            self.goes_on.lock().unwrap().recv().unwrap();
            self.has_kept.store(true, SeqCst);
            self.registry.leave(ID);
        }
    }

    /// Goal: an opener comes after the drop of the file that was open before, and finds the error that it kept.
    /// Incident: an opener that came between the end of the last reference and the drop found no error, and only
    /// the one after it did.
    #[test]
    fn an_opener_waits_for_the_drop_of_the_file_before() {
        let registry = Arc::new(Registry::<Dropped>::default());
        let (begins, has_begun) = channel();
        let (go_on, goes_on) = channel();
        let goes_on = Mutex::new(goes_on);
        let has_kept = Arc::new(AtomicBool::new(false));
        let Found::Place(place) = registry.find(ID) else { panic!("nothing is open") };
        let kept = Arc::clone(&has_kept);
        let file =
            Arc::new(Dropped { registry: Arc::clone(&registry), begins, goes_on, has_kept: kept });
        place.enter(&file);
        drop(find_open(&registry));
        std::thread::scope(|threads| {
            threads.spawn(move || drop(file));
            has_begun.recv().unwrap();
            let opener = threads.spawn(|| {
                let found = registry.find(ID);
                assert!(matches!(found, Found::Place(_)), "the file is gone");
                has_kept.load(SeqCst)
            });
            // On a slow machine the opener has not looked yet, and the test shows less.
            std::thread::sleep(Duration::from_millis(50));
            go_on.send(()).unwrap();
            assert!(opener.join().unwrap(), "the opener came before the file was dropped");
        });
    }

    /// The file, which is open.
    fn find_open(registry: &Registry<Dropped>) -> Arc<Dropped> {
        match registry.find(ID) {
            Found::Open(file) => file,
            Found::Place(_) => panic!("it is open"),
        }
    }
}
