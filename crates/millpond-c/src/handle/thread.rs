//! Per-thread data of the handle lookup: the thread's hazard pointer, and the hit counters that it used last.
//!
//! One record, in one cache line of thread-local storage. A shared library's default TLS model needs a
//! function call. On x86-64 the record uses the "initial exec" model instead: a fixed offset in the static
//! TLS block, of which loaders reserve a part for libraries that are loaded late. The gain of that alone
//! was within the noise of a busy machine (`examples/cost`).

use std::cell::Cell;

use millpond::internals::HitCounts;

use crate::handle::protect::{Fences, Hazard};
use crate::handle::state::{self, HazardOf};

/// All zero at first.
#[repr(C, align(64))]
pub(crate) struct Record {
    pub(super) hazard: Hazard,
    /// 0: the hazard is not in the list.
    fences: Cell<u8>,
    /// The counters of read hits.
    pub(crate) counts: Cell<HitCounts>,
}

const FULL: u8 = 1;
const ASYMMETRIC: u8 = 2;

#[cfg(target_arch = "x86_64")]
mod storage {
    use super::Record;

    const _: () = assert!(size_of::<Record>() == 64);

    std::arch::global_asm!(
        ".pushsection .tbss.millpond_record,\"awT\",@nobits",
        ".p2align 6",
        ".hidden millpond_record",
        ".globl millpond_record",
        ".type millpond_record,@object",
        ".size millpond_record, 64",
        "millpond_record:",
        ".zero 64",
        ".popsection",
    );

    #[inline]
    pub(super) fn record() -> *const Record {
        let record: *const Record;
        // SAFETY: computes the address of a thread-local variable, by the ABI: reads a constant that the
        // loader set and the thread's own address, which is at fs:0.
        unsafe {
            std::arch::asm!(
                "mov {record}, qword ptr [rip + millpond_record@GOTTPOFF]",
                "add {record}, qword ptr fs:[0]",
                record = out(reg) record,
                options(pure, readonly, nostack),
            );
        }
        record
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod storage {
    use super::{Cell, Hazard, HitCounts, Record};

    thread_local! {
        static RECORD: Record = const {
            Record {
                hazard: Hazard::new(),
                fences: Cell::new(0),
                counts: Cell::new(HitCounts::NONE),
            }
        };
    }

    #[inline]
    pub(super) fn record() -> *const Record {
        // It has no destructor, so it exists until the thread has ended.
        RECORD.with(|record| std::ptr::from_ref(record))
    }
}

/// The calling thread's record. Not to be kept beyond a call.
#[inline]
pub(crate) fn record<'a>() -> &'a Record {
    // SAFETY: thread-local storage exists until the thread has ended. All zero bytes are a valid Record.
    // Other threads access only the hazard, which is atomic.
    unsafe { &*storage::record() }
}

impl Record {
    /// The fences of this process, if the hazard is in the list.
    #[inline]
    pub(super) fn fences(&self) -> Option<Fences> {
        match self.fences.get() {
            0 => None,
            ASYMMETRIC => Some(Fences::Asymmetric),
            _ => Some(Fences::Full),
        }
    }
}

/// Removes the hazard from the list when its thread ends, or at the end of a call after the thread's
/// destructors.
pub(super) struct Delist;

impl Drop for Delist {
    fn drop(&mut self) {
        let record = record();
        record.fences.set(0);
        record.counts.set(HitCounts::NONE);
        let own = HazardOf(&raw const record.hazard);
        state::lock().hazards.retain(|&one| one != own);
    }
}

thread_local! {
    static DELIST: Cell<Option<Delist>> = const { Cell::new(None) };
}

/// Adds the thread's hazard to the list. After the thread's destructors have run, it returns a guard, to be
/// dropped at the end of the call.
#[cold]
pub(super) fn enlist() -> Option<Delist> {
    let record = record();
    let mut state = state::lock();
    record.fences.set(match Fences::here() {
        Fences::Asymmetric => ASYMMETRIC,
        Fences::Full => FULL,
    });
    state.hazards.push(HazardOf(&raw const record.hazard));
    drop(state);
    let mut delist = Some(Delist);
    // Fails if the thread's destructors have run.
    let _ = DELIST.try_with(|place| place.set(delist.take()));
    delist
}
