//! What a miss shares with others.

use crate::{Admission, Advice, BackendChoice, Engine, OpenOptions};

const PAGE: u64 = 4096;
const CACHE_BYTES: u64 = 64 << 20;
const FILE_BYTES: u64 = 8 * CACHE_BYTES;

/// Goal: where the cache is full, a miss takes the lock of the evictor's queues and that of the free frames once in
/// a batch: for newcomers, and for what goes.
/// Method: pages that are not cached, none twice, in an order that no page is near the one before; the holds are
/// counted. A batch is 16 frames here, on up to 32 processors; half as many on more.
/// Incident: each miss took both, and two threads of misses were no faster than one.
#[test]
fn of_a_batch_of_misses_one_takes_the_shared_locks() {
    let dir = tempfile::tempdir().unwrap();
    let builder = Engine::builder().cache_bytes(CACHE_BYTES).backend(BackendChoice::Null);
    let engine = builder.admission(Admission::Always).build().unwrap();
    let path = dir.path().join("file");
    std::fs::File::create(&path).unwrap().set_len(FILE_BYTES).unwrap();
    let file = engine.open(&path, &OpenOptions::new().read(true)).unwrap();
    file.advise(0, 0, Advice::Random).unwrap();
    let pages = FILE_BYTES / PAGE;
    let mut at = 0;
    let mut miss = |count: u64| {
        for _ in 0..count {
            at = (at + 7919) % pages;
            assert_eq!(file.read_at(&mut [0; PAGE as usize], at * PAGE).unwrap(), 4096);
        }
    };
    miss(CACHE_BYTES / PAGE * 2);
    let cache = &engine.shared().cache;
    cache.take_holds();
    let before = engine.stats();
    const MISSES: u64 = 8000;
    miss(MISSES);
    let (queues, lists) = cache.take_holds();
    let after = engine.stats();
    assert_eq!(after.misses - before.misses, MISSES);
    assert!(after.evictions - before.evictions > MISSES * 9 / 10, "the cache was full");
    let batch = cache.frames.batch(crate::cache::class::Class::UNIT_PAGE) as u64;
    assert!(batch >= 2, "there are frames at hand");
    // For newcomers and for victims; and a few for leaves that come and go.
    let most = 2 * MISSES / batch + MISSES / 50;
    assert!(queues <= most, "{queues} holds of the queues' lock, {most} at most");
    assert!(lists <= most, "{lists} holds of the free lists' locks, {most} at most");
}
