//! Kernel calls in flight: how the library takes a descriptor over from the kernel.
//!
//! A descriptor that the kernel serves for now is *unserved*: its slot in the table says so, and each call that reads,
//! writes or moves the offset there names the descriptor in its thread's word while it lasts:
//!
//! ```text
//! begin: push the number;  load the slot;  UNSERVED: the kernel's call;  end: the word as it was
//!                                          CLAIMED:  end, wait for the claimant, begin again
//! ```
//!
//! The thread that takes the file over must find no such call in flight, and none may begin: a write of the kernel's that
//! lands later would not be in the cache, and a read would move an offset that was taken over:
//!
//! ```text
//! slot: UNSERVED -> CLAIMED;  membarrier();  load every thread's word
//!     no thread names the number:       take the file over;  slot: CLAIMED -> the description
//!     a thread names it for some time:  slot: CLAIMED -> UNSERVED
//! ```
//!
//! - I1. The number is pushed before the slot is loaded, and the slot is claimed before the words are loaded; `membarrier`
//!   is a full fence on every thread. A call that pushed before that fence is seen by the loads after it. A call that
//!   pushed after it loads the slot after it, and finds it claimed. So a call needs a compiler fence only, and writes
//!   its own thread's word alone. Where the kernel refuses `membarrier`, callers fence themselves; loom explores that.
//! - I2. A claim is a try. A call may last without limit (a pipe that was opened by name, a handler that does not return, a
//!   `longjmp` out of a call, which leaves its number named). A claimant that finds the number named gives the claim up
//!   after a bounded time.
//! - I3. A call that waits for a claimant names no number while it waits.
//! - I4. A handler's calls nest in the word of its thread. There is room for three; with more the word says *any number*,
//!   until the outermost of them ends. So three jumps out of calls (`longjmp`) end claims in a process. A jump could be
//!   noticed by the stack pointer, but not where a signal stack lies above the interrupted frame; then a call would go
//!   on unnamed, and bytes could be lost.
//! - I5. A description that has, or had, several numbers is not claimed: a call may go on by a number that was closed, and
//!   is another file's now. Several descriptions of one file may be claimed, each by its one number. A call that goes on
//!   by a closed number holds a description that is not claimed, and with it open there is no lease (`multi_open.G2`).
//!
//! The kernel orders the changes of the file by these calls. Release at the end of a call and Acquire in the claimant's loads
//! order the library's own memory.

use std::os::fd::RawFd;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::compiler_fence;

use crate::runtime::sync::{AtomicU64, fence};

/// A number plus one takes so many bits; see `table::SLOTS`.
const BITS: u32 = 21;
const ONE: u64 = (1 << BITS) - 1;
/// I4: more numbers than there is room for.
const ANY: u64 = 1 << 63;
/// Set in the third place: a fourth number would fall off.
const FULL: u64 = ONE << (2 * BITS);

/// The numbers that one thread names, which alone changes it. Zero: none.
pub struct InFlight(AtomicU64);

/// The numbers that a thread named before a call: see [`InFlight::end`].
#[derive(Clone, Copy)]
pub struct SavedCall(u64);

impl InFlight {
    #[cfg(loom)]
    pub fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Names `fd`. Paired with [`InFlight::end`].
    #[inline(always)]
    pub fn begin(&self, fd: RawFd, is_fenced: bool) -> SavedCall {
        let before = self.0.load(Relaxed);
        let word = if before == 0 { fd as u64 + 1 } else { nested(before, fd) };
        // Relaxed: I1 orders it before the load of the slot.
        self.0.store(word, Relaxed);
        compiler_fence(SeqCst);
        if is_fenced {
            fence(SeqCst);
        }
        SavedCall(before)
    }

    /// The call is over.
    #[inline(always)]
    pub fn end(&self, before: SavedCall) {
        // Release: pairs with the Acquire in `names`.
        self.0.store(before.0, Release);
    }

    /// There is no such thread any more.
    pub fn reset(&self) {
        self.0.store(0, Relaxed);
    }

    /// Whether the thread names one of `fds`.
    pub fn names(&self, fds: &[RawFd]) -> bool {
        // Acquire: pairs with the Release in `end`.
        let word = self.0.load(Acquire);
        if word == 0 {
            return false;
        }
        let is_named =
            |fd: RawFd| (0..3).any(|place| word >> (place * BITS) & ONE == fd as u64 + 1);
        word & ANY != 0 || fds.iter().any(|fd| is_named(*fd))
    }
}

/// I4: the word of a thread that names `fd` in addition.
#[cold]
fn nested(before: u64, fd: RawFd) -> u64 {
    let any = if before & (FULL | ANY) == 0 { 0 } else { ANY };
    (before << BITS | (fd as u64 + 1)) & !ANY | any
}

/// Between the claim and the looks at who names the number: `membarrier` is a fence on all
/// threads, or nothing where callers fence themselves.
pub fn after_claim(membarrier: impl FnOnce()) {
    fence(SeqCst);
    membarrier();
}

#[cfg(all(test, loom))]
#[path = "in_flight/loom_tests.rs"]
mod loom_tests;
