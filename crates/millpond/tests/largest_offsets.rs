//! Files that end at the largest possible offset, 2^63 - 1.
//!
//! Incident: the last page ends beyond that offset, where the kernel refuses every transfer. Reads
//! of the page, read-ahead, and the read of the rest of a partly written page failed with EINVAL,
//! though the bytes could be read. The tests use tmpfs and XFS, as few other file systems have such files.

mod common;

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use millpond::queue::Request;
use millpond::{Advice, AsyncFile, BackendChoice, Backing, File, OpenOptions, WriteMode};

use common::mount::Mount;
use common::{block_on, engine, has_uring, read_write};

const MAX: u64 = i64::MAX as u64;
/// mkfs.xfs makes no smaller ones.
const XFS_BYTES: u64 = 300 << 20;

/// A directory on tmpfs.
#[track_caller]
fn in_memory() -> Option<tempfile::TempDir> {
    let dir = match tempfile::tempdir_in("/dev/shm") {
        Ok(dir) => dir,
        Err(error) => {
            common::skip(format_args!("/dev/shm: {error}"));
            return None;
        }
    };
    let file = std::fs::File::create(dir.path().join("probe")).unwrap();
    if let Err(error) = file.set_len(MAX) {
        common::skip(format_args!("/dev/shm has no files of 2^63 - 1 bytes: {error}"));
        return None;
    }
    Some(dir)
}

fn cases() -> Vec<(String, BackendChoice, OpenOptions)> {
    let mut back_ends = vec![("threads", BackendChoice::Threads)];
    if has_uring() {
        back_ends.push(("uring", BackendChoice::Uring));
    }
    let mut cases = Vec::new();
    for (name, backend) in back_ends {
        for backing in [Backing::Buffered, Backing::Mapped, Backing::Direct] {
            // Mapped backing is for writes through.
            let modes = match backing {
                Backing::Mapped => &[WriteMode::Through][..],
                _ => &[WriteMode::Through, WriteMode::Back],
            };
            for &mode in modes {
                for page_bytes in [4096, 65536] {
                    let options = read_write().write_mode(mode).backing(backing);
                    cases.push((
                        format!("{name}, {backing:?}, {mode:?}, pages of {page_bytes}"),
                        backend.clone(),
                        options.page_bytes(page_bytes),
                    ));
                }
            }
        }
    }
    cases
}

fn each_case(test: impl Fn(&str, &Path, &Arc<File>, &millpond::Engine)) {
    let memory = in_memory();
    // Files of tmpfs are never mapped.
    let xfs = Mount::xfs(XFS_BYTES);
    let memory = memory.as_ref().map(|dir| ("tmpfs", dir.path()));
    let xfs = xfs.as_ref().map(|mount| ("XFS", mount.point.as_path()));
    for (system, dir) in memory.into_iter().chain(xfs) {
        for (number, (name, backend, options)) in cases().into_iter().enumerate() {
            let name = format!("{system}, {name}");
            let path = dir.join(number.to_string());
            let engine = engine(4 << 20, backend);
            match engine.open(&path, &options) {
                Ok(file) => test(&name, &path, &Arc::new(file), &engine),
                Err(error) => common::skip(format_args!("{name}: {error}")),
            }
        }
    }
}

fn forget(file: &File) {
    file.write_back().unwrap();
    file.advise(0, 0, Advice::DontNeed).unwrap();
}

#[track_caller]
fn reads(name: &str, file: &Arc<File>, engine: &millpond::Engine, expected: &[u8], offset: u64) {
    let fresh = || vec![9; expected.len()];
    let mut bytes = fresh();
    assert_eq!(file.read_at(&mut bytes, offset).unwrap(), expected.len(), "{name}");
    assert_eq!(bytes, expected, "{name}");
    forget(file);
    let mut bytes = fresh();
    let (one, two) = bytes.split_at_mut(expected.len() / 2);
    let mut slices = [IoSliceMut::new(one), IoSliceMut::new(two)];
    assert_eq!(file.read_vectored_at(&mut slices, offset).unwrap(), expected.len(), "{name}");
    assert_eq!(bytes, expected, "{name}");
    forget(file);
    let queue = engine.queue(1).unwrap();
    queue.submit(Request::read(file, fresh(), offset)).unwrap();
    let (outcome, bytes) = queue.wait(1, 1, None).unwrap().remove(0).into_parts();
    assert_eq!((outcome.unwrap(), &*bytes), (expected.len(), expected), "{name}");
    forget(file);
    let view = file.view(MAX - 1, 1).unwrap();
    assert_eq!(&*view, &expected[expected.len() - 1..], "{name}");
}

/// Goal: bytes up to the last can be written and read back, in every way, cached or not.
#[test]
fn the_last_bytes_can_be_written_and_read() {
    each_case(|name, path, file, engine| {
        file.write_all_at(b"last", MAX - 4).unwrap();
        assert_eq!(file.len().unwrap(), MAX, "{name}");
        reads(name, file, engine, b"last", MAX - 4);
        // From the page before on; a hole lies between.
        let mut expected = vec![0; 100_000];
        expected.extend(b"last");
        reads(name, file, engine, &expected, MAX - 100_004);
        // A part of the last page, whose other bytes are to be read first.
        forget(file);
        file.write_vectored_at(&[IoSlice::new(b"A"), IoSlice::new(b"S")], MAX - 3).unwrap();
        file.sync_all().unwrap();
        reads(name, file, engine, b"lASt", MAX - 4);
        let mut seen = [0; 4];
        let below = std::fs::File::open(path).unwrap();
        below.read_exact_at(&mut seen, MAX - 4).unwrap();
        assert_eq!(&seen, b"lASt", "{name}");
        // The part of the file that may be mapped.
        for _ in 0..20 {
            let mut bytes = [9; 5000];
            file.read_exact_at(&mut bytes, 1).unwrap();
            assert_eq!(bytes, [0; 5000], "{name}");
        }
        // There is nothing beyond.
        assert_eq!(file.read_at(&mut [0; 1], MAX - 1).unwrap(), 1, "{name}");
        assert_eq!(file.read_at(&mut [0; 0], MAX).unwrap(), 0, "{name}");
        assert!(file.write_at(&[1; 2], MAX - 1).is_err(), "{name}");
        assert!(file.append(b"x").is_err(), "{name}");
        file.advise(MAX - 70_000, 70_000, Advice::WillNeed).unwrap();
        let mut bytes = [0; 10];
        let asynchronous = AsyncFile::from(engine.open(path, &read_write()).unwrap());
        assert_eq!(block_on(asynchronous.read_at(&mut bytes, MAX - 10)).unwrap(), 10, "{name}");
        assert_eq!(&bytes[6..], b"lASt", "{name}");
    });
}

/// Goal: the end of the file can be set to the last byte and back, and extents there can be
/// changed.
#[test]
fn the_extent_reaches_the_last_byte() {
    each_case(|name, path, file, engine| {
        file.truncate(MAX - 5).unwrap();
        assert_eq!(file.append(b"12345").unwrap(), MAX - 5, "{name}");
        reads(name, file, engine, b"\0\x0012345", MAX - 7);
        file.zero_range(MAX - 2, 2).unwrap();
        reads(name, file, engine, b"123\0\0", MAX - 5);
        file.punch_hole(MAX - 5, 1).unwrap();
        reads(name, file, engine, b"\x0023\0\0", MAX - 5);
        file.allocate(MAX - 1, 1).unwrap();
        assert_eq!(file.len().unwrap(), MAX, "{name}");
        file.write_back().unwrap();
        // Linux 6.18 computes the end of such a file of tmpfs wrongly, and finds no data.
        let below = std::fs::File::open(path).unwrap();
        // SAFETY: no memory involved.
        let at = unsafe { libc::lseek(below.as_raw_fd(), MAX as i64 - 70_000, libc::SEEK_DATA) };
        let data = file.seek_data(MAX - 70_000).unwrap();
        assert_eq!(data, u64::try_from(at).ok(), "{name}");
        assert_eq!(file.seek_hole(MAX - 1).unwrap(), Some(MAX), "{name}");
        file.truncate(MAX - 4).unwrap();
        assert_eq!(file.append(b"9").unwrap(), MAX - 4, "{name}");
        file.truncate(MAX).unwrap();
        reads(name, file, engine, b"\x009\0\0\0", MAX - 5);
        file.invalidate(MAX - 10, 10).unwrap();
        reads(name, file, engine, b"\x009\0\0\0", MAX - 5);
        file.truncate(0).unwrap();
        assert!(file.is_empty().unwrap(), "{name}");
    });
}

/// Goal: direct handles reach the last byte if they may bounce, and otherwise the last whole block.
#[test]
fn direct_handles_reach_the_last_byte() {
    let Some(dir) = in_memory() else { return };
    let engine = engine(4 << 20, BackendChoice::Auto);
    let options = read_write().direct(true).bounce(true);
    let file = match engine.open(dir.path().join("direct"), &options) {
        Ok(file) => file,
        Err(error) => return common::skip(error),
    };
    file.write_all_at(b"last", MAX - 4).unwrap();
    let mut bytes = [0; 6];
    assert_eq!(file.read_at(&mut bytes, MAX - 6).unwrap(), 6);
    assert_eq!(&bytes, b"\0\0last");
    assert!(file.append(b"x").is_err());
    file.truncate(MAX - 3).unwrap();
    assert_eq!(file.append(b"x").unwrap(), MAX - 3);
    assert_eq!(file.read_at(&mut bytes[..4], MAX - 4).unwrap(), 2);
    assert_eq!(&bytes[..2], b"lx");
}
