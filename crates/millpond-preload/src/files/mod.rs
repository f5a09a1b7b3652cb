//! The files of a program in mode back: each open file description of the program has one of these states.
//!
//! ```text
//!   state      in the table of numbers        who serves it
//!   UNSERVED   UNSERVED (CLAIMED: a moment)   the kernel, for now: `unserved`
//!   LEFT       LEFT                           the kernel, until it is closed
//!   ENGINE     an OpenFile that is SERVED     the engine: `served_io`, `seek`
//!   BYPASSED   the same, and bypassed         the kernel, at the offset that the library keeps: `bypass`
//!   PASSED     an OpenFile that is PASSED     the kernel, until the last descriptor of the file is closed
//!   ENDING     none                           no call; readers and the engine leave it: `registry`, `pending_close`
//! ```
//!
//! The calls and their transitions. A file changes with all its descriptions, except for UNSERVED and LEFT:
//!
//! ```text
//!   open to write; the lease is granted             -> ENGINE
//!   open to write; the process has it open already  -> UNSERVED; claimed with the others -> ENGINE    multi_open
//!   open to write; another process has it open      -> PASSED
//!   open to read                                    -> UNSERVED; with --eager as to write
//!   open of an ENGINE file                          -> ENGINE, which share a description; else all -> PASSED    reopen
//!   64 calls by an UNSERVED writer                  UNSERVED -> ENGINE, if only this process has it open
//!   read, write, lseek, fsync, Linux AIO            no change
//!   stat, chmod, rename, utimens, sync, ..          no change: dirty pages are written back before
//!   ftruncate, fallocate                            no change: by the kernel, then cached pages are dropped
//!   dup                                             UNSERVED -> LEFT
//!   flock, fcntl locks                              UNSERVED -> LEFT; ENGINE that share -> PASSED
//!   mmap, splice, sendfile, copy_file_range,
//!     ioctl, F_SETFL, RWF flags, POSIX AIO, stdio   UNSERVED -> LEFT; ENGINE -> PASSED
//!   sendmsg with descriptors                        the same
//!   fork, exec, spawn, pidfd_getfd                  the same, of all files
//!   another process opens the file                  ENGINE -> PASSED                                  lease
//!   close                                           -> ENDING
//! ```
//!
//! `ENGINE -> PASSED` is `Registry::pass_file` (`hand_over`). Descriptions that share one pass BYPASSED (`unshare`), and
//! one that can't be opened again stays there. It is retried with each later call that would hand the file over.

pub mod bypass;
pub mod forked;
pub mod hand_over;
pub mod identity;
pub mod lease;
pub mod mode_back;
pub mod multi_open;
pub mod numbers;
pub mod offset;
pub mod open_file;
pub mod pending_close;
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
