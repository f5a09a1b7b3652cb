//! Tests of `millpond serve`: its settings, its output, and its end.

#[path = "common/server.rs"]
mod server;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

use millpond_serve::{SharedStore, set_server_memory};
use object_store::local::LocalFileSystem;
use object_store::{ObjectStore, ObjectStoreExt};
use server::{output, serve, start, stop};

#[test]
fn each_wrong_setting_has_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("socket").display().to_string();
    let open = dir.path().join("open");
    std::fs::create_dir(&open).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o777);
    std::fs::set_permissions(&open, mode).unwrap();
    let in_open = open.join("socket").display().to_string();
    let missing = format!("file://{}", dir.path().join("none").display());
    let at = ["--socket", &socket];
    let of = |more: &[&str], status: i32, text: &str| {
        let given = [&["--memory", "16M", "--store", "memory:///"], &at[..], more].concat();
        // The last of an option counts for the test.
        let mut arguments: Vec<&str> = Vec::new();
        for pair in given.chunks(2) {
            if pair.len() == 2 && arguments.iter().any(|there| *there == pair[0]) {
                let there = arguments.iter().position(|there| *there == pair[0]).unwrap();
                arguments[there + 1] = pair[1];
            } else {
                arguments.extend(pair);
            }
        }
        let output = output(&arguments);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{arguments:?}: {error}");
        assert!(error.contains(text), "{arguments:?}: {error}");
    };
    of(&["--store", "nowhere"], 2, "is not a URL");
    of(&["--store", "ftp://x"], 2, "unknown scheme");
    of(&["--store", "memory:///x"], 2, "has no path");
    of(&["--store", "file://x"], 2, "no absolute path");
    of(&["--store", &missing], 2, "none");
    of(&["--store", "s3:///prefix"], 2, "has no bucket");
    of(&["--store", "s3://bucket/a//b"], 2, "empty path segment");
    of(&["--memory", "5x"], 2, "--memory");
    of(&["--memory", "100K"], 2, "at least 1048576");
    of(&["--page", "3000"], 2, "page");
    of(&["--page", "5G"], 2, "too large");
    of(&["--freshness", "0s"], 2, "neither immutable");
    of(&["--freshness", "soon"], 2, "neither immutable");
    of(&["--shared-memory", "big"], 2, "neither auto");
    of(&["--shared-memory", "/proc"], 2, "/proc: not a tmpfs");
    of(&["--shared-memory", "/no/such/directory"], 2, "/no/such/directory: No such file");
    of(&["--disk", "/tmp/x", "y"], 2, "--disk");
    of(&["--log", "loud"], 2, "neither off, error");
    of(&["--socket", &in_open], 1, "mode 777");
    #[cfg(not(feature = "s3"))]
    of(&["--store", "s3://bucket"], 2, "--features s3");
    let no_socket = output(&["--memory", "16M", "--store", "memory:///", "--check"]);
    if rustix::process::geteuid().is_root() {
        let settings = String::from_utf8_lossy(&no_socket.stdout);
        assert!(settings.starts_with("socket:        /run/millpond/serve.sock\n"), "{no_socket:?}");
    } else {
        assert_eq!(no_socket.status.code(), Some(2));
        assert!(String::from_utf8_lossy(&no_socket.stderr).contains("XDG_RUNTIME_DIR"));
    }
    assert_eq!(output(&["--store", "memory:///"]).status.code(), Some(2), "no --memory");
    let no_server = output(&["--set-memory", "16M", "--socket", &socket]);
    assert_eq!(no_server.status.code(), Some(1));
    assert!(!Path::new(&socket).exists());
}

#[test]
fn a_check_prints_the_settings_and_the_memory() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("socket").display().to_string();
    let store = format!("file://{}", dir.path().display());
    let arguments = ["--store", &store, "--memory", "24M", "--socket", &socket, "--check"];
    let more = ["--freshness", "90s", "--disk", "/nowhere/yet", "3G"];
    let output = output(&[&arguments[..], &more].concat());
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8_lossy(&output.stdout);
    for part in [&socket, &store, "24.0 MiB", "90s", "/nowhere/yet, 3.0 GiB", "16384 bytes"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let memory = text.lines().find(|line| line.starts_with("shared memory:")).unwrap();
    assert!(memory.contains("huge pages") || text.contains("echo advise >"), "{text}");
    assert!(!Path::new(&socket).exists());
}

/// Goal: a program reads by the server, the limit changes, and a signal ends it and removes the socket.
#[test]
fn a_server_serves_until_a_signal() {
    for end in ["-TERM", "-INT"] {
        let dir = tempfile::tempdir().unwrap();
        let objects = dir.path().join("objects");
        std::fs::create_dir(&objects).unwrap();
        let (socket, url) =
            (dir.path().join("run/socket"), format!("file://{}", objects.display()));
        let name = socket.display().to_string();
        let arguments =
            ["--store", &url, "--memory", "32M", "--freshness", "immutable", "--socket", &name];
        let (child, lines) = start(&arguments);
        assert!(lines.iter().any(|line| line.contains("immutable")), "{lines:?}");
        let second = output(&arguments);
        assert_eq!(second.status.code(), Some(1));
        assert!(String::from_utf8_lossy(&second.stderr).contains("listens at"), "{second:?}");
        let store: Arc<dyn ObjectStore> =
            Arc::new(LocalFileSystem::new_with_prefix(&objects).unwrap());
        let client = SharedStore::new(store, &socket);
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(async {
            let path = object_store::path::Path::from("pond");
            client.put(&path, "water lilies".into()).await.unwrap();
            for _ in 0..3 {
                assert_eq!(client.get_range(&path, 6..12).await.unwrap(), "lilies");
            }
        });
        let stats = client.stats();
        assert_eq!((stats.hits, stats.misses, stats.fallbacks), (2, 1, 0), "{stats:?}");
        let changed = output(&["--set-memory", "16M", "--socket", &name]);
        assert!(changed.status.success(), "{changed:?}");
        assert_eq!(String::from_utf8_lossy(&changed.stdout), "the limit is 16.0 MiB\n");
        assert!(set_server_memory(&socket, 64 << 20).is_err(), "more than it was started with");
        // Both limits are those of the user, not of the part that is the engine's.
        for (size, bytes) in [("64M", 64 << 20), ("33M", 33 << 20), ("1K", 1 << 10)] {
            let refused = output(&["--set-memory", size, "--socket", &name]);
            assert_eq!(refused.status.code(), Some(1), "{refused:?}");
            let text = String::from_utf8_lossy(&refused.stderr);
            let what = format!("memory of {bytes} bytes: must be ");
            assert!(text.starts_with("millpond: --set-memory: ") && text.contains(&what), "{text}");
            assert!(text.contains(&format!(" to {}, the limit", 32 << 20)), "{text}");
        }
        stop(child, end);
        assert!(!socket.exists());
    }
}

/// Goal: the server raises its limit of descriptors, and says on standard error why it refuses a client.
#[test]
fn refused_clients_are_in_the_log() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("socket");
    let name = socket.display().to_string();
    let arguments = ["--store", "memory:///", "--memory", "16M", "--socket", &name];
    let loud = serve(&arguments).env("MILLPOND_LOG", "loud").output().unwrap();
    assert_eq!(loud.status.code(), Some(2), "{loud:?}");
    assert!(String::from_utf8_lossy(&loud.stderr).contains("MILLPOND_LOG"), "{loud:?}");

    let of_shell = "ulimit -Sn 256; exec \"$0\" serve \"$@\"";
    let mut child = Command::new("sh")
        .args(["-c", of_shell, env!("CARGO_BIN_EXE_millpond")])
        .args(arguments)
        .env_remove("MILLPOND_LOG")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.map(Result::unwrap).any(|line| line == "serving"));
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", child.id())).unwrap();
    let limit = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    let limit: Vec<_> = limit.split_whitespace().skip(3).take(2).collect();
    assert_eq!(limit[0], limit[1], "{limits}");

    let store = Arc::new(LocalFileSystem::new_with_prefix(dir.path()).unwrap());
    let client = SharedStore::new(store, &socket);
    assert!(!tokio::runtime::Runtime::new().unwrap().block_on(client.attach()));
    assert!(Command::new("kill").arg(child.id().to_string()).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let log = String::from_utf8_lossy(&output.stderr);
    assert_eq!(log.lines().count(), 1, "{log}");
    assert!(
        log.contains(" millpond: warning: a client was refused error=the server caches "),
        "{log}"
    );
}
