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

/// Goal: a file that is opened, read and closed costs no more system calls than on the kernel, in both modes.
#[test]
fn a_file_that_is_read_once_costs_as_much() {
    require("strace", "strace");
    for mode in [Mode::Through, Mode::Back] {
        let pond = Pond::new().in_mode(mode).serving(ServedFiles::Default);
        let program = pond.compile("handed_over.c", &["-O1"]);
        std::fs::write(pond.path("f"), common::lines(2000)).unwrap();
        // The library's own calls at start and exit do not depend on the number of files.
        let all =
            [(false, "1"), (false, "101"), (true, "1"), (true, "101")].map(|(served, times)| {
                let mut command = if served { pond.served(&program) } else { pond.plain(&program) };
                system_calls(command.args(["once", times]), &pond.aside("counts"))
            });
        let [Some(kernel_1), Some(kernel_101), Some(served_1), Some(served_101)] = all else {
            return skip("processes may not be traced here");
        };
        assert!(kernel_101 - kernel_1 >= 300, "opens and closes that were not counted");
        assert_eq!(served_101 - served_1, kernel_101 - kernel_1, "{mode:?}");
        let report = pond.report();
        assert_eq!(report.served_files, 0, "{}", report.lines);
    }
}
