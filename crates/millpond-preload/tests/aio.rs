//! Linux AIO on served files and others, by system calls and by libaio's functions. Each scenario is a C
//! program's function that checks itself; it must pass on the kernel alone too, else it checks the wrong
//! thing.

mod common;

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;

use common::{MODES, Mode, Pond, Report, require, require_library, succeed};

/// In all modes, in both ways; returns what was reported in each mode.
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

/// Goal: requests for files that are served, that are not, and that are open with `O_DIRECT`, all end
/// in one wait.
#[test]
fn served_and_other_files_in_one_context() {
    for report in run("mixed") {
        assert!(report.served_bytes > 8 << 20, "{}", report.lines);
        assert!(report.passed_for("o-direct") >= 1, "{}", report.lines);
    }
}

/// Goal: an eventfd counts each completion, after it can be had; one that is none is refused.
#[test]
fn eventfds_count_completions() {
    run("eventfds");
}

/// Goal: minimum, maximum, timeout, signals and their mask are the kernel's.
#[test]
fn waits_are_the_kernels() {
    run("waits");
}

/// Goal: reads, writes and syncs do what they say, vectored, appending, durable, at and past the end.
#[test]
fn operations() {
    for report in run("operations") {
        assert!(report.served_bytes > 4 << 20, "{}", report.lines);
    }
}

/// Goal: what the kernel refuses is refused, when the kernel does; bad memory is EFAULT.
#[test]
fn refusals() {
    run("errors");
}

/// Goal: a context takes no more than it has room for, and again when completions were taken.
#[test]
fn room_for_so_many() {
    run("capacity");
}

/// Goal: destroying a context waits for its requests; closing a file does not change what they do.
#[test]
fn destroyed_and_closed_in_flight() {
    run("in_flight");
}

/// Goal: reads that the kernel has carried out past the engine are of one moment, whatever becomes of the file
/// until their
/// completions are taken.
#[test]
fn completions_that_are_taken_late() {
    for scenario in ["taken_late", "overtaken"] {
        run(scenario);
        for pond in Pond::unmeasured().into_iter().chain([Pond::new().in_mode(Mode::BackDirect)]) {
            directly(&pond, scenario, &[]);
        }
    }
    // Served from the open on, so all that misses is handed to the kernel, if it can be.
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

/// Goal: threads that submit and threads that wait lose no completion.
#[test]
fn threads_submit_while_others_wait() {
    run("threads");
}

/// Goal: contexts that are made and destroyed on several threads do not meet each other, and a
/// thread that waits in one that is destroyed is told.
#[test]
fn contexts_come_and_go() {
    run("churn");
}

/// Goal: a thread that submits to a context while it is destroyed is told that it is gone.
#[test]
fn destroyed_while_others_submit() {
    run("closing");
}

/// Goal: a child has no contexts, those of its parent go on; a process that exits has written what
/// it submitted.
#[test]
fn forks_and_exits() {
    run("forks");
}

/// Goal: what fio writes at random by libaio, and syncs, it reads again; the kernel agrees.
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
        // Looks for completions in the ring that a kernel's handle points to.
        &["--iodepth=32", "--userspace_reap"],
    ];
    for (mode, way) in MODES.into_iter().flat_map(|mode| ways.map(|way| (mode, way))) {
        let pond = Pond::with_cache_bytes(2 << 20).in_mode(mode);
        pond.run("fio", &[&VERIFY[..], way].concat());
        pond.report().assert_served(16 << 20);
        // Without the library, so by what the kernel has.
        succeed(pond.plain("fio").args(VERIFY).args(way).arg("--verify_only"));
    }
}

/// Goal: reads that miss go to the device without the kernel's cache, where that was asked for.
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
