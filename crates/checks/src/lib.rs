//! Reads the sources of a crate as text, and says which file takes names from which.
//!
//! What counts is production code: items under `cfg(test)`, `cfg(loom)` and `cfg(doc)` are left out. A
//! `mod.rs` is a file like any other. A name that a file only hands on (`pub use`) counts as the file's
//! that defines it. Calls of methods are not seen: they follow from types that somebody imported.

mod graph;
mod module;
mod names;
mod source;

pub use graph::{circles, upward_imports};
pub use module::is_production;
pub use source::{Crate, SourceFile};
