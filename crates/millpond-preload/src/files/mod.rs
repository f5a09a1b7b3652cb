//! The files of a program in mode back.
//!
//! ```text
//! table: number -> description -> io: a hit, or pinned and through the engine
//!               -> UNSERVED: the kernel, until the program opens the file for writing (unserved, multi_open)
//! registry: which files are served                   late: dirty pages
//! ```

pub mod bypass;
pub mod description;
pub mod forked;
pub mod hand_over;
pub mod identity;
pub mod lease;
pub mod mode_back;
pub mod multi_open;
pub mod numbers;
pub mod offset;
pub mod pending_close;
pub mod pending_writes;
pub mod pin;
pub mod pressure;
pub mod process_locks;
pub mod references;
pub mod registry;
pub mod reopen;
pub mod seek;
pub mod segments;
pub mod served_io;
pub mod serving;
pub mod table;
pub mod unserved;
pub mod unserved_calls;
pub mod unshare;
pub mod writeback_policy;
