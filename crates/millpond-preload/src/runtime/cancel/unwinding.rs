//! Removal of this library's frames when a thread ends: `cancel.C5`.

use std::ffi::{c_int, c_void};

/// cancel.C5. Unwinding calls each frame's personality function. Rust's would drop the frame's
/// values, and abort the process if the frame was interrupted between two calls. The library's function
/// reports that the frame needs no cleanup. That also holds for exceptions of the program, which pass through frames
/// that call it back (`ftw`): there the library holds nothing. The library's panics unwind nothing, as they end the
/// process (`end_on_panic`). So the result is right for every unwinder, also for a different one than the library's.
///
/// Called once, when the library is loaded.
pub fn let_threads_end() {
    // SAFETY: the word is writable data of this library, which unwinding only reads; nothing of
    // this library is unwound yet.
    unsafe { personality_place().write(personality as *const () as usize) };
}

extern "C" fn personality(_: c_int, _: c_int, _: u64, _: *mut c_void, _: *mut c_void) -> c_int {
    const CONTINUE_UNWIND: c_int = 8;
    CONTINUE_UNWIND
}

/// The word by which every frame of this library names its personality.
#[cfg(target_arch = "x86_64")]
fn personality_place() -> *mut usize {
    let place;
    // SAFETY: the address of a variable that the compiler makes.
    unsafe {
        std::arch::asm!(
            ".hidden DW.ref.rust_eh_personality",
            "lea {}, [rip + DW.ref.rust_eh_personality]",
            out(reg) place,
            options(nomem, nostack, preserves_flags),
        );
    }
    place
}

/// The word by which every frame of this library names its personality.
#[cfg(target_arch = "aarch64")]
fn personality_place() -> *mut usize {
    let place;
    // SAFETY: the address of a variable that the compiler makes.
    unsafe {
        std::arch::asm!(
            ".hidden DW.ref.rust_eh_personality",
            "adrp {0}, DW.ref.rust_eh_personality",
            "add {0}, {0}, :lo12:DW.ref.rust_eh_personality",
            out(reg) place,
            options(nomem, nostack, preserves_flags),
        );
    }
    place
}
