//! Extent operations with concurrent readers of the same ranges.

use std::path::Path;
use std::time::{Duration, Instant};

use millpond::{Advice, Backing, Engine, OpenOptions, WriteMode};

use crate::common::{
    Random, back_ends, cache_for, engine, read_write, stress_time, temp_dir, within,
};
use crate::read;

const GROUPS: u64 = 24;
/// Groups from here on are truncated and written again.
const CUT_FROM: u64 = 16;

/// Goal: readers see a range as it was written or all zero, never a mixture. The last writer of a
/// range reads its own bytes.
/// Method: groups of words with one stamp, unaligned to pages. Each of two threads owns half of the
/// lower groups: it writes, punches or zeroes one or several whole groups, and reads them back. A
/// third thread truncates the file among the upper groups and extends it, in two ways. The other
/// threads read.
fn groups_under_change(engine: &Engine, path: &Path, options: &OpenOptions, seed: u64, what: &str) {
    let mut random = Random(seed);
    let bytes = 8 * (100 + random.below(1500));
    let words = bytes as usize / 8;
    let file = engine.open(path, options).unwrap();
    file.truncate(GROUPS * bytes).unwrap();
    let end = Instant::now() + stress_time(0.5);
    let uniform = |bytes_read: &[u8], group: u64| {
        let word = |at: usize| u64::from_ne_bytes(bytes_read[at..at + 8].try_into().unwrap());
        let first = word(0);
        for at in (0..bytes_read.len()).step_by(8) {
            assert_eq!(word(at), first, "{what}: torn: group {group}, byte {at} of {bytes}");
        }
        assert!(first == 0 || first >> 40 == group + 1, "{what}: another group's: {first:#x}");
        first
    };
    let counts: Vec<u64> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..6u64)
            .map(|thread| {
                let mut random = random.fork();
                let uniform = &uniform;
                scope.spawn(move || {
                    let file = engine.open(path, options).unwrap();
                    let (mut count, mut stamp) = (0, 0);
                    while Instant::now() < end {
                        count += 1;
                        match thread {
                            0 | 1 => {
                                let half = CUT_FROM / 2;
                                let group = thread * half + random.below(half);
                                let more = random.below(thread * half + half - group).min(3);
                                let (at, len) = (group * bytes, (1 + more) * bytes);
                                stamp += 1;
                                let expected = match random.below(4) {
                                    0 => {
                                        file.punch_hole(at, len).unwrap();
                                        0
                                    }
                                    1 => {
                                        file.zero_range(at, len).unwrap();
                                        0
                                    }
                                    _ => stamp,
                                };
                                for group in group..=group + more {
                                    let word = (group + 1) << 40 | expected;
                                    let word = if expected == 0 { 0 } else { word };
                                    if word != 0 {
                                        let src = word.to_ne_bytes().repeat(words);
                                        file.write_all_at(&src, group * bytes).unwrap();
                                    }
                                    let now = read(&file, bytes as usize, group * bytes);
                                    assert_eq!(now.len() as u64, bytes);
                                    assert_eq!(uniform(&now, group), word, "{what}: not current");
                                }
                            }
                            2 => {
                                let group = CUT_FROM + random.below(GROUPS - CUT_FROM);
                                file.truncate(group * bytes).unwrap();
                                match random.below(3) {
                                    0 => file.truncate(GROUPS * bytes).unwrap(),
                                    1 => file.allocate(0, GROUPS * bytes).unwrap(),
                                    _ => {
                                        let rest = (GROUPS - group) * bytes;
                                        file.allocate(group * bytes, rest).unwrap();
                                    }
                                }
                                let now = read(&file, bytes as usize, group * bytes);
                                assert_eq!(uniform(&now, group), 0, "{what}: came back");
                                stamp += 1;
                                for group in group..GROUPS {
                                    let word = (group + 1) << 40 | stamp;
                                    let src = word.to_ne_bytes().repeat(words);
                                    file.write_all_at(&src, group * bytes).unwrap();
                                }
                            }
                            3 => {
                                let at = random.below(GROUPS * bytes);
                                let advice =
                                    [Advice::DontNeed, Advice::WillNeed, Advice::Sequential];
                                let advice = advice[random.below(3) as usize];
                                file.advise(at, random.below(100_000), advice).unwrap();
                                engine.set_hit_path(random.chance(700));
                                let found = file.seek_data(at).unwrap();
                                assert!(found.is_none_or(|found| found >= at));
                            }
                            _ => {
                                let group = random.below(GROUPS);
                                let count = 1 + random.below(3);
                                let len = (count * bytes) as usize;
                                let now = read(&file, len, group * bytes);
                                assert_eq!(now.len() as u64 % bytes, 0, "{what}: half a group");
                                for (part, group) in now.chunks(bytes as usize).zip(group..) {
                                    uniform(part, group);
                                }
                            }
                        }
                    }
                    count
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    println!("{what}: groups of {bytes}, operations {counts:?}; {:?}", engine.stats());
}

#[test]
fn readers_see_whole_ranges_as_they_were_or_zero() {
    let mut random = Random::from_environment();
    for (name, backend) in back_ends(random.next()) {
        for (page_bytes, cache_pages, backing, mode) in [
            (4096u64, 5, Backing::Buffered, WriteMode::Through),
            (4096, 100, Backing::Direct, WriteMode::Through),
            (4096, 100, Backing::Mapped, WriteMode::Through),
            (4096, 100, Backing::Direct, WriteMode::Back),
            (4096, 100, Backing::DirectInPlace, WriteMode::Back),
            (16384, 30, Backing::Buffered, WriteMode::Back),
        ] {
            let (backend, seed) = (backend.clone(), random.next());
            within(stress_time(0.5) + Duration::from_secs(60), name, move || {
                let dir = temp_dir();
                let path = dir.path().join("file");
                let engine = engine(cache_for(cache_pages, page_bytes), backend);
                let options = read_write().page_bytes(page_bytes as u32).backing(backing);
                let options = options.write_mode(mode);
                let what = format!("{name}, {backing:?}, {mode:?}, pages of {page_bytes}");
                groups_under_change(&engine, &path, &options, seed, &what);
            });
        }
    }
}
