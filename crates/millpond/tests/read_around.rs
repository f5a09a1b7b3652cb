//! Reads that go around the cache (`EngineBuilder::admission`).

mod common;

use std::future::Future;
use std::io::IoSliceMut;
use std::os::unix::fs::FileExt;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::task::{Context, Wake, Waker};
use std::time::{Duration, Instant};

use millpond::{
    Admission, Advice, AsyncFile, BackendChoice, Backing, Engine, File, Request, SimOptions,
    WriteMode,
};

use common::{Random, block_on, builder, read_write, temp_dir};

const PAGE: usize = 4096;
const CACHE_BYTES: u64 = 8 << 20;

fn contents(pages: usize) -> Vec<u8> {
    (0..pages * PAGE + 1000).map(|at| (at / 5 + at / PAGE) as u8).collect()
}

fn open(engine: &Engine, bytes: &[u8], mode: WriteMode) -> (File, tempfile::TempDir) {
    let dir = temp_dir();
    let path = dir.path().join("file");
    std::fs::write(&path, bytes).unwrap();
    let file = engine.open(&path, &read_write().write_mode(mode)).unwrap();
    file.advise(0, 0, Advice::Random).unwrap();
    (file, dir)
}

/// Goal: where reads go around, they have the bytes that are there: what was written and is cached, DIRTY or
/// not, in part or as a whole, and the back end's; up to the end of the file, into any memory.
/// Method: a model; reads and writes at random, on every back end, in both modes.
#[test]
fn what_goes_around_is_what_is_there() {
    let mut random = Random::from_environment();
    for backend in [BackendChoice::Threads, BackendChoice::Auto, BackendChoice::Memory] {
        for mode in [WriteMode::Back, WriteMode::Through] {
            let engine =
                builder(CACHE_BYTES, backend.clone()).admission(Admission::Never).build().unwrap();
            let mut model = contents(300);
            let (file, _dir) = open(&engine, &model, mode);
            let file = AsyncFile::from(file);
            for _ in 0..3000 {
                let mut offset = random.below(model.len() as u64 + 2000);
                let mut len = 1 + random.below(20 * PAGE as u64) as usize;
                if random.below(4) > 0 {
                    offset = offset / PAGE as u64 * PAGE as u64;
                    len = len.next_multiple_of(PAGE);
                }
                let at = offset as usize;
                match random.below(8) {
                    0 if at < model.len() => {
                        let end = (at + len).min(model.len());
                        let byte = random.below(256) as u8;
                        model[at..end].fill(byte);
                        file.file().write_all_at(&vec![byte; end - at], offset).unwrap();
                    }
                    1..=3 => file.file().advise(0, 0, Advice::DontNeed).unwrap(),
                    _ => {
                        let expected = &model[at.min(model.len())..(at + len).min(model.len())];
                        let mut bytes = vec![0; len];
                        let (head, tail) = bytes.split_at_mut(random.below(len as u64) as usize);
                        let mut parts = [IoSliceMut::new(head), IoSliceMut::new(tail)];
                        let moved = match random.below(3) {
                            0 => block_on(file.read_vectored_at(&mut parts, offset)).unwrap(),
                            _ => file.file().read_vectored_at(&mut parts, offset).unwrap(),
                        };
                        assert!(bytes[..moved] == *expected, "{len} at {offset}");
                        assert!(bytes[moved..].iter().all(|&byte| byte == 0));
                    }
                }
            }
            let stats = engine.stats();
            assert!(stats.bytes_passed > 1 << 17 && stats.hits > 0, "{stats:?}");
        }
    }
}

/// Goal: a read that goes around and finds less than there should be, as somebody else cut the file, ends
/// there; one that finds more later has that.
#[test]
fn it_ends_where_somebody_else_has_cut_the_file() {
    let engine = builder(CACHE_BYTES, BackendChoice::Auto).admission(Admission::Never);
    let engine = engine.build().unwrap();
    let bytes = contents(8);
    let (file, dir) = open(&engine, &bytes, WriteMode::Through);
    let other = std::fs::OpenOptions::new().write(true).open(dir.path().join("file")).unwrap();
    let cut = 3 * PAGE + 17;
    other.set_len(cut as u64).unwrap();
    let mut dst = vec![9; 2 * PAGE];
    assert_eq!(file.read_at(&mut dst, 2 * PAGE as u64).unwrap(), PAGE + 17);
    assert_eq!(dst[..PAGE + 17], bytes[2 * PAGE..cut]);
    assert_eq!(file.read_at(&mut dst, 5 * PAGE as u64).unwrap(), 0);
    assert_eq!(file.len().unwrap(), cut as u64);
}

/// Goal: with direct I/O below, what is aligned goes around, and what is not is cached; so is a page of
/// which a part is read.
#[test]
fn direct_reads_are_aligned_or_cached() {
    let dir = temp_dir();
    let path = dir.path().join("file");
    let bytes = contents(64);
    std::fs::write(&path, &bytes).unwrap();
    let engine = builder(CACHE_BYTES, BackendChoice::Auto).admission(Admission::Never);
    let engine = engine.build().unwrap();
    let Ok(file) = engine.open(&path, &read_write().backing(Backing::Direct)) else {
        return common::skip("no direct I/O here");
    };
    file.advise(0, 0, Advice::Random).unwrap();
    let mut dst = vec![0; 4 * PAGE];
    let start = dst.as_ptr().align_offset(PAGE);
    for (from, at, len, cached) in [
        (start, 3 * PAGE, 2 * PAGE, 0),
        (start, 10 * PAGE, PAGE, 0),
        (start + 1, 20 * PAGE, PAGE, 1),
        (start, 30 * PAGE + 1, 100, 1),
        (start, 50 * PAGE, 512, 1),
        (start, 64 * PAGE, 1000, 1),
    ] {
        let before = engine.stats().fills;
        assert_eq!(file.read_at(&mut dst[from..from + len], at as u64).unwrap(), len);
        assert_eq!(dst[from..from + len], bytes[at..at + len]);
        assert_eq!(engine.stats().fills - before, cached, "{len} at {at}");
    }
}

/// Goal: of its own accord, a cache whose pages leave before they are read again turns reads away, keeps
/// what is hot, and takes up what becomes hot.
#[test]
fn what_is_read_once_goes_around_and_what_is_hot_stays() {
    let engine = builder(CACHE_BYTES, BackendChoice::Null).admission(Admission::Adaptive);
    let engine = engine.build().unwrap();
    let dir = temp_dir();
    let path = dir.path().join("file");
    std::fs::File::create(&path).unwrap().set_len(64 * CACHE_BYTES).unwrap();
    let file = engine.open(&path, &read_write()).unwrap();
    file.advise(0, 0, Advice::Random).unwrap();
    let read = |page: u64| file.read_at(&mut [0; PAGE], page * PAGE as u64).unwrap();
    let mut once = (0..64 * CACHE_BYTES / PAGE as u64).map(|n| n.wrapping_mul(7919) % (1 << 17));
    let hits_of = |first: u64, once: &mut dyn Iterator<Item = u64>| {
        let before = engine.stats();
        for (n, page) in (0..4000).zip(once) {
            read(page);
            read((1 << 16) + first + n % 500);
        }
        engine.stats().hits - before.hits
    };
    hits_of(0, &mut once);
    for first in [0, 1000] {
        hits_of(first, &mut once);
        let before = engine.stats();
        let hits = hits_of(first, &mut once);
        let after = engine.stats();

        assert!(hits > 3900, "{hits} of 4000 reads of a hot set hit");
        let (fills, misses) = (after.fills - before.fills, after.misses - before.misses);
        assert!(fills < misses / 2, "{fills} of {misses} pages were cached");
    }
}

/// Goal: what another process writes to the file is found by a read that goes around, as it caches nothing.
#[test]
fn nothing_is_kept_of_what_goes_around() {
    let engine = builder(CACHE_BYTES, BackendChoice::Auto).admission(Admission::Never);
    let engine = engine.build().unwrap();
    let (file, dir) = open(&engine, &contents(8), WriteMode::Through);
    let other = std::fs::OpenOptions::new().write(true).open(dir.path().join("file")).unwrap();
    for byte in [1, 2] {
        other.write_all_at(&[byte; PAGE], 0).unwrap();
        let mut dst = [0; PAGE];
        file.read_exact_at(&mut dst, 0).unwrap();
        assert_eq!(dst, [byte; PAGE]);
    }
    assert_eq!(engine.stats().fills, 0);
}

struct Counting(AtomicUsize);

impl Wake for Counting {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, SeqCst);
    }
}

/// Goal: a task that reads aside is woken by the waker of its last call; one that is dropped leaves nothing
/// behind: neither guard nor frames.
/// Method: a device that takes its time; each read is polled by two wakers in turn, and each second
/// one is dropped while it is under way.
#[test]
fn a_read_aside_wakes_who_called_last_and_can_be_dropped() {
    let device = BackendChoice::Sim(SimOptions::new(5).delay_us_max(3000));
    let engine = builder(CACHE_BYTES, device).admission(Admission::Never).build().unwrap();
    let bytes = contents(200);
    let (file, _dir) = open(&engine, &bytes, WriteMode::Back);
    let file = AsyncFile::from(file);
    let memory_bytes = engine.stats().memory_bytes;
    for n in 0..100 {
        let (first, second) = (Arc::new(Counting(0.into())), Arc::new(Counting(0.into())));
        let mut dst = vec![0; PAGE * (1 + n % 3)];
        let offset = (n * PAGE) as u64;
        let mut future = pin!(file.read_at(&mut dst, offset));
        let mut poll = |by: &Arc<Counting>| {
            let waker = Waker::from(Arc::clone(by));
            future.as_mut().poll(&mut Context::from_waker(&waker))
        };
        let mut polled = poll(&first);
        if polled.is_pending() {
            polled = poll(&second);
        }
        if n % 2 == 1 {
            continue;
        }
        while polled.is_pending() {
            let begun = Instant::now();
            while second.0.swap(0, SeqCst) == 0 {
                assert!(begun.elapsed() < Duration::from_secs(20), "nobody woke the task");
                std::thread::yield_now();
            }
            polled = poll(&second);
        }
        let len = dst.len();
        assert_eq!(dst, bytes[offset as usize..offset as usize + len]);
    }
    assert_eq!(engine.stats().fills, 0);
    // Nobody has a guard any more.
    file.file().write_all_at(&bytes, 0).unwrap();
    file.file().sync_all().unwrap();
    file.file().advise(0, 0, Advice::DontNeed).unwrap();
    assert!(engine.stats().memory_bytes < memory_bytes + (2 << 20), "{:?}", engine.stats());
}

/// Goal: requests of a queue go around, too.
#[test]
fn a_queue_reads_around() {
    for backend in [BackendChoice::Threads, BackendChoice::Auto] {
        let engine = builder(CACHE_BYTES, backend).admission(Admission::Never).build().unwrap();
        let bytes = contents(400);
        let (file, _dir) = open(&engine, &bytes, WriteMode::Through);
        let file = Arc::new(file);
        let queue = engine.queue(64).unwrap();
        let request = |n: u64| {
            let buffer = vec![0; 2 * PAGE];
            Request::read(&file, buffer, n * 2 * PAGE as u64).user_data(n)
        };
        let mut requests: Vec<Request> = (0..64).map(request).collect();
        assert_eq!(queue.submit(&mut requests), 64);
        for completion in queue.wait(64, 64, None).unwrap() {
            let at = completion.user_data() as usize * 2 * PAGE;
            assert_eq!(completion.result().unwrap(), 2 * PAGE);
            assert_eq!(completion.into_buffer(), bytes[at..at + 2 * PAGE]);
        }
        assert_eq!(engine.stats().fills, 0);
    }
}
