//! Contexts of Linux AIO: requests for served files and for other files, in one queue of completions.
//!
//! A program's context is a context of the kernel, under a handle of the library. Requests for files that
//! are not served go to the kernel unchanged. The engine carries out requests for served files. When
//! such a request ends, the library submits a *stand-in* to the kernel's context: a read of an empty file, which
//! completes at once. So there is one queue, the kernel's, with its order, counts, timeouts,
//! signals and eventfds. A call that takes a stand-in's completion from it returns the served
//! request's completion instead.
//!
//! ```text
//!   io_submit: served -> a hit, a write: ended                       -> stand-in -> kernel's queue
//!                     -> a direct read worth no frame: `optimistic_read`     -> kernel's queue, by a descriptor of the engine's
//!                     -> another that misses: `File::start_read_raw` -> ended, on the engine's thread
//!                     -> syncs, long reads: `aside`                  -> ended, on the engine's thread
//!              else   -> the kernel's queue
//!   io_getevents: the kernel's; then stand-ins are replaced -> slot free
//! ```
//!
//! - **A1** A request owns its slot from submission on. The thread that ends the request stores the result
//!   and submits the slot's stand-in; from then on the `io_getevents` that takes the completion owns the slot.
//!   For A6 the submitter submits it, and the thread that takes the completion computes the result.
//! - **A2** While requests for served files are in flight or not taken, the total number of requests is
//!   at most the capacity of the context. The kernel always has room for that number, so a stand-in
//!   is not refused. If there are no such requests, only the kernel's count applies.
//! - **A3** The program keeps the memory of a request valid until it has taken the completion: the
//!   contract of Linux AIO. A request keeps its description pinned, so it is carried out on
//!   the file that was open, even if the number was closed or reused, and its memory until its end.
//! - **A4** A context is destroyed when all requests for served files have ended; no request begins
//!   once the destroyer waits for that. Its memory lives as long as the context has users: the next thread that makes or
//!   destroys a context frees it, outside of the engine's threads.
//! - **A5** Requests that end in one batch of the engine have their stand-ins submitted together,
//!   by the thread that ends the first of them.
//! - **A6** A direct read that is not worth a frame goes unchanged to the program's context, by a descriptor of
//!   the engine; no engine thread takes part. It holds no guard, as the program may write before it
//!   takes the completion. The thread that takes the completion checks whether the read is valid (optimistic.U2). If
//!   not, it reads again and waits. Until then the slot pins the description, which must not be writable: the end of a
//!   writable description must not wait for a completion that the program may never take.
//!
//! The handle is the address of library memory that is initially zero. Programs that look for
//! completions in the ring at a kernel's handle find no ring, and call. A forked child
//! has no contexts: the kernel knows none of its handles. The eventfd of a request is the program's
//! number: a program that closes it before the completion gets no notification.
//!
//! Locks: those of `context` and `slots`, all leaves. Waiting for completions takes no lock.

pub mod context;
pub mod iocb;
pub mod optimistic_read;
pub mod request;
pub mod slots;
pub mod submit;
pub mod transfer;
