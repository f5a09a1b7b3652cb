//! Loom models of the role of a ring's reaper: no thread sleeps for completions without a reaper.
//!
//! The kernel's part of the ring is modelled as far as it matters: it posts a completion, has a
//! fence, and reads the flag; a sleeper checks for completions before it sleeps. Loom reports a
//! sleeper that is never woken as a deadlock.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use loom::thread;

use super::*;
use crate::sync::{AtomicU32, Condvar};

struct Model {
    /// Entries for the kernel to take and then complete.
    queued: AtomicU32,
    completions: AtomicU32,
    pokes: AtomicU32,
    notify: AtomicU32,
    wake: Mutex<bool>,
    changed: Condvar,
    events: Mutex<Events>,
    /// The total number of events.
    total: u32,
    /// For the mutation tests.
    without: Rule,
}

/// A rule that a mutation test leaves out.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Rule {
    None,
    /// reaper.H1: a vacant ring notifies.
    Notify,
    /// reaper.H2.
    SecondLook,
    /// reaper.H3, for completions.
    Completed,
    /// reaper.H5.
    Poke,
    /// reaper.H6, for a listed thread.
    Submit,
}

#[derive(Default)]
struct Events {
    ended: u32,
    /// The number of events that each waiter waits for.
    waits: Vec<(u32, Arc<Signal>)>,
}

impl Ring for Model {
    fn submit(&self) {
        if self.without != Rule::Submit {
            self.take_queued();
        }
    }

    fn is_idle(&self) -> bool {
        self.events.lock().unwrap().ended == self.total
    }

    fn set_notify(&self, on: bool) {
        self.notify.store((on && self.without != Rule::Notify).into(), Release);
    }

    fn ring_driver(&self) {
        *self.wake.lock().unwrap() = true;
        self.changed.notify_all();
    }

    fn has_completions(&self) -> bool {
        self.without != Rule::SecondLook && self.completions.load(Acquire) > 0
    }

    fn reap(&self) {
        // In one order with the pokes of other threads, as in the kernel's queue.
        self.pokes.swap(0, Acquire);
        let count = self.completions.swap(0, Acquire);
        if count > 0 {
            self.end(count);
        }
    }

    fn sleep(&self, _deadline: Option<Instant>) {
        self.take_queued();
        let mut wake = self.wake.lock().unwrap();
        if self.without == Rule::Completed {
            wake = self.changed.wait(wake).unwrap();
        }
        while self.completions.load(Acquire) + self.pokes.load(Acquire) == 0 {
            wake = self.changed.wait(wake).unwrap();
        }
    }

    fn poke(&self) {
        if self.without == Rule::Poke {
            return;
        }
        self.pokes.fetch_add(1, Release);
        let _wake = self.wake.lock().unwrap();
        self.changed.notify_all();
    }
}

impl Model {
    fn new(total: u32) -> Arc<Reaper<Model>> {
        Model::without(Rule::None, total)
    }

    fn without(without: Rule, total: u32) -> Arc<Reaper<Model>> {
        Arc::new(Reaper::new(Model {
            queued: AtomicU32::new(0),
            completions: AtomicU32::new(0),
            pokes: AtomicU32::new(0),
            notify: AtomicU32::new(1),
            wake: Mutex::new(false),
            changed: Condvar::new(),
            events: Mutex::default(),
            total,
            without,
        }))
    }

    /// A thread also takes the entries of other submitters.
    fn take_queued(&self) {
        (0..self.queued.swap(0, Acquire)).for_each(|_| self.complete());
    }

    /// As the kernel does.
    fn complete(&self) {
        self.completions.fetch_add(1, Release);
        fence(SeqCst);
        let notify = self.notify.load(Relaxed) == 1;
        let mut wake = self.wake.lock().unwrap();
        *wake |= notify;
        self.changed.notify_all();
    }

    /// Ends events, and grants the waiters whose events have all ended.
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
        // No more events follow: the driver may end.
        if ended == self.total {
            self.ring_driver();
        }
    }
}

/// Waits until that many events have ended.
fn wait_for(reaper: &Reaper<Model>, wanted: u32, deadline: Option<Instant>) -> bool {
    wait_with(reaper, wanted, deadline, false)
}

/// The same, possibly with the role. The wait goes through the ring if there are entries to submit.
fn wait_with(reaper: &Reaper<Model>, wanted: u32, deadline: Option<Instant>, leads: bool) -> bool {
    let signal = Arc::new(Signal::new());
    let mut events = reaper.ring.events.lock().unwrap();
    if events.ended >= wanted {
        return true;
    }
    events.waits.push((wanted, Arc::clone(&signal)));
    drop(events);
    reaper.wait(&signal, wanted as usize, deadline, leads)
}

/// The driver's thread, until all events have ended.
fn drive(reaper: &Reaper<Model>) {
    while reaper.ring.events.lock().unwrap().ended < reaper.ring.total {
        let mut wake = reaper.ring.wake.lock().unwrap();
        while !*wake {
            wake = reaper.ring.changed.wait(wake).unwrap();
        }
        *wake = false;
        drop(wake);
        reaper.poll();
    }
}

/// As a submitting thread does.
fn lead_through(reaper: &Reaper<Model>, work: impl FnOnce()) {
    let leads = reaper.try_take();
    work();
    if leads {
        reaper.release_role();
    }
}

fn model(body: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(body);
}

/// Makes the test `name` run `twin` in a separate process: loom cannot unwind out of a deadlock.
fn deadlocks(name: &str, twin: impl FnOnce()) {
    const IS_CHILD: &str = "MILLPOND_LOOM_TWIN";
    if std::env::var_os(IS_CHILD).is_some() {
        return twin();
    }
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "--nocapture"]).arg(format!("io::reaper::loom_tests::{name}"));
    let output = child.env(IS_CHILD, "1").output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && told.contains("deadlock; threads"), "{told}");
}

fn spawn(reaper: &Arc<Reaper<Model>>, body: fn(&Reaper<Model>)) -> thread::JoinHandle<()> {
    let reaper = Arc::clone(reaper);
    thread::spawn(move || body(&reaper))
}

fn a_waiter_meets_its_completion(without: Rule) {
    model(move || {
        let reaper = Model::without(without, 1);
        let kernel = spawn(&reaper, |reaper| reaper.ring.complete());
        assert!(wait_for(&reaper, 1, None));
        kernel.join().unwrap();
    });
}

/// Goal: a completion meets a waiter that takes the role, at every step of both.
#[test]
fn loom_a_waiter_reaps_its_completions() {
    a_waiter_meets_its_completion(Rule::None);
}

#[test]
fn loom_a_sleep_without_a_check_never_ends() {
    deadlocks("loom_a_sleep_without_a_check_never_ends", || {
        a_waiter_meets_its_completion(Rule::Completed);
    });
}

/// Two waiters, the kernel and the driver.
fn a_leader_leaves_a_sleeper(without: Rule) {
    model(move || {
        let reaper = Model::without(without, 2);
        let driver = spawn(&reaper, drive);
        let other = spawn(&reaper, |reaper| {
            assert!(wait_for(reaper, 1, None));
            reaper.ring.complete();
        });
        reaper.ring.complete();
        assert!(wait_for(&reaper, 2, None));
        other.join().unwrap();
        driver.join().unwrap();
    });
}

/// Goal: the first granted waiter gives the role up, and the other one is still granted.
#[test]
fn loom_a_leader_leaves_a_sleeper() {
    a_leader_leaves_a_sleeper(Rule::None);
}

#[test]
fn loom_behind_a_ring_that_does_not_notify_a_sleeper_is_left() {
    deadlocks("loom_behind_a_ring_that_does_not_notify_a_sleeper_is_left", || {
        a_leader_leaves_a_sleeper(Rule::Notify);
    });
}

/// A waiter that has queued a read meets one that may sleep in the ring already.
fn a_submitter_waits(without: Rule) {
    model(move || {
        let reaper = Model::without(without, 1);
        let other = spawn(&reaper, |reaper| assert!(wait_for(reaper, 1, None)));
        reaper.ring.queued.fetch_add(1, Release);
        let leads = reaper.try_take();
        assert!(wait_with(&reaper, 1, None, leads));
        other.join().unwrap();
    });
}

/// Goal: a waiter's queued entries are submitted, whether it leads or is listed.
#[test]
fn loom_a_waiter_submits_its_entries() {
    a_submitter_waits(Rule::None);
}

#[test]
fn loom_a_listed_thread_that_does_not_submit_waits_forever() {
    deadlocks("loom_a_listed_thread_that_does_not_submit_waits_forever", || {
        a_submitter_waits(Rule::Submit);
    });
}

fn a_leader_is_granted_by_another_thread(without: Rule) {
    model(move || {
        let reaper = Model::without(without, 1);
        let worker = spawn(&reaper, |reaper| reaper.ring.end(1));
        assert!(wait_for(&reaper, 1, None));
        worker.join().unwrap();
    });
}

/// Goal: a leader whose wait another thread grants wakes up in its ring.
#[test]
fn loom_a_leader_is_granted_by_another_thread() {
    a_leader_is_granted_by_another_thread(Rule::None);
}

#[test]
fn loom_without_a_poke_a_leader_is_granted_in_vain() {
    deadlocks("loom_without_a_poke_a_leader_is_granted_in_vain", || {
        a_leader_is_granted_by_another_thread(Rule::Poke);
    });
}

/// Goal: a leader that changes places with a thread that waits for fewer completions is still
/// granted, also by other threads.
#[test]
fn loom_a_longer_wait_changes_places() {
    model(|| {
        let reaper = Model::new(2);
        let little = spawn(&reaper, |reaper| assert!(wait_for(reaper, 1, None)));
        let worker = spawn(&reaper, |reaper| {
            reaper.ring.end(1);
            drive(reaper);
        });
        reaper.ring.complete();
        assert!(wait_for(&reaper, 2, None));
        little.join().unwrap();
        worker.join().unwrap();
    });
}

/// A waiter leaves to which the driver may have given the role, while another one sleeps. The
/// driver is also the kernel.
fn a_leaver_meets_the_role(leave: fn(&Reaper<Model>)) {
    model(move || {
        let reaper = Model::new(2);
        let leaves = spawn(&reaper, leave);
        let driver = spawn(&reaper, |reaper| {
            lead_through(reaper, || reaper.ring.complete());
            reaper.poll();
            reaper.ring.complete();
            drive(reaper);
        });
        assert!(wait_for(&reaper, 2, None));
        leaves.join().unwrap();
        driver.join().unwrap();
    });
}

/// Goal: a waiter that is given the role when its time is up gives it up.
#[test]
fn loom_a_leaver_gives_up_the_role() {
    a_leaver_meets_the_role(|reaper| {
        wait_for(reaper, 2, Some(Instant::now()));
    });
}

#[test]
fn loom_a_leaver_that_skips_the_list_loses_the_role() {
    deadlocks("loom_a_leaver_that_skips_the_list_loses_the_role", || {
        a_leaver_meets_the_role(|reaper| {
            let signal = Arc::new(Signal::new());
            if reaper.take_or_list(&signal, 2) {
                return reaper.release_role();
            }
            // reaper.H4: not unlisted.
            signal.sleep(Some(Instant::now()));
        });
    });
}

/// Goal: the driver reaps completions that arrive while the role is vacant, or while a leader
/// leaves.
#[test]
fn loom_the_driver_reaps_the_rest() {
    model(|| {
        let reaper = Model::new(2);
        let driver = spawn(&reaper, drive);
        let submitter = spawn(&reaper, |reaper| lead_through(reaper, || reaper.ring.complete()));
        reaper.ring.complete();
        submitter.join().unwrap();
        driver.join().unwrap();
    });
}

fn a_completion_meets_a_leaver(without: Rule) {
    model(move || {
        let reaper = Model::without(without, 1);
        let kernel = spawn(&reaper, |reaper| reaper.ring.complete());
        lead_through(&reaper, || ());
        kernel.join().unwrap();
        let rung = *reaper.ring.wake.lock().unwrap();
        assert!(rung || reaper.ring.completions.load(Relaxed) == 0, "it is not reaped");
    });
}

/// Goal: a completion is reaped by the leader that leaves, or the driver is notified.
#[test]
fn loom_a_completion_meets_a_leaver() {
    a_completion_meets_a_leaver(Rule::None);
}

#[test]
#[should_panic(expected = "it is not reaped")]
fn loom_without_a_second_check_a_completion_is_left() {
    a_completion_meets_a_leaver(Rule::SecondLook);
}
