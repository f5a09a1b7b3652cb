//! Power cuts that tear writes, on XFS: a file with untorn blocks has whole blocks afterwards.
//!
//! The disk below XFS loses a random part of the sectors that were not flushed, also inside one write; see `power`.
//! A store of blocks with checksums is written while the power is cut again and again. The kernel's buffered writes and
//! plain files of Millpond show torn blocks there, or the test fails, as it could not find any then.

#[path = "common/mod.rs"]
mod common;

#[path = "power/mod.rs"]
mod power;

use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use millpond::{BackendChoice, Backing, Engine, File, OpenOptions, WriteMode};

use common::{Random, engine, has_uring, read_write, run_and_stop, scaled, temp_dir};
use power::{Disk, Unflushed};

const BLOCK: usize = 16384;
/// Blocks of the store at first.
const BLOCKS: usize = 64;
/// A store that grows is cut to its first length at this one.
const BLOCKS_MAX: usize = 192;
const WRITERS: usize = 2;
/// Blocks that are written before a sync, at most.
const GROUP_MAX: u64 = 16;
/// Power cuts in which a plain store shows a torn block at the latest.
const PLAIN_CUTS_MAX: usize = 200;
/// The same for a plain database, of which one page is in flight at a time: a cut in 15 to 50 damages it.
const PLAIN_SQLITE_CUTS_MAX: usize = 1000;

#[test]
#[ignore = "a role, in which others start this program"]
fn recorder_process() {
    power::recorder::run();
}

/// The file of a store.
enum Store {
    Kernel(std::fs::File),
    Pond(File),
}

impl Store {
    fn write(&self, bytes: &[u8], offset: u64) {
        match self {
            Store::Kernel(file) => file.write_all_at(bytes, offset).unwrap(),
            Store::Pond(file) => file.write_all_at(bytes, offset).unwrap(),
        }
    }

    fn sync(&self) {
        match self {
            Store::Kernel(file) => file.sync_data().unwrap(),
            Store::Pond(file) => file.sync_data().unwrap(),
        }
    }

    fn truncate(&self, len: u64) {
        match self {
            Store::Kernel(file) => file.set_len(len).unwrap(),
            Store::Pond(file) => file.truncate(len).unwrap(),
        }
    }
}

/// The versions of each block that a survivor may have, 0: zeros or none.
#[derive(Clone)]
struct Versions {
    synced: Vec<u64>,
    written: Vec<u64>,
    /// Number of blocks that a sync has covered.
    synced_blocks: usize,
    blocks: usize,
    truncations: u32,
}

/// Aligned memory for direct writes.
#[repr(align(4096))]
struct Block([u8; BLOCK]);

/// The bytes of a version of a block: each word is a function of both, and of its place.
fn fill(block: &mut Block, number: usize, version: u64) {
    let mut random = Random(((number as u64) << 40) ^ version);
    block.0[..8].copy_from_slice(&version.to_le_bytes());
    block.0[8..].chunks_exact_mut(8).for_each(|w| w.copy_from_slice(&random.next().to_le_bytes()));
}

/// The version of a whole block; `None` if it is torn.
fn version_of(bytes: &[u8], number: usize) -> Option<u64> {
    let version = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    if bytes.iter().all(|byte| *byte == 0) {
        return Some(0);
    }
    let mut expected = Box::new(Block([0; BLOCK]));
    fill(&mut expected, number, version);
    (bytes == expected.0).then_some(version)
}

/// Updates random blocks of the writer's own, and syncs, until `stop`. The first writer of a store that grows also appends
/// blocks, and cuts the file when it is long.
fn write(store: &Store, versions: &Mutex<Versions>, writer: usize, grows: bool, stop: &AtomicBool) {
    let mut random = Random::from_environment();
    let mut block = Box::new(Block([0; BLOCK]));
    let is_grower = grows && writer == 0;
    while !stop.load(SeqCst) {
        let blocks = versions.lock().unwrap().blocks;
        let mut group = Vec::new();
        for _ in 0..=random.below(GROUP_MAX) {
            group.push(random.below((BLOCKS / WRITERS) as u64) as usize * WRITERS + writer);
        }
        if is_grower && blocks >= BLOCKS_MAX {
            let mut known = versions.lock().unwrap();
            known.synced[BLOCKS..].fill(0);
            (known.synced_blocks, known.blocks) = (BLOCKS, BLOCKS);
            known.truncations += 1;
            drop(known);
            store.truncate((BLOCKS * BLOCK) as u64);
        } else if is_grower {
            group.extend(blocks..blocks + 1 + random.below(6) as usize);
        }
        for &number in &group {
            let mut known = versions.lock().unwrap();
            known.written[number] += 1;
            let version = known.written[number];
            drop(known);
            fill(&mut block, number, version);
            store.write(&block.0, (number * BLOCK) as u64);
        }
        store.sync();
        let mut known = versions.lock().unwrap();
        for number in group {
            known.synced[number] = known.written[number];
            if is_grower {
                known.blocks = known.blocks.max(number + 1);
                known.synced_blocks = known.blocks;
            }
        }
    }
}

/// The blocks that a survivor has torn. Panics if it has lost synced ones. The power was cut between `before` and `after`.
fn torn_blocks(found: &[u8], before: &Versions, after: &Versions, what: &str) -> usize {
    let mut before = before.clone();
    if before.truncations != after.truncations {
        // The file may have been cut before the power was.
        before.synced_blocks = BLOCKS;
        before.synced[BLOCKS..].fill(0);
    }
    assert!(
        found.len() >= before.synced_blocks * BLOCK,
        "{what}: {} bytes of {} synced blocks",
        found.len(),
        before.synced_blocks
    );
    let mut torn = 0;
    for (number, bytes) in found.chunks(BLOCK).enumerate() {
        let mut whole = bytes.to_vec();
        whole.resize(BLOCK, 0);
        let Some(version) = version_of(&whole, number) else {
            torn += 1;
            continue;
        };
        let (synced, written) = (before.synced[number], after.written[number]);
        assert!(
            (synced..=written).contains(&version),
            "{what}: block {number} has version {version} of {synced} (synced) to {written}"
        );
    }
    torn
}

/// Cuts the power of a store that is being written until `enough` is true of the numbers of cuts and of torn blocks.
fn cut_power(
    disk: &mut Disk,
    name: &str,
    store: &Store,
    grows: bool,
    enough: impl Fn(usize, usize) -> bool,
) {
    let versions = Mutex::new(Versions {
        synced: vec![0; BLOCKS_MAX + 8],
        written: vec![0; BLOCKS_MAX + 8],
        synced_blocks: 0,
        blocks: BLOCKS,
        truncations: 0,
    });
    let mut block = Box::new(Block([0; BLOCK]));
    for number in 0..BLOCKS {
        fill(&mut block, number, 1);
        store.write(&block.0, (number * BLOCK) as u64);
    }
    store.sync();
    let mut known = versions.lock().unwrap();
    known.synced[..BLOCKS].fill(1);
    known.written[..BLOCKS].fill(1);
    known.synced_blocks = BLOCKS;
    drop(known);
    let stop = AtomicBool::new(false);
    let mut random = Random::from_environment();
    std::thread::scope(|scope| {
        for writer in 0..WRITERS {
            let (versions, stop) = (&versions, &stop);
            scope.spawn(move || write(store, versions, writer, grows, stop));
        }
        run_and_stop(&stop, || {
            let (mut cuts, mut torn) = (0, 0);
            while !enough(cuts, torn) {
                std::thread::sleep(Duration::from_micros(random.below(20_000)));
                let before = versions.lock().unwrap().clone();
                let survivor = disk.cut(Unflushed::Some(random.next()));
                let after = versions.lock().unwrap().clone();
                let found = survivor.read(name).unwrap();
                cuts += 1;
                torn += torn_blocks(&found, &before, &after, &format!("{name}, cut {cuts}"));
            }
            println!("{name}: {torn} torn blocks in {cuts} power cuts");
        });
    });
}

fn open(engine: &Engine, path: &Path, options: &OpenOptions) -> Store {
    Store::Pond(engine.open(path, &options.clone().backing(Backing::Direct)).unwrap())
}

/// Goal: a cut of this disk tears blocks, of the kernel's buffered writes and of plain files of Millpond. Otherwise the
/// test below could not fail.
#[test]
fn plain_blocks_are_torn() {
    let Some(mut disk) = Disk::start_xfs("recorder_process") else { return };
    let is_torn = |cuts, torn| {
        assert!(cuts < PLAIN_CUTS_MAX, "no block was torn: the disk shows nothing");
        torn > 0
    };
    let path = disk.path("kernel");
    let options = std::fs::File::options().read(true).write(true).create(true).clone();
    let kernel = Store::Kernel(options.open(path).unwrap());
    cut_power(&mut disk, "kernel", &kernel, false, is_torn);
    drop(kernel);
    for mode in [WriteMode::Back, WriteMode::Through] {
        let engine = engine(4 << 20, BackendChoice::Auto);
        let name = format!("plain-{mode:?}");
        let options = read_write().write_mode(mode).page_bytes(BLOCK as u32);
        let store = open(&engine, &disk.path(&name), &options);
        cut_power(&mut disk, &name, &store, false, is_torn);
    }
}

/// Goal: no power cut tears a block of a file with untorn blocks or takes back a sync, in both modes and by direct
/// handles, by each back end, in files that keep their length and in files that grow and are truncated.
#[test]
fn untorn_blocks_are_whole() {
    let Some(mut disk) = Disk::start_xfs("recorder_process") else { return };
    let cuts_each = scaled(4) as usize;
    let mut back_ends = vec![BackendChoice::Threads];
    back_ends.extend(has_uring().then_some(BackendChoice::Uring));
    for backend in back_ends {
        let engine = engine(4 << 20, backend.clone());
        let untorn = read_write().untorn(BLOCK as u32);
        for (way, options) in [
            ("back", untorn.clone().write_mode(WriteMode::Back)),
            ("through", untorn.clone()),
            ("direct", untorn.clone().direct(true)),
        ] {
            for grows in [false, true] {
                let name = format!("{backend:?}-{way}-{grows}");
                let store = open(&engine, &disk.path(&name), &options);
                cut_power(&mut disk, &name, &store, grows, |cuts, torn| {
                    assert_eq!(torn, 0, "{name}: in {cuts} power cuts");
                    cuts == cuts_each
                });
                drop(store);
                std::fs::remove_file(disk.path(&name)).unwrap();
            }
        }
    }
}

/// A database that a process of `integrations/sqlite/updates` updates until it is dropped.
struct Updates {
    process: Child,
    /// The number of the last update that is committed.
    committed: Arc<AtomicU64>,
}

impl Updates {
    /// `parameters` of the URI, and SQL that is run at first.
    fn start(program: &OsStr, path: &Path, parameters: &str, sql: &str) -> Updates {
        let uri = format!("file:{}?{parameters}", path.display());
        let mut updates = Command::new(program);
        updates.args([&uri, "sequence", sql]).stdout(Stdio::piped());
        let mut process = updates.spawn().unwrap();
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let mut next = move || lines.next().and_then(Result::ok)?.parse().ok();
        let committed = Arc::new(AtomicU64::new(next().expect("a database")));
        let to = Arc::clone(&committed);
        std::thread::spawn(move || {
            while let Some(number) = next() {
                to.store(number, SeqCst);
            }
        });
        Updates { process, committed }
    }
}

impl Drop for Updates {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Cuts the power of a database without a journal that is being updated, until `enough` is true of the numbers of cuts and of
/// damaged survivors. Panics if a survivor has lost an update.
fn cut_power_of_sqlite(
    disk: &mut Disk,
    program: &OsStr,
    (name, parameters, sql): (&str, &str, &str),
    enough: impl Fn(usize, usize) -> bool,
) {
    let mut updates = Updates::start(program, &disk.path(name), parameters, sql);
    let mut random = Random::from_environment();
    let dir = temp_dir();
    let (mut cuts, mut damaged) = (0, 0);
    let first = updates.committed.load(SeqCst);
    while !enough(cuts, damaged) {
        std::thread::sleep(Duration::from_micros(random.below(20_000)));
        let ended = updates.process.try_wait().unwrap();
        assert!(ended.is_none(), "{name}, cut {cuts}: the updates have ended: {ended:?}");
        let before = updates.committed.load(SeqCst);
        let survivor = disk.cut(Unflushed::Some(random.next()));
        // The next one may be durable, or committed and not counted yet.
        let after = updates.committed.load(SeqCst) + 2;
        cuts += 1;
        assert!(survivor.read(&format!("{name}-journal")).is_none(), "{name}: there is a journal");
        let copy = dir.path().join("survivor.db");
        std::fs::write(&copy, survivor.read(name).unwrap()).unwrap();
        let check = Command::new(program)
            .args([&format!("file:{}", copy.display()), "check"])
            .stderr(Stdio::inherit())
            .output()
            .unwrap();
        if !check.status.success() {
            damaged += 1;
            continue;
        }
        let last: u64 = String::from_utf8(check.stdout).unwrap().trim().parse().unwrap();
        let expected = before..=after;
        assert!(expected.contains(&last), "{name}, cut {cuts}: update {last} of {expected:?}");
    }
    let updated = updates.committed.load(SeqCst) - first;
    assert!(updated > 0, "{name}: no update was committed");
    println!("{name}: {damaged} damaged databases in {cuts} power cuts, {updated} updates");
}

/// Goal: SQLite commits without a journal on a VFS that announces atomic writes, and no power cut damages its database or
/// takes back an update. Method: the same without announced writes, and without a journal, is damaged.
#[test]
#[ignore = "needs the program that scripts/long untorn_sqlite builds"]
fn sqlite_needs_no_journal() {
    let program = std::env::var_os("MILLPOND_SQLITE_UPDATES").expect("integrations/sqlite/updates");
    let Some(mut disk) = Disk::start_xfs("recorder_process") else { return };
    let plain = ("plain.db", "vfs=unix", "pragma journal_mode = off");
    cut_power_of_sqlite(&mut disk, &program, plain, |cuts, damaged| {
        assert!(cuts < PLAIN_SQLITE_CUTS_MAX, "no database was damaged: the disk shows nothing");
        damaged > 0
    });
    let untorn = ("untorn.db", "vfs=millpond&millpond_untorn=4k", "");
    let cuts_each = scaled(20) as usize;
    cut_power_of_sqlite(&mut disk, &program, untorn, |cuts, damaged| {
        assert_eq!(damaged, 0, "in {cuts} power cuts");
        cuts == cuts_each
    });
}
