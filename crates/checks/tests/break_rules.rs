//! Goal: each test that `scripts/break-rules` names exists, and each place that it breaks, so that a new name does not
//! silence a rule's check.
//!
//! An entry is `BUILD TARGET` or `BUILD TARGET FILTER`: a file of `crates/millpond/tests`, or `lib`, and a part of the
//! names of its tests.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use regex::Regex;

fn millpond() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../millpond")
}

/// The sources below `path`, as one text.
fn sources(path: &Path) -> String {
    if path.is_file() {
        return fs::read_to_string(path).expect("a readable source");
    }
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    entries.map(|entry| sources(&entry.path())).collect()
}

fn has_test(target: &str, filter: &str) -> bool {
    let tests = millpond().join("tests");
    let text = match target {
        "lib" => sources(&millpond().join("src")),
        _ => sources(&tests.join(format!("{target}.rs"))) + &sources(&tests.join(target)),
    };
    let name = filter.rsplit("::").next().unwrap_or_default();
    text.lines().filter_map(|line| line.trim_start().strip_prefix("fn ")).any(|line| {
        let end = line.find('(').unwrap_or(0);
        line[..end].contains(name)
    })
}

#[test]
fn filters_select_tests() {
    let script = sources(&millpond().join("../../scripts/break-rules"));
    let entry = Regex::new(r#""(?:debug|release|loom) ([a-z_]+)(?: ([a-z_:]+))?""#).expect("valid");
    let entries: Vec<_> = entry.captures_iter(&script).collect();
    assert!(entries.len() > 30, "{} entries", entries.len());
    for entry in &entries {
        let filter = entry.get(2).map_or("", |filter| filter.as_str());
        assert!(has_test(&entry[1], filter), "no such test: {}", &entry[0]);
    }
}

#[test]
fn places_exist() {
    let script = millpond().join("../../scripts/break-rules");
    let check = Command::new(script).arg("--check").output().expect("python3");
    assert!(check.status.success(), "{}", String::from_utf8_lossy(&check.stderr));
}
