//! Goal: the imports of each crate form layers, without circles.
//!
//! `cargo test -p millpond-checks -- --nocapture` prints the names that form a circle.

use std::path::Path;

use millpond_checks::{CRATES, Crate, circles, upward_imports};

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
fn no_crate_has_an_import_circle() {
    for (name, root) in CRATES {
        has_no_circles(&read(name, root));
    }
}

/// The engine's layers, as in ARCHITECTURE.md: each line imports only from the lines below it.
const ENGINE: &[&[&str]] = &[
    &["lib.rs"],
    &["internals.rs"],
    &["api/engine.rs"],
    &["queue"],
    &["api"],
    &["direct_io"],
    &["write"],
    &["read"],
    &["writeback"],
    &["inode"],
    &["writeback/state"],
    &["cache"],
    &["backend.rs"],
    &["options.rs"],
    &["recovery"],
    &["sim", "workers.rs", "stats.rs"],
    &["io"],
    &["waits.rs"],
    &["page_cache"],
    &["advice.rs", "buffers.rs", "fault.rs", "thread", "thread.rs"],
    &[
        "copy.rs",
        "error.rs",
        "event.rs",
        "file_id.rs",
        "huge_memory.rs",
        "latency.rs",
        "memory.rs",
        "process_local.rs",
        "sync.rs",
        "units.rs",
    ],
    &["copy"],
];

#[test]
fn the_engines_imports_lead_down_its_layers() {
    let found = upward_imports(&read("millpond", "millpond/src/lib.rs"), ENGINE);
    assert!(found.is_empty(), "{}", found.join("\n"));
}

const PRELOAD: &[&[&str]] = &[
    &["lib.rs"],
    &["hooks"],
    &["fork.rs"],
    &["retirement.rs"],
    &["aio"],
    &["page_cache"],
    &["files"],
    &["report"],
    &["runtime"],
    &["calls.rs"],
];

#[test]
fn the_preload_librarys_imports_lead_down_its_layers() {
    let found = upward_imports(&read("millpond-preload", "millpond-preload/src/lib.rs"), PRELOAD);
    assert!(found.is_empty(), "{}", found.join("\n"));
}

const C: &[&[&str]] = &[
    &["lib.rs"],
    &["pipeline.rs"],
    &["queue.rs", "view.rs", "io.rs", "extent.rs", "durability.rs"],
    &["file.rs", "stats.rs", "buffers.rs"],
    &["engine.rs", "fault.rs"],
    &["call.rs", "objects.rs"],
    &["handle"],
    &["sync.rs"],
];

#[test]
fn the_c_librarys_imports_lead_down_its_layers() {
    let found = upward_imports(&read("millpond-c", "millpond-c/src/lib.rs"), C);
    assert!(found.is_empty(), "{}", found.join("\n"));
}

/// Goal: circles and upward imports are found in every notation, and no others are reported.
#[test]
fn finds_circles_and_upward_imports() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
    std::fs::create_dir(dir.path().join("low")).unwrap();
    file("lib.rs", "mod high; mod low; mod far; pub use high::High;");
    file("high.rs", "use crate::low; pub struct High; pub fn go() { low::deep::dig() }");
    file("low/mod.rs", "pub mod deep; pub use deep::dig;");
    // A re-exported name, inside a macro call.
    file("low/deep.rs", "pub fn dig() { println!(\"{}\", size_of::<crate::High>()) }");
    file(
        "far.rs",
        "#[cfg(doc)] use crate::low::dig; #[cfg(test)] mod tests { use crate::high::go; }",
    );
    let read = || Crate::read("example", &dir.path().join("lib.rs"));
    let layers: &[&[&str]] = &[&["lib.rs"], &["high.rs"], &["low"], &["far.rs"]];
    let circle = ["high.rs", "low/deep.rs"].map(str::to_string);
    assert_eq!(circles(&read()), [circle.into_iter().collect()]);
    assert_eq!(upward_imports(&read(), layers), ["low/deep.rs -> high.rs: High"]);
    assert_eq!(
        upward_imports(&read(), &layers[..3]),
        ["far.rs is in no layer", "low/deep.rs -> high.rs: High"]
    );
    file("low/deep.rs", "pub fn dig() {}");
    assert!(circles(&read()).is_empty() && upward_imports(&read(), layers).is_empty());
}
