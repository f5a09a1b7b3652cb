//! Who reaps a ring that several threads wait for: one at a time, and never nobody.
//!
//! ```text
//!             take                        give up
//!   VACANT ----------> LED, notify off ------------> VACANT, notify on
//!                       ^  |  hand on, by the driver: to the first who is listed
//!                       +--+
//! ```
//!
//! A thread that is about to sleep takes the role if it is vacant, and sleeps in the ring; others are
//! listed and sleep each on its own word (`signal`). The leader ends what has completed, which may grant
//! others their waits, or its own; then it gives the role up, as it is often back sooner than somebody
//! else could be woken. While nobody leads, each completion rings for the driver: it reaps, and if more is
//! to come hands the role on, to who was listed last: he that waits for much was listed long ago, and
//! would be woken many times before he has it.
//!
//! - **H1** Role, list and notification change together, under one lock: a vacant ring notifies, so who
//!   is listed may sleep behind nobody.
//! - **H2** Who gives the role up looks for completions after it turned the notification on, and rings
//!   for the driver if there are any: what completed before that was notified of to nobody. SeqCst fence
//!   here; the kernel has one between the completion and its look at the flag. Only who has the role may
//!   look, so it is vacant after that.
//! - **H3** A sleep in the ring ends at once if something had completed, or the poke had come, before.
//! - **H4** A listed thread leaves the list under the lock. If it is not there any more, it was given the
//!   role, whether or not it was told of that first: it leads, or gives it up.
//! - **H5** Who has the role may be granted by others: they see from its word that it sleeps in the ring,
//!   and poke that.
//!
//! Locks: the role's; under it only the ring's flag and queue are looked at.

use std::collections::VecDeque;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Instant;

use crate::io::signal::{Signal, Woken};
use crate::sync::{Arc, Mutex, MutexGuard, fence};

/// A ring as its reapers see it.
pub(crate) trait Ring {
    /// Whether nothing is in flight.
    fn is_idle(&self) -> bool;

    /// Whether completions ring for the driver. The caller has the role.
    fn set_notify(&self, on: bool);

    /// Has the driver look at the ring.
    fn ring_driver(&self);

    /// Whether something has completed and was not reaped. The caller has the role.
    fn has_completions(&self) -> bool;

    /// Ends what has completed. The caller has the role.
    fn reap(&self);

    /// Sleeps until something has completed, or `deadline`; may return early. The caller has the role.
    fn sleep(&self, deadline: Option<Instant>);

    /// Brings a leader out of its sleep, also one that is about to.
    fn poke(&self);
}

/// A ring, and the role of its reaper.
pub(crate) struct Reaping<R> {
    pub(crate) ring: R,
    role: Mutex<Role>,
}

#[derive(Default)]
struct Role {
    led: bool,
    listed: VecDeque<Arc<Signal>>,
}

impl<R: Ring> Reaping<R> {
    /// Of a ring that notifies.
    pub(crate) fn new(ring: R) -> Reaping<R> {
        Reaping { ring, role: Mutex::new(Role::default()) }
    }

    fn role(&self) -> MutexGuard<'_, Role> {
        self.role.lock().expect("no panic under the lock")
    }

    /// Sleeps until `signal` is granted, or `deadline`, and reaps as long as it is its turn. Whether it
    /// was granted.
    pub(crate) fn wait(&self, signal: &Arc<Signal>, deadline: Option<Instant>) -> bool {
        while !self.take_or_list(signal) {
            let woken = signal.sleep(deadline);
            if self.unlist(signal) {
                break;
            }
            if woken != Woken::Promoted {
                return woken == Woken::Granted;
            }
            // Told late of a role that it was given, and gave up, before.
        }
        self.lead(signal, deadline);
        self.vacate();
        signal.is_granted()
    }

    fn lead(&self, signal: &Signal, deadline: Option<Instant>) {
        loop {
            // Also when granted: nothing is left behind that the driver would be rung for.
            self.ring.reap();
            if signal.is_granted() || deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                return;
            }
            if signal.begin_lead() {
                self.ring.sleep(deadline);
                signal.end_lead();
            }
        }
    }

    /// Takes the role if it is vacant; then the driver is not rung for until the caller gives it up.
    pub(crate) fn try_take(&self) -> bool {
        self.take(&mut self.role())
    }

    fn take(&self, role: &mut Role) -> bool {
        if role.led {
            return false;
        }
        role.led = true;
        self.ring.set_notify(false);
        true
    }

    /// Reaps, and gives up the role.
    pub(crate) fn give_up(&self) {
        self.ring.reap();
        self.vacate();
    }

    /// For the driver: reaps if nobody else does, and has who is listed do so from then on.
    pub(crate) fn look(&self) {
        if !self.try_take() {
            return;
        }
        self.ring.reap();
        match self.next() {
            Some(next) => next.promote(),
            None => self.vacate(),
        }
    }

    /// Who is to have the role next, if there is a use in that; it is not listed any more.
    fn next(&self) -> Option<Arc<Signal>> {
        if self.ring.is_idle() {
            return None;
        }
        let mut role = self.role();
        // Who was granted comes by itself, and leaves again.
        let place = role.listed.iter().rposition(|signal| !signal.is_granted())?;
        role.listed.remove(place)
    }

    fn take_or_list(&self, signal: &Arc<Signal>) -> bool {
        let mut role = self.role();
        let taken = self.take(&mut role);
        if !taken {
            role.listed.push_back(Arc::clone(signal));
        }
        taken
    }

    /// Whether the caller has the role now (H4).
    fn unlist(&self, signal: &Arc<Signal>) -> bool {
        let mut role = self.role();
        let place = role.listed.iter().position(|listed| Arc::ptr_eq(listed, signal));
        place.map(|place| role.listed.remove(place)).is_none()
    }

    /// Gives up the role (H2).
    fn vacate(&self) {
        let mut role = self.role();
        self.ring.set_notify(true);
        fence(SeqCst);
        let left = self.ring.has_completions();
        role.led = false;
        drop(role);
        if left {
            self.ring.ring_driver();
        }
    }
}

#[cfg(all(test, loom))]
mod loom_tests;
