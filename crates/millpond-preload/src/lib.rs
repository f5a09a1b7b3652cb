//! `libmillpond_preload.so`: gives the file I/O of an unmodified program to Millpond.
//!
//! Loaded with `LD_PRELOAD` (by `millpond run`), it replaces libc's file functions. Regular files
//! under the served directories are read and written through an engine in the program's own
//! process. Calls on other files, and calls that can't be served, go to the kernel.
//!
//! Mode through reads from the kernel's page cache (`page_cache`), and passes all other calls on. The rest of this
//! page is about mode back. The path of a call through the library:
//!
//! ```text
//! hooks  ->  files/table: number -> description  ->  hit: the engine's lock-free read
//!                                                ->  files/served_io: pinned, through the engine
//!                                                ->  the kernel, if not served, or passed
//!                                -> unserved     ->  the kernel (files/unserved)
//! ```
//!
//! A file that the program opens for writing is served from then on, with all descriptors that the process has of
//! it. It is handed to the kernel permanently when another process may use it.
//!
//! Folders, each of which imports only those below it: `hooks`, `fork`, `retirement`, `aio`, `files`, `report`,
//! `runtime`.
//!
//! Coherence: each served descriptor *is* a real one, so a call without a hook still reaches the right file
//! (`multi_open`: all descriptors of a file are of one description). Dirty pages are written back before another process
//! can read the file (`writeback_policy`), and a lease reports when another process opens it (`lease`). Only the file offset lives
//! here (`offset`), and the kernel gets it when the file is passed to it.
//!
//! Linux AIO takes the same path, and ends later: `hooks/aio` -> `aio` -> the engine, or the kernel. The completions
//! of both come from one queue.
//!
//! Limits. Unless noted otherwise, the kernel serves these files, coherently:
//!
//! - a file that another process has open; a file that is open several times, and locked, or with flags that can't be
//!   kept (`multi_open`); files that are open at a fork or an exec, descriptors that were sent to another process,
//!   mappings;
//! - libc's streams;
//! - all files of a program that uses io_uring, `RTLD_DEEPBIND`, `dlmopen` or descriptors of a
//!   thread's own (`Registry::release_all_files`);
//! - **a system call that the program makes by an instruction of its own is not seen**: on a file
//!   that it uses through libc, too, it may read old bytes, and its writes may be lost. Nor is it
//!   noticed when a child of `clone` that shares memory, but not descriptors, opens and closes;
//! - a program that blocks SIGSEGV dies of a bad buffer instead of getting EFAULT;
//! - all files of a program that forbids itself system calls, locks its memory, ends its main thread first, or has
//!   threads of the asynchronous cancel type (`retirement`);
//! - the first served open, and a thread's first hit, may call `malloc` inside libc: a handler that
//!   does either while it interrupts `malloc` can hang.
//!
//! Locks, in order: registry, a description's offset, the engine's own, `process_locks`, pool,
//! AIO's, heap. All are taken with signals blocked (`section`), so that hooks may be called from
//! signal handlers.

#![deny(unsafe_op_in_unsafe_fn, clippy::undocumented_unsafe_blocks)]
// Hooks have the safety contract of the libc function whose name they bear.
#![allow(clippy::missing_safety_doc)]
// Under loom, `tests/loom.rs` has its protocols alone.
#![cfg(all(target_os = "linux", not(loom)))]

#[macro_use]
mod calls;
mod hooks;

mod aio;
mod files;
mod fork;
mod page_cache;
mod report;
mod retirement;
mod runtime;

use millpond::WriteMode;

use files::{registry, table, writeback_policy};
use runtime::cancel::point::without;
use runtime::cancel::unwinding::let_threads_end;
use runtime::{config, libc_calls, section, thread};

/// Runs when the library is loaded, before the program's own code.
extern "C" fn load() {
    thread::initialise();
    section::run(|_| {
        end_on_panic();
        let_threads_end();
        table::initialise();
        config::get();
        for fd in report::initialise() {
            table::set(fd, table::NumberState::Internal);
        }
        if config::get().mode == WriteMode::Through {
            page_cache::initialise();
        }
        fork::initialise();
        retirement::initialise();
    });
    libc_calls::resolve_all();
    libc_calls::find_single_threaded();
    thread::begin_work();
}

/// A panic must not unwind into the program: it prints its message, and ends the process.
fn end_on_panic() {
    let say = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        say(panic);
        std::process::abort();
    }));
}

/// Runs when the program ends by `exit` or by returning from `main`.
extern "C" fn unload() {
    if thread::is_away() {
        return;
    }
    without(|| {
        writeback_policy::end();
        report::report_exit(registry::before_report);
    });
}

#[used]
#[unsafe(link_section = ".init_array")]
static LOAD: extern "C" fn() = load;

#[used]
#[unsafe(link_section = ".fini_array")]
static UNLOAD: extern "C" fn() = unload;
