//! The keeper: a recovery daemon that writes back the dirty pages of processes that died.
//!
//! An engine that was built with a keeper's [`Address`] hands each file over before its first dirty page,
//! and has its cached pages in memory that the keeper shares. When its process dies, however it dies, the
//! keeper writes the dirty pages to their files, and describes the result in a [`Report`].
//!
//! The keeper must outlive the program: [`spawn`] creates a separate process for it, `millpond keeper` is
//! one, and [`Server`] is for a parent process that exists anyway. Dirty pages do not survive events that
//! kill the keeper, too (a crash of the machine, a kill of the whole container).
//!
//! It serves processes of its own user, which may change to another user once their engine is built, and
//! accepts nothing from other users. It writes through the very descriptors that it is given, and only to
//! regular files on known file systems: so a client gains no access by it. A slow file system delays only
//! the processes that use it.
//!
//! Pages that it can't write, or must not write because another process has changed the file since, are
//! kept in a rescue file, which the report names ([`restore`], `millpond rescue`).
//!
//! An open of a file through Millpond waits until the dirty pages of a dead process are written. It does
//! not find the keeper of another network name space (usually of another container).
//!
//! ```no_run
//! use millpond::{Engine, keeper};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // Before the first thread starts.
//! let address = keeper::spawn()?;
//! let engine = Engine::builder().keeper(address).build()?;
//! # Ok(())
//! # }
//! ```

mod process;

mod server;

mod listen;

mod trusted_directory;

mod clients;

mod client_exit;

mod liveness;

mod replay;

mod orphaned_pages;

mod write_pieces;

mod page_writer;

mod client_memory;

mod target;

mod rescue;

mod report;

#[cfg(all(test, not(loom)))]
mod kill_tests;
#[cfg(all(test, loom))]
mod loom_tests;

use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

pub use process::{run, spawn};
pub use report::{Failure, FileReport, Report};
pub use rescue::{Restored, restore};
pub use server::{Server, Stopper};

use crate::recovery::mark;
pub use crate::recovery::wire::Address;

/// Waits until no keeper has pages of a dead process left to write to the file; [`crate::Engine::open`]
/// does so itself. This is for a caller that must not wait inside `open`, or reads the file without the
/// engine.
///
/// # Errors
///
/// [`io::ErrorKind::ResourceBusy`] if a keeper still writes after `patience`; or the error of the kernel.
pub fn await_written(file: BorrowedFd<'_>, patience: Duration) -> io::Result<()> {
    mark::await_written(&rustix::fs::fstat(file)?, patience)
}
