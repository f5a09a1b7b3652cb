//! Adjacent frames for pages that are filled in random order.

use crate::{Advice, Engine, OpenOptions, WriteMode};

const PAGE: u64 = 4096;

/// Goal: pages of a leaf that are filled at random have adjacent frames, and abandoned reservations
/// are used up before anything is evicted. Method: the pages of a file in a scattered order, read
/// through views; then more files, until little is left of the limit.
#[test]
fn pages_filled_at_random_lie_in_a_row() {
    const PAGES: u64 = 4 * 512;
    let dir = tempfile::tempdir().unwrap();
    let engine = Engine::builder().cache_bytes(64 << 20).build().unwrap();
    let open = |name: &str, pages: u64| {
        let path = dir.path().join(name);
        let file = std::fs::File::create(&path).unwrap();
        file.set_len(pages * PAGE).unwrap();
        let file = engine.open(&path, &OpenOptions::new().read(true)).unwrap();
        file.advise(0, 0, Advice::Random).unwrap();
        file
    };
    let file = open("scattered", PAGES);
    // 769 has no factor in common with the number of pages.
    for page in (0..PAGES).map(|i| i * 769 % PAGES) {
        file.read_at(&mut [0; 8], page * PAGE).unwrap();
    }
    let address = |page: u64| file.view(page * PAGE, 1).unwrap().as_ptr() as u64;
    for page in 0..PAGES {
        let first = page & !511;
        assert_eq!(address(page) - address(first), (page - first) * PAGE, "page {page}");
    }
    // One page each: the rest of each reservation is unused.
    let sparse = open("sparse", 16 * 512);
    for leaf in 0..16 {
        sparse.read_at(&mut [0; 8], leaf * 512 * PAGE).unwrap();
    }
    let before = engine.stats();
    assert!(before.memory_bytes < engine.cache_bytes() * 6 / 10, "{before:?}");
    let dense = open("dense", 12 * 512);
    for page in 0..12 * 512 {
        dense.read_at(&mut [0; 8], page * PAGE).unwrap();
    }
    let after = engine.stats();
    assert_eq!(after.evictions, 0, "{after:?}");
    assert!(after.memory_bytes <= engine.cache_bytes());
    assert_eq!(after.fills, PAGES + 16 + 12 * 512);
}

/// Incident: after the limit was lowered and raised, each leaf of which one page was read took a chunk that nothing had
/// used, though the class had free groups.
///
/// Goal: an engine whose limit changes uses the same address space again.
#[test]
fn a_limit_that_changes_uses_no_further_chunks() {
    const LIMIT_BYTES: u64 = 64 << 20;
    let dir = tempfile::tempdir().unwrap();
    let engine = Engine::builder().cache_bytes(LIMIT_BYTES).build().unwrap();
    let path = dir.path().join("sparse");
    std::fs::File::create(&path).unwrap().set_len(256 * 512 * PAGE).unwrap();
    let file = engine.open(&path, &OpenOptions::new().read(true)).unwrap();
    file.advise(0, 0, Advice::Random).unwrap();
    let mut used = Vec::new();
    for round in 0..4 {
        for leaf in (0..64).map(|leaf| round * 64 + leaf) {
            file.read_at(&mut [0; 8], leaf * 512 * PAGE).unwrap();
        }
        used.push(engine.shared().cache.frames.metas_committed_bytes());
        engine.set_cache_bytes(1 << 20).unwrap();
        engine.set_cache_bytes(LIMIT_BYTES).unwrap();
    }
    assert!(used[1..].iter().all(|&bytes| bytes <= used[0] + used[0] / 4), "{used:?}");
}

/// Goal: the pages of writes have adjacent frames, so that their write-back has few segments. Method: the frames are those
/// of a closed file. Incident: they were on the free list in the reverse order of its pages.
#[test]
fn written_pages_lie_in_a_row() {
    const LEN: u64 = 8 << 20;
    const LONG: u64 = 1 << 20;
    let dir = tempfile::tempdir().unwrap();
    for write_len in [LONG, PAGE] {
        let engine = Engine::builder().cache_bytes(64 << 20).build().unwrap();
        let options = OpenOptions::new().create(true).read(true).write(true);
        let options = options.write_mode(WriteMode::Back);
        let written = |name: &str, write_len: u64| {
            let file = engine.open(dir.path().join(name), &options).unwrap();
            for write in 0..LEN / write_len {
                file.write_all_at(&vec![1; write_len as usize], write * write_len).unwrap();
            }
            file
        };
        drop(written("closed", LONG));
        let file = written("open", write_len);
        let address = |page: u64| file.view(page * PAGE, 1).unwrap().as_ptr() as u64;
        let pages = LEN / PAGE;
        let follows = |page: &u64| address(*page) == address(*page - 1) + PAGE;
        let parts = pages - (1..pages).filter(follows).count() as u64;
        // The thread's magazine may have a few frames of another place.
        assert!(parts <= 4 * LEN / LONG, "{pages} pages in {parts} parts");
    }
}

/// Goal: a long write orders its frames itself. Method: pages are dropped from the cache one by one, in ascending order.
#[test]
fn a_long_write_sorts_its_frames() {
    const LEN: u64 = 1 << 20;
    let dir = tempfile::tempdir().unwrap();
    let engine = Engine::builder().cache_bytes(64 << 20).build().unwrap();
    let options = OpenOptions::new().create(true).read(true).write(true);
    let file = engine.open(dir.path().join("file"), &options.write_mode(WriteMode::Back)).unwrap();
    file.write_all_at(&vec![1; LEN as usize], 0).unwrap();
    file.sync_all().unwrap();
    for page in 0..LEN / PAGE {
        file.advise(page * PAGE, PAGE, Advice::DontNeed).unwrap();
    }
    file.write_all_at(&vec![2; LEN as usize], 0).unwrap();
    let address = |page: u64| file.view(page * PAGE, 1).unwrap().as_ptr() as u64;
    let follows = |page: &u64| address(*page) == address(*page - 1) + PAGE;
    let parts = LEN / PAGE - (1..LEN / PAGE).filter(follows).count() as u64;
    assert!(parts <= 4, "in {parts} parts");
}
