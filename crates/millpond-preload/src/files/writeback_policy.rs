//! Mode back: when dirty pages are written back.
//!
//! A file that the process opens for writing, and that it alone has open (it holds the write lease), is in mode back. The
//! program's writes stay in the cache until the pages are old, the cache fills up, or another process could notice that
//! they are not in the file:
//!
//! - L1. Before a call that *looks* at the file in the kernel (stat, sendfile, ...), or sets attributes that a later write
//!   would change (times, mode), dirty pages are written back: [`flush_before_kernel_call`].
//! - L2. While a call *changes* the file in the kernel (fallocate, a write that the engine could not do), writes go
//!   through, and cached pages are dropped afterwards: [`change_by_kernel`].
//! - L3. When a file is handed to the kernel (`hand_over`), when its last number is closed, and when the process ends or becomes
//!   another program ([`end`]), writes go through for good.
//! - L4. At the last close dirty pages are written back before the lease is given up, and the call returns when the
//!   engine's descriptors are closed. So the next process to open or execute the file finds it whole, and not open for
//!   writing; its file system can be unmounted, and the space of an unlinked file is free. The engine closes them after
//!   all reading sections that were under way at the close, also sections of threads that read other files. On a busy
//!   machine a thread may wait for a processor within its section, for longer than a read takes.
//! - L5. Direct backing sets `O_DIRECT` on the program's own description while it moves bytes, as another description
//!   would cost the lease. The flag is clear in L2 and L3, and before a fork. F_GETFL does not report the flag:
//!   [`hides_direct`].
//!
//! A page that can't be written back stays in the cache. `close`, `fsync` and writes return the error; where there is no
//! call to return it, a line on standard error names the file. The engine tries again, and so does the keeper.
//!
//! A process that is killed leaves its dirty pages to the keeper, `millpond run`. The lease lives as long as the keeper has
//! the file, so another process that opens it waits until it is whole. A *lookup of size and times by path, from another
//! process*, does not wait: they may be fifteen seconds old.

use std::ffi::{c_char, c_int, c_void};
use std::mem::ManuallyDrop;
use std::os::fd::RawFd;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use millpond::File;

use crate::files::identity::{self, FileId};
use crate::files::mode_back;
use crate::files::open_file::OpenFile;
use crate::files::pending_close::is_lingering;
use crate::files::pin::Pin;
use crate::files::registry::{self, lock};
use crate::files::table::{self, NumberState};
use crate::report::lines;
use crate::report::reason::Reason;
use crate::runtime::cancel::point::with_cleanup;
use crate::runtime::{section, thread};

/// Whether `fd` may be in mode back.
fn is_candidate(fd: RawFd) -> bool {
    mode_back::is_any()
        && !thread::record().is_inside()
        && matches!(table::get(fd), NumberState::File(description) if description.leased().write)
}

/// Runs `work` on the file behind `fd` if it is in mode back.
fn with<R>(fd: RawFd, work: impl FnOnce(&File) -> R) -> Option<R> {
    if !is_candidate(fd) {
        return None;
    }
    section::run(|_| Pin::of(fd)?.late_file().map(work))
}

fn errno(result: millpond::Result<()>) -> Result<(), c_int> {
    result.map_err(|error| error.errno())
}

/// L1: before the kernel looks at the file behind `fd`.
pub fn flush_before_kernel_call(fd: RawFd) {
    // A page that fails stays dirty, and fsync or close returns the error.
    let _ = with(fd, |file| file.settle());
}

/// L1, for a call that returns the error.
pub fn write_back(fd: RawFd) -> Option<Result<(), c_int>> {
    with(fd, |file| errno(file.settle()))
}

/// L1: before the kernel looks at the file of a path.
pub fn settle_path(dir: RawFd, path: *const c_char, follow: bool) {
    if !mode_back::is_any() || thread::record().is_inside() {
        return;
    }
    section::run(|_| {
        if let Some(identity) = identity::identify_path(dir, path, follow) {
            settle_inside(identity.id);
        }
    });
}

/// L1, by device and inode. Whether anything may have been written back: then earlier answers about the file are old.
pub fn settle_id(id: FileId) -> bool {
    if !mode_back::is_any() || thread::record().is_inside() {
        return false;
    }
    section::run(|_| settle_inside(id))
}

fn settle_inside(id: FileId) -> bool {
    let Some(pin) = lock().find_late(id) else { return false };
    if let Some(file) = pin.late_file() {
        let _ = file.settle();
    }
    true
}

/// L1, for all files.
pub fn settle_all() {
    if !mode_back::is_any() || thread::record().is_inside() {
        return;
    }
    section::run(|_| {
        for pin in registry::late_files() {
            if let Some(file) = pin.late_file() {
                let _ = file.settle();
            }
        }
    });
}

/// L2: makes `change` by the kernel to the file behind `fd`. From here on hits copy no page of the kernel, in any mode.
pub fn change_by_kernel<R: Copy>(fd: RawFd, change: impl FnOnce() -> R) -> R {
    // It comes also where the thread ends in the call.
    unsafe extern "C" fn end(held: *mut c_void) {
        // SAFETY: made below, and used by this function alone while it runs. A second run finds nothing.
        let held = unsafe { &mut *held.cast::<Option<Pin>>() };
        section::run(|_| {
            let pin = held.take();
            if let Some(file) = pin.as_deref().and_then(OpenFile::late_file) {
                if file.invalidate(0, i64::MAX as u64).is_err() {
                    // Stale bytes stay: they may not be served.
                    let mut registry = lock();
                    // SAFETY: the registry is locked.
                    let id = unsafe { pin.as_deref().map(|pin| pin.cold().id) };
                    id.inspect(|id| registry.pass_file(*id, Reason::Engine));
                }
                file.end_through();
            }
        });
    }
    if !is_candidate(fd) {
        return change();
    }
    let mut held = ManuallyDrop::new(None::<Pin>);
    let held = &raw mut *held;
    let work = || {
        section::run(|_| {
            let pin = Pin::of(fd);
            if let Some(file) = pin.as_deref().and_then(OpenFile::late_file) {
                let _ = file.begin_through();
            }
            // SAFETY: no other code uses it now.
            unsafe { *held = pin };
        });
        change()
    };
    // SAFETY: `end` takes `held`.
    unsafe { with_cleanup(end, held.cast(), work) }
}

/// L5: whether `O_DIRECT`, if it is set on the description behind `fd`, is ours and not the
/// program's: such files are passed.
pub fn hides_direct(fd: RawFd) -> bool {
    let is_hidden = |pin: Pin| pin.is_served() && pin.late_file().is_some();
    is_candidate(fd) && section::run(|_| Pin::of(fd).is_some_and(is_hidden))
}

/// `fsync` and its kin: `None` where the kernel does it.
pub fn sync(fd: RawFd, data_only: bool) -> Option<Result<(), c_int>> {
    with(fd, |file| errno(if data_only { file.sync_data() } else { file.sync_all() }))
}

/// L4, first half: before a number is given up. `None` where the library has nothing of its file open afterwards.
pub fn before_close(fd: RawFd) -> Option<Closing> {
    if !matches!(table::get(fd), NumberState::File(_)) || thread::record().is_inside() {
        return None;
    }
    section::run(|_| begin_close(fd))
}

/// The same in a section.
pub fn begin_close(fd: RawFd) -> Option<Closing> {
    let pin = Pin::of(fd)?;
    let Some(file) = pin.late_file() else {
        let id = lock().last_number_of(fd).filter(|_| pin.kernel_fd() >= 0)?;
        return Some(Closing { id, failed: None });
    };
    let id = {
        let mut registry = lock();
        registry.last_slot_of(fd).or_else(|| registry.release_last_writer(fd))?
    };
    let failed = errno(file.begin_through()).err();
    if let Some(errno) = failed {
        lines::warn_unwritten(fd, errno);
    }
    Some(Closing { id, failed })
}

/// The longest wait of a last close: a thread may have to wait that long for a processor. Chosen.
const PATIENCE: Duration = Duration::from_secs(5);
/// The same after a wait in vain. The section that it waited for may never end, as a handler has jumped out of it
/// (`reading`), and each later close meets it. Chosen.
const PATIENCE_AFTER: Duration = Duration::from_millis(100);
/// The last wait was in vain.
static WAITED_IN_VAIN: AtomicBool = AtomicBool::new(false);

/// A file whose last number is being given up.
pub struct Closing {
    id: FileId,
    failed: Option<c_int>,
}

impl Closing {
    /// L4, second half: waits until the engine has closed the file, unless what stands in its way
    /// is a read that this very handler has interrupted. Returns what could not be written.
    pub fn end(self) -> Option<c_int> {
        section::run(|record| {
            // After an error the engine keeps the file, and tries again.
            if self.failed.is_some() || record.is_reading() {
                return;
            }
            let in_vain = WAITED_IN_VAIN.load(Relaxed);
            let patience = if in_vain { PATIENCE_AFTER } else { PATIENCE };
            let is_reading = await_closed(patience, || lock().closing.has(self.id));
            WAITED_IN_VAIN.store(is_reading, Relaxed);
            // Not longer: a descriptor that the program has opened past the library may have the number by now.
            await_closed(PATIENCE_AFTER, || lock().closing.has(self.id) || is_lingering(self.id));
        });
        self.failed
    }
}

/// Waits until `is_open` returns false, for `patience` at most. Returns whether the wait was in vain.
fn await_closed(patience: Duration, mut is_open: impl FnMut() -> bool) -> bool {
    const YIELDS: usize = 10;
    const PAUSE: Duration = Duration::from_micros(200);
    let begun = Instant::now();
    let mut attempts = 0;
    while is_open() {
        if begun.elapsed() > patience {
            return true;
        }
        if attempts < YIELDS {
            // A read of another thread, which takes microseconds.
            std::thread::yield_now();
        } else {
            std::thread::sleep(PAUSE);
        }
        attempts += 1;
    }
    false
}

/// L3, for all files: the process ends, or becomes another program.
pub fn end() {
    if thread::record().is_inside() {
        return;
    }
    mode_back::set_ending(true);
    section::run(|_| {
        for pin in &registry::late_files() {
            if let Some(Err(errno)) = pin.late_file().map(|file| errno(file.begin_through())) {
                lines::warn_unwritten(pin.kernel_fd(), errno);
            }
        }
    });
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Goal: a last close waits for a read that takes a second, as its thread is preempted. The wait has an end.
    #[test]
    fn a_last_close_waits_longer_than_a_preempted_read() {
        let begun = Instant::now();
        let is_slow = || begun.elapsed() < Duration::from_secs(1);
        assert!(!await_closed(PATIENCE, is_slow) && !is_slow(), "it did not wait");
        let begun = Instant::now();
        assert!(await_closed(PATIENCE_AFTER, || true));
        assert!(begun.elapsed() < PATIENCE, "it waited too long");
    }
}
