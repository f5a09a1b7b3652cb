//! Any of the range locks, chosen when the engine is built.
//!
//! The choice is made above [`RangeLock`], which spins, sleeps and times out, so that each lock runs
//! as it does alone; and a guard knows by its variant which lock it came from.

use std::fmt;
use std::pin::Pin;
use std::str::FromStr;
use std::sync::{Arc, Weak};

use millpond_rangelock::peers::{IntervalTree, MutexBTree, OlcBTree, WholeFile};
use millpond_rangelock::{Budget, ByteRange, Mode, RangeLock, RawRangeLock, Striped};

use super::REGION_BYTES;
use crate::error::{Error, Op};

/// Defines what has one variant for each lock.
macro_rules! any_range_lock {
    ($($(#[$meta:meta])* $kind:ident = $make:expr,)*) => {
        /// Which lock orders the operations on a file; see
        /// [`EngineBuilder::range_lock`](crate::EngineBuilder::range_lock).
        ///
        /// With each of them reads and writes are atomic, and requests that overlap get their turn in
        /// the order in which they came; they differ in what can go on at the same time, and in what
        /// it costs. Their names, for [`FromStr`] and [`Display`](fmt::Display): `striped`,
        /// `whole-file`, `interval-tree`, `mutex-btree`, `olc-btree`.
        ///
        /// Needs the feature `range-lock-peers`.
        ///
        /// # Examples
        ///
        /// ```
        /// use millpond::RangeLockKind;
        /// let kind: RangeLockKind = "olc-btree".parse()?;
        /// assert_eq!(kind, RangeLockKind::OlcBTree);
        /// assert_eq!(kind.to_string(), "olc-btree");
        /// assert!("rcu".parse::<RangeLockKind>().is_err());
        /// # Ok::<(), millpond::Error>(())
        /// ```
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum RangeLockKind {
            $($(#[$meta])* $kind,)*
        }

        impl RangeLockKind {
            /// Every kind, the default first.
            pub const ALL: &'static [RangeLockKind] = &[$(RangeLockKind::$kind),*];

            fn name(self) -> &'static str {
                match self {
                    $(RangeLockKind::$kind => <$kind as RawRangeLock>::NAME,)*
                }
            }

            /// A lock for a file; that of the engine grows within `budget`, the others as they like.
            pub(crate) fn lock(self, budget: Weak<dyn Budget>) -> Ranges {
                match self {
                    $(RangeLockKind::$kind => Ranges::$kind(Arc::new($make(budget))),)*
                }
            }
        }

        /// The ranges of one file that are held.
        pub(crate) enum Ranges {
            $($kind(Arc<RangeLock<$kind>>),)*
        }

        /// A held range of a borrowed lock.
        pub(crate) enum Guard<'a> {
            $($kind(millpond_rangelock::Guard<'a, $kind>),)*
        }

        /// A held range that keeps its lock alive.
        #[expect(dead_code, reason = "dropped, which releases the range, and nothing else")]
        pub(crate) enum OwnedGuard {
            $($kind(millpond_rangelock::OwnedGuard<$kind>),)*
        }

        /// A request for a guard, pending or granted and not yet taken.
        pub(crate) type GuardRequest = Pin<Box<dyn Future<Output = OwnedGuard> + Send>>;

        impl Ranges {
            #[inline]
            #[cfg_attr(debug_assertions, track_caller)]
            pub(crate) fn lock(&self, range: ByteRange, mode: Mode) -> Guard<'_> {
                match self {
                    $(Ranges::$kind(lock) => Guard::$kind(lock.lock(range, mode)),)*
                }
            }

            #[inline]
            #[cfg_attr(debug_assertions, track_caller)]
            pub(crate) fn try_lock(&self, range: ByteRange, mode: Mode) -> Option<Guard<'_>> {
                match self {
                    $(Ranges::$kind(lock) => lock.try_lock(range, mode).map(Guard::$kind),)*
                }
            }

            #[cfg_attr(debug_assertions, track_caller)]
            pub(crate) fn try_lock_owned(&self, range: ByteRange, mode: Mode) -> Option<OwnedGuard> {
                match self {
                    $(Ranges::$kind(lock) => {
                        lock.try_lock_owned(range, mode).map(OwnedGuard::$kind)
                    })*
                }
            }

            fn lock_later(&self, range: ByteRange, mode: Mode) -> GuardRequest {
                match self {
                    $(Ranges::$kind(lock) => {
                        let request = lock.lock_owned_async(range, mode);
                        Box::pin(async move { OwnedGuard::$kind(request.await) })
                    })*
                }
            }
        }

        impl Guard<'_> {
            #[inline]
            pub(crate) fn range(&self) -> ByteRange {
                match self {
                    $(Guard::$kind(guard) => guard.range(),)*
                }
            }
        }

        /// The size of the largest lock.
        pub(crate) const LOCK_BYTES: usize = {
            let mut largest = 0;
            $(if size_of::<RangeLock<$kind>>() > largest {
                largest = size_of::<RangeLock<$kind>>();
            })*
            largest
        };
    };
}

/// A request for a guard that no thread waits for.
pub(crate) fn lock_later(ranges: &Ranges, range: ByteRange, mode: Mode) -> GuardRequest {
    ranges.lock_later(range, mode)
}

any_range_lock! {
    /// Millpond's own: a request touches only what belongs to its part of the file.
    #[default]
    Striped = |budget| RangeLock::with_region_bytes(REGION_BYTES).with_budget(budget),
    /// One reader-writer lock for the whole file: a write excludes everything else.
    WholeFile = |_| RangeLock::with_raw(),
    /// An interval tree under a mutex.
    IntervalTree = |_| RangeLock::with_raw(),
    /// A B-tree under a mutex.
    MutexBTree = |_| RangeLock::with_raw(),
    /// A B-tree with optimistic lock coupling: who changes it locks the leaf that changes.
    OlcBTree = |_| RangeLock::with_raw(),
}

impl fmt::Display for RangeLockKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for RangeLockKind {
    type Err = Error;

    /// # Errors
    ///
    /// [`Error::InvalidInput`] for what is no kind's name.
    fn from_str(name: &str) -> Result<Self, Error> {
        Self::ALL.iter().copied().find(|kind| kind.name() == name).ok_or_else(|| {
            let names: Vec<&str> = Self::ALL.iter().map(|kind| kind.name()).collect();
            let what = format!("no range lock is called {name:?}: there are {}", names.join(", "));
            Error::InvalidInput { op: Op::Build, what }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the lock of each kind excludes and releases, by both sorts of guards.
    #[test]
    fn every_kind_locks() {
        let range = ByteRange::new(0, 4096).unwrap();
        for &kind in RangeLockKind::ALL {
            assert_eq!(kind.to_string().parse::<RangeLockKind>().unwrap(), kind);
            let nobody: Weak<crate::inode::Shared> = Weak::new();
            let ranges = kind.lock(nobody);
            let guard = ranges.lock(range, Mode::Exclusive);
            assert_eq!(guard.range(), range);
            assert!(ranges.try_lock_owned(range, Mode::Shared).is_none(), "{kind}");
            drop(guard);
            let owned = ranges.try_lock_owned(range, Mode::Exclusive).unwrap();
            assert!(ranges.try_lock_owned(range, Mode::Shared).is_none(), "{kind}");
            drop(owned);
            assert!(ranges.try_lock_owned(range, Mode::Shared).is_some(), "{kind}");
        }
    }
}
