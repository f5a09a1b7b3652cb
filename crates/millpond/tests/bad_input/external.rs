//! Descriptors opened by other code, and files changed by other processes.

use super::*;

fn descriptor(path: &Path, flags: i32, read: bool, write: bool) -> OwnedFd {
    std::fs::File::options().read(read).write(write).custom_flags(flags).open(path).unwrap().into()
}

#[test]
fn descriptors_that_do_not_permit_what_is_asked_for() {
    let dir = temp_dir();
    let path = with_content(dir.path(), b"pond");
    let engine = threads_engine();
    let cases = [
        (libc::O_PATH, true, false, read_only()),
        (0, true, false, OpenOptions::new().write(true)),
        (0, true, false, OpenOptions::new().append(true)),
        (0, true, false, OpenOptions::new().read(true).write(true)),
        (0, false, true, read_only()),
        (0, false, true, OpenOptions::new().read(true).write(true)),
    ];
    for (flags, may_read, may_write, options) in cases {
        let fd = descriptor(&path, flags, may_read, may_write);
        let error = refused(engine.from_fd(fd, &options), libc::EINVAL, &["open", "descriptor"]);
        assert!(matches!(error, Error::InvalidInput { op: Op::Open, .. }));
    }
    let (reader, _writer) = std::io::pipe().unwrap();
    refused(engine.from_fd(reader.into(), &read_only()), libc::ENOTSUP, &["open", "regular"]);
    let directory = std::fs::File::open(dir.path()).unwrap().into();
    refused(engine.from_fd(directory, &read_only()), libc::EISDIR, &["open"]);
}

/// Goal: positioned writes do not append, whether or not the descriptor has O_APPEND.
/// Method: a descriptor with O_APPEND, opened alone and after other handles, for writing and for
/// both.
#[test]
fn positioned_writes_ignore_o_append() {
    for (name, backend) in back_ends(1) {
        if matches!(name, "memory" | "sim") {
            continue;
        }
        for backing in [Backing::Buffered, Backing::Mapped, Backing::Direct] {
            for may_read in [false, true] {
                let dir = temp_dir();
                let path = with_content(dir.path(), &[b'.'; 10_000]);
                let engine = engine(1 << 20, backend.clone());
                let fd = descriptor(&path, libc::O_APPEND, may_read, true);
                let options = OpenOptions::new().read(may_read).write(true).backing(backing);
                let file = engine.from_fd(fd, &options).unwrap();
                file.write_all_at(b"one", 3).unwrap();
                file.write_all_at(&[b'x'; 8192], 0).unwrap();
                let long = vec![b'y'; 600_000];
                file.write_all_at(&long, 1).unwrap();
                assert_eq!(file.append(b"end").unwrap(), 600_001);
                let mut expected = long;
                expected.insert(0, b'x');
                expected.extend(b"end");
                assert!(std::fs::read(&path).unwrap() == expected, "{name} {backing:?}");
                if may_read {
                    assert!(read(&file, 700_000, 0).unwrap() == expected, "{name} {backing:?}");
                }
            }
        }
    }
}

/// Goal: another process may truncate, extend or remove a file that is open. Bytes that are not
/// cached are read as the file is now. `invalidate` drops the stale cached pages.
#[test]
fn changes_by_other_processes() {
    for (name, backend) in back_ends(1) {
        if matches!(name, "memory" | "sim") {
            continue;
        }
        for backing in [Backing::Buffered, Backing::Mapped, Backing::Direct] {
            for hit_path in [true, false] {
                change_externally(name, backend.clone(), backing, hit_path);
            }
        }
    }
}

fn change_externally(name: &str, backend: BackendChoice, backing: Backing, hit_path: bool) {
    let dir = temp_dir();
    let path = with_content(dir.path(), &[1; 100_000]);
    let engine = engine(1 << 20, backend);
    engine.set_hit_path(hit_path);
    let file = engine.open(&path, &read_write().backing(backing)).unwrap();
    assert_eq!(read(&file, 100, 0).unwrap(), [1; 100]);
    let outside = std::fs::File::options().read(true).write(true).open(&path).unwrap();
    // Cut: a read that goes below finds the new end.
    outside.set_len(50_000).unwrap();
    file.advise(0, 0, Advice::DontNeed).unwrap();
    assert_eq!(read(&file, 100, 60_000).unwrap(), b"", "{name}");
    assert_eq!(file.len().unwrap(), 50_000);
    assert_eq!(read(&file, 100_000, 0).unwrap(), [1; 50_000]);
    // In one read across the new end.
    outside.set_len(30_001).unwrap();
    file.advise(0, 0, Advice::DontNeed).unwrap();
    assert_eq!(read(&file, 100_000, 0).unwrap(), [1; 30_001]);
    // A view.
    outside.set_len(20_000).unwrap();
    file.advise(0, 0, Advice::DontNeed).unwrap();
    assert_eq!(file.view(28_000, 10).unwrap().len(), 0);
    assert_eq!(file.len().unwrap(), 20_000);
    // Extended: the new length is visible after `invalidate`.
    outside.set_len(40_000).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&outside, &[2; 10], 39_990).unwrap();
    file.invalidate(0, 0).unwrap();
    assert_eq!(file.len().unwrap(), 40_000);
    let mut expected = vec![1; 20_000];
    expected.resize(39_990, 0);
    expected.extend([2; 10]);
    assert!(read(&file, 100_000, 0).unwrap() == expected, "{name}");
    // Truncated and extended: cached bytes stay as they were, until `invalidate`.
    outside.set_len(10).unwrap();
    outside.set_len(40_000).unwrap();
    file.invalidate(0, MAX).unwrap();
    expected[10..].fill(0);
    assert!(read(&file, 100_000, 0).unwrap() == expected, "{name}");
    // Empty, and written again by the engine: at the requested offset.
    outside.set_len(0).unwrap();
    file.write_all_at(b"back", 8192).unwrap();
    file.invalidate(0, MAX).unwrap();
    assert_eq!(file.len().unwrap(), 8196);
    assert_eq!(read(&file, 10, 8190).unwrap(), b"\0\0back");
    // Removed: the open file stays usable; a new file of that name is another file.
    std::fs::remove_file(&path).unwrap();
    file.write_all_at(b"gone", 0).unwrap();
    std::fs::write(&path, b"other").unwrap();
    let other = engine.open(&path, &read_write()).unwrap();
    assert_eq!(read(&other, 10, 0).unwrap(), b"other");
    assert_eq!(read(&file, 4, 0).unwrap(), b"gone");
    file.truncate(100_000).unwrap();
    assert_eq!(other.len().unwrap(), 5);
}

/// Goal: direct backing on a file without direct I/O returns an error, and the file stays usable
/// without it.
#[test]
fn direct_backing_without_support() {
    in_own_process("external::direct_backing_without_support", Duration::from_secs(10), || {
        let engine = threads_engine();
        let dir = temp_dir();
        // The one file system of the kernel that holds plain files and has no direct I/O.
        let ramfs = ["-t", "ramfs", "none", dir.path().to_str().unwrap()];
        if !std::process::Command::new("mount")
            .args(ramfs)
            .status()
            .is_ok_and(|status| status.success())
        {
            return common::skip("a ramfs cannot be mounted");
        }
        let path = with_content(dir.path(), b"pond");
        let direct = engine.open(&path, &read_only().backing(Backing::Direct));
        let buffered = engine.open(&path, &read_only()).map(drop);
        let unmounted = std::process::Command::new("umount").arg(dir.path()).status();
        assert!(unmounted.is_ok_and(|status| status.success()));
        let error = refused(direct, libc::EINVAL, &["open"]);
        assert!(matches!(error, Error::Io { op: Op::Open, .. }));
        buffered.unwrap();
    });
}
