//! `syscall(2)`: the system calls of the other hooks, asked for by number.
//!
//! Programs do so where libc had no function once (`close_range`, `copy_file_range`), and some as a
//! habit. A call by number must do the same as the call by name: a close past the hooks, and the
//! table takes the next file under that number for the one before; a write past them, and hits are
//! stale. The table of calls says what that is; `tests/system_calls.rs` has every number that there
//! is.
//!
//! A system call that the program makes itself, by an instruction of its own, is not seen.

use crate::aio::iocb::{Event, Handle, Iocb};
use crate::files::multi_open::before_rights;
use crate::files::registry::release_all_files;
use crate::files::served_io::At;
use crate::files::writeback_policy::{flush_before_kernel_call, settle_all};
use crate::hooks::metadata::{settle_at, settle_both, settle_rights, settle_rights_at};
use crate::hooks::{aio, clone, descriptor, io, kernel, open, process, signal, stat};
use crate::retirement;
use crate::runtime::c::*;
use crate::runtime::cancel::point::without;
use crate::runtime::elf::libcs;
use crate::runtime::libc_calls::{self, slots};
use crate::runtime::sys::{sys, to_libc};
use crate::runtime::{section, thread};

/// The numbers, those too that the libc crate has not for every architecture.
#[allow(non_upper_case_globals)]
mod numbers {
    pub use libc::*;

    pub use crate::aio::iocb::SYS_io_pgetevents;

    pub const SYS_fchmodat2: c_long = 452;
    pub const SYS_setxattrat: c_long = 463;
    pub const SYS_removexattrat: c_long = 466;
    pub const SYS_file_setattr: c_long = 469;
}

/// Where a system call goes on. One that makes a thread or process on another stack returns there:
/// not to a function of ours, which has its own.
pub extern "C" fn route(number: c_long, a: usize, b: usize) -> *const c_void {
    if number == libc::SYS_rt_sigaction && b != 0 {
        section::block_from_now_on();
    }
    if clone::leaves_for_good(number, a, b) {
        libcs(&slots::syscall, c"syscall")
    } else {
        by_number as *const () as *const c_void
    }
}

unsafe extern "C-unwind" fn by_number(
    number: c_long,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> c_long {
    if thread::record().is_inside() {
        // SAFETY: as the caller vouches to the system call of this number.
        return to_libc(unsafe { sys!(number, a, b, c, d, e, f) }) as c_long;
    }
    // However the system call is called, this is no cancellation point.
    // SAFETY: as above; arguments that the caller did not give are not looked at.
    if let Some(result) = without(|| unsafe { by_table(number, [a, b, c, d, e, f]) }) {
        return result as c_long;
    }
    // By libc, where a thread may end.
    // SAFETY: as above.
    unsafe {
        type Call = unsafe extern "C-unwind" fn(c_long, ...) -> c_long;
        let call: Call = std::mem::transmute(libcs(&slots::syscall, c"syscall"));
        call(number, a, b, c, d, e, f)
    }
}

/// The result of the call of this number; `None`, after the library's part before it, if it is the kernel's.
#[allow(unused_mut, unused_unsafe, unused_variables, unreachable_code)]
#[allow(clippy::diverging_sub_expression)]
unsafe fn by_table(number: c_long, arguments: [usize; 6]) -> Option<isize> {
    macro_rules! arm {
        ([] [] $($by_name_only:tt)*) => {};
        ([$($all:ident)*] [$($x86:ident)*] ($($arg:ident: $ty:ty),*)
            $(=> $call:expr)? $(; after $before:expr)?) => {
            let numbers = [
                $(numbers::$all,)*
                $(#[cfg(target_arch = "x86_64")] numbers::$x86,)*
            ];
            if numbers.contains(&number) {
                let mut rest = arguments.into_iter();
                $(let $arg = rest.next().unwrap_or_default() as $ty;)*
                // SAFETY: the caller's duty.
                $(return Some(unsafe { $call } as isize);)?
                $(
                    // SAFETY: as above.
                    unsafe { $before };
                    return None;
                )?
            }
        };
    }
    macro_rules! row {
        ($class:ident fn $name:ident $(/$alias:ident)* ($($args:tt)*) -> $ret:ty
            $(=> $call:expr)? $(; after $before:expr)? $(, else $missing:expr)?
            $(, number $($all:ident)+)? $(, x86 $($x86:ident)+)?) => {
            arm! { [$($($all)+)?] [$($($x86)+)?] ($($args)*) $(=> $call)? $(; after $before)? }
        };
        ($class:ident number $($all:ident)+ ($($args:tt)*) $(=> $call:expr)? $(; after $before:expr)?) => {
            arm! { [$($all)+] [] ($($args)*) $(=> $call)? $(; after $before)? }
        };
        ($class:ident x86 $($x86:ident)+ ($($args:tt)*) $(=> $call:expr)?) => {
            #[cfg(target_arch = "x86_64")]
            arm! { [] [$($x86)+] ($($args)*) $(=> $call)? }
        };
        ($($name_only:tt)*) => {};
    }
    calls!(row);
    None
}
