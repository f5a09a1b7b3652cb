//! Lock requests consist of a [`ByteRange`] and a [`Mode`].
//!
//! A range is validated once, when it is created, so lock operations need no checks of their input.

use std::fmt;
use std::ops::Range;

/// The mode of a lock request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    /// Compatible with other shared holders of overlapping ranges.
    Shared,
    /// Excludes all other holders of overlapping ranges.
    Exclusive,
}

impl Mode {
    /// Whether overlapping ranges in these modes exclude each other.
    ///
    /// ```
    /// use millpond_rangelock::Mode;
    /// assert!(!Mode::Shared.conflicts_with(Mode::Shared));
    /// assert!(Mode::Shared.conflicts_with(Mode::Exclusive));
    /// ```
    #[inline]
    pub const fn conflicts_with(self, other: Mode) -> bool {
        matches!(self, Mode::Exclusive) || matches!(other, Mode::Exclusive)
    }
}

/// A range of bytes, `start..end`, never empty.
///
/// Bytes are numbered `0..u64::MAX`, so that every range has an exclusive end; the byte
/// numbered `u64::MAX` does not exist.
///
/// ```
/// use millpond_rangelock::{ByteRange, RangeError};
///
/// let range = ByteRange::new(4096, 8192)?;
/// assert_eq!((range.start(), range.end(), range.len()), (4096, 8192, 4096));
/// assert_eq!(ByteRange::at(4096, 4096)?, range);
/// assert_eq!(ByteRange::try_from(4096..8192)?, range);
/// assert_eq!(ByteRange::new(7, 7), Err(RangeError::Empty { start: 7 }));
/// # Ok::<(), RangeError>(())
/// ```
///
/// # Examples
///
/// ```
/// use millpond_rangelock::{ByteRange, RangeError};
///
/// let file = ByteRange::ALL;
/// let tail = ByteRange::from_start(4096)?;
/// assert!(file.contains(tail) && tail.overlaps(ByteRange::new(0, 4097)?));
/// assert!(!tail.overlaps(ByteRange::new(0, 4096)?));
/// assert!(matches!(ByteRange::new(8, 7), Err(RangeError::Reversed { .. })));
/// # Ok::<(), RangeError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct ByteRange {
    start: u64,
    end: u64,
}

impl ByteRange {
    /// Every byte there is: the whole file.
    pub const ALL: ByteRange = ByteRange { start: 0, end: u64::MAX };

    /// The bytes from `start` up to, not including, `end`.
    ///
    /// # Errors
    ///
    /// - [`RangeError::Empty`]: `start == end`.
    /// - [`RangeError::Reversed`]: `start > end`.
    #[inline]
    pub const fn new(start: u64, end: u64) -> Result<ByteRange, RangeError> {
        if start < end {
            Ok(ByteRange { start, end })
        } else if start == end {
            Err(RangeError::Empty { start })
        } else {
            Err(RangeError::Reversed { start, end })
        }
    }

    /// The `len` bytes at `offset`.
    ///
    /// # Errors
    ///
    /// - [`RangeError::Empty`]: `len` is 0.
    /// - [`RangeError::Overflow`]: `offset + len` exceeds `u64::MAX`.
    #[inline]
    pub const fn at(offset: u64, len: u64) -> Result<ByteRange, RangeError> {
        match offset.checked_add(len) {
            Some(end) => ByteRange::new(offset, end),
            None => Err(RangeError::Overflow { start: offset, len }),
        }
    }

    /// All bytes from `start` on: the range that a truncate to `start` locks.
    ///
    /// # Errors
    ///
    /// - [`RangeError::Empty`]: `start` is `u64::MAX`.
    #[inline]
    pub const fn from_start(start: u64) -> Result<ByteRange, RangeError> {
        ByteRange::new(start, u64::MAX)
    }

    /// A range whose ends the caller knows to be in order.
    #[inline]
    pub(crate) const fn raw(start: u64, end: u64) -> ByteRange {
        debug_assert!(start < end);
        ByteRange { start, end }
    }

    /// The first byte.
    #[inline]
    pub const fn start(self) -> u64 {
        self.start
    }

    /// The byte after the last.
    #[inline]
    pub const fn end(self) -> u64 {
        self.end
    }

    /// The number of bytes, at least 1.
    #[inline]
    #[allow(clippy::len_without_is_empty)] // a range is never empty
    pub const fn len(self) -> u64 {
        self.end - self.start
    }

    /// Whether the two share a byte.
    #[inline]
    pub const fn overlaps(self, other: ByteRange) -> bool {
        self.start < other.end && other.start < self.end
    }

    /// Whether every byte of `other` is in `self`.
    #[inline]
    pub const fn contains(self, other: ByteRange) -> bool {
        self.start <= other.start && other.end <= self.end
    }
}

impl TryFrom<Range<u64>> for ByteRange {
    type Error = RangeError;

    #[inline]
    fn try_from(range: Range<u64>) -> Result<ByteRange, RangeError> {
        ByteRange::new(range.start, range.end)
    }
}

impl From<ByteRange> for Range<u64> {
    #[inline]
    fn from(range: ByteRange) -> Range<u64> {
        range.start..range.end
    }
}

impl fmt::Debug for ByteRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}", self.start, self.end)
    }
}

impl fmt::Display for ByteRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// Why a [`ByteRange`] could not be created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RangeError {
    /// The range is empty.
    Empty {
        /// The start of the range.
        start: u64,
    },
    /// The end comes before the start.
    Reversed {
        /// The given start.
        start: u64,
        /// The given end.
        end: u64,
    },
    /// `start + len` is beyond the last byte.
    Overflow {
        /// The given start.
        start: u64,
        /// The given length.
        len: u64,
    },
}

impl fmt::Display for RangeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            RangeError::Empty { start } => write!(f, "empty byte range at {start}"),
            RangeError::Reversed { start, end } => {
                write!(f, "byte range ends before it starts: {start}..{end}")
            }
            RangeError::Overflow { start, len } => {
                write!(f, "byte range of {len} bytes at {start} ends beyond the last byte")
            }
        }
    }
}

impl std::error::Error for RangeError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_input_is_a_typed_error() {
        assert_eq!(ByteRange::new(5, 5), Err(RangeError::Empty { start: 5 }));
        assert_eq!(ByteRange::new(6, 5), Err(RangeError::Reversed { start: 6, end: 5 }));
        assert_eq!(ByteRange::at(6, 0), Err(RangeError::Empty { start: 6 }));
        let overflow = RangeError::Overflow { start: u64::MAX, len: 2 };
        assert_eq!(ByteRange::at(u64::MAX, 2), Err(overflow));
        assert_eq!(ByteRange::from_start(u64::MAX), Err(RangeError::Empty { start: u64::MAX }));
        assert_eq!(ByteRange::from_start(0), Ok(ByteRange::ALL));
        assert!(overflow.to_string().contains("beyond"));
    }

    #[test]
    fn neighbours_do_not_overlap() {
        let a = ByteRange::raw(0, 10);
        assert!(!a.overlaps(ByteRange::raw(10, 20)));
        assert!(a.overlaps(ByteRange::raw(9, 10)));
        assert!(ByteRange::ALL.overlaps(ByteRange::raw(u64::MAX - 1, u64::MAX)));
    }
}
