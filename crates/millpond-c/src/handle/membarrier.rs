//! A memory fence on all threads of the process (`membarrier(2)`, Linux 4.14).

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU8, fence};

use rustix::thread::{MembarrierCommand, membarrier};

const UNKNOWN: u8 = 0;
const ABSENT: u8 = 1;
const PRESENT: u8 = 2;

/// The result of the registration. It never changes afterwards.
static STATE: AtomicU8 = AtomicU8::new(UNKNOWN);

/// Whether the system has membarrier. The first call registers, under the lock of the tables, so that all
/// callers get one answer.
pub(crate) fn is_available() -> bool {
    if STATE.load(Relaxed) == UNKNOWN {
        let registered = membarrier(MembarrierCommand::RegisterPrivateExpedited)
            .and_then(|()| membarrier(MembarrierCommand::PrivateExpedited));
        STATE.store(if registered.is_ok() { PRESENT } else { ABSENT }, Relaxed);
    }
    STATE.load(Relaxed) == PRESENT
}

/// Makes the fence.
///
/// Argued: the kernel's call is a full fence for the caller, too; the fence below is for the compiler,
/// which does not know that. Loom has no membarrier.
pub(crate) fn everywhere() {
    while membarrier(MembarrierCommand::PrivateExpedited).is_err() {
        // EPERM: a child of fork may have to register again. No other error is known after a success,
        // except a temporary lack of memory.
        let _ = membarrier(MembarrierCommand::RegisterPrivateExpedited);
        std::thread::yield_now();
    }
    fence(std::sync::atomic::Ordering::SeqCst);
}
