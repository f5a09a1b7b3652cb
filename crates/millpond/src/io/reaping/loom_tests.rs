//! Loom models of the role of a ring's reaper: nobody sleeps for what nobody reaps.
//!
//! The ring is the kernel's as far as it matters: it posts a completion, has a fence, and looks at the
//! flag; a sleeper looks at the completions before it sleeps. Loom reports a sleeper that is never woken
//! as a deadlock.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use loom::thread;

use super::*;
use crate::sync::{AtomicU32, Condvar};

struct Model {
    completions: AtomicU32,
    pokes: AtomicU32,
    notify: AtomicU32,
    bell: Mutex<bool>,
    changed: Condvar,
    events: Mutex<Events>,
    /// How many events there are in all.
    total: u32,
    /// For the twin.
    looks_again: bool,
}

#[derive(Default)]
struct Events {
    ended: u32,
    /// For how many who waits.
    waits: Vec<(u32, Arc<Signal>)>,
}

impl Ring for Model {
    fn set_notify(&self, on: bool) {
        self.notify.store(on.into(), Release);
    }

    fn ring_driver(&self) {
        *self.bell.lock().unwrap() = true;
        self.changed.notify_all();
    }

    fn has_completions(&self) -> bool {
        self.looks_again && self.completions.load(Acquire) > 0
    }

    fn reap(&self) {
        // In one order with the others' pokes, as in the kernel's queue.
        self.pokes.swap(0, Acquire);
        let count = self.completions.swap(0, Acquire);
        if count > 0 {
            self.end(count);
        }
    }

    fn sleep(&self, _deadline: Option<Instant>) {
        let mut bell = self.bell.lock().unwrap();
        while self.completions.load(Acquire) + self.pokes.load(Acquire) == 0 {
            bell = self.changed.wait(bell).unwrap();
        }
    }

    fn poke(&self) {
        self.pokes.fetch_add(1, Release);
        let _bell = self.bell.lock().unwrap();
        self.changed.notify_all();
    }
}

impl Model {
    fn new(total: u32) -> Arc<Reaping<Model>> {
        Model::with(total, true)
    }

    fn with(total: u32, looks_again: bool) -> Arc<Reaping<Model>> {
        Arc::new(Reaping::new(Model {
            completions: AtomicU32::new(0),
            pokes: AtomicU32::new(0),
            notify: AtomicU32::new(1),
            bell: Mutex::new(false),
            changed: Condvar::new(),
            events: Mutex::default(),
            total,
            looks_again,
        }))
    }

    /// As the kernel does.
    fn complete(&self) {
        self.completions.fetch_add(1, Release);
        fence(SeqCst);
        let notify = self.notify.load(Relaxed) == 1;
        let mut bell = self.bell.lock().unwrap();
        *bell |= notify;
        self.changed.notify_all();
    }

    /// Ends events, and grants those who have what they wait for.
    fn end(&self, count: u32) {
        let mut events = self.events.lock().unwrap();
        events.ended += count;
        let ended = events.ended;
        let waits = std::mem::take(&mut events.waits);
        let (granted, waits): (Vec<_>, _) =
            waits.into_iter().partition(|(wanted, _)| *wanted <= ended);
        events.waits = waits;
        drop(events);
        for (_, signal) in granted {
            if signal.grant() {
                self.poke();
            }
        }
        // There is nothing more to come: the driver may end.
        if ended == self.total {
            self.ring_driver();
        }
    }
}

/// Waits until so many events have ended.
fn wait_for(reaping: &Reaping<Model>, wanted: u32, deadline: Option<Instant>) -> bool {
    let signal = Arc::new(Signal::new());
    let mut events = reaping.ring.events.lock().unwrap();
    if events.ended >= wanted {
        return true;
    }
    events.waits.push((wanted, Arc::clone(&signal)));
    drop(events);
    reaping.wait(&signal, deadline)
}

/// The driver's thread, until all events have ended.
fn drive(reaping: &Reaping<Model>) {
    while reaping.ring.events.lock().unwrap().ended < reaping.ring.total {
        let mut bell = reaping.ring.bell.lock().unwrap();
        while !*bell {
            bell = reaping.ring.changed.wait(bell).unwrap();
        }
        *bell = false;
        drop(bell);
        lead_through(reaping, || ());
    }
}

/// As a thread does that submits, or the driver.
fn lead_through(reaping: &Reaping<Model>, work: impl FnOnce()) {
    let leads = reaping.try_take();
    work();
    if leads {
        reaping.give_up();
    }
}

fn model(body: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(body);
}

fn spawn(reaping: &Arc<Reaping<Model>>, body: fn(&Reaping<Model>)) -> thread::JoinHandle<()> {
    let reaping = Arc::clone(reaping);
    thread::spawn(move || body(&reaping))
}

/// Goal: a completion meets a waiter that takes the role, at every step of either.
#[test]
fn loom_a_waiter_reaps_what_it_waits_for() {
    model(|| {
        let reaping = Model::new(1);
        let kernel = spawn(&reaping, |reaping| reaping.ring.complete());
        assert!(wait_for(&reaping, 1, None));
        kernel.join().unwrap();
    });
}

/// Goal: two waiters: who is served first hands the role to the other, and that is woken for it.
#[test]
fn loom_a_leader_hands_on_to_a_sleeper() {
    model(|| {
        let reaping = Model::new(2);
        let other = spawn(&reaping, |reaping| assert!(wait_for(reaping, 1, None)));
        let kernel = spawn(&reaping, |reaping| {
            reaping.ring.complete();
            reaping.ring.complete();
        });
        assert!(wait_for(&reaping, 2, None));
        other.join().unwrap();
        kernel.join().unwrap();
    });
}

/// Goal: a leader that is granted by somebody else comes out of its ring.
#[test]
fn loom_a_leader_is_granted_by_others() {
    model(|| {
        let reaping = Model::new(1);
        let worker = spawn(&reaping, |reaping| reaping.ring.end(1));
        assert!(wait_for(&reaping, 1, None));
        worker.join().unwrap();
    });
}

/// Goal: who is given the role when its time is up passes it on.
#[test]
fn loom_who_leaves_passes_on_what_it_was_given() {
    model(|| {
        let reaping = Model::new(2);
        let leaves = spawn(&reaping, |reaping| {
            wait_for(reaping, 2, Some(Instant::now()));
        });
        let first = spawn(&reaping, |reaping| {
            reaping.ring.complete();
            assert!(wait_for(reaping, 1, None));
            reaping.ring.complete();
        });
        assert!(wait_for(&reaping, 2, None));
        leaves.join().unwrap();
        first.join().unwrap();
    });
}

/// Goal: what completes while nobody leads, or while a leader goes, the driver reaps.
#[test]
fn loom_the_driver_reaps_what_is_left() {
    model(|| {
        let reaping = Model::new(2);
        let driver = spawn(&reaping, drive);
        let submitter =
            spawn(&reaping, |reaping| lead_through(reaping, || reaping.ring.complete()));
        reaping.ring.complete();
        submitter.join().unwrap();
        driver.join().unwrap();
    });
}

fn a_completion_meets_a_leaver(looks_again: bool) {
    model(move || {
        let reaping = Model::with(1, looks_again);
        let kernel = spawn(&reaping, |reaping| reaping.ring.complete());
        lead_through(&reaping, || ());
        kernel.join().unwrap();
        let rung = *reaping.ring.bell.lock().unwrap();
        assert!(rung || reaping.ring.completions.load(Relaxed) == 0, "nobody reaps it");
    });
}

/// Goal: a completion is reaped by who leaves, or the driver is rung for.
#[test]
fn loom_a_completion_meets_who_gives_up_the_role() {
    a_completion_meets_a_leaver(true);
}

#[test]
#[should_panic(expected = "nobody reaps it")]
fn loom_without_a_second_look_a_completion_is_left() {
    a_completion_meets_a_leaver(false);
}
