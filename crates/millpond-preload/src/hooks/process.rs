//! Exec, spawn, exit: where descriptors get a second owner, or the library ends. (For fork see
//! `fork`.)
//!
//! Before exec and spawn all files are handed to the kernel. For `vfork` see `vfork`.

use std::os::fd::RawFd;

use crate::files::multi_open::before_rights;
use crate::files::{mode_back, process_locks, registry, writeback_policy};
use crate::page_cache;
use crate::report::reason::Reason;
use crate::report::{self, shared_totals};
use crate::retirement;
use crate::runtime::c::{Start, c_int, c_void};
use crate::runtime::cancel::point::without;
use crate::runtime::cancel::state::disable;
use crate::runtime::libc_calls;
use crate::runtime::sys::sys;
use crate::runtime::{own_threads, section, thread};

/// Threads that the engine starts are inside the library for good: their calls are its own.
pub unsafe fn pthread_create(
    thread: *mut libc::pthread_t,
    attributes: *const libc::pthread_attr_t,
    start: Start,
    argument: *mut c_void,
) -> c_int {
    extern "C" fn run(job: *mut c_void) -> *mut c_void {
        thread::record().enter_inside();
        own_threads::note_started();
        // SAFETY: made below, for this thread alone.
        let (start, argument) = *unsafe { Box::from_raw(job.cast::<(Start, *mut c_void)>()) };
        start(argument)
    }
    if thread::record().inside_depth() == 0 {
        // SAFETY: as the caller vouches to `pthread_create`.
        return unsafe { libc_calls::pthread_create(thread, attributes, start, argument) };
    }
    let job = Box::into_raw(Box::new((start, argument)));
    own_threads::begin_start();
    // SAFETY: as above; `run` takes `job`.
    let result = unsafe { libc_calls::pthread_create(thread, attributes, run, job.cast()) };
    if result != 0 {
        own_threads::cancel_start();
        // SAFETY: no thread has taken it.
        drop(unsafe { Box::from_raw(job) });
    }
    result
}

/// Something in this process does I/O that no hook sees; see `Registry::release_all_files`. Not for the library's own work.
pub fn release_all_files() {
    if !thread::record().is_inside() {
        page_cache::retire();
    }
    registry::release_all_files();
}

/// Before libc reads or writes `fd` inside itself, at the kernel's offset.
pub extern "C" fn release_to_libc(fd: RawFd) {
    if page_cache::is_on() && !thread::record().is_inside() {
        page_cache::share(fd);
    }
    registry::hand_over(fd, Reason::Stdio);
}

/// Hands over the files that another program may inherit: all, as before a fork.
pub fn release_inherited_files() {
    if thread::record().is_inside() {
        return;
    }
    if page_cache::is_on() {
        return page_cache::release_for_exec();
    }
    section::run(|_| {
        // An earlier exec has failed unnoticed.
        process_locks::after_exec();
        registry::lock().pass_all(Reason::Given);
    });
}

/// From now on writes go through, because this process can't write back later.
pub extern "C" fn before_exec() {
    if thread::record().is_left_alone() {
        return;
    }
    writeback_policy::end();
    if !thread::record().is_inside() {
        release_inherited_files();
        // Nothing of this program is left after exec to report it.
        report::report_exec(registry::before_report);
        shared_totals::keep_over_exec(true);
        section::run(|_| {
            registry::detach_keeper();
            process_locks::before_exec();
        });
    }
}

/// An exec: returns where it failed. Writes go through then, to files that were served before.
pub fn exec(call: impl FnOnce() -> c_int) -> c_int {
    if thread::record().is_left_alone() {
        return call();
    }
    before_exec();
    let failed = call();
    shared_totals::keep_over_exec(false);
    section::run(|_| process_locks::after_exec());
    mode_back::set_ending(false);
    failed
}

/// The child of a later spawn gets `fd` under another number, close-on-exec or not.
pub fn release_spawned(fd: c_int) {
    if !thread::record().is_inside() {
        page_cache::share(fd);
        registry::hand_over(fd, Reason::Given);
    }
}

/// Descriptors that the calling thread alone has: the library's threads and table have others then.
pub fn before_unshare(flags: c_int) {
    before_rights();
    if flags & libc::CLONE_FILES != 0 {
        release_all_files();
    }
    // Of a process with several threads the kernel refuses these.
    if flags & (libc::CLONE_NEWUSER | libc::CLONE_VM | libc::CLONE_SIGHAND | libc::CLONE_THREAD)
        != 0
    {
        retirement::end_threads();
    }
}

/// Another name space: the kernel refuses some to a process with several threads.
pub fn before_setns(fd: c_int) {
    before_rights();
    // Else the call fails and changes nothing.
    // SAFETY: no memory involved.
    if unsafe { sys!(libc::SYS_fcntl, fd, libc::F_GETFD) } >= 0 {
        retirement::end_threads();
    }
}

/// A filter of system calls, by `prctl`.
pub fn before_prctl(option: c_int) {
    if option == libc::PR_SET_SECCOMP {
        retirement::retire();
    }
}

/// The calling thread ends by the system call: if it is the main one, the others go on without it.
pub fn before_thread_exit() {
    // SAFETY: no memory involved.
    if unsafe { sys!(libc::SYS_gettid) == sys!(libc::SYS_getpid) } {
        retirement::retire();
    }
}

/// Handlers of the program's follow, which may be cancelled.
pub fn before_quick_exit() {
    if thread::record().is_inside() {
        return;
    }
    without(writeback_policy::end);
    report::report_exit(registry::before_report);
}

pub unsafe fn _exit(status: c_int) -> ! {
    // For good: the process ends here, cancelled or not.
    disable();
    if !thread::record().is_inside() {
        writeback_policy::end();
        report::report_exit(registry::before_report);
    }
    loop {
        // SAFETY: ends the process.
        unsafe { sys!(libc::SYS_exit_group, status) };
    }
}
