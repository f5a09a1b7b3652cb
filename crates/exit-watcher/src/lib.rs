//! Leaves a process behind that does something when a program has ended, and is no child of that program's.
//!
//! For who is about to become that program (exec): whatever ends it, its end is noticed, and it knows nothing of that.
//!
//! ```text
//! caller ------------- (waits) -----------> goes on, execs the program ................... ends
//!    \ fork                     ^ ends                                                     |
//!     middle: closes, clone ----+                                                          v
//!                     \
//!                      aside: own session, sleeps ............................. sign? job, ends
//! ```
//!
//! - **A1** *No child.* The middle process ends at once and is waited for here, so the kernel gives the one aside to
//!   init, or to who takes orphans in (`PR_SET_CHILD_SUBREAPER`). Where the caller is that itself there would be a
//!   child after all: then there is none aside.
//! - **A2** *Nothing is held.* The process aside has the caller's standard error and the two descriptors that it was
//!   given, and no others; its directory is the root. The middle one sees to that, so it is so before the
//!   caller goes on.
//! - **A3** *Not disturbed.* It has a session of its own, and all signals are blocked: what a terminal sends, or
//!   somebody to a process group, does not end it. SIGKILL does.
//! - **A4** *Memory.* The middle one has a copy of the caller's, which it leaves to the one aside: that one touches
//!   nothing but the stack it was given until the program has ended, and so the middle one, for which the caller
//!   waited. If the program has left its *sign* there was an exec; without, the caller may have ended or failed
//!   before, and the one aside ends.
//!
//! Why a copy: while another process has the caller's memory, the kernel looks through all processes of the
//! machine at the exec for who is to own it (`mm_update_next_owner`): 0.17 ms beside some hundred processes. The
//! middle one's heir is its child, where the kernel looks first. Why two steps: with the program as its parent it
//! would be a child where that asks for all of its children (`__WALL`, `/proc/PID/task/TID/children`).
//!
//! Beside it is [`before_main`], by which the one who is about to become a program gets there sooner.

#![deny(unsafe_op_in_unsafe_fn, clippy::undocumented_unsafe_blocks)]
#![cfg(target_os = "linux")]

mod before_main;

use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Of the job's.
const STACK_BYTES: usize = 256 << 10;

/// What the process aside is told; never freed.
struct Watch<J> {
    marker_offset: i64,
    on_exit: J,
}

/// Leaves a process behind that sleeps until this one, which becomes a program by exec, has ended; `program` is a pidfd of
/// this process. Then it does `job` with a duplicate of `file`, if the program has put a *sign* there, a byte that
/// is not zero at `sign_at`; and ends. Whether there is such a process: it needs room for two, and init must
/// be somebody else.
///
/// To be called by the only thread, before the exec. A panic in the job is as good as its end.
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
        // SAFETY: this is the only thread, so the copy of the memory is one of no lock and nothing half done. No
        // signal when the child ends (the flags are zero): the program may have SIGCHLD blocked, and would find
        // one. The child does not return from here.
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

/// The end of a new stack.
fn make_stack() -> Option<*mut c_void> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_STACK;
    // SAFETY: a new mapping.
    unsafe {
        let stack = libc::mmap(std::ptr::null_mut(), STACK_BYTES, protection, flags, -1, 0);
        (stack != libc::MAP_FAILED).then(|| stack.byte_add(STACK_BYTES))
    }
}

/// Whether a process without a parent would become our child.
fn is_reaper_of_orphans() -> bool {
    let mut is_reaper: c_int = 0;
    // SAFETY: the kernel fills `is_reaper`.
    unsafe {
        libc::prctl(libc::PR_GET_CHILD_SUBREAPER, &raw mut is_reaper);
        is_reaper != 0 || libc::getpid() == 1
    }
}

/// A3, for who is started in `call`; ours are as before when it is over.
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

/// The middle process: whether there is one aside.
fn run_middle<J>(program: BorrowedFd, file: BorrowedFd, watch: Watch<J>) -> bool
where
    J: FnOnce(OwnedFd) + 'static,
{
    let Some(stack) = make_stack().filter(|_| keep_only(program, file)) else { return false };
    let watch = Box::into_raw(Box::new(watch));
    let flags = libc::CLONE_VM | libc::SIGCHLD;
    // SAFETY: `run_aside` expects what it is given, which is never freed, nor is its stack; what it does in
    // this memory: A4.
    unsafe { libc::clone(run_watcher::<J>, stack, flags, watch.cast()) > 0 }
}

/// A2: the numbers 0 and 1 become those two, 2 stays, and no others are open.
fn keep_only(first: BorrowedFd, second: BorrowedFd) -> bool {
    // SAFETY: this process's own descriptors, copies of the caller's.
    unsafe {
        // Out of each other's way first.
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

/// The process aside.
extern "C" fn run_watcher<J>(watch: *mut c_void) -> c_int
where
    J: FnOnce(OwnedFd) + 'static,
{
    let mut program = libc::pollfd { fd: 0, events: libc::POLLIN, revents: 0 };
    let mut marker = 0_u8;
    // SAFETY: A4. Two system calls first, which touch this stack alone: libc's `errno` is the middle process's, too,
    // and is written only by a call that fails. All signals are blocked, so none is interrupted. When the
    // program has ended this memory is this process's alone, and so is the job, which is taken once. Descriptor
    // 1 was made by `has_only`, and nobody else knows of it. The process ends here.
    unsafe {
        libc::setsid();
        if libc::poll(&raw mut program, 1, -1) == 1 {
            let marker_offset = (&raw const (*watch.cast::<Watch<J>>()).marker_offset).read();
            if libc::pread(1, (&raw mut marker).cast(), 1, marker_offset) == 1 && marker != 0 {
                let on_exit = (&raw const (*watch.cast::<Watch<J>>()).on_exit).read();
                // It must not unwind into what called this.
                let on_exit = std::panic::AssertUnwindSafe(|| on_exit(OwnedFd::from_raw_fd(1)));
                let _ = std::panic::catch_unwind(on_exit);
            }
        }
        libc::_exit(0)
    }
}
