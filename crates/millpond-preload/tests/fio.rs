//! fio with verification: reads return the data that fio wrote, and the kernel returns the same.

mod common;

use common::{MODES, Mode, Pond, ServedFiles, require};

fn fio(pond: &Pond, options: &[&str]) {
    require("fio", "fio");
    let mut all = vec!["--name=t", "--filename=data", "--ioengine=psync", "--output=fio.log"];
    all.extend(options);
    pond.run("fio", &all);
}

#[test]
fn random_writes_verified() {
    let engines = ["sync", "psync", "vsync", "pvsync"].map(|name| format!("--ioengine={name}"));
    for (engine, mode) in engines.iter().flat_map(|engine| MODES.map(|mode| (engine, mode))) {
        let pond = Pond::with_cache_bytes(2 << 20).in_mode(mode);
        let options =
            ["--rw=randwrite", "--bs=4k", "--size=4m", "--verify=crc32c", "--thread", engine];
        fio(&pond, &options);
        pond.report().assert_served(8 << 20);
        // Verifies the file on the kernel alone, without the library.
        let verify = "fio --name=t --filename=data --rw=randwrite --bs=4k --size=4m --verify=crc32c \
                      --verify_only --output=/dev/null";
        common::succeed(pond.plain("sh").args(["-c", verify]));
    }
}

#[test]
fn mixed_sizes_verified_by_processes() {
    for mode in MODES {
        let pond = Pond::new().in_mode(mode);
        fio(&pond, &["--rw=randrw", "--bsrange=512-64k", "--size=8m", "--verify=crc32c"]);
        pond.report().assert_served(8 << 20);
    }
}

#[test]
fn threads_read_one_file() {
    let pond = Pond::new();
    std::fs::write(pond.path("data"), common::lines(300_000)).unwrap();
    let options =
        ["--rw=randread", "--bs=4k", "--size=3m", "--thread", "--numjobs=4", "--readonly"];
    fio(&pond, &options);
    pond.report().assert_served(12 << 20);
}

/// Goal: a file is served to all threads that open it at once, some for reading and some for writing.
#[test]
fn threads_open_one_file_at_once() {
    const TRIES: usize = 5;
    require("fio", "fio");
    let is_served = |mode| {
        let pond = Pond::new().in_mode(mode).serving(ServedFiles::Default);
        std::fs::write(pond.path("data"), common::lines(300_000)).unwrap();
        let mut command = pond.served("fio");
        command.args(["--thread", "--filename=data", "--size=2m", "--bs=4k", "--ioengine=psync"]);
        command.args(["--time_based", "--runtime=1", "--output=fio.log"]);
        command.args(["--name=reads", "--rw=randread", "--numjobs=4"]);
        command.args(["--name=writes", "--rw=randwrite", "--numjobs=4"]);
        common::succeed(&mut command);
        pond.report().served_share() > 0.5
    };
    // A try fails while a preempted thread holds a description of the file.
    for mode in MODES {
        assert!((0..TRIES).any(|_| is_served(mode)), "{mode:?}");
    }
}

#[test]
fn direct_backing() {
    MODES.into_iter().for_each(direct_backing_in_mode);
}

fn direct_backing_in_mode(mode: Mode) {
    let pond = Pond::with_cache_bytes(2 << 20).in_mode(mode);
    require("fio", "fio");
    std::fs::write(pond.path("data"), common::lines(300_000)).unwrap();
    let size = format!("--size={}", std::fs::metadata(pond.path("data")).unwrap().len());
    for options in [
        ["--rw=randread", "--bs=4k", "--readonly"],
        ["--rw=randwrite", "--bs=4k", "--verify=crc32c"],
    ] {
        let mut command = pond.served("fio");
        command.args(["--name=t", "--filename=data", "--ioengine=psync", "--thread", &size]);
        common::succeed(command.args(options).env("MILLPOND_BACKING", "direct"));
        pond.report().assert_served(3 << 20);
    }
}

/// The emergency stop: each call takes the slow path, and the results are the same.
#[test]
fn without_the_hit_path() {
    let pond = Pond::new();
    require("fio", "fio");
    let mut command = pond.served("fio");
    command.args(["--name=t", "--filename=data", "--rw=randrw", "--bs=4k", "--size=2m"]);
    common::succeed(command.arg("--verify=crc32c").env("MILLPOND_HIT_PATH", "0"));
    pond.report().assert_served(2 << 20);
}
