//! Handles: numbers that stand for objects, so that no number that a program may give is a crash.
//!
//! ```text
//!   id:  generation (40 bits) | kind (4) | place in the kind's table (20)
//! ```
//!
//! - **N1** An id is given once: the generation grows each time that a place is used again, and a place
//!   whose generations are used up is not.
//! - **N2** Looking an id up writes to memory of the calling thread alone, and makes no system call:
//!   `protect` has the protocol. Places stay where they are, and are never given back to the system.
//! - **N3** All that changes a table is done under one lock, which `fork` takes, too: so a child finds the
//!   tables whole, and empties them. What its parent had it does not touch, and does not drop.

pub(crate) mod protect;

#[cfg(not(loom))]
mod fork;
#[cfg(not(loom))]
mod membarrier;
#[cfg(not(loom))]
mod state;
#[cfg(not(loom))]
pub(crate) mod table;
#[cfg(not(loom))]
pub(crate) mod thread;

#[cfg(all(test, loom))]
mod loom_tests;

#[cfg(not(loom))]
pub(crate) use state::with_buffers;
