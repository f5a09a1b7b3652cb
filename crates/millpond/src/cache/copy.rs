//! Copies that may race with the reuse of a frame, or fault on the caller's memory.
//!
//! A hit copies from a frame that the evictor may hand to another page at the same moment; the
//! page word, checked afterwards, says whether the copy counts. A race like that is undefined
//! behaviour for a Rust or C `memcpy`, so these copies are assembly that the compiler knows
//! nothing about (x86-64), or relaxed atomic words (elsewhere).
//!
//! On x86-64 the copy is a single `rep movsb`, which the processor can stop and resume at any
//! byte with `rcx` telling what is left. So a handler of SIGSEGV or SIGBUS can turn a fault on
//! the caller's memory into an error: it continues at [`resume_address`], and the copy returns
//! the number of bytes that it did not copy.

/// Copies `len` bytes from `src` to `dst`; returns how many bytes were left when an access
/// faulted and a handler resumed the copy, 0 when all were copied.
///
/// # Safety
///
/// Both ranges must be valid, `src` for reads and `dst` for writes, except that either may fault
/// where a handler consults [`resume_address`]. They must not overlap. `src` may change during the
/// copy (the bytes copied are then unspecified), and nobody may hold a reference to `dst`.
#[inline]
#[must_use]
pub(crate) unsafe fn copy(dst: *mut u8, src: *const u8, len: usize) -> usize {
    // SAFETY: the caller's promise is the same.
    unsafe { arch::copy(dst, src, len) }
}

/// Sets `len` bytes at `dst` to zero; late readers of the frame may race with it.
///
/// # Safety
///
/// `dst` must be valid for writes of `len` bytes, and nobody may hold a reference to them.
pub(crate) unsafe fn zero(dst: *mut u8, len: usize) {
    // SAFETY: the caller's promise is the same.
    unsafe { arch::zero(dst, len) }
}

/// Where to continue when an access at program counter `pc` faulted, if `pc` is in [`copy`].
#[must_use]
pub(crate) fn resume_address(pc: usize) -> Option<usize> {
    arch::resume_address(pc)
}

#[cfg(target_arch = "x86_64")]
mod arch {
    use std::arch::{asm, global_asm};

    // The System V ABI passes dst in rdi and src in rsi, where `rep movsb` wants them, and has
    // the direction flag clear.
    global_asm!(
        ".pushsection .text.millpond_copy,\"ax\",@progbits",
        ".p2align 5",
        ".hidden millpond_racy_copy",
        ".globl millpond_racy_copy",
        ".type millpond_racy_copy,@function",
        "millpond_racy_copy:",
        "mov rcx, rdx",
        ".hidden millpond_racy_copy_access",
        ".globl millpond_racy_copy_access",
        "millpond_racy_copy_access:",
        "rep movsb",
        ".hidden millpond_racy_copy_resume",
        ".globl millpond_racy_copy_resume",
        "millpond_racy_copy_resume:",
        "mov rax, rcx",
        "ret",
        ".size millpond_racy_copy, . - millpond_racy_copy",
        ".popsection",
    );

    unsafe extern "C" {
        fn millpond_racy_copy(dst: *mut u8, src: *const u8, len: usize) -> usize;
        fn millpond_racy_copy_access();
        fn millpond_racy_copy_resume();
    }

    #[inline]
    pub(super) unsafe fn copy(dst: *mut u8, src: *const u8, len: usize) -> usize {
        // SAFETY: the routine above reads and writes exactly the two ranges that the caller
        // vouches for, and keeps to the C ABI.
        unsafe { millpond_racy_copy(dst, src, len) }
    }

    pub(super) unsafe fn zero(dst: *mut u8, len: usize) {
        // SAFETY: writes exactly the range that the caller vouches for.
        unsafe {
            asm!(
                "rep stosb",
                inout("rcx") len => _,
                inout("rdi") dst => _,
                in("al") 0u8,
                options(nostack, preserves_flags),
            );
        }
    }

    pub(super) fn resume_address(pc: usize) -> Option<usize> {
        (pc == millpond_racy_copy_access as *const () as usize)
            .then_some(millpond_racy_copy_resume as *const () as usize)
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod arch {
    use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};

    pub(super) unsafe fn copy(dst: *mut u8, src: *const u8, len: usize) -> usize {
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

    pub(super) unsafe fn zero(dst: *mut u8, len: usize) {
        for i in 0..len {
            // SAFETY: within the caller's range.
            unsafe { AtomicU8::from_ptr(dst.add(i)).store(0, Relaxed) };
        }
    }

    pub(super) fn resume_address(_pc: usize) -> Option<usize> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_and_zeroes_exactly_the_range() {
        for len in [0, 1, 7, 8, 9, 511, 4096, 4097] {
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
    fn only_the_access_resumes() {
        assert_eq!(resume_address(0), None);
        assert_eq!(resume_address(copies_and_zeroes_exactly_the_range as *const () as usize), None);
    }
}
