//! Benchmark of the object cache: against foyer's in-memory cache with the same interface and limit, and against no cache.
//!
//! Slices run in pairs, in the order A B B A. Each result is the median of the pairs' ratios, with quartiles.

mod foyer;

use std::ops::Range;
use std::sync::Arc;
use std::sync::Barrier;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use futures_util::stream::{self, StreamExt};
use millpond_objects::{CachedStore, Freshness};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::throttle::{ThrottleConfig, ThrottledStore};
use object_store::{ObjectStore, ObjectStoreExt};

use crate::foyer::{Foyer, PAGE_BYTES};

const OBJECTS: u64 = 128;
const OBJECT_BYTES: u64 = 1 << 20;
const LIMIT_BYTES: u64 = 256 << 20;
const READ_BYTES: u64 = 4096;

fn path(number: u64) -> Path {
    Path::from(format!("table/day={number}/part-00000.parquet"))
}

async fn filled() -> Arc<InMemory> {
    let store = InMemory::new();
    for number in 0..OBJECTS {
        let bytes: Vec<u8> = (0..OBJECT_BYTES).map(|at| (at / 7 + number) as u8).collect();
        store.put(&path(number), bytes.into()).await.unwrap();
    }
    Arc::new(store)
}

fn cached(store: Arc<dyn ObjectStore>) -> CachedStore {
    let builder =
        CachedStore::builder(store).memory_bytes(LIMIT_BYTES).page_bytes(PAGE_BYTES as u32);
    builder.freshness(Freshness::Immutable).build().unwrap()
}

struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) % limit
    }

    fn range(&mut self) -> Range<u64> {
        let start = self.below(OBJECT_BYTES / READ_BYTES) * READ_BYTES;
        start..start + READ_BYTES
    }
}

/// Nanoseconds per read, with `threads` threads that read for `length`.
fn slice(threads: u64, length: Duration, read: &(impl Fn(&mut Random, &[Path]) + Sync)) -> f64 {
    let (reads, barrier) = (AtomicU64::new(0), Barrier::new(threads as usize));
    let paths: Vec<Path> = (0..OBJECTS).map(path).collect();
    let longest = std::thread::scope(|scope| {
        let run = |thread: u64| {
            let (reads, barrier, paths) = (&reads, &barrier, &paths);
            move || {
                let mut random = Random(thread + 1);
                barrier.wait();
                let (began, mut count) = (Instant::now(), 0);
                while began.elapsed() < length {
                    (0..64).for_each(|_| read(&mut random, paths));
                    count += 64;
                }
                reads.fetch_add(count, Relaxed);
                began.elapsed()
            }
        };
        let threads: Vec<_> = (0..threads).map(|thread| scope.spawn(run(thread))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).max().unwrap()
    });
    longest.as_nanos() as f64 * threads as f64 / reads.load(Relaxed) as f64
}

/// The result of a future that is ready at its first poll.
fn now<T>(future: impl Future<Output = T>) -> T {
    futures_util::FutureExt::now_or_never(future).expect("it is cached")
}

fn reader(store: &impl ObjectStore) -> impl Fn(&mut Random, &[Path]) + Sync {
    move |random, paths| {
        let at = random.below(OBJECTS) as usize;
        let bytes = now(store.get_range(&paths[at], random.range())).unwrap();
        look_at(&bytes);
    }
}

/// Loads every cache line of the bytes.
fn look_at(bytes: &[u8]) {
    assert_eq!(bytes.len() as u64, READ_BYTES);
    std::hint::black_box(bytes.iter().step_by(64).fold(0u8, |sum, byte| sum.wrapping_add(*byte)));
}

fn quartiles(mut values: Vec<f64>) -> [f64; 3] {
    values.sort_by(f64::total_cmp);
    [1, 2, 3].map(|quarter| values[(values.len() - 1) * quarter / 4])
}

/// Medians of both times, and quartiles of the ratios of the second to the first.
fn compare(
    pairs: usize,
    first: impl Fn() -> f64,
    second: impl Fn() -> f64,
) -> (f64, f64, [f64; 3]) {
    let (mut firsts, mut seconds, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for pair in 0..pairs {
        let (one, other) = match pair % 2 {
            0 => {
                let one = first();
                (one, second())
            }
            _ => {
                let other = second();
                (first(), other)
            }
        };
        firsts.push(one);
        seconds.push(other);
        ratios.push(other / one);
    }
    (quartiles(firsts)[1], quartiles(seconds)[1], quartiles(ratios))
}

async fn hits(pairs: usize, length: Duration) {
    let far = filled().await;
    let ours = cached(Arc::clone(&far) as _);
    let peer = Foyer::new(far, LIMIT_BYTES);
    for number in 0..OBJECTS {
        for start in (0..OBJECT_BYTES).step_by(PAGE_BYTES as usize) {
            let range = start..start + PAGE_BYTES;
            let a = ours.get_range(&path(number), range.clone()).await.unwrap();
            assert_eq!(a, peer.get_range(&path(number), range).await.unwrap());
        }
    }
    let requests = ours.stats().requests;
    println!(
        "4 KiB get_range at random, {OBJECTS} objects of 1 MiB, all cached, limit {} MiB",
        LIMIT_BYTES >> 20
    );
    println!(
        "{:>8} {:>12} {:>22} {:>30}",
        "threads", "Millpond ns", "peer ns", "peer / Millpond (quartiles)"
    );
    for threads in [1, 2] {
        let ours = || slice(threads, length, &reader(&ours));
        let bare = |random: &mut Random, paths: &[Path]| {
            let at = random.below(OBJECTS) as usize;
            look_at(&peer.lookup(&paths[at], random.range()).unwrap());
        };
        for (name, (a, b, [low, mid, high])) in [
            ("foyer, as a store", compare(pairs, ours, || slice(threads, length, &reader(&peer)))),
            ("foyer, bare", compare(pairs, ours, || slice(threads, length, &bare))),
        ] {
            println!(
                "{threads:>8} {a:>12.0} {b:>8.0} {name:<20} {mid:>8.2} ({low:.2} to {high:.2})"
            );
        }
    }
    assert_eq!(ours.stats().requests, requests, "all were hits");
}

/// Reads all objects once, several at a time, as a query engine does: the end of each object, then ranges.
async fn first_round(store: &dyn ObjectStore) -> Duration {
    let began = Instant::now();
    stream::iter(0..OBJECTS)
        .for_each_concurrent(8, |number| async move {
            let (path, size) = (path(number), OBJECT_BYTES);
            store.get_ranges(&path, &[size - 8..size]).await.unwrap();
            store.get_ranges(&path, &[size - 30_000..size - 8]).await.unwrap();
            let ranges: Vec<_> = (0..8).map(|at| at * 110_000..at * 110_000 + 90_000).collect();
            store.get_ranges(&path, &ranges).await.unwrap();
        })
        .await;
    began.elapsed()
}

async fn misses(pairs: usize) {
    let config =
        ThrottleConfig { wait_get_per_call: Duration::from_millis(3), ..Default::default() };
    let far = foyer::Counted::new(ThrottledStore::new(filled().await, config));
    let (mut with, mut without, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    let mut requests = [0, 0];
    for pair in 0..pairs {
        for side in [pair % 2, 1 - pair % 2] {
            let store = cached(Arc::clone(&far) as _);
            let before = far.requests();
            let took = match side {
                0 => first_round(&store).await,
                _ => first_round(&far).await,
            };
            requests[side] = far.requests() - before;
            [&mut with, &mut without][side].push(took.as_secs_f64() * 1000.0);
        }
        ratios.push(with.last().unwrap() / without.last().unwrap());
    }
    let [low, mid, high] = quartiles(ratios);
    println!("\nfirst round, all misses: {OBJECTS} objects, a request takes 3 ms");
    println!(
        "with the cache {:.0} ms, {} requests; without {:.0} ms, {} requests; with / without {mid:.3} ({low:.3} to {high:.3})",
        quartiles(with)[1],
        requests[0],
        quartiles(without)[1],
        requests[1]
    );
}

fn main() {
    let is_quick = std::env::args().any(|argument| argument == "--quick");
    let (pairs, length) = if is_quick { (5, 100) } else { (15, 400) };
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_time().build();
    runtime.unwrap().block_on(async {
        hits(pairs, Duration::from_millis(length)).await;
        misses(pairs).await;
    });
}
