//! Hints to the processor, of memory that will be read soon.

/// Has the processor fetch the first bytes of a page, where it can be asked to. `at` may be any
/// address.
#[inline]
pub(crate) fn ask_for(at: *const u8) {
    (0..4).for_each(|line| ask_for_line(at.wrapping_add(64 * line)));
}

/// The same of one line of its caches.
#[inline]
pub(crate) fn ask_for_line<T>(at: *const T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: a hint, which accesses nothing as far as the program can tell.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}
