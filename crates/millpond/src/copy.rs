//! Copies that may race with the reuse of a frame, or fault on the caller's memory.
//!
//! A hit copies from a frame that the evictor may hand to another page at the same moment; the
//! page word, checked afterwards, says whether the copy counts. A race like that is undefined
//! behaviour for a Rust or C `memcpy`, so these copies are assembly that the compiler knows
//! nothing about (x86-64), or relaxed atomic words (elsewhere).
//!
//! On x86-64 a handler of SIGSEGV or SIGBUS can turn a fault on the caller's memory into an error:
//! it continues at [`resume_address`], and the copy returns that it was cut short. There are three
//! routines. The plain one is a `rep movsb`. Where the processor has AVX2, copies of 32 bytes and
//! more go through its registers instead: those loads start before the page word that names the
//! frame has arrived (see `Frames::address_guessed`), which string instructions do not. Copies of
//! more than 4 KiB, or from 4 KiB on where the source is likely to be in memory only, ask for the
//! source 4 KiB ahead, as hardware prefetching ends with each page. The third stores past the
//! processor's caches, for long writes: their memory need not be read before it is overwritten.

/// Copies `len` bytes from `src` to `dst`; returns 0 when all were copied, and something else if an
/// access faulted and a handler resumed the copy.
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
    unsafe { arch::copy(dst, src, len, Source::Near) }
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
    unsafe { arch::copy(dst, src, len, source) }
}

/// [`copy`] of bytes that nobody reads soon: past the processor's caches, where it can.
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

/// Where a source is likely to be.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    /// In one of the processor's caches.
    Near,
    /// In memory.
    Far,
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

#[cfg(all(target_arch = "x86_64", not(scheduled)))]
mod arch {
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
        // r10: the end of the source. rax, rcx: the last 128 bytes of both. The fourth argument,
        // in rcx at first, is the length from which to ask for the source ahead.
        "lea r10, [rsi + rdx]",
        "cmp rdx, 256",
        "jb 4f",
        "cmp rdx, rcx",
        "lea rax, [rdi + rdx - 128]",
        "lea rcx, [rsi + rdx - 128]",
        "jb 3f",
        // Ask for the first 4 KiB.
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
        fn millpond_copy_wide(dst: *mut u8, src: *const u8, len: usize, ahead_from: usize)
        -> usize;
        fn millpond_copy_wide_resume();
        fn millpond_copy_stream(dst: *mut u8, src: *const u8, len: usize) -> usize;
        fn millpond_copy_stream_resume();
    }

    /// What the streaming routine moves at once, into memory aligned to a quarter of it.
    const STREAM_BYTES: usize = 128;

    /// The wide routine takes no less.
    const WIDE_BYTES_MIN: usize = 32;

    #[inline]
    pub(super) unsafe fn copy(
        dst: *mut u8,
        src: *const u8,
        len: usize,
        source: super::Source,
    ) -> usize {
        // SAFETY: both routines read and write exactly the two ranges that the caller vouches for
        // and keep to the C ABI; the wide one needs the length and the instructions tested for.
        unsafe {
            if len >= WIDE_BYTES_MIN && is_x86_feature_detected!("avx2") {
                // The routine asks for 4 KiB at once, so no less than that.
                let ahead_from = 4096 + usize::from(source == super::Source::Near);
                millpond_copy_wide(dst, src, len, ahead_from)
            } else {
                millpond_copy_plain(dst, src, len)
            }
        }
    }

    #[inline]
    pub(super) unsafe fn copy_away(dst: *mut u8, src: *const u8, len: usize) -> usize {
        let fits = len > 0
            && len.is_multiple_of(STREAM_BYTES)
            && dst.addr().is_multiple_of(STREAM_BYTES / 4);
        // SAFETY: as above; the routine needs what was tested for. Its stores are in order with
        // those that follow it: it ends with a fence.
        unsafe {
            if fits && is_x86_feature_detected!("avx2") {
                millpond_copy_stream(dst, src, len)
            } else {
                copy(dst, src, len, super::Source::Near)
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
        let stream =
            millpond_copy_stream as *const () as usize..address(millpond_copy_stream_resume);
        if pc == address(millpond_copy_plain_access) {
            Some(address(millpond_copy_plain_resume))
        } else if stream.contains(&pc) {
            Some(address(millpond_copy_stream_resume))
        } else {
            wide.contains(&pc).then_some(address(millpond_copy_wide_resume))
        }
    }
}

/// By pieces, between which it may be another thread's turn.
#[cfg(scheduled)]
mod arch {
    const PIECE_BYTES: usize = 512;

    pub(super) unsafe fn copy(
        dst: *mut u8,
        src: *const u8,
        len: usize,
        _source: super::Source,
    ) -> usize {
        for at in (0..len).step_by(PIECE_BYTES) {
            std::point();
            // SAFETY: within the caller's ranges; one thread runs at a time.
            unsafe { src.add(at).copy_to(dst.add(at), PIECE_BYTES.min(len - at)) };
        }
        0
    }

    pub(super) unsafe fn copy_away(dst: *mut u8, src: *const u8, len: usize) -> usize {
        // SAFETY: the caller's promise is the same.
        unsafe { copy(dst, src, len, super::Source::Near) }
    }

    pub(super) unsafe fn zero(dst: *mut u8, len: usize) {
        for at in (0..len).step_by(PIECE_BYTES) {
            std::point();
            // SAFETY: within the caller's range; one thread runs at a time.
            unsafe { dst.add(at).write_bytes(0, PIECE_BYTES.min(len - at)) };
        }
    }

    pub(super) fn resume_address(_pc: usize) -> Option<usize> {
        None
    }
}

#[cfg(not(any(target_arch = "x86_64", scheduled)))]
mod arch {
    use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};

    pub(super) unsafe fn copy(
        dst: *mut u8,
        src: *const u8,
        len: usize,
        _source: super::Source,
    ) -> usize {
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
        unsafe { copy(dst, src, len, super::Source::Near) }
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
