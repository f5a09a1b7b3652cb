//! Handles: numbers that stand for objects. A wrong number is an error and never a crash.
//!
//! ```text
//!   id:  generation (40 bits) | kind (4) | place in the kind's table (20)
//! ```
//!
//! - **N1** An id is used once: the generation grows each time that a place is reused. A place whose
//!   generations are used up is retired.
//! - **N2** The lookup of an id writes only to memory of the calling thread, and makes no system call:
//!   `protect` has the protocol. Places do not move, and are never freed.
//! - **N3** Every change of a table is made under one lock, which `fork` takes, too. So a child finds the
//!   tables consistent, and empties them. It neither uses nor drops the objects of its parent.

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
