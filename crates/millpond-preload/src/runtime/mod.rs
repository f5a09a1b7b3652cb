//! The library's base inside a program: threads, sections, locks, memory, and calls of
//! the kernel.

pub mod alloc;
pub mod c;
pub mod cancel;
pub mod config;
pub mod count_blocks;
pub mod count_words;
pub mod elf;
pub mod fault;
pub mod following;
pub mod forks;
pub mod handlers;
pub mod in_flight;
pub mod libc_calls;
pub mod link;
pub mod lock;
pub mod own_threads;
pub mod reading;
pub mod section;
pub mod stack;
pub mod sync;
pub mod sys;
pub mod thread;
