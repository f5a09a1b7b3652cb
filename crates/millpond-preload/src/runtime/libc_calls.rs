//! libc's own definitions of the functions that this library replaces, found as
//! `dlsym(RTLD_NEXT)` finds them (see `following`, `elf`). A passed call goes through them, because a
//! libc call that may block is also a cancellation point.
//!
//! A cancelled thread unwinds through the frame of the hook. So hooks are `extern "C-unwind"`, and when they call libc
//! they hold no value that needs dropping: see `cancel`.

use std::ffi::CStr;
use std::sync::atomic::{AtomicPtr, AtomicU8, Ordering::Relaxed};

use crate::runtime::c::*;
use crate::runtime::elf;
use crate::runtime::following::{Following, Found};
use crate::runtime::sys::set_errno;

/// Finds the next definition of a symbol after this library, and remembers it in `slot`.
#[cold]
fn resolve(slot: &AtomicPtr<c_void>, name: &CStr) -> *mut c_void {
    let found = elf::next(name);
    // Relaxed, here and in the wrappers: a thread that reads null resolves again, to the same
    // address, and the code behind it was mapped before this library was.
    slot.store(found, Relaxed);
    found
}

/// A wrapper for each row that calls libc's own.
macro_rules! row {
    ($class:ident fn $name:ident $(/$alias:ident)* ($($arg:ident: $ty:ty),*) -> $ret:ty
        $(=> $call:expr)? $(; after $before:expr)?, else $missing:expr $(, $($rest:tt)*)?) => {
        /// libc's own; for the arguments' duties see its manual.
        ///
        /// # Safety
        ///
        /// As the function of the same name in libc.
        #[inline]
        #[allow(non_snake_case, unreachable_code)]
        #[allow(clippy::diverging_sub_expression, clippy::unused_unit)]
        pub unsafe fn $name($($arg: $ty),*) -> $ret {
            /// Apart, with the arguments as they came, so that nothing is kept for it before each call.
            #[cold]
            #[inline(never)]
            unsafe fn first($($arg: $ty),*) -> $ret {
                if resolve(&slots::$name, name_of(concat!(stringify!($name), "\0"))).is_null() {
                    set_errno(libc::ENOSYS);
                    return $missing;
                }
                // SAFETY: the caller's duty.
                unsafe { $name($($arg),*) }
            }
            let found = slots::$name.load(Relaxed);
            // SAFETY: libc defines this symbol with this signature; the caller vouches for the
            // arguments.
            unsafe {
                if found.is_null() {
                    return first($($arg),*);
                }
                let call: unsafe extern "C-unwind" fn($($ty),*) -> $ret =
                    std::mem::transmute(found);
                call($($arg),*)
            }
        }
    };
    ($($without:tt)*) => {};
}
calls!(row);

/// Calls `$then!` with the name, for a row that needs libc's own.
macro_rules! name_for {
    ($then:ident $class:ident fn $name:ident $(/$alias:ident)* ($($args:tt)*) -> $ret:ty
        $(=> $call:expr)? $(; after $before:expr)?, else $($rest:tt)*) => {
        $then! { $name }
    };
    ($then:ident $class:ident variadic $name:ident => $before:path) => {
        $then! { $name }
    };
    ($then:ident $class:ident routed $name:ident $(/$alias:ident)* => $route:path) => {
        $then! { $name }
    };
    ($($without:tt)*) => {};
}

/// Where libc's own are.
#[allow(non_upper_case_globals)]
pub mod slots {
    use super::*;

    macro_rules! slot {
        ($name:ident) => {
            pub static $name: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
        };
    }
    macro_rules! row {
        ($($row:tt)*) => { name_for! { slot $($row)* } };
    }
    calls!(row);
}

/// Looks all of them up: `dlsym` is not async-signal-safe, so it should not be left to their first
/// use.
pub fn resolve_all() {
    let following = Following::of(resolve_all as *const () as usize);
    macro_rules! look_up {
        ($name:ident) => {
            find(&following, &slots::$name, name_of(concat!(stringify!($name), "\0")));
        };
    }
    macro_rules! row {
        ($($row:tt)*) => { name_for! { look_up $($row)* } };
    }
    calls!(row);
}

/// libc's `__libc_single_threaded` (glibc 2.32); null without it.
static SINGLE_THREADED: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

pub fn find_single_threaded() {
    SINGLE_THREADED.store(elf::next(c"__libc_single_threaded"), Relaxed);
}

/// Whether libc knows that the process has one thread.
#[inline]
pub fn is_single_threaded() -> bool {
    // SAFETY: null, or a byte of libc, which is never unmapped and has no other accesses than those of whole bytes.
    let is_single = unsafe { SINGLE_THREADED.load(Relaxed).cast::<AtomicU8>().as_ref() };
    // Relaxed: a thread that runs beside this one was created by it, and cleared the byte before.
    is_single.is_some_and(|is_single| is_single.load(Relaxed) != 0)
}

#[inline(never)]
fn find(following: &Following, slot: &AtomicPtr<c_void>, name: &CStr) {
    match following.find(name) {
        // Relaxed: as in `resolve`.
        Found::Function(found) => slot.store(found, Relaxed),
        // Some library that is loaded later may define it.
        Found::Nothing => {}
        Found::Unclear => {
            resolve(slot, name);
        }
    }
}

fn name_of(text: &'static str) -> &'static CStr {
    CStr::from_bytes_with_nul(text.as_bytes()).unwrap_or(c"")
}
