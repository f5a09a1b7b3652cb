//! The exported symbols of the preload library, which take the place of libc's: one for each name of
//! the table of calls.

use crate::aio::iocb::{Event, Handle, Iocb};
use crate::files::multi_open::before_rights;
use crate::files::served_io::At;
use crate::files::writeback_policy::{flush_before_kernel_call, settle_all};
use crate::fork::fork_by;
use crate::hooks::jump::{routed, variadic};
use crate::hooks::metadata::{settle_at, settle_both, settle_rights, settle_rights_at};
use crate::hooks::process::{release_all_files, release_to_libc};
use crate::hooks::{
    aio, by_number, cancel, clone, descriptor, io, kernel, lookup, open, process, signal, stat,
    stdio, vfork,
};
use crate::retirement;
use crate::runtime::c::*;
use crate::runtime::cancel::point::point;
use crate::runtime::libc_calls;

/// One function.
macro_rules! export {
    ($name:ident ($($arg:ident: $ty:ty),*) -> $ret:ty => $call:expr $(, $($rest:tt)*)?) => {
        #[unsafe(no_mangle)]
        #[allow(unused_unsafe)]
        pub unsafe extern "C-unwind" fn $name($($arg: $ty),*) -> $ret {
            // SAFETY: as the caller vouches to the function of this name.
            unsafe { $call }
        }
    };
    ($name:ident ($($arg:ident: $ty:ty),*) -> $ret:ty; after $before:expr $(, $($rest:tt)*)?) => {
        export! { $name ($($arg: $ty),*) -> $ret
            => { $before; libc_calls::$name($($arg),*) } }
    };
}

/// Another name of it, for each that there is.
macro_rules! aliases {
    ([] $($row:tt)*) => {};
    ([$alias:ident $($more:ident)*] $name:ident ($($arg:ident: $ty:ty),*) -> $ret:ty
        $(=> $call:expr)? $(; after $before:expr)? $(, $($rest:tt)*)?) => {
        export! { $alias ($($arg: $ty),*) -> $ret => $name($($arg),*) }
        aliases! { [$($more)*] $name ($($arg: $ty),*) -> $ret }
    };
}

macro_rules! row {
    ($class:ident fn $name:ident $(/$alias:ident)* ($($args:tt)*) -> $($rest:tt)*) => {
        export! { $name ($($args)*) -> $($rest)* }
        aliases! { [$($alias)*] $name ($($args)*) -> $($rest)* }
    };
    ($class:ident variadic $name:ident => $before:path) => {
        variadic! { $name, $before; }
    };
    ($class:ident routed $name:ident $(/$alias:ident)* => $route:path) => {
        routed! { $name, $route; $($alias, $route;)* }
    };
    ($($number_only:tt)*) => {};
}

calls!(row);
