//! Cancellation: which frames a thread may unwind through if it is cancelled, or otherwise ends, during a call.
//!
//! libc ends a thread (`pthread_cancel`, `pthread_exit`) by unwinding its stack. If a hook waits
//! in libc, the hook's frame is unwound. If a signal handler of the program ends its thread,
//! the interrupted frame is unwound, which can be any frame. So:
//!
//! - C1. In a [`Section`](crate::runtime::section::Section) cancellation is disabled and signals
//!   are blocked. So no thread ends in the engine or in this library's own work, including their calls of
//!   libc. No panic leaves them either: it ends the process (`load`).
//! - C2. A hook that is a cancellation point first acts on a request ([`point::point`]), while it has
//!   done nothing and holds nothing. When it calls libc, which may wait, it holds nothing that
//!   must be released, or has passed that to [`point::with_cleanup`]. Other hooks are no
//!   cancellation points: [`point::without`].
//! - C3. A hit makes no call that could act on a request. Instead `pthread_cancel` disables the
//!   thread's hits ([`cancel_request`]), so that its next read reaches a point.
//! - C4. A thread of the asynchronous cancel type may end at any instruction, including a section's first. So the
//!   library leaves the program alone before a thread gets that type (`retirement`).
//! - C5. When a thread ends, frames of this library are removed like C's: none of their
//!   values is dropped ([`unwinding::let_threads_end`]). So a handler may interrupt a hit, or a
//!   hook outside of sections, anywhere, and end the thread. The state of an interrupted hit is reset
//!   when the thread's [`Record`](crate::runtime::thread::Record) is released.

pub mod cancel_request;
pub mod point;
pub mod state;
pub mod unwinding;
