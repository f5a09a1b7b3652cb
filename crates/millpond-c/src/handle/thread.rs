//! The hazard of the calling thread.

use std::cell::Cell;

use crate::handle::protect::{Fences, Hazard};
use crate::handle::state;

/// A thread's hazard, and its fences.
#[derive(Clone, Copy)]
pub(super) struct Mine {
    pub(super) hazard: &'static Hazard,
    pub(super) fences: Fences,
}

/// Gives a hazard back when its thread ends.
struct Leave(&'static Hazard);

thread_local! {
    static MINE: Cell<Option<Mine>> = const { Cell::new(None) };
    static LEAVE: Cell<Option<Leave>> = const { Cell::new(None) };
}

/// Of a thread that has ended as far as its own memory goes: its hazard serves one call.
pub(super) struct Borrowed(pub(super) Mine);

impl Drop for Borrowed {
    fn drop(&mut self) {
        give_back(self.0.hazard);
    }
}

impl Drop for Leave {
    fn drop(&mut self) {
        MINE.set(None);
        give_back(self.0);
    }
}

fn give_back(hazard: &'static Hazard) {
    let mut state = state::lock();
    state.hazards.retain(|one| !std::ptr::eq(*one, hazard));
    state.free_hazards.push(hazard);
}

/// What the thread has, if it has used a handle before.
#[inline]
pub(super) fn mine() -> Option<Mine> {
    MINE.get()
}

/// Gives the thread what it needs; what it returns must be kept while it is used.
#[cold]
pub(super) fn enlist() -> Result<Mine, Borrowed> {
    let mut state = state::lock();
    let hazard = state.free_hazards.pop().unwrap_or_else(|| Box::leak(Box::default()));
    state.hazards.push(hazard);
    let mine = Mine { hazard, fences: Fences::here() };
    drop(state);
    match LEAVE.try_with(|leave| leave.set(Some(Leave(hazard)))) {
        Ok(()) => {
            MINE.set(Some(mine));
            Ok(mine)
        }
        Err(_) => Err(Borrowed(mine)),
    }
}
