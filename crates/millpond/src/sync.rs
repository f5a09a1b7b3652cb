//! The atomics and locks of the protocols that loom explores; std's everywhere else. And futexes, which are not
//! the kernel's where one scheduler decides who runs; loom has none.

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, fence,
};
#[cfg(loom)]
pub(crate) use loom::sync::{Arc, Condvar, Mutex, MutexGuard};
#[cfg(loom)]
pub(crate) use loom::thread_local;
#[cfg(not(any(loom, scheduled)))]
pub(crate) use rustix::thread::futex;
#[cfg(all(scheduled, not(loom)))]
pub(crate) use std::futex;
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, fence,
};
#[cfg(not(loom))]
pub(crate) use std::sync::{Arc, Condvar, Mutex, MutexGuard};
#[cfg(not(loom))]
pub(crate) use std::thread_local;
