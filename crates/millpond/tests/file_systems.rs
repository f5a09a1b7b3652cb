//! The same guarantees on ext4, XFS and btrfs: contents by every way of reading and writing, synced
//! bytes after a power cut, and full disks.
//!
//! Each test makes file systems on loop devices with direct I/O to their images. An image holds the
//! bytes that the file system has written to its disk, so a copy of it is the state after a power
//! cut.

mod common;

use std::collections::HashMap;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use millpond::direct::{DirectRequest, SegmentList};
use millpond::{BackendChoice, Backing, Engine, File, OpenOptions, WriteMode};

use rustix::fs::FallocateFlags;

use common::requests::each;
use common::{
    Random, builder, engine, has_uring, read_write, same, scaled, skip, temp_dir, within,
};

const PAGE: usize = 4096;
/// The least size for XFS.
const DISK_BYTES: u64 = 320 << 20;

/// How to make each file system, and to mount a copy of it.
const KINDS: [(&str, &[&str], &str); 2] =
    [("xfs", &["-q", "-m", "reflink=1"], "noatime,nouuid"), ("btrfs", &["-q"], "noatime")];

/// Runs a command that needs root; returns its failure as an error.
fn run(program: &str, args: &[&str]) -> Result<String, String> {
    let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
    let output = Command::new(program).args(args).env("PATH", path).output();
    let output = output.map_err(|error| format!("{program}: {error}"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_string();
    match output.status.success() {
        true => Ok(text(&output.stdout)),
        false => Err(format!("{program} {args:?}: {}", text(&output.stderr))),
    }
}

/// An image with a file system, mounted.
struct Disk {
    point: PathBuf,
    image: PathBuf,
    device: String,
}

impl Disk {
    /// A new file system in `dir`; `None`, with a skip, where permissions or programs are missing.
    fn new(dir: &Path, (kind, make, options): (&str, &[&str], &str)) -> Option<Disk> {
        let image = dir.join("image");
        std::fs::File::create(&image).unwrap().set_len(DISK_BYTES).unwrap();
        let mut args = make.to_vec();
        args.push(image.to_str().unwrap());
        let made = run(&format!("mkfs.{kind}"), &args);
        let mounted = made.and_then(|_| Disk::mount(dir, image, options));
        mounted.map_err(|reason| skip(format_args!("{kind}: {reason}"))).ok()
    }

    fn mount(dir: &Path, image: PathBuf, options: &str) -> Result<Disk, String> {
        let args = ["--find", "--show", "--direct-io=on", image.to_str().unwrap()];
        let device = run("losetup", &args)?;
        let point = dir.join(format!("on-{}", device.trim_start_matches("/dev/")));
        std::fs::create_dir_all(&point).unwrap();
        let mounted = run("mount", &["-o", options, &device, point.to_str().unwrap()]);
        let disk = Disk { point, image, device };
        mounted.map(|_| disk)
    }

    /// Copies the state that a power cut would leave now.
    fn cut(&self, to: &Path) {
        let (image, to) = (self.image.to_str().unwrap(), to.to_str().unwrap());
        run("cp", &["--sparse=always", "--reflink=never", image, to]).unwrap();
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // Lazily, after a failure: then the file may still be open.
        let point = self.point.to_str().unwrap();
        let _ = run("umount", &[point]).or_else(|_| run("umount", &["--lazy", point]));
        let _ = run("losetup", &["--detach", &self.device]);
    }
}

fn back_ends() -> Vec<BackendChoice> {
    let mut all = vec![BackendChoice::Threads];
    all.extend(has_uring().then_some(BackendChoice::Uring));
    all
}

/// Engines and ways to open a file: both modes, over the kernel's cache and past it, by each back end.
fn each_way(mut body: impl FnMut(&str, &Engine, &OpenOptions)) {
    for (name, backend) in ["threads", "uring"].iter().zip(back_ends()) {
        for mode in [WriteMode::Through, WriteMode::Back] {
            let backings =
                [Backing::Buffered, Backing::Direct, Backing::DirectInPlace, Backing::Mapped];
            // Mapped backing is for writes through.
            let count = if mode == WriteMode::Through { 4 } else { 3 };
            for backing in backings.into_iter().take(count) {
                let engine = engine(2 << 20, backend.clone());
                let options = read_write().write_mode(mode).backing(backing);
                body(&format!("{name}-{mode:?}-{backing:?}"), &engine, &options);
            }
        }
    }
}

/// A file that is changed and read by cached and by direct handles, and its expected contents.
struct Contents<'e> {
    what: String,
    engine: &'e Engine,
    cached: File,
    direct: File,
    expected: Vec<u8>,
    /// The range of the last write.
    last: (usize, usize),
    random: Random,
}

impl Contents<'_> {
    fn range(&mut self) -> (usize, usize) {
        // Often near earlier ranges.
        let reach = if self.random.chance(700) { 60_000 } else { 600_000 };
        let at = self.random.below(reach) as usize;
        let len = 1 + self.random.below([300, 9000, 200_000][at % 3]) as usize;
        if self.random.chance(500) {
            return (at / PAGE * PAGE, len.next_multiple_of(PAGE));
        }
        (at, len)
    }

    fn write(&mut self, at: usize, src: &[u8]) {
        self.last = (at, src.len());
        let offset = at as u64;
        let is_aligned = (at | src.len()).is_multiple_of(PAGE);
        match self.random.below(6) {
            0 => self.direct.write_all_at(src, offset).unwrap(),
            1 if is_aligned => {
                let mut buffers = self.engine.alloc_buffers(1, src.len()).unwrap();
                buffers[0].copy_from_slice(src);
                let mut list = Some(SegmentList::from_buffers(buffers));
                each(&mut self.engine.pipeline(2).unwrap(), |done| {
                    if let Some(done) = done {
                        assert_eq!(done.outcome.unwrap(), src.len());
                    }
                    Some(DirectRequest::write(&self.direct, list.take()?, offset))
                });
            }
            2 => assert_eq!(self.cached.write_at_dsync(src, offset).unwrap(), src.len()),
            _ => self.cached.write_all_at(src, offset).unwrap(),
        }
        self.expected.resize(self.expected.len().max(at + src.len()), 0);
        self.expected[at..at + src.len()].copy_from_slice(src);
    }

    fn step(&mut self, stamp: u8) {
        let (at, len) = self.range();
        let (offset, bytes) = (at as u64, len as u64);
        match self.random.below(16) {
            0 => {
                self.cached.truncate(offset).unwrap();
                self.expected.resize(at, 0);
            }
            1 | 2 => {
                // Mostly recently written bytes, which may wait in the cache.
                let (at, len) = match self.random.chance(700) {
                    true => (self.last.0 + 100, self.last.1.min(5000)),
                    false => (at, len),
                };
                let (offset, bytes) = (at as u64, len as u64);
                let cleared = match self.random.chance(500) {
                    true => self.cached.punch_hole(offset, bytes),
                    false => self.cached.zero_range(offset, bytes),
                };
                cleared.unwrap_or_else(|error| panic!("{}: {error}", self.what));
                let end = self.expected.len();
                self.expected[at.min(end)..(at + len).min(end)].fill(0);
            }
            3 => {
                self.cached.allocate(offset, bytes).unwrap();
                self.expected.resize(self.expected.len().max(at + len), 0);
            }
            4 => {
                let src = vec![stamp; len.min(20_000)];
                assert_eq!(self.cached.append(&src).unwrap(), self.expected.len() as u64);
                self.expected.extend(src);
            }
            5 => self.cached.sync_data().unwrap(),
            6 => self.cached.invalidate(offset, bytes).unwrap(),
            7 => self.seek(at),
            _ => self.write(at, &vec![stamp; len]),
        }
        let around = (at.saturating_sub(5000), len.min(20_000) + 10_000);
        let (at, len) = if self.random.chance(500) { around } else { self.range() };
        let mut seen = vec![0xEE; len];
        let file = if self.random.chance(300) { &self.direct } else { &self.cached };
        let moved = file.read_at(&mut seen, at as u64).unwrap();
        let end = self.expected.len();
        let expected = &self.expected[at.min(end)..(at + len).min(end)];
        same(&seen[..moved], expected, &format!("{}: {at}", self.what));
    }

    /// Bytes other than zero are in no hole.
    fn seek(&self, at: usize) {
        let Some(next) = self.expected.get(at..).and_then(|rest| rest.iter().position(|&b| b != 0))
        else {
            return;
        };
        let data = self.cached.seek_data(at as u64).unwrap();
        assert!(data.is_some_and(|data| data as usize <= at + next), "{}: {data:?}", self.what);
        let hole = self.cached.seek_hole((at + next) as u64).unwrap().unwrap() as usize;
        let is_zero = |&byte: &u8| byte == 0;
        let page_end = (hole + 1).next_multiple_of(512).min(self.expected.len());
        assert!(hole > at + next, "{}: data at {} is in a hole", self.what, at + next);
        assert!(self.expected[hole..page_end].iter().all(is_zero), "{}: {hole}", self.what);
    }
}

/// Goal: contents are correct for any block layout of the file system: copy on write, shared
/// blocks.
/// Method: random operations against a model, on a file that shares half of its blocks with another
/// file, where the file system supports it.
#[test]
fn contents_are_right() {
    let mut random = Random::from_environment();
    for kind in KINDS {
        let random = random.fork();
        within(Duration::from_secs(120 + u64::from(scaled(1))), kind.0, move || {
            let (dir, mut random) = (temp_dir(), random);
            let Some(disk) = Disk::new(dir.path(), kind) else { return };
            each_way(|way, engine, options| {
                let path = disk.point.join(way);
                let expected = vec![200; 500_000];
                std::fs::write(&path, &expected).unwrap();
                if random.chance(500) {
                    let clone = disk.point.join("clone");
                    let args =
                        ["--reflink=always", path.to_str().unwrap(), clone.to_str().unwrap()];
                    run("cp", &args).unwrap();
                }
                let cached = engine.open(&path, options).unwrap();
                let direct = options.clone().direct(true).bounce(true);
                let direct = engine.open(&path, &direct).unwrap();
                let (what, random) = (format!("{}, {way}", kind.0), random.fork());
                let last = (0, 1);
                let mut file = Contents { what, engine, cached, direct, expected, last, random };
                for step in 0..scaled(120) {
                    file.step(step as u8 % 199 + 1);
                }
                let Contents { what, cached, direct, expected, .. } = file;
                direct.close().unwrap();
                cached.close().unwrap();
                same(&std::fs::read(&path).unwrap(), &expected, &what);
            });
        });
    }
}

/// An operation that makes bytes durable, with the file, its path, and the range that was written.
type Sync = fn(&File, &Path, usize, usize);

const SYNCS: [(&str, Sync); 6] = [
    ("sync_all", |file, _, _, _| file.sync_all().unwrap()),
    ("sync_data", |file, _, _, _| file.sync_data().unwrap()),
    ("sync_range", |file, _, at, len| file.sync_range(at as u64, len as u64).unwrap()),
    ("dsync", |file, _, at, len| {
        let mut bytes = vec![0; len];
        file.read_exact_at(&mut bytes, at as u64).unwrap();
        assert_eq!(file.write_at_dsync(&bytes, at as u64).unwrap(), len);
    }),
    ("persist", |file, path, _, _| file.persist(path, path).unwrap()),
    ("nothing", |file, _, _, _| file.write_back().unwrap()),
];

/// Goal: bytes that a sync or a durable write covered are there after a power cut.
/// Method: bytes are written into durable files, holes and data, and made durable; then the disk is
/// copied. To show that the test can fail, bytes that were not synced must be lost at least once;
/// not always, as another process may call `sync`.
#[test]
fn syncs_survive_power_cuts() {
    let (at, len) = (300_000, 100_000);
    for kind in KINDS {
        let dir = temp_dir();
        let Some(disk) = Disk::new(dir.path(), kind) else { continue };
        let mut lefts = Vec::new();
        let modes = [("back", WriteMode::Back), ("through", WriteMode::Through)];
        let backends = back_ends();
        for (number, (sync_name, sync)) in SYNCS.into_iter().enumerate() {
            for (turn, (mode_name, mode)) in modes.into_iter().enumerate() {
                let name = format!("{sync_name}-{mode_name}");
                let path = disk.point.join(&name);
                let before = std::fs::File::create(&path).unwrap();
                before.write_all_at(&[1; 200_000], 0).unwrap();
                before.set_len(350_000).unwrap();
                before.sync_all().unwrap();
                std::fs::File::open(&disk.point).unwrap().sync_all().unwrap();
                let backend = backends[(number + turn) % backends.len()].clone();
                let engine = builder(4 << 20, backend).build().unwrap();
                let file = engine.open(&path, &read_write().write_mode(mode)).unwrap();
                // In old blocks, in a hole, and beyond the end.
                file.write_all_at(&[2; 50_000], 100_000).unwrap();
                file.write_all_at(&vec![3; len], at as u64).unwrap();
                sync(&file, &path, at, len);
                let left = dir.path().join(format!("left-{name}"));
                disk.cut(&left);
                lefts.push((name, sync_name, left));
            }
        }
        // The copies look like the same disk.
        drop(disk);
        let mut lost = 0;
        for (name, sync_name, left) in lefts {
            let survivor = Disk::mount(dir.path(), left.clone(), kind.2).unwrap();
            let found = std::fs::read(survivor.point.join(&name)).unwrap();
            drop(survivor);
            std::fs::remove_file(left).unwrap();
            let what = format!("{}, {name}", kind.0);
            let is_there = |value: u8, at: usize, len: usize| {
                found.get(at..at + len).is_some_and(|part| part.iter().all(|&byte| byte == value))
            };
            assert!(is_there(1, 0, 100_000), "{what}: bytes that were durable before");
            if sync_name == "nothing" {
                lost += usize::from(!is_there(3, at, len));
                continue;
            }
            assert!(is_there(3, at, len), "{what}: {} bytes are left", found.len());
            let covers_all = !matches!(sync_name, "sync_range" | "dsync");
            assert!(!covers_all || is_there(2, 100_000, 50_000), "{what}: the other write");
        }
        assert!(lost > 0, "{}: durable without a sync", kind.0);
    }
}

/// Takes all free space but `left` bytes.
fn fill_up(disk: &Disk, left: u64) {
    let filler = std::fs::File::create(disk.point.join("filler")).unwrap();
    let mut at = 0;
    for len in [64 << 20, 1 << 20, 64 << 10, PAGE as u64] {
        while rustix::fs::fallocate(&filler, FallocateFlags::empty(), at, len).is_ok() {
            at += len;
        }
    }
    filler.set_len(at - left.min(at)).unwrap();
    filler.sync_all().unwrap();
}

/// Goal: on a full disk the write that finds no space returns the error, and no later call.
/// Acknowledged bytes can be synced, and are there.
/// Method: new pages in order and at random, with overwrites among them, until the disk is full and
/// for a while after that; from aligned and from unaligned memory.
#[test]
fn the_write_that_fills_the_disk_fails() {
    for kind in KINDS {
        for backing in [Backing::Buffered, Backing::Direct] {
            let dir = temp_dir();
            let Some(disk) = Disk::new(dir.path(), kind) else { continue };
            let path = disk.point.join("file");
            fill_up(&disk, 6 << 20);
            let engine = engine(32 << 20, BackendChoice::Threads);
            let options = read_write().write_mode(WriteMode::Back).backing(backing);
            let file = engine.open(&path, &options).unwrap();
            let (mut expected, mut refused, mut random) = (Vec::<u8>::new(), 0, Random(7));
            let mut next = 0;
            let mut memory = vec![0; 6 * PAGE];
            let aligned = memory.as_ptr().align_offset(PAGE);
            // Bytes that refused writes may have left in a page: the kernel does not report the
            // part that a failed direct write has written.
            let mut perhaps = HashMap::<usize, Vec<u8>>::new();
            let what = format!("{}, {backing:?}", kind.0);
            for step in 0..1500 {
                let len = PAGE * (1 + random.below(4) as usize);
                let at = match random.below(3) {
                    0 => random.below(12 << 20) as usize / PAGE * PAGE,
                    _ => next,
                };
                next = (next + len) % (12 << 20);
                let (value, pages) = (step as u8 | 1, at / PAGE..(at + len) / PAGE);
                let bytes = &mut memory[aligned + step % 2..][..len];
                bytes.fill(value);
                match file.write_at(bytes, at as u64) {
                    Ok(moved) => {
                        expected.resize(expected.len().max(at + moved), 0);
                        expected[at..at + moved].fill(value);
                        pages.take(moved / PAGE).for_each(|page| drop(perhaps.remove(&page)));
                    }
                    Err(error) => {
                        assert_eq!(error.errno(), libc::ENOSPC, "{what}: {error}");
                        refused += 1;
                        if backing == Backing::Direct {
                            pages.for_each(|page| perhaps.entry(page).or_default().push(value));
                        }
                    }
                }
            }
            println!("{what}: {refused} refused, {} bytes", expected.len());
            assert!(refused > 0, "{what}: it was never full");
            file.sync_all().unwrap_or_else(|error| panic!("{what}: {error}"));
            file.close().unwrap();
            let found = std::fs::read(&path).unwrap();
            for (page, values) in perhaps {
                let Some(found) = found.get(page * PAGE..(page + 1) * PAGE) else { continue };
                if values.iter().any(|value| found.iter().all(|byte| byte == value)) {
                    expected.resize(expected.len().max((page + 1) * PAGE), 0);
                    expected[page * PAGE..][..PAGE].copy_from_slice(found);
                }
            }
            same(&found, &expected, &what);
        }
    }
}
