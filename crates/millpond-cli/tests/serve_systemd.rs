//! Tests of `millpond serve` under systemd: the units, inherited sockets, and the notification of states.

#[path = "common/server.rs"]
mod server;
#[path = "../../millpond/tests/common/skip.rs"]
mod skip;

use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use millpond_serve::SharedStore;
use object_store::ObjectStore;
use object_store::memory::InMemory;
use server::{serve, stop};
use skip::skip;

const PROGRAM: &str = env!("CARGO_BIN_EXE_millpond");

/// Whether this machine has a command of systemd. The caller skips without it.
fn has(command: &str) -> bool {
    Command::new(command).arg("--version").stdout(Stdio::null()).status().is_ok()
}

/// Goal: systemd accepts the units as they are installed, without a warning.
#[test]
fn the_units_are_valid() {
    if !has("systemd-analyze") {
        return skip("no systemd-analyze");
    }
    let prefix = tempfile::tempdir().unwrap();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let installed = Command::new(root.join("scripts/install"))
        .env("MILLPOND_PROGRAM", PROGRAM)
        .env("DESTDIR", "")
        .env("PREFIX", prefix.path())
        .output()
        .unwrap();
    assert!(installed.status.success(), "{installed:?}");
    let units = prefix.path().join("share/systemd/user");
    let checked = Command::new("systemd-analyze")
        .args(["verify", "--user", "--man=no"])
        .args(["service", "socket"].map(|kind| units.join(format!("millpond-serve.{kind}"))))
        .env("XDG_RUNTIME_DIR", prefix.path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&checked.stderr);
    assert!(checked.status.success() && !said.contains("millpond"), "{said}");
}

/// Goal: the first connection to systemd's socket starts a server, which serves it, and leaves the socket in place.
#[test]
fn a_socket_of_systemd_is_served() {
    if !has("systemd-socket-activate") {
        return skip("no systemd-socket-activate");
    }
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    std::fs::create_dir(&run).unwrap();
    let socket = run.join("socket");
    let mut child = Command::new("systemd-socket-activate")
        .args(["--seqpacket", "-l", socket.to_str().unwrap(), PROGRAM])
        .args(["serve", "--store", "memory:///", "--memory", "16M"])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let started = Instant::now();
    while !socket.exists() {
        assert!(started.elapsed() < Duration::from_secs(20), "systemd-socket-activate listens");
        std::thread::sleep(Duration::from_millis(10));
    }
    let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let client = SharedStore::new(store, &socket);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    // The first attempts end while the server starts.
    while !runtime.block_on(client.attach()) {
        assert!(started.elapsed() < Duration::from_secs(60), "no server answers");
        std::thread::sleep(Duration::from_millis(100));
    }
    let lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    let lines: Vec<_> = lines.take_while(|line| line != "serving").collect();
    let shown = socket.display().to_string();
    assert!(lines.iter().any(|line| line.contains(&shown)), "{lines:?}");
    stop(child, "-TERM");
    assert!(socket.exists(), "the socket is systemd's");
}

#[test]
fn the_service_manager_receives_the_states() {
    let dir = tempfile::tempdir().unwrap();
    let manager = UnixDatagram::bind(dir.path().join("notify")).unwrap();
    manager.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let socket = dir.path().join("run/socket").display().to_string();
    let child = serve(&["--store", "memory:///", "--memory", "16M", "--socket", &socket])
        .env("NOTIFY_SOCKET", dir.path().join("notify"))
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let receive = || {
        let mut buffer = [0; 256];
        let len = manager.recv(&mut buffer).expect("a state");
        String::from_utf8_lossy(&buffer[..len]).trim().to_owned()
    };
    assert_eq!(receive(), "READY=1");
    assert!(Path::new(&socket).exists(), "it listens before it is ready");
    stop(child, "-TERM");
    assert_eq!(receive(), "STOPPING=1");
}

#[test]
fn each_wrong_socket_has_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("run/socket").display().to_string();
    let of = |variables: &str, text: &str| {
        // The shell has the process ID that the program keeps.
        let script =
            format!("export {variables}; exec \"$0\" serve \"$@\" 3</dev/null 4</dev/null");
        let output = Command::new("sh")
            .args([
                "-c",
                &script,
                PROGRAM,
                "--store",
                "memory:///",
                "--memory",
                "16M",
                "--socket",
                &socket,
            ])
            .output()
            .unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{variables}: {error}");
        assert!(error.contains(text), "{variables}: {error}");
    };
    of("LISTEN_PID=$$ LISTEN_FDS=1", "ListenSequentialPacket");
    of("LISTEN_PID=$$ LISTEN_FDS=2", "2 sockets");
    of("LISTEN_PID=$$ LISTEN_FDS=x", "LISTEN_FDS");
    assert!(!Path::new(&socket).exists());
}
