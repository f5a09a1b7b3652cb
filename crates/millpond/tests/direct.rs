//! Direct and cached I/O on one file, one operation after another, against a model.
//!
//! Concurrent operations are in `direct_races`, failing devices in `direct_faults`.

mod common;

use std::io::{IoSlice, IoSliceMut};
use std::time::Duration;

use millpond::direct::{DirectRequest, SegmentList};
use millpond::{BackendChoice, Backing, Buffer, Engine, Error, File, OpenOptions, WriteMode};

use common::requests::each;
use common::{
    Random, back_ends_with_direct, cache_for, direct, engine, is_on_disk, read_write, same, scaled,
    temp_dir, within,
};

/// The alignment of offsets and lengths that a handle without bouncing needs.
fn limit_bytes(file: &File) -> usize {
    match file.read_at(&mut [0; 1], 1) {
        Err(Error::Unaligned { limit_bytes, .. }) => limit_bytes as usize,
        _ => 1,
    }
}

/// One file under test, and its expected contents.
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
        // The first open may be of any kind.
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

    /// Takes the memory of the operations; the model has a replacement until it is returned.
    fn take_buffer(&mut self) -> Buffer {
        let other = self.engine.alloc_buffers(1, 1).unwrap().pop().unwrap();
        std::mem::replace(&mut self.buffer, other)
    }

    /// Records bytes as the expected contents of the file.
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

    /// Cuts a range at a few multiples of `block`; some pieces are empty.
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

    /// A handle, and the alignment that its requests need: 1 unless it is direct without bouncing.
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
            0..25 => self.read_once(which, block),
            25..35 => self.read_in_pieces(which, block),
            35..60 => self.write_once(which, block),
            60..64 => self.append_once(which, block),
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

    fn read_once(&mut self, which: usize, block: usize) {
        let (at, len) = self.span(block, self.limit);
        let shift = if block > 1 { 0 } else { self.random.below(3) as usize };
        let mut memory = self.take_buffer();
        let dst = &mut memory[shift..shift + len];
        let moved = self.file(which).read_at(dst, at as u64).unwrap();
        self.check(at, &dst[..moved], len, &format!("read by {which}"));
        self.buffer = memory;
    }

    fn read_in_pieces(&mut self, which: usize, block: usize) {
        let (at, len) = self.span(block, self.limit);
        let cuts = self.cuts(len, block);
        let mut memory = self.take_buffer();
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

    fn write_once(&mut self, which: usize, block: usize) {
        let (at, len) = self.span(block, self.limit);
        let src = self.fill(at, len);
        self.buffer[..len].copy_from_slice(&src);
        let cuts = self.cuts(len, block);
        let slices: Vec<_> =
            cuts.windows(2).map(|pair| IoSlice::new(&self.buffer[pair[0]..pair[1]])).collect();
        let file = self.file(which);
        let moved = match self.stamp % 4 {
            0 => file.write_vectored_at(&slices, at as u64),
            1 if self.stamp % 32 == 1 => file.write_at_dsync(&self.buffer[..len], at as u64),
            _ => file.write_at(&self.buffer[..len], at as u64),
        };
        assert_eq!(moved.unwrap(), len, "{}: by {which} at {at}", self.name);
        self.write(at, &src);
    }

    fn append_once(&mut self, which: usize, block: usize) {
        let end = self.bytes.len();
        let len =
            (self.span(block, 30_000).1).min((self.limit - end.min(self.limit)) / block * block);
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

    /// Several requests; overlapping ones take effect in their order.
    fn pipeline(&mut self) {
        let depth = [1, 2, 3, 8, 40][self.random.below(5) as usize];
        let block = self.block.max(512);
        // A reader beyond the end does not wait for the writer that moves it.
        let readable = self.bytes.len();
        let mut left = self.random.below(30) as usize;
        let mut pipeline = self.engine.pipeline(depth).unwrap();
        let open = direct();
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
                // All from one region, or each from its own.
                let is_one_region = self.random.chance(500);
                let each = len / parts / block * block;
                if is_one_region {
                    len = each * parts;
                }
                let id = (at as u64) << 20 | len as u64;
                // Identified by their memory.
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
        if is_on_disk(self.name) {
            same(&std::fs::read(&path).unwrap(), &bytes, self.name);
        }
    }
}

/// Goal: direct and cached operations on a file see each other's effects.
/// Method: random operations through cached and direct handles, one that bounces, and pipelines,
/// against a vector of bytes; at the end the bytes on disk are compared.
#[test]
fn direct_and_cached_agree_with_a_model() {
    let seed = Random::from_environment().next();
    for (name, backend) in back_ends_with_direct(seed) {
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
