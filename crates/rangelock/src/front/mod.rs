//! The front: ranges that were granted without waiting, in a table of stripes.
//!
//! A range is claimed piece by piece, each by one compare-exchange on a word that disjoint requests elsewhere in the file
//! do not touch. `striped` decides which requests use the front and which queue.

pub(crate) mod stripe;
pub(crate) mod table;
pub(crate) mod whole;
