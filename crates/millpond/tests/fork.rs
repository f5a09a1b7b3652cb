//! A fork while the engine has operations in flight. A separate test program: a child has one
//! thread only, and must not touch operations of its parent's other threads.

mod common;

use std::ffi::CString;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use millpond::queue::{Queue, Request};
use millpond::sim::SimOptions;
use millpond::{Advice, BackendChoice, Backing, Engine, Error, File, View, WriteMode};

use common::{Random, has_uring, in_own_process, read_write, temp_dir};

const PAGE: u64 = 4096;
const FILE_BYTES: u64 = 8 << 20;

fn byte_at(offset: u64) -> u8 {
    (offset.wrapping_mul(41) ^ (offset >> 12).wrapping_mul(19)) as u8
}

fn content(offset: u64, len: usize) -> Vec<u8> {
    (offset..offset + len as u64).map(byte_at).collect()
}

/// The actions of a child process.
#[derive(Clone, Copy, Debug)]
enum Child {
    Exits,
    BecomesAnother,
}

/// The id of a child that ends at once.
fn fork(child: Child, program: &CString) -> libc::pid_t {
    let arguments = [program.as_ptr(), std::ptr::null()];
    // SAFETY: the child makes only async-signal-safe calls, and accesses only this memory.
    unsafe {
        let id = libc::fork();
        if id == 0 {
            if matches!(child, Child::BecomesAnother) {
                libc::execv(program.as_ptr(), arguments.as_ptr());
                libc::_exit(100);
            }
            libc::_exit(0);
        }
        id
    }
}

fn wait_for(child: libc::pid_t) {
    let mut status = 0;
    // SAFETY: the argument is valid for the call.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "{status:x}");
}

/// Goal: children that are forked during reads and writes, and exit or exec, take no completion
/// from the parent. All completions arrive with the correct bytes, and so do concurrent synchronous
/// reads.
#[test]
fn a_child_disturbs_nothing_that_is_in_flight() {
    let test = "a_child_disturbs_nothing_that_is_in_flight";
    in_own_process(test, Duration::from_secs(120), || {
        let sim = SimOptions::new(5).delay_us_max(2000);
        let mut all = vec![
            ("sim", BackendChoice::Sim(sim), Backing::Buffered),
            ("threads", BackendChoice::Threads, Backing::Buffered),
            ("threads, mapped", BackendChoice::Threads, Backing::Mapped),
        ];
        if has_uring() {
            all.push(("uring", BackendChoice::Uring, Backing::Buffered));
            all.push(("uring, mapped", BackendChoice::Uring, Backing::Mapped));
            // Past the kernel's cache: reads that are in flight for a while.
            all.push(("uring, direct", BackendChoice::Uring, Backing::Direct));
        }
        let program = CString::new("/bin/true").unwrap();
        for (name, backend, backing) in all {
            let dir = temp_dir();
            let path = dir.path().join("file");
            std::fs::write(&path, content(0, FILE_BYTES as usize)).unwrap();
            let engine = common::engine(512 << 10, backend);
            let file = match engine.open(&path, &read_write().backing(backing)) {
                Ok(file) => Arc::new(file),
                Err(error) => {
                    common::skip(format_args!("{name}: {error}"));
                    continue;
                }
            };
            file.advise(0, 0, Advice::Random).unwrap();
            let queue = engine.queue(96).unwrap();
            let mut random = Random::from_environment();
            let stop = AtomicBool::new(false);
            std::thread::scope(|scope| {
                let reader = scope.spawn(|| {
                    let (mut bytes, mut page) = (vec![0; 2 * PAGE as usize], 0);
                    while !stop.load(SeqCst) {
                        page = (page + 7) % (FILE_BYTES / PAGE - 2);
                        let moved = file.read_at(&mut bytes, page * PAGE).unwrap();
                        assert!(bytes[..moved] == content(page * PAGE, moved));
                    }
                });
                for round in 0..12 {
                    let mut requests: Vec<Request> = (0..96)
                        .map(|n| {
                            let offset = random.below(FILE_BYTES - 9000);
                            // The write stores the bytes that the file has already.
                            match n % 8 {
                                0 => Request::write(&file, content(offset, 9000), offset),
                                _ => Request::read(&file, vec![0; 9000], offset),
                            }
                            .user_data(offset)
                        })
                        .collect();
                    queue.submit_all(requests.drain(..)).unwrap();
                    let children = [Child::Exits, Child::BecomesAnother];
                    let children = children.map(|child| fork(child, &program));
                    assert!(children.iter().all(|&id| id > 0));
                    let done = queue.wait(96, 96, Some(Duration::from_secs(60))).unwrap();
                    assert_eq!(done.len(), 96, "{name}, round {round}: completions are missing");
                    for one in done {
                        assert_eq!(one.result().unwrap(), 9000, "{name}");
                        let offset = one.user_data();
                        assert!(one.into_buffer() == content(offset, 9000), "{name}");
                    }
                    children.into_iter().for_each(wait_for);
                }
                stop.store(true, SeqCst);
                reader.join().unwrap();
            });
            assert_eq!(queue.counts(), (0, 0));
            file.sync_all().unwrap();
        }
    });
}

/// Carries out `body` in a child; it must not panic, nor be killed.
fn in_child(body: impl FnOnce()) {
    // SAFETY: locks that other threads hold at the fork are the C library's, which it resets in the
    // child; the child ends without unwinding into the parent's frames.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body));
        // SAFETY: ends the child.
        unsafe { libc::_exit(if outcome.is_ok() { 0 } else { 101 }) };
    }
    assert!(child > 0);
    wait_for(child);
}

fn is_refused<T>(result: Result<T, Error>) -> bool {
    matches!(result, Err(Error::Forked { .. }))
}

/// Goal: a child that uses its parent's open file gets an error, cached or not: no wrong bytes, no
/// signal, and no change for the parent.
#[test]
fn a_child_is_refused_its_parents_files() {
    let test = "a_child_is_refused_its_parents_files";
    in_own_process(test, Duration::from_secs(120), || {
        let dir = temp_dir();
        for (backend, kept) in [
            (BackendChoice::Threads, false),
            (BackendChoice::Auto, false),
            (BackendChoice::Auto, true),
        ] {
            for mode in [WriteMode::Through, WriteMode::Back] {
                let path = dir.path().join("file");
                std::fs::write(&path, content(0, FILE_BYTES as usize)).unwrap();
                let mut builder = common::builder(16 << 20, backend.clone());
                if kept {
                    builder = builder.keeper(millpond::keeper::spawn().unwrap());
                }
                let engine = builder.build().unwrap();
                let file = engine.open(&path, &read_write().write_mode(mode)).unwrap();
                let file = Arc::new(file);
                let mut bytes = vec![0; FILE_BYTES as usize];
                assert_eq!(file.read_at(&mut bytes, 0).unwrap(), bytes.len());
                file.write_all_at(&[7; 5000], 3000).unwrap();
                let view = file.view(100, 100).unwrap();
                let queue = engine.queue(8).unwrap();
                let other = engine.open(&path, &read_write()).unwrap();
                in_child(|| {
                    refused(&engine, &file, &queue, &view);
                    assert!(is_refused(other.close()));
                });
                assert_eq!(view[..], content(100, 100));
                assert_eq!(file.read_at(&mut bytes, 0).unwrap(), bytes.len());
                assert!(bytes[..3000] == content(0, 3000) && bytes[3000..8000] == [7; 5000]);
                assert!(bytes[8000..] == content(8000, bytes.len() - 8000));
                drop(view);
                file.sync_all().unwrap();
                assert!(std::fs::read(&path).unwrap() == bytes);
            }
        }
    });
}

/// Goal: a child has no access to its parent's blobs, and gets an error. It can drop fills that the
/// parent has started, and the parent can complete them.
#[test]
fn a_child_has_nothing_of_its_parents_blobs() {
    let test = "a_child_has_nothing_of_its_parents_blobs";
    in_own_process(test, Duration::from_secs(60), || {
        let engine = common::builder(16 << 20, BackendChoice::Auto).build().unwrap();
        let blob = engine.blob(FILE_BYTES, PAGE as u32).unwrap();
        blob.claim(0..PAGE).fills.pop().unwrap().bring(&content(0, PAGE as usize));
        let begun = blob.claim(PAGE..3 * PAGE).fills.pop().unwrap();
        let mut dropped = Some(blob.claim(5 * PAGE..6 * PAGE).fills.pop().unwrap());
        let mut brought = Some(blob.claim(7 * PAGE..8 * PAGE).fills.pop().unwrap());
        in_child(|| {
            assert!(!blob.try_read(&mut Vec::new(), 0..PAGE));
            assert!(blob.try_view(0..PAGE).is_none());
            let claim = blob.claim(0..FILE_BYTES);
            assert!(!claim.is_complete && claim.fills.is_empty());
            drop(dropped.take());
            brought.take().unwrap().bring(&[1; PAGE as usize]);
            assert!(engine.blob(1, PAGE as u32).is_err());
        });
        begun.bring(&content(PAGE, 2 * PAGE as usize));
        let mut bytes = Vec::new();
        assert!(blob.try_read(&mut bytes, 0..3 * PAGE));
        assert_eq!(bytes, content(0, 3 * PAGE as usize));
    });
}

/// In the child: all operations on a file.
fn refused(engine: &Engine, file: &Arc<File>, queue: &Queue, view: &View<'_>) {
    let mut bytes = [9; 9000];
    for len in [1, 100, 4096, 9000] {
        for offset in [0, 1, 4000, FILE_BYTES - 10, FILE_BYTES, FILE_BYTES + 5000] {
            assert!(is_refused(file.read_at(&mut bytes[..len], offset)));
            let mut slices = bytes[..len].chunks_mut(50).map(std::io::IoSliceMut::new);
            let mut slices: Vec<_> = slices.by_ref().collect();
            assert!(is_refused(file.read_vectored_at(&mut slices, offset)));
            assert!(is_refused(file.try_read_at(&mut bytes[..len], offset)));
            // SAFETY: `bytes` is valid for writes of its length.
            assert!(unsafe { file.raw().try_read_hit(bytes.as_mut_ptr(), len, offset) }.is_none());
            assert!(is_refused(file.write_at(&bytes[..len], offset)));
            assert!(is_refused(file.view(offset, len)));
        }
    }
    assert_eq!(bytes, [9; 9000]);
    assert!(is_refused(file.append(&bytes)));
    assert!(is_refused(file.write_at_dsync(&bytes, 0)));
    assert!(is_refused(file.len()));
    assert!(is_refused(file.truncate(0)));
    assert!(is_refused(file.punch_hole(0, 4096)));
    assert!(is_refused(file.zero_range(0, 4096)));
    assert!(is_refused(file.allocate(0, 4096)));
    assert!(is_refused(file.seek_data(0)));
    assert!(is_refused(file.seek_hole(0)));
    assert!(is_refused(file.invalidate(0, 4096)));
    assert!(is_refused(file.sync_all()));
    assert!(is_refused(file.sync_data()));
    assert!(is_refused(file.sync_range(0, 1)));
    assert!(is_refused(file.write_back()));
    assert!(is_refused(file.settle()));
    assert!(is_refused(file.suspend_writeback()));
    for advice in [Advice::WillNeed, Advice::DontNeed, Advice::Random] {
        assert!(is_refused(file.advise(0, 0, advice)));
    }
    assert!(is_refused(engine.queue(8)));
    assert!(is_refused(engine.open("/dev/null", &read_write())));
    let requests = [
        Request::read(file, vec![0; 100], 0),
        Request::write(file, vec![0; 100], 0),
        Request::sync_all(file),
    ];
    let rejected = queue.submit_all(requests).unwrap_err();
    assert_eq!(rejected.requests().len(), 3);
    assert!(is_refused(queue.wait(0, 3, None)));
    assert!(is_refused(queue.submit_and_wait(rejected.into_requests(), 1, 3, None)));
    assert!(is_refused(queue.eventfd()));
    // A view can't return an error.
    std::panic::set_hook(Box::new(|_| {}));
    let seen = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| view.len()));
    assert!(seen.is_err());
}

/// Goal: a child holds no memory of its parent's cache, so the parent may fill it again without
/// doubling it.
/// Incident: private frames were copied on write. Each living child kept the pages that were cached
/// at its fork, and a limit of 1 GiB became 2.
#[test]
fn a_child_holds_none_of_the_cache() {
    const CACHE_BYTES: u64 = 64 << 20;
    let test = "a_child_holds_none_of_the_cache";
    in_own_process(test, Duration::from_secs(120), || {
        let dir = temp_dir();
        let path = dir.path().join("file");
        std::fs::File::create(&path).unwrap().set_len(2 * CACHE_BYTES).unwrap();
        let engine = common::engine(CACHE_BYTES, BackendChoice::Threads);
        let file = engine.open(&path, &read_write()).unwrap();
        let fill = |from: u64| {
            let mut bytes = vec![0; 1 << 16];
            for at in (from..from + CACHE_BYTES).step_by(bytes.len()) {
                assert_eq!(file.read_at(&mut bytes, at).unwrap(), bytes.len());
            }
        };
        fill(0);
        let own = |key| memory_of(std::process::id() as i32, key);
        assert!(own("Rss:") > CACHE_BYTES * 9 / 10, "the cache is full");
        // SAFETY: the child does nothing.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: as above.
            unsafe { libc::pause() };
        }
        assert!(child > 0);
        fill(CACHE_BYTES);
        let both = own("Pss:") + memory_of(child, "Pss:");
        let childs = memory_of(child, "Rss:");
        // SAFETY: our own child.
        unsafe {
            libc::kill(child, libc::SIGKILL);
            libc::waitpid(child, std::ptr::null_mut(), 0);
        }
        println!("child: {childs}, both together: {both}");
        assert!(childs < CACHE_BYTES / 4, "{childs} bytes resident in the child");
        assert!(both < CACHE_BYTES + CACHE_BYTES / 4, "{both} bytes resident in both");
    });
}

/// A line of the kernel's memory statistics of a process, in bytes.
fn memory_of(process: libc::pid_t, key: &str) -> u64 {
    let all = std::fs::read_to_string(format!("/proc/{process}/smaps_rollup")).unwrap();
    let line = all.lines().find(|line| line.starts_with(key)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}
