//! Which descriptor number belongs to which open description.
//!
//! First stop of every call on a descriptor. One word per number:
//!
//! ```text
//! UNKNOWN   not seen opened: inherited, received, or opened where no hook sees it
//! FOREIGN   not a regular file under the served directories
//! INTERNAL  the library's own (the engine's duplicate, the report's stderr)
//! UNSERVED the kernel's, and open for reading only: see `unserved`
//! CLAIMED   about to be served or LEFT: for a moment under the registry lock
//! LEFT      the same as UNSERVED, and the kernel's until it is closed
//! pointer   an `OpenFile`, served or passed
//!
//! open -> UNSERVED -> CLAIMED -> pointer, LEFT      (all but the first: registry lock)
//! open -> pointer
//! ```
//!
//! Reading a slot takes no lock; its description stays valid inside a reading section (see
//! `thread`). Slots of descriptions change under the registry lock only.
//!
//! The table lies in memory that the kernel wipes in a forked child (`MADV_WIPEONFORK`), however
//! the fork was made: in the child every number is UNKNOWN, and [`is_initialised`] is false until
//! the library has started afresh there.

use std::ffi::c_void;
use std::os::fd::RawFd;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

use crate::files::open_file::OpenFile;
use crate::runtime::sys::sys;

/// Highest descriptor number that can be served, plus one: the kernel's default `fs.nr_open`.
pub const SLOTS: usize = 1 << 20;

const UNKNOWN: usize = 0;
const FOREIGN: usize = 1;
const INTERNAL: usize = 2;
const UNSERVED: usize = 3;
const CLAIMED: usize = 4;
const LEFT: usize = 5;
const WORDS_PER_PAGE: usize = 512;

#[repr(C, align(4096))]
struct Table {
    initialised: [AtomicUsize; WORDS_PER_PAGE],
    slots: [AtomicUsize; SLOTS],
}

static TABLE: Table = Table {
    initialised: [const { AtomicUsize::new(0) }; WORDS_PER_PAGE],
    slots: [const { AtomicUsize::new(UNKNOWN) }; SLOTS],
};
/// One more than the highest slot ever set.
static SLOTS_USED: AtomicUsize = AtomicUsize::new(0);

/// The state of a descriptor number.
#[derive(Clone, Copy)]
pub enum NumberState {
    Unknown,
    Foreign,
    Internal,
    Unserved,
    Claimed,
    Left,
    File(&'static OpenFile),
}

impl NumberState {
    fn to_word(self) -> usize {
        match self {
            NumberState::Unknown => UNKNOWN,
            NumberState::Foreign => FOREIGN,
            NumberState::Internal => INTERNAL,
            NumberState::Unserved => UNSERVED,
            NumberState::Claimed => CLAIMED,
            NumberState::Left => LEFT,
            NumberState::File(description) => std::ptr::from_ref(description).expose_provenance(),
        }
    }
}

pub fn initialise() {
    const WIPE_ON_FORK: usize = 18;
    // SAFETY: advice about our own static, page-aligned and a whole number of pages long. Where
    // the kernel refuses, the handler of `fork` clears the table instead.
    unsafe { sys!(libc::SYS_madvise, &raw const TABLE, size_of::<Table>(), WIPE_ON_FORK) };
    TABLE.initialised[0].store(1, Release);
}

/// The table's whole pages.
pub fn memory() -> (*const c_void, usize) {
    ((&raw const TABLE).cast(), size_of::<Table>())
}

pub fn is_initialised() -> bool {
    TABLE.initialised[0].load(Acquire) != 0
}

/// In a forked child: forgets all numbers.
pub fn after_fork() {
    for slot in &TABLE.slots[..SLOTS_USED.swap(0, Relaxed)] {
        if slot.load(Relaxed) != UNKNOWN {
            slot.store(UNKNOWN, Relaxed);
        }
    }
}

/// The description at `fd`. The caller is in a reading section, or holds the registry lock.
#[inline]
pub fn description(fd: RawFd) -> Option<&'static OpenFile> {
    match get(fd) {
        NumberState::File(description) => Some(description),
        _ => None,
    }
}

#[inline]
pub fn get(fd: RawFd) -> NumberState {
    let Some(slot) = TABLE.slots.get(fd as usize) else {
        return NumberState::Foreign;
    };
    // Acquire: pairs with the Release in `set`, which follows the filling of the description.
    match slot.load(Acquire) {
        UNKNOWN => NumberState::Unknown,
        FOREIGN => NumberState::Foreign,
        INTERNAL => NumberState::Internal,
        UNSERVED => NumberState::Unserved,
        CLAIMED => NumberState::Claimed,
        LEFT => NumberState::Left,
        // SAFETY: other values are pointers that `set` stored; descriptions are never unmapped.
        pointer => NumberState::File(unsafe { &*(pointer as *const OpenFile) }),
    }
}

/// Sets the state of `fd`; for descriptions under the registry lock. A number past the end
/// of the table stays foreign.
pub fn set(fd: RawFd, slot: NumberState) -> bool {
    let Some(word) = TABLE.slots.get(fd as usize) else {
        return false;
    };
    use_slot(fd);
    // Release: pairs with the Acquire in `get`.
    word.store(slot.to_word(), Release);
    true
}

/// Changes the state of `fd` from `old`, if it is that.
#[inline]
pub fn try_change(fd: RawFd, old: NumberState, new: NumberState) -> bool {
    let Some(word) = TABLE.slots.get(fd as usize) else { return false };
    use_slot(fd);
    // AcqRel: as in `get` and `set`.
    word.compare_exchange(old.to_word(), new.to_word(), AcqRel, Relaxed).is_ok()
}

fn use_slot(fd: RawFd) {
    if SLOTS_USED.load(Relaxed) <= fd as usize {
        SLOTS_USED.fetch_max((fd as usize + 1).min(SLOTS), Relaxed);
    }
}

/// Forgets `fd` if it is still known as `old`. A lost race means that another thread has described the number.
#[inline]
pub fn forget(fd: RawFd, old: NumberState) -> bool {
    try_change(fd, old, NumberState::Unknown)
}

/// The numbers of a description. The registry is locked.
pub fn numbers_of(description: &OpenFile) -> Vec<RawFd> {
    known(0, u32::MAX)
        .filter(|(_, slot)| matches!(slot, NumberState::File(other) if std::ptr::eq(*other, description)))
        .map(|(fd, _)| fd)
        .collect()
}

/// The numbers from `first` to `last` that are not UNKNOWN, in order.
pub fn known(first: u32, last: u32) -> impl Iterator<Item = (RawFd, NumberState)> {
    let end = SLOTS_USED.load(Relaxed).min((last as usize).saturating_add(1));
    (first as usize..end).filter_map(|fd| {
        let slot = get(fd as RawFd);
        (!matches!(slot, NumberState::Unknown)).then_some((fd as RawFd, slot))
    })
}
