//! Copies by relaxed atomic words, for processors without an assembly routine. Faults are not
//! resumed.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};

pub(super) unsafe fn copy(dst: *mut u8, src: *const u8, len: usize, _is_far: bool) -> usize {
    let mut done = 0;
    if (dst as usize | src as usize) % 8 == 0 {
        while done + 8 <= len {
            // SAFETY: within the caller's ranges, and aligned for u64.
            unsafe {
                let word = AtomicU64::from_ptr(src.add(done).cast_mut().cast()).load(Relaxed);
                AtomicU64::from_ptr(dst.add(done).cast()).store(word, Relaxed);
            }
            done += 8;
        }
    }
    while done < len {
        // SAFETY: within the caller's ranges.
        unsafe {
            let byte = AtomicU8::from_ptr(src.add(done).cast_mut()).load(Relaxed);
            AtomicU8::from_ptr(dst.add(done)).store(byte, Relaxed);
        }
        done += 1;
    }
    0
}

pub(super) unsafe fn copy_away(dst: *mut u8, src: *const u8, len: usize) -> usize {
    // SAFETY: the caller's promise is the same.
    unsafe { copy(dst, src, len, false) }
}

pub(super) unsafe fn zero(dst: *mut u8, len: usize) {
    for i in 0..len {
        // SAFETY: within the caller's range.
        unsafe { AtomicU8::from_ptr(dst.add(i)).store(0, Relaxed) };
    }
}

pub(super) fn resume_address(_pc: usize) -> Option<usize> {
    None
}
