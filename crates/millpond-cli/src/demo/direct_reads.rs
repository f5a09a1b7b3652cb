//! Direct I/O: 4 KiB at random with `O_DIRECT`, 32 requests in flight.
//!
//! The kernel's side is a bare io_uring with registered file and buffers: the least that such a read can
//! cost. A request allocates no memory: `millpond/tests/direct_allocations.rs` counts that.

use std::io;
use std::time::{Duration, Instant};

use millpond::direct::{DirectRequest, Mut, Pipeline, SegmentList};
use millpond::{Engine, OpenOptions};
use millpond_bench_peers::Uring;
use rustix::fs::OFlags;

use super::scratch::{MIB, Scratch, ScratchFile};
use super::slices::{BlockRandom, compare};
use super::table::{Table, per_second};
use crate::failure::{Context, Result};

const FILE_BYTES: u64 = 128 * MIB;
const BLOCK_BYTES: usize = 4096;
const DEPTH: usize = 32;
const SLICE: Duration = Duration::from_millis(150);
const ROUNDS: usize = 2;

pub fn run(scratch: &Scratch, table: &mut Table) -> Result<()> {
    let file = scratch.create(FILE_BYTES, BLOCK_BYTES)?;
    let engine = Engine::builder().cache_bytes(16 * MIB).build().context("building an engine")?;
    let opened = engine.open(file.path(), &OpenOptions::new().read(true).direct(true));
    let (millpond, kernel) = match (opened, file.open(OFlags::DIRECT)) {
        (Ok(millpond), Ok(kernel)) => (millpond, kernel),
        (millpond, kernel) => {
            let why = millpond.err().map(io::Error::from).or(kernel.err());
            let why = why.map_or_else(String::new, |error| error.to_string());
            table.add_note(format!(
                "direct I/O: not measured, as the file system refuses O_DIRECT: {why}"
            ));
            return Ok(());
        }
    };
    let mut ring = match Uring::new(&kernel, DEPTH as u32, BLOCK_BYTES as u32, false) {
        Ok(ring) => ring,
        Err(error) => {
            table.add_note(format!(
                "direct I/O: not measured, as the kernel refuses io_uring: {error}"
            ));
            return Ok(());
        }
    };
    let buffers = engine.alloc_buffers(DEPTH, BLOCK_BYTES).context("allocating buffers")?;
    let idle = buffers.into_iter().map(|buffer| SegmentList::from_buffers(vec![buffer])).collect();
    let pipeline = engine.pipeline(DEPTH).context("creating a pipeline")?;
    let mut own = PipelineReads { pipeline, file: &millpond, idle };
    let (mut kernel_places, mut own_places) = (BlockRandom::seeded(5), BlockRandom::seeded(5));
    let compared = compare(
        ROUNDS,
        || read_by_ring(&mut ring, &file, &mut kernel_places).map(|rate| [rate]),
        || own.run(&file, &mut own_places).map(|rate| [rate]),
    )?;
    let [kernel, millpond] = [compared.kernel[0], compared.millpond[0]].map(per_second);
    table.add_ratio(
        "direct reads of 4 KiB, 32 in flight (kernel: bare io_uring)",
        kernel,
        millpond,
        compared.ratio[0],
    );
    Ok(())
}

fn read_by_ring(ring: &mut Uring, file: &ScratchFile, random: &mut BlockRandom) -> io::Result<f64> {
    let started = Instant::now();
    let mut next = || {
        let offset = file.offset_of(random.below(file.blocks()));
        (started.elapsed() < SLICE).then_some(offset)
    };
    let done = ring.run(&mut next, |_, _| Ok(()))?;
    Ok(done as f64 / started.elapsed().as_secs_f64())
}

struct PipelineReads<'f> {
    pipeline: Pipeline,
    file: &'f millpond::File,
    /// The memory of requests that are not in flight.
    idle: Vec<SegmentList<'static, Mut>>,
}

impl PipelineReads<'_> {
    fn run(&mut self, places: &ScratchFile, random: &mut BlockRandom) -> io::Result<f64> {
        let Self { pipeline, file, idle } = self;
        let mut unused = std::mem::take(idle);
        let mut ended = Vec::with_capacity(DEPTH);
        let (mut done, mut failure) = (0u64, None);
        let started = Instant::now();
        pipeline.run(|lane| {
            let offset = places.offset_of(random.below(places.blocks()));
            let Some((mut request, outcome)) = lane.into_ended() else {
                return unused.pop().map(|list| DirectRequest::read(file, list, offset));
            };
            match outcome {
                Ok(BLOCK_BYTES) => done += 1,
                Ok(len) => failure = Some(io::Error::other(format!("{len} bytes"))),
                Err(error) => failure = Some(error.into()),
            }
            if failure.is_some() || started.elapsed() >= SLICE {
                ended.push(request);
                return None;
            }
            request.set_offset(offset);
            Some(request)
        });
        let elapsed = started.elapsed();
        let lists =
            ended.into_iter().map(|request| SegmentList::from_buffers(request.into_buffers()));
        self.idle = unused.into_iter().chain(lists).collect();
        match failure {
            Some(error) => Err(error),
            None => Ok(done as f64 / elapsed.as_secs_f64()),
        }
    }
}
