//! POSIX locks under the library: other processes see the same locks as on the kernel alone.
//!
//! Incident: a SQLite database was corrupted, because a program's POSIX locks vanished while it held them. They end
//! when any descriptor of the file is closed. The engine had deferred the close of a duplicate because of a thread in
//! a hit, and the open of another file then closed it. Exec closed duplicates, too.

mod common;

use std::process::Stdio;

use common::{ALL_MODES, Mode, Pond, require, succeed};

/// Runs the program with the library, in all modes, and without it; the output must be the same.
fn same(scenario: &str) {
    let alone = Pond::new();
    let program = alone.compile("posix_locks.c", &["-O1"]);
    let expected = succeed(alone.plain(&program).arg(scenario));
    assert!(!expected.is_empty());
    let in_modes = ALL_MODES.map(|mode| (Pond::new().in_mode(mode), format!("{mode:?}")));
    let at_random = Pond::unmeasured().map(|pond| (pond, "at random".into()));
    for (pond, mode) in in_modes.into_iter().chain(at_random) {
        let found = succeed(pond.served(&program).arg(scenario));
        for (expected, found) in expected.lines().zip(found.lines()) {
            assert_eq!(found, expected, "{mode}");
        }
        assert_eq!(found.lines().count(), expected.lines().count(), "{mode}");
    }
}

/// Goal: a deferred close ends no lock that was taken after the program's close, by whichever call it was taken.
#[test]
fn closes_that_are_put_off() {
    same("deferred");
}

/// Goal: each way to take a lock, with each way to close another descriptor of the file.
#[test]
fn ways_to_lock_and_to_close() {
    same("ways");
}

/// Goal: exec keeps locks exactly if it keeps all of the program's descriptors of the file.
#[test]
fn exec_keeps_locks() {
    same("exec");
}

/// Goal: a lock survives that the program has from before an exec, on a descriptor whose open no hook saw.
#[test]
fn locks_from_before_exec() {
    same("inherit");
}

/// Goal: two programs, one under the library and one on the kernel, write a database; it stays consistent and has
/// every acknowledged transaction.
#[test]
fn two_programs_write_a_database() {
    require("sqlite3", "sqlite3");
    let all = [
        (None, 100),
        (Some(Mode::Through), 600),
        (Some(Mode::Back), 100),
        (Some(Mode::BackDirect), 100),
    ];
    for (mode, count) in all {
        let pond = mode.map_or_else(Pond::new, |mode| Pond::new().in_mode(mode));
        let program = pond.compile_with("sqlite_locks.c", &["-O1"], &["-lsqlite3"]);
        let schema =
            "create table counter(n); insert into counter values(0); create table data(d);";
        succeed(pond.plain("sqlite3").args(["db", schema]));
        let rounds = count.to_string();
        let mut other = pond.plain(&program);
        let other = other.args([&rounds, "one"]).stdout(Stdio::piped()).spawn().unwrap();
        let mut this = if mode.is_some() { pond.served(&program) } else { pond.plain(&program) };
        let acknowledged = succeed(this.args([&rounds, "two"]));
        let other = other.wait_with_output().unwrap();
        assert!(other.status.success(), "{mode:?}: the program on the kernel failed");
        assert_eq!(acknowledged.trim(), rounds);
        let check = "pragma integrity_check; select n from counter; select count(*) from data;";
        let found = succeed(pond.plain("sqlite3").args(["db", check]));
        assert_eq!(found, format!("ok\n{}\n{}\n", 2 * count, 10 * count), "{mode:?}");
    }
}
