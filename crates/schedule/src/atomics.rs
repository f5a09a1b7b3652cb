//! Atomics: std's, with a point before each operation, where the scheduler may switch threads.

use std::fmt;
use std::sync::atomic::{self as real, Ordering};

use crate::scheduler::point;

/// As std's.
pub fn fence(order: Ordering) {
    point();
    real::fence(order);
}

pub use std::sync::atomic::compiler_fence;

macro_rules! atomic {
    ($name:ident $(<$of:ident>)?, $real:ty, $value:ty) => {
        /// As std's, of the same layout.
        #[repr(transparent)]
        pub struct $name $(<$of>)? ($real);

        impl $(<$of>)? $name $(<$of>)? {
            /// As std's.
            pub const fn new(value: $value) -> Self {
                Self(<$real>::new(value))
            }

            /// As std's.
            ///
            /// # Safety
            ///
            /// As for std's.
            pub const unsafe fn from_ptr<'a>(ptr: *mut $value) -> &'a Self {
                // SAFETY: the layouts are the same; the caller guarantees the rest.
                unsafe { &*ptr.cast() }
            }

            /// As std's.
            pub const fn as_ptr(&self) -> *mut $value {
                self.0.as_ptr()
            }

            /// As std's.
            pub fn get_mut(&mut self) -> &mut $value {
                self.0.get_mut()
            }

            /// As std's.
            pub fn into_inner(self) -> $value {
                self.0.into_inner()
            }

            /// As std's.
            pub fn load(&self, order: Ordering) -> $value {
                point();
                self.0.load(order)
            }

            /// As std's.
            pub fn store(&self, value: $value, order: Ordering) {
                point();
                self.0.store(value, order);
            }

            /// As std's.
            pub fn swap(&self, value: $value, order: Ordering) -> $value {
                point();
                self.0.swap(value, order)
            }

            /// As std's.
            pub fn compare_exchange(
                &self,
                current: $value,
                new: $value,
                success: Ordering,
                failure: Ordering,
            ) -> Result<$value, $value> {
                point();
                self.0.compare_exchange(current, new, success, failure)
            }

            /// As std's.
            pub fn compare_exchange_weak(
                &self,
                current: $value,
                new: $value,
                success: Ordering,
                failure: Ordering,
            ) -> Result<$value, $value> {
                self.compare_exchange(current, new, success, failure)
            }

            /// As std's.
            pub fn fetch_update(
                &self,
                success: Ordering,
                failure: Ordering,
                mut change: impl FnMut($value) -> Option<$value>,
            ) -> Result<$value, $value> {
                let mut current = self.load(failure);
                while let Some(new) = change(current) {
                    match self.compare_exchange(current, new, success, failure) {
                        Ok(before) => return Ok(before),
                        Err(now) => current = now,
                    }
                }
                Err(current)
            }
        }

        impl $(<$of>)? fmt::Debug for $name $(<$of>)? {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&self.0, f)
            }
        }

        impl $(<$of>)? From<$value> for $name $(<$of>)? {
            fn from(value: $value) -> Self {
                Self::new(value)
            }
        }
    };
}

macro_rules! fetches {
    ($name:ident, $value:ty, $($fetch:ident)*) => {
        impl $name {
            $(
                /// As std's.
                pub fn $fetch(&self, value: $value, order: Ordering) -> $value {
                    point();
                    self.0.$fetch(value, order)
                }
            )*
        }
    };
}

macro_rules! integers {
    ($($name:ident $value:ty;)*) => {
        $(
            atomic!($name, real::$name, $value);
            fetches!($name, $value,
                fetch_add fetch_sub fetch_and fetch_or fetch_xor fetch_nand fetch_max fetch_min);

            impl Default for $name {
                fn default() -> Self {
                    Self::new(0)
                }
            }
        )*
    };
}

integers! {
    AtomicU8 u8;
    AtomicU16 u16;
    AtomicU32 u32;
    AtomicU64 u64;
    AtomicUsize usize;
    AtomicI8 i8;
    AtomicI16 i16;
    AtomicI32 i32;
    AtomicI64 i64;
    AtomicIsize isize;
}

atomic!(AtomicBool, real::AtomicBool, bool);
fetches!(AtomicBool, bool, fetch_and fetch_or fetch_xor fetch_nand);

impl Default for AtomicBool {
    fn default() -> Self {
        Self::new(false)
    }
}

atomic!(AtomicPtr<T>, real::AtomicPtr<T>, *mut T);

impl<T> Default for AtomicPtr<T> {
    fn default() -> Self {
        Self::new(std::ptr::null_mut())
    }
}
