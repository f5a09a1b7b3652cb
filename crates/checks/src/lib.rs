//! Reads the sources of a crate as text, and says which file takes names from which.
//!
//! What counts is production code: items under `cfg(test)`, `cfg(loom)` and `cfg(doc)` are left out. A
//! `mod.rs` is a file like any other. A name that a file only hands on (`pub use`) counts as the file's
//! that defines it. Calls of methods are not seen: they follow from types that somebody imported.

mod graph;
mod module;
mod names;
mod prose;
mod source;

pub use graph::{circles, upward_imports};
pub use module::is_production;
pub use prose::{CONSTRUCTIONS, HardClause, hard_clauses};
pub use source::{Crate, SourceFile};

/// The crates whose sources are checked: the name, and the root below `crates`.
pub const CRATES: &[(&str, &str)] = &[
    ("millpond", "millpond/src/lib.rs"),
    ("millpond-preload", "millpond-preload/src/lib.rs"),
    ("millpond-c", "millpond-c/src/lib.rs"),
    ("millpond-objects", "millpond-objects/src/lib.rs"),
    ("millpond-cli", "millpond-cli/src/main.rs"),
    ("millpond-rangelock", "rangelock/src/lib.rs"),
    ("millpond-rangelock-peers", "rangelock-peers/src/lib.rs"),
    ("millpond-bench-peers", "bench-peers/src/lib.rs"),
    ("millpond-exit-watcher", "exit-watcher/src/lib.rs"),
    ("millpond-checks", "checks/src/lib.rs"),
];
