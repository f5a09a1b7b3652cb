//! Leaves a process behind, that is no child of the one that asks for it.
//!
//! Whoever is about to exec a program can have something done when that has ended, whatever ends it, and the
//! program knows nothing of it.
//!
//! ```text
//! caller ----------- (stopped) ------------> goes on, execs ...
//!    \ vfork                  ^ ends
//!     middle: closes, fork ---+
//!              \
//!               aside: own session ...............> job, ends
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
//! - **A4** *Its memory is its own.* The middle process borrows the caller's, which stands still meanwhile; the
//!   one aside has a copy, made by libc's `fork`. So the job may do what any program does.
//!
//! Why two: the first is as cheap as a thread, and what has no other purpose than to end need not copy tables of
//! pages. To have the program as a parent would save 20 us, and show it a child where it asks for all
//! of its children (`__WALL`, `/proc/PID/task/TID/children`).

#![deny(unsafe_op_in_unsafe_fn, clippy::undocumented_unsafe_blocks)]
#![cfg(target_os = "linux")]

use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// What the middle process needs: a frame of libc's functions, `fork` among them, and of the job.
const STACK_BYTES: usize = 256 << 10;

struct Middle<'a, J> {
    first: BorrowedFd<'a>,
    second: BorrowedFd<'a>,
    job: Option<J>,
    is_left: bool,
}

/// Leaves a process behind that does `job` and ends; `job` gets duplicates of the two descriptors. Whether there is
/// one: it needs room for two processes, and init must be somebody else.
///
/// Returns when the process is there. What the job does not end by itself does not end; a panic does, with a
/// message. Not for a process with other threads: their locks stay locked there.
pub fn leave<J>(first: BorrowedFd, second: BorrowedFd, job: J) -> bool
where
    J: FnOnce(OwnedFd, OwnedFd),
{
    // A1.
    if takes_orphans() {
        return false;
    }
    let mut middle = Middle { first, second, job: Some(job), is_left: false };
    with_signals_blocked(|| {
        // SAFETY: `run` expects what it is given. `middle` and the stack outlive the process, which has ended
        // when it was waited for; it runs in this memory while this thread, the only one, stands still
        // (CLONE_VFORK): A4.
        unsafe {
            let stack = libc::mmap(
                std::ptr::null_mut(),
                STACK_BYTES,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_STACK,
                -1,
                0,
            );
            if stack == libc::MAP_FAILED {
                return;
            }
            // No signal when it ends: the program may have SIGCHLD blocked, and would find one.
            let flags = libc::CLONE_VM | libc::CLONE_VFORK;
            let top = stack.byte_add(STACK_BYTES);
            let pid = libc::clone(run::<J>, top, flags, (&raw mut middle).cast());
            // Without an exec to wait for it stands still until that process has ended.
            while pid > 0
                && libc::waitpid(pid, std::ptr::null_mut(), libc::__WALL) < 0
                && *libc::__errno_location() == libc::EINTR
            {}
            libc::munmap(stack, STACK_BYTES);
        }
    });
    middle.is_left
}

/// Whether a process without a parent would become our child.
fn takes_orphans() -> bool {
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

/// The middle process, in memory that the caller will use again: it leaves nothing changed but `middle`.
extern "C" fn run<J>(middle: *mut c_void) -> c_int
where
    J: FnOnce(OwnedFd, OwnedFd),
{
    // SAFETY: given by `leave`, which stands still.
    let middle = unsafe { &mut *middle.cast::<Middle<J>>() };
    if !has_only(middle.first, middle.second) {
        return 1;
    }
    // SAFETY: the caller has one thread, so this is all of its memory's.
    match unsafe { libc::fork() } {
        -1 => return 1,
        0 => {}
        _ => {
            middle.is_left = true;
            return 0;
        }
    }
    // SAFETY: `has_only` made them, and nobody else knows of them; ends this process, whose memory is a copy.
    unsafe {
        libc::setsid();
        let (first, second) = (OwnedFd::from_raw_fd(0), OwnedFd::from_raw_fd(1));
        let job = middle.job.take();
        // It must not unwind into what called this.
        let job = std::panic::AssertUnwindSafe(|| job.map(|job| job(first, second)));
        let _ = std::panic::catch_unwind(job);
        libc::_exit(0)
    }
}

/// A2: the numbers 0 and 1 become those two, 2 stays, and no others are open.
fn has_only(first: BorrowedFd, second: BorrowedFd) -> bool {
    // SAFETY: this process's own descriptors: it shares memory with the caller, but not those.
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
