//! A SQLite database was corrupted: a program's POSIX locks vanished while it held them. They end when any
//! descriptor of the file is closed, and a duplicate of the engine's was closed by the open of another
//! file, its end having been put off by a thread in a hit. Exec closed them, too.
//!
//! Whatever a program does to its locks, others see what they see on the kernel alone.

mod common;

use std::process::Stdio;

use common::{ALL_MODES, Mode, Pond, require, succeed};

/// The same words with the library as without, in all modes.
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

/// Goal: a close that was put off ends no lock that was taken since, whichever call has seen it be
/// taken.
#[test]
fn closes_that_are_put_off() {
    same("deferred");
}

/// Goal: each way to take a lock, with each way to close another descriptor of the file.
#[test]
fn ways_to_lock_and_to_close() {
    same("ways");
}

/// Goal: exec keeps locks exactly where it keeps all of the program's descriptors of the file.
#[test]
fn exec_keeps_locks() {
    same("exec");
}

/// Goal: a lock that the program has from before an exec, on a descriptor that no hook saw opened.
#[test]
fn locks_from_before_exec() {
    same("inherit");
}

/// Goal: two programs, one under the library and one on the kernel, write a database: it stays whole, and
/// has every transaction that was acknowledged.
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
