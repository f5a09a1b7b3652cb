//! A program with thread-local variables that do not fit in a thread's usual stack.
//!
//! The C library places them in the stack of each thread. Incident: it refused the stack of the engine's threads, so
//! that dirty pages were never written back.

mod common;

use std::cell::Cell;
use std::hint::black_box;
use std::time::{Duration, Instant};

use millpond::{AsyncFile, BackendChoice, Engine, WriteMode};

use common::{block_on, read_write, temp_dir};

thread_local! {
    static LARGE: Cell<[u8; 3 << 20]> = const { Cell::new([0; 3 << 20]) };
}

#[test]
fn threads_are_started_beside_large_thread_locals() {
    // The test's own thread has hardly any stack.
    let thread = std::thread::Builder::new().stack_size(16 << 20).spawn(use_threads).unwrap();
    thread.join().unwrap();
}

fn use_threads() {
    LARGE.with(|large| {
        black_box(large.as_ptr());
    });
    let dir = temp_dir();
    let path = dir.path().join("file");
    let builder = Engine::builder().cache_bytes(1 << 20).backend(BackendChoice::Threads);
    let engine = builder.dirty_age_max(Duration::from_millis(20)).build().unwrap();
    let file = engine.open(&path, &read_write().write_mode(WriteMode::Back)).unwrap();
    file.write_all_at(&[7; 4096], 0).unwrap();
    let end = Instant::now() + Duration::from_secs(30);
    while std::fs::read(&path).unwrap() != [7; 4096] {
        assert!(Instant::now() < end, "no thread writes dirty pages back");
        std::thread::sleep(Duration::from_millis(5));
    }
    let task = AsyncFile::from(file);
    assert_eq!(block_on(task.write_at(&[8; 100], 5)).unwrap(), 100);
}
