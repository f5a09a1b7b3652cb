//! Reads that bypass the cache (`EngineBuilder::admission`).

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

use millpond::queue::Request;
use millpond::sim::SimOptions;
use millpond::{Admission, Advice, AsyncFile, BackendChoice, Backing, Engine, File, WriteMode};

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

/// Goal: reads that bypass the cache return the file's bytes: pages that are cached, DIRTY or not,
/// in part or as a whole, and the back end's; up to the end of the file, into any memory.
/// Method: a model; reads and writes at random, on every back end, in both modes.
#[test]
fn bypassing_reads_return_the_files_bytes() {
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

/// Goal: a bypassing read of a file that another process has truncated ends at the new end. If the
/// file has grown again, a later read returns the new bytes.
#[test]
fn a_bypassing_read_ends_at_an_external_truncation() {
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

/// Goal: with direct I/O below, aligned reads bypass the cache, and unaligned ones and reads of a
/// part of a page are cached.
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

/// Goal: adaptively, a cache whose pages are evicted before their second read stops admitting
/// pages, keeps hot pages, and admits pages that become hot.
#[test]
fn cold_pages_bypass_the_cache_and_hot_pages_stay() {
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

/// Goal: a bypassing read finds the writes of another process, as it caches nothing.
#[test]
fn bypassing_reads_cache_nothing() {
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

/// Goal: a task with a bypassing read in the background is woken by the waker of its last poll. A
/// dropped task leaves neither guard nor frames behind.
/// Method: a slow device; each read is polled by two wakers in turn, and every second one is
/// dropped in flight.
#[test]
fn a_background_read_wakes_the_last_waker_and_can_be_dropped() {
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
                assert!(begun.elapsed() < Duration::from_secs(20), "the task was not woken");
                std::thread::yield_now();
            }
            polled = poll(&second);
        }
        let len = dst.len();
        assert_eq!(dst, bytes[offset as usize..offset as usize + len]);
    }
    assert_eq!(engine.stats().fills, 0);
    // No guard is held any more.
    file.file().write_all_at(&bytes, 0).unwrap();
    file.file().sync_all().unwrap();
    file.file().advise(0, 0, Advice::DontNeed).unwrap();
    assert!(engine.stats().memory_bytes < memory_bytes + (2 << 20), "{:?}", engine.stats());
}

/// Goal: requests of a queue bypass the cache, too.
#[test]
fn a_queue_bypasses_the_cache() {
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
        queue.submit_all(requests.drain(..)).unwrap();
        for completion in queue.wait(64, 64, None).unwrap() {
            let at = completion.user_data() as usize * 2 * PAGE;
            assert_eq!(completion.result().unwrap(), 2 * PAGE);
            assert_eq!(completion.into_buffer(), bytes[at..at + 2 * PAGE]);
        }
        assert_eq!(engine.stats().fills, 0);
    }
}

/// Goal: requests with owned or borrowed memory that bypass the cache return the file's bytes.
/// Where the device is short or fails, the read takes another way or returns the error.
/// Method: reads of all kinds, of whole pages and not, among pages that are cached, DIRTY or not;
/// devices that fail.
#[test]
fn requests_bypass_the_cache_into_owned_memory() {
    let faulty = SimOptions::new(11).short_per_mille(200).error_per_mille(50);
    let faulty = [faulty.clone(), faulty.delay_us_max(300)].map(BackendChoice::Sim);
    let backends = [BackendChoice::Threads, BackendChoice::Auto, BackendChoice::Memory];
    for (backend, is_faulty) in
        backends.map(|one| (one, false)).into_iter().chain(faulty.map(|one| (one, true)))
    {
        let engine = builder(CACHE_BYTES, backend).admission(Admission::Never).build().unwrap();
        let bytes = contents(400);
        let (file, _dir) = open(&engine, &bytes, WriteMode::Back);
        let file = Arc::new(file);
        // DIRTY pages, with the same bytes.
        for page in [10, 11, 50, 399] {
            let page = page * PAGE..(page + 1) * PAGE;
            file.write_all_at(&bytes[page.clone()], page.start as u64).unwrap();
        }
        let queue = engine.queue(64).unwrap();
        let mut random = Random::from_environment();
        for round in 0..20 {
            let mut lent = vec![0; 64 * 8 * PAGE];
            let mut requests = Vec::new();
            let mut len_of = Vec::new();
            for (number, memory) in lent.chunks_mut(8 * PAGE).enumerate() {
                let offset = random.below(400) * PAGE as u64 + random.below(2) * random.below(900);
                let pages = 1 + random.below(3) as usize;
                let (request, len) = match number % 3 {
                    0 => (Request::read(&file, vec![0; pages * PAGE], offset), pages * PAGE),
                    1 => {
                        let buffers = engine.alloc_buffers(pages, PAGE).unwrap();
                        (Request::read_buffers(&file, buffers, offset), pages * PAGE)
                    }
                    _ => {
                        let (base, len) = (memory.as_mut_ptr(), pages * PAGE);
                        let of = |from: usize, len| libc::iovec {
                            iov_base: base.wrapping_add(from).cast(),
                            iov_len: len,
                        };
                        let parts = [of(0, 100), of(4 * PAGE, len - 100)];
                        // SAFETY: all completions are taken before the memory is accessed or freed.
                        (unsafe { Request::read_lent(&file, &parts, offset) }, len)
                    }
                };
                len_of.push((offset as usize, len));
                requests.push(request.user_data(number as u64));
            }
            let done = if round % 2 == 0 {
                queue.submit_all(requests.drain(..)).unwrap();
                queue.wait(64, 64, None).unwrap()
            } else {
                let alone = |request| queue.submit_and_wait([request], 1, 1, None);
                requests.into_iter().flat_map(|request| alone(request).unwrap().0).collect()
            };
            assert_eq!(done.len(), 64);
            for completion in done {
                let number = completion.user_data() as usize;
                let (offset, len) = len_of[number];
                let end = (offset + len).min(bytes.len());
                let moved = match completion.result() {
                    Ok(moved) => moved,
                    Err(error) => {
                        assert!(is_faulty, "{error}");
                        continue;
                    }
                };
                // A read that can't be completed returns the part before the failure.
                assert!(moved == end - offset || is_faulty && 0 < moved && moved < end - offset);
                let got = match number % 3 {
                    0 => completion.into_buffer(),
                    1 => completion.into_buffers().iter().flat_map(|one| one.to_vec()).collect(),
                    _ => {
                        let memory = &lent[number * 8 * PAGE..][..8 * PAGE];
                        [&memory[..100], &memory[4 * PAGE..][..len - 100]].concat()
                    }
                };
                assert!(got[..moved] == bytes[offset..][..moved], "{len} at {offset}");
                assert_eq!(got.len(), len);
            }
        }
        // No guard is held any more.
        if !is_faulty {
            assert!(engine.stats().fills < 20 * 64, "most went around: {:?}", engine.stats());
            file.write_all_at(&bytes, 0).unwrap();
        }
        file.advise(0, 0, Advice::DontNeed).unwrap();
    }
}

/// Goal: a read into owned memory is atomic, as all other reads are: it holds the range until it
/// has ended.
/// Method: a writer stamps several pages at once, past the cache, while a queue reads them.
#[test]
fn a_read_into_owned_memory_is_atomic() {
    const PAGES: usize = 4;
    for backend in [BackendChoice::Threads, BackendChoice::Auto] {
        let engine = builder(CACHE_BYTES, backend).admission(Admission::Never).build().unwrap();
        let (file, _dir) = open(&engine, &[0; PAGES * PAGE], WriteMode::Through);
        let file = Arc::new(file);
        let queue = engine.queue(8).unwrap();
        std::thread::scope(|scope| {
            let is_over = Arc::new(AtomicUsize::new(0));
            let (writes, theirs) = (Arc::clone(&file), Arc::clone(&is_over));
            scope.spawn(move || {
                for stamp in (0..=255).cycle().take_while(|_| theirs.load(SeqCst) == 0) {
                    writes.write_all_at(&[stamp; PAGES * PAGE], 0).unwrap();
                    writes.advise(0, 0, Advice::DontNeed).unwrap();
                }
            });
            let mut checked = 0;
            let begun = Instant::now();
            while checked < 2000 && begun.elapsed() < Duration::from_secs(60) {
                let request = |_| {
                    let buffers = engine.alloc_buffers(PAGES, PAGE).unwrap();
                    Request::read_buffers(&file, buffers, 0)
                };
                let mut requests: Vec<Request> = (0..8).map(request).collect();
                queue.submit_all(requests.drain(..)).unwrap();
                for completion in queue.wait(8, 8, None).unwrap() {
                    assert_eq!(completion.result().unwrap(), PAGES * PAGE);
                    let buffers = completion.into_buffers();
                    let stamp = buffers[0][0];
                    let is_whole = buffers.iter().all(|one| one.iter().all(|&byte| byte == stamp));
                    checked += 1;
                    if !is_whole {
                        is_over.store(1, SeqCst);
                        panic!("torn");
                    }
                }
            }
            is_over.store(1, SeqCst);
        });
    }
}

/// Goal: a bypassing request of a file that another process has truncated ends at the new end.
#[test]
fn a_request_ends_at_an_external_truncation() {
    let engine = builder(CACHE_BYTES, BackendChoice::Auto).admission(Admission::Never);
    let engine = engine.build().unwrap();
    let bytes = contents(8);
    let (file, dir) = open(&engine, &bytes, WriteMode::Through);
    let file = Arc::new(file);
    let other = std::fs::OpenOptions::new().write(true).open(dir.path().join("file")).unwrap();
    let cut = 3 * PAGE + 17;
    other.set_len(cut as u64).unwrap();
    let queue = engine.queue(8).unwrap();
    let buffers = engine.alloc_buffers(2, PAGE).unwrap();
    queue.submit(Request::read_buffers(&file, buffers, 2 * PAGE as u64)).unwrap();
    let done = queue.wait(1, 8, None).unwrap().remove(0);
    assert_eq!(done.result().unwrap(), PAGE + 17);
    let buffers = done.into_buffers();
    assert_eq!(buffers[0][..], bytes[2 * PAGE..3 * PAGE]);
    assert_eq!(buffers[1][..17], bytes[3 * PAGE..cut]);
    assert_eq!(file.len().unwrap(), cut as u64);
}

/// Goal: a read into buffers through the cache hits at once, and fills the pages that miss.
#[test]
fn buffers_are_read_through_the_cache() {
    let engine = builder(CACHE_BYTES, BackendChoice::Auto).admission(Admission::Always);
    let engine = engine.build().unwrap();
    let bytes = contents(64);
    let (file, _dir) = open(&engine, &bytes, WriteMode::Through);
    let file = Arc::new(file);
    let queue = engine.queue(16).unwrap();
    for round in 0..2 {
        let request = |n: usize| {
            let buffers = engine.alloc_buffers(2, PAGE + 100).unwrap();
            Request::read_buffers(&file, buffers, (n * 4 * PAGE) as u64).user_data(n as u64)
        };
        let mut requests: Vec<Request> = (0..16).map(request).collect();
        queue.submit_all(requests.drain(..)).unwrap();
        if round == 1 {
            assert_eq!(queue.counts(), (16, 0), "all have hit");
        }
        for done in queue.wait(16, 16, None).unwrap() {
            let at = done.user_data() as usize * 4 * PAGE;
            assert_eq!(done.result().unwrap(), 2 * (PAGE + 100));
            let read: Vec<u8> = done.into_buffers().iter().flat_map(|one| one.to_vec()).collect();
            assert!(read == bytes[at..at + 2 * (PAGE + 100)]);
        }
        assert_eq!(engine.stats().fills, 16 * 3);
    }
    // A read too large for a hit goes to a thread, and an empty one completes at once.
    let buffers = engine.alloc_buffers(65, PAGE).unwrap();
    queue
        .submit_all([
            Request::read_buffers(&file, buffers, 0),
            Request::read_buffers(&file, Vec::new(), 0).user_data(1),
        ])
        .unwrap();
    for done in queue.wait(2, 16, None).unwrap() {
        let (moved, number) = (done.result().unwrap(), done.user_data());
        let buffers = done.into_buffers();
        assert_eq!((moved, buffers.len()), [(bytes.len(), 65), (0, 0)][number as usize]);
    }
}
