//! The switch of a file's descriptions from the engine to the kernel, at one moment: open_file.D7.
//!
//! A file may have several descriptions (`multi_open`). A write by one that is bypassed goes to the kernel and leaves
//! the cache as it is; a read by one that is not bypassed returns cached bytes. So there is one moment for all:
//!
//! ```text
//! no description has hits
//! switch: begin           the moment
//!         set, of each description
//!         end
//! the cache is dropped
//! ```
//!
//! - **Y1** The registry is locked from `begin` to `end`, so one file switches at a time.
//! - **Y2** A call looks at the switch first, and then at the flag of its description. Let a write find its description
//!   bypassed, and a read begin after that write has returned. If the write found the switch at its file, the
//!   read finds it there, or finds it ended, and then the flag. If the write found the flag, the switch began before.

use std::os::fd::RawFd;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use crate::runtime::sync::{AtomicBool, AtomicU32};

/// Whether a description is bypassed; see the module header.
pub struct Bypass(AtomicBool);

/// Which file switches just now: the number that its descriptions share, or [`NONE`].
pub struct Switch(AtomicU32);

/// No number; nor -1, which a description without one has.
const NONE: u32 = u32::MAX - 1;

#[cfg(not(loom))]
pub static SWITCH: Switch = Switch::new();

impl Switch {
    #[cfg(not(loom))]
    pub const fn new() -> Self {
        Self(AtomicU32::new(NONE))
    }

    #[cfg(loom)]
    pub fn new() -> Self {
        Self(AtomicU32::new(NONE))
    }

    /// Y1. Descriptions that share `real` are bypassed from here on.
    pub fn begin(&self, real: RawFd) {
        // Release: pairs with the Acquire in `Bypass::is_set`; a call that finds the switch finds no hits.
        self.0.store(real as u32, Release);
    }

    /// Each of them is [`Bypass::set`].
    pub fn end(&self) {
        // Release: pairs with the Acquire in `Bypass::is_set`; a call that finds the end finds the flags.
        self.0.store(NONE, Release);
    }

    /// In a child of fork, which has one thread.
    pub fn reset(&self) {
        self.0.store(NONE, Relaxed);
    }
}

impl Bypass {
    pub fn none() -> Self {
        Self(AtomicBool::new(false))
    }

    /// For a description that no other thread has found yet.
    pub fn reset(&self, is_set: bool) {
        self.0.store(is_set, Relaxed);
    }

    /// Between [`Switch::begin`] and [`Switch::end`].
    pub fn set(&self) {
        // Release: pairs with the Acquire in `is_set`; a call that finds the flag comes after the switch began.
        self.0.store(true, Release);
    }

    /// Whether it is set, or the file of the descriptions that share `real` switches just now.
    pub fn is_set(&self, switch: &Switch, real: RawFd) -> bool {
        // Acquire: Y2. The load of the flag must not come before that of the switch.
        let switching = switch.0.load(Acquire);
        switching == real as u32 || self.0.load(Acquire)
    }
}

#[cfg(all(test, loom))]
#[path = "bypass/loom_tests.rs"]
mod loom_tests;
