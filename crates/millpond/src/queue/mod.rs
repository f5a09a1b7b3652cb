//! Completion queues.

pub(crate) mod rules;

pub(crate) mod waiting;

mod signal;

#[cfg(all(test, loom))]
mod loom_tests;

#[cfg(all(test, not(loom)))]
mod rules_tests;
