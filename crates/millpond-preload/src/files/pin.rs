//! Holding a description, and its end with the last holder: `open_file.D2` and `D3`.

use std::os::fd::RawFd;
use std::sync::Arc;

use crate::files::identity::FileId;
use crate::files::open_file::OpenFile;
use crate::files::{pending_close, table};
use crate::runtime::thread::{Snapshot, record};

/// A description that cannot end while this exists. Dropped in a section.
pub struct Pin {
    description: &'static OpenFile,
}

impl Pin {
    /// The description at `fd`, held.
    pub fn of(fd: RawFd) -> Option<Self> {
        let record = record();
        record.enter();
        let found = table::description(fd);
        if let Some(description) = found {
            description.pin();
        }
        record.exit();
        found.map(|description| Self { description })
    }

    /// A description of the registry, which is locked.
    pub fn of_registered(description: &'static OpenFile) -> Self {
        description.pin();
        Self { description }
    }

    /// Gives the pin up, unless that ends the description, which may take its time.
    pub fn try_give_up(self) -> Result<(), Self> {
        if self.description.try_unpin() {
            std::mem::forget(self);
            return Ok(());
        }
        Err(self)
    }
}

impl std::ops::Deref for Pin {
    type Target = OpenFile;
    fn deref(&self) -> &OpenFile {
        self.description
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        unpin(self.description);
    }
}

/// Gives up a reference; the last one returns the description to the pool. In a section.
fn unpin(description: &OpenFile) {
    if description.unpin() {
        end(description);
    }
}

#[cold]
fn end(description: &OpenFile) {
    // SAFETY: the last reference is gone.
    let (id, file) = unsafe { description.end() };
    // Others may share it.
    if file.is_some_and(|file| Arc::into_inner(file).is_some()) {
        pending_close::add(description.kernel_fd(), id);
    }
    description.recycle();
}

/// Closed descriptions that a reading section may still look at. The registry is locked.
pub struct Closed(pub Vec<(Snapshot, &'static OpenFile)>);

impl Closed {
    /// No slot has it any more.
    pub fn add(&mut self, description: &'static OpenFile) {
        self.0.push((Snapshot::take(), description));
    }

    /// Ends those that no reading section can still look at.
    pub fn end(&mut self) {
        self.0.retain_mut(|(readers, description)| {
            let is_over = readers.is_over();
            if is_over {
                unpin(description);
            }
            !is_over
        });
    }

    /// Whether a description of the file may still be looked at; ends those that are not.
    pub fn has(&mut self, id: FileId) -> bool {
        self.end();
        // SAFETY: the registry is locked.
        self.0.iter().any(|(_, description)| unsafe { description.cold() }.id == id)
    }
}
