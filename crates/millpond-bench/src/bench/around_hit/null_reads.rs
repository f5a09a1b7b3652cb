//! The processor time of a direct request, without a device.
//!
//! A simulated device completes each request immediately. The requests go through a [`Queue`] and through a pipeline
//! ([`millpond::direct`]). The peer is io_uring's `IORING_OP_NOP`, with the same queue depth.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use millpond::queue::{Queue, Request};
use millpond::{BackendChoice, Buffer, Engine, File, OpenOptions};
use millpond_bench_peers::{Nops, Usage};

use crate::bench::data::{KIB, MIB, NamedFile, Random};
use crate::bench::harness::{Pair, Slice};
use crate::bench::no_copy::{RequestStream, nop_slice};
use crate::bench::outcome::Outcome;
use crate::bench::plan::Plan;
use crate::failure::{Context, Result};

const PIPELINE: &str = "direct-null-pipeline";
const QUEUE: &str = "direct-null-queue";
const NOP: &str = "io_uring NOP";
const DEPTH: u32 = Nops::BATCH as u32;
const BLOCK_BYTES: u32 = 4 * KIB;
const FILE_BYTES: u64 = 16 * MIB;

pub fn run(plan: &Plan, outcome: &mut Outcome) -> Result<()> {
    let cases = [(PIPELINE, "millpond, pipeline"), (QUEUE, "millpond, queue")];
    let bytes = plan.bytes(FILE_BYTES);
    for (case, subject) in cases.into_iter().filter(|(case, _)| plan.wants(case)) {
        plan.report_progress(case);
        let mut nops = match Nops::new() {
            Ok(nops) => nops,
            Err(error) => {
                outcome.skip(case, NOP, error);
                continue;
            }
        };
        let named = NamedFile::create(&plan.dir, bytes)?;
        let engine = Engine::builder().cache_bytes(16 * MIB).backend(BackendChoice::Null).build();
        let engine = engine.context("building an engine")?;
        let options = OpenOptions::new().read(true).direct(true);
        let file = Arc::new(engine.open(&named.path, &options).context(case)?);
        let mut random = Random::seeded(3);
        let blocks = (bytes / u64::from(BLOCK_BYTES)) as u32;
        let place = |_| u64::from(random.below(blocks)) * u64::from(BLOCK_BYTES);
        let offsets: Vec<u64> = (0..blocks).map(place).collect();
        let length = plan.slice(100, 30);
        let mut own: Box<dyn FnMut() -> io::Result<Slice> + '_> = if case == PIPELINE {
            let stream =
                RequestStream::new(&engine, &file, DEPTH as usize, 1, BLOCK_BYTES, offsets);
            let mut stream = stream.context(case)?;
            Box::new(move || stream.slice(length, 0))
        } else {
            let queue = engine.queue(DEPTH as usize).context(case)?;
            let buffers = engine.alloc_buffers(DEPTH as usize, BLOCK_BYTES as usize);
            let buffers = buffers.context(case)?.into_iter().map(|buffer| vec![buffer]).collect();
            let mut reads = NullReads { queue, file: Arc::clone(&file), buffers, offsets, next: 0 };
            Box::new(move || reads.slice(length))
        };
        own().and(nop_slice(&mut nops, length)).context(case)?;
        let block_bytes = Some(BLOCK_BYTES);
        let pair = Pair { case, threads: 1, block_bytes, subject, baseline: NOP };
        let rows = pair.measure(plan.rounds(), own, || nop_slice(&mut nops, length))?;
        outcome.rows.extend(rows.map(|row| row.in_flight(DEPTH)));
    }
    Ok(())
}

/// Reads of a queue, submitted and completed a batch at a time, as the NOPs are.
struct NullReads {
    queue: Queue,
    file: Arc<File>,
    /// One for each request.
    buffers: Vec<Vec<Buffer>>,
    offsets: Vec<u64>,
    next: usize,
}

impl NullReads {
    fn batch(&mut self) -> io::Result<u64> {
        let mut requests = Vec::with_capacity(self.buffers.len());
        for buffer in self.buffers.drain(..) {
            self.next = (self.next + 1) % self.offsets.len();
            requests.push(Request::read_buffers(&self.file, buffer, self.offsets[self.next]));
        }
        let submitted = requests.len();
        self.queue.submit_all(requests).map_err(millpond::Error::from)?;
        while self.buffers.len() < submitted {
            let left = submitted - self.buffers.len();
            for completion in self.queue.wait(left, left, None)? {
                let moved =
                    completion.result().map_err(|error| io::Error::other(error.to_string()));
                if moved? != BLOCK_BYTES as usize {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                self.buffers.push(completion.into_buffers());
            }
        }
        Ok(submitted as u64)
    }

    fn slice(&mut self, length: Duration) -> io::Result<Slice> {
        let before = Usage::now();
        let started = Instant::now();
        let mut ops = 0;
        while ops == 0 || started.elapsed() < length {
            ops += self.batch()?;
        }
        let elapsed = started.elapsed();
        let used = Usage::now().since(before);
        let ops_per_s = ops as f64 / elapsed.as_secs_f64();
        Ok(Slice { ops, ops_per_s, cpu: used.cpu, context_switches: used.context_switches })
    }
}
