//! Goal: `millpond-bench crash` finds the states that a power cut can break, and reports none for a program that
//! is safe.

#[path = "common/needs_millpond.rs"]
mod needs_millpond;
#[path = "../../millpond/tests/common/skip.rs"]
mod skip;

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

use needs_millpond::has_millpond;

const MILLPOND_BENCH: &str = env!("CARGO_BIN_EXE_millpond-bench");

/// Whether FUSE can mount.
fn has_fuse() -> bool {
    let has = Path::new("/dev/fuse").exists() && rustix::process::geteuid().is_root();
    if !has {
        skip::skip("no /dev/fuse, or not root");
    }
    has
}

fn crash(dir: &Path, check: &str, options: &[&str], program: &[&str]) -> Output {
    let mut crash = Command::new(MILLPOND_BENCH);
    crash.arg("crash").args(["--check", check, "--dir"]).arg(dir).args(options).arg("--");
    let done = crash.args(program).output().unwrap();
    let mounts = fs::read_to_string("/proc/mounts").unwrap();
    assert!(!mounts.contains(dir.to_str().unwrap()), "{mounts}");
    done
}

fn text(done: &Output) -> String {
    let words = [done.stdout.as_slice(), b"\n--\n", &done.stderr].concat();
    String::from_utf8_lossy(&words).into_owned()
}

fn json(done: &Output) -> Value {
    serde_json::from_slice(&done.stdout).unwrap_or_else(|error| panic!("{error}: {}", text(done)))
}

/// The number of states; `MILLPOND_TEST_SCALE` raises it. It is never too small to find the failure.
fn states(least: usize) -> String {
    let scale = std::env::var("MILLPOND_TEST_SCALE").ok().and_then(|scale| scale.parse().ok());
    (least as f64 * scale.unwrap_or(1.0f64).max(1.0)).to_string()
}

const REPLACE: &str = "printf new > t && mv t f && echo done";
const WHOLE: &str = "test \"$(cat f)\" = old || test \"$(cat f)\" = new";

#[test]
fn a_rename_without_a_sync_is_found() {
    if !has_fuse() || !has_millpond() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("f"), "old").unwrap();
    for (model, is_broken) in [("strict", true), ("ordered", true), ("ext4", false)] {
        for engine in [&["--eager"][..], &["--kernel"]] {
            let options = [&["--json", "--model", model][..], engine].concat();
            let done = crash(dir.path(), WHOLE, &options, &["sh", "-c", REPLACE]);
            let report = json(&done);
            assert_eq!(done.status.code(), Some(i32::from(is_broken)), "{}", text(&done));
            assert_eq!(report["all_states"], true);
            if is_broken {
                let lost = &report["shortest"]["lost"];
                assert_eq!(lost.as_array().unwrap().len(), 1, "{report}");
                assert_eq!(lost[0], "write t, 3 bytes at 0");
            }
            assert!(String::from_utf8_lossy(&done.stderr).contains("done"), "its output");
        }
    }
    // With the sync the program is right, in all models.
    let synced = "printf new > t && sync t && mv t f && sync . && echo done";
    let durable = format!("{WHOLE} && (! grep -q done $MILLPOND_CRASH_SAID || grep -q new f)");
    for model in ["strict", "ordered", "ext4"] {
        let done = crash(dir.path(), &durable, &["--model", model], &["sh", "-c", synced]);
        assert!(done.status.success(), "{}", text(&done));
    }
    // Without the sync of the directory the rename may be undone after the program has printed "done".
    let half = "printf new > t && sync t && mv t f && echo done";
    let done = crash(dir.path(), &durable, &[], &["sh", "-c", half]);
    assert!(!done.status.success() && text(&done).contains("LOST"), "{}", text(&done));
    // The directory itself is unchanged.
    assert_eq!(fs::read_to_string(dir.path().join("f")).unwrap(), "old");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}

const SQLITE: &str = "
import sqlite3, sys
db = sqlite3.connect('f.db', isolation_level=None)
db.execute('pragma journal_mode=' + sys.argv[1])
db.execute('pragma synchronous=' + sys.argv[2])
db.execute('create table t(n integer primary key, b blob)')
print('ready', flush=True)
for n in range(4):
    db.execute('begin')
    db.execute('insert into t values(?, zeroblob(3000))', (n,))
    db.execute('commit')
    print(n, flush=True)
";

/// A line of output is for the table, and one for each row.
const SQLITE_CHECK: &str = "
said=$(grep -c . $MILLPOND_CRASH_SAID)
[ -e f.db ] || exit $said
[ \"$(sqlite3 f.db 'pragma integrity_check')\" = ok ] || { echo the database is broken; exit 1; }
[ $said = 0 ] && exit 0
set -- $(sqlite3 -separator ' ' f.db 'select count(*), coalesce(max(n) + 1, 0) from t')
echo said $said, has $1 rows, the last is $2
[ $1 = $2 ] && [ $1 -ge $((said - 1)) ]
";

/// SQLite documents that with FULL a power cut may undo a commit in mode DELETE, as the removal of the
/// journal is not synced, and that in mode WAL it may undo commits with NORMAL.
#[test]
fn sqlite_is_never_broken() {
    if !has_fuse() || !has_millpond() {
        return;
    }
    let scripts = tempfile::tempdir().unwrap();
    let program = scripts.path().join("program.py");
    fs::write(&program, SQLITE).unwrap();
    for (journal, sync, loses) in [
        ("delete", "extra", false),
        ("delete", "full", true),
        ("wal", "full", false),
        ("wal", "normal", true),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let program = ["python3", program.to_str().unwrap(), journal, sync];
        let mode = if journal == "wal" { "back" } else { "through" };
        // States that lose a commit are rare.
        let states = states(if loses { 300 } else { 60 });
        let options = ["--eager", "--mode", mode, "--states", &states, "--json"];
        let done = crash(dir.path(), SQLITE_CHECK, &options, &program);
        let report = json(&done);
        assert_eq!(report["failed"] != 0, loses, "{journal} {sync}: {report:#}");
        assert!(report["steps"].as_array().unwrap().len() > 20, "{report:#}");
        if loses {
            let words = report["shortest"]["words"].as_str().unwrap();
            assert!(!words.contains("broken"), "{words}");
        }
    }
}

/// A log whose records have checksums; `sync` is whether it syncs.
const LOG: &str = "
import os, sys, zlib
fd = os.open('log', os.O_RDWR | os.O_CREAT, 0o644)
if sys.argv[1] == 'sync':
    os.fsync(os.open('.', os.O_RDONLY))
for n in range(5):
    body = bytes([n]) * 5000
    os.pwrite(fd, zlib.crc32(body).to_bytes(4, 'little') + body, n * 5004)
    if sys.argv[1] == 'sync':
        os.fdatasync(fd)
    print(n, flush=True)
";

const LOG_CHECK: &str = "
import os, sys, zlib
said = open(os.environ['MILLPOND_CRASH_SAID']).read().split()
data = open('log', 'rb').read() if os.path.exists('log') else b''
good = 0
while True:
    record = data[good * 5004:(good + 1) * 5004]
    if len(record) < 5004 or zlib.crc32(record[4:]).to_bytes(4, 'little') != record[:4]:
        break
    good += 1
if good < len(said):
    sys.exit(f'{good} records of {len(said)}')
";

#[test]
fn a_log_is_as_good_as_its_syncs() {
    if !has_fuse() || !has_millpond() {
        return;
    }
    let scripts = tempfile::tempdir().unwrap();
    let (program, check) = (scripts.path().join("program.py"), scripts.path().join("check.py"));
    fs::write(&program, LOG).unwrap();
    fs::write(&check, LOG_CHECK).unwrap();
    let check = format!("python3 {}", check.display());
    for (how, options) in [("sync", "--torn"), ("sync", "--eager"), ("not", "--eager")] {
        let dir = tempfile::tempdir().unwrap();
        let program = ["python3", program.to_str().unwrap(), how];
        let keep = dir.path().with_extension("kept");
        let keep_words = ["--keep", keep.to_str().unwrap()];
        let states = states(60);
        let options = [&[options, "--states", &states][..], &keep_words].concat();
        let done = crash(dir.path(), &check, &options, &program);
        assert_eq!(done.status.success(), how == "sync", "{}", text(&done));
        assert_eq!(keep.exists(), how != "sync");
        if how != "sync" {
            let said = fs::read_to_string(keep.join("said")).unwrap();
            assert!(said.starts_with('0') && keep.join("state").is_dir(), "{said}");
            assert!(fs::read_to_string(keep.join("report")).unwrap().contains("LOST"));
            fs::remove_dir_all(&keep).unwrap();
        }
    }
}

#[test]
fn what_fails_is_told() {
    if !has_fuse() || !has_millpond() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let failed = crash(dir.path(), "true", &[], &["sh", "-c", "echo x > f; exit 3"]);
    assert_eq!(failed.status.code(), Some(1));
    assert!(text(&failed).contains("the program failed: exit status 3"), "{}", text(&failed));
    let missing = crash(dir.path(), "true", &["--kernel"], &["/no/such/program"]);
    assert!(text(&missing).contains("/no/such/program"), "{}", text(&missing));
    let slow = crash(dir.path(), "sleep 60", &["--kernel", "--timeout", "1"], &["true"]);
    assert!(text(&slow).contains("took longer than 1 s"), "{}", text(&slow));
    let keep = ["--keep", dir.path().to_str().unwrap()];
    let kept = crash(dir.path(), "true", &keep, &["true"]);
    assert_eq!(kept.status.code(), Some(2), "{}", text(&kept));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

/// Writes 200 pages to 16 places, and syncs once.
const OVER_AND_OVER: &str = "
import os
fd = os.open('f', os.O_RDWR | os.O_CREAT, 0o644)
for n in range(200):
    os.pwrite(fd, bytes([n]) * 4096, n % 16 * 4096)
os.fsync(fd)
os.close(fd)
";

/// Method: in mode back fewer pages are written than the program wrote.
#[test]
fn the_engine_serves_the_recorded_files() {
    if !has_fuse() || !has_millpond() {
        return;
    }
    let scripts = tempfile::tempdir().unwrap();
    let program = scripts.path().join("program.py");
    fs::write(&program, OVER_AND_OVER).unwrap();
    let python = ["python3", program.to_str().unwrap()];
    let writes = |options: &[&str]| {
        let dir = tempfile::tempdir().unwrap();
        let options = [&["--json", "--states", "5"], options].concat();
        let report = json(&crash(dir.path(), "true", &options, &python));
        let steps = report["steps"].as_array().unwrap().clone();
        assert!(steps.iter().any(|step| step == "sync f"), "{report:#}");
        steps.iter().filter(|step| step.as_str().unwrap().starts_with("write f")).count()
    };
    assert_eq!(writes(&["--kernel"]), 200);
    for options in [&["--mode", "back"][..], &["--eager", "--mode", "back"]] {
        let back = writes(options);
        assert!((1..=100).contains(&back), "{options:?}: {back} writes reached the file system");
    }
}

#[test]
fn an_interrupt_leaves_nothing_behind() {
    if !has_fuse() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mut crash = Command::new(MILLPOND_BENCH);
    crash.args(["crash", "--kernel", "--check", "true", "--dir"]).arg(dir.path());
    // Its child holds its standard output, too.
    let begins = dir.path().with_extension("begun");
    let leaves = format!("sleep 20 & echo $! >{0}.part; mv {0}.part {0}; wait", begins.display());
    let mut crash = crash.args(["--", "sh", "-c", &leaves]).spawn().unwrap();
    let mounted =
        || fs::read_to_string("/proc/mounts").unwrap().contains(dir.path().to_str().unwrap());
    let begun = std::time::Instant::now();
    while !begins.exists() {
        assert!(begun.elapsed().as_secs() < 60, "it never begins");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    assert!(mounted());
    let left = fs::read_to_string(&begins).unwrap();
    fs::remove_file(begins).unwrap();
    rustix::process::kill_process(
        rustix::process::Pid::from_child(&crash),
        rustix::process::Signal::INT,
    )
    .unwrap();
    let interrupted = std::time::Instant::now();
    assert_eq!(crash.wait().unwrap().code(), Some(1));
    assert!(interrupted.elapsed().as_secs() < 10, "it waited for the program's child");
    assert!(!mounted());
    // A process has its command line until it is a zombie.
    let command = fs::read(format!("/proc/{}/cmdline", left.trim())).unwrap_or_default();
    assert!(!command.starts_with(b"sleep"), "its child continues");
}
