//! Tasks that wait for a page that another thread fills or hides: they are woken when that ends,
//! with or without an error.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::{Duration, Instant};

use crate::cache::table::page::PageState;
use crate::inode::CachedFile;
use crate::queue::Request;
use crate::tests::slow::{Kind, Slow};
use crate::units::PageIndex;
use crate::workers::THREADS_MAX;
use crate::{Advice, AsyncFile, BackendChoice, Engine, File, OpenOptions};

const PAGE: usize = 4096;
const FILE_BYTES: usize = 128 * PAGE;
const OLD: u8 = 1;
const NEW: u8 = 2;
/// A wake-up that takes longer is lost.
const LIMIT: Duration = Duration::from_secs(30);

struct Case {
    slow: Arc<Slow>,
    engine: Engine,
    cached: Arc<CachedFile>,
}

impl Case {
    fn new() -> Case {
        let engine = Engine::builder().cache_bytes(4 << 20).backend(BackendChoice::Memory);
        let engine = engine.build().unwrap();
        let slow = Slow::new(vec![OLD; FILE_BYTES], Duration::ZERO);
        let options = OpenOptions::new().read(true).write(true);
        let cached = CachedFile::on(engine.shared(), slow.clone(), &options).unwrap();
        Case { slow, engine, cached }
    }

    fn file(&self, direct: bool) -> File {
        let options = OpenOptions::new().read(true).write(true);
        let options = if direct { options.direct(true).bounce(true) } else { options };
        let file = File::new(Arc::clone(&self.cached), None, &options);
        if !direct {
            file.advise(0, 0, Advice::Random).unwrap();
        }
        file
    }

    fn state(&self, page: u64) -> PageState {
        let found = self.cached.core().lookup(&self.engine.shared().cache.frames, PageIndex(page));
        found.map_or(PageState::Empty, |found| found.word.load().state())
    }
}

#[derive(Default)]
struct Count(AtomicUsize);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, SeqCst);
    }
}

/// The result of a read, and the bytes.
type Done = (Result<usize, i32>, Vec<u8>);

/// A read of `len` bytes as a task that is only polled explicitly.
struct Task {
    read: Pin<Box<dyn Future<Output = Done>>>,
    count: Arc<Count>,
}

impl Task {
    fn new(case: &Case, offset: usize, len: usize) -> Task {
        let file = AsyncFile::from(case.file(false));
        let read = Box::pin(async move {
            let mut bytes = vec![0; len];
            let moved = file.read_at(&mut bytes, offset as u64).await;
            (moved.map_err(|error| error.errno()), bytes)
        });
        Task { read, count: Arc::default() }
    }

    fn poll(&mut self) -> Poll<Done> {
        let waker = Waker::from(Arc::clone(&self.count));
        self.read.as_mut().poll(&mut Context::from_waker(&waker))
    }

    fn woken(&self) -> usize {
        self.count.0.load(SeqCst)
    }

    fn wait_for(&self, wake_ups: usize) {
        let begun = Instant::now();
        while self.woken() < wake_ups {
            assert!(begun.elapsed() < LIMIT, "a lost wake-up: {} of {wake_ups}", self.woken());
            thread::sleep(Duration::from_micros(100));
        }
    }

    /// Polls whenever it is woken, until it is ready.
    fn finish(&mut self) -> Done {
        let mut seen = self.woken();
        loop {
            if let Poll::Ready(done) = self.poll() {
                return done;
            }
            self.wait_for(seen + 1);
            seen = self.woken();
        }
    }
}

/// Goal: a task whose page a synchronous reader fills starts no read itself, is woken by the end of
/// that fill, and after an error reads the page itself.
#[test]
fn a_task_is_woken_by_the_end_of_a_threads_fill() {
    for errno in [0, libc::EIO] {
        let case = Case::new();
        case.slow.hold(Kind::Read, true);
        thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let read = case.file(false).read_at(&mut [0; 2 * PAGE], 0);
                read.map_err(|error| error.errno())
            });
            case.slow.wait_for(Kind::Read, 1);
            assert_eq!(case.state(0), PageState::Filling);
            // The second one is over a page that is not the first of the fill.
            let mut tasks = [Task::new(&case, 0, PAGE), Task::new(&case, PAGE, 100)];
            for task in &mut tasks {
                assert!(task.poll().is_pending() && task.poll().is_pending());
            }
            assert_eq!(case.slow.now(Kind::Read), 1, "no read of their own");
            assert!(tasks.iter().all(|task| task.woken() == 0));
            case.slow.fail(Kind::Read, errno);
            case.slow.hold(Kind::Read, false);
            let expected = if errno == 0 { Ok(2 * PAGE) } else { Err(errno) };
            assert_eq!(reader.join().unwrap(), expected);
            tasks.iter().for_each(|task| task.wait_for(1));
            case.slow.fail(Kind::Read, 0);
            for (task, len) in tasks.iter_mut().zip([PAGE, 100]) {
                assert_eq!(task.finish(), (Ok(len), vec![OLD; len]));
            }
        });
    }
}

/// Goal: the same for requests of a queue, which are stepped on the thread of the reader in the
/// middle of its fill: if that same thread is FILLING their next page, they do not wait for it.
#[test]
fn a_request_is_stepped_by_the_thread_whose_fill_it_waits_for() {
    for errno in [0, libc::EIO] {
        let case = Case::new();
        let queue = case.engine.queue(8).unwrap();
        case.slow.hold(Kind::Read, true);
        thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let read = case.file(false).read_at(&mut [0; 8 * PAGE], 0);
                read.map_err(|error| error.errno())
            });
            case.slow.wait_for(Kind::Read, 1);
            let file = Arc::new(case.file(false));
            let mut requests: Vec<_> = (0..8)
                .map(|n| Request::read(&file, vec![0; (8 - n) * PAGE], (n * PAGE) as u64))
                .collect();
            queue.submit_all(requests.drain(..)).unwrap();
            assert_eq!((case.slow.now(Kind::Read), queue.counts()), (1, (0, 8)));
            case.slow.fail(Kind::Read, errno);
            case.slow.hold(Kind::Read, false);
            assert_eq!(reader.join().unwrap().is_ok(), errno == 0);
            case.slow.fail(Kind::Read, 0);
            let done = queue.wait(8, 8, Some(LIMIT)).unwrap();
            assert_eq!(done.len(), 8, "some were not woken");
            for one in done {
                match one.into_parts() {
                    (Ok(moved), bytes) => assert_eq!(bytes, vec![OLD; moved]),
                    // A separate read, before the device had recovered.
                    (Err(error), _) => assert_eq!((error.errno(), errno), (libc::EIO, libc::EIO)),
                }
            }
        });
    }
}

/// Goal: a task whose page is HIDDEN, by a truncation, a hole or a direct write, is woken when that
/// ends, also by an error, and reads the new bytes.
#[test]
fn a_task_is_woken_when_a_hidden_page_is_shown_or_dropped() {
    type Act = fn(&Case) -> Result<(), crate::Error>;
    let acts: [(&str, Kind, Act, &[u8]); 3] = [
        ("cut", Kind::Change, |case| case.file(false).truncate(100), &[OLD; 100]),
        ("hole", Kind::Change, |case| case.file(false).punch_hole(0, PAGE as u64), &[0; PAGE]),
        (
            "direct write",
            Kind::Write,
            |case| case.file(true).write_at(&[NEW; PAGE], 0).map(drop),
            &[NEW; PAGE],
        ),
    ];
    for (name, kind, act, new) in acts {
        for errno in [0, libc::EIO] {
            let case = Case::new();
            case.file(false).read_at(&mut [0; PAGE], 0).unwrap();
            case.slow.hold(kind, true);
            thread::scope(|scope| {
                let other = scope.spawn(|| act(&case).map_err(|error| error.errno()));
                case.slow.wait_for(kind, 1);
                assert_eq!(case.state(0), PageState::Hidden, "{name}");
                let mut task = Task::new(&case, 0, PAGE);
                assert!(task.poll().is_pending());
                let mut dropped = Task::new(&case, 0, PAGE);
                assert!(dropped.poll().is_pending());
                let count = Arc::clone(&dropped.count);
                drop(dropped);
                assert_eq!((task.woken(), case.slow.now(Kind::Read)), (0, 0), "{name}");
                case.slow.fail(kind, errno);
                case.slow.hold(kind, false);
                let outcome = other.join().unwrap();
                assert_eq!(outcome, if errno == 0 { Ok(()) } else { Err(errno) }, "{name}");
                task.wait_for(1);
                let (read, mut bytes) = task.finish();
                bytes.truncate(read.unwrap());
                assert_eq!(bytes, if errno == 0 { new } else { &[OLD; PAGE] }, "{name}");
                assert_eq!(count.0.load(SeqCst), 0, "a reader that left is not woken");
            });
        }
    }
}

/// Goal: a task that waits for a page again, after it was woken, is woken again: the second
/// registration is not taken for the first.
#[test]
fn a_task_that_waits_for_a_page_again_is_woken_again() {
    let case = Case::new();
    case.file(false).read_at(&mut [0; PAGE], 0).unwrap();
    let mut task = Task::new(&case, 0, PAGE);
    for round in 0..20 {
        case.slow.hold(Kind::Change, true);
        thread::scope(|scope| {
            let other = scope.spawn(|| {
                // Fails, so that the page is cached again at once.
                case.file(false).punch_hole(0, PAGE as u64).map_err(|error| error.errno())
            });
            case.slow.wait_for(Kind::Change, 1);
            assert_eq!(task.woken(), round);
            assert!(task.poll().is_pending());
            case.slow.fail(Kind::Change, libc::EIO);
            case.slow.hold(Kind::Change, false);
            assert_eq!(other.join().unwrap(), Err(libc::EIO));
            task.wait_for(round + 1);
        });
    }
    assert_eq!(task.finish(), (Ok(PAGE), vec![OLD; PAGE]));
}

/// Goal: the end of a page's state wakes no task of another page, and uses up no wake-up of one,
/// although both are in one bucket of the wait table.
#[test]
fn pages_of_one_bucket_are_distinguished() {
    // The table has 64 buckets, in which neighbours follow each other.
    const OTHER: usize = 64;
    let case = Case::new();
    case.file(false).read_at(&mut [0; PAGE], 0).unwrap();
    case.slow.hold(Kind::Change, true);
    thread::scope(|scope| {
        let hole = scope.spawn(|| case.file(false).punch_hole(0, PAGE as u64));
        case.slow.wait_for(Kind::Change, 1);
        let mut hidden = Task::new(&case, 0, PAGE);
        assert!(hidden.poll().is_pending());
        for round in 0..10 {
            case.file(false).advise((OTHER * PAGE) as u64, PAGE as u64, Advice::DontNeed).unwrap();
            case.slow.hold(Kind::Read, true);
            let reader = scope
                .spawn(|| case.file(false).read_at(&mut [0; PAGE], (OTHER * PAGE) as u64).unwrap());
            case.slow.wait_for(Kind::Read, 1);
            let mut filling = Task::new(&case, OTHER * PAGE, PAGE);
            assert!(filling.poll().is_pending());
            case.slow.hold(Kind::Read, false);
            reader.join().unwrap();
            filling.wait_for(1);
            assert_eq!(filling.finish(), (Ok(PAGE), vec![OLD; PAGE]));
            assert_eq!(hidden.woken(), 0, "round {round}");
        }
        case.slow.hold(Kind::Change, false);
        hole.join().unwrap().unwrap();
        hidden.wait_for(1);
        assert_eq!(hidden.finish(), (Ok(PAGE), vec![0; PAGE]));
    });
}

/// Goal: a task that waited for the marked page of a read-ahead window reads it itself when the window arrives: the
/// marker, which refuses hits, is no reason to ask a worker.
#[test]
fn a_task_reads_the_marked_page_that_it_has_waited_for() {
    let case = Case::new();
    let options = OpenOptions::new().read(true).write(true);
    let file = Arc::new(AsyncFile::from(File::new(Arc::clone(&case.cached), None, &options)));
    let task = |offset: usize| {
        let file = Arc::clone(&file);
        let read = Box::pin(async move {
            let mut bytes = vec![0; PAGE];
            let moved = file.read_at(&mut bytes, offset as u64).await;
            (moved.map_err(|error| error.errno()), bytes)
        });
        Task { read, count: Arc::default() }
    };
    case.slow.hold(Kind::Change, true);
    let hole = |at: usize| file.punch_hole((at * PAGE) as u64, PAGE as u64);
    let mut holes: Vec<_> = (100..100 + THREADS_MAX).map(|at| Box::pin(hole(at))).collect();
    for hole in &mut holes {
        assert!(hole.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    }
    // No worker is left.
    case.slow.wait_for(Kind::Change, THREADS_MAX);
    case.slow.hold(Kind::Read, true);
    // The read starts the first window, whose first page is the next one.
    let mut first = task(0);
    assert!(first.poll().is_pending());
    let mut marked = task(PAGE);
    assert!(marked.poll().is_pending());
    assert_eq!(case.state(1), PageState::Filling);
    case.slow.hold(Kind::Read, false);
    marked.wait_for(1);
    let polled = marked.poll();
    assert!(polled == Poll::Ready((Ok(PAGE), vec![OLD; PAGE])), "a worker reads");
    assert_eq!(first.finish(), (Ok(PAGE), vec![OLD; PAGE]));
    case.slow.hold(Kind::Change, false);
}
