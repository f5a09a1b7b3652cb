//! Tests of the disk tier: pages survive a restart, and no failure causes wrong bytes.

mod common;
#[path = "../../millpond/tests/common/skip.rs"]
mod skip;

use std::fs::{self, OpenOptions, Permissions};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, PermissionsExt, chown, symlink};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use common::{Far, content};
use futures_util::future::try_join_all;
use millpond_objects::{Builder, CachedStore, Freshness, Stats};
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use skip::skip;
use tempfile::TempDir;

const PAGE: u64 = 4096;
const DISK: u64 = 4 << 20;

/// A directory on a real disk, removed when dropped.
fn temp_dir() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn over(far: &Far, dir: &TempDir) -> Builder {
    let builder = CachedStore::builder(Arc::new(far.clone())).page_bytes(PAGE as u32);
    let builder = builder.memory_bytes(2 << 20).freshness(Freshness::Immutable);
    builder.readahead_bytes_max(0).disk(tier_dir(dir), DISK)
}

fn tier_dir(dir: &TempDir) -> PathBuf {
    dir.path().join("tier")
}

/// Builds a store, after waiting for tasks of an earlier store on the same directory.
async fn built(builder: impl Fn() -> Builder) -> CachedStore {
    loop {
        match builder().build() {
            Ok(store) => return store,
            Err(error) if error.to_string().contains("another store") => {
                tokio::task::yield_now().await;
            }
            Err(error) => panic!("{error}"),
        }
    }
}

fn object(number: u64) -> (Path, Vec<u8>) {
    (Path::from(format!("objects/{number}")), content(number, 100_000 + number as usize * 777))
}

async fn with_objects(count: u64) -> Far {
    let far = Far::default();
    for number in 0..count {
        let (path, bytes) = object(number);
        far.store.put(&path, bytes.into()).await.unwrap();
    }
    far
}

/// Reads all of each object, in ranges.
async fn read_all(store: &CachedStore, count: u64) {
    for number in 0..count {
        let (path, bytes) = object(number);
        for at in (0..bytes.len()).step_by(30_000) {
            let range = at as u64..(at as u64 + 30_000).min(bytes.len() as u64);
            let got = store.get_range(&path, range.clone()).await.unwrap();
            assert_eq!(got, bytes[range.start as usize..range.end as usize], "{path} {range:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cached_pages_survive_a_restart() {
    let (far, dir) = (with_objects(20).await, temp_dir());
    // With chunk buffers for all pages.
    let store = over(&far, &dir).memory_bytes(64 << 20).build().unwrap();
    read_all(&store, 20).await;
    assert_eq!(store.stats().disk_pages_dropped, 0);
    let first = far.gets().len();
    assert!(first >= 80, "{first} requests");
    drop(store);
    let store = built(|| over(&far, &dir)).await;
    let stats = store.stats();
    assert_eq!((stats.disk_pages_damaged, stats.disk_errors, stats.disk_is_off), (0, 0, false));
    assert!(stats.disk_pages >= 20 * 100_000 / PAGE, "{stats:?}");
    read_all(&store, 20).await;
    // One request for each object, to learn its version.
    assert_eq!(far.gets().len(), 20);
    let stats = store.stats();
    assert_eq!((stats.requests, stats.requests_saved as usize), (20, first - 20));
    assert!(stats.to_string().contains("\ndisk: "), "{stats}");
    assert!(stats.bytes_from_disk > 20 * 70_000, "{stats:?}");
    assert_eq!(stats.disk_pages_damaged, 0);
    // A whole object that has no entry.
    drop(store);
    let large = Path::from("large");
    let bytes = content(7, 2_500_000);
    far.store.put(&large, bytes.clone().into()).await.unwrap();
    for requests in [1, 1] {
        let store = built(|| over(&far, &dir).memory_bytes(64 << 20)).await;
        assert_eq!(store.get(&large).await.unwrap().bytes().await.unwrap(), bytes);
        assert_eq!(far.gets().len(), requests);
        assert_eq!(store.stats().disk_pages_dropped, 0);
    }
    let revalidate = || over(&far, &dir).memory_bytes(16 << 20).freshness(Freshness::Revalidate);
    let store = built(revalidate).await;
    for _ in 0..2 {
        assert_eq!(store.get(&large).await.unwrap().bytes().await.unwrap(), bytes);
        assert_eq!(store.get_range(&large, 5..70_000).await.unwrap(), bytes[5..70_000]);
    }
    let stats = store.stats();
    assert!(stats.bytes_from_store < 100_000, "{stats:?}");
}

/// Goal: pages that are read from the disk do not make an error of the store cost a second request.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_error_beside_pages_on_the_disk_is_returned() {
    let (far, dir) = (with_objects(1).await, temp_dir());
    let (path, bytes) = object(0);
    let with_room = || over(&far, &dir).memory_bytes(64 << 20).gap_bytes(0);
    let store = with_room().build().unwrap();
    store.get_range(&path, 4 * PAGE..8 * PAGE).await.unwrap();
    drop(store);
    let store = built(with_room).await;
    store.get_range(&path, 20 * PAGE..20 * PAGE + 1).await.unwrap();
    far.gets();
    far.faults.fail_every.store(1, Relaxed);
    store.get_range(&path, 0..8 * PAGE).await.unwrap_err();
    assert_eq!(far.gets(), [common::bounded(0..4 * PAGE)]);
    let got = store.get_range(&path, 4 * PAGE..8 * PAGE).await.unwrap();
    assert_eq!(got, bytes[4 * PAGE as usize..8 * PAGE as usize]);
    assert!(far.gets().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn corrupt_pages_are_fetched_from_the_store() {
    let (far, dir) = (with_objects(20).await, temp_dir());
    let store = over(&far, &dir).build().unwrap();
    read_all(&store, 20).await;
    drop(store);
    // Damage some pages, most pages, and then all headers as well.
    for every in [104_729, 10_007, 701] {
        let file = OpenOptions::new().read(true).write(true).open(tier_dir(&dir).join("pages"));
        let (file, mut at) = (file.unwrap(), 5000);
        while at < file.metadata().unwrap().len() {
            let mut byte = [0];
            file.read_exact_at(&mut byte, at).unwrap();
            file.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
            at += every;
        }
        drop(file);
        let store = built(|| over(&far, &dir)).await;
        let known = store.stats().disk_pages;
        read_all(&store, 20).await;
        let damaged = store.stats().disk_pages_damaged;
        assert_eq!((damaged > 0, known > 0), (every > 1000, every > 1000), "{damaged} of {known}");
        drop(store);
    }
    // Neither a truncated file nor a file of another program.
    for (len, bytes) in [(1_000_001, None), (5000, None), (9000, Some([7; 9000]))] {
        let path = tier_dir(&dir).join("pages");
        OpenOptions::new().write(true).open(&path).unwrap().set_len(len).unwrap();
        if let Some(bytes) = bytes {
            fs::write(&path, bytes).unwrap();
        }
        read_all(&built(|| over(&far, &dir)).await, 20).await;
        let store = built(|| over(&far, &dir)).await;
        // A busy writer drops pages, but it always writes the last ones.
        assert!(store.stats().disk_pages > 0, "{:?}", store.stats());
    }
}

/// Bytes allocated on the disk for the directory.
fn du(dir: &TempDir) -> u64 {
    let entries = fs::read_dir(tier_dir(dir)).unwrap();
    entries.map(|entry| entry.unwrap().metadata().unwrap().blocks() * 512).sum()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_directory_keeps_to_its_limit_and_used_pages_stay() {
    let (far, dir) = (with_objects(60).await, temp_dir());
    let store = over(&far, &dir).build().unwrap();
    let (hot, hot_bytes) = object(0);
    for round in 0..3 {
        for number in 0..60 {
            let (path, bytes) = object(number);
            let got = store.get_range(&path, 0..bytes.len() as u64).await.unwrap();
            assert_eq!(got, bytes);
            if number % 15 == 14 {
                // Evicted from memory, with a valid entry again.
                store.forget(&hot);
                store.get_range(&hot, 0..1).await.unwrap();
                let got = store.get_range(&hot, 8192..40_000).await.unwrap();
                assert_eq!(got, hot_bytes[8192..40_000]);
            }
            assert!(du(&dir) <= DISK, "{} in round {round}", du(&dir));
        }
    }
    drop(store);
    assert!(du(&dir) <= DISK && du(&dir) > DISK / 2, "{}", du(&dir));
    let store = built(|| over(&far, &dir)).await;
    store.get_range(&hot, 0..1).await.unwrap();
    far.gets();
    assert_eq!(store.get_range(&hot, 8192..40_000).await.unwrap(), hot_bytes[8192..40_000]);
    assert!(far.gets().is_empty(), "{:?}", store.stats());
    drop(store);
    // A smaller limit applies when the store is built.
    let small = || over(&far, &dir).disk(tier_dir(&dir), DISK / 4);
    let store = built(small).await;
    assert!(du(&dir) <= DISK / 4, "{}", du(&dir));
    read_all(&store, 20).await;
    assert!(du(&dir) <= DISK / 4, "{}", du(&dir));
}

/// Reads random ranges from several tasks, and checks the bytes.
async fn read_at_random(store: &CachedStore, objects: u64, seed: u64, reads: u64) {
    let tasks = (0..8u64).map(|task| {
        let store = store.clone();
        tokio::spawn(async move {
            let mut random = seed * 8 + task;
            let mut next = move |below: u64| {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(12_345);
                (random >> 33) % below
            };
            for _ in 0..reads {
                let (path, bytes) = object(next(objects));
                let start = next(bytes.len() as u64 - 1);
                let range = start..(start + 1 + next(40_000)).min(bytes.len() as u64);
                let expected = &bytes[range.start as usize..range.end as usize];
                assert_eq!(store.get_range(&path, range).await.unwrap(), expected);
                if next(16) == 0 {
                    assert_eq!(store.get(&path).await.unwrap().bytes().await.unwrap(), bytes);
                }
            }
        })
    });
    try_join_all(tasks).await.unwrap();
}

/// Reads random ranges until `is_seen`. The time is not bounded by a number of reads, as the writer drops pages while all
/// chunk buffers are in use.
async fn read_until(
    store: &CachedStore,
    objects: u64,
    seed: u64,
    is_seen: impl Fn(&Stats) -> bool,
) -> Stats {
    let started = Instant::now();
    loop {
        read_at_random(store, objects, seed, 60).await;
        let stats = store.stats();
        if is_seen(&stats) {
            return stats;
        }
        assert!(started.elapsed() < Duration::from_secs(60), "{stats:?}");
    }
}

/// Goal: pages that the writer overwrites during a read, and bytes that another program changes, are misses.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_are_correct_while_the_file_is_overwritten() {
    let (far, dir) = (with_objects(30).await, temp_dir());
    let store = over(&far, &dir).disk(tier_dir(&dir), 1 << 20).build().unwrap();
    let is_warm = |stats: &Stats| stats.disk_hits > 0 && stats.disk_bytes_written > 2 << 20;
    let stats = read_until(&store, 30, 1, is_warm).await;
    assert_eq!((stats.disk_errors, stats.disk_pages_damaged), (0, 0));
    let is_over = Arc::new(AtomicBool::new(false));
    let scribbler = std::thread::spawn({
        let (is_over, path) = (Arc::clone(&is_over), tier_dir(&dir).join("pages"));
        move || {
            let file = OpenOptions::new().write(true).open(path).unwrap();
            let mut at = 1u64;
            while !is_over.load(Relaxed) {
                at = at.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                file.write_all_at(&[7; 100], (at >> 33) % (1 << 20)).unwrap();
            }
        }
    });
    read_until(&store, 30, 2, |stats| stats.disk_pages_damaged > 0).await;
    is_over.store(true, Relaxed);
    scribbler.join().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_directory_has_one_store_and_may_be_removed() {
    let (far, dir) = (with_objects(20).await, temp_dir());
    let store = over(&far, &dir).build().unwrap();
    let refused = over(&far, &dir).build().unwrap_err().to_string();
    assert!(refused.contains("another store uses this directory"), "{refused}");
    assert!(refused.contains(tier_dir(&dir).to_str().unwrap()), "{refused}");
    fs::remove_dir_all(tier_dir(&dir)).unwrap();
    read_until(&store, 20, 1, |stats| stats.disk_hits > 0).await;
    // A new directory of the same name.
    let other = over(&far, &dir).build().unwrap();
    read_all(&other, 20).await;
    read_all(&store, 20).await;
    // Neither a file in place of the directory, nor a size that is too small.
    fs::write(dir.path().join("file"), "").unwrap();
    let refused = over(&far, &dir).disk(dir.path().join("file"), DISK).build().unwrap_err();
    assert!(refused.to_string().contains("the directory"), "{refused}");
    let refused = over(&far, &dir).disk(dir.path().join("small"), 100_000).build().unwrap_err();
    assert!(refused.to_string().contains("too few"), "{refused}");
    let refused = over(&far, &dir).disk(dir.path().join("large"), 1 << 40).build().unwrap_err();
    assert!(refused.to_string().contains("more than half"), "{refused}");
}

/// Incident: a child of fork had the descriptor of the lock, so the directory stayed locked until the last child ended.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_child_of_fork_does_not_hold_the_lock() {
    let (far, dir) = (with_objects(1).await, temp_dir());
    let store = over(&far, &dir).build().unwrap();
    let (mut ready, mut child_ready) = std::io::pipe().unwrap();
    // SAFETY: the child takes no lock and allocates no memory.
    let child = unsafe { libc::fork() };
    if child == 0 {
        CachedStore::forget_parent();
        child_ready.write_all(b".").ok();
        loop {
            // SAFETY: the call has no conditions.
            unsafe { libc::pause() };
        }
    }
    ready.read_exact(&mut [0]).unwrap();
    let refused = over(&far, &dir).build().map(|_| ());
    drop(store);
    let again = over(&far, &dir).build().map(|_| ());
    // SAFETY: the child of this test.
    unsafe {
        libc::kill(child, libc::SIGKILL);
        libc::waitpid(child, &mut 0, 0);
    }
    assert!(refused.unwrap_err().to_string().contains("another store uses this directory"));
    again.unwrap();
}

/// Incident: the tier used a directory of another user that contained a link named `pages`. The link was followed, and a
/// file of root was truncated.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_directory_that_another_user_can_change_is_refused() {
    let far = with_objects(1).await;
    let refused = |dir: &TempDir, why: &str| {
        let Err(refused) = over(&far, dir).build() else { panic!("not refused: {why}") };
        let refused = refused.to_string();
        assert!(refused.contains(why), "{refused}");
        assert!(refused.contains(tier_dir(dir).to_str().unwrap()), "{refused}");
    };
    let victim_dir = temp_dir();
    let victim = victim_dir.path().join("victim");
    for name in ["pages", "lock"] {
        fs::write(&victim, [7; 100_000]).unwrap();
        let dir = temp_dir();
        fs::DirBuilder::new().mode(0o700).create(tier_dir(&dir)).unwrap();
        symlink(&victim, tier_dir(&dir).join(name)).unwrap();
        refused(&dir, "symbolic links");
        fs::remove_file(tier_dir(&dir).join(name)).unwrap();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            tier_dir(&dir).join(name),
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
            0,
        )
        .unwrap();
        refused(&dir, "no regular file");
        // A file that another user may write to.
        fs::remove_file(tier_dir(&dir).join(name)).unwrap();
        fs::write(tier_dir(&dir).join(name), []).unwrap();
        let shared = Permissions::from_mode(0o620);
        fs::set_permissions(tier_dir(&dir).join(name), shared).unwrap();
        refused(&dir, "has mode 620");
        assert_eq!(fs::read(&victim).unwrap(), [7; 100_000]);
    }
    for mode in [0o777, 0o1777, 0o775] {
        let dir = temp_dir();
        fs::create_dir(tier_dir(&dir)).unwrap();
        fs::set_permissions(tier_dir(&dir), Permissions::from_mode(mode)).unwrap();
        refused(&dir, "may replace its files");
    }
    let dir = temp_dir();
    let store = over(&far, &dir).build().unwrap();
    read_all(&store, 1).await;
    drop(store);
    let mode = fs::metadata(tier_dir(&dir)).unwrap().mode();
    assert_eq!(mode & 0o7777, 0o700);
    // The same with files of another user.
    let other_user = 65_534;
    for path in [tier_dir(&dir), tier_dir(&dir).join("pages"), tier_dir(&dir).join("lock")] {
        if let Err(error) = chown(&path, Some(other_user), None) {
            return skip(format!("chown: {error}"));
        }
        refused(&dir, "belongs to user 65534");
        chown(&path, Some(0), None).unwrap();
    }
    drop(built(|| over(&far, &dir)).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_versioned_objects_are_stored_and_only_for_their_store() {
    let (far, dir) = (with_objects(5).await, temp_dir());
    far.faults.without_tags.store(true, Relaxed);
    let store = over(&far, &dir).build().unwrap();
    read_all(&store, 5).await;
    drop(store);
    far.faults.without_tags.store(false, Relaxed);
    let mut store = built(|| over(&far, &dir)).await;
    assert_eq!(store.stats().disk_pages, 0);
    // Pages that the writer drops are in memory only, until another store queues them.
    for round in 0.. {
        read_all(&store, 5).await;
        let stats = store.stats();
        if stats.disk_pages > 100 {
            break;
        }
        assert!(round < 100, "{stats:?}");
        drop(store);
        store = built(|| over(&far, &dir)).await;
    }
    // Different content with the same tag, in a store of another name.
    drop(store);
    let other = Arc::new(object_store::memory::InMemory::new());
    for number in 0..5 {
        let (path, bytes) = object(number);
        other.put(&path, content(99, bytes.len()).into()).await.unwrap();
    }
    let builder = || {
        let builder = CachedStore::builder(Arc::clone(&other) as Arc<dyn ObjectStore>);
        builder.page_bytes(PAGE as u32).memory_bytes(2 << 20).disk(tier_dir(&dir), DISK)
    };
    let store = built(builder).await;
    let stats = store.stats();
    assert!(stats.disk_pages > 100, "{stats:?}");
    for number in 0..5 {
        let (path, bytes) = object(number);
        for range in [0..5000, 20_000..90_000] {
            let got = store.get_range(&path, range.start as u64..range.end as u64).await.unwrap();
            assert_eq!(got, content(99, bytes.len())[range]);
        }
    }
    assert_eq!(store.stats().disk_hits, 0);
}

/// A tmpfs, unmounted when dropped.
struct Tmpfs(TempDir);

impl Tmpfs {
    fn new(size: &str) -> Option<Tmpfs> {
        let dir = temp_dir();
        let options = ["-t", "tmpfs", "-o", size, "none"];
        let mounted = Command::new("mount").args(options).arg(dir.path()).output();
        if !mounted.is_ok_and(|output| output.status.success()) {
            skip("mount makes no tmpfs here");
            return None;
        }
        Some(Tmpfs(dir))
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

/// Goal: on a disk that is full at first, then free, then full again, bytes are correct, the statistics report it, and
/// writing resumes without help.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_disk_is_reported_and_corrupts_no_bytes() {
    let far = with_objects(30).await;
    let Some(tmpfs) = Tmpfs::new("size=1m") else { return };
    let dir = &tmpfs.0;
    let fill = dir.path().join("fill");
    fs::write(&fill, vec![1; 2 << 20]).unwrap_err();
    let store = match over(&far, dir).build() {
        Err(error) if error.to_string().contains("direct I/O") => return skip(error),
        built => built.unwrap(),
    };
    read_at_random(&store, 30, 1, 30).await;
    let mut seeds = 2..;
    let limit = Instant::now() + Duration::from_secs(60);
    while store.stats().disk_errors < 2 || !store.stats().disk_is_off {
        read_at_random(&store, 30, seeds.next().unwrap(), 10).await;
        assert!(Instant::now() < limit, "{:?}", store.stats());
    }
    assert_eq!((store.stats().disk_hits, store.stats().disk_bytes_written), (0, 0));
    assert!(store.stats().disk_pages_dropped > 0);
    fs::remove_file(&fill).unwrap();
    // The tier's limit exceeds the tmpfs: it becomes full again.
    let errors = store.stats().disk_errors;
    while store.stats().disk_hits < 100 || store.stats().disk_errors == errors {
        read_at_random(&store, 30, seeds.next().unwrap(), 10).await;
        assert!(Instant::now() < limit, "{:?}", store.stats());
    }
    assert_eq!(store.stats().disk_pages_damaged, 0);
    drop(store);
    let store = built(|| over(&far, dir)).await;
    assert!(store.stats().disk_pages > 50, "{:?}", store.stats());
    read_at_random(&store, 30, 4, 30).await;
    assert_eq!(store.stats().disk_pages_damaged, 0);
}

/// Main loop of the child process of the next test, which kills it.
async fn read_until_killed(dir: PathBuf) {
    let store = built(|| over_files(&dir)).await;
    println!("reading");
    for seed in std::process::id() as u64.. {
        read_at_random(&store, 12, seed, 50).await;
    }
}

fn over_files(dir: &std::path::Path) -> Builder {
    let files = LocalFileSystem::new_with_prefix(dir.join("files")).unwrap();
    let builder = CachedStore::builder(Arc::new(files)).page_bytes(PAGE as u32);
    let builder = builder.memory_bytes(1 << 20).freshness(Freshness::Immutable);
    builder.disk(dir.join("tier"), 1 << 19)
}

/// Goal: after a process is killed at any moment, the next one reads correct bytes from its directory.
/// Method: a child reads random ranges through a tier that holds few of the objects, and is killed at a random moment.
/// After each kill this process reads all objects. The next child continues on the same directory.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_of_a_killed_process_are_correct_or_missed() {
    const DIR: &str = "MILLPOND_OBJECTS_KILLED_IN";
    if let Some(dir) = std::env::var_os(DIR) {
        return read_until_killed(dir.into()).await;
    }
    let dir = temp_dir();
    fs::create_dir_all(dir.path().join("files/objects")).unwrap();
    for number in 0..12 {
        let (path, bytes) = object(number);
        fs::write(dir.path().join("files").join(path.as_ref()), bytes).unwrap();
    }
    let (mut written, mut hits, mut recovered) = (0, 0, 0);
    for round in 0..10u64 {
        let test = "pages_of_a_killed_process_are_correct_or_missed";
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([test, "--exact", "--nocapture"])
            .env(DIR, dir.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap().contains("reading")), "the child reads");
        tokio::time::sleep(Duration::from_micros(round * round * 1500 + round * 377)).await;
        child.kill().unwrap();
        // Killed by the signal, not ended by an assertion.
        assert_eq!(child.wait().unwrap().code(), None);
        let store = built(|| over_files(dir.path())).await;
        recovered += store.stats().disk_pages;
        read_all(&store, 12).await;
        (written, hits) =
            (written + store.stats().disk_bytes_written, hits + store.stats().disk_hits);
    }
    assert!(written > 0 && hits > 0 && recovered > 100, "{written} {hits} {recovered}");
}
