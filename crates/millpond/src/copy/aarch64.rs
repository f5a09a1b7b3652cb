//! Copies through vector registers, 64 bytes at a time (see `copy`).

use std::arch::global_asm;

// The procedure call standard passes dst in x0, src in x1 and the length in x2, and lets us change x0 to x17 and v0
// to v7.
global_asm!(
    ".pushsection .text.millpond_copy,\"ax\",@progbits",
    ".p2align 6",
    ".hidden millpond_copy_wide",
    ".globl millpond_copy_wide",
    ".type millpond_copy_wide,@function",
    "millpond_copy_wide:",
    ".cfi_startproc",
    // x4, x5: the ends of both.
    "add x4, x1, x2",
    "add x5, x0, x2",
    "cmp x2, #32",
    "b.lo 4f",
    "cmp x2, #128",
    "b.lo 3f",
    "sub x6, x5, #64",
    "2:",
    // Hardware prefetching ends with each page.
    "add x7, x1, #4096",
    "cmp x7, x4",
    "b.hs 5f",
    "prfm pldl2keep, [x7]",
    "5:",
    "ldp q0, q1, [x1]",
    "ldp q2, q3, [x1, #32]",
    "stp q0, q1, [x0]",
    "stp q2, q3, [x0, #32]",
    "add x1, x1, #64",
    "add x0, x0, #64",
    "cmp x0, x6",
    "b.lo 2b",
    // The rest, together with bytes that were copied already.
    "ldp q0, q1, [x4, #-64]",
    "ldp q2, q3, [x4, #-32]",
    "stp q0, q1, [x5, #-64]",
    "stp q2, q3, [x5, #-32]",
    "mov x0, #0",
    "ret",
    // 32 to 127 bytes.
    "3:",
    "sub x6, x5, #32",
    "6:",
    "ldp q0, q1, [x1]",
    "stp q0, q1, [x0]",
    "add x1, x1, #32",
    "add x0, x0, #32",
    "cmp x0, x6",
    "b.lo 6b",
    "ldp q0, q1, [x4, #-32]",
    "stp q0, q1, [x5, #-32]",
    "mov x0, #0",
    "ret",
    // Fewer.
    "4:",
    "cbz x2, 8f",
    "7:",
    "ldrb w6, [x1], #1",
    "strb w6, [x0], #1",
    "cmp x1, x4",
    "b.lo 7b",
    "8:",
    "mov x0, #0",
    "ret",
    ".hidden millpond_copy_wide_resume",
    ".globl millpond_copy_wide_resume",
    "millpond_copy_wide_resume:",
    "mov x0, #1",
    "ret",
    ".cfi_endproc",
    ".size millpond_copy_wide, . - millpond_copy_wide",
    //
    ".p2align 4",
    ".hidden millpond_zero",
    ".globl millpond_zero",
    ".type millpond_zero,@function",
    "millpond_zero:",
    ".cfi_startproc",
    "add x5, x0, x1",
    "movi v0.2d, #0",
    "cmp x1, #32",
    "b.lo 4f",
    "sub x6, x5, #32",
    "2:",
    "stp q0, q0, [x0]",
    "add x0, x0, #32",
    "cmp x0, x6",
    "b.lo 2b",
    "stp q0, q0, [x5, #-32]",
    "ret",
    "4:",
    "cbz x1, 6f",
    "5:",
    "strb wzr, [x0], #1",
    "cmp x0, x5",
    "b.lo 5b",
    "6:",
    "ret",
    ".cfi_endproc",
    ".size millpond_zero, . - millpond_zero",
    ".popsection",
);

unsafe extern "C" {
    fn millpond_copy_wide(dst: *mut u8, src: *const u8, len: usize) -> usize;
    fn millpond_copy_wide_resume();
    fn millpond_zero(dst: *mut u8, len: usize);
}

#[inline]
pub(super) unsafe fn copy(dst: *mut u8, src: *const u8, len: usize, _is_far: bool) -> usize {
    // SAFETY: the routine reads and writes exactly the two ranges that the caller vouches for, and keeps to the C
    // ABI.
    unsafe { millpond_copy_wide(dst, src, len) }
}

#[inline]
pub(super) unsafe fn copy_away(dst: *mut u8, src: *const u8, len: usize) -> usize {
    // SAFETY: the caller's promise is the same.
    unsafe { copy(dst, src, len, false) }
}

pub(super) unsafe fn zero(dst: *mut u8, len: usize) {
    // SAFETY: writes exactly the range that the caller vouches for.
    unsafe { millpond_zero(dst, len) }
}

pub(super) fn resume_address(pc: usize) -> Option<usize> {
    let start = millpond_copy_wide as *const () as usize;
    let resume = millpond_copy_wide_resume as *const () as usize;
    (start..resume).contains(&pc).then_some(resume)
}
