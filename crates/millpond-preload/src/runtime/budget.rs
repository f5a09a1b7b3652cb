//! One memory budget for a tree of processes: which of them may have how many steps of it.
//!
//! A page that all of them have mapped holds one word for the budget, the *pool*, and a *slot* for each process.
//!
//! ```text
//! pool    steps granted in all; the last transfer: its slot, its number there, its steps (+ or -)
//! owner   who has the slot: 0 -> claim -> process .. gone -> reclaim -> 0
//! grant   steps that the slot has; the number of its last transfer
//! asked   steps that others want back: a wish, nothing depends on it
//!
//! transfer:  read the pool -> `finish` what it names -> compare-and-swap of the pool -> `finish`
//! ```
//!
//! A process may be killed between any two instructions, and nobody has to be alive to clean up.
//!
//! - **BU1** A transfer is one compare-and-swap of the pool. The grant follows: whoever comes next writes it there
//!   before anything else (`finish`), as the pool says which number it has and a grant is changed from
//!   the number before only. So a transfer happens as a whole, or not at all.
//! - **BU2** At most one transfer is unfinished. When it is finished, the pool's sum is that of all grants.
//! - **BU3** The numbers of a slot only grow, whoever owns it, so the pool never has a value twice: a
//!   compare-and-swap that succeeds has seen no transfer in between. (Numbers have 40 bits.)
//! - **BU4** Steps of a slot are the owner's to take and give. Of one that is gone they are anybody's: who reads the
//!   pool, *then* finds the owner gone, and then swaps the pool, has met no later owner (BU3). A slot is free again
//!   when it has no steps and the pool has not changed since the owner was found gone.
//! - **BU5** The owner uses steps after it has taken them, and gives them when it does not use them any more. So what
//!   all use together is within the budget at each moment.

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};

use crate::runtime::sync::AtomicU64;

/// A budget has so many steps.
pub const STEPS: u32 = 64;
/// For so many processes. Others do with what needs no grant.
#[cfg(not(loom))]
pub const SLOTS: usize = 250;
#[cfg(loom)]
pub const SLOTS: usize = 3;

/// See the module header. Zero bytes are a budget of which nothing is granted.
#[repr(C)]
pub struct Budget {
    /// What the steps are of; and whose numbers the owners are. Zero until the first process is there.
    pub bytes: AtomicU64,
    pub name_space: AtomicU64,
    pool: AtomicU64,
    slots: [Slot; SLOTS],
}

#[repr(C)]
struct Slot {
    owner: AtomicU64,
    grant: AtomicU64,
    asked: AtomicU64,
}

const NUMBER_BITS: u32 = 40;
const NUMBERS: u64 = (1 << NUMBER_BITS) - 1;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Pool {
    granted: u32,
    slot: usize,
    steps: i8,
    number: u64,
}

impl Pool {
    fn of(word: u64) -> Self {
        let byte = |at: u32| (word >> (NUMBER_BITS + at)) as u8;
        let (granted, slot) = (u32::from(byte(0)), usize::from(byte(8)));
        Self { granted, slot, steps: byte(16) as i8, number: word & NUMBERS }
    }

    fn word(self) -> u64 {
        let high =
            u64::from(self.granted) | (self.slot as u64) << 8 | u64::from(self.steps as u8) << 16;
        high << NUMBER_BITS | self.number
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Grant {
    steps: u32,
    number: u64,
}

impl Grant {
    fn of(word: u64) -> Self {
        Self { steps: (word >> NUMBER_BITS) as u32, number: word & NUMBERS }
    }

    fn word(self) -> u64 {
        u64::from(self.steps) << NUMBER_BITS | self.number
    }
}

impl Budget {
    #[cfg(any(test, loom))]
    pub fn new() -> Self {
        let zero = || AtomicU64::new(0);
        let slots = std::array::from_fn(|_| Slot { owner: zero(), grant: zero(), asked: zero() });
        Self { bytes: zero(), name_space: zero(), pool: zero(), slots }
    }

    /// The slot of `process`, which is the caller: the one that it has already, or a free one. What it has of
    /// it is the caller's.
    pub fn claim(&self, process: u64) -> Option<usize> {
        let is_own = |slot: &Slot| slot.owner.load(Relaxed) == process;
        let owned = self.slots.iter().position(is_own);
        owned.or_else(|| {
            self.slots.iter().position(|slot| {
                // AcqRel: pairs with the one in `reclaim`, before which the last owner's steps went.
                slot.owner.compare_exchange(0, process, AcqRel, Relaxed).is_ok()
            })
        })
    }

    /// The steps of a slot of the caller's.
    pub fn granted(&self, slot: usize) -> u32 {
        self.finish(self.read_pool());
        self.grant(slot).steps
    }

    /// Takes so many steps, if the pool has them.
    pub fn try_take(&self, slot: usize, steps: u32) -> bool {
        loop {
            let pool = self.read_finished();
            if pool.granted + steps > STEPS {
                return false;
            }
            if self.try_transfer(pool, slot, steps as i8) {
                return true;
            }
        }
    }

    /// Gives steps of the caller's back, of those it has.
    pub fn give(&self, slot: usize, steps: u32) {
        loop {
            let pool = self.read_finished();
            let steps = steps.min(self.grant(slot).steps);
            if steps == 0 || self.try_transfer(pool, slot, -(steps as i8)) {
                return;
            }
        }
    }

    /// Takes back what processes had that are gone.
    pub fn reclaim(&self, is_gone: impl Fn(u64) -> bool) {
        (0..SLOTS).for_each(|slot| self.reclaim_one(slot, &is_gone));
    }

    fn reclaim_one(&self, slot: usize, is_gone: &impl Fn(u64) -> bool) {
        loop {
            let pool = self.read_finished();
            // Acquire: pairs with `claim`. BU4: after the pool.
            let owner = self.slots[slot].owner.load(Acquire);
            if owner == 0 || !is_gone(owner) {
                return;
            }
            // A transfer takes no more at once. A process that was at fault may have left any number.
            let steps = self.grant(slot).steps.min(STEPS);
            if steps > 0 {
                self.try_transfer(pool, slot, -(steps as i8));
            } else if self.read_pool() == pool {
                // AcqRel: pairs with the one in `claim`.
                let _ = self.slots[slot].owner.compare_exchange(owner, 0, AcqRel, Relaxed);
                return;
            }
        }
    }

    /// Asks the one back that has the most, of those that have more than `kept` and were not asked.
    pub fn ask(&self, own: usize, kept: u32) {
        let others = (0..SLOTS).filter(|slot| *slot != own);
        let asked = |slot: &usize| self.slots[*slot].asked.load(Relaxed) != 0;
        let most = others.filter(|slot| !asked(slot)).max_by_key(|slot| self.grant(*slot).steps);
        if let Some(slot) = most.filter(|slot| self.grant(*slot).steps > kept) {
            self.slots[slot].asked.store(1, Relaxed);
        }
    }

    /// Whether somebody wants steps back of the caller's slot.
    #[inline]
    pub fn is_asked(&self, slot: usize) -> bool {
        self.slots[slot].asked.load(Relaxed) != 0
    }

    /// The wish was looked at.
    pub fn answer(&self, slot: usize) {
        self.slots[slot].asked.store(0, Relaxed);
    }

    fn grant(&self, slot: usize) -> Grant {
        // Acquire: pairs with the swap in `finish`.
        Grant::of(self.slots[slot].grant.load(Acquire))
    }

    fn read_pool(&self) -> Pool {
        // Acquire: pairs with the swap in `try_transfer`: the grant that it came from is seen, too.
        Pool::of(self.pool.load(Acquire))
    }

    /// The pool, whose last transfer is finished (BU1).
    fn read_finished(&self) -> Pool {
        let pool = self.read_pool();
        self.finish(pool);
        pool
    }

    /// One transfer more, if there was none since `pool` was read and finished.
    fn try_transfer(&self, pool: Pool, slot: usize, steps: i8) -> bool {
        let next = self.next(pool, slot, steps);
        let is_done = self.swap(pool, next);
        if is_done {
            self.finish(next);
        }
        is_done
    }

    fn next(&self, pool: Pool, slot: usize, steps: i8) -> Pool {
        let granted = pool.granted.wrapping_add_signed(i32::from(steps));
        let number = self.grant(slot).number.wrapping_add(1) & NUMBERS;
        Pool { granted, slot, steps, number }
    }

    /// The moment of a transfer.
    fn swap(&self, pool: Pool, next: Pool) -> bool {
        // AcqRel: pairs with `read_pool`.
        self.pool.compare_exchange(pool.word(), next.word(), AcqRel, Relaxed).is_ok()
    }

    /// BU1.
    fn finish(&self, pool: Pool) {
        let Some(slot) = self.slots.get(pool.slot) else { return };
        let grant = self.grant(pool.slot);
        if grant.number.wrapping_add(1) & NUMBERS == pool.number {
            let steps = grant.steps.wrapping_add_signed(i32::from(pool.steps));
            let finished = Grant { steps, number: pool.number };
            // AcqRel: pairs with `grant`. Where it fails, somebody else was here.
            let _ = slot.grant.compare_exchange(grant.word(), finished.word(), AcqRel, Relaxed);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn steps_go_round() {
        let budget = Budget::new();
        let (one, two) = (budget.claim(7).unwrap(), budget.claim(8).unwrap());
        assert_ne!(one, two);
        assert_eq!(budget.claim(7), Some(one), "after an exec");
        assert!(budget.try_take(one, 40) && budget.try_take(two, 24));
        assert!(!budget.try_take(two, 1));
        budget.ask(two, 4);
        assert!(budget.is_asked(one) && !budget.is_asked(two));
        budget.give(one, 1);
        budget.answer(one);
        assert!(budget.try_take(two, 1) && !budget.is_asked(one));
        assert_eq!((budget.granted(one), budget.granted(two)), (39, 25));
        budget.reclaim(|owner| owner == 7);
        assert!(budget.try_take(two, 39));
        assert_eq!(budget.claim(9), Some(one));
        budget.give(two, 100);
        assert_eq!(
            (budget.granted(one), budget.granted(two), budget.read_pool().granted),
            (0, 0, 0)
        );
    }

    /// Goal: numbers and signs keep to their bits.
    #[test]
    fn words_are_what_they_were_made_of() {
        for (granted, slot, steps, number) in
            [(0, 0, 0, 0), (64, SLOTS - 1, -64, NUMBERS), (1, 2, 64, 1 << 39)]
        {
            let pool = Pool { granted, slot, steps, number };
            assert_eq!(Pool::of(pool.word()), pool);
            let grant = Grant { steps: granted, number };
            assert_eq!(Grant::of(grant.word()), grant);
        }
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use crate::runtime::sync::AtomicBool;
    use loom::sync::Arc;
    use loom::thread;

    /// How far a process comes before it is killed.
    #[derive(Clone, Copy, PartialEq)]
    enum Killed {
        Before,
        /// Its transfer has happened, and nobody has written the grant.
        Unfinished,
        After,
    }

    struct Tree {
        budget: Budget,
        /// Process 1 is gone.
        is_gone: AtomicBool,
    }

    impl Tree {
        fn new() -> Arc<Self> {
            Arc::new(Self { budget: Budget::new(), is_gone: AtomicBool::new(false) })
        }

        /// Process 1: takes all, and is killed.
        fn first(&self, slot: usize, killed: Killed) {
            if killed != Killed::Before {
                let pool = self.budget.read_finished();
                let next = self.budget.next(pool, slot, STEPS as i8);
                if self.budget.swap(pool, next) && killed == Killed::After {
                    self.budget.finish(next);
                }
            }
            self.is_gone.store(true, std::sync::atomic::Ordering::Release);
        }

        fn is_gone(&self, owner: u64) -> bool {
            owner == 1 && self.is_gone.load(Acquire)
        }

        /// When all is quiet: the pool is what is granted.
        fn check(&self) -> u32 {
            let pool = self.budget.read_finished();
            let sum: u32 = (0..SLOTS).map(|slot| self.budget.grant(slot).steps).sum();
            assert_eq!(sum, pool.granted, "steps got lost, or were granted twice");
            sum
        }
    }

    /// One process is killed while two others take back what it had, and take a step: then no step is lost or
    /// granted twice, and in the end all can be had.
    #[test]
    fn nothing_is_lost_with_a_process() {
        for killed in [Killed::Before, Killed::Unfinished, Killed::After] {
            let mut model = loom::model::Builder::new();
            model.preemption_bound = Some(2);
            model.check(move || {
                let tree = Tree::new();
                let first = tree.budget.claim(1).unwrap();
                let others = [2, 3].map(|process| {
                    let tree = Arc::clone(&tree);
                    let slot = tree.budget.claim(process).unwrap();
                    thread::spawn(move || {
                        if process == 2 {
                            tree.budget.reclaim_one(first, &|owner| tree.is_gone(owner));
                        }
                        tree.budget.try_take(slot, 1)
                    })
                });
                tree.first(first, killed);
                let taken = others.map(|other| other.join().unwrap());
                let taken = taken.iter().filter(|taken| **taken).count() as u32;
                let sum = tree.check();
                let kept = tree.budget.grant(first).steps;
                assert_eq!(sum, kept + taken);
                tree.budget.reclaim(|owner| tree.is_gone(owner));
                assert_eq!(tree.check(), taken);
                assert_eq!(tree.budget.claim(4), Some(first));
            });
        }
    }

    /// Goal: BU1 is needed: a transfer that was not finished first.
    #[test]
    #[should_panic]
    fn unfinished_transfers_are_lost() {
        fn take(tree: &Tree, slot: usize) -> bool {
            loop {
                let pool = tree.budget.read_pool();
                if pool.granted + 1 > STEPS {
                    return false;
                }
                if tree.budget.try_transfer(pool, slot, 1) {
                    return true;
                }
            }
        }
        fn reclaim(tree: &Tree) {
            for slot in 0..SLOTS {
                let pool = tree.budget.read_pool();
                let owner = tree.budget.slots[slot].owner.load(Acquire);
                let steps = tree.budget.grant(slot).steps;
                if owner != 0 && tree.is_gone(owner) && steps > 0 {
                    tree.budget.try_transfer(pool, slot, -(steps as i8));
                }
            }
        }
        // Room is left for a taker to overwrite what the pool names.
        loom::model(|| {
            let tree = Tree::new();
            let (first, second) = (tree.budget.claim(1).unwrap(), tree.budget.claim(2).unwrap());
            let pool = tree.budget.read_finished();
            assert!(tree.budget.swap(pool, tree.budget.next(pool, first, 4)));
            let other = Arc::clone(&tree);
            let other = thread::spawn(move || take(&other, second));
            reclaim(&tree);
            other.join().unwrap();
            tree.check();
        });
    }

    /// Goal: BU4 is needed: the pool is read before the owner is found gone, not after. Else a step that a new
    /// owner has taken is taken from it.
    #[test]
    #[should_panic]
    fn a_later_owner_is_robbed() {
        fn reclaim(tree: &Tree) {
            let slot = 0;
            let owner = tree.budget.slots[slot].owner.load(Acquire);
            if owner == 0 || !tree.is_gone(owner) {
                return;
            }
            let pool = tree.budget.read_finished();
            let steps = tree.budget.grant(slot).steps;
            if steps > 0 {
                tree.budget.try_transfer(pool, slot, -(steps as i8));
            }
        }
        reclaimed_for_a_new_owner(reclaim);
    }

    /// The same by the rules.
    #[test]
    fn a_later_owner_keeps_its_steps() {
        reclaimed_for_a_new_owner(|tree| tree.budget.reclaim_one(0, &|owner| tree.is_gone(owner)));
    }

    fn reclaimed_for_a_new_owner(reclaim: fn(&Tree)) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(move || {
            let tree = Tree::new();
            let first = tree.budget.claim(1).unwrap();
            assert_eq!(first, 0);
            tree.first(first, Killed::After);
            let other = Arc::clone(&tree);
            let other = thread::spawn(move || reclaim(&other));
            tree.budget.reclaim_one(first, &|owner| tree.is_gone(owner));
            let own = tree.budget.claim(2);
            let taken = own.is_some_and(|slot| tree.budget.try_take(slot, 1));
            other.join().unwrap();
            tree.check();
            if taken {
                assert_eq!(tree.budget.granted(own.unwrap()), 1, "robbed");
            }
        });
    }
}
