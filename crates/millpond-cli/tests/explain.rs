//! Goal: `millpond run --explain` and `--stats` report the state of each file, however the program ends.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;
use std::time::Duration;

use serde_json::Value;

/// Reads 400 times 4 KiB at 4 places, so mode through maps the file.
const READS: u64 = 400;
const PRELUDE: &str = "import os, sys, time\n\
    def again(fd, times=400):\n\
    \x20   for i in range(times): assert len(os.pread(fd, 4096, i % 4 * 4096)) == 4096\n";

struct Place {
    dir: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("f"), vec![7; 16384]).unwrap();
        Self { dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().canonicalize().unwrap().join(name)
    }

    fn command(&self, options: &[&str], script: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_millpond"));
        command
            .arg("run")
            .args((!options.contains(&"--mode")).then_some("--mode=back"))
            .args(options)
            .arg("--")
            .arg(python())
            .arg("-c");
        command.arg(format!("{PRELUDE}{script}")).current_dir(self.dir.path());
        command
    }

    /// The JSON report of the script.
    #[track_caller]
    fn told(&self, options: &[&str], script: &str) -> (Output, Value) {
        self.told_by(
            self.command(&[&["--explain", "--json", "--report", "told"], options].concat(), script),
        )
    }

    #[track_caller]
    fn told_by(&self, mut command: Command) -> (Output, Value) {
        let output = command.output().unwrap();
        let told = fs::read_to_string(self.path("told"));
        let told = told.unwrap_or_else(|error| panic!("{error}: {}", stderr(&output)));
        let told = serde_json::from_str(&told);
        (output, told.unwrap_or_else(|error| panic!("{error}")))
    }

    /// The reason why the kernel serves the file `name`.
    #[track_caller]
    fn reason(&self, name: &str, options: &[&str], script: &str) -> String {
        let (output, told) = self.told(options, script);
        assert!(output.status.success(), "{}", stderr(&output));
        let row = row(&told, &self.path(name));
        row["kernel"].as_str().unwrap_or_else(|| panic!("served: {row}")).to_owned()
    }
}

/// The interpreter itself: the first one in PATH may be a script.
fn python() -> &'static Path {
    static PYTHON: OnceLock<PathBuf> = OnceLock::new();
    PYTHON.get_or_init(|| {
        let mut command = Command::new("python3");
        let output =
            command.args(["-c", "import sys; print(end=sys.executable)"]).output().unwrap();
        PathBuf::from(String::from_utf8(output.stdout).unwrap())
    })
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn rows<'a>(told: &'a Value, path: &Path) -> Vec<&'a Value> {
    let files = told["files"].as_array().unwrap();
    files.iter().filter(|row| row["path"] == path.to_str().unwrap()).collect()
}

#[track_caller]
fn row<'a>(told: &'a Value, path: &Path) -> &'a Value {
    let rows = rows(told, path);
    assert_eq!(rows.len(), 1, "{told}");
    rows[0]
}

#[track_caller]
fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is no number"))
}

/// Each read was counted once, most of them as hits.
#[track_caller]
fn assert_served(row: &Value) {
    let (hits, misses) = (number(&row["hits"]), number(&row["misses"]));
    // A page that another thread is filling may be missed more than once.
    assert!(hits > READS / 3 && misses <= 20, "{row}");
    assert_eq!(number(&row["read"]["served"]), (hits + misses) * 4096, "{row}");
    assert_eq!(
        number(&row["read"]["served"]) + number(&row["read"]["kernel"]),
        READS * 4096,
        "{row}"
    );
    assert_eq!(number(&row["adoptions"]), 1, "{row}");
}

/// Goal: the same use gives the same report, for every way to end, in both modes.
#[test]
fn told_however_the_program_ends() {
    let ends = [
        ("", Some(0), None),
        ("os._exit(3)", Some(3), None),
        ("os.kill(os.getpid(), 15); time.sleep(100)", None, Some(15)),
        ("os.kill(os.getpid(), 9); time.sleep(100)", None, Some(9)),
        ("os.execv('/bin/sh', ['sh', '-c', 'exit 5'])", Some(5), None),
    ];
    for mode in ["through", "back"] {
        for (end, status, signal) in ends {
            let place = Place::new();
            let script = format!("fd = os.open('f', os.O_RDWR)\nagain(fd)\n{end}");
            let (output, told) = place.told(&["--mode", mode], &script);
            assert_eq!((output.status.code(), output.status.signal()), (status, signal));
            assert_eq!(stderr(&output), "", "{mode}: {end}");
            assert_eq!(told["exit_status"].as_i64(), status.map(i64::from), "{told}");
            assert_eq!(told["signal"].as_i64(), signal.map(i64::from), "{told}");
            let row = row(&told, &place.path("f"));
            assert_served(row);
            // In mode back the next program gets the files from the kernel.
            let is_given = mode == "back" && end.starts_with("os.execv");
            assert_eq!(row["kernel"].as_str(), is_given.then_some("given"), "{row}");
            assert_eq!(row["opens"], 1);
            assert_eq!(told["totals"]["hits"], row["hits"], "{told}");
            assert_eq!(told["totals"]["served_files"], 1, "{told}");
            assert_eq!(told["totals"]["read"], row["read"], "{told}");
        }
    }
}

/// Goal: a report does not change when mode through maps a file: the counts are those of the run without the report.
/// Incident: with a report a file was mapped by its first read, and without one by its 64th.
#[test]
fn a_report_has_the_counts_of_a_run_without() {
    // Reads of each descriptor; expected hits. A descriptor is looked at by its 64th read, with --eager by its first one.
    for (eager, reads, hits) in [
        (false, &[3, 0][..], 0),
        (false, &[63, 1], 0),
        (false, &[100, 0], 36),
        (false, &[100, 3], 36),
        (false, &[100, 100], 36 + 37),
        (true, &[3, 3], 2 + 3),
    ] {
        let place = Place::new();
        let (first, second) = (reads[0], reads[1]);
        // The last page of a file is the kernel's.
        let script = format!(
            "one, two = os.open('f', 0), os.open('f', 0)\n\
             for fd, times in (one, {first}), (two, {second}):\n\
             \x20   for i in range(times): assert len(os.pread(fd, 4096, i % 3 * 4096)) == 4096"
        );
        let options = [&["--mode", "through"][..], if eager { &["--eager"] } else { &[] }].concat();
        let (output, told) = place.told(&options, &script);
        assert!(output.status.success(), "{}", stderr(&output));
        let row = row(&told, &place.path("f"));
        assert_eq!(row["hits"], hits, "{reads:?}: {row}");
        assert_eq!(row["adoptions"], u64::from(hits > 0), "{reads:?}: {row}");
        assert_eq!(row["kernel"].as_str(), (hits == 0).then_some("once"), "{reads:?}: {row}");
        assert_eq!(row["opens"], if second > 0 { 2 } else { 1 }, "{reads:?}: {row}");
        let bytes =
            serde_json::json!({"served": hits * 4096, "kernel": (first + second - hits) * 4096});
        assert_eq!(row["read"], bytes, "{reads:?}: {row}");

        let line = stderr(&place.command(&options, &script).output().unwrap());
        let served = format!("served {} files, {} bytes;", u64::from(hits > 0), hits * 4096);
        assert!(line.contains(&served), "{reads:?}: {line}");
    }
}

/// Goal: the same for a file that is only written, by a program with one thread.
#[test]
fn writes_in_mode_through_are_told_of() {
    let place = Place::new();
    let script = "fd = os.open('new', os.O_CREAT | os.O_WRONLY)\nfor i in range(3): os.write(fd, b'x' * 1000)";
    let (output, told) = place.told(&["--mode", "through"], script);
    assert!(output.status.success(), "{}", stderr(&output));
    let row = row(&told, &place.path("new"));
    assert_eq!(row["written"], serde_json::json!({"served": 0, "kernel": 3000}), "{row}");
    assert_eq!((&row["kernel"], &row["opens"]), (&"once".into(), &1.into()), "{row}");
}

/// Goal: files outside the served directories are a number of opens in the report, in each mode. They are not in the last line of
/// mode through, once the library has looked at them.
/// Incident: the last line of mode through had their bytes, and the report had nothing of them.
#[test]
fn files_outside_are_told_of() {
    // More than 64 reads of `cat`, of which each is of 128 KiB or 256 KiB.
    const BYTES: usize = 32 << 20;
    let place = Place::new();
    fs::write(place.path("large"), vec![7; BYTES]).unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    let cat = |mode: &str, path: &Path, options: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_millpond"));
        command.args(["run", "--mode", mode]).args(options).arg("--path").arg(path);
        command.args(["--", "cat", "large"]).current_dir(place.dir.path());
        let output = command.output().unwrap();
        assert!(output.status.success() && output.stdout.len() == BYTES, "{}", stderr(&output));
        stderr(&output)
    };
    for mode in ["through", "back"] {
        let told = cat(mode, elsewhere.path(), &["--stats", "--json"]);
        let told: Value = serde_json::from_str(&told).unwrap();
        let totals = &told["totals"];
        assert_eq!(
            (&totals["files"], &totals["read"]["kernel"]),
            (&0.into(), &0.into()),
            "{mode}: {told}"
        );
        assert!(number(&totals["opens_outside"]) >= 1, "{mode}: {told}");
    }
    assert_eq!(cat("through", elsewhere.path(), &[]), "");
    let line = cat("through", place.dir.path(), &[]);
    assert!(line.starts_with("millpond: served 1 files, "), "{line}");
    assert!(line.contains(" (once: 0 files, "), "{line}");
}

/// Goal: children of fork, and the programs that they exec, have their own rows, also when they are killed.
#[test]
fn children_are_told_of() {
    let place = Place::new();
    let script = "fd = os.open('f', os.O_RDWR)\nagain(fd); os.close(fd)\n\
        child = os.fork()\n\
        if child == 0:\n\
        \x20   again(os.open('f', os.O_RDWR)); os.kill(os.getpid(), 9)\n\
        os.waitpid(child, 0)\n\
        os.spawnlp(os.P_WAIT, 'cat', 'cat', 'f')";
    let (output, told) = place.told(&[], script);
    assert!(output.status.success(), "{}", stderr(&output));
    let rows = rows(&told, &place.path("f"));
    assert_eq!(rows.len(), 3, "{told}");
    let (cats, readers): (Vec<&Value>, Vec<&Value>) =
        rows.into_iter().partition(|row| row["program"].as_str().unwrap().ends_with("cat"));
    for row in &readers {
        assert_served(row);
        assert!(row["kernel"].is_null(), "{row}");
    }
    assert_ne!(readers[0]["pid"], readers[1]["pid"]);
    assert_eq!((&cats[0]["kernel"], &cats[0]["hits"]), (&"read-only".into(), &0.into()));
    assert_eq!(cats[0]["read"]["kernel"], 16384);
    assert!(number(&told["totals"]["processes"]) >= 3, "{told}");
    assert_eq!(told["totals"]["kernel_files"]["read-only"], 1, "{told}");
}

/// Goal: the report has the written bytes, and whether the engine or the kernel wrote them.
#[test]
fn writes_are_told_of() {
    let place = Place::new();
    let script = "fd = os.open('f', os.O_RDWR)\nos.pwrite(fd, b'a' * 100, 0)\nagain(fd)\n\
        os.pwrite(fd, b'b' * 1000, 50)\nassert os.pread(fd, 3, 49) == b'abb'";
    let (output, told) = place.told(&[], script);
    assert!(output.status.success(), "{}", stderr(&output));
    let row = row(&told, &place.path("f"));
    assert_eq!(row["written"], serde_json::json!({"served": 1100, "kernel": 0}));
}

/// Goal: each time that a file is served is reported, in order, up to the number that is kept.
#[test]
fn each_time_is_told() {
    let place = Place::new();
    let script = "for i in range(8): fd = os.open('f', os.O_RDWR); again(fd, 4); os.close(fd)";
    let (output, told) = place.told(&[], script);
    assert!(output.status.success(), "{}", stderr(&output));
    let row = row(&told, &place.path("f"));
    assert_eq!(row["adoptions"], 8, "{row}");
    let periods = row["served"].as_array().unwrap();
    assert_eq!(periods.len(), 6, "{row}");
    assert!(periods.iter().all(|period| period["ended_by"] == "closed"), "{row}");
    let mut last = row["opened_s"].as_f64().unwrap();
    for period in periods {
        let from = period["from_s"].as_f64().unwrap();
        assert!(from >= last, "{row}");
        last = period["to_s"].as_f64().unwrap_or(f64::MAX);
        assert!(last >= from, "{row}");
    }
}

/// Goal: for a file that the kernel serves, the report has the reason.
#[test]
fn each_reason_is_told() {
    let alone = |script: &str| Place::new().reason("f", &[], script);
    let before = |text: &str| {
        Place::new().reason("f", &[], &format!("fd = os.open('f', os.O_RDWR)\n{text}"))
    };
    assert_eq!(alone("os.read(os.open('f', os.O_RDONLY), 16384)"), "read-only");
    assert_eq!(alone("os.open('f', os.O_RDWR | os.O_DIRECT)"), "o-direct");
    // The child has the file until its parent ends.
    let fork =
        "end, own = os.pipe()\nif not os.fork(): os.close(own); os.read(end, 1); os._exit(0)\n";
    assert_eq!(before(&format!("{fork}again(fd)")), "forked");
    assert_eq!(before("os.preadv(fd, [bytearray(9)], 0, os.RWF_NOWAIT)\nagain(fd)"), "changed");
    let two = "other = os.open('f', os.O_RDWR | os.O_SYNC)\nagain(fd)";
    assert_eq!(before(two), "open-twice");
    let two = "other = os.open('f', os.O_RDONLY)\nimport fcntl; fcntl.lockf(fd, fcntl.LOCK_EX)\nagain(fd)";
    assert_eq!(before(two), "locked");
    assert_eq!(before("os.close(0); os.open('f', 0); again(0)"), "stdio");
    let libc = "import ctypes; libc = ctypes.CDLL(None)\n";
    assert_eq!(before(&format!("{libc}libc.dprintf(fd, b'x')\nagain(fd)")), "stdio");
    let map = "libc.mmap(None, 4096, 3, 1, fd, 0)";
    assert_eq!(before(&format!("{libc}{map}\nagain(fd)")), "mapped");
    let ring = "libc.syscall(425, 1, ctypes.create_string_buffer(120))";
    assert_eq!(before(&format!("{libc}{ring}")), "unseen");
    let spawn = "os.set_inheritable(fd, True); os.posix_spawnp('true', ['true'], os.environ)";
    assert_eq!(before(&format!("{spawn}\nagain(fd)")), "given");
    let send = "import socket; a, b = socket.socketpair()\nsocket.send_fds(a, [b'x'], [fd])\n";
    assert_eq!(before(&format!("{send}again(fd)")), "given");
    let limit = "import resource; limit = resource.RLIMIT_NOFILE\n\
        resource.setrlimit(limit, (10, resource.getrlimit(limit)[1]))\n";
    assert_eq!(alone(&format!("{limit}again(os.open('f', os.O_RDWR))")), "descriptors");
    let limit = "import resource\nsize = int(open('/proc/self/statm').read().split()[0]) * 4096\n\
        resource.setrlimit(resource.RLIMIT_AS, (size + (16 << 20), -1))\n";
    assert_eq!(alone(&format!("{limit}again(os.open('f', os.O_RDWR))")), "engine");
    let proc = Place::new();
    let script = "os.pread(os.open('/proc/self/comm', os.O_RDWR), 100, 0)";
    let (_, told) = proc.told(&["--path", "/proc"], script);
    let files = told["files"].as_array().unwrap();
    let is_it = |row: &&Value| row["path"].as_str().unwrap().ends_with("/comm");
    let row = files.iter().find(is_it).unwrap_or_else(|| panic!("{told}"));
    assert_eq!((&row["kernel"], &row["hits"]), (&"file-system".into(), &0.into()), "{told}");
}

/// Goal: the same for files that other processes have open, or had at the start, or that belong to other
/// users.
#[test]
fn reasons_that_take_others() {
    const AGAIN: &str = "fd = os.open('f', os.O_RDWR)\nagain(fd)\n";
    let place = Place::new();
    let writer = fs::OpenOptions::new().append(true).open(place.path("f")).unwrap();
    assert_eq!(place.reason("f", &[], AGAIN), "open-elsewhere");
    drop(writer);

    let script = format!(
        "{AGAIN}open('ready', 'w').close()\n\
         while not os.path.exists('done'): time.sleep(0.01)\n"
    );
    let reason = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !place.path("ready").exists() {
                std::thread::sleep(Duration::from_millis(5));
            }
            drop(fs::OpenOptions::new().append(true).open(place.path("f")).unwrap());
            fs::write(place.path("done"), "").unwrap();
        });
        place.reason("f", &[], &script)
    });
    assert_eq!(reason, "opened-elsewhere");

    // A file of root, read by another user.
    let script = "if os.getuid() == 0: os.setuid(65534)\nfd = os.open('/etc/passwd', 0)\n\
        for i in range(400): os.pread(fd, 100, 0)";
    let (output, told) = place.told(&["--eager", "--path", "/etc"], script);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(row(&told, Path::new("/etc/passwd"))["kernel"], "no-lease", "{told}");
}

/// Goal: the same as text, for people and for `grep`: a line for each file, then the totals; with `--stats`
/// only the totals.
#[test]
fn told_as_text() {
    let place = Place::new();
    fs::write(place.path("once"), "x").unwrap();
    let script =
        "again(os.open('f', 2)); os.read(os.open('once', 0), 9); os.open('/etc/passwd', 0)";
    let text = stderr(&place.command(&["--explain"], script).output().unwrap());
    assert!(text.lines().all(|line| line.starts_with("millpond: ")), "{text}");
    let line = |name: &str| {
        let path = place.path(name).display().to_string();
        text.lines().find(|line| line.ends_with(&path)).unwrap_or_else(|| panic!("{path}: {text}"))
    };
    assert!(line("f").starts_with("millpond:   served 0."), "{text}");
    assert!(line("f").contains(" misses; read ") && line("f").contains("; python3"), "{text}");
    assert!(
        line("once").starts_with("millpond:   not served (read-only); 0 hits, 0 misses; read 0+1,"),
        "{text}"
    );
    let totals = "millpond: 1 processes, 2 files, 1 of them served (1 times): ";
    assert!(text.contains(totals), "{text}");
    assert!(text.contains("\nmillpond: files never served: read-only 1\n"), "{text}");
    assert!(text.contains("millpond: outside the served directories: "), "{text}");

    let stats = stderr(&place.command(&["--stats"], script).output().unwrap());
    assert!(stats.starts_with(totals) && !stats.contains("passwd"), "{stats}");
    let stats = place.command(&["--stats", "--json"], script).output().unwrap();
    let stats: Value = serde_json::from_str(&stderr(&stats)).unwrap();
    assert!(stats["files"].is_null() && stats["totals"]["served_files"] == 1, "{stats}");
}

/// Goal: the report has the number of times that the cache shrank for lack of memory, also when the program
/// is killed. The text mentions it only if it is not 0.
#[test]
fn memory_pressure_is_told() {
    let place = Place::new();
    // Outside the served directory: the library itself reads the file.
    let aside = tempfile::tempdir().unwrap();
    let stalls = aside.path().join("stalls");
    let script = |end: &str| {
        format!(
            "def stall(us): open({stalls:?}, 'w').write('some avg10=0.00 avg60=0.00 avg300=0.00 total=%d\\n' % us)\n\
             stall(0); f = os.open('f', os.O_RDWR); again(f); os.pwrite(f, bytes([7]) * 4096, 0); again(f)\n\
             {end}\n\
             os.kill(os.getpid(), 9)"
        )
    };
    let told = |end: &str, options: &[&str]| {
        let mut command = place.command(options, &script(end));
        stderr(&command.env("MILLPOND_PRESSURE_FILE", &stalls).output().unwrap())
    };
    // Waits until the library has checked: the seventh word of the header changes.
    let pressed = "accounts = open(os.environ['MILLPOND_ACCOUNTS'].split(':')[0], 'rb', buffering=0)\n\
        us = 0\n\
        while accounts.seek(48) and accounts.read(8) == bytes(8):\n\
        \x20   us += 1000000; stall(us); time.sleep(0.1)";
    let quiet = ["--stats", "--json", "--quiet"];
    let json: Value = serde_json::from_str(&told(pressed, &quiet)).unwrap();
    assert!(number(&json["totals"]["cache_shrunk"]) > 0, "{json}");
    let text = told(pressed, &["--stats"]);
    assert!(text.contains(" times, as memory was short\n"), "{text}");
    let text = told("time.sleep(0.1)", &["--stats"]);
    assert!(!text.contains("the cache shrank"), "{text}");
}

#[test]
fn bad_reports_are_refused() {
    let place = Place::new();
    for (options, message) in [
        (["--json", "--quiet"], "--stats"),
        (["--report", "told"], "--stats"),
        (["--stats", "--report=/no/such/place"], "--report /no/such/place: No such file"),
    ] {
        let output = place.command(&options, "print('started')").output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        assert!(stderr(&output).contains(message), "{}", stderr(&output));
        assert!(output.stdout.is_empty());
    }
}

/// Goal: a report that can't be written is an error line, and the exit status stays the program's.
#[test]
fn a_report_without_space_keeps_the_status() {
    let place = Place::new();
    let options = ["--stats", "--report", "/dev/full"];
    let output = place.command(&options, "os._exit(7)").output().unwrap();
    assert_eq!(output.status.code(), Some(7), "{}", stderr(&output));
    let line = "millpond: writing /dev/full: No space left on device";
    assert!(stderr(&output).starts_with(line), "{}", stderr(&output));
    let killed = place.command(&options, "os.kill(os.getpid(), 9)").output().unwrap();
    assert_eq!(killed.status.signal(), Some(9), "{}", stderr(&killed));
}

/// Goal: a name that has become another file is not used, neither for the accounts nor for the totals, to
/// which children add.
#[test]
fn a_stranger_is_not_written_to() {
    let place = Place::new();
    fs::write(place.path("stranger"), vec![0; 4096]).unwrap();
    let stranger = place.path("stranger");
    let script = format!(
        "again(os.open('f', 0))\n\
         keep = os.open({stranger:?}, os.O_RDWR)\n\
         for name in ('MILLPOND_TOTALS', 'MILLPOND_ACCOUNTS'):\n\
         \x20   old = os.environ.get(name, ':1:1').split(':')\n\
         \x20   os.environ[name] = ':'.join(['/proc/%d/fd/%d' % (os.getpid(), keep)] + old[1:])\n\
         os.spawnlp(os.P_WAIT, 'cat', 'cat', 'f')\n"
    );
    let output = place.command(&["--stats"], &script).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(fs::read(stranger).unwrap() == vec![0; 4096], "written to");
}

/// Incident: a file whose name had escape codes changed the colours and the title of the terminal.
#[test]
fn names_are_told_without_control_characters() {
    let place = Place::new();
    let script = "fd = os.open('\\x1b[31mred\\x07', os.O_CREAT | os.O_RDWR); os.write(fd, b'x')";
    let output = place.command(&["--explain"], script).output().unwrap();
    let told = stderr(&output);
    assert!(told.contains("?[31mred?"), "{told}");
    assert!(!told.contains('\x1b'), "{told}");
}
