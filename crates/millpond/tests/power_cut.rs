//! Power cuts on ext4: what a sync or a durable write has returned for is there afterwards, whoever
//! wrote it and how.
//!
//! The disk below the file system loses what it was not asked to flush; see `power`. `sim` starts
//! with a file nobody else has written to, so tests on it could not show this: a `sync_data` wrote
//! its dirty pages with RWF_DSYNC and left `fdatasync` out, because this opening of the file knew of
//! nothing else that was not durable. What an earlier opening had written back, another descriptor
//! or another process had written, was still in the kernel's cache, and lost.

mod common;
mod power;

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering::SeqCst};

use millpond::keeper::{Address, Server};
use millpond::{
    BackendChoice, Backing, DirectRequest, Engine, EngineBuilder, Error, File, OpenOptions,
    PersistStep, SegmentList, SimOptions,
};

use common::requests::each;
use common::{Random, builder, has_uring, read_write, scaled, then_stop, write_back};
use power::{Disk, Unflushed};

const CACHE_BYTES: u64 = 4 << 20;
/// Of what must be there together with what was written last.
const A_BYTES: usize = 1 << 20;
const B_BYTES: usize = 4096;

/// Not a test: the disk of the others, when they start this program again.
#[test]
fn the_disk_of_the_others() {
    power::recorder::serve_if_asked();
}

fn disk() -> Option<Disk> {
    Disk::start("the_disk_of_the_others")
}

fn backends() -> Vec<BackendChoice> {
    let mut backends = vec![BackendChoice::Threads];
    backends.extend(has_uring().then_some(BackendChoice::Uring));
    backends
}

/// Engines and ways of opening with which a power cut is tried: mode back and through, over the
/// kernel's cache and past it, and each by a back end in turn.
fn each_engine(mut body: impl FnMut(&str, &Engine, &OpenOptions)) {
    let backends = backends();
    let modes = [("back", write_back()), ("through", read_write())];
    for (number, (mode, options)) in modes.into_iter().enumerate() {
        for (turn, backing) in [Backing::Buffered, Backing::Direct].into_iter().enumerate() {
            let backend = &backends[(number + turn) % backends.len()];
            let engine = builder(CACHE_BYTES, backend.clone()).build().unwrap();
            body(&format!("{mode}-{backing:?}"), &engine, &options.clone().backing(backing));
        }
    }
}

/// After a cut now, whatever the disk does with what it was not asked to flush, the file holds
/// `bytes` of that value at each of those offsets.
#[track_caller]
fn has_after_cut(disk: &mut Disk, name: &str, what: &[(u8, usize, usize)]) {
    for unflushed in [Unflushed::Lost, Unflushed::Some(7)] {
        let survivor = disk.cut(unflushed);
        let found = survivor.read(name).unwrap_or_else(|| panic!("{name}: the file is not there"));
        for &(value, offset, bytes) in what {
            let range = found.get(offset..offset + bytes);
            let right = range.map_or(0, |range| range.iter().filter(|b| **b == value).count());
            assert_eq!(
                right,
                bytes,
                "{name}, {unflushed:?}: of {bytes} bytes {value:#x} at {offset}; the file has {}",
                found.len()
            );
        }
    }
}

/// Both, after the second was made durable.
const BOTH: [(u8, usize, usize); 2] = [(0xA, 0, A_BYTES), (0xB, A_BYTES, B_BYTES)];

fn write_b(file: &File) {
    file.write_all_at(&[0xB; B_BYTES], A_BYTES as u64).unwrap();
}

/// Goal: the disk loses what nobody asked it to flush, and keeps what somebody did: else no test here
/// could fail.
#[test]
fn the_disk_loses_what_was_not_flushed() {
    let Some(mut disk) = disk() else { return };
    let (kept, lost) = (disk.path("kept"), disk.path("lost"));
    fs::write(&kept, [1; 8192]).unwrap();
    fs::File::open(&kept).unwrap().sync_all().unwrap();
    fs::write(&lost, [2; 8192]).unwrap();
    let in_place = fs::OpenOptions::new().write(true).open(&kept).unwrap();
    // Written, by way of the device's queue, and not flushed.
    in_place.write_all_at(&[3; 4096], 0).unwrap();
    let flags = libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    let fd = std::os::fd::AsRawFd::as_raw_fd(&in_place);
    // SAFETY: takes no memory.
    assert_eq!(unsafe { libc::sync_file_range(fd, 0, 4096, flags) }, 0);

    let survivor = disk.cut(Unflushed::Lost);
    assert_eq!(survivor.read("kept").unwrap(), [1; 8192], "flushed, or written but not flushed");
    assert_eq!(survivor.read("lost"), None);
    drop(survivor);
    let kept_anyway = (0..64).any(|seed| {
        let found = disk.cut(Unflushed::Some(seed)).read("kept").unwrap();
        assert_eq!(found[4096..], [1; 4096]);
        found[..4096].contains(&3)
    });
    assert!(kept_anyway, "a disk may keep what it was not asked to flush");
    in_place.sync_data().unwrap();
    let found = disk.cut(Unflushed::Lost).read("kept").unwrap();
    assert_eq!(found[..4096], [3; 4096]);
}

/// Goal: a sync covers what an earlier opening of the file wrote, though nobody is left who knows.
#[test]
fn what_was_written_before_the_file_was_opened() {
    let Some(mut disk) = disk() else { return };
    each_engine(|name, engine, options| {
        let path = disk.path(name);
        let before = engine.open(&path, options).unwrap();
        before.write_all_at(&vec![0xA; A_BYTES], 0).unwrap();
        before.close().unwrap();
        let file = engine.open(&path, options).unwrap();
        write_b(&file);
        file.sync_data().unwrap();
        has_after_cut(&mut disk, name, &BOTH);
    });
}

/// Goal: the same within one opening, of what write-back has written since.
#[test]
fn what_was_written_back_before() {
    let Some(mut disk) = disk() else { return };
    each_engine(|name, engine, options| {
        let file = engine.open(disk.path(name), options).unwrap();
        file.write_all_at(&vec![0xA; A_BYTES], 0).unwrap();
        file.write_back().unwrap();
        write_b(&file);
        file.sync_data().unwrap();
        has_after_cut(&mut disk, name, &BOTH);
    });
}

/// Ways below the engine, by which bytes come into a file that it has open.
fn write_below(how: &str, path: &Path) {
    let below = fs::OpenOptions::new().write(true).open(path).unwrap();
    match how {
        "pwrite" => below.write_all_at(&vec![0xA; A_BYTES], 0).unwrap(),
        "copy_file_range" => {
            let mut source = tempfile::tempfile_in(path.parent().unwrap()).unwrap();
            source.write_all_at(&vec![0xA; A_BYTES], 0).unwrap();
            // Of two files, this is `copy_file_range`.
            let copied = std::io::copy(&mut source, &mut &below);
            assert_eq!(copied.unwrap(), A_BYTES as u64);
        }
        "process" => {
            // 0xA, too.
            let script = format!("head -c {A_BYTES} /dev/zero | tr '\\0' '\\n'");
            let command = format!("{script} | dd of={} conv=notrunc status=none", path.display());
            assert!(Command::new("sh").args(["-c", &command]).status().unwrap().success());
        }
        _ => unreachable!("{how}"),
    }
}

/// A file that is as long as it will be, and durable: what is written then is no new length, for which
/// the engine might sync for its own reasons.
fn create_durable(path: &Path) {
    fs::write(path, vec![1; A_BYTES + B_BYTES]).unwrap();
    fs::File::open(path).unwrap().sync_all().unwrap();
}

/// Goal: a sync covers what came into the file below the engine: by another descriptor, copied in the
/// kernel, from another process.
#[test]
fn what_was_written_below() {
    let Some(mut disk) = disk() else { return };
    each_engine(|name, engine, options| {
        for how in ["pwrite", "copy_file_range", "process"] {
            for is_new in [false, true] {
                let name = format!("{name}-{how}-{is_new}");
                let path = disk.path(&name);
                if !is_new {
                    create_durable(&path);
                }
                let file = engine.open(&path, options).unwrap();
                write_below(how, &path);
                write_b(&file);
                file.sync_data().unwrap();
                has_after_cut(&mut disk, &name, &BOTH);
                drop(file);
                fs::remove_file(path).unwrap();
            }
        }
    });
}

/// Goal: the same after a sync that covered all there was: the second must not rest on the first.
#[test]
fn what_was_written_below_after_a_sync() {
    let Some(mut disk) = disk() else { return };
    each_engine(|name, engine, options| {
        let path = disk.path(name);
        create_durable(&path);
        let file = engine.open(&path, options).unwrap();
        file.write_all_at(&[2; 4096], A_BYTES as u64).unwrap();
        file.sync_all().unwrap();
        write_below("pwrite", &path);
        write_b(&file);
        file.sync_data().unwrap();
        has_after_cut(&mut disk, name, &BOTH);
    });
}

/// Goal: a sync without anything dirty covers what was written below, too.
#[test]
fn a_sync_with_nothing_of_its_own() {
    let Some(mut disk) = disk() else { return };
    each_engine(|name, engine, options| {
        let path = disk.path(name);
        create_durable(&path);
        let file = engine.open(&path, options).unwrap();
        write_below("pwrite", &path);
        file.sync_data().unwrap();
        has_after_cut(&mut disk, name, &BOTH[..1]);
    });
}

/// Goal: a sync of one handle covers what others of the same file wrote: direct, through, of another
/// engine, in the mode of another.
#[test]
fn what_other_handles_wrote() {
    let Some(mut disk) = disk() else { return };
    each_engine(|name, engine, options| {
        let other_engine = builder(CACHE_BYTES, BackendChoice::Threads).build().unwrap();
        let kinds: [(&str, &Engine, OpenOptions); 4] = [
            ("direct", engine, read_write().direct(true).bounce(true)),
            ("direct-of-another", &other_engine, read_write().direct(true).bounce(true)),
            ("cached-of-another", &other_engine, read_write()),
            ("cached", engine, options.clone()),
        ];
        for (kind, other_engine, other_options) in kinds {
            for is_open in [true, false] {
                let name = format!("{name}-{kind}-{is_open}");
                let path = disk.path(&name);
                create_durable(&path);
                let file = engine.open(&path, options).unwrap();
                let other = other_engine.open(&path, &other_options).unwrap();
                other.write_all_at(&vec![0xA; A_BYTES], 0).unwrap();
                let other = is_open.then_some(other);
                write_b(&file);
                file.sync_data().unwrap();
                has_after_cut(&mut disk, &name, &BOTH);
                drop((file, other));
                fs::remove_file(path).unwrap();
            }
        }
    });
}

/// An engine whose dirty pages a keeper has, and the keeper.
fn kept(backend: &BackendChoice) -> EngineBuilder {
    let server = Server::bind(&Address::unique()).unwrap();
    let address = server.address().clone();
    std::thread::spawn(move || server.serve(|_| {}));
    builder(CACHE_BYTES, backend.clone()).keeper(address)
}

/// Goal: with a keeper, whose descriptors are further ones of the file, a sync covers what went
/// before, also of an earlier opening.
#[test]
fn with_a_keeper() {
    let Some(mut disk) = disk() else { return };
    for (number, backend) in backends().into_iter().enumerate() {
        for backing in [Backing::Buffered, Backing::Direct] {
            let engine = kept(&backend).build().unwrap();
            let name = format!("kept-{backing:?}-{number}");
            let options = write_back().backing(backing);
            let before = engine.open(disk.path(&name), &options).unwrap();
            before.write_all_at(&vec![0xA; A_BYTES], 0).unwrap();
            before.close().unwrap();
            let file = engine.open(disk.path(&name), &options).unwrap();
            write_b(&file);
            file.sync_data().unwrap();
            has_after_cut(&mut disk, &name, &BOTH);
        }
    }
}

/// Goal: the whole of a hundred pieces and no order: a sync of many dirty runs.
#[test]
fn many_runs() {
    let Some(mut disk) = disk() else { return };
    each_engine(|name, engine, options| {
        let file = engine.open(disk.path(name), options).unwrap();
        let mut expected = Vec::new();
        for piece in (0..100).rev() {
            let (value, at) = (piece as u8 + 1, piece * 3 * 4096);
            file.write_all_at(&[value; 5000], at as u64).unwrap();
            expected.push((value, at, 5000));
        }
        file.sync_data().unwrap();
        has_after_cut(&mut disk, name, &expected);
    });
}

/// Ways to write durably: through handles that are durable, by calls that are, cached, direct, and
/// through a pipeline.
const DURABLE: [&str; 6] =
    ["write_at_dsync", "dsync", "append-dsync", "direct-dsync", "direct-unaligned", "pipeline"];

/// Writes `bytes` bytes of 0xD durably at `at`, or for "append-dsync" at the end; returns where.
fn write_durably(how: &str, engine: &Engine, options: &OpenOptions, path: &Path, at: u64) -> u64 {
    let open = |options: &OpenOptions| engine.open(path, options).unwrap();
    let data = [0xD; B_BYTES];
    match how {
        "write_at_dsync" => assert_eq!(open(options).write_at_dsync(&data, at).unwrap(), B_BYTES),
        "dsync" => open(&options.clone().dsync(true)).write_all_at(&data, at).unwrap(),
        "append-dsync" => return open(&options.clone().dsync(true)).append(&data).unwrap(),
        "direct-dsync" => {
            let mut buffer = engine.alloc_buffers(1, B_BYTES).unwrap().remove(0);
            buffer.fill(0xD);
            let direct = open(&read_write().direct(true).dsync(true));
            direct.write_all_at(&buffer, at).unwrap();
        }
        "direct-unaligned" => {
            let direct = open(&read_write().direct(true).bounce(true).dsync(true));
            direct.write_all_at(&data, at + 77).unwrap();
            return at + 77;
        }
        "pipeline" => {
            let mut buffer = engine.alloc_buffers(1, B_BYTES).unwrap().remove(0);
            buffer.fill(0xD);
            let direct = open(&read_write().direct(true));
            let mut request =
                Some(DirectRequest::write(&direct, SegmentList::from_slice(&buffer), at));
            each(&mut engine.pipeline(1).unwrap(), |done| {
                if let Some(done) = done {
                    assert_eq!(done.outcome.unwrap(), B_BYTES);
                }
                Some(request.take()?.durable(true))
            });
        }
        _ => unreachable!("{how}"),
    }
    at
}

/// Goal: the bytes of a durable write are there, and so is the size that shows them, whatever was done
/// to size and blocks before and is not durable itself.
#[test]
fn durable_writes() {
    let Some(mut disk) = disk() else { return };
    type Before = (&'static str, fn(&File));
    const BEFORE: [Before; 7] = [
        ("nothing", |_| {}),
        ("extended", |file| file.write_all_at(&[1; 300_000], 0).unwrap()),
        ("extended-and-written-back", |file| {
            file.write_all_at(&[1; 300_000], 0).unwrap();
            file.write_back().unwrap();
        }),
        ("allocated", |file| file.allocate(0, 400_000).unwrap()),
        ("punched", |file| {
            file.write_all_at(&[1; 300_000], 0).unwrap();
            file.punch_hole(60_000, 100_000).unwrap();
        }),
        ("cut", |file| {
            file.write_all_at(&[1; 300_000], 0).unwrap();
            file.truncate(10_000).unwrap();
        }),
        ("grown", |file| file.truncate(500_000).unwrap()),
    ];
    each_engine(|name, engine, options| {
        for how in DURABLE {
            for (before, prepare) in BEFORE {
                let name = format!("{name}-{how}-{before}");
                let path = disk.path(&name);
                let file = engine.open(&path, options).unwrap();
                prepare(&file);
                let at = write_durably(how, engine, options, &path, 32 * 4096) as usize;
                has_after_cut_once(&mut disk, &name, (0xD, at, B_BYTES));
                drop(file);
                fs::remove_file(&path).unwrap();
            }
        }
    });
}

/// As [`has_after_cut`], of one range, and only the worst of cuts.
#[track_caller]
fn has_after_cut_once(disk: &mut Disk, name: &str, (value, at, bytes): (u8, usize, usize)) {
    let found = disk.cut(Unflushed::Lost).read(name).unwrap_or_else(|| panic!("{name}: no file"));
    let range = found.get(at..at + bytes);
    let is_there = range.is_some_and(|range| range.iter().all(|byte| *byte == value));
    assert!(is_there, "{name}: not all of {bytes} at {at}; the file has {}", found.len());
}

/// What a file may hold after a power cut, byte by byte.
struct Model {
    /// As everybody reads it now.
    current: Vec<u8>,
    /// For each byte the values it may have, as bits: values are below 64.
    may_be: Vec<u64>,
    /// Lengths it may have.
    shortest: usize,
    longest: usize,
}

/// Below this only a descriptor of the kernel's writes, from it on only the engine does, which
/// caches what it has read.
const KERNEL_END: usize = 64 << 10;
const MODEL_BYTES: usize = 400 << 10;

impl Model {
    fn new() -> Model {
        Model { current: Vec::new(), may_be: vec![1; MODEL_BYTES], shortest: 0, longest: 0 }
    }

    fn resized(&mut self, len: usize) {
        for at in len..self.current.len() {
            self.may_be[at] |= 1;
        }
        self.current.resize(len, 0);
        self.shortest = self.shortest.min(len);
        self.longest = self.longest.max(len);
    }

    fn wrote(&mut self, value: u8, at: usize, bytes: usize, is_durable: bool) {
        let end = at + bytes;
        if end > self.current.len() {
            self.resized(end);
        }
        self.current[at..end].fill(value);
        for may_be in &mut self.may_be[at..end] {
            let others = if is_durable { 0 } else { *may_be };
            *may_be = others | 1 << value;
        }
        if is_durable {
            self.shortest = self.shortest.max(end);
        }
    }

    /// Zeros within the length.
    fn zeroed(&mut self, at: usize, bytes: usize) {
        let end = (at + bytes).min(self.current.len());
        if at < end {
            self.wrote(0, at, end - at, false);
        }
    }

    fn synced(&mut self) {
        for (at, may_be) in self.may_be.iter_mut().enumerate() {
            *may_be = 1 << self.current.get(at).unwrap_or(&0);
        }
        (self.shortest, self.longest) = (self.current.len(), self.current.len());
    }

    /// What is wrong with what was found after a cut.
    fn explain(&self, found: &[u8]) -> Option<String> {
        if !(self.shortest..=self.longest).contains(&found.len()) {
            let (len, now) = (found.len(), self.current.len());
            let (shortest, longest) = (self.shortest, self.longest);
            return Some(format!("length {len}, not {shortest} to {longest}; now {now}"));
        }
        let is_wrong = |at: &usize| found[*at] >= 64 || self.may_be[*at] & 1 << found[*at] == 0;
        let mut wrong = (0..found.len()).filter(is_wrong);
        let first = wrong.next()?;
        let (value, now, count) = (found[first], self.current.get(first), wrong.count() + 1);
        Some(format!("{count} bytes, the first at {first}: {value}, and now {now:?}"))
    }
}

/// The handles of a file that a random run uses.
struct Handles {
    cached: File,
    durable: File,
    direct: File,
    direct_durable: File,
    kernel: fs::File,
}

impl Handles {
    fn open(engine: &Engine, path: &Path, options: &OpenOptions) -> Handles {
        let direct = read_write().direct(true).bounce(true);
        let open = |options: &OpenOptions| engine.open(path, options).unwrap();
        Handles {
            cached: open(options),
            durable: open(&options.clone().dsync(true)),
            direct: open(&direct),
            direct_durable: open(&direct.dsync(true)),
            kernel: fs::OpenOptions::new().write(true).open(path).unwrap(),
        }
    }
}

/// One random operation; returns what it was, and whether it promised something that a cut is to
/// show.
fn step(random: &mut Random, handles: &Handles, model: &mut Model) -> (String, bool) {
    let value = 1 + random.below(63) as u8;
    let at = KERNEL_END + random.below((MODEL_BYTES - KERNEL_END - 1) as u64) as usize;
    // Mostly some pages; at times within one, or many.
    let bytes_max = [300, 20_000, 200_000][random.below(3) as usize].min(MODEL_BYTES - at);
    let bytes = 1 + random.below(bytes_max as u64) as usize;
    let data = vec![value; bytes];
    let mut wrote = |what: &str, at: usize, is_durable: bool| {
        model.wrote(value, at, bytes, is_durable);
        (format!("{what} {value} {bytes} at {at}"), is_durable)
    };
    let offset = at as u64;
    match random.below(20) {
        0..4 => {
            handles.cached.write_all_at(&data, offset).unwrap();
            wrote("write", at, false)
        }
        4 => {
            assert_eq!(handles.cached.write_at_dsync(&data, offset).unwrap(), bytes);
            wrote("write_at_dsync", at, true)
        }
        5 => {
            handles.durable.write_all_at(&data, offset).unwrap();
            wrote("dsync write", at, true)
        }
        6 => {
            handles.direct.write_all_at(&data, offset).unwrap();
            wrote("direct write", at, false)
        }
        7 => {
            handles.direct_durable.write_all_at(&data, offset).unwrap();
            wrote("direct dsync write", at, true)
        }
        8 => {
            let bytes = 1 + random.below(KERNEL_END as u64 / 4) as usize;
            let at = random.below((KERNEL_END - bytes) as u64) as usize;
            handles.kernel.write_all_at(&data.repeat(bytes)[..bytes], at as u64).unwrap();
            model.wrote(value, at, bytes, false);
            (format!("kernel's write {value} {bytes} at {at}"), false)
        }
        9 if model.current.len() + bytes <= MODEL_BYTES => {
            let is_durable = random.chance(500);
            let handle = if is_durable { &handles.durable } else { &handles.cached };
            let at = handle.append(&data).unwrap() as usize;
            assert_eq!(at, model.current.len());
            let mut wrote = |what: &str| {
                model.wrote(value, at, bytes, is_durable);
                (format!("{what} {value} {bytes} at {at}"), is_durable)
            };
            wrote(if is_durable { "dsync append" } else { "append" })
        }
        9 | 10 => {
            handles.cached.truncate(offset).unwrap();
            model.resized(at);
            (format!("truncate {at}"), false)
        }
        11 => {
            handles.cached.punch_hole(offset, bytes as u64).unwrap();
            model.zeroed(at, bytes);
            (format!("punch {bytes} at {at}"), false)
        }
        12 => {
            handles.cached.zero_range(offset, bytes as u64).unwrap();
            model.zeroed(at, bytes);
            (format!("zero {bytes} at {at}"), false)
        }
        13 => {
            handles.cached.allocate(offset, bytes as u64).unwrap();
            let len = model.current.len().max(at + bytes);
            model.resized(len);
            (format!("allocate {bytes} at {at}"), false)
        }
        14 => {
            handles.cached.write_back().unwrap();
            ("write_back".into(), false)
        }
        15 => {
            handles.durable.settle().unwrap();
            ("settle".into(), false)
        }
        16 => {
            handles.cached.sync_all().unwrap();
            model.synced();
            ("sync_all".into(), true)
        }
        17 => {
            handles.direct.sync_data().unwrap();
            model.synced();
            ("direct sync_data".into(), true)
        }
        _ => {
            handles.cached.sync_data().unwrap();
            model.synced();
            ("sync_data".into(), true)
        }
    }
}

/// Goal: after any sequence of operations by several handles, of a descriptor below them and of
/// openings, each byte is after a cut what a sync or durable write made of it, or what came after.
/// Method: a model of what may be there; a cut at once after what promised something.
#[test]
fn random_sequences() {
    let Some(mut disk) = disk() else { return };
    let mut random = Random::from_environment();
    each_engine(|name, engine, options| {
        let path = disk.path(name);
        fs::File::create(&path).unwrap().sync_all().unwrap();
        fs::File::open(path.parent().unwrap()).unwrap().sync_all().unwrap();
        let mut model = Model::new();
        let mut log = Vec::new();
        let mut handles = Handles::open(engine, &path, options);
        let mut cuts = scaled(8);
        while cuts > 0 {
            if random.chance(60) {
                drop(handles);
                handles = Handles::open(engine, &path, options);
                log.push("all closed, and opened".to_string());
            }
            let (what, has_promised) = step(&mut random, &handles, &mut model);
            log.push(what);
            if !has_promised || random.chance(400) {
                continue;
            }
            cuts -= 1;
            let seed = random.next();
            let unflushed =
                if seed.is_multiple_of(2) { Unflushed::Lost } else { Unflushed::Some(seed) };
            let found = disk.cut(unflushed).read(name).expect("the file is there");
            if let Some(wrong) = model.explain(&found) {
                panic!("{name}, {unflushed:?}: {wrong}; after {log:#?}");
            }
        }
    });
}

/// Contents of a file that is replaced as a whole: all of one number, as many pages.
fn version(number: u8) -> Vec<u8> {
    vec![number; 4096 * (1 + number as usize % 5) + 100]
}

/// Goal: after `File::persist` has returned the new file is there by its name, with all its bytes; with
/// nothing but sync and rename, or rename alone, it would not be.
#[test]
fn persisted_files() {
    let Some(mut disk) = disk() else { return };
    fs::create_dir(disk.path("other")).unwrap();
    each_engine(|name, engine, options| {
        for (number, dir) in (1u8..).zip(["", "other/", "", ""]) {
            let new = format!("{dir}{name}-new");
            let path = disk.path(&new);
            let file = engine.open(&path, options).unwrap();
            file.write_all_at(&version(number), 0).unwrap();
            file.persist(&path, disk.path(name)).unwrap();
            for unflushed in [Unflushed::Lost, Unflushed::Some(7)] {
                let survivor = disk.cut(unflushed);
                assert_eq!(survivor.read(name).unwrap(), version(number), "{name}, {number}");
                assert_eq!(survivor.read(&new), None, "{name}, {number}: the old name");
            }
        }
    });
}

/// Goal: a cut while files are persisted finds one of them, whole: the last that was, or a later one.
#[test]
fn cuts_while_files_are_persisted() {
    let Some(mut disk) = disk() else { return };
    let mut random = Random::from_environment();
    each_engine(|name, engine, options| {
        let (new, current) = (disk.path("new"), disk.path(name));
        let persist = |number: u8| {
            let file = engine.open(&new, options).unwrap();
            file.write_all_at(&version(number), 0).unwrap();
            file.persist(&new, &current).unwrap();
        };
        persist(1);
        let (persisted, stop) = (AtomicU8::new(1), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for number in 2..=250 {
                    if stop.load(SeqCst) {
                        return;
                    }
                    persist(number);
                    persisted.store(number, SeqCst);
                }
            });
            then_stop(&stop, || {
                for _ in 0..scaled(5) {
                    let before = persisted.load(SeqCst);
                    let seed = random.next();
                    let found = disk.cut(Unflushed::Some(seed)).read(name).expect("a file");
                    let number = found[0];
                    assert!(number >= before, "{name}, {seed}: {number} after {before}");
                    assert_eq!(found, version(number), "{name}, {seed}");
                }
            });
        });
    });
}

/// Goal: where the directory can't be synced that is said, with what has happened: the file has its new
/// name. After a cut the old one is there, or it.
/// Method: a file of `sim`, whose own sync the failing disk does not concern.
#[test]
fn a_directory_that_can_not_be_synced() {
    let Some(mut disk) = disk() else { return };
    let (new, current) = (disk.path("new"), disk.path("current"));
    fs::write(&current, b"old").unwrap();
    fs::File::open(&current).unwrap().sync_all().unwrap();
    let engine = builder(CACHE_BYTES, BackendChoice::Sim(SimOptions::new(1))).build().unwrap();
    let file = engine.open(&new, &read_write()).unwrap();
    let inode = fs::metadata(&new).unwrap().ino();
    disk.fail();
    let failed = file.persist(&new, &current);
    let is_told = matches!(failed, Err(Error::Persist { step: PersistStep::SyncDirectory, .. }));
    assert!(is_told, "{failed:?}");
    assert_eq!(fs::metadata(&current).unwrap().ino(), inode);
    assert!(!new.exists());
    assert_eq!(disk.cut(Unflushed::Lost).read("current").unwrap(), b"old");
}
