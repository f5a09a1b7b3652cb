//! Linux AIO on served files and on other files, by system calls and by libaio's functions. Each scenario is a
//! function of a C program, which checks its own results. It must also pass on the kernel alone; otherwise it checks
//! for the wrong behaviour.

mod common;

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;

use common::{MODES, Mode, Pond, Report, require, require_library, succeed};

/// Runs the scenario in all modes, in both ways; returns each mode's report.
fn run(scenario: &str) -> Vec<Report> {
    require_library("libaio.so.1", "libaio-dev");
    let alone = Pond::new();
    let program = alone.compile("aio.c", &["-O1"]);
    let run = |pond: &Pond, make: &dyn Fn() -> std::process::Command| {
        for way in ["syscall", "libaio"] {
            let aside = pond.aside(way);
            std::fs::create_dir(&aside).unwrap();
            succeed(make().args([way, scenario]).arg(aside));
        }
    };
    run(&alone, &|| alone.plain(&program));
    for pond in Pond::unmeasured() {
        run(&pond, &|| pond.served(&program));
    }
    let served = |mode| {
        let pond = Pond::new().in_mode(mode);
        run(&pond, &|| pond.served(&program));
        pond.report()
    };
    MODES.into_iter().map(served).collect()
}

/// Goal: requests for served files, for other files and for files open with `O_DIRECT` all complete in one wait.
#[test]
fn served_and_other_files_in_one_context() {
    for report in run("mixed") {
        assert!(report.served_bytes > 8 << 20, "{}", report.lines);
        assert!(report.passed_for("o-direct") >= 1, "{}", report.lines);
    }
}

/// Goal: an eventfd counts each completion no earlier than it can be taken; a descriptor that is no eventfd is
/// refused.
#[test]
fn eventfds_count_completions() {
    run("eventfds");
}

/// Goal: the minimum, the maximum, the timeout, signals and their mask have the kernel's effect.
#[test]
fn waits_are_the_kernels() {
    run("waits");
}

/// Goal: reads, writes and syncs have the kernel's results: vectored, appending, durable, at the end of the file and
/// past it.
#[test]
fn operations() {
    for report in run("operations") {
        assert!(report.served_bytes > 4 << 20, "{}", report.lines);
    }
}

/// Goal: the library refuses the requests that the kernel refuses, at the same point; bad memory is EFAULT.
#[test]
fn refusals() {
    run("errors");
}

/// Goal: a context accepts no more requests than it has room for, and accepts more after completions were taken.
#[test]
fn room_for_so_many() {
    run("capacity");
}

/// Goal: destroying a context waits for its requests; a request keeps its file when the descriptor is closed.
#[test]
fn destroyed_and_closed_in_flight() {
    run("in_flight");
}

/// Goal: a read that the kernel carried out past the engine returns bytes of one moment, even if the file is written,
/// cut or closed before the completion is taken.
#[test]
fn completions_that_are_taken_late() {
    for scenario in ["taken_late", "overtaken"] {
        run(scenario);
        for pond in Pond::unmeasured().into_iter().chain([Pond::new().in_mode(Mode::BackDirect)]) {
            directly(&pond, scenario, &[]);
        }
    }
    // The file is served from its open on, so each read that misses is handed to the kernel if possible.
    let pond = Pond::new().in_mode(Mode::BackDirect);
    let probe = pond.path("probe");
    std::fs::write(&probe, [0; 4096]).unwrap();
    let is_direct = File::options().read(true).custom_flags(libc::O_DIRECT).open(probe).is_ok();
    if !is_direct {
        return common::skip("the temporary directory's file system has no direct I/O");
    }
    directly(&pond, "overtaken", &[("AIO_IS_STRICT", "1")]);
}

fn directly(pond: &Pond, scenario: &str, variables: &[(&str, &str)]) {
    let program = pond.compile("aio.c", &["-O1"]);
    for way in ["syscall", "libaio"] {
        let aside = pond.aside(way);
        std::fs::create_dir_all(&aside).unwrap();
        let mut command = pond.served(&program);
        command.env("MILLPOND_BACKING", "direct").envs(variables.iter().copied());
        succeed(command.args([way, scenario]).arg(aside));
    }
}

/// Goal: no completion is lost between threads that submit and threads that wait.
#[test]
fn threads_submit_while_others_wait() {
    run("threads");
}

/// Goal: contexts that several threads create and destroy do not affect each other; a thread that waits in a context
/// gets an error when the context is destroyed.
#[test]
fn contexts_come_and_go() {
    run("churn");
}

/// Goal: a thread that submits to a context gets an error if the context is destroyed during the call.
#[test]
fn destroyed_while_others_submit() {
    run("closing");
}

/// Goal: a child has no contexts, and those of its parent continue; the writes that a process submitted before it
/// exits are in the file.
#[test]
fn forks_and_exits() {
    run("forks");
}

/// Goal: fio reads back the data that it wrote at random by libaio and synced; the kernel returns the same data.
#[test]
fn fio_verifies() {
    require("fio", "fio");
    const VERIFY: [&str; 9] = [
        "--name=t",
        "--filename=data",
        "--ioengine=libaio",
        "--rw=randwrite",
        "--bsrange=4k-64k",
        "--size=8m",
        "--verify=crc32c",
        "--output=fio.log",
        "--thread",
    ];
    let ways: [&[&str]; 3] = [
        &["--iodepth=32"],
        &["--iodepth=32", "--iodepth_batch=8", "--iodepth_batch_complete_min=4", "--fsync=16"],
        // fio looks for completions in the ring that the kernel's context handle points to.
        &["--iodepth=32", "--userspace_reap"],
    ];
    for (mode, way) in MODES.into_iter().flat_map(|mode| ways.map(|way| (mode, way))) {
        let pond = Pond::with_cache_bytes(2 << 20).in_mode(mode);
        pond.run("fio", &[&VERIFY[..], way].concat());
        pond.report().assert_served(16 << 20);
        // Verifies the file on the kernel alone, without the library.
        succeed(pond.plain("fio").args(VERIFY).args(way).arg("--verify_only"));
    }
}

/// Goal: reads that miss bypass the kernel's cache if direct backing was requested.
#[test]
fn fio_reads_directly() {
    require("fio", "fio");
    let pond = Pond::with_cache_bytes(2 << 20).in_mode(Mode::BackDirect);
    std::fs::write(pond.path("data"), common::lines(600_000)).unwrap();
    let options = ["--rw=randread", "--bs=4k", "--size=6m", "--iodepth=32", "--readonly"];
    let mut command = pond.served("fio");
    command.args(["--name=t", "--filename=data", "--ioengine=libaio", "--thread"]).args(options);
    succeed(command.env("MILLPOND_BACKING", "direct"));
    let report = pond.report();
    report.assert_served(6 << 20);
    if report.undirected_files > 0 {
        common::skip("the temporary directory's file system has no direct I/O");
    } else {
        assert!(report.direct_reads > 500, "{}", report.lines);
    }
}
