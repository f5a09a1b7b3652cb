//! Direct I/O allocates no memory per request, for any number of segments.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::io::{IoSlice, IoSliceMut};

use millpond::direct::{DirectRequest, SegmentList};
use millpond::{BackendChoice, Buffer, WriteMode};

use common::requests::{at, each};
use common::{engine, read_write, temp_dir};

/// Counts the allocations of each thread.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

fn count() {
    // Not there any more while the thread ends.
    let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
}

fn allocations() -> u64 {
    ALLOCATIONS.with(Cell::get)
}

// SAFETY: all is left to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promise is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(at, layout) };
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        count();
        // SAFETY: as above.
        unsafe { System.realloc(at, layout, bytes) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const SEGMENT: usize = 4096;
const FILE_BYTES: u64 = 64 << 20;

fn back_ends() -> Vec<(&'static str, BackendChoice)> {
    let mut all = vec![("null", BackendChoice::Null), ("threads", BackendChoice::Threads)];
    if common::has_uring() {
        all.push(("uring", BackendChoice::Uring));
    }
    all
}

/// Goal: after the first few requests, none allocates memory.
/// Method: reads and writes of 1, 16 and 1,000 segments, by calls and by pipelines of several
/// depths that reuse their lists, on a file with other pages cached. The allocations of this thread
/// are counted.
#[test]
fn requests_allocate_nothing() {
    for (name, backend) in back_ends() {
        for mode in [WriteMode::Through, WriteMode::Back] {
            let dir = temp_dir();
            let path = dir.path().join("file");
            std::fs::File::create(&path).unwrap().set_len(FILE_BYTES).unwrap();
            let engine = engine(8 << 20, backend.clone());
            let options = read_write().write_mode(mode);
            let cached = engine.open(&path, &options).unwrap();
            let file = match engine.open(&path, &options.direct(true)) {
                Ok(file) => file,
                Err(error) => {
                    common::skip(format_args!("{name}: {error}"));
                    continue;
                }
            };
            for at in (0..FILE_BYTES).step_by(1 << 20) {
                cached.read_at(&mut [0; 100], at + 5 * 4096).unwrap();
            }
            for segments in [1, 16, 1000] {
                let mut buffer =
                    engine.alloc_buffers(1, segments * SEGMENT).unwrap().pop().unwrap();
                let mut reads: Vec<_> = buffer.chunks_mut(SEGMENT).map(IoSliceMut::new).collect();
                let other = engine.alloc_buffers(1, segments * SEGMENT).unwrap().pop().unwrap();
                let writes: Vec<_> = other.chunks(SEGMENT).map(IoSlice::new).collect();
                let mut counted = 0;
                for round in 0..40u64 {
                    let at = (round % 12) << 20;
                    let before = allocations();
                    file.write_vectored_at(&writes, at).unwrap();
                    file.read_vectored_at(&mut reads, at).unwrap();
                    if segments == 1 {
                        file.read_at(&mut reads[0], at).unwrap();
                        file.write_at(&writes[0], at).unwrap();
                    }
                    counted = if round < 12 { 0 } else { counted + allocations() - before };
                }
                assert_eq!(counted, 0, "{name} {mode:?}: calls of {segments} segments");
                for depth in [1, 8, 128] {
                    pipeline(&engine, &file, &format!("{name} {mode:?}"), segments, depth);
                }
            }
        }
    }
}

fn pipeline(
    engine: &millpond::Engine,
    file: &millpond::File,
    name: &str,
    segments: usize,
    depth: usize,
) {
    let depth = depth.min(2048 / segments).max(1);
    let memory: Vec<Vec<Buffer>> =
        (0..depth).map(|_| engine.alloc_buffers(segments, SEGMENT).unwrap()).collect();
    let mut lists: Vec<_> = memory.into_iter().map(SegmentList::from_buffers).collect();
    let mut pipeline = engine.pipeline(depth).unwrap();
    let (mut number, mut counted) = (0u64, 0);
    let apart = FILE_BYTES / 4096 / depth as u64 * 4096;
    // All places are seen before: the range lock's table may grow when many ranges are held at once.
    let rounds = if segments == 1 { apart / 2 / 4096 + 8 } else { 8 };
    let warm = rounds * depth as u64;
    let last = warm + 60.max(4 * depth as u64);
    let mut lane = 0;
    let mut before = 0;
    each(&mut pipeline, |done| {
        if number >= warm {
            counted += allocations() - before;
        }
        number += 1;
        let next = match done {
            Some(done) => {
                assert_eq!(done.outcome.unwrap(), segments * SEGMENT);
                // A little further in its own part of the file.
                let offset = done.request.offset();
                let base = offset / apart * apart;
                let next = (offset - base + 4096) % (apart / 2).max(4096);
                (number < last).then(|| at(done.request, base + next))
            }
            None => lists.pop().map(|list| {
                lane += 1;
                let offset = (lane - 1) * apart;
                match lane % 2 {
                    0 => DirectRequest::read(file, list, offset),
                    _ => DirectRequest::write(file, list, offset),
                }
            }),
        };
        before = allocations();
        next
    });
    assert!(number >= last);
    // Debug builds record the holder of each range in a table, which is reallocated occasionally.
    let allowed = if cfg!(debug_assertions) && depth > 8 { 4 } else { 0 };
    assert!(counted <= allowed, "{name}: {segments} segments, depth {depth}: {counted}");
}
