//! A stream of direct requests through a pipeline: each completion starts the next request.

use std::hint::black_box;
use std::io;
use std::time::{Duration, Instant};

use millpond::direct::{DirectRequest, Mut, Pipeline, Registration, SegmentList};
use millpond::{Buffer, Engine, File};
use millpond_bench_peers::{Usage, allocations};

use crate::bench::harness::Slice;

/// The requests of one file, each with its own memory.
pub struct RequestStream<'f> {
    file: &'f File,
    pipeline: Pipeline,
    idle: Vec<SegmentList<'static, Mut>>,
    /// Offsets of the requests, in turn.
    offsets: Vec<u64>,
    next: usize,
    pub writes: bool,
    /// A vector of offsets and lengths that is copied, read and dropped for each request; none if
    /// it is empty.
    pub copied: Vec<(usize, usize)>,
    /// Number of allocations of the last slice, and of its requests.
    pub allocated: (u64, u64),
}

/// Requests between two readings of the clock.
const BATCH: u64 = 256;

impl<'f> RequestStream<'f> {
    /// `depth` requests in flight, each of `segments` segments of `segment_bytes`.
    pub fn new(
        engine: &Engine,
        file: &'f File,
        depth: usize,
        segments: usize,
        segment_bytes: u32,
        offsets: Vec<u64>,
    ) -> millpond::Result<Self> {
        let mut idle = Vec::with_capacity(depth);
        // A request's segments come from one region, and are not adjacent.
        let mut buffers = engine.alloc_buffers(depth * segments * 2, segment_bytes as usize)?;
        for _ in 0..depth {
            let apart = buffers.drain(..segments * 2).step_by(2);
            idle.push(SegmentList::from_buffers(apart.collect::<Vec<Buffer>>()));
        }
        let pipeline = engine.pipeline(depth)?;
        let allocated = (0, 0);
        Ok(Self {
            file,
            pipeline,
            idle,
            offsets,
            next: 0,
            writes: false,
            copied: Vec::new(),
            allocated,
        })
    }

    pub fn registration(&self) -> Registration {
        self.pipeline.registration()
    }

    /// Runs for about `length`, and at least through `least` requests.
    pub fn slice(&mut self, length: Duration, least: u64) -> io::Result<Slice> {
        let Self { file, pipeline, idle, offsets, next, writes, copied, allocated } = self;
        let mut ended: Vec<DirectRequest<'_>> = Vec::with_capacity(idle.len());
        let (mut ops, mut failure, mut over) = (0u64, None, false);
        let mut fresh = std::mem::take(idle).into_iter();
        let used = Usage::now();
        let made = allocations();
        let started = Instant::now();
        pipeline.run(|lane| {
            let offset = offsets[*next];
            *next = if *next + 1 == offsets.len() { 0 } else { *next + 1 };
            let Some((mut request, outcome)) = lane.into_ended() else {
                return fresh.next().map(|list| match *writes {
                    true => DirectRequest::write(file, list, offset),
                    false => DirectRequest::read(file, list, offset),
                });
            };
            ops += 1;
            if ops.is_multiple_of(BATCH) && ops >= least && started.elapsed() >= length {
                over = true;
            }
            match outcome {
                Ok(moved) if moved as u64 == request.len() => {}
                Ok(moved) => failure = Some(io::Error::other(format!("moved {moved}"))),
                Err(error) => failure = Some(error.into()),
            }
            if over || failure.is_some() {
                ended.push(request);
                return None;
            }
            if !copied.is_empty() {
                let copy = black_box(copied.clone());
                black_box(copy.iter().map(|(_, len)| len).sum::<usize>());
            }
            request.set_offset(offset);
            Some(request)
        });
        let elapsed = started.elapsed();
        let made = allocations() - made;
        let used = Usage::now().since(used);
        idle.extend(
            ended.into_iter().map(|request| SegmentList::from_buffers(request.into_buffers())),
        );
        idle.extend(fresh);
        *allocated = (made, ops);
        match failure {
            Some(error) => Err(error),
            None => Ok(Slice {
                ops,
                ops_per_s: ops as f64 / elapsed.as_secs_f64(),
                cpu: used.cpu,
                context_switches: used.context_switches,
            }),
        }
    }
}
