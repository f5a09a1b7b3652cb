//! Files that start with the kernel, and are served from when they show use.

mod common;

use std::path::Path;
use std::process::Command;

use common::{Adoption, MODES, Mode, Pond, Report, finish, require, skip, succeed};

fn on_use() -> Pond {
    Pond::new().adopting(Adoption::OnUse)
}

/// On the kernel alone, and with files adopted on use and at random, in all modes. Returns the
/// first report.
fn run(scenario: &[&str]) -> Report {
    let alone = Pond::new();
    let program = alone.compile("adoption.c", &["-O1"]);
    succeed(alone.plain(&program).args(scenario));
    let on_use = MODES.map(|mode| Pond::new().in_mode(mode).adopting(Adoption::OnUse));
    let mut reports = on_use.into_iter().chain(Pond::unmeasured()).map(|pond| {
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

/// On the kernel, and with files adopted on use.
fn run_hands(pond: &Pond, scenario: &[&str]) -> Report {
    let program = pond.compile("hands.c", &["-O1"]);
    succeed(pond.plain(&program).args(scenario));
    succeed(pond.served(&program).args(scenario));
    pond.report()
}

/// Incident: a write that went on by a number that had been closed landed after the file was adopted
/// by a second number, and the cache had the old bytes for good.
#[test]
fn writes_by_closed_numbers() {
    for mode in [Mode::Through, Mode::Back] {
        run_hands(&on_use().in_mode(mode), &["closed"]);
    }
}

/// Incident: one of two numbers was looked at where its file was nobody's concern, and the other one
/// after it had been renamed; one went past the cache.
#[test]
fn files_that_are_renamed_into_served_directories() {
    let pond = on_use();
    let elsewhere = pond.aside("renamed");
    run_hands(&pond, &["renamed", elsewhere.to_str().unwrap()]);
}

/// Incident: a lock that a child had, too, was taken from it when the parent closed its number.
#[test]
fn locks_that_a_child_has() {
    run_hands(&on_use(), &["forked"]);
    run_hands(&Pond::new(), &["forked"]);
}

/// Incident: flags of a call, and of a description, that came while the file was adopted were
/// forgotten: bytes that were to be appended overwrote the first.
#[test]
fn flags_that_come_meanwhile() {
    run_hands(&on_use(), &["flags"]);
    run_hands(&on_use(), &["status"]);
}

/// Goal: a file that is hardly ever hit is given back.
#[test]
fn what_is_only_missed_is_given_back() {
    let pond = Pond::with_cache_bytes(1 << 20).adopting(Adoption::OnUse);
    let report = run_hands(&pond, &["missed"]);
    assert!(report.passed_for("unused") >= 1, "{}", report.lines);
}

/// Goal: a file that nobody writes to is read from the kernel's cache, in no memory of its own, until
/// somebody does; what is written then is read.
#[test]
fn what_is_not_written_takes_no_memory() {
    for mode in [Mode::Through, Mode::Back] {
        let pond = Pond::with_cache_bytes(1 << 20).in_mode(mode).adopting(Adoption::OnUse);
        let report = run_hands(&pond, &["mapped"]);
        assert!(report.served_bytes > 20 << 20, "{}", report.lines);
    }
    for pond in Pond::unmeasured() {
        run_hands(&pond, &["mapped"]);
    }
}

/// Goal: a file that is cut by somebody who does not wait is read to where it ends, and ends no program.
#[test]
fn cut_while_it_is_read_from_the_kernels_cache() {
    run_hands(&on_use(), &["cut"]);
}
