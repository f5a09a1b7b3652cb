//! POSIX locks of a process that has a file open several times, in mode back: the kernel holds the locks, and the
//! first lock hands a shared file over.

mod common;

use common::{MODES, Mode, Pond, ServedFiles, require, succeed};

/// Runs the scenario on the kernel alone, and in mode back.
fn run(scenario: &[&str]) {
    let alone = Pond::new();
    let program = alone.compile("shared_locks.c", &["-O1"]);
    succeed(alone.plain(&program).args(scenario));
    let served = MODES.map(|mode| Pond::new().in_mode(mode).serving(ServedFiles::Default));
    for pond in Pond::unmeasured().into_iter().chain(served) {
        succeed(pond.served(&program).args(scenario));
    }
}

/// Goal: other processes see the locks that were taken: while the file is served and handed over, with a write lock,
/// over a fork, and until the first close.
#[test]
fn locks_are_kept_while_the_file_is_served_and_handed_over() {
    run(&["kept", "3"]);
}

/// Goal: the close of any descriptor ends the locks, as on the kernel.
#[test]
fn a_close_ends_the_locks() {
    run(&["closed", "16"]);
}

/// Goal: each descriptor locks by its own rights and from its own offset.
#[test]
fn rights_and_offsets_of_each_descriptor() {
    run(&["rights"]);
}

/// Goal: a thread that waits for another process's lock acquires it, is interrupted by a signal, or is cancelled.
#[test]
fn waits_for_other_processes() {
    run(&["waits", "12"]);
}

/// Goal: no two processes are in the critical section at once, and each reads the other's writes.
#[test]
fn processes_that_contend() {
    run(&["count"]);
}

/// Goal: a database in WAL mode is consistent after four connections in threads have used it.
#[test]
fn a_database_of_four_connections() {
    require("sqlite3", "sqlite3");
    for mode in [None, Some(Mode::Through), Some(Mode::Back)] {
        let pond = Pond::new().in_mode(mode.unwrap_or(Mode::Through)).serving(ServedFiles::Default);
        let source = "../../../millpond-bench/src/bench/programs/wal.c";
        let program = pond.compile_with(source, &["-O1"], &["-lsqlite3"]);
        let schema = "create table t(id integer primary key, n integer, v text);
            with recursive k(x) as (select 1 union all select x + 1 from k where x < 3000)
            insert into t select x, 0, printf('%d %0500d', x, x) from k;";
        succeed(pond.plain("sqlite3").args(["db", schema]));
        let mut command = if mode.is_some() { pond.served(&program) } else { pond.plain(&program) };
        succeed(command.args(["db", "3000", "20000", "1000"]));
        let check = "pragma integrity_check; select sum(n) from t;";
        assert_eq!(succeed(pond.plain("sqlite3").args(["db", check])), "ok\n2000\n");
    }
}
