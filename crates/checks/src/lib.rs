//! Parses the sources of a crate and reports which file uses names of which other file.
//!
//! Only production code counts: items under `cfg(test)`, `cfg(loom)` and `cfg(doc)` are left out. A `mod.rs` is a file like
//! any other. A re-exported name (`pub use`) belongs to the file that defines it. Method calls are not analysed: they need a
//! type that some import brings in.

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
    ("millpond-serve", "millpond-serve/src/lib.rs"),
    ("millpond-endpoint", "millpond-endpoint/src/lib.rs"),
    ("millpond-python", "millpond-python/src/lib.rs"),
    ("millpond-cli", "millpond-cli/src/main.rs"),
    ("millpond-bench", "millpond-bench/src/main.rs"),
    ("millpond-rangelock", "rangelock/src/lib.rs"),
    ("millpond-rangelock-peers", "rangelock-peers/src/lib.rs"),
    ("millpond-bench-peers", "bench-peers/src/lib.rs"),
    ("millpond-checks", "checks/src/lib.rs"),
];
