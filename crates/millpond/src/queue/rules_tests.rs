//! Tests of the waiting rules: against a reference that follows the design's text step by step, against
//! results of a simulation, and with each rule omitted in turn, which must show.

use std::collections::{BTreeMap, VecDeque};

use proptest::prelude::*;

use super::rules::{Relaxed, Rule, Rules, Ticket, WaiterEntry, Wakes};

type Queue = Rules<u32, u32>;

/// Collects the waiters that a call wakes.
fn woken(call: impl FnOnce(&mut Wakes<u32>)) -> Vec<u32> {
    let mut wakes = Wakes::new();
    call(&mut wakes);
    wakes.into_iter().collect()
}

fn ready_queue(capacity: usize, events: u32) -> Queue {
    let mut queue = Queue::new(capacity);
    assert_eq!(queue.admit(events as usize), events as usize);
    (0..events).for_each(|event| assert_eq!(woken(|wakes| queue.complete(event, wakes)), []));
    queue
}

fn wait(queue: &mut Queue, min: usize, max: usize, name: u32) -> Ticket {
    match queue.arrive(min, max, || name, &mut Wakes::new()) {
        WaiterEntry::Waits(ticket) => ticket,
        WaiterEntry::Events(events) => panic!("did not wait: {events:?}"),
    }
}

fn at_once(queue: &mut Queue, min: usize, max: usize) -> Vec<u32> {
    match queue.arrive(min, max, || unreachable!(), &mut Wakes::new()) {
        WaiterEntry::Events(events) => events,
        WaiterEntry::Waits(_) => panic!("waits"),
    }
}

/// Goal: events that complete together are granted together, to a waiter that accepts them; to several by
/// their minima.
#[test]
fn what_completes_together_is_given_together() {
    let mut queue = Queue::new(8);
    assert_eq!(queue.admit(8), 8);
    let alone = wait(&mut queue, 1, 3, 7);
    let together = &mut VecDeque::from([1, 2, 3, 4]);
    assert_eq!(woken(|wakes| queue.complete_all(together, wakes)), [7]);
    assert_eq!(queue.collect(alone), Some(vec![1, 2, 3]));
    let (one, two) = (wait(&mut queue, 2, 8, 8), wait(&mut queue, 2, 8, 9));
    let together = &mut VecDeque::from([5, 6, 7, 8]);
    assert_eq!(woken(|wakes| queue.complete_all(together, wakes)), [8, 9]);
    assert_eq!(queue.collect(one), Some(vec![4, 5]));
    assert_eq!(queue.collect(two), Some(vec![6, 7, 8]), "it is alone by then");
}

#[test]
fn what_may_be_asked_for() {
    let queue = Queue::new(8);
    assert!(queue.permits(8, 8) && queue.permits(0, 1) && queue.permits(1, usize::MAX));
    assert!(!queue.permits(9, 9) && !queue.permits(2, 1) && !queue.permits(0, 0));
}

#[test]
fn a_queue_takes_what_it_has_room_for() {
    let mut queue = Queue::new(4);
    assert_eq!(queue.admit(3), 3);
    assert_eq!(queue.admit(3), 1);
    woken(|wakes| queue.complete(1, wakes));
    assert_eq!(queue.admit(1), 0, "ready events take room, too");
    assert_eq!(at_once(&mut queue, 0, 1), [1]);
    assert_eq!(queue.admit(2), 1);
    // Granted events need room until they are collected, as they may come back.
    let ticket = wait(&mut queue, 1, 1, 7);
    assert_eq!(woken(|wakes| queue.complete(2, wakes)), [7]);
    assert_eq!(queue.admit(1), 0);
    assert_eq!(queue.collect(ticket), Some(vec![2]));
    assert_eq!(queue.admit(2), 1);
}

/// Goal: the case of the 2006 thread: the head wants 3, the second 2, two events complete.
#[test]
fn the_smallest_that_can_be_satisfied_is_woken() {
    let mut queue = Queue::new(8);
    let three = wait(&mut queue, 3, 3, 3);
    let two = wait(&mut queue, 2, 2, 2);
    queue.admit(5);
    assert_eq!(woken(|wakes| queue.complete(10, wakes)), []);
    assert_eq!(woken(|wakes| queue.complete(11, wakes)), [2]);
    assert_eq!(queue.collect(two), Some(vec![10, 11]));
    for event in 12..14 {
        assert_eq!(woken(|wakes| queue.complete(event, wakes)), []);
    }
    assert_eq!(woken(|wakes| queue.complete(14, wakes)), [3]);
    assert_eq!(queue.collect(three), Some(vec![12, 13, 14]));
}

/// Goal: its other case: a waiter wants 100, 50 are there, and a late caller wants all of them.
#[test]
fn a_latecomer_takes_what_nobody_can_have_yet_and_counts_for_it() {
    let mut queue = ready_queue(100, 50);
    queue.admit(50);
    let hundred = wait(&mut queue, 100, 100, 100);
    // Not passed by yet: the late caller may have them.
    assert_eq!(at_once(&mut queue, 0, 60).len(), 50);
    // Later callers may, until they have taken a whole queue; then the sleeper is next.
    queue.admit(100);
    for event in 0..50 {
        woken(|wakes| queue.complete(event, wakes));
    }
    assert_eq!(at_once(&mut queue, 1, 60).len(), 1, "exactly the minimum while others wait");
    assert_eq!(at_once(&mut queue, 0, 60).len(), 49);
    queue.admit(100);
    for event in 0..40 {
        woken(|wakes| queue.complete(event, wakes));
    }
    assert_eq!(at_once(&mut queue, 0, 60).len(), 0, "reserved");
    let one = wait(&mut queue, 1, 1, 1);
    for event in 40..99 {
        assert_eq!(woken(|wakes| queue.complete(event, wakes)), []);
    }
    assert_eq!(woken(|wakes| queue.complete(99, wakes)), [100]);
    assert_eq!(queue.collect(hundred).map(|events| events.len()), Some(100));
    assert_eq!(queue.collect(one), None);
}

#[test]
fn the_maximum_counts_for_who_waits_alone() {
    let mut queue = ready_queue(8, 5);
    assert_eq!(at_once(&mut queue, 2, 4), [0, 1, 2, 3]);
    let other = wait(&mut queue, 6, 6, 0);
    assert_eq!(at_once(&mut queue, 1, 8), [4]);
    queue.abandon(other, &mut Wakes::new());
}

#[test]
fn a_timeout_returns_what_was_granted_meanwhile_or_takes_what_is_there() {
    let mut queue = ready_queue(8, 2);
    let first = wait(&mut queue, 3, 8, 1);
    assert_eq!(queue.withdraw(first, &mut Wakes::new()), [0, 1]);
    let second = wait(&mut queue, 2, 2, 2);
    queue.admit(2);
    woken(|wakes| queue.complete(8, wakes));
    assert_eq!(woken(|wakes| queue.complete(9, wakes)), [2]);
    assert_eq!(queue.withdraw(second, &mut Wakes::new()), [8, 9]);
}

#[test]
fn min_wait_takes_what_is_there_or_waits_for_one() {
    let mut queue = ready_queue(8, 2);
    let some = wait(&mut queue, 3, 8, 1);
    assert!(matches!(queue.relax(some, &mut Wakes::new()), Relaxed::Events(e) if e == [0, 1]));
    let none = wait(&mut queue, 3, 8, 2);
    assert!(matches!(queue.relax(none, &mut Wakes::new()), Relaxed::Waits));
    queue.admit(1);
    assert_eq!(woken(|wakes| queue.complete(7, wakes)), [2]);
    assert_eq!(queue.collect(none), Some(vec![7]));
}

/// Goal: a granted waiter that is dropped returns its events, oldest first, to the waiters.
#[test]
fn a_dropped_grant_goes_to_the_next() {
    let mut queue = Queue::new(8);
    let dropped = wait(&mut queue, 2, 2, 1);
    let next = wait(&mut queue, 3, 3, 2);
    queue.admit(3);
    woken(|wakes| queue.complete(0, wakes));
    assert_eq!(woken(|wakes| queue.complete(1, wakes)), [1]);
    assert_eq!(woken(|wakes| queue.complete(2, wakes)), []);
    assert_eq!(woken(|wakes| _ = queue.abandon(dropped, wakes)), [2]);
    assert_eq!(queue.collect(next), Some(vec![0, 1, 2]));
}

/// Goal: when a senior with reserved events leaves, another waiter gets them at once.
#[test]
fn a_senior_that_leaves_sets_its_reserve_free() {
    let mut queue = Queue::new(2);
    let two = wait(&mut queue, 2, 2, 2);
    for _ in 0..2 {
        queue.admit(1);
        woken(|wakes| queue.complete(0, wakes));
        assert_eq!(at_once(&mut queue, 0, 1).len(), 1);
    }
    queue.admit(2);
    woken(|wakes| queue.complete(5, wakes));
    let one = wait(&mut queue, 1, 1, 1);
    assert_eq!(woken(|wakes| _ = queue.abandon(two, wakes)), [1]);
    assert_eq!(queue.collect(one), Some(vec![5]));
}

#[test]
fn an_eventfd_is_told_of_each_unassigned_event_once() {
    let mut queue = Queue::new(8);
    queue.admit(6);
    woken(|wakes| queue.complete(0, wakes));
    assert_eq!((queue.newly_unassigned(), queue.newly_unassigned()), (1, 0));
    woken(|wakes| queue.complete(1, wakes));
    assert_eq!(at_once(&mut queue, 0, 1), [0]);
    assert_eq!(queue.newly_unassigned(), 1);
    assert_eq!(at_once(&mut queue, 0, 9), [1]);
    // Assigned at its completion: not reported; returned: reported.
    let waiter = wait(&mut queue, 1, 1, 0);
    woken(|wakes| queue.complete(2, wakes));
    assert_eq!(queue.newly_unassigned(), 0);
    queue.abandon(waiter, &mut Wakes::new());
    assert_eq!(queue.newly_unassigned(), 1);
}

/// Waiters of fixed minima that come back at once. Returns the number of batches that each got of `events`
/// that complete one by one, with `depth` in flight. `poll`: after each so-many completions, a caller takes
/// all ready events without waiting.
fn batches(mut queue: Queue, minima: &[usize], events: u32, poll: Option<u32>) -> Vec<usize> {
    let mut batches = vec![0; minima.len()];
    let mut tickets: Vec<Option<Ticket>> = vec![None; minima.len()];
    let come = |queue: &mut Queue, who: usize| match queue.arrive(
        minima[who],
        minima[who],
        || who as u32,
        &mut Wakes::new(),
    ) {
        WaiterEntry::Waits(ticket) => ticket,
        WaiterEntry::Events(_) => panic!("a waiter found what another should have had"),
    };
    for (who, ticket) in tickets.iter_mut().enumerate() {
        *ticket = Some(come(&mut queue, who));
    }
    for event in 0..events {
        queue.admit(usize::MAX);
        for who in woken(|wakes| queue.complete(event, wakes)) {
            let who = who as usize;
            batches[who] += 1;
            let got = queue.collect(tickets[who].take().unwrap()).unwrap();
            assert_eq!(got.len(), minima[who], "a batch is whole");
            tickets[who] = Some(come(&mut queue, who));
        }
        if poll.is_some_and(|every| event % every == 0) {
            at_once(&mut queue, 0, usize::MAX);
        }
    }
    batches
}

/// Goal: the results of the design: the same rule gives the same shares, and smallest-first alone starves
/// all other waiters.
#[test]
fn shares_of_waiters_of_1_2_8_32() {
    let minima = [1, 2, 8, 32];
    assert_eq!(batches(Queue::new(64), &minima, 100_000, None), [56268, 1042, 1042, 1041]);
    let without = Queue::without(64, Rule::Seniors);
    assert_eq!(batches(without, &minima, 100_000, None), [100_000, 0, 0, 0]);
}

/// The maximum number of completions that each waiter waited for, from one batch to the next, of `events`
/// that complete one by one with `depth` in flight; `None` if one got none.
fn longest_waits(
    mut queue: Queue,
    minima: &[usize],
    depth: usize,
    events: u32,
) -> Vec<Option<u32>> {
    let mut longest = vec![None; minima.len()];
    let mut since = vec![0; minima.len()];
    let come = |queue: &mut Queue, who: usize| wait(queue, minima[who], minima[who], who as u32);
    let mut tickets: Vec<Ticket> = (0..minima.len()).map(|who| come(&mut queue, who)).collect();
    for event in 0..events {
        queue.admit(depth - queue.inflight());
        for who in woken(|wakes| queue.complete(event, wakes)) {
            let who = who as usize;
            assert_eq!(queue.collect(tickets[who]).unwrap().len(), minima[who], "a batch is whole");
            longest[who] = longest[who].max(Some(event - since[who]));
            since[who] = event;
            tickets[who] = come(&mut queue, who);
        }
    }
    // And no waiter waits for longer at the end.
    let waits = longest.iter().zip(since);
    waits.map(|(longest, since)| longest.map(|longest| longest.max(events - since))).collect()
}

/// Goal: with enough in flight at all times, every waiter has a batch within a time that follows from the
/// capacity: at 20,000 completions a second, 2,000 take 100 ms. With less in flight than its minimum, a
/// waiter may starve.
#[test]
fn every_waiter_has_a_batch_within_a_bounded_time() {
    let minima = [1, 2, 8, 32];
    for depth in [32, 48, 64] {
        let longest = longest_waits(Queue::new(64), &minima, depth, 100_000);
        // Each can become senior once, and be served, while another one waits to become senior.
        let most = 2 * (64 + minima.iter().sum::<usize>()) as u32;
        let bounded = |wait: &Option<u32>| wait.is_some_and(|wait| wait <= most);
        assert!(longest.iter().all(bounded), "{depth} in flight: {longest:?}, {most}");
    }
    let starved = longest_waits(Queue::new(64), &minima, 16, 100_000);
    assert!(starved[3].is_none() && starved[..3].iter().all(Option::is_some), "{starved:?}");
}

/// Goal: a thread that polls all the time starves no waiter; it would if its takes did not count, or if it
/// could take a reserve.
#[test]
fn a_poller_starves_nobody() {
    let minima = [2, 8, 32];
    let shares = batches(Queue::new(64), &minima, 100_000, Some(1));
    assert!(shares.iter().all(|&share| share >= 500), "{shares:?}");
    for rule in [Rule::TakesPass, Rule::TakesYield] {
        let shares = batches(Queue::without(64, rule), &minima, 100_000, Some(1));
        assert!(shares[1..] == [0, 0], "without {rule:?}: {shares:?}");
    }
}

/// An operation on a queue.
#[derive(Clone, Debug)]
enum Step {
    Admit(usize),
    Complete,
    CompleteAll(usize),
    Arrive { min: usize, more: usize },
    Withdraw(usize),
    Relax(usize),
    Abandon(usize),
    Collect(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let minimum = prop_oneof![3 => 0usize..4, 1 => 0usize..9];
    let step = prop_oneof![
        4 => (0usize..6).prop_map(Step::Admit),
        12 => Just(Step::Complete),
        3 => (0usize..6).prop_map(Step::CompleteAll),
        5 => (minimum, 0usize..4).prop_map(|(min, more)| Step::Arrive { min, more }),
        1 => any::<usize>().prop_map(Step::Withdraw),
        1 => any::<usize>().prop_map(Step::Relax),
        1 => any::<usize>().prop_map(Step::Abandon),
        3 => any::<usize>().prop_map(Step::Collect),
    ];
    prop::collection::vec(step, 1..200)
}

/// The text of the design, literally: all state that can be computed is computed.
#[derive(Default)]
struct Reference {
    capacity: usize,
    ready: Vec<u32>,
    inflight: usize,
    /// By arrival: minimum, maximum, passed.
    waiters: BTreeMap<u32, (usize, usize, usize)>,
    granted: BTreeMap<u32, Vec<u32>>,
}

impl Reference {
    fn seniors(&self) -> Vec<u32> {
        let supply = self.ready.len() + self.inflight;
        (self.waiters.iter())
            .filter(|(_, (min, _, passed))| *passed >= self.capacity && supply >= *min)
            .map(|(&name, _)| name)
            .collect()
    }

    fn candidate(&self) -> Option<u32> {
        let least = self.waiters.iter().min_by_key(|(name, (min, _, _))| (*min, **name));
        self.seniors().first().copied().or(least.map(|(&name, _)| name))
    }

    fn remove(&mut self, count: usize) -> Vec<u32> {
        self.waiters.values_mut().for_each(|(_, _, passed)| *passed += count);
        self.ready.drain(..count).collect()
    }

    fn dispatch(&mut self) -> Vec<u32> {
        let mut woken = Vec::new();
        while let Some(name) = self.candidate() {
            let (min, max, _) = self.waiters[&name];
            if self.ready.len() < min {
                break;
            }
            self.waiters.remove(&name);
            let alone = self.waiters.is_empty();
            let count = if alone { max.min(self.ready.len()) } else { min };
            let events = self.remove(count);
            self.granted.insert(name, events);
            woken.push(name);
        }
        woken
    }

    fn take(&mut self, max: usize) -> Vec<u32> {
        if self.seniors().is_empty() { self.remove(max.min(self.ready.len())) } else { Vec::new() }
    }
}

/// Runs `steps` on a queue and on the reference; returns the first difference.
fn compare(mut queue: Queue, steps: &[Step]) -> Result<(), String> {
    let mut reference = Reference { capacity: queue.capacity(), ..Reference::default() };
    let mut tickets: Vec<(u32, Ticket)> = Vec::new();
    let mut next_event = 0;
    for (name, step) in (0u32..).zip(steps) {
        let differs = |what: &str| Err(format!("step {name}, {step:?}: {what}"));
        let mut wakes = Wakes::new();
        let mut woken = Vec::new();
        let mut pick = |at: usize| match tickets.is_empty() {
            true => None,
            false => Some(tickets.swap_remove(at % tickets.len())),
        };
        let (mut got, mut want) = (None, None);
        match *step {
            Step::Admit(count) => {
                let held: usize = reference.granted.values().map(Vec::len).sum();
                let room = reference.capacity - reference.ready.len() - reference.inflight - held;
                reference.inflight += count.min(room);
                if queue.admit(count) != count.min(room) {
                    return differs("admitted");
                }
            }
            Step::Complete if reference.inflight > 0 => {
                next_event += 1;
                queue.complete(next_event, &mut wakes);
                reference.inflight -= 1;
                reference.ready.push(next_event);
                woken = reference.dispatch();
            }
            Step::Complete => {}
            Step::CompleteAll(count) => {
                let count = count.min(reference.inflight);
                let mut events: VecDeque<u32> =
                    (1..=count as u32).map(|n| next_event + n).collect();
                next_event += count as u32;
                reference.inflight -= count;
                reference.ready.extend(&events);
                queue.complete_all(&mut events, &mut wakes);
                if !events.is_empty() {
                    return differs("left");
                }
                woken = reference.dispatch();
            }
            Step::Arrive { min, more } => {
                let max = (min + more).max(1);
                if !queue.permits(min, max) {
                    continue;
                }
                let arrival = queue.arrive(min, max, || name, &mut wakes);
                if min == 0 {
                    want = Some(reference.take(max));
                } else {
                    reference.waiters.insert(name, (min, max, 0));
                }
                woken = reference.dispatch();
                if let Some(events) = reference.granted.remove(&name) {
                    woken.retain(|&other| other != name);
                    want = Some(events);
                }
                match arrival {
                    WaiterEntry::Events(events) => got = Some(events),
                    WaiterEntry::Waits(ticket) => tickets.push((name, ticket)),
                }
            }
            Step::Withdraw(at) => {
                let Some((who, ticket)) = pick(at) else { continue };
                got = Some(queue.withdraw(ticket, &mut wakes));
                want = reference.granted.remove(&who);
                if want.is_none() {
                    let Some((_, max, _)) = reference.waiters.remove(&who) else {
                        return differs("lost");
                    };
                    want = Some(reference.take(max));
                    woken = reference.dispatch();
                }
            }
            Step::Relax(at) => {
                let Some((who, ticket)) = pick(at) else { continue };
                let relaxed = queue.relax(ticket, &mut wakes);
                want = reference.granted.remove(&who);
                if want.is_none() {
                    let (_, max, passed) = reference.waiters.remove(&who).unwrap();
                    let taken = reference.take(max);
                    if taken.is_empty() {
                        reference.waiters.insert(who, (1, max, passed));
                    } else {
                        want = Some(taken);
                    }
                    woken = reference.dispatch();
                    want = want.or_else(|| reference.granted.remove(&who));
                }
                match relaxed {
                    Relaxed::Events(events) => got = Some(events),
                    Relaxed::Waits => tickets.push((who, ticket)),
                }
            }
            Step::Abandon(at) => {
                let Some((who, ticket)) = pick(at) else { continue };
                queue.abandon(ticket, &mut wakes);
                reference.waiters.remove(&who);
                if let Some(events) = reference.granted.remove(&who) {
                    reference.ready.splice(0..0, events);
                }
                woken = reference.dispatch();
            }
            Step::Collect(at) => {
                let Some((who, ticket)) = pick(at) else { continue };
                got = queue.collect(ticket);
                want = reference.granted.remove(&who);
                if got.is_none() {
                    tickets.push((who, ticket));
                }
            }
        }
        if got != want {
            return differs(&format!("events {got:?}, not {want:?}"));
        }
        let notified: Vec<u32> = wakes.into_iter().collect();
        if notified != woken {
            return differs(&format!("woke {notified:?}, not {woken:?}"));
        }
        if (queue.ready(), queue.inflight()) != (reference.ready.len(), reference.inflight) {
            return differs("ready or in flight");
        }
        // rules.Q5.
        if let Some(name) = reference.candidate()
            && reference.ready.len() >= reference.waiters[&name].0
        {
            return differs("a waiter is satisfiable");
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    /// Goal: no sequence of calls distinguishes the rules from the reference.
    #[test]
    fn same_as_the_reference(capacity in 1usize..9, steps in steps()) {
        let same = compare(Queue::new(capacity), &steps);
        prop_assert!(same.is_ok(), "{}", same.unwrap_err());
    }
}

/// Goal: each rule is needed: without it, some sequence differs.
#[test]
fn twins_without_a_rule_differ() {
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;
    let mut runner = TestRunner::deterministic();
    let cases: Vec<(usize, Vec<Step>)> =
        (0..300).map(|_| (1usize..9, steps()).new_tree(&mut runner).unwrap().current()).collect();
    for rule in [
        Rule::Whole,
        Rule::NoMore,
        Rule::LeastFirst,
        Rule::Seniors,
        Rule::SupplyOfSeniors,
        Rule::TakesYield,
        Rule::TakesPass,
        Rule::DispatchDepartures,
        Rule::Return,
        Rule::ReturnToFront,
    ] {
        let seen = cases.iter().any(|(capacity, steps)| {
            // A mutated version may fail its own assertions: that counts, too.
            std::panic::catch_unwind(|| compare(Queue::without(*capacity, rule), steps))
                .is_ok_and(|compared| compared.is_err())
        });
        assert!(seen, "left out {rule:?}, and nothing shows it");
    }
}
