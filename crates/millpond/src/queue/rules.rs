//! Which waiter gets which completions: the waiting rules of a queue, without threads, clocks or
//! I/O.
//!
//! ```text
//!   admit: inflight += n        complete: inflight -> ready        dispatch: ready -> granted
//!
//!   arrive -> (granted at once)                     -> its events
//!          -> WAITING -- dispatch --> GRANTED -- collect, withdraw --> its events
//!                |                       |
//!                |                       +-- abandon --> its events to the front of `ready`
//!                +-- withdraw (timeout), relax (min_wait) --> what it may take
//!                +-- abandon --> nothing
//! ```
//!
//! - **Q1** A waiter gets nothing, or at least its minimum at once: nobody hoards a part and sleeps
//!   on it. It gets exactly the minimum while others wait, up to its maximum if nobody does.
//! - **Q2** The candidate is the waiter with the least (minimum, arrival): that of a batch which is
//!   there is never kept waiting by a larger one that is not.
//! - **Q3** A waiter that `capacity` events passed by is *senior*, as long as what is ready and in
//!   flight suffices for it. While there are seniors the candidate is the oldest of them, and what is
//!   ready is reserved for it: so large minima are not starved by small ones.
//! - **Q4** A caller that does not wait (minimum 0), or no longer (timeout), *takes* what is ready,
//!   up to its maximum: nothing while there is a senior, and what it takes passes the others by.
//! - **Q5** Dispatch follows each completion, arrival and departure, until the candidate's minimum is
//!   not there. So between calls nobody is satisfiable, a senior's reserve excepted: no latecomer
//!   finds events that somebody should have had. What completes together is dispatched together: a
//!   waiter that is alone gets all of it that it takes, rather than its minimum and the rest later.
//! - **Q6** A waiter that was granted and goes away without its events returns them to the front.
//! - **Q7** At most `capacity` events are in flight, ready or granted and not collected.
//! - **Q8** An event counts as unassigned once for each time that it is ready after a dispatch, having
//!   been in flight or granted before: that is what an eventfd tells of.
//!
//! The signals of the waiters that were granted come back in [`Wakes`], to be told after the lock is
//! released.

use std::collections::VecDeque;

/// A rule that a twin in the tests leaves out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(not(test), expect(dead_code, reason = "of the twins"))]
pub(crate) enum Rule {
    /// All are kept.
    None,
    /// Q1: whole minima.
    Whole,
    /// Q1: no more than the minimum while others wait.
    NoMore,
    /// Q2: by minimum, not by arrival.
    LeastFirst,
    /// Q3: seniors.
    Seniors,
    /// Q3: only a waiter that what is ready and in flight can satisfy.
    SupplyOfSeniors,
    /// Q4: takes leave the senior's reserve.
    TakesYield,
    /// Q4: what is taken passes the others by.
    TakesPass,
    /// Q5: after departures.
    DispatchDepartures,
    /// Q6.
    Return,
    /// Q6: to the front.
    ReturnToFront,
}

/// A waiter, or one that was granted and has not collected yet.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Ticket(u64);

/// The waiters to tell, after the lock is released.
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

/// How an arrival ended.
#[derive(Debug)]
pub(crate) enum Arrival<E> {
    Events(Vec<E>),
    Waits(Ticket),
}

/// What a waiter finds when its time is up.
#[derive(Debug)]
pub(crate) enum Relaxed<E> {
    Events(Vec<E>),
    /// It waits on, for one event.
    Waits,
}

struct Waiter<S> {
    ticket: Ticket,
    min: usize,
    max: usize,
    /// Events that went to others since it came.
    passed: usize,
    /// None until it is about to sleep.
    signal: Option<S>,
}

/// The state of a queue of `E`s whose waiters are told by `S`s. Its owner has it under one lock.
pub(crate) struct Rules<E, S> {
    capacity: usize,
    ready: VecDeque<E>,
    inflight: usize,
    /// Granted and not collected.
    held: usize,
    /// Of `ready`, how many were told of as unassigned (Q8).
    told: usize,
    /// In the order of their arrival.
    waiters: Vec<Waiter<S>>,
    granted: Vec<(Ticket, Vec<E>)>,
    next: u64,
    /// The least minimum of all waiters, `usize::MAX` without any: most completions look no further.
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

    /// Events that nobody has been given yet.
    pub(crate) fn ready(&self) -> usize {
        self.ready.len()
    }

    pub(crate) fn inflight(&self) -> usize {
        self.inflight
    }

    /// Whether nothing is under way or ready, and nobody waits.
    pub(crate) fn is_unused(&self) -> bool {
        self.inflight + self.ready.len() + self.held == 0 && self.waiters.is_empty()
    }

    /// Whether a waiter may ask for that: `min` events that the queue can hold, and a maximum of at
    /// least one and at least `min`.
    pub(crate) fn permits(&self, min: usize, max: usize) -> bool {
        min <= self.capacity && max >= min && max > 0
    }

    /// Takes room for up to `wanted` events that will complete; how many (Q7).
    pub(crate) fn admit(&mut self, wanted: usize) -> usize {
        let room = self.capacity.saturating_sub(self.ready.len() + self.inflight + self.held);
        let admitted = wanted.min(room);
        // Makes seniors, maybe, but nobody satisfiable: that needs events that are ready.
        self.inflight += admitted;
        admitted
    }

    /// One of the admitted has completed.
    pub(crate) fn complete(&mut self, event: E, wakes: &mut Wakes<S>) {
        debug_assert!(self.inflight > 0, "completed without having been admitted");
        self.inflight -= 1;
        self.ready.push_back(event);
        self.dispatch(wakes);
    }

    /// Several of the admitted have completed, in this order; takes all of them.
    pub(crate) fn complete_all(&mut self, events: &mut VecDeque<E>, wakes: &mut Wakes<S>) {
        debug_assert!(self.inflight >= events.len(), "completed without having been admitted");
        self.inflight -= events.len();
        if self.ready.is_empty() {
            // As a whole: an event is large, and none is moved by itself.
            std::mem::swap(&mut self.ready, events);
        } else {
            self.ready.append(events);
        }
        self.dispatch(wakes);
    }

    /// A caller comes for `min` to `max` events, which [`Rules::permits`]. `signal` is made only if
    /// it has to wait.
    pub(crate) fn arrive(
        &mut self,
        min: usize,
        max: usize,
        signal: impl FnOnce() -> S,
        wakes: &mut Wakes<S>,
    ) -> Arrival<E> {
        debug_assert!(self.permits(min, max));
        if min == 0 {
            let events = self.take(max);
            self.dispatch(wakes);
            return Arrival::Events(events);
        }
        let ticket = Ticket(self.next);
        self.next += 1;
        self.waiters.push(Waiter { ticket, min, max, passed: 0, signal: None });
        self.least = self.least.min(min);
        self.dispatch(wakes);
        if let Some(events) = self.collect(ticket) {
            return Arrival::Events(events);
        }
        self.waiters.last_mut().expect("just pushed").signal = Some(signal());
        Arrival::Waits(ticket)
    }

    /// The events of a waiter that was granted; `None` if it was not.
    pub(crate) fn collect(&mut self, ticket: Ticket) -> Option<Vec<E>> {
        let at = self.granted.iter().position(|(granted, _)| *granted == ticket)?;
        let (_, events) = self.granted.swap_remove(at);
        self.held -= events.len();
        Some(events)
    }

    /// Has a waiter told by another signal; the old one, or the new one back if it was granted.
    pub(crate) fn resignal(&mut self, ticket: Ticket, signal: S) -> Option<S> {
        match self.waiters.iter_mut().find(|waiter| waiter.ticket == ticket) {
            Some(waiter) => waiter.signal.replace(signal),
            None => Some(signal),
        }
    }

    /// A waiter's time is up, or it was interrupted: its events if it was granted, else what it may
    /// take (Q4).
    pub(crate) fn withdraw(&mut self, ticket: Ticket, wakes: &mut Wakes<S>) -> Vec<E> {
        if let Some(events) = self.collect(ticket) {
            return events;
        }
        let max = self.unlink(ticket).map_or(0, |waiter| waiter.max);
        let events = self.take(max);
        self.dispatch_departure(wakes);
        events
    }

    /// A waiter's time for its minimum is up: as [`Rules::withdraw`], but where there is nothing to
    /// take it keeps its place and waits for one event.
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
            // A senior's reserve, or what its departure from seniority set free, may be for it.
            false => self.collect(ticket).map_or(Relaxed::Waits, Relaxed::Events),
        }
    }

    /// A waiter goes away and wants nothing (Q6). Its signal, if it was not granted, is to be dropped outside of the
    /// lock.
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

    /// How many events became unassigned since this was last asked (Q8).
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

    /// Q3: the place of the oldest senior.
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

    /// Q4. The caller is no waiter, or no longer.
    fn take(&mut self, max: usize) -> Vec<E> {
        if self.keeps(Rule::TakesYield) && self.senior().is_some() {
            return Vec::new();
        }
        let count = max.min(self.ready.len());
        if self.keeps(Rule::TakesPass) {
            self.pass(count);
        }
        self.leave(count)
    }

    /// The first `count` events leave `ready`.
    fn leave(&mut self, count: usize) -> Vec<E> {
        // As a whole, where its memory is not much too large for them.
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
        // The candidate's minimum is not less.
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
            let events = self.leave(count);
            self.pass(count);
            self.held += count;
            self.granted.push((waiter.ticket, events));
            wakes.0.extend(waiter.signal);
        }
    }
}
