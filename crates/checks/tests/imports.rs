//! Goal: data flows one way, and the imports show it.
//!
//! `cargo test -p millpond-checks -- --nocapture` prints what ties a circle.

use std::path::Path;

use millpond_checks::{Crate, circles};

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
