//! Changes of pages that are being filled: a background read or read-ahead never shows or caches
//! bytes from before a change that has returned.
//!
//! The page word's rule W3: a filling thread holds a guard over the page from before the claim
//! until the page is READY, and a writer holds a guard, too. A background read keeps its guard with
//! the transfer, even if the reader has gone.

mod common;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::Duration;

use millpond::direct::{DirectRequest, SegmentList};
use millpond::queue::{Completion, Queue, Request};
use millpond::sim::{SimDevice, SimOptions};
use millpond::{Advice, AsyncFile, BackendChoice, Engine, Error, File, WriteMode};

use common::{
    Random, back_ends, block_on, builder, cache_for, direct, read_write, same, scaled, temp_dir,
    within,
};

const PAGE: usize = 4096;
const FILE_BYTES: usize = 24 * PAGE;
/// Maximum of reads in flight. The model stores all versions since the start of the oldest one.
const FILLS_MAX: usize = 6;

/// A background read in flight: its offset, and the number of changes before it.
struct Fill {
    at: usize,
    since: usize,
    future: Pin<Box<dyn Future<Output = Vec<u8>>>>,
}

/// A file, its expected contents, and the reads in flight.
struct Case<'n> {
    name: &'n str,
    engine: Engine,
    cached: Arc<File>,
    direct: Option<Arc<File>>,
    queue: Queue,
    random: Random,
    expected: Vec<u8>,
    /// The file's versions; the last is `expected`. The first `gone` are dropped.
    versions: Vec<Vec<u8>>,
    gone: usize,
    fills: Vec<Fill>,
    /// Reads of the queue: their offset, and the version at which they started.
    queued: Vec<(usize, usize)>,
    stamp: u8,
    /// Changes that were made while a read was in flight.
    met: u32,
    _dir: tempfile::TempDir,
}

impl Case<'_> {
    fn new<'n>(
        name: &'n str,
        backend: BackendChoice,
        mode: WriteMode,
        cache_pages: u64,
        mut random: Random,
    ) -> Case<'n> {
        let dir = temp_dir();
        let path = dir.path().join("file");
        let content: Vec<u8> = (0..FILE_BYTES).map(|at| (at / 100) as u8).collect();
        std::fs::write(&path, &content).unwrap();
        let mut builder = builder(cache_for(cache_pages, PAGE as u64), backend);
        if random.chance(300) {
            builder = builder.reads_in_flight_max(1 + random.below(3) as usize);
        }
        let engine = builder.build().unwrap();
        let open = |options: millpond::OpenOptions| engine.open(&path, &options.write_mode(mode));
        let cached = Arc::new(open(read_write()).unwrap());
        // Not every file system has direct I/O.
        let direct = open(direct().bounce(true)).ok().map(Arc::new);
        let (queue, versions) = (engine.queue(FILLS_MAX).unwrap(), vec![content.clone()]);
        Case {
            name,
            engine,
            cached,
            direct,
            queue,
            random,
            expected: content,
            versions,
            gone: 0,
            fills: Vec::new(),
            queued: Vec::new(),
            stamp: 0,
            met: 0,
            _dir: dir,
        }
    }

    /// A range of the file, mostly within, of a byte or a few pages.
    fn range(&mut self) -> (usize, usize) {
        let random = &mut self.random;
        let at = random.below(FILE_BYTES as u64) as usize;
        let at = if random.chance(500) { at / PAGE * PAGE } else { at };
        let len = match random.below(4) {
            0 => PAGE as u64,
            1 => 1 + random.below(300),
            _ => 1 + random.below(5 * PAGE as u64),
        };
        (at, (len as usize).min(FILE_BYTES - at))
    }

    fn now(&self) -> usize {
        self.gone + self.versions.len() - 1
    }

    /// Starts an operation that fills pages.
    fn fill(&mut self) {
        let ((at, len), since) = (self.range(), self.now());
        let file = AsyncFile::from(Arc::clone(&self.cached));
        let mut cx = Context::from_waker(Waker::noop());
        match self.random.below(6) {
            0 => {
                self.cached.advise(at as u64, len as u64, Advice::WillNeed).unwrap();
            }
            1 => {
                // Read-ahead behind it.
                self.cached.advise(0, 0, Advice::Sequential).unwrap();
                self.read(at, len.min(PAGE));
                self.cached.advise(0, 0, Advice::Normal).unwrap();
            }
            2 if self.queued.len() < FILLS_MAX => {
                let request = Request::read(&self.cached, vec![0xEE; len], at as u64);
                let number = self.queued.len() as u64;
                self.queue.submit(request.user_data(number)).unwrap();
                self.queued.push((at, since));
                if self.random.chance(200) {
                    self.queue.cancel(number);
                }
            }
            3 if self.random.chance(300) => {
                // The worker that fills the page has it from here on.
                let _ = Box::pin(file.view(at as u64, len)).as_mut().poll(&mut cx);
            }
            _ if self.fills.len() < FILLS_MAX => {
                let mut future: Fill = Fill {
                    at,
                    since,
                    future: Box::pin(async move {
                        let mut bytes = vec![0xEE; len];
                        let moved = file.read_at(&mut bytes, at as u64).await.unwrap();
                        bytes.truncate(moved);
                        bytes
                    }),
                };
                if future.future.as_mut().poll(&mut cx).is_ready() {
                    return;
                }
                match self.random.below(3) {
                    0 => drop(future),
                    // A forgotten future, whose last poll this was.
                    1 if self.random.chance(100) => std::mem::forget(future),
                    _ => self.fills.push(future),
                }
            }
            _ => {}
        }
    }

    /// Changes the file, and waits for the change to return.
    fn change(&mut self) {
        let (at, len) = self.range();
        self.met += u32::from(!self.fills.is_empty() || !self.queued.is_empty());
        self.stamp = self.stamp.wrapping_add(1);
        let src = vec![self.stamp; len];
        let offset = at as u64;
        let file = Arc::clone(&self.cached);
        let is_within = at + len <= self.expected.len();
        match self.random.below(12) {
            0 => assert_eq!(file.write_at_dsync(&src, offset).unwrap(), len),
            1 => {
                let file = AsyncFile::from(file);
                assert_eq!(block_on(file.write_at(&src, offset)).unwrap(), len);
            }
            2 => self.write_direct(&src, offset),
            3 => self.write_by_pipeline(&src, offset),
            4 => {
                file.truncate(offset).unwrap();
                self.expected.resize(at, 0);
                if self.random.chance(500) {
                    file.truncate(FILE_BYTES as u64).unwrap();
                    self.expected.resize(FILE_BYTES, 0);
                }
                return self.changed();
            }
            5 | 6 if is_within => {
                let is_hole = self.random.chance(500);
                let cleared = match is_hole {
                    true => file.punch_hole(offset, len as u64),
                    false => file.zero_range(offset, len as u64),
                };
                match cleared {
                    Ok(()) => self.expected[at..at + len].fill(0),
                    Err(error) => assert_eq!(error.errno(), libc::EOPNOTSUPP, "{error}"),
                }
                return self.changed();
            }
            7 => {
                file.allocate(offset, len as u64).unwrap();
                self.expected.resize(self.expected.len().max(at + len), 0);
                return self.changed();
            }
            8 if self.expected.len() + len <= FILE_BYTES => {
                assert_eq!(file.append(&src).unwrap(), self.expected.len() as u64);
                self.expected.extend(&src);
                return self.changed();
            }
            _ => assert_eq!(file.write_at(&src, offset).unwrap(), len),
        }
        self.expected.resize(self.expected.len().max(at + len), 0);
        self.expected[at..at + len].copy_from_slice(&src);
        self.changed();
    }

    fn write_direct(&self, src: &[u8], offset: u64) {
        let file = self.direct.as_ref().unwrap_or(&self.cached);
        assert_eq!(file.write_at(src, offset).unwrap(), src.len());
    }

    /// A pipeline's write is aligned; others are direct.
    fn write_by_pipeline(&self, src: &[u8], offset: u64) {
        let is_aligned = (src.len() | offset as usize).is_multiple_of(PAGE);
        let Some(direct) = self.direct.as_ref().filter(|_| is_aligned) else {
            return self.write_direct(src, offset);
        };
        let mut buffers = self.engine.alloc_buffers(1, src.len()).unwrap();
        buffers[0].copy_from_slice(src);
        let mut list = Some(SegmentList::from_buffers(buffers));
        self.engine.pipeline(1).unwrap().run(|lane| {
            if let Some((_, outcome)) = lane.into_ended() {
                assert_eq!(outcome.unwrap(), src.len());
            }
            list.take().map(|list| DirectRequest::write(direct, list, offset))
        });
    }

    fn changed(&mut self) {
        self.versions.push(self.expected.clone());
    }

    /// Reads in a random way: all changes that have returned are visible.
    fn read(&mut self, at: usize, len: usize) {
        let mut bytes = vec![0xEE; len];
        let offset = at as u64;
        let way = self.random.below(6);
        let moved = match (way, &self.direct) {
            (0, Some(direct)) => direct.read_at(&mut bytes, offset).unwrap(),
            (1, _) => {
                let file = AsyncFile::from(Arc::clone(&self.cached));
                block_on(file.read_at(&mut bytes, offset)).unwrap()
            }
            (2, _) => match self.cached.view(offset, len) {
                Ok(view) => {
                    bytes[..view.len()].copy_from_slice(&view);
                    bytes.truncate(view.len());
                    view.len()
                }
                // Fills in flight have all frames.
                Err(Error::NoBuffers { .. }) => return,
                Err(error) => panic!("{error}"),
            },
            (3, _) => {
                let file = AsyncFile::from(Arc::clone(&self.cached));
                let buffers = self.engine.alloc_buffers(1, len).unwrap();
                let (moved, buffers) = block_on(file.read_buffers_at(buffers, offset));
                bytes.copy_from_slice(&buffers[0]);
                moved.unwrap()
            }
            _ => self.cached.read_at(&mut bytes, offset).unwrap(),
        };
        let len = bytes.len();
        let expected = &self.expected[at.min(self.expected.len())..];
        let expected = &expected[..len.min(expected.len())];
        same(&bytes[..moved], expected, &format!("{}: way {way}, at {at}", self.name));
    }

    /// Completes a read in flight: its bytes are the file's at one moment since it started.
    fn end_one(&mut self) {
        if self.fills.is_empty() {
            return;
        }
        let Fill { at, since, future } = self.fills.swap_remove(0);
        let bytes = block_on(future);
        self.was_there(at, since, &bytes);
    }

    fn end_queued(&mut self) {
        let mut left = self.queued.len();
        while left > 0 {
            let done: Vec<Completion> = self.queue.wait(1, FILLS_MAX, None).unwrap();
            left -= done.len();
            for done in done {
                let (at, since) = self.queued[done.user_data() as usize];
                match done.into_parts() {
                    (Ok(moved), bytes) => self.was_there(at, since, &bytes[..moved]),
                    (Err(error), _) => assert_eq!(error.errno(), libc::ECANCELED, "{error}"),
                }
            }
        }
        self.queued.clear();
    }

    fn was_there(&self, at: usize, since: usize, bytes: &[u8]) {
        let is_of = |version: &Vec<u8>| {
            let rest = &version[at.min(version.len())..];
            rest.starts_with(bytes)
        };
        let versions = &self.versions[since - self.gone..];
        assert!(
            versions.iter().any(is_of),
            "{}: {} bytes at {at} are of none of {} versions",
            self.name,
            bytes.len(),
            versions.len()
        );
    }

    /// Drops versions that no read can match any more.
    fn forget(&mut self) {
        let fills = self.fills.iter().map(|fill| fill.since);
        let queued = self.queued.iter().map(|&(_, since)| since);
        let first = fills.chain(queued).min().unwrap_or(self.now());
        self.versions.drain(..first - self.gone);
        self.gone = first;
    }

    fn run(&mut self, rounds: u32) {
        for round in 0..rounds {
            if self.random.chance(700) {
                self.cached.advise(0, 0, Advice::DontNeed).unwrap();
            }
            if self.random.chance(100) {
                self.cached.invalidate(0, FILE_BYTES as u64).unwrap();
            }
            for _ in 0..1 + self.random.below(3) {
                self.fill();
            }
            for _ in 0..self.random.below(4) * self.random.below(2000) {
                std::hint::spin_loop();
            }
            self.change();
            let (at, len) = self.range();
            self.read(at, len);
            if self.random.chance(300) {
                self.read(0, FILE_BYTES);
            }
            if self.random.chance(400) {
                self.end_one();
            }
            if self.random.chance(200) {
                self.end_queued();
            }
            if self.random.chance(30) {
                self.cached.sync_data().unwrap();
            }
            if round % 8 == 0 {
                self.forget();
            }
        }
        while !self.fills.is_empty() {
            self.end_one();
        }
        self.end_queued();
        // Nor later, from the cache or from below.
        for _ in 0..4 {
            self.read(0, FILE_BYTES);
        }
        self.cached.invalidate(0, FILE_BYTES as u64).unwrap();
        self.read(0, FILE_BYTES);
    }
}

/// Goal: as the module says; and each of those reads is of one moment.
/// Method: one thread starts reads without waiting for them, drops some, has pages read ahead,
/// changes the file in every way, and reads at once. A model has the contents of the file since
/// each read began. Devices with and without delays, and caches of few pages and of many.
#[test]
fn fills_never_show_earlier_bytes() {
    let mut random = Random::from_environment();
    let mut all: Vec<(&str, BackendChoice, Option<SimDevice>)> =
        back_ends(random.next()).into_iter().map(|(name, backend)| (name, backend, None)).collect();
    for (name, delay_us) in [("slow sim", 300), ("slower sim", 1500)] {
        let sim = SimOptions::new(random.next()).delay_us_max(delay_us);
        let device = sim.device();
        all.push((name, BackendChoice::Sim(sim), Some(device)));
    }
    for (name, backend, device) in all {
        for mode in [WriteMode::Through, WriteMode::Back] {
            for cache_pages in [6, 200] {
                let (backend, mut random) = (backend.clone(), random.fork());
                let rounds = scaled(if name == "slower sim" { 100 } else { 300 });
                let limit = Duration::from_secs(60 + u64::from(rounds) / 10);
                within(limit, name, move || {
                    let random = random.fork();
                    let mut case = Case::new(name, backend, mode, cache_pages, random);
                    case.run(rounds);
                    let met = case.met;
                    assert!(met > rounds / 10 || name == "memory", "{name}: {met} of {rounds}");
                });
            }
        }
        let violations = device.map(|device| device.violations()).unwrap_or_default();
        assert_eq!(violations, [""; 0], "{name}");
    }
}
