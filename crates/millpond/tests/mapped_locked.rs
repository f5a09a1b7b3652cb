//! Mapped files in a process that locks all of its mappings (`mlockall`). The only test of its
//! process.

mod common;

use std::os::fd::AsFd;

use millpond::{BackendChoice, WriteMode};

use common::{engine, read_write, temp_dir};

/// Goal: under `mlockall` a mapped file has no resident pages until it is read, and reads hit.
#[test]
fn a_mapped_file_is_not_locked() {
    const BYTES: usize = 1 << 20;
    let dir = temp_dir();
    let path = dir.path().join("locked-or-not");
    std::fs::write(&path, vec![7; BYTES]).unwrap();
    let engine = engine(4 << 20, BackendChoice::Threads);
    let options = read_write().write_mode(WriteMode::Through);
    let file = engine.open(&path, &options).unwrap();
    let plain = std::fs::File::open(&path).unwrap();
    // SAFETY: no memory involved.
    let locks = unsafe { libc::mlockall(libc::MCL_FUTURE) } == 0;
    // SAFETY: no process changes the file.
    assert!(unsafe { file.map(plain.as_fd()) }, "not mapped");
    // SAFETY: no memory involved.
    unsafe { libc::munlockall() };
    assert!(locks, "this process may lock nothing");
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let (_, own) = maps.split_once("/locked-or-not").expect("it is mapped");
    let resident = own.lines().find(|line| line.starts_with("Rss:")).unwrap();
    assert_eq!(resident.split_whitespace().nth(1), Some("0"), "{resident}");
    let mut bytes = [0; 100];
    // SAFETY: `bytes` has room for so many.
    let read = unsafe { file.try_read_hit_raw(bytes.as_mut_ptr(), 100, 5000) };
    assert_eq!((read, bytes), (Some(100), [7; 100]));
}
