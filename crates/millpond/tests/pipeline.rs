//! Pipelines: many requests in flight from one thread, beside other operations.

mod common;
#[path = "pipeline/files.rs"]
mod files;

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use millpond::direct::{DirectRequest, SegmentList};
use millpond::{Buffer, Engine, File, OpenOptions, WriteMode};

use common::requests::{at, each};
use common::{direct, engine, read_write, temp_dir, within};

const PAGE: usize = 4096;

/// A file of `pages` pages in an engine of each kind that has direct I/O here.
struct Bench {
    name: &'static str,
    engine: Engine,
    path: std::path::PathBuf,
    _dir: tempfile::TempDir,
}

fn content(at: usize) -> u8 {
    (at / PAGE * 7 + at % 251) as u8
}

fn for_each_engine(pages: usize, body: impl Fn(&Bench) + Clone + Send + 'static) {
    for (name, backend) in common::back_ends(1) {
        let body = body.clone();
        within(Duration::from_secs(60), name, move || {
            let dir = temp_dir();
            let path = dir.path().join("file");
            let bytes: Vec<u8> = (0..pages * PAGE).map(content).collect();
            std::fs::write(&path, &bytes).unwrap();
            let engine = engine(4 << 20, backend);
            match engine.open(&path, &direct()) {
                Ok(file) => drop(file),
                Err(error) => return common::skip(format_args!("{name}: {error}")),
            }
            body(&Bench { name, engine, path, _dir: dir });
        });
    }
}

impl Bench {
    fn open(&self, options: &OpenOptions) -> File {
        self.engine.open(&self.path, options).unwrap()
    }

    fn buffer(&self, pages: usize, byte: u8) -> Buffer {
        let mut buffer = self.engine.alloc_buffers(1, pages * PAGE).unwrap().pop().unwrap();
        buffer.fill(byte);
        buffer
    }

    fn write<'a>(&self, file: &'a File, page: usize, pages: usize, byte: u8) -> DirectRequest<'a> {
        let list = SegmentList::from_buffers(vec![self.buffer(pages, byte)]);
        DirectRequest::write(file, list, (page * PAGE) as u64)
    }

    fn read<'a>(&self, file: &'a File, page: usize, pages: usize) -> DirectRequest<'a> {
        let list = SegmentList::from_buffers(vec![self.buffer(pages, 0xEE)]);
        DirectRequest::read(file, list, (page * PAGE) as u64)
    }
}

/// Goal: a thread with requests in flight does not wait for a thread that waits for those requests,
/// for example a flush.
/// Method: a write to a dirty page, which hides it, is in flight; another thread syncs, and waits
/// for the page; then a request comes for a page that is dirty elsewhere.
#[test]
fn requests_do_not_wait_for_a_sync_that_waits_for_them() {
    for_each_engine(400, |bench| {
        let cached = bench.open(&read_write().write_mode(WriteMode::Back));
        let file = bench.open(&direct());
        for (case, request) in [
            ("read of one page", bench.read(&file, 50, 1)),
            ("long read", bench.read(&file, 40, 300)),
            ("write", bench.write(&file, 50, 1, 9)),
            ("read of clean pages", bench.read(&file, 60, 1)),
            ("long read of clean pages", bench.read(&file, 60, 200)),
        ] {
            cached.write_all_at(&[1; PAGE], (5 * PAGE) as u64).unwrap();
            cached.write_all_at(&[2; PAGE], (50 * PAGE) as u64).unwrap();
            println!("{}: {case}", bench.name);
            let syncing = AtomicBool::new(false);
            std::thread::scope(|scope| {
                let mut number = 0;
                let mut request = Some(request);
                let mut pipeline = bench.engine.pipeline(4).unwrap();
                each(&mut pipeline, |done| {
                    if let Some(done) = done {
                        done.outcome.unwrap();
                        return None;
                    }
                    number += 1;
                    match number {
                        1 => Some(bench.write(&file, 5, 1, 3)),
                        2 => {
                            scope.spawn(|| {
                                syncing.store(true, SeqCst);
                                cached.sync_all().unwrap();
                            });
                            while !syncing.load(SeqCst) {
                                std::thread::yield_now();
                            }
                            std::thread::sleep(Duration::from_millis(30));
                            request.take()
                        }
                        _ => None,
                    }
                });
            });
            let mut bytes = [0; PAGE];
            cached.read_exact_at(&mut bytes, (5 * PAGE) as u64).unwrap();
            assert_eq!(bytes, [3; PAGE]);
        }
    });
}

/// Goal: a file that another process has truncated is read up to its end, and its new length is
/// found, without waiting for the pipeline's own requests.
/// Method: many reads are in flight beyond the new end.
#[test]
fn a_file_that_was_cut_below_is_read_to_its_end() {
    for_each_engine(64, |bench| {
        if !matches!(bench.name, "uring" | "threads") {
            return;
        }
        let file = bench.open(&direct());
        let other = std::fs::OpenOptions::new().write(true).open(&bench.path).unwrap();
        other.set_len(20 * PAGE as u64).unwrap();
        let mut page = 0;
        let mut moved = 0;
        each(&mut bench.engine.pipeline(16).unwrap(), |done| {
            moved += done.map_or(0, |done| done.outcome.unwrap());
            page += 2;
            (page <= 64).then(|| bench.read(&file, page - 2, 2))
        });
        assert_eq!(moved, 20 * PAGE);
        assert_eq!(file.len().unwrap(), 20 * PAGE as u64);
    });
}

/// Goal: each request ends exactly once and returns its memory, for any depth and any number of
/// requests.
#[test]
fn any_depth_and_number_of_requests() {
    for_each_engine(300, |bench| {
        let file = bench.open(&direct());
        for (depth, count) in [(1, 5), (2, 1), (3, 100), (8, 8), (64, 63), (256, 300), (300, 0)] {
            let mut pipeline = bench.engine.pipeline(depth).unwrap();
            for turn in 0..2 {
                let mut next = 0;
                let mut ended = vec![false; count];
                let mut under_way = 0;
                each(&mut pipeline, |done| {
                    if let Some(done) = done {
                        under_way -= 1;
                        let page = done.request.offset() as usize / PAGE;
                        assert_eq!(done.outcome.unwrap(), PAGE, "{}", bench.name);
                        assert!(!std::mem::replace(&mut ended[page], true));
                        // Written before, or read now.
                        let seen: Vec<u8> = done.request.slices().flatten().copied().collect();
                        assert!(seen == [page as u8; PAGE], "{} page {page}", bench.name);
                    }
                    (next < count).then(|| {
                        next += 1;
                        under_way += 1;
                        assert!(under_way <= depth);
                        match turn {
                            0 => bench.write(&file, next - 1, 1, (next - 1) as u8),
                            _ => bench.read(&file, next - 1, 1),
                        }
                    })
                });
                assert!(ended.iter().all(|&ended| ended), "{}: depth {depth}", bench.name);
            }
        }
        for depth in [0, 4097, usize::MAX] {
            let error = bench.engine.pipeline(depth).unwrap_err();
            assert!(error.to_string().contains("must be 1 to 4096"), "{error}");
        }
    });
}

/// Goal: overlapping requests of one pipeline take effect in their order, also beside other
/// operations.
/// Method: reads and writes of the same few pages; a cached writer beside them, elsewhere and
/// there.
#[test]
fn requests_that_overlap_take_effect_in_their_order() {
    for_each_engine(64, |bench| {
        let file = bench.open(&direct());
        let cached = bench.open(&read_write());
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut bytes = [0; 3 * PAGE];
                while !stop.load(SeqCst) {
                    for page in 0..16 {
                        cached.read_exact_at(&mut bytes, page * PAGE as u64).unwrap();
                    }
                    cached.write_all_at(&bytes, 30 * PAGE as u64).unwrap();
                }
            });
            let mut random = common::Random(3);
            let mut model = [None; 16];
            let mut expected = std::collections::HashMap::new();
            let mut left = 300u64;
            each(&mut bench.engine.pipeline(7).unwrap(), |done| {
                if let Some(done) = done {
                    let moved = done.outcome.unwrap();
                    let seen: Vec<u8> = done.request.slices().flatten().copied().collect();
                    assert_eq!(moved, seen.len());
                    if let Some(pages) = expected.remove(&address(&done.request)) {
                        let pages: Vec<Option<u8>> = pages;
                        for (bytes, page) in seen.chunks(PAGE).zip(pages) {
                            let Some(page) = page else { continue };
                            assert!(bytes.iter().all(|&byte| byte == page), "{}", bench.name);
                        }
                    }
                }
                left = left.checked_sub(1)?;
                let (page, pages) = (random.below(12) as usize, 1 + random.below(4) as usize);
                if random.chance(500) {
                    let byte = left as u8;
                    model[page..page + pages].fill(Some(byte));
                    return Some(bench.write(&file, page, pages, byte));
                }
                let request = bench.read(&file, page, pages);
                expected.insert(address(&request), model[page..page + pages].to_vec());
                Some(request)
            });
            assert!(expected.is_empty());
            stop.store(true, SeqCst);
        });
    });
}

/// The address of a request's memory: while it is in flight, no other request has it.
fn address(request: &DirectRequest<'_>) -> usize {
    request.slices().next().map_or(0, |slice| slice.as_ptr() as usize)
}

/// Goal: pipelines that overlap each other, and cached operations, end (P2).
/// Method: two threads with a pipeline each over the same pages in opposite orders; cached writers,
/// syncs and truncations beside them; on the same file and on a second one.
#[test]
fn pipelines_that_overlap_do_not_deadlock() {
    for_each_engine(40, |bench| {
        let other = bench.path.with_extension("other");
        std::fs::write(&other, vec![0; 40 * PAGE]).unwrap();
        for mode in [WriteMode::Through, WriteMode::Back] {
            let cached = [&bench.path, &other]
                .map(|path| bench.engine.open(path, &read_write().write_mode(mode)).unwrap());
            let files =
                [&bench.path, &other].map(|path| bench.engine.open(path, &direct()).unwrap());
            let stop = AtomicBool::new(false);
            let end = std::time::Instant::now() + common::stress_time(0.5);
            std::thread::scope(|scope| {
                let mut pipelines = Vec::new();
                for thread in 0..2usize {
                    let (stop, files) = (&stop, &files);
                    pipelines.push(scope.spawn(move || {
                        let mut random = common::Random(thread as u64);
                        let mut pipeline = bench.engine.pipeline(6).unwrap();
                        let mut count = 0usize;
                        while count < 80 || std::time::Instant::now() < end {
                            let mut left = 40;
                            each(&mut pipeline, |done| {
                                if let Some(done) = done {
                                    done.outcome.unwrap();
                                }
                                left -= 1;
                                if left < 0 {
                                    return None;
                                }
                                count += 1;
                                let page = match thread {
                                    0 => count % 30,
                                    _ => 30 - count % 30,
                                };
                                let pages = 1 + random.below(5) as usize;
                                let file = &files[random.below(2) as usize];
                                Some(match random.below(3) {
                                    0 => bench.read(file, page, pages),
                                    1 => bench
                                        .write(file, page, pages, count as u8)
                                        .durable(count.is_multiple_of(64)),
                                    _ => bench.write(file, page, pages, count as u8),
                                })
                            });
                        }
                        stop.store(true, SeqCst);
                    }));
                }
                for thread in 0..2u64 {
                    let (stop, cached) = (&stop, &cached);
                    scope.spawn(move || {
                        let mut random = common::Random(thread);
                        let mut bytes = vec![thread as u8; 6 * PAGE];
                        while !stop.load(SeqCst) {
                            let file = &cached[random.below(2) as usize];
                            let at = random.below(36 * PAGE as u64);
                            match random.below(8) {
                                0 => file.sync_data().unwrap(),
                                1 => file.truncate(36 * PAGE as u64 + at / 8).unwrap(),
                                2 => drop(file.append(&bytes[..100])),
                                3 => file.write_back().unwrap(),
                                4 | 5 => drop(file.read_at(&mut bytes, at).unwrap()),
                                _ => drop(file.write_at(&bytes, at).unwrap()),
                            }
                        }
                    });
                }
                for pipeline in pipelines {
                    pipeline.join().unwrap();
                }
            });
        }
    });
}

/// Goal: after a panic of `step` all requests in flight end first; their memory is not used before;
/// no page stays hidden and no guard held; the pipeline and the file stay usable.
/// Method: a panic at every call, with borrowed memory that is freed by the unwinding.
#[test]
fn a_panic_of_step_waits_for_requests_in_flight() {
    for_each_engine(64, |bench| {
        let file = bench.open(&direct());
        let cached = bench.open(&read_write());
        let mut pipeline = bench.engine.pipeline(8).unwrap();
        for at in 0..24u8 {
            cached.read_exact_at(&mut vec![0; 64 * PAGE], 0).unwrap();
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                let mut memory = bench.engine.alloc_buffers(40, PAGE).unwrap();
                memory.iter_mut().for_each(|buffer| buffer.fill(at));
                let mut lists = memory.iter_mut().map(SegmentList::from_buffer_mut);
                let mut calls = 0;
                each(&mut pipeline, |done| {
                    if calls == at {
                        std::panic::resume_unwind(Box::new("on purpose"));
                    }
                    calls += 1;
                    drop(done);
                    // Some requests wait for earlier ones.
                    let page = u64::from(calls % 5 * 2 + calls / 8);
                    let list = lists.next()?;
                    Some(match calls % 3 {
                        0 => DirectRequest::read(&file, list, page * PAGE as u64),
                        _ => DirectRequest::write(&file, list, page * PAGE as u64),
                    })
                });
            }));
            assert!(outcome.is_err());
            // An exclusive guard over the whole file.
            cached.invalidate(0, i64::MAX as u64).unwrap();
            let mut bytes = vec![0; 64 * PAGE];
            cached.read_exact_at(&mut bytes, 0).unwrap();
            let mut number = 0;
            each(&mut pipeline, |done| {
                if let Some(done) = done {
                    let page = done.request.offset() as usize;
                    assert_eq!(done.outcome.unwrap(), PAGE);
                    let seen: Vec<u8> = done.request.slices().flatten().copied().collect();
                    assert!(seen == bytes[page..page + PAGE]);
                }
                number += 1;
                (number <= 20).then(|| bench.read(&file, number, 1))
            });
        }
    });
}

/// Goal: the error of an invalid request is returned with that request, and the others continue.
#[test]
fn requests_that_are_refused_do_not_disturb_others() {
    for_each_engine(16, |bench| {
        let file = bench.open(&direct());
        let cached = bench.open(&read_write());
        let reader = bench.open(&OpenOptions::new().read(true).direct(true));
        let writer = bench.open(&OpenOptions::new().write(true).direct(true));
        let far = i64::MAX as u64 / PAGE as u64 * PAGE as u64;
        let mut number = 0;
        let mut errors = Vec::new();
        each(&mut bench.engine.pipeline(4).unwrap(), |done| {
            if let Some(done) = done {
                errors.push(done.outcome.map_err(|error| error.errno()));
            }
            number += 1;
            Some(match number {
                1 => bench.read(&cached, 0, 1),
                2 => bench.write(&reader, 0, 1, 1),
                3 => bench.read(&writer, 0, 1),
                4 => at(bench.read(&file, 0, 1), far),
                5 => at(bench.write(&file, 0, 1, 1), u64::MAX - 4095),
                6 => at(bench.write(&file, 0, 1, 1), far),
                7 => DirectRequest::read(&file, SegmentList::from_buffers(vec![]), 0),
                8 => DirectRequest::write(&file, SegmentList::from_slice(&[]), 0),
                9 => DirectRequest::write(&file, SegmentList::from_slice(&[]), 3),
                10 => DirectRequest::read(&file, SegmentList::from_io_slices_mut(&mut []), 7),
                11 => bench.read(&file, 2, 1),
                12 => bench.read(&file, 200, 1),
                13 => bench.read(&file, 15, 3),
                _ => return None,
            })
        });
        let mut expected = vec![
            Err(libc::EINVAL),
            Err(libc::EBADF),
            Err(libc::EBADF),
            Err(libc::EINVAL),
            Err(libc::EINVAL),
            Err(libc::EINVAL),
            Ok(0),
            Ok(0),
            Ok(0),
            Ok(0),
            Ok(PAGE),
            Ok(0),
            Ok(PAGE),
        ];
        let key = |it: &Result<usize, i32>| format!("{it:?}");
        errors.sort_by_key(key);
        expected.sort_by_key(key);
        assert_eq!(errors, expected, "{}", bench.name);
    });
}

extern "C" fn on_signal(_: libc::c_int) {}

/// Goal: signals do not disturb requests: none is lost, repeated or failed.
/// Method: a timer interrupts all waits, without SA_RESTART.
#[test]
fn signals_do_not_disturb() {
    common::in_own_process("signals_do_not_disturb", Duration::from_secs(60), || {
        // SAFETY: a zeroed action is valid, and the handler does nothing.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_signal as extern "C" fn(libc::c_int) as usize;
            assert_eq!(libc::sigaction(libc::SIGALRM, &action, std::ptr::null_mut()), 0);
            let every = libc::timeval { tv_sec: 0, tv_usec: 300 };
            let timer = libc::itimerval { it_interval: every, it_value: every };
            let set = libc::syscall(libc::SYS_setitimer, libc::ITIMER_REAL, &raw const timer, 0);
            assert_eq!(set, 0);
        }
        let dir = temp_dir();
        for (name, backend) in common::back_ends(1) {
            let path = dir.path().join(name);
            let bytes: Vec<u8> = (0..64 * PAGE).map(content).collect();
            std::fs::write(&path, &bytes).unwrap();
            let engine = engine(1 << 20, backend);
            let Ok(file) = engine.open(&path, &direct()) else {
                common::skip(format_args!("{name}"));
                continue;
            };
            let bench = Bench { name, engine, path, _dir: temp_dir() };
            let (mut number, mut count) = (0, 0);
            each(&mut bench.engine.pipeline(16).unwrap(), |done| {
                if let Some(done) = done {
                    assert_eq!(done.outcome.unwrap(), PAGE, "{name}");
                    count += 1;
                }
                number += 1;
                (number <= 1000).then(|| match number % 2 {
                    0 => bench.read(&file, number % 64, 1),
                    _ => bench.write(&file, number % 64, 1, number as u8).durable(number % 50 == 1),
                })
            });
            assert_eq!(count, 1000, "{name}");
        }
    });
}
