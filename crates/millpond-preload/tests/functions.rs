//! The table of calls is complete for libc. Incident: functions of libc that the library did not replace gave
//! programs access to files past the library.
//!
//! Each function that libc exports is in the table of calls, or in a list that states the reason why the library need
//! not replace it. The tests check the libc of this machine, and that of another architecture by a list of its names.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use common::table::{listed, rows};
use object::Endianness;
use object::elf::{FileHeader64, SHT_DYNSYM, STT_FUNC, STT_GNU_IFUNC};
use object::read::elf::{FileHeader, Sym};

const OTHERS: &str = include_str!("programs/other_functions.txt");
const AARCH64: &str = include_str!("programs/aarch64_functions.txt");

/// The functions that a library exports to programs, without those for libc's own libraries.
fn exported(library: &Path) -> BTreeSet<String> {
    let data = std::fs::read(library).unwrap();
    let data = data.as_slice();
    let header = FileHeader64::<Endianness>::parse(data).unwrap();
    let endian = header.endian().unwrap();
    let sections = header.sections(endian, data).unwrap();
    let versions = sections.versions(endian, data).unwrap();
    let symbols = sections.symbols(endian, data, SHT_DYNSYM).unwrap();
    let is_private = |index| {
        let versions = versions.as_ref()?;
        let version = versions.version(versions.version_index(endian, index).index()).unwrap()?;
        Some(version.name() == b"GLIBC_PRIVATE")
    };
    symbols
        .enumerate()
        .filter(|(_, symbol)| [STT_FUNC, STT_GNU_IFUNC].contains(&symbol.st_type()))
        .filter(|(index, symbol)| {
            !symbol.is_undefined(endian) && !is_private(*index).unwrap_or_default()
        })
        .map(|(_, symbol)| symbols.symbol_name(endian, symbol).unwrap())
        .map(|name| String::from_utf8(name.to_vec()).unwrap())
        .collect()
}

/// The file from which this process has loaded the library `path`.
fn loaded(name: &str) -> std::path::PathBuf {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let mut paths = maps.lines().filter_map(|line| line.split_whitespace().nth(5));
    paths.find(|path| path.ends_with(name)).unwrap_or_else(|| panic!("no {name}")).into()
}

fn replaced() -> BTreeSet<&'static str> {
    rows().into_iter().flat_map(|row| row.names).collect()
}

#[track_caller]
fn assert_accounted_for<'a>(functions: impl Iterator<Item = &'a str>) {
    let (replaced, others) = (replaced(), listed(OTHERS).collect::<BTreeSet<_>>());
    let missing: Vec<_> =
        functions.filter(|name| !replaced.contains(name) && !others.contains(name)).collect();
    assert!(missing.is_empty(), "what becomes of {missing:?}?");
}

/// Goal: each function by which a program of this libc can access a file is in the table or in the list.
#[test]
fn what_libc_exports_is_accounted_for() {
    let functions = exported(&loaded("/libc.so.6"));
    assert!(functions.len() > 2000);
    assert_accounted_for(functions.iter().map(String::as_str));
}

/// Goal: AArch64 has no such function that is missing here.
#[test]
fn what_libc_exports_on_aarch64_is_accounted_for() {
    assert!(listed(AARCH64).count() > 2000);
    assert_accounted_for(listed(AARCH64));
}

/// Goal: the library replaces the functions of the table, and no other.
#[test]
fn the_table_is_what_is_exported() {
    let exported = exported(common::library());
    let exported: BTreeSet<&str> = exported.iter().map(String::as_str).collect();
    assert_eq!(exported, replaced());
}

/// Goal: each name occurs once.
#[test]
fn each_name_is_there_once() {
    let mut seen = BTreeMap::new();
    let of_table = rows().into_iter().flat_map(|row| row.names).map(|name| (name, "the table"));
    for (name, place) in of_table.chain(listed(OTHERS).map(|name| (name, "the list"))) {
        assert_eq!(seen.insert(name, place), None, "{name}, in {place}, too");
    }
}

const RUN: &str = include_str!("../../../docs/run-calls.md");
const BEGIN: &str = "<!-- calls: begin -->\n";
const END: &str = "<!-- calls: end -->\n";

/// Tests that try each call of the table; other tests try the calls that these leave out.
const TRY_ALL: [&str; 2] = ["hooks", "system_calls"];

/// Each test file, with the programs that it names.
fn tests() -> BTreeMap<String, String> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    let read = |path: &Path| std::fs::read_to_string(path).unwrap();
    let programs = std::fs::read_dir(dir.join("programs")).unwrap().map(|entry| entry.unwrap());
    let programs: Vec<_> = programs
        .map(|entry| (entry.file_name().into_string().unwrap(), read(&entry.path())))
        .filter(|(name, _)| !name.ends_with(".txt"))
        .collect();
    let files = std::fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().path());
    files
        .filter(|path| path.extension().is_some_and(|extension| extension == "rs"))
        .filter(|path| !path.ends_with("functions.rs"))
        .map(|path| {
            let mut text = read(&path);
            for (name, program) in &programs {
                if text.contains(&format!("\"{name}\"")) {
                    text += program;
                }
            }
            (path.file_stem().unwrap().to_str().unwrap().to_owned(), text)
        })
        .collect()
}

fn names_word(text: &str, word: &str) -> bool {
    let is_part = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_';
    text.match_indices(word).any(|(at, _)| {
        !text.as_bytes()[..at].last().is_some_and(is_part)
            && !text.as_bytes().get(at + word.len()).is_some_and(is_part)
    })
}

/// The table of docs/run-calls.md.
fn calls_as_text() -> String {
    let (tests, mut text, mut untested) = (tests(), String::new(), Vec::new());
    text += "| functions | system calls | | tests |\n|---|---|---|---|\n";
    for row in rows() {
        let system_calls: Vec<_> = row.numbers.iter().map(|name| format!("SYS_{name}")).collect();
        let words = || row.names.iter().copied().chain(system_calls.iter().map(String::as_str));
        let calls = |file: &&&str| words().any(|word| names_word(&tests[**file], word));
        let mut tested: Vec<&str> = TRY_ALL.iter().filter(calls).copied().collect();
        if tested.is_empty() {
            tested = tests.keys().map(String::as_str).filter(|file| calls(&file)).collect();
        }
        if tested.is_empty() {
            untested.push(words().collect::<Vec<_>>().join("/"));
        }
        let code = |names: &[&str]| {
            names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
        };
        let (names, numbers) = (code(&row.names), code(&row.numbers));
        text += &format!("| {names} | {numbers} | {} | {} |\n", row.class, code(&tested));
    }
    assert!(untested.is_empty(), "called by no test: {untested:?}");
    text
}

/// Goal: at least one test tries each call, and docs/run-calls.md states how the library treats each. With
/// `MILLPOND_WRITE_DOCS=1` the test writes the page.
#[cfg(target_arch = "x86_64")]
#[test]
fn the_documentation_has_every_call() {
    let (before, rest) = RUN.split_once(BEGIN).unwrap();
    let (calls, after) = rest.split_once(END).unwrap();
    let expected = calls_as_text();
    if std::env::var_os("MILLPOND_WRITE_DOCS").is_some() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/run-calls.md");
        std::fs::write(path, [before, BEGIN, &expected, END, after].concat()).unwrap();
    } else {
        assert!(calls == expected, "docs/run-calls.md is not of this table: MILLPOND_WRITE_DOCS=1");
    }
}
