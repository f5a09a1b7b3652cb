//! Goal: the SQLite VFS (`integrations/sqlite`) is as safe as SQLite's own, next to processes that use the
//! default one. The tests run the sqlite3 command, whose default VFS is the other process's.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use tempfile::TempDir;

use super::{compile_and_run, here, installed, run, skip};

/// Builds the extension; `None` if its prerequisites are not installed.
fn extension() -> Option<&'static Path> {
    static EXTENSION: OnceLock<Option<PathBuf>> = OnceLock::new();
    let built = EXTENSION.get_or_init(|| {
        let is_there = |name: &str| Command::new(name).arg("--version").output().is_ok();
        let has_header = Path::new("/usr/include/sqlite3ext.h").exists();
        if !["sqlite3", "make", "stdbuf"].into_iter().all(is_there) || !has_header {
            return None;
        }
        let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join("sqlite");
        fs::create_dir_all(&out).unwrap();
        let mut make = Command::new("make");
        make.arg("-B")
            .arg("-C")
            .arg(&out)
            .arg("-f")
            .arg(here("../../integrations/sqlite/Makefile"));
        make.args(["CFLAGS=-O1 -g -Werror", "millponddb.so"]);
        run(make.env("PKG_CONFIG_PATH", installed().join("lib/pkgconfig")));
        Some(out.join("millponddb.so"))
    });
    if built.is_none() {
        skip("no sqlite3, sqlite3ext.h, stdbuf or make: ./test setup installs them");
    }
    built.as_deref()
}

fn directory() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// The VFS of a process.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Vfs {
    Ours,
    Unix,
}
use Vfs::{Ours, Unix};

/// A sqlite3 process that executes commands and prints the results.
struct Shell {
    process: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Shell {
    /// Opens no database yet.
    fn start(dir: &Path) -> Option<Shell> {
        let extension = extension()?;
        // Line-buffered output, with errors in order.
        // SAFETY: returns a number.
        let is_root = unsafe { libc::geteuid() } == 0;
        // Otherwise root may write to any file.
        let without = if is_root { "setpriv --bounding-set -dac_override" } else { "" };
        // XFSZ: see `limit`.
        let command = format!("trap '' XFSZ; exec {without} stdbuf -oL sqlite3 -batch 2>&1");
        let mut sqlite = Command::new("sh");
        sqlite.args(["-c", &command]).current_dir(dir).env("MILLPOND_SQLITE_CACHE", "8m");
        let mut process = sqlite.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, output) = (process.stdin.take().unwrap(), process.stdout.take().unwrap());
        let mut shell = Shell { process, input, output: BufReader::new(output) };
        assert_eq!(shell.ask(&format!(".load {}\n.timeout 30000", extension.display())), "");
        Some(shell)
    }

    fn open(dir: &Path, name: &str, vfs: Vfs) -> Option<Shell> {
        let mut shell = Shell::start(dir)?;
        let vfs = if vfs == Ours { "?vfs=millpond" } else { "" };
        // A small cache of SQLite, so that reads reach the VFS.
        shell.expect("", &format!(".open file:{name}{vfs}\n.timeout 30000\npragma cache_size = 2"));
        Some(shell)
    }

    fn tell(&mut self, text: &str) {
        let end = if text.starts_with('.') && !text.contains('\n') { "" } else { ";" };
        writeln!(self.input, "{text}{end}").unwrap();
    }

    /// The output of a command, without the last line end.
    fn ask(&mut self, text: &str) -> String {
        self.tell(text);
        self.tell(".print ~");
        let mut answer = String::new();
        while self.output.read_line(&mut answer).unwrap() > 0 {
            if let Some(answer) = answer.strip_suffix("~\n") {
                return answer.trim_end().to_string();
            }
        }
        panic!("{text}: it has ended: {answer}");
    }

    #[track_caller]
    fn expect(&mut self, answer: &str, text: &str) {
        assert_eq!(self.ask(text), answer, "{text}");
    }

    /// Sets the process's limit of the file size, in bytes.
    fn limit(&mut self, bytes: u64) {
        let limit = libc::rlimit { rlim_cur: bytes, rlim_max: libc::RLIM_INFINITY };
        let process = self.process.id() as libc::pid_t;
        // SAFETY: the limit is read during the call.
        let failed =
            unsafe { libc::prlimit(process, libc::RLIMIT_FSIZE, &limit, std::ptr::null_mut()) };
        assert_eq!(failed, 0);
    }

    fn kill(mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        // At the end of its input sqlite3 ends by itself; but in a failed test the process may wait for a
        // lock.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

const ROWS: u64 = 400;
const SUM: &str = "select count(*), sum(a), sum(length(b)), sum(substr(b, 1, 4)) from t";

/// A database of a few hundred pages.
fn fill(shell: &mut Shell, journal: &str, page_bytes: u32) {
    shell.ask(&format!(
        "pragma page_size = {page_bytes}; pragma journal_mode = {journal};
        pragma synchronous = off; pragma wal_autocheckpoint = 40;
        create table t(id integer primary key, a int, b blob); create index by_a on t(a);
        with recursive n(x) as (select 1 union all select x + 1 from n where x < {ROWS})
            insert into t select x, x, printf('%04d', x) || zeroblob(600) from n"
    ));
}

/// A statement that changes the file, and mostly the result of `SUM`.
fn change(random: &mut Random, journal: &str) -> String {
    let (id, by) = (random.below(ROWS) + 1, random.below(1000));
    let checkpoint = ["passive", "full", "restart", "truncate"][random.below(4) as usize];
    match random.below(12) {
        0 => "vacuum".to_string(),
        1 => format!("delete from t where id % 7 = {}", id % 7),
        2 => {
            format!("insert or replace into t select id + 1, a, b from t where id % 5 = {}", id % 5)
        }
        3..=5 if journal == "wal" => format!(
            "update t set a = a + {by} where id % 9 = {}; pragma wal_checkpoint({checkpoint})",
            id % 9
        ),
        3 => format!(
            "begin; update t set a = {by}; rollback; update t set a = a + 1 where id = {id}"
        ),
        4 => format!("update t set a = a + 1, b = printf('%04d', {by}) || zeroblob({})", 100 + by),
        _ => format!(
            "update t set a = a + {by}, b = printf('%04d', {by}) || substr(b, 5) where id = {id}"
        ),
    }
}

/// Goal: the rules about moments that two processes can hardly be brought to (R4, W4 to W6).
#[test]
fn pages_are_used_while_they_are_current() {
    compile_and_run("tests/programs/pages.c", &["-std=gnu11"]);
}

/// Goal: two processes on one database see each other's writes; one of each VFS, or both with ours.
#[test]
fn what_others_write_is_seen() {
    let cases = [
        ("delete", 4096),
        ("persist", 1024),
        ("truncate", 65536),
        ("wal", 1024),
        ("wal", 4096),
        ("wal", 16384),
    ];
    for (seed, (journal, page_bytes)) in cases.into_iter().enumerate() {
        for other in [Unix, Ours] {
            let dir = directory();
            let Some(mut ours) = Shell::open(dir.path(), "db", Ours) else { return };
            let mut other = Shell::open(dir.path(), "db", other).unwrap();
            fill(&mut ours, journal, page_bytes);
            other.ask("pragma synchronous = off; pragma wal_autocheckpoint = 40");
            let mut random = Random(seed as u64);
            for round in 0..25 {
                let change = change(&mut random, journal);
                let (writer, reader) = if random.below(3) > 0 {
                    (&mut other, &mut ours)
                } else {
                    (&mut ours, &mut other)
                };
                reader.ask(SUM);
                writer.ask(&change);
                let said = writer.ask(SUM);
                reader.expect(&said, SUM);
                if random.below(8) == 0 {
                    reader.expect("ok", "pragma integrity_check");
                }
                assert!(
                    said.contains('|'),
                    "{journal} {page_bytes}, round {round}: {change}: {said}"
                );
            }
        }
    }
}

/// Goal: a reader of a WAL sees one state during checkpoints, and the next state afterwards.
#[test]
fn a_snapshot_stays_while_others_checkpoint() {
    for page_bytes in [1024, 4096] {
        let dir = directory();
        let Some(mut ours) = Shell::open(dir.path(), "db", Ours) else { return };
        let mut unix = Shell::open(dir.path(), "db", Unix).unwrap();
        fill(&mut unix, "wal", page_bytes);
        for round in 0..10 {
            let before = ours.ask(&format!("begin; {SUM}"));
            unix.ask("update t set a = a + 1; pragma wal_checkpoint(passive)");
            ours.expect(&before, SUM);
            unix.ask("update t set b = printf('%04d', id + a) || substr(b, 5); pragma wal_checkpoint(passive)");
            ours.expect(&before, SUM);
            ours.ask("commit");
            // All frames are moved, so the WAL may restart.
            let kind = if round % 2 == 0 { "restart" } else { "truncate" };
            unix.ask(&format!("pragma wal_checkpoint({kind})"));
            let after = unix.ask(SUM);
            assert_ne!(before, after);
            ours.expect(&after, SUM);
        }
    }
}

/// Goal: a process that may not write the wal-index, and so has no index to read, sees the writes of other
/// processes.
#[test]
fn without_a_wal_index_others_are_seen() {
    let dir = directory();
    let Some(mut unix) = Shell::open(dir.path(), "db", Unix) else { return };
    fill(&mut unix, "wal", 4096);
    // The last one to close it.
    unix.ask(".open :memory:");
    for name in ["db-wal", "db-shm"] {
        fs::write(dir.path().join(name), "").unwrap();
    }
    let mut ours = Shell::start(dir.path()).unwrap();
    ours.ask(".open file:db?vfs=millpond&readonly_shm=1\npragma cache_size = 2");
    for _ in 0..3 {
        let before = ours.ask(SUM);
        unix.ask(".open file:db");
        unix.ask("update t set a = a + 1; pragma wal_checkpoint(truncate)");
        let after = unix.ask(SUM);
        assert_ne!(before, after);
        unix.ask(".open :memory:");
        ours.expect(&after, SUM);
    }
}

/// Goal: pages of an uncommitted transaction are not taken for the database's, whichever process rolls it
/// back.
#[test]
fn what_a_killed_writer_left_is_undone() {
    for (killed, undoes) in [(Unix, Ours), (Unix, Unix), (Ours, Unix), (Ours, Ours)] {
        let dir = directory();
        let Some(mut reader) = Shell::open(dir.path(), "db", Ours) else { return };
        fill(&mut reader, "delete", 4096);
        for _ in 0..2 {
            let before = reader.ask(SUM);
            let mut writer = Shell::open(dir.path(), "db", killed).unwrap();
            // More pages than SQLite caches, so that they are written to the file before the commit.
            writer.expect("", "begin; update t set a = 7, b = printf('%04d', 7) || substr(b, 5)");
            assert!(dir.path().join("db-journal").metadata().unwrap().len() > 0);
            writer.kill();
            if undoes == Unix {
                Shell::open(dir.path(), "db", Unix).unwrap().expect(&before, SUM);
            }
            reader.expect(&before, SUM);
            reader.expect("ok", "pragma integrity_check");
            // Its change counter equals that of the transaction that was rolled back.
            let mut next = Shell::open(dir.path(), "db", Unix).unwrap();
            next.ask("update t set a = a + 1 where id = 3");
            let after = next.ask(SUM);
            assert_ne!(before, after);
            reader.expect(&after, SUM);
        }
    }
}

/// Goal: a different state of the database that is copied over the file is noticed, though its header and
/// its modification time equal those of the state before.
#[test]
fn a_copy_that_is_put_in_place_is_seen() {
    let dir = directory();
    let Some(mut ours) = Shell::open(dir.path(), "db", Ours) else { return };
    fill(&mut ours, "delete", 4096);
    let (file, copy) = (dir.path().join("db"), dir.path().join("copy"));
    fs::copy(&file, &copy).unwrap();
    let mut unix = Shell::open(dir.path(), "copy", Unix).unwrap();
    unix.ask("update t set a = a + 1");
    ours.ask("update t set a = a + 2");
    ours.ask(SUM);
    let after = unix.ask(SUM);
    let bytes = fs::read(&copy).unwrap();
    assert!(bytes[..100] == fs::read(&file).unwrap()[..100]);
    // This connection keeps its pages; the connection below reads with SQLite's own VFS.
    ours.ask(".connection 1");
    ours.ask(".open file:db?vfs=millpond");
    let written = file.metadata().unwrap().modified().unwrap();
    fs::write(&file, bytes).unwrap();
    fs::File::options().write(true).open(&file).unwrap().set_modified(written).unwrap();
    ours.expect(&after, SUM);
}

/// Goal: writes to the file that fail half-way, in a transaction and in a checkpoint, change no data that
/// is read, and later writes succeed.
#[test]
fn writes_that_fail() {
    for (journal, page_bytes) in [("delete", 16384), ("wal", 16384), ("delete", 512), ("wal", 512)]
    {
        let dir = directory();
        let Some(mut ours) = Shell::open(dir.path(), "db", Ours) else { return };
        fill(&mut ours, journal, page_bytes);
        ours.ask("pragma wal_checkpoint(truncate)");
        let add = "insert into t select id + 1000, a, b from t where id <= 200";
        let before = ours.ask(SUM);
        let len = dir.path().join("db").metadata().unwrap().len();
        let at = len + u64::from(page_bytes) * 3 / 2;
        let (expected, failed) = if journal == "wal" {
            ours.ask("pragma wal_autocheckpoint = 0");
            ours.expect("", add);
            let expected = ours.ask(SUM);
            ours.limit(at);
            (expected, ours.ask("pragma wal_checkpoint"))
        } else {
            ours.limit(at);
            (before, ours.ask(add))
        };
        assert!(failed.contains("disk I/O error"), "{journal}: {failed}");
        ours.expect(&expected, SUM);
        ours.limit(libc::RLIM_INFINITY);
        let mut unix = Shell::open(dir.path(), "db", Unix).unwrap();
        for shell in [&mut unix, &mut ours] {
            shell.expect(&format!("ok\n{expected}"), &format!("pragma integrity_check; {SUM}"));
            shell.ask("update t set a = a; pragma wal_checkpoint(restart)");
        }
        ours.ask("insert into t select id + 2000, a, b from t where id <= 200");
        ours.ask("pragma wal_checkpoint(truncate)");
        let expected = ours.ask(SUM);
        unix.expect(&format!("ok\n{expected}"), &format!("pragma integrity_check; {SUM}"));
    }
}

/// Goal: writers of both kinds, killed at random moments, leave a consistent database, and readers see one.
#[test]
fn killed_at_random_moments() {
    for journal in ["delete", "wal"] {
        let dir = directory();
        let Some(mut checker) = Shell::open(dir.path(), "db", Ours) else { return };
        fill(&mut checker, journal, 4096);
        checker.ask("update t set a = 100");
        let total = ROWS * 100;
        let mut random = Random(17);
        for _ in 0..5 {
            let mut writers: Vec<Shell> =
                [Ours, Unix, Ours].map(|vfs| Shell::open(dir.path(), "db", vfs).unwrap()).into();
            for writer in &mut writers {
                writer.tell("pragma synchronous = off; pragma wal_autocheckpoint = 20");
                for _ in 0..300 {
                    let (from, to) = (random.below(ROWS) + 1, random.below(ROWS) + 1);
                    writer.tell(&format!(
                        "begin immediate; update t set a = a - 1 where id = {from};
                        update t set b = randomblob(600) where id % 40 = {};
                        update t set a = a + 1 where id = {to}; commit",
                        random.below(40)
                    ));
                }
            }
            let sum = format!("select sum(a) = {total} from t");
            for writer in writers {
                std::thread::sleep(Duration::from_millis(random.below(40)));
                checker.expect("1", &sum);
                writer.kill();
                checker.expect("1", &sum);
            }
            checker.expect("ok", "pragma integrity_check");
        }
        drop(checker);
        let mut unix = Shell::open(dir.path(), "db", Unix).unwrap();
        unix.expect(
            &format!("ok\n{ROWS}|{total}"),
            "pragma integrity_check; select count(*), sum(a) from t",
        );
    }
}

/// Goal: the close of a connection drops no lock of another connection of the process, of either VFS.
#[test]
fn a_close_drops_no_locks() {
    for first in [Ours, Unix] {
        let dir = directory();
        let Some(mut holder) = Shell::open(dir.path(), "db", first) else { return };
        fill(&mut holder, "delete", 4096);
        holder.ask("begin immediate; update t set a = 5 where id = 1");
        // Another connection in the same process, which closes its descriptors.
        holder.ask(".connection 1");
        holder.ask(".open file:db?vfs=millpond");
        holder.expect(&ROWS.to_string(), "select count(*) from t");
        holder.ask(".connection 0");
        holder.expect("", ".connection close 1");
        let mut other = Shell::open(dir.path(), "db", Unix).unwrap();
        other.ask(".timeout 0");
        let refused = other.ask("begin immediate");
        assert!(refused.contains("database is locked"), "{first:?}: {refused}");
        holder.ask("commit");
        other.expect("", "begin immediate");
        other.expect("5", "select a from t where id = 1");
    }
}

/// Goal: reads are served from the cache, and no pages are dropped while no other process writes.
#[test]
fn reads_come_from_the_cache() {
    for journal in ["delete", "wal"] {
        let dir = directory();
        let Some(mut shell) = Shell::open(dir.path(), "db", Ours) else { return };
        shell.expect("millpond/unix", ".vfsname");
        fill(&mut shell, journal, 4096);
        let stats = |shell: &mut Shell| -> Vec<u64> {
            let words = shell.ask("pragma millpond_stats");
            words
                .split(|c: char| !c.is_ascii_digit())
                .filter_map(|word| word.parse().ok())
                .collect()
        };
        shell.ask("pragma wal_checkpoint(truncate)");
        shell.ask(SUM);
        let before = stats(&mut shell);
        for round in 0..20 {
            shell.ask(SUM);
            shell.ask(&format!(
                "update t set a = {round} where id = 9; pragma wal_checkpoint(restart)"
            ));
        }
        let after = stats(&mut shell);
        assert!(after[0] > before[0] + 20 * 50, "{journal}: hits {before:?}, then {after:?}");
        assert!(after[1] <= before[1] + 20, "{journal}: misses {before:?}, then {after:?}");
        assert_eq!(after[2], before[2], "{journal}: dropped");
    }
}

/// Goal: the file operations of SQLite other than plain reads and writes.
#[test]
fn vacuum_attach_backup_and_big_blobs() {
    let dir = directory();
    let Some(mut shell) = Shell::open(dir.path(), "db", Ours) else { return };
    fill(&mut shell, "delete", 4096);
    shell.ask("pragma auto_vacuum = incremental; vacuum; insert into t values(100000, 1, randomblob(5000000))");
    shell.expect("5000000", "select length(b) from t where id = 100000");
    shell.ask("create temp table u as select * from t; update u set a = 1; drop table u");
    shell.ask("attach 'file:second?vfs=millpond' as second; create table second.t as select * from main.t");
    shell.ask("begin; update t set a = a + 1; update second.t set a = a + 1; commit");
    let sum = shell.ask(SUM);
    shell.expect(
        &sum,
        "select count(*), sum(a), sum(length(b)), sum(substr(b, 1, 4)) from second.t",
    );
    shell.ask("delete from t where id = 100000; pragma incremental_vacuum");
    assert!(dir.path().join("db").metadata().unwrap().len() < 2_000_000);
    let sum = shell.ask(SUM);
    shell.ask(".backup main third");
    shell.ask(".restore main third");
    shell.expect(&format!("ok\n{sum}"), &format!("pragma integrity_check; {SUM}"));
    let mut unix = Shell::open(dir.path(), "third", Unix).unwrap();
    unix.expect(&format!("ok\n{sum}"), &format!("pragma integrity_check; {SUM}"));
    // Through the kernel's page cache, which has the writes.
    shell.expect("100000000", "pragma mmap_size = 100000000");
    shell.ask("update t set a = a + 5");
    let sum = shell.ask(SUM);
    shell.ask("pragma mmap_size = 0");
    shell.expect(&sum, SUM);
}

/// Goal: a database that can't be opened, or must not be written, gives the same error as with SQLite's
/// VFS.
#[test]
fn options_and_what_may_not_be_written() {
    let dir = directory();
    let Some(mut shell) = Shell::open(dir.path(), "db", Ours) else { return };
    fill(&mut shell, "delete", 4096);
    let sum = shell.ask(SUM);
    for parameters in [
        "millpond=off",
        "millpond_cache=1m",
        "mode=ro",
        "immutable=1",
        "nolock=1",
        "psow=0",
        "cache=private",
    ] {
        shell.ask(&format!(".open file:db?vfs=millpond&{parameters}"));
        shell.expect(&sum, SUM);
        shell.expect(&sum, SUM);
        let stats = shell.ask("pragma millpond_stats");
        let is_cached = !["millpond=off"].contains(&parameters);
        assert_eq!(stats.contains("hits"), is_cached, "{parameters}: {stats}");
    }
    for parameters in
        ["millpond_cache=lots", "millpond_cache=1", "millpond_cache=-1", "millpond_cache=1mm"]
    {
        let refused = shell.ask(&format!(".open file:db?vfs=millpond&{parameters}"));
        assert!(refused.contains("unable to open"), "{parameters}: {refused}");
    }
    shell.ask(".open file:db?vfs=millpond&mode=ro");
    assert!(shell.ask("delete from t").contains("readonly"));
    assert!(shell.ask(".open file:none/db?vfs=millpond").contains("unable to open"));
    assert!(shell.ask(".open file:.?vfs=millpond").contains("unable to open"));

    // A directory without write permission: no journal.
    drop(shell);
    let mut shell = Shell::start(dir.path()).unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o555)).unwrap();
    shell.ask(".open file:db?vfs=millpond");
    let refused = shell.ask("delete from t");
    shell.expect(&sum, SUM);
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    assert!(refused.contains("unable to open") || refused.contains("readonly"), "{refused}");
}

/// Goal: a database with untorn pages works on XFS, and can't be opened where pages can be torn.
#[test]
fn untorn_pages_are_announced_or_the_database_is_not_opened() {
    let dir = directory();
    let Some(mut shell) = Shell::start(dir.path()) else { return };
    let open = |at: &Path, size: &str| {
        format!(".open 'file:{}/untorn.db?vfs=millpond&millpond_untorn={size}'", at.display())
    };
    let (image, point) = (dir.path().join("image"), dir.path().join("mounted"));
    fs::File::create(&image).unwrap().set_len(320 << 20).unwrap();
    fs::create_dir(&point).unwrap();
    let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
    let is_done = |program: &str, args: &[&std::ffi::OsStr]| {
        let output = Command::new(program).args(args).env("PATH", &path).output();
        output.is_ok_and(|output| output.status.success())
    };
    let make = ["-q", "-m", "reflink=1"].map(std::ffi::OsStr::new);
    let mount = ["-o", "loop"].map(std::ffi::OsStr::new);
    if !is_done("mkfs.xfs", &[&make[..], &[image.as_os_str()]].concat())
        || !is_done("mount", &[&mount[..], &[image.as_os_str(), point.as_os_str()]].concat())
    {
        return skip("no XFS on a loop device");
    }
    shell.ask(&open(&point, "4k"));
    assert_eq!(shell.ask("pragma millpond_untorn;"), "4096");
    shell.ask("create table t(k integer primary key, v); insert into t values (1, 0);");
    for number in 1..=20 {
        shell.ask(&format!("update t set v = {number}; insert into t(v) values (zeroblob(9000));"));
    }
    shell.ask("begin; update t set v = 99; rollback; delete from t where k > 10; vacuum;");
    assert_eq!(shell.ask("select v from t where k = 1; pragma integrity_check;"), "20\nok");
    let stats = shell.ask("pragma millpond_stats;");
    assert!(!stats.contains("not cached"), "{stats}");
    shell.ask(".open :memory:");
    // With SQLite's own VFS.
    shell.ask(&format!(".open '{}/untorn.db'", point.display()));
    assert_eq!(shell.ask("select v from t where k = 1; pragma integrity_check;"), "20\nok");
    shell.ask(".open :memory:");
    for refused in [open(&point, "5k"), open(&point, "1m"), open(Path::new("/dev/shm"), "4k")] {
        let said = shell.ask(&format!("{refused}\npragma millpond_untorn;"));
        assert!(said.contains("unable to open"), "{refused}: {said}");
    }
    drop(shell);
    let _ = fs::remove_file("/dev/shm/untorn.db");
    assert!(is_done("umount", &["--lazy".as_ref(), point.as_os_str()]));
}
