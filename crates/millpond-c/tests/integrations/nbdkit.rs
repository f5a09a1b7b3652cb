//! Goal: the nbdkit plugin (`integrations/nbdkit`) serves a file as the NBD protocol requires. The clients
//! are independent: libnbd's, qemu's and fio's.

use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::{here, installed, run, skip};

const MIB: usize = 1 << 20;
/// The modes of the plugin; all are tested.
const WAYS: [&[&str]; 4] = [
    &["mode=through"],
    &["mode=back"],
    &["mode=back", "direct=true", "cache=1M"],
    &["mode=through", "page=64K", "cache=4M"],
];

/// Builds the plugin; `None` if its prerequisites are not installed.
fn plugin() -> Option<&'static Path> {
    static PLUGIN: OnceLock<Option<PathBuf>> = OnceLock::new();
    let built = PLUGIN.get_or_init(|| {
        let is_there = |name: &str| Command::new(name).arg("--version").output().is_ok();
        let programs = ["nbdkit", "nbdcopy", "nbdinfo", "qemu-img", "qemu-io", "make"];
        let has_header = Command::new("pkg-config").args(["--exists", "nbdkit"]).status();
        if !programs.into_iter().all(is_there) || !has_header.is_ok_and(|status| status.success()) {
            return None;
        }
        let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join("nbdkit");
        let mut make = Command::new("make");
        make.arg("-B").arg("-C").arg(here("../../integrations/nbdkit"));
        make.arg(format!("OUT={}", out.display())).arg("CFLAGS=-O2 -g -Werror");
        run(make.env("PKG_CONFIG_PATH", installed().join("lib/pkgconfig")));
        Some(out.join("nbdkit-millpond-plugin.so"))
    });
    if built.is_none() {
        skip(
            "no nbdkit, nbdkit-plugin-dev, libnbd-bin, qemu-utils or make: ./test setup installs them",
        );
    }
    built.as_deref()
}

/// A file, and a server of it.
struct Server {
    process: Child,
    uri: String,
    image: PathBuf,
    _dir: TempDir,
}

impl Server {
    /// `None` if there is no plugin.
    fn start(content: &[u8], arguments: &[&str]) -> Option<Server> {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let (image, socket) = (dir.path().join("image"), dir.path().join("socket"));
        fs::write(&image, content).unwrap();
        let mut nbdkit = Command::new("nbdkit");
        nbdkit.args(["-f", "-U"]).arg(&socket).arg(plugin()?).arg(&image).args(arguments);
        let mut process = nbdkit.spawn().unwrap();
        let started = Instant::now();
        while !is_listened_at(&socket) {
            assert_eq!(process.try_wait().unwrap(), None, "nbdkit has ended: {arguments:?}");
            assert!(started.elapsed() < Duration::from_secs(60), "no socket: {arguments:?}");
            std::thread::sleep(Duration::from_millis(2));
        }
        let uri = format!("nbd+unix:///?socket={}", socket.display());
        Some(Server { process, uri, image, _dir: dir })
    }

    /// Stops the server as an administrator does; returns the file's content.
    fn end(&mut self) -> Vec<u8> {
        run(Command::new("kill").arg(self.process.id().to_string()));
        assert!(self.process.wait().unwrap().success());
        fs::read(&self.image).unwrap()
    }

    /// Kills it.
    fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    /// Whether it has its file open for writing.
    fn writes(&self) -> bool {
        let dir = PathBuf::from(format!("/proc/{}", self.process.id()));
        let numbers = fs::read_dir(dir.join("fd")).unwrap().map(|entry| entry.unwrap().file_name());
        let flags: Vec<_> = numbers
            .filter(|number| fs::read_link(dir.join("fd").join(number)).unwrap() == self.image)
            .map(|number| fs::read_to_string(dir.join("fdinfo").join(number)).unwrap())
            .map(|info| info.split_whitespace().nth(3).unwrap().to_string())
            .collect();
        assert!(!flags.is_empty(), "it has its file open");
        flags.iter().any(|flags| !flags.ends_with('0'))
    }

    /// The output of qemu-io for these commands, which must all succeed.
    fn qemu_io(&self, commands: &[&str]) -> String {
        let mut qemu_io = Command::new("qemu-io");
        qemu_io.args(["-f", "raw", "-t", "writeback"]);
        for command in commands {
            qemu_io.args(["-c", command]);
        }
        let said = run(qemu_io.arg(&self.uri));
        assert!(!said.contains("failed") && !said.contains("rror"), "{said}");
        said
    }

    /// The map of holes and data: offset, length, and whether it is a hole.
    fn map(&self) -> Vec<(usize, usize, bool)> {
        let said = run(Command::new("nbdinfo").arg("--map").arg(&self.uri));
        said.lines()
            .map(|line| {
                let words: Vec<_> = line.split_whitespace().collect();
                let number = |at: usize| words[at].parse::<usize>().unwrap();
                (number(0), number(1), number(2) & 1 != 0)
            })
            .collect()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The socket exists before the server listens at it. A connection as a probe would count as a failed
/// client.
fn is_listened_at(socket: &Path) -> bool {
    const ACCEPTS: &str = "00010000";
    let path = socket.to_str().unwrap();
    let sockets = fs::read_to_string("/proc/net/unix").unwrap();
    let mut words = sockets.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    words.any(|words| words.last() == Some(&path) && words[3] == ACCEPTS)
}

/// Pseudo-random bytes without repetitions.
fn noise(len: usize, mut seed: u64) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(len);
    while bytes.len() < len {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        bytes.extend_from_slice(&(seed >> 16).to_le_bytes()[..4]);
    }
    bytes.truncate(len);
    bytes
}

#[test]
fn clients_are_told_what_it_can() {
    let Some(server) = Server::start(&noise(5000, 1), &["page=16K"]) else { return };
    let said = run(Command::new("nbdinfo").arg("--json").arg(&server.uri));
    for wanted in [
        "\"export-size\": 5000",
        "\"is_read_only\": false",
        "\"can_cache\": true",
        "\"can_fast_zero\": true",
        "\"can_flush\": true",
        "\"can_fua\": true",
        "\"can_multi_conn\": true",
        "\"can_trim\": true",
        "\"can_zero\": true",
        "\"base:allocation\"",
        "\"block_size_minimum\": 1,",
        "\"block_size_preferred\": 16384",
    ] {
        assert!(said.contains(wanted), "{wanted}: {said}");
    }
    let reader = Server::start(&[7; 5000], &["-r"]).unwrap();
    let said = run(Command::new("nbdinfo").arg("--json").arg(&reader.uri));
    assert!(said.contains("\"is_read_only\": true"), "{said}");
    assert!(server.writes() && !reader.writes(), "a file that is only read is open for reading");

    let of_plugin = |option: &str| run(Command::new("nbdkit").arg(plugin().unwrap()).arg(option));
    let dumped = of_plugin("--dump-plugin");
    for wanted in
        ["name=millpond", "thread_model=parallel", "millpond_version=", "millpond_back_end="]
    {
        assert!(dumped.contains(wanted), "{wanted}: {dumped}");
    }
    let help = of_plugin("--help");
    for option in ["file=", "cache=", "mode=", "direct=", "keeper=", "page="] {
        assert!(help.contains(option), "{option}: {help}");
    }
}

#[test]
fn bad_options_are_refused_with_a_reason() {
    let Some(plugin) = plugin() else { return };
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let image = dir.path().join("image");
    fs::write(&image, [0; 4096]).unwrap();
    for (arguments, reason) in [
        (&["cache=much"][..], "cache"),
        (&["cache=0"], "cache=0"),
        (&["cache=1K"], "creating the cache"),
        (&["mode=sideways"], "through or back"),
        (&["direct=perhaps"], "perhaps"),
        (&["page=5000"], "power of two"),
        (&["page=1M"], "power of two"),
        (&["keeper=true"], "mode=back"),
        (&["colour=blue"], "unknown parameter 'colour'"),
        (&["file=/nowhere/at/all"], "No such file"),
        (&["file=/proc/self"], "directory"),
    ] {
        let mut nbdkit = Command::new("nbdkit");
        // No process connects: the server would serve the command that follows.
        nbdkit.args(["-U", "-"]).arg(plugin).arg(&image).args(arguments).args(["--run", "true"]);
        let output = nbdkit.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{arguments:?}");
        assert!(said.contains(reason), "{arguments:?}: {said}");
    }
}

/// Goal: a copy into the export is in the file when the server has ended, and a copy out of it equals the
/// file.
#[test]
fn copies_in_and_out_are_the_same() {
    // A partial last page, zeros in the middle, and a hole as the second half.
    let len = 9 * MIB + 1234;
    let mut content = noise(len, 2);
    content[MIB..3 * MIB].fill(0);
    content[5 * MIB..].fill(0);
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let [source, copy] = ["source", "copy"].map(|name| dir.path().join(name));
    fs::write(&source, &content).unwrap();
    for way in WAYS {
        let Some(mut server) = Server::start(&noise(len, 3), way) else { return };
        run(Command::new("nbdcopy")
            .args(["--flush", "--connections=4"])
            .arg(&source)
            .arg(&server.uri));
        run(Command::new("nbdcopy").arg(&server.uri).arg(&copy));
        assert!(fs::read(&copy).unwrap() == content, "copied out, {way:?}");
        let compare = ["compare", "-f", "raw", "-F", "raw"].map(OsStr::new);
        run(Command::new("qemu-img").args(compare).arg(&source).arg(&server.uri));
        assert!(server.end() == content, "copied in, {way:?}");
    }
}

/// Goal: a qemu image, with its metadata, stays consistent when it is created, checked and stressed in an
/// export.
#[test]
fn images_of_qemu_are_whole() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let source = dir.path().join("source");
    fs::write(&source, noise(4 * MIB, 4)).unwrap();
    for way in WAYS {
        let Some(mut server) = Server::start(&vec![0; 12 * MIB], way) else { return };
        let uri = server.uri.clone();
        let qemu_img = |words: &[&str]| run(Command::new("qemu-img").args(words));
        qemu_img(&["create", "-q", "-f", "qcow2", &uri, "8M"]);
        let from = source.to_str().unwrap();
        qemu_img(&["convert", "-n", "-W", "-f", "raw", "-O", "qcow2", from, &uri]);
        qemu_img(&["check", "-f", "qcow2", &uri]);
        let differences = Command::new("qemu-img")
            .args(["compare", "-f", "raw", "-F", "qcow2", from, &uri])
            .output()
            .unwrap();
        // The lengths differ; the rest is zeros, which compare as equal.
        assert!(differences.status.success(), "{way:?}: {differences:?}");
        let bench = "bench -q -w -f qcow2 -c 500 -d 16 -s 4096 --flush-interval=50";
        let words: Vec<_> = bench.split(' ').chain([uri.as_str()]).collect();
        qemu_img(&words);
        qemu_img(&["check", "-f", "qcow2", &uri]);
        server.end();
        qemu_img(&["check", "-f", "qcow2", server.image.to_str().unwrap()]);
    }
}

/// Goal: writes, zeroing and trimming, with and without FUA, are visible at once, also as holes.
#[test]
fn changes_are_seen_and_holes_are_told() {
    for way in WAYS {
        let Some(mut server) = Server::start(&vec![0xee; 8 * MIB], way) else { return };
        assert_eq!(server.map(), [(0, 8 * MIB, false)], "{way:?}");
        server.qemu_io(&[
            "read -P 0xee 0 8M",
            "write -P 0x11 4097 70001",
            "write -f -P 0x22 1M 64k",
            "write -z 2M 1M",
            "write -z -u 4M 1M",
            "write -z -f 5M 100",
            "discard 6M 1M",
            "read -P 0xee 0 4097",
            "read -P 0x11 4097 70001",
            "read -P 0xee 74098 4096",
            "read -P 0x22 1M 64k",
            "read -P 0 2M 1M",
            "read -P 0 4M 1M",
            "read -P 0 5M 100",
            "read -P 0xee 5242980 1000",
            "read -P 0 6M 1M",
            "aio_write -P 0x33 3M 256k",
            "aio_write -P 0x44 7M 256k",
            "aio_flush",
            "flush",
            "read -P 0x33 3M 256k",
            "read -P 0x44 7M 256k",
        ]);
        // The holes are the file system's: zeroed ranges that keep their space may be holes or data.
        let map = server.map();
        let state = |at: usize| {
            map.iter().find(|(from, len, _)| (*from..from + len).contains(&at)).unwrap().2
        };
        for (at, is_hole) in
            [(0, false), (3 * MIB, false), (4 * MIB, true), (6 * MIB, true), (7 * MIB, false)]
        {
            assert_eq!(state(at), is_hole, "{way:?}, byte {at}: {map:?}");
        }
        // Data in a hole, which only the cache has in mode back.
        server.qemu_io(&["write -P 0x55 4608k 4k", "write -P 0x55 6656k 4k"]);
        let told: Vec<_> = server
            .map()
            .into_iter()
            .filter(|(at, ..)| [4608 << 10, 6656 << 10].contains(at))
            .collect();
        assert_eq!(told, [(4608 << 10, 4096, false), (6656 << 10, 4096, false)], "{way:?}");

        let content = server.end();
        let at = |from: usize, len: usize, byte: u8| {
            content[from..from + len].iter().all(|&b| b == byte)
        };
        assert!(at(4097, 70001, 0x11) && at(MIB, 65536, 0x22) && at(2 * MIB, MIB, 0), "{way:?}");
        assert!(
            at(3 * MIB, 256 << 10, 0x33) && at(4608 << 10, 4096, 0x55) && content.len() == 8 * MIB,
            "{way:?}"
        );
    }
}

/// Goal: a read of bytes that no longer exist is an error, for the client and in the log; other reads
/// succeed.
#[test]
fn an_error_is_told_and_nothing_else_is_lost() {
    let Some(mut server) = Server::start(&noise(MIB, 5), &["cache=64K"]) else { return };
    let image = fs::File::options().write(true).open(&server.image).unwrap();
    image.set_len(4096).unwrap();
    let mut qemu_io = Command::new("qemu-io");
    qemu_io.args(["-f", "raw", "-c", "read 512k 4k", "-c", "read 0 4k", &server.uri]);
    let said = qemu_io.output().unwrap();
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    assert!(said.contains("Input/output error"), "{said}");
    assert!(said.contains("read 4096/4096 bytes at offset 0"), "{said}");
    server.end();
}

#[test]
fn fio_finds_what_it_wrote() {
    let engines = Command::new("fio").arg("--enghelp").output();
    if !engines.is_ok_and(|said| String::from_utf8_lossy(&said.stdout).contains("\tnbd\n")) {
        return skip("there is no fio with an nbd engine");
    }
    for way in WAYS {
        let Some(server) = Server::start(&vec![0; 16 * MIB], way) else { return };
        let mut fio = Command::new("fio");
        fio.args(["--name=v", "--ioengine=nbd", "--rw=randrw", "--bsrange=4k-64k", "--size=16m"]);
        fio.args([
            "--io_size=16m",
            "--verify=crc32c",
            "--verify_fatal=1",
            "--fsync=64",
            "--iodepth=16",
        ]);
        fio.arg("--serialize_overlap=1").arg(format!("--uri={}", server.uri));
        let said = run(fio.current_dir(server.image.parent().unwrap()));
        assert!(said.contains("err= 0"), "{way:?}: {said}");
    }
}

/// A client that writes, and stays connected without a flush.
struct Writer {
    process: Child,
    said: BufReader<std::process::ChildStdout>,
}

impl Writer {
    fn connect(server: &Server) -> Writer {
        let mut qemu_io = Command::new("qemu-io");
        // `unsafe`: the client sends no flushes.
        qemu_io.args(["-f", "raw", "-t", "unsafe", &server.uri]);
        let mut process = qemu_io
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let said = BufReader::new(process.stdout.take().unwrap());
        Writer { process, said }
    }

    /// Returns when the server has replied.
    fn write(&mut self, command: &str) {
        writeln!(self.process.stdin.as_mut().unwrap(), "{command}").unwrap();
        let mut line = String::new();
        while !line.contains("wrote") {
            line.clear();
            assert!(self.said.read_line(&mut line).unwrap() > 0, "qemu-io has ended at {command}");
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn holds(image: &Path, at: u64, byte: u8) -> bool {
    let mut bytes = [0; 65536];
    fs::File::open(image).unwrap().read_exact_at(&mut bytes, at).unwrap();
    bytes.iter().all(|&b| b == byte)
}

/// Goal: flushed writes, and writes with FUA, are in the file after a kill of the server, in every mode. A
/// flush covers the writes of other connections.
#[test]
fn what_was_flushed_survives_a_kill() {
    for way in WAYS {
        let Some(mut server) = Server::start(&vec![0; 4 * MIB], way) else { return };
        let (mut one, mut other) = (Writer::connect(&server), Writer::connect(&server));
        one.write("write -P 0x11 0 64k");
        other.write("write -P 0x22 1M 64k");
        server.qemu_io(&["flush"]);
        one.write("write -f -P 0x33 2M 64k");
        other.write("write -P 0x44 3M 64k");
        server.kill();
        for (at, byte) in [(0, 0x11), (MIB, 0x22), (2 * MIB, 0x33)] {
            assert!(holds(&server.image, at as u64, byte), "{way:?}, at {at}");
        }
        if way.contains(&"mode=through") {
            assert!(holds(&server.image, 3 * MIB as u64, 0x44), "{way:?}: the kernel has it");
        }
    }
}

/// Goal: with a keeper, dirty pages are in the file after a kill, too.
#[test]
fn what_waited_survives_a_kill_with_a_keeper() {
    let Some(mut server) = Server::start(&vec![0; 4 * MIB], &["mode=back", "keeper=true"]) else {
        return;
    };
    let mut writer = Writer::connect(&server);
    writer.write("write -P 0x11 0 64k");
    writer.write("write -P 0x22 2M 64k");
    assert!(!holds(&server.image, 0, 0x11), "it waits in the cache");
    server.kill();
    let killed = Instant::now();
    while !holds(&server.image, 0, 0x11) || !holds(&server.image, 2 * MIB as u64, 0x22) {
        assert!(killed.elapsed() < Duration::from_secs(60), "the keeper has not written");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Goal: `untorn=SIZE` reaches the library, whose refusal keeps the server from starting.
/// Method: a file whose length is no multiple of the block, and options that contradict it.
#[test]
fn untorn_blocks_are_promised_or_the_server_does_not_start() {
    let Some(plugin) = plugin() else { return };
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let image = dir.path().join("image");
    fs::write(&image, [0; 5000]).unwrap();
    for (arguments, said) in [
        (&["untorn=16K"][..], "needs direct=true"),
        (&["untorn=5000", "direct=true"], "must be a power of two"),
        (&["untorn=16K", "direct=true"], "untorn blocks"),
    ] {
        let mut nbdkit = Command::new("nbdkit");
        nbdkit.args(["-f", "-U"]).arg(dir.path().join("socket")).arg(plugin).arg(&image);
        let output = nbdkit.args(arguments).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && text.contains(said), "{arguments:?}: {text}");
    }
}
