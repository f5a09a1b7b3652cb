//! Random operations by many handles, and a model of the contents that a power cut may leave.
//!
//! The model has for each byte its possible values. A write adds one; a durable write, for its
//! bytes, and a sync, for all, leave only the last. So the model does not depend on the engine's or
//! the file system's method, and accepts early write-back.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;

use millpond::{Engine, File, OpenOptions};

use crate::common::{Random, read_write, scaled};
use crate::power::Unflushed;
use crate::{disk, each_engine};

/// The possible contents of a file after a power cut, byte by byte.
struct Model {
    /// The contents that every read returns now.
    current: Vec<u8>,
    /// The possible values of each byte, as bits: values are below 64.
    may_be: Vec<u64>,
    /// The possible lengths.
    shortest: usize,
    longest: usize,
}

/// Only a kernel descriptor writes below this offset, and only the engine from it on, as it caches
/// the bytes it has read. A file has this length from the start, as the engine tracks the length by
/// its own operations.
const KERNEL_END: usize = 64 << 10;
const MODEL_BYTES: usize = 400 << 10;

impl Model {
    fn new() -> Model {
        let current = vec![0; KERNEL_END];
        let (shortest, longest) = (KERNEL_END, KERNEL_END);
        Model { current, may_be: vec![1; MODEL_BYTES], shortest, longest }
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

    /// The first difference between the contents after a cut and the model.
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

/// Runs one random operation; returns its description, and whether it made bytes durable, which a
/// cut then checks.
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
/// openings, a cut leaves each byte as of the last sync or durable write, or newer.
/// Method: a model of the possible contents; a cut directly after each operation that made bytes
/// durable.
#[test]
fn random_sequences() {
    let Some(mut disk) = disk() else { return };
    let mut random = Random::from_environment();
    each_engine(|name, engine, options| {
        let path = disk.path(name);
        let file = fs::File::create(&path).unwrap();
        file.set_len(KERNEL_END as u64).unwrap();
        file.sync_all().unwrap();
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
