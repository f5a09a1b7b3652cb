//! I/O that bypasses the hooks: the library serves the calls that it can see, and leaves files with other I/O to the
//! kernel.
//!
//! Incident: programs read wrong data, and lost writes in mode back. Some of their I/O bypassed the hooks: functions
//! looked up in libc's own handle, a library that binds to libc before this one, and io_uring.

mod common;

use std::path::PathBuf;

use common::{MODES, Pond, finish, require, require_library, skip, succeed};

/// How the library treats the program's files.
enum Fate {
    Served,
    Unseen,
}

fn run(how: &str, fate: &Fate) {
    run_with(how, fate, None);
}

/// Like `run`, with one of the test libraries loaded before all others except this library.
fn run_with(how: &str, fate: &Fate, preloaded: Option<&str>) {
    let alone = Pond::new();
    let (program, libraries) = compile(&alone);
    let own = preloaded.map(|name| libraries.join(name).display().to_string());
    let mut plain = alone.plain(&program);
    plain.arg(how).arg(&libraries).envs(own.iter().map(|own| ("LD_PRELOAD", own)));
    let output = finish(&mut plain);
    if output.status.code() == Some(77) {
        return skip(String::from_utf8_lossy(&output.stderr).trim());
    }
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for mode in MODES {
        let pond = Pond::new().in_mode(mode);
        let ours = common::library().display();
        let both = own.iter().map(|own| ("LD_PRELOAD", format!("{ours}:{own}")));
        succeed(pond.served(&program).arg(how).arg(&libraries).envs(both));
        let report = pond.report();
        match fate {
            Fate::Served => {
                assert!(report.served_bytes > 1 << 20, "{mode:?}: {}", report.lines);
                assert_eq!(report.passed_files, 0, "{mode:?}: {}", report.lines);
            }
            Fate::Unseen => {
                assert!(report.passed_for("unseen") >= 2, "{mode:?}: {}", report.lines);
            }
        }
    }
}

/// Compiles the program; returns it, and the directory of its libraries.
fn compile(pond: &Pond) -> (PathBuf, PathBuf) {
    let program = pond.compile_with("looked_up.c", &["-O1"], &["-ldl"]);
    let directory = program.parent().unwrap().to_owned();
    for name in ["bound", "own", "ring"] {
        let library = directory.join(format!("lib{name}.so"));
        let compiled = pond.compile_with(&format!("{name}.c"), &["-shared", "-fPIC"], &["-ldl"]);
        std::fs::rename(compiled, library).unwrap();
    }
    (program, directory)
}

/// Goal: the lookup is right with `dlsym` and `dlvsym` in libc's handle, in handles that lead to it, and with the two
/// pseudo-handles. A library's own definitions stay its own.
#[test]
fn functions_looked_up_in_a_handle() {
    run("lookups", &Fate::Served);
}

/// Goal: the same for libaio's functions, if the program looks them up in libaio.
#[test]
fn libaio_looked_up() {
    require_library("libaio.so.1", "libaio-dev");
    run("libaio", &Fate::Served);
}

/// Goal: a definition of another library between this one and libc finds libc's, and not that of this library, which
/// called it.
#[test]
fn a_definition_between_ours_and_libcs() {
    let alone = Pond::new();
    let (program, libraries) = compile(&alone);
    let own = libraries.join("libown.so").display().to_string();
    succeed(alone.plain(&program).arg("between").env("LD_PRELOAD", &own));
    for mode in MODES {
        let pond = Pond::new().in_mode(mode);
        let both = format!("{}:{own}", common::library().display());
        succeed(pond.served(&program).arg("between").env("LD_PRELOAD", both));
        assert!(pond.report().passed_for("open-twice") >= 1);
    }
}

#[test]
fn a_library_that_binds_as_others_do() {
    run("bound", &Fate::Served);
}

/// Goal: a library that binds to libc before this one reads and writes the same bytes as all other code.
#[test]
fn a_library_that_binds_deep() {
    run("deep", &Fate::Unseen);
}

#[test]
fn a_library_in_a_space_of_its_own() {
    run("space", &Fate::Unseen);
}

/// Goal: reads and writes by a ring have the same bytes as reads and writes by calls.
#[test]
fn rings_of_the_program() {
    run("rings", &Fate::Unseen);
}

/// Goal: the same for a library whose system calls bypass the hooks.
#[test]
fn rings_by_a_library() {
    run_with("library", &Fate::Unseen, Some("libring.so"));
}

/// Goal: Python's `ctypes` works, which looks functions up in the handle of the library that the script names.
#[test]
fn ctypes() {
    require("python3", "python3");
    let script = "import ctypes, os\n\
        libc = ctypes.CDLL('libc.so.6')\n\
        at = ctypes.c_long\n\
        f = os.open('f', os.O_RDWR | os.O_CREAT)\n\
        os.write(f, b'a' * 8192)\n\
        [os.pread(f, 4096, 0) for _ in range(3)]\n\
        libc.pwrite(f, b'b' * 4096, ctypes.c_size_t(4096), at(0))\n\
        assert os.pread(f, 4, 0) == b'bbbb'\n\
        os.pwrite(f, b'c' * 10, 100)\n\
        found = ctypes.create_string_buffer(10)\n\
        libc.pread(f, found, ctypes.c_size_t(10), at(100))\n\
        assert found.raw == b'c' * 10, found.raw\n\
        os.close(f)\n\
        assert open('/proc/self/cwd/f', 'rb').read() == b'b' * 100 + b'c' * 10 + b'b' * 3986 + b'a' * 4096\n";
    let alone = Pond::new();
    succeed(alone.plain("python3").args(["-c", script]));
    for mode in MODES {
        let pond = Pond::new().in_mode(mode);
        pond.run("python3", &["-c", script]);
    }
}
