//! `File::persist`: the files at both names after each step, and after a failure of each step.
//!
//! The files after a power cut: `power_cut/persisted.rs`.

mod common;

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::time::Duration;

use millpond::sim::SimOptions;
use millpond::{AsyncFile, Engine, Error, File, OpenOptions, PersistStep};

use common::{
    Simulated, back_ends, block_on, engine, in_own_process, read_write, temp_dir, write_back,
};

/// A new file of that path, with these bytes in the cache.
fn written(engine: &Engine, path: &Path, options: &OpenOptions, bytes: &[u8]) -> File {
    let file = engine.open(path, options).unwrap();
    file.write_all_at(bytes, 0).unwrap();
    file
}

/// The step that failed, and with which errno.
#[track_caller]
fn failed(outcome: millpond::Result<()>) -> (PersistStep, i32) {
    let error = outcome.expect_err("persisted");
    match error {
        Error::Persist { step, .. } => (step, error.errno()),
        other => panic!("another error: {other}"),
    }
}

/// Goal: the file has its new name, with its dirty pages, in place of the old file. Programs that
/// have the old file open still see it unchanged. The new file's handle stays usable.
#[test]
fn the_file_takes_the_name() {
    for (name, backend) in back_ends(1) {
        let dir = temp_dir();
        let (new, current) = (dir.path().join("new"), dir.path().join("current"));
        let engine = engine(1 << 20, backend);
        let old = written(&engine, &current, &write_back(), b"old");
        let file = written(&engine, &new, &write_back(), b"new bytes");
        file.persist(&new, &current).unwrap();
        assert!(!new.exists(), "{name}");
        let (mut bytes, mut old_bytes) = ([0; 9], [0; 3]);
        let reader = engine.open(&current, &read_write()).unwrap();
        reader.read_exact_at(&mut bytes, 0).unwrap();
        old.read_exact_at(&mut old_bytes, 0).unwrap();
        assert_eq!((&bytes, &old_bytes), (b"new bytes", b"old"), "{name}");
        if common::is_on_disk(name) {
            assert_eq!(fs::read(&current).unwrap(), b"new bytes", "{name}");
        }
        file.write_all_at(b"NEW", 0).unwrap();
        reader.read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!(&bytes, b"NEW bytes", "{name}");
        // Its own name again: nothing is renamed.
        file.persist(&current, &current).unwrap();
        assert!(current.exists());
    }
}

/// Goal: paths may be relative, or in two directories of one file system.
#[test]
fn relative_paths_and_two_directories() {
    in_own_process("relative_paths_and_two_directories", Duration::from_secs(60), || {
        let dir = temp_dir();
        std::env::set_current_dir(dir.path()).unwrap();
        fs::create_dir("sub").unwrap();
        let engine = Engine::builder().cache_bytes(1 << 20).build().unwrap();
        let file = written(&engine, Path::new("new"), &write_back(), b"new");
        file.persist("new", "sub/current").unwrap();
        assert_eq!(fs::read("sub/current").unwrap(), b"new");
        file.persist("sub/current", "./current").unwrap();
        assert_eq!(fs::read("current").unwrap(), b"new");
        assert!(!Path::new("sub/current").exists());
    });
}

/// Goal: the asynchronous forms do the same.
#[test]
fn asynchronous() {
    let dir = temp_dir();
    let (new, current) = (dir.path().join("new"), dir.path().join("current"));
    let engine = Engine::builder().cache_bytes(1 << 20).build().unwrap();
    let file = AsyncFile::from(written(&engine, &new, &write_back(), b"new"));
    block_on(file.persist_noclobber(&new, &current)).unwrap();
    assert_eq!(fs::read(&current).unwrap(), b"new");
    let refused = block_on(file.persist_noclobber(&current, &current));
    assert_eq!(failed(refused), (PersistStep::Rename, libc::EEXIST));
    block_on(file.persist(&current, &new)).unwrap();
    assert_eq!(fs::read(&new).unwrap(), b"new");
}

/// Goal: of several callers that want one name, one gets it, and all others get an error.
#[test]
fn one_of_several_callers_gets_the_name() {
    let dir = temp_dir();
    let current = dir.path().join("current");
    let engine = Engine::builder().cache_bytes(1 << 20).build().unwrap();
    let outcomes: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8u8)
            .map(|thread| {
                let (engine, current) = (&engine, &current);
                let new = dir.path().join(format!("new{thread}"));
                scope.spawn(move || {
                    let file = written(engine, &new, &write_back(), &[thread; 10_000]);
                    let outcome = file.persist_noclobber(&new, current);
                    assert_eq!(new.exists(), outcome.is_err());
                    outcome
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let found = fs::read(&current).unwrap();
    for (thread, outcome) in outcomes.into_iter().enumerate() {
        if found[0] as usize == thread {
            outcome.unwrap();
        } else {
            assert_eq!(failed(outcome), (PersistStep::Rename, libc::EEXIST));
        }
    }
    assert_eq!(found, [found[0]; 10_000]);
}

/// Goal: a call that can't start changes nothing: the name of another file, of no file, an empty
/// name, a link to the file, a directory that was removed.
#[test]
fn lookups_that_fail() {
    let dir = temp_dir();
    let (new, current) = (dir.path().join("new"), dir.path().join("current"));
    let engine = Engine::builder().cache_bytes(1 << 20).build().unwrap();
    let file = written(&engine, &new, &read_write(), b"new");
    fs::write(&current, b"old").unwrap();
    fs::create_dir(dir.path().join("gone")).unwrap();
    fs::remove_dir(dir.path().join("gone")).unwrap();
    std::os::unix::fs::symlink(&new, dir.path().join("link")).unwrap();
    let at = |name| dir.path().join(name);
    let lookup = |errno| (PersistStep::Lookup, errno);
    assert_eq!(failed(file.persist(&current, &new)), lookup(libc::EINVAL));
    assert_eq!(failed(file.persist(at("link"), &current)), lookup(libc::EINVAL));
    assert_eq!(failed(file.persist(at("nothing"), &current)), lookup(libc::ENOENT));
    assert_eq!(failed(file.persist(&new, at("gone/current"))), lookup(libc::ENOENT));
    assert_eq!(failed(file.persist(&new, at("current/current"))), lookup(libc::ENOTDIR));
    assert_eq!(failed(file.persist(&new, "/")), lookup(libc::EINVAL));
    assert_eq!(failed(file.persist(&new, at(".."))), lookup(libc::EINVAL));
    assert_eq!(failed(file.persist("", &current)), lookup(libc::EINVAL));
    // Another process has put another file at that name.
    fs::rename(&new, at("elsewhere")).unwrap();
    fs::write(&new, b"another").unwrap();
    assert_eq!(failed(file.persist(&new, &current)), lookup(libc::EINVAL));
    assert_eq!(fs::read(&current).unwrap(), b"old");
    assert_eq!(fs::read(at("elsewhere")).unwrap(), b"new");
}

/// Goal: a failing sync leaves the names unchanged, and the next call without failures succeeds.
#[test]
fn syncs_that_fail() {
    let sim = SimOptions::new(3).fail_every_kth_sync(2);
    let simulated = Simulated::new(sim, 1 << 20, &write_back());
    let (file, current) = (&simulated.file, simulated.path.with_extension("current"));
    fs::write(&current, b"old").unwrap();
    let inode = fs::metadata(&current).unwrap().ino();
    file.write_all_at(b"first", 0).unwrap();
    file.sync_all().unwrap();
    file.write_all_at(b"new", 0).unwrap();
    assert_eq!(failed(file.persist(&simulated.path, &current)).0, PersistStep::Sync);
    assert_eq!(fs::metadata(&current).unwrap().ino(), inode);
    assert!(simulated.path.exists());
    file.persist(&simulated.path, &current).unwrap();
    assert_ne!(fs::metadata(&current).unwrap().ino(), inode);
    assert_eq!(&simulated.device.crash(1)[..3], b"new");
}

/// Goal: a refused rename leaves the names unchanged: to another file system, over a directory, in
/// a directory without write permission.
#[test]
fn renames_that_fail() {
    let dir = temp_dir();
    let (new, current) = (dir.path().join("new"), dir.path().join("current"));
    let engine = Engine::builder().cache_bytes(1 << 20).build().unwrap();
    let file = written(&engine, &new, &write_back(), b"new");
    fs::create_dir(&current).unwrap();
    assert_eq!(failed(file.persist(&new, &current)), (PersistStep::Rename, libc::EISDIR));
    let device = |path: &Path| fs::metadata(path).unwrap().dev();
    match tempfile::tempdir_in("/dev/shm") {
        Ok(other) if device(other.path()) != device(dir.path()) => {
            let outcome = file.persist(&new, other.path().join("current"));
            assert_eq!(failed(outcome), (PersistStep::Rename, libc::EXDEV));
        }
        _ => common::skip("there is no other file system at /dev/shm"),
    }
    assert_eq!(fs::read(&new).unwrap(), b"new", "synced, and of its old name");
}

#[test]
fn renames_without_permission() {
    in_own_process("renames_without_permission", Duration::from_secs(60), || {
        let dir = temp_dir();
        std::env::set_current_dir(dir.path()).unwrap();
        let engine = Engine::builder().cache_bytes(1 << 20).build().unwrap();
        let file = written(&engine, Path::new("new"), &write_back(), b"new");
        fs::write("current", b"old").unwrap();
        let set_mode = |mode| fs::set_permissions(".", fs::Permissions::from_mode(mode)).unwrap();
        set_mode(0o555);
        // SAFETY: takes no memory; this process has nothing else to do.
        let was_root = unsafe { libc::geteuid() == 0 && libc::seteuid(65534) == 0 };
        let outcome = file.persist("new", "current");
        if was_root {
            // SAFETY: as above.
            assert_eq!(unsafe { libc::seteuid(0) }, 0);
        }
        assert_eq!(failed(outcome), (PersistStep::Rename, libc::EACCES));
        set_mode(0o755);
        assert_eq!(fs::read("current").unwrap(), b"old");
        assert_eq!(fs::read("new").unwrap(), b"new");
        file.persist("new", "current").unwrap();
        assert_eq!(fs::read("current").unwrap(), b"new");
    });
}

/// Goal: the message names the step, and the error the reason.
#[test]
fn what_is_said() {
    let dir = temp_dir();
    let engine = Engine::builder().cache_bytes(1 << 20).build().unwrap();
    let new = dir.path().join("new");
    let file = written(&engine, &new, &read_write(), b"new");
    let error = file.persist(&new, dir.path().join("no/current")).unwrap_err();
    assert!(error.to_string().contains("nothing is changed"), "{error}");
    assert_eq!(std::io::Error::from(error).kind(), ErrorKind::NotFound);
}
