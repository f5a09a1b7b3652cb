//! Changes of the memory limit while files are in use.

mod common;

use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use millpond::keeper::{Address, Server};
use millpond::{BackendChoice, Engine, EngineBuilder, File};

use common::{
    Random, builder, in_own_process, read_write, rss_bytes, run_and_stop, temp_dir, write_back,
};

const PAGE: usize = 4096;
const CACHE_BYTES: u64 = 64 << 20;
const FILE_PAGES: u64 = 12 << 10;
const SMALL_BYTES: u64 = 8 << 20;
/// As in `memory`.
const SLACK_BYTES: u64 = 4 << 20;

fn page(number: u64) -> Vec<u8> {
    number.to_le_bytes().repeat(PAGE / 8)
}

fn read_right(file: &File, number: u64, dst: &mut [u8]) {
    assert_eq!(file.read_at(dst, number * PAGE as u64).unwrap(), PAGE);
    assert!(*dst == page(number)[..], "page {number}");
}

fn read_all(file: &File) {
    let mut bytes = vec![0; PAGE];
    (0..FILE_PAGES).for_each(|number| read_right(file, number, &mut bytes));
}

/// Reads all pages, lowers the cache limit, reads all again, and restores the limit.
fn lower_and_raise_limit(builder: EngineBuilder) {
    let dir = temp_dir();
    let path = dir.path().join("file");
    let made = std::fs::File::create(&path).unwrap();
    (0..FILE_PAGES).for_each(|n| made.write_all_at(&page(n), n * PAGE as u64).unwrap());
    let engine = builder.build().unwrap();
    let file = engine.open(&path, &read_write()).unwrap();
    let base = rss_bytes();
    let grown = || rss_bytes().saturating_sub(base);
    read_all(&file);
    assert!(grown() > 40 << 20, "{} bytes resident", grown());

    assert_eq!(engine.set_cache_bytes(SMALL_BYTES).unwrap(), SMALL_BYTES);
    assert_eq!(engine.cache_bytes(), SMALL_BYTES);
    for _ in 0..2 {
        assert!(grown() <= SMALL_BYTES + SLACK_BYTES, "{} bytes resident", grown());
        assert!(engine.stats().memory_bytes <= SMALL_BYTES, "{:?}", engine.stats());
        read_all(&file);
    }

    assert_eq!(engine.set_cache_bytes(CACHE_BYTES).unwrap(), CACHE_BYTES);
    read_all(&file);
    let before = engine.stats().misses;
    read_all(&file);
    assert_eq!(engine.stats().misses, before, "all of it is cached");
}

/// Goal: memory beyond a lowered limit is returned to the system, and is allocated again after the
/// limit is raised.
#[test]
fn memory_beyond_the_limit_is_released() {
    in_own_process("memory_beyond_the_limit_is_released", Duration::from_secs(60), || {
        lower_and_raise_limit(builder(CACHE_BYTES, BackendChoice::Auto));
    });
}

/// The same for memory that a keeper shares.
#[test]
fn shared_memory_beyond_the_limit_is_released() {
    in_own_process("shared_memory_beyond_the_limit_is_released", Duration::from_secs(60), || {
        let server = Server::bind(&Address::unique()).unwrap();
        let (address, stopper) = (server.address().clone(), server.stopper());
        let keeper = thread::spawn(move || server.serve(|_| ()));
        lower_and_raise_limit(builder(CACHE_BYTES, BackendChoice::Auto).keeper(address));
        stopper.stop_when_idle();
        keeper.join().unwrap().unwrap();
    });
}

/// Goal: readers and writers find the correct bytes, and free frames, while the limit goes down and
/// up.
#[test]
fn reads_and_writes_continue_during_a_resize() {
    let dir = temp_dir();
    let engine = builder(CACHE_BYTES, BackendChoice::Auto).build().unwrap();
    let open = |name: &str| engine.open(dir.path().join(name), &write_back()).unwrap();
    let files = ["one", "two"].map(open);
    for file in &files {
        (0..FILE_PAGES / 2).for_each(|n| file.write_all_at(&page(n), n * PAGE as u64).unwrap());
    }
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for (seed, file) in files.iter().enumerate() {
            let stop = &stop;
            scope.spawn(move || {
                let (mut random, mut bytes) = (Random(seed as u64), vec![0; PAGE]);
                while !stop.load(Relaxed) {
                    let number = random.below(FILE_PAGES / 2);
                    read_right(file, number, &mut bytes);
                    if random.chance(100) {
                        file.write_all_at(&page(number), number * PAGE as u64).unwrap();
                    }
                }
            });
        }
        run_and_stop(&stop, || {
            for mib in [32, 8, 1, 64, 2, 16, 1, 64].into_iter().cycle().take(40) {
                let holds = engine.set_cache_bytes(mib << 20).unwrap();
                assert!(holds >= mib << 20 && holds <= CACHE_BYTES, "{holds} of {mib} MiB");
                assert_eq!(engine.cache_bytes(), holds);
                thread::sleep(Duration::from_millis(5));
            }
        });
    });
    for file in files {
        let mut bytes = vec![0; PAGE];
        (0..FILE_PAGES / 2).for_each(|number| read_right(&file, number, &mut bytes));
        file.close().unwrap();
    }
}

/// Sets the limit until the engine has reached it.
fn await_limit(engine: &Engine, bytes: u64) {
    let started = Instant::now();
    loop {
        let holds = engine.set_cache_bytes(bytes).unwrap();
        if holds == bytes {
            return;
        }
        assert!(engine.stats().memory_bytes <= holds, "{holds}: {:?}", engine.stats());
        assert!(started.elapsed() < Duration::from_secs(60), "still {holds} bytes");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Goal: dirty pages stay until they are written back, which starts at once, at any age.
#[test]
fn dirty_pages_are_written_first() {
    let dir = temp_dir();
    let builder = builder(CACHE_BYTES, BackendChoice::Auto);
    let engine = builder.dirty_age_max(Duration::from_secs(3600)).build().unwrap();
    let file = engine.open(dir.path().join("file"), &write_back()).unwrap();
    // Below half of the dirty limit, above which they would be written back anyway.
    let pages = (12 << 20) / PAGE as u64;
    (0..pages).for_each(|n| file.write_all_at(&page(n), n * PAGE as u64).unwrap());
    await_limit(&engine, SMALL_BYTES);
    assert!(engine.stats().memory_bytes <= SMALL_BYTES, "{:?}", engine.stats());
    let mut bytes = vec![0; PAGE];
    (0..pages).for_each(|number| read_right(&file, number, &mut bytes));
    file.close().unwrap();
}

/// Goal: a view pins its page, and the call returns the limit that holds.
#[test]
fn views_keep_their_pages() {
    let dir = temp_dir();
    let path = dir.path().join("file");
    std::fs::write(&path, vec![7; 16 << 20]).unwrap();
    let engine = builder(CACHE_BYTES, BackendChoice::Auto).build().unwrap();
    let file = engine.open(&path, &read_write()).unwrap();
    let views: Vec<_> =
        (0..(12 << 20) / PAGE as u64).map(|n| file.view(n * PAGE as u64, PAGE).unwrap()).collect();
    let holds = engine.set_cache_bytes(SMALL_BYTES).unwrap();
    assert!((12 << 20..CACHE_BYTES).contains(&holds), "{holds}");
    assert_eq!(engine.cache_bytes(), holds);
    assert!(views.iter().all(|view| view.iter().all(|byte| *byte == 7)));
    drop(views);
    assert_eq!(engine.set_cache_bytes(SMALL_BYTES).unwrap(), SMALL_BYTES);
}

#[test]
fn invalid_limits_are_refused() {
    let engine = builder(CACHE_BYTES, BackendChoice::Auto).build().unwrap();
    for bytes in [0, 4096, CACHE_BYTES + 1, u64::MAX] {
        let error = engine.set_cache_bytes(bytes).unwrap_err();
        assert_eq!(error.errno(), libc::EINVAL, "{error}");
        assert!(error.to_string().contains("must be 16384 to 67108864"), "{error}");
    }
    assert_eq!(engine.cache_bytes(), CACHE_BYTES);
}
