//! The reaper of a ring that several threads wait for: one at a time, and never none.
//!
//! ```text
//!             take                        give up
//!   VACANT ----------> LED, notify off ------------> VACANT, notify on
//!                       ^  |  hand on, to one who is listed: by the driver,
//!                       +--+  or by a leader who wants more, and is listed itself
//! ```
//!
//! A thread that is about to sleep takes the role if it is vacant, and sleeps in the ring; others are
//! listed and sleep each on its own word (`signal`). The leader ends what has completed, which may grant
//! others their waits, or its own; then it gives the role up, as it is often back sooner than somebody
//! else could be woken. While nobody leads, each completion rings for the driver: it reaps, and if more is
//! to come hands the role on.
//!
//! Each completion wakes the leader. So the role is for the waiter that wants least, as it will be
//! granted first: one that waits for much would be woken many times before it has it.
//!
//! - **H1** Role, list and notification change together, under one lock: a vacant ring notifies, so
//!   a listed waiter may sleep behind nobody.
//! - **H2** A leader that gives the role up looks for completions after it turned the notification
//!   on, and rings for the driver if there are any: what completed before that was notified of to
//!   nobody. SeqCst fence here; the kernel has one between the completion and its look at the flag.
//!   Only the leader may look, so the role is vacant after that.
//! - **H3** A sleep in the ring ends at once if something had completed, or the poke had come, before.
//! - **H4** A listed thread leaves the list under the lock. If it is not there any more, it was given the
//!   role, whether or not it was told of that first: it leads, or gives it up.
//! - **H5** A leader may be granted by others: they see from its word that it sleeps in the ring,
//!   and poke that.
//! - **H6** Who waits may have queued what nobody has submitted yet: it submits before it sleeps, in
//!   the ring or listed, and before it goes.
//!
//! Locks: the role's; under it only the ring's flag and queue are looked at.

use std::sync::atomic::Ordering::SeqCst;
use std::time::Instant;

use crate::io::signal::{Signal, Woken};
use crate::sync::{Arc, Mutex, MutexGuard, fence};

/// A ring as its reapers see it.
pub(crate) trait Ring {
    /// Has the kernel take what is queued.
    fn submit(&self);

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

    /// Submits, and sleeps until something has completed, or `deadline`; may return early. The caller
    /// has the role.
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
    listed: Vec<Listed>,
}

/// A waiter that sleeps until it is granted, or has the role.
struct Listed {
    signal: Arc<Signal>,
    wanted: usize,
}

impl Role {
    /// Takes the waiter that wants least off the list, if that is little enough.
    fn take_next(&mut self, is_little: impl Fn(usize) -> bool) -> Option<Arc<Signal>> {
        let listed = self.listed.iter().enumerate();
        let place = listed
            // A granted waiter comes by itself, and leaves again.
            .filter(|(_, listed)| is_little(listed.wanted) && !listed.signal.is_granted())
            .min_by_key(|(_, listed)| listed.wanted)
            .map(|(place, _)| place)?;
        Some(self.listed.remove(place).signal)
    }
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
    /// was granted. `wanted`: for how much it waits; `leads`: it has taken the role already. What it has
    /// queued before is submitted.
    pub(crate) fn wait(
        &self,
        signal: &Arc<Signal>,
        wanted: usize,
        deadline: Option<Instant>,
        leads: bool,
    ) -> bool {
        let mut leads = leads || self.take_or_list(signal, wanted);
        loop {
            let is_over = leads && self.lead(signal, wanted, deadline);
            // H6.
            self.ring.submit();
            if is_over {
                self.vacate();
                return signal.is_granted();
            }
            let woken = signal.sleep(deadline);
            leads = self.unlist(signal);
            if leads {
                continue;
            }
            if woken != Woken::Promoted {
                return woken == Woken::Granted;
            }
            // Told late of a role that it was given, and gave up, before.
            leads = self.take_or_list(signal, wanted);
        }
    }

    /// Reaps until the wait is over; false if the role went to one that wants less, and the caller
    /// is listed.
    fn lead(&self, signal: &Arc<Signal>, wanted: usize, deadline: Option<Instant>) -> bool {
        loop {
            // Also when granted: nothing is left behind that the driver would be rung for.
            self.ring.reap();
            if signal.is_granted() || deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                return true;
            }
            if self.change_places(signal, wanted) {
                return false;
            }
            if signal.begin_lead() {
                self.ring.sleep(deadline);
                signal.end_lead();
            }
        }
    }

    fn change_places(&self, signal: &Arc<Signal>, wanted: usize) -> bool {
        if self.ring.is_idle() {
            return false;
        }
        let mut role = self.role();
        let Some(next) = role.take_next(|least| least < wanted) else { return false };
        role.listed.push(Listed { signal: Arc::clone(signal), wanted });
        drop(role);
        next.promote();
        true
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

    /// For the driver: reaps if nobody else does, and has a listed waiter do so from then on.
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

    /// The next leader, if there is a use in one.
    fn next(&self) -> Option<Arc<Signal>> {
        if self.ring.is_idle() { None } else { self.role().take_next(|_| true) }
    }

    fn take_or_list(&self, signal: &Arc<Signal>, wanted: usize) -> bool {
        let mut role = self.role();
        let taken = self.take(&mut role);
        if !taken {
            role.listed.push(Listed { signal: Arc::clone(signal), wanted });
        }
        taken
    }

    /// Whether the caller has the role now (H4).
    fn unlist(&self, signal: &Arc<Signal>) -> bool {
        let mut role = self.role();
        let place = role.listed.iter().position(|listed| Arc::ptr_eq(&listed.signal, signal));
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
