//! Which processes of a tree hold which descriptions that came to them by fork.
//!
//! The processes of a tree (those that came of one by fork, without an exec) have a page or two together. Each
//! has a *slot* there, with the numbers of the descriptions that it holds and another one may hold, too:
//!
//! ```text
//! slot:  FREE -> claim -> BORN -> begin -> ALIVE      claim: by the parent, before the fork
//!                         BORN -> cancel -> FREE      there was no fork
//!        ALIVE, gone   -> claim -> BORN               gone: dead, or another program by exec
//!
//! fork:  claim a slot; copy the own numbers there; forks += 1; then the fork itself
//! close: the kernel's close; no call in flight; the number goes from the own slot
//! look:  read forks; all other slots; given; read forks again, unless it has changed
//! ```
//!
//! A process may be killed between any two instructions, and nobody has to be alive to clean up: whether
//! who has a slot is gone, the kernel says (`is_gone`, to the callers' account), which must come to know of
//! it after the process's last store here and its last system call.
//!
//! - **H1** Only its owner changes the numbers of a slot, and before there is one, who claimed it. A number keeps its
//!   place until it goes: a look that runs beside other changes meets it or has come too late.
//! - **H2** Who holds a description has its number in the own slot. It gets to another process by fork alone,
//!   and to that one's slot before `forks` grows, and before it can go from the first. So a look that
//!   misses it in the old slot (Acquire) finds `forks` changed, or has seen it in the new one.
//! - **H3** What gets to somebody without a slot (a program that is exec'ed or spawned, who receives it) is *given*,
//!   before: no look finds it alone again. It is noted before the giver is gone, or its number goes; a
//!   look reads that last.
//! - **H4** The numbers in the slot of who is gone mean nothing. A slot that is claimed anew has another
//!   *life*: a look that finds a number in it, then its owner gone, and then the same life, has seen the
//!   number of who is gone.
//! - **H5** A slot that is BORN counts as held by a living process. A child that is killed before it has begun leaves
//!   it so: then what it held is never found alone. So it is with numbers that there is no room for.
//! - **H6** Numbers are given in turn, and may come again after 2^32. Then a look may find a description
//!   held that is not: never the other way round.

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

use crate::runtime::sync::AtomicU32;

/// So many processes are alive together; others share nothing that is ever found alone.
#[cfg(not(loom))]
pub const SLOTS: usize = 256;
#[cfg(loom)]
pub const SLOTS: usize = 3;
/// So many numbers has each.
#[cfg(not(loom))]
const NUMBERS: usize = 253;
#[cfg(loom)]
const NUMBERS: usize = 1;
/// Slots that a fork looks at before it takes one that was never used.
const LOOKS: usize = 4;
const NONE: u32 = 0;

/// See the module header. Zero bytes are a tree without processes.
#[repr(C)]
pub struct Holders {
    forks: AtomicU32,
    last_number: AtomicU32,
    /// Slots that were ever claimed are below.
    slots_used: AtomicU32,
    /// Where the next fork begins to look for one.
    next_slot: AtomicU32,
    /// H3: of all that there are, and will be.
    all_given: AtomicU32,
    given: [AtomicU32; NUMBERS],
    slots: [Slot; SLOTS],
}

#[repr(C)]
struct Slot {
    /// The life, and below it the state.
    life: AtomicU32,
    /// Places that were ever used are below.
    places_used: AtomicU32,
    numbers: [AtomicU32; NUMBERS],
}

const STATE_BITS: u32 = 2;
const STATE: u32 = (1 << STATE_BITS) - 1;
const FREE: u32 = 0;
const BORN: u32 = 1;
const ALIVE: u32 = 2;

/// What a look has found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Found {
    /// Nobody else holds it, and nobody else will, as long as who looked gives it to nobody.
    Alone,
    /// Somebody may hold it still.
    Held,
    /// H3.
    Given,
}

impl Holders {
    #[cfg(any(test, loom))]
    pub fn new() -> Self {
        let zero = || AtomicU32::new(0);
        let slot = |_| Slot {
            life: zero(),
            places_used: zero(),
            numbers: std::array::from_fn(|_| zero()),
        };
        Self {
            forks: zero(),
            last_number: zero(),
            slots_used: zero(),
            next_slot: zero(),
            all_given: zero(),
            given: std::array::from_fn(|_| zero()),
            slots: std::array::from_fn(slot),
        }
    }

    /// A slot for a process that holds nothing yet, BORN.
    pub fn claim(&self, is_gone: impl Fn(usize) -> bool) -> Option<usize> {
        let used = self.slots_used.load(Acquire) as usize;
        let first = self.next_slot.fetch_add(1, Relaxed) as usize;
        let turn = |index: usize| (first + index) % used;
        let found = (0..used.min(LOOKS)).map(turn).find(|slot| self.try_claim(*slot, &is_gone));
        // More than one may take the new one; who comes second looks on.
        let fresh = |_| (used..SLOTS).find(|slot| self.try_claim(*slot, &is_gone));
        let again =
            |_| (LOOKS.min(used)..used).map(turn).find(|slot| self.try_claim(*slot, &is_gone));
        let slot = found.ok_or(()).or_else(|()| fresh(()).ok_or(())).ok().or_else(|| again(()))?;
        // Release: pairs with the Acquire above and in `find`. H2: `forks` comes after.
        self.slots_used.fetch_max(slot as u32 + 1, Release);
        Some(slot)
    }

    fn try_claim(&self, slot: usize, is_gone: impl Fn(usize) -> bool) -> bool {
        let found = &self.slots[slot];
        // Acquire: pairs with the Releases below; what was done in that life comes before.
        let life = found.life.load(Acquire);
        let is_free = match life & STATE {
            FREE => true,
            ALIVE => is_gone(slot),
            _ => false,
        };
        let next = (life & !STATE).wrapping_add(1 << STATE_BITS) | BORN;
        // AcqRel: the numbers that follow come after it (H4).
        if !is_free || found.life.compare_exchange(life, next, AcqRel, Relaxed).is_err() {
            return false;
        }
        let used = found.places_used.load(Relaxed) as usize;
        for number in &found.numbers[..used] {
            // Release: pairs with the Acquire in `has`, H4.
            number.store(NONE, Release);
        }
        true
    }

    /// A slot for the child of `parent`'s that is about to be: what that holds, it will hold.
    pub fn before_fork(&self, parent: usize, is_gone: impl Fn(usize) -> bool) -> Option<usize> {
        let child = self.claim(is_gone)?;
        let (from, to) = (&self.slots[parent], &self.slots[child]);
        let used = from.places_used.load(Relaxed) as usize;
        for (from, to) in from.numbers[..used].iter().zip(&to.numbers) {
            // Relaxed: the caller's own. Release: pairs with the Acquire in `has`.
            to.store(from.load(Relaxed), Release);
        }
        to.places_used.fetch_max(used as u32, Release);
        // AcqRel: pairs with the Acquire in `look`, by way of the number that goes, H2.
        self.forks.fetch_add(1, AcqRel);
        Some(child)
    }

    /// There was no fork.
    pub fn cancel(&self, slot: usize) {
        self.change(slot, FREE);
    }

    /// The owner is there, and `is_gone` says so.
    pub fn begin(&self, slot: usize) {
        self.change(slot, ALIVE);
    }

    fn change(&self, slot: usize, state: u32) {
        let life = &self.slots[slot].life;
        // Relaxed: BORN, so nobody else changes it. Release: pairs with the Acquires of `life`.
        life.store(life.load(Relaxed) & !STATE | state, Release);
    }

    /// A number for a description that nobody else holds yet; it goes to the slot, which is the caller's.
    /// `None`: there is no room.
    pub fn add(&self, slot: usize) -> Option<u32> {
        let own = &self.slots[slot];
        let used = own.places_used.load(Relaxed) as usize;
        let is_free = |place: &usize| own.numbers[*place].load(Relaxed) == NONE;
        let place = (0..used).find(is_free).or((used < NUMBERS).then_some(used))?;
        let mut number = NONE;
        while number == NONE {
            number = self.last_number.fetch_add(1, Relaxed).wrapping_add(1);
        }
        // Nobody looks for it before a fork.
        own.numbers[place].store(number, Release);
        own.places_used.fetch_max(place as u32 + 1, Release);
        Some(number)
    }

    /// Whether the slot's process, the caller's, holds nothing that others may hold.
    pub fn is_empty(&self, slot: usize) -> bool {
        let own = &self.slots[slot];
        let used = own.places_used.load(Relaxed) as usize;
        own.numbers[..used].iter().all(|number| number.load(Relaxed) == NONE)
    }

    /// The process of the slot, the caller's, has closed the description, and no call of its goes on there.
    pub fn remove(&self, slot: usize, number: u32) {
        let own = &self.slots[slot];
        let used = own.places_used.load(Relaxed) as usize;
        // Release: pairs with the Acquire in `has`. H2, H3. In one step, as loom would take the owner's load
        // for what the store depends on, and miss who has looked before.
        let is_removed =
            |place: &AtomicU32| place.compare_exchange(number, NONE, Release, Relaxed).is_ok();
        own.numbers[..used].iter().any(is_removed);
    }

    /// H3.
    pub fn give(&self, number: u32) {
        if self.is_given(number) {
            return;
        }
        if !self.try_give(number) {
            self.drop_lost();
            if !self.try_give(number) {
                self.all_given.store(1, Release);
            }
        }
    }

    fn try_give(&self, number: u32) -> bool {
        let is_taken =
            |place: &AtomicU32| place.compare_exchange(NONE, number, AcqRel, Relaxed).is_ok();
        self.given.iter().any(is_taken)
    }

    /// H3, of all that the slot's process holds.
    pub fn give_all(&self, slot: usize) {
        for number in &self.slots[slot].numbers {
            match number.load(Relaxed) {
                NONE => {}
                number => self.give(number),
            }
        }
    }

    fn is_given(&self, number: u32) -> bool {
        // Acquire: pairs with the Releases in `give`.
        self.all_given.load(Acquire) != 0
            || self.given.iter().any(|given| given.load(Acquire) == number)
    }

    /// Forgets of what was given that which nobody here holds: nobody will.
    fn drop_lost(&self) {
        let forks = self.forks.load(Acquire);
        let given = self.given.each_ref().map(|given| given.load(Acquire));
        let is_lost = |number: u32| self.slots.iter().all(|slot| !slot.has(number));
        let lost = given.map(|number| number != NONE && is_lost(number));
        // As in `look`.
        if self.forks.load(Acquire) != forks {
            return;
        }
        for ((place, number), is_lost) in self.given.iter().zip(given).zip(lost) {
            if is_lost {
                let _ = place.compare_exchange(number, NONE, AcqRel, Relaxed);
            }
        }
    }

    /// Whether somebody beside the caller, whose slot it is, holds the description. `is_gone`: see the header.
    pub fn look(&self, own: usize, number: u32, is_gone: impl Fn(usize) -> bool) -> Found {
        const TRIES: usize = 8;
        for _ in 0..TRIES {
            // Acquire: pairs with the AcqRel in `before_fork`; who has forked before is seen below.
            let forks = self.forks.load(Acquire);
            match self.find(own, number, &is_gone) {
                Some(true) => return Found::Held,
                Some(false) => {}
                None => continue,
            }
            // H3: after whoever is gone.
            if self.is_given(number) {
                return Found::Given;
            }
            // H2.
            if self.forks.load(Acquire) == forks {
                return Found::Alone;
            }
        }
        Found::Held
    }

    /// `None`: a slot has changed its owner meanwhile.
    fn find(&self, own: usize, number: u32, is_gone: impl Fn(usize) -> bool) -> Option<bool> {
        // Acquire: pairs with the Release in `claim`.
        let used = self.slots_used.load(Acquire) as usize;
        for (index, slot) in self.slots[..used].iter().enumerate() {
            // Acquire: pairs with the Releases of `life`.
            let life = slot.life.load(Acquire);
            if index == own || life & STATE == FREE || !slot.has(number) {
                continue;
            }
            if life & STATE == BORN || !is_gone(index) {
                return Some(true);
            }
            // H4: a number of another life comes after the change of `life`, which is seen here then.
            if slot.life.load(Acquire) != life {
                return None;
            }
        }
        Some(false)
    }
}

impl Slot {
    fn has(&self, number: u32) -> bool {
        // Acquire: pairs with the Releases of `places_used` and of the numbers. H2, H4.
        let used = self.places_used.load(Acquire) as usize;
        self.numbers[..used].iter().any(|place| place.load(Acquire) == number)
    }
}

#[cfg(all(test, loom))]
#[path = "holders/loom_tests.rs"]
mod loom_tests;

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn root(holders: &Holders) -> usize {
        let slot = holders.claim(|_| false).unwrap();
        holders.begin(slot);
        slot
    }

    fn fork(holders: &Holders, parent: usize) -> usize {
        let child = holders.before_fork(parent, |_| false).unwrap();
        holders.begin(child);
        child
    }

    /// Goal: a description is held until all others have closed it, whoever forked whom.
    #[test]
    fn holders_are_counted() {
        let holders = Holders::new();
        let parent = root(&holders);
        let number = holders.add(parent).unwrap();
        let child = fork(&holders, parent);
        let grandchild = fork(&holders, child);
        holders.remove(child, number);
        assert_eq!(holders.look(parent, number, |_| false), Found::Held);
        assert_eq!(holders.look(parent, number, |slot| slot == grandchild), Found::Alone);
        holders.remove(parent, number);
        assert_eq!(holders.look(grandchild, number, |_| false), Found::Alone);
    }

    /// Goal: what was given is not found alone, by whomever; and of what nobody holds any more there is no
    /// memory, which has room for so many only.
    #[test]
    fn what_is_given_stays_so() {
        let holders = Holders::new();
        let parent = root(&holders);
        let kept = holders.add(parent).unwrap();
        let child = fork(&holders, parent);
        holders.give_all(child);
        for _ in 0..2 * NUMBERS {
            let number = holders.add(parent).unwrap();
            holders.give(number);
            assert_eq!(holders.look(parent, number, |_| true), Found::Given);
            holders.remove(parent, number);
        }
        assert_eq!(holders.look(parent, kept, |_| true), Found::Given);
        let other = holders.add(parent).unwrap();
        assert_eq!(holders.look(parent, other, |_| true), Found::Alone);
    }

    /// Goal: where there is no room, nothing is shared that could be found alone.
    #[test]
    fn without_room() {
        let holders = Holders::new();
        let parent = root(&holders);
        while holders.add(parent).is_some() {}
        let mut children = Vec::new();
        while let Some(child) = holders.before_fork(parent, |_| false) {
            children.push(child);
        }
        assert_eq!(children.len(), SLOTS - 1);
        // Killed before it began: as good as alive.
        assert!(holders.before_fork(parent, |slot| slot == children[7]).is_none());
        holders.begin(children[7]);
        assert_eq!(holders.before_fork(parent, |slot| slot == children[7]), Some(children[7]));
        holders.cancel(children[9]);
        assert_eq!(holders.before_fork(parent, |_| false), Some(children[9]));
    }
}
