//! Files whose last description has ended here, while the engine or the kernel may still have them
//! open. A lease can't be had before they are done.

use std::os::fd::RawFd;
use std::time::{Duration, Instant};

use crate::files::identity::{self, FileId};
use crate::files::process_locks;
use crate::runtime::lock::Lock;

/// Descriptors of ended descriptions that the engine may still hold, and their files.
static PENDING: Lock<Vec<(RawFd, FileId)>> = Lock::new(Vec::new());
/// Files of descriptors that were found closed, and when. The number is free before the kernel is
/// done with its description, if a thread of the engine closes it: a file system may have much to
/// do then. Its lock may be taken under that of [`PENDING`].
static LEAVING: Lock<Vec<(Instant, FileId)>> = Lock::new(Vec::new());
/// For so long a file may be in use after its number is free. Chosen, not measured.
const LEAVING_MAX: Duration = Duration::from_millis(100);

/// A description has ended whose descriptor was `fd`: the engine may still use it, for other
/// descriptions of the file.
pub fn add(fd: RawFd, id: FileId) {
    PENDING.lock().push((fd, id));
    forget_closed();
}

/// Notes which descriptors the engine has closed.
fn forget_closed() {
    // Not used any more, but open: no call has to wait for it, and the number is not free.
    let retired = process_locks::retired();
    let mut pending = PENDING.lock();
    pending.retain(|(fd, id)| {
        if retired.contains(fd) {
            return false;
        }
        let is_open = identity::identify(*fd).is_some_and(|found| found.id == *id);
        if !is_open {
            // Its mark in the table went when it was closed: the number may have another by now.
            LEAVING.lock().push((Instant::now(), *id));
        }
        is_open
    });
    drop(pending);
    LEAVING.lock().retain(|(closed, _)| closed.elapsed() < LEAVING_MAX);
}

/// Whether the kernel may not be done yet with a description of the file that the engine has
/// closed.
pub fn is_leaving(id: FileId) -> bool {
    forget_closed();
    LEAVING.lock().iter().any(|(_, other)| *other == id)
}

/// Whether the engine may still hold a descriptor of an ended description of the file.
pub fn is_lingering(id: FileId) -> bool {
    forget_closed();
    PENDING.lock().iter().any(|(_, other)| *other == id)
}

/// For a forked child to close.
pub fn fds() -> Vec<RawFd> {
    PENDING.lock().iter().map(|(fd, _)| *fd).collect()
}

/// In a forked child.
///
/// # Safety
///
/// No other thread exists.
pub unsafe fn after_fork() {
    // SAFETY: the caller's duty.
    unsafe {
        PENDING.reset(Vec::new());
        LEAVING.reset(Vec::new());
    }
}
