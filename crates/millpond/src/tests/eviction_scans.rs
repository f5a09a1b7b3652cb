//! The number of pages that an eviction scans while it holds the lock that every miss and every
//! overwrite acquires.
//!
//! Incident: after a second pass over all cached pages, the next miss gave each page its second
//! chance in one hold of the lock. Writes of other threads waited 30 ms with 1 GiB, and 120 ms with
//! 4 GiB.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crate::cache::policy::evict::SCANNED_PER_PASS_MAX;
use crate::stats::Stats;
use crate::{Admission, Advice, BackendChoice, Engine, File, OpenOptions, WriteMode};

const PAGE: u64 = 4096;
const CACHE_BYTES: u64 = 32 << 20;
const FILE_BYTES: u64 = 4 * CACHE_BYTES;

struct Case {
    engine: Engine,
    file: Arc<File>,
    _dir: tempfile::TempDir,
}

impl Case {
    fn new() -> Case {
        let dir = tempfile::tempdir().unwrap();
        let engine = Engine::builder().cache_bytes(CACHE_BYTES).backend(BackendChoice::Null);
        let engine = engine
            .admission(Admission::Always)
            .dirty_age_max(Duration::from_secs(3600))
            .build()
            .unwrap();
        let path = dir.path().join("file");
        std::fs::File::create(&path).unwrap().set_len(FILE_BYTES).unwrap();
        let options = OpenOptions::new().read(true).write(true).write_mode(WriteMode::Back);
        let file = Arc::new(engine.open(&path, &options).unwrap());
        file.advise(0, 0, Advice::Random).unwrap();
        Case { engine, file, _dir: dir }
    }

    fn read(&self, page: u64) {
        assert_eq!(self.file.read_at(&mut [0; PAGE as usize], page * PAGE).unwrap(), 4096);
    }

    /// Reads from the first page on until some are evicted. Returns the pages that are cached then.
    fn fill(&self) -> Range<u64> {
        let end = (0..).find(|&page| {
            self.read(page);
            self.stats().evictions > 0
        });
        self.scanned_max();
        // The first pages are among the evicted ones.
        self.stats().evictions + 64..end.unwrap()
    }

    /// Reads all of `pages` again, by hits.
    fn read_again(&self, pages: &Range<u64>) {
        let misses = self.stats().misses;
        pages.clone().for_each(|page| self.read(page));
        assert!(self.stats().misses - misses < 100, "most are cached");
    }

    fn scanned_max(&self) -> u64 {
        self.engine.shared().cache.take_scanned_max()
    }

    fn stats(&self) -> Stats {
        self.engine.stats()
    }
}

/// Goal: after all pages were read again, evictions scan a bounded number of pages in one hold of
/// the lock, and each evicts a page. So do later evictions, until the backlog is processed.
#[test]
fn a_cache_that_was_all_read_again_is_not_gone_through_at_once() {
    let case = Case::new();
    let mut pages = case.fill();
    let many = pages.end - pages.start;
    assert!(many > 20 * SCANNED_PER_PASS_MAX, "{many}: too few for a conclusion");
    case.read_again(&pages);
    // Once for new pages, and once for pages that have all been used.
    for round in 0..2 {
        let before = case.stats();
        let fresh = pages.end..pages.end + many / 4;
        fresh.clone().for_each(|page| case.read(page));
        let after = case.stats();
        assert_eq!(after.uncached_reads, 0);
        assert!(after.evictions - before.evictions >= many / 4 - 64, "{after:?}");
        let scanned = case.scanned_max();
        assert!(scanned > 1, "nothing was looked at");
        assert!(
            scanned <= SCANNED_PER_PASS_MAX,
            "round {round}: {scanned} pages in one hold of the lock"
        );
        for _ in 0..3 {
            pages.clone().for_each(|page| case.read(page));
        }
        case.scanned_max();
        pages.end = fresh.end;
    }
}

/// Goal: the same where every second page is dirty, and some are pinned.
#[test]
fn pages_that_cannot_go_are_not_gone_through_at_once() {
    let case = Case::new();
    let pages = case.fill();
    let many = pages.end - pages.start;
    // In random order: a stream would be written back too early.
    for n in 0..many / 5 {
        let page = pages.start + (n * 7919 % (many / 5)) * 2;
        case.file.write_all_at(&[1; PAGE as usize], page * PAGE).unwrap();
    }
    let odd = (0..200).map(|n| pages.start + n * 2 + 1);
    let views: Vec<_> = odd.map(|page| case.file.view(page * PAGE, 1).unwrap()).collect();
    case.read_again(&pages);
    for page in 0..many / 2 {
        case.read(pages.end + page);
    }
    assert_eq!(case.stats().uncached_reads, 0);
    let scanned = case.scanned_max();
    assert!(
        scanned > 1 && scanned <= SCANNED_PER_PASS_MAX,
        "{scanned} pages in one hold of the lock"
    );
    drop(views);
}

/// Goal: if every page was read again and the window queue is empty, a page is evicted
/// nevertheless.
#[test]
fn a_victim_is_found_among_pages_that_are_all_in_use() {
    let case = Case::new();
    let pages = case.fill();
    let cache = &case.engine.shared().cache;
    let class = crate::cache::frames::class::Class::UNIT_PAGE;
    let mut taken = Vec::new();
    loop {
        (0..pages.end).for_each(|page| {
            // Only hits: no page is added.
            let mut bytes = [0; PAGE as usize];
            // SAFETY: `bytes` is valid for writes of its length.
            unsafe { case.file.raw().try_read_hit(bytes.as_mut_ptr(), bytes.len(), page * PAGE) };
        });
        let before = case.stats();
        for _ in 0..pages.end / 16 {
            let Some(frame) = cache.take_frame(class) else { break };
            taken.push(frame);
        }
        if case.stats().evictions == before.evictions {
            break;
        }
    }
    let stats = case.stats();
    assert_eq!(stats.evictions, stats.fills, "some were left: {stats:?}");
    assert!(case.scanned_max() <= SCANNED_PER_PASS_MAX);
    taken.into_iter().for_each(|frame| cache.frames.free(frame, class));
}
