//! Files that are opened, read once and closed, without `--eager`.

mod common;

use std::path::Path;
use std::process::Command;

use common::{Mode, Pond, ServedFiles, finish, require, skip};

/// The number of system calls of a command, by `strace`; `None` if a process may not be traced.
fn system_calls(command: &Command, counts: &Path) -> Option<u64> {
    let mut strace = Command::new("strace");
    strace.args(["-f", "-c", "-o"]).arg(counts).arg("-E").arg("LC_ALL=C");
    for (name, value) in command.get_envs() {
        let mut assignment = name.to_owned();
        if let Some(value) = value {
            assignment.push("=");
            assignment.push(value);
        }
        strace.arg("-E").arg(assignment);
    }
    strace.arg(command.get_program()).args(command.get_args());
    strace.current_dir(command.get_current_dir()?);
    let output = finish(&mut strace);
    let stderr = String::from_utf8_lossy(&output.stderr);
    if stderr.contains("Operation not permitted") {
        return None;
    }
    assert!(output.status.success(), "{stderr}");
    let table = std::fs::read_to_string(counts).unwrap();
    let total = table.lines().find(|line| line.ends_with("total")).unwrap();
    let calls = total.split_whitespace().nth(3).unwrap();
    Some(calls.parse().unwrap())
}

/// The system calls of 100 more files, on the kernel and served; `None` if a process may not be traced.
fn calls_of_100_files(pond: &Pond, scenario: &str) -> Option<[u64; 2]> {
    let program = pond.compile("handed_over.c", &["-O1"]);
    // The library's own calls at start and exit do not depend on the number of files.
    let calls = |served: bool, times: &str| {
        let mut command = if served { pond.served(&program) } else { pond.plain(&program) };
        system_calls(command.args([scenario, times]), &pond.aside("counts"))
    };
    let difference = |served| Some(calls(served, "101")? - calls(served, "1")?);
    Some([difference(false)?, difference(true)?])
}

/// Goal: a file that is opened, read and closed costs no more system calls than on the kernel, in both modes.
#[test]
fn a_file_that_is_read_once_costs_as_much() {
    require("strace", "strace");
    for mode in [Mode::Through, Mode::Back] {
        let pond = Pond::new().in_mode(mode).serving(ServedFiles::Default);
        std::fs::write(pond.path("f"), common::lines(2000)).unwrap();
        let Some([kernel, served]) = calls_of_100_files(&pond, "once") else {
            return skip("processes may not be traced here");
        };
        assert!(kernel >= 300, "opens and closes that were not counted");
        assert_eq!(served, kernel, "{mode:?}");
        let report = pond.report();
        assert_eq!(report.served_files, 0, "{}", report.lines);
    }
}

/// Goal: a new file of a program with one thread costs no more system calls than on the kernel, beside a file that the library
/// serves.
#[test]
fn a_new_file_costs_as_much() {
    require("strace", "strace");
    let pond = Pond::new().in_mode(Mode::Through).serving(ServedFiles::Default);
    std::fs::write(pond.path("f"), common::lines(2000)).unwrap();
    let Some([kernel, served]) = calls_of_100_files(&pond, "written") else {
        return skip("processes may not be traced here");
    };
    assert!(kernel >= 600, "writes that were not counted");
    assert_eq!(served, kernel);
    let report = pond.report();
    // The file that is read often, in each of two runs.
    assert_eq!(report.served_files, 2, "{}", report.lines);
}

/// Goal: a file that was new, and whose writes the library did not look at, is served with its present bytes and size.
#[test]
fn a_new_file_is_served_as_it_is() {
    let pond = Pond::new().in_mode(Mode::Through).serving(ServedFiles::Default);
    let program = pond.compile("handed_over.c", &["-O1"]);
    common::succeed(pond.served(&program).arg("written-again"));
    let report = pond.report();
    assert_eq!(report.served_files, 1, "{}", report.lines);
}
