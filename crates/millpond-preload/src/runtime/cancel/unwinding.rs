//! How frames of this library are taken away when a thread ends: `cancel.C5`.

use std::ffi::{c_int, c_void};

/// cancel.C5. Unwinding asks each frame's personality what there is to do. Rust's would have values
/// dropped, and stop the process where the frame was interrupted between two calls; ours answers in its
/// place that there is nothing. That holds for exceptions of the program, too, which pass where it is called
/// back (`ftw`): there the library holds nothing. Its own panics unwind nothing, as they end the process
/// (`end_on_panic`). So no answer depends on the unwinder that asks, which may be another one than ours.
///
/// Once, when the library is loaded.
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
