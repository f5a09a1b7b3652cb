//! The memory of threads' counts (`count_words` has their form).
//!
//! - **B1** A block is never unmapped, and belongs to one thread record permanently.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};

use crate::runtime::count_words::WORDS;
use crate::runtime::sys::{self, PRIVATE};

/// Padded so that two threads never share a line.
#[repr(C, align(128))]
pub struct CountBlock([AtomicU64; WORDS]);

impl CountBlock {
    #[inline]
    pub fn word(&self, word: usize) -> &AtomicU64 {
        &self.0[word]
    }
}

const FIRST_MAX: usize = 32;

/// The first blocks, which need no system call.
static FIRST: [CountBlock; FIRST_MAX] =
    [const { CountBlock([const { AtomicU64::new(0) }; WORDS]) }; FIRST_MAX];
static IS_FIRST_USED: AtomicBool = AtomicBool::new(false);

/// `count` consecutive blocks, for new records. Mapped by a direct system call: a signal handler may need them.
pub fn take(count: usize) -> *mut CountBlock {
    if count <= FIRST_MAX && !IS_FIRST_USED.swap(true, Relaxed) {
        return FIRST.as_ptr().cast_mut();
    }
    map(count * size_of::<CountBlock>()).cast()
}

/// Zero bytes in a new private mapping, which is never unmapped.
pub fn map(bytes: usize) -> *mut u8 {
    sys::map(bytes, PRIVATE, -1).unwrap_or_else(|| std::process::abort())
}
