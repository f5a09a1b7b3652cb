//! Goal: a C program can use the library as installed: include it, link it, call it with good and bad
//! arguments. The programs check themselves (`tests/programs`); here they are compiled and run.

#[path = "../../millpond/tests/common/skip.rs"]
mod skip;

// These tests use the library that is installed here.
#[path = "integrations/nbdkit.rs"]
mod nbdkit;
#[path = "integrations/sqlite.rs"]
mod sqlite;

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use skip::skip;
use tempfile::TempDir;

const STRICT: [&str; 4] = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"];
/// Sanitizers that check the program's memory, also for the library's copies.
const WATCHED: [&str; 3] =
    ["-std=gnu11", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"];
/// Programs that call every function, with good and bad arguments.
const CALLS: [&str; 2] = ["tests/programs/calls.c", "tests/programs/direct.c"];

fn here(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// The output of the command, which must succeed.
fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let Output { status, stdout, stderr } = output;
    let [stdout, stderr] = [stdout, stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(status.success(), "{command:?}: {status}\n{stdout}\n{stderr}");
    stdout
}

/// The directory of the installed library, built with the profile of this test; installed once for all
/// tests.
fn installed() -> &'static Path {
    static INSTALLED: OnceLock<PathBuf> = OnceLock::new();
    INSTALLED.get_or_init(|| {
        let this = std::env::current_exe().unwrap();
        let profile_dir = this.parent().and_then(Path::parent).unwrap();
        let profile = match profile_dir.file_name().and_then(OsStr::to_str).unwrap() {
            "debug" => "dev",
            other => other,
        };
        // Cargo does not build an archive for the tests of its own package.
        let target_dir = profile_dir.parent().unwrap();
        let mut build = Command::new(env!("CARGO"));
        build.args(["build", "--quiet", "-p", "millpond-c", "--profile", profile, "--target-dir"]);
        run(build.arg(target_dir).current_dir(env!("CARGO_MANIFEST_DIR")));
        let prefix = target_dir.join("millpond-c");
        let mut install = Command::new(here("../../scripts/install-c"));
        install.env("MILLPOND_ARCHIVE", profile_dir.join("libmillpond_c.a"));
        run(install.env("PREFIX", &prefix).env_remove("DESTDIR").env_remove("LIBDIR"));
        prefix
    })
}

/// Compiles a program of C or C++, and links it with the installed library by pkg-config.
fn compile(source: &str, to: &Path, flags: &[&str]) {
    let flags_of = |option: &str| {
        let mut ask = Command::new("pkg-config");
        ask.args(["--cflags", "--libs", option, "millpond"]);
        run(ask.env("PKG_CONFIG_PATH", installed().join("lib/pkgconfig")))
    };
    let is_static = flags.contains(&"-l:libmillpond.a");
    let linked = if is_static {
        flags_of("--static").replace("-lmillpond", "")
    } else {
        flags_of("--print-errors")
    };
    let compiler = if source.ends_with(".cc") { "c++" } else { "cc" };
    let mut command = Command::new(compiler);
    command.args(["-g", "-pthread"]).args(STRICT).arg(here(source)).arg("-o").arg(to);
    command.args(flags).args(linked.split_whitespace());
    run(command.arg(format!("-Wl,-rpath,{}", installed().join("lib").display())));
}

/// Compiles a program and runs it in an empty directory; returns its output.
fn compile_and_run(source: &str, flags: &[&str]) -> String {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let program = dir.path().join("program");
    compile(source, &program, flags);
    let printed = run(Command::new(program).current_dir(dir.path()));
    for line in printed.lines().filter_map(|line| line.strip_prefix("SKIPPED: ")) {
        skip(line);
    }
    printed
}

#[test]
fn every_call_with_good_and_bad_arguments() {
    for program in CALLS {
        for flags in [&["-std=gnu11"], &WATCHED[..]] {
            let said = compile_and_run(program, flags);
            assert!(said.contains("all calls checked"), "{program} {flags:?}");
        }
    }
}

#[test]
fn handles_are_closed_while_others_use_them() {
    compile_and_run("tests/programs/threads.c", &["-std=gnu11"]);
    compile_and_run("tests/programs/threads.c", &WATCHED);
}

/// Goal: one run of a pipeline closes files, whose descriptors are reused, and reads each one's own bytes.
#[test]
fn a_pipeline_closes_files() {
    compile_and_run("tests/programs/closing.c", &["-std=gnu11"]);
    compile_and_run("tests/programs/closing.c", &WATCHED);
}

/// Goal: a child of fork keeps the memory that it maps at addresses of its parent's rings.
#[test]
fn a_child_of_fork_keeps_its_memory() {
    compile_and_run("tests/programs/forked.c", &["-std=gnu11"]);
}

#[test]
#[cfg(target_arch = "x86_64")]
fn bad_memory_is_an_error_where_a_handler_helps() {
    compile_and_run("tests/programs/fault.c", &["-std=gnu11"]);
}

/// Goal: a call whose list finds no memory fails with ENOMEM, and does not abort the program.
#[test]
#[cfg(target_env = "gnu")]
fn a_list_without_memory_is_an_error() {
    compile_and_run("tests/programs/refused.c", &["-std=gnu11"]);
}

/// Goal: the static library works as well as the shared one.
#[test]
fn a_program_can_be_linked_with_the_archive() {
    let flags = ["-std=c99", "-l:libmillpond.a"];
    assert_eq!(compile_and_run("examples/first.c", &flags), "a pond\n");
}

#[test]
fn the_examples_do_what_they_say() {
    assert_eq!(compile_and_run("examples/first.c", &["-std=c99"]), "a pond\n");

    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let program = |name: &str| dir.path().join(name);
    compile("examples/scan.cc", &program("scan"), &["-std=c++17"]);
    std::fs::write(program("lines"), "frog\n".repeat(300_000)).unwrap();
    assert_eq!(run(Command::new(program("scan")).arg(program("lines"))), "300000\n");
    let missing = Command::new(program("scan")).arg(program("missing")).output().unwrap();
    assert!(String::from_utf8_lossy(&missing.stderr).contains("No such file"), "{missing:?}");

    compile("examples/kv.c", &program("kv"), &["-std=c99"]);
    let log = program("log");
    let kv = |words: &[&str]| run(Command::new(program("kv")).arg(&log).args(words));
    kv(&["set", "pond", "frog"]);
    kv(&["set", "reed", "duck"]);
    kv(&["set", "pond", "toad"]);
    kv(&["delete", "reed"]);
    assert_eq!(kv(&["get", "pond"]), "toad\n");
    assert_eq!(kv(&["get", "reed"]), "(none)\n");
    // Half of a record, as a power cut may leave it.
    let whole = std::fs::read(&log).unwrap();
    kv(&["set", "pond", "newt"]);
    let torn = std::fs::read(&log).unwrap();
    std::fs::write(&log, &torn[..torn.len() - 1]).unwrap();
    assert_eq!(kv(&["get", "pond"]), "toad\n");
    assert_eq!(std::fs::read(&log).unwrap(), whole, "it is cut off");
    let lines = std::fs::read_to_string(here("examples/kv.c")).unwrap().lines().count();
    assert!(lines < 200, "a small store: {lines} lines");
}

#[test]
fn the_header_is_for_c99_c11_and_cpp17() {
    for (compiler, language, standard) in
        [("cc", "c", "c99"), ("cc", "c", "c11"), ("c++", "c++", "c++17")]
    {
        let mut command = Command::new(compiler);
        command.args(["-x", language, &format!("-std={standard}"), "-fsyntax-only"]).args(STRICT);
        // A warning that compilers give for a header as the main file.
        if language == "c" {
            command.arg("-Wno-unused-function");
        }
        run(command.arg(here("include/millpond.h")));
    }
}

/// The names of functions in a text.
fn functions(text: &str, before: &str, after: &str) -> BTreeSet<String> {
    text.lines()
        .filter_map(|line| line.split_once(after)?.0.rsplit(before).next())
        .filter(|name| name.starts_with("millpond_"))
        .map(str::to_string)
        .collect()
}

/// Goal: the library exports the declared functions with their versions, and no other symbols, not even
/// Rust's.
#[test]
fn the_library_exports_what_the_header_declares() {
    let header = std::fs::read_to_string(here("include/millpond.h")).unwrap();
    let code: String = header
        .lines()
        .filter(|line| !line.trim_start().starts_with(['*', '/']))
        .map(|line| format!("{line}\n"))
        .collect();
    let declared = functions(&code.replace('*', " "), " ", "(");
    let library = installed().join("lib/libmillpond.so");
    let exported = run(Command::new("nm").args(["-D", "--defined-only"]).arg(&library));
    let mut names = BTreeSet::new();
    for line in exported.lines() {
        let name = line.rsplit(' ').next().unwrap();
        match name.strip_suffix("@@MILLPOND_0.1") {
            Some(name) => assert!(names.insert(name.to_string())),
            None => assert_eq!(name, "MILLPOND_0.1", "{line}"),
        }
    }
    assert_eq!(names, declared);
    let tested = CALLS.map(|program| std::fs::read_to_string(here(program)).unwrap()).concat();
    let untested: Vec<_> =
        declared.iter().filter(|name| !tested.contains(&format!("{name}("))).collect();
    assert!(untested.is_empty(), "{untested:?}");

    let dynamic = run(Command::new("readelf").arg("-d").arg(&library));
    assert!(dynamic.contains("[libmillpond.so.0]"), "{dynamic}");
    let archive = installed().join("lib/libmillpond.a");
    let global = run(Command::new("nm").args(["-g", "--defined-only"]).arg(archive));
    for line in global.lines().filter(|line| line.contains(' ')) {
        assert!(line.contains(" millpond_"), "{line}");
    }
}

/// Goal: the committed header is up to date with the sources.
#[test]
fn the_header_is_current() {
    let tools = here("../../target/tools/bin");
    let path = std::env::var_os("PATH").unwrap_or_default();
    let is_there = std::iter::once(tools)
        .chain(std::env::split_paths(&path))
        .any(|dir| dir.join("cbindgen").exists());
    if !is_there {
        return skip("there is no cbindgen: ./test setup installs it");
    }
    let dir = TempDir::new().unwrap();
    let made = dir.path().join("millpond.h");
    run(Command::new(here("../../scripts/c-header")).arg(&made));
    let read = |path: &Path| std::fs::read_to_string(path).unwrap();
    assert!(
        read(&made) == read(&here("include/millpond.h")),
        "include/millpond.h is out of date: run scripts/c-header"
    );
    let version = env!("CARGO_PKG_VERSION");
    assert!(read(&made).contains(&format!("#define MILLPOND_VERSION \"{version}\"")));
}
