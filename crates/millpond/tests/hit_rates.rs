//! Hit rates of the eviction policy on traces, compared with LRU and with the crate `quick_cache`
//! (Clock-PRO with a queue for newcomers, similar to S3-FIFO's).

mod common;

use std::collections::{BTreeMap, HashMap};

use millpond::{Advice, BackendChoice};

use common::own_client::{memory, own_client};
use common::{Random, builder, read_write, temp_dir};

const CACHE_BYTES: u64 = 32 << 20;
const PAGE: u64 = 4096;
/// Pages that the cache has room for, about.
const CACHE: u64 = CACHE_BYTES / PAGE;
const FILE_PAGES: u64 = 40 * CACHE;

/// An LRU cache of the same number of pages.
#[derive(Default)]
struct Lru {
    clock: u64,
    used: HashMap<u64, u64>,
    by_age: BTreeMap<u64, u64>,
    hits: u64,
}

impl Lru {
    fn read(&mut self, page: u64) {
        self.clock += 1;
        if let Some(age) = self.used.insert(page, self.clock) {
            self.by_age.remove(&age);
            self.hits += 1;
        }
        self.by_age.insert(self.clock, page);
        if self.used.len() as u64 > CACHE {
            let (_, oldest) = self.by_age.pop_first().unwrap();
            self.used.remove(&oldest);
        }
    }
}

/// Ranks with probabilities as 1 / rank^s.
struct Zipf {
    sums: Vec<f64>,
}

impl Zipf {
    fn new(ranks: u64, exponent: f64) -> Zipf {
        let mut sum = 0.0;
        let sums = (1..=ranks).map(|rank| {
            sum += (rank as f64).powf(-exponent);
            sum
        });
        Zipf { sums: sums.collect() }
    }

    fn next(&self, random: &mut Random) -> u64 {
        let point = random.next() as f64 / u64::MAX as f64 * self.sums.last().unwrap();
        self.sums.partition_point(|&sum| sum < point) as u64
    }
}

/// A page for a rank, so that ranks are spread over the file.
fn scattered(rank: u64) -> u64 {
    // Odd, so that no two ranks meet while the number of pages is a power of two.
    rank.wrapping_mul(0x9E37_79B1) % FILE_PAGES.next_power_of_two() % FILE_PAGES
}

/// Hit rates of one trace.
struct Rates {
    ours: f64,
    /// Of the reads of a client that shares another engine's cache.
    client: f64,
    lru: f64,
    quick: f64,
}

fn rates(trace: &[u64]) -> Rates {
    let mut lru = Lru::default();
    let mut quick = quick_cache::unsync::Cache::<u64, ()>::new(CACHE as usize);
    let mut quick_hits = 0u64;
    for page in trace {
        lru.read(*page);
        match quick.get(page) {
            Some(()) => quick_hits += 1,
            None => quick.insert(*page, ()),
        }
    }
    let part = |hits: u64| hits as f64 / trace.len() as f64;
    let (ours, client) = (engine_hits(trace, false), engine_hits(trace, true));
    Rates { ours: part(ours), client: part(client), lru: part(lru.hits), quick: part(quick_hits) }
}

/// The hits of an engine, or of a client of its shared cache. A miss is the engine's in both cases.
fn engine_hits(trace: &[u64], by_client: bool) -> u64 {
    let dir = temp_dir();
    let path = dir.path().join("file");
    std::fs::File::create(&path).unwrap().set_len(FILE_PAGES * PAGE).unwrap();
    let built = builder(CACHE_BYTES, BackendChoice::Null);
    let built = if by_client { built.shared(memory()) } else { built };
    let engine = built.build().unwrap();
    let file = engine.open(&path, &read_write()).unwrap();
    file.advise(0, 0, Advice::Random).unwrap();
    let client = engine.shared_cache().as_ref().map(own_client);
    let reader = client.as_ref().map(|(client, _)| client.reader().unwrap());
    let mut bytes = vec![0; PAGE as usize];
    let mut hits = 0;
    for page in trace {
        let at = page * PAGE;
        let hit = match &reader {
            Some(reader) => reader.try_read(file.shared_file().unwrap(), &mut bytes, at),
            // SAFETY: `bytes` is valid for writes of its length.
            None => unsafe { file.raw().try_read_hit(bytes.as_mut_ptr(), bytes.len(), at) },
        };
        match hit {
            Some(_) => hits += 1,
            None => assert_eq!(file.read_at(&mut bytes, at).unwrap() as u64, PAGE),
        }
    }
    hits
}

fn trace(name: &str, random: &mut Random) -> Vec<u64> {
    let mut random = random.fork();
    let mut out = Vec::new();
    match name {
        // Half of the reads go to a hot set, the others through the file once.
        "hot set beside a scan" => {
            for at in 0..12 * CACHE {
                out.push(random.below(CACHE / 2));
                out.push(CACHE + at);
            }
        }
        // The whole cache is hot before the scan, and the hot set is not read during it.
        "hot set, then a scan, then the hot set" => {
            for _ in 0..3 {
                out.extend(0..CACHE / 2);
            }
            for round in 0..4 {
                out.extend(CACHE + round * 4 * CACHE..CACHE + (round + 1) * 4 * CACHE);
                out.extend(0..CACHE / 2);
            }
        }
        // A loop that nearly fits.
        "loop of 1.1 times the cache" => {
            for _ in 0..12 {
                out.extend(0..CACHE + CACHE / 10);
            }
        }
        "zipf 0.8" | "zipf 1.0" | "zipf 1.2" => {
            let zipf = Zipf::new(16 * CACHE, name[5..].parse().unwrap());
            out.extend((0..40 * CACHE).map(|_| scattered(zipf.next(&mut random))));
        }
        // All that is cached is read twice and more, and then one read in sixteen is new.
        "all hot, and a trickle" => {
            let hot = CACHE * 9 / 10;
            for _ in 0..3 {
                out.extend(0..hot);
            }
            for at in 0..20 * CACHE {
                out.push(if at % 16 == 0 { CACHE + at } else { random.below(hot) });
            }
        }
        // The earlier hot set is cold from here on.
        "moving hot set" => {
            for phase in 0..10 {
                let start = phase * 2 * CACHE;
                for _ in 0..4 * CACHE {
                    out.push(start + random.below(CACHE * 8 / 10));
                }
            }
        }
        // Each page is read twice, farther apart than the young queue is long.
        "twice and never again" => {
            for at in (0..16 * CACHE).step_by(CACHE as usize / 4) {
                out.extend(at..at + CACHE / 4);
                out.extend(at..at + CACHE / 4);
            }
        }
        // Popular pages, a loop now and then, scans.
        "mixture" => {
            let zipf = Zipf::new(8 * CACHE, 0.9);
            while out.len() < 40 * CACHE as usize {
                match random.below(100) {
                    0 => {
                        let start = random.below(FILE_PAGES - CACHE);
                        out.extend(start..start + random.below(CACHE));
                    }
                    1 => {
                        let start = 20 * CACHE + random.below(4) * CACHE / 4;
                        out.extend(start..start + CACHE / 4);
                    }
                    _ => {
                        for _ in 0..200 {
                            out.push(scattered(zipf.next(&mut random)));
                        }
                    }
                }
            }
        }
        _ => unreachable!("{name}"),
    }
    out
}

/// Goal: evictions that scan few pages each cost no hits, and reads that bypass the cache cost few.
/// Method: traces, and for each the rate of the policy without that bound (E4 of `cache::evict`),
/// measured before the bound existed. Each run has the same rates. With other hashes of the pages
/// they vary by less than 0.001, except for the loop (0.646 to 0.700 in twelve runs) and the
/// mixture (0.477 to 0.486).
#[test]
#[cfg_attr(debug_assertions, ignore = "slow: run by ./test at full speed")]
fn short_eviction_scans_cost_no_hits() {
    let cases = [
        ("hot set beside a scan", 0.4720),
        ("hot set, then a scan, then the hot set", 0.1506),
        ("loop of 1.1 times the cache", 0.6286),
        ("zipf 0.8", 0.4521),
        ("zipf 1.0", 0.7198),
        ("zipf 1.2", 0.9012),
        ("all hot, and a trickle", 0.8939),
        ("moving hot set", 0.6885),
        ("twice and never again", 0.2479),
        ("mixture", 0.4905),
    ];
    let mut failed = Vec::new();
    for (name, unbounded) in cases {
        let Rates { ours, client, lru, quick } = rates(&trace(name, &mut Random(7)));
        println!(
            "{name}: {ours:.4}; by a client {client:.4}; without a bound {unbounded:.4}; LRU {lru:.4}; quick_cache {quick:.4}"
        );
        // In the mixture, reads that miss during a scan bypass the cache the first time
        // (`cache::admission`): half a point of 49.
        let less = if name == "mixture" { 0.01 } else { 0.005 };
        // The rings of a client lose reads.
        if ours < unbounded - less || client < ours - 0.01 {
            failed.push((name, ours, client, unbounded));
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
}
