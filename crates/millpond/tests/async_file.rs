//! Asynchronous reads and writes, in several runtimes and without one.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::future::Future;
use std::io::IoSliceMut;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use millpond::sim::SimOptions;
use millpond::{Advice, AsyncFile, BackendChoice, Engine, Error, OpenOptions};

use common::{Random, back_ends, block_on, read_write, temp_dir, within};

const PAGE: u64 = 4096;

/// Counts the allocations of each thread.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: passes everything on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promise is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is the same.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn byte_at(offset: u64) -> u8 {
    (offset.wrapping_mul(37) ^ (offset >> 12).wrapping_mul(11)) as u8
}

fn content(offset: u64, len: usize) -> Vec<u8> {
    (offset..offset + len as u64).map(byte_at).collect()
}

struct Case {
    file: AsyncFile,
    engine: Engine,
    dir: tempfile::TempDir,
}

fn open(backend: BackendChoice, cache_bytes: u64, file_bytes: u64) -> Case {
    open_with(common::builder(cache_bytes, backend), file_bytes)
}

fn open_with(builder: millpond::EngineBuilder, file_bytes: u64) -> Case {
    let dir = temp_dir();
    let path = dir.path().join("file");
    std::fs::write(&path, content(0, file_bytes as usize)).unwrap();
    let engine = builder.build().unwrap();
    let file = AsyncFile::from(engine.open(&path, &read_write()).unwrap());
    Case { engine, file, dir }
}

/// Goal: a read of cached bytes is ready at the first poll, without an allocation.
#[test]
fn a_hit_is_ready_at_once_and_allocates_nothing() {
    let case = open(BackendChoice::Threads, 1 << 20, 100_000);
    let mut all = vec![0; 100_000];
    case.file.file().read_at(&mut all, 0).unwrap();
    let mut dst = vec![0; 9000];
    let (mut one, mut two) = ([0; 100], [0; 5000]);
    let mut cx = Context::from_waker(Waker::noop());
    let before = ALLOCATIONS.get();
    for offset in [0, 4000, 99_000, 100_000] {
        let read = pin!(case.file.read_at(&mut dst, offset)).poll(&mut cx);
        assert!(matches!(read, Poll::Ready(Ok(len)) if len == 9000.min(100_000 - offset as usize)));
        let mut slices = [IoSliceMut::new(&mut one), IoSliceMut::new(&mut two)];
        let read = pin!(case.file.read_vectored_at(&mut slices, offset)).poll(&mut cx);
        assert!(matches!(read, Poll::Ready(Ok(len)) if len == 5100.min(100_000 - offset as usize)));
        assert!(pin!(case.file.read_exact_at(&mut dst[..0], offset)).poll(&mut cx).is_ready());
    }
    assert_eq!(ALLOCATIONS.get(), before);
    assert!(dst[..1000] == content(99_000, 1000));
}

/// Goal: misses of every length and offset return the file's bytes, without a runtime, on every
/// back end, with few frames and few reads in flight.
#[test]
fn misses_return_the_files_bytes() {
    let mut random = Random::from_environment();
    for (name, backend) in back_ends(random.next()) {
        for (cache_bytes, in_flight) in [(48 << 10, 1024), (1 << 20, 1), (1 << 20, 1024)] {
            let builder = common::builder(cache_bytes, backend.clone());
            let case = open_with(builder.reads_in_flight_max(in_flight), 4 << 20);
            let mut random = random.fork();
            within(Duration::from_secs(60), name, move || {
                if random.chance(500) {
                    case.file.file().advise(0, 0, Advice::Random).unwrap();
                }
                let mut dst = vec![0; 400_000];
                for _ in 0..300 {
                    let long = if random.chance(100) { 400_000 } else { 3 * PAGE };
                    let len = random.below(long) as usize;
                    let offset = random.below(5 << 20);
                    let dst = &mut dst[..len];
                    let expected = len.min((4u64 << 20).saturating_sub(offset) as usize);
                    let half = len / 3;
                    let moved = if random.chance(300) {
                        let (one, two) = dst.split_at_mut(half);
                        let mut slices = [IoSliceMut::new(one), IoSliceMut::new(two)];
                        block_on(case.file.read_vectored_at(&mut slices, offset)).unwrap()
                    } else {
                        block_on(case.file.read_at(dst, offset)).unwrap()
                    };
                    assert_eq!(moved, expected);
                    assert!(dst[..moved] == content(offset, moved), "{name}: {len} at {offset}");
                }
            });
        }
    }
}

#[test]
fn operations_without_permission_fail() {
    let case = open(BackendChoice::Threads, 1 << 20, 100);
    let writer = OpenOptions::new().write(true);
    let writer = case.engine.open(case.dir.path().join("file"), &writer).unwrap();
    let mut bytes = [0; 10];
    assert_eq!(writer.try_read_at(&mut bytes, 0).unwrap_err().errno(), libc::EBADF);
    let writer = AsyncFile::from(writer);
    let refused = block_on(writer.read_at(&mut bytes, 0)).unwrap_err();
    assert_eq!(refused.errno(), libc::EBADF);
    let refused = block_on(case.file.read_at(&mut bytes, u64::MAX)).unwrap_err();
    assert_eq!(refused.errno(), libc::EINVAL);
}

/// Goal: `try_read_at` reads cached bytes, and starts no I/O for bytes that are not cached.
#[test]
fn try_read_starts_no_io() {
    let case = open(BackendChoice::Threads, 1 << 20, 100_000);
    let file = case.file.file();
    let mut bytes = [0; 8192];
    for _ in 0..3 {
        let refused = file.try_read_at(&mut bytes, 4096).unwrap_err();
        assert!(matches!(refused, Error::WouldBlock { .. }) && refused.errno() == libc::EAGAIN);
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!((case.engine.stats().misses, case.engine.stats().fills), (0, 0));
    file.advise(0, 0, Advice::Random).unwrap();
    file.read_at(&mut bytes[..4096], 4096).unwrap();
    assert!(file.try_read_at(&mut bytes, 4096).is_err(), "half of it is not cached");
    assert_eq!(file.try_read_at(&mut bytes[..100], 5000).unwrap(), 100);
    assert!(bytes[..100] == content(5000, 100));
    assert_eq!(file.try_read_at(&mut bytes, 100_000).unwrap(), 0);
    assert_eq!(file.try_read_at(&mut [], 0).unwrap(), 0);
    assert_eq!(case.engine.stats().fills, 1);
}

/// Polls a future at most a given number of times, then completes with `None`.
struct PollAtMost<F>(F, u32);

impl<F: Future + Unpin> Future for PollAtMost<F> {
    type Output = Option<F::Output>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if self.1 == 0 {
            return Poll::Ready(None);
        }
        self.1 -= 1;
        match Pin::new(&mut self.0).poll(cx) {
            Poll::Ready(done) => Poll::Ready(Some(done)),
            Poll::Pending if self.1 == 0 => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    }
}

/// Goal: a future may be dropped at any point of its wait (page, guard, frame, worker). Its buffer
/// may be reused at once, other operations get their bytes, and nothing hangs or leaks.
#[test]
fn futures_can_be_dropped_at_any_point() {
    let mut random = Random::from_environment();
    let mut all = back_ends(random.next());
    let faulty = SimOptions::new(4).delay_us_max(200).short_per_mille(200).error_per_mille(50);
    all.push(("faulty", BackendChoice::Sim(faulty)));
    for (name, backend) in all {
        let builder = common::builder(128 << 10, backend).reads_in_flight_max(3);
        let case = Arc::new(open_with(builder, 2 << 20));
        let dropped = Arc::new(AtomicU64::new(0));
        let threads: Vec<_> = (0..3)
            .map(|_| {
                let (case, dropped, mut random) =
                    (Arc::clone(&case), Arc::clone(&dropped), random.fork());
                std::thread::spawn(move || {
                    for _ in 0..400 {
                        let pages = if random.chance(50) { 70 } else { 4 };
                        let len = 1 + random.below(pages * PAGE) as usize;
                        let offset = random.below((2 << 20) - len as u64);
                        if random.chance(100) {
                            let place = random.below(512) * PAGE;
                            let bytes = content(place, 4096);
                            // The faulty device may fail the write.
                            let _ = case.file.file().write_at(&bytes, place);
                        }
                        let mut dst = vec![0; len];
                        let polls = 1 + random.below(4) as u32;
                        let read = PollAtMost(case.file.read_at(&mut dst, offset), polls);
                        match block_on(read) {
                            None => {
                                dropped.fetch_add(1, SeqCst);
                            }
                            Some(Ok(moved)) => {
                                // On the failing device a read may end before the bytes that
                                // failed.
                                assert!(moved == len || (name == "faulty" && moved > 0));
                                assert!(dst[..moved] == content(offset, moved));
                            }
                            Some(Err(error)) => {
                                assert!(name == "faulty" && error.errno() == libc::EIO);
                            }
                        }
                    }
                })
            })
            .collect();
        within(Duration::from_secs(60), name, move || {
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        });
        if name != "memory" {
            assert!(dropped.load(SeqCst) > 50, "{name}: {dropped:?} were dropped");
        }
        // The file still works.
        let mut dst = vec![0; 8192];
        for offset in [0, 1 << 20] {
            if let Ok(moved) = block_on(case.file.read_at(&mut dst, offset)) {
                assert!(moved == 8192 && dst == content(offset, 8192));
            } else {
                assert_eq!(name, "faulty");
            }
        }
    }
}

/// Goal: a future that is woken but never polled again does not occupy the last place of the
/// in-flight limit.
#[test]
fn a_future_that_is_not_polled_blocks_no_other() {
    let sim = SimOptions::new(1).delay_us_max(3000);
    let builder = common::builder(1 << 20, BackendChoice::Sim(sim)).reads_in_flight_max(1);
    let case = open_with(builder, 4 << 20);
    case.file.file().advise(0, 0, Advice::Random).unwrap();
    within(Duration::from_secs(20), "others", move || {
        let mut cx = Context::from_waker(Waker::noop());
        let mut buffers = vec![[0; 100]; 20];
        let mut idle: Vec<_> = (1u64..)
            .zip(&mut buffers)
            .map(|(n, buffer)| case.file.read_at(buffer, n * 64 * PAGE))
            .collect();
        // The device may complete a read before its first poll.
        let pending = idle
            .iter_mut()
            .filter_map(|read| Pin::new(read).poll(&mut cx).is_pending().then_some(()));
        assert!(pending.count() > 10);
        let mut dst = [0; 100];
        assert_eq!(block_on(case.file.read_at(&mut dst, 50 * PAGE)).unwrap(), 100);
        assert!(dst[..] == content(50 * PAGE, 100));
        drop(idle);
    });
}

/// Goal: a task waits for completions of a queue without a thread. A wait that is dropped returns
/// the completions that were granted to it.
#[test]
fn tasks_wait_for_a_queue_without_a_thread() {
    let case = open(BackendChoice::Threads, 1 << 20, 1 << 20);
    let queue = case.engine.queue(8).unwrap();
    let request =
        |n: u64| millpond::queue::Request::read(case.file.file(), vec![0; 10], n * 9 * PAGE);
    let mut granted = Box::pin(queue.wait_async(2, 2).unwrap());
    let mut cx = Context::from_waker(Waker::noop());
    assert!(granted.as_mut().poll(&mut cx).is_pending());
    queue.submit_all([request(0).user_data(0), request(1).user_data(1)]).unwrap();
    while queue.counts() != (0, 0) {
        std::thread::yield_now();
    }
    assert!(queue.wait(0, 8, None).unwrap().is_empty(), "both are granted");
    drop(granted);
    assert_eq!(queue.counts(), (2, 0));
    queue.submit(request(2).user_data(2)).unwrap();
    assert_eq!(block_on(queue.wait_async(3, 3).unwrap()).len(), 3);
}

/// Goal: readers and writers of one place, all asynchronous, in tokio's runtimes: nothing is torn.
#[test]
fn runs_in_tokio() {
    const LEN: usize = 2 * 4096;
    let multi = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_time()
        .build()
        .unwrap();
    let current = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    for (name, backend) in back_ends(1) {
        for runtime in [&multi, &current] {
            let case = open(backend.clone(), 64 << 10, 64 * PAGE);
            runtime.block_on(async {
                let tasks: Vec<_> = (0..8u64)
                    .map(|who| {
                        let file = case.file.clone();
                        tokio::spawn(async move {
                            let mut random = Random(who);
                            let mut dst = vec![0; LEN];
                            for round in 0..40 {
                                let offset = random.below(32) * LEN as u64;
                                if who < 2 {
                                    let src = vec![round; LEN];
                                    assert_eq!(file.write_at(&src, offset).await.unwrap(), LEN);
                                    continue;
                                }
                                assert_eq!(file.read_at(&mut dst, offset).await.unwrap(), LEN);
                                let whole = dst.iter().all(|&byte| byte == dst[0]);
                                assert!(whole || dst == content(offset, LEN), "{name}: torn");
                            }
                        })
                    })
                    .collect();
                for task in tasks {
                    tokio::time::timeout(Duration::from_secs(30), task)
                        .await
                        .unwrap_or_else(|_| panic!("{name}: a hang"))
                        .unwrap();
                }
            });
        }
    }
}
