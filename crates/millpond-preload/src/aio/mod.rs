//! Contexts of Linux AIO: requests for served files and for others, in one queue of completions.
//!
//! A program's context is a context of the kernel, under a handle of ours. Requests for files that
//! are not served go to it as they came. Those for served files are carried out by the engine; when
//! one has ended, a *stand-in* is submitted to the kernel's context: a read of nothing, which
//! completes at once. So there is one queue, the kernel's, with its order, counts, timeouts,
//! signals and eventfds; a call that takes a stand-in's completion from it finds the served
//! request's in its place.
//!
//! ```text
//!   io_submit: served -> a hit, a write of a few pages: ended        -> stand-in -> kernel's queue
//!                     -> a direct read worth no frame: `handed`     -> kernel's queue, by a descriptor of the engine's
//!                     -> another that misses: `File::start_read_raw` -> ended, on the engine's thread
//!                     -> other writes, syncs, long reads: `aside`    -> ended, on the engine's thread
//!              else   -> the kernel's queue
//!   io_getevents: the kernel's; then stand-ins are replaced -> slot free
//! ```
//!
//! - **A1** A slot is its request's from submission on. The thread that ends the request fills in the result
//!   and submits the slot's stand-in (of A6: who submits, and who takes it has the result); from then on the
//!   slot belongs to the `io_getevents` that takes the completion.
//! - **A2** While requests for served files are under way or not taken, all requests together are
//!   at most as many as the context was made for, which the kernel always has room for: a stand-in
//!   is not refused. While there are none, the kernel alone counts.
//! - **A3** The program keeps the memory of a request valid until it has taken its completion: that
//!   is the contract of Linux AIO. A request keeps its description pinned, so it is carried out on
//!   the file that was open, whatever became of the number, and its memory until its end.
//! - **A4** A context is destroyed when all requests for served files have ended; none begins from
//!   when that is waited for. Its memory lives as long as somebody uses the context: a user counts
//!   itself, and then looks whether the handle stands yet; the destroyer takes the handle away, and
//!   frees the memory when nobody is counted, or leaves that to the next thread that makes or
//!   destroys a context.
//! - **A5** Requests that end in one batch of the engine's have their stand-ins submitted together,
//!   by the thread that ends the first of them.
//! - **A6** A direct read that is worth no frame is *handed* to the program's context as it is, by a descriptor of the
//!   engine's: no thread of the engine's has to do with it. It holds no guard, as the program may write before it
//!   takes the completion; who takes that looks whether the read counts (unguarded.U2), and else reads anew, waiting.
//!   Until then the slot has the description pinned, which is one that may not write: the end of one that may
//!   is not to wait for a completion that nobody takes.
//!
//! The handle is the address of memory of ours that is zero at first: programs that look for
//! completions in the ring that a kernel's handle points to find no ring, and call. A forked child
//! has no contexts: the kernel knows none of its handles. The eventfd of a request is the program's
//! number: a program that closes it before the completion came gives up being told.
//!
//! Locks: those of `places` and `context`, leaves both. Waiting for completions takes none.

pub mod block;
pub mod context;
pub mod handed;
pub mod places;
pub mod request;
pub mod slots;
pub mod submit;
pub mod transfer;
