//! Claims of pages for a fill.

use std::sync::Arc;
use std::time::Duration;

use smallvec::smallvec;

use crate::inode::CachedFile;
use crate::inode::leaves::Leaves;
use crate::read::run::{Run, try_claim};
use crate::tests::slow::Slow;
use crate::units::PageIndex;
use crate::{BackendChoice, Engine, OpenOptions};

/// Goal: of two threads that find a page empty, and have a frame for it each, one fills it
/// (page.W9). Method: one claims the page between the other's check and its claim, which threads
/// rarely do by chance.
#[test]
fn a_thread_that_was_beaten_claims_nothing() {
    const PAGE: usize = 4096;
    let engine = Engine::builder().cache_bytes(1 << 20).backend(BackendChoice::Memory);
    let engine = engine.readahead_bytes_max(0).build().unwrap();
    let slow = Slow::new(vec![1; PAGE], Duration::ZERO);
    let options = OpenOptions::new().read(true);
    let file: Arc<CachedFile> = CachedFile::on(engine.shared(), slow, &options).unwrap();
    let (page, cache, core) = (PageIndex(0), file.cache(), file.core());
    let class = core.page_class();
    let held = core.hold(cache, page, true).unwrap();
    let word = held.word(page);
    let [first, second] = [(); 2].map(|()| cache.take_page_frame(&held, page, false).unwrap());
    assert!(try_claim(&held, word, first));
    assert!(!try_claim(&held, word, second));
    assert_eq!(word.load().frame(), first);
    cache.frames.free(second, class);
    let run =
        Run { first: page, frames: smallvec![first], size: 0, prefetched: false, marker: false };
    // No bytes have been read: the page is empty again, and its leaf has been released as often as
    // it was occupied.
    run.finish(&file, &mut Leaves::new(&file), 0, &mut |_| {});
    assert!(try_claim(&held, word, cache.take_page_frame(&held, page, false).unwrap()));
    let frames = smallvec![word.load().frame()];
    Run { first: page, frames, size: 0, prefetched: false, marker: false }.finish(
        &file,
        &mut Leaves::new(&file),
        0,
        &mut |_| {},
    );
}
