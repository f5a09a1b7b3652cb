//! Goal: comments, documents, help texts and messages name their actors in the field's terms.
//!
//! `language-ceilings.txt` has the maximum number of hard clauses of each folder. The test fails if a folder has more
//! clauses, and also if it has fewer, until the ceiling is lowered.
//! `MILLPOND_LOWER_CEILINGS=1 cargo test -p millpond-checks --test language` lowers all ceilings to the present counts.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use millpond_checks::hard_clauses;

const CEILINGS: &str = "language-ceilings.txt";
/// Number of clauses that a failure prints for each folder.
const SHOWN: usize = 12;

/// Files that are not checked: records of the past, and this check's own list of constructions.
const NOT_READ: &[&str] = &["CHANGELOG.md", "crates/checks/src/prose.rs"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// All files that git lists, relative to the root.
fn files() -> Vec<String> {
    let listed = Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard"])
        .current_dir(root())
        .output()
        .expect("git is missing: install the package git");
    assert!(listed.status.success(), "{}", String::from_utf8_lossy(&listed.stderr));
    String::from_utf8(listed.stdout).expect("UTF-8").lines().map(str::to_owned).collect()
}

/// The folder that a file counts for: a folder of a crate's sources, of the documents, or the root.
fn folder_of(file: &str) -> String {
    let parts: Vec<&str> = file.split('/').collect();
    let depth = match parts[..] {
        ["crates", _, "src", _, _, ..] => 4,
        ["crates", _, _, _, ..] => 3,
        ["crates" | "integrations", _, _, ..] => 2,
        [_, _, ..] => 1,
        _ => return ".".into(),
    };
    parts[..depth].join("/")
}

fn ceilings() -> BTreeMap<String, usize> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(CEILINGS);
    let text = fs::read_to_string(path).unwrap_or_default();
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let pair = |line: &str| {
        let (count, folder) = line.trim().split_once(' ')?;
        Some((folder.trim().to_owned(), count.parse().ok()?))
    };
    lines.map(|line| pair(line).unwrap_or_else(|| panic!("{CEILINGS}: {line}"))).collect()
}

fn write_ceilings(counts: &BTreeMap<String, usize>) {
    let mut text = String::from(
        "# Hard clauses that a folder may hold: tests/language.rs. These numbers only fall.\n",
    );
    for (folder, count) in counts.iter().filter(|(_, count)| **count > 0) {
        text += &format!("{count:5} {folder}\n");
    }
    fs::write(Path::new(env!("CARGO_MANIFEST_DIR")).join(CEILINGS), text).expect("a writable file");
}

#[test]
fn hard_clauses_only_become_fewer() {
    let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for file in files().iter().filter(|file| !NOT_READ.contains(&file.as_str())) {
        // Skips files that are deleted but still listed, and files that are not text.
        let Ok(text) = fs::read_to_string(root().join(file)) else { continue };
        for hard in hard_clauses(Path::new(file), &text) {
            let line = format!("{file}: {}  [{}]", hard.clause, hard.advice);
            found.entry(folder_of(file)).or_default().push(line);
        }
    }
    let ceilings = ceilings();
    let count = |folder: &String| found.get(folder).map_or(0, Vec::len);
    let ceiling = |folder: &String| ceilings.get(folder).copied().unwrap_or(0);
    let mut failures = String::new();
    for (folder, clauses) in &found {
        if clauses.len() > ceiling(folder) {
            failures +=
                &format!("{folder}: {} hard clauses, ceiling {}\n", clauses.len(), ceiling(folder));
            for clause in clauses.iter().take(SHOWN) {
                failures += &format!("    {clause}\n");
            }
        }
    }
    assert!(
        failures.is_empty(),
        "\n{failures}name the actor in the field's terms; see CONTRIBUTING.md"
    );
    if std::env::var_os("MILLPOND_LOWER_CEILINGS").is_some() {
        write_ceilings(&found.iter().map(|(folder, all)| (folder.clone(), all.len())).collect());
        return;
    }
    let lower: Vec<&String> =
        ceilings.keys().filter(|folder| count(folder) < ceiling(folder)).collect();
    assert!(
        lower.is_empty(),
        "fewer hard clauses than {CEILINGS} allows in {lower:?}: run \
         MILLPOND_LOWER_CEILINGS=1 cargo test -p millpond-checks --test language"
    );
}

#[test]
fn files_count_for_their_folder() {
    assert_eq!(folder_of("README.md"), ".");
    assert_eq!(folder_of("docs/guide/start.md"), "docs");
    assert_eq!(folder_of("crates/x/src/cache/page.rs"), "crates/x/src/cache");
    assert_eq!(folder_of("crates/x/src/lib.rs"), "crates/x/src");
    assert_eq!(folder_of("crates/x/README.md"), "crates/x");
}
