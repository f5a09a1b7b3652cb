//! Leaves of page tables that go and come back, and lock-free reads meanwhile.

use std::sync::Arc;

use crate::cache::step;
use crate::cache::table::Unheld;
use crate::inode::CachedFile;
use crate::tests::slow::Slow;
use crate::units::PageIndex;
use crate::{Advice, BackendChoice, Engine, File, OpenOptions};

const PAGE: u64 = 4096;
const LEAF_PAGES: u64 = 512;
const LEAVES: u64 = 4;

/// Goal: a leaf that is recycled fails lock-free reads that went through it, and no others (epoch.V4); where
/// the generation of its slot comes around, it fails all of the file's.
/// Method: what a reader loads before the copy is compared after leaves were recycled.
/// Incident: each of them raised the file's epoch; beside random reads of a file of 512 caches a hit in 30
/// failed, and the line that size and root are in went from processor to processor.
#[test]
fn a_recycled_leaf_fails_reads_that_went_through_it_and_no_others() {
    let engine = Engine::builder().cache_bytes(4 << 20).backend(BackendChoice::Memory);
    let engine = engine.readahead_bytes_max(0).build().unwrap();
    let bytes = vec![0; (LEAVES * LEAF_PAGES * PAGE) as usize];
    let options = OpenOptions::new().read(true);
    let slow = Slow::new(bytes, std::time::Duration::ZERO);
    let cached = CachedFile::on(engine.shared(), slow, &options).unwrap();
    let file = File::new(Arc::clone(&cached), None, &options);
    let read = |page: u64| file.read_at(&mut [0; 8], page * PAGE).unwrap();
    let recycled = 2 * LEAF_PAGES + 7;
    let (core, frames) = (cached.core(), &engine.shared().cache.frames);
    read(5);
    read(recycled);
    let begun = core.epoch.begin();
    // Of the leaves alone: a page that comes back may have the word that it had.
    let is_unchanged = |pages: &[u64]| {
        let leaf = |page: &u64| core.lookup(frames, PageIndex(*page)).unwrap().leaf;
        let leaves: Vec<_> = pages.iter().map(leaf).collect();
        move || step::is_one_moment([], leaves.iter().copied(), &core.epoch, begun)
    };
    let (hit, through_it) = (is_unchanged(&[5]), is_unchanged(&[5, recycled]));
    for round in 1..LEAF_PAGES {
        file.advise(recycled * PAGE, PAGE, Advice::DontNeed).unwrap();
        assert_eq!(core.hold(frames, PageIndex(recycled), false).err(), Some(Unheld::Absent));
        assert!(!through_it());
        read(recycled);
        let has_turned = !core.epoch.is_unchanged(begun);
        assert_eq!(has_turned, round >= 128, "round {round}");
        assert_eq!(hit(), !has_turned, "round {round}");
        assert!(!through_it(), "round {round}");
    }
}
