//! Guards of pending asynchronous reads.

use std::pin::pin;
use std::task::{Context, Poll, Waker};

use millpond_rangelock::Mode;

use crate::{AsyncFile, BackendChoice, Engine, OpenOptions};

const PAGE: u64 = 4096;

/// Goal: a read that waits for a guard gets it over all bytes that it will fill, even if the file
/// has grown in the meantime (page.W3). Otherwise the pages of a concurrent writer could be filled
/// with old bytes. Method: a read across the end waits for a conflicting guard; the file grows
/// under that guard; when it is released, no other thread can acquire a page of the new part.
#[test]
fn a_waiting_read_has_its_guard_over_the_grown_part() {
    let dir = tempfile::tempdir().unwrap();
    let engine = Engine::builder().backend(BackendChoice::Memory).build().unwrap();
    let options = OpenOptions::new().read(true).write(true).create(true);
    let file = engine.open(dir.path().join("file"), &options).unwrap();
    file.write_all_at(&[1; PAGE as usize], 0).unwrap();
    file.invalidate(0, PAGE).unwrap();
    let reader = AsyncFile::from(engine.open(dir.path().join("file"), &options).unwrap());
    let cached = file.cached();
    let mut bytes = vec![0; 16 * PAGE as usize];
    let mut read = pin!(reader.read_at(&mut bytes, 0));
    let mut cx = Context::from_waker(Waker::noop());

    let writer = cached.lock(0, 16 * PAGE, Mode::Exclusive);
    assert!(read.as_mut().poll(&mut cx).is_pending());
    cached.backing.set_len(16 * PAGE).unwrap();
    cached.set_size(16 * PAGE);
    drop(writer);
    let range = cached.pages(5 * PAGE, 7 * PAGE);
    assert!(
        cached.ranges.try_lock(range, Mode::Exclusive).is_none(),
        "a page in the reader's hands"
    );
    let moved = loop {
        match read.as_mut().poll(&mut cx) {
            Poll::Ready(moved) => break moved.unwrap(),
            Poll::Pending => std::thread::yield_now(),
        }
    };
    assert_eq!(moved, 16 * PAGE as usize);
}
