//! Locks that concurrent misses share.

use crate::{Admission, Advice, BackendChoice, Backing, Engine, OpenOptions, WriteMode};

const PAGE: u64 = 4096;
const CACHE_BYTES: u64 = 64 << 20;
const FILE_BYTES: u64 = 8 * CACHE_BYTES;

/// Goal: with a full cache, a miss acquires the lock of the evictor's queues and that of the free
/// frames once in a batch: for inserted pages, and for victims. Method: uncached pages, each once,
/// in an order without neighbours; the acquisitions are counted. A batch has 16 frames here, on up
/// to 32 processors; half as many on more. Incident: each miss acquired both, and two threads of
/// misses were no faster than one.
#[test]
fn one_miss_of_a_batch_takes_the_shared_locks() {
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
    cache.take_lock_counts();
    let before = engine.stats();
    const MISSES: u64 = 8000;
    miss(MISSES);
    let (queues, lists) = cache.take_lock_counts();
    let after = engine.stats();
    assert_eq!(after.misses - before.misses, MISSES);
    assert!(after.evictions - before.evictions > MISSES * 9 / 10, "the cache was full");
    let batch = cache.frames.batch(crate::cache::frames::class::Class::UNIT_PAGE) as u64;
    assert!(batch >= 2, "there are free frames");
    // For inserted pages and for victims; and a few for leaves.
    let most = 2 * MISSES / batch + MISSES / 50;
    assert!(queues <= most, "{queues} holds of the queues' lock, {most} at most");
    assert!(lists <= most, "{lists} holds of the free lists' locks, {most} at most");
}

/// Goal: the last page of a file is read by one system call, through the kernel's cache and past
/// it. There is no read beyond the end, and a file that another program has truncated since ends
/// there. Incident: through the kernel's cache it took two calls, one of which was empty. For small
/// files this doubled the calls.
#[test]
fn the_last_page_is_one_system_call() {
    const LEN: usize = 9000;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    let bytes: Vec<u8> = (0..LEN).map(|at| at as u8).collect();
    for backing in [Backing::Buffered, Backing::Direct] {
        for write in [false, true] {
            std::fs::write(&path, &bytes).unwrap();
            let engine = Engine::builder().cache_bytes(4 << 20).backend(BackendChoice::Threads);
            let engine = engine.admission(Admission::Always).build().unwrap();
            let options = OpenOptions::new().read(true).write(true).backing(backing);
            let options = options.write_mode(WriteMode::Back);
            let Ok(file) = engine.open(&path, &options) else { continue };
            file.advise(0, 0, Advice::Random).unwrap();
            if write {
                // A part of it, the rest of which is read.
                file.write_all_at(&bytes[8500..8600], 8500).unwrap();
            } else {
                let mut last = [0; 4096];
                assert_eq!(file.read_at(&mut last, 8192).unwrap(), LEN - 8192);
                assert_eq!(last[..LEN - 8192], bytes[8192..]);
            }
            let stats = engine.stats();
            assert_eq!(stats.plain_reads + stats.direct_reads, 1, "{backing:?}, {write}");
            let mut all = [0; LEN + 1];
            assert_eq!(file.read_at(&mut all, 0).unwrap(), LEN);
            assert_eq!(all[..LEN], bytes);
        }
    }
}
