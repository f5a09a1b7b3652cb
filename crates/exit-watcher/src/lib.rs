//! Starts a detached process that runs a callback when the caller's process, which becomes a program by exec, has ended.
//!
//! The watcher detects every kind of exit, SIGKILL included. The program can't see the watcher: it is not its child.
//!
//! ```text
//! caller -------------- (waits) ------------> continues, execs the program ................ ends
//!    \ fork                       ^ exits                                                   |
//!     intermediate: closes, clone +                                                         v
//!                          \
//!                           watcher: own session, sleeps ................ marker? callback, exits
//! ```
//!
//! - **A1** *No child.* The intermediate process exits at once, and the caller waits for it. So the kernel reparents the
//!   watcher to init or to the nearest subreaper (`PR_SET_CHILD_SUBREAPER`). If the caller itself is init or a subreaper,
//!   the watcher would become its child: then no watcher is started.
//! - **A2** *No resources.* The watcher has the caller's standard error and the two descriptors passed to it, and no
//!   others; its working directory is the root. The intermediate process sets this up before the caller continues.
//! - **A3** *No signals.* The watcher has a separate session, and all signals are blocked: a signal from a terminal or to a
//!   process group does not end it. SIGKILL does.
//! - **A4** *Memory.* The intermediate process has a copy of the caller's memory, which it shares with the watcher. Until
//!   the program has ended, the watcher accesses only its own stack. By then the intermediate process has exited, as the
//!   caller waited for it. A *marker* in the file shows that the exec succeeded. Without it, the caller has ended or failed
//!   before the exec, and the watcher exits.
//!
//! Why a copy of the memory. While another process shares the caller's memory, an exec makes the kernel search all
//! processes of the machine for a new owner (`mm_update_next_owner`), which takes 0.17 ms with some hundred processes. For
//! the intermediate process, the new owner is its child, where the kernel searches first. Why two steps. With the program
//! as its parent, the watcher would be visible as a child (`__WALL`, `/proc/PID/task/TID/children`).
//!
//! [`before_main`] lets the caller reach the exec sooner.

#![deny(unsafe_op_in_unsafe_fn, clippy::undocumented_unsafe_blocks)]
#![cfg(target_os = "linux")]

mod before_main;

use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Stack size of the watcher.
const STACK_BYTES: usize = 256 << 10;

/// Arguments of the watcher; never freed.
struct Watch<J> {
    marker_offset: i64,
    on_exit: J,
}

/// Starts a watcher that sleeps until this process has ended; `program` is a pidfd of this process. Then, if `file` has a
/// marker, a non-zero byte at `marker_offset`, the watcher calls `on_exit` with a duplicate of `file`, and exits.
///
/// Returns whether the watcher was started. It fails if the process limit leaves no room for two processes, or if this
/// process is init or a subreaper (A1).
///
/// Call it in a single-threaded process, before the exec. A panic in `on_exit` ends the watcher.
pub fn spawn<J>(program: BorrowedFd, file: BorrowedFd, marker_offset: i64, on_exit: J) -> bool
where
    J: FnOnce(OwnedFd) + 'static,
{
    // A1.
    if is_reaper_of_orphans() {
        return false;
    }
    let mut is_spawned = false;
    with_signals_blocked(|| {
        // SAFETY: this is the only thread, so the copied memory contains no held lock and no inconsistent
        // state. The flags are zero, so the child sends no signal at its end: the program might find a pending
        // SIGCHLD. The child does not return from here.
        unsafe {
            let pid = libc::syscall(libc::SYS_clone, 0, 0, 0, 0, 0) as libc::pid_t;
            if pid == 0 {
                libc::_exit(c_int::from(!run_middle(
                    program,
                    file,
                    Watch { marker_offset, on_exit },
                )));
            }
            let mut status = -1;
            while pid > 0
                && libc::waitpid(pid, &raw mut status, libc::__WALL) < 0
                && *libc::__errno_location() == libc::EINTR
            {}
            is_spawned = status == 0;
        }
    });
    is_spawned
}

/// Allocates a stack and returns its end.
fn make_stack() -> Option<*mut c_void> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_STACK;
    // SAFETY: a new mapping.
    unsafe {
        let stack = libc::mmap(std::ptr::null_mut(), STACK_BYTES, protection, flags, -1, 0);
        (stack != libc::MAP_FAILED).then(|| stack.byte_add(STACK_BYTES))
    }
}

/// Whether orphaned descendants become children of this process.
fn is_reaper_of_orphans() -> bool {
    let mut is_reaper: c_int = 0;
    // SAFETY: the kernel fills `is_reaper`.
    unsafe {
        libc::prctl(libc::PR_GET_CHILD_SUBREAPER, &raw mut is_reaper);
        is_reaper != 0 || libc::getpid() == 1
    }
}

/// Blocks all signals during `call`, so that processes started in it inherit that (A3), and restores the mask.
fn with_signals_blocked(call: impl FnOnce()) {
    let mut all = std::mem::MaybeUninit::uninit();
    let mut before = std::mem::MaybeUninit::uninit();
    // SAFETY: both are filled before they are read.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::sigprocmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
        call();
        libc::sigprocmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut());
    }
}

/// The intermediate process; returns whether the watcher was started.
fn run_middle<J>(program: BorrowedFd, file: BorrowedFd, watch: Watch<J>) -> bool
where
    J: FnOnce(OwnedFd) + 'static,
{
    let Some(stack) = make_stack().filter(|_| keep_only(program, file)) else { return false };
    let watch = Box::into_raw(Box::new(watch));
    let flags = libc::CLONE_VM | libc::SIGCHLD;
    // SAFETY: `run_watcher` gets the argument that it expects. The argument and the stack are never freed. Its
    // use of the shared memory follows A4.
    unsafe { libc::clone(run_watcher::<J>, stack, flags, watch.cast()) > 0 }
}

/// Moves the two descriptors to 0 and 1, keeps 2, and closes all others (A2).
fn keep_only(first: BorrowedFd, second: BorrowedFd) -> bool {
    // SAFETY: these are this process's descriptors, copies of the caller's.
    unsafe {
        // Duplicated first, so that neither `dup2` overwrites the other descriptor.
        let first = libc::fcntl(first.as_raw_fd(), libc::F_DUPFD, 3);
        let second = libc::fcntl(second.as_raw_fd(), libc::F_DUPFD, 3);
        first >= 0
            && second >= 0
            && libc::dup2(first, 0) == 0
            && libc::dup2(second, 1) == 1
            && libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0) == 0
            && libc::chdir(c"/".as_ptr()) == 0
    }
}

/// The watcher process.
extern "C" fn run_watcher<J>(watch: *mut c_void) -> c_int
where
    J: FnOnce(OwnedFd) + 'static,
{
    let mut program = libc::pollfd { fd: 0, events: libc::POLLIN, revents: 0 };
    let mut marker = 0_u8;
    // SAFETY: A4. Before the program has ended, there are only two system calls, which use this stack alone:
    // libc's `errno` is shared with the intermediate process, but only a failing call writes it, and no call
    // is interrupted, as all signals are blocked. After the program has ended, only this process uses the
    // memory, and it moves the callback out once. `keep_only` created descriptor 1, and no other code uses it.
    // The process exits here.
    unsafe {
        libc::setsid();
        if libc::poll(&raw mut program, 1, -1) == 1 {
            let marker_offset = (&raw const (*watch.cast::<Watch<J>>()).marker_offset).read();
            if libc::pread(1, (&raw mut marker).cast(), 1, marker_offset) == 1 && marker != 0 {
                let on_exit = (&raw const (*watch.cast::<Watch<J>>()).on_exit).read();
                // A panic must not unwind into the C caller.
                let on_exit = std::panic::AssertUnwindSafe(|| on_exit(OwnedFd::from_raw_fd(1)));
                let _ = std::panic::catch_unwind(on_exit);
            }
        }
        libc::_exit(0)
    }
}
