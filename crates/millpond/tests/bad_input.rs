//! Bad input: each errno that POSIX gives, with the operation, offset and length in the message.

mod common;
#[path = "bad_input/external.rs"]
mod external;

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

use millpond::{Advice, BackendChoice, Backing, Engine, Error, File, Op, OpenOptions, Result};

use common::{back_ends, engine, in_own_process, read_write, temp_dir};

const MAX: u64 = i64::MAX as u64;

#[track_caller]
fn refused<T>(outcome: Result<T>, errno: i32, words: &[&str]) -> Error {
    let Err(error) = outcome else { panic!("no error; expected {words:?}") };
    let text = error.to_string();
    assert_eq!(error.errno(), errno, "{text}");
    for word in words {
        assert!(text.contains(word), "{word:?} is not in {text:?}");
    }
    error
}

fn threads_engine() -> Engine {
    engine(1 << 20, BackendChoice::Threads)
}

fn with_content(dir: &Path, content: &[u8]) -> std::path::PathBuf {
    let path = dir.join("file");
    std::fs::write(&path, content).unwrap();
    path
}

fn read_only() -> OpenOptions {
    OpenOptions::new().read(true)
}

fn read(file: &File, len: usize, offset: u64) -> Result<Vec<u8>> {
    let mut bytes = vec![0; len];
    let moved = file.read_at(&mut bytes, offset)?;
    bytes.truncate(moved);
    Ok(bytes)
}

/// Every operation on a range that changes the file's extent, and its name in errors.
fn extents(file: &File, offset: u64, len: u64) -> [(Result<()>, &'static str); 3] {
    [
        (file.punch_hole(offset, len), "punch"),
        (file.zero_range(offset, len), "zero"),
        (file.allocate(offset, len), "allocate"),
    ]
}

#[test]
fn ranges_past_the_largest_offset() {
    let dir = temp_dir();
    let path = with_content(dir.path(), b"pond");
    for (_, backend) in back_ends(1) {
        let engine = engine(1 << 20, backend);
        let file = engine.open(&path, &read_write()).unwrap();
        for (offset, len) in
            [(MAX, 1), (MAX - 3, 4 + 1), (MAX + 1, 0), (u64::MAX, 1), (u64::MAX, 0)]
        {
            let place = format!("{len} bytes at offset {offset}");
            let mut bytes = vec![0; len];
            refused(file.read_at(&mut bytes, offset), libc::EINVAL, &["read", &place]);
            refused(file.read_exact_at(&mut bytes, offset), libc::EINVAL, &["read", &place]);
            let mut slices = [IoSliceMut::new(&mut bytes)];
            refused(file.read_vectored_at(&mut slices, offset), libc::EINVAL, &["read", &place]);
            refused(file.write_at(&bytes, offset), libc::EINVAL, &["write", &place]);
            let slices = [IoSlice::new(&bytes)];
            refused(file.write_vectored_at(&slices, offset), libc::EINVAL, &["write", &place]);
            refused(file.view(offset, len), libc::EINVAL, &["view", &place]);
            let len = len as u64;
            let advised = file.advise(offset, len, Advice::WillNeed);
            refused(advised, libc::EINVAL, &["advise", &place]);
            refused(file.invalidate(offset, len), libc::EINVAL, &[&place]);
            for (outcome, name) in extents(&file, offset, len) {
                let error = refused(outcome, libc::EINVAL, &[name, &place]);
                assert!(matches!(error, Error::InvalidRange { .. }), "{error}");
            }
        }
        for offset in [MAX + 1, u64::MAX] {
            refused(file.seek_data(offset), libc::EINVAL, &["seek", &offset.to_string()]);
            refused(file.seek_hole(offset), libc::EINVAL, &["seek", &offset.to_string()]);
        }
        for len in [MAX + 1, u64::MAX] {
            let error = refused(file.truncate(len), libc::EINVAL, &["truncate", &len.to_string()]);
            assert!(matches!(error, Error::InvalidRange { op: Op::Truncate, .. }));
        }
        assert_eq!(read(&file, 10, 0).unwrap(), b"pond");
        assert_eq!(file.len().unwrap(), 4);
    }
}

/// Goal: the largest valid offsets are accepted. If the file system does not support one, its own
/// error is returned.
#[test]
fn ranges_up_to_the_largest_offset() {
    let dir = temp_dir();
    let path = with_content(dir.path(), b"pond");
    let engine = threads_engine();
    let file = engine.open(&path, &read_write()).unwrap();
    for page_end in [MAX, MAX - 1, MAX - 5000, 1 << 62] {
        assert_eq!(read(&file, 0, page_end).unwrap(), b"");
        assert_eq!(read(&file, 10.min((MAX - page_end) as usize), page_end).unwrap(), b"");
        assert_eq!(&*file.view(page_end, 0).unwrap(), b"");
        assert_eq!(file.write_at(b"", page_end).unwrap(), 0);
        for advice in [Advice::WillNeed, Advice::DontNeed, Advice::Normal] {
            file.advise(page_end, 0, advice).unwrap();
        }
        file.invalidate(page_end, 0).unwrap();
        file.invalidate(page_end, MAX - page_end).unwrap();
        if page_end < MAX {
            let words = ["write", "1 bytes", &page_end.to_string()];
            refused(file.write_at(b"x", page_end), libc::EFBIG, &words);
        }
        refused(file.truncate(page_end), libc::EFBIG, &["truncate", &page_end.to_string()]);
        // Beyond the end there is nothing to clear.
        file.punch_hole(page_end - 1, 1).unwrap();
        file.zero_range(page_end - 1, 1).unwrap();
        file.punch_hole(4, page_end - 4).unwrap();
        file.zero_range(4, page_end - 4).unwrap();
        let words = ["allocate", "1 bytes", &(page_end - 1).to_string()];
        refused(file.allocate(page_end - 1, 1), libc::EFBIG, &words);
        assert_eq!(file.seek_data(page_end).unwrap(), None);
        assert_eq!(file.seek_hole(page_end).unwrap(), None);
        assert_eq!(file.len().unwrap(), 4);
    }
    file.invalidate(0, MAX).unwrap();
    file.advise(0, MAX, Advice::DontNeed).unwrap();
    file.advise(0, MAX, Advice::WillNeed).unwrap();
    assert_eq!(read(&file, 10, 0).unwrap(), b"pond");
    // Offsets that the file system supports: sparse files with data far from the start.
    for far in [1u64 << 40, (1 << 43) + 12_345] {
        file.write_all_at(b"far out", far).unwrap();
        assert_eq!(file.len().unwrap(), far + 7);
        assert_eq!(read(&file, 100, far - 3).unwrap(), b"\0\0\0far out");
        assert_eq!(read(&file, 4, 0).unwrap(), b"pond");
    }
    file.punch_hole(3, MAX - 3).unwrap();
    assert_eq!(file.len().unwrap(), (1 << 43) + 12_345 + 7);
    assert_eq!(read(&file, 9, (1 << 43) + 12_345).unwrap(), [0; 7]);
    assert_eq!(read(&file, 4, 0).unwrap(), b"pon\0");
    file.truncate(2).unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), b"po");
}

#[test]
fn reads_at_and_past_the_end_and_of_nothing() {
    let dir = temp_dir();
    let path = with_content(dir.path(), &[7; 5000]);
    for (name, backend) in back_ends(1) {
        for hit_path in [true, false] {
            let engine = engine(1 << 20, backend.clone());
            engine.set_hit_path(hit_path);
            let file = engine.open(&path, &read_write()).unwrap();
            for _ in 0..2 {
                assert_eq!(read(&file, 10, 4995).unwrap(), [7; 5], "{name}");
                assert_eq!(read(&file, 10_000, 4096).unwrap(), [7; 904]);
                assert_eq!(read(&file, 10_000, 1).unwrap(), [7; 4999]);
                for offset in [5000, 5001, 8192, 1 << 40] {
                    assert_eq!(read(&file, 10, offset).unwrap(), b"");
                    assert_eq!(read(&file, 100_000, offset).unwrap(), b"");
                    assert_eq!(file.view(offset, 10).unwrap().len(), 0);
                }
                assert_eq!(read(&file, 0, 0).unwrap(), b"");
                assert_eq!(file.read_vectored_at(&mut [], 0).unwrap(), 0);
                let mut none = [IoSliceMut::new(&mut []), IoSliceMut::new(&mut [])];
                assert_eq!(file.read_vectored_at(&mut none, 100).unwrap(), 0);
                assert_eq!(file.write_at(&[], 100_000).unwrap(), 0);
                assert_eq!(file.write_vectored_at(&[], 100_000).unwrap(), 0);
                assert_eq!(file.write_vectored_at(&[IoSlice::new(&[])], 100_000).unwrap(), 0);
                assert_eq!(file.append(&[]).unwrap(), 5000);
                assert_eq!(file.append_vectored(&[]).unwrap(), 5000);
                assert_eq!(file.view(100, 0).unwrap().len(), 0);
                let error = file.read_exact_at(&mut [0; 10], 4995).unwrap_err();
                assert!(matches!(error, Error::Io { op: Op::Read, offset: 4995, len: 10, .. }));
                assert_eq!(std::io::Error::from(error).kind(), std::io::ErrorKind::UnexpectedEof);
            }
            for (outcome, name) in extents(&file, 100, 0) {
                let error = refused(outcome, libc::EINVAL, &[name, "offset 100", "at least 1"]);
                assert!(matches!(error, Error::InvalidInput { .. }), "{error}");
            }
            assert_eq!(file.len().unwrap(), 5000, "nothing of that extends the file");
        }
    }
}

#[test]
fn files_that_can_not_be_opened() {
    let dir = temp_dir();
    let path = with_content(dir.path(), b"pond");
    let engine = threads_engine();
    let missing = dir.path().join("missing");
    refused(engine.open(&missing, &read_only()), libc::ENOENT, &["open"]);
    refused(engine.open(missing.join("more"), &read_write()), libc::ENOENT, &["open"]);
    refused(engine.open(path.join("more"), &read_only()), libc::ENOTDIR, &["open"]);
    let text = refused(engine.open(dir.path(), &read_only()), libc::EISDIR, &["open", "directory"]);
    assert!(matches!(text, Error::NotRegular { directory: true }));
    let write_only = OpenOptions::new().write(true);
    refused(engine.open(dir.path(), &write_only), libc::EISDIR, &["open"]);
    refused(engine.open("/dev/null", &read_only()), libc::ENOTSUP, &["open", "regular"]);
    let fifo = dir.path().join("fifo");
    let c_path = std::ffi::CString::new(fifo.to_str().unwrap()).unwrap();
    // SAFETY: a valid C string.
    assert_eq!(unsafe { libc::mkfifo(c_path.as_ptr(), 0o600) }, 0);
    // No process has the other end of the FIFO open: these opens must not wait for one.
    refused(engine.open(&fifo, &read_only()), libc::ENOTSUP, &["open", "regular"]);
    refused(engine.open(&fifo, &write_only), libc::ENXIO, &["open"]);
    refused(engine.open(&fifo, &read_write()), libc::ENOTSUP, &["open", "regular"]);
    refused(engine.open(&path, &read_write().create_new(true)), libc::EEXIST, &["open"]);
    let long = dir.path().join("x".repeat(300));
    refused(engine.open(long, &read_write()), libc::ENAMETOOLONG, &["open"]);
    assert_eq!(std::fs::read(&path).unwrap(), b"pond");
    // The failed opens have left nothing behind.
    let fresh = engine.open(dir.path().join("new"), &read_write().create_new(true)).unwrap();
    fresh.write_all_at(b"new", 0).unwrap();
}

#[test]
fn options_that_contradict_each_other_or_the_file() {
    let dir = temp_dir();
    let path = with_content(dir.path(), b"pond");
    let engine = threads_engine();
    let refuse = |options: &OpenOptions, words: &[&str]| {
        let error = refused(engine.open(&path, options), libc::EINVAL, words);
        assert!(matches!(error, Error::InvalidInput { op: Op::Open, .. }), "{error}");
    };
    refuse(&OpenOptions::new(), &["open", "read"]);
    refuse(&read_only().create(true), &["open", "create"]);
    refuse(&read_only().create_new(true), &["open", "create"]);
    refuse(&read_only().truncate(true), &["open", "truncate"]);
    refuse(&OpenOptions::new().append(true).truncate(true), &["open", "truncate"]);
    for page_bytes in [0, 1, 512, 4095, 4097, 12288, 65535, 131_072, u32::MAX] {
        refuse(&read_only().page_bytes(page_bytes), &["open", &page_bytes.to_string(), "65536"]);
    }
    let file = engine.open(&path, &read_only().page_bytes(8192)).unwrap();
    refuse(&read_only().page_bytes(4096), &["open", "8192"]);
    refuse(&read_only().page_bytes(65536), &["open", "8192"]);
    // Options that are not set contradict nothing.
    let other = engine.open(&path, &read_only()).unwrap();
    assert_eq!(read(&other, 10, 0).unwrap(), b"pond");
    drop((file, other));
    engine.open(&path, &read_only().page_bytes(4096)).unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), b"pond");
}

#[test]
fn limits_that_no_engine_can_keep() {
    for bytes in [0, 1, 4096, 16383, (512 << 30) + 1, u64::MAX] {
        let outcome = Engine::builder().cache_bytes(bytes).build();
        let error = refused(outcome, libc::EINVAL, &["build", &bytes.to_string()]);
        assert!(matches!(error, Error::InvalidInput { op: Op::Build, .. }));
    }
    // The smallest and the largest.
    for bytes in [16384, 512 << 30] {
        let engine = Engine::builder().cache_bytes(bytes).build().unwrap();
        let dir = temp_dir();
        for page_bytes in [4096, 65536] {
            let path = dir.path().join(page_bytes.to_string());
            let file = engine.open(path, &read_write().page_bytes(page_bytes)).unwrap();
            file.write_all_at(&[3; 300_000], 0).unwrap();
            assert_eq!(read(&file, 400_000, 0).unwrap(), [3; 300_000]);
            assert!(engine.stats().memory_bytes <= bytes);
        }
    }
}

#[test]
fn handles_do_only_what_they_were_opened_for() {
    let dir = temp_dir();
    let path = with_content(dir.path(), b"pond");
    for (_, backend) in back_ends(1) {
        let engine = engine(1 << 20, backend);
        // A third handle with all permissions gives the others none.
        let _all = engine.open(&path, &read_write()).unwrap();
        let reader = engine.open(&path, &read_only()).unwrap();
        let writer = engine.open(&path, &OpenOptions::new().write(true)).unwrap();
        let appender = engine.open(&path, &OpenOptions::new().append(true)).unwrap();
        refused(reader.write_at(b"xyz", 5), libc::EBADF, &["write", "3 bytes at offset 5"]);
        refused(reader.append(b"xyz"), libc::EBADF, &["write", "3 bytes"]);
        refused(reader.truncate(0), libc::EBADF, &["truncate"]);
        for (outcome, name) in extents(&reader, 1, 2) {
            let error = refused(outcome, libc::EBADF, &[name, "2 bytes at offset 1"]);
            assert!(matches!(error, Error::NotPermitted { .. }), "{error}");
        }
        for file in [&reader, &writer, &appender] {
            assert_eq!(file.seek_data(1).unwrap(), Some(1));
            assert_eq!(file.seek_hole(1).unwrap(), Some(4));
        }
        for file in [&writer, &appender] {
            refused(read(file, 3, 1), libc::EBADF, &["read", "3 bytes at offset 1"]);
            refused(file.view(1, 3), libc::EBADF, &["view", "3 bytes at offset 1"]);
            let mut bytes = [0; 3];
            // SAFETY: `bytes` is valid for writes of its length.
            let hit = unsafe { file.raw().try_read_hit(bytes.as_mut_ptr(), 3, 0) };
            assert_eq!(hit, None);
        }
        assert_eq!(read(&reader, 10, 0).unwrap(), b"pond");
    }
}

/// Goal: writes to a file that only a write handle has open are correct, without ever reading it.
/// Method: unaligned writes into the middle, across pages and at the end; compared by std.
#[test]
fn a_file_may_be_open_for_writing_only() {
    for backing in [Backing::Buffered, Backing::Mapped, Backing::Direct] {
        let dir = temp_dir();
        let mut expected: Vec<u8> = (0..20_000u32).map(|i| i as u8).collect();
        let path = with_content(dir.path(), &expected);
        let engine = threads_engine();
        let options = OpenOptions::new().write(true).backing(backing);
        let file = engine.open(&path, &options).unwrap();
        for (at, len) in [(10, 10), (4000, 5000), (8192, 4096), (19_990, 100), (30_000, 5)] {
            file.write_all_at(&vec![0xEE; len], at as u64).unwrap();
            expected.resize(expected.len().max(at + len), 0);
            expected[at..at + len].fill(0xEE);
        }
        file.truncate(29_999).unwrap();
        expected.truncate(29_999);
        assert_eq!(file.append(b"end").unwrap(), 29_999);
        expected.extend(b"end");
        assert!(std::fs::read(&path).unwrap() == expected, "{backing:?}");
        // A reader that comes later reads through its own descriptor.
        let reader = engine.open(&path, &read_only()).unwrap();
        assert!(read(&reader, 50_000, 0).unwrap() == expected, "{backing:?}");
    }
}

/// Method: root may write to every file, so the process changes to another user first.
#[test]
fn a_read_only_file_opened_for_writing() {
    let name = "a_read_only_file_opened_for_writing";
    in_own_process(name, Duration::from_secs(10), || {
        let dir = temp_dir();
        let path = with_content(dir.path(), b"pond");
        let mode = |mode| std::os::unix::fs::PermissionsExt::from_mode(mode);
        std::fs::set_permissions(dir.path(), mode(0o755)).unwrap();
        std::fs::set_permissions(&path, mode(0o444)).unwrap();
        if rustix::process::geteuid().is_root() {
            // SAFETY: no memory is concerned.
            assert_eq!(unsafe { libc::seteuid(65534) }, 0);
        }
        if let Err(error) = std::fs::File::open(&path) {
            // SAFETY: no memory is concerned. The test's user must be able to report the skip.
            unsafe { libc::seteuid(libc::getuid()) };
            common::skip(format_args!(
                "other users can't enter the directory of the tests: {error}"
            ));
        } else {
            let engine = threads_engine();
            refused(engine.open(&path, &read_write()), libc::EACCES, &["open"]);
            let write_only = OpenOptions::new().write(true);
            refused(engine.open(&path, &write_only), libc::EACCES, &["open"]);
            let file = engine.open(&path, &read_only()).unwrap();
            assert_eq!(read(&file, 9, 0).unwrap(), b"pond");
        }
        // SAFETY: as above; back to a user that may remove the directory, if we were root.
        unsafe { libc::seteuid(libc::getuid()) };
    });
}

/// Goal: a write across the size limit is short, and the next one fails with EFBIG. The cache holds
/// the bytes that were written.
/// Method: RLIMIT_FSIZE in a child process.
#[test]
fn a_size_limit_in_the_way() {
    in_own_process("a_size_limit_in_the_way", Duration::from_secs(30), || {
        // SAFETY: ignoring a signal; else it would end the process.
        unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
        let soft = 50_000;
        assert!(common::set_limit(libc::RLIMIT_FSIZE, soft, soft));
        for (name, backend) in back_ends(1) {
            if matches!(name, "memory" | "sim") {
                continue;
            }
            for cache_bytes in [16 << 10, 4 << 20] {
                let dir = temp_dir();
                let path = dir.path().join("file");
                let engine = engine(cache_bytes, backend.clone());
                let file = engine.open(&path, &read_write()).unwrap();
                full(&file, &path, soft, libc::EFBIG, name);
                refused(file.truncate(soft + 1), libc::EFBIG, &["truncate"]);
                assert_eq!(file.len().unwrap(), soft);
            }
        }
    });
}

/// Fills the file up to `room` bytes, beyond which the system fails with `errno`.
fn full(file: &File, path: &Path, room: u64, errno: i32, name: &str) {
    let src: Vec<u8> = (0..room as usize * 2).map(|i| (i / 4096) as u8 + 1).collect();
    file.write_all_at(&src[..1000], 0).unwrap();
    let moved = file.write_at(&src[1000..], 1000).unwrap() as u64;
    assert_eq!(moved, room - 1000, "{name}");
    assert_eq!(file.len().unwrap(), room);
    refused(file.write_at(b"x", room), errno, &["write", "1 bytes", &room.to_string()]);
    refused(file.append(b"xyz"), errno, &["write", "3 bytes", &room.to_string()]);
    assert!(read(file, src.len(), 0).unwrap() == src[..room as usize], "{name}");
    // Across the limit, within a page.
    file.write_all_at(b"abc", room - 3).unwrap();
    assert_eq!(file.write_at(&[9; 10_000], room - 2).unwrap(), 2, "{name}");
    let mut expected = src[..room as usize].to_vec();
    expected[room as usize - 3..].copy_from_slice(&[b'a', 9, 9]);
    assert!(read(file, src.len(), 0).unwrap() == expected, "{name}");
    file.invalidate(0, MAX).unwrap();
    assert!(read(file, src.len(), 0).unwrap() == expected, "{name}");
    assert!(std::fs::read(path).unwrap() == expected, "{name}");
}

/// Goal: as above, where the device is full.
/// Method: a small tmpfs, in a mount namespace of the test's own.
#[test]
fn a_full_device() {
    in_own_process("a_full_device", Duration::from_secs(30), || {
        let dir = temp_dir();
        let target = std::ffi::CString::new(dir.path().to_str().unwrap()).unwrap();
        let size = 64 * 4096u64;
        let data = std::ffi::CString::new(format!("size={size}")).unwrap();
        // SAFETY: valid C strings; the namespace is this process's own.
        let mounted = unsafe {
            libc::unshare(libc::CLONE_NEWNS) == 0
                && libc::mount(
                    std::ptr::null(),
                    c"/".as_ptr(),
                    std::ptr::null(),
                    libc::MS_REC | libc::MS_PRIVATE,
                    std::ptr::null(),
                ) == 0
                && libc::mount(
                    c"tmpfs".as_ptr(),
                    target.as_ptr(),
                    c"tmpfs".as_ptr(),
                    0,
                    data.as_ptr().cast(),
                ) == 0
        };
        if !mounted {
            common::skip(format_args!("no tmpfs of our own: {}", std::io::Error::last_os_error()));
            return;
        }
        for (name, backend) in back_ends(1) {
            if matches!(name, "memory" | "sim") {
                continue;
            }
            let path = dir.path().join("file");
            let engine = engine(1 << 20, backend);
            let file = engine.open(&path, &read_write()).unwrap();
            full(&file, &path, size, libc::ENOSPC, name);
            drop(file);
            std::fs::remove_file(&path).unwrap();
        }
    });
}

/// Goal: views pin at most half of the cache. A request for more fails, and reads go on.
#[test]
fn too_many_views() {
    for (_, backend) in back_ends(1) {
        let dir = temp_dir();
        let path = with_content(dir.path(), &vec![5; 200 * 4096]);
        let engine = engine(400 << 10, backend);
        let file = engine.open(&path, &read_write()).unwrap();
        let mut views = Vec::new();
        let error = loop {
            match file.view(views.len() as u64 * 4096, 4096) {
                Ok(view) => views.push(view),
                Err(error) => break error,
            }
            assert!(views.len() < 100, "half of the cache is 50 pages");
        };
        assert!(matches!(error, Error::NoBuffers { op: Op::View }), "{error}");
        assert_eq!(error.errno(), libc::ENOBUFS);
        assert!(views.len() > 40, "{}", views.len());
        for page in 0..200 {
            assert_eq!(read(&file, 4096, page * 4096).unwrap(), [5; 4096]);
        }
        file.write_all_at(&vec![6; 200 * 4096], 0).unwrap();
        file.truncate(100).unwrap();
        assert!(views.iter().all(|view| **view == [5; 4096]), "a view is a snapshot");
        views.clear();
        file.truncate(200 * 4096).unwrap();
        for page in 1..200 {
            assert_eq!(&*file.view(page * 4096, 10).unwrap(), [0; 10]);
        }
        assert!(engine.stats().memory_bytes <= engine.cache_bytes());
    }
}
