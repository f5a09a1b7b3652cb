//! Fork: parent and child share each description, and the child initialises the library again.
//!
//! A description that another process holds too can change unnoticed: its offset, and its bytes if it is writable. So
//! before a fork, every served file is handed to the kernel for good, with its offset (`files::forked`). Files that
//! parent and child open afterwards may be served.
//!
//! The child leaves the parent's engine alone. A raw `clone` with memory shared and descriptors not
//! is a documented limit; one without shared memory is noticed by the wiped table
//! ([`ensure_initialised`]).

use std::cell::UnsafeCell;
use std::os::fd::RawFd;

use crate::aio::context;
use crate::files::forked::{self, FORKS};
use crate::files::{
    lease, mode_back, open_file, pending_close, pressure, process_locks, registry, table,
};
use crate::page_cache;
use crate::report;
use crate::report::reason::Reason;
use crate::retirement;
use crate::runtime::alloc::HEAP;
use crate::runtime::section::{self, Section};
use crate::runtime::sys::sys;
use crate::runtime::{fault, handlers, own_threads, thread};

/// The state that the forking thread carries across the fork. The registry lock protects it.
struct Crossing(UnsafeCell<Option<Crossed>>);

struct Crossed {
    _section: Section,
    /// The library's own descriptors, for the child to close.
    internal: Vec<RawFd>,
    /// `forked.K5`.
    hidden: Vec<RawFd>,
}

// SAFETY: accessed between `before_fork` and `after_fork_*` only, by the thread that holds the
// registry lock.
unsafe impl Sync for Crossing {}

static CROSSING: Crossing = Crossing(UnsafeCell::new(None));

pub fn initialise() {
    // SAFETY: the three functions may be called around any fork.
    unsafe { libc::pthread_atfork(Some(prepare), Some(parent), Some(child)) };
}

/// Hands over files that a child shares if the child may not come from libc's fork.
pub fn release_shared_files() {
    if page_cache::is_on() {
        page_cache::release_for_fork();
    }
    section::run(|_| registry::lock().pass_all(Reason::Forked));
}

/// A fork by a system call, which calls no handlers.
pub fn fork_by(call: impl FnOnce() -> isize) -> isize {
    // SAFETY: the functions are called around a fork.
    unsafe {
        prepare();
        let child_pid = call();
        if child_pid == 0 {
            child()
        } else {
            parent();
        }
        child_pid
    }
}

unsafe extern "C" fn prepare() {
    if thread::is_away() {
        return;
    }
    let section = Section::enter();
    if !table::is_initialised() {
        start_afresh(&[]);
    }
    let mut registry = registry::lock();
    // Checked again: it changes under the lock, and not before `parent` or `child`.
    if thread::is_away() {
        return;
    }
    let hidden = registry.hand_over_for_fork();
    if page_cache::is_on() {
        page_cache::release_for_fork();
    }
    page_cache::before_fork();
    // From here on the engine's threads close no descriptor.
    let mut internal = process_locks::before_fork();
    internal.extend(registry.internal_fds());
    internal.extend(context::internal_fd());
    registry::before_fork(registry);
    // SAFETY: the registry is locked.
    unsafe { *CROSSING.0.get() = Some(Crossed { _section: section, internal, hidden }) };
    fault::before_fork();
    handlers::before_fork();
    HEAP.before_fork();
}

unsafe extern "C" fn parent() {
    if thread::is_away() {
        return;
    }
    page_cache::end_fork();
    HEAP.after_fork();
    handlers::after_fork();
    fault::after_fork();
    // SAFETY: the registry is locked since `prepare`.
    let crossing = unsafe { (*CROSSING.0.get()).take() };
    FORKS.end();
    process_locks::after_fork_parent();
    registry::after_fork_parent();
    drop(crossing);
}

unsafe extern "C" fn child() {
    if thread::is_away() {
        return;
    }
    HEAP.after_fork();
    handlers::after_fork();
    fault::after_fork();
    // SAFETY: the registry is locked since `prepare`.
    if let Some(crossed) = unsafe { (*CROSSING.0.get()).take() } {
        crossed.hidden.iter().for_each(|fd| forked::hide(*fd));
        start_afresh(&crossed.internal);
    }
}

/// In a child: forgets the parent's files, engine and locks. The engine's duplicates are closed,
/// else they would keep the parent's files open here, and their flocks held.
fn start_afresh(internal_fds: &[RawFd]) {
    table::after_fork();
    page_cache::after_fork();
    for fd in internal_fds {
        // SAFETY: duplicates of the library's, unknown to the child's program.
        unsafe { sys!(libc::SYS_close, *fd) };
    }
    thread::after_fork();
    own_threads::after_fork();
    retirement::after_fork();
    lease::after_fork();
    // SAFETY: a child of fork has one thread, this one.
    unsafe {
        context::after_fork();
        open_file::after_fork();
        pending_close::after_fork();
        registry::after_fork_child();
        process_locks::after_fork_child();
        pressure::after_fork();
    }
    table::initialise();
    FORKS.reset();
    mode_back::after_fork();
    report::after_fork();
}

/// Called first by hooks that describe files: detects a child of a fork that called no handler.
pub fn ensure_initialised() {
    if !table::is_initialised() && !thread::is_away() {
        section::run(|_| start_afresh(&[]));
    }
}
