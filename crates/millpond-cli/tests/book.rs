//! Goal: the book is complete: its contents list every page, every link has a target, every command of the
//! guide runs.

#[path = "../../millpond/tests/common/skip.rs"]
mod skip;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const MILLPOND: &str = env!("CARGO_BIN_EXE_millpond");

fn docs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").canonicalize().unwrap()
}

/// All pages, as paths below `docs`.
fn pages() -> Vec<PathBuf> {
    let docs = docs();
    let mut pages = Vec::new();
    for folder in [docs.clone(), docs.join("guide")] {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|end| end == "md") {
                pages.push(path.strip_prefix(&docs).unwrap().to_owned());
            }
        }
    }
    pages.sort();
    pages
}

/// The text without its blocks of code.
fn prose(text: &str) -> String {
    let mut is_code = false;
    let lines = text.lines().filter(|line| {
        let is_fence = line.trim_start().starts_with("```");
        is_code ^= is_fence;
        !is_code && !is_fence
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// The targets of a page's links.
fn links(text: &str) -> Vec<String> {
    let prose = prose(text);
    let targets = prose.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
    targets.map(|(target, _)| target.to_owned()).collect()
}

/// The anchor of a heading, as mdBook and GitHub generate it.
fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.collect::<String>().to_lowercase().replace(' ', "-")
}

fn anchors(text: &str) -> Vec<String> {
    let prose = prose(text);
    let headings = prose.lines().filter(|line| line.starts_with('#'));
    headings.map(|line| anchor(line.trim_start_matches('#').trim())).collect()
}

/// The code blocks of this language, in order.
fn blocks(text: &str, language: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        if line.trim_start().starts_with("```") {
            let block: Vec<&str> =
                lines.by_ref().take_while(|line| !line.trim_start().starts_with("```")).collect();
            if line.trim_start() == format!("```{language}") {
                found.push(block.join("\n"));
            }
        }
    }
    found
}

#[test]
fn every_page_is_in_the_contents() {
    let contents = links(&fs::read_to_string(docs().join("SUMMARY.md")).unwrap());
    let summary = Path::new("SUMMARY.md");
    for page in pages().iter().filter(|page| *page != summary) {
        let name = page.to_str().unwrap();
        assert_eq!(contents.iter().filter(|one| *one == name).count(), 1, "{name}");
    }
    assert_eq!(contents.len() + 1, pages().len());
}

#[test]
fn links_lead_somewhere() {
    let mut followed = 0;
    for page in pages().iter().map(|page| docs().join(page)).chain([docs().join("../README.md")]) {
        let text = fs::read_to_string(&page).unwrap();
        for link in links(&text).iter().filter(|link| !link.contains("://")) {
            let (file, part) = link.split_once('#').unwrap_or((link, ""));
            let target = match file {
                "" => page.clone(),
                file => page.parent().unwrap().join(file),
            };
            assert!(target.exists(), "{}: {link}", page.display());
            if !part.is_empty() && target.extension().is_some_and(|end| end == "md") {
                let known = anchors(&fs::read_to_string(&target).unwrap());
                assert!(
                    known.iter().any(|one| one == part),
                    "{}: {link}: {known:?}",
                    page.display()
                );
            }
            followed += 1;
        }
    }
    assert!(followed > 50, "{followed} links");
}

/// Method: runs the blocks of a page marked `sh`, in turn, in an empty directory. The blocks marked
/// `sh,ignore` install or measure for minutes: other tests cover `scripts/install`, `scripts/install-c` and
/// `millpond-bench`.
#[test]
fn the_commands_of_the_guide_run() {
    let mut path = Path::new(MILLPOND).parent().unwrap().as_os_str().to_owned();
    path.push(":");
    path.push(std::env::var_os("PATH").unwrap());
    let mut run = 0;
    for page in pages().iter().filter(|page| page.starts_with("guide")) {
        let dir = tempfile::tempdir().unwrap();
        for block in blocks(&fs::read_to_string(docs().join(page)).unwrap(), "sh") {
            let mut bash = Command::new("bash");
            bash.args(["-euo", "pipefail", "-c", &block]).current_dir(&dir).env("PATH", &path);
            let done = bash.output().unwrap();
            let (out, error) = (&done.stdout, String::from_utf8_lossy(&done.stderr));
            let out = String::from_utf8_lossy(out);
            assert!(done.status.success(), "{}:\n{block}\n{out}{error}", page.display());
            if block.contains("--explain") {
                let line = error.lines().find(|line| line.contains("/data")).unwrap_or_default();
                assert!(line.contains("served") || line.contains("adopted"), "{error}");
            }
            run += 1;
        }
    }
    assert!(run >= 2, "{run} blocks");
}

#[test]
fn mdbook_builds_it() {
    if Command::new("mdbook").arg("--version").output().is_err() {
        skip::skip("there is no mdbook");
        return;
    }
    let to = tempfile::tempdir().unwrap();
    let mut mdbook = Command::new("mdbook");
    let done = mdbook.arg("build").arg(docs()).arg("-d").arg(to.path()).output().unwrap();
    let error = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success() && !error.contains("WARN"), "{error}");
    for page in ["guide/start.html", "run.html", "promises.html"] {
        let html = fs::read_to_string(to.path().join(page)).unwrap();
        assert!(html.contains("Millpond"), "{page}");
    }
    // Pictures are copied, and included files are in place.
    assert!(to.path().join("pictures/hit.svg").exists());
    let c = fs::read_to_string(to.path().join("guide/c.html")).unwrap();
    assert!(c.contains("millpond_engine_create"), "the program is included");
}
