//! A scan must not evict the hot set.

mod common;

use std::collections::HashMap;

use millpond::{Advice, BackendChoice, File};

use common::{Random, engine, read_write, temp_dir};

const CACHE_BYTES: u64 = 16 << 20;
const PAGE: u64 = 4096;

/// A real LRU cache of pages, on the same trace.
struct Lru {
    capacity: usize,
    clock: u64,
    used: HashMap<u64, u64>,
    by_age: std::collections::BTreeMap<u64, u64>,
}

impl Lru {
    fn new(capacity: usize) -> Lru {
        Lru { capacity, clock: 0, used: HashMap::new(), by_age: Default::default() }
    }

    fn read(&mut self, page: u64) -> bool {
        self.clock += 1;
        let hit = match self.used.insert(page, self.clock) {
            Some(age) => self.by_age.remove(&age).is_some(),
            None => false,
        };
        self.by_age.insert(self.clock, page);
        if self.used.len() > self.capacity {
            let (_, oldest) = self.by_age.pop_first().unwrap();
            self.used.remove(&oldest);
        }
        hit
    }
}

struct Trace {
    lru: Lru,
}

impl Trace {
    /// Reads a page; returns whether it hit in the engine and in the LRU.
    fn read(&mut self, file: &File, page: u64) -> (bool, bool) {
        let mut bytes = vec![0; PAGE as usize];
        // SAFETY: `bytes` is valid for writes of its length.
        let hit = unsafe { file.raw().try_read_hit(bytes.as_mut_ptr(), bytes.len(), page * PAGE) };
        assert_eq!(file.read_at(&mut bytes, page * PAGE).unwrap() as u64, PAGE);
        (hit.is_some(), self.lru.read(page))
    }

    /// Reads a page in pieces.
    fn pass(&mut self, file: &File, page: u64, piece: usize) {
        let mut bytes = vec![0; piece];
        for at in (0..PAGE).step_by(piece) {
            assert_eq!(file.read_at(&mut bytes, page * PAGE + at).unwrap(), piece);
        }
        self.lru.read(page);
    }
}

/// The hot set is read twice at random, then a scan ten times the cache passes once; returns the
/// parts of the hot set that hit afterwards, in the engine and in an LRU.
fn scan(piece: usize, advice: Advice, scattered: bool) -> (f64, f64) {
    let dir = temp_dir();
    let path = dir.path().join("file");
    let engine = engine(CACHE_BYTES, BackendChoice::Auto);
    let cache_pages = CACHE_BYTES / PAGE;
    let (hot_pages, cold_pages) = (cache_pages / 2, cache_pages * 10);
    std::fs::File::create(&path).unwrap().set_len((hot_pages + cold_pages) * PAGE).unwrap();
    let mut random = Random(3);
    let mut pages: Vec<u64> = (0..hot_pages + cold_pages).collect();
    for last in (1..pages.len()).rev().filter(|_| scattered) {
        pages.swap(last, random.below(last as u64 + 1) as usize);
    }
    let hot = pages[..hot_pages as usize].to_vec();
    let is_hot: std::collections::HashSet<u64> = hot.iter().copied().collect();
    let reader = engine.open(&path, &read_write()).unwrap();
    let scanner = engine.open(&path, &read_write()).unwrap();
    reader.advise(0, 0, Advice::Random).unwrap();
    scanner.advise(0, 0, advice).unwrap();
    let mut trace = Trace { lru: Lru::new(cache_pages as usize) };
    for _ in 0..2 {
        let mut order = hot.clone();
        for last in (1..order.len()).rev() {
            order.swap(last, random.below(last as u64 + 1) as usize);
        }
        for page in order {
            trace.pass(&reader, page, PAGE as usize);
        }
    }
    for page in (0..hot_pages + cold_pages).filter(|page| !is_hot.contains(page)) {
        trace.pass(&scanner, page, piece);
    }
    let (mut ours, mut theirs) = (0u64, 0u64);
    for &page in &hot {
        let (hit, lru_hit) = trace.read(&reader, page);
        ours += u64::from(hit);
        theirs += u64::from(lru_hit);
    }
    println!("{:?}", engine.stats());
    (ours as f64 / hot_pages as f64, theirs as f64 / hot_pages as f64)
}

/// Goal: the hot set survives a scan of ten times the cache: at least 95% of it hits afterwards,
/// where an LRU keeps less than half.
/// Method: pieces of a page and smaller ones (each page is then read several times in a row), with
/// read-ahead (pages come before their first read) and without; a hot set in one place, and
/// scattered over the file that is scanned. The LRU sees the same trace.
#[test]
#[cfg_attr(debug_assertions, ignore = "slow: run by ./test at full speed")]
fn a_scan_leaves_the_hot_set_alone() {
    let mut failed = Vec::new();
    for advice in [Advice::Random, Advice::Normal, Advice::Sequential] {
        for piece in [4096, 512] {
            for scattered in [false, true] {
                let (ours, lru) = scan(piece, advice, scattered);
                let case = format!("pieces of {piece}, advice {advice:?}, scattered {scattered}");
                println!("{case}: {ours:.4} of the hot set hit; LRU {lru:.4}");
                assert!(lru < 0.5, "an LRU that keeps {lru} is none");
                if ours < 0.95 {
                    failed.push((case, ours));
                }
            }
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
}
