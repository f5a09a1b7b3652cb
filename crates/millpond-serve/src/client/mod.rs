//! The client: an object store that reads the cache of a server.
//!
//! ```text
//!   get -> objects: known, current, fresh? -> copy from the mapping              a hit: no lock, no system call
//!            | no                                 | a page is not cached
//!            +--------------------+---------------+
//!                                 v
//!          attach: attached? -> link: a request -> place and bytes -> objects
//!            | no server
//!            v
//!          the program's own store
//! ```
//!
//! - **CL1** A mapping is of one attachment, and so are the places of objects. When the server is gone, the attachment goes
//!   as a whole: later reads do not find it, and the mapping ends with the last read that has it.
//! - **CL2** A child of fork has a copy of its parent's attachment, whose socket, locks and thread are the parent's. The child
//!   leaks it, and attaches itself.
//! - **CL3** Bytes at a place are of one version, as long as they can be read. Whether that version may be served without
//!   asking is for the validity table and the freshness to say, or for the reply of this call.

mod attach;
mod attachment;
mod client_parts;
mod control;
mod gate;
mod kept_forgets;
mod link;
mod objects;
mod read;
mod stats;
mod store;
mod stream;
mod writes;

pub use control::set_server_memory;
pub use stats::ClientStats;
pub use store::SharedStore;
