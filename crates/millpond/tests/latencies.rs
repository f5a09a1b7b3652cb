//! Goal: the histogram of each kind has its operations: all misses, and a fixed fraction of the
//! hits.

use millpond::stats::{Latencies, LatencyKind, Stats};
use millpond::{Engine, OpenOptions};

const PAGE: usize = 4096;
const PAGES: u64 = 16;

fn count(stats: &Stats, kind: LatencyKind) -> u64 {
    stats.latencies.of(kind).count()
}

#[test]
fn each_kind_is_counted_by_thread_and_merged() {
    let dir = tempfile::tempdir().unwrap();
    let engine = Engine::builder().cache_bytes(4 << 20).readahead_bytes_max(0).build().unwrap();
    let options = OpenOptions::new().read(true).write(true).create(true);
    let path = dir.path().join("data");
    std::fs::write(&path, vec![7; PAGES as usize * PAGE]).unwrap();
    let file = engine.open(&path, &options).unwrap();
    let page = [1; PAGE];

    let read_all = || {
        let mut bytes = [0; PAGE];
        for page in 0..PAGES {
            assert_eq!(file.read_at(&mut bytes, page * PAGE as u64).unwrap(), PAGE);
        }
    };
    read_all();
    let missed = engine.stats();
    assert_eq!(count(&missed, LatencyKind::ReadMiss), PAGES);
    assert_eq!(missed.misses, PAGES);
    assert_eq!(count(&missed, LatencyKind::ReadHit), 0, "{:?}", missed.latencies);

    const ROUNDS: u64 = 40;
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| (0..ROUNDS).for_each(|_| read_all()));
        }
    });
    for number in 0..48 {
        file.write_all_at(&page, number % PAGES * PAGE as u64).unwrap();
    }
    file.sync_all().unwrap();
    let stats = engine.stats();
    assert_eq!(count(&stats, LatencyKind::ReadHit), 2 * ROUNDS * PAGES / 64);
    assert_eq!(count(&stats, LatencyKind::ReadMiss), PAGES);
    assert_eq!(count(&stats, LatencyKind::Write), 3);
    assert_eq!(count(&stats, LatencyKind::Sync), 1);
    assert_eq!(count(&stats, LatencyKind::Open), 1);
    for kind in LatencyKind::ALL {
        let histogram = stats.latencies.of(kind);
        assert!(histogram.sum_ns() >= histogram.count(), "{}: it takes time", kind.name());
    }

    let mut twice = Latencies::default();
    (0..2).for_each(|_| twice.merge(&stats.latencies));
    assert_eq!(twice.of(LatencyKind::Write).count(), 6);
}

#[test]
fn direct_operations_are_sampled() {
    let dir = tempfile::tempdir().unwrap();
    let engine = Engine::builder().cache_bytes(4 << 20).build().unwrap();
    let options = OpenOptions::new().read(true).write(true).create(true).direct(true).bounce(true);
    let file = engine.open(dir.path().join("data"), &options).unwrap();
    let mut bytes = vec![0; PAGE];
    for number in 0..32 {
        file.write_all_at(&bytes, number * PAGE as u64).unwrap();
    }
    for number in 0..32 {
        file.read_exact_at(&mut bytes, number * PAGE as u64).unwrap();
    }
    let stats = engine.stats();
    assert_eq!(count(&stats, LatencyKind::DirectWrite), 2);
    assert_eq!(count(&stats, LatencyKind::DirectRead), 2);
    assert_eq!(count(&stats, LatencyKind::ReadMiss) + count(&stats, LatencyKind::Write), 0);
}
