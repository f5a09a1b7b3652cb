//! A hung file, a full disk or a broken one delays only its own users.
//!
//! One file of a simulated device fails or hangs; the others work. The time limits only detect a
//! hang or a delay as bad as one: on an idle machine each test takes seconds.

mod common;

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use millpond::sim::{SimDevice, SimOptions};
use millpond::{BackendChoice, Engine, File};

use common::{in_own_process, same, threads, within, write_back};

const PAGE: usize = 4096;
const LIMIT: Duration = Duration::from_secs(60);
const DIRTY_PAGES: usize = 64;

/// An engine with files on a simulated device, each of which can fail or hang.
struct Pond {
    engine: Engine,
    device: SimDevice,
    files: Vec<Arc<File>>,
    dir: tempfile::TempDir,
}

impl Pond {
    /// An engine with `files` files, whose pages are written back after `age`.
    fn new(files: usize, age: Duration) -> Pond {
        let sim = SimOptions::new(1);
        let device = sim.device();
        let builder = Engine::builder()
            .admission(common::admission())
            .cache_bytes(4 << 20)
            .backend(BackendChoice::Sim(sim));
        let builder = builder.dirty_bytes_max((DIRTY_PAGES * PAGE) as u64).dirty_age_max(age);
        let (engine, dir) = (builder.build().unwrap(), common::temp_dir());
        let mut pond = Pond { engine, device, files: Vec::new(), dir };
        for number in 0..files {
            let file = pond.open(number);
            pond.files.push(file);
        }
        pond
    }

    fn open(&self, number: usize) -> Arc<File> {
        Arc::new(self.engine.open(path(self.dir.path(), number), &write_back()).unwrap())
    }

    /// Reserves blocks for pages of the file, without which a write can't wait in the cache.
    fn reserve_blocks(&self, number: usize, pages: usize) {
        let bytes = contents(number, pages).len() as u64;
        self.files[number].allocate(0, bytes).unwrap();
    }

    /// Writes a page of the file. The pages are in random order, as a sequential stream is written
    /// back early.
    fn write(&self, number: usize, page: usize) -> millpond::Result<()> {
        let at = page * 7 % 1009 * PAGE;
        self.files[number].write_all_at(&stamp(number, page), at as u64)
    }

    /// Writes pages of a failing file, each from its own thread, until writes block or fail.
    fn fill(self: &Arc<Self>, number: usize) -> Filling {
        let filling = Filling { taken: Arc::default(), stop: Arc::default(), all: Arc::default() };
        let (pond, ours) = (Arc::clone(self), filling.clone());
        let thread = std::thread::spawn(move || {
            while !ours.stop.load(SeqCst) {
                let page = ours.taken.load(SeqCst);
                // On a full disk, retries continuously.
                if pond.write(number, page).is_ok() {
                    ours.taken.fetch_add(1, SeqCst);
                }
            }
        });
        filling.all.lock().unwrap().push(thread);
        filling.come_to_rest();
        filling
    }

    /// Waits until the file on the device has the expected bytes.
    fn await_device(&self, number: usize, expected: &[u8], what: &str) {
        let started = Instant::now();
        while self.device.file(number).image() != expected {
            assert!(started.elapsed() < LIMIT / 2, "{what}: not written back");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

#[derive(Clone)]
struct Filling {
    taken: Arc<AtomicUsize>,
    stop: Arc<AtomicBool>,
    all: Arc<Mutex<Vec<std::thread::JoinHandle<()>>>>,
}

impl Filling {
    fn come_to_rest(&self) {
        let mut last = usize::MAX;
        loop {
            std::thread::sleep(Duration::from_millis(200));
            let now = self.taken.load(SeqCst);
            if now == last && now > 0 {
                return;
            }
            last = now;
        }
    }

    /// Ends the writer, after the failing file works again.
    fn end(self) -> usize {
        self.stop.store(true, SeqCst);
        self.all.lock().unwrap().drain(..).for_each(|thread| thread.join().unwrap());
        self.taken.load(SeqCst)
    }
}

fn path(dir: &Path, number: usize) -> std::path::PathBuf {
    dir.join(format!("file-{number}"))
}

fn stamp(number: usize, page: usize) -> [u8; PAGE] {
    [(1 + number * 31 + page) as u8; PAGE]
}

/// The expected contents of a file after its first pages were written.
fn contents(number: usize, pages: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    for page in 0..pages {
        let at = page * 7 % 1009 * PAGE;
        bytes.resize(bytes.len().max(at + PAGE), 0);
        bytes[at..at + PAGE].copy_from_slice(&stamp(number, page));
    }
    bytes
}

/// The file reads as expected, and the device has the same bytes after a sync.
fn assert_stored(pond: &Pond, number: usize, pages: usize) {
    let mut expected = contents(number, pages);
    let file = &pond.files[number];
    // More blocks were reserved.
    expected.resize(file.len().unwrap() as usize, 0);
    common::sync_until_success(file);
    let mut bytes = vec![0; expected.len() + 1];
    assert_eq!(file.read_at(&mut bytes, 0).unwrap(), expected.len());
    same(&bytes[..expected.len()], &expected, "read");
    same(&pond.device.file(number).durable(), &expected, "durable");
}

/// Goal: writes to a working file do not wait, and reach the device by age, while another file of a
/// full disk has the maximum number of dirty pages and its writers retry continuously.
/// Incident: each write, to any file, waited for 5 s before it succeeded.
#[test]
fn a_full_disk_delays_its_own_writers_only() {
    within(LIMIT * 2, "writers beside a full disk", || {
        for errno in [libc::ENOSPC, libc::EIO] {
            let pond = Arc::new(Pond::new(2, Duration::from_millis(400)));
            pond.device.file(0).fail_writes(errno);
            let filling = pond.fill(0);
            let started = Instant::now();
            for page in 0..200 {
                pond.write(1, page).unwrap();
                assert!(started.elapsed() < LIMIT / 2, "{page} writes beside a full disk");
            }
            pond.await_device(1, &contents(1, 200), "beside a full disk");
            // Writers of the full disk's file get the error.
            let started = Instant::now();
            while !pond.write(0, 500).is_err_and(|error| error.errno() == errno) {
                assert!(
                    started.elapsed() < LIMIT / 2,
                    "writers of the full disk's file get no error"
                );
            }
            pond.files[0].sync_all().unwrap_err();
            pond.device.file(0).fail_writes(0);
            let started = Instant::now();
            while pond.write(0, 500).is_err() {
                assert!(started.elapsed() < LIMIT / 2, "no end of it");
            }
            assert_stored(&pond, 1, 200);
            filling.end();
            pond.files[0].sync_all().unwrap();
        }
    });
}

/// Goal: the same beside a file that hangs: writes of a working file go on, beyond the dirty limit;
/// it is written back by age and by amount; it is synced and closed.
/// Incident: the only writer with the write-back token hung, and so did the only thread that writes
/// back by age.
#[test]
fn a_hung_file_delays_its_own_users_only() {
    within(LIMIT * 2, "users beside a file that hangs", || {
        let pond = Arc::new(Pond::new(2, Duration::from_millis(400)));
        pond.reserve_blocks(0, 4 * DIRTY_PAGES);
        pond.device.file(0).hang(true);
        let filling = pond.fill(0);
        assert!(pond.device.file(0).hanging() > 0);
        let started = Instant::now();
        for page in 0..4 * DIRTY_PAGES {
            pond.write(1, page).unwrap();
            assert!(started.elapsed() < LIMIT / 2, "{page} writes beside a file that hangs");
        }
        pond.await_device(1, &contents(1, 4 * DIRTY_PAGES), "beside a file that hangs");
        assert_stored(&pond, 1, 4 * DIRTY_PAGES);
        let other = pond.open(2);
        other.write_all_at(&stamp(2, 0), 0).unwrap();
        drop(other);
        same(&pond.device.image(), &stamp(2, 0), "closed");
        assert!(pond.device.file(0).hanging() > 0, "it has not hung");
        pond.device.file(0).hang(false);
        let pages = filling.end();
        assert_stored(&pond, 0, pages);
    });
}

/// Goal: old pages are written back while several other files hang in the flusher's threads,
/// without further writes or syncs.
/// Method: all pages are dirty before the first file hangs, or after.
#[test]
fn pages_are_written_by_age_beside_hung_files() {
    within(LIMIT * 2, "write-back by age beside files that hang", || {
        for hung_first in [true, false] {
            let pond = Pond::new(5, Duration::from_millis(400));
            (0..3).for_each(|number| pond.reserve_blocks(number, 1));
            let hang = |on: bool| (0..3).for_each(|number| pond.device.file(number).hang(on));
            if hung_first {
                hang(true);
                (0..3).for_each(|number| pond.write(number, 0).unwrap());
                let started = Instant::now();
                while (0..3).all(|number| pond.device.file(number).hanging() == 0) {
                    assert!(started.elapsed() < LIMIT / 2, "nothing hangs");
                    std::thread::sleep(Duration::from_millis(2));
                }
                (3..5).for_each(|number| pond.write(number, 0).unwrap());
            } else {
                // The hung files are first in the list in any order but the reverse, which the
                // other case has.
                (0..5).for_each(|number| pond.write(number, 0).unwrap());
                hang(true);
            }
            for number in 3..5 {
                pond.await_device(number, &contents(number, 1), "beside files that hang");
            }
            assert!(
                (0..3).any(|number| pond.device.file(number).hanging() > 0),
                "nothing has hung"
            );
            hang(false);
            for number in 0..3 {
                pond.await_device(number, &contents(number, 1), "after it hung");
            }
        }
    });
}

/// Goal: reads, views and writes that find no frame, as write-back pins the cache, do not wait for
/// the device of the hung file.
/// Incident: they wrote back, and synced, the other files themselves.
/// Method: views pin half of the cache. The hung file pins most of the other half: dirty pages, by
/// less than the flusher's threshold, and as many that were written and not synced.
#[test]
fn allocations_do_not_wait_for_a_hung_file() {
    within(LIMIT * 2, "a write that needs memory", || {
        let cache_pages = 512;
        let sim = SimOptions::new(1);
        let device = sim.device();
        let builder =
            Engine::builder().admission(common::admission()).cache_bytes(cache_pages * PAGE as u64);
        let engine = builder.backend(BackendChoice::Sim(sim)).build().unwrap();
        let dir = common::temp_dir();
        let mut pond = Pond { engine, device, files: Vec::new(), dir };
        pond.files = vec![pond.open(0), pond.open(1)];
        let well = Arc::clone(&pond.files[1]);
        well.write_all_at(&vec![9; 4 << 20], 0).unwrap();
        well.sync_all().unwrap();
        let mut views = Vec::new();
        for page in 0.. {
            match well.view(page * PAGE as u64, 1) {
                Ok(view) => views.push(view),
                Err(_) => break,
            }
        }
        assert!(views.len() >= cache_pages as usize / 3, "{} views", views.len());
        drop(views.pop());
        pond.reserve_blocks(0, 240);
        (0..120).for_each(|page| pond.write(0, page).unwrap());
        pond.files[0].write_back().unwrap();
        (120..220).for_each(|page| pond.write(0, page).unwrap());
        pond.device.file(0).hang(true);
        let (mut bytes, started) = ([0; PAGE], Instant::now());
        for page in 0..200 {
            let at = (512 + page * 2 + 1) * PAGE as u64;
            well.write_all_at(&[8; 100], at).unwrap();
            well.read_exact_at(&mut bytes, at).unwrap();
            assert_eq!((bytes[0], bytes[200]), (8, 9));
            if page % 50 == 0 {
                // There may be no memory for it.
                drop(well.view(at, 1));
            }
            assert!(started.elapsed() < LIMIT, "{page} rounds");
        }
        pond.device.file(0).hang(false);
        assert_stored(&pond, 0, 220);
    });
}

/// Goal: a file whose writes succeed, and whose syncs hang, leaves other files their part of the
/// cache.
/// Incident: the number of unsynced pages, which can't be evicted, had no limit: they filled the
/// cache.
#[test]
fn hung_syncs_leave_room_in_the_cache() {
    within(LIMIT * 2, "beside hung syncs", || {
        const CACHE_PAGES: u64 = 512;
        let sim = SimOptions::new(1);
        let device = sim.device();
        let builder =
            Engine::builder().admission(common::admission()).cache_bytes(CACHE_PAGES * PAGE as u64);
        let builder = builder.readahead_bytes_max(0).backend(BackendChoice::Sim(sim));
        let (engine, dir) = (builder.build().unwrap(), common::temp_dir());
        let mut pond = Pond { engine, device, files: Vec::new(), dir };
        pond.files = vec![pond.open(0), pond.open(1)];
        let (ill, well) = (&pond.files[0], &pond.files[1]);
        well.write_all_at(&vec![9; 1 << 20], 0).unwrap();
        well.sync_all().unwrap();
        pond.device.file(0).hang_syncs(true);
        for page in 0..2 * CACHE_PAGES as usize {
            pond.write(0, page % 1009).unwrap();
            if page % 32 == 0 {
                ill.write_back().unwrap();
            }
        }
        let read_all = || {
            let mut bytes = [0; PAGE];
            for page in 0..CACHE_PAGES / 32 {
                well.read_exact_at(&mut bytes, page * PAGE as u64).unwrap();
                assert_eq!(bytes, [9; PAGE]);
            }
        };
        let before = pond.engine.stats();
        (0..4).for_each(|_| read_all());
        let after = pond.engine.stats();
        assert_eq!(after.uncached_reads, before.uncached_reads);
        assert!(after.hits - before.hits >= 3 * CACHE_PAGES / 32, "{before:?} {after:?}");
        // The flusher syncs it in the background.
        let started = Instant::now();
        while pond.device.file(0).hanging() == 0 {
            assert!(started.elapsed() < LIMIT, "no sync hangs");
            std::thread::sleep(Duration::from_millis(1));
        }
        pond.device.file(0).hang_syncs(false);
        ill.sync_all().unwrap();
    });
}

/// Goal: for any number of hung files there are few write-back threads. All files are written in
/// the end. The threads end with the work, except for one, which ends with the engine. Dropping the
/// engine while a file hangs does not wait for that file.
#[test]
fn threads_are_a_few_and_end() {
    let test = "threads_are_a_few_and_end";
    in_own_process(test, LIMIT * 2, || {
        const FILES: usize = 12;
        const THREADS_MAX: usize = 8;
        let flushers =
            || threads().iter().filter(|(_, name)| name.starts_with("millpond-flush")).count();
        let await_flushers = |count: usize| {
            let started = Instant::now();
            while flushers() != count {
                assert!(started.elapsed() < LIMIT / 2, "{} threads, not {count}", flushers());
                std::thread::sleep(Duration::from_millis(5));
            }
        };
        let pond = Pond::new(FILES, Duration::from_millis(200));
        (0..FILES).for_each(|number| pond.reserve_blocks(number, 1));
        let hang = |on: bool| (0..FILES).for_each(|number| pond.device.file(number).hang(on));
        for round in 0..2 {
            hang(true);
            (0..FILES).for_each(|number| pond.write(number, 0).unwrap());
            let hanging =
                || (0..FILES).filter(|&number| pond.device.file(number).hanging() > 0).count();
            let started = Instant::now();
            // One thread scans, and finds that enough threads are at the device.
            while hanging() < 4 {
                assert!(started.elapsed() < LIMIT / 2, "{} files hang", hanging());
                assert!(flushers() <= THREADS_MAX);
                std::thread::sleep(Duration::from_millis(5));
            }
            std::thread::sleep(Duration::from_secs(1));
            assert!(hanging() < THREADS_MAX && flushers() <= THREADS_MAX, "{}", flushers());
            if round == 0 {
                hang(false);
                for number in 0..FILES {
                    pond.await_device(number, &contents(number, 1), "after it hung");
                }
                await_flushers(1);
            }
        }
        let Pond { engine, device, files, dir } = pond;
        drop(engine);
        std::thread::scope(|scope| {
            for file in files {
                scope.spawn(move || drop(file));
            }
            (0..FILES).for_each(|number| device.file(number).hang(false));
        });
        await_flushers(0);
        drop(dir);
    });
}

/// Goal: a file that was closed while its disk was full is written when there is space again. It
/// delays neither other files nor the drop of the engine.
#[test]
fn a_closed_file_of_a_full_disk_is_written_in_the_end() {
    within(LIMIT * 2, "a closed file of a full disk", || {
        let mut pond = Pond::new(2, Duration::from_millis(200));
        pond.device.file(0).fail_writes(libc::ENOSPC);
        for page in 0..10 {
            pond.write(0, page).unwrap();
        }
        drop(pond.files.remove(0));
        let well = &pond.files[0];
        let started = Instant::now();
        for round in 0..20 {
            well.write_all_at(&[round; PAGE], 0).unwrap();
            while pond.device.file(1).image() != [round; PAGE] {
                assert!(started.elapsed() < LIMIT / 2, "beside a closed file: {round} rounds");
                std::thread::sleep(Duration::from_millis(2));
            }
        }
        pond.device.file(0).fail_writes(0);
        pond.await_device(0, &contents(0, 10), "after there is room");
    });
}

/// Goal: files that are closed while their disk refuses writes, opened and written again, and
/// closed for the last time, are all written in the end, and leave nothing behind.
/// Method: the flusher scans them continuously, so at any of these moments it writes some of them
/// back.
#[test]
fn closed_files_are_reopened_during_write_back() {
    within(LIMIT * 2, "strays", || {
        let pond = Pond::new(0, Duration::from_millis(1));
        for round in 0..common::scaled(200) as usize {
            let file = pond.open(round);
            let device = pond.device.file(round);
            device.fail_writes(libc::EIO);
            // A write during a failing write-back writes its own pages back, and returns that this
            // failed (space.SP3). The pages stay dirty.
            let write = |byte, page: u64| match file.write_all_at(&[byte; PAGE], page * PAGE as u64)
            {
                Err(error) if error.errno() == libc::EIO => {}
                other => other.unwrap(),
            };
            write(1, 0);
            write(2, 3);
            drop(file);
            if round % 2 == 0 {
                // The same while another handle is open.
                let file = pond.open(round);
                file.write_all_at(&[3; PAGE], 0).unwrap();
                device.fail_writes(0);
                drop(file);
            } else {
                device.fail_writes(0);
            }
            assert_eq!(pond.device.files(), round + 1, "the file was opened again");
            // Before the number of dirty pages makes writes go through.
            for round in (round.saturating_sub(9)..=round).filter(|_| round % 10 == 9) {
                let first = if round % 2 == 0 { 3 } else { 1 };
                let expected = [vec![first; PAGE], vec![0; 2 * PAGE], vec![2; PAGE]].concat();
                pond.await_device(round, &expected, "in the end");
            }
        }
        // A file keeps a descriptor of its inode for as long as it is there.
        let left = || {
            let links = std::fs::read_dir("/proc/self/fd").unwrap();
            let paths = links.filter_map(|link| std::fs::read_link(link.ok()?.path()).ok());
            paths.filter(|path| path.starts_with(pond.dir.path())).count()
        };
        let started = Instant::now();
        while left() > 0 {
            assert!(started.elapsed() < LIMIT / 2, "{} files are left", left());
            std::thread::sleep(Duration::from_millis(5));
        }
    });
}
