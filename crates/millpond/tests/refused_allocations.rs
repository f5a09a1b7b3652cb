//! A heap that gives no large blocks: operations fail with an error, and none aborts the process.
//!
//! The test program's allocator refuses all blocks from [`REFUSED_BYTES`] on while a switch is on, as the heap does
//! under strict overcommit or at a limit on address space. Smaller blocks are outside of these tests: the standard
//! library ends a process that has no room for them.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::mpsc::channel;
use std::time::Duration;

use millpond::direct::{DirectRequest, SegmentList};
use millpond::file::AsyncCursor;
use millpond::keeper::{Address, Server};
use millpond::queue::Request;
use millpond::{AsyncFile, BackendChoice, Engine, Error, WriteMode};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use common::requests::each;
use common::{
    block_on, direct, hard_limit, has_uring, in_own_process, read_write, set_limit, status_field,
    temp_dir,
};

/// The engine takes smaller blocks for batches and for tables of fixed size.
const REFUSED_BYTES: usize = 96 << 10;

static IS_SHORT: AtomicBool = AtomicBool::new(false);

struct Heap;

// SAFETY: blocks are the system's, or refused.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.size() >= REFUSED_BYTES && IS_SHORT.load(SeqCst) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's duty.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static HEAP: Heap = Heap;

/// Runs `act` while the heap refuses large blocks.
fn short<R>(what: &str, act: impl FnOnce() -> R) -> R {
    println!("{what}");
    IS_SHORT.store(true, SeqCst);
    let done = act();
    IS_SHORT.store(false, SeqCst);
    done
}

#[track_caller]
fn is_no_memory<T>(outcome: &Result<T, Error>) -> bool {
    match outcome {
        Ok(_) => false,
        Err(error) => {
            assert_eq!(error.errno(), libc::ENOMEM, "{error}");
            true
        }
    }
}

const LEN: usize = 2 << 20;

fn content(at: usize) -> u8 {
    (at ^ at >> 12) as u8
}

/// Goal: an operation that needs a large block fails with ENOMEM, or does without the block. It
/// succeeds afterwards.
#[test]
fn large_blocks_that_are_refused_are_errors() {
    in_own_process("large_blocks_that_are_refused_are_errors", Duration::from_secs(120), || {
        // The other back ends keep the file itself on the heap.
        for backend in [BackendChoice::Threads, BackendChoice::Uring] {
            if matches!(backend, BackendChoice::Uring) && !has_uring() {
                continue;
            }
            for mode in [WriteMode::Through, WriteMode::Back] {
                println!("{backend:?}, {mode:?}");
                operations(backend.clone(), mode);
            }
        }
    });
}

fn operations(backend: BackendChoice, mode: WriteMode) {
    let dir = temp_dir();
    let path = dir.path().join("file");
    let whole: Vec<u8> = (0..LEN).map(content).collect();
    std::fs::write(&path, &whole).unwrap();
    let build = || Engine::builder().cache_bytes(1 << 30).backend(backend.clone()).build();
    let built = short("build", build);
    assert!(is_no_memory(&built), "there is a ghost of 2 MiB");
    let engine = build().unwrap();
    let options = read_write().write_mode(mode);
    let file = short("open", || engine.open(&path, &options)).unwrap();
    let file = Arc::new(file);
    let task = AsyncFile::from(Arc::clone(&file));
    let mut bytes = vec![0; LEN];

    let _ = is_no_memory(&short("asynchronous read", || block_on(task.read_at(&mut bytes, 0))));
    let _ = is_no_memory(&short("asynchronous write", || block_on(task.write_at(&whole, 0))));
    let _ =
        is_no_memory(&short("durable write", || block_on(task.write_at_dsync(&whole, LEN as u64))));
    let _ = is_no_memory(&short("asynchronous append", || block_on(task.append(&whole))));
    task.file().truncate(LEN as u64).unwrap();
    assert_eq!(short("read", || file.read_at(&mut bytes, 0)).unwrap(), LEN);
    assert!(bytes == whole);
    short("write", || file.write_all_at(&whole, 0)).unwrap();
    short("sync", || file.sync_all()).unwrap();
    let mut cursor = AsyncCursor::new(task.clone());
    let errno = |outcome: std::io::Result<usize>| outcome.unwrap_err().raw_os_error();
    let written = short("cursor write", || block_on(cursor.write(&whole)));
    assert_eq!(errno(written), Some(libc::ENOMEM));
    file.invalidate(0, LEN as u64).unwrap();
    let read = short("cursor read", || block_on(cursor.read(&mut bytes)));
    assert_eq!(errno(read), Some(libc::ENOMEM));
    assert!(block_on(cursor.read(&mut bytes)).unwrap() > 0);
    drop(cursor);
    let _ = is_no_memory(&short("view", || file.view(0, LEN).map(drop)));
    short("punch", || file.punch_hole(0, LEN as u64)).unwrap();
    short("zero", || file.zero_range(0, LEN as u64)).unwrap();
    short("invalidate", || file.invalidate(0, LEN as u64)).unwrap();
    file.write_all_at(&whole, 0).unwrap();
    file.sync_all().unwrap();
    short("miss", || {
        file.invalidate(0, LEN as u64).unwrap();
        assert_eq!(file.read_at(&mut bytes, 0).unwrap(), LEN);
    });
    assert!(bytes == whole);
    short("dump", || engine.dump());
    short("stats", || engine.stats());

    let queue = short("queue", || engine.queue(1 << 20));
    let _ = is_no_memory(&queue);
    let queue = engine.queue(1 << 16).unwrap();
    // With more requests, the list of completions is a large block, as the list of requests is.
    let many = 512;
    let mut requests: Vec<Request> =
        (0..many).map(|at| Request::read(&file, vec![0; 4096], at * 4096)).collect();
    let done = short("queue requests", || {
        let submitted = requests.len();
        queue.submit_all(std::mem::take(&mut requests)).unwrap();
        let mut left = submitted;
        while left > 0 {
            let done = queue.wait(1, 64, None).unwrap();
            assert!(!done.is_empty());
            left -= done.len();
            for request in done {
                let (outcome, _) = request.into_parts();
                outcome.unwrap();
            }
        }
        submitted
    });
    assert!(done > 0);

    let _ = is_no_memory(&short("buffers", || engine.alloc_buffers(1 << 16, 4096)));
    let _ = is_no_memory(&short("pipeline", || engine.pipeline(4096)));
    let blob = engine.blob(LEN as u64, 4096).unwrap();
    short("blob", || {
        for fill in blob.claim(0..LEN as u64).fills {
            let range = fill.range();
            fill.bring(&whole[range.start as usize..range.end as usize]);
        }
    });
    let mut read = Vec::new();
    assert!(!short("blob read", || blob.try_read(&mut read, 0..LEN as u64)));
    drop(file);
    drop(task);
    let Ok(direct) = engine.open(&path, &direct().bounce(true)) else {
        return common::skip("no direct I/O");
    };
    let odd = &mut bytes[1..LEN - 7];
    let outcome = short("bounced read", || direct.read_at(odd, 1));
    assert!(is_no_memory(&outcome), "a bounce buffer is a large block");
    assert_eq!(direct.read_at(odd, 1).unwrap(), odd.len());
    assert!(*odd == whole[1..LEN - 7]);
    let outcome = short("bounced write", || direct.write_at(&whole[1..][..LEN / 2], 4096));
    assert!(is_no_memory(&outcome), "a bounce buffer is a large block");
    assert_eq!(direct.write_at(&whole[1..][..LEN / 2], 4096).unwrap(), LEN / 2);
    let memory = engine.alloc_buffers(1, 4096).unwrap();
    let mut pipeline = engine.pipeline(4096).unwrap();
    short("pipeline run", || {
        let mut next = Some(&memory[0]);
        each(&mut pipeline, |done| {
            if let Some(done) = done {
                assert_eq!(done.outcome.unwrap(), 4096);
            }
            Some(DirectRequest::write(&direct, SegmentList::from_slice(next.take()?), 0))
        });
    });
}

const ROLE: &str = "MILLPOND_TEST_KEPT_WRITER";
/// The list of so many dirty pages is a large block.
const DIRTY_PAGES: usize = 8192;
const PAGE: usize = 4096;

/// The writer: leaves every other page dirty, and waits for its end.
#[test]
#[ignore = "a role, in which another test starts this program"]
fn writer() {
    let role = std::env::var(ROLE).unwrap();
    let (address, path) = role.split_once('|').unwrap();
    let builder = Engine::builder().cache_bytes(256 << 20).backend(BackendChoice::Threads);
    let engine = builder.keeper(address.parse::<Address>().unwrap()).build().unwrap();
    let file = engine.open(path, &read_write().write_mode(WriteMode::Back)).unwrap();
    for page in 0..DIRTY_PAGES {
        file.write_all_at(&[1; PAGE], (2 * page * PAGE) as u64).unwrap();
    }
    println!("\nready");
    loop {
        std::thread::park();
    }
}

/// Goal: a keeper that has no memory for the list of a dead process's dirty pages tries again, reports the pages as lost
/// after its patience, and keeps the files of other processes.
#[test]
fn a_keeper_without_memory_reports_the_pages() {
    in_own_process("a_keeper_without_memory_reports_the_pages", Duration::from_secs(120), || {
        let dir = temp_dir();
        let server = Server::bind(&Address::unique()).unwrap();
        let (address, stopper) = (server.address().clone(), server.stopper());
        let (send, reports) = channel();
        std::thread::spawn(move || server.serve(|report| send.send(report).unwrap()));
        for (name, short_for) in [("retried", Some(Duration::from_secs(1))), ("lost", None)] {
            let path = dir.path().join(name);
            std::fs::write(&path, b"").unwrap();
            let mut child = Command::new(std::env::current_exe().unwrap())
                .args(["writer", "--exact", "--ignored", "--nocapture"])
                .env(ROLE, format!("{address}|{}", path.display()))
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let said = BufReader::new(child.stdout.take().unwrap());
            assert!(said.lines().any(|line| line.unwrap().contains("ready")), "the writer ended");
            let report = short(name, || {
                child.kill().unwrap();
                child.wait().unwrap();
                if let Some(time) = short_for {
                    std::thread::sleep(time);
                    IS_SHORT.store(false, SeqCst);
                }
                reports.recv_timeout(Duration::from_secs(60)).unwrap()
            });
            println!("{report}");
            let [file] = &report.files[..] else { panic!("one file") };
            if short_for.is_some() {
                assert_eq!(file.failures.len(), 0);
                let found = std::fs::read(&path).unwrap();
                let is_dirty = |page: usize| page.is_multiple_of(2);
                for (page, bytes) in found.chunks(PAGE).enumerate() {
                    assert_eq!(bytes, [u8::from(is_dirty(page)); PAGE], "{page}");
                }
                assert_eq!(found.len(), (2 * DIRTY_PAGES - 1) * PAGE);
            } else {
                let errno = file.failures[0].error.raw_os_error();
                assert_eq!(errno, Some(libc::ENOMEM));
            }
        }
        stopper.stop_when_idle();
    });
}

fn vm_data_bytes() -> u64 {
    status_field(Path::new("/proc/self/status"), "VmData").unwrap() << 10
}

/// Accepts errors of memory and of threads, which need memory for their stacks.
#[track_caller]
fn accept<T>(what: &str, outcome: Result<T, Error>) -> Option<T> {
    match outcome {
        Ok(done) => Some(done),
        Err(error) => {
            let errno = error.errno();
            assert!(
                [libc::ENOMEM, libc::EAGAIN, libc::ENOBUFS].contains(&errno),
                "{what}: {error}"
            );
            None
        }
    }
}

/// Goal: a process that may not commit more memory gets errors from the engine at any stage, and is
/// not ended.
/// Method: `RLIMIT_DATA` counts for one process the same memory as strict overcommit
/// (`vm.overcommit_memory=2`). An engine is built and used with increasing limits.
#[test]
fn a_limit_on_committed_memory_is_an_error() {
    in_own_process("a_limit_on_committed_memory_is_an_error", Duration::from_secs(300), || {
        let dir = temp_dir();
        let path = dir.path().join("file");
        let whole: Vec<u8> = (0..LEN).map(content).collect();
        let mut bytes = vec![0; LEN];
        let (mut refused, mut built) = (0, 0);
        let most = hard_limit(libc::RLIMIT_DATA);
        for slack_bytes in (0..9).map(|power| (1u64 << 20) << power) {
            for backend in [BackendChoice::Threads, BackendChoice::Uring] {
                if matches!(backend, BackendChoice::Uring) && !has_uring() {
                    continue;
                }
                let modes = [WriteMode::Through, WriteMode::Back];
                for (mode, cache_bytes) in
                    modes.map(|mode| [(mode, 64 << 20), (mode, 1 << 30)]).concat()
                {
                    std::fs::write(&path, &whole).unwrap();
                    let limit = vm_data_bytes() + slack_bytes;
                    assert!(set_limit(libc::RLIMIT_DATA, limit.min(most), most));
                    let builder =
                        Engine::builder().cache_bytes(cache_bytes).backend(backend.clone());
                    match accept("build", builder.build()) {
                        Some(engine) => {
                            built += 1;
                            use_engine(&engine, &path, mode, &whole, &mut bytes);
                        }
                        None => refused += 1,
                    }
                    assert!(set_limit(libc::RLIMIT_DATA, most, most));
                    assert!(std::fs::read(&path).unwrap() == whole, "{backend:?}, {mode:?}");
                }
            }
        }
        println!("{refused} engines were refused, {built} built");
        assert!(refused > 0 && built > 0);
    });
}

/// All writes store the bytes that the file has already.
fn use_engine(engine: &Engine, path: &Path, mode: WriteMode, whole: &[u8], bytes: &mut [u8]) {
    let Some(file) = accept("open", engine.open(path, &read_write().write_mode(mode))) else {
        return;
    };
    let file = Arc::new(file);
    let task = AsyncFile::from(Arc::clone(&file));
    if accept("read", file.read_at(bytes, 0)).is_some() {
        assert!(bytes == whole);
    }
    accept("write", file.write_at(whole, 0));
    accept("asynchronous read", block_on(task.read_at(bytes, 0)));
    accept("asynchronous write", block_on(task.write_at(whole, 0)));
    accept("durable write", block_on(task.write_at_dsync(&whole[..8192], 0)));
    accept("view", file.view(0, LEN).map(drop));
    accept("sync", block_on(task.sync_all()));
    if let Some(queue) = accept("queue", engine.queue(256)) {
        let request = |at: u64| Request::read(&file, vec![0; 4096], at * 4096);
        let requests: Vec<Request> = (0..64).map(request).collect();
        let mut left = requests.len();
        queue.submit_all(requests).unwrap();
        while left > 0 {
            for done in queue.wait(1, 64, None).unwrap() {
                left -= 1;
                accept("queued read", done.into_parts().0);
            }
        }
    }
    accept("buffers", engine.alloc_buffers(16, 1 << 20));
    if let Some(blob) = accept("blob", engine.blob(LEN as u64, 4096)) {
        for fill in blob.claim(0..LEN as u64).fills {
            let range = fill.range();
            fill.bring(&whole[range.start as usize..range.end as usize]);
        }
    }
    let direct = direct().bounce(true);
    if let Ok(direct) = engine.open(path, &direct) {
        accept("bounced write", direct.write_at(&whole[4096..][..LEN / 2], 4096));
        if let (Some(mut pipeline), Some(memory)) = (
            accept("pipeline", engine.pipeline(64)),
            accept("buffers", engine.alloc_buffers(1, 8192)),
        ) {
            let mut left = 100;
            let mut memory = memory.into_iter().map(|mut buffer| {
                buffer.copy_from_slice(&whole[..8192]);
                buffer
            });
            let mut next = memory.next().map(|buffer| SegmentList::from_buffers(vec![buffer]));
            each(&mut pipeline, |done| {
                if let Some(done) = done {
                    accept("direct write", done.outcome);
                }
                left -= 1;
                let list = next.take().filter(|_| left > 0)?;
                Some(DirectRequest::write(&direct, list, 0))
            });
        }
    }
    // With memory again the dirty pages are written back.
    let most = hard_limit(libc::RLIMIT_DATA);
    assert!(set_limit(libc::RLIMIT_DATA, most, most));
    file.sync_all().unwrap();
    file.read_exact_at(bytes, 0).unwrap();
    assert!(bytes == whole);
}
