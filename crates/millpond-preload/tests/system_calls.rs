//! System calls by number have the same effect on served files as the functions of libc.
//!
//! Incident: programs that made some calls by number and others by name read wrong data, because the library saw only
//! the latter. The table of calls and `programs/other_system_calls.txt` state the treatment of every number. A call
//! that concerns served files behaves as on the kernel.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::process::{Command, Stdio};

use common::table::rows;
use common::{ALL_MODES, Mode, Pond, require, succeed};

const OTHERS: &str = include_str!("programs/other_system_calls.txt");

/// The treatment of each system call: its class in the table, or the list's class for calls that are not in the
/// table. Also returns the calls of the table that only other tests try, or no test.
fn listed() -> (BTreeMap<&'static str, &'static str>, BTreeSet<&'static str>) {
    let mut all = BTreeMap::new();
    for row in rows() {
        for number in row.numbers {
            assert_eq!(all.insert(number, row.class), None, "{number} is there twice");
        }
    }
    let mut untried = BTreeSet::new();
    for line in OTHERS.lines().filter(|line| !line.starts_with('#')) {
        let (fate, names) = line.split_once(": ").unwrap();
        for name in names.split(' ') {
            if fate == "untried" || fate.starts_with("elsewhere") {
                assert!(all.contains_key(name), "{name} is not in the table");
                untried.insert(name);
            } else {
                assert_eq!(all.insert(name, fate), None, "{name} is there twice");
            }
        }
    }
    (all, untried)
}

/// The names in the headers.
fn known() -> Vec<String> {
    require("gcc", "gcc");
    let mut gcc = Command::new("gcc");
    gcc.args(["-E", "-dM", "-"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut gcc = gcc.spawn().unwrap();
    gcc.stdin.take().unwrap().write_all(b"#include <sys/syscall.h>\n").unwrap();
    let output = gcc.wait_with_output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let names = text.split_whitespace().filter_map(|word| word.strip_prefix("__NR_"));
    names.map(str::to_owned).collect()
}

/// Goal: each system call of the headers is in the table or in the list.
#[test]
fn every_number_is_accounted_for() {
    let (listed, _) = listed();
    let known = known();
    assert!(known.len() > 250);
    let missing: Vec<_> = known.iter().filter(|name| !listed.contains_key(name.as_str())).collect();
    assert!(missing.is_empty(), "what becomes of {missing:?}?");
}

/// Goal: each system call that concerns served files has the kernel's results, errors, bytes, sizes, offsets and
/// times.
#[test]
fn what_is_asked_for_by_number_is_the_same() {
    let alone = Pond::new();
    let program = alone.compile("by_number.c", &["-O1"]);
    let expected = succeed(&mut alone.plain(&program));
    let tried: BTreeSet<&str> =
        expected.lines().filter_map(|line| line.strip_prefix("case ")).collect();
    let known: BTreeSet<String> = known().into_iter().collect();
    let (listed, untried) = listed();
    for (name, fate) in listed {
        let is_tried = !["plain", "other"].contains(&fate) && !untried.contains(name);
        assert!(!is_tried || !known.contains(name) || tried.contains(name), "{name} is not tried");
    }
    for mode in ALL_MODES {
        let pond = Pond::new().in_mode(mode);
        let found = succeed(&mut pond.served(&program));
        let mut case = "";
        for (expected, found) in expected.lines().zip(found.lines()) {
            case = expected.strip_prefix("case ").unwrap_or(case);
            assert_eq!(found, expected, "{mode:?}: {case}");
        }
        assert_eq!(found.lines().count(), expected.lines().count(), "{mode:?}");
        let report = pond.report();
        assert!(mode == Mode::Through || report.served_files >= 150, "{}", report.lines);
    }
}
