//! Allocation of blocks for cached writes, where the file system, a resource limit or another
//! process can refuse it.

mod common;

use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use millpond::{BackendChoice, Backing, File};

use common::mount::Mount;
use common::{engine, in_own_process, same, set_limit, temp_dir, write_back};

const PAGE: usize = 4096;
const FILE_BYTES: usize = 8 << 20;

/// Overwrites random pages of the file. A sync must store all acknowledged bytes.
fn overwrite(path: &Path, backing: Backing, what: &str) {
    let engine = engine(32 << 20, BackendChoice::Threads);
    let file = engine.open(path, &write_back().backing(backing)).unwrap();
    let mut expected = vec![7; FILE_BYTES];
    let mut refused = 0;
    for page in (0..FILE_BYTES / PAGE).step_by(3) {
        match file.write_at(&[page as u8; PAGE], (page * PAGE) as u64) {
            Ok(moved) => expected[page * PAGE..page * PAGE + moved].fill(page as u8),
            Err(error) => {
                assert_eq!(error.errno(), libc::ENOSPC, "{what}: {error}");
                refused += 1;
            }
        }
    }
    println!("{what}: {refused} refused");
    file.sync_all().unwrap_or_else(|error| panic!("{what}: {error}"));
    file.close().unwrap();
    same(&std::fs::read(path).unwrap(), &expected, what);
}

/// Incident: data blocks were assumed to be reserved. On a copy-on-write file system an overwrite
/// takes new blocks: writes were acknowledged, and each later sync failed with ENOSPC.
///
/// Goal: on such a file system, too, the write that finds the disk full returns the error.
#[test]
fn overwrites_that_take_new_blocks_fail_on_a_full_disk() {
    type Make = fn(u64) -> Option<Mount>;
    let made: [(&str, Make); 3] =
        [("XFS, cloned", Mount::xfs), ("btrfs", Mount::btrfs), ("ext4", Mount::ext4)];
    for (what, make) in made {
        for backing in [Backing::Buffered, Backing::Direct] {
            let Some(mount) = make(320 << 20) else { continue };
            let path = mount.point.join("file");
            let file = std::fs::File::create(&path).unwrap();
            file.write_all_at(&vec![7; FILE_BYTES], 0).unwrap();
            file.sync_all().unwrap();
            if what.starts_with("XFS") {
                let clone = mount.point.join("clone");
                let mut cp = Command::new("cp");
                let cloned = cp.arg("--reflink=always").args([&path, &clone]).status();
                assert!(cloned.unwrap().success());
            }
            mount.fill_up(&mount.point.join("filler"));
            overwrite(&path, backing, &format!("{what}, {backing:?}"));
        }
    }
}

/// Goal: where the file system overwrites blocks in place, or no other file shares them, writes
/// wait in the cache.
#[test]
fn overwrites_in_place_wait_in_the_cache() {
    for (what, make) in [("XFS", Mount::xfs as fn(u64) -> Option<Mount>), ("ext4", Mount::ext4)] {
        let Some(mount) = make(320 << 20) else { continue };
        let path = mount.point.join("file");
        std::fs::write(&path, vec![7; FILE_BYTES]).unwrap();
        let engine = engine(32 << 20, BackendChoice::Threads);
        let file = engine.open(&path, &write_back()).unwrap();
        file.write_all_at(&[8; 3 * PAGE], PAGE as u64).unwrap();
        assert_eq!(std::fs::read(&path).unwrap()[PAGE], 7, "{what}: it went through");
        file.close().unwrap();
        assert_eq!(std::fs::read(&path).unwrap()[PAGE], 8, "{what}");
    }
}

/// Incident: only writes beyond the end of the file checked RLIMIT_FSIZE. Other writes were
/// acknowledged, and the sync failed, with the signal that ends a program.
///
/// Goal: the write itself fails, as it does in the kernel, for a file of any length.
#[test]
fn writes_beyond_the_size_limit_fail_in_longer_files() {
    let name = "writes_beyond_the_size_limit_fail_in_longer_files";
    in_own_process(name, Duration::from_secs(30), || {
        // SAFETY: nothing but the signal's disposition.
        unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
        let dir = temp_dir();
        let path = dir.path().join("file");
        std::fs::write(&path, vec![7; 2 << 20]).unwrap();
        let engine = engine(32 << 20, BackendChoice::Threads);
        let limit = (1 << 20) + 100;
        let wrote = |file: &File, len: usize, at: u64| {
            file.write_at(&vec![8; len], at).map_err(|error| error.errno())
        };
        let file = engine.open(&path, &write_back()).unwrap();
        // This page has its blocks already, from before the limit.
        assert_eq!(wrote(&file, 10, 0), Ok(10));
        assert!(set_limit(libc::RLIMIT_FSIZE, limit, libc::RLIM_INFINITY));
        let file = [file, engine.open(&path, &write_back()).unwrap()].into_iter().next_back();
        let file = file.unwrap();
        for (at, len, expected) in [
            (limit, 10, Err(libc::EFBIG)),
            (limit + 500_000, PAGE, Err(libc::EFBIG)),
            (limit - 10, 100, Ok(10)),
            (limit - 10_000, 50_000, Ok(10_000)),
            (1000, 100, Ok(100)),
        ] {
            assert_eq!(wrote(&file, len, at), expected, "{len} at {at}");
        }
        file.sync_all().unwrap();
        file.close().unwrap();
        let bytes = std::fs::read(&path).unwrap();
        assert!(bytes[limit as usize - 10_000..limit as usize].iter().all(|&byte| byte == 8));
        assert!(bytes[limit as usize..].iter().all(|&byte| byte == 7));
    });
}

/// Incident: blocks reserved ahead were released by a truncation to the file's last known length.
/// Bytes that another process appended between the two system calls were cut off.
///
/// Goal: reserved blocks are released only while no other process has the file open.
#[test]
fn reserved_blocks_are_released_only_without_other_writers() {
    let dir = temp_dir();
    let engine = engine(4 << 20, BackendChoice::Threads);
    let size = 300_000;
    for is_shared in [false, true] {
        let path = dir.path().join(is_shared.to_string());
        let file = engine.open(&path, &write_back()).unwrap();
        file.write_all_at(&vec![1; size], 0).unwrap();
        let other =
            is_shared.then(|| std::fs::OpenOptions::new().append(true).open(&path).unwrap());
        // Ahead of this.
        file.append(&[1; 2 * PAGE]).unwrap();
        file.close().unwrap();
        let metadata = std::fs::metadata(&path).unwrap();
        assert_eq!(metadata.len(), (size + 2 * PAGE) as u64);
        let beyond = (metadata.blocks() * 512).saturating_sub(metadata.len());
        match other {
            None => assert!(beyond <= PAGE as u64, "{beyond} bytes beyond the end"),
            Some(_) => {
                assert!(beyond > PAGE as u64, "the file was cut, while it is open elsewhere")
            }
        }
    }
}

/// Goal: no record is lost that another process appends while the engine closes the file.
#[test]
fn appends_race_with_closing() {
    let dir = temp_dir();
    let path = dir.path().join("file");
    let engine = engine(4 << 20, BackendChoice::Threads);
    std::fs::write(&path, vec![1; 300_000]).unwrap();
    for round in 0..200 {
        let file = engine.open(&path, &write_back()).unwrap();
        file.append(&[2; 100]).unwrap();
        file.sync_all().unwrap();
        let len = file.len().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| file.close().unwrap());
            let mut other = std::fs::OpenOptions::new().append(true).open(&path).unwrap();
            other.write_all(&[3; 50]).unwrap();
        });
        let bytes = std::fs::read(&path).unwrap();
        assert_eq!(bytes.len() as u64, len + 50, "round {round}");
        assert!(bytes[len as usize..].iter().all(|&byte| byte == 3));
    }
}
