//! Known byte-range lock designs behind the API of `millpond_rangelock`, for comparison.
//!
//! | lock | held ranges are in | limit |
//! |---|---|---|
//! | [`WholeFile`] | one counter | every writer excludes all other requests |
//! | [`IntervalTree`] | an interval tree under a mutex | one tree walk at a time |
//! | [`MutexBTree`] | a B+tree under a mutex | the same, with shorter walks |
//! | [`OlcBTree`] | a B+tree whose leaves are locked separately | few held ranges share one leaf |
//!
//! All of them use the queue of `Striped` for waiting requests, so a comparison shows the difference of the path without
//! waiting. `millpond-bench range-lock` compares them.

mod btree;
mod interval_tree;
mod mutex_btree;
mod olc;
mod whole_file;

pub use interval_tree::IntervalTree;
pub use mutex_btree::MutexBTree;
pub use olc::OlcBTree;
pub use whole_file::WholeFile;
