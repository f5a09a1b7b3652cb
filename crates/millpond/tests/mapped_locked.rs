//! Mapped backing in a process that locks all of its new mappings (`mlockall`). The only test of its process.

mod common;

use millpond::{BackendChoice, Backing};

use common::{engine, read_write, temp_dir};

/// Goal: under `mlockall` a mapped file has no resident pages but those of reads, and the mapping serves them.
#[test]
fn a_mapped_file_is_not_locked() {
    const BYTES: usize = 8 << 20;
    const PAGE: usize = 4096;
    let dir = temp_dir();
    let path = dir.path().join("locked-or-not");
    std::fs::write(&path, vec![7; BYTES]).unwrap();
    let engine = engine(4 << 20, BackendChoice::Threads);
    let file = engine.open(&path, &read_write().backing(Backing::Mapped)).unwrap();
    // SAFETY: no memory involved.
    let locks = unsafe { libc::mlockall(libc::MCL_FUTURE) } == 0;
    let mut bytes = [0; 100];
    for at in 0..20 {
        file.read_exact_at(&mut bytes, at * PAGE as u64 + 5000).unwrap();
        assert_eq!(bytes, [7; 100]);
    }
    // SAFETY: no memory involved.
    unsafe { libc::munlockall() };
    assert!(locks, "this process may lock nothing");
    assert!(engine.stats().hits > 0, "the mapping served no read");
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let (_, own) = maps.split_once("/locked-or-not").expect("it is mapped");
    let resident = own.lines().find(|line| line.starts_with("Rss:")).unwrap();
    let kib: usize = resident.split_whitespace().nth(1).unwrap().parse().unwrap();
    // A fault maps the pages around it, too, which the kernel has anyway.
    assert!(kib << 10 < BYTES / 2, "{resident}");
}
