//! Goal: `millpond top` shows what engines do, in a real terminal.
//! Method: an engine in this process, and a program under `millpond run`; tmux is the terminal.

#[path = "../../millpond/tests/common/skip.rs"]
mod skip;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use millpond::{Engine, File, OpenOptions, WriteMode};

const MILLPOND: &str = env!("CARGO_BIN_EXE_millpond");
const PAGE: usize = 4096;
/// For a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A published engine, and a file of four pages.
fn engine(dir: &Path) -> (Engine, File) {
    let engine = Engine::builder().cache_bytes(8 << 20).published(true).build().unwrap();
    let path = dir.join("data");
    std::fs::write(&path, [7; 4 * PAGE]).unwrap();
    let options = OpenOptions::new().read(true).write(true).write_mode(WriteMode::Back);
    let file = engine.open(&path, &options).unwrap();
    (engine, file)
}

fn read(file: &File, times: usize) {
    let mut bytes = [0; PAGE];
    (0..times).for_each(|_| assert_eq!(file.read_at(&mut bytes, 0).unwrap(), PAGE));
}

fn top(arguments: &[&str]) -> String {
    let done = Command::new(MILLPOND).arg("top").args(arguments).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8(done.stdout).unwrap()
}

/// Polls until `of` returns a result.
fn await_some<T>(what: &str, mut of: impl FnMut() -> Result<T, String>) -> T {
    let begun = Instant::now();
    loop {
        match of() {
            Ok(found) => return found,
            Err(seen) if begun.elapsed() > PATIENCE => panic!("no {what}:\n{seen}"),
            Err(_) => std::thread::sleep(Duration::from_millis(50)),
        }
    }
}

/// A program under `run` that reads one file repeatedly until it is killed. Returns its id, and the id of a
/// child of fork, which has all its descriptors.
fn program(dir: &Path) -> (Ended, u32, u32) {
    let path = dir.join("read");
    let first = dir.join("first");
    for path in [&path, &first] {
        std::fs::write(path, [1; PAGE]).unwrap();
    }
    let script = "import os, sys, time\n\
        first = os.open(sys.argv[2], os.O_RDONLY)\n\
        os.pread(first, 4096, 0)\n\
        os.close(first)\n\
        child = os.fork()\n\
        if child == 0:\n    time.sleep(1000)\n\
        fd = os.open(sys.argv[1], os.O_RDONLY)\n\
        print(os.getpid(), child, flush=True)\n\
        while True:\n    os.pread(fd, 4096, 0)\n    time.sleep(0.002)\n";
    let mut command = Command::new(MILLPOND);
    command
        .args(["run", "--eager", "--mode", "back", "--stats", "--path"])
        .arg(dir)
        .args(["--", "python3", "-c"]);
    command.arg(script).args([&path, &first]).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = Ended(command.spawn().unwrap());
    let mut line = String::new();
    BufReader::new(child.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let (pid, forked) = line.trim().split_once(' ').unwrap();
    (child, pid.parse().unwrap(), forked.parse().unwrap())
}

fn signal(signal: &str, pid: u32) {
    assert!(Command::new("kill").args([signal, &pid.to_string()]).status().unwrap().success());
}

fn kill(pid: u32) {
    signal("-9", pid);
}

#[test]
fn an_engine_is_told_as_text_as_json_and_to_prometheus() {
    let dir = tempfile::tempdir().unwrap();
    let (engine, file) = engine(dir.path());
    read(&file, 1 + 640);
    // One of 16 is timed.
    (0..16).for_each(|_| file.write_all_at(&[3; PAGE], PAGE as u64).unwrap());
    let stats = engine.stats();
    let own = std::process::id().to_string();

    await_some("such numbers", || {
        let text = top(&[&own, "--json"]);
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        let one = json["engines"].as_array().unwrap().iter().find(|one| {
            let values = &one["values"];
            values["hits"] == stats.hits
                && values["misses"] == stats.misses
                && values["dirty_bytes"] == PAGE
                && values["limit_bytes"] == 8 << 20
                && one["latencies"]["read_hit"]["count"] == 10
                && one["latencies"]["write"]["count"] == 1
        });
        one.map(drop).ok_or(text)
    });
    let text = top(&[&own, "--once"]);
    assert!(text.contains(&format!("hits {}, misses {}", stats.hits, stats.misses)), "{text}");
    assert!(text.contains("dirty 4096 B"), "{text}");

    let mut command = Command::new(MILLPOND);
    command.args(["top", "--prometheus", "127.0.0.1:0"]).stdout(Stdio::piped());
    let mut server = Ended(command.spawn().unwrap());
    let mut line = String::new();
    BufReader::new(server.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let address = line.trim().strip_prefix("http://").unwrap().strip_suffix("/metrics").unwrap();
    let ask = |path: &str| {
        let mut connection = TcpStream::connect(address).unwrap();
        write!(connection, "GET {path} HTTP/1.1\r\nHost: test\r\n\r\n").unwrap();
        let mut answer = String::new();
        connection.read_to_string(&mut answer).unwrap();
        answer
    };
    let answer = ask("/metrics");
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    let has = |name: &str, value: &str| {
        let start = format!("{name}{{kind=\"engine\",pid=\"{own}\"");
        answer.lines().any(|line| line.starts_with(&start) && line.ends_with(value))
    };
    assert!(has("millpond_hits_total", &format!(" {}", stats.hits)), "{answer}");
    assert!(has("millpond_latency_seconds_count", " 10"), "{answer}");
    assert!(ask("/other").starts_with("HTTP/1.1 404"));
    let _silent = TcpStream::connect(address).unwrap();
    assert!(ask("/metrics").starts_with("HTTP/1.1 200"));

    let shown = Command::new(MILLPOND).arg("top").stdin(Stdio::null()).output().unwrap();
    assert_eq!(shown.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&shown.stderr).contains("not a terminal"));
}

#[test]
fn a_store_of_objects_is_told() {
    use object_store::{ObjectStoreExt, memory::InMemory, path::Path};

    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let far = std::sync::Arc::new(InMemory::new());
    let builder = millpond_objects::CachedStore::builder(far).memory_bytes(16 << 20);
    let builder = builder.freshness(millpond_objects::Freshness::Immutable);
    let store = builder.published(true).build().unwrap();
    let path = Path::from("pond");
    runtime.block_on(async {
        store.put(&path, "water".into()).await.unwrap();
        for _ in 0..5 {
            assert_eq!(store.get_range(&path, 0..5).await.unwrap(), "water");
        }
    });
    let stats = store.stats();
    assert_eq!((stats.requests, stats.requests_saved), (1, 4));
    let own = std::process::id().to_string();
    await_some("such numbers", || {
        let text = top(&[&own, "--once"]);
        if text.contains("1 objects: 1 requests, 4 saved, 5 B received") {
            Ok(())
        } else {
            Err(text)
        }
    });
}

#[test]
fn a_killed_process_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (run, pid, child) = program(dir.path());
    let pid = pid.to_string();
    await_some("file that is read", || {
        let text = top(&[&pid, "--once"]);
        let is_read = text.lines().any(|line| line.contains("served ") && line.ends_with("/read"));
        // The entries of the run and of the engine in its process.
        let is_told = text.contains("served 2") && text.contains("read_hit ");
        if is_read && is_told { Ok(()) } else { Err(text) }
    });
    kill(pid.parse().unwrap());
    drop(run);
    let gone = Command::new(MILLPOND).args(["top", &pid, "--once"]).output().unwrap();
    assert_eq!(gone.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&gone.stderr).contains("has no engine"));
    let told = top(&["--json"]);
    let json: serde_json::Value = serde_json::from_str(&told).unwrap();
    let is_of_child = |one: &serde_json::Value| one["pid"] == child;
    assert!(!json["engines"].as_array().unwrap().iter().any(is_of_child), "{told}");
    kill(child);
}

/// A tmux server with one window.
struct Terminal(tempfile::TempDir);

impl Terminal {
    fn tmux(&self, arguments: &[&str]) -> String {
        let socket = self.0.path().join("socket");
        let mut command = Command::new("tmux");
        let done = command.arg("-S").arg(socket).args(["-f", "/dev/null"]).args(arguments);
        let done = done.env("TERM", "screen").env("LC_ALL", "C.UTF-8").output().unwrap();
        let error = String::from_utf8_lossy(&done.stderr);
        assert!(done.status.success(), "{arguments:?}: {error}");
        String::from_utf8(done.stdout).unwrap()
    }

    fn screen(&self) -> String {
        self.tmux(&["capture-pane", "-p"])
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let socket = self.0.path().join("socket");
        let _ = Command::new("tmux").arg("-S").arg(socket).arg("kill-server").status();
    }
}

/// The number of hits of the file that the program reads.
fn hits_of_file(screen: &str) -> Option<u64> {
    let line = screen.lines().find(|line| line.contains(" served ") && line.contains("/read"))?;
    let mut words = line.split(|c: char| !c.is_ascii_alphanumeric()).filter(|w| !w.is_empty());
    words.nth(1)?.parse().ok()
}

#[test]
fn a_terminal_shows_numbers_that_move() {
    if Command::new("tmux").arg("-V").output().is_err() {
        skip::skip("there is no tmux");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (_engine, file) = engine(dir.path());
    read(&file, 1 + 99);
    let (run, pid, child) = program(dir.path());
    let own = std::process::id().to_string();

    let terminal = Terminal(tempfile::tempdir().unwrap());
    let size = ["-x", "140", "-y", "50"];
    let shown = format!(
        "'{MILLPOND}' top; echo it is over; '{MILLPOND}' top; echo over again; exec sleep 1000"
    );
    terminal.tmux(&[&["new-session", "-d"], &size[..], &[&shown]].concat());
    let shell = terminal.tmux(&["list-panes", "-F", "#{pane_pid}"]);
    let top_pid = || {
        let path = format!("/proc/{0}/task/{0}/children", shell.trim());
        std::fs::read_to_string(path).unwrap().trim().parse::<u32>().ok()
    };
    let first = await_some("engines", || {
        let screen = terminal.screen();
        let has_own = screen.lines().any(|line| line.contains(&own) && line.contains("99.0%"));
        match hits_of_file(&screen) {
            Some(hits) if has_own && hits > 0 => Ok(hits),
            _ => Err(screen),
        }
    });
    await_some("more hits", || {
        let screen = terminal.screen();
        hits_of_file(&screen).filter(|hits| *hits > first).ok_or(screen)
    });
    terminal.tmux(&["send-keys", "s"]);
    await_some("other order", || {
        let screen = terminal.screen();
        if screen.contains("by misses") { Ok(()) } else { Err(screen) }
    });
    terminal.tmux(&["send-keys", "p"]);
    await_some("pause", || {
        let screen = terminal.screen();
        if screen.contains("paused") { Ok(()) } else { Err(screen) }
    });
    terminal.tmux(&["send-keys", "p"]);
    terminal.tmux(&["resize-window", "-x", "60", "-y", "20"]);
    await_some("view of that size", || {
        let screen = terminal.screen();
        let widest = screen.lines().map(|line| line.chars().count()).max();
        if widest == Some(60) && screen.contains("live") { Ok(()) } else { Err(screen) }
    });
    terminal.tmux(&["resize-window", "-x", "140", "-y", "50"]);
    kill(pid);
    kill(child);
    drop(run);
    await_some("run gone", || {
        let screen = terminal.screen();
        let is_gone = hits_of_file(&screen).is_none() && screen.contains(&own);
        if is_gone { Ok(()) } else { Err(screen) }
    });
    let one = top_pid();
    terminal.tmux(&["send-keys", "q"]);
    await_some("view, again", || {
        let screen = terminal.screen();
        match top_pid() {
            Some(other) if Some(other) != one && screen.contains("live") => {
                signal("-TERM", other);
                Ok(())
            }
            _ => Err(screen),
        }
    });
    await_some("end", || {
        let screen = terminal.screen();
        let is_over = screen.contains("it is over") && screen.contains("over again");
        if is_over { Ok(()) } else { Err(screen) }
    });
}
