//! Kernel calls in flight: how a file is taken over from the kernel, and no call pays for it.
//!
//! A file that the kernel serves is *watched*: its slot in the table says so, and each call that
//! reads, writes or moves the offset there names the number in its thread's word while it lasts:
//!
//! ```text
//! begin: push the number;  load the slot;  WATCHED: the kernel's call;  end: the word as it was
//!                                          CLAIMED: end, wait for the claimant, begin again
//! ```
//!
//! Who adopts the file wants no such call to be under way, and none to begin: a write of the
//! kernel's that lands later would never be seen, and a read would move an offset that was taken
//! over. So he does
//!
//! ```text
//! slot: WATCHED -> CLAIMED;  membarrier();  load every thread's word
//!     nobody names the number: take the file over;  slot: CLAIMED -> the description
//!     somebody does, and goes on so for a while:    slot: CLAIMED -> WATCHED
//! ```
//!
//! - I1. The number is pushed before the slot is loaded, and the slot is claimed before the words
//!   are loaded; `membarrier` is a full fence on every thread. A call that pushed before that fence
//!   is seen by the loads after it; one that pushed after it loads the slot after it, and finds it
//!   claimed. So a call needs a compiler fence only, and writes its own thread's word alone. Where
//!   the kernel refuses `membarrier`, callers fence themselves; loom explores that way.
//! - I2. A claim is a try. A call may last for ever (a pipe that was opened by name, a handler that
//!   does not return, a `longjmp` out of a call, which leaves its number named): who finds the
//!   number named gives the claim back after a bounded time, and so waits for nobody for good.
//! - I3. Who waits for a claimant names nothing meanwhile.
//! - I4. A handler's calls nest in the word of its thread; what it interrupts may be restarted, and
//!   stays named. There is room for three: with more the word says *any number*, until the
//!   outermost of them ends. So three jumps out of calls (`longjmp`) end adoption in a process for good. To
//!   notice a jump by the stack pointer (an outermost call that begins where an earlier one was, or above, has
//!   lost it) would take one more store for each call, and be wrong on a signal stack that lies above the frame which
//!   was interrupted; with SS_AUTODISARM the kernel does not tell whether that is so. Then a call of the
//!   kernel's would go on unnamed, and bytes could be lost: rather no adoption.
//! - I5. A description that has, or had, several numbers is not claimed: a call may go on by one of
//!   them that was closed meanwhile, and is another file's now. Several descriptions of one file may
//!   be, each by its one number: a call that goes on by a number that was closed holds a description
//!   that nobody claimed, and with it open there is no lease (`several.G2`).
//!
//! What the calls did to the file is ordered by the kernel; what they noted in the library, by
//! Release at their end and Acquire in the claimant's loads.

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

/// What a thread named before a call: see [`InFlight::end`].
#[derive(Clone, Copy)]
pub struct Before(u64);

impl InFlight {
    #[cfg(loom)]
    pub fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Names `fd`. Paired with [`InFlight::end`].
    #[inline(always)]
    pub fn begin(&self, fd: RawFd, is_fenced: bool) -> Before {
        let before = self.0.load(Relaxed);
        let word = if before == 0 { fd as u64 + 1 } else { nested(before, fd) };
        // Relaxed: I1 orders it before the load of the slot.
        self.0.store(word, Relaxed);
        compiler_fence(SeqCst);
        if is_fenced {
            fence(SeqCst);
        }
        Before(before)
    }

    /// The call is over.
    #[inline(always)]
    pub fn end(&self, before: Before) {
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

/// I4: the word of a thread that names `fd` beside what it names already.
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
