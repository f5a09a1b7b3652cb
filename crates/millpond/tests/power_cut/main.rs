//! Power cuts on ext4: bytes that a sync or a durable write covered are there afterwards, by any
//! way of writing.
//!
//! The disk below the file system loses all writes that were not flushed; see `power`. The tests on
//! `sim` could not show this incident, as a file there has no other writers: `sync_data` wrote its
//! dirty pages with RWF_DSYNC and left out `fdatasync`, because this opening of the file had no
//! record of other unsynced bytes. Bytes that an earlier opening had written back, or another
//! descriptor or process had written, were still in the kernel's cache, and were lost.

mod random;

mod persisted;

#[path = "../common/mod.rs"]
mod common;

#[path = "../power/mod.rs"]
mod power;

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use millpond::direct::{DirectRequest, SegmentList};
use millpond::keeper::{Address, Server};
use millpond::{BackendChoice, Backing, Engine, EngineBuilder, File, OpenOptions};

use common::requests::each;
use common::{builder, has_uring, read_write, write_back};
use power::{Disk, Unflushed, file_system};

const CACHE_BYTES: u64 = 4 << 20;
/// Length of the older bytes that must survive together with the last written ones.
const A_BYTES: usize = 1 << 20;
const B_BYTES: usize = 4096;

/// The recorder's role, in which the other tests start this program again.
#[test]
#[ignore = "a role, in which others start this program"]
fn recorder_process() {
    power::recorder::run();
}

fn disk() -> Option<Disk> {
    Disk::start("recorder_process")
}

fn backends() -> Vec<BackendChoice> {
    let mut backends = vec![BackendChoice::Threads];
    backends.extend(has_uring().then_some(BackendChoice::Uring));
    backends
}

/// Engines and options for each power cut test: mode back and through, over the kernel's cache and
/// past it, each with the back ends in turn.
fn each_engine(mut body: impl FnMut(&str, &Engine, &OpenOptions)) {
    let backends = backends();
    let modes = [("back", write_back()), ("through", read_write())];
    for (number, (mode, options)) in modes.into_iter().enumerate() {
        for (turn, backing) in [Backing::Buffered, Backing::Direct].into_iter().enumerate() {
            let backend = &backends[(number + turn) % backends.len()];
            let engine = builder(CACHE_BYTES, backend.clone()).build().unwrap();
            body(&format!("{mode}-{backing:?}"), &engine, &options.clone().backing(backing));
        }
    }
}

/// After a cut now, for any choice of unflushed sectors that the disk loses, the file has `bytes`
/// of that value at each of those offsets.
#[track_caller]
fn has_after_cut(disk: &mut Disk, name: &str, what: &[(u8, usize, usize)]) {
    for unflushed in [Unflushed::Lost, Unflushed::Some(7)] {
        let survivor = disk.cut(unflushed);
        let found = survivor.read(name).unwrap_or_else(|| panic!("{name}: the file is not there"));
        for &(value, offset, bytes) in what {
            let range = found.get(offset..offset + bytes);
            let right = range.map_or(0, |range| range.iter().filter(|b| **b == value).count());
            assert_eq!(
                right,
                bytes,
                "{name}, {unflushed:?}: of {bytes} bytes {value:#x} at {offset}; the file has {}",
                found.len()
            );
        }
    }
}

/// Both values, after the second was made durable.
const BOTH: [(u8, usize, usize); 2] = [(0xA, 0, A_BYTES), (0xB, A_BYTES, B_BYTES)];

fn write_b(file: &File) {
    file.write_all_at(&[0xB; B_BYTES], A_BYTES as u64).unwrap();
}

/// Goal: the disk loses bytes that were not flushed, and stores bytes that were. Otherwise no test
/// here could fail.
#[test]
fn the_disk_loses_what_was_not_flushed() {
    let Some(mut disk) = disk() else { return };
    let (kept, lost) = (disk.path("kept"), disk.path("lost"));
    fs::write(&kept, [1; 8192]).unwrap();
    fs::File::open(&kept).unwrap().sync_all().unwrap();
    fs::write(&lost, [2; 8192]).unwrap();
    let in_place = fs::OpenOptions::new().write(true).open(&kept).unwrap();
    // In the device's queue, and not flushed.
    in_place.write_all_at(&[3; 4096], 0).unwrap();
    let flags = libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    let fd = std::os::fd::AsRawFd::as_raw_fd(&in_place);
    // SAFETY: takes no memory.
    assert_eq!(unsafe { libc::sync_file_range(fd, 0, 4096, flags) }, 0);

    let survivor = disk.cut(Unflushed::Lost);
    assert_eq!(survivor.read("kept").unwrap(), [1; 8192], "flushed, or written but not flushed");
    assert_eq!(survivor.read("lost"), None);
    drop(survivor);
    let kept_anyway = (0..64).any(|seed| {
        let found = disk.cut(Unflushed::Some(seed)).read("kept").unwrap();
        assert_eq!(found[4096..], [1; 4096]);
        found[..4096].contains(&3)
    });
    // A copy-on-write file system shows new blocks only after their commit.
    assert_eq!(
        kept_anyway,
        file_system().overwrites,
        "a disk may store bytes that were not flushed"
    );
    in_place.sync_data().unwrap();
    let found = disk.cut(Unflushed::Lost).read("kept").unwrap();
    assert_eq!(found[..4096], [3; 4096]);
}

/// Goal: a sync covers writes of an earlier opening of the file, of which the engine has no record.
#[test]
fn syncs_cover_earlier_openings() {
    let Some(mut disk) = disk() else { return };
    each_engine(|name, engine, options| {
        let path = disk.path(name);
        let before = engine.open(&path, options).unwrap();
        before.write_all_at(&vec![0xA; A_BYTES], 0).unwrap();
        before.close().unwrap();
        let file = engine.open(&path, options).unwrap();
        write_b(&file);
        file.sync_data().unwrap();
        has_after_cut(&mut disk, name, &BOTH);
    });
}

/// Goal: the same within one opening, for bytes that write-back has written since.
#[test]
fn syncs_cover_earlier_write_back() {
    let Some(mut disk) = disk() else { return };
    each_engine(|name, engine, options| {
        let file = engine.open(disk.path(name), options).unwrap();
        file.write_all_at(&vec![0xA; A_BYTES], 0).unwrap();
        file.write_back().unwrap();
        write_b(&file);
        file.sync_data().unwrap();
        has_after_cut(&mut disk, name, &BOTH);
    });
}

/// Writes to an open file below the engine, in the way `how`.
fn write_below(how: &str, path: &Path) {
    let below = fs::OpenOptions::new().write(true).open(path).unwrap();
    match how {
        "pwrite" => below.write_all_at(&vec![0xA; A_BYTES], 0).unwrap(),
        "copy_file_range" => {
            let mut source = tempfile::tempfile_in(path.parent().unwrap()).unwrap();
            source.write_all_at(&vec![0xA; A_BYTES], 0).unwrap();
            // Between two files, this is `copy_file_range`.
            let copied = std::io::copy(&mut source, &mut &below);
            assert_eq!(copied.unwrap(), A_BYTES as u64);
        }
        "process" => {
            // 0xA, too.
            let script = format!("head -c {A_BYTES} /dev/zero | tr '\\0' '\\n'");
            let command = format!("{script} | dd of={} conv=notrunc status=none", path.display());
            assert!(Command::new("sh").args(["-c", &command]).status().unwrap().success());
        }
        _ => unreachable!("{how}"),
    }
}

/// A durable file of its final length: later writes do not extend it, so the engine has no other
/// reason to sync.
fn create_durable(path: &Path) {
    fs::write(path, vec![1; A_BYTES + B_BYTES]).unwrap();
    fs::File::open(path).unwrap().sync_all().unwrap();
}

/// Goal: a sync covers bytes that were written below the engine: by another descriptor, by a copy
/// in the kernel, by another process.
#[test]
fn syncs_cover_writes_below_the_engine() {
    let Some(mut disk) = disk() else { return };
    each_engine(|name, engine, options| {
        for how in ["pwrite", "copy_file_range", "process"] {
            for is_new in [false, true] {
                let name = format!("{name}-{how}-{is_new}");
                let path = disk.path(&name);
                if !is_new {
                    create_durable(&path);
                }
                let file = engine.open(&path, options).unwrap();
                write_below(how, &path);
                write_b(&file);
                file.sync_data().unwrap();
                has_after_cut(&mut disk, &name, &BOTH);
                drop(file);
                fs::remove_file(path).unwrap();
            }
        }
    });
}

/// Goal: the same after a complete sync: the second sync must not rely on the first.
#[test]
fn syncs_cover_writes_below_after_a_sync() {
    let Some(mut disk) = disk() else { return };
    each_engine(|name, engine, options| {
        let path = disk.path(name);
        create_durable(&path);
        let file = engine.open(&path, options).unwrap();
        file.write_all_at(&[2; 4096], A_BYTES as u64).unwrap();
        file.sync_all().unwrap();
        write_below("pwrite", &path);
        write_b(&file);
        file.sync_data().unwrap();
        has_after_cut(&mut disk, name, &BOTH);
    });
}

/// Goal: a sync of a file without dirty pages covers bytes that were written below, too.
#[test]
fn a_sync_without_dirty_pages_covers_writes_below() {
    let Some(mut disk) = disk() else { return };
    each_engine(|name, engine, options| {
        let path = disk.path(name);
        create_durable(&path);
        let file = engine.open(&path, options).unwrap();
        write_below("pwrite", &path);
        file.sync_data().unwrap();
        has_after_cut(&mut disk, name, &BOTH[..1]);
    });
}

/// Goal: a sync of one handle covers the writes of other handles of the file: direct, written
/// through, of another engine, or of another mode.
#[test]
fn syncs_cover_other_handles() {
    let Some(mut disk) = disk() else { return };
    each_engine(|name, engine, options| {
        let other_engine = builder(CACHE_BYTES, BackendChoice::Threads).build().unwrap();
        let kinds: [(&str, &Engine, OpenOptions); 4] = [
            ("direct", engine, read_write().direct(true).bounce(true)),
            ("direct-of-another", &other_engine, read_write().direct(true).bounce(true)),
            ("cached-of-another", &other_engine, read_write()),
            ("cached", engine, options.clone()),
        ];
        for (kind, other_engine, other_options) in kinds {
            for is_open in [true, false] {
                let name = format!("{name}-{kind}-{is_open}");
                let path = disk.path(&name);
                create_durable(&path);
                let file = engine.open(&path, options).unwrap();
                let other = other_engine.open(&path, &other_options).unwrap();
                other.write_all_at(&vec![0xA; A_BYTES], 0).unwrap();
                let other = is_open.then_some(other);
                write_b(&file);
                file.sync_data().unwrap();
                has_after_cut(&mut disk, &name, &BOTH);
                drop((file, other));
                fs::remove_file(path).unwrap();
            }
        }
    });
}

/// A builder of an engine with a keeper, and the keeper.
fn kept(backend: &BackendChoice) -> EngineBuilder {
    let server = Server::bind(&Address::unique()).unwrap();
    let address = server.address().clone();
    std::thread::spawn(move || server.serve(|_| {}));
    builder(CACHE_BYTES, backend.clone()).keeper(address)
}

/// Goal: with a keeper, whose descriptors of the file are separate ones, a sync covers all earlier
/// writes, also of an earlier opening.
#[test]
fn with_a_keeper() {
    let Some(mut disk) = disk() else { return };
    for (number, backend) in backends().into_iter().enumerate() {
        for backing in [Backing::Buffered, Backing::Direct] {
            let engine = kept(&backend).build().unwrap();
            let name = format!("kept-{backing:?}-{number}");
            let options = write_back().backing(backing);
            let before = engine.open(disk.path(&name), &options).unwrap();
            before.write_all_at(&vec![0xA; A_BYTES], 0).unwrap();
            before.close().unwrap();
            let file = engine.open(disk.path(&name), &options).unwrap();
            write_b(&file);
            file.sync_data().unwrap();
            has_after_cut(&mut disk, &name, &BOTH);
        }
    }
}

/// Goal: a sync of a hundred dirty runs in random order covers all of them.
#[test]
fn many_runs() {
    let Some(mut disk) = disk() else { return };
    each_engine(|name, engine, options| {
        let file = engine.open(disk.path(name), options).unwrap();
        let mut expected = Vec::new();
        for piece in (0..100).rev() {
            let (value, at) = (piece as u8 + 1, piece * 3 * 4096);
            file.write_all_at(&[value; 5000], at as u64).unwrap();
            expected.push((value, at, 5000));
        }
        file.sync_data().unwrap();
        has_after_cut(&mut disk, name, &expected);
    });
}

/// The ways to write durably: through durable handles, by durable calls, cached, direct, and
/// through a pipeline.
const DURABLE: [&str; 6] =
    ["write_at_dsync", "dsync", "append-dsync", "direct-dsync", "direct-unaligned", "pipeline"];

/// Writes `bytes` bytes of 0xD durably at `at`, or for "append-dsync" at the end; returns where.
fn write_durably(how: &str, engine: &Engine, options: &OpenOptions, path: &Path, at: u64) -> u64 {
    let open = |options: &OpenOptions| engine.open(path, options).unwrap();
    let data = [0xD; B_BYTES];
    match how {
        "write_at_dsync" => assert_eq!(open(options).write_at_dsync(&data, at).unwrap(), B_BYTES),
        "dsync" => open(&options.clone().dsync(true)).write_all_at(&data, at).unwrap(),
        "append-dsync" => return open(&options.clone().dsync(true)).append(&data).unwrap(),
        "direct-dsync" => {
            let mut buffer = engine.alloc_buffers(1, B_BYTES).unwrap().remove(0);
            buffer.fill(0xD);
            let direct = open(&read_write().direct(true).dsync(true));
            direct.write_all_at(&buffer, at).unwrap();
        }
        "direct-unaligned" => {
            let direct = open(&read_write().direct(true).bounce(true).dsync(true));
            direct.write_all_at(&data, at + 77).unwrap();
            return at + 77;
        }
        "pipeline" => {
            let mut buffer = engine.alloc_buffers(1, B_BYTES).unwrap().remove(0);
            buffer.fill(0xD);
            let direct = open(&read_write().direct(true));
            let mut request =
                Some(DirectRequest::write(&direct, SegmentList::from_slice(&buffer), at));
            each(&mut engine.pipeline(1).unwrap(), |done| {
                if let Some(done) = done {
                    assert_eq!(done.outcome.unwrap(), B_BYTES);
                }
                Some(request.take()?.durable(true))
            });
        }
        _ => unreachable!("{how}"),
    }
    at
}

/// Goal: the bytes of a durable write survive, with the size that shows them, also after unsynced
/// changes of size and blocks.
#[test]
fn durable_writes() {
    let Some(mut disk) = disk() else { return };
    type Before = (&'static str, fn(&File));
    const BEFORE: [Before; 7] = [
        ("nothing", |_| {}),
        ("extended", |file| file.write_all_at(&[1; 300_000], 0).unwrap()),
        ("extended-and-written-back", |file| {
            file.write_all_at(&[1; 300_000], 0).unwrap();
            file.write_back().unwrap();
        }),
        ("allocated", |file| file.allocate(0, 400_000).unwrap()),
        ("punched", |file| {
            file.write_all_at(&[1; 300_000], 0).unwrap();
            file.punch_hole(60_000, 100_000).unwrap();
        }),
        ("cut", |file| {
            file.write_all_at(&[1; 300_000], 0).unwrap();
            file.truncate(10_000).unwrap();
        }),
        ("grown", |file| file.truncate(500_000).unwrap()),
    ];
    each_engine(|name, engine, options| {
        for how in DURABLE {
            for (before, prepare) in BEFORE {
                let name = format!("{name}-{how}-{before}");
                let path = disk.path(&name);
                let file = engine.open(&path, options).unwrap();
                prepare(&file);
                let at = write_durably(how, engine, options, &path, 32 * 4096) as usize;
                has_after_cut_once(&mut disk, &name, (0xD, at, B_BYTES));
                drop(file);
                fs::remove_file(&path).unwrap();
            }
        }
    });
}

/// As [`has_after_cut`], for one range, and only with the loss of all unflushed sectors.
#[track_caller]
fn has_after_cut_once(disk: &mut Disk, name: &str, (value, at, bytes): (u8, usize, usize)) {
    let found = disk.cut(Unflushed::Lost).read(name).unwrap_or_else(|| panic!("{name}: no file"));
    let range = found.get(at..at + bytes);
    let is_there = range.is_some_and(|range| range.iter().all(|byte| *byte == value));
    assert!(is_there, "{name}: not all of {bytes} at {at}; the file has {}", found.len());
}

/// Goal: a durable write is covered by the length after a cut, also if an earlier write, which no sync has
/// covered, has moved the end of the file beyond it.
/// Incident: ext4 stores a new length with the blocks that a buffered write allocates, and a write with
/// RWF_DSYNC stores its own pages alone. The durable bytes of an old block lay behind the end after the cut.
#[test]
fn durable_writes_below_an_unsynced_end() {
    const END: usize = 4096 * 3 + 100;
    let Some(mut disk) = disk() else { return };
    type Extend = (&'static str, fn(&File, &Path));
    const EXTEND: [Extend; 3] = [
        ("write", |file, _| file.write_all_at(&[2; 4096], 4096 * 5).unwrap()),
        ("write-back", |file, _| {
            file.write_all_at(&[2; 4096], 4096 * 5).unwrap();
            file.write_back().unwrap();
        }),
        ("below", |_, path| {
            let below = fs::OpenOptions::new().write(true).open(path).unwrap();
            below.write_all_at(&[2; 4096], 4096 * 5).unwrap();
        }),
    ];
    each_engine(|name, engine, options| {
        for how in DURABLE.into_iter().filter(|how| *how != "append-dsync") {
            for (extend, extend_file) in EXTEND {
                for is_open_before in [true, false] {
                    let name = format!("{name}-{how}-{extend}-{is_open_before}");
                    let path = disk.path(&name);
                    let mut file = engine.open(&path, options).unwrap();
                    file.write_all_at(&[1; END], 0).unwrap();
                    file.sync_all().unwrap();
                    extend_file(&file, &path);
                    if !is_open_before {
                        file.close().unwrap();
                        file = engine.open(&path, options).unwrap();
                    }
                    let at = write_durably(how, engine, options, &path, 4096 * 3) as usize;
                    has_after_cut_once(&mut disk, &name, (0xD, at, B_BYTES));
                    drop(file);
                    fs::remove_file(&path).unwrap();
                }
            }
        }
    });
}
