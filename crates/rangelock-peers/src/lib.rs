//! The byte-range locks that others built, behind the face of `millpond_rangelock`, to compare with.
//!
//! | lock | held ranges are in | where it ends |
//! |---|---|---|
//! | [`WholeFile`] | one counter | every writer excludes everybody |
//! | [`IntervalTree`] | an interval tree under a mutex | one tree walk at a time |
//! | [`MutexBTree`] | a B+tree under a mutex | the same, with shorter walks |
//! | [`OlcBTree`] | a B+tree, each leaf locked alone | all meet in one leaf if few are held |
//!
//! All of them queue waiting requests as `Striped` does, by its own queue, so that what is compared is
//! the way without waiting. `millpond bench range-lock` compares them.

mod btree;
mod interval_tree;
mod mutex_btree;
mod olc;
mod whole_file;

pub use interval_tree::IntervalTree;
pub use mutex_btree::MutexBTree;
pub use olc::OlcBTree;
pub use whole_file::WholeFile;
