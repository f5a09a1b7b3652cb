//! The end of an engine whose handles are all dropped while work is in progress: nothing is left of
//! it.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Wake, Waker};
use std::thread;
use std::time::{Duration, Instant};

use crate::inode::{CachedFile, Shared};
use crate::queue::Request;
use crate::tests::slow::{Kind, Slow};
use crate::{AsyncFile, BackendChoice, Engine, File, OpenOptions, WriteMode};

const PAGE: u64 = 4096;
const FILE_PAGES: u64 = 1024;
const READS: u64 = 30;
const WRITES: u64 = 10;

struct Nobody;

impl Wake for Nobody {
    fn wake(self: Arc<Self>) {}
}

/// The objects that must be gone at the end.
struct Left {
    shared: Weak<Shared>,
    cached: Weak<CachedFile>,
    file: Weak<File>,
    waker: Arc<Nobody>,
    slow: Arc<Slow>,
}

impl Left {
    fn wait(&self, case: &str) {
        let begun = Instant::now();
        let counts = || {
            let (shared, cached) = (self.shared.strong_count(), self.cached.strong_count());
            let wakers = Arc::strong_count(&self.waker) - 1;
            [shared, cached, self.file.strong_count(), wakers, Arc::strong_count(&self.slow) - 1]
        };
        while counts() != [0; 5] {
            assert!(begun.elapsed() < Duration::from_secs(30), "{case}: left: {:?}", counts());
            thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Starts reads, writes, futures and read-ahead on a blocked device, drops all objects in the order
/// of number `order`, and unblocks the device.
fn drop_all(order: usize, mode: WriteMode, errno: i32) {
    let builder = Engine::builder().cache_bytes(2 << 20).backend(BackendChoice::Memory);
    let engine = builder.reads_in_flight_max(8).readahead_bytes_max(0).build().unwrap();
    let slow = Slow::new(vec![1; (FILE_PAGES * PAGE) as usize], Duration::ZERO);
    let options = OpenOptions::new().read(true).write(true).write_mode(mode);
    let cached = CachedFile::on(engine.shared(), slow.clone(), &options).unwrap();
    let file = Arc::new(File::new(Arc::clone(&cached), None, &options));
    let left = Left {
        shared: Arc::downgrade(engine.shared()),
        cached: Arc::downgrade(&cached),
        file: Arc::downgrade(&file),
        waker: Arc::new(Nobody),
        slow: Arc::clone(&slow),
    };
    drop(cached);
    slow.hold(Kind::Read, true);
    slow.hold(Kind::Write, true);
    let queue = engine.queue(64).unwrap();
    // More than fit in flight, a read that needs a worker, and more writes than workers.
    let mut requests: Vec<Request> =
        (0..READS).map(|n| Request::read(&file, vec![0; 6000], n * 3 * PAGE)).collect();
    requests.push(Request::read(&file, vec![0; 70 * PAGE as usize], 200 * PAGE));
    // Whole pages and parts of pages, which are read first.
    requests.extend((0..WRITES).map(|n| {
        let len = if n.is_multiple_of(2) { PAGE } else { 100 };
        Request::write(&file, vec![2; len as usize], (400 + 2 * n) * PAGE)
    }));
    requests.push(Request::sync_data(&file));
    queue.submit_all(requests.drain(..)).unwrap();
    let future = AsyncFile::from(Arc::clone(&file));
    let mut futures: Vec<Pin<Box<dyn Future<Output = usize>>>> = Vec::new();
    for n in 0..12 {
        let future = future.clone();
        futures.push(Box::pin(async move {
            let mut bytes = [0; 5000];
            future.read_at(&mut bytes, (600 + 3 * n) * PAGE).await.unwrap_or(0)
        }));
    }
    for future in &mut futures {
        let waker = Waker::from(Arc::clone(&left.waker));
        assert!(future.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    }
    drop(future);
    slow.wait_for(Kind::Read, 8);
    let mut all =
        [Some(Box::new(engine) as Box<dyn Send>), Some(Box::new(file)), Some(Box::new(queue))];
    let second = (order + 1 + order / 3) % 3;
    for at in [order % 3, second, 3 - order % 3 - second] {
        drop(all[at].take());
    }
    // Some before, some after the device is unblocked.
    futures.truncate(6);
    slow.fail(Kind::Read, errno);
    slow.hold(Kind::Read, false);
    slow.hold(Kind::Write, false);
    drop(futures);
    let written = |n: u64, bytes: &[u8]| {
        let at = ((400 + 2 * n) * PAGE) as usize;
        let len = if n.is_multiple_of(2) { PAGE as usize } else { 100 };
        bytes[at..at + len].iter().all(|&byte| byte == 2)
    };
    let case = format!("order {order}, {mode:?}, errno {errno}");
    let begun = Instant::now();
    loop {
        let bytes = slow.contents();
        // A part of a page that could not be read is not written in mode back.
        let done = (0..WRITES).all(|n| written(n, &bytes) || (errno != 0 && n % 2 == 1));
        if done {
            break;
        }
        assert!(begun.elapsed() < Duration::from_secs(30), "{case}: writes are missing");
        thread::sleep(Duration::from_millis(1));
    }
    drop(slow);
    left.wait(&case);
}

/// Goal: for every order of drops, with reads and writes in flight, with and without errors: all
/// accepted requests are performed, and then nothing is left: no engine, file, task or waker.
#[test]
fn nothing_is_left_of_an_engine_dropped_with_work() {
    for order in 0..6 {
        for mode in [WriteMode::Through, WriteMode::Back] {
            for errno in [0, libc::EIO] {
                drop_all(order, mode, errno);
            }
        }
    }
}
