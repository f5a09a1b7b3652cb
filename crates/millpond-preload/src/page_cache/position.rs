//! The file offset of descriptions that this process alone has.
//!
//! ```text
//! SHARED        the kernel has it, for good: the process did not open the description, or shares it
//! UNKNOWN       the kernel has it
//! SYNCED value  the kernel has it, and this is it
//! HERE value    the kernel's is old
//! LOCKED owner  a call of the kernel's that moves it is under way; the kernel has it
//! ```
//!
//! Each change is one compare-exchange, so a description that is shared while a call is under way stays SHARED.
//!
//! A read moves it by one compare-exchange. A write by `write` is the kernel's, which takes the kernel's offset: it
//! locks the word, gives the offset to the kernel if that is old, and unlocks the word with the new offset.

use std::os::fd::RawFd;
use std::sync::atomic::Ordering::Relaxed;

use crate::files::offset::{kernel_offset, push_offset};
use crate::page_cache::descriptors::{
    self, CLOSES, FILE, Number, OPENED, SHARED, UNKNOWN, is_on, kind,
};
use crate::runtime::sys::sys;
use crate::runtime::thread;

const TAG: u64 = 0b11 << 62;
const SYNCED: u64 = 0b01 << 62;
const HERE: u64 = 0b10 << 62;
const LOCKED: u64 = 0b11 << 62;
/// In a locked word, whose owner is an even address: another call has moved the offset.
const DISTURBED: u64 = 1;
/// In a locked word: it is SHARED when the lock ends.
const SHARES: u64 = 2;
/// Offsets up to here are valid on every file system.
const SURELY_VALID: i64 = i32::MAX as i64;
/// How often a thread looks whether a word is unlocked, before the call is the kernel's alone.
const LOOKS: u32 = 10_000;

fn word_of(tag: u64, value: i64) -> u64 {
    tag | value as u64
}

/// The offset at which a read of the file at `fd` begins, and the word that said so; `None`: the kernel's.
#[inline]
pub fn begin_read(fd: RawFd, number: &Number) -> Option<(u64, u64)> {
    let word = number.offset.load(Relaxed);
    match word & TAG {
        SYNCED | HERE => Some((word & !TAG, word)),
        _ if word == SHARED => None,
        _ => begin_read_slow(fd, number),
    }
}

#[cold]
fn begin_read_slow(fd: RawFd, number: &Number) -> Option<(u64, u64)> {
    let word = await_unlocked(number, !thread::record().has_writes())?;
    match word {
        UNKNOWN => {}
        SHARED => return None,
        _ => return Some((word & !TAG, word)),
    }
    let value = kernel_offset(fd) as i64;
    if value < 0 {
        return None;
    }
    let word = word_of(SYNCED, value);
    number.offset.compare_exchange(UNKNOWN, word, Relaxed, Relaxed).ok()?;
    Some((value as u64, word))
}

/// Whether this process alone has the description.
pub fn is_own(number: &Number) -> bool {
    number.offset.load(Relaxed) != SHARED
}

/// The read that began with `word` has ended at `end`. Whether no other call has moved the offset.
#[inline]
pub fn end_read(number: &Number, word: u64, end: u64) -> bool {
    number.offset.compare_exchange(word, word_of(HERE, end as i64), Relaxed, Relaxed).is_ok()
}

/// The word, when it is not locked. `None`: it stays so, or the caller may not wait, as its thread may have the lock
/// in a call that a signal handler has interrupted.
fn await_unlocked(number: &Number, may_wait: bool) -> Option<u64> {
    for _ in 0..LOOKS {
        let word = number.offset.load(Relaxed);
        if word & TAG != LOCKED {
            return Some(word);
        }
        if !may_wait {
            return None;
        }
        std::thread::yield_now();
    }
    None
}

/// Locks the offset of `fd` for a call of the kernel's that moves it, and has the kernel know it: where the call
/// begins. `None`: the offset is the kernel's alone. `owner`: an address of the caller's, which [`unlock`] gets in any
/// case.
pub fn lock(fd: RawFd, number: &Number, owner: usize, may_wait: bool) -> Option<u64> {
    loop {
        let word = await_unlocked(number, may_wait)?;
        if word == SHARED {
            return None;
        }
        let locked = LOCKED | owner as u64;
        if number.offset.compare_exchange(word, locked, Relaxed, Relaxed).is_err() {
            continue;
        }
        let value = word & !TAG;
        return match word & TAG {
            HERE => {
                push_offset(fd, value);
                Some(value)
            }
            SYNCED => Some(value),
            _ => u64::try_from(kernel_offset(fd)).ok(),
        };
    }
}

/// Ends a lock, if `owner` has it. `value`: where the offset is now; `None`: the kernel knows.
pub fn unlock(number: &Number, owner: usize, value: Option<u64>) {
    let locked = LOCKED | owner as u64;
    let next = |word| match word ^ locked {
        0 => Some(value.map_or(UNKNOWN, |value| word_of(SYNCED, value as i64))),
        DISTURBED => Some(UNKNOWN),
        bits if bits & !(DISTURBED | SHARES) == 0 => Some(SHARED),
        _ => None,
    };
    let _ = number.offset.fetch_update(Relaxed, Relaxed, next);
}

/// A call of the kernel's moves the offset, whether it is locked or not: only the kernel knows it then. After
/// [`release`].
pub fn disturb(number: &Number) {
    let next = |word| match word & TAG {
        LOCKED => Some(word | DISTURBED),
        _ if word == SHARED => None,
        _ => Some(UNKNOWN),
    };
    let _ = number.offset.fetch_update(Relaxed, Relaxed, next);
}

/// Gives the offset to the kernel, and sets the word to `next`.
fn move_offset_to_kernel(fd: RawFd, number: &Number, next: u64) {
    loop {
        let word = number.offset.load(Relaxed);
        let changed = match word & TAG {
            // The kernel has it.
            LOCKED if next == SHARED => word | SHARES,
            LOCKED => return,
            _ if word == SHARED => return,
            HERE => {
                push_offset(fd, word & !TAG);
                next
            }
            _ => next,
        };
        if number.offset.compare_exchange(word, changed, Relaxed, Relaxed).is_ok() {
            return;
        }
    }
}

/// Before a call of the kernel's that uses the offset of `fd`: the kernel has it.
pub fn release(fd: RawFd) {
    if let Some(number) = descriptors::get(fd).filter(|number| kind(number.state()) == FILE) {
        move_offset_to_kernel(fd, number, UNKNOWN);
    }
}

/// The number is replaced, or closed where no hook sees it. It may stay open: the kernel gets its offset.
pub fn forget(fd: RawFd) {
    release(fd);
    descriptors::forget_closed(fd);
}

/// Before another number or another process gets the description at `fd`: its offset is the kernel's from then on.
pub fn share(fd: RawFd) {
    if let Some(number) = descriptors::get(fd).filter(|number| is_kept(number)) {
        move_offset_to_kernel(fd, number, SHARED);
    }
}

/// Before a fork: the child has a part of every description.
pub fn release_for_fork() {
    descriptors::all().filter(|(_, number)| is_kept(number)).for_each(|(fd, _)| share(fd));
}

/// Before an exec or a spawn: the new program gets the numbers that exec does not close.
pub fn release_for_exec() {
    let inherited = |number: &Number| is_kept(number) && !number.has(CLOSES);
    descriptors::all().filter(|(_, number)| inherited(number)).for_each(|(fd, _)| share(fd));
}

fn is_kept(number: &Number) -> bool {
    number.offset.load(Relaxed) != SHARED && matches!(kind(number.state()), OPENED | FILE)
}

/// `lseek`, in the kernel's form.
pub fn seek(fd: RawFd, offset: i64, whence: i32) -> isize {
    // SAFETY: no memory involved.
    let by_kernel = || unsafe { sys!(libc::SYS_lseek, fd, offset, whence) };
    let known = descriptors::get(fd)
        .filter(|number| kind(number.state()) == FILE && is_on())
        .filter(|number| number.offset.load(Relaxed) != SHARED);
    let Some(number) = known.filter(|_| !thread::record().is_inside()) else { return by_kernel() };
    let word = number.offset.load(Relaxed);
    if matches!(word & TAG, SYNCED | HERE) {
        let old = (word & !TAG) as i64;
        let new = match whence {
            libc::SEEK_SET => Some(offset),
            libc::SEEK_CUR => old.checked_add(offset),
            _ => None,
        };
        let new = new.filter(|new| (0..=SURELY_VALID).contains(new));
        if let Some(new) = new {
            let next = if new == old { word } else { word_of(HERE, new) };
            if number.offset.compare_exchange(word, next, Relaxed, Relaxed).is_ok() {
                return new as isize;
            }
        }
    }
    // A seek that fails leaves the offset where it was.
    release(fd);
    disturb(number);
    let result = by_kernel();
    if result >= 0 {
        let word = word_of(SYNCED, result as i64);
        let _ = number.offset.compare_exchange(UNKNOWN, word, Relaxed, Relaxed);
    }
    result
}
