//! Block devices that fail, below real file systems: after a sync has succeeded, a remount finds the bytes.
//!
//! A loop device whose image lies in a small tmpfs fails its writes while that tmpfs is full, and works again
//! when it has room. The tests compare with the file as a fresh mount of the same image shows it, so the
//! kernel's page cache has no say. A FUSE server whose answers are errors, short or late stands for file systems
//! on other machines.

mod common;

#[path = "failing_devices/device.rs"]
mod device;

#[path = "failing_devices/keeper_retries.rs"]
mod keeper_retries;

#[path = "failing_devices/server.rs"]
mod server;

use std::sync::Arc;
use std::time::Duration;

use millpond::queue::Request;
use millpond::{AsyncFile, BackendChoice, Backing, File, OpenOptions, WriteMode};

use common::{Random, block_on, engine, has_uring, read_write, scaled, sync_until_success, within};
use device::{FailingDisk, Kind};
use server::{Faults, Server};

const PAGE: usize = 4096;

fn back_ends() -> Vec<BackendChoice> {
    match has_uring() {
        true => vec![BackendChoice::Threads, BackendChoice::Uring],
        false => vec![BackendChoice::Threads],
    }
}

fn fill(file: &File, pages: std::ops::Range<usize>, value: u8) {
    for page in pages {
        // A full device may refuse a write already; the bytes are written again below then.
        let _ = file.write_at(&[value; PAGE], (page * PAGE) as u64);
    }
}

/// The same, of writes that must all succeed.
fn fill_all(file: &File, pages: std::ops::Range<usize>, value: u8) {
    pages.for_each(|page| file.write_all_at(&[value; PAGE], (page * PAGE) as u64).unwrap());
}

/// The first page that lacks `value`, as a fresh mount shows the file.
fn first_wrong(found: &[u8], pages: std::ops::Range<usize>, value: u8) -> Option<usize> {
    pages.into_iter().find(|page| {
        let bytes = found.get(page * PAGE..(page + 1) * PAGE);
        bytes.is_none_or(|bytes| bytes.iter().any(|&byte| byte != value))
    })
}

/// Goal: bytes that a failed sync did not store are on the device once a later sync succeeds.
/// Incident: ext4 leaves the blocks of a failed write-back unwritten, and the kernel's page cache believes them
/// mapped. The same pages written again reached those blocks, the sync succeeded, and a remount read zeros.
/// Method: new pages while the device fails; with and without an overwrite before the next sync.
#[test]
fn a_good_sync_after_a_failed_one_has_stored_the_bytes() {
    for backend in back_ends() {
        for mode in [WriteMode::Through, WriteMode::Back] {
            for (backing, overwritten) in [
                (Backing::Buffered, false),
                (Backing::Buffered, true),
                (Backing::Direct, false),
                (Backing::Uncached, false),
            ] {
                let what =
                    format!("{backend:?}, {mode:?}, {backing:?}, overwritten: {overwritten}");
                let Some(mut disk) = FailingDisk::new(Kind::EXT4) else { return };
                let path = disk.path("file");
                let engine = engine(16 << 20, backend.clone());
                let options: OpenOptions = read_write().write_mode(mode).backing(backing);
                let file = engine.open(&path, &options).unwrap();
                fill(&file, 0..64, 1);
                file.sync_all().unwrap();
                disk.fail();
                fill(&file, 64..512, 2);
                // Direct writes that go through fail themselves, and leave nothing to a sync.
                let is_reported = mode == WriteMode::Through && backing == Backing::Direct;
                for _ in 0..2 {
                    // Where it may succeed, it may also report an error of another process's sync(2).
                    assert!(file.sync_all().is_err() || is_reported, "{what}");
                }
                let value = if overwritten { 3 } else { 2 };
                if overwritten {
                    // As by a program that repeats its writes and its sync.
                    fill(&file, 64..512, value);
                    assert!(file.sync_all().is_err(), "{what}");
                }
                disk.work();
                if is_reported {
                    fill_all(&file, 64..512, value);
                }
                // The first attempt may report an error of another process's sync(2).
                let synced = file.sync_all().or_else(|_| file.sync_all());
                synced.unwrap_or_else(|error| panic!("{what}: {error}"));
                file.close().unwrap();
                drop(engine);
                disk.remount();
                let found = std::fs::read(&path).unwrap();
                assert_eq!(found.len(), 512 * PAGE, "{what}");
                assert_eq!(first_wrong(&found, 0..64, 1), None, "{what}");
                assert_eq!(first_wrong(&found, 64..512, value), None, "{what}");
            }
        }
    }
}

/// Goal: the same of durable writes, each of which is its own sync.
#[test]
fn a_durable_write_after_a_failed_one_is_stored() {
    for backend in back_ends() {
        for (mode, backing) in [
            (WriteMode::Through, Backing::Buffered),
            (WriteMode::Through, Backing::Direct),
            (WriteMode::Back, Backing::Buffered),
        ] {
            let what = format!("{backend:?}, {mode:?}, {backing:?}");
            let Some(mut disk) = FailingDisk::new(Kind::EXT4) else { return };
            let path = disk.path("file");
            let engine = engine(16 << 20, backend.clone());
            let file = engine.open(&path, &read_write().write_mode(mode).backing(backing)).unwrap();
            fill(&file, 0..64, 1);
            file.sync_all().unwrap();
            disk.fail();
            // The tmpfs has room for some of them.
            let pages = 64..192;
            let write = |page: usize| file.write_at_dsync(&[2; PAGE], (page * PAGE) as u64);
            let refused = pages.clone().filter(|&page| write(page).is_err()).count();
            assert!(refused > 0, "{what}: the device did not fail");
            disk.work();
            for page in pages.clone() {
                // The first attempt may report the error of an earlier write.
                write(page)
                    .or_else(|_| write(page))
                    .unwrap_or_else(|error| panic!("{what}: {error}"));
            }
            drop((file, engine));
            disk.remount();
            let found = std::fs::read(&path).unwrap();
            assert_eq!(first_wrong(&found, pages, 2), None, "{what}");
        }
    }
}

/// The values that a unit of the file may hold after a remount.
#[derive(Clone, Default)]
struct Unit {
    /// The value that the last sync or durable write promised, or 0 of a hole.
    stored: u8,
    /// Values of later writes, successful or not.
    newer: Vec<u8>,
    /// The value that the last write put there, if all of its bytes were acknowledged.
    last: Option<u8>,
}

impl Unit {
    fn write(&mut self, value: u8, is_acknowledged: bool) {
        self.newer.push(value);
        if is_acknowledged {
            self.last = Some(value);
        } else if let Some(last) = self.last.take() {
            self.newer.push(last);
        }
    }

    fn promise(&mut self) {
        if let Some(last) = self.last {
            (self.stored, self.newer) = (last, Vec::new());
        }
    }

    fn may_hold(&self, byte: u8) -> bool {
        byte == self.stored || self.newer.contains(&byte)
    }
}

/// The engine's side of a file on a failing device.
struct Handles {
    engine: millpond::Engine,
    file: Arc<File>,
    task: AsyncFile,
    direct: Option<File>,
}

impl Handles {
    fn open(path: &std::path::Path, case: &Case) -> Handles {
        let engine = engine(case.cache_bytes, case.backend.clone());
        let options = read_write().write_mode(case.mode).backing(case.backing);
        let file = Arc::new(engine.open(path, &options).unwrap());
        let task = AsyncFile::from(Arc::clone(&file));
        let direct = engine.open(path, &options.direct(true).bounce(true)).ok();
        Handles { engine, file, task, direct }
    }

    fn write(&self, way: u64, bytes: &[u8], at: u64) -> millpond::Result<usize> {
        match (way, &self.direct) {
            (0, _) => block_on(self.task.write_at(bytes, at)),
            (1, _) => self.queue(Request::write(&self.file, bytes.to_vec(), at)),
            (2, Some(direct)) => direct.write_at(bytes, at),
            _ => self.file.write_at(bytes, at),
        }
    }

    fn write_durably(&self, way: u64, bytes: &[u8], at: u64) -> millpond::Result<usize> {
        match (way, &self.direct) {
            (0, _) => block_on(self.task.write_at_dsync(bytes, at)),
            (1, Some(direct)) => direct.write_at_dsync(bytes, at),
            _ => self.file.write_at_dsync(bytes, at),
        }
    }

    fn sync(&self, way: u64) -> millpond::Result<()> {
        match way {
            0 => self.file.sync_data(),
            1 => block_on(self.task.sync_all()),
            2 => self.queue(Request::sync_all(&self.file)).map(drop),
            3 => self.queue(Request::sync_data(&self.file)).map(drop),
            _ => self.file.sync_all(),
        }
    }

    fn queue(&self, request: Request) -> millpond::Result<usize> {
        let queue = self.engine.queue(1).unwrap();
        let (mut done, _) = queue.submit_and_wait([request], 1, 1, None).unwrap();
        done.remove(0).into_parts().0
    }
}

#[derive(Debug)]
struct Case {
    kind: Kind,
    mode: WriteMode,
    backing: Backing,
    backend: BackendChoice,
    cache_bytes: u64,
}

impl Case {
    fn random(kind: Kind, random: &mut Random) -> Case {
        let backends = back_ends();
        let mode = [WriteMode::Through, WriteMode::Back][random.below(2) as usize];
        let backings = [
            Backing::Buffered,
            Backing::Direct,
            Backing::Uncached,
            Backing::DirectInPlace,
            Backing::Mapped,
        ];
        // Mapped backing is for writes through.
        let count = if mode == WriteMode::Through { 5 } else { 4 };
        Case {
            kind,
            mode,
            backing: backings[random.below(count) as usize],
            backend: backends[random.below(backends.len() as u64) as usize].clone(),
            cache_bytes: [256 << 10, 4 << 20][random.below(2) as usize],
        }
    }
}

const UNIT: usize = 2048;
const UNITS: usize = 512;

/// Goal: a remount finds the bytes that a sync or a durable write has reported as stored, after any
/// number of device failures, by every API.
/// Method: random operations by the plain, asynchronous and queued APIs and by direct handles,
/// while the device fails and works in turns; a remount after each round. `MILLPOND_TEST_SEED`
/// replays the operations; the point of failure depends on the kernel's write-back, too.
#[test]
fn promised_bytes_are_on_the_device() {
    let mut random = Random::from_environment();
    let kinds = [Kind::EXT4, Kind::XFS, Kind::EXT4, Kind::BTRFS, Kind::EXT4_JOURNAL];
    let mut promises = 0;
    for round in 0..scaled(2) as usize {
        let mut random = random.fork();
        let case = Case::random(kinds[round % kinds.len()], &mut random);
        let Some(mut disk) = FailingDisk::new(case.kind) else { continue };
        println!("{case:?}");
        promises += promised_bytes(&mut disk, &case, &mut random);
    }
    println!("{promises} promises after a failure");
}

/// One file's life on one device; how many promises it was given after the device had failed.
fn promised_bytes(disk: &mut FailingDisk, case: &Case, random: &mut Random) -> usize {
    let path = disk.path("file");
    let mut units = vec![Unit::default(); UNITS];
    let (mut value, mut promises) = (0u8, 0);
    for life in 0..3 {
        let what = format!("{case:?}, life {life}");
        let handles = Handles::open(&path, case);
        let mut is_failing = false;
        let mut has_failed = false;
        for step in 0..60 {
            if step == 45 || random.chance(80) {
                is_failing = !is_failing && step < 45;
                if is_failing {
                    disk.fail()
                } else {
                    disk.work()
                }
                has_failed |= is_failing;
            }
            let first = random.below(UNITS as u64) as usize;
            let most = [4, 96][random.below(2) as usize];
            let count = (1 + random.below(most) as usize).min(UNITS - first);
            let range = first..first + count;
            value = value % 250 + 1;
            let (bytes, at) = (vec![value; count * UNIT], (first * UNIT) as u64);
            let (action, way) = (random.below(12), random.below(5));
            match action {
                0..=6 => {
                    let moved = handles.write(way, &bytes, at).unwrap_or(0) / UNIT;
                    let note = |(n, unit): (usize, &mut Unit)| unit.write(value, n < moved);
                    units[range].iter_mut().enumerate().for_each(note);
                }
                7 => {
                    let moved = handles.write_durably(way, &bytes, at).unwrap_or(0) / UNIT;
                    for (n, unit) in units[range].iter_mut().enumerate() {
                        unit.write(value, n < moved);
                        if n < moved {
                            unit.promise();
                            promises += usize::from(has_failed);
                        }
                    }
                }
                8 => {
                    if handles.file.sync_range(at, bytes.len() as u64).is_ok() {
                        units[range].iter_mut().for_each(Unit::promise);
                        promises += usize::from(has_failed);
                    }
                }
                9 | 10 => {
                    if handles.sync(way).is_ok() {
                        units.iter_mut().for_each(Unit::promise);
                        promises += usize::from(has_failed);
                    }
                }
                _ => {
                    let mut found = vec![0; count * UNIT];
                    let moved = handles.file.read_at(&mut found, at).unwrap_or(0);
                    for (found, unit) in found[..moved].chunks(UNIT).zip(&units[range]) {
                        let may_hold = |&byte: &u8| unit.may_hold(byte);
                        assert!(found.iter().all(may_hold), "{what}, step {step}: {found:?}");
                    }
                }
            }
        }
        disk.work();
        if random.chance(700) {
            // The first sync may report an earlier failure.
            let synced = handles.file.sync_all().or_else(|_| handles.file.sync_all());
            if synced.is_ok() {
                units.iter_mut().for_each(Unit::promise);
            }
        }
        drop(handles);
        let is_remounted = disk.try_remount();
        let found = match is_remounted {
            true => std::fs::read(&path).unwrap(),
            false => match disk.after_power_cut("file") {
                Some(found) => found,
                None => break,
            },
        };
        for (number, unit) in units.iter_mut().enumerate() {
            let start = found.len().min(number * UNIT);
            let mut bytes = found[start..found.len().min(start + UNIT)].to_vec();
            bytes.resize(UNIT, 0);
            let wrong = bytes.iter().find(|byte| !unit.may_hold(**byte));
            assert_eq!(
                wrong, None,
                "{what}: unit {number} of {UNIT} bytes, stored {}, newer {:?}",
                unit.stored, unit.newer
            );
            // A mixture of stored and newer values: each of them may stay.
            let is_even = bytes.iter().all(|byte| *byte == bytes[0]);
            match is_even {
                true => *unit = Unit { stored: bytes[0], newer: Vec::new(), last: Some(bytes[0]) },
                false => unit.last = None,
            }
        }
        if !is_remounted {
            break;
        }
    }
    promises
}

/// Goal: an operation that meets a server's EAGAIN, EINTR or ECANCELED time after time says so, and gives up
/// its range. Once the server answers, the same operation succeeds.
/// Incident: a read of a FUSE file whose server said EAGAIN kept a processor busy and its range locked, and a
/// write of the page waited behind it, without end.
#[test]
fn endless_transient_errors_are_returned() {
    // Mostly pauses: all cases at once.
    std::thread::scope(|threads| {
        for backend in back_ends() {
            for errno in [libc::EAGAIN, libc::EINTR, libc::ECANCELED] {
                let backend = backend.clone();
                threads.spawn(move || transient_errors(backend, errno));
            }
        }
    });
}

fn transient_errors(backend: BackendChoice, errno: i32) {
    let Some(server) = Server::new(1, vec![7; 1 << 20]) else { return };
    let what = format!("{backend:?}, {errno}");
    within(Duration::from_secs(120), &what.clone(), move || {
        let engine = engine(1 << 20, backend);
        let options = read_write().create(false);
        let through = Arc::new(engine.open(server.path("f"), &options).unwrap());
        let direct = engine.open(server.path("f"), &options.clone().direct(true)).map(Arc::new);
        let always = (1000, errno);
        let (read_error, write_error, sync_error) = (always, always, always);
        let faults = Faults { read_error, write_error, sync_error, ..Faults::default() };
        let tell = |operation: &str, outcome: millpond::Result<()>| {
            let error = outcome.expect_err(operation);
            assert_eq!(error.errno(), errno, "{what}, {operation}: {error}");
        };
        server.set(faults);
        let handles = [("cached", Some(&through)), ("direct", direct.as_ref().ok())];
        for (name, file) in handles.into_iter().filter_map(|(name, file)| Some((name, file?))) {
            let mut memory = engine.alloc_buffers(1, PAGE).unwrap();
            let queue = engine.queue(4).unwrap();
            let task = AsyncFile::from(Arc::clone(file));
            let at = |operation: &str| format!("{name} {operation}");
            tell(&at("read"), file.read_at(&mut memory[0], 0).map(drop));
            tell(&at("write"), file.write_at(&memory[0], 0).map(drop));
            tell(&at("durable write"), file.write_at_dsync(&memory[0], 0).map(drop));
            tell(&at("sync"), file.sync_all());
            let (read, buffers) = block_on(task.read_buffers_at(memory, 0));
            tell(&at("asynchronous read"), read.map(drop));
            let requests = [Request::read_buffers(file, buffers, 0)];
            let (mut done, _) = queue.submit_and_wait(requests, 1, 1, None).unwrap();
            tell(&at("queued read"), done.remove(0).into_parts().0.map(drop));
        }
        server.set(Faults::default());
        assert_eq!(through.read_at(&mut [0; PAGE], 0).unwrap(), PAGE);
        through.write_all_at(&[8; PAGE], 0).unwrap();
        sync_until_success(&through);
        assert_eq!(server.state().data[..PAGE], [8; PAGE]);
    });
}

/// Goal: a file that has bytes and reports a length of 0 is refused; an empty one is not.
/// Incident: `/proc/version` opened, and read as an empty file.
#[test]
fn files_that_claim_no_bytes_are_refused() {
    let refused = |engine: &millpond::Engine, path: &std::path::Path| {
        let opened = engine.open(path, &OpenOptions::new().read(true));
        let error = opened.err().unwrap_or_else(|| panic!("{} opened", path.display()));
        assert_eq!(error.errno(), libc::EOPNOTSUPP, "{}: {error}", path.display());
        assert!(error.to_string().contains("length"), "{error}");
    };
    for backend in back_ends() {
        let engine = engine(1 << 20, backend);
        for path in
            ["/proc/version", "/proc/self/status", "/sys/kernel/mm/transparent_hugepage/enabled"]
        {
            let path = std::path::Path::new(path);
            match path.exists() {
                true => refused(&engine, path),
                false => common::skip(format_args!("no {}", path.display())),
            }
        }
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        engine.open(dir.path().join("empty"), &read_write()).unwrap();
        let Some(server) = Server::new(1, vec![7; 100]) else { continue };
        server.state().claimed_len = Some(0);
        refused(&engine, &server.path("f"));
        server.state().claimed_len = None;
        let file = engine.open(server.path("f"), &OpenOptions::new().read(true)).unwrap();
        assert_eq!(file.read_at(&mut [0; 200], 0).unwrap(), 100);
        drop(file);
        server.state().data.clear();
        let file = engine.open(server.path("f"), &OpenOptions::new().read(true)).unwrap();
        assert_eq!(file.read_at(&mut [0; 200], 0).unwrap(), 0);
    }
}

const SECTOR: usize = 512;

/// Goal: reads return the acknowledged bytes for any answer of a server, and a successful sync
/// means that the server has them.
/// Method: random operations on a FUSE file whose answers are errors, short or late. A sector may
/// have the value acknowledged last, or one of a later operation that failed. `MILLPOND_TEST_SEED`
/// replays.
#[test]
fn servers_that_fail_keep_what_is_acknowledged() {
    let mut random = Random::from_environment();
    for round in 0..scaled(4) {
        let seed = random.next();
        for backend in back_ends() {
            let mode = [WriteMode::Through, WriteMode::Back][round as usize % 2];
            let what = format!("{backend:?}, {mode:?}, seed {seed}");
            let is_uring = matches!(backend, BackendChoice::Uring);
            let mut random = Random(seed);
            let faults = Faults {
                read_error: (random.below(40), [libc::EIO, libc::EAGAIN][random.below(2) as usize]),
                // Linux 6.18 continues a short read of such a file in a ring at the wrong place.
                read_short: if is_uring { 0 } else { random.below(300) },
                write_error: (
                    random.below(100),
                    [libc::EIO, libc::ENOSPC, libc::EDQUOT, libc::EINTR][random.below(4) as usize],
                ),
                write_part: random.below(60),
                write_short: random.below(300),
                sync_error: (random.below(300), libc::EIO),
                late: random.below(100),
            };
            let Some(server) = Server::new(seed, vec![0; 256 << 10]) else { return };
            within(Duration::from_secs(120), &what.clone(), move || {
                served(&server, (mode, backend), faults, random, &format!("{what}, {faults:?}"));
            });
        }
    }
}

fn served(
    server: &Server,
    (mode, backend): (WriteMode, BackendChoice),
    faults: Faults,
    mut random: Random,
    what: &str,
) {
    let span = server.state().data.len();
    let engine = engine(128 << 10, backend);
    let file = engine.open(server.path("f"), &read_write().create(false).write_mode(mode)).unwrap();
    let mut may = vec![vec![0u8]; span / SECTOR];
    let check = |found: &[u8], may: &[Vec<u8>], step: u64, when: &str| {
        for (sector, (found, may)) in found.chunks(SECTOR).zip(may).enumerate() {
            let wrong = found.iter().find(|byte| !may.contains(byte));
            assert_eq!(wrong, None, "{what}: step {step}, {when}, sector {sector}: not of {may:?}");
        }
    };
    for step in 0..150 {
        server.set(if step < 130 { faults } else { Faults::default() });
        let first = random.below(may.len() as u64) as usize;
        let most = [12, 100][random.below(2) as usize];
        let count = (1 + random.below(most) as usize).min(may.len() - first);
        let (at, value) = ((first * SECTOR) as u64, step as u8 + 1);
        let range = first..first + count;
        match random.below(12) {
            action @ 0..=5 => {
                let bytes = vec![value; count * SECTOR];
                let written = match action {
                    0 => file.write_at_dsync(&bytes, at),
                    _ => file.write_at(&bytes, at),
                };
                let whole = written.unwrap_or(0) / SECTOR;
                for (n, may) in may[range].iter_mut().enumerate() {
                    if n < whole {
                        may.clear();
                    }
                    may.push(value);
                }
            }
            6 => {
                let is_done = file.punch_hole(at, (count * SECTOR) as u64).is_ok();
                for may in &mut may[range] {
                    if is_done {
                        may.clear();
                    }
                    may.push(0);
                }
            }
            7 => {
                if file.sync_all().is_ok() {
                    check(&server.state().data, &may, step, "after a good sync");
                }
            }
            8 => {
                // Later reads of the range go to the server.
                let _ = file.invalidate(at, (count * SECTOR) as u64);
            }
            _ => {
                let mut found = vec![0xEE; count * SECTOR];
                if let Ok(moved) = file.read_at(&mut found, at) {
                    assert!(moved > 0, "{what}: step {step}: an empty read");
                    check(&found[..moved], &may[range], step, "read");
                }
            }
        }
    }
    let is_lost = match file.sync_all().or_else(|_| file.sync_all()) {
        Ok(()) => false,
        Err(millpond::Error::Lost { .. }) => true,
        Err(error) => panic!("{what}: a sync of a server that works: {error}"),
    };
    let data = server.state().data.clone();
    check(&data, &may, 150, "at the end");
    let mut found = vec![0; span];
    file.read_exact_at(&mut found, 0).unwrap();
    assert!(is_lost || found == data, "{what}: the cache and the server differ");
}

/// A read-only mapping of a file. The kernel does not drop the pages that it has touched.
struct MappedPages {
    at: *const u8,
    len: usize,
}

impl MappedPages {
    fn of(path: &std::path::Path, len: usize) -> MappedPages {
        use std::os::fd::AsRawFd;
        let file = std::fs::File::open(path).unwrap();
        // SAFETY: a new mapping.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        assert_ne!(at, libc::MAP_FAILED);
        MappedPages { at: at.cast(), len }
    }

    fn touch(&self) {
        for offset in (0..self.len).step_by(PAGE) {
            // SAFETY: within the mapping, and the callers within the file.
            unsafe { self.at.add(offset).read_volatile() };
        }
    }
}

impl Drop for MappedPages {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and not used again.
        unsafe { libc::munmap(self.at.cast_mut().cast(), self.len) };
    }
}

/// Goal: bytes that a failed sync did not store are on the device once a later sync or a durable write succeeds, also
/// if another process maps the pages.
/// Incident: `fadvise` drops no page that is mapped, and ext4 could not store it: the sync succeeded, and a remount
/// read zeros.
#[test]
fn a_good_sync_of_mapped_pages_has_stored_the_bytes() {
    const PAGES: std::ops::Range<usize> = 64..256;
    for backend in back_ends() {
        for (mode, backing) in [
            (WriteMode::Through, Backing::Buffered),
            (WriteMode::Back, Backing::Buffered),
            (WriteMode::Back, Backing::Direct),
            (WriteMode::Through, Backing::Mapped),
        ] {
            // No direct write can drop a tail shorter than a sector, so a sync may fail while it is mapped.
            for (is_durable, tail_bytes) in [(false, 0), (true, 0), (false, 100), (false, 600)] {
                let what =
                    format!("{backend:?}, {mode:?}, {backing:?}, {is_durable}, {tail_bytes}");
                let Some(mut disk) = FailingDisk::new(Kind::EXT4) else { return };
                let path = disk.path("file");
                let engine = engine(16 << 20, backend.clone());
                let options = read_write().write_mode(mode).backing(backing);
                let mut file = engine.open(&path, &options).unwrap();
                fill(&file, 0..64, 1);
                file.sync_all().unwrap();
                disk.fail();
                let tail = PAGES.end * PAGE;
                fill(&file, PAGES, 2);
                let _ = file.write_at(&vec![2; tail_bytes], tail as u64);
                let _ = file.write_back();
                let len = std::fs::metadata(&path).unwrap().len() as usize;
                let mapped = (backing != Backing::Mapped).then(|| MappedPages::of(&path, len));
                mapped.iter().for_each(MappedPages::touch);
                // With mapped backing these reads map the pages.
                for page in 0..PAGES.end {
                    let _ = file.read_at(&mut [0; PAGE], (page * PAGE) as u64);
                }
                assert!(file.sync_all().is_err(), "{what}");
                mapped.iter().for_each(MappedPages::touch);
                disk.work();
                if backing == Backing::Mapped {
                    // The pages were the kernel's alone.
                    fill_all(&file, PAGES, 3);
                    for _ in 0..2 {
                        let synced = file.sync_all();
                        assert!(matches!(synced, Err(millpond::Error::Lost { .. })), "{what}");
                    }
                    drop(file);
                    file = engine.open(&path, &options).unwrap();
                }
                // The first attempt may report the error of an earlier write.
                let stored: Vec<usize> = if is_durable {
                    let durable = |page| file.write_at_dsync(&[3; PAGE], (page * PAGE) as u64);
                    PAGES.filter(|&page| durable(page).or_else(|_| durable(page)).is_ok()).collect()
                } else {
                    fill_all(&file, PAGES, 3);
                    file.write_all_at(&vec![3; tail_bytes], tail as u64).unwrap();
                    let synced = file.sync_all().or_else(|_| file.sync_all());
                    synced.map_or(Vec::new(), |()| (0..PAGES.end - PAGES.start).collect())
                };
                if tail_bytes == 0 || tail_bytes > 512 {
                    assert_eq!(stored.len(), PAGES.len(), "{what}");
                }
                drop((file, engine, mapped));
                disk.remount();
                let found = std::fs::read(&path).unwrap();
                if !stored.is_empty() {
                    assert_eq!(first_wrong(&found, PAGES, 3), None, "{what}");
                    let is_stored = found[tail..] == vec![3; tail_bytes];
                    assert!(is_durable || is_stored, "{what}: the tail");
                }
            }
        }
    }
}
