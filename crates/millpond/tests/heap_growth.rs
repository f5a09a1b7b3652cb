//! The heap grows with open files and with operations under way. It does not grow with operations that have ended.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::AtomicI64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use millpond::direct::{DirectRequest, SegmentList};
use millpond::queue::Request;
use millpond::sim::SimOptions;
use millpond::{AsyncFile, BackendChoice, Engine, WriteMode};

use common::requests::each;
use common::{Random, block_on, direct, has_uring, in_own_process, read_write, scaled, temp_dir};

/// Bytes that are allocated. Relaxed: a sum, read when all operations have ended.
static LIVE: AtomicI64 = AtomicI64::new(0);

struct Heap;

// SAFETY: blocks are the system's.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size() as i64, Relaxed);
        // SAFETY: the caller's duty.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size() as i64, Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static HEAP: Heap = Heap;

const PAGE: usize = 4096;
const FILES: u64 = 40;
/// Growth between two measurements that cached pages and list capacities may cause.
const GROWTH_MAX: i64 = 64 << 10;

/// One of each operation, on a file that is opened for it.
fn round(engine: &Engine, dir: &std::path::Path, random: &mut Random, fails: bool) {
    let number = random.below(FILES);
    let path = dir.join(number.to_string());
    let modes = [WriteMode::Through, WriteMode::Back];
    let options = read_write().write_mode(modes[random.below(2) as usize]);
    let Ok(file) = engine.open(&path, &options) else { return };
    let file = Arc::new(file);
    let task = AsyncFile::from(Arc::clone(&file));
    let page = |random: &mut Random| random.below(64) * PAGE as u64;
    let mut bytes = vec![number as u8; 3 * PAGE];
    let _ = file.write_at(&bytes, page(random));
    let _ = file.write_at_dsync(&bytes[..PAGE], page(random));
    let _ = file.read_at(&mut bytes, page(random));
    let _ = block_on(task.write_at(&bytes, page(random)));
    let _ = block_on(task.read_at(&mut bytes, page(random)));
    let _ = file.append(&bytes[..100]);
    let _ = file.view(page(random), PAGE).map(drop);
    let _ = file.punch_hole(page(random), PAGE as u64);
    let _ = file.truncate(page(random));
    let _ = file.allocate(page(random), PAGE as u64);
    if !fails {
        let queue = engine.queue(64).unwrap();
        let requests: Vec<Request> = (0..40)
            .map(|_| match random.below(3) {
                0 => Request::sync_data(&file),
                1 => Request::write(&file, vec![1; PAGE], page(random)),
                _ => Request::read(&file, vec![0; PAGE], page(random)),
            })
            .collect();
        let count = requests.len();
        queue.submit_all(requests).unwrap();
        queue.wait(count, count, None).unwrap();
    }
    if let Ok(direct) = engine.open(&path, &direct().bounce(true)) {
        let _ = direct.read_at(&mut bytes[1..], 1);
        let memory = engine.alloc_buffers(4, PAGE).unwrap();
        let mut left = memory.iter();
        each(&mut engine.pipeline(2).unwrap(), |_| {
            let list = SegmentList::from_slice(left.next()?);
            Some(DirectRequest::write(&direct, list, page(random)).durable(true))
        });
    }
    let blob = engine.blob(16 * PAGE as u64, PAGE as u32);
    if let Ok(blob) = blob {
        for fill in blob.claim(0..8 * PAGE as u64).fills {
            fill.bring(&vec![3; 8 * PAGE]);
        }
    }
    let _ = file.sync_all();
    std::thread::scope(|threads| {
        threads.spawn(|| file.read_at(&mut [0; 100], 0).map(drop));
    });
}

fn grows(what: &str, engine: &Engine, fails: bool) {
    let dir = temp_dir();
    let mut random = Random::from_environment();
    let mut rounds = |count: u64| {
        for _ in 0..count {
            round(engine, dir.path(), &mut random, fails);
        }
        // The threads of the engine finish their work.
        std::thread::sleep(Duration::from_millis(100));
        LIVE.load(SeqCst)
    };
    let count = scaled(60).into();
    let first = rounds(2 * count);
    let grown: Vec<i64> = (0..3).map(|_| rounds(count) - first).collect();
    println!("{what}: {count} rounds each, heap grown by {grown:?}");
    // A leak grows in each round.
    assert!(grown.iter().any(|&grown| grown < GROWTH_MAX), "{what}: {grown:?}");
}

/// Goal: no list of the engine grows with the operations that have ended, whether they have succeeded or failed.
/// Method: the allocator counts live bytes after equal numbers of rounds.
#[test]
fn ended_operations_leave_no_heap_memory() {
    in_own_process("ended_operations_leave_no_heap_memory", Duration::from_secs(600), || {
        let build =
            |backend| Engine::builder().cache_bytes(1 << 20).backend(backend).build().unwrap();
        grows("threads", &build(BackendChoice::Threads), false);
        if has_uring() {
            grows("uring", &build(BackendChoice::Uring), false);
        }
        let sim = SimOptions::new(7).error_per_mille(100).fail_every_kth_sync(3);
        grows("sim", &build(BackendChoice::Sim(sim)), true);
    });
}
