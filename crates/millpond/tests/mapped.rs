//! Files of which hits copy from a mapping of the kernel's page cache: `inode::mapped`.

mod common;

use std::os::fd::AsFd;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;

use millpond::{BackendChoice, Engine, Error, File, WriteMode};

use common::{Random, engine, read_write, scaled, temp_dir};

const PAGE: usize = 4096;
const PAGES: usize = 300;

fn content() -> Vec<u8> {
    (0..PAGES * PAGE + 100).map(|at| (at / PAGE * 7 + at) as u8).collect()
}

/// A file of that content, mapped.
struct Mapped {
    dir: tempfile::TempDir,
    engine: Engine,
    file: File,
}

impl Mapped {
    fn new(mode: WriteMode) -> Mapped {
        Mapped::of(&content(), mode)
    }

    fn of(content: &[u8], mode: WriteMode) -> Mapped {
        let dir = temp_dir();
        let path = dir.path().join("file");
        std::fs::write(&path, content).unwrap();
        let engine = engine(4 << 20, BackendChoice::Threads);
        let file = engine.open(&path, &read_write().write_mode(mode)).unwrap();
        let plain = std::fs::File::open(&path).unwrap();
        // SAFETY: these tests change the file through the engine alone, and cut it never below.
        assert!(unsafe { file.map(plain.as_fd()) }, "not mapped");
        Mapped { dir, engine, file }
    }

    /// Whether a read of these bytes hits, and the bytes that it has read.
    fn hit(&self, offset: u64, len: usize) -> Option<Vec<u8>> {
        let mut bytes = vec![0xEE; len];
        // SAFETY: `bytes` has room for so many.
        let read = unsafe { self.file.try_read_hit_raw(bytes.as_mut_ptr(), len, offset) }?;
        bytes.truncate(read);
        Some(bytes)
    }

    fn read(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let read = self.file.read_at(&mut bytes, offset).unwrap();
        bytes.truncate(read);
        bytes
    }
}

/// Goal: all reads hit, of one page and of several, also at the end, and no page takes a frame.
#[test]
fn reads_hit_and_nothing_is_filled() {
    let mapped = Mapped::new(WriteMode::Through);
    let (content, mut random) = (content(), Random::from_environment());
    for _ in 0..2000 {
        let offset = random.below(content.len() as u64 + 10);
        let len = random.below(3 * PAGE as u64) as usize + 1;
        let expected = content.get(offset as usize..).unwrap_or_default();
        let expected = &expected[..len.min(expected.len())];
        assert_eq!(mapped.hit(offset, len).expect("a hit"), expected, "{len} at {offset}");
        assert_eq!(mapped.read(offset, len), expected, "{len} at {offset}");
    }
    let stats = mapped.engine.stats();
    assert_eq!((stats.misses, stats.fills), (0, 0));
}

/// Goal: any change of the file ends its mapping permanently, and reads return the changed bytes.
#[test]
fn changes_end_the_mapping() {
    type Change = fn(&File) -> Result<(), Error>;
    let changes: [(&str, Change); 6] = [
        ("write", |file| file.write_all_at(&[1; 10], 5000)),
        ("write over its end", |file| file.write_all_at(&[1; 9000], (PAGES * PAGE) as u64)),
        ("append", |file| file.append(&[1; 10]).map(drop)),
        ("truncate", |file| file.truncate(5000)),
        ("punch", |file| file.punch_hole(4096, 8192)),
        ("invalidate", |file| file.invalidate(0, 10)),
    ];
    for mode in [WriteMode::Through, WriteMode::Back] {
        for (name, change) in changes {
            let mapped = Mapped::new(mode);
            assert!(mapped.hit(20 * PAGE as u64, 100).is_some());
            change(&mapped.file).unwrap();
            assert!(
                mapped.hit(20 * PAGE as u64 + 1, 100).is_none_or(|hit| hit.is_empty()),
                "{name}"
            );
            let mut expected = content();
            match name {
                "write" => expected[5000..5010].fill(1),
                "write over its end" => {
                    expected.truncate(PAGES * PAGE);
                    expected.extend([1; 9000]);
                }
                "append" => expected.extend([1; 10]),
                "truncate" => expected.truncate(5000),
                "punch" => expected[4096..4096 + 8192].fill(0),
                _ => {}
            }
            assert!(mapped.read(0, 2 * expected.len()) == expected, "{name}");
            let plain = std::fs::File::open(mapped.dir.path().join("file")).unwrap();
            // SAFETY: as in `new`.
            assert!(!unsafe { mapped.file.map(plain.as_fd()) }, "mapped again after {name}");
        }
    }
}

/// Goal: reads of several pages during the first write return all of it or nothing, and reads after
/// the write return it.
#[test]
fn reads_beside_the_first_write_are_whole() {
    for round in 0..scaled(200) {
        let mode = if round % 2 == 0 { WriteMode::Through } else { WriteMode::Back };
        let file = Mapped::of(&[0; 4 * PAGE], mode).file;
        let is_written = AtomicBool::new(false);
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let mut bytes = vec![0; 3 * PAGE];
                    loop {
                        let was_written = is_written.load(Relaxed);
                        assert_eq!(file.read_at(&mut bytes, 0).unwrap(), bytes.len());
                        let first = bytes[0];
                        assert!(bytes.iter().all(|byte| *byte == first), "torn");
                        assert!(
                            first == 1 || !was_written,
                            "a read after the write misses its bytes"
                        );
                        if was_written {
                            break;
                        }
                    }
                });
            }
            file.write_all_at(&vec![1; 3 * PAGE], 0).unwrap();
            is_written.store(true, Relaxed);
        });
    }
}

/// Goal: an empty file, and a file with dirty pages, is not mapped.
#[test]
fn files_that_can_not_be_mapped_are_not() {
    let dir = temp_dir();
    let path = dir.path().join("file");
    let engine = engine(4 << 20, BackendChoice::Threads);
    let options = read_write().create(true).write_mode(WriteMode::Back);
    let file = engine.open(&path, &options).unwrap();
    let plain = std::fs::File::open(&path).unwrap();
    // SAFETY: as in `Mapped::new`.
    assert!(!unsafe { file.map(plain.as_fd()) }, "an empty file");
    file.write_all_at(&[1; PAGE], 0).unwrap();
    // SAFETY: as above.
    assert!(!unsafe { file.map(plain.as_fd()) }, "a page waits");
    file.sync_all().unwrap();
    let mut bytes = [0; PAGE];
    file.read_at(&mut bytes, 0).unwrap();
    assert_eq!(bytes, [1; PAGE]);
}
