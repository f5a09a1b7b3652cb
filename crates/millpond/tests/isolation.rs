//! A file that hangs, a disk that is full or broken, delays its own users and nobody else.
//!
//! One file of a simulated device is ill, others are well. Time limits are there to find a hang, or what
//! amounts to one: on a machine with nothing else to do, all of this takes seconds.

mod common;

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use millpond::{BackendChoice, Engine, File, SimDevice, SimOptions};

use common::{in_own_process, same, threads, within, write_back};

const PAGE: usize = 4096;
const LIMIT: Duration = Duration::from_secs(60);
const DIRTY_PAGES: usize = 64;

/// An engine with files on a simulated device, of which any may be ill.
struct Pond {
    engine: Engine,
    device: SimDevice,
    files: Vec<Arc<File>>,
    dir: tempfile::TempDir,
}

impl Pond {
    /// With so many files, of which pages are written back after `age`.
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

    /// Sees to it that pages of the file have their space, without which a write can't wait in the cache.
    fn make_room(&self, number: usize, pages: usize) {
        let bytes = contents(number, pages).len() as u64;
        self.files[number].allocate(0, bytes).unwrap();
    }

    /// Writes a page of the file, in no order: a stream would be written back before there is much.
    fn write(&self, number: usize, page: usize) -> millpond::Result<()> {
        let at = page * 7 % 1009 * PAGE;
        self.files[number].write_all_at(&stamp(number, page), at as u64)
    }

    /// Writes pages of an ill file, from a thread of their own each, until no more of them are taken.
    fn fill(self: &Arc<Self>, number: usize) -> Filling {
        let filling = Filling { taken: Arc::default(), stop: Arc::default(), all: Arc::default() };
        let (pond, ours) = (Arc::clone(self), filling.clone());
        let thread = std::thread::spawn(move || {
            while !ours.stop.load(SeqCst) {
                let page = ours.taken.load(SeqCst);
                // Where the disk is full, again and again.
                if pond.write(number, page).is_ok() {
                    ours.taken.fetch_add(1, SeqCst);
                }
            }
        });
        filling.all.lock().unwrap().push(thread);
        filling.come_to_rest();
        filling
    }

    /// Waits until the file on the device is as it should be.
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

    /// After what was ill is well again.
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

/// What a file holds after its first pages were written.
fn contents(number: usize, pages: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    for page in 0..pages {
        let at = page * 7 % 1009 * PAGE;
        bytes.resize(bytes.len().max(at + PAGE), 0);
        bytes[at..at + PAGE].copy_from_slice(&stamp(number, page));
    }
    bytes
}

/// The file reads as it should, and is on the device so after a sync.
fn settles(pond: &Pond, number: usize, pages: usize) {
    let mut expected = contents(number, pages);
    let file = &pond.files[number];
    // Room was made for more.
    expected.resize(file.len().unwrap() as usize, 0);
    common::sync_in_the_end(file);
    let mut bytes = vec![0; expected.len() + 1];
    assert_eq!(file.read_at(&mut bytes, 0).unwrap(), expected.len());
    same(&bytes[..expected.len()], &expected, "read");
    same(&pond.device.file(number).durable(), &expected, "durable");
}

/// Goal: writes to a well file wait for nobody, and reach the device by age, while a full disk keeps
/// as many dirty pages of another file as there may be, and its writers try again all the time.
/// Incident: each write, to whatever file, waited for 5 s before it went through.
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
            // Its own are told.
            let started = Instant::now();
            while !pond.write(0, 500).is_err_and(|error| error.errno() == errno) {
                assert!(started.elapsed() < LIMIT / 2, "its own writers are not told");
            }
            pond.files[0].sync_all().unwrap_err();
            pond.device.file(0).fail_writes(0);
            let started = Instant::now();
            while pond.write(0, 500).is_err() {
                assert!(started.elapsed() < LIMIT / 2, "no end of it");
            }
            settles(&pond, 1, 200);
            filling.end();
            pond.files[0].sync_all().unwrap();
        }
    });
}

/// Goal: the same beside a file that hangs: writes of a well file go on, in amounts beyond the dirty
/// limit; it is written back by age and by amount; it is synced and closed.
/// Incident: the one writer whose turn it was to write back hung, and the one thread that does it by age.
#[test]
fn a_hung_file_delays_its_own_users_only() {
    within(LIMIT * 2, "users beside a file that hangs", || {
        let pond = Arc::new(Pond::new(2, Duration::from_millis(400)));
        pond.make_room(0, 4 * DIRTY_PAGES);
        pond.device.file(0).hang(true);
        let filling = pond.fill(0);
        assert!(pond.device.file(0).hanging() > 0);
        let started = Instant::now();
        for page in 0..4 * DIRTY_PAGES {
            pond.write(1, page).unwrap();
            assert!(started.elapsed() < LIMIT / 2, "{page} writes beside a file that hangs");
        }
        pond.await_device(1, &contents(1, 4 * DIRTY_PAGES), "beside a file that hangs");
        settles(&pond, 1, 4 * DIRTY_PAGES);
        let other = pond.open(2);
        other.write_all_at(&stamp(2, 0), 0).unwrap();
        drop(other);
        same(&pond.device.image(), &stamp(2, 0), "closed");
        assert!(pond.device.file(0).hanging() > 0, "it has not hung");
        pond.device.file(0).hang(false);
        let pages = filling.end();
        settles(&pond, 0, pages);
    });
}

/// Goal: what is old is written back while several other files hang in the flusher's hands, and nobody
/// writes or asks any more.
/// Method: all is dirty before the first file hangs, or after.
#[test]
fn age_is_kept_beside_files_that_hang() {
    within(LIMIT * 2, "write-back by age beside files that hang", || {
        for hung_first in [true, false] {
            let pond = Pond::new(5, Duration::from_millis(400));
            (0..3).for_each(|number| pond.make_room(number, 1));
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
                // Those that hang are first in any order but the reverse, of which the other case is.
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

/// Goal: reads, views and writes that find no frame, as write-back keeps the cache full, do not wait for
/// the device of the file that keeps it.
/// Incident: they wrote back, and synced, the other files themselves.
/// Method: views keep half of the cache; of the other half, the file that hangs then keeps most, by less
/// than the flusher would look at of pages that are dirty, and as many that were written and not synced.
#[test]
fn who_needs_memory_does_not_wait_for_another_file() {
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
        pond.make_room(0, 240);
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
        settles(&pond, 0, 220);
    });
}

/// Goal: a file whose writes are taken, and whose syncs hang, leaves others their place in the cache.
/// Incident: nothing limited the pages that wait for a sync, and they can't be evicted: all of the cache.
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
        assert!(pond.device.file(0).hanging() > 0, "no sync hangs");
        pond.device.file(0).hang_syncs(false);
        ill.sync_all().unwrap();
    });
}

/// Goal: however many files hang, the threads that write back are a few; all of the files are written in
/// the end, and the threads end with the work, but for one, and that with the engine. A thread that
/// drops the engine while a file hangs does not wait for it.
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
        (0..FILES).for_each(|number| pond.make_room(number, 1));
        let hang = |on: bool| (0..FILES).for_each(|number| pond.device.file(number).hang(on));
        for round in 0..2 {
            hang(true);
            (0..FILES).for_each(|number| pond.write(number, 0).unwrap());
            let hanging =
                || (0..FILES).filter(|&number| pond.device.file(number).hanging() > 0).count();
            let started = Instant::now();
            // One is on duty, and finds that there are enough at the device.
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

/// Goal: a file that was closed while its disk was full is written when there is room again, and others
/// are not held up by it, nor the end of the engine's other users.
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

/// Goal: files that are closed while their disk takes nothing, opened and written again, and closed for
/// good, are written, all of them, and nothing is left of them.
/// Method: the flusher looks at them all the time, so that it has some in hand in any of these moments.
#[test]
fn strays_come_and_go() {
    within(LIMIT * 2, "strays", || {
        let pond = Pond::new(0, Duration::from_millis(1));
        for round in 0..common::scaled(200) as usize {
            let file = pond.open(round);
            let device = pond.device.file(round);
            device.fail_writes(libc::EIO);
            // A write that meets a write-back as it fails writes its own pages back, and reports that it cannot
            // (space.SP3). The pages stay dirty all the same.
            let write = |byte, page: u64| match file.write_all_at(&[byte; PAGE], page * PAGE as u64)
            {
                Err(error) if error.errno() == libc::EIO => {}
                other => other.unwrap(),
            };
            write(1, 0);
            write(2, 3);
            drop(file);
            if round % 2 == 0 {
                // The same: somebody keeps it.
                let file = pond.open(round);
                file.write_all_at(&[3; PAGE], 0).unwrap();
                device.fail_writes(0);
                drop(file);
            } else {
                device.fail_writes(0);
            }
            assert_eq!(pond.device.files(), round + 1, "it was opened anew");
            // Before there are so many that writes go through.
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
