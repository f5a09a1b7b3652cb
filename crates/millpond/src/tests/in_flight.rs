//! The number of reads that all callers together have in flight at the backend.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::Duration;

use crate::cache::table::page::PageState;
use crate::inode::CachedFile;
use crate::queue::Request;
use crate::tests::slow::{Kind, Slow};
use crate::units::PageIndex;
use crate::{AsyncFile, BackendChoice, Engine, File, OpenOptions, WriteMode};

const PAGE: u64 = 4096;
const FILE_PAGES: u64 = 512;

fn byte_at(offset: u64) -> u8 {
    (offset.wrapping_mul(29) ^ (offset >> 12).wrapping_mul(13)) as u8
}

fn is_content(bytes: &[u8], offset: u64) -> bool {
    (offset..).zip(bytes).all(|(at, &byte)| byte == byte_at(at))
}

struct Case {
    slow: Arc<Slow>,
    engine: Engine,
    cached: Arc<CachedFile>,
    options: OpenOptions,
}

impl Case {
    fn new(reads: usize, cache_bytes: u64, delay: Duration) -> Case {
        let builder = Engine::builder().cache_bytes(cache_bytes).backend(BackendChoice::Memory);
        let builder = builder.reads_in_flight_max(reads).readahead_bytes_max(0);
        let engine = builder.build().unwrap();
        let slow = Slow::new((0..FILE_PAGES * PAGE).map(byte_at).collect(), delay);
        let options = OpenOptions::new().read(true).write(true).write_mode(WriteMode::Back);
        let cached = CachedFile::on(engine.shared(), slow.clone(), &options).unwrap();
        Case { slow, engine, cached, options }
    }

    fn file(&self) -> File {
        File::new(Arc::clone(&self.cached), None, &self.options)
    }

    fn is_empty(&self, page: u64) -> bool {
        let found = self.cached.core().lookup(&self.engine.shared().cache.frames, PageIndex(page));
        found.is_none_or(|found| found.word.load().state() == PageState::Empty)
    }
}

struct Unpark(thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

fn block_on<F: Future>(future: F) -> F::Output {
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(done) => return done,
            Poll::Pending => thread::park(),
        }
    }
}

/// SplitMix64 (Steele et al., OOPSLA 2014).
struct Random(u64);

impl Random {
    fn below(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % below
    }
}

fn work(file: &File, random: &mut Random, rounds: u32) {
    let mut bytes = vec![0; 20 * PAGE as usize];
    for _ in 0..rounds {
        let len = 1 + random.below(20 * PAGE);
        let offset = random.below(FILE_PAGES * PAGE - len);
        let bytes = &mut bytes[..len as usize];
        match random.below(8) {
            // A part of each of its edge pages: both are read.
            0 => {
                (offset..).zip(&mut *bytes).for_each(|(at, byte)| *byte = byte_at(at));
                assert_eq!(file.write_at(bytes, offset).unwrap(), len as usize);
            }
            // If there is no room, there is no view.
            1 => {
                if let Ok(view) = file.view(offset, 100) {
                    assert!(is_content(&view, offset));
                }
            }
            // Alternately cached and not: a read of many extents.
            2 => {
                for page in 0..10 {
                    let at = (offset / PAGE + 2 * page) % FILE_PAGES * PAGE;
                    file.advise(at, PAGE, crate::Advice::DontNeed).unwrap();
                }
            }
            _ => {
                assert_eq!(file.read_at(bytes, offset).unwrap(), len as usize);
                assert!(is_content(bytes, offset));
            }
        }
    }
}

/// Goal: the number of reads in flight never exceeds the limit, for any mix of threads, futures and
/// queues, in small and larger caches; and all reads end (read_limit.L2, read_limit.L3).
#[test]
fn no_mix_has_more_reads_in_flight_than_there_may_be() {
    for (reads, cache_bytes) in
        [(1, 64 << 10), (1, 1 << 20), (2, 16 << 10), (3, 256 << 10), (7, 1 << 20)]
    {
        let case = Case::new(reads, cache_bytes, Duration::from_micros(100));
        thread::scope(|scope| {
            for who in 0..8 {
                let file = case.file();
                scope.spawn(move || work(&file, &mut Random(who), 40));
            }
            for who in 0..4 {
                let file = AsyncFile::from(case.file());
                scope.spawn(move || {
                    let (mut random, mut bytes) = (Random(who + 100), vec![0; 9 * PAGE as usize]);
                    for _ in 0..40 {
                        let len = 1 + random.below(9 * PAGE);
                        let offset = random.below(FILE_PAGES * PAGE - len);
                        let bytes = &mut bytes[..len as usize];
                        assert_eq!(block_on(file.read_at(bytes, offset)).unwrap(), len as usize);
                        assert!(is_content(bytes, offset));
                    }
                });
            }
            let (file, queue) = (Arc::new(case.file()), case.engine.queue(32).unwrap());
            scope.spawn(move || {
                let mut random = Random(1000);
                for _ in 0..15 {
                    let mut requests: Vec<Request> = (0..32)
                        .map(|_| {
                            let offset = random.below((FILE_PAGES - 3) * PAGE);
                            Request::read(&file, vec![0; 9000], offset).user_data(offset)
                        })
                        .collect();
                    queue.submit_all(requests.drain(..)).unwrap();
                    for one in queue.wait(32, 32, None).unwrap() {
                        assert_eq!(one.result().unwrap(), 9000);
                        let offset = one.user_data();
                        assert!(is_content(&one.into_buffer(), offset));
                    }
                }
            });
        });
        // The cache of a few pages permits fewer.
        let most = reads.min((cache_bytes / 4 / PAGE) as usize);
        assert_eq!(case.slow.take_max(Kind::Read), most, "{reads} in {cache_bytes}");
        case.file().sync_all().unwrap();
    }
}

/// Goal: a thread that waits for a slot has claimed no page (read_limit.L1): another reader of its
/// pages does not wait for it, and reads them when there is a slot.
#[test]
fn a_waiter_for_a_slot_has_claimed_no_page() {
    let case = Case::new(1, 1 << 20, Duration::ZERO);
    case.slow.hold(Kind::Read, true);
    thread::scope(|scope| {
        let read = |page: u64, pages: u64| {
            let file = case.file();
            scope.spawn(move || {
                let mut bytes = vec![0; (pages * PAGE) as usize];
                assert_eq!(file.read_at(&mut bytes, page * PAGE).unwrap(), bytes.len());
                assert!(is_content(&bytes, page * PAGE));
            });
        };
        read(0, 1);
        case.slow.wait_for(Kind::Read, 1);
        read(10, 3);
        read(20, 1);
        // They can only wait, so the length of the pause matters little.
        thread::sleep(Duration::from_millis(50));
        assert!(!case.is_empty(0) && (10..13).chain(20..21).all(|page| case.is_empty(page)));
        assert_eq!(case.slow.now(Kind::Read), 1);
        case.slow.hold(Kind::Read, false);
    });
    assert_eq!(case.slow.take_max(Kind::Read), 1);
}

/// Goal: a read of several extents takes the free slots, and reads the rest in parts.
#[test]
fn a_read_of_many_runs_goes_in_parts() {
    let case = Case::new(3, 4 << 20, Duration::from_micros(100));
    let file = case.file();
    let mut bytes = vec![0; 40 * PAGE as usize];
    for page in (0..40).step_by(2) {
        file.read_at(&mut bytes[..1], page * PAGE).unwrap();
    }
    assert_eq!(case.slow.take_max(Kind::Read), 1);
    assert_eq!(file.read_at(&mut bytes, 0).unwrap(), bytes.len());
    assert!(is_content(&bytes, 0));
    assert_eq!(case.slow.take_max(Kind::Read), 3);
    assert_eq!(case.engine.stats().misses, 40);
}

/// Goal: however many offers wait, if a backend refuses one read after the other, for example
/// without a thread, the offers are called one after the other, and not nested.
#[test]
fn a_long_line_of_refused_reads_needs_no_stack() {
    let case = Case::new(1, 4 << 20, Duration::ZERO);
    case.slow.hold(Kind::Read, true);
    let file = AsyncFile::from(case.file());
    let first = thread::scope(|scope| {
        let reader = scope.spawn(|| case.file().read_at(&mut [0; 1], 0).unwrap());
        case.slow.wait_for(Kind::Read, 1);
        let mut bytes = vec![[0; 1]; 20_000];
        let mut reads: Vec<_> = (0u64..)
            .zip(&mut bytes)
            .map(|(n, byte)| file.read_at(byte, (1 + n % (FILE_PAGES - 1)) * PAGE))
            .collect();
        let mut cx = Context::from_waker(Waker::noop());
        assert!(reads.iter_mut().all(|read| pin!(read).poll(&mut cx).is_pending()));
        case.slow.refuse();
        case.slow.hold(Kind::Read, false);
        reader.join().unwrap()
    });
    assert_eq!(first, 1);
    // The slot has been returned.
    let mut bytes = [0; PAGE as usize];
    assert_eq!(case.file().read_at(&mut bytes, 100 * PAGE).unwrap(), bytes.len());
    assert!(is_content(&bytes, 100 * PAGE));
}
