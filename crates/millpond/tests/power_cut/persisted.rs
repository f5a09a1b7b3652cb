//! `File::persist` and power cuts: the file is complete under its new name, or it was not renamed.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering::SeqCst};

use millpond::sim::SimOptions;
use millpond::{BackendChoice, Error, PersistStep};

use crate::common::{Random, builder, read_write, run_and_stop, scaled};
use crate::power::{Unflushed, file_system};
use crate::{CACHE_BYTES, disk, each_engine};

/// The contents of version `number` of a file: that many pages of that value.
fn version(number: u8) -> Vec<u8> {
    vec![number; 4096 * (1 + number as usize % 5) + 100]
}

/// Goal: after `File::persist` has returned, the new file has its name and all its bytes. A sync
/// and a rename, or a rename alone, would not ensure this.
#[test]
fn persisted_files() {
    let Some(mut disk) = disk() else { return };
    fs::create_dir(disk.path("other")).unwrap();
    each_engine(|name, engine, options| {
        for (number, dir) in (1u8..).zip(["", "other/", "", ""]) {
            let new = format!("{dir}{name}-new");
            let path = disk.path(&new);
            let file = engine.open(&path, options).unwrap();
            file.write_all_at(&version(number), 0).unwrap();
            file.persist(&path, disk.path(name)).unwrap();
            for unflushed in [Unflushed::Lost, Unflushed::Some(7)] {
                let survivor = disk.cut(unflushed);
                assert_eq!(survivor.read(name).unwrap(), version(number), "{name}, {number}");
                assert_eq!(survivor.read(&new), None, "{name}, {number}: the old name");
            }
        }
    });
}

/// Goal: a cut while files are persisted leaves one complete version: the last one, or a later one.
#[test]
fn cuts_while_files_are_persisted() {
    let Some(mut disk) = disk() else { return };
    let mut random = Random::from_environment();
    each_engine(|name, engine, options| {
        let (new, current) = (disk.path("new"), disk.path(name));
        let persist = |number: u8| {
            let file = engine.open(&new, options).unwrap();
            file.write_all_at(&version(number), 0).unwrap();
            file.persist(&new, &current).unwrap();
        };
        persist(1);
        let (persisted, stop) = (AtomicU8::new(1), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for number in 2..=250 {
                    if stop.load(SeqCst) {
                        return;
                    }
                    persist(number);
                    persisted.store(number, SeqCst);
                }
            });
            run_and_stop(&stop, || {
                for _ in 0..scaled(5) {
                    let before = persisted.load(SeqCst);
                    let seed = random.next();
                    let found = disk.cut(Unflushed::Some(seed)).read(name).expect("a file");
                    let number = found[0];
                    assert!(number >= before, "{name}, {seed}: {number} after {before}");
                    assert_eq!(found, version(number), "{name}, {seed}");
                }
            });
        });
    });
}

/// Goal: if the directory can't be synced, the error reports the outcome: the file has its new
/// name. After a cut the old file is there, or the new one.
/// Method: a file of `sim`, whose own sync does not depend on the failing disk.
#[test]
fn a_directory_that_can_not_be_synced() {
    let Some(mut disk) = disk() else { return };
    let (new, current) = (disk.path("new"), disk.path("current"));
    fs::write(&current, b"old").unwrap();
    fs::File::open(&current).unwrap().sync_all().unwrap();
    let engine = builder(CACHE_BYTES, BackendChoice::Sim(SimOptions::new(1))).build().unwrap();
    let file = engine.open(&new, &read_write()).unwrap();
    let inode = fs::metadata(&new).unwrap().ino();
    disk.fail();
    let failed = file.persist(&new, &current);
    let is_reported =
        matches!(failed, Err(Error::Persist { step: PersistStep::SyncDirectory, .. }));
    assert!(is_reported, "{failed:?}");
    if file_system().outlives_errors {
        assert_eq!(fs::metadata(&current).unwrap().ino(), inode);
        assert!(!new.exists());
    }
    assert_eq!(disk.cut(Unflushed::Lost).read("current").unwrap(), b"old");
}
