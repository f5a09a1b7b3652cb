//! Threads of the engine.

use std::io;
use std::mem::MaybeUninit;

/// Spawns a thread that takes no signals: they belong to the program's own threads. Save those of
/// memory faults, which a copy to a caller's memory may raise here as well ([`crate::fault`]).
pub(crate) fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let mut all = MaybeUninit::uninit();
    let mut old = MaybeUninit::uninit();
    // SAFETY: `all` and `old` are valid for the calls, and initialised by them; the mask of this
    // thread is restored below.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::sigdelset(all.as_mut_ptr(), libc::SIGSEGV);
        libc::sigdelset(all.as_mut_ptr(), libc::SIGBUS);
        libc::pthread_sigmask(libc::SIG_BLOCK, all.as_ptr(), old.as_mut_ptr());
    }
    let spawned = std::thread::Builder::new().name(name.into()).spawn(body);
    // SAFETY: `old` was initialised above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, old.as_ptr(), std::ptr::null_mut()) };
    spawned.map(drop)
}
