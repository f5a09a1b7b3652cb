//! A million completions.

mod common;

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{Duration, Instant};

use millpond::queue::{Rejected, Request};
use millpond::sim::SimOptions;
use millpond::{Advice, BackendChoice};

use common::{Random, read_write, temp_dir, within};

const PAGE: u64 = 4096;
const FILE_BYTES: u64 = 2 << 20;
const LEN: usize = 64;
const CAPACITY: usize = 256;
const SUBMITTERS: u64 = 2;

/// The kind of a request, by its number: invalid, of shared cached pages, or mostly a miss.
enum Kind {
    Refused,
    Cached,
    Anywhere,
}

fn kind_of(number: u64) -> Kind {
    match number % 64 {
        // In the middle of each batch.
        7 => Kind::Refused,
        11 | 20 | 30 | 50 => Kind::Anywhere,
        _ => Kind::Cached,
    }
}

/// Goal: of many completions each comes exactly once, with its own outcome and bytes: hits, misses
/// in any order, refused requests and device errors in the middle of batches, short transfers,
/// several submitters, and several waiters for batches of different sizes.
#[test]
fn a_storm_of_a_million_completions() {
    let total = u64::from(common::scaled(1_000_000));
    let dir = temp_dir();
    let path = dir.path().join("file");
    let mut random = Random::from_environment();
    let content: Arc<Vec<u8>> =
        Arc::new((0..FILE_BYTES / 8).flat_map(|_| random.next().to_ne_bytes()).collect());
    std::fs::write(&path, &**content).unwrap();
    let sim = SimOptions::new(random.next()).short_per_mille(200).error_per_mille(100);
    let engine = common::engine(512 << 10, BackendChoice::Sim(sim));
    let file = Arc::new(engine.open(&path, &read_write()).unwrap());
    file.advise(0, 0, Advice::Random).unwrap();
    let seen: Vec<AtomicBool> = (0..total).map(|_| AtomicBool::new(false)).collect();
    let (done, failed) = (AtomicU64::new(0), AtomicU64::new(0));
    let seeds: Vec<u64> = (0..SUBMITTERS).map(|_| random.next()).collect();
    let begun = Instant::now();
    within(Duration::from_secs(300), "a storm", move || {
        let queue = engine.queue(CAPACITY).unwrap();
        std::thread::scope(|scope| {
            for (who, seed) in (0..).zip(seeds) {
                let (queue, file) = (&queue, &file);
                scope.spawn(move || {
                    let mut random = Random(seed);
                    let mut numbers = (who..total).step_by(SUBMITTERS as usize);
                    let mut batch = Vec::new();
                    loop {
                        let room = 32 - batch.len();
                        batch.extend(numbers.by_ref().take(room).map(|number| {
                            let offset = match kind_of(number / SUBMITTERS) {
                                Kind::Refused => u64::MAX,
                                Kind::Cached => random.below(8 * PAGE),
                                Kind::Anywhere => random.below(FILE_BYTES - LEN as u64),
                            };
                            // The completion's number has the offset, to check the bytes.
                            let data = number << 32 | offset & 0xffff_ffff;
                            Request::read(file, vec![0; LEN], offset).user_data(data)
                        }));
                        if batch.is_empty() {
                            return;
                        }
                        let before = batch.len();
                        batch = queue
                            .submit_all(batch)
                            .map_or_else(Rejected::into_requests, |()| vec![]);
                        if batch.len() == before {
                            std::thread::yield_now();
                        }
                    }
                });
            }
            for min in [1, 3, 20] {
                let (queue, seen, done, failed, content) =
                    (&queue, &seen, &done, &failed, &content);
                scope.spawn(move || {
                    while done.load(SeqCst) < total {
                        let got = queue.wait(min, 64, Some(Duration::from_millis(20))).unwrap();
                        let count = got.len() as u64;
                        for one in got {
                            let number = one.user_data() >> 32;
                            let at = (one.user_data() & 0xffff_ffff) as usize;
                            assert!(!seen[number as usize].swap(true, SeqCst), "{number} twice");
                            let refused = matches!(kind_of(number / SUBMITTERS), Kind::Refused);
                            match one.into_parts() {
                                (Ok(moved), bytes) => {
                                    // Or the part before the bytes that could not be read.
                                    assert!(!refused && moved > 0, "{number}: {moved}");
                                    let expected = &content[at..at + moved];
                                    assert!(bytes[..moved] == *expected, "{number}: bytes");
                                    failed.fetch_add(u64::from(moved < LEN), SeqCst);
                                }
                                (Err(error), _) => {
                                    let errno = if refused { libc::EINVAL } else { libc::EIO };
                                    assert_eq!(error.errno(), errno, "{number}");
                                    failed.fetch_add(u64::from(!refused), SeqCst);
                                }
                            }
                        }
                        done.fetch_add(count, SeqCst);
                    }
                });
            }
        });
        assert_eq!(queue.counts(), (0, 0));
        assert!(seen.iter().all(|seen| seen.load(SeqCst)));
        println!("{:?}: {total}, {failed:?} failed, {:?}", begun.elapsed(), engine.stats());
        assert!(failed.load(SeqCst) >= total / 100_000, "too few errors: {failed:?}");
    });
}
