//! What this process may have of the memory that all processes of a run have together: see `budget`.
//!
//! - **SH1** The engine may always have a *floor*: 4 MiB, or all of a smaller budget. Beyond that it needs steps, 64ths
//!   of the budget: it has them before its limit goes up, and gives them back when its limit has gone down.
//!   So all engines together have no more than the budget, and a floor for each.
//! - **SH2** A step is taken after a call that missed while more than half of the limit is in use: so there is room for
//!   whole chunks, as long as the budget lasts. Where there is none left, what dead processes had is taken
//!   back; and when the cache is full and this process has missed on about as much as it may have, the one
//!   with the most is asked for a step. Who has a 16th of the budget or less is left alone.
//! - **SH3** Who is asked gives a step after a call that misses. Who does not miss keeps what it has; and so does a
//!   program that was exec'ed and opens no file that is served.
//!
//! The page lies in front of the tally's lines, which the main process names to its children. Where it can't be
//! had (the main process is gone, or numbers processes otherwise) there is the floor.
//!
//! Locks: `ENGINE`, then the engine's own. The registry's may be held.

use std::os::unix::fs::MetadataExt;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize};

use millpond::{Engine, File};

use crate::report::tally;
use crate::runtime::budget::{Budget, STEPS};
use crate::runtime::config;
use crate::runtime::lock::Lock;

const FLOOR_BYTES: u64 = 4 << 20;
/// SH2: nobody is asked for these.
const KEPT_STEPS: u32 = STEPS / 16;
/// No slot: nothing is shared, or there is no more than the floor.
const NONE: usize = usize::MAX;

/// The process's engine, and what it was built for: the budget, as far as this process knows.
struct Own {
    engine: Engine,
    most_bytes: u64,
}

static ENGINE: Lock<Option<Own>> = Lock::new(None);
static BUDGET: AtomicPtr<Budget> = AtomicPtr::new(std::ptr::null_mut());
static SLOT: AtomicUsize = AtomicUsize::new(NONE);
/// Calls that missed while a step was wanted: since one was looked for, and since one was had.
static MISSED: AtomicU64 = AtomicU64::new(0);
static MISSED_IN_ALL: AtomicU64 = AtomicU64::new(0);
/// `pressure.PR3`.
static CAP_BYTES: AtomicU64 = AtomicU64::new(u64::MAX);
static IS_CHANGING: AtomicBool = AtomicBool::new(false);

/// The engine is given up, and its steps with it.
pub fn end() {
    let mut engine = ENGINE.lock();
    let slot = SLOT.swap(NONE, Relaxed);
    if let Some(budget) = budget().filter(|_| slot != NONE) {
        budget.give(slot, STEPS);
    }
    *engine = None;
}

/// In a forked child: it has no engine yet, and a slot of its own when it makes one.
///
/// # Safety
///
/// No other thread exists.
pub unsafe fn after_fork() {
    // SAFETY: the caller's duty.
    unsafe { ENGINE.reset(None) };
    SLOT.store(NONE, Relaxed);
    MISSED.store(0, Relaxed);
    MISSED_IN_ALL.store(0, Relaxed);
    IS_CHANGING.store(false, Relaxed);
    CAP_BYTES.store(u64::MAX, Relaxed);
}

/// `pressure.PR3`: a limit of this process's beside its steps. Whether its limit is decided here.
pub fn set_cap(bytes: u64) -> bool {
    CAP_BYTES.store(bytes, Relaxed);
    let engine = ENGINE.lock();
    let slot = SLOT.load(Relaxed);
    if let (Some(own), Some(budget)) = (&*engine, budget().filter(|_| slot != NONE)) {
        own.hold(budget, budget.granted(slot));
    }
    engine.is_some()
}

/// The engine was made, with the whole budget as its limit.
pub fn begin(engine: &Engine) {
    if !config::get().is_cache_shared {
        return;
    }
    let own = Own { engine: engine.clone(), most_bytes: engine.cache_bytes() };
    let slot = find().and_then(|budget| {
        let process = process(std::process::id())?;
        let _ = budget.bytes.compare_exchange(0, own.most_bytes, Relaxed, Relaxed);
        let slot = budget.claim(process)?;
        // Of an engine that ended with an exec.
        budget.give(slot, STEPS);
        own.hold(budget, 0);
        // What the engine needs for itself may be more than the floor.
        let mut steps = 0;
        while own.engine.cache_bytes() > own.limit_bytes(budget, steps) && budget.try_take(slot, 1)
        {
            steps += 1;
            own.hold(budget, steps);
        }
        Some(slot)
    });
    if slot.is_none() {
        let _ = own.engine.set_cache_bytes(own.most_bytes.min(FLOOR_BYTES));
    }
    *ENGINE.lock() = Some(own);
    SLOT.store(slot.unwrap_or(NONE), Relaxed);
}

/// A call on the file was not a hit. In a section.
pub fn after_miss(file: &File) {
    let slot = SLOT.load(Relaxed);
    if slot == NONE {
        return;
    }
    let Some(budget) = budget() else { return };
    let (used, limit) = file.cache_use();
    let is_asked = budget.is_asked(slot);
    if is_asked || used > limit / 2 {
        change(budget, slot, is_asked, used + limit / 32 >= limit);
    }
}

#[cold]
fn change(budget: &Budget, slot: usize, is_asked: bool, is_full: bool) {
    // Where there is none to be had, or none can be given, another look is far off: the slots are many.
    const PAUSE: u64 = 64;
    let missed = MISSED.fetch_add(1, Relaxed);
    if !missed.is_multiple_of(PAUSE) || IS_CHANGING.swap(true, Relaxed) {
        return;
    }
    if let Some(own) = &*ENGINE.lock() {
        if is_asked {
            own.give(budget, slot);
        } else {
            own.take(budget, slot, is_full);
        }
    }
    IS_CHANGING.store(false, Relaxed);
}

impl Own {
    fn limit_bytes(&self, budget: &Budget, steps: u32) -> u64 {
        let all = budget.bytes.load(Relaxed).min(self.most_bytes);
        let cap = CAP_BYTES.load(Relaxed).max(FLOOR_BYTES);
        all.min(cap).min(FLOOR_BYTES + all / u64::from(STEPS) * u64::from(steps))
    }

    /// Changes the limit to what so many steps allow: the limit that holds.
    fn hold(&self, budget: &Budget, steps: u32) -> u64 {
        let wanted = self.limit_bytes(budget, steps);
        self.engine.set_cache_bytes(wanted).unwrap_or(self.most_bytes)
    }

    /// SH2.
    fn take(&self, budget: &Budget, slot: usize, is_full: bool) {
        let granted = budget.granted(slot);
        if self.limit_bytes(budget, granted) >= self.limit_bytes(budget, STEPS) {
            return;
        }
        let mut is_taken = budget.try_take(slot, 1);
        if !is_taken {
            budget.reclaim(is_gone);
            is_taken = budget.try_take(slot, 1);
        }
        if is_taken {
            // The next miss may look again.
            MISSED.store(0, Relaxed);
            MISSED_IN_ALL.store(0, Relaxed);
            self.hold(budget, granted + 1);
        } else if is_full {
            let missed = MISSED_IN_ALL.fetch_add(MISSED.swap(1, Relaxed), Relaxed);
            if missed >= self.engine.cache_bytes() >> 12 {
                MISSED_IN_ALL.store(0, Relaxed);
                budget.ask(slot, KEPT_STEPS);
            }
        }
    }

    /// SH3. SH1: the limit first.
    fn give(&self, budget: &Budget, slot: usize) {
        let granted = budget.granted(slot);
        if granted > KEPT_STEPS {
            if self.hold(budget, granted - 1) > self.limit_bytes(budget, granted - 1) {
                // It is still asked.
                return;
            }
            budget.give(slot, 1);
        }
        budget.answer(slot);
    }
}

fn budget() -> Option<&'static Budget> {
    // SAFETY: null, or a mapping of a budget that is never unmapped. Relaxed: the fields are atomic.
    unsafe { BUDGET.load(Relaxed).as_ref() }
}

/// The page, if it can be had.
fn find() -> Option<&'static Budget> {
    if budget().is_none() {
        let page = tally::map_budget()?;
        BUDGET.store(page, Relaxed);
    }
    let budget = budget()?;
    let own = std::fs::metadata("/proc/self/ns/pid").ok()?.ino();
    let first = budget.name_space.compare_exchange(0, own, Relaxed, Relaxed);
    (first.is_ok() || first == Err(own)).then_some(budget)
}

/// Who it is: the number and the time of the start, which an exec does not change. `None`: gone, or as good.
fn process(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // After the name, which may hold anything: the state is the third field, the start the 22nd.
    let mut fields = stat[stat.rfind(')')? + 1..].split_ascii_whitespace();
    let state = fields.next()?;
    let start: u64 = fields.nth(18)?.parse().ok()?;
    (!matches!(state, "Z" | "X")).then_some(u64::from(pid) | start << 32)
}

fn is_gone(owner: u64) -> bool {
    process(owner as u32) != Some(owner)
}
