//! Kernels whose pages are larger than a frame, as on AArch64. The test works on any kernel, as it
//! checks that the engine commits and decommits whole pages of that size.
//!
//! Incident: frames of 4 KiB were decommitted one by one. Such a kernel takes the whole page, or
//! refuses: up to fifteen neighbours were lost, dirty ones among them.

use crate::cache::frames::class::Class;
use crate::cache::frames::{FrameMemory, Frames, SYSTEM_PAGE_BYTES};
use crate::units::{CHUNK_UNITS, FrameIndex};
use crate::{Engine, OpenOptions, WriteMode};

const SIZES: [usize; 3] = [4096, 16 << 10, 64 << 10];
const CLASSES: [Class; 4] = [Class::INNER, Class::LEAF, Class::SLAB, Class::UNIT_PAGE];

fn with_system_pages(bytes: usize, body: impl FnOnce()) {
    SYSTEM_PAGE_BYTES.set(bytes);
    body();
    SYSTEM_PAGE_BYTES.set(0);
}

fn next(random: &mut u64) -> u64 {
    *random =
        random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    *random >> 33
}

/// Goal: decommitted memory is not in use, and the charge is that of whole system pages: all that
/// have a frame in use, or a free one that is not decommitted. Method: frames of all classes are
/// allocated and freed at random; a frame in use is filled with its number. The madvise of a system
/// page is the kernel's, so bytes of other frames would be zero.
#[test]
fn frames_in_use_are_left_alone() {
    for bytes in SIZES {
        // Without huge pages, and with.
        for limit_bytes in [8 << 20, 160 << 20] {
            with_system_pages(bytes, || come_and_go(bytes, limit_bytes));
        }
    }
}

fn come_and_go(system_page_bytes: usize, limit_bytes: u64) {
    let frames = Frames::new(limit_bytes, FrameMemory::Private).unwrap();
    let classes: Vec<Class> = CLASSES.into_iter().chain((13..17).map(Class::page)).collect();
    let write = |frame: FrameIndex, class: Class| {
        // SAFETY: the frame is ours, and large enough.
        unsafe { frames.bytes(frame).cast::<u32>().write(frame.0) };
        // SAFETY: as above.
        unsafe { frames.bytes(frame).add(class.bytes() - 4).cast::<u32>().write(frame.0) };
    };
    let check = |frame: FrameIndex, class: Class| {
        // SAFETY: as in `write`.
        let first = unsafe { frames.bytes(frame).cast::<u32>().read() };
        // SAFETY: as in `write`.
        let last = unsafe { frames.bytes(frame).add(class.bytes() - 4).cast::<u32>().read() };
        assert_eq!((first, last), (frame.0, frame.0), "{system_page_bytes}, {class:?}");
    };
    let mut used: Vec<(FrameIndex, Class)> = Vec::new();
    let mut random = 5;
    let mut given_back = 0;
    for step in 0..30_000 {
        let class = classes[next(&mut random) as usize % classes.len()];
        // Alternately grows and shrinks.
        let grows = step / 3000 % 2 == 0;
        match next(&mut random) % 10 {
            0..=6 if grows => {
                if let Some(frame) = frames.try_alloc(class) {
                    assert!(used.iter().all(|&(other, _)| other != frame));
                    write(frame, class);
                    used.push((frame, class));
                }
            }
            7 => given_back += u64::from(frames.decommit_one(Some(class))),
            _ if !used.is_empty() => {
                let (frame, class) = used.swap_remove(next(&mut random) as usize % used.len());
                check(frame, class);
                frames.free(frame, class);
            }
            _ => {}
        }
        assert!(frames.committed_bytes() <= limit_bytes);
        if step % 500 == 0 {
            used.iter().for_each(|&(frame, class)| check(frame, class));
        }
    }
    assert!(given_back > 100, "{given_back}");
    // Frames in use occupy whole system pages.
    let groups = |used: &[(FrameIndex, Class)]| {
        let pages = used.iter().flat_map(|&(frame, class)| {
            let first = frame.0 as usize * 4096 / system_page_bytes;
            first..(frame.0 as usize * 4096 + class.bytes()).div_ceil(system_page_bytes)
        });
        pages.collect::<std::collections::HashSet<_>>().len() * system_page_bytes
    };
    while frames.decommit_one(None) {}
    used.iter().for_each(|&(frame, class)| check(frame, class));
    let (counted, all) = (frames.committed_bytes(), groups(&used) as u64);
    let metas = frames.metas_committed_bytes();
    assert_eq!(counted, all + metas, "{system_page_bytes}: {} frames in use", used.len());
    for (frame, class) in used.drain(..) {
        check(frame, class);
        frames.free(frame, class);
    }
    while frames.decommit_one(None) {}
    assert_eq!(frames.committed_bytes(), metas, "{system_page_bytes}: nothing is in use");
}

/// Goal: files of all page sizes, one after the other in one cache that is too small for them,
/// clean and dirty, keep the bytes that were written to them.
#[test]
fn files_keep_their_bytes() {
    const CACHE_BYTES: u64 = 4 << 20;
    for bytes in SIZES {
        with_system_pages(bytes, || {
            let dir = tempfile::tempdir().unwrap();
            let engine = Engine::builder().cache_bytes(CACHE_BYTES).build().unwrap();
            for round in 0..2u64 {
                for page_shift in [12u64, 16, 14] {
                    let options = OpenOptions::new().read(true).write(true).create(true);
                    let options = options.page_bytes(1 << page_shift).write_mode(WriteMode::Back);
                    let path = dir.path().join(format!("{round}-{page_shift}"));
                    let file = engine.open(&path, &options).unwrap();
                    let mut random = page_shift + round;
                    // Far apart, so that there are leaves, too.
                    let places: Vec<u64> =
                        (0..300).map(|_| (next(&mut random) % (1 << 16)) << 17).collect();
                    for &place in &places {
                        file.write_all_at(&place.to_ne_bytes(), place).unwrap();
                    }
                    for &place in &places {
                        let mut back = [0; 8];
                        file.read_exact_at(&mut back, place).unwrap();
                        assert_eq!(u64::from_ne_bytes(back), place, "{bytes}, {page_shift}");
                    }
                    let stats = engine.stats();
                    assert!(stats.memory_bytes <= CACHE_BYTES, "{stats:?}");
                    file.close().unwrap();
                    let written = std::fs::File::open(&path).unwrap();
                    for &place in &places {
                        let mut back = [0; 8];
                        std::os::unix::fs::FileExt::read_exact_at(&written, &mut back, place)
                            .unwrap();
                        assert_eq!(u64::from_ne_bytes(back), place, "{bytes}, {page_shift}");
                    }
                }
            }
            assert!(engine.stats().evictions > 0);
        });
    }
}

/// Goal: a system page of which frames cannot be formed is refused when the engine is built.
#[test]
fn other_system_pages_are_refused() {
    for bytes in [2 << 20, 512] {
        with_system_pages(bytes, || {
            let refused = Engine::builder().cache_bytes(1 << 20).build().unwrap_err();
            assert!(refused.to_string().contains("pages"), "{refused}");
        });
    }
}

/// Goal: a chunk that is taken ahead of its use is charged as a whole, with its metadata, and one
/// that the limit refuses leaves no charge. Incident: a chunk that was refused after it had been set
/// up was listed with groups whose metadata was charged already.
#[test]
fn chunks_taken_ahead_count_with_their_metadata() {
    let frames = Frames::new(64 << 20, FrameMemory::Private).unwrap();
    let charge = u64::from(CHUNK_UNITS) * frames.charge(Class::UNIT_PAGE);
    let before = frames.committed_bytes();
    let taken = std::iter::from_fn(|| frames.take_chunk(Class::UNIT_PAGE)).count() as u64;
    assert!(taken > 10, "{taken}");
    assert_eq!(frames.committed_bytes() - before, taken * charge);
    let rest = std::iter::from_fn(|| frames.try_alloc(Class::UNIT_PAGE)).count() as u64;
    let count = taken * u64::from(CHUNK_UNITS) + rest;
    assert!(
        rest > 0 && frames.committed_bytes() - before >= count * frames.charge(Class::UNIT_PAGE)
    );
}
