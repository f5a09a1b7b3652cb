//! The waiting rules of a queue: they decide which waiter gets which completions. A pure state machine
//! without threads, clocks or I/O.
//!
//! ```text
//!   admit: inflight += n        complete: inflight -> ready        dispatch: ready -> granted
//!
//!   arrive -> (granted at once)                     -> its events
//!          -> WAITING -- dispatch --> GRANTED -- collect, withdraw --> its events
//!                |                       |
//!                |                       +-- abandon --> its events to the front of `ready`
//!                +-- withdraw (timeout), relax (min_wait) --> the events that it may take
//!                +-- abandon --> nothing
//! ```
//!
//! - **Q1** A waiter gets nothing, or at least its minimum at once: no waiter holds a part of its minimum
//!   while it sleeps. It gets exactly the minimum if other waiters exist, and up to its maximum if none do.
//! - **Q2** The candidate is the waiter with the least (minimum, arrival): a waiter whose events are ready
//!   is never delayed by a waiter with a larger minimum whose events are not.
//! - **Q3** A waiter is *senior* when `capacity` events have gone to other callers since its arrival, if
//!   the ready events and those in flight suffice for it. While there are seniors, the candidate is the
//!   oldest of them, and ready events are reserved for it: so small minima do not starve large ones.
//! - **Q4** A caller that does not wait (minimum 0), or no longer waits (timeout), *takes* ready events, up
//!   to its maximum. It takes none while there is a senior, and taken events count as passed for the
//!   waiters.
//! - **Q5** A dispatch follows each completion, arrival and departure, until the ready events do not
//!   suffice for the candidate's minimum. So between calls no waiter can be satisfied, except by a senior's
//!   reserve: no late caller takes events that a waiter should have had. Events that complete together are
//!   dispatched together: a single waiter gets all of them up to its maximum, rather than its minimum first
//!   and the rest later.
//! - **Q6** A granted waiter that leaves without its events returns them to the front.
//! - **Q7** At most `capacity` events are in flight, ready, or granted and not collected.
//! - **Q8** An event counts as unassigned once for each time that it is ready after a dispatch, having been
//!   in flight or granted before: an eventfd reports these.
//!
//! The signals of granted waiters are returned in [`Wakes`], to be sent after the lock is released.

use std::collections::VecDeque;

/// A rule that a mutation test omits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(not(test), expect(dead_code, reason = "of the twins"))]
pub(crate) enum Rule {
    /// No rule is omitted.
    None,
    /// Q1: whole minima.
    Whole,
    /// Q1: no more than the minimum while other callers wait.
    NoMore,
    /// Q2: by minimum, not by arrival.
    LeastFirst,
    /// Q3: seniors.
    Seniors,
    /// Q3: only a waiter that the ready events and those in flight can satisfy.
    SupplyOfSeniors,
    /// Q4: takes leave the senior's reserve.
    TakesYield,
    /// Q4: taken events count as passed for the waiters.
    TakesPass,
    /// Q5: after departures.
    DispatchDepartures,
    /// Q6.
    Return,
    /// Q6: to the front.
    ReturnToFront,
}

/// A waiter, waiting or granted and not collected.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Ticket(u64);

/// The waiters to wake after the lock is released.
#[must_use]
pub(crate) struct Wakes<S>(Vec<S>);

impl<S> Wakes<S> {
    pub(crate) fn new() -> Wakes<S> {
        Wakes(Vec::new())
    }

    pub(crate) fn into_iter(self) -> impl Iterator<Item = S> {
        self.0.into_iter()
    }
}

/// The result for a waiter that begins to wait.
#[derive(Debug)]
pub(crate) enum WaiterEntry<E> {
    Events(Vec<E>),
    Waits(Ticket),
}

/// The result of a waiter's timeout.
#[derive(Debug)]
pub(crate) enum Relaxed<E> {
    Events(Vec<E>),
    /// It continues to wait, for one event.
    Waits,
}

struct Waiter<S> {
    ticket: Ticket,
    min: usize,
    max: usize,
    /// Events that went to other callers since its arrival.
    passed: usize,
    /// None until it is about to sleep.
    signal: Option<S>,
}

/// The state of a queue of `E`s whose waiters are notified through `S`s. The owner protects it by one lock.
pub(crate) struct Rules<E, S> {
    capacity: usize,
    ready: VecDeque<E>,
    inflight: usize,
    /// Granted and not collected.
    held: usize,
    /// The number of events in `ready` that were reported as unassigned (Q8).
    told: usize,
    /// In the order of arrival.
    waiters: Vec<Waiter<S>>,
    granted: Vec<(Ticket, Vec<E>)>,
    next: u64,
    /// The least minimum of all waiters, `usize::MAX` without any: most completions check only this.
    least: usize,
    #[cfg(test)]
    without: Rule,
}

impl<E, S> Rules<E, S> {
    pub(crate) fn new(capacity: usize) -> Rules<E, S> {
        Rules {
            capacity,
            ready: VecDeque::new(),
            inflight: 0,
            held: 0,
            told: 0,
            waiters: Vec::new(),
            granted: Vec::new(),
            next: 0,
            least: usize::MAX,
            #[cfg(test)]
            without: Rule::None,
        }
    }

    #[cfg(test)]
    pub(crate) fn without(capacity: usize, rule: Rule) -> Rules<E, S> {
        Rules { without: rule, ..Rules::new(capacity) }
    }

    #[cfg(test)]
    fn keeps(&self, rule: Rule) -> bool {
        self.without != rule
    }

    #[cfg(not(test))]
    #[inline(always)]
    fn keeps(&self, _rule: Rule) -> bool {
        true
    }

    #[cfg(test)]
    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    /// Events that are not granted.
    pub(crate) fn ready(&self) -> usize {
        self.ready.len()
    }

    pub(crate) fn inflight(&self) -> usize {
        self.inflight
    }

    /// Whether no event is in flight or ready, and there is no waiter.
    pub(crate) fn is_unused(&self) -> bool {
        self.inflight + self.ready.len() + self.held == 0 && self.waiters.is_empty()
    }

    /// Whether a waiter may request this: `min` events that the queue can hold, and a maximum of at least
    /// one and at least `min`.
    pub(crate) fn permits(&self, min: usize, max: usize) -> bool {
        min <= self.capacity && max >= min && max > 0
    }

    /// Reserves room for up to `wanted` events that will complete; returns their number (Q7).
    pub(crate) fn admit(&mut self, wanted: usize) -> usize {
        let room = self.capacity.saturating_sub(self.ready.len() + self.inflight + self.held);
        let admitted = wanted.min(room);
        // May make seniors, but can't satisfy a waiter: that needs ready events.
        self.inflight += admitted;
        admitted
    }

    /// Completes one of the admitted events.
    pub(crate) fn complete(&mut self, event: E, wakes: &mut Wakes<S>) {
        debug_assert!(self.inflight > 0, "completed without having been admitted");
        self.inflight -= 1;
        self.ready.push_back(event);
        self.dispatch(wakes);
    }

    /// Completes several of the admitted events, in this order; drains `events`.
    pub(crate) fn complete_all(&mut self, events: &mut VecDeque<E>, wakes: &mut Wakes<S>) {
        debug_assert!(self.inflight >= events.len(), "completed without having been admitted");
        self.inflight -= events.len();
        if self.ready.is_empty() {
            // Swaps the whole buffer: an event is large, and none is moved individually.
            std::mem::swap(&mut self.ready, events);
        } else {
            self.ready.append(events);
        }
        self.dispatch(wakes);
    }

    /// A caller arrives that wants `min` to `max` events, which [`Rules::permits`]. `signal` is called only
    /// if it has to wait.
    pub(crate) fn arrive(
        &mut self,
        min: usize,
        max: usize,
        signal: impl FnOnce() -> S,
        wakes: &mut Wakes<S>,
    ) -> WaiterEntry<E> {
        debug_assert!(self.permits(min, max));
        if min == 0 {
            let events = self.take(max);
            self.dispatch(wakes);
            return WaiterEntry::Events(events);
        }
        let ticket = Ticket(self.next);
        self.next += 1;
        self.waiters.push(Waiter { ticket, min, max, passed: 0, signal: None });
        self.least = self.least.min(min);
        self.dispatch(wakes);
        if let Some(events) = self.collect(ticket) {
            return WaiterEntry::Events(events);
        }
        self.waiters.last_mut().expect("just pushed").signal = Some(signal());
        WaiterEntry::Waits(ticket)
    }

    /// The events of a granted waiter; `None` if it was not granted.
    pub(crate) fn collect(&mut self, ticket: Ticket) -> Option<Vec<E>> {
        let at = self.granted.iter().position(|(granted, _)| *granted == ticket)?;
        let (_, events) = self.granted.swap_remove(at);
        self.held -= events.len();
        Some(events)
    }

    /// Replaces a waiter's signal; returns the old one, or the new one if the waiter was granted.
    pub(crate) fn resignal(&mut self, ticket: Ticket, signal: S) -> Option<S> {
        match self.waiters.iter_mut().find(|waiter| waiter.ticket == ticket) {
            Some(waiter) => waiter.signal.replace(signal),
            None => Some(signal),
        }
    }

    /// A waiter's timeout, or interruption: returns its events if it was granted, otherwise the events that
    /// it may take (Q4).
    pub(crate) fn withdraw(&mut self, ticket: Ticket, wakes: &mut Wakes<S>) -> Vec<E> {
        if let Some(events) = self.collect(ticket) {
            return events;
        }
        let max = self.unlink(ticket).map_or(0, |waiter| waiter.max);
        let events = self.take(max);
        self.dispatch_departure(wakes);
        events
    }

    /// A waiter's timeout for its minimum: as [`Rules::withdraw`], but if there is no event to take, it
    /// keeps its place and waits for one event.
    pub(crate) fn relax(&mut self, ticket: Ticket, wakes: &mut Wakes<S>) -> Relaxed<E> {
        if let Some(events) = self.collect(ticket) {
            return Relaxed::Events(events);
        }
        let at = self.place(ticket).expect("neither granted nor waiting");
        let mut waiter = self.waiters.remove(at);
        let events = self.take(waiter.max);
        let gone = !events.is_empty();
        if !gone {
            waiter.min = 1;
            self.waiters.insert(at, waiter);
        }
        self.find_least();
        self.dispatch_departure(wakes);
        match gone {
            true => Relaxed::Events(events),
            // The departure of a senior, or the end of its seniority, may have released events for it.
            false => self.collect(ticket).map_or(Relaxed::Waits, Relaxed::Events),
        }
    }

    /// A waiter leaves without events (Q6). If it was not granted, its signal is returned, to be dropped
    /// outside of the lock.
    pub(crate) fn abandon(&mut self, ticket: Ticket, wakes: &mut Wakes<S>) -> Option<S> {
        let mut signal = None;
        match self.collect(ticket) {
            Some(_) if !self.keeps(Rule::Return) => {}
            Some(events) if !self.keeps(Rule::ReturnToFront) => self.ready.extend(events),
            Some(events) => {
                events.into_iter().rev().for_each(|event| self.ready.push_front(event));
            }
            None => signal = self.unlink(ticket).and_then(|waiter| waiter.signal),
        }
        self.dispatch_departure(wakes);
        signal
    }

    /// The number of events that became unassigned since the last call (Q8).
    pub(crate) fn newly_unassigned(&mut self) -> usize {
        let more = self.ready.len() - self.told.min(self.ready.len());
        self.told = self.ready.len();
        more
    }

    fn place(&self, ticket: Ticket) -> Option<usize> {
        self.waiters.binary_search_by_key(&ticket, |waiter| waiter.ticket).ok()
    }

    fn unlink(&mut self, ticket: Ticket) -> Option<Waiter<S>> {
        let at = self.place(ticket)?;
        let waiter = self.waiters.remove(at);
        self.find_least();
        Some(waiter)
    }

    fn find_least(&mut self) {
        self.least = self.waiters.iter().map(|waiter| waiter.min).min().unwrap_or(usize::MAX);
    }

    /// Q3: the index of the oldest senior.
    fn senior(&self) -> Option<usize> {
        if !self.keeps(Rule::Seniors) {
            return None;
        }
        let supply = match self.keeps(Rule::SupplyOfSeniors) {
            true => self.ready.len() + self.inflight,
            false => usize::MAX,
        };
        self.waiters
            .iter()
            .position(|waiter| waiter.passed >= self.capacity && supply >= waiter.min)
    }

    /// Q4. The caller is not a waiter, or no longer.
    fn take(&mut self, max: usize) -> Vec<E> {
        if self.keeps(Rule::TakesYield) && self.senior().is_some() {
            return Vec::new();
        }
        let count = max.min(self.ready.len());
        if self.keeps(Rule::TakesPass) {
            self.pass(count);
        }
        self.remove_ready(count)
    }

    /// Removes the first `count` events from `ready`.
    fn remove_ready(&mut self, count: usize) -> Vec<E> {
        // The whole buffer, unless it is much too large for them.
        let is_whole = count == self.ready.len() && 2 * count >= self.ready.capacity();
        let events = match is_whole {
            true => Vec::from(std::mem::take(&mut self.ready)),
            false => self.ready.drain(..count).collect(),
        };
        self.told = self.told.saturating_sub(count);
        events
    }

    fn pass(&mut self, count: usize) {
        self.waiters.iter_mut().for_each(|waiter| waiter.passed += count);
    }

    fn dispatch_departure(&mut self, wakes: &mut Wakes<S>) {
        if self.keeps(Rule::DispatchDepartures) {
            self.dispatch(wakes);
        }
    }

    /// Q5.
    fn dispatch(&mut self, wakes: &mut Wakes<S>) {
        // The candidate's minimum is at least `least`.
        while self.ready.len() >= self.least || !self.keeps(Rule::Whole) {
            let least = |waiters: &[Waiter<S>]| {
                (0..waiters.len()).min_by_key(|&at| (waiters[at].min, waiters[at].ticket))
            };
            let candidate = match self.senior() {
                Some(senior) => Some(senior),
                None if self.keeps(Rule::LeastFirst) => least(&self.waiters),
                None => (!self.waiters.is_empty()).then_some(0),
            };
            let Some(at) = candidate else { return };
            let waiter = &self.waiters[at];
            let mut count = waiter.min;
            if self.waiters.len() == 1 || !self.keeps(Rule::NoMore) {
                count = waiter.max.min(self.ready.len()).max(count);
            }
            if !self.keeps(Rule::Whole) {
                count = count.min(self.ready.len());
            }
            if self.ready.len() < count || count == 0 {
                return;
            }
            let waiter = self.unlink(self.waiters[at].ticket).expect("found above");
            let events = self.remove_ready(count);
            self.pass(count);
            self.held += count;
            self.granted.push((waiter.ticket, events));
            wakes.0.extend(waiter.signal);
        }
    }
}
