//! Goal: `millpond run` behaves as documented: which programs it accepts, its messages, its exit status.
//!
//! The tests of the preload library cover which files are served, and their bytes.

#[path = "common/executable.rs"]
mod executable;
#[path = "../../millpond/tests/common/skip.rs"]
mod skip;

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus, Output};

use executable::executable;

fn millpond() -> Command {
    Command::new(env!("CARGO_BIN_EXE_millpond"))
}

/// `millpond run` with the given arguments.
fn run(words: &[&str]) -> Output {
    millpond().arg("run").args(words).output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[track_caller]
fn assert_fails(output: &Output, status: i32, message: &str) {
    assert_eq!(output.status.code(), Some(status), "{}", stderr(output));
    assert!(stderr(output).contains(message), "{:?} in {}", message, stderr(output));
}

/// An ELF header without content.
fn elf(machine: u16) -> Vec<u8> {
    let mut bytes = vec![0; 64];
    bytes[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
    bytes[16] = 2;
    bytes[18..20].copy_from_slice(&machine.to_le_bytes());
    bytes
}

#[test]
fn bad_arguments_are_refused() {
    assert_fails(&run(&[]), 2, "PROGRAM");
    assert_fails(&run(&["--"]), 2, "PROGRAM");
    assert_fails(&run(&["--cache", "lots", "--", "true"]), 2, "--cache");
    assert_fails(&run(&["--path", "/no/such", "--", "true"]), 2, "/no/such");
    assert_fails(&run(&["--path", "/dev/null", "--", "true"]), 2, "not a directory");
    assert_fails(&run(&["--backing", "tape", "--", "true"]), 2, "mapped, buffered, direct");
    assert_fails(&run(&["--mode", "late", "--", "true"]), 2, "through, back");
    let least =
        "invalid value '255k' for '--cache <SIZE>': 261120 bytes are too few: at least 256k";
    assert_fails(&run(&["--cache", "255k", "--", "true"]), 2, least);
    assert_fails(&run(&["--mode", "back", "--cache", "255k", "--", "true"]), 2, least);
    for (options, message) in [
        (&["--backing", "buffered"][..], "--backing buffered needs --mode back"),
        (&["--backing", "direct"], "--backing direct needs --mode back"),
        (&["--cache", "1m"], "--cache needs --mode back"),
        (&["--mode", "back", "--backing", "mapped"], "use --backing buffered or --backing direct"),
    ] {
        assert_fails(&run(&[options, &["--", "true"]].concat()), 2, message);
    }
    assert_fails(&run(&["--cache-shared", "--", "true"]), 2, "--cache-shared");
}

#[test]
fn the_programs_end_is_ours() {
    for mode in ["through", "back"] {
        let run = |words: &[&str]| run(&[&["--mode", mode, "--"], words].concat());
        assert_eq!(run(&["true"]).status.code(), Some(0));
        assert_eq!(run(&["sh", "-c", "exit 7"]).status.code(), Some(7));
        assert_eq!(run(&["sh", "-c", "kill -TERM $$"]).status.signal(), Some(15));
        assert_eq!(run(&["sh", "-c", "kill -KILL $$"]).status.signal(), Some(9));
        assert_eq!(run(&["sh", "-c", "kill -40 $$"]).status.signal(), Some(40));
        assert_eq!(run(&["/no/such/program"]).status.code(), Some(127));
    }
}

/// Goal: a script without `#!` is run by the shell, as by `execvp`, in each mode and with a report.
/// Incident: with a keeper or a report it had "Exec format error".
#[test]
fn a_script_without_an_interpreter_is_the_shells() {
    let dir = tempfile::tempdir().unwrap();
    let script = executable(dir.path(), "script", b"[ \"$0\" = \"$1\" ] || exit 1\nexit \"$2\"\n");
    let script = script.to_str().unwrap();
    for options in [&["--mode", "through"][..], &["--mode", "back"], &["--stats"], &["--explain"]] {
        let output = run(&[options, &["--", script, script, "7"]].concat());
        assert_eq!(output.status.code(), Some(7), "{options:?}: {}", stderr(&output));
    }
}

/// Starts `millpond run` on a shell that exits with status 9 after any of `signals`. Sends it `sent`, one after the other;
/// returns its end.
fn sent_to_run(options: &[&str], signals: &[&str], sent: &[&str]) -> ExitStatus {
    let script =
        format!("trap 'exit 9' {}; echo ready; while :; do sleep 0.01; done", signals.join(" "));
    // A test in the background of a shell has been started to ignore SIGINT and SIGQUIT.
    let mut command = Command::new("env");
    command.args(["--default-signal", env!("CARGO_BIN_EXE_millpond"), "run"]).args(options);
    command.args(["--", "sh", "-c", &script]);
    let mut child = command.stdout(std::process::Stdio::piped()).spawn().unwrap();
    let mut ready = [0; 6];
    std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut ready).unwrap();
    for signal in sent {
        let arguments = [format!("-{signal}"), child.id().to_string()];
        assert!(Command::new("kill").args(arguments).status().unwrap().success());
    }
    child.wait().unwrap()
}

/// With a keeper or a report the program is a child: signals to `millpond run` reach it.
/// Incident: a real-time signal ended the keeper.
#[test]
fn signals_are_handed_on() {
    for number in [1, 2, 3, 10, 12, 14, 15, 16, 26, 27, 29, 30, 34, 50, 64] {
        let number = number.to_string();
        let end = sent_to_run(&["--mode", "back"], &[&number], &[&number]);
        assert_eq!(end.code(), Some(9), "{number}");
    }
    let end = sent_to_run(&["--stats", "--report", "/dev/null"], &["40"], &["40"]);
    assert_eq!(end.code(), Some(9));
}

/// Goal: a signal about the writes or the processor time of `millpond run` is not the program's, and ends neither.
#[test]
fn signals_about_the_keeper_are_not_handed_on() {
    for number in ["13", "24", "25"] {
        let end = sent_to_run(&["--mode", "back"], &["15"], &[number, "15"]);
        assert_eq!(end.code(), Some(9), "{number}");
    }
}

/// Goal: the program ignores the signals that `millpond run` was started to ignore, as of `nohup`, in each mode.
#[test]
fn ignored_signals_stay_ignored() {
    for mode in ["through", "back"] {
        let mut command = Command::new("env");
        command.args(["--ignore-signal=HUP,USR1,CHLD,RTMIN+6", env!("CARGO_BIN_EXE_millpond")]);
        command.args(["run", "--mode", mode, "--", "grep", "SigIgn", "/proc/self/status"]);
        let output = command.output().unwrap();
        let said = String::from_utf8(output.stdout.clone()).unwrap();
        let mask = said.strip_prefix("SigIgn:").unwrap_or_else(|| panic!("{output:?}"));
        let mask = u64::from_str_radix(mask.trim(), 16).unwrap();
        for number in [1, 10, 17, 40] {
            assert!(mask & 1 << (number - 1) != 0, "{mode}: {number}: {said}");
        }
    }
}

/// Incident: the kernel reaps the child of a process that ignores SIGCHLD, so the wait for the program failed, and the keeper
/// ended without writing its pages.
///
/// Goal: the pages of a killed program are written, and the exit status is passed on, if SIGCHLD is ignored at the start.
#[test]
fn ignored_ends_of_children_lose_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let run = |end: &str| {
        let script = format!(
            "import os; f = os.open('f', os.O_RDWR | os.O_CREAT); os.write(f, b'x' * 10000); {end}"
        );
        let mut command = Command::new("env");
        command.args(["--ignore-signal=CHLD", env!("CARGO_BIN_EXE_millpond")]);
        command.args(["run", "--eager", "--mode", "back", "--", "python3", "-c", &script]);
        command.current_dir(dir.path()).output().unwrap()
    };
    let output = run("os.kill(os.getpid(), 9)");
    assert_eq!(output.status.signal(), Some(9), "{}", stderr(&output));
    assert_eq!(fs::read(dir.path().join("f")).unwrap(), [b'x'; 10000]);
    let output = run("os._exit(7)");
    assert_eq!(output.status.code(), Some(7), "{}", stderr(&output));
}

/// Dirty pages of a killed program are in the file when `millpond run` returns, which reports it.
#[test]
fn a_line_says_what_was_recovered() {
    let dir = tempfile::tempdir().unwrap();
    let script = "import os; f = os.open('f', os.O_RDWR | os.O_CREAT); \
                  os.write(f, b'x' * 10000); os.kill(os.getpid(), 9)";
    let line = "millpond: recovered 1 files, 3 pages, 10000 bytes\n";
    for (quiet, expected) in [(false, line), (true, "")] {
        let _ = fs::remove_file(dir.path().join("f"));
        let mut command = millpond();
        command.args(["run", "--eager", "--mode", "back"]).args(quiet.then_some("--quiet"));
        command.args(["--", "python3", "-c", script]).current_dir(dir.path());
        let output = command.output().unwrap();
        assert_eq!(output.status.signal(), Some(9), "{}", stderr(&output));
        assert_eq!(stderr(&output), expected);
        assert_eq!(fs::read(dir.path().join("f")).unwrap(), [b'x'; 10000]);
    }
}

#[test]
fn programs_are_found_or_not_as_in_a_shell() {
    let dir = tempfile::tempdir().unwrap();
    let mut missing = millpond();
    missing.args(["run", "--", "no-such-program"]).env("PATH", "/no/such:/usr/bin:/bin");
    assert_fails(&missing.output().unwrap(), 127, "not found");
    assert_fails(&run(&["--", "/no/such/program"]), 127, "No such file");
    assert_fails(&run(&["--", "/etc/passwd"]), 126, "ermission denied");
    assert_fails(&run(&["--", "/etc"]), 126, "ermission denied");
    let orphan = executable(dir.path(), "orphan", b"#!/no/such/interpreter\n");
    assert_fails(&run(&["--", orphan.to_str().unwrap()]), 127, "/no/such/interpreter");

    // A script without an interpreter line: /bin/sh runs it.
    executable(dir.path(), "plain", b"exit 9\n");
    let found = millpond().args(["run", "--", "plain"]).env("PATH", dir.path()).output().unwrap();
    assert_eq!(found.status.code(), Some(9), "{}", stderr(&found));
}

#[test]
fn programs_that_cannot_be_served_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let own = fs::read("/proc/self/exe").unwrap();
    let machine = u16::from_le_bytes([own[18], own[19]]);
    let fixed = executable(dir.path(), "fixed", &elf(machine));
    assert_fails(&run(&["--", fixed.to_str().unwrap()]), 2, "statically linked");

    let script = format!("#!{} -x\n", fixed.display());
    let script = executable(dir.path(), "script", script.as_bytes());
    let output = run(&["--", script.to_str().unwrap()]);
    assert_fails(&output, 2, "statically linked");
    assert_fails(&output, 2, "interpreter of");

    // A program for another machine, otherwise like ours.
    let mut foreign = own;
    foreign[18..20].copy_from_slice(&(if machine == 243 { 62_u16 } else { 243 }).to_le_bytes());
    let foreign = executable(dir.path(), "foreign", &foreign);
    assert_fails(&run(&["--", foreign.to_str().unwrap()]), 2, "is a program for");
}

#[test]
fn privileged_programs_are_refused() {
    if !rustix::process::geteuid().is_root() {
        return skip::skip("only root can give a program to another user");
    }
    let dir = tempfile::tempdir().unwrap();
    let program = executable(dir.path(), "setuid", &fs::read("/proc/self/exe").unwrap());
    chown(&program, Some(65534), None).unwrap();
    fs::set_permissions(&program, PermissionsExt::from_mode(0o4755)).unwrap();
    assert_fails(&run(&["--", program.to_str().unwrap()]), 2, "is setuid");
    // Root gains no rights by its own setuid programs.
    chown(&program, Some(0), None).unwrap();
    fs::set_permissions(&program, PermissionsExt::from_mode(0o4755)).unwrap();
    let output = run(&["--quiet", "--", program.to_str().unwrap(), "--list"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
}

#[test]
fn the_library_is_told_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().to_str().unwrap();
    let output = millpond()
        .args(["run", "--cache", "64m", "--path", place, "--path", "/usr/../usr", "--quiet"])
        .args(["--backing", "direct", "--mode", "back", "--eager", "--", "/usr/bin/env"])
        .env("XDG_RUNTIME_DIR", dir.path())
        .env("LD_PRELOAD", "")
        .output()
        .unwrap();
    let environment = String::from_utf8(output.stdout).unwrap();
    let canonical = fs::canonicalize(dir.path()).unwrap();
    for line in [
        format!("LD_PRELOAD={place}/millpond/libmillpond_preload-"),
        format!("MILLPOND_PATHS={}:/usr\n", canonical.display()),
        "MILLPOND_CACHE_BYTES=67108864\n".into(),
        "MILLPOND_QUIET=1\n".into(),
        "MILLPOND_BACKING=direct\n".into(),
        "MILLPOND_MODE=back\n".into(),
        "MILLPOND_EAGER=1\n".into(),
    ] {
        assert!(environment.contains(&line), "{line:?} in {environment}");
    }
}

/// The options that `env` got from `millpond run` in the middle of `words`; a keeper has another address each time.
fn options_in(words: &[&str]) -> Vec<String> {
    let mut command = Command::new(words[0]);
    // Another run around these tests must not matter.
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("MILLPOND_")) {
        command.env_remove(name);
    }
    let output = command.args(&words[1..]).output().unwrap();
    assert!(output.status.success(), "{words:?}: {}", stderr(&output));
    let environment = String::from_utf8(output.stdout).unwrap();
    let told = |line: &&str| line.starts_with("MILLPOND_") || line.starts_with("LD_PRELOAD=");
    let counts = |line: &&str| {
        line.starts_with("MILLPOND_TOTALS=") || line.starts_with("MILLPOND_ACCOUNTS=")
    };
    let lines = environment.lines().filter(told).filter(|line| !counts(line));
    let mut lines: Vec<_> = lines
        .map(|line| if line.starts_with("MILLPOND_KEEPER=") { "MILLPOND_KEEPER" } else { line })
        .map(str::to_owned)
        .collect();
    lines.sort();
    lines
}

/// Goal: a run within another one has its own options alone.
/// Incident: it had the outer one's size of the cache and keeper, was eager and quiet.
#[test]
fn a_nested_run_has_its_own_options() {
    const MILLPOND: &str = env!("CARGO_BIN_EXE_millpond");
    let inner: [&[&str]; 4] =
        [&[], &["--mode", "back"], &["--mode", "back", "--cache", "8m"], &["--quiet", "--eager"]];
    let outer: [&[&str]; 7] = [
        &[],
        &["--eager"],
        &["--quiet"],
        &["--stats"],
        &["--path", "/usr"],
        &["--mode", "back", "--cache", "64m"],
        &["--mode", "back", "--backing", "direct"],
    ];
    for inner in inner {
        let inner = [&[MILLPOND, "run"], inner, &["--", "/usr/bin/env"]].concat();
        let expected = options_in(&inner);
        assert!(expected.len() >= 4, "{expected:?}");
        for outer in outer {
            let nested = [&[MILLPOND, "run"], outer, &["--"], &inner].concat();
            assert_eq!(options_in(&nested), expected, "{outer:?}");
        }
    }
}

#[test]
fn one_line_says_what_was_served() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("file"), vec![7; 100_000]).unwrap();
    let cat = |options: &[&str]| {
        let mut command = millpond();
        command.arg("run").args(options).args(["--", "cat", "file"]).current_dir(dir.path());
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        assert_eq!(output.stdout, vec![7; 100_000]);
        stderr(&output)
    };
    let told = cat(&[]);
    assert_eq!(told.lines().count(), 1, "{told}");
    assert!(told.starts_with("millpond: ") && told.contains("served"), "{told}");
    assert!(told.contains("served 0 files, 0 bytes") && told.contains("once: "), "{told}");
    let eager = cat(&["--mode", "back", "--eager"]);
    assert!(eager.contains("served 1 files, 100000 bytes"), "{eager}");
    assert_eq!(cat(&["--quiet"]), "");
}

/// A write to a full file system returns the error, as usual.
#[test]
fn a_write_without_space_fails() {
    let dir = tempfile::tempdir().unwrap();
    let mut mount = Command::new("mount");
    mount.args(["-t", "tmpfs", "-o", "size=1m", "tmpfs"]).arg(dir.path());
    if !mount.output().is_ok_and(|output| output.status.success()) {
        return skip::skip("only root can mount a small file system");
    }
    let script = "import os; f = os.open('f', os.O_RDWR | os.O_CREAT)\n\
                  try:\n while True: os.write(f, b'x' * 100000)\n\
                  except OSError as error: os._exit(error.errno)";
    let mut command = millpond();
    command.args(["run", "--eager", "--mode", "back", "--quiet", "--"]);
    command.args(["python3", "-c", script]);
    let output = command.current_dir(dir.path()).output().unwrap();
    let size = fs::metadata(dir.path().join("f")).unwrap().len();
    let _ = Command::new("umount").arg("-l").arg(dir.path()).output();
    assert_eq!(output.status.code(), Some(28), "{}", stderr(&output));
    assert_eq!((size, stderr(&output)), (1 << 20, String::new()));
}

#[test]
fn a_planted_library_is_never_loaded() {
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
    // Each directory that the environment names is writable for other users.
    for name in ["millpond", ".cache"] {
        let planted = dir.path().join(name);
        fs::create_dir(&planted).unwrap();
        fs::set_permissions(&planted, PermissionsExt::from_mode(0o777)).unwrap();
    }
    let uid = rustix::process::geteuid().as_raw();
    std::os::unix::fs::symlink(
        dir.path().join("millpond"),
        dir.path().join(format!("millpond-{uid}")),
    )
    .unwrap();
    let output = millpond()
        .args(["run", "--", "true"])
        .env("XDG_RUNTIME_DIR", dir.path())
        .env("TMPDIR", dir.path())
        .env("HOME", dir.path())
        .output()
        .unwrap();
    // /tmp remains: it is root's, and its sticky bit prevents renames by other users.
    assert!(output.status.success(), "{}", stderr(&output));
    for name in ["millpond", ".cache"] {
        let planted = fs::read_dir(dir.path().join(name)).unwrap();
        assert_eq!(planted.count(), 0, "the library is in {name}, which other users may write");
    }
}

#[test]
fn a_library_can_be_chosen() {
    let with = |path: &str| {
        millpond().args(["run", "--", "true"]).env("MILLPOND_PRELOAD", path).output().unwrap()
    };
    assert_fails(&with("/no/such/library.so"), 2, "MILLPOND_PRELOAD /no/such/library.so");
}

/// The library inside the binary is built separately from the library that the preload tests use. Incident:
/// a cancelled thread in one of its hooks ended the process.
#[test]
fn threads_of_the_program_can_be_cancelled() {
    let script = "import ctypes\n\
        libc = ctypes.CDLL(None)\n\
        thread, result = ctypes.c_ulong(), ctypes.c_void_p()\n\
        job = (libc.system, b'exec sleep 1000')\n\
        assert libc.pthread_create(ctypes.byref(thread), None, *job) == 0\n\
        libc.usleep(300000)\n\
        assert libc.pthread_cancel(thread) == 0\n\
        assert libc.pthread_join(thread, ctypes.byref(result)) == 0\n\
        assert result.value == ctypes.c_void_p(-1).value\n";
    for mode in ["through", "back"] {
        let output = run(&["--quiet", "--mode", mode, "--", "python3", "-c", script]);
        assert!(output.status.success(), "{mode}: {}\n{}", output.status, stderr(&output));
    }
}
