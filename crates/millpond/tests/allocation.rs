//! Space for what is written later: where the file system, a limit or another process has a say in it.

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

/// Overwrites pages of the file here and there. What was acknowledged must be stored by a sync.
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

/// What lies in data was taken for reserved. On a file system that copies on write, overwriting it takes
/// new blocks: writes were acknowledged, and the sync failed for want of space, again and again.
///
/// Goal: a full disk is told of by the write, there, too.
#[test]
fn overwriting_is_told_of_a_full_disk_where_it_takes_new_blocks() {
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

/// Goal: where blocks are overwritten in place, or are shared by nobody, writes wait in the cache.
#[test]
fn overwriting_waits_where_it_takes_no_new_blocks() {
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

/// A limit on the size of files was looked at by writes beyond the end only: others were acknowledged, and
/// failed at the sync, with the signal that ends a program.
///
/// Goal: the write is told, as by the kernel, however long the file is.
#[test]
fn writes_beyond_the_limit_are_told_of_it_in_longer_files() {
    let name = "writes_beyond_the_limit_are_told_of_it_in_longer_files";
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
        // Known to have its blocks, from before the limit.
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

/// Space that was reserved ahead was given back by cutting the file to the length that it had just had:
/// what another process appended between the two system calls was cut off.
///
/// Goal: it is given back only while nobody else has the file open.
#[test]
fn space_is_given_back_only_where_nobody_can_append() {
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

/// Goal: what others append while a file is closed is there in the end.
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
