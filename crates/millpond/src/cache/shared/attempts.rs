//! The count of a client's attempts, by which the server knows that no thread is reading (shared.SH4).
//!
//! Locks: none.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::compiler_fence;

use crate::sync::{AtomicBool, AtomicU64, fence};

const CMD_GLOBAL_EXPEDITED: libc::c_int = 1 << 1;
const CMD_REGISTER_GLOBAL_EXPEDITED: libc::c_int = 1 << 2;

/// How an attempt's begin is ordered before its loads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum AttemptOrder {
    /// By the server's `membarrier`, which fences in each running thread of registered processes.
    ByServer,
    ByFence,
}

/// How a client orders its attempts: by fences, until it is registered. Each order is right at any time.
pub(crate) struct ClientOrder {
    /// The server calls `membarrier`.
    is_offered: bool,
    is_registered: AtomicBool,
}

impl ClientOrder {
    pub(crate) fn new(is_offered: bool) -> ClientOrder {
        ClientOrder { is_offered, is_registered: AtomicBool::new(false) }
    }

    /// Registers this process. In one with several threads the kernel waits for a grace period, of 10 to 20 ms.
    pub(crate) fn register(&self) {
        if self.is_offered && membarrier(CMD_REGISTER_GLOBAL_EXPEDITED) {
            // Release: pairs with `current`. Argued: an attempt without a fence comes after the registration, and loom has no
            // `membarrier`, by which alone that shows.
            self.is_registered.store(true, Release);
        }
    }

    #[inline]
    pub(crate) fn current(&self) -> AttemptOrder {
        // Acquire: pairs with `register`. Argued: as there.
        if self.is_registered.load(Acquire) {
            AttemptOrder::ByServer
        } else {
            AttemptOrder::ByFence
        }
    }
}

impl AttemptOrder {
    /// Whether this process, a server, can call `membarrier` for its clients.
    pub(crate) fn is_offered() -> bool {
        membarrier(CMD_GLOBAL_EXPEDITED)
    }
}

/// Twice the attempts that a thread of a client has begun, less one if it is in one.
#[repr(transparent)]
pub(crate) struct AttemptCount(AtomicU64);

impl AttemptCount {
    #[cfg(all(test, loom))]
    pub(crate) fn new() -> AttemptCount {
        AttemptCount(AtomicU64::new(0))
    }

    /// Begins an attempt. Caller: the thread that has the slot.
    #[inline]
    pub(crate) fn begin(&self, order: AttemptOrder) -> Attempting<'_> {
        // Release: pairs with `has_ended`, which may find this attempt in place of the end of the one before. The fence
        // orders it before the attempt's loads.
        self.0.store(self.0.load(Relaxed) + 1, Release);
        match order {
            // Argued: the server's membarrier is a fence of this thread, at whichever instruction it is. If that is
            // before the store, the loads below come after it as well.
            AttemptOrder::ByServer => compiler_fence(SeqCst),
            // Pairs with the fence of `begin_look`.
            AttemptOrder::ByFence => fence(SeqCst),
        }
        Attempting(self)
    }

    /// The attempt that is under way.
    pub(crate) fn under_way(&self) -> Option<u64> {
        // Acquire: pairs with the release of the end of the attempt before, whose loads are complete.
        let count = self.0.load(Acquire);
        (count % 2 == 1).then_some(count)
    }

    /// Whether the attempt has ended.
    pub(crate) fn has_ended(&self, attempt: u64) -> bool {
        // Acquire: as in `under_way`.
        self.0.load(Acquire) != attempt
    }
}

/// An attempt, until it is dropped.
pub(crate) struct Attempting<'a>(&'a AttemptCount);

impl Drop for Attempting<'_> {
    #[inline]
    fn drop(&mut self) {
        let count = &self.0.0;
        // Release: pairs with `has_ended`: the attempt's loads come before the server gives memory back.
        count.store(count.load(Relaxed) + 1, Release);
    }
}

/// The server's side, after frames have left their pages and before it looks at the counts.
pub(crate) fn begin_look() {
    #[cfg(not(loom))]
    membarrier(CMD_GLOBAL_EXPEDITED);
    // Pairs with the fence of `begin`.
    fence(SeqCst);
}

/// False: the system does not have the call, or does not allow it.
fn membarrier(command: libc::c_int) -> bool {
    // SAFETY: the call takes no memory.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
}
