//! Runs programs under the preload library, and parses its report.

#![allow(dead_code, unused_imports, reason = "each test file uses a part of it")]

#[path = "../../../millpond/tests/common/skip.rs"]
mod skip;

#[path = "../../src/runtime/count_words.rs"]
mod count_words;
#[path = "../../src/report/reason.rs"]
mod reason;

pub mod table;

mod mount;

use std::ffi::OsStr;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use millpond::keeper::{Address, Server};

use count_words::*;
use reason::REASONS;

pub use mount::Mount;
pub use skip::skip;

/// The preload library, built with the profile of this test: cargo does not build a cdylib for the tests of its own
/// package. `MILLPOND_TEST_LIBRARY` names another library to use, after the libraries to load before it.
pub fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        if let Some(other) = std::env::var_os("MILLPOND_TEST_LIBRARY") {
            return other.into();
        }
        let this = std::env::current_exe().unwrap();
        let profile_dir = this.parent().and_then(Path::parent).unwrap();
        let mut build = Command::new(env!("CARGO"));
        build.args(["build", "--quiet", "-p", "millpond-preload", "--target-dir"]);
        build.arg(profile_dir.parent().unwrap());
        if profile_dir.ends_with("release") {
            build.arg("--release");
        }
        build.current_dir(env!("CARGO_MANIFEST_DIR"));
        assert!(build.status().unwrap().success(), "cargo could not build the preload library");
        let library = profile_dir.join("libmillpond_preload.so");
        assert!(library.exists(), "{} was not built", library.display());
        library
    })
}

/// A served directory, and one that is not served, for reports and compiled programs.
pub struct Pond {
    served: tempfile::TempDir,
    aside: tempfile::TempDir,
    cache_bytes: u64,
    mode: Mode,
    served_files: ServedFiles,
    /// What processes add their counts to, as children of a run do; see `report::shared_totals`.
    totals: File,
}

/// Which files are served.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ServedFiles {
    /// As with `--eager`: mode through maps files from their first read on, and mode back also serves files that are
    /// open for reading only.
    Eager,
    /// As in a run without options.
    Default,
    /// As `Default`, and files of mode back are handed to the kernel at random moments, by this seed.
    HandOver(u64),
}

/// The library's modes; see its modules `page_cache` and `writeback_policy`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Mode {
    /// Reads from the kernel's page cache, as in a run without options.
    Through,
    Back,
    /// `Back`, and with `O_DIRECT` if the served directory's file system supports it.
    BackDirect,
}

/// The modes in which the library has its own cache.
pub const MODES: [Mode; 2] = [Mode::Back, Mode::BackDirect];
pub const ALL_MODES: [Mode; 3] = [Mode::Through, Mode::Back, Mode::BackDirect];

/// The keeper of all programs of this test, in a process of its own: this one starts programs, and each of them has
/// copies of all descriptors until it is executed. Copies of a keeper's would keep files open after their last close.
pub fn keeper() -> &'static Address {
    static KEEPER: OnceLock<(Child, Address)> = OnceLock::new();
    &KEEPER.get_or_init(|| start_keeper(|line| println!("{line}"))).1
}

/// Starts a keeper that can be killed, and ends when this process does; returns its address. `on_line` is called with
/// each line that it prints.
pub fn start_keeper(on_line: impl Fn(String) + Send + 'static) -> (Child, Address) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "common::the_keeper", "--nocapture", "--ignored"]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    // The test harness prints text before the address in the same line.
    let address =
        |line: String| line.split_once("address=").map(|(_, address)| address.to_string());
    let address = lines.find_map(|line| address(line.unwrap())).expect("the keeper has an address");
    // The thread continues to read, as the keeper may print more.
    std::thread::spawn(move || lines.map_while(Result::ok).for_each(on_line));
    (child, address.parse().unwrap())
}

/// The keeper's role.
#[test]
#[ignore = "a role, in which another test starts this program"]
fn the_keeper() {
    let server = Server::bind(&Address::unique()).unwrap();
    println!("address={}", server.address());
    std::io::stdout().flush().unwrap();
    let stopper = server.stopper();
    std::thread::spawn(move || {
        // The end of the process that started this one.
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        stopper.stop_when_idle();
    });
    server
        .serve(|report| {
            if report.pages() > 0 || !report.is_complete() {
                println!("keeper: {report}");
            }
        })
        .unwrap();
    // The process that reads the harness's output is gone.
    std::process::exit(0);
}

/// The merged reports of all processes of a run.
#[derive(Debug, Default, PartialEq)]
pub struct Report {
    pub served_files: u64,
    pub served_bytes: u64,
    pub passed_files: u64,
    pub passed_bytes: u64,
    pub direct_reads: u64,
    pub direct_writes: u64,
    pub undirected_files: u64,
    /// How often a cache shrank.
    pub shrunk: u64,
    pub lines: String,
}

impl Report {
    /// The share of the moved bytes that the library served.
    pub fn served_share(&self) -> f64 {
        self.served_bytes as f64 / (self.served_bytes + self.passed_bytes) as f64
    }

    #[track_caller]
    pub fn assert_served(&self, bytes_min: u64) {
        assert!(self.served_bytes >= bytes_min, "served too little:\n{}", self.lines);
        assert!(self.served_share() >= 0.95, "passed too much:\n{}", self.lines);
    }

    /// Files passed for a reason.
    pub fn passed_for(&self, reason: &str) -> u64 {
        self.lines
            .split_whitespace()
            .filter_map(|field| field.strip_prefix(&format!("passed:{reason}=")))
            .filter_map(|counts| counts.split('/').next()?.parse::<u64>().ok())
            .sum()
    }
}

impl Pond {
    pub fn new() -> Self {
        let totals = tempfile::tempfile().unwrap();
        totals.set_len(4096).unwrap();
        totals.write_all_at(b"mp-sum\x002", 0).unwrap();
        Self {
            served: tempfile::tempdir().unwrap(),
            aside: tempfile::tempdir().unwrap(),
            cache_bytes: 64 << 20,
            mode: Mode::Back,
            served_files: ServedFiles::Eager,
            totals,
        }
    }

    /// How a program finds the totals.
    fn totals_name(&self) -> String {
        let file = self.totals.metadata().unwrap();
        let (pid, fd) = (std::process::id(), self.totals.as_raw_fd());
        format!("/proc/{pid}/fd/{fd}:{}:{}", file.dev(), file.ino())
    }

    /// Has its served directory in `dir`.
    pub fn in_dir(dir: &Path) -> Self {
        Self { served: tempfile::tempdir_in(dir).unwrap(), ..Self::new() }
    }

    pub fn in_mode(self, mode: Mode) -> Self {
        Self { mode, ..self }
    }

    pub fn serving(self, served_files: ServedFiles) -> Self {
        Self { served_files, ..self }
    }

    pub fn with_cache_bytes(cache_bytes: u64) -> Self {
        Self { cache_bytes, ..Self::new() }
    }

    /// Ponds for tests that check only the program's result, not the served share: files are handed to the kernel at
    /// random moments, or read from the kernel's page cache.
    pub fn unmeasured() -> [Self; 4] {
        let pond = |mode, files| Self::new().in_mode(mode).serving(files);
        [
            pond(Mode::Back, ServedFiles::HandOver(1)),
            pond(Mode::BackDirect, ServedFiles::HandOver(2)),
            pond(Mode::Through, ServedFiles::Eager),
            pond(Mode::Through, ServedFiles::Default),
        ]
    }

    /// A path in the served directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.served.path().join(name)
    }

    /// A path outside it.
    pub fn aside(&self, name: &str) -> PathBuf {
        self.aside.path().join(name)
    }

    /// A command that runs in the served directory, on the kernel alone.
    pub fn plain(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        command.current_dir(self.served.path()).stdin(Stdio::null());
        command.env("LC_ALL", "C").env_remove("LD_PRELOAD");
        command
    }

    /// A command that runs in the served directory, under the library.
    pub fn served(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = self.plain(program);
        command
            .env("LD_PRELOAD", library())
            .env("MILLPOND_PATHS", self.served.path().canonicalize().unwrap())
            .env("MILLPOND_CACHE_BYTES", self.cache_bytes.to_string())
            .env("MILLPOND_TOTALS", self.totals_name())
            // Memory pressure by other programs of the machine shrinks no cache.
            .env("MILLPOND_PRESSURE_FILE", "/dev/null")
            .env("MILLPOND_QUIET", "1");
        match self.served_files {
            ServedFiles::Eager => command.env("MILLPOND_EAGER", "1"),
            ServedFiles::Default => &mut command,
            ServedFiles::HandOver(seed) => command.env("MILLPOND_HAND_OVER", seed.to_string()),
        };
        if self.mode == Mode::BackDirect {
            command.env("MILLPOND_BACKING", "direct");
        }
        if self.mode != Mode::Through {
            command.env("MILLPOND_MODE", "back");
            command.env("MILLPOND_KEEPER", keeper().to_string());
        }
        command
    }

    /// Runs a program under the library; it must succeed. Returns its output.
    #[track_caller]
    pub fn run(&self, program: &str, args: &[&str]) -> String {
        succeed(self.served(program).args(args))
    }

    /// The report since the last call.
    pub fn report(&self) -> Report {
        let mut words = [0; 8 * WORDS];
        self.totals.read_exact_at(&mut words, 8).unwrap();
        self.totals.write_all_at(&[0; 8 * WORDS], 8).unwrap();
        let word = |index: usize| u64::from_ne_bytes(words[8 * index..][..8].try_into().unwrap());
        let mut report = Report {
            served_files: word(SERVED_FILES),
            served_bytes: word(SERVED_BYTES),
            direct_reads: word(DIRECT_READS),
            direct_writes: word(DIRECT_WRITES),
            undirected_files: word(UNDIRECTED_FILES),
            shrunk: word(SHRUNK),
            ..Report::default()
        };
        for (index, (_, reason)) in REASONS.iter().enumerate() {
            // An addition may be lost of which the bytes were taken back.
            let bytes = word(PASSED_BYTES + index).cast_signed().max(0).cast_unsigned();
            let files = word(PASSED_FILES + index);
            report.passed_files += files;
            report.passed_bytes += bytes;
            if files != 0 || bytes != 0 {
                report.lines += &format!(" passed:{reason}={files}/{bytes}");
            }
        }
        report.lines = format!("{report:?}");
        report
    }

    /// Compiles a C program of `tests/programs`.
    pub fn compile(&self, source: &str, options: &[&str]) -> PathBuf {
        self.compile_with(source, options, &[])
    }

    /// Like `compile`, with libraries.
    pub fn compile_with(&self, source: &str, options: &[&str], libraries: &[&str]) -> PathBuf {
        require("gcc", "gcc");
        let binary = self.aside.path().join(Path::new(source).file_stem().unwrap());
        let programs = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs");
        let mut gcc = Command::new("gcc");
        gcc.args(["-w", "-pthread"]).args(options);
        gcc.arg("-o").arg(&binary).arg(programs.join(source)).args(libraries);
        assert!(gcc.status().unwrap().success(), "gcc failed on {source}");
        binary
    }
}

/// Runs a command that must succeed; returns its standard output.
#[track_caller]
pub fn succeed(command: &mut Command) -> String {
    let output = finish(command);
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// A command that takes longer hangs, also on a busy machine.
const HANG: Duration = Duration::from_secs(300);

/// Runs a command to its end; a hang ends it, with all its children.
pub fn finish(command: &mut Command) -> Output {
    use std::os::unix::process::CommandExt;
    command.process_group(0);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let pid = child.id();
    let (done, is_done) = std::sync::mpsc::channel::<()>();
    let watchdog = std::thread::spawn(move || {
        if is_done.recv_timeout(HANG).is_err() {
            let _ = Command::new("kill").args(["-9", &pid.to_string()]).status();
        }
    });
    let output = child.wait_with_output().unwrap();
    let _ = done.send(());
    watchdog.join().unwrap();
    output
}

/// Fails with the package's name if a program is missing: the set-up script installs it.
#[track_caller]
pub fn require(program: &str, package: &str) {
    let found = std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|dir| dir.join(program).exists()));
    assert!(found, "{program} is missing: install the package {package}");
}

/// Fails with the package's name if a shared library is missing.
#[track_caller]
pub fn require_library(name: &str, package: &str) {
    let listed = ["ldconfig", "/sbin/ldconfig"]
        .into_iter()
        .find_map(|program| Command::new(program).arg("-p").output().ok())
        .map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
        .unwrap_or_default();
    let found = listed.split_whitespace().any(|word| word == name);
    assert!(found, "{name} is missing: install the package {package}");
}

/// Numbered lines, which differ enough from each other that a shift is noticed.
pub fn lines(count: usize) -> Vec<u8> {
    (0..count)
        .flat_map(|n| format!("{} {n}\n", n * 2_654_435_761 % 1_000_003).into_bytes())
        .collect()
}
