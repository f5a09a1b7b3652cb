//! The front: the ranges that are held without having waited, in a table of stripes.
//!
//! A range is claimed piece by piece, each by one compare-exchange, none of them touching a word that
//! disjoint requests elsewhere in the file touch. `striped` decides what goes here, and what queues.

pub(crate) mod stripe;
pub(crate) mod table;
pub(crate) mod whole;
