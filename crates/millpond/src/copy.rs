//! Copies that may race with the reuse of a frame, or fault on the caller's memory.
//!
//! A hit copies from a frame that the evictor may hand to another page at the same moment; the page
//! word, checked afterwards, shows whether the copy is valid. Such a race is undefined behaviour
//! for a Rust or C `memcpy`, so these copies are assembly that is opaque to the compiler (x86-64,
//! AArch64), or relaxed atomic words (elsewhere).
//!
//! On these two a handler of SIGSEGV or SIGBUS can turn a fault on the caller's memory into an
//! error: it continues at [`resume_address`], and the copy returns that it is incomplete. On
//! AArch64 there is one routine, which moves 64 bytes at a time through vector registers; on x86-64
//! there are three. The plain one is a `rep movsb`. Where the processor has AVX2, copies of 32
//! bytes and more go through its registers instead: those loads start before the page word that
//! names the frame has arrived (see `Frames::address_predicted`), which string instructions do not.
//! Copies of more than 4 KiB, or from 4 KiB on where the source is likely to be in memory only,
//! prefetch the source 4 KiB ahead, as hardware prefetching ends with each page. The third stores
//! past the processor's caches, for long writes: their memory need not be read before it is
//! overwritten.

#[cfg(all(target_arch = "aarch64", not(scheduled)))]
mod aarch64;

#[cfg(scheduled)]
mod pieces;

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64", scheduled)))]
mod words;

#[cfg(all(target_arch = "x86_64", not(scheduled)))]
mod x86_64;

#[cfg(all(target_arch = "aarch64", not(scheduled)))]
use aarch64 as arch;
#[cfg(scheduled)]
use pieces as arch;
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64", scheduled)))]
use words as arch;
#[cfg(all(target_arch = "x86_64", not(scheduled)))]
use x86_64 as arch;

/// Copies `len` bytes from `src` to `dst`. Returns 0 when all were copied, and another value if an
/// access faulted and a handler resumed the copy.
///
/// # Safety
///
/// Both ranges must be valid, `src` for reads and `dst` for writes, except that either may fault
/// where a handler consults [`resume_address`]. They must not overlap. `src` may change during the
/// copy (the bytes copied are then unspecified), and no reference to `dst` may exist.
#[inline]
#[must_use]
pub(crate) unsafe fn copy(dst: *mut u8, src: *const u8, len: usize) -> usize {
    // SAFETY: the caller's guarantee is the same.
    unsafe { arch::copy(dst, src, len, false) }
}

/// [`copy`] from a source that may be farther away.
///
/// # Safety
///
/// As for [`copy`].
#[inline]
#[must_use]
pub(crate) unsafe fn copy_from(dst: *mut u8, src: *const u8, len: usize, source: Source) -> usize {
    // SAFETY: the caller's promise is the same.
    unsafe { arch::copy(dst, src, len, source == Source::Far) }
}

/// [`copy`] of bytes that will not be read soon: past the processor's caches, if possible.
///
/// # Safety
///
/// As for [`copy`].
#[inline]
#[must_use]
pub(crate) unsafe fn copy_away(dst: *mut u8, src: *const u8, len: usize) -> usize {
    // SAFETY: the caller's promise is the same.
    unsafe { arch::copy_away(dst, src, len) }
}

/// Zeroes `len` bytes at `dst`; as [`copy`] where that may fault.
///
/// # Safety
///
/// As for [`copy`].
#[must_use]
pub(crate) unsafe fn copy_zeros(dst: *mut u8, len: usize) -> usize {
    static ZEROS: [u8; 4096] = [0; 4096];
    for at in (0..len).step_by(ZEROS.len()) {
        let part = (len - at).min(ZEROS.len());
        // SAFETY: the caller's promise, of a part.
        if unsafe { copy(dst.add(at), ZEROS.as_ptr(), part) } > 0 {
            return len - at;
        }
    }
    0
}

/// Prefetches the first bytes of a page, if the processor supports that. `at` may be any address.
#[inline]
pub(crate) fn ask_for(at: *const u8) {
    (0..4).for_each(|line| prefetch_line(at.wrapping_add(64 * line)));
}

/// Prefetches one cache line.
#[inline]
pub(crate) fn prefetch_line<T>(at: *const T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: a hint, which has no architectural memory access.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// The likely position of a source.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    /// In one of the processor's caches.
    Near,
    /// In memory.
    Far,
}

/// Sets `len` bytes at `dst` to zero. Late readers of the frame may race with it.
///
/// # Safety
///
/// `dst` must be valid for writes of `len` bytes, and no reference to them may exist.
pub(crate) unsafe fn zero(dst: *mut u8, len: usize) {
    // SAFETY: the caller's promise is the same.
    unsafe { arch::zero(dst, len) }
}

/// The address to continue at when an access at program counter `pc` faulted, if `pc` is in
/// [`copy`].
#[must_use]
pub(crate) fn resume_address(pc: usize) -> Option<usize> {
    arch::resume_address(pc)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_and_zeroes_exactly_the_range() {
        for len in (0..300).chain([511, 512, 4095, 4096, 4097, 4200, 8191, 8192, 70_000]) {
            let src: Vec<u8> = (0..len + 16).map(|i| i as u8).collect();
            let mut dst = vec![0xEE; len + 16];
            // SAFETY: both ranges lie in their vectors.
            let left = unsafe { copy(dst.as_mut_ptr().add(3), src.as_ptr().add(8), len) };
            assert_eq!(left, 0);
            assert_eq!(&dst[3..3 + len], &src[8..8 + len]);
            assert!(dst[..3].iter().chain(&dst[3 + len..]).all(|&byte| byte == 0xEE));
            // SAFETY: the range lies in the vector.
            unsafe { zero(dst.as_mut_ptr().add(3), len) };
            assert!(dst[3..3 + len].iter().all(|&byte| byte == 0));
            assert_eq!(dst[3 + len], 0xEE);
        }
    }

    #[test]
    fn copies_away_exactly_the_range() {
        let (src, mut dst) = (vec![7u8; 9000], vec![0xEEu8; 9000]);
        for (from, len) in [(0, 128), (32, 4096), (0, 4097), (5, 4096), (64, 0), (32, 8192)] {
            dst.fill(0xEE);
            let skip = dst.as_ptr().align_offset(32) + from;
            // SAFETY: both ranges lie in their vectors.
            let left = unsafe { copy_away(dst.as_mut_ptr().add(skip), src.as_ptr(), len) };
            assert_eq!(left, 0);
            assert!(dst[skip..skip + len].iter().all(|&byte| byte == 7));
            assert!(dst[..skip].iter().chain(&dst[skip + len..]).all(|&byte| byte == 0xEE));
        }
    }

    #[test]
    fn only_the_access_resumes() {
        assert_eq!(resume_address(0), None);
        assert_eq!(resume_address(copies_and_zeroes_exactly_the_range as *const () as usize), None);
    }
}
