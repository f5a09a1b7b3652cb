//! The keeper: the process that writes back what others left dirty when they died.
//!
//! An engine that was built with a keeper's [`Address`] hands each file over before its first dirty
//! page, and has its cached pages in memory that the keeper shares. When its process dies, however
//! it dies, the keeper writes the dirty pages to their files, and says what it did in a [`Report`].
//!
//! The keeper must outlive the program: [`spawn`] makes a process of its own for it, `millpond
//! keeper` is one, and [`Server`] is for a parent that is there anyway. What kills the keeper, too
//! (the machine, a container as a whole), is not survived.
//!
//! It serves processes of its own user, which may change to another user once their engine is
//! built, and takes nothing from others. It writes through the very descriptors that it is given,
//! and to files only, of file systems that are known to hold such: so a client can do nothing by it
//! that it could not do itself. A slow file system is waited for by those alone who use it.
//!
//! What it can't write, and what it must not write, as somebody else has changed the file
//! meanwhile, it keeps in a rescue file, which the report names ([`restore`], `millpond rescue`).
//!
//! An open of a file through Millpond waits until what a dead process left of it is written. The
//! keeper of another network name space (of another container, mostly) is not known to it.
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

mod burial;

mod life;

mod replay;

mod dirty;

mod pieces;

mod write;

mod memory;

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

use crate::survival::mark;
pub use crate::survival::wire::Address;

/// Waits until no keeper has pages of a dead process left to write to the file;
/// [`crate::Engine::open`] does so itself. This is for a caller that must not wait inside of it, or
/// reads the file past the engine.
///
/// # Errors
///
/// [`io::ErrorKind::ResourceBusy`] where a keeper still writes after `patience`; what the kernel
/// says, if it can't be asked.
pub fn await_written(file: BorrowedFd<'_>, patience: Duration) -> io::Result<()> {
    mark::await_written(&rustix::fs::fstat(file)?, patience)
}
