//! The waiters of a queue: threads and tasks that wait by the rules, under the queue's one lock.
//!
//! ```text
//!   wait:  lock, arrive, unlock -> sleep -> lock, collect (granted) or withdraw (timeout), unlock
//!   other: lock, change, dispatch, unlock -> wake the granted waiters
//! ```
//!
//! A thread that changes the rules' state releases the lock, and then wakes the granted waiters, and
//! signals the eventfd for events that no waiter was granted. A waiter whose time is up takes the lock: it
//! finds its events there even if it has not been woken yet, and the late wake-up touches a signal that no
//! thread reads.
//!
//! Locks: the rules'; nothing is called under it, and no waker is cloned or dropped (`millpond_rangelock::callback`).

use std::collections::VecDeque;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::task::{Poll, Waker};
use std::time::Instant;

use millpond_rangelock::callback::TaskWaker;

use crate::io::backend::shared_ring::{HeldRing, SharedRing};
use crate::io::signal::{Signal, Woken};
use crate::queue::rules::{Relaxed, Rules, Ticket, WaiterEntry, Wakes};
use crate::sync::MutexExt;
use crate::sync::{Arc, AtomicU32, Mutex, MutexGuard};

/// The target of a grant's notification: used once, and that is the last access (signal.SG1).
pub(crate) enum Notify {
    Thread(Arc<Signal>),
    Task(TaskWaker),
}

/// A waiter's time limits.
#[derive(Clone, Copy, Default)]
pub(crate) struct Deadlines {
    /// After this time one event is enough.
    pub(crate) for_min: Option<Instant>,
    /// After this time no event is needed.
    pub(crate) at_all: Option<Instant>,
}

/// The rules under their lock.
pub(crate) struct QueueWaiters<E> {
    rules: Mutex<Rules<E, Notify>>,
    /// 1 after a caller has enabled the notification of unassigned events.
    is_notifying: AtomicU32,
    on_unassigned: Box<dyn Fn(usize) + Send + Sync>,
    /// A ring in which a waiter may sleep.
    ring: Option<std::sync::Arc<SharedRing>>,
}

impl<E> QueueWaiters<E> {
    /// `on_unassigned` is called with the number of unassigned events, after [`QueueWaiters::notify_unassigned`].
    pub(crate) fn new(
        capacity: usize,
        on_unassigned: Box<dyn Fn(usize) + Send + Sync>,
        ring: Option<std::sync::Arc<SharedRing>>,
    ) -> QueueWaiters<E> {
        QueueWaiters {
            rules: Mutex::new(Rules::new(capacity)),
            is_notifying: AtomicU32::new(0),
            on_unassigned,
            ring,
        }
    }

    #[cfg(all(test, loom))]
    pub(crate) fn without(capacity: usize, rule: crate::queue::rules::Rule) -> QueueWaiters<E> {
        let queue = QueueWaiters::new(capacity, Box::new(|_| {}), None);
        *queue.rules.acquire() = Rules::without(capacity, rule);
        queue
    }

    /// Releases the lock, and notifies the granted waiters.
    fn notify_waiters(&self, mut rules: MutexGuard<'_, Rules<E, Notify>>, wakes: Wakes<Notify>) {
        // Acquire: pairs with `notify_unassigned`, so that the eventfd is there. Argued: both are under
        // the lock of the rules.
        let unassigned = match self.is_notifying.load(Acquire) {
            0 => 0,
            _ => rules.newly_unassigned(),
        };
        drop(rules);
        wakes.into_iter().for_each(|notify| self.notify(notify));
        if unassigned > 0 {
            (self.on_unassigned)(unassigned);
        }
    }

    fn notify(&self, notify: Notify) {
        match notify {
            Notify::Thread(signal) => {
                // The last access to the signal; the ring outlives it.
                if signal.grant()
                    && let Some(ring) = &self.ring
                {
                    ring.poke();
                }
            }
            Notify::Task(waker) => waker.wake(),
        }
    }

    /// Sleeps until `signal` is granted this many events, or until `deadline`; returns whether it was
    /// granted.
    fn sleep(
        &self,
        signal: &Arc<Signal>,
        min: usize,
        deadline: Option<Instant>,
        held: Option<HeldRing<'_>>,
    ) -> bool {
        match &self.ring {
            Some(ring) => ring.wait(signal, min, deadline, held),
            None => signal.sleep(deadline) == Woken::Granted,
        }
    }

    /// Enables the notification of unassigned events, and reports those that are there already.
    pub(crate) fn notify_unassigned(&self) {
        let rules = self.rules.acquire();
        // Argued: see `notify_waiters`.
        self.is_notifying.store(1, Release);
        self.notify_waiters(rules, Wakes::new());
    }

    pub(crate) fn permits(&self, min: usize, max: usize) -> bool {
        self.rules.acquire().permits(min, max)
    }

    /// Reserves room for up to `wanted` events; returns their number.
    pub(crate) fn admit(&self, wanted: usize) -> usize {
        self.rules.acquire().admit(wanted)
    }

    /// Reserves room for one event, if the queue is empty and has no waiter.
    pub(crate) fn admit_alone(&self) -> bool {
        let mut rules = self.rules.acquire();
        rules.is_unused() && rules.admit(1) == 1
    }

    /// The number of events that are ready and not granted, and of those in flight.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let rules = self.rules.acquire();
        (rules.ready(), rules.inflight())
    }

    pub(crate) fn complete(&self, event: E) {
        let mut wakes = Wakes::new();
        let mut rules = self.rules.acquire();
        rules.complete(event, &mut wakes);
        self.notify_waiters(rules, wakes);
    }

    /// Completes several at once, in order; drains `events`.
    pub(crate) fn complete_all(&self, events: &mut VecDeque<E>) {
        let mut wakes = Wakes::new();
        let mut rules = self.rules.acquire();
        rules.complete_all(events, &mut wakes);
        self.notify_waiters(rules, wakes);
    }

    /// Waits for `min` to `max` events, which the rules permit; `held` submissions of the ring are made
    /// first.
    pub(crate) fn wait(
        &self,
        min: usize,
        max: usize,
        deadlines: Deadlines,
        mut held: Option<HeldRing<'_>>,
    ) -> Vec<E> {
        let mut wakes = Wakes::new();
        let mut signal = None;
        let mut rules = self.rules.acquire();
        let arrival = rules.arrive(
            min,
            max,
            || Notify::Thread(Arc::clone(signal.insert(Arc::new(Signal::new())))),
            &mut wakes,
        );
        self.notify_waiters(rules, wakes);
        let ticket = match arrival {
            WaiterEntry::Events(events) => return events,
            WaiterEntry::Waits(ticket) => ticket,
        };
        let signal = signal.expect("made for a waiter");
        let for_min = deadlines.for_min;
        let for_min = for_min.filter(|&min| deadlines.at_all.is_none_or(|at_all| min < at_all));
        let mut is_granted = for_min.is_some() && self.sleep(&signal, min, for_min, held.take());
        if for_min.is_some() && !is_granted {
            let mut wakes = Wakes::new();
            let mut rules = self.rules.acquire();
            let relaxed = rules.relax(ticket, &mut wakes);
            self.notify_waiters(rules, wakes);
            if let Relaxed::Events(events) = relaxed {
                return events;
            }
        }
        let min = if for_min.is_some() { 1 } else { min };
        is_granted = is_granted || self.sleep(&signal, min, deadlines.at_all, held);
        if is_granted {
            // The granted events are there: the grant came before the notification, under the lock.
            return self.rules.acquire().collect(ticket).expect("granted, and notified");
        }
        let mut wakes = Wakes::new();
        let mut rules = self.rules.acquire();
        let events = rules.withdraw(ticket, &mut wakes);
        self.notify_waiters(rules, wakes);
        events
    }

    /// The same for a task; `ticket` is its place from one poll to the next.
    pub(crate) fn poll_wait(
        &self,
        ticket: &mut Option<Ticket>,
        min: usize,
        max: usize,
        waker: &Waker,
    ) -> Poll<Vec<E>> {
        let mut wakes = Wakes::new();
        let mut fresh = Some(TaskWaker::new(waker));
        let mut notify = || Notify::Task(fresh.take().expect("for one waiter"));
        let mut rules = self.rules.acquire();
        if let Some(waiting) = *ticket {
            if let Some(events) = rules.collect(waiting) {
                *ticket = None;
                return Poll::Ready(events);
            }
            let old = rules.resignal(waiting, notify());
            drop(rules);
            // The drop of a waker may run any code, so not under the lock.
            drop(old);
            return Poll::Pending;
        }
        let arrival = rules.arrive(min, max, notify, &mut wakes);
        self.notify_waiters(rules, wakes);
        match arrival {
            WaiterEntry::Events(events) => Poll::Ready(events),
            WaiterEntry::Waits(waiting) => {
                *ticket = Some(waiting);
                Poll::Pending
            }
        }
    }

    /// A waiting task is dropped.
    pub(crate) fn abandon(&self, ticket: Ticket) {
        let mut wakes = Wakes::new();
        let mut rules = self.rules.acquire();
        let old = rules.abandon(ticket, &mut wakes);
        self.notify_waiters(rules, wakes);
        drop(old);
    }
}
