//! The files of a program: which are open, which are served, and what is done to them.
//!
//! ```text
//! table: number -> watched: the kernel, and counts (watch), until it pays (adoption, claim)
//!               -> description -> io: a hit, or pinned and through the engine
//! registry: who serves a file                        late: what waits in the cache
//! forked: what several processes have by fork
//! ```

pub mod adoption;
pub mod bypass;
pub mod carried;
pub mod claim;
pub mod copy;
pub mod description;
pub mod evidence;
pub mod forked;
pub mod further;
pub mod given;
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
pub mod share;
pub mod streams;
pub mod table;
pub mod under_way;
pub mod unfinished;
pub mod watch;
