//! Copies by string instructions, and through AVX2 registers (see `copy`).

use std::arch::{asm, global_asm};

// The System V ABI passes dst in rdi, src in rsi and the length in rdx, has the direction flag
// clear, and lets us change rax, rcx, r8 to r10 and the vector registers.
global_asm!(
    ".pushsection .text.millpond_copy,\"ax\",@progbits",
    ".p2align 6",
    ".hidden millpond_copy_plain",
    ".globl millpond_copy_plain",
    ".type millpond_copy_plain,@function",
    "millpond_copy_plain:",
    ".cfi_startproc",
    "mov rcx, rdx",
    ".hidden millpond_copy_plain_access",
    ".globl millpond_copy_plain_access",
    "millpond_copy_plain_access:",
    "rep movsb",
    ".hidden millpond_copy_plain_resume",
    ".globl millpond_copy_plain_resume",
    "millpond_copy_plain_resume:",
    "mov rax, rcx",
    "ret",
    ".cfi_endproc",
    ".size millpond_copy_plain, . - millpond_copy_plain",
    //
    ".p2align 6",
    ".hidden millpond_copy_wide",
    ".globl millpond_copy_wide",
    ".type millpond_copy_wide,@function",
    "millpond_copy_wide:",
    ".cfi_startproc",
    // r10: the end of the source. rax, rcx: the last 128 bytes of both. The fourth argument, in rcx
    // at first, is the length from which the source is prefetched.
    "lea r10, [rsi + rdx]",
    "cmp rdx, 256",
    "jb 4f",
    "cmp rdx, rcx",
    "lea rax, [rdi + rdx - 128]",
    "lea rcx, [rsi + rdx - 128]",
    "jb 3f",
    // Prefetch the first 4 KiB.
    "mov r8, rsi",
    "lea r9, [rsi + 4096]",
    "2:",
    "prefetcht1 [r8]",
    "prefetcht1 [r8 + 64]",
    "add r8, 128",
    "cmp r8, r9",
    "jb 2b",
    "3:",
    "lea r8, [rsi + 4096]",
    "cmp r8, r10",
    "jae 5f",
    "prefetcht1 [r8]",
    "prefetcht1 [r8 + 64]",
    "5:",
    "vmovdqu ymm0, [rsi]",
    "vmovdqu ymm1, [rsi + 32]",
    "vmovdqu ymm2, [rsi + 64]",
    "vmovdqu ymm3, [rsi + 96]",
    "vmovdqu [rdi], ymm0",
    "vmovdqu [rdi + 32], ymm1",
    "vmovdqu [rdi + 64], ymm2",
    "vmovdqu [rdi + 96], ymm3",
    "add rsi, 128",
    "add rdi, 128",
    "cmp rdi, rax",
    "jb 3b",
    // The rest, together with bytes that were copied already.
    "vmovdqu ymm0, [rcx]",
    "vmovdqu ymm1, [rcx + 32]",
    "vmovdqu ymm2, [rcx + 64]",
    "vmovdqu ymm3, [rcx + 96]",
    "vmovdqu [rax], ymm0",
    "vmovdqu [rax + 32], ymm1",
    "vmovdqu [rax + 64], ymm2",
    "vmovdqu [rax + 96], ymm3",
    "vzeroupper",
    "xor eax, eax",
    "ret",
    // 32 to 255 bytes.
    "4:",
    "lea rax, [rdi + rdx - 32]",
    "lea rcx, [rsi + rdx - 32]",
    "6:",
    "vmovdqu ymm0, [rsi]",
    "vmovdqu [rdi], ymm0",
    "add rsi, 32",
    "add rdi, 32",
    "cmp rdi, rax",
    "jb 6b",
    "vmovdqu ymm0, [rcx]",
    "vmovdqu [rax], ymm0",
    "vzeroupper",
    "xor eax, eax",
    "ret",
    ".hidden millpond_copy_wide_resume",
    ".globl millpond_copy_wide_resume",
    "millpond_copy_wide_resume:",
    "vzeroupper",
    "mov eax, 1",
    "ret",
    ".cfi_endproc",
    ".size millpond_copy_wide, . - millpond_copy_wide",
    //
    ".p2align 6",
    ".hidden millpond_copy_stream",
    ".globl millpond_copy_stream",
    ".type millpond_copy_stream,@function",
    "millpond_copy_stream:",
    ".cfi_startproc",
    "lea r10, [rsi + rdx]",
    "2:",
    "vmovdqu ymm0, [rsi]",
    "vmovdqu ymm1, [rsi + 32]",
    "vmovdqu ymm2, [rsi + 64]",
    "vmovdqu ymm3, [rsi + 96]",
    "vmovntdq [rdi], ymm0",
    "vmovntdq [rdi + 32], ymm1",
    "vmovntdq [rdi + 64], ymm2",
    "vmovntdq [rdi + 96], ymm3",
    "add rsi, 128",
    "add rdi, 128",
    "cmp rsi, r10",
    "jb 2b",
    "sfence",
    "vzeroupper",
    "xor eax, eax",
    "ret",
    ".hidden millpond_copy_stream_resume",
    ".globl millpond_copy_stream_resume",
    "millpond_copy_stream_resume:",
    "sfence",
    "vzeroupper",
    "mov eax, 1",
    "ret",
    ".cfi_endproc",
    ".size millpond_copy_stream, . - millpond_copy_stream",
    ".popsection",
);

unsafe extern "C" {
    fn millpond_copy_plain(dst: *mut u8, src: *const u8, len: usize) -> usize;
    fn millpond_copy_plain_access();
    fn millpond_copy_plain_resume();
    fn millpond_copy_wide(dst: *mut u8, src: *const u8, len: usize, ahead_from: usize) -> usize;
    fn millpond_copy_wide_resume();
    fn millpond_copy_stream(dst: *mut u8, src: *const u8, len: usize) -> usize;
    fn millpond_copy_stream_resume();
}

/// The block of the streaming routine, which is stored to memory aligned to a quarter of it.
const STREAM_BYTES: usize = 128;

/// The minimum length for the wide routine.
const WIDE_BYTES_MIN: usize = 32;

#[inline]
pub(super) unsafe fn copy(dst: *mut u8, src: *const u8, len: usize, is_far: bool) -> usize {
    // SAFETY: both routines read and write exactly the two ranges that the caller guarantees and
    // keep to the C ABI; the length and the instructions that the wide one needs were tested for.
    unsafe {
        if len >= WIDE_BYTES_MIN && is_x86_feature_detected!("avx2") {
            // The routine prefetches 4 KiB at once, so no less than that.
            let ahead_from = 4096 + usize::from(!is_far);
            millpond_copy_wide(dst, src, len, ahead_from)
        } else {
            millpond_copy_plain(dst, src, len)
        }
    }
}

#[inline]
pub(super) unsafe fn copy_away(dst: *mut u8, src: *const u8, len: usize) -> usize {
    let fits =
        len > 0 && len.is_multiple_of(STREAM_BYTES) && dst.addr().is_multiple_of(STREAM_BYTES / 4);
    // SAFETY: as above; the instructions of the routine were tested for. Its stores are in order
    // with those that follow it: it ends with a fence.
    unsafe {
        if fits && is_x86_feature_detected!("avx2") {
            millpond_copy_stream(dst, src, len)
        } else {
            copy(dst, src, len, false)
        }
    }
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
    let address = |label: unsafe extern "C" fn()| label as *const () as usize;
    let wide = millpond_copy_wide as *const () as usize..address(millpond_copy_wide_resume);
    let stream = millpond_copy_stream as *const () as usize..address(millpond_copy_stream_resume);
    if pc == address(millpond_copy_plain_access) {
        Some(address(millpond_copy_plain_resume))
    } else if stream.contains(&pc) {
        Some(address(millpond_copy_stream_resume))
    } else {
        wide.contains(&pc).then_some(address(millpond_copy_wide_resume))
    }
}
