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

use common::{same, threads, within, write_back};

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
        let builder = Engine::builder().cache_bytes(4 << 20).backend(BackendChoice::Sim(sim));
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
/// writes or asks any more; and the threads for that end.
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
            // One thread is left.
            let started = Instant::now();
            let flushers = || threads().iter().filter(|(_, name)| name == "millpond-flush").count();
            // Of tests that run beside this one, too.
            while hung_first && flushers() > 8 {
                assert!(started.elapsed() < LIMIT / 2, "{} threads are left", flushers());
                std::thread::sleep(Duration::from_millis(10));
            }
        }
    });
}

/// Goal: reads, views and writes that find no frame, as write-back keeps the cache full, do not wait for
/// the device of the file that keeps it.
/// Incident: they wrote back, and synced, the other files themselves.
#[test]
fn who_needs_memory_does_not_wait_for_another_file() {
    within(LIMIT * 2, "who needs memory", || {
        let sim = SimOptions::new(1);
        let device = sim.device();
        let builder = Engine::builder().cache_bytes(1 << 20).backend(BackendChoice::Sim(sim));
        let (engine, dir) = (builder.build().unwrap(), common::temp_dir());
        let pond = Arc::new(Pond { engine, device, files: Vec::new(), dir });
        let (ill, well) = (pond.open(0), pond.open(1));
        well.write_all_at(&vec![9; 4 << 20], 0).unwrap();
        well.sync_all().unwrap();
        // Views keep the rest of the cache.
        let mut views = Vec::new();
        for page in 0.. {
            match well.view(page * PAGE as u64, 1) {
                Ok(view) => views.push(view),
                Err(_) => break,
            }
        }
        views.truncate(views.len() / 2);
        pond.device.file(0).hang(true);
        let writer = std::thread::spawn({
            let ill = Arc::clone(&ill);
            move || {
                (0..100)
                    .for_each(|page| ill.write_all_at(&[1; PAGE], page * 7 * PAGE as u64).unwrap())
            }
        });
        let started = Instant::now();
        while pond.device.file(0).hanging() == 0 && !writer.is_finished() {
            assert!(started.elapsed() < LIMIT / 2, "nothing hangs");
            std::thread::sleep(Duration::from_millis(2));
        }
        let mut bytes = [0; PAGE];
        for page in 0..500 {
            let at = (page * 2 + 1) * PAGE as u64;
            well.write_all_at(&[8; 100], at).unwrap();
            well.read_exact_at(&mut bytes, at).unwrap();
            assert_eq!((bytes[0], bytes[200]), (8, 9));
            // There may be no memory for it.
            drop(well.view(at, 1));
            assert!(started.elapsed() < LIMIT, "{page} rounds");
        }
        pond.device.file(0).hang(false);
        writer.join().unwrap();
        ill.sync_all().unwrap();
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
