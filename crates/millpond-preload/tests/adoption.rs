//! Files that start with the kernel, and are served from when they show use.

mod common;

use std::path::Path;
use std::process::Command;

use common::{Adoption, MODES, Pond, Report, finish, require, skip, succeed};

fn on_use() -> Pond {
    Pond::new().adopting(Adoption::OnUse)
}

/// On the kernel alone, and with files adopted on use and at random, in all modes. Returns what was
/// reported of the first.
fn run(scenario: &[&str]) -> Report {
    let alone = Pond::new();
    let program = alone.compile("adoption.c", &["-O1"]);
    succeed(alone.plain(&program).args(scenario));
    let on_use = MODES.map(|mode| Pond::new().in_mode(mode).adopting(Adoption::OnUse));
    let mut reports = on_use.into_iter().chain(Pond::at_random()).map(|pond| {
        succeed(pond.served(&program).args(scenario));
        pond.report()
    });
    let first = reports.next().unwrap();
    reports.for_each(drop);
    first
}

/// How many system calls a command makes, by `strace`; `None` where a process may not be traced.
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

/// Goal: a file that is opened, read and closed costs no system call more than on the kernel.
#[test]
fn what_is_read_once_costs_as_much() {
    require("strace", "strace");
    let pond = on_use();
    let program = pond.compile("adoption.c", &["-O1"]);
    std::fs::write(pond.path("f"), common::lines(2000)).unwrap();
    // What the library itself needs at the beginning and the end is not of one file.
    let all = [(false, "1"), (false, "101"), (true, "1"), (true, "101")].map(|(served, times)| {
        let mut command = if served { pond.served(&program) } else { pond.plain(&program) };
        system_calls(command.args(["once", times]), &pond.aside("counts"))
    });
    let [Some(kernel_1), Some(kernel_101), Some(served_1), Some(served_101)] = all else {
        return skip("processes may not be traced here");
    };
    assert!(kernel_101 - kernel_1 >= 300, "opens and closes that were not counted");
    assert_eq!(served_101 - served_1, kernel_101 - kernel_1);
    let report = pond.report();
    assert_eq!(report.served_files, 0, "{}", report.lines);
    assert!(report.passed_for("once") >= 101, "{}", report.lines);
}

/// Goal: a file that is read again and again is served.
#[test]
fn what_is_read_again_is_served() {
    let report = run(&["again", "3000"]);
    assert!(report.served_bytes > 5 << 20, "{}", report.lines);
    assert_eq!(report.served_files, 1, "{}", report.lines);
}

/// Goal: what a thread has written it reads, whoever had the file at which moment.
#[test]
fn adopted_while_threads_write() {
    run(&["writers"]);
}

/// Goal: one offset is moved once by each call, whoever has it.
#[test]
fn adopted_while_the_offset_moves() {
    run(&["offsets"]);
}

/// Goal: the same of seeks.
#[test]
fn adopted_while_a_thread_seeks() {
    run(&["seeks"]);
}

/// Goal: a child that shares the offset gets its part, once, whether it goes on or becomes another program.
#[test]
fn adopted_while_the_process_forks() {
    run(&["forked"]);
}

/// Goal: what another process writes in the middle is read. It is served again when nobody has come for a
/// while.
#[test]
fn adopted_while_others_open_the_file() {
    let report = run(&["others"]);
    assert!(report.passed_for("opened-elsewhere") >= 2, "{}", report.lines);
    assert!(report.served_files >= 2, "{}", report.lines);
}
