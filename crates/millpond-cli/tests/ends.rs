//! Goal: the last line of `millpond run` is printed once for a program and its children, at each exit of the program; a
//! program that is killed prints none; and `millpond run` adds no process and holds nothing beyond the end.

use std::fs;
use std::io::Read;
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

/// Goal: each exit of the program prints the same line, once. A program that is killed prints no line. The
/// exit status is unchanged. With `--stats` the report has the counts for each end.
#[test]
fn each_exit_prints_the_line_and_a_kill_does_not() {
    let unseen = format!(
        "import mmap; {}; memory = mmap.mmap(-1, 4096, prot=7); memory.write(code)\n\
         ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))()",
        exit_unseen()
    );
    let kills = [
        ("kill(9)", (None, Some(9))),
        ("kill(15)", (None, Some(15))),
        ("signal.signal(2, signal.SIG_DFL); kill(2)", (None, Some(2))),
        ("kill(11)", (None, Some(11))),
        ("os.abort()", (None, Some(6))),
        (unseen.as_str(), (Some(5), None)),
    ];
    for options in [&["--mode", "through"][..], &["--mode", "back"], &["--eager"]] {
        let itself = run(options, &format!("{READS}os._exit(3)"));
        assert_eq!(itself.status.code(), Some(3), "{}", stderr(&itself));
        let line = stderr(&itself);
        assert!(line.starts_with("millpond: served ") && line.lines().count() == 1, "{line}");
        let returned = run(options, READS);
        assert!(returned.status.success(), "{}", stderr(&returned));
        assert!(stderr(&returned).starts_with("millpond: served "), "{}", stderr(&returned));
        for (end, expected) in kills {
            let killed = run(options, &format!("{READS}{end}"));
            assert_eq!(ended(killed.status), expected, "{options:?} {end}: {}", stderr(&killed));
            assert_eq!(stderr(&killed), "", "{options:?} {end}");
            let stats = run(&[options, &["--stats"]].concat(), &format!("{READS}{end}"));
            assert_eq!(ended(stats.status), expected, "{options:?} {end}: {}", stderr(&stats));
            assert!(stderr(&stats).contains("served"), "{options:?} {end}: {}", stderr(&stats));
        }
    }
}

/// Goal: with direct backing the line has the numbers of direct transfers.
#[test]
fn direct_transfers_are_in_the_line() {
    let ended = run(&["--mode", "back", "--backing", "direct"], READS);
    let line = stderr(&ended);
    assert!(line.contains("; direct: ") && line.contains(" reads, "), "{line}");
}

#[test]
fn quiet_stays_quiet() {
    for mode in ["through", "back"] {
        let output = run(&["--quiet", "--mode", mode], READS);
        assert!(output.status.success() && stderr(&output).is_empty(), "{}", stderr(&output));
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
    let one = run(&["--mode", "back"], reads);
    let twice = format!(
        "{reads}child = os.fork()\n\
         if child == 0: use(); os._exit(0)\n\
         os.waitpid(child, 0)\n\
         os.execv('/bin/sh', ['sh', '-c', 'cat f > /dev/null; exit 3'])"
    );
    for options in [&["--mode", "back"][..], &["--mode", "back", "--backing", "direct"]] {
        let twice = run(options, &twice);
        assert_eq!(twice.status.code(), Some(3), "{}", stderr(&twice));
        let line = stderr(&twice);
        assert_eq!(line.lines().count(), 1, "{line}");
        let (once, twice) = (bytes(&stderr(&one)), bytes(&line));
        assert!(once.0 > 0 && twice.0 == 2 * once.0, "{}{line}", stderr(&one));
        // The reads of `cat`.
        assert!(twice.1 >= once.1 + 16384, "{}{line}", stderr(&one));
    }
}

/// Goal: `millpond run` in mode through becomes the program: the process is the same, and has no child.
#[test]
fn the_program_is_the_process_that_was_started() {
    let place = place();
    let script = "print(os.getpid(), open(f'/proc/self/task/{os.getpid()}/children').read())";
    let child = command(place.path(), &["--quiet"], script).stdout(Stdio::piped()).spawn().unwrap();
    let pid = child.id();
    let output = child.wait_with_output().unwrap();
    assert_eq!(String::from_utf8(output.stdout).unwrap(), format!("{pid} \n"));
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
