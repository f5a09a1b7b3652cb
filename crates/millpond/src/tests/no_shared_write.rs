//! A cached read writes no shared memory, which is shown by write-protecting that memory.

use std::io::IoSliceMut;
use std::sync::Barrier;

use crate::{Advice, BackendChoice, Engine, File, OpenOptions};

/// Reads of every shape, which must all be hits.
fn read_hits(file: &File, len: u64, seed: u64, reads: u64) {
    let page_bytes = 4096u64;
    let mut random = seed;
    let mut bytes = vec![0; 64 * page_bytes as usize];
    for number in 0..reads {
        random = random.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        let at = (random >> 33) % len;
        let shape = number % 16;
        let wanted = match shape {
            0 => 3 * page_bytes + 17,
            1 => 63 * page_bytes,
            2 => 0,
            3 => 100_000_000,
            _ => page_bytes,
        };
        let wanted = wanted.min(bytes.len() as u64) as usize;
        let at = match shape {
            // At the end of the file, across it, and beyond it.
            4 => len - 10,
            5 => len,
            6 => len + 1_000_000,
            // Whole pages, else one more than 64 may be touched.
            3 => at / page_bytes * page_bytes,
            _ => at,
        };
        let moved = if shape == 7 {
            let (head, rest) = bytes[..3 * page_bytes as usize].split_at_mut(100);
            let (middle, tail) = rest.split_at_mut(5000);
            let mut slices = [head, middle, &mut [], tail].map(IoSliceMut::new);
            file.read_vectored_at(&mut slices, at).unwrap()
        } else {
            file.read_at(&mut bytes[..wanted], at).unwrap()
        };
        if moved > 0 {
            assert_eq!(bytes[0], (at / 4096) as u8 ^ at as u8);
        }
    }
}

/// Goal: cached reads, including reads of many pages, vectored, at the end of the file, and of
/// blobs, write neither frames nor tables nor file objects nor their metadata. So they scale, and
/// share no cache line that is written. Method: after a warm-up, which sets the REFERENCED bits,
/// all of that memory is read-only, and two threads read a million times each. A write would cause
/// a SIGSEGV.
#[test]
fn cached_reads_write_no_shared_memory() {
    const LEN: u64 = (4 << 20) + 123;
    let dir = tempfile::tempdir().unwrap();
    let engine =
        Engine::builder().cache_bytes(16 << 20).backend(BackendChoice::Threads).build().unwrap();
    let options = OpenOptions::new().read(true).write(true).create(true);
    let file = engine.open(dir.path().join("file"), &options).unwrap();
    let bytes: Vec<u8> = (0..LEN).map(|at| (at / 4096) as u8 ^ at as u8).collect();
    // The same for a blob, whose bytes its owner supplied.
    let blob = engine.blob(LEN, 4096).unwrap();
    for fill in blob.claim(0..LEN).fills {
        let range = fill.range();
        fill.bring(&bytes[range.start as usize..range.end as usize]);
    }
    file.advise(0, 0, Advice::Random).unwrap();
    file.write_all_at(&bytes, 0).unwrap();
    let mut back = vec![0; LEN as usize];
    for _ in 0..3 {
        for (number, part) in back.chunks_mut(64 * 4096).enumerate() {
            let at = number as u64 * 64 * 4096;
            assert_eq!(file.read_at(part, at).unwrap(), part.len());
        }
    }
    assert!(back == bytes);
    let mut of_blob = Vec::new();
    (0..3).for_each(|_| assert!(blob.try_read(&mut of_blob, 0..LEN)));
    assert!(of_blob.chunks(LEN as usize).all(|all| all == bytes));
    let reads = if cfg!(debug_assertions) { 1_000_000 / 4 } else { 1_000_000 };
    let before = engine.stats();
    let barrier = Barrier::new(3);
    let frames = &engine.shared().cache.frames;
    std::thread::scope(|scope| {
        for thread in 0..2u64 {
            let (file, blob, bytes, barrier) = (&file, &blob, &bytes, &barrier);
            scope.spawn(move || {
                // Takes the thread's slot for counting.
                read_hits(file, LEN, thread, 100);
                barrier.wait();
                barrier.wait();
                read_hits(file, LEN, thread, reads);
                let mut got = Vec::new();
                for at in (0..LEN - 5000).step_by(1001) {
                    got.clear();
                    assert!(blob.try_read(&mut got, at..at + 5000));
                    assert_eq!(got, bytes[at as usize..at as usize + 5000]);
                }
            });
        }
        barrier.wait();
        frames.protect(true);
        barrier.wait();
    });
    frames.protect(false);
    let after = engine.stats();
    assert_eq!(after.misses, before.misses);
    assert!(after.hits > before.hits + 2 * reads);
    file.write_all_at(b"still writable", 0).unwrap();
}
