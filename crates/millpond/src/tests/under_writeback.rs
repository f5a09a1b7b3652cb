//! Operations that change pages below the cache wait for active write-backs of these pages
//! (page.W7).

use std::thread;
use std::time::Duration;

use crate::inode::CachedFile;
use crate::tests::slow::{Kind, Slow};
use crate::units::PageIndex;
use crate::{BackendChoice, Engine, File, OpenOptions, WriteMode};

const PAGE: u64 = 4096;
const PAGES: u64 = 300;

/// Goal: the backend does not change a page while it writes it, and has the change at the end.
/// Method: the backend is blocked while it writes page 1, by a sync of that page alone; `change`
/// sleeps on the page, or reaches the backend.
fn waits_for_the_write_back(change: impl FnOnce(&File) + Send) -> Vec<u8> {
    let engine = Engine::builder().backend(BackendChoice::Memory);
    // No automatic write-back.
    let engine = engine.dirty_age_max(Duration::from_secs(3600)).build().unwrap();
    let slow = Slow::new(vec![1; (PAGES * PAGE) as usize], Duration::ZERO);
    slow.reserve();
    let options = OpenOptions::new().read(true).write(true).write_mode(WriteMode::Back);
    let cached = CachedFile::on(engine.shared(), slow.clone(), &options).unwrap();
    let file = File::new(cached.clone(), None, &options);
    file.write_all_at(&[2; PAGE as usize], PAGE).unwrap();
    slow.hold(Kind::Write, true);
    slow.hold(Kind::Change, true);
    let waits = thread::scope(|scope| {
        scope.spawn(|| file.sync_range(PAGE, PAGE).unwrap());
        slow.wait_for(Kind::Write, 1);
        scope.spawn(|| change(&file));
        let waits = loop {
            if slow.now(Kind::Change) > 0 || slow.now(Kind::Write) > 1 {
                break false;
            }
            let held = cached.core().hold(cached.cache(), PageIndex(1), false).ok();
            if held.is_some_and(|held| held.word(PageIndex(1)).load().has_waiters()) {
                break slow.now(Kind::Change) == 0 && slow.now(Kind::Write) == 1;
            }
            thread::yield_now();
        };
        slow.hold(Kind::Write, false);
        slow.hold(Kind::Change, false);
        waits
    });
    assert!(waits, "changed while it was being written");
    slow.contents()
}

#[test]
fn a_cut_waits_for_write_backs() {
    let bytes = waits_for_the_write_back(|file| file.truncate(PAGE).unwrap());
    assert_eq!(bytes.len() as u64, PAGE);
}

#[test]
fn a_hole_waits_for_write_backs() {
    let bytes = waits_for_the_write_back(|file| file.punch_hole(PAGE, 2 * PAGE).unwrap());
    assert!(bytes[PAGE as usize..][..2 * PAGE as usize].iter().all(|&byte| byte == 0));
}

/// Whole pages, and more than fit in the cache: as a direct write, it hides cached pages.
#[test]
fn a_write_past_the_cache_waits_for_write_backs() {
    let all = vec![3; (PAGES * PAGE) as usize];
    let bytes = waits_for_the_write_back(|file| file.write_all_at(&all, 0).unwrap());
    assert_eq!(bytes, all);
}
