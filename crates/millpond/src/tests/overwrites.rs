//! Locks that concurrent overwrites of cached bytes share.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use crate::{BackendChoice, Engine, OpenOptions, WriteMode};

/// Goal: an overwrite of a cached page takes no lock that all files share. In mode back, if the
/// page is dirty already, it takes no lock of its file either. So it writes only to cache lines of
/// the overwritten pages. Method: one thread overwrites while another holds all of these locks.
/// With a shared lock it would wait forever. Incident: each overwrite took the lock of the
/// evictor's queues, and that of the free frames twice.
#[test]
fn overwrites_take_no_shared_lock() {
    for mode in [WriteMode::Back, WriteMode::Through] {
        let dir = tempfile::tempdir().unwrap();
        // Enough for full magazines, however many processors there are.
        let engine = Engine::builder().cache_bytes(512 << 20).backend(BackendChoice::Memory);
        let engine = engine.build().unwrap();
        let options = OpenOptions::new().read(true).write(true).create(true).write_mode(mode);
        let file = Arc::new(engine.open(dir.path().join("file"), &options).unwrap());
        file.write_all_at(&[1; 64 << 10], 0).unwrap();
        let (warm, is_warm) = channel();
        let (go, goes) = channel::<()>();
        let (done, is_done) = channel();
        let writer = std::thread::spawn({
            let file = Arc::clone(&file);
            move || {
                let overwrite = |len: usize| {
                    for page in 0..16 {
                        file.write_all_at(&vec![2; len], page * 4096).unwrap();
                    }
                };
                // The thread has frames in its magazine, and its slot for counting.
                overwrite(4096);
                warm.send(()).unwrap();
                goes.recv().unwrap();
                (0..100).for_each(|number| overwrite(if number % 2 == 0 { 4096 } else { 100 }));
                done.send(()).unwrap();
            }
        });
        is_warm.recv().unwrap();
        let shared = engine.shared();
        let ended = shared.cache.with_shared_locks(|| {
            let _listed = shared.flusher.state();
            let cached = &file.cached;
            let _of_the_file = (mode == WriteMode::Back)
                .then(|| (cached.writeback.state(), cached.writeback.generations.lock()));
            go.send(()).unwrap();
            // This long only if it waits.
            is_done.recv_timeout(Duration::from_secs(30))
        });
        writer.join().unwrap();
        assert!(ended.is_ok(), "an overwrite in mode {mode:?} waits for a shared lock");
        let mut page = [0; 4096];
        file.read_exact_at(&mut page, 0).unwrap();
        assert!(page.iter().all(|&byte| byte == 2));
    }
}
