//! Events of `tracing`. A subscriber is the program's code, and is called in the middle of the engine's work: its panic
//! ends there (`millpond_rangelock::callback`), and an event of an operation that it calls is left out, as it could be without end.
//!
//! No lock is held, but pages may be under write-back and ranges guarded: a subscriber must not wait for the engine.

use std::cell::Cell;

thread_local! {
    /// This thread is in a subscriber.
    static IS_EMITTING: Cell<bool> = const { Cell::new(false) };
}

/// Calls `emit`, which emits one event.
pub(crate) fn contained(emit: impl FnOnce()) {
    if !IS_EMITTING.replace(true) {
        millpond_rangelock::callback::contain(emit);
        IS_EMITTING.set(false);
    }
}

/// An event of a level, as `tracing` takes it behind its target.
macro_rules! event {
    ($level:ident, $($event:tt)+) => {
        $crate::event::contained(|| tracing::$level!(target: "millpond", $($event)+))
    };
}

pub(crate) use event;
