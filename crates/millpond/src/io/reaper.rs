//! The reaper of a ring for which several threads wait: at most one thread reaps at a time, and
//! completions are never left without a reaper.
//!
//! ```text
//!             take                        give up
//!   VACANT ----------> LED, notify off ------------> VACANT, notify on
//!                       ^  |  hand on to a listed thread: by the driver,
//!                       +--+  or by a leader that waits for more, and is listed then
//! ```
//!
//! A thread that is about to sleep takes the role of the leader if it is vacant, and sleeps in the
//! ring. Other threads are listed and sleep on a word each (`signal`). The leader reaps
//! completions, which may grant waits of other threads, or its own. Then it gives the role up, as
//! it often returns sooner than another thread could be woken. While the role is vacant, each
//! completion notifies the driver, which reaps, and hands the role on if more completions are
//! expected.
//!
//! Each completion wakes the leader. So the role is for the waiter that waits for the fewest
//! completions, as it will be granted first. A waiter for many completions would be woken many
//! times before its wait is over.
//!
//! - **H1** Role, list and notification change together, under one lock: a vacant ring notifies the
//!   driver, so no listed waiter sleeps without a reaper.
//! - **H2** A leader that gives the role up turns the notification on and then checks for
//!   completions; if there are any, it notifies the driver, as earlier completions were not
//!   notified. There is a SeqCst fence here; the kernel has one between the completion and its read
//!   of the flag. Only the leader may check, so the role becomes vacant after that.
//! - **H3** A sleep in the ring ends at once if a completion or the poke came before.
//! - **H4** A listed thread leaves the list under the lock. If it is not listed any more, it was
//!   given the role, whether or not it has noticed the promotion: it leads, or gives the role up.
//! - **H5** Other threads may grant the wait of a leader: they see from its word that it sleeps in
//!   the ring, and poke the ring.
//! - **H6** A waiter may have queued entries that were not submitted yet. It submits them before it
//!   sleeps, in the ring or listed, and before it returns.
//!
//! Locks: the lock of the role; under it only the ring's flag and queue are accessed.

use std::sync::atomic::Ordering::SeqCst;
use std::time::Instant;

use crate::io::signal::{Signal, Woken};
use crate::sync::MutexExt;
use crate::sync::{Arc, Mutex, fence};

/// A ring as seen by its reapers.
pub(crate) trait Ring {
    /// Submits the queued entries to the kernel.
    fn submit(&self);

    /// Whether nothing is in flight.
    fn is_idle(&self) -> bool;

    /// Sets whether completions notify the driver. The caller has the role.
    fn set_notify(&self, on: bool);

    /// Makes the driver check the ring.
    fn ring_driver(&self);

    /// Whether there are completions that were not reaped. The caller has the role.
    fn has_completions(&self) -> bool;

    /// Processes the completions. The caller has the role.
    fn reap(&self);

    /// Submits, and sleeps until there is a completion, or until `deadline`. May return early. The
    /// caller has the role.
    fn sleep(&self, deadline: Option<Instant>);

    /// Ends the sleep of a leader, even one that is about to begin.
    fn poke(&self);
}

/// A ring, and the role of its reaper.
pub(crate) struct Reaper<R> {
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
    /// Removes the waiter that waits for the fewest completions from the list, if they are few
    /// enough.
    fn take_next(&mut self, is_little: impl Fn(usize) -> bool) -> Option<Arc<Signal>> {
        let listed = self.listed.iter().enumerate();
        let place = listed
            // A granted waiter wakes up by itself and leaves.
            .filter(|(_, listed)| is_little(listed.wanted) && !listed.signal.is_granted())
            .min_by_key(|(_, listed)| listed.wanted)
            .map(|(place, _)| place)?;
        Some(self.listed.remove(place).signal)
    }
}

impl<R: Ring> Reaper<R> {
    /// The role of a ring that notifies.
    pub(crate) fn new(ring: R) -> Reaper<R> {
        Reaper { ring, role: Mutex::new(Role::default()) }
    }

    /// Sleeps until `signal` is granted, or until `deadline`, and reaps while it has the role.
    /// Returns whether it was granted. `wanted`: the number of completions that it waits for.
    /// `leads`: it has the role already. Entries that it has queued are submitted.
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
            // A late notice of a role that the thread was given, and gave up, before.
            leads = self.take_or_list(signal, wanted);
        }
    }

    /// Reaps until the wait is over. False: the role went to a thread that waits for fewer
    /// completions, and the caller is listed.
    fn lead(&self, signal: &Arc<Signal>, wanted: usize, deadline: Option<Instant>) -> bool {
        loop {
            // Also when granted: otherwise the driver would be notified of the remaining
            // completions.
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
        let mut role = self.role.acquire();
        let Some(next) = role.take_next(|least| least < wanted) else { return false };
        role.listed.push(Listed { signal: Arc::clone(signal), wanted });
        drop(role);
        next.promote();
        true
    }

    /// Takes the role if it is vacant. The driver is not notified then until the caller gives the
    /// role up.
    pub(crate) fn try_take(&self) -> bool {
        self.take(&mut self.role.acquire())
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
    pub(crate) fn release_role(&self) {
        self.ring.reap();
        self.vacate();
    }

    /// For the driver: reaps if the role is vacant, and hands the role to a listed waiter.
    pub(crate) fn poll(&self) {
        if !self.try_take() {
            return;
        }
        self.ring.reap();
        match self.next() {
            Some(next) => next.promote(),
            None => self.vacate(),
        }
    }

    /// The next leader, if one is useful.
    fn next(&self) -> Option<Arc<Signal>> {
        if self.ring.is_idle() { None } else { self.role.acquire().take_next(|_| true) }
    }

    fn take_or_list(&self, signal: &Arc<Signal>, wanted: usize) -> bool {
        let mut role = self.role.acquire();
        let taken = self.take(&mut role);
        if !taken {
            role.listed.push(Listed { signal: Arc::clone(signal), wanted });
        }
        taken
    }

    /// Whether the caller has the role now (H4).
    fn unlist(&self, signal: &Arc<Signal>) -> bool {
        let mut role = self.role.acquire();
        let place = role.listed.iter().position(|listed| Arc::ptr_eq(&listed.signal, signal));
        place.map(|place| role.listed.remove(place)).is_none()
    }

    /// Gives up the role (H2).
    fn vacate(&self) {
        let mut role = self.role.acquire();
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
