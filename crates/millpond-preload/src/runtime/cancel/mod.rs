//! Threads that are cancelled, or otherwise end in the midst of a call: what they may unwind
//! through.
//!
//! libc ends a thread (`pthread_cancel`, `pthread_exit`) by unwinding its stack. Where a hook waits
//! in libc, the hook's frame is unwound; where a signal handler of the program ends its thread,
//! whatever frame it interrupted. So:
//!
//! - C1. In a [`Section`](crate::runtime::section::Section) cancellation is disabled and signals
//!   are blocked: no thread ends in the engine or in this library's own work, whatever they call in
//!   libc. Nor does a panic leave them: it ends the process (`load`).
//! - C2. A hook that is a cancellation point acts on a request first ([`point::point`]), when it
//!   has done and holds nothing yet; and calls libc, where it may wait, while it holds nothing that
//!   must be given back, or with that handed to [`point::with_cleanup`]. Other hooks are no
//!   cancellation points: [`point::without`].
//! - C3. A hit makes no call that could act on a request. Instead `pthread_cancel` takes the
//!   thread's hits away ([`request`]): its next read comes to a point.
//! - C4. Libc is never told of the asynchronous cancel type, with which it would unwind a thread
//!   wherever it is, a section's first instruction included. The type is kept here, and libc has
//!   the thread's type deferred. `pthread_cancel` sends the thread libc's own signal (no program
//!   can block it), and `on_signal` acts on the request, unless the thread is in this library:
//!   then it looks again a little later.
//! - C5. When a thread ends, frames of this library are taken away as they are, like C's: nothing
//!   of them is dropped ([`unwinding::let_threads_end`]). So a handler may interrupt a hit, or a
//!   hook outside of sections, anywhere, and end the thread. What it leaves of a hit is put right
//!   when the thread's [`Record`](crate::runtime::thread::Record) is given back.

pub mod asynchronous;
pub mod point;
pub mod request;
pub mod state;
pub mod unwinding;
