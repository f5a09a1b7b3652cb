//! Goal: every cited rule can be found: a crate defines each label once, and each citation leads to a definition.
//!
//! A module's header defines rules as `- **X1**`. The module itself cites a rule as `X1`, other modules cite it as
//! `module.X1`, where `module` is the name of its file or folder.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// The crates whose rules are checked.
const COVERED: &[&str] = &["millpond"];

struct Source {
    /// The path below `src`.
    name: String,
    text: String,
}

impl Source {
    /// The module name by which its rules are cited.
    fn module(&self) -> &str {
        let path = self.name.strip_suffix("/mod.rs").unwrap_or(&self.name);
        path.rsplit('/').next().expect("a name").trim_end_matches(".rs")
    }

    fn definitions(&self) -> impl Iterator<Item = &str> {
        let rules = self.text.lines().filter_map(|line| line.strip_prefix("//! - **"));
        rules.filter_map(|rule| rule.split("**").next()).filter(|label| is_label(label))
    }

    /// The labels in its comments, each with its line and the module named before it.
    fn citations(&self) -> Vec<(usize, Option<&str>, &str)> {
        let mut found = Vec::new();
        for (number, line) in self.text.lines().enumerate() {
            let Some((_, comment)) = line.split_once("//") else { continue };
            let is_name = |c: char| c.is_alphanumeric() || c == '_';
            let mut end = 0;
            while let Some(start) = comment[end..].find(is_name).map(|at| end + at) {
                let rest = &comment[start..];
                end = start + rest.find(|c| !is_name(c)).unwrap_or(rest.len());
                let word = &comment[start..end];
                // The name of an eviction policy.
                if !is_label(word) || comment[start..].starts_with("S3-FIFO") {
                    continue;
                }
                let before = comment[..start].strip_suffix('.').unwrap_or_default();
                let module = before.rsplit(|c| !is_name(c)).next().filter(|it| !it.is_empty());
                found.push((number + 1, module, word));
            }
        }
        found
    }
}

/// One or two capital letters, and a number.
fn is_label(word: &str) -> bool {
    let letters = word.chars().take_while(char::is_ascii_uppercase).count();
    let digits = &word[letters..];
    (1..=2).contains(&letters)
        && (1..=2).contains(&digits.len())
        && digits.chars().all(|c| c.is_ascii_digit())
}

/// Labels that a crate defines twice, and citations of labels that no module defines.
fn findings(sources: &[Source]) -> Vec<String> {
    let mut findings = Vec::new();
    let mut defined: BTreeMap<&str, &Source> = BTreeMap::new();
    for source in sources {
        for label in source.definitions() {
            let first = &defined.entry(label).or_insert(source).name;
            if *first != source.name || source.definitions().filter(|it| *it == label).count() > 1 {
                findings.push(format!("{}: {label} is defined in {first}, too", source.name));
            }
        }
    }
    findings.dedup();
    for source in sources {
        for (line, module, label) in source.citations() {
            let module = module.unwrap_or(source.module());
            if defined.get(label).is_none_or(|it| it.module() != module) {
                let name = &source.name;
                findings.push(format!("{name}:{line}: {module} does not define {label}"));
            }
        }
    }
    findings
}

fn read(folder: &Path, below: &str, sources: &mut Vec<Source>) {
    for entry in fs::read_dir(folder).expect("a folder of sources") {
        let entry = entry.expect("an entry");
        let name = format!("{below}{}", entry.file_name().to_str().expect("UTF-8"));
        if entry.path().is_dir() {
            read(&entry.path(), &format!("{name}/"), sources);
        } else if name.ends_with(".rs") {
            let text = fs::read_to_string(entry.path()).expect("a source");
            sources.push(Source { name, text });
        }
    }
}

#[test]
fn rules_can_be_found() {
    let mut all = Vec::new();
    for krate in COVERED {
        let mut sources = Vec::new();
        let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(krate).join("src");
        read(&src, "", &mut sources);
        sources.sort_by(|one, other| one.name.cmp(&other.name));
        all.extend(findings(&sources).into_iter().map(|finding| format!("{krate}: {finding}")));
    }
    assert!(all.is_empty(), "\n{}", all.join("\n"));
}

#[test]
fn wrong_labels_are_found() {
    let source = |name: &str, text: &str| Source { name: name.to_string(), text: text.to_string() };
    let find = |own: &str| {
        let other = source("pond/mod.rs", "//! - **W1** Ducks swim.\n//! - **W2** See W1.\n");
        findings(&[other, source("pond/reed.rs", own)])
    };
    assert_eq!(
        find("//! - **R1** Reeds stand.\n// R1 and pond.W2, not S3-FIFO or u64.\n"),
        [""; 0]
    );
    assert_eq!(
        find("//! - **R1** a\n//! - **R1** b\n"),
        ["pond/reed.rs: R1 is defined in pond/reed.rs, too"]
    );
    assert_eq!(find("//! - **W1** a\n")[0], "pond/reed.rs: W1 is defined in pond/mod.rs, too");
    assert_eq!(find("fn f() {} // (W2)\n"), ["pond/reed.rs:1: reed does not define W2"]);
    assert_eq!(find("\n/// By pond.W3.\n"), ["pond/reed.rs:2: pond does not define W3"]);
    assert_eq!(find("// reed.R1-back\n"), ["pond/reed.rs:1: reed does not define R1"]);
}
