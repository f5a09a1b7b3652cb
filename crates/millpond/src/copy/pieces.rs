//! Copies in pieces, between which another thread may run: for tests under the deterministic
//! scheduler (`cfg(scheduled)`).

const PIECE_BYTES: usize = 512;

pub(super) unsafe fn copy(dst: *mut u8, src: *const u8, len: usize, _is_far: bool) -> usize {
    for at in (0..len).step_by(PIECE_BYTES) {
        std::point();
        // SAFETY: within the caller's ranges; one thread runs at a time.
        unsafe { src.add(at).copy_to(dst.add(at), PIECE_BYTES.min(len - at)) };
    }
    0
}

pub(super) unsafe fn copy_away(dst: *mut u8, src: *const u8, len: usize) -> usize {
    // SAFETY: the caller's promise is the same.
    unsafe { copy(dst, src, len, false) }
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
