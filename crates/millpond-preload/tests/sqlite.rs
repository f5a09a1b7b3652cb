//! sqlite3: transactions, vacuum and an integrity check, under the library and then by the kernel.

mod common;

use common::{ALL_MODES, Mode, Pond, require, succeed};

const WORK: &str = "
    pragma page_size = 8192;
    create table t(id integer primary key, name text, data blob);
    create index by_name on t(name);
    begin;
    with recursive n(x) as (select 1 union all select x + 1 from n where x < 30000)
        insert into t select x, 'name' || (x * 7919 % 30000), randomblob(100) from n;
    commit;
    update t set data = zeroblob(500) where id % 11 = 0;
    delete from t where id % 5 = 0;
    begin; delete from t; rollback;
    vacuum;
    pragma integrity_check;
    select count(*), sum(id), sum(length(data)) from t;
";

fn database(journal: &str) {
    for mode in ALL_MODES {
        database_in_mode(journal, mode);
    }
}

fn database_in_mode(journal: &str, mode: Mode) {
    require("sqlite3", "sqlite3");
    let pond = Pond::with_cache_bytes(4 << 20).in_mode(mode);
    let first = pond.run("sqlite3", &["db", &format!("pragma journal_mode = {journal}; {WORK}")]);
    let report = pond.report();
    let check = "pragma integrity_check; select count(*), sum(id), sum(length(data)) from t;";
    let again = pond.run("sqlite3", &["db", check]);
    let by_kernel = succeed(pond.plain("sqlite3").args(["db", check]));
    assert!(by_kernel.starts_with("ok\n24000|"), "{by_kernel}");
    assert_eq!(again, by_kernel);
    assert!(first.ends_with(&by_kernel), "{first}");
    if mode == Mode::Through {
        assert!(report.served_bytes > 0, "{}", report.lines);
    } else {
        report.assert_served(10 << 20);
    }
}

#[test]
fn rollback_journal() {
    database("delete");
}

#[test]
fn kept_journal() {
    database("persist");
}

/// Write-ahead logging shares memory through a mapped file, which the kernel serves.
#[test]
fn write_ahead_log() {
    database("wal");
}

/// Two processes on one database: neither reads stale pages of the other.
#[test]
fn two_processes() {
    for mode in ALL_MODES {
        two_processes_in_mode(mode);
    }
}

fn two_processes_in_mode(mode: Mode) {
    require("sqlite3", "sqlite3");
    let pond = Pond::new().in_mode(mode);
    pond.run("sqlite3", &["db", "create table t(x); insert into t values(0);"]);
    let add = ".timeout 20000\nupdate t set x = x + 1;\n".repeat(50);
    std::fs::write(pond.aside("script"), &add).unwrap();
    let start = || {
        let script = std::fs::File::open(pond.aside("script")).unwrap();
        pond.served("sqlite3").arg("db").stdin(script).spawn().unwrap()
    };
    let mut children = [start(), start(), start()];
    for child in &mut children {
        assert!(child.wait().unwrap().success());
    }
    let total =
        succeed(pond.plain("sqlite3").args(["db", "select x from t; pragma integrity_check;"]));
    assert_eq!(total, "150\nok\n");
}
