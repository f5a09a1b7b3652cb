//! Direct I/O without waiting threads: requests of queues and futures, with owned buffers.

mod common;

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Waker};
use std::time::Duration;

use millpond::queue::Request;
use millpond::sim::SimOptions;
use millpond::{AsyncFile, BackendChoice, Buffer, Engine, Error, File, OpenOptions};

use common::{
    Random, block_on, builder, engine, has_uring, in_own_process, temp_dir, threads, within,
};

const PAGE: usize = 4096;

/// One file, with a direct and a cached handle.
struct Case {
    name: &'static str,
    engine: Engine,
    direct: Arc<File>,
    cached: File,
    _dir: tempfile::TempDir,
}

fn case(name: &'static str, engine: Engine, bytes: &[u8]) -> Option<Case> {
    let dir = temp_dir();
    let path = dir.path().join("file");
    std::fs::write(&path, bytes).unwrap();
    // Without a sync, the kernel uses its own threads for direct reads of dirty pages.
    std::fs::File::open(&path).unwrap().sync_all().unwrap();
    let options = OpenOptions::new().read(true).write(true);
    let direct = match engine.open(&path, &options.clone().direct(true)) {
        Ok(file) => Arc::new(file),
        Err(error) => {
            common::skip(format_args!("{name}: {error}"));
            return None;
        }
    };
    let cached = engine.open(&path, &options).unwrap();
    Some(Case { name, engine, direct, cached, _dir: dir })
}

fn cases(bytes: &[u8]) -> Vec<Case> {
    let mut all = vec![
        ("threads", BackendChoice::Threads),
        ("memory", BackendChoice::Memory),
        ("sim", BackendChoice::Sim(SimOptions::new(1).short_per_mille(200))),
    ];
    if has_uring() {
        all.push(("uring", BackendChoice::Uring));
    }
    all.into_iter().filter_map(|(name, kind)| case(name, engine(1 << 20, kind), bytes)).collect()
}

fn content(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at / PAGE * 3 + at % 251) as u8).collect()
}

fn filled(buffers: &[Buffer], moved: usize) -> Vec<u8> {
    let mut bytes = buffers.iter().map(|buffer| &buffer[..]).collect::<Vec<_>>().concat();
    bytes.truncate(moved);
    bytes
}

/// Goal: many direct reads of a queue, of one and of several buffers, also beyond the end, return
/// the file's bytes, including those that wait in the cache.
#[test]
fn a_queue_reads_into_buffers() {
    let mut bytes = content(300 * PAGE + 1000);
    for case in cases(&bytes) {
        let newer = vec![200; 5 * PAGE + 17];
        case.cached.write_at(&newer, 40_001).unwrap();
        bytes[40_001..40_001 + newer.len()].copy_from_slice(&newer);
        let queue = case.engine.queue(32).unwrap();
        let mut random = Random(3);
        for _ in 0..40 {
            let mut requests: Vec<Request> = (0..32)
                .map(|_| {
                    let page = random.below(310);
                    let (count, pages) =
                        (1 + random.below(3) as usize, 1 + random.below(8) as usize);
                    let buffers = case.engine.alloc_buffers(count, pages * PAGE).unwrap();
                    Request::read_buffers(&case.direct, buffers, page * PAGE as u64).user_data(page)
                })
                .collect();
            queue.submit_all(requests.drain(..)).unwrap();
            for done in queue.wait(32, 32, None).unwrap() {
                let at = done.user_data() as usize * PAGE;
                let moved = *done.result().as_ref().unwrap();
                let buffers = done.into_buffers();
                let wanted: usize = buffers.iter().map(|buffer| buffer.len()).sum();
                let expected = &bytes[at.min(bytes.len())..(at + wanted).min(bytes.len())];
                assert!(filled(&buffers, moved) == expected, "{}: at {at}", case.name);
            }
        }
        assert_eq!(queue.counts(), (0, 0));
        bytes = content(bytes.len());
    }
}

/// Goal: futures read and write with owned buffers, through cached and direct handles, and each
/// sees the other's writes.
#[test]
fn futures_move_buffers() {
    for case in cases(&content(64 * PAGE)) {
        let direct = AsyncFile::from(Arc::clone(&case.direct));
        block_on(async {
            let mut buffers = case.engine.alloc_buffers(3, 2 * PAGE).unwrap();
            buffers.iter_mut().for_each(|buffer| buffer.fill(9));
            let (moved, buffers) = direct.write_buffers_at(buffers, 8 * PAGE as u64).await;
            assert_eq!((moved.unwrap(), buffers.len()), (6 * PAGE, 3));
            let mut seen = vec![0; 6 * PAGE];
            case.cached.read_exact_at(&mut seen, 8 * PAGE as u64).unwrap();
            assert!(seen.iter().all(|&byte| byte == 9), "{}", case.name);
            case.cached.write_at(&[8; 100], 8 * PAGE as u64 + 50).unwrap();
            let (moved, buffers) = direct.read_buffers_at(buffers, 8 * PAGE as u64).await;
            let bytes = filled(&buffers, moved.unwrap());
            assert_eq!(bytes.len(), 6 * PAGE, "{}", case.name);
            assert!(bytes[50..150].iter().all(|&byte| byte == 8), "{}", case.name);
            assert!(bytes[..50].iter().chain(&bytes[150..]).all(|&byte| byte == 9));
            let cached = AsyncFile::from(case.cached);
            let (moved, again) = cached.read_buffers_at(buffers, 8 * PAGE as u64).await;
            assert!(filled(&again, moved.unwrap()) == bytes, "{}", case.name);
        });
    }
}

/// Goal: an invalid request completes with an error and returns its buffers.
#[test]
fn invalid_requests_return_their_buffers() {
    for case in cases(&content(16 * PAGE)) {
        if matches!(case.name, "memory" | "sim") {
            // This back end needs no alignment.
            continue;
        }
        let queue = case.engine.queue(4).unwrap();
        let buffers = || case.engine.alloc_buffers(2, PAGE).unwrap();
        let mut requests = vec![
            Request::read_buffers(&case.direct, buffers(), 1).user_data(1),
            Request::read_buffers(&case.direct, buffers(), u64::MAX - 5).user_data(2),
            Request::read_buffers(&case.direct, buffers(), 16 * PAGE as u64).user_data(3),
            Request::read_buffers(&case.direct, Vec::new(), 0).user_data(4),
        ];
        queue.submit_all(requests.drain(..)).unwrap();
        for done in queue.wait(4, 4, None).unwrap() {
            let id = done.user_data();
            match (id, done.result()) {
                (1, Err(Error::Unaligned { what: "offset", .. })) => {}
                (2, Err(Error::InvalidRange { .. })) => {}
                (3 | 4, Ok(0)) => {}
                (_, other) => panic!("{}: {id}: {other:?}", case.name),
            }
            assert_eq!(done.into_buffers().len(), if id == 4 { 0 } else { 2 });
        }
        let bounced = case.engine.open(
            case._dir.path().join("file"),
            &OpenOptions::new().read(true).direct(true).bounce(true),
        );
        let bounced = AsyncFile::from(bounced.unwrap());
        let (moved, buffers) = block_on(bounced.read_buffers_at(buffers(), 33));
        assert!(filled(&buffers, moved.unwrap()) == content(16 * PAGE)[33..33 + 2 * PAGE]);
    }
}

/// Goal: direct and cached reads and writes of several pages are atomic: a read never sees a part
/// of a write.
#[test]
fn requests_and_writes_of_one_range_are_atomic() {
    for case in cases(&vec![0; 8 * PAGE]) {
        let queue = case.engine.queue(16).unwrap();
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut number = 0u8;
                while !over.load(Relaxed) {
                    number = number.wrapping_add(1);
                    case.cached.write_at(&vec![number; 8 * PAGE], 0).unwrap();
                }
            });
            for round in 0..12 {
                let mut requests: Vec<Request> = (0..16)
                    .map(|number| {
                        let mut buffers = case.engine.alloc_buffers(2, 4 * PAGE).unwrap();
                        if number % 4 == 0 {
                            let byte = 128 | round;
                            buffers.iter_mut().for_each(|buffer| buffer.fill(byte));
                            Request::write_buffers(&case.direct, buffers, 0).user_data(1)
                        } else {
                            Request::read_buffers(&case.direct, buffers, 0)
                        }
                    })
                    .collect();
                queue.submit_all(requests.drain(..)).unwrap();
                for done in queue.wait(16, 16, None).unwrap() {
                    assert_eq!(*done.result().as_ref().unwrap(), 8 * PAGE);
                    let bytes = filled(&done.into_buffers(), 8 * PAGE);
                    assert!(bytes == vec![bytes[0]; 8 * PAGE], "{}: torn", case.name);
                }
            }
            over.store(true, Relaxed);
        });
    }
}

/// Goal: reads in flight run to their end after their future or queue is dropped. The memory that
/// the device writes to is not freed before, and the next operation finds the range free.
#[test]
fn dropped_with_reads_in_flight() {
    let slow = SimOptions::new(2).delay_us_max(5000);
    let bytes = content(64 * PAGE);
    let mut all = cases(&bytes);
    let engine = builder(1 << 20, BackendChoice::Sim(slow)).build().unwrap();
    all.extend(case("slow sim", engine, &bytes));
    for case in all {
        within(Duration::from_secs(60), case.name, move || {
            let direct = AsyncFile::from(Arc::clone(&case.direct));
            for round in 0..100u64 {
                let queue = case.engine.queue(8).unwrap();
                let buffers = || case.engine.alloc_buffers(1, 4 * PAGE).unwrap();
                let mut requests: Vec<Request> = (0..8)
                    .map(|n| Request::read_buffers(&case.direct, buffers(), n * 4 * PAGE as u64))
                    .collect();
                queue.submit_all(requests.drain(..)).unwrap();
                let mut future = Box::pin(direct.read_buffers_at(buffers(), 0));
                let mut context = Context::from_waker(Waker::noop());
                let _ = future.as_mut().poll(&mut context);
                if round % 2 == 0 {
                    drop(future);
                    drop(queue);
                } else {
                    drop(queue);
                    drop(future);
                }
                // An exclusive guard over all of it.
                case.cached.punch_hole(0, 64 * PAGE as u64).unwrap();
                case.cached.write_at(&content(64 * PAGE), 0).unwrap();
            }
        });
    }
}

/// Goal: on io_uring only the driver's thread works for direct reads, for any number of them.
#[test]
fn direct_reads_take_no_thread() {
    if !has_uring() {
        return;
    }
    in_own_process("direct_reads_take_no_thread", Duration::from_secs(60), || {
        // A small cache lets few reads be in flight.
        let engine = engine(8 << 20, BackendChoice::Uring);
        let Some(case) = case("uring", engine, &content(1024 * PAGE)) else { return };
        let before = threads().len();
        let queue = case.engine.queue(256).unwrap();
        for _ in 0..10 {
            let mut requests: Vec<Request> = (0..256)
                .map(|n| {
                    let buffers = case.engine.alloc_buffers(1, PAGE).unwrap();
                    Request::read_buffers(&case.direct, buffers, n * 4 * PAGE as u64)
                })
                .collect();
            queue.submit_all(requests.drain(..)).unwrap();
            assert!(queue.wait(256, 256, None).unwrap().iter().all(|done| done.result().is_ok()));
        }
        let names: Vec<_> = threads().into_iter().map(|(_, name)| name).collect();
        // The driver, and one idle worker.
        assert_eq!(names.len(), before + 2, "{names:?}");
    });
}
