//! Goal: data flows one way, and the imports show it.
//!
//! `cargo test -p millpond-checks -- --nocapture` prints what ties a circle.

use std::path::Path;

use millpond_checks::{Crate, circles, upward_imports};

fn read(name: &str, root: &str) -> Crate {
    Crate::read(name, &Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(root))
}

fn has_no_circles(of: &Crate) {
    let circles = circles(of);
    let mut text = String::new();
    for circle in &circles {
        text += &format!("{}: {} files import each other\n", of.name, circle.len());
        for file in circle {
            for (to, names) in of.files[file].imports.iter().filter(|(to, _)| circle.contains(*to))
            {
                let names: Vec<&str> = names.iter().map(String::as_str).collect();
                text += &format!("  {file} -> {to}: {}\n", names.join(", "));
            }
        }
    }
    assert!(circles.is_empty(), "{text}");
}

#[test]
fn the_engine_has_no_import_circle() {
    has_no_circles(&read("millpond", "millpond/src/lib.rs"));
}

/// The engine's layers, as ARCHITECTURE.md draws them: what is in one line knows only lines below.
const ENGINE: &[&[&str]] = &[
    &["lib.rs"],
    &["face/engine.rs", "preload.rs"],
    &["queue"],
    &["face"],
    &["direct"],
    &["write"],
    &["read"],
    &["flush"],
    &["inode"],
    &["writeback"],
    &["cache"],
    &["options.rs"],
    &["survival"],
    &["sim", "workers.rs", "stats.rs"],
    &["io"],
    &["advice.rs", "buffers.rs", "fault.rs", "thread.rs"],
    &["copy.rs", "error.rs", "file_id.rs", "memory.rs", "sync.rs", "units.rs"],
];

#[test]
fn the_engines_imports_lead_down_its_layers() {
    let found = upward_imports(&read("millpond", "millpond/src/lib.rs"), ENGINE);
    assert!(found.is_empty(), "{}", found.join("\n"));
}
