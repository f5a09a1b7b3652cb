//! Goal: a name identifies one type and one file.
//!
//! Within a crate no two types of production code have the same name, and no two files do (except `mod.rs`).
//! `names-used-twice.txt` lists the remaining exceptions. The test fails for a new one, and for an entry that is resolved.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use millpond_checks::{CRATES, Crate};

const LIST: &str = "names-used-twice.txt";

fn read(name: &str, root: &str) -> Crate {
    Crate::read(name, &Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(root))
}

/// The names that a crate uses twice, as `crate kind name`, with the files.
fn used_twice(of: &Crate) -> BTreeMap<String, Vec<String>> {
    let mut found = BTreeMap::new();
    for (name, files) in of.types.iter().filter(|(_, files)| files.len() > 1) {
        found.insert(format!("{} type {name}", of.name), files.clone());
    }
    let mut files: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for path in of.files.keys() {
        let name = path.rsplit('/').next().unwrap_or(path);
        files.entry(name).or_default().push(path.clone());
    }
    files.remove("mod.rs");
    for (name, paths) in files.into_iter().filter(|(_, paths)| paths.len() > 1) {
        found.insert(format!("{} file {name}", of.name), paths);
    }
    found
}

#[test]
fn names_are_used_once() {
    let mut found = BTreeMap::new();
    for (name, root) in CRATES {
        found.extend(used_twice(&read(name, root)));
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(LIST);
    let text = fs::read_to_string(path).unwrap_or_default();
    let listed: BTreeSet<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
    let new: Vec<String> = (found.iter().filter(|(name, _)| !listed.contains(name.as_str())))
        .map(|(name, files)| format!("{name}: {}", files.join(", ")))
        .collect();
    let resolved: Vec<&&str> = listed.iter().filter(|name| !found.contains_key(**name)).collect();
    assert!(new.is_empty(), "names that a crate uses twice:\n{}", new.join("\n"));
    assert!(resolved.is_empty(), "{LIST} lists names that are no longer used twice: {resolved:?}");
}

#[test]
fn a_name_that_is_used_twice_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let src = folder.path();
    fs::create_dir(src.join("pond")).unwrap();
    fs::write(src.join("lib.rs"), "mod pond;\nmod reed;\nstruct Duck;\n").unwrap();
    fs::write(src.join("pond/mod.rs"), "mod reed;\n#[cfg(test)]\nmod tests { struct Frog; }\n")
        .unwrap();
    fs::write(src.join("pond/reed.rs"), "enum Duck {}\nstruct Frog;\n").unwrap();
    fs::write(src.join("reed.rs"), "#[cfg(test)]\nstruct Frog;\n").unwrap();
    let found = used_twice(&Crate::read("lake", &src.join("lib.rs")));
    let names: Vec<&String> = found.keys().collect();
    assert_eq!(names, ["lake file reed.rs", "lake type Duck"]);
}
