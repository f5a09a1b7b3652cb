//! Rings that the kernel refuses after they were set up: a program enters a sandbox without
//! `io_uring_enter`, or closes descriptors that it does not know.
//!
//! Incident: a thread that submitted to such a ring, or waited for it, retried without end while it
//! held guards.

mod common;

use std::io::Read;
use std::os::fd::RawFd;
use std::path::Path;
use std::sync::{Arc, Barrier};
use std::time::Duration;

use millpond::direct::{DirectRequest, SegmentList};
use millpond::queue::{Completion, Request};
use millpond::{Advice, AsyncFile, BackendChoice, Backing, Engine, File, OpenOptions};

use common::{block_on, engine, has_uring, in_own_process, read_write, temp_dir};

const FILE_BYTES: usize = 8 << 20;
const PAGE: usize = 4096;
const LIMIT: Duration = Duration::from_secs(120);

fn byte_at(at: usize) -> u8 {
    (at % 251) as u8
}

fn content(at: usize, len: usize) -> Vec<u8> {
    (at..at + len).map(byte_at).collect()
}

/// Enters a sandbox like those of containers: rings exist, and `io_uring_enter` is refused from now
/// on.
fn enter_sandbox() {
    refuse(libc::SYS_io_uring_enter);
}

/// Makes a system call fail with EPERM, in all threads.
fn refuse(call: libc::c_long) {
    let load = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    let jump = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    let done = libc::BPF_RET | libc::BPF_K;
    let line =
        |code: u32, jt: u8, jf: u8, k: u32| libc::sock_filter { code: code as u16, jt, jf, k };
    let mut filter = [
        // The number of the system call is the first word.
        line(load, 0, 0, 0),
        line(jump, 0, 1, call as u32),
        line(done, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
        line(done, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    let (mode, all) = (libc::SECCOMP_SET_MODE_FILTER, libc::SECCOMP_FILTER_FLAG_TSYNC);
    // SAFETY: the program is valid for the call.
    let entered = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        libc::syscall(libc::SYS_seccomp, mode, all, &raw const program)
    };
    assert_eq!(entered, 0, "{}", std::io::Error::last_os_error());
}

/// Closes the descriptors of all rings.
fn close_rings() {
    let rings: Vec<RawFd> = std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|entry| {
            let entry = entry.ok()?;
            let target = std::fs::read_link(entry.path()).ok()?;
            let is_ring = target.to_string_lossy().contains("io_uring");
            is_ring.then(|| entry.file_name().to_str()?.parse().ok()).flatten()
        })
        .collect();
    assert!(!rings.is_empty());
    for ring in rings {
        // SAFETY: no memory. These descriptors belong to the engine, and closing them is the
        // purpose of the test.
        let closed = unsafe { libc::syscall(libc::SYS_close_range, ring, ring, 0) };
        assert_eq!(closed, 0);
    }
}

/// An engine all of whose rings have been used.
struct Used {
    engine: Engine,
    file: Arc<File>,
    queue: millpond::queue::Queue,
    _dir: tempfile::TempDir,
}

impl Used {
    fn new() -> Used {
        let dir = temp_dir();
        let path = dir.path().join("file");
        std::fs::write(&path, content(0, FILE_BYTES)).unwrap();
        let engine = engine(4 << 20, BackendChoice::Uring);
        let file = Arc::new(engine.open(&path, &read_write()).unwrap());
        let queue = engine.queue(64).unwrap();
        let used = Used { engine, file, queue, _dir: dir };
        used.use_all();
        used
    }

    fn path(&self) -> std::path::PathBuf {
        self._dir.path().join("file")
    }

    fn forget(&self) {
        self.file.advise(0, 0, Advice::DontNeed).unwrap();
    }

    fn requests(&self, seed: usize) -> Vec<Request> {
        let request = |number: usize| {
            let at = ((number * 97 + seed * 31) % 2000) * PAGE + 5;
            Request::read(&self.file, vec![0; 5000], at as u64).user_data(at as u64)
        };
        (0..64).map(request).collect()
    }

    fn submit(&self, seed: usize) {
        self.queue.submit_all(self.requests(seed)).unwrap();
    }

    fn reap(&self) {
        self.queue.wait(64, 64, None).unwrap().into_iter().for_each(check);
    }

    /// Reads by each of the rings.
    fn use_all(&self) {
        // The thread's ring: several runs.
        self.forget();
        let mut bytes = vec![0; 40 * PAGE];
        self.file.advise(0, 0, Advice::Random).unwrap();
        for page in (0..40).step_by(3) {
            self.file.read_at(&mut bytes[..1], (page * PAGE) as u64).unwrap();
        }
        self.file.read_exact_at(&mut bytes, 0).unwrap();
        assert!(bytes == content(0, bytes.len()));
        // The driver's ring: read-ahead, and futures.
        self.file.advise(4 << 20, 1 << 20, Advice::WillNeed).unwrap();
        let handle = self.engine.open(self.path(), &read_write()).unwrap();
        let asynchronous = AsyncFile::from(handle);
        for page in [1000, 1100, 1200] {
            let mut bytes = vec![0; 2 * PAGE];
            let read = asynchronous.read_at(&mut bytes, (page * PAGE) as u64);
            assert_eq!(block_on(read).unwrap(), 2 * PAGE);
            assert!(bytes == content(page * PAGE, 2 * PAGE));
        }
        // Of the queue.
        self.forget();
        self.submit(1);
        self.reap();
        self.forget();
        self.submit_and_reap(3);
    }

    /// A few at a time, in the call that waits for them.
    fn submit_and_reap(&self, seed: usize) {
        for round in 0..10 {
            let requests = self.requests(seed + round).split_off(56);
            let (done, rest) = self.queue.submit_and_wait(requests, 8, 8, None).unwrap();
            assert_eq!((done.len(), rest.len()), (8, 0));
            done.into_iter().for_each(check);
        }
    }
}

fn check(done: Completion) {
    let at = done.user_data() as usize;
    let (outcome, bytes) = done.into_parts();
    assert_eq!(outcome.unwrap(), 5000);
    assert!(bytes == content(at, 5000));
}

/// Many direct reads under way at once, after some of which `breaks` is called.
fn use_a_pipeline(engine: &Engine, path: &Path, breaks: impl FnOnce()) {
    let file = match engine.open(path, &OpenOptions::new().read(true).direct(true)) {
        Ok(file) => file,
        Err(error) => return common::skip(error),
    };
    let mut buffers = engine.alloc_buffers(16, 16 * PAGE).unwrap();
    let mut breaks = Some(breaks);
    let (mut next, mut ended) = (0, 0);
    let total = 120;
    let mut at = [0; 16];
    engine.pipeline(16).unwrap().run(|lane| {
        let at = &mut at[lane.number()];
        let request = lane.into_ended().map(|(request, outcome)| {
            assert_eq!(outcome.unwrap(), 16 * PAGE);
            let bytes: Vec<u8> = request.slices().flatten().copied().collect();
            assert!(bytes == content(*at, bytes.len()));
            ended += 1;
            request
        });
        if next == 40
            && let Some(breaks) = breaks.take()
        {
            breaks();
        }
        if next == total {
            return None;
        }
        *at = next * 16 * PAGE;
        next += 1;
        let mut request = request.unwrap_or_else(|| {
            let list = SegmentList::from_buffers(buffers.pop().into_iter().collect());
            DirectRequest::read(&file, list, *at as u64)
        });
        request.set_offset(*at as u64);
        Some(request)
    });
    assert_eq!(ended, total);
}

fn in_use(name: &str, breaks: fn()) {
    in_own_process(name, Duration::from_secs(120), || {
        if !has_uring() {
            return;
        }
        let used = Used::new();
        // Some in flight, and a thread asleep in the queue's ring.
        used.forget();
        used.submit(2);
        std::thread::scope(|scope| {
            scope.spawn(|| used.reap());
            breaks();
        });
        for _ in 0..3 {
            used.use_all();
        }
        drop(used);
    });
}

/// Goal: all operations in flight, and all later ones, end with their bytes.
#[test]
fn operations_continue_in_a_sandbox_without_rings() {
    in_use("operations_continue_in_a_sandbox_without_rings", enter_sandbox);
}

/// Goal: the same for reads that are submitted by the call in which their waiter sleeps, if that
/// call is refused first, with several threads in it.
#[test]
fn reads_submitted_with_their_wait_continue_without_rings() {
    in_own_process("reads_submitted_with_their_wait_continue_without_rings", LIMIT, || {
        if !has_uring() {
            return;
        }
        let used = Used::new();
        used.forget();
        let barrier = Barrier::new(3);
        std::thread::scope(|scope| {
            for seed in 0..2 {
                let (used, barrier) = (&used, &barrier);
                scope.spawn(move || {
                    for round in 0..200 {
                        if round == 20 {
                            barrier.wait();
                        }
                        let requests = used.requests(seed + 2 * round).split_off(61);
                        // As many completions as it submits requests; they may be another thread's.
                        let waited = used.queue.submit_and_wait(requests, 3, 3, None);
                        waited.unwrap().0.into_iter().for_each(check);
                        if round % 50 == 0 {
                            used.forget();
                        }
                    }
                });
            }
            barrier.wait();
            enter_sandbox();
        });
        assert_eq!(used.queue.counts(), (0, 0));
    });
}

/// The same.
#[test]
fn operations_continue_without_ring_descriptors() {
    in_use("operations_continue_without_ring_descriptors", close_rings);
}

/// Goal: the same for a pipeline, in the middle of its run.
#[test]
fn a_pipeline_continues_in_a_sandbox_without_rings() {
    let name = "a_pipeline_continues_in_a_sandbox_without_rings";
    in_own_process(name, Duration::from_secs(60), || {
        if has_uring() {
            let used = Used::new();
            use_a_pipeline(&used.engine, &used.path(), enter_sandbox);
            use_a_pipeline(&used.engine, &used.path(), || {});
        }
    });
}

/// The same.
#[test]
fn a_pipeline_continues_without_ring_descriptors() {
    let name = "a_pipeline_continues_without_ring_descriptors";
    in_own_process(name, Duration::from_secs(60), || {
        if has_uring() {
            let used = Used::new();
            use_a_pipeline(&used.engine, &used.path(), close_rings);
        }
    });
}

/// Goal: an engine works without rings where the kernel refuses to set them up or to enter them,
/// and its report has the reason. A builder that requires io_uring gets an error.
fn builds_without_rings(name: &str, call: libc::c_long) {
    in_own_process(name, Duration::from_secs(60), || {
        refuse(call);
        let dir = temp_dir();
        let path = dir.path().join("file");
        std::fs::write(&path, content(0, 10_000)).unwrap();
        let engine = engine(1 << 20, BackendChoice::Auto);
        let stats = engine.stats();
        assert_eq!(stats.back_end, "threads");
        let why = std::io::Error::from_raw_os_error(libc::EPERM).to_string();
        let reason = stats.back_end_reason;
        assert!(reason.contains("io_uring") && reason.contains(&why), "{reason}");
        let asked = Engine::builder().cache_bytes(1 << 20).backend(BackendChoice::Uring).build();
        assert_eq!(asked.unwrap_err().errno(), libc::EPERM);
        for backing in [Backing::Buffered, Backing::Direct] {
            let file = match engine.open(&path, &read_write().backing(backing)) {
                Ok(file) => file,
                Err(error) => return common::skip(format_args!("{backing:?}: {error}")),
            };
            let mut bytes = vec![0; 10_000];
            file.read_exact_at(&mut bytes, 0).unwrap();
            assert!(bytes == content(0, 10_000));
            file.write_all_at(&content(1, 5000), 1).unwrap();
            file.sync_all().unwrap();
            drop(file);
            let mut below = Vec::new();
            std::fs::File::open(&path).unwrap().read_to_end(&mut below).unwrap();
            assert!(bytes == below);
        }
    });
}

#[test]
fn an_engine_is_made_where_rings_cannot_be_entered() {
    let name = "an_engine_is_made_where_rings_cannot_be_entered";
    builds_without_rings(name, libc::SYS_io_uring_enter);
}

#[test]
fn an_engine_is_made_where_rings_cannot_be_set_up() {
    let name = "an_engine_is_made_where_rings_cannot_be_set_up";
    builds_without_rings(name, libc::SYS_io_uring_setup);
}
