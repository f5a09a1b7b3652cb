//! A process after its engines were dropped with I/O in flight: no thread, descriptor or lost write
//! remains.

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use millpond::queue::Request;
use millpond::sim::SimOptions;
use millpond::{Admission, AsyncFile, BackendChoice, File, WriteMode};

use common::{Random, has_uring, in_own_process, read_write, rss_bytes, temp_dir, threads};

const PAGE: u64 = 4096;
const FILE_BYTES: u64 = 4 << 20;
const REQUESTS: u64 = 96;
const LEN: usize = 64 << 10;

/// The target of each open descriptor.
fn descriptors() -> Vec<std::path::PathBuf> {
    let open = std::fs::read_dir("/proc/self/fd").unwrap();
    open.filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok()).collect()
}

/// Starts reads and writes, and drops all objects, in any order.
fn drop_all(backend: BackendChoice, random: &mut Random) {
    let dir = temp_dir();
    let path = dir.path().join("file");
    std::fs::write(&path, vec![1; FILE_BYTES as usize]).unwrap();
    let engine = common::engine(256 << 10, backend);
    let file = Arc::new(engine.open(&path, &read_write()).unwrap());
    let queue = engine.queue(REQUESTS as usize).unwrap();
    queue.eventfd().unwrap();
    let mut requests: Vec<Request> = (0..REQUESTS)
        .map(|_| {
            let offset = random.below(FILE_BYTES - LEN as u64);
            if random.chance(100) {
                Request::write(&file, vec![1; LEN], offset)
            } else {
                // Initialized memory, so that a leak becomes resident.
                Request::read(&file, vec![7; LEN], offset)
            }
        })
        .collect();
    queue.submit_all(requests.drain(..)).unwrap();
    let future = AsyncFile::from(Arc::clone(&file));
    let mut bytes = vec![0; PAGE as usize];
    let mut read = Box::pin(future.read_at(&mut bytes, random.below(FILE_BYTES)));
    let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
    let _ = std::future::Future::poll(read.as_mut(), &mut cx);
    if random.chance(500) {
        let _ = queue.wait(1 + random.below(20) as usize, 40, None).unwrap();
    }
    drop(read);
    let mut all: Vec<Box<dyn Send>> =
        vec![Box::new(engine), Box::new(file), Box::new(queue), Box::new(future)];
    while !all.is_empty() {
        drop(all.swap_remove(random.below(all.len() as u64) as usize));
    }
}

/// Goal: engines dropped with I/O in flight leave no thread, descriptor or memory behind, and do
/// not hang.
#[test]
fn engines_dropped_with_io_in_flight_leave_nothing() {
    let test = "engines_dropped_with_io_in_flight_leave_nothing";
    in_own_process(test, Duration::from_secs(120), || {
        let sim = SimOptions::new(9).delay_us_max(1000).short_per_mille(100).error_per_mille(50);
        let mut all = vec![BackendChoice::Sim(sim), BackendChoice::Threads];
        if has_uring() {
            all.push(BackendChoice::Uring);
        }
        let mut random = Random::from_environment();
        let at_start = descriptors().len();
        let mut settle = |rounds: u32| {
            for _ in 0..rounds {
                all.iter().for_each(|backend| drop_all(backend.clone(), &mut random));
            }
            let begun = Instant::now();
            while threads().iter().any(|(_, name)| name.starts_with("millpond-")) {
                assert!(begun.elapsed() < Duration::from_secs(60), "left: {:?}", threads());
                std::thread::sleep(Duration::from_millis(5));
            }
            // A thread that closes descriptors gets its name after it has begun.
            while descriptors().len() > at_start {
                assert!(begun.elapsed() < Duration::from_secs(60), "left: {:?}", descriptors());
                std::thread::sleep(Duration::from_millis(5));
            }
            rss_bytes()
        };
        let before = settle(3);
        let after = settle(12);
        // The buffers of all rounds since then are more than 200 MB.
        let grown = after.saturating_sub(before);
        assert!(grown < 64 << 20, "{grown} bytes more");
    });
}

/// Goal: the last handle of a file with dirty pages may be in a request, of whichever kind and however it ends: the bytes
/// are in the file when the completion was taken.
///
/// Incident: a worker wrote back after the completion was reported, and of 50 processes that ended then 47 lost
/// acknowledged bytes.
#[test]
fn the_last_handle_in_a_request_is_written_back_before_its_completion() {
    const BYTES: usize = 512 << 10;
    let dir = temp_dir();
    let mut backends = vec![BackendChoice::Threads];
    if has_uring() {
        backends.push(BackendChoice::Uring);
    }
    type Make = fn(&Arc<File>) -> Request;
    let far = 2 * BYTES as u64;
    let kinds: [(&str, bool, Make); 7] = [
        ("a hit", true, |file| Request::read(file, vec![0; 100], 0)),
        ("a miss", true, |file| Request::read(file, vec![0; 100], 2 * BYTES as u64)),
        ("a read around the cache", false, |file| {
            Request::read(file, vec![0; 100], 2 * BYTES as u64)
        }),
        ("a long read", true, |file| Request::read(file, vec![0; 2 * BYTES], 2 * BYTES as u64)),
        ("a write", true, |file| Request::write(file, vec![7; 100], 0)),
        ("a sync", true, |file| Request::sync_data(file)),
        ("an error", true, |file| Request::read(file, vec![0; 100], u64::MAX)),
    ];
    for backend in backends {
        for (kind, fills, request) in kinds {
            let admission = if fills { Admission::Always } else { Admission::Never };
            let builder = common::builder(16 << 20, backend.clone()).admission(admission);
            let engine = builder.build().unwrap();
            let queue = engine.queue(8).unwrap();
            for round in 0..5 {
                let path = dir.path().join(format!("{kind}-{round}"));
                std::fs::write(&path, vec![1; 2 * far as usize]).unwrap();
                let options = read_write().write_mode(WriteMode::Back);
                let file = Arc::new(engine.open(&path, &options).unwrap());
                file.write_all_at(&vec![7; BYTES], 0).unwrap();
                let mut requests = vec![request(&file)];
                drop(file);
                queue.submit_all(requests.drain(..)).unwrap();
                assert_eq!(queue.wait(1, 8, None).unwrap().len(), 1);
                let written = std::fs::read(&path).unwrap();
                assert!(written[..BYTES].iter().all(|&byte| byte == 7), "{kind}, {round}: lost");
            }
        }
    }
}
