//! Shared helpers of the integration tests.
#![allow(dead_code, unused_imports, reason = "each test file uses a part of it")]

pub mod mount;
pub mod own_client;
pub mod requests;
mod skip;

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use millpond::sim::{SimDevice, SimOptions};
use millpond::{Admission, BackendChoice, Engine, EngineBuilder, File, OpenOptions, WriteMode};

pub use skip::skip;

/// A directory on a real disk, removed at the end.
pub fn temp_dir() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// How much longer and larger than by default the random tests are: MILLPOND_TEST_SCALE.
pub fn scale() -> f64 {
    std::env::var("MILLPOND_TEST_SCALE").ok().and_then(|scale| scale.parse().ok()).unwrap_or(1.0)
}

pub fn scaled(n: u32) -> u32 {
    ((f64::from(n) * scale()) as u32).max(1)
}

/// How long a stress test of `seconds` runs, by the scale.
pub fn stress_time(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds * scale())
}

/// SplitMix64 (Steele et al., OOPSLA 2014).
pub struct Random(pub u64);

impl Random {
    /// Seeded by MILLPOND_TEST_SEED or the clock; says so, for a replay.
    pub fn from_environment() -> Random {
        let seed = std::env::var("MILLPOND_TEST_SEED").ok().and_then(|seed| seed.parse().ok());
        let seed = seed.unwrap_or_else(|| {
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
            now.as_nanos() as u64
        });
        println!("MILLPOND_TEST_SEED={seed}");
        Random(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, below: u64) -> u64 {
        self.next() % below.max(1)
    }

    pub fn chance(&mut self, per_mille: u64) -> bool {
        self.below(1000) < per_mille
    }

    pub fn fork(&mut self) -> Random {
        Random(self.next())
    }
}

/// A limit with room for `pages` pages of `page_bytes`, the tables of a small file and a slab.
pub fn cache_for(pages: u64, page_bytes: u64) -> u64 {
    let page = page_bytes + page_bytes / 4096 * 32;
    let bytes = pages * page + 3 * 4128 + 1024;
    // The ghost takes up to 16 bytes for each 4 KiB of the limit.
    (bytes + bytes / 200 + 64).max(16384)
}

pub fn read_write() -> OpenOptions {
    OpenOptions::new().read(true).write(true).create(true)
}

pub fn direct() -> OpenOptions {
    read_write().direct(true)
}

/// Whether io_uring works here; where it does not, that is a skip.
#[track_caller]
pub fn has_uring() -> bool {
    let built = Engine::builder().cache_bytes(16384).backend(BackendChoice::Uring).build();
    if let Err(error) = &built {
        skip(format_args!("io_uring: {error}"));
    }
    built.is_ok()
}

/// Every back end that works here, by name.
#[track_caller]
pub fn back_ends(seed: u64) -> Vec<(&'static str, BackendChoice)> {
    let sim = SimOptions::new(seed).delay_us_max(100).short_per_mille(200);
    let mut all = vec![
        ("threads", BackendChoice::Threads),
        ("memory", BackendChoice::Memory),
        ("sim", BackendChoice::Sim(sim)),
    ];
    if has_uring() {
        all.insert(0, ("uring", BackendChoice::Uring));
    }
    all
}

/// The back ends that have direct I/O here, by name; the others are skips.
#[track_caller]
pub fn back_ends_with_direct(seed: u64) -> Vec<(&'static str, BackendChoice)> {
    let dir = temp_dir();
    let mut all = back_ends(seed);
    all.retain(|(name, backend)| {
        let path = dir.path().join(name);
        let opened = engine(1 << 20, backend.clone()).open(&path, &direct());
        if let Err(error) = &opened {
            skip(format_args!("{name}: {error}"));
        }
        opened.is_ok()
    });
    all
}

/// Whether that back end transfers bytes to and from a real file.
pub fn is_on_disk(name: &str) -> bool {
    matches!(name, "uring" | "threads")
}

pub fn engine(cache_bytes: u64, backend: BackendChoice) -> Engine {
    builder(cache_bytes, backend).build().unwrap()
}

pub fn builder(cache_bytes: u64, backend: BackendChoice) -> EngineBuilder {
    Engine::builder().cache_bytes(cache_bytes).backend(backend).admission(admission())
}

/// Admission policy of the tests' engines: the default, unless `MILLPOND_TEST_ADMISSION` sets
/// another one.
pub fn admission() -> Admission {
    match std::env::var("MILLPOND_TEST_ADMISSION").as_deref() {
        Ok("never") => Admission::Never,
        Ok("always") => Admission::Always,
        Ok(other) => panic!("MILLPOND_TEST_ADMISSION={other}: never or always"),
        Err(_) => Admission::Adaptive,
    }
}

pub fn write_back() -> OpenOptions {
    read_write().write_mode(WriteMode::Back)
}

/// A file on a simulated device, with its engine, device and directory.
pub struct Simulated {
    pub file: File,
    pub engine: Engine,
    pub device: SimDevice,
    pub path: PathBuf,
    errors: Arc<AtomicBool>,
    _dir: tempfile::TempDir,
}

impl Simulated {
    /// An empty file, in a cache of `cache_bytes`.
    pub fn new(sim: SimOptions, cache_bytes: u64, options: &OpenOptions) -> Simulated {
        Simulated::with(sim, &Engine::builder().cache_bytes(cache_bytes), options)
    }

    pub fn with(sim: SimOptions, builder: &EngineBuilder, options: &OpenOptions) -> Simulated {
        let dir = temp_dir();
        let path = dir.path().join("file");
        let (device, errors) = (sim.device(), sim.errors_switch());
        let engine = builder.clone().backend(BackendChoice::Sim(sim)).build().unwrap();
        let file = engine.open(&path, options).unwrap();
        Simulated { file, engine, device, path, errors, _dir: dir }
    }

    pub fn errors(&self, on: bool) {
        self.errors.store(on, SeqCst);
    }

    /// Once no request fails, a sync succeeds, and then exactly the bytes `expected` are read, on
    /// the device, and durable.
    pub fn assert_stored(&self, expected: &[u8]) {
        self.errors(false);
        sync_until_success(&self.file);
        self.is_durable(expected);
        let mut bytes = vec![0; expected.len() + 1];
        assert_eq!(self.file.read_at(&mut bytes, 0).unwrap(), expected.len());
        same(&bytes[..expected.len()], expected, "read");
        same(&self.device.image(), expected, "image");
        assert_eq!(self.device.violations(), [""; 0]);
    }

    pub fn is_durable(&self, expected: &[u8]) {
        same(&self.device.durable(), expected, "durable");
        same(&self.device.crash(1), expected, "after a crash");
    }
}

/// Syncs until a sync succeeds. Earlier syncs may return an error of an earlier operation.
pub fn sync_until_success(file: &File) {
    if let Err(first) = file.sync_all() {
        file.sync_all().unwrap_or_else(|error| panic!("sync: {first}, and then: {error}"));
    }
}

/// Panics with the first difference of two contents.
pub fn same(seen: &[u8], expected: &[u8], what: &str) {
    if seen != expected {
        let at = seen.iter().zip(expected).position(|(one, other)| one != other);
        let lens = (seen.len(), expected.len());
        let pair = at.map(|at| (seen[at], expected[at]));
        panic!("{what}: differs at {at:?}, {pair:x?}; lengths {lens:?}");
    }
}

const INSIDE: &str = "MILLPOND_TEST_INSIDE";

/// Runs `body` in a child process, which is this test program with only `test` to run. For tests
/// that concern a whole process: limits, signal handlers, memory. `test` is the full name of the
/// calling test. Fails if the child fails, or takes longer than `limit`.
pub fn in_own_process(test: &str, limit: Duration, body: impl FnOnce()) {
    if std::env::var(INSIDE).is_ok_and(|inside| inside == test) {
        return body();
    }
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture", "--include-ignored", "--test-threads=1"])
        .env(INSIDE, test)
        // Pipes, not the parent's output: if that is a file, a limit on file sizes would stop the
        // reports.
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let outputs = [relay_output(child.stdout.take()), relay_output(child.stderr.take())];
    let started = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            let ran = outputs.map(|output| output.join().unwrap()).contains(&true);
            assert!(status.success(), "{test}: {status}");
            assert!(ran, "there is no test {test}");
            return;
        }
        if started.elapsed() > limit {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("{test}: still running after {limit:?}: a deadlock?");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Prints the output of a child process; returns whether the child reported that it runs its test.
fn relay_output(output: Option<impl Read + Send + 'static>) -> std::thread::JoinHandle<bool> {
    std::thread::spawn(move || {
        let mut runs = false;
        for line in BufReader::new(output.expect("a pipe")).lines().map_while(Result::ok) {
            println!("{line}");
            runs |= line == "running 1 test";
        }
        runs
    })
}

/// Runs `body` on another thread; fails if it takes longer than `limit`.
pub fn within(limit: Duration, what: &str, body: impl FnOnce() + Send + 'static) {
    let (done, ended) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        body();
        let _ = done.send(());
    });
    match ended.recv_timeout(limit) {
        Err(std::sync::mpsc::RecvTimeoutError::Timeout) => {
            panic!("{what}: still running after {limit:?}: a deadlock?")
        }
        _ => {
            if let Err(panic) = thread.join() {
                std::panic::resume_unwind(panic);
            }
        }
    }
}

/// Runs `body`, and sets `stop` afterwards, also after a panic.
pub fn run_and_stop<T>(stop: &AtomicBool, body: impl FnOnce() -> T) -> T {
    struct Stop<'a>(&'a AtomicBool);
    impl Drop for Stop<'_> {
        fn drop(&mut self) {
            self.0.store(true, SeqCst);
        }
    }
    let _stop = Stop(stop);
    body()
}

/// A field of a `status` file below /proc/self, in the file's own unit.
pub fn status_field(path: &Path, field: &str) -> Option<u64> {
    let text = std::fs::read_to_string(path).ok()?;
    let line = text.lines().find(|line| line.starts_with(field))?;
    line[field.len()..].trim_start_matches(':').split_whitespace().next()?.parse().ok()
}

pub fn rss_bytes() -> u64 {
    status_field(Path::new("/proc/self/status"), "VmRSS").unwrap() * 1024
}

/// The threads of this process: id and name.
pub fn threads() -> Vec<(u64, String)> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    tasks
        .filter_map(|task| {
            let path: PathBuf = task.ok()?.path();
            let id = path.file_name()?.to_str()?.parse().ok()?;
            Some((id, std::fs::read_to_string(path.join("comm")).ok()?.trim().to_string()))
        })
        .collect()
}

/// Voluntary and other context switches of a thread of this process.
pub fn context_switches(thread: u64) -> (u64, u64) {
    let path = PathBuf::from(format!("/proc/self/task/{thread}/status"));
    let field = |name| status_field(&path, name).unwrap_or(0);
    (field("voluntary_ctxt_switches"), field("nonvoluntary_ctxt_switches"))
}

/// Sets a limit of this process.
pub fn set_limit(resource: libc::__rlimit_resource_t, soft: u64, hard: u64) -> bool {
    let limit = libc::rlimit { rlim_cur: soft, rlim_max: hard };
    // SAFETY: the argument is valid for the call.
    unsafe { libc::setrlimit(resource, &limit) == 0 }
}

/// The hard limit of this process.
pub fn hard_limit(resource: libc::__rlimit_resource_t) -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the argument is valid for the call.
    assert_eq!(unsafe { libc::getrlimit(resource, &mut limit) }, 0);
    limit.rlim_max
}

/// Wakes a thread.
struct Unpark(std::thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// A runtime of a single thread. A lost wake-up shows as a hang.
pub fn block_on<F: Future>(future: F) -> F::Output {
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(done) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return done;
        }
        std::thread::park();
    }
}
