//! Goal: each promise of the documents has tests, and the table of promises in docs/testing.md is correct: a document
//! contains the promise word for word, each test exists, and each longer version is a part of `scripts/long` or a suite of
//! `millpond-bench`.

use std::fs;
use std::path::{Path, PathBuf};

const HEADING: &str = "## Documented promises";

/// The documents that make promises.
const DOCUMENTS: &[&str] = &[
    "README.md",
    "docs/run.md",
    "docs/run-internals.md",
    "docs/objects.md",
    "docs/sqlite.md",
    "docs/guide/rust.md",
    "docs/guide/c.md",
    "docs/guide/concepts.md",
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The words of a text, separated by single spaces, so that line breaks do not matter.
fn words(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn sources(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// The texts between backquotes.
fn quoted(cell: &str) -> Vec<&str> {
    cell.split('`').skip(1).step_by(2).collect()
}

#[test]
fn each_promise_has_its_tests() {
    let root = root();
    let documents: Vec<String> = DOCUMENTS.iter().map(|it| read(&root.join(it))).collect();
    let promises = words(&documents.join("\n\n"));
    let document = read(&root.join("docs/testing.md"));
    let long = read(&root.join("scripts/long"));
    let suites = read(&root.join("crates/millpond-bench/src/bench/mod.rs"));
    let (_, section) = document.split_once(HEADING).expect("the section is there");
    let section = section.split("\n## ").next().unwrap_or_default();
    let mut files = Vec::new();
    for crate_dir in fs::read_dir(root.join("crates")).unwrap().flatten() {
        sources(&crate_dir.path().join("tests"), &mut files);
        sources(&crate_dir.path().join("src"), &mut files);
    }
    let files: Vec<_> = files.into_iter().map(|path| (read(&path), path)).collect();
    let is_test = |program: &str, name: &str| {
        // The test attribute precedes the function, with at most comments in between.
        let is_there = |text: &str| {
            let above = text.split_once(&format!("fn {name}(")).map(|(above, _)| above);
            let item = above.and_then(|above| above.rsplit("\n\n").next());
            item.is_some_and(|item| item.contains("test]") || item.contains("test("))
        };
        files.iter().any(|(text, path)| {
            let of_program = path.iter().any(|part| part == program)
                || path.file_stem().is_some_and(|stem| stem == program);
            of_program && is_there(text)
        })
    };
    let mut rows = 0;
    let mut wrong = Vec::new();
    for row in section.lines().filter(|line| line.starts_with("| \"")) {
        rows += 1;
        let cells: Vec<&str> = row.trim_matches('|').split(" | ").map(str::trim).collect();
        let [promise, tests, longer @ ..] = &cells[..] else { panic!("no cells: {row}") };
        let promise = promise.trim_matches('"');
        if !promises.contains(&words(promise)) {
            wrong.push(format!("no document says: {promise}"));
        }
        if quoted(tests).is_empty() {
            wrong.push(format!("no test: {promise}"));
        }
        for test in quoted(tests) {
            if !test.split_once("::").is_some_and(|(program, name)| is_test(program, name)) {
                wrong.push(format!("no such test: {test}"));
            }
        }
        for part in longer.iter().flat_map(|cell| quoted(cell)) {
            let is_there = match part.strip_prefix("bench ") {
                Some(suite) => suites.contains(&format!("\"{suite}\"")),
                None => long.contains(&format!("\n{part}()")),
            };
            if !is_there {
                wrong.push(format!("neither a part of scripts/long nor a suite: {part}"));
            }
        }
    }
    assert!(rows > 30, "{rows} rows");
    assert!(wrong.is_empty(), "docs/testing.md:\n{}", wrong.join("\n"));
}
