//! A table of surroundings of programs, by the modes of the library. In each the outcome is that of the kernel alone,
//! or the row names the sentence of docs/run.md about the difference.
//!
//! `MILLPOND_TEST_ROWS=word,word` runs the rows whose names contain one of the words.

mod common;

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::{Mode, Pond, ServedFiles, library, skip};

/// A run that takes longer hangs: the longest one takes a few seconds on a busy machine.
const HANG: Duration = Duration::from_secs(90);

/// The modes that a user may choose.
const MODES: [(&str, Mode, ServedFiles); 4] = [
    ("default", Mode::Through, ServedFiles::Default),
    ("eager", Mode::Through, ServedFiles::Eager),
    ("back", Mode::Back, ServedFiles::Default),
    ("back and eager", Mode::Back, ServedFiles::Eager),
];

/// The exit and the output of a program.
#[derive(PartialEq, Debug)]
struct Outcome {
    /// `None`: the program did not exit.
    status: Option<Result<i32, i32>>,
    printed: String,
    complained: String,
}

/// One line of the table.
struct Row {
    name: &'static str,
    /// A sentence of docs/run.md, where the outcome may differ from the kernel's.
    limit: Option<&'static str>,
}

/// The outcome must be as on the kernel.
const fn same(name: &'static str) -> Row {
    Row { name, limit: None }
}

/// Documented: the outcome may differ.
const fn limited(name: &'static str, limit: &'static str) -> Row {
    Row { name, limit: Some(limit) }
}

fn is_chosen(name: &str) -> bool {
    std::env::var("MILLPOND_TEST_ROWS")
        .map_or(true, |words| words.split(',').any(|word| name.contains(word)))
}

/// Runs a command until it ends or hangs.
fn run(command: &mut Command, output: &Path) -> Outcome {
    let (out, err) = (output.with_extension("out"), output.with_extension("err"));
    command.stdout(std::fs::File::create(&out).unwrap());
    command.stderr(std::fs::File::create(&err).unwrap());
    command.stdin(Stdio::null()).process_group(0);
    let mut child = command.spawn().unwrap();
    let end = Instant::now() + HANG;
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break Some(status.code().ok_or_else(|| status.signal().unwrap_or(0))),
            None if Instant::now() > end => break None,
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    // Kills the group, with the processes that are left in it: this child alone leads it.
    let group = format!("-{}", child.id());
    let _ = Command::new("kill").args(["-9", "--", &group]).stderr(Stdio::null()).status();
    let _ = child.wait();
    let read = |path| String::from_utf8_lossy(&std::fs::read(path).unwrap()).into_owned();
    Outcome { status, printed: read(&out), complained: read(&err) }
}

/// Runs the command that `prepare` has changed, in each mode and on the kernel alone; returns the differences.
fn compare(
    row: &Row,
    program: &Path,
    arguments: &[&str],
    prepare: &dyn Fn(&mut Command),
) -> Vec<String> {
    let mut differences = Vec::new();
    let alone = Pond::new();
    let mut command = alone.plain(program);
    command.args(arguments);
    prepare(&mut command);
    let expected = run(&mut command, &alone.aside("plain"));
    for (mode_name, mode, files) in MODES {
        let pond = Pond::new().in_mode(mode).serving(files);
        let mut command = pond.served(program);
        command.args(arguments);
        prepare(&mut command);
        let found = run(&mut command, &pond.aside("served"));
        if found != expected {
            let difference =
                format!("{}, {mode_name}:\n  kernel {expected:?}\n  served {found:?}", row.name);
            differences.push(difference);
        }
    }
    differences
}

/// Checks a row's differences: there are none, or the documents have a sentence about them.
fn check(row: &Row, differences: Vec<String>, failures: &mut Vec<String>) {
    match row.limit {
        None => failures.extend(differences),
        Some(sentence) => {
            let documents = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
            let read = |page| std::fs::read_to_string(documents.join(page)).unwrap();
            let text = [read("run.md"), read("run-internals.md")].concat();
            let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
            if !words(&text).contains(&words(sentence)) {
                failures.push(format!(
                    "{}: docs/run.md and docs/run-internals.md do not say {sentence:?}",
                    row.name
                ));
            }
            for difference in differences {
                println!("documented: {difference}");
            }
        }
    }
}

#[track_caller]
fn assert_none(failures: &[String]) {
    assert!(failures.is_empty(), "\n{}", failures.join("\n"));
}

/// Runs rows whose name is the argument of `surroundings.c`.
fn run_rows(rows: &[Row]) {
    let compiler = Pond::new();
    let program = compiler.compile("surroundings.c", &["-O1"]);
    let mut failures = Vec::new();
    for row in rows.iter().filter(|row| is_chosen(row.name)) {
        let differences = compare(row, &program, &[row.name], &|_| {});
        check(row, differences, &mut failures);
    }
    assert_none(&failures);
}

/// Goal: the process ends when the program's threads have ended.
/// Incident: a program whose main thread left by `pthread_exit` never ended, as the library's threads went on.
#[test]
fn end_of_the_main_thread() {
    run_rows(&[same("main-pthread-exit"), same("main-sys-exit"), same("main-cancelled")]);
}

/// Goal: files can be used on the smallest stacks that POSIX and the kernel allow.
/// Incident: the read that had the file served ran off a thread's stack of 16 KiB.
#[test]
fn small_stacks() {
    run_rows(&[
        same("stack-thread-min"),
        same("stack-handler-min"),
        same("stack-fiber"),
        same("stack-handlers-nested"),
    ]);
}

/// Goal: a program that filters its own system calls makes only the calls of its own code.
/// Incident: a filter killed the process for a call of a library thread; another one made that thread spin.
#[test]
fn filters_of_system_calls() {
    run_rows(&[
        same("seccomp-strict"),
        same("seccomp-strict-by-number"),
        same("seccomp-kill"),
        same("seccomp-kill-one-thread"),
        same("seccomp-errno"),
        limited("seccomp-errno-unseen", UNSEEN),
        same("seccomp-trap"),
    ]);
}

/// Goal: the counts of a program that the library leaves alone are reported before that.
#[test]
fn counts_are_reported_before() {
    let compiler = Pond::new();
    let program = compiler.compile("surroundings.c", &["-O1"]);
    for name in ["seccomp-kill", "main-pthread-exit", "mlockall-current"] {
        let pond = Pond::new();
        let outcome = run(pond.served(&program).arg(name), &pond.aside("served"));
        assert_eq!(outcome.status, Some(Ok(0)), "{name}: {outcome:?}");
        let report = pond.report();
        assert!(report.served_bytes > 1 << 20, "{name}: {}", report.lines);
    }
}

/// Goal: a program that locks its memory has about as much resident memory as on the kernel.
/// Incident: `mlockall` after a file was served took 9 s and 736 MB.
#[test]
fn locked_memory() {
    run_rows(&[same("mlockall-current"), same("mlockall-future"), same("mlockall-both")]);
}

/// Goal: calls that only a process of one thread may make succeed.
/// Incident: `unshare(CLONE_NEWUSER)` failed with EINVAL after a file was served.
#[test]
fn namespaces() {
    run_rows(&[
        same("namespace-user"),
        same("namespace-user-by-number"),
        same("namespace-mount"),
        same("namespace-setns"),
    ]);
}

/// Goal: `dup2` takes no descriptor number from the library: it fails with EBUSY, and files stay as they are.
#[test]
fn numbers_of_the_library() {
    let compiler = Pond::new();
    let program = compiler.compile("surroundings.c", &["-O1"]);
    for mode in [Mode::Through, Mode::Back] {
        let pond = Pond::new().in_mode(mode);
        // A main process: in mode through it alone has a number of the library's.
        let mut command = pond.served(&program);
        command.arg("library-number").env_remove("MILLPOND_TOTALS");
        let outcome = run(&mut command, &pond.aside("served"));
        assert_eq!(outcome.status, Some(Ok(0)), "{outcome:?}");
        assert_eq!(outcome.printed, "refused\nread\nread again\n", "{mode:?}: {outcome:?}");
    }
}

/// Goal: a child of vfork shares the memory of its parent, which waits.
/// Incident: busybox's xargs believed that a missing program had started.
#[test]
fn vfork() {
    run_rows(&[same("vfork"), same("vfork-beside-threads")]);
}

/// Goal: a program that waits for a signal gets each one, with its value.
/// Incident: the library's thread took SIGIO and signal 61 when they were sent to the process.
#[test]
fn awaited_signals() {
    run_rows(&[
        same("sigio-sigwait"),
        same("sigio-signalfd"),
        same("sigio-pending"),
        same("realtime-sigwait"),
        same("realtime-signalfd"),
        same("realtime-pending"),
    ]);
}

/// Goal: system calls about a descriptor or the process answer as on the kernel.
/// Incident: `F_GETLEASE` answered with the library's lease.
#[test]
fn answers_about_descriptors() {
    run_rows(&[same("flags"), same("lease"), same("high-numbers"), same("own-name")]);
    run_rows(&[limited("threads", THREADS), limited("fdinfo", OFFSETS)]);
}

const UNSEEN: &str =
    "A program that makes one of these calls by an instruction of its own is not left alone";
const THREADS: &str = "A process with served files has threads of the library";
const OFFSETS: &str = "The offset in `/proc/self/fdinfo`";
const ASAN: &str = "AddressSanitizer's runtime wants to be loaded first";
const TSAN: &str = "ThreadSanitizer may report races in the library";
const MUSL: &str = "Programs of another C library (musl) do not start";
const NARROW: &str = "Programs of 32 bits, and those in a `chroot`";

/// The path of jemalloc in Debian.
const JEMALLOC: &str = "/usr/lib/x86_64-linux-gnu/libjemalloc.so.2";

/// Goal: programs start even if their allocator uses files during its own start.
/// Incident: redis, which Debian links with jemalloc, hung before `main`.
#[test]
fn allocators() {
    if !Path::new(JEMALLOC).exists() {
        return skip("jemalloc is missing: install the package libjemalloc2");
    }
    let compiler = Pond::new();
    let mut failures = Vec::new();
    let linked =
        compiler.compile_with("surroundings.c", &["-O1", "-Wl,--no-as-needed"], &[JEMALLOC]);
    for name in ["plain", "main-pthread-exit", "vfork"] {
        check(
            &same("jemalloc, linked"),
            compare(&same(name), &linked, &[name], &|_| {}),
            &mut failures,
        );
    }
    let own = Pond::new();
    let program = own.compile("surroundings.c", &["-O1"]);
    for (name, is_first) in
        [("jemalloc, preloaded before", true), ("jemalloc, preloaded after", false)]
    {
        let differences = compare(&same(name), &program, &["plain"], &|command| {
            preload(command, Path::new(JEMALLOC), is_first);
        });
        check(&same(name), differences, &mut failures);
    }
    assert_none(&failures);
}

/// Loads `other` before or after the command's own preloaded libraries.
fn preload(command: &mut Command, other: &Path, is_first: bool) {
    let is_served = command.get_envs().any(|(name, value)| name == "LD_PRELOAD" && value.is_some());
    let (other, own) = (other.display(), library().display());
    let list = match (is_served, is_first) {
        (false, _) => format!("{other}"),
        (true, true) => format!("{other}:{own}"),
        (true, false) => format!("{own}:{other}"),
    };
    command.env("LD_PRELOAD", list);
}

/// Goal: other preloaded libraries work before and after the library.
#[test]
fn other_preloads() {
    let compiler = Pond::new();
    let program = compiler.compile("surroundings.c", &["-O1"]);
    let other = compiler.compile_with("preloaded.c", &["-O1", "-shared", "-fPIC"], &["-ldl"]);
    let mut failures = Vec::new();
    for (name, is_first) in [("preloaded before", true), ("preloaded after", false)] {
        let differences = compare(&same(name), &program, &["plain"], &|command| {
            preload(command, &other, is_first);
        });
        check(&same(name), differences, &mut failures);
    }
    assert_none(&failures);
}

/// Whether a program that was built with a sanitizer runs here at all.
fn build_with(compiler: &Pond, sanitizer: &str) -> Option<PathBuf> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/surroundings.c");
    let binary = compiler.aside(sanitizer);
    let mut gcc = Command::new("gcc");
    gcc.args(["-w", "-g", "-O1", "-pthread", &format!("-fsanitize={sanitizer}"), "-o"]);
    gcc.arg(&binary).arg(source).stderr(Stdio::null());
    if !gcc.status().is_ok_and(|status| status.success()) {
        skip(format!("gcc has no runtime for -fsanitize={sanitizer}"));
        return None;
    }
    Some(binary)
}

/// Goal: programs that were built with a sanitizer run.
/// Incident: one with ThreadSanitizer died by SIGSEGV before `main`.
#[test]
fn sanitizers() {
    let compiler = Pond::new();
    let mut failures = Vec::new();
    for (sanitizer, limit, options) in [
        ("thread", Some(TSAN), None),
        ("thread", None, Some(("TSAN_OPTIONS", "ignore_noninstrumented_modules=1"))),
        ("undefined", None, None),
        ("address", Some(ASAN), None),
        ("address", None, Some(("ASAN_OPTIONS", "verify_asan_link_order=0:detect_leaks=0"))),
    ] {
        let Some(program) = build_with(&compiler, sanitizer) else { continue };
        let row = Row { name: sanitizer, limit };
        if !is_chosen(sanitizer) {
            continue;
        }
        let differences = compare(&row, &program, &["plain"], &|command| {
            command.envs(options);
        });
        check(&row, differences, &mut failures);
    }
    assert_none(&failures);
}

/// Goal: programs that cannot load the library run as on the kernel, or the documents name them.
/// Incident: a program of another C library ended with status 127.
#[test]
fn programs_without_the_library() {
    let compiler = Pond::new();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/elementary.c");
    let mut failures = Vec::new();
    let kinds: [(&str, &[&str], Option<&str>); 3] = [
        ("static", &["gcc", "-static"], None),
        ("musl", &["musl-gcc"], Some(MUSL)),
        ("32 bits", &["gcc", "-m32"], Some(NARROW)),
    ];
    // Other architectures have no programs of this kind.
    let exists = |name: &str| cfg!(target_arch = "x86_64") || name != "32 bits";
    for (name, words, limit) in kinds.into_iter().filter(|(name, ..)| exists(name)) {
        let binary = compiler.aside(&name.replace(' ', "-"));
        let mut build = Command::new(words[0]);
        build.args(&words[1..]).args(["-w", "-O1", "-o"]).arg(&binary).arg(&source);
        if !build.stderr(Stdio::null()).status().is_ok_and(|status| status.success()) {
            skip(format!("no compiler for programs of the kind {name}"));
            continue;
        }
        let row = Row { name, limit };
        let script = "\"$0\"; echo status $?";
        let differences =
            compare(&row, Path::new("sh"), &["-c", script, binary.to_str().unwrap()], &|_| {});
        check(&row, differences, &mut failures);
    }
    assert_none(&failures);
}

/// Goal: a program whose root or mount name space hides the library runs as on the kernel. The loader's complaint
/// is not compared.
#[test]
fn programs_that_do_not_find_the_library() {
    let compiler = Pond::new();
    let binary = compiler.compile("elementary.c", &["-O1"]);
    let root = compiler.aside("root");
    std::fs::create_dir(&root).unwrap();
    let hidden = library().parent().unwrap();
    let hide = "mount --make-rprivate / && mount -t tmpfs none";
    let rows = [
        ("hidden by a mount", format!("{hide} \"$2\" && \"$0\" 2>/dev/null; echo status $?")),
        (
            "hidden by a root",
            format!(
                "mount --rbind / \"$1\" && {hide} \"$1/$2\" && chroot \"$1\" \"$0\" 2>/dev/null; echo status $?"
            ),
        ),
    ];
    let mut failures = Vec::new();
    for (name, script) in &rows {
        let paths = [&*binary, &*root, hidden].map(|path| path.to_str().unwrap());
        let arguments = [&["--mount", "sh", "-c", script][..], &paths].concat();
        let mut probe = Command::new("unshare");
        let probe = probe.args(&arguments).current_dir(&root).output().unwrap();
        if !String::from_utf8_lossy(&probe.stdout).contains("right\nstatus 7") {
            let why = String::from_utf8_lossy(&probe.stderr);
            skip(format!("no program runs {name}: {why}"));
            continue;
        }
        let differences = compare(&same(name), Path::new("unshare"), &arguments, &|_| {});
        check(&same(name), differences, &mut failures);
    }
    assert_none(&failures);
}
