//! Goal: the last line of `millpond run` is printed however the program ends; by the reporter process if
//! the program can't.
//!
//! The reporter exists before the program starts: these tests do not have to wait for it.

#[path = "../../millpond/tests/common/skip.rs"]
mod skip;

use std::fs;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Output, Stdio};
use std::sync::OnceLock;

/// Reads 400 times 4 KiB at 4 places, so mode through maps the file.
const PRELUDE: &str = "import os, sys, time, ctypes, signal\n\
    def again(fd):\n\
    \x20   for i in range(400): assert len(os.pread(fd, 4096, i % 4 * 4096)) == 4096\n\
    def kill(number): os.kill(os.getpid(), number); time.sleep(100)\n";
/// The interpreter opens files before. They are counted, too, always the same way.
const READS: &str =
    "again(os.open('f', os.O_RDONLY)); other = os.open('f', os.O_RDONLY); os.read(other, 9)\n";

/// A directory with a file in it.
fn place() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("f"), vec![7; 16384]).unwrap();
    dir
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

fn command(place: &Path, options: &[&str], script: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_millpond"));
    command.arg("run").args(options).arg("--").arg(python()).arg("-c");
    command.arg(format!("{PRELUDE}{script}")).current_dir(place);
    command
}

/// Returns when all processes have closed standard error.
fn run(options: &[&str], script: &str) -> Output {
    let place = place();
    command(place.path(), options, script).output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn ended(status: ExitStatus) -> (Option<i32>, Option<i32>) {
    (status.code(), status.signal())
}

/// Ends the process by a system call instruction, which no hook sees.
fn exit_unseen() -> &'static str {
    if cfg!(target_arch = "x86_64") {
        // mov edi, 5; mov eax, SYS_exit_group; syscall
        "code = b'\\xbf\\x05\\0\\0\\0\\xb8\\xe7\\0\\0\\0\\x0f\\x05'"
    } else {
        // mov x0, #5; mov x8, #SYS_exit_group; svc #0
        "code = b'\\xa0\\0\\x80\\xd2\\xc8\\x0b\\x80\\xd2\\x01\\0\\0\\xd4'"
    }
}

/// Goal: the line is printed once, with the same counts, for every end of the program, in all modes. Files
/// that were open then are counted. The exit status is unchanged.
#[test]
fn the_line_is_said_however_the_program_ends() {
    let unseen = format!(
        "import mmap; {}; memory = mmap.mmap(-1, 4096, prot=7); memory.write(code)\n\
         ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))()",
        exit_unseen()
    );
    let ends = [
        ("kill(9)", (None, Some(9))),
        ("kill(15)", (None, Some(15))),
        ("signal.signal(2, signal.SIG_DFL); kill(2)", (None, Some(2))),
        ("kill(11)", (None, Some(11))),
        ("os.abort()", (None, Some(6))),
        (unseen.as_str(), (Some(5), None)),
    ];
    for options in [&["--mode", "through"][..], &["--mode", "back"], &["--eager"]] {
        for (end, expected) in ends {
            // The modules that the interpreter loads for this end are loaded each time.
            let before = if end == unseen { "import mmap\n" } else { "" };
            let itself = run(options, &format!("{before}{READS}os._exit(3)"));
            assert_eq!(itself.status.code(), Some(3), "{}", stderr(&itself));
            let line = stderr(&itself);
            assert!(line.starts_with("millpond: served ") && line.lines().count() == 1, "{line}");
            let killed = run(options, &format!("{before}{READS}{end}"));
            assert_eq!(ended(killed.status), expected, "{options:?} {end}: {}", stderr(&killed));
            assert_eq!(stderr(&killed), line, "{options:?} {end}");
        }
    }
}

/// Goal: with direct backing, too, except for the transfers, which are unknown at the end.
#[test]
fn with_direct_backing_files_are_told() {
    let killed = run(&["--mode", "back", "--backing", "direct"], &format!("{READS}kill(9)"));
    let line = stderr(&killed);
    assert!(line.contains("; direct: ") && line.ends_with(" files without\n"), "{line}");
    assert!(!line.contains(" reads, "), "{line}");
}

#[test]
fn quiet_stays_quiet() {
    for mode in ["through", "back"] {
        let killed = run(&["--quiet", "--mode", mode], &format!("{READS}kill(9)"));
        assert_eq!((ended(killed.status), stderr(&killed)), ((None, Some(9)), String::new()));
    }
}

/// The numbers of `served` and `passed`, in bytes.
fn bytes(line: &str) -> (u64, u64) {
    let numbers = line.split([' ', ';']).filter_map(|word| word.parse().ok());
    let numbers: Vec<u64> = numbers.take(4).collect();
    (numbers[1], numbers[3])
}

/// Goal: a program that calls exec is one program: the line includes its earlier counts, and its
/// children's.
#[test]
fn another_program_and_children_are_in_the_line() {
    let reads = "def use(): fd = os.open('f', os.O_RDWR); again(fd); os.close(fd)\nuse()\n";
    let one = run(&["--mode", "back"], &format!("{reads}kill(9)"));
    let twice = format!(
        "{reads}child = os.fork()\n\
         if child == 0: use(); os._exit(0)\n\
         os.waitpid(child, 0)\n\
         os.execv('/bin/sh', ['sh', '-c', 'cat f > /dev/null; kill -KILL $$'])"
    );
    for options in [&["--mode", "back"][..], &["--mode", "back", "--backing", "direct"]] {
        let twice = run(options, &twice);
        assert_eq!(ended(twice.status), (None, Some(9)), "{}", stderr(&twice));
        let line = stderr(&twice);
        assert_eq!(line.lines().count(), 1, "{line}");
        let (once, twice) = (bytes(&stderr(&one)), bytes(&line));
        assert!(once.0 > 0 && twice.0 == 2 * once.0, "{}{line}", stderr(&one));
        // The reads of `cat`.
        assert!(twice.1 >= once.1 + 16384, "{}{line}", stderr(&one));
    }
}

/// Goal: the reporter is no child of the program, in any way to ask; is in none of its sessions and process
/// groups; and shares nothing with it except standard error.
#[test]
fn nobody_is_there_for_the_program() {
    let script = "import errno\n\
        def none(call):\n\
        \x20   try: call()\n\
        \x20   except OSError as error: assert error.errno == errno.ECHILD, error\n\
        \x20   else: assert False\n\
        none(lambda: os.wait())\n\
        none(lambda: os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG))\n\
        none(lambda: os.waitpid(-1, 0x40000000))\n\
        children = open(f'/proc/self/task/{os.getpid()}/children').read()\n\
        assert children == '', children\n\
        ctypes.CDLL(None).prctl(36, 1)\n\
        none(lambda: os.waitpid(-1, 0x40000000))\n\
        assert not signal.sigpending()\n\
        def fields(pid): return open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()\n\
        def is_aside(pid):\n\
        \x20   try: words = open(f'/proc/{pid}/cmdline').read()\n\
        \x20   except OSError: return False\n\
        \x20   return int(pid) != os.getpid() and sys.argv[1] in words.split(chr(0))\n\
        pids = [pid for pid in os.listdir('/proc') if pid.isdigit() and is_aside(pid)]\n\
        for pid in pids:\n\
        \x20   own = fields('self')\n\
        \x20   assert fields(pid)[2] == fields(pid)[3] == pid and pid not in own[2:4], fields(pid)\n\
        \x20   assert sorted(os.listdir(f'/proc/{pid}/fd')) == ['0', '1', '2']\n\
        \x20   assert os.readlink(f'/proc/{pid}/fd/2') == os.readlink('/proc/self/fd/2')\n\
        \x20   assert 'pidfd' in os.readlink(f'/proc/{pid}/fd/0')\n\
        \x20   assert 'millpond-tally' in os.readlink(f'/proc/{pid}/fd/1')\n\
        \x20   assert os.readlink(f'/proc/{pid}/cwd') == '/'\n\
        print(len(pids), os.getpid())\n";
    let place = place();
    let mark = format!("mark-{}", std::process::id());
    for (option, expected) in [("--eager", 1), ("--quiet", 0)] {
        // The signal for the end of a child would be pending then.
        let setup = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])\n";
        let script = format!("{PRELUDE}{script}");
        let words = [option, "--", python().to_str().unwrap(), "-c", &script, &mark];
        let mut command = prepared(setup, &words);
        command.current_dir(place.path()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.spawn();
        let child = child.unwrap();
        let pid = child.id();
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        let told = String::from_utf8(output.stdout).unwrap();
        assert_eq!(told, format!("{expected} {pid}\n"), "the program is where `run` was");
    }
}

/// Goal: a reader of the output waits for the program only, and not for the processes that the program left
/// behind, which continue.
#[test]
fn nothing_is_held_beyond_the_end() {
    let place = place();
    // A daemon that runs until the directory is removed.
    let script = "again(os.open('f', os.O_RDONLY))\n\
        if os.fork() == 0:\n\
        \x20   os.setsid(); null = os.open('/dev/null', os.O_RDWR)\n\
        \x20   for fd in range(3): os.dup2(null, fd)\n\
        \x20   while os.path.exists('f'): time.sleep(0.01)\n\
        \x20   os._exit(0)\n";
    let mut child = command(place.path(), &[], script);
    let mut child = child.stderr(Stdio::piped()).spawn().unwrap();
    let mut text = String::new();
    child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
    assert!(text.starts_with("millpond: served 1 files, "), "{text}");
    assert!(child.wait().unwrap().success());
}

/// Goal: if the process limit is reached, or the reporter would be an unexpected child of the program, the
/// program runs as usual, and prints its line itself if it can.
#[test]
fn where_nobody_can_stay_aside_the_program_is_alone() {
    let script = "n=0; while [ $n -lt 9 ]; do read -r x < f; n=$((n + 1)); done; ";
    let no_room = "import resource\n\
        if os.getuid() == 0: os.setgid(65534); os.setuid(65534)\n\
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))\n";
    for setup in [no_room, "ctypes.CDLL(None).prctl(36, 1)\n"] {
        let place = place();
        fs::set_permissions(place.path(), PermissionsExt::from_mode(0o777)).unwrap();
        let run = |end: &str| {
            let script = format!("{script}{end}");
            let mut command = prepared(setup, &["--", "/bin/sh", "-c", &script]);
            command.env("XDG_RUNTIME_DIR", place.path()).current_dir(place.path());
            command.output().unwrap()
        };
        let itself = run("exit 3");
        if itself.status.code() == Some(1) && stderr(&itself).contains("ermission denied") {
            return skip::skip("another user can't run this program where it is built");
        }
        assert_eq!(itself.status.code(), Some(3), "{}", stderr(&itself));
        assert!(stderr(&itself).starts_with("millpond: served 0 files, "), "{}", stderr(&itself));
        let killed = run("kill -9 $$");
        assert_eq!((ended(killed.status), stderr(&killed)), ((None, Some(9)), String::new()));
    }
}

/// `millpond run` in a process that `setup` has prepared.
fn prepared(setup: &str, words: &[&str]) -> Command {
    let mut command = Command::new(python());
    let exec = "os.execv(sys.argv[1], [sys.argv[1], 'run'] + sys.argv[2:])";
    command.arg("-c").arg(format!("{PRELUDE}{setup}{exec}")).arg(env!("CARGO_BIN_EXE_millpond"));
    command.args(words);
    command
}
