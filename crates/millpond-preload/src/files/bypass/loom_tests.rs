//! Loom models of a file of two descriptions that switches to the kernel, compiled by `tests/loom.rs`: a write by the
//! one, and then a read by the other. The twins leave one rule out and must fail.

use std::sync::atomic::Ordering::Relaxed;

use loom::sync::Arc;
use loom::sync::atomic::AtomicU8;
use loom::thread;

use super::*;

const REAL: RawFd = 7;

#[derive(Clone, Copy, PartialEq)]
enum Rule {
    All,
    /// The flags are set one after the other, with no switch.
    NoSwitch,
    /// The switch ends before the flags are set.
    EndsEarly,
    /// A call looks at its flag first.
    FlagFirst,
    /// Hits end after the switch.
    HitsEndLate,
}

struct Model {
    switch: Switch,
    flags: [Bypass; 2],
    has_hits: AtomicBool,
    /// The file's version in the kernel, and the one that is cached.
    kernels: AtomicU8,
    cached: AtomicU8,
}

impl Model {
    fn new() -> Self {
        Self {
            switch: Switch::new(),
            flags: [Bypass::none(), Bypass::none()],
            has_hits: AtomicBool::new(true),
            kernels: AtomicU8::new(0),
            cached: AtomicU8::new(0),
        }
    }

    fn is_bypassed(&self, index: usize, rule: Rule) -> bool {
        if rule == Rule::FlagFirst {
            let flag = self.flags[index].0.load(Acquire);
            return flag || self.switch.0.load(Acquire) == REAL as u32;
        }
        self.flags[index].is_set(&self.switch, REAL)
    }

    fn give_back(&self, rule: Rule) {
        if rule != Rule::HitsEndLate {
            self.has_hits.store(false, Relaxed);
        }
        if rule != Rule::NoSwitch {
            self.switch.begin(REAL);
        }
        if rule == Rule::EndsEarly {
            self.switch.end();
        }
        self.flags.iter().for_each(Bypass::set);
        self.switch.end();
        self.has_hits.store(false, Relaxed);
    }

    /// By the first description: the engine writes to both.
    fn write(&self, rule: Rule) {
        if !self.is_bypassed(0, rule) {
            self.cached.store(1, Relaxed);
        }
        // Release: as the kernel orders a write and a read of its bytes.
        self.kernels.store(1, Release);
    }

    /// By the second description.
    fn read(&self, rule: Rule) -> u8 {
        let is_cached = self.has_hits.load(Relaxed) || !self.is_bypassed(1, rule);
        if is_cached { self.cached.load(Relaxed) } else { self.kernels.load(Acquire) }
    }
}

fn read_after_a_write(rule: Rule) {
    loom::model(move || {
        let model = Arc::new(Model::new());
        let registry = thread::spawn({
            let model = Arc::clone(&model);
            move || model.give_back(rule)
        });
        model.write(rule);
        assert_eq!(model.read(rule), 1, "an old version after the write");
        registry.join().unwrap();
    });
}

/// Goal: a read that begins after a write has returned finds the bytes of that write, whichever description is found
/// bypassed first.
#[test]
fn loom_bypass_reads_what_was_written() {
    read_after_a_write(Rule::All);
}

#[test]
#[should_panic(expected = "an old version")]
fn loom_bypass_without_the_switch() {
    read_after_a_write(Rule::NoSwitch);
}

#[test]
#[should_panic(expected = "an old version")]
fn loom_bypass_with_an_early_end() {
    read_after_a_write(Rule::EndsEarly);
}

#[test]
#[should_panic(expected = "an old version")]
fn loom_bypass_with_the_flag_first() {
    read_after_a_write(Rule::FlagFirst);
}

#[test]
#[should_panic(expected = "an old version")]
fn loom_bypass_with_late_hits() {
    read_after_a_write(Rule::HitsEndLate);
}
