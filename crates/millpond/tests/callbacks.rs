//! Goal: code of the program's that the engine calls harms no operation but its own. Wakers, reports of long waits
//! and subscribers of `tracing` panic, block for a moment, call the engine, and drop the last handles; the operations of
//! other tasks and threads end, with their bytes.
//! Method: a task of each operation on each back end, polled with a waker that misbehaves, beside threads and
//! tasks that read, write, sync and use a queue. `MILLPOND_TEST_SEED` replays the cases that were drawn.
//!
//! Incident: a waker that panics (a channel whose receiver is gone) ended threads of the engine one by one: with four
//! of them gone each asynchronous write and each sync hung, with eight gone each read of a page that misses; on
//! io_uring the first one aborted the process; and a `write_at` of another thread panicked, as it had granted its range
//! to the task.

mod common;

#[path = "callbacks/program.rs"]
mod program;

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::task::{Context, Poll, RawWaker, RawWakerVTable, Waker};
use std::time::{Duration, Instant};

use millpond::blob::Blob;
use millpond::queue::{Queue, Request};
use millpond::sim::SimOptions;
use millpond::{
    Admission, AsyncFile, BackendChoice, Backing, Engine, File, OpenOptions, WriteMode,
};

use common::{Random, block_on, in_own_process, read_write, scaled, temp_dir, within};
use program::{CALLS, Call, MISBEHAVIORS, Misbehavior, Program, caught, panic_quietly};

const PAGE: u64 = 4096;
/// All threads read these pages, and none writes to them.
const READ_PAGES: u64 = 128;
/// First byte of the ranges that the writing threads use.
const WRITTEN: u64 = READ_PAGES * PAGE;
const GUARDED: u64 = WRITTEN + 16 * PAGE;
const GUARDED_BYTES: usize = 256 << 10;
const FILE_BYTES: u64 = GUARDED + GUARDED_BYTES as u64;
/// More than there are threads of a kind.
const ROUNDS: u64 = 9;
const LIMIT: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operation {
    Read,
    ReadAround,
    ReadDirect,
    /// A read that waits for the range of a writer.
    Guard,
    Write,
    Sync,
    View,
    Queue,
    Blob,
    BlobRead,
}

use Operation::*;
const OPERATIONS: [Operation; 10] =
    [Read, ReadAround, ReadDirect, Guard, Write, Sync, View, Queue, Blob, BlobRead];

#[derive(Clone, Copy, Debug)]
struct Case {
    backend: &'static str,
    operation: Operation,
    call: Call,
    misbehavior: Misbehavior,
}

const BACK_ENDS: [&str; 5] = ["uring", "uring, direct", "threads", "aio", "sim"];

impl Case {
    fn backend(self, seed: u64) -> BackendChoice {
        match self.backend {
            "uring" | "uring, direct" => BackendChoice::Uring,
            "sim" => BackendChoice::Sim(SimOptions::new(seed).delay_us_max(300)),
            _ => BackendChoice::Threads,
        }
    }

    fn options(self) -> OpenOptions {
        match self.backend {
            "uring, direct" | "aio" => read_write().backing(Backing::Direct),
            _ => read_write(),
        }
    }
}

fn byte_at(offset: u64) -> u8 {
    (offset.wrapping_mul(41) ^ (offset >> 12).wrapping_mul(7)) as u8
}

fn content(offset: u64, len: usize) -> Vec<u8> {
    (offset..offset + len as u64).map(byte_at).collect()
}

struct Bench {
    file: AsyncFile,
    /// For reads past the cache.
    direct: Option<AsyncFile>,
    queue: Queue,
    /// Of wakers.
    wakers: Queue,
    blob: Blob,
    engine: Engine,
}

impl Bench {
    /// `Err`: the back end does not work on this machine.
    fn new(case: Case, path: &std::path::Path, seed: u64) -> Result<Bench, millpond::Error> {
        let admission = match case.operation {
            ReadAround => Admission::Never,
            _ => Admission::Always,
        };
        let builder = Engine::builder().cache_bytes(8 << 20).backend(case.backend(seed));
        let engine = builder.admission(admission).readahead_bytes_max(0).build()?;
        let file = engine.open(path, &case.options())?;
        file.write_all_at(&content(0, FILE_BYTES as usize), 0).unwrap();
        file.invalidate(0, FILE_BYTES).unwrap();
        let direct = match case.operation {
            ReadDirect | BlobRead => Some(AsyncFile::from(engine.open(path, &common::direct())?)),
            _ => None,
        };
        let (queue, wakers) = (engine.queue(64)?, engine.queue(64)?);
        let blob = engine.blob(READ_PAGES * PAGE, 4096)?;
        Ok(Bench { file: AsyncFile::from(file), direct, queue, wakers, blob, engine })
    }

    fn file(&self) -> &Arc<File> {
        self.file.file()
    }

    /// Calls that wait for nothing, as a waker may make.
    fn call(&self, random: &mut Random) {
        let at = random.below(READ_PAGES) * PAGE;
        let mut bytes = [0; PAGE as usize];
        let mut read = pin!(self.file.read_at(&mut bytes, at));
        let _ = read.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        self.wakers.submit(Request::read(self.file(), vec![0; 100], at)).unwrap();
        drop(self.wakers.wait(0, 64, None).unwrap());
        for fill in self.blob.claim(at..at + PAGE).fills {
            let range = fill.range();
            fill.bring(&content(range.start, (range.end - range.start) as usize));
        }
        self.blob.try_read(&mut Vec::new(), at..at + 10);
        self.blob.forget(at..at + PAGE);
        drop((self.engine.stats(), self.engine.dump()));
    }

    /// An operation of the task whose waker misbehaves, which has to wait as a rule.
    fn operation<'b>(
        &'b self,
        operation: Operation,
        round: u64,
    ) -> Pin<Box<dyn Future<Output = ()> + 'b>> {
        let at = round * 7 % READ_PAGES * PAGE;
        let file = &self.file;
        let is_read = move |read: &[u8]| assert!(read == &content(at, read.len())[..], "at {at}");
        if matches!(operation, Read | ReadAround | ReadDirect | View | Queue) {
            self.file().invalidate(at, PAGE).unwrap();
        }
        match operation {
            Read | ReadAround => Box::pin(async move {
                let mut bytes = [0; PAGE as usize];
                assert_eq!(file.read_at(&mut bytes, at).await.unwrap(), bytes.len());
                is_read(&bytes);
            }),
            ReadDirect => Box::pin(async move {
                let buffers = self.engine.alloc_buffers(1, PAGE as usize).unwrap();
                let direct = self.direct.as_ref().expect("opened for this");
                let (moved, buffers) = direct.read_buffers_at(buffers, at).await;
                assert_eq!(moved.unwrap() as u64, PAGE);
                is_read(&buffers[0]);
            }),
            Guard => {
                self.file().invalidate(GUARDED, PAGE).unwrap();
                Box::pin(async move {
                    let mut bytes = [0; PAGE as usize];
                    assert_eq!(file.read_at(&mut bytes, GUARDED).await.unwrap(), bytes.len());
                    assert!(
                        bytes == bytes.map(|_| bytes[0])
                            || bytes[..] == content(GUARDED, bytes.len())
                    );
                })
            }
            Write => Box::pin(async move {
                file.write_all_at(&[round as u8; 100], WRITTEN).await.unwrap();
            }),
            Sync => Box::pin(async move { file.sync_data().await.unwrap() }),
            View => Box::pin(async move { is_read(&file.view(at, 100).await.unwrap()) }),
            Queue => {
                let read = Request::read(self.file(), vec![0; 100], at);
                self.queue.submit(read).unwrap();
                Box::pin(async move {
                    let done = self.queue.wait_async(1, 64).unwrap().await;
                    done.iter().for_each(|done| assert_eq!(done.result().unwrap(), 100));
                })
            }
            Blob => {
                let range = at..at + PAGE;
                self.blob.forget(range.clone());
                let fills = self.blob.claim(range.clone()).fills;
                std::thread::spawn(move || {
                    std::thread::sleep(Duration::from_micros(200));
                    fills.into_iter().for_each(|fill| fill.bring(&content(at, PAGE as usize)));
                });
                Box::pin(self.blob.arrival(range))
            }
            BlobRead => {
                self.blob.forget(at..at + PAGE);
                let fills = self.blob.claim(at..at + PAGE).fills;
                let direct = self.direct.as_ref().expect("opened for this");
                Box::pin(async move {
                    for fill in fills {
                        let (moved, fill) = fill.read_direct(direct, at).await;
                        assert_eq!(moved.unwrap() as u64, PAGE);
                        fill.bring_read();
                    }
                })
            }
        }
    }
}

/// Runs the task of the case. It catches panics of its waker where the engine clones the waker in
/// its polls.
fn misbehave(case: Case, bench: &Arc<Bench>, random: &mut Random, dir: &std::path::Path) {
    for round in 0..ROUNDS {
        let (own, called) = (Arc::clone(bench), random.next());
        let engine = move || own.call(&mut Random(called));
        let (last, path, bytes) = last_handles(case, random, dir, round);
        let program = Program::new((case.call, case.misbehavior), engine, last);
        let mut future = bench.operation(case.operation, round);
        let polled = program.poll(future.as_mut());
        if matches!(polled, Some(Poll::Pending)) {
            if case.call == Call::Wake || random.chance(500) {
                let begun = Instant::now();
                while program.wakes() == 0 {
                    assert!(begun.elapsed() < LIMIT / 2, "{case:?}: the task is not woken");
                    std::thread::sleep(Duration::from_micros(50));
                }
                block_on(future);
            } else {
                assert!(caught(|| drop(future)).is_some(), "{case:?}: a drop panics");
            }
        }
        drop(program);
        if let Some(path) = path {
            let begun = Instant::now();
            while std::fs::read(&path).unwrap() != bytes {
                assert!(begun.elapsed() < LIMIT / 2, "{case:?}: bytes of a dropped file are lost");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
}

type Last = (Option<(Engine, File)>, Option<std::path::PathBuf>, Vec<u8>);

/// An engine and the last handle of a file of it that has dirty pages, and where its bytes are to arrive.
fn last_handles(case: Case, random: &mut Random, dir: &std::path::Path, round: u64) -> Last {
    if case.misbehavior != Misbehavior::DropLast {
        return (None, None, Vec::new());
    }
    let engine = Engine::builder().cache_bytes(1 << 20).backend(case.backend(random.next()));
    let engine = engine.build().unwrap();
    let path = dir.join(format!("last-{round}"));
    let file = engine.open(&path, &case.options().write_mode(WriteMode::Back)).unwrap();
    let bytes = vec![round as u8 + 1; 3 * PAGE as usize];
    file.write_all_at(&bytes, 0).unwrap();
    let path = (case.backend != "sim").then_some(path);
    (Some((engine, file)), path, bytes)
}

/// Reads and writes of threads and tasks that are not part of the case.
fn run_other_operations(bench: &Bench, random: &mut Random, me: u64) {
    let own = WRITTEN + (1 + me) * PAGE;
    let mut bytes = vec![0; 300];
    let is_read = |bytes: &[u8], at| assert!(bytes == content(at, bytes.len()), "{me}: at {at}");
    for round in 0..2 * ROUNDS {
        let at = random.below(READ_PAGES * PAGE - 300);
        let written = [round as u8; 50];
        match me {
            0 => {
                assert_eq!(bench.file().read_at(&mut bytes, at).unwrap(), 300);
                is_read(&bytes, at);
                bench.file().write_all_at(&written, own).unwrap();
                bench.file().read_exact_at(&mut bytes[..50], own).unwrap();
                assert_eq!(bytes[..50], written);
            }
            1 => block_on(async {
                assert_eq!(bench.file.read_at(&mut bytes, at).await.unwrap(), 300);
                is_read(&bytes, at);
                bench.file.write_all_at(&written, own).await.unwrap();
                is_read(&bench.file.view(at, 10).await.unwrap(), at);
            }),
            2 => {
                let queue = bench.engine.queue(8).unwrap();
                let read = |n| Request::read(bench.file(), vec![0; 100], at + n);
                let write = Request::write(bench.file(), written.to_vec(), own);
                queue.submit_all([read(0), read(100), read(200), write]).unwrap();
                for done in queue.wait(4, 8, None).unwrap() {
                    assert!(matches!(done.result().unwrap(), 100 | 50));
                }
            }
            _ => {
                let all = vec![round as u8; GUARDED_BYTES];
                bench.file().write_all_at(&all, GUARDED).unwrap();
            }
        }
    }
    if me == 1 {
        block_on(bench.file.sync_data()).unwrap();
    }
}

/// False: not here.
fn run(case: Case, random: &mut Random) -> bool {
    let dir = temp_dir();
    let seed = random.next();
    let bench = match Bench::new(case, &dir.path().join("file"), seed) {
        Ok(bench) => Arc::new(bench),
        Err(error) => {
            common::skip(format_args!("{}: {error}", case.backend));
            return false;
        }
    };
    let mut randoms: Vec<Random> = (0..5).map(|_| random.fork()).collect();
    within(LIMIT, &format!("{case:?}, seed {seed}"), move || {
        std::thread::scope(|scope| {
            let mut own = randoms.pop().unwrap();
            let bench = &bench;
            for (me, mut random) in randoms.into_iter().enumerate() {
                scope.spawn(move || run_other_operations(bench, &mut random, me as u64));
            }
            misbehave(case, bench, &mut own, dir.path());
        });
        // And afterwards, with all threads that are left.
        (0..4).for_each(|me| run_other_operations(&bench, &mut Random(seed), me));
    });
    true
}

/// Goal: a waker that panics when it is woken, the worst misbehavior, at each operation on each
/// back end.
#[test]
fn a_waker_that_panics_harms_no_other_operation() {
    let mut random = Random::from_environment();
    for backend in BACK_ENDS {
        for operation in OPERATIONS {
            let case =
                Case { backend, operation, call: Call::Wake, misbehavior: Misbehavior::Panic };
            run(case, &mut random);
        }
    }
}

/// Goal: a waker may misbehave in any of its calls, at any operation on any back end.
#[test]
fn wakers_that_misbehave_harm_no_other_operation() {
    let mut random = Random::from_environment();
    let mut cases = Vec::new();
    for backend in BACK_ENDS {
        for operation in OPERATIONS {
            for call in CALLS {
                cases.extend(MISBEHAVIORS.map(|misbehavior| Case {
                    backend,
                    operation,
                    call,
                    misbehavior,
                }));
            }
        }
    }
    for _ in 0..scaled(40) {
        let case = cases[random.below(cases.len() as u64) as usize];
        run(case, &mut random);
    }
}

/// Goal: after a poll that its waker's clone has ended by a panic, a task is polled again and reads its bytes, not those
/// of memory into which its read has not arrived yet.
/// Method: a device that takes its time; the clone panics in the first poll, and the second poll follows at once.
#[test]
fn a_task_whose_clone_has_panicked_reads_its_bytes() {
    static PANICS: AtomicBool = AtomicBool::new(false);
    fn clone(_: *const ()) -> RawWaker {
        if PANICS.swap(false, SeqCst) {
            panic_quietly(false);
        }
        RawWaker::new(std::ptr::null(), &VTABLE)
    }
    static VTABLE: RawWakerVTable = RawWakerVTable::new(clone, |_| {}, |_| {}, |_| {});
    // SAFETY: the functions use no data, and may be called by any thread.
    let waker = unsafe { Waker::from_raw(RawWaker::new(std::ptr::null(), &VTABLE)) };
    let dir = temp_dir();
    let (operations, seed) = ([Read, ReadAround], Random::from_environment().next());
    for operation in operations {
        let (call, misbehavior) = (Call::Clone, Misbehavior::Panic);
        let case = Case { backend: "sim", operation, call, misbehavior };
        let bench = Bench::new(case, &dir.path().join(format!("{operation:?}")), seed).unwrap();
        let mut panics = 0;
        for round in 0..u64::from(scaled(64)) {
            let at = round * 7 % READ_PAGES * PAGE;
            bench.file().invalidate(at, PAGE).unwrap();
            let mut bytes = [0; PAGE as usize];
            let mut read = pin!(bench.file.read_at(&mut bytes, at));
            PANICS.store(true, SeqCst);
            let mut polled = caught(|| read.as_mut().poll(&mut Context::from_waker(&waker)));
            PANICS.store(false, SeqCst);
            panics += u64::from(polled.is_none());
            while !matches!(polled, Some(Poll::Ready(_))) {
                polled = Some(read.as_mut().poll(&mut Context::from_waker(&waker)));
                std::thread::yield_now();
            }
            assert!(matches!(polled, Some(Poll::Ready(Ok(len))) if len as u64 == PAGE));
            assert!(bytes[..] == content(at, bytes.len()), "{operation:?}, {at}");
        }
        assert!(panics > 0, "{operation:?}: each read had arrived before its poll looked");
    }
}

/// Waits until `reached` says so.
fn await_that(what: &str, reached: impl Fn() -> bool) {
    let begun = Instant::now();
    while !reached() {
        assert!(begun.elapsed() < LIMIT / 2, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Goal: after a report that panics, other waits are still reported.
/// Method: writes to a device that hangs, one after the other.
///
/// Incident: the first panic silently ended the thread that reports long waits.
#[test]
fn a_report_that_panics_stops_no_later_report() {
    let sim = SimOptions::new(1);
    let device = sim.device();
    let reports = Arc::new(AtomicUsize::new(0));
    let reported = Arc::clone(&reports);
    let builder = Engine::builder().cache_bytes(1 << 20).backend(BackendChoice::Sim(sim));
    let builder = builder.report_waits_over(Duration::from_millis(10), move |_| {
        reported.fetch_add(1, SeqCst);
        panic_quietly(true);
    });
    let engine = builder.build().unwrap();
    let dir = temp_dir();
    let file = engine.open(dir.path().join("file"), &read_write()).unwrap();
    file.write_all_at(&[1; 5 * PAGE as usize], 0).unwrap();
    device.hang(true);
    std::thread::scope(|scope| {
        for page in 0..5 {
            let file = &file;
            scope.spawn(move || file.write_all_at(&[2; 10], page * PAGE).unwrap());
            let begun = Instant::now();
            while reports.load(SeqCst) <= page as usize {
                if begun.elapsed() > LIMIT / 2 {
                    device.hang(false);
                    panic!("wait {page} is not reported");
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        device.hang(false);
    });
}

/// Goal: a function that publishes further counts may panic, and is called again.
#[test]
fn publishers_may_panic() {
    let engine = common::engine(1 << 20, BackendChoice::Threads);
    let asked = Arc::new(AtomicUsize::new(0));
    let asks = Arc::clone(&asked);
    let publish = engine.publish_with(move || {
        asks.fetch_add(1, SeqCst);
        panic_quietly(false)
    });
    publish.unwrap();
    await_that("it is not asked for again", || asked.load(SeqCst) > 3);
}

/// A subscriber that appends each event to a log of the same engine, and then panics.
struct Subscriber {
    log: Arc<File>,
    events: Arc<AtomicUsize>,
}

impl tracing::Subscriber for Subscriber {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, _: &tracing::Event<'_>) {
        self.events.fetch_add(1, SeqCst);
        self.log.append(b"an event\n").unwrap();
        panic_quietly(true);
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

/// Goal: a subscriber that panics harms neither write-back nor the syncs whose failures it is given.
/// Method: a device that refuses writes for a while; the bytes reach it afterwards.
#[test]
fn a_subscriber_that_panics_harms_no_operation() {
    in_own_process("a_subscriber_that_panics_harms_no_operation", LIMIT, || {
        let sim = SimOptions::new(1);
        let device = sim.device();
        let builder = Engine::builder().cache_bytes(1 << 20).backend(BackendChoice::Sim(sim));
        let engine = builder.dirty_age_max(Duration::from_millis(20)).build().unwrap();
        let dir = temp_dir();
        let back = read_write().write_mode(WriteMode::Back);
        let file = engine.open(dir.path().join("file"), &back).unwrap();
        let others = common::engine(1 << 20, BackendChoice::Threads);
        let log = Arc::new(others.open(dir.path().join("log"), &read_write()).unwrap());
        let events = Arc::new(AtomicUsize::new(0));
        let subscriber = Subscriber { log: Arc::clone(&log), events: Arc::clone(&events) };
        tracing::subscriber::set_global_default(subscriber).unwrap();
        for round in 0..5u8 {
            device.fail_writes(libc::EIO);
            let before = events.load(SeqCst);
            file.write_all_at(&[round; 3 * PAGE as usize], 0).unwrap();
            await_that("write-back does not fail", || events.load(SeqCst) > before);
            file.sync_all().unwrap_err();
            device.fail_writes(0);
            // It may report the failure of a write-back first.
            common::sync_until_success(&file);
            let mut bytes = [0; 3 * PAGE as usize];
            file.invalidate(0, 3 * PAGE).unwrap();
            file.read_exact_at(&mut bytes, 0).unwrap();
            assert!(bytes == [round; 3 * PAGE as usize]);
        }
        assert_eq!(log.len().unwrap() as usize, 9 * events.load(SeqCst));
    });
}
