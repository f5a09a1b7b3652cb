//! Direct I/O beside cached I/O: one file, whichever way one goes to it.

mod common;

use std::io::{IoSlice, IoSliceMut};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use millpond::{
    BackendChoice, Backing, Buffer, DirectRequest, Engine, Error, File, OpenOptions, SegmentList,
    SimOptions, WriteMode,
};

use common::requests::each;
use common::{Random, cache_for, engine, read_write, same, scaled, stress_time, temp_dir, within};

fn direct() -> OpenOptions {
    read_write().direct(true)
}

/// What offsets and lengths must be multiples of, of a handle that bounces nothing.
fn limit_bytes(file: &File) -> usize {
    match file.read_at(&mut [0; 1], 1) {
        Err(Error::Unaligned { limit_bytes, .. }) => limit_bytes as usize,
        _ => 1,
    }
}

/// The back ends that have direct I/O here, by name; those without are told of.
fn back_ends(seed: u64) -> Vec<(&'static str, BackendChoice)> {
    let dir = temp_dir();
    let mut all = common::back_ends(seed);
    all.retain(|(name, backend)| {
        let path = dir.path().join(name);
        let opened = engine(1 << 20, backend.clone()).open(&path, &direct());
        if let Err(error) = &opened {
            println!("skipped: {name}: {error}");
        }
        opened.is_ok()
    });
    all
}

fn on_disk(name: &str) -> bool {
    matches!(name, "uring" | "threads")
}

/// One file under test, and what it should hold.
struct Model {
    name: &'static str,
    engine: Engine,
    path: std::path::PathBuf,
    cached: [File; 2],
    direct: File,
    bounce: File,
    block: usize,
    limit: usize,
    bytes: Vec<u8>,
    random: Random,
    buffer: Buffer,
    stamp: u8,
    _dir: tempfile::TempDir,
}

impl Model {
    fn new(
        name: &'static str,
        backend: BackendChoice,
        mode: WriteMode,
        page: u32,
        seed: u64,
    ) -> Model {
        let mut random = Random(seed);
        let dir = temp_dir();
        let path = dir.path().join("file");
        let len = random.below(u64::from(page) * 20) as usize;
        let bytes: Vec<u8> = (0..len).map(|at| at as u8 | 1).collect();
        std::fs::write(&path, &bytes).unwrap();
        let pages = [4, 8, 30, 200][random.below(4) as usize];
        let engine = engine(cache_for(pages, u64::from(page)), backend);
        let backings = [Backing::Buffered, Backing::Buffered, Backing::Direct, Backing::Uncached];
        let backing = backings[random.below(4) as usize];
        let options = read_write().page_bytes(page).write_mode(mode).backing(backing);
        let open = |options: OpenOptions| engine.open(&path, &options).unwrap();
        // Any kind may be the first to open the file.
        let early = random.chance(500).then(|| open(options.clone().direct(true)));
        let cached = [open(options.clone()), open(options.clone().dsync(random.chance(100)))];
        let direct = open(options.clone().direct(true));
        let bounce = open(options.direct(true).bounce(true));
        drop(early);
        let limit = 30 * page as usize;
        let buffer = engine.alloc_buffers(1, limit + 4096).unwrap().pop().unwrap();
        let block = limit_bytes(&direct);
        Model {
            name,
            engine,
            path,
            cached,
            direct,
            bounce,
            block,
            limit,
            bytes,
            random,
            buffer,
            stamp: 0,
            _dir: dir,
        }
    }

    /// A range of at most `len_max` bytes below the limit; of whole blocks of `block`.
    fn span(&mut self, block: usize, len_max: usize) -> (usize, usize) {
        let at = self.random.below((self.limit / block) as u64) as usize * block;
        let len_max = if self.random.chance(700) { len_max.min(20_000) } else { len_max };
        let most = (self.limit - at).min(len_max) / block;
        (at, self.random.below(most as u64 + 1) as usize * block)
    }

    fn fill(&mut self, at: usize, len: usize) -> Vec<u8> {
        self.stamp = self.stamp.wrapping_add(1);
        let stamp = self.stamp;
        (at..at + len).map(|i| (i / 512 + i % 7) as u8 ^ stamp.wrapping_mul(37) | 1).collect()
    }

    fn write(&mut self, at: usize, src: &[u8]) {
        if !src.is_empty() {
            self.bytes.resize(self.bytes.len().max(at + src.len()), 0);
            self.bytes[at..at + src.len()].copy_from_slice(src);
        }
    }

    fn expected(&self, at: usize, len: usize) -> &[u8] {
        let end = self.bytes.len();
        &self.bytes[at.min(end)..(at + len).min(end)]
    }

    /// Cuts a range in some places that are multiples of `block`; some pieces are empty.
    fn cuts(&mut self, len: usize, block: usize) -> Vec<usize> {
        let many = if self.random.chance(30) { 1500 } else { 6 };
        let count = self.random.below(many);
        let mut cuts: Vec<usize> = (0..count)
            .map(|_| self.random.below((len / block) as u64 + 1) as usize * block)
            .collect();
        cuts.extend([0, len]);
        cuts.sort_unstable();
        cuts
    }

    /// A handle; whether it is direct and bounces; what is to be aligned with it.
    fn choose(&mut self) -> (usize, usize) {
        let which = self.random.below(4) as usize;
        (which, if which == 2 { self.block } else { 1 })
    }

    fn file(&self, which: usize) -> &File {
        match which {
            0 | 1 => &self.cached[which],
            2 => &self.direct,
            _ => &self.bounce,
        }
    }

    fn check(&self, at: usize, seen: &[u8], len: usize, what: &str) {
        same(seen, self.expected(at, len), &format!("{}: {what} of {len} at {at}", self.name));
    }

    fn step(&mut self) {
        let (which, block) = self.choose();
        match self.random.below(100) {
            0..25 => {
                let (at, len) = self.span(block, self.limit);
                let shift = if block > 1 { 0 } else { self.random.below(3) as usize };
                let mut memory = std::mem::replace(
                    &mut self.buffer,
                    self.engine.alloc_buffers(1, 1).unwrap().pop().unwrap(),
                );
                let dst = &mut memory[shift..shift + len];
                let moved = self.file(which).read_at(dst, at as u64).unwrap();
                self.check(at, &dst[..moved], len, &format!("read by {which}"));
                self.buffer = memory;
            }
            25..35 => {
                let (at, len) = self.span(block, self.limit);
                let cuts = self.cuts(len, block);
                let mut memory = std::mem::replace(
                    &mut self.buffer,
                    self.engine.alloc_buffers(1, 1).unwrap().pop().unwrap(),
                );
                let mut rest = &mut memory[..len];
                let mut slices = Vec::new();
                for pair in cuts.windows(2) {
                    let (piece, after) = rest.split_at_mut(pair[1] - pair[0]);
                    slices.push(IoSliceMut::new(piece));
                    rest = after;
                }
                let moved = self.file(which).read_vectored_at(&mut slices, at as u64).unwrap();
                self.check(at, &memory[..moved], len, &format!("vectored read by {which}"));
                self.buffer = memory;
            }
            35..60 => {
                let (at, len) = self.span(block, self.limit);
                let src = self.fill(at, len);
                self.buffer[..len].copy_from_slice(&src);
                let cuts = self.cuts(len, block);
                let slices: Vec<_> = cuts
                    .windows(2)
                    .map(|pair| IoSlice::new(&self.buffer[pair[0]..pair[1]]))
                    .collect();
                let file = self.file(which);
                let moved = match self.stamp % 4 {
                    0 => file.write_vectored_at(&slices, at as u64),
                    1 if self.stamp % 32 == 1 => {
                        file.write_at_dsync(&self.buffer[..len], at as u64)
                    }
                    _ => file.write_at(&self.buffer[..len], at as u64),
                };
                assert_eq!(moved.unwrap(), len, "{}: by {which} at {at}", self.name);
                self.write(at, &src);
            }
            60..64 => {
                let end = self.bytes.len();
                let len = (self.span(block, 30_000).1)
                    .min((self.limit - end.min(self.limit)) / block * block);
                let src = self.fill(end, len);
                self.buffer[..len].copy_from_slice(&src);
                match self.file(which).append(&self.buffer[..len]) {
                    Ok(at) => {
                        assert_eq!(at, end as u64);
                        self.write(end, &src);
                    }
                    Err(Error::Unaligned { offset, .. }) => {
                        assert!(which == 2 && !end.is_multiple_of(self.block));
                        assert_eq!(offset, end as u64);
                    }
                    Err(error) => panic!("{error}"),
                }
            }
            64..70 => {
                let (at, _) = self.span(1, 1);
                self.file(which).truncate(at as u64).unwrap();
                self.bytes.resize(at, 0);
            }
            70..76 => {
                let (at, len) = self.span(1, self.limit);
                let end = (at + len).min(self.bytes.len());
                if len > 0 {
                    let punched = match self.stamp % 2 {
                        0 => self.file(which).punch_hole(at as u64, len as u64),
                        _ => self.file(which).zero_range(at as u64, len as u64),
                    };
                    match punched {
                        Ok(()) if at < end => self.bytes[at..end].fill(0),
                        Ok(()) => {}
                        Err(error) => assert_eq!(error.errno(), libc::EOPNOTSUPP, "{error}"),
                    }
                }
            }
            76..79 => {
                let (at, len) = self.span(1, 20_000);
                if len > 0 && self.file(which).allocate(at as u64, len as u64).is_ok() {
                    self.bytes.resize(self.bytes.len().max(at + len), 0);
                }
            }
            79..84 => match self.random.below(4) {
                0 => self.file(which).sync_all().unwrap(),
                1 => self.file(which).sync_data().unwrap(),
                2 => self.file(which).write_back().unwrap(),
                _ => {
                    let (at, len) = self.span(1, 20_000);
                    self.file(which).sync_range(at as u64, len as u64).unwrap();
                }
            },
            84..86 => {
                let (at, len) = self.span(1, 20_000);
                let advice = [millpond::Advice::DontNeed, millpond::Advice::WillNeed];
                self.file(which).advise(at as u64, len as u64, advice[len % 2]).unwrap();
            }
            _ => self.pipeline(),
        }
        assert_eq!(self.direct.len().unwrap(), self.bytes.len() as u64);
    }

    /// Some requests, of which those that overlap take effect in the order in which they were given.
    fn pipeline(&mut self) {
        let depth = [1, 2, 3, 8, 40][self.random.below(5) as usize];
        let block = self.block.max(512);
        // Who reads beyond the end does not wait for who moves it.
        let readable = self.bytes.len();
        let mut left = self.random.below(30) as usize;
        let mut pipeline = self.engine.pipeline(depth).unwrap();
        let open = read_write().direct(true);
        let own = [
            self.engine.open(&self.path, &open).unwrap(),
            self.engine.open(&self.path, &open.dsync(depth == 3)).unwrap(),
        ];
        let mut under_way: Vec<(u64, usize, Option<Vec<u8>>)> = Vec::new();
        let mut ended = 0;
        each(&mut pipeline, |done| {
            if let Some(done) = done {
                ended += 1;
                let id = done.request.offset() << 20 | done.request.len();
                let place = under_way.iter().position(|&(known, ..)| known == id).unwrap();
                let (_, at, expected) = under_way.remove(place);
                let moved = done.outcome.unwrap();
                if let Some(expected) = expected {
                    let seen: Vec<u8> =
                        done.request.slices().flatten().copied().take(moved).collect();
                    same(&seen, &expected, &format!("{}: read by a request at {at}", self.name));
                } else {
                    assert_eq!(moved as u64, done.request.len());
                }
            }
            if left == 0 {
                return None;
            }
            left -= 1;
            let file = &own[left % 2];
            loop {
                let (at, mut len) = self.span(block, 40_000);
                let parts = 1 + self.random.below(3) as usize;
                // All of one region, or each of its own.
                let is_one_region = self.random.chance(500);
                let each = len / parts / block * block;
                if is_one_region {
                    len = each * parts;
                }
                let id = (at as u64) << 20 | len as u64;
                // Told apart by their place.
                if under_way.iter().any(|&(known, ..)| known == id) {
                    continue;
                }
                let mut buffers = Vec::new();
                if is_one_region && each > 0 {
                    buffers = self.engine.alloc_buffers(parts, each).unwrap();
                }
                let mut rest = if is_one_region { 0 } else { len };
                for part in 0..parts {
                    let here = if part + 1 == parts {
                        rest
                    } else {
                        self.random.below((rest / block) as u64 + 1) as usize * block
                    };
                    rest -= here;
                    if here > 0 {
                        buffers.extend(self.engine.alloc_buffers(1, here).unwrap());
                    }
                }
                if self.random.chance(500) && at + len <= readable {
                    under_way.push((id, at, Some(self.expected(at, len).to_vec())));
                    return Some(DirectRequest::read(
                        file,
                        SegmentList::from_buffers(buffers),
                        at as u64,
                    ));
                }
                let src = self.fill(at, len);
                let mut from = 0;
                for buffer in &mut buffers {
                    let len = buffer.len();
                    buffer.copy_from_slice(&src[from..from + len]);
                    from += len;
                }
                self.write(at, &src);
                under_way.push((id, at, None));
                return Some(DirectRequest::write(
                    file,
                    SegmentList::from_buffers(buffers),
                    at as u64,
                ));
            }
        });
        assert!(under_way.is_empty() && left == 0, "{ended} ended");
    }

    fn end(self) {
        let mut bytes = vec![0; self.limit + 1];
        for which in [3, 0, 1] {
            let moved = self.file(which).read_at(&mut bytes, 0).unwrap();
            self.check(0, &bytes[..moved], self.limit + 1, "last read");
        }
        let Model { cached: [one, two], direct, bounce, path, bytes, .. } = self;
        for file in [one, direct, two, bounce] {
            file.close().unwrap();
        }
        if on_disk(self.name) {
            same(&std::fs::read(&path).unwrap(), &bytes, self.name);
        }
    }
}

/// Goal: direct and cached operations on one file are operations on one file.
/// Method: random ones of all kinds through cached handles, direct ones, one that bounces, and
/// pipelines, against a vector of bytes; what is on the disk in the end.
#[test]
fn direct_and_cached_agree_with_a_model() {
    let seed = Random::from_environment().next();
    for (name, backend) in back_ends(seed) {
        for mode in [WriteMode::Through, WriteMode::Back] {
            for page in [4096, 16384] {
                let backend = backend.clone();
                within(Duration::from_secs(120), name, move || {
                    for round in 0..scaled(1) {
                        let seed = seed ^ u64::from(round) << 40;
                        let mut model = Model::new(name, backend.clone(), mode, page, seed);
                        for _ in 0..150 {
                            model.step();
                        }
                        model.end();
                    }
                });
            }
        }
    }
}

/// A page's worth of bytes that tell who wrote them: a number, over and over.
fn stamp(bytes: &mut [u8], token: u64) {
    for word in bytes.chunks_exact_mut(8) {
        word.copy_from_slice(&token.to_le_bytes());
    }
}

/// The one number that is in all of `bytes`.
fn token(bytes: &[u8]) -> Result<u64, String> {
    let words = bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap()));
    let mut last = None;
    for (at, word) in words.enumerate() {
        if last.is_some_and(|last| last != word) {
            return Err(format!("{last:x?}, and from byte {} {word:x}", at * 8));
        }
        last = Some(word);
    }
    Ok(last.unwrap_or(0))
}

/// Goal: an operation is one step for all others, whichever of them goes past the cache; and what
/// was seen once is not replaced by something older.
/// Method: areas of some pages, each with a writer that writes ever higher numbers to all of its
/// area at once, direct, cached or by a pipeline in turn, and reads them back; readers of both kinds
/// see one number, and none that is lower than one seen before. Beside them somebody cuts and
/// extends the file behind the areas, makes a hole there, syncs, and drops pages. Neighbours share
/// what the kernel caches as one.
#[test]
fn direct_and_cached_operations_are_atomic() {
    let seed = Random::from_environment().next();
    let time = stress_time(0.15);
    for (name, backend) in back_ends(seed) {
        for mode in [WriteMode::Through, WriteMode::Back] {
            for (area, page) in
                [(4096, 4096), (12288, 4096), (300_000 / 4096 * 4096, 4096), (32768, 16384)]
            {
                let backend = backend.clone();
                within(time * 20 + Duration::from_secs(60), name, move || {
                    areas(name, backend, mode, area, page, time, seed);
                });
            }
        }
    }
}

fn areas(
    name: &'static str,
    backend: BackendChoice,
    mode: WriteMode,
    area: usize,
    page: u32,
    time: Duration,
    seed: u64,
) {
    const AREAS: usize = 3;
    let dir = temp_dir();
    let path = dir.path().join("file");
    std::fs::write(&path, vec![0; area * AREAS]).unwrap();
    let pages = [8, 400][seed as usize % 2].max(area as u64 / u64::from(page) * 9);
    let engine = engine(cache_for(pages, u64::from(page)), backend);
    let options = read_write().page_bytes(page).write_mode(mode);
    let cached = engine.open(&path, &options).unwrap();
    let direct = engine.open(&path, &options.direct(true)).unwrap();
    let stop = AtomicBool::new(false);
    let floors: Vec<AtomicU64> = (0..AREAS).map(|_| AtomicU64::new(0)).collect();
    let see = |number: usize, buffer: &[u8], floor: u64, what: &str| {
        let seen = token(buffer).unwrap_or_else(|error| {
            panic!("{name} {mode:?} {area}: area {number} by {what} is a mixture: {error}")
        });
        assert!(
            seen >= floor,
            "{name} {mode:?} {area}: area {number} by {what}: {seen} after {floor}"
        );
        floors[number].fetch_max(seen, SeqCst);
        seen
    };
    let read = |number: usize, buffer: &mut Buffer, way: bool| {
        let floor = floors[number].load(SeqCst);
        let (file, what) = if way { (&direct, "direct") } else { (&cached, "cached") };
        file.read_exact_at(buffer, (number * area) as u64).unwrap();
        see(number, buffer, floor, what)
    };
    let rounds = AtomicU64::new(0);
    let fail_fast = |body: &dyn Fn()| {
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body));
        stop.store(true, SeqCst);
        if let Err(panic) = outcome {
            std::panic::resume_unwind(panic);
        }
    };
    std::thread::scope(|scope| {
        for number in 0..AREAS {
            let (engine, direct, cached, stop, floors, read, fail_fast, rounds) =
                (&engine, &direct, &cached, &stop, &floors, &read, &fail_fast, &rounds);
            scope.spawn(move || {
                fail_fast(&|| {
                    let mut random = Random(seed ^ number as u64);
                    let mut pipeline = engine.pipeline(2).unwrap();
                    let mut buffers = engine.alloc_buffers(2, area).unwrap();
                    let (mut seen, mut buffer) = (buffers.pop().unwrap(), buffers.pop());
                    let at = (number * area) as u64;
                    for next in 1.. {
                        if stop.load(SeqCst) {
                            return;
                        }
                        let mut memory = buffer.take().unwrap();
                        stamp(&mut memory, next);
                        // An area of even number is mostly written by one way, others by another.
                        match (random.below(8) + number as u64 * 4) % 8 {
                            0..4 => assert_eq!(cached.write_at(&memory, at).unwrap(), area),
                            4..6 => assert_eq!(direct.write_at(&memory, at).unwrap(), area),
                            _ => {
                                let mut list = Some(SegmentList::from_buffers(vec![memory]));
                                let mut back = Vec::new();
                                each(&mut pipeline, |done| {
                                    if let Some(done) = done {
                                        assert_eq!(done.outcome.unwrap(), area);
                                        back = done.request.into_buffers();
                                    }
                                    Some(DirectRequest::write(direct, list.take()?, at))
                                });
                                memory = back.pop().unwrap();
                            }
                        }
                        floors[number].fetch_max(next, SeqCst);
                        assert_eq!(read(number, &mut seen, next % 2 == 0), next);
                        if next % 3 == 0 {
                            cached.advise(at, area as u64, millpond::Advice::DontNeed).unwrap();
                            assert_eq!(read(number, &mut seen, false), next);
                        }
                        buffer = Some(memory);
                        rounds.fetch_add(1, SeqCst);
                    }
                });
            });
        }
        for reader in 0..2u64 {
            let (engine, stop, read, fail_fast) = (&engine, &stop, &read, &fail_fast);
            scope.spawn(move || {
                fail_fast(&|| {
                    let mut random = Random(seed ^ reader << 8);
                    let mut buffer = engine.alloc_buffers(1, area).unwrap().pop().unwrap();
                    while !stop.load(SeqCst) {
                        read(random.below(AREAS as u64) as usize, &mut buffer, random.chance(500));
                    }
                });
            });
        }
        let check = || {
            let mut random = Random(seed);
            let end = Instant::now() + time;
            let (behind, far) = ((AREAS * area) as u64, (AREAS * area + 100_000) as u64);
            while Instant::now() < end && !stop.load(SeqCst) {
                match random.below(5) {
                    0 => cached.truncate(behind + random.below(100_000)).unwrap(),
                    1 => drop(direct.punch_hole(behind, 100_000)),
                    2 => cached.sync_data().unwrap(),
                    3 => drop(direct.append(&[7; 1000])),
                    _ => cached.truncate(far).unwrap(),
                }
                std::thread::sleep(Duration::from_micros(300));
            }
        };
        fail_fast(&check);
    });
    println!("{name} {mode:?} {area}: {rounds:?} rounds");
    let last: Vec<u64> = floors.iter().map(|floor| floor.load(SeqCst)).collect();
    cached.close().unwrap();
    direct.close().unwrap();
    if on_disk(name) {
        let bytes = std::fs::read(&path).unwrap();
        for (number, &last) in last.iter().enumerate() {
            assert_eq!(token(&bytes[number * area..][..area]), Ok(last), "{name}: on the disk");
        }
    }
}

/// Goal: what was written directly is what cached readers find, though the kernel caches it together
/// with neighbours that are written through its cache at the same time.
/// Method: one page is written directly, over and over, and read back cached; its neighbours are
/// written through; somebody has the kernel read the whole file anew, in large pieces.
#[test]
fn neighbours_in_the_kernels_cache() {
    const PAGES: u64 = 256;
    let time = stress_time(0.4);
    for (name, backend) in back_ends(1) {
        if !on_disk(name) {
            continue;
        }
        let dir = temp_dir();
        let path = dir.path().join("file");
        std::fs::write(&path, vec![0; PAGES as usize * 4096]).unwrap();
        let engine = engine(1 << 20, backend);
        let cached = engine.open(&path, &read_write()).unwrap();
        let direct = engine.open(&path, &direct()).unwrap();
        let stop = AtomicBool::new(false);
        let at = 37 * 4096;
        let mut rounds = 0;
        std::thread::scope(|scope| {
            for neighbour in [at - 4096, at + 4096, at + 8192] {
                let (cached, stop) = (&cached, &stop);
                scope.spawn(move || {
                    for round in 0u64.. {
                        cached.write_at(&[round as u8; 4096], neighbour).unwrap();
                        if stop.load(SeqCst) {
                            return;
                        }
                    }
                });
            }
            scope.spawn(|| {
                use std::os::fd::AsRawFd;
                let file = std::fs::File::open(&path).unwrap();
                while !stop.load(SeqCst) {
                    // SAFETY: no memory involved.
                    unsafe {
                        libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED);
                        libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_WILLNEED);
                    }
                    let _ = std::fs::read(&path).unwrap();
                }
            });
            let check = || {
                let end = Instant::now() + time;
                let mut buffer = engine.alloc_buffers(1, 4096).unwrap().pop().unwrap();
                while Instant::now() < end {
                    rounds += 1;
                    stamp(&mut buffer, rounds);
                    direct.write_at(&buffer, at).unwrap();
                    for _ in 0..3 {
                        cached.advise(at, 4096, millpond::Advice::DontNeed).unwrap();
                        cached.read_exact_at(&mut buffer, at).unwrap();
                        assert_eq!(token(&buffer), Ok(rounds), "{name}: cached");
                    }
                    direct.read_exact_at(&mut buffer, at).unwrap();
                    assert_eq!(token(&buffer), Ok(rounds), "{name}: direct");
                }
            };
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(check));
            stop.store(true, SeqCst);
            if let Err(panic) = outcome {
                std::panic::resume_unwind(panic);
            }
        });
        println!("{name}: {rounds} rounds");
    }
}

/// Goal: whatever a device refuses, cached and direct readers see the same file, with all that was
/// acknowledged.
/// Method: operations of all kinds on a device that fails, and moves a part; a byte is what was
/// acknowledged last, or what failed to replace it, and stays what it was seen to be, by whichever
/// way.
#[test]
fn direct_and_cached_agree_where_the_device_fails() {
    let seed = Random::from_environment().next();
    for mode in [WriteMode::Through, WriteMode::Back] {
        for round in 0..scaled(6) {
            let seed = seed.wrapping_add(u64::from(round));
            within(Duration::from_secs(60), "sim", move || failing(mode, seed));
        }
    }
}

fn failing(mode: WriteMode, seed: u64) {
    const LIMIT: usize = 100_000;
    let sim = SimOptions::new(seed).error_per_mille(150).short_per_mille(300);
    let errors = sim.errors_switch();
    let dir = temp_dir();
    let path = dir.path().join("file");
    std::fs::write(&path, vec![0; LIMIT]).unwrap();
    let engine = engine(cache_for(12, 4096), BackendChoice::Sim(sim));
    let cached = engine.open(&path, &read_write().write_mode(mode)).unwrap();
    let direct = engine.open(&path, &direct()).unwrap();
    let mut random = Random(seed);
    let mut bytes = vec![0u8; LIMIT];
    let mut others = vec![Vec::new(); LIMIT];
    let mut pipeline = engine.pipeline(4).unwrap();
    let failed = |error: &Error| assert_eq!(error.errno(), libc::EIO, "{error}");
    for step in 0..400u64 {
        errors.store(step < 360, SeqCst);
        let at = random.below(LIMIT as u64 - 1) as usize;
        let len = (random.below(16_000) as usize + 1).min(LIMIT - at);
        let way = random.below(3);
        if random.chance(450) {
            let src = vec![step as u8 | 1; len];
            let mut outcome = Ok(0);
            match way {
                0 => outcome = cached.write_at(&src, at as u64),
                1 => outcome = direct.write_at(&src, at as u64),
                _ => {
                    let mut list = Some(SegmentList::from_slice(&src));
                    each(&mut pipeline, |done| {
                        if let Some(done) = done {
                            outcome = done.outcome;
                        }
                        Some(DirectRequest::write(&direct, list.take()?, at as u64))
                    });
                }
            }
            let moved = outcome.unwrap_or_else(|error| {
                failed(&error);
                0
            });
            bytes[at..at + moved].fill(src[0]);
            others[at..at + moved].iter_mut().for_each(Vec::clear);
            others[at + moved..at + len].iter_mut().for_each(|it| it.push(src[0]));
        } else if random.chance(100) {
            if let Err(error) = cached.write_back() {
                failed(&error);
            }
        } else {
            let mut dst = vec![0; len];
            let mut outcome = Ok(0);
            match way {
                0 => outcome = cached.read_at(&mut dst, at as u64),
                1 => outcome = direct.read_at(&mut dst, at as u64),
                _ => {
                    let mut list = Some(SegmentList::from_slice_mut(&mut dst));
                    each(&mut pipeline, |done| {
                        if let Some(done) = done {
                            outcome = done.outcome;
                        }
                        Some(DirectRequest::read(&direct, list.take()?, at as u64))
                    });
                }
            }
            match outcome {
                Ok(moved) => {
                    assert_eq!(moved, len);
                    for (place, &byte) in dst.iter().enumerate() {
                        let (was, others) = (&mut bytes[at + place], &mut others[at + place]);
                        assert!(
                            byte == *was || others.contains(&byte),
                            "{mode:?} seed {seed} step {step} way {way}: byte {} is {byte}, not \
                             {was} or one of {others:?}",
                            at + place
                        );
                        *was = byte;
                        others.clear();
                    }
                }
                Err(error) => failed(&error),
            }
        }
    }
    errors.store(false, SeqCst);
    common::sync_in_the_end(&cached);
    let (mut one, mut other) = (vec![0; LIMIT], vec![0; LIMIT]);
    direct.read_exact_at(&mut one, 0).unwrap();
    cached.read_exact_at(&mut other, 0).unwrap();
    same(&one, &other, "direct and cached");
}

/// Goal: whoever reads while the file is cut, punched and written anew sees one content, as far as
/// the file went.
/// Method: writers of all ways write an area at the start of the file whole, each with a number of
/// its own; somebody cuts the file within it, or makes all of it a hole; readers of all ways.
#[test]
fn cuts_and_holes_beside_direct_operations() {
    let seed = Random::from_environment().next();
    let time = stress_time(0.3);
    for (name, backend) in back_ends(seed) {
        for mode in [WriteMode::Through, WriteMode::Back] {
            let backend = backend.clone();
            within(time * 20 + Duration::from_secs(60), name, move || {
                cuts_and_holes(name, backend, mode, time, seed);
            });
        }
    }
}

fn cuts_and_holes(
    name: &'static str,
    backend: BackendChoice,
    mode: WriteMode,
    time: Duration,
    seed: u64,
) {
    const AREA: usize = 5 * 4096;
    let dir = temp_dir();
    let path = dir.path().join("file");
    let engine = engine(cache_for(10, 4096), backend);
    let cached = engine.open(&path, &read_write().write_mode(mode)).unwrap();
    let direct = engine.open(&path, &direct()).unwrap();
    let stop = AtomicBool::new(false);
    let next = AtomicU64::new(1);
    let rounds = AtomicU64::new(0);
    let work = |thread: u64| {
        let mut random = Random(seed ^ thread);
        let mut pipeline = engine.pipeline(3).unwrap();
        let mut memory = engine.alloc_buffers(1, AREA).unwrap().pop().unwrap();
        while !stop.load(SeqCst) {
            rounds.fetch_add(1, SeqCst);
            let mut moved = 0;
            let way = random.below(3);
            let is_write = thread < 2;
            if is_write {
                stamp(&mut memory, next.fetch_add(1, SeqCst));
            }
            match (way, is_write) {
                (0, true) => assert_eq!(cached.write_at(&memory, 0).unwrap(), AREA),
                (1, true) => assert_eq!(direct.write_at(&memory, 0).unwrap(), AREA),
                (0, false) => moved = cached.read_at(&mut memory, 0).unwrap(),
                (1, false) => moved = direct.read_at(&mut memory, 0).unwrap(),
                (_, is_write) => {
                    let list = SegmentList::from_buffer_mut(&mut memory);
                    let mut request = Some(match is_write {
                        true => DirectRequest::write(&direct, list, 0),
                        false => DirectRequest::read(&direct, list, 0),
                    });
                    each(&mut pipeline, |done| {
                        if let Some(done) = done {
                            moved = done.outcome.unwrap();
                        }
                        request.take()
                    });
                }
            }
            if !is_write && let Err(error) = token(&memory[..moved / 8 * 8]) {
                panic!("{name} {mode:?}: by way {way}, {moved} bytes: {error}");
            }
            if thread == 3 && random.chance(300) {
                match random.below(3) {
                    // Nobody else makes it shorter meanwhile.
                    0 => cached.truncate(random.below(cached.len().unwrap() / 8) * 8).unwrap(),
                    1 => drop(direct.punch_hole(0, AREA as u64)),
                    _ => cached.advise(0, AREA as u64, millpond::Advice::DontNeed).unwrap(),
                }
            }
        }
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..4)
            .map(|thread| {
                let (work, stop) = (&work, &stop);
                scope.spawn(move || {
                    let outcome =
                        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work(thread)));
                    stop.store(true, SeqCst);
                    outcome
                })
            })
            .collect();
        let end = Instant::now() + time;
        while Instant::now() < end && !stop.load(SeqCst) {
            std::thread::sleep(Duration::from_millis(5));
        }
        stop.store(true, SeqCst);
        for worker in workers {
            if let Err(panic) = worker.join().unwrap() {
                std::panic::resume_unwind(panic);
            }
        }
    });
    println!("{name} {mode:?}: {rounds:?} rounds");
}

/// Goal: a direct write that was asked to be durable is, when it returns; one that was not is after
/// the next sync that succeeds; and a sync that fails is told of until the file is closed, as what
/// was written directly is in no cache.
/// Method: a device whose syncs fail now and then; what is durable on it, after each.
#[test]
fn durable_direct_writes_are_durable() {
    for seed in 0..u64::from(scaled(10)) {
        let sim = SimOptions::new(seed).fail_every_kth_sync(4).short_per_mille(200);
        let device = sim.device();
        let errors = sim.errors_switch();
        let dir = temp_dir();
        let path = dir.path().join("file");
        std::fs::write(&path, vec![0; 16 * 4096]).unwrap();
        let engine = engine(1 << 20, BackendChoice::Sim(sim));
        let mode = if seed % 2 == 0 { WriteMode::Through } else { WriteMode::Back };
        let cached = engine.open(&path, &read_write().write_mode(mode)).unwrap();
        let direct = engine.open(&path, &direct()).unwrap();
        let mut pipeline = engine.pipeline(4).unwrap();
        let mut random = Random(seed);
        let mut known: Vec<Option<u8>> = vec![None; 16];
        let mut pending: Vec<(usize, u8)> = Vec::new();
        let mut is_lost = false;
        for step in 1..60u8 {
            let page = random.below(16) as usize;
            let at = page as u64 * 4096;
            let src = [step; 4096];
            match random.below(5) {
                0 => {
                    cached.write_at(&src, at).unwrap();
                    known[page] = None;
                    pending.retain(|&(other, _)| other != page);
                    pending.push((page, step));
                }
                1 => {
                    direct.write_at(&src, at).unwrap();
                    known[page] = None;
                    pending.retain(|&(other, _)| other != page);
                    pending.push((page, step));
                }
                2 => match cached.sync_data() {
                    Ok(()) => {
                        assert!(!is_lost, "seed {seed} step {step}: success after a loss");
                        pending.drain(..).for_each(|(page, byte)| known[page] = Some(byte));
                    }
                    Err(Error::Lost { .. }) => is_lost = true,
                    Err(error) => assert_eq!(error.errno(), libc::EIO),
                },
                way => {
                    let mut outcome = direct.write_at_dsync(&src[..0], at);
                    if way == 3 {
                        outcome = direct.write_at_dsync(&src, at);
                    } else {
                        let mut list = Some(SegmentList::from_slice(&src));
                        each(&mut pipeline, |done| {
                            if let Some(done) = done {
                                outcome = done.outcome;
                            }
                            Some(DirectRequest::write(&direct, list.take()?, at).durable(true))
                        });
                    }
                    pending.retain(|&(other, _)| other != page);
                    // A part may have been durable before the rest failed.
                    let is_whole = outcome.is_ok_and(|moved| moved == 4096);
                    known[page] = is_whole.then_some(step);
                }
            }
            let durable = device.durable();
            for (page, byte) in known.iter().enumerate() {
                if let Some(byte) = byte {
                    let bytes = &durable[page * 4096..][..4096];
                    assert!(bytes == [*byte; 4096], "seed {seed} step {step}: page {page}");
                }
            }
        }
        errors.store(false, SeqCst);
        let last = cached.sync_all().and_then(|()| cached.sync_all());
        assert!(last.is_ok() || matches!(last, Err(Error::Lost { .. } | Error::Io { .. })));
    }
}
