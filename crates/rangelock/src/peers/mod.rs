//! The byte-range locks that others built, behind the same face, to compare with.

mod btree;
mod interval_tree;
mod mutex_btree;
mod olc;
mod whole_file;

pub use interval_tree::IntervalTree;
pub use mutex_btree::MutexBTree;
pub use olc::OlcBTree;
pub use whole_file::WholeFile;
