//! Mode through on the kernel's page cache: the default of a run.
//!
//! The kernel has every byte at every moment. The library answers reads from the same pages, through a read-only
//! mapping; each other call is the program's own, on its own descriptor. So there is no second copy of the data,
//! no lease, no thread, no descriptor of the library's, and no file that has to be handed back.
//!
//! ```text
//! read   -> descriptors: the state of the number       -> FILE: copy from the mapping, checked by counters
//!                                                    -> else the program's own call, between two checks
//! write  -> FILE: counters, the program's own call, counters
//! close, dup, fork, exec, .. -> forget or release what the library has, then the program's own call
//! ```
//!
//! Files: [`descriptors`] has the state of each descriptor number, [`inodes`] that of each file, [`mapped_io`] reads and writes,
//! [`position`] the file offset. The counters and the mapping are the engine's (`millpond::internals::page_cache`).
//!
//! Rules:
//!
//! - **P1** A number is looked at by its 64th read ([`descriptors::READS`]), with `--eager` by its first read, and in a process with
//!   several threads by its first write. Before that the library has made no system call for it, but for its name in a report. A
//!   write by the only thread has no read beside it, and later reads find its bytes and the size as they find those of another process.
//! - **P2** A mapping holds the open file description of the number that it was made by. It ends before that number
//!   is closed or replaced.
//! - **P3** The offset of a description is kept here only if this process opened it and no other process can have
//!   it. It goes to the kernel before the description is shared (fork, exec, spawn, a socket message, `dup`), and
//!   before a call of the kernel's that uses it.
//! - **P4** The library holds no lock while a program's call runs, so a signal handler may interrupt any call, make any
//!   other, and leave by `longjmp` ([`mapped_io::before_jump`]).
//! - **P5** Locks are held in sections alone, which block signals. Order: inodes, then the engine's ranges.
//!
//! Calls of the program past the hooks (system calls of its own instructions, io_uring, mappings, libc's own reads
//! and writes inside a stream) reach the same pages, so no bytes are stale or lost. Such a write is not atomic
//! for a read beside it, and such a `read` finds the kernel's offset.

mod descriptors;
mod inodes;
pub mod mapped_io;
mod position;

pub use descriptors::{
    forget_closed, forget_range, initialise, is_on, memory, note_flags_changed, note_open,
};
pub use inodes::{after_fork, before_fork, end_fork};
pub use mapped_io::truncate;
pub use position::{forget, release, release_for_exec, release_for_fork, seek, share};

/// Ends all mappings and gives all offsets to the kernel, for good: the program asks to be left alone, or does I/O that no
/// hook sees, so that descriptors may change hands unnoticed.
pub fn retire() {
    if descriptors::turn_off() {
        release_for_fork();
        inodes::unmap_all();
    }
}
