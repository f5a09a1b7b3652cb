//! Other byte-range locks behind the same face, to compare with.

/// For now the same queue under one mutex.
pub use crate::striped::Striped as IntervalTree;
