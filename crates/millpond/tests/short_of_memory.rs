//! Temporary shortages of memory: they cost speed, and have no effect once they are over.
//!
//! Each test runs in a child process. `MILLPOND_TEST_SEED` replays a run, `MILLPOND_TEST_SCALE`
//! makes it longer.

mod common;

use std::path::Path;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use millpond::queue::Request;
use millpond::{
    Admission, Advice, AsyncFile, BackendChoice, Backing, Engine, File, OpenOptions, WriteMode,
};

use common::{Random, hard_limit, in_own_process, read_write, scaled, set_limit, temp_dir};

const FILE_BYTES: u64 = 8 << 20;
const CACHE_BYTES: u64 = 32 << 20;
/// Room for small allocations while memory is short: less than a chunk of the cache takes.
const SLACK_BYTES: u64 = 1 << 20;

/// The limit that the process has reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shortage {
    /// RLIMIT_DATA.
    Data,
    /// RLIMIT_AS.
    AddressSpace,
    /// The maximum number of mappings of a process (`vm.max_map_count`).
    Mappings,
}

/// A shortage, which ends when it is dropped.
struct Moment {
    shortage: Shortage,
    /// Mappings that use up the maximum.
    taken: Vec<(*mut libc::c_void, usize)>,
}

fn status_bytes(field: &str) -> u64 {
    common::status_field(Path::new("/proc/self/status"), field).unwrap() << 10
}

impl Moment {
    fn begin(shortage: Shortage) -> Moment {
        let mut taken = Vec::new();
        let limit = |resource, field| {
            let most = hard_limit(resource);
            assert!(set_limit(resource, (status_bytes(field) + SLACK_BYTES).min(most), most));
        };
        match shortage {
            Shortage::Data => limit(libc::RLIMIT_DATA, "VmData"),
            Shortage::AddressSpace => limit(libc::RLIMIT_AS, "VmSize"),
            Shortage::Mappings => taken = take_mappings(),
        }
        Moment { shortage, taken }
    }
}

impl Drop for Moment {
    fn drop(&mut self) {
        let lift =
            |resource| assert!(set_limit(resource, hard_limit(resource), hard_limit(resource)));
        match self.shortage {
            Shortage::Data => lift(libc::RLIMIT_DATA),
            Shortage::AddressSpace => lift(libc::RLIMIT_AS),
            Shortage::Mappings => {
                for &(at, len) in &self.taken {
                    // SAFETY: mapped by `take_mappings`.
                    unsafe { libc::munmap(at, len) };
                }
            }
        }
    }
}

/// Takes all but a few of the mappings that the process may have: pages whose neighbours have other
/// permissions.
fn take_mappings() -> Vec<(*mut libc::c_void, usize)> {
    const PAGE: usize = 4096;
    const LEFT: usize = 8;
    let mut taken = Vec::with_capacity(64);
    loop {
        const PAGES: usize = 8192;
        // SAFETY: new mappings.
        let at = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            libc::mmap(ptr::null_mut(), PAGES * PAGE, libc::PROT_NONE, flags, -1, 0)
        };
        if at == libc::MAP_FAILED {
            break;
        }
        taken.push((at, PAGES * PAGE));
        let protect = |page: usize, access| {
            // SAFETY: within the mapping above.
            unsafe { libc::mprotect(at.byte_add(page * PAGE), PAGE, access) == 0 }
        };
        let mut page = 1;
        while page < PAGES && protect(page, libc::PROT_READ) {
            page += 2;
        }
        if page < PAGES {
            // A few are free for thread stacks and the like.
            for page in (1..page).step_by(2).take(LEFT) {
                protect(page, libc::PROT_NONE);
            }
            break;
        }
        if taken.len() == taken.capacity() {
            break;
        }
    }
    taken
}

fn byte_at(offset: u64) -> u8 {
    (offset.wrapping_mul(37) ^ (offset >> 12).wrapping_mul(11)) as u8
}

fn content(offset: u64, len: usize) -> Vec<u8> {
    (offset..offset + len as u64).map(byte_at).collect()
}

/// Reads all pages of the file, one by one.
fn read_all(file: &File, bytes: &mut [u8], whole: &[u8]) {
    for offset in (0..whole.len()).step_by(bytes.len()) {
        assert_eq!(file.read_at(bytes, offset as u64).unwrap(), bytes.len());
        assert!(*bytes == whole[offset..][..bytes.len()], "{offset}");
    }
}

fn builder() -> millpond::EngineBuilder {
    Engine::builder()
        .cache_bytes(CACHE_BYTES)
        .backend(BackendChoice::Threads)
        .readahead_bytes_max(0)
        .admission(Admission::Always)
}

/// After the shortage a file that fits is cached as a whole: a second pass only hits.
fn caches_all(engine: &Engine, file: &File, page_bytes: usize, whole: &[u8]) {
    let mut bytes = vec![0; page_bytes];
    for _ in 0..2 {
        read_all(file, &mut bytes, whole);
    }
    let before = engine.stats();
    read_all(file, &mut bytes, whole);
    let after = engine.stats();
    assert_eq!(after.uncached_reads, before.uncached_reads, "reads go around the cache");
    assert_eq!(after.misses, before.misses, "pages are missing");
    assert!(after.memory_bytes <= engine.cache_bytes());
}

fn moments(random: &mut Random, shortage: Shortage, keeper: bool, page_bytes: usize) {
    println!("{shortage:?}, keeper: {keeper}, pages of {page_bytes}");
    let dir = temp_dir();
    let path = dir.path().join("file");
    let whole = content(0, FILE_BYTES as usize);
    std::fs::write(&path, &whole).unwrap();
    let mut builder = builder();
    if keeper {
        builder = builder.keeper(millpond::keeper::spawn().unwrap());
    }
    let engine = builder.build().unwrap();
    let modes = [WriteMode::Through, WriteMode::Back];
    let options =
        read_write().page_bytes(page_bytes as u32).write_mode(modes[random.below(2) as usize]);
    let file = engine.open(&path, &options).unwrap();
    let mut bytes = vec![0; page_bytes];
    // The first operations may start threads.
    file.read_at(&mut bytes, 0).unwrap();
    file.write_all_at(&bytes, 0).unwrap();
    for _ in 0..2 {
        // More operations than chunk numbers exist, so that a number lost by each is noticed.
        let operations = 600 + random.below(2000);
        if random.chance(500) {
            file.advise(0, 0, Advice::DontNeed).unwrap();
        }
        let moment = Moment::begin(shortage);
        for _ in 0..operations {
            let offset = random.below(FILE_BYTES / page_bytes as u64) * page_bytes as u64;
            let part = &whole[offset as usize..][..page_bytes];
            if random.chance(200) {
                file.write_all_at(part, offset).unwrap();
            } else {
                assert_eq!(file.read_at(&mut bytes, offset).unwrap(), page_bytes);
                assert!(bytes == part, "{offset}");
            }
        }
        drop(moment);
        caches_all(&engine, &file, page_bytes, &whole);
    }
    file.sync_all().unwrap();
    drop(file);
    assert!(std::fs::read(&path).unwrap() == whole);
}

fn test_moments(test: &str, shortage: Shortage) {
    in_own_process(test, Duration::from_secs(300), || {
        let mut random = Random::from_environment();
        for _ in 0..scaled(1) {
            for keeper in [false, true] {
                for page_bytes in [4096, 16384] {
                    moments(&mut random, shortage, keeper, page_bytes);
                }
            }
        }
    });
}

/// Goal: a shortage of memory costs speed only: all operations succeed with the correct bytes, and
/// the cache grows to its limit afterwards.
/// Incident: each miss during a shortage used up a chunk of the address space permanently. After a
/// few hundred misses no page was cached any more until the engine was dropped.
#[test]
fn a_limit_on_data_passes() {
    test_moments("a_limit_on_data_passes", Shortage::Data);
}

/// The same for a limit on address space, with which a keeper's memory can't be mapped.
#[test]
fn a_limit_on_address_space_passes() {
    test_moments("a_limit_on_address_space_passes", Shortage::AddressSpace);
}

/// The same for a process that has the maximum number of mappings.
#[test]
fn a_lack_of_mappings_passes() {
    test_moments("a_lack_of_mappings_passes", Shortage::Mappings);
}

/// Goal: pages of a size that has no memory yet, and gets none, evict no other pages: those would make
/// no room for them.
/// Incident: one miss emptied the cache.
#[test]
fn a_size_without_memory_evicts_no_other_pages() {
    in_own_process("a_size_without_memory_evicts_no_other_pages", Duration::from_secs(60), || {
        let dir = temp_dir();
        let whole = content(0, FILE_BYTES as usize);
        let engine = builder().build().unwrap();
        let open = |name: &str, page_bytes: usize| {
            let path = dir.path().join(name);
            std::fs::write(&path, &whole).unwrap();
            engine.open(&path, &read_write().page_bytes(page_bytes as u32)).unwrap()
        };
        let (small, large) = (open("small", 4096), open("large", 65536));
        let mut bytes = vec![0; 65536];
        read_all(&small, &mut bytes[..4096], &whole);
        let moment = Moment::begin(Shortage::Data);
        let before = engine.stats();
        read_all(&large, &mut bytes, &whole);
        read_all(&small, &mut bytes[..4096], &whole);
        let after = engine.stats();
        drop(moment);
        assert!(after.uncached_reads > before.uncached_reads, "memory was not short");
        assert_eq!(after.evictions, before.evictions);
        caches_all(&engine, &large, 65536, &whole);
    });
}

/// Goal: a thread that the engine starts while there is no memory ends no process: it needs a stack alone, or the
/// operation fails.
/// Incident: the standard library aborted, as it had no memory for the thread's alternative signal stack.
#[test]
fn a_thread_is_started_without_memory() {
    in_own_process("a_thread_is_started_without_memory", Duration::from_secs(60), || {
        let dir = temp_dir();
        let engine = builder().build().unwrap();
        let file = Arc::new(engine.open(dir.path().join("file"), &read_write()).unwrap());
        // The C library keeps the stacks of ended threads for others. They give their alternative stacks back.
        let begin = |_| std::thread::Builder::new().stack_size(3 << 20).spawn(|| ()).unwrap();
        let ended: Vec<_> = (0..4).map(begin).collect();
        ended.into_iter().for_each(|thread| thread.join().unwrap());
        let moment = Moment::begin(Shortage::AddressSpace);
        let most = hard_limit(libc::RLIMIT_AS);
        assert!(set_limit(libc::RLIMIT_AS, status_bytes("VmSize"), most));
        let queue = engine.queue(1);
        let written = queue.and_then(|queue| {
            queue.submit(Request::write(&file, vec![7; 4096], 0))?;
            queue.wait(1, 1, None)?.remove(0).into_parts().0
        });
        drop(moment);
        assert_eq!(written.unwrap(), 4096, "there is a stack");
    });
}

/// Mappings of this process whose names contain `name`.
fn mappings_of(name: &str) -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.contains(name)).count()
}

/// Several runs of dirty pages, and a sync of them.
fn write_runs(file: &File) {
    for run in 0..16 {
        file.write_all_at(&[run as u8; 4096], run * (64 << 10)).unwrap();
    }
    file.sync_all().unwrap();
}

/// Goal: batches of direct transfers use AIO again when memory is available.
/// Incident: after the first AIO context that the kernel refused the engine asked for none again.
#[test]
fn contexts_are_asked_for_again() {
    in_own_process("contexts_are_asked_for_again", Duration::from_secs(60), || {
        let dir = temp_dir();
        let engine = builder().build().unwrap();
        let options: OpenOptions =
            read_write().write_mode(WriteMode::Back).backing(Backing::DirectInPlace);
        let file = match engine.open(dir.path().join("file"), &options) {
            Ok(file) => file,
            Err(error) => return common::skip(format_args!("direct I/O: {error}")),
        };
        file.truncate(1 << 20).unwrap();
        file.read_at(&mut [0; 4096], 0).unwrap();
        let moment = Moment::begin(Shortage::AddressSpace);
        let most = hard_limit(libc::RLIMIT_AS);
        assert!(set_limit(libc::RLIMIT_AS, status_bytes("VmSize"), most));
        write_runs(&file);
        drop(moment);
        if mappings_of("[aio]") > 0 {
            return common::skip("AIO contexts are mapped in spite of RLIMIT_AS");
        }
        write_runs(&file);
        if mappings_of("[aio]") == 0 {
            // Whether this machine has AIO.
            let other = builder().build().unwrap();
            let fresh = other.open(dir.path().join("other"), &options).unwrap();
            write_runs(&fresh);
            assert_eq!(mappings_of("[aio]"), 0, "only an engine that had memory has a context");
            common::skip("no AIO here");
        }
    });
}

/// Goal: background reads use a ring again once descriptors are available.
/// Incident: a driver that got no ring when it started read one page after the other until the
/// engine was dropped.
#[test]
fn a_ring_is_asked_for_again() {
    in_own_process("a_ring_is_asked_for_again", Duration::from_secs(60), || {
        if !common::has_uring() {
            return;
        }
        let dir = temp_dir();
        let path = dir.path().join("file");
        std::fs::write(&path, content(0, 1 << 20)).unwrap();
        let engine = builder().backend(BackendChoice::Uring).build().unwrap();
        let tasks = AsyncFile::from(engine.open(&path, &read_write()).unwrap());
        let read = |page: u64| {
            let mut bytes = [0; 100];
            assert_eq!(common::block_on(tasks.read_at(&mut bytes, page * 4096)).unwrap(), 100);
            assert!(bytes[..] == content(page * 4096, 100));
        };
        let most = hard_limit(libc::RLIMIT_NOFILE);
        assert!(set_limit(libc::RLIMIT_NOFILE, 3, most));
        (0..4).for_each(read);
        assert!(set_limit(libc::RLIMIT_NOFILE, most, most));
        // The driver asks for a ring after the next batch.
        (4..8).for_each(read);
        for page in 8..200 {
            if mappings_of("io_uring") > 0 {
                return;
            }
            read(page);
        }
        panic!("the driver has no ring");
    });
}
