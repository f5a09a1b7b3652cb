//! Reads of a device: 64 in flight, 4 KiB at random, nothing cached on either side.
//!
//! A program without asynchronous I/O needs a thread for each read in flight: that is the kernel's side.
//! Millpond's side is one thread with a [`millpond::queue::Queue`]. Both count the threads of the process.

use std::io;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use millpond::queue::{Queue, Request};
use millpond::{Advice, Backing, Buffer, Engine, OpenOptions};
use rustix::fs::{OFlags, fadvise};

use super::scratch::{MIB, Scratch, ScratchFile, sequence_of};
use super::slices::{BlockRandom, ReadTarget, compare, rate_of};
use super::table::{Table, per_second};
use crate::failure::{Context, Result};

const FILE_BYTES: u64 = 128 * MIB;
const BLOCK_BYTES: usize = 4096;
const DEPTH: usize = 64;
const SLICE: Duration = Duration::from_millis(150);
const ROUNDS: usize = 2;

pub fn run(scratch: &Scratch, table: &mut Table) -> Result<()> {
    let file = scratch.create(FILE_BYTES, BLOCK_BYTES)?;
    let kernel = file.open(OFlags::empty()).context("opening the file")?;
    fadvise(&kernel, 0, None, rustix::fs::Advice::Random).context("advising")?;
    let engine = Engine::builder().cache_bytes(16 * MIB).build().context("building an engine")?;
    let options = OpenOptions::new().read(true);
    let millpond = engine
        .open(file.path(), &options.clone().backing(Backing::Direct))
        .or_else(|_| engine.open(file.path(), &options))
        .context("opening the file in Millpond")?;
    let millpond = Arc::new(millpond);
    millpond.advise(0, 0, Advice::Random).context("advising")?;
    let queue = engine.queue(DEPTH).context("creating a queue")?;
    let buffers = engine.alloc_buffers(DEPTH, BLOCK_BYTES).context("allocating buffers")?;
    let buffers = buffers.into_iter().map(|buffer| vec![buffer]).collect();
    let mut reads = QueueReads { queue, file: Arc::clone(&millpond), buffers };
    let places = BlockOffsets::new(file.blocks());
    let idle_threads = threads_of_process();
    let (kernel_threads, millpond_threads) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let compared = compare(
        ROUNDS,
        || {
            file.drop_kernel_cache()?;
            read_by_threads(&kernel, &file, &places, &kernel_threads).map(|rate| [rate])
        },
        || {
            file.drop_kernel_cache()?;
            millpond.advise(0, 0, Advice::DontNeed)?;
            reads.run(&file, &places, &millpond_threads).map(|rate| [rate])
        },
    )?;
    let [kernel, own] = [compared.kernel[0], compared.millpond[0]].map(per_second);
    table.add_ratio("cold reads of 4 KiB, 64 in flight", kernel, own, compared.ratio[0]);
    // The engine's own threads were idle, or not there, when the slices began.
    let kernel_threads = kernel_threads.into_inner().saturating_sub(idle_threads);
    let own_threads = 1 + millpond_threads.into_inner().saturating_sub(idle_threads);
    let counts = [kernel_threads, own_threads].map(|threads| threads.to_string());
    let [kernel, own] = counts;
    table.add_counts("  threads that it takes", kernel, own, own_threads <= kernel_threads);
    Ok(())
}

/// Blocks in random order; each is read once before any is read again.
struct BlockOffsets {
    blocks: Vec<u32>,
    next: AtomicUsize,
}

impl BlockOffsets {
    fn new(blocks: u32) -> Self {
        BlockOffsets { blocks: BlockRandom::seeded(7).shuffled(blocks), next: AtomicUsize::new(0) }
    }

    fn next(&self) -> u32 {
        self.blocks[self.next.fetch_add(1, Relaxed) % self.blocks.len()]
    }
}

fn threads_of_process() -> usize {
    std::fs::read_dir("/proc/self/task").map_or(0, Iterator::count)
}

fn read_by_threads(
    target: &impl ReadTarget,
    file: &ScratchFile,
    places: &BlockOffsets,
    threads: &AtomicUsize,
) -> io::Result<f64> {
    let counted = Mutex::new(false);
    rate_of(DEPTH as u32, SLICE, |_| {
        let (mut dst, counted) = (vec![0; BLOCK_BYTES], &counted);
        move || {
            let block = places.next();
            target.read_at(&mut dst, file.offset_of(block))?;
            sequence_of(&dst, block)?;
            if let Ok(mut counted) = counted.try_lock()
                && !*counted
            {
                threads.fetch_max(threads_of_process(), Relaxed);
                *counted = true;
            }
            Ok(())
        }
    })
}

/// One thread that keeps [`DEPTH`] reads in flight.
struct QueueReads {
    queue: Queue,
    file: Arc<millpond::File>,
    /// The buffers of requests that are not in flight.
    buffers: Vec<Vec<Buffer>>,
}

impl QueueReads {
    fn run(
        &mut self,
        file: &ScratchFile,
        places: &BlockOffsets,
        threads: &AtomicUsize,
    ) -> io::Result<f64> {
        let (started, mut requests, mut done) = (Instant::now(), Vec::new(), 0u64);
        let mut in_flight = 0;
        let mut outcome = Ok(());
        loop {
            if outcome.is_ok() && started.elapsed() < SLICE {
                for buffer in self.buffers.drain(..) {
                    let block = places.next();
                    let request = Request::read_buffers(&self.file, buffer, file.offset_of(block));
                    requests.push(request.user_data(u64::from(block)));
                }
            }
            if in_flight + requests.len() == 0 {
                return outcome.map(|()| done as f64 / started.elapsed().as_secs_f64());
            }
            in_flight += requests.len();
            let (ended, rest) = self.queue.submit_and_wait(requests, 1, DEPTH, None)?;
            in_flight -= rest.len();
            requests = rest;
            if done == 0 {
                threads.fetch_max(threads_of_process(), Relaxed);
            }
            for completion in ended {
                in_flight -= 1;
                done += 1;
                let block = completion.user_data() as u32;
                let read = completion.result().map_err(|error| io::Error::other(error.to_string()));
                let buffers = completion.into_buffers();
                let checked = read.and_then(|_| sequence_of(&buffers[0], block));
                outcome = outcome.and(checked.map(|_| ()));
                self.buffers.push(buffers);
            }
        }
    }
}
