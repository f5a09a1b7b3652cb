//! Eviction while write-back keeps much of the cache unevictable.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::cache::frames::class::Class;
use crate::{Advice, BackendChoice, Engine, File, OpenOptions, WriteMode};

const PAGE: u64 = 4096;
const CACHE_BYTES: u64 = 16 << 20;
/// More than one scan of a queue covers, however often it is repeated.
const UNEVICTABLE: u64 = 450;
/// The bytes of the unevictable pages.
const BYTES: u64 = 2 * UNEVICTABLE * PAGE;
const FILE_BYTES: u64 = 64 << 20;

struct Case {
    engine: Engine,
    file: Arc<File>,
    path: PathBuf,
    _dir: tempfile::TempDir,
}

fn empty() -> Case {
    let dir = tempfile::tempdir().unwrap();
    let engine = Engine::builder().cache_bytes(CACHE_BYTES).backend(BackendChoice::Memory);
    // No automatic write-back.
    let engine = engine.dirty_age_max(Duration::from_secs(3600)).build().unwrap();
    let path = dir.path().join("file");
    std::fs::write(&path, vec![1; FILE_BYTES as usize]).unwrap();
    let options = OpenOptions::new().read(true).write(true).write_mode(WriteMode::Back);
    let file = Arc::new(engine.open(&path, &options).unwrap());
    file.advise(0, 0, Advice::Random).unwrap();
    Case { engine, file, path, _dir: dir }
}

/// A full cache: first dirty pages, then as many clean ones as there is room for, then dirty ones
/// again. So all queues begin with unevictable pages.
fn full() -> Case {
    let case = empty();
    let Case { engine, file, .. } = &case;
    // In random order: a stream would be written back too early.
    let dirty = |first: u64| {
        for n in 0..UNEVICTABLE {
            let page = first + (n * 89) % UNEVICTABLE;
            file.write_all_at(&[2; PAGE as usize], page * 2 * PAGE).unwrap();
        }
    };
    dirty(0);
    let mut page = 8 * UNEVICTABLE;
    let room = CACHE_BYTES - CACHE_BYTES / 16 - UNEVICTABLE * PAGE;
    while engine.stats().memory_bytes < room {
        file.read_at(&mut [0; PAGE as usize], page * PAGE).unwrap();
        page += 1;
    }
    dirty(UNEVICTABLE);
    case
}

/// Evicts all evictable pages.
fn evict_all(case: &Case) {
    let cache = &case.engine.shared().cache;
    let taken: Vec<_> = std::iter::from_fn(|| cache.take_frame(Class::UNIT_PAGE)).collect();
    taken.into_iter().for_each(|frame| cache.frames.free(frame, Class::UNIT_PAGE));
}

/// Goal: the evictor does not scan unevictable pages again and again, and pages become evictable
/// when their write-back ends.
#[test]
fn unevictable_pages_are_not_queued_until_written() {
    let case = full();
    let cache = &case.engine.shared().cache;
    evict_all(&case);
    // An eviction that fails has scanned all pages.
    assert_eq!(cache.queued_bytes(), (0, BYTES));
    // Pages that are written again stay out of the queues, in other frames.
    for page in 0..2 * UNEVICTABLE {
        case.file.write_all_at(&[3; PAGE as usize], page * 2 * PAGE).unwrap();
    }
    assert_eq!(cache.queued_bytes(), (0, BYTES));
    case.file.sync_all().unwrap();
    assert_eq!(cache.queued_bytes(), (BYTES, 0), "some were not queued again");
    evict_all(&case);
    assert_eq!(cache.queued_bytes(), (0, 0));
}

/// Goal: a durable write through makes pages evictable that write-back had left for a sync to cover: no later sync
/// covers them.
#[test]
fn a_durable_write_through_leaves_no_page_to_a_sync() {
    const PAGES: u64 = 8;
    let case = full();
    case.file.sync_all().unwrap();
    let unsynced = || case.engine.shared().cache.writeback_counts.unstable();
    let pages = vec![4; (PAGES * PAGE) as usize];
    // One page alone is replaced in one step.
    for write in [&pages[..PAGE as usize], &pages[..]] {
        case.file.write_all_at(write, 0).unwrap();
        case.file.write_back().unwrap();
        assert_eq!(unsynced(), write.len() as u64);
        case.file.begin_through().unwrap();
        assert_eq!(case.file.write_at_dsync(write, 0).unwrap(), write.len());
        assert_eq!(unsynced(), 0);
        case.file.end_through();
    }
    evict_all(&case);
    assert_eq!(case.engine.shared().cache.queued_bytes(), (0, 0));
}

/// Goal: a durable write into the cache makes its page evictable without a later sync, and the page is queued again.
#[test]
fn a_durable_write_back_queues_its_page_again() {
    let case = full();
    let cache = &case.engine.shared().cache;
    evict_all(&case);
    assert_eq!(cache.queued_bytes(), (0, BYTES));
    case.file.write_at_dsync(&[4; PAGE as usize], 0).unwrap();
    assert_eq!(cache.queued_bytes(), (PAGE, BYTES - PAGE));
    evict_all(&case);
    assert_eq!(cache.queued_bytes(), (0, BYTES - PAGE));
}

/// Goal: pages that are truncated while they are in no queue, or whose file is closed, do not count any
/// more.
#[test]
fn truncated_pages_do_not_return() {
    let case = full();
    let Case { engine, file, .. } = &case;
    let cache = &engine.shared().cache;
    evict_all(&case);
    assert_eq!(cache.queued_bytes(), (0, BYTES));
    // Half of those that lie below the first `UNEVICTABLE` pairs of pages, and then all that lie above.
    file.punch_hole(0, UNEVICTABLE * PAGE).unwrap();
    assert_eq!(cache.queued_bytes(), (0, 3 * UNEVICTABLE / 2 * PAGE));
    file.truncate(2 * UNEVICTABLE * PAGE).unwrap();
    assert_eq!(cache.queued_bytes(), (0, UNEVICTABLE / 2 * PAGE));
    Arc::into_inner(case.file).unwrap().close().unwrap();
    assert_eq!(case.engine.shared().cache.queued_bytes(), (0, 0));
}

/// Goal: no page stays out of the queues indefinitely, for any operation on it while it leaves them or
/// becomes evictable. Method: threads overwrite pages, read, sync, evict and truncate; at the end all
/// pages must be evictable.
#[test]
fn no_page_stays_out_of_the_queues() {
    const PAGES: u64 = 512;
    let case = full();
    let through = OpenOptions::new().read(true).write(true).write_mode(WriteMode::Through);
    let through = case.engine.open(&case.path, &through).unwrap();
    let (file, cache) = (&case.file, &case.engine.shared().cache);
    std::thread::scope(|scope| {
        for thread in 0..3 {
            let through = &through;
            scope.spawn(move || {
                for n in 0..20_000 {
                    let page = (n * 7919 + thread * 31) % PAGES;
                    let file = if (n / 64) % 4 == 0 { through } else { file };
                    file.write_all_at(&[thread as u8; PAGE as usize], page * PAGE).unwrap();
                    if n % 1000 == 0 {
                        file.punch_hole(page * PAGE, 8 * PAGE).unwrap();
                    }
                }
            });
        }
        scope.spawn(|| (0..200).for_each(|_| file.sync_all().unwrap()));
        scope.spawn(|| {
            for n in 0..20_000 {
                file.read_at(&mut [0; PAGE as usize], (PAGES + n % 12_000) * PAGE).unwrap();
            }
        });
        scope.spawn(|| {
            for _ in 0..50 {
                evict_all(&case);
                std::thread::yield_now();
            }
        });
    });
    file.sync_all().unwrap();
    assert_eq!(cache.writeback_counts.unevictable(), 0);
    evict_all(&case);
    assert_eq!(cache.queued_bytes(), (0, 0), "pages are left");
}

/// Goal: an allocation finds a clean page at any position of the queues, while there is one.
#[test]
fn a_clean_page_is_found_behind_unevictable_ones() {
    let case = full();
    let cache = &case.engine.shared().cache;
    assert_eq!(cache.writeback_counts.unevictable(), BYTES, "nothing was written back");
    let evictions = || case.engine.stats().evictions;
    let clean = case.engine.stats().fills - evictions();
    assert!(clean > 1000, "{clean}");
    let mut taken = Vec::new();
    while let Some(frame) = cache.take_frame(Class::UNIT_PAGE) {
        taken.push(frame);
    }
    assert_eq!(case.engine.stats().fills, evictions(), "clean pages are left");
    for frame in taken {
        cache.frames.free(frame, Class::UNIT_PAGE);
    }
    // Unevictable pages keep their bytes.
    let mut bytes = [0; PAGE as usize];
    for page in 0..2 * UNEVICTABLE {
        case.file.read_at(&mut bytes, page * 2 * PAGE).unwrap();
        assert!(bytes.iter().all(|&byte| byte == 2));
    }
}

/// Goal: the same if the queue is so short that one pass scans it.
#[test]
fn a_clean_page_is_found_behind_a_few_unevictable_ones() {
    const FEW: u64 = 40;
    let case = empty();
    for page in 0..FEW {
        case.file.write_all_at(&[2; PAGE as usize], page * 2 * PAGE).unwrap();
    }
    case.file.read_at(&mut [0; PAGE as usize], 4 * FEW * PAGE).unwrap();
    evict_all(&case);
    assert_eq!(case.engine.shared().cache.queued_bytes(), (0, FEW * PAGE));
}

/// Goal: while clean pages are evictable, no read bypasses the cache, and no charge is refused.
#[test]
fn no_allocation_fails_while_pages_are_evictable() {
    let case = full();
    let cache = &case.engine.shared().cache;
    let spare: Vec<_> = std::iter::from_fn(|| cache.frames.try_alloc(Class::UNIT_PAGE)).collect();
    assert!(cache.try_charge(64 << 10));
    let mut bytes = [0; PAGE as usize];
    for page in 0..3000 {
        case.file.read_at(&mut bytes, (40 << 20) + page * PAGE).unwrap();
    }
    assert_eq!(case.engine.stats().uncached_reads, 0);
    let views: Vec<_> = (0..16).map(|n| case.file.view((60 << 20) + n * PAGE, 1)).collect();
    assert!(views.iter().all(Result::is_ok));
    drop(views);
    cache.frames.uncharge(64 << 10);
    spare.into_iter().for_each(|frame| cache.frames.free(frame, Class::UNIT_PAGE));
}
