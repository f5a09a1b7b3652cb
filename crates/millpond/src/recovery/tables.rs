//! The engine's side of the tables: the stores, and their order.
//!
//! Every store that a kill may follow is a *step*: the caller's hook is called before each, and the tests'
//! hooks can stop there. The engine's hook always continues, and costs nothing.
//!
//! Argued: a killed thread has made the stores that come first in the program, and the keeper reads when
//! all threads are gone; so only the compiler must keep the order, for which Release is enough. A model of
//! a kill is a thread that stops and is joined, which shows all of its stores. An op slot's next owner
//! stores after it found IDLE, which the last one stored last.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use crate::recovery::layout::{
    ChangeWords, DIRTY, EntryUse, FREE, INTENT_NONE, Intent, NO_SIZE, OPS, OpUse,
};
use crate::sync::AtomicU64;
use crate::units::{FrameIndex, PageIndex};

/// An op slot; `layout::OpWords` is how the keeper reads it.
#[repr(C)]
pub(crate) struct OpSlot {
    pub(crate) state: AtomicU64,
    pub(crate) file: AtomicU64,
    pub(crate) size: AtomicU64,
    #[cfg(not(loom))]
    _unused: [u64; 5],
}

/// A file entry; `layout::FileEntryWords` is how the keeper reads it.
#[repr(C)]
pub(crate) struct FileEntry {
    pub(crate) life: AtomicU64,
    pub(crate) size: AtomicU64,
    pub(crate) intent: [AtomicU64; 3],
    /// State, changed_ns, reach.
    pub(crate) changes: [AtomicU64; 3],
}

/// The record of a unit of frames; `layout::RecordWords` is how the keeper reads it.
#[repr(C)]
pub(crate) struct Record {
    pub(crate) state: AtomicU64,
    pub(crate) file: AtomicU64,
    pub(crate) page: AtomicU64,
    pub(crate) sequence: AtomicU64,
}

#[cfg(not(loom))]
const _: () = {
    use crate::recovery::layout::{FILE_BYTES, OP_BYTES, RECORD_BYTES};
    assert!(size_of::<OpSlot>() == OP_BYTES);
    assert!(size_of::<FileEntry>() == FILE_BYTES);
    assert!(size_of::<Record>() == RECORD_BYTES);
};

/// Called before each store; `None` is a kill.
pub(crate) trait Steps: FnMut() -> Option<()> {}
impl<F: FnMut() -> Option<()>> Steps for F {}

/// No kill.
#[inline]
pub(crate) fn unbroken() -> Option<()> {
    Some(())
}

/// The tables of one mapping.
#[derive(Clone, Copy)]
pub(crate) struct Tables<'a> {
    pub(crate) ops: &'a [OpSlot],
    pub(crate) files: &'a [FileEntry],
    pub(crate) records: &'a [Record],
    /// The last write sequence; the keeper does not need it.
    pub(crate) sequence: &'a AtomicU64,
}

impl<'a> Tables<'a> {
    /// Makes the pages dirty and sets the size, if given, atomically.
    #[inline]
    pub(crate) fn try_commit(
        self,
        file: EntryUse,
        pages: impl Iterator<Item = (PageIndex, FrameIndex)> + Clone,
        size: Option<u64>,
        mut step: impl Steps,
    ) -> Option<()> {
        // Relaxed: a page's guard orders the threads that write it, and RMWs of one atomic by ordered
        // threads have the same order (recovery.K3).
        let sequence = self.sequence.fetch_add(1, Relaxed) + 1;
        let mut peeked = pages.clone();
        match (peeked.next(), peeked.next(), size) {
            (None, _, None) => Some(()),
            (None, _, Some(size)) => self.try_set_size(file, size, step),
            (Some((page, frame)), None, None) => {
                self.describe(file, page, frame, sequence, &mut step)?;
                self.set_state(frame, DIRTY, &mut step)
            }
            _ => self.commit_by_op(file, pages, size, sequence, step),
        }
    }

    fn commit_by_op(
        self,
        file: EntryUse,
        pages: impl Iterator<Item = (PageIndex, FrameIndex)> + Clone,
        size: Option<u64>,
        sequence: u64,
        mut step: impl Steps,
    ) -> Option<()> {
        let op = self.claim_op(sequence, &mut step)?;
        let slot = &self.ops[op.op as usize];
        step()?;
        slot.file.store(file.word(), Relaxed);
        step()?;
        slot.size.store(size.unwrap_or(NO_SIZE), Relaxed);
        for (page, frame) in pages.clone() {
            self.describe(file, page, frame, sequence, &mut step)?;
            // recovery.K1: this thread owns the slot from `claim_op` to the store of IDLE below.
            self.set_state(frame, op.pending(), &mut step)?;
        }
        step()?;
        // Release: all committed data is stored before. This is the commit.
        slot.state.store(op.committed(), Release);
        if let Some(size) = size {
            self.try_set_size(file, size, &mut step)?;
        }
        for (_, frame) in pages {
            self.set_state(frame, DIRTY, &mut step)?;
        }
        step()?;
        // Release: the size and every DIRTY are stored before; pairs with the next claim.
        slot.state.store(op.idle(), Release);
        Some(())
    }

    /// Takes an idle op slot. There are more than the sensible number of threads; if all are taken, their
    /// owners are at most preempted.
    fn claim_op(self, start: u64, step: &mut impl Steps) -> Option<OpUse> {
        let count = self.ops.len() as u64;
        debug_assert!(count <= u64::from(OPS));
        loop {
            step()?;
            for op in (start..start + count).map(|at| (at % count) as u32) {
                let state = &self.ops[op as usize].state;
                let seen = state.load(Relaxed);
                // Acquire: pairs with the Release of IDLE by the slot's last owner, so that this thread's
                // stores come after all of that owner's.
                if let Some(claimed) = OpUse::claimed(op, seen)
                    && state.compare_exchange(seen, claimed.busy(), Acquire, Relaxed).is_ok()
                {
                    return Some(claimed);
                }
            }
            #[cfg(not(loom))]
            std::thread::yield_now();
            #[cfg(loom)]
            loom::thread::yield_now();
        }
    }

    /// Stores the description of a frame's content; its state is stored after. Caller: owns the frame, and
    /// its record is FREE (recovery.K2), or DIRTY for the same page, whose write-back a failed sync
    /// overtook.
    #[inline]
    fn describe(
        self,
        file: EntryUse,
        page: PageIndex,
        frame: FrameIndex,
        sequence: u64,
        step: &mut impl Steps,
    ) -> Option<()> {
        let record = self.record(frame);
        debug_assert!(
            record.state.load(Relaxed) == FREE || record.page.load(Relaxed) == page.0,
            "a frame is committed for one page"
        );
        step()?;
        record.file.store(file.word(), Relaxed);
        step()?;
        record.page.store(page.0, Relaxed);
        step()?;
        record.sequence.store(sequence, Relaxed);
        Some(())
    }

    #[inline]
    fn set_state(self, frame: FrameIndex, state: u64, step: &mut impl Steps) -> Option<()> {
        step()?;
        // Release: the record's description, and the frame's bytes, are stored before.
        self.record(frame).state.store(state, Release);
        Some(())
    }

    #[inline]
    pub(crate) fn record(self, frame: FrameIndex) -> &'a Record {
        &self.records[frame.0 as usize]
    }

    pub(crate) fn try_clean(self, frame: FrameIndex, mut step: impl Steps) -> Option<()> {
        self.set_state(frame, FREE, &mut step)
    }

    pub(crate) fn try_set_size(
        self,
        file: EntryUse,
        size: u64,
        mut step: impl Steps,
    ) -> Option<()> {
        step()?;
        // Release: it comes after the stores that precede it in the program.
        self.files[file.index as usize].size.store(size, Release);
        Some(())
    }

    pub(crate) fn try_set_intent(
        self,
        file: EntryUse,
        intent: Intent,
        mut step: impl Steps,
    ) -> Option<()> {
        let [kind, start, end] = &self.files[file.index as usize].intent;
        let words = intent.words();
        step()?;
        kind.store(INTENT_NONE, Release);
        step()?;
        start.store(words[1], Release);
        step()?;
        end.store(words[2], Release);
        step()?;
        // Release, all three: no bound is seen with another intent's kind.
        kind.store(words[0], Release);
        Some(())
    }

    pub(crate) fn try_clear_intent(self, file: EntryUse, mut step: impl Steps) -> Option<()> {
        step()?;
        // Release: the size and the records after the operation are stored before.
        self.files[file.index as usize].intent[0].store(INTENT_NONE, Release);
        Some(())
    }

    /// Records the start of a change of the file below the cache, before the call of the backend.
    pub(crate) fn try_begin_change(
        self,
        file: EntryUse,
        changes: ChangeWords,
        mut step: impl Steps,
    ) -> Option<()> {
        let [state, _, reach] = &self.files[file.index as usize].changes;
        // The reach has grown, or no change is in flight yet.
        step()?;
        reach.store(changes.reach, Release);
        step()?;
        // Release: its reach is stored before.
        state.store(changes.state, Release);
        Some(())
    }

    /// Records the end of a change, and the state of the file in `changes`.
    pub(crate) fn try_end_change(
        self,
        file: EntryUse,
        changes: ChangeWords,
        mut step: impl Steps,
    ) -> Option<()> {
        let [state, changed, reach] = &self.files[file.index as usize].changes;
        step()?;
        changed.store(changes.changed_ns, Release);
        step()?;
        // Release: the time is stored before the state that makes it valid.
        state.store(changes.state, Release);
        step()?;
        reach.store(changes.reach, Release);
        Some(())
    }

    /// Initialises the entry of a file; the caller then hands the file to the keeper (recovery.K6). A
    /// change counts as in flight, until the first one that ends.
    pub(crate) fn open_entry(self, file: EntryUse, size: u64) {
        let entry = &self.files[file.index as usize];
        let [state, changed, reach] = &entry.changes;
        entry.intent[0].store(INTENT_NONE, Relaxed);
        state.store(1, Relaxed);
        changed.store(0, Relaxed);
        reach.store(0, Relaxed);
        entry.size.store(size, Relaxed);
        // Release: all of it is stored before.
        entry.life.store(file.used(), Release);
    }

    pub(crate) fn close_entry(self, file: EntryUse) {
        self.files[file.index as usize].life.store(file.unused(), Release);
    }
}
