//! The handle tables, one for each kind of object (handle.N1 to handle.N3 [handle](crate::handle)).

use std::sync::atomic::AtomicPtr;
use std::sync::atomic::Ordering::{Acquire, Release};

use crate::handle::fork;
use crate::handle::protect::{Fences, Held, Refusal, Slot};
use crate::handle::state::{self, Forget, State};
use crate::handle::thread;
use crate::sync::yield_now;

/// The kind of object that a handle stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Engine,
    File,
    Queue,
    View,
}

const PLACE_BITS: u32 = 20;
const KIND_BITS: u32 = 4;
const GENERATION_SHIFT: u32 = PLACE_BITS + KIND_BITS;
const GENERATIONS: u64 = 1 << (64 - GENERATION_SHIFT);
const PLACES: u32 = 1 << PLACE_BITS;
const CHUNK_PLACES: usize = 1024;
const CHUNKS: usize = PLACES as usize / CHUNK_PLACES;

type Chunk<T> = [Slot<T>; CHUNK_PLACES];

/// Objects of one kind, by their ids.
pub(crate) struct Table<T: 'static> {
    kind: Kind,
    /// The first chunk, inline, so that its slots are found without a load; the other chunks.
    first: Chunk<T>,
    chunks: [AtomicPtr<Chunk<T>>; CHUNKS],
}

impl<T: Clone + Send + Sync> Table<T> {
    pub(crate) const fn new(kind: Kind) -> Table<T> {
        Table {
            kind,
            first: [const { Slot::new() }; CHUNK_PLACES],
            chunks: [const { AtomicPtr::new(std::ptr::null_mut()) }; CHUNKS],
        }
    }

    #[inline(always)]
    fn slot(&self, place: u32) -> Option<&Slot<T>> {
        if let Some(slot) = self.first.get(place as usize) {
            return Some(slot);
        }
        // Acquire: pairs with the release in `slot_or_new`. Argued: a chunk is leaked, and its slots were
        // stored before its address, as with every published pointer; loom has no static tables.
        let chunk = self.chunks.get(place as usize / CHUNK_PLACES)?.load(Acquire);
        // SAFETY: null, or a chunk that `slot_or_new` leaked.
        let chunk = unsafe { chunk.as_ref() }?;
        Some(&chunk[place as usize % CHUNK_PLACES])
    }

    /// Call under the lock.
    fn slot_or_new(&self, place: u32) -> &Slot<T> {
        if let Some(slot) = self.slot(place) {
            return slot;
        }
        let slots: Vec<Slot<T>> = (0..CHUNK_PLACES).map(|_| Slot::default()).collect();
        let chunk: &'static mut Chunk<T> = match Vec::leak(slots).try_into() {
            Ok(chunk) => chunk,
            Err(_) => unreachable!("as many as a chunk has"),
        };
        // Release: a thread that finds the chunk finds its slots. Argued: as in `slot`.
        self.chunks[place as usize / CHUNK_PLACES].store(chunk, Release);
        self.slot(place).expect("stored above")
    }

    /// The slot that an id names, if it is an id of this table.
    #[inline(always)]
    fn named(&self, id: u64) -> Option<&Slot<T>> {
        let kind = (id >> PLACE_BITS) & ((1 << KIND_BITS) - 1);
        // Kinds and generations count from 1, so that no id is a small number.
        (kind == self.kind as u64 + 1).then(|| self.slot(id as u32 & (PLACES - 1))).flatten()
    }

    /// Inserts an object and returns its id. `Err` returns the object: the table is full.
    pub(crate) fn insert(&'static self, object: T) -> Result<u64, T> {
        fork::install_handlers();
        let mut state = state::lock();
        let places = &mut state.places[self.kind as usize];
        let (place, generation) = match places.free.pop() {
            Some(free) => free,
            None if places.next < PLACES => {
                let place = places.next;
                places.next += 1;
                if place == 0 {
                    state.tables.push(self);
                }
                (place, 1)
            }
            None => return Err(object),
        };
        let kind = self.kind as u64 + 1;
        let id = generation << GENERATION_SHIFT | kind << PLACE_BITS | u64::from(place);
        self.slot_or_new(place).publish(id, object);
        Ok(id)
    }

    /// Runs `work`, which must be brief (protect.P4), with the object.
    #[inline(always)]
    pub(crate) fn with<R>(&self, id: u64, work: impl FnOnce(&T) -> R) -> Result<R, Refusal> {
        let Some(slot) = self.named(id) else { return Err(Refusal::Unknown) };
        let record = thread::record();
        let Some(fences) = record.fences() else { return self.with_enlisted(id, work) };
        let held: Held<'_, T> = slot.enter(&record.hazard, fences, id)?;
        Ok(work(&held))
    }

    #[cold]
    #[inline(never)]
    fn with_enlisted<R>(&self, id: u64, work: impl FnOnce(&T) -> R) -> Result<R, Refusal> {
        let _late = thread::enlist();
        let record = thread::record();
        let slot = self.named(id).ok_or(Refusal::Unknown)?;
        let held = slot.enter(&record.hazard, record.fences().unwrap_or(Fences::Full), id)?;
        Ok(work(&held))
    }

    /// A reference to the object.
    pub(crate) fn get(&self, id: u64) -> Result<T, Refusal> {
        self.with(id, T::clone)
    }

    /// Removes an object, after its last use.
    pub(crate) fn take(&self, id: u64) -> Result<T, Refusal> {
        let slot = self.named(id).ok_or(Refusal::Unknown)?;
        let own = &thread::record().hazard;
        if own.is_in_use() {
            return Err(Refusal::Nested);
        }
        if !slot.withdraw(id) {
            return Err(Refusal::Unknown);
        }
        // A thread that enters the list later does so under the lock that is taken here, and finds the id
        // gone; a thread that leaves the list has finished its uses before.
        let mut state = state::lock();
        if state.has_others(own) {
            Fences::here().heavy();
        }
        let mut attempts = 0;
        while state.is_used(id, own) {
            drop(state);
            yield_now(attempts);
            attempts += 1;
            state = state::lock();
        }
        // SAFETY: this thread withdrew the id, and found no user after the fence. Without other threads in
        // the list, no fence is needed.
        let object = unsafe { slot.take() };
        self.free_place(&mut state, id);
        object.ok_or(Refusal::Unknown)
    }

    fn free_place(&self, state: &mut State, id: u64) {
        let generation = (id >> GENERATION_SHIFT) + 1;
        if generation < GENERATIONS {
            let place = id as u32 & (PLACES - 1);
            state.places[self.kind as usize].free.push((place, generation));
        }
    }
}

impl<T: Clone + Send + Sync> Forget for Table<T> {
    fn forget_all(&self, state: &mut State) {
        for place in 0..state.places[self.kind as usize].next {
            let Some(slot) = self.slot(place) else { return };
            if let Some(id) = slot.forget() {
                self.free_place(state, id);
            }
        }
    }
}
