//! Random operations on a file of a full file system.
//!
//! `MILLPOND_TEST_SEED` replays a run, `MILLPOND_TEST_SCALE` makes it longer.

use std::time::Duration;

use millpond::{BackendChoice, Error, Result};

use super::*;
use crate::common::{Random, has_uring, scaled, within};

/// A longer file is truncated.
const FILE_BYTES_MAX: u64 = 3 << 20;
/// The free space at the start, at most.
const FREE_BYTES_MAX: u64 = 4 << 20;
/// On each file system and backing.
const STEPS: u32 = 30;

struct Subject {
    what: String,
    /// Whether a sync may find the disk full: on file systems that do not overwrite blocks in
    /// place.
    fails_at_sync: bool,
    mount: Mount,
    path: PathBuf,
    filler: PathBuf,
    engine: Engine,
    options: OpenOptions,
    /// `None` between the last close and the next open.
    file: Option<File>,
    direct: Option<File>,
    expected: Vec<u8>,
    random: Random,
    stamp: u8,
}

/// The effect of an operation on the file, if it succeeds.
enum Effect {
    /// Bytes at an offset, which may be written in part.
    Write(u64, Vec<u8>),
    Resize(u64),
    /// Zeros up to the end of the file.
    Clear(u64, u64),
    Extend(u64),
    Nothing,
}

impl Subject {
    fn new(
        mount: Mount,
        what: String,
        backing: Backing,
        backend: BackendChoice,
    ) -> Option<Subject> {
        let (path, filler) = (mount.point.join("file"), mount.point.join("filler"));
        let engine = engine(8 << 20, backend);
        let options = write_back().backing(backing);
        let file = match engine.open(&path, &options) {
            Ok(file) => file,
            Err(error) => {
                skip(format_args!("{what}: {error}"));
                return None;
            }
        };
        Some(Subject {
            what,
            fails_at_sync: false,
            mount,
            path,
            filler,
            direct: None,
            engine,
            options,
            file: Some(file),
            expected: Vec::new(),
            random: Random(0),
            stamp: 0,
        })
    }

    fn file(&self) -> &File {
        self.file.as_ref().expect("open")
    }

    fn len(&self) -> u64 {
        self.expected.len() as u64
    }

    /// A range that begins in the file, or a little beyond its end.
    fn range(&mut self, len_max: u64) -> (u64, u64) {
        let mut at = match self.random.below(3) {
            0 => self.len(),
            _ => self.random.below(self.len() + (128 << 10)),
        };
        let mut len = 1 + self.random.below(len_max);
        if self.random.chance(600) {
            (at, len) = (at / PAGE as u64 * PAGE as u64, len.next_multiple_of(PAGE as u64));
        }
        (at, len)
    }

    fn bytes(&mut self, len: u64) -> Vec<u8> {
        self.stamp = self.stamp % 250 + 1;
        vec![self.stamp; len as usize]
    }

    /// Performs one operation; returns its name, its effect on the file, and its outcome.
    fn operate(&mut self) -> (String, Effect, Result<usize>) {
        match self.random.below(24) {
            0..=4 => {
                let len = 1 + self.random.below(100 << 10);
                let (bytes, end) = (self.bytes(len), self.len());
                let outcome = match self.file().append(&bytes) {
                    Ok(at) => {
                        assert_eq!(at, end, "{}", self.what);
                        Ok(bytes.len())
                    }
                    Err(Error::Io { len, ref source, .. })
                        if source.kind() == std::io::ErrorKind::WriteZero =>
                    {
                        Ok(len as usize)
                    }
                    Err(error) => Err(error),
                };
                (format!("append {len} at {end}"), Effect::Write(end, bytes), outcome)
            }
            5..=9 => {
                // The longest writes have more pages than a write leaves in the cache.
                let len_max = [8 << 10, 8 << 10, 200 << 10, 2 << 20][self.random.below(4) as usize];
                let (at, len) = self.range(len_max);
                let bytes = self.bytes(len);
                let outcome = match self.random.below(4) {
                    0 => self.file().write_at_dsync(&bytes, at),
                    _ => self.file().write_at(&bytes, at),
                };
                (format!("write {len} at {at}"), Effect::Write(at, bytes), outcome)
            }
            10 | 11 => {
                let (at, len) = self.range(400 << 10);
                let bytes = self.bytes(len);
                let outcome = self.direct.as_ref().unwrap_or(self.file()).write_at(&bytes, at);
                (format!("direct write {len} at {at}"), Effect::Write(at, bytes), outcome)
            }
            12 => {
                let (at, len) = self.range(64 << 10);
                let bytes = self.bytes(len);
                let suspended = self.file().suspend_writeback();
                let outcome = suspended.and_then(|_suspended| self.file().write_at(&bytes, at));
                (format!("write through {len} at {at}"), Effect::Write(at, bytes), outcome)
            }
            13..=15 => {
                let len = match self.random.below(3) {
                    0 => self.len(),
                    1 => self.random.below(self.len() + 1),
                    _ => self.len() + self.random.below(256 << 10),
                };
                let outcome = self.file().truncate(len).map(|()| 0);
                (format!("truncate to {len}"), Effect::Resize(len), outcome)
            }
            16 => {
                let (at, len) = self.range(300 << 10);
                let outcome = self.file().punch_hole(at, len).map(|()| 0);
                (format!("punch {len} at {at}"), Effect::Clear(at, at + len), outcome)
            }
            17 => {
                let (at, len) = self.range(300 << 10);
                let outcome = self.file().zero_range(at, len).map(|()| 0);
                (format!("zero {len} at {at}"), Effect::Clear(at, at + len), outcome)
            }
            18 => {
                let (at, len) = self.range(300 << 10);
                let outcome = self.file().allocate(at, len).map(|()| 0);
                (format!("allocate {len} at {at}"), Effect::Extend(at + len), outcome)
            }
            19 | 20 => self.change_below(),
            21 => ("sync".into(), Effect::Nothing, self.file().sync_all().map(|()| 0)),
            22 => ("settle".into(), Effect::Nothing, self.file().settle().map(|()| 0)),
            _ => {
                self.direct = None;
                let open = || Some(self.engine.open(&self.path, &self.options).unwrap());
                // With another handle, or the last.
                let another = if self.random.chance(500) { open() } else { None };
                let closed = self.file.take().expect("open").close();
                self.file = another.or_else(open);
                ("close".into(), Effect::Nothing, closed.map(|()| 0))
            }
        }
    }

    /// Another program changes the file, and the test calls `invalidate`.
    fn change_below(&mut self) -> (String, Effect, Result<usize>) {
        if let Err(error) = self.file().write_back() {
            return ("write back".into(), Effect::Nothing, Err(error));
        }
        let other = std::fs::File::options().write(true).open(&self.path).unwrap();
        let (at, len) = self.range(300 << 10);
        let (what, effect) = match self.random.below(3) {
            0 => {
                other.set_len(self.len()).unwrap();
                ("cuts to its length".to_string(), Effect::Nothing)
            }
            1 => {
                let len = self.random.below(self.len() + 1);
                other.set_len(len).unwrap();
                (format!("cuts to {len}"), Effect::Resize(len))
            }
            _ => {
                let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                match rustix::fs::fallocate(&other, how, at, len) {
                    Ok(()) => (format!("punches {len} at {at}"), Effect::Clear(at, at + len)),
                    Err(_) => ("punches nothing".to_string(), Effect::Nothing),
                }
            }
        };
        let outcome = self.file().invalidate(0, i64::MAX as u64 - 1).map(|()| 0);
        (format!("another program {what}"), effect, outcome)
    }

    /// The contents after an operation that wrote `moved` bytes.
    fn apply(&self, effect: &Effect, moved: usize) -> Vec<u8> {
        let mut bytes = self.expected.clone();
        match effect {
            Effect::Write(at, new) if moved > 0 => {
                let at = *at as usize;
                bytes.resize(bytes.len().max(at + moved), 0);
                bytes[at..at + moved].copy_from_slice(&new[..moved]);
            }
            Effect::Resize(len) => bytes.resize(*len as usize, 0),
            Effect::Clear(start, end) => {
                let limit = bytes.len();
                bytes[(*start as usize).min(limit)..(*end as usize).min(limit)].fill(0);
            }
            Effect::Extend(end) => bytes.resize(bytes.len().max(*end as usize), 0),
            Effect::Write(..) | Effect::Nothing => {}
        }
        bytes
    }

    /// After an operation that failed, or wrote a part: each byte is as before or as after it.
    fn adopt(&mut self, effect: &Effect, least: Vec<u8>) {
        let most = match effect {
            Effect::Write(_, new) => self.apply(effect, new.len()),
            _ => self.apply(effect, 0),
        };
        let mut seen = vec![0; self.file().len().unwrap() as usize];
        let moved = self.file().read_at(&mut seen, 0).unwrap();
        assert_eq!(moved, seen.len(), "{}: it is shorter than its length", self.what);
        let lens = (least.len().min(most.len()), least.len().max(most.len()));
        let what = &self.what;
        assert!((lens.0..=lens.1).contains(&moved), "{what}: {moved} bytes, expected {lens:?}");
        for (at, &byte) in seen.iter().enumerate() {
            let is = |bytes: &[u8]| byte == bytes.get(at).copied().unwrap_or(0);
            assert!(is(&least) || is(&most), "{what}: {byte} at {at}");
        }
        self.expected = seen;
    }

    /// Whether the file can still be used: false once a sync found the disk full where that is allowed.
    fn step(&mut self) -> bool {
        let (what, effect, outcome) = self.operate();
        let least = self.apply(&effect, *outcome.as_ref().unwrap_or(&0));
        let wanted = match &effect {
            Effect::Write(_, bytes) => bytes.len(),
            _ => 0,
        };
        let is_sync = matches!(effect, Effect::Nothing);
        if std::env::var_os("MILLPOND_TEST_STEPS").is_some() {
            println!("{}: {what}: {outcome:?}", self.what);
        }
        match outcome {
            Ok(moved) if moved == wanted => self.expected = least,
            Ok(_) => self.adopt(&effect, least),
            Err(error) => {
                let refused = [libc::ENOSPC, libc::EOPNOTSUPP].contains(&error.errno());
                assert!(refused, "{}: {what}: {error}", self.what);
                let is_late = is_sync || matches!(error, Error::Lost { .. });
                if is_late && self.fails_at_sync {
                    return false;
                }
                assert!(!is_late, "{}: {what} failed: {error}", self.what);
                let before = self.expected.clone();
                self.adopt(&effect, before);
            }
        }
        if is_sync {
            same(&std::fs::read(&self.path).unwrap(), &self.expected, &self.what);
        }
        if self.len() > FILE_BYTES_MAX {
            self.file().truncate(FILE_BYTES_MAX / 2).unwrap();
            self.expected.truncate(FILE_BYTES_MAX as usize / 2);
        }
        true
    }

    /// The other program takes the free space, or releases some.
    fn fill(&mut self) {
        match self.random.below(10) {
            0..=4 => self.mount.fill_up(&self.filler),
            5 => {
                let filler = std::fs::File::options().write(true).open(&self.filler).unwrap();
                let given = self.random.below(1 << 20);
                filler.set_len(filler.metadata().unwrap().len().saturating_sub(given)).unwrap();
                filler.sync_all().unwrap();
            }
            _ => {}
        }
    }

    fn run(mut self) {
        self.mount.fill_up(&self.filler);
        let filler = std::fs::File::options().write(true).open(&self.filler).unwrap();
        let free = self.random.below(FREE_BYTES_MAX);
        filler.set_len(filler.metadata().unwrap().len() - free).unwrap();
        filler.sync_all().unwrap();
        for _ in 0..scaled(STEPS) {
            if self.direct.is_none() && self.random.chance(300) {
                let options = read_write().direct(true).bounce(true);
                self.direct = self.engine.open(&self.path, &options).ok();
            }
            if !self.step() {
                return;
            }
            self.fill();
        }
        self.mount.fill_up(&self.filler);
        let Subject { what, file, direct, path, expected, fails_at_sync, .. } = self;
        drop(direct);
        match file.expect("open").close() {
            Err(_) if fails_at_sync => return,
            closed => closed.unwrap_or_else(|error| panic!("{what}: close: {error}")),
        }
        same(&std::fs::read(&path).unwrap(), &expected, &what);
    }
}

/// Goal: each acknowledged byte is in the file when it is closed, or a write, a sync or the close
/// failed; on file systems that overwrite in place, only the write may fail.
/// Method: random writes, appends, truncations, punches and changes by another program, on a disk
/// on which another file takes the freed blocks; a model.
#[test]
fn acknowledged_bytes_are_stored_on_a_full_disk() {
    let btrfs: (&str, Make) = ("btrfs", || Mount::btrfs(XFS_BYTES));
    let mut random = Random::from_environment();
    let backends = [BackendChoice::Threads, BackendChoice::Uring];
    let backends = &backends[..1 + usize::from(has_uring())];
    for (name, make) in IN_PLACE.into_iter().chain([btrfs]) {
        for backing in BACKINGS {
            let mut random = random.fork();
            let backend = &backends[random.below(backends.len() as u64) as usize];
            let what = format!("{name}, {backing:?}, {backend:?}");
            let Some(mount) = make() else { continue };
            let Some(mut subject) = Subject::new(mount, what, backing, backend.clone()) else {
                continue;
            };
            subject.random = random;
            subject.fails_at_sync = name == "btrfs";
            let limit = Duration::from_secs(120 + u64::from(scaled(10)));
            within(limit, name, move || subject.run());
        }
    }
}

/// Goal: the same with several writers at once, and while the other program takes blocks at any
/// moment.
/// Method: threads make short appends, which wait in the cache, long appends, which do not, and
/// overwrites. Another thread takes the free blocks, and releases some. At the end all acknowledged
/// bytes are in the file.
#[test]
fn acknowledged_bytes_are_stored_beside_other_writers() {
    let mut random = Random::from_environment();
    for (name, make) in IN_PLACE {
        let backing = BACKINGS[random.below(BACKINGS.len() as u64) as usize];
        let Some(case) = Case::new(name, make, backing) else { continue };
        let random = random.fork();
        let limit = Duration::from_secs(120 + u64::from(scaled(10)));
        within(limit, name, move || write_beside(case, random));
    }
}

fn write_beside(case: Case, mut random: Random) {
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
    // Within this part the length never changes; each thread overwrites its own third of it.
    const BASE: u64 = 300 << 10;
    let (case, stop) = (&case, &AtomicBool::new(false));
    let mut expected = vec![1; BASE as usize];
    case.file.write_all_at(&expected, 0).unwrap();
    let acknowledged = std::thread::scope(|scope| {
        let writers: Vec<_> = [8 << 10, 60 << 10, 2 << 20]
            .into_iter()
            .enumerate()
            .map(|(number, len_max)| {
                let mut random = random.fork();
                scope.spawn(move || {
                    let mut done = Vec::new();
                    for step in 0..scaled(25) {
                        let stamp = (number as u32 * 80 + step % 80 + 2) as u8;
                        let bytes = vec![stamp; 1 + random.below(len_max) as usize];
                        if random.chance(300) {
                            let at = number as u64 * BASE / 3 + random.below(BASE / 6);
                            let bytes = &bytes[..bytes.len().min(BASE as usize / 6)];
                            if let Ok(moved) = case.file.write_at(bytes, at) {
                                done.push((at, moved, stamp));
                            }
                            continue;
                        }
                        match case.file.append(&bytes) {
                            Ok(at) => done.push((at, bytes.len(), stamp)),
                            Err(Error::Io { offset, len, ref source, .. })
                                if source.kind() == std::io::ErrorKind::WriteZero =>
                            {
                                done.push((offset, len as usize, stamp));
                            }
                            Err(error) => {
                                let what = &case.what;
                                assert_eq!(error.errno(), libc::ENOSPC, "{what}: {error}");
                            }
                        }
                    }
                    done
                })
            })
            .collect();
        let other = scope.spawn(|| {
            while !stop.load(Relaxed) {
                case.fill_up();
                if random.chance(200) {
                    let filler = std::fs::File::options().write(true).open(&case.filler).unwrap();
                    let len = filler.metadata().unwrap().len();
                    filler.set_len(len.saturating_sub(random.below(300 << 10))).unwrap();
                }
                std::thread::sleep(Duration::from_millis(random.below(4)));
            }
        });
        let done = writers.into_iter().map(|writer| writer.join());
        let done: Vec<_> = done.collect();
        stop.store(true, Relaxed);
        other.join().unwrap();
        done.into_iter().flat_map(|done| done.unwrap()).collect::<Vec<_>>()
    });
    let what = &case.what;
    case.fill_up();
    case.file.sync_all().unwrap_or_else(|error| panic!("{what}: {error}"));
    let found = std::fs::read(&case.path).unwrap();
    assert_eq!(found.len() as u64, case.file.len().unwrap(), "{what}");
    expected.resize(found.len(), 0);
    let mut is_known = vec![false; found.len()];
    for (at, len, stamp) in acknowledged {
        let range = at as usize..at as usize + len;
        expected[range.clone()].fill(stamp);
        is_known[range].fill(true);
    }
    for (at, (&byte, &wanted)) in found.iter().zip(&expected).enumerate() {
        assert!(!is_known[at] || byte == wanted, "{what}: {byte} at {at}, expected {wanted}");
    }
}
