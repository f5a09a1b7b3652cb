//! Operations that end in bounded time although other threads write as fast as they can.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::thread;
use std::time::Duration;

use crate::inode::CachedFile;
use crate::tests::slow::{Kind, Slow};
use crate::{BackendChoice, Engine, File, OpenOptions};

const PAGE: u64 = 4096;
/// The maximum number of writes during the operation: far more than it should see.
const WRITES_MAX: u64 = 60;

struct Case {
    slow: Arc<Slow>,
    cached: Arc<CachedFile>,
    options: OpenOptions,
    _engine: Engine,
}

impl Case {
    fn new() -> Case {
        let builder = Engine::builder().cache_bytes(16 << 20).backend(BackendChoice::Memory);
        let engine = builder.build().unwrap();
        let slow = Slow::new(Vec::new(), Duration::ZERO);
        let options = OpenOptions::new().read(true).write(true);
        let cached = CachedFile::on(engine.shared(), slow.clone(), &options).unwrap();
        Case { slow, cached, options, _engine: engine }
    }

    fn file(&self) -> File {
        File::new(Arc::clone(&self.cached), None, &self.options)
    }

    /// Runs `operation` concurrently with two threads that write page after page at the end of the
    /// file, of which one always has a guard, and the other waits for one. Returns the number of
    /// writes that ended in between.
    fn concurrent_writes(&self, operation: impl FnOnce(&File) + Send) -> u64 {
        let (stop, ended) = (AtomicBool::new(false), AtomicBool::new(false));
        self.slow.hold(Kind::Write, true);
        let mut writes = 0;
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let file = self.file();
                    while !stop.load(SeqCst) {
                        let end = file.len().unwrap();
                        file.write_all_at(&[1; PAGE as usize], end + PAGE).unwrap();
                    }
                });
            }
            self.slow.wait_for(Kind::Write, 1);
            let running = scope.spawn(|| {
                operation(&self.file());
                ended.store(true, SeqCst);
            });
            while !running.is_finished() && writes < WRITES_MAX {
                // Time for the other threads to wait. The fewer of them do, the sooner it ends.
                thread::sleep(Duration::from_millis(10));
                self.slow.release_one(Kind::Write);
                writes += 1;
            }
            let is_over = ended.load(SeqCst);
            stop.store(true, SeqCst);
            self.slow.hold(Kind::Write, false);
            running.join().unwrap();
            assert!(is_over, "still waiting after {writes} writes of other threads");
        });
        writes
    }
}

/// Goal: an append is granted its guard after the operations that were there before it. Incident:
/// an append requested a guard over its own bytes at the end that it had seen, and started over
/// when the end had moved by the time it was granted. With two concurrent writers that extended the
/// file, it never succeeded.
#[test]
fn appends_end_despite_extending_writers() {
    let case = Case::new();
    let writes = case.concurrent_writes(|file| {
        for at in 0..3 {
            let offset = file.append(&[2; 3]).unwrap();
            assert!(offset > at);
        }
    });
    assert!(writes < WRITES_MAX);
}

/// The same for other operations with a guard from the end on.
#[test]
fn length_changes_end_despite_extending_writers() {
    let changes: [fn(&File); 4] = [
        |file| file.truncate(10).unwrap(),
        |file| file.truncate(file.len().unwrap() + 100 * PAGE).unwrap(),
        |file| file.write_all_at(&[3; 10], file.len().unwrap() + 5).unwrap(),
        // The backend refuses: the test is about the waiting.
        |file| drop(file.allocate(0, file.len().unwrap() + 100 * PAGE)),
    ];
    for change in changes {
        Case::new().concurrent_writes(change);
    }
}

/// Goal: appends of several threads are served in order, and neither mix nor leave gaps.
#[test]
fn appends_have_their_turns() {
    let case = Case::new();
    thread::scope(|scope| {
        for who in 1..=4u8 {
            let file = case.file();
            scope.spawn(move || {
                for _ in 0..200 {
                    file.append(&[who; 100]).unwrap();
                }
            });
        }
    });
    let bytes = case.slow.contents();
    assert_eq!(bytes.len(), 4 * 200 * 100);
    assert!(bytes.chunks(100).all(|record| record.iter().all(|&byte| byte == record[0])));
}
