//! How frames of this library are taken away when a thread ends: `cancel.C5`.

use std::ffi::{c_int, c_void};
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

/// cancel.C5. Unwinding asks each frame's personality what there is to do. Rust's would have values
/// dropped, and stop the process where the frame was interrupted between two calls. While a thread
/// ends, ours answers in its place. Exceptions of other languages and panics are Rust's business.
///
/// Once, when the library is loaded.
pub fn let_threads_end() {
    let place = personality_place();
    // SAFETY: the word is writable data of this library, which unwinding only reads; nothing of
    // this library is unwound yet.
    unsafe {
        RUST_PERSONALITY.store(place.read(), Relaxed);
        place.write(personality as *const () as usize);
    }
}

static RUST_PERSONALITY: AtomicUsize = AtomicUsize::new(0);

type Personality =
    unsafe extern "C-unwind" fn(c_int, c_int, u64, *mut c_void, *mut c_void) -> c_int;

unsafe extern "C-unwind" fn personality(
    version: c_int,
    actions: c_int,
    class: u64,
    exception: *mut c_void,
    context: *mut c_void,
) -> c_int {
    const FORCE_UNWIND: c_int = 8;
    const CONTINUE_UNWIND: c_int = 8;
    if actions & FORCE_UNWIND != 0 {
        return CONTINUE_UNWIND;
    }
    // SAFETY: Rust's own, with the unwinder's arguments.
    unsafe {
        let rust: Personality = std::mem::transmute(RUST_PERSONALITY.load(Relaxed));
        rust(version, actions, class, exception, context)
    }
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
