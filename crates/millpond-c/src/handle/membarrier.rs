//! A fence in all threads of the process, made by one (`membarrier(2)`, Linux 4.14).

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU8, fence};

use rustix::thread::{MembarrierCommand, membarrier};

const UNKNOWN: u8 = 0;
const ABSENT: u8 = 1;
const PRESENT: u8 = 2;

/// What the system said. Once there it stays for the life of the process.
static STATE: AtomicU8 = AtomicU8::new(UNKNOWN);

/// Whether the system has it. Asked the first time; under the lock of the tables, so that all get one answer.
pub(crate) fn is_there() -> bool {
    if STATE.load(Relaxed) == UNKNOWN {
        let registered = membarrier(MembarrierCommand::RegisterPrivateExpedited)
            .and_then(|()| membarrier(MembarrierCommand::PrivateExpedited));
        STATE.store(if registered.is_ok() { PRESENT } else { ABSENT }, Relaxed);
    }
    STATE.load(Relaxed) == PRESENT
}

/// The fence.
///
/// Argued: the kernel's call is a full fence for the caller, too; this one is for the compiler, which does
/// not know that. Loom has no membarrier.
pub(crate) fn everywhere() {
    while membarrier(MembarrierCommand::PrivateExpedited).is_err() {
        // EPERM: a child of fork may have to register again. Nothing else is known to fail once it has
        // worked; memory may be short for a moment.
        let _ = membarrier(MembarrierCommand::RegisterPrivateExpedited);
        std::thread::yield_now();
    }
    fence(std::sync::atomic::Ordering::SeqCst);
}
