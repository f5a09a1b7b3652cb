//! One limit for all memory of the engine: the resident memory that the kernel reports grows by no
//! more.
//!
//! Each test runs in a child process. Results are printed.

mod common;

use std::time::{Duration, Instant};

use millpond::{Advice, BackendChoice, Engine, Error, WriteMode};

use common::{Random, cache_for, engine, in_own_process, read_write, rss_bytes, temp_dir};

const SLACK_BYTES: u64 = 4 << 20;

/// Runs each operation once, so that memory of the program itself is resident before the
/// measurement.
fn warm_up() {
    let dir = temp_dir();
    let engine = engine(1 << 20, BackendChoice::Auto);
    let file = engine.open(dir.path().join("file"), &read_write()).unwrap();
    file.truncate(8 << 20).unwrap();
    let mut bytes = vec![0; 4096];
    for page in 0..2048u64 {
        file.read_at(&mut bytes, page * 4096).unwrap();
    }
    file.write_all_at(&vec![1; 1 << 20], 0).unwrap();
    let _ = file.view(0, 100).unwrap();
    println!("{:?}", engine.stats());
}

struct Watch {
    base: u64,
    peak: u64,
}

impl Watch {
    fn new() -> Watch {
        let base = rss_bytes();
        Watch { base, peak: base }
    }

    fn check(&mut self, engine: &Engine, what: &str) {
        let stats = engine.stats();
        assert!(stats.memory_bytes <= engine.cache_bytes(), "{what}: {stats:?}");
        self.peak = self.peak.max(rss_bytes());
        let grown = self.peak - self.base;
        assert!(
            grown <= engine.cache_bytes() + SLACK_BYTES,
            "{what}: {grown} bytes resident, of {} allowed and {} counted",
            engine.cache_bytes(),
            stats.memory_bytes
        );
    }

    fn report(&self, engine: &Engine, what: &str) {
        println!(
            "{what}: cache_bytes {}, counted {}, resident set grew by {} ({:+} of the limit)",
            engine.cache_bytes(),
            engine.stats().memory_bytes,
            self.peak - self.base,
            (self.peak - self.base) as i64 - engine.cache_bytes() as i64,
        );
    }
}

/// Goal: tables of a huge sparse file, in which each page needs a leaf of its own, stay within the
/// limit.
/// Method: 10^6 random pages of 1 TiB.
#[test]
#[cfg_attr(debug_assertions, ignore = "slow: run by ./test at full speed")]
fn random_pages_of_a_sparse_terabyte() {
    in_own_process("random_pages_of_a_sparse_terabyte", Duration::from_secs(300), || {
        warm_up();
        let sizes: &[u64] = if cfg!(debug_assertions) { &[64] } else { &[8, 64, 256] };
        for &cache_mib in sizes {
            let cache_bytes = cache_mib << 20;
            let dir = temp_dir();
            let path = dir.path().join("file");
            std::fs::File::create(&path).unwrap().set_len(1 << 40).unwrap();
            let mut bytes = vec![0; 4096];
            let mut watch = Watch::new();
            let engine = engine(cache_bytes, BackendChoice::Auto);
            let file = engine.open(&path, &read_write()).unwrap();
            let mut random = Random(1);
            let started = Instant::now();
            for number in 0..1_000_000 {
                let page = random.below(1 << 28);
                assert_eq!(file.read_at(&mut bytes, page * 4096).unwrap(), 4096);
                if number % 50_000 == 0 {
                    watch.check(&engine, "sparse terabyte");
                }
            }
            watch.check(&engine, "sparse terabyte");
            watch.report(&engine, &format!("sparse terabyte, {:.1?}", started.elapsed()));
        }
    });
}

/// Goal: the objects of open files count in the limit.
/// Method: 32,768 files of one page, all open, each read once, and then again. Where no more may be open,
/// a quarter of that shows it, too.
#[test]
#[cfg_attr(debug_assertions, ignore = "slow: run by ./test at full speed")]
fn many_open_files() {
    const WANTED: u64 = 32_768;
    in_own_process("many_open_files", Duration::from_secs(300), || {
        let files_max = open_files_max(WANTED);
        if files_max < WANTED / 4 {
            common::skip(format_args!("RLIMIT_NOFILE allows {files_max} open files"));
            return;
        }
        warm_up();
        let dir = temp_dir();
        let path = |number: u64| dir.path().join(format!("{}/{number}", number % 64));
        for sub in 0..64 {
            std::fs::create_dir(dir.path().join(format!("{sub}"))).unwrap();
        }
        for number in 0..files_max {
            std::fs::write(path(number), [number as u8; 4096]).unwrap();
        }
        // The list of handles is the caller's memory: resident before it is measured.
        let mut files = Vec::with_capacity(files_max as usize);
        for cache_bytes in [files_max * 2944, 512 << 20] {
            files.resize_with(files_max as usize, || None);
            let mut watch = Watch::new();
            let engine = engine(cache_bytes, BackendChoice::Auto);
            let mut bytes = vec![0; 8192];
            let started = Instant::now();
            for number in 0..files_max {
                let file = engine
                    .open(path(number), &read_write())
                    .unwrap_or_else(|error| panic!("file {number}: {error}: {:?}", engine.stats()));
                assert_eq!(file.read_at(&mut bytes, 0).unwrap(), 4096);
                assert_eq!(bytes[77], number as u8);
                files[number as usize] = Some(file);
                if number % 4096 == 0 {
                    watch.check(&engine, "open files");
                }
            }
            for number in 0..files_max {
                let file = files[number as usize].as_ref().unwrap();
                assert_eq!(file.read_at(&mut bytes, 0).unwrap(), 4096);
                assert_eq!(bytes[77], number as u8);
            }
            watch.check(&engine, "open files");
            watch.report(&engine, &format!("{files_max} open files, {:.1?}", started.elapsed()));
            files.clear();
            println!("all closed: counted {}", engine.stats().memory_bytes);
        }
    });
}

/// Goal: an engine whose limit has no space for another file refuses to open it, and goes on.
#[test]
#[cfg_attr(debug_assertions, ignore = "slow: run by ./test at full speed")]
fn too_many_files_for_the_limit_are_refused() {
    in_own_process("too_many_files_for_the_limit_are_refused", Duration::from_secs(60), || {
        let dir = temp_dir();
        let engine = engine(64 << 10, BackendChoice::Auto);
        let mut files = Vec::new();
        let refused = loop {
            let path = dir.path().join(files.len().to_string());
            match engine.open(&path, &read_write()) {
                Ok(file) => files.push(file),
                Err(error) => break error,
            }
            assert!(files.len() < 100, "more files than the limit has room for");
        };
        assert!(matches!(refused, Error::NoBuffers { .. }), "{refused}");
        assert_eq!(refused.errno(), libc::ENOBUFS);
        for (number, file) in files.iter().enumerate() {
            file.write_all_at(&[number as u8; 9000], 0).unwrap();
        }
        let mut bytes = [0; 10_000];
        for (number, file) in files.iter().enumerate() {
            assert_eq!(file.read_at(&mut bytes, 0).unwrap(), 9000);
            assert_eq!(bytes[..9000], [number as u8; 9000]);
        }
        assert!(engine.stats().memory_bytes <= engine.cache_bytes());
        files.truncate(files.len() / 2);
        let file = engine.open(dir.path().join("0"), &read_write()).unwrap();
        assert_eq!(file.read_at(&mut bytes, 0).unwrap(), 9000);
    });
}

/// Goal: memory that was used for one page size is used for another one later, never for both at
/// once.
/// Method: files of every page size in turn fill the cache, several times over, with sequential
/// reads, so that read-ahead takes part.
#[test]
#[cfg_attr(debug_assertions, ignore = "slow: run by ./test at full speed")]
fn page_sizes_take_turns() {
    in_own_process("page_sizes_take_turns", Duration::from_secs(300), || {
        warm_up();
        for cache_bytes in [8u64 << 20, 128 << 20] {
            let mut bytes = vec![0; 1 << 16];
            let mut watch = Watch::new();
            let engine = engine(cache_bytes, BackendChoice::Auto);
            for _ in 0..2 {
                for page_shift in [12, 16, 13, 15, 14] {
                    let dir = temp_dir();
                    let path = dir.path().join("file");
                    let len = cache_bytes + cache_bytes / 2;
                    std::fs::File::create(&path).unwrap().set_len(len).unwrap();
                    let options = read_write().page_bytes(1 << page_shift);
                    let file = engine.open(&path, &options).unwrap();
                    for at in (0..len).step_by(bytes.len()) {
                        assert_eq!(file.read_at(&mut bytes, at).unwrap(), bytes.len());
                    }
                    watch.check(&engine, "page sizes");
                    file.advise(0, 0, Advice::DontNeed).unwrap();
                    watch.check(&engine, "page sizes");
                }
            }
            watch.report(&engine, "page sizes in turn");
        }
    });
}

/// Raises the limit on open files as far as possible; returns the number of files that may be open,
/// at most `wanted`.
fn open_files_max(wanted: u64) -> u64 {
    const SPARE: u64 = 100;
    if common::set_limit(libc::RLIMIT_NOFILE, wanted + SPARE, wanted + SPARE) {
        return wanted;
    }
    let hard = common::hard_limit(libc::RLIMIT_NOFILE);
    assert!(common::set_limit(libc::RLIMIT_NOFILE, hard, hard));
    wanted.min(hard - SPARE)
}

/// Goal: the memory of files with many ranges held at the same time stays within the limit.
/// Method: many files, each with eight reads in flight, each in another region.
/// Incident: each such file had a table of 8 KiB for its range lock until it was closed, which the
/// limit did not include: 80 MiB beyond a limit of 64.
#[test]
#[cfg_attr(debug_assertions, ignore = "slow: run by ./test at full speed")]
fn reads_under_way_in_many_files() {
    const READS: u64 = 8;
    const REGION: u64 = 64 << 10;
    in_own_process("reads_under_way_in_many_files", Duration::from_secs(300), || {
        let files_max = open_files_max(8000);
        warm_up();
        let dir = temp_dir();
        // A delay in the back end, so that reads stay in flight.
        for number in 0..files_max {
            let path = dir.path().join(number.to_string());
            std::fs::File::create(path).unwrap().set_len(READS * REGION).unwrap();
        }
        let engine = common::builder(48 << 20, BackendChoice::Threads)
            .readahead_bytes_max(0)
            .build()
            .unwrap();
        let queue = engine.queue(READS as usize).unwrap();
        let mut files = Vec::with_capacity(files_max as usize);
        let mut watch = Watch::new();
        for number in 0..files_max {
            let path = dir.path().join(number.to_string());
            let file = std::sync::Arc::new(engine.open(path, &read_write()).unwrap());
            let mut reads: Vec<_> = (0..READS)
                .map(|read| millpond::queue::Request::read(&file, vec![1; 16], read * REGION))
                .collect();
            queue.submit_all(reads.drain(..)).unwrap();
            let done = queue.wait(READS as usize, READS as usize, None).unwrap();
            for read in done {
                assert_eq!(read.result().unwrap(), 16);
                assert_eq!(read.into_buffer(), [0; 16]);
            }
            files.push(file);
            if number % 500 == 0 {
                watch.check(&engine, "reads under way");
            }
        }
        watch.check(&engine, "reads under way");
        watch.report(&engine, &format!("{READS} reads under way in each of {files_max} files"));
        assert!(engine.stats().misses >= files_max * READS);
        drop((files, queue));
        let left = engine.stats().memory_bytes;
        assert!(left < engine.cache_bytes(), "{left} bytes are counted for no file");
    });
}

/// Goal: the sets of dirty pages, of unsynced pages and of blocks that files have stay within the
/// limit.
/// Method: many files with a write each that waits, or went through, and one with such writes far
/// apart.
#[test]
#[cfg_attr(debug_assertions, ignore = "slow: run by ./test at full speed")]
fn sets_of_pages_of_many_files() {
    in_own_process("sets_of_pages_of_many_files", Duration::from_secs(300), || {
        // A file that is written may have two descriptors.
        let files_max = open_files_max(8000) / 2;
        warm_up();
        for mode in [WriteMode::Back, WriteMode::Through] {
            let dir = temp_dir();
            let engine = common::builder(64 << 20, BackendChoice::Threads)
                .dirty_age_max(Duration::from_secs(3600))
                .build()
                .unwrap();
            let options = read_write().write_mode(mode);
            let mut files = Vec::with_capacity(files_max as usize);
            let mut watch = Watch::new();
            for number in 0..files_max {
                let file = engine.open(dir.path().join(number.to_string()), &options).unwrap();
                file.write_all_at(&[1; 100], 0).unwrap();
                files.push(file);
                if number % 500 == 0 {
                    watch.check(&engine, "sets of files");
                }
            }
            watch.report(&engine, &format!("{mode:?}, a page of each of {files_max} files"));
            let sparse = engine.open(dir.path().join("sparse"), &options).unwrap();
            sparse.truncate(1 << 40).unwrap();
            for number in 0..10_000u64 {
                // No two pages in one leaf of the table, in random order.
                sparse.write_all_at(&[1; 100], (number * 7919 % 10_000) * (4 << 20)).unwrap();
                if number % 500 == 0 {
                    watch.check(&engine, "sets of a file");
                }
            }
            watch.check(&engine, "sets of a file");
            watch.report(&engine, &format!("{mode:?}, pages far apart"));
            drop(files);
        }
    });
}

/// Goal: the records of unsynced writes stay within the limit, also in a cache of few pages that a
/// single write fills.
#[test]
#[cfg_attr(debug_assertions, ignore = "slow: run by ./test at full speed")]
fn writes_as_long_as_the_cache() {
    let dir = temp_dir();
    for pages in 4..40 {
        let engine = engine(cache_for(pages, 4096), BackendChoice::Auto);
        for mode in [WriteMode::Through, WriteMode::Back] {
            let path = dir.path().join(format!("{pages}-{mode:?}"));
            let file = engine.open(&path, &read_write().write_mode(mode)).unwrap();
            for len in 0..12 {
                let src = vec![1; (pages as usize * 4096).saturating_sub(len * 2000)];
                file.write_all_at(&src, 1000).unwrap();
                let stats = engine.stats();
                assert!(stats.memory_bytes <= engine.cache_bytes(), "{pages}, {len}: {stats:?}");
            }
        }
    }
}
