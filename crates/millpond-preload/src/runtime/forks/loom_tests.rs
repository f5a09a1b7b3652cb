//! Loom models of a file that is opened beside a fork, compiled by `tests/loom.rs`.
//!
//! The fork finds a file that a child gets in the table, or the open reports it. The `loom_forks_without_*` twins leave
//! one rule out and must fail.

use std::sync::atomic::Ordering::Relaxed;

use loom::sync::{Arc, Mutex};
use loom::thread;

use crate::runtime::sync::AtomicBool;

use super::*;

#[derive(Clone, Copy, PartialEq)]
enum Rule {
    All,
    /// The open stores and loads without a fence between.
    NoFenceOfOpen,
    /// The fork stores and loads without a fence between.
    NoFenceOfFork,
    /// The open ignores that the count was odd before.
    NoOddCount,
}

struct Model {
    forks: Forks,
    /// The kernel's table of descriptors, under its lock.
    kernels: Mutex<bool>,
    /// Ours.
    table: AtomicBool,
}

impl Model {
    /// Whether the open has noticed a fork.
    fn open(&self, rule: Rule) -> bool {
        let before = self.forks.before();
        *self.kernels.lock().unwrap() = true;
        self.table.store(true, Relaxed);
        match rule {
            Rule::NoFenceOfOpen => before.0 & 1 != 0 || self.forks.0.load(Acquire) != before.0,
            Rule::NoOddCount => {
                fence(SeqCst);
                self.forks.0.load(Acquire) != before.0
            }
            _ => self.forks.has_forked(before),
        }
    }

    /// Whether the fork has found the file, and whether the child has it.
    fn fork(&self, rule: Rule) -> (bool, bool) {
        if rule == Rule::NoFenceOfFork {
            self.forks.0.fetch_add(1, SeqCst);
        } else {
            self.forks.begin();
        }
        let is_found = self.table.load(Relaxed);
        let is_childs = *self.kernels.lock().unwrap();
        self.forks.end();
        (is_found, is_childs)
    }
}

fn open_beside_a_fork(rule: Rule) {
    loom::model(move || {
        let model = Arc::new(Model {
            forks: Forks::new(),
            kernels: Mutex::new(false),
            table: AtomicBool::new(false),
        });
        let opener = thread::spawn({
            let model = Arc::clone(&model);
            move || model.open(rule)
        });
        let (is_found, is_childs) = model.fork(rule);
        let is_told = opener.join().unwrap();
        assert!(!is_childs || is_found || is_told, "the child has it unnoticed");
        assert!(!model.open(rule), "F2: no child has a file that is opened now");
    });
}

#[test]
fn loom_forks_opens() {
    open_beside_a_fork(Rule::All);
}

#[test]
#[should_panic(expected = "unnoticed")]
fn loom_forks_without_the_fence_of_an_open() {
    open_beside_a_fork(Rule::NoFenceOfOpen);
}

#[test]
#[should_panic(expected = "unnoticed")]
fn loom_forks_without_the_fence_of_a_fork() {
    open_beside_a_fork(Rule::NoFenceOfFork);
}

#[test]
#[should_panic(expected = "unnoticed")]
fn loom_forks_without_odd_counts() {
    open_beside_a_fork(Rule::NoOddCount);
}
