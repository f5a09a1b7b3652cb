//! SQLite: point reads by the shell, and concurrent connections that read and write.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;

use super::fixtures::{self, WorkDirectory, program};
use super::job::{JobRunner, JobTarget, ProgramJob, remove, target};
use super::threads::{compile, own_time};
use crate::bench::data::{MIB, Random};
use crate::failure::{Context, Result};

const TRANSACTION: JobTarget = target("sqlite-transaction", 1.0);
const AUTOCOMMIT: JobTarget = target("sqlite-autocommit", 1.0);
const TRANSACTION_X5: JobTarget = target("sqlite-transaction-x5", 1.25);
const AUTOCOMMIT_X5: JobTarget = target("sqlite-autocommit-x5", 1.25);
const WAL: JobTarget = target("sqlite-wal-2+2", 1.0);

/// Reads: full and quick.
const READS: [usize; 2] = [200_000, 25_000];
const DATABASE_BYTES: [u64; 2] = [512 * MIB, 64 * MIB];
/// A row with its key and its share of the page.
const ROW_BYTES: u64 = 508;

pub fn run(work_dir: &WorkDirectory, runner: &mut JobRunner<'_>) -> Result<()> {
    reads(work_dir, runner)?;
    wal(work_dir, runner)
}

fn rows(runner: &JobRunner<'_>) -> u32 {
    let bytes = DATABASE_BYTES[usize::from(runner.plan.quick)];
    (runner.plan.bytes(bytes) / ROW_BYTES) as u32
}

/// A table of rows with identifying texts, of such a size that eight rows fill a page of 4 KiB.
fn database(path: &Path, rows: u32) -> Result<()> {
    let script = format!(
        "create table t(id integer primary key, n integer, v text);
         with recursive r(i) as (select 1 union all select i + 1 from r where i < {rows})
         insert into t select i, 0, printf('%0480d', i) from r;"
    );
    fixtures::make(Command::new("sqlite3").arg(path).arg(script)).map(|_| ())
}

/// Reads rows by random keys, in a new process.
fn reads(work_dir: &WorkDirectory, runner: &mut JobRunner<'_>) -> Result<()> {
    let cases = [TRANSACTION, AUTOCOMMIT, TRANSACTION_X5, AUTOCOMMIT_X5];
    if !runner.wants(&cases) {
        return Ok(());
    }
    if let Err(reason) = program("sqlite3", "sqlite3") {
        runner.skip(&cases, reason);
        return Ok(());
    }
    let (path, rows) = (work_dir.at("points.db"), rows(runner));
    database(&path, rows)?;
    let count = runner.plan.count(READS[0], READS[1]);
    let [one, each] = [work_dir.at("transaction.sql"), work_dir.at("autocommit.sql")];
    let (mut random, mut script) = (Random::seeded(1), String::new());
    for _ in 0..count {
        let key = 1 + random.below(rows);
        writeln!(script, "select substr(v, -9) from t where id = {key};").context("a script")?;
    }
    fs::write(&each, &script).context(each.display())?;
    fs::write(&one, format!("begin;\n{script}commit;\n")).context(one.display())?;
    fixtures::settle(&work_dir.path)?;
    for (target, script, times) in [
        (TRANSACTION, &one, 1),
        (AUTOCOMMIT, &each, 1),
        (TRANSACTION_X5, &one, 5),
        (AUTOCOMMIT_X5, &each, 5),
    ] {
        if !runner.wants(&[target]) {
            continue;
        }
        let mut words = vec!["sqlite3".to_owned(), "points.db".to_owned()];
        let name = script.file_name().unwrap_or_default().to_string_lossy();
        words.extend((0..times).map(|_| format!(".read {name}")));
        let job =
            ProgramJob::new(target, times * count, words).blocks(4096).reads(&[&path, script]);
        runner.measure(&work_dir.path, &job);
    }
    [path, one, each].iter().try_for_each(|path| remove(path).context(path.display()))
}

/// Two connections that read and two that write, in threads of one process.
fn wal(work_dir: &WorkDirectory, runner: &mut JobRunner<'_>) -> Result<()> {
    if !runner.wants(&[WAL]) {
        return Ok(());
    }
    let built = program("sqlite3", "sqlite3")
        .and_then(|_| compile(work_dir, "wal", include_str!("wal.c"), &["-lsqlite3"]))
        .map_err(|reason| format!("{reason} (Debian's packages are sqlite3, libsqlite3-dev, gcc)"));
    let program = match built {
        Ok(program) => program,
        Err(reason) => {
            runner.skip(&[WAL], reason);
            return Ok(());
        }
    };
    let path = work_dir.at("wal.db");
    let rows = (rows(runner) / 8).max(1000);
    database(&path, rows)?;
    fixtures::settle(&work_dir.path)?;
    let [reads, writes] = [runner.plan.count(200_000, 40_000), runner.plan.count(5_000, 1_000)]
        .map(|n| n.to_string());
    let words = [
        program.as_os_str(),
        "wal.db".as_ref(),
        rows.to_string().as_ref(),
        reads.as_ref(),
        writes.as_ref(),
    ]
    .map(std::ffi::OsStr::to_owned);
    let job = ProgramJob::timing_itself([WAL], words, own_time).threads(4).reads(&[&path]);
    runner.measure(&work_dir.path, &job);
    for end in ["", "-wal", "-shm"] {
        let path = work_dir.at(&format!("wal.db{end}"));
        remove(&path).context(path.display())?;
    }
    Ok(())
}
