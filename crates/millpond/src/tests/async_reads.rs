//! What an asynchronous read holds while it is pending.

use std::pin::pin;
use std::task::{Context, Poll, Waker};

use millpond_rangelock::Mode;

use crate::{AsyncFile, BackendChoice, Engine, OpenOptions};

const PAGE: u64 = 4096;

/// Goal: a read that waits for a guard gets it over all that it will fill, also if the file has grown
/// meanwhile (page.W3); else a writer beside it could have its pages filled with old bytes.
/// Method: a read across the end waits for a guard that is in its way; the file grows under that; when
/// it is released, nobody else can have a page of the part that is new.
#[test]
fn a_read_that_waits_has_its_guard_over_what_the_file_grew_by() {
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
