//! The files of a program in mode back.
//!
//! ```text
//! table: number -> description -> io: a hit, or pinned and through the engine
//!               -> UNSERVED: the kernel, until the program opens the file for writing (unserved, several)
//! registry: which files are served                   late: dirty pages
//! ```

pub mod bypass;
pub mod copy;
pub mod description;
pub mod forked;
pub mod further;
pub mod hand_over;
pub mod identity;
pub mod io;
pub mod late;
pub mod lease;
pub mod lingering;
pub mod mode_back;
pub mod numbers;
pub mod offset;
pub mod parting;
pub mod pin;
pub mod pressure;
pub mod process_locks;
pub mod references;
pub mod registry;
pub mod seek;
pub mod segments;
pub mod serving;
pub mod several;
pub mod streams;
pub mod table;
pub mod under_way;
pub mod unfinished;
pub mod unserved;
