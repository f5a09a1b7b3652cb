//! The library's own cost: requests to a back end that completes at once.
//!
//! The file is in mode back, every other stretch of 64 KiB of it is cached, and some of these pages
//! are dirty; requests go to the other stretches. So each request has to find that none of its
//! pages is cached.

use std::io;
use std::time::{Duration, Instant};

use millpond::{BackendChoice, Engine, File, OpenOptions, WriteMode};
use millpond_bench_peers::{Nops, Usage};

use super::request_stream::RequestStream;
use crate::bench::data::{KIB, MIB, NamedFile, Random};
use crate::bench::harness::{Pair, Slice};
use crate::bench::outcome::{Outcome, Row};
use crate::bench::plan::Plan;
use crate::failure::{Context, Result};

const DEPTH: usize = 128;
const STRETCH_BYTES: u64 = 64 << 10;
const SEGMENT_BYTES: u32 = 4 * KIB;

const MILLPOND: &str = "millpond, null";
const SMALL: &str = "millpond, null, 4 KiB";
const COPIED: &str = "millpond, null, vectors copied";
const NOP: &str = "io_uring NOP, 32 at once";

/// Cases of reads, with the bytes of a request.
const READS: [(&str, u32); 6] = [
    ("null-read-512", 512),
    ("null-read-4k", 4 * KIB),
    ("null-read-8k", 8 * KIB),
    ("null-read-16k", 16 * KIB),
    ("null-read-32k", 32 * KIB),
    ("null-read-64k", 64 * KIB),
];

pub fn run(plan: &Plan, outcome: &mut Outcome) -> Result<()> {
    let wanted: Vec<_> = READS.into_iter().filter(|(case, _)| plan.wants(case)).collect();
    let writes = plan.wants("null-write-4k");
    if wanted.is_empty() && !writes {
        return Ok(());
    }
    let bytes = plan.bytes(64 * MIB);
    let named = NamedFile::create(&plan.dir, bytes)?;
    let engine = Engine::builder()
        .cache_bytes(2 * bytes + 32 * MIB)
        .backend(BackendChoice::Null)
        .build()
        .context("building a Millpond engine")?;
    let options = OpenOptions::new().read(true).write(true).write_mode(WriteMode::Back);
    let cached = engine.open(&named.path, &options).context("opening the file")?;
    let file = engine.open(&named.path, &options.direct(true)).context("opening the file")?;
    cache_every_other(&cached, bytes).context("caching the file")?;
    for (case, block_bytes) in wanted {
        plan.report_progress(case);
        measure_reads(case, block_bytes, &engine, &file, bytes, plan, outcome)?;
    }
    if writes {
        plan.report_progress("null-write-4k");
        measure_writes("null-write-4k", &engine, &file, bytes, plan, outcome)?;
    }
    Ok(())
}

fn cache_every_other(cached: &File, bytes: u64) -> millpond::Result<()> {
    let mut page = [0; SEGMENT_BYTES as usize];
    for start in (0..bytes).step_by(2 * STRETCH_BYTES as usize) {
        for at in (start..start + STRETCH_BYTES).step_by(page.len()) {
            cached.read_exact_at(&mut page, at)?;
        }
        cached.write_all_at(&page, start)?;
    }
    Ok(())
}

/// The blocks that are not cached, in random order.
fn offsets(bytes: u64, block_bytes: u32) -> Vec<u64> {
    let stretches = (STRETCH_BYTES..bytes).step_by(2 * STRETCH_BYTES as usize);
    let blocks = |start| (start..start + STRETCH_BYTES).step_by(block_bytes as usize);
    let mut offsets: Vec<u64> = stretches.flat_map(blocks).collect();
    let mut random = Random::seeded(2);
    for last in (1..offsets.len()).rev() {
        offsets.swap(last, random.below(last as u32 + 1) as usize);
    }
    offsets
}

fn stream<'f>(
    engine: &Engine,
    file: &'f File,
    bytes: u64,
    block_bytes: u32,
) -> Result<RequestStream<'f>> {
    let segment_bytes = block_bytes.min(SEGMENT_BYTES);
    let segments = (block_bytes / segment_bytes) as usize;
    RequestStream::new(engine, file, DEPTH, segments, segment_bytes, offsets(bytes, block_bytes))
        .context("a pipeline")
}

fn measure_reads(
    case: &'static str,
    block_bytes: u32,
    engine: &Engine,
    file: &File,
    bytes: u64,
    plan: &Plan,
    outcome: &mut Outcome,
) -> Result<()> {
    let length = plan.slice(200, 25);
    let mut own = stream(engine, file, bytes, block_bytes)?;
    let pair = |baseline| Pair {
        case,
        threads: 1,
        block_bytes: Some(block_bytes),
        subject: MILLPOND,
        baseline,
    };
    let mut copied = stream(engine, file, bytes, block_bytes)?;
    copied.copied = vec![(0, 0); block_bytes.div_ceil(SEGMENT_BYTES) as usize];
    own.slice(length, 0).context(case)?;
    note_allocations(case, &mut own, length, outcome)?;
    let rows =
        pair(COPIED).measure(plan.rounds(), || own.slice(length, 0), || copied.slice(length, 0))?;
    outcome.rows.extend(rows.map(deep));
    if block_bytes > 4 * KIB {
        let mut small = stream(engine, file, bytes, 4 * KIB)?;
        let rows = pair(SMALL).measure(
            plan.rounds(),
            || own.slice(length, 0),
            || small.slice(length, 0),
        )?;
        outcome.rows.extend(rows.map(deep));
    }
    if block_bytes == 4 * KIB {
        against_nops(case, &mut own, plan, outcome)?;
    }
    Ok(())
}

fn measure_writes(
    case: &'static str,
    engine: &Engine,
    file: &File,
    bytes: u64,
    plan: &Plan,
    outcome: &mut Outcome,
) -> Result<()> {
    let mut own = stream(engine, file, bytes, 4 * KIB)?;
    own.writes = true;
    note_allocations(case, &mut own, plan.slice(200, 40), outcome)?;
    against_nops(case, &mut own, plan, outcome)
}

fn deep(row: Row) -> Row {
    Row { queue_depth: Some(DEPTH as u32), ..row }
}

fn note_allocations(
    case: &'static str,
    stream: &mut RequestStream<'_>,
    length: Duration,
    outcome: &mut Outcome,
) -> Result<()> {
    // The allocations of the call itself are constant, and are subtracted.
    stream.slice(Duration::ZERO, 0).context(case)?;
    let (per_call, _) = stream.allocated;
    stream.slice(length, 0).context(case)?;
    let (made, ops) = stream.allocated;
    let per_request = made.saturating_sub(per_call) as f64 / ops as f64;
    let note = format!(
        "{case}: {per_request:.4} allocations per request ({ops} requests, {made} allocations, of \
         which {per_call} of the call)"
    );
    outcome.note(note);
    Ok(())
}

fn against_nops(
    case: &'static str,
    own: &mut RequestStream<'_>,
    plan: &Plan,
    outcome: &mut Outcome,
) -> Result<()> {
    let mut nops = match Nops::new() {
        Ok(nops) => nops,
        Err(error) => {
            outcome.skip(case, NOP, error);
            return Ok(());
        }
    };
    let length = plan.slice(200, 40);
    let pair =
        Pair { case, threads: 1, block_bytes: Some(4 * KIB), subject: MILLPOND, baseline: NOP };
    let rows =
        pair.measure(plan.rounds(), || own.slice(length, 0), || nop_slice(&mut nops, length))?;
    outcome.rows.extend(rows.map(deep));
    Ok(())
}

pub fn nop_slice(nops: &mut Nops, length: Duration) -> io::Result<Slice> {
    let used = Usage::now();
    let started = Instant::now();
    let mut ops = 0;
    let elapsed = loop {
        for _ in 0..8 {
            nops.batch()?;
            ops += Nops::BATCH as u64;
        }
        let elapsed = started.elapsed();
        if elapsed >= length {
            break elapsed;
        }
    };
    let used = Usage::now().since(used);
    Ok(Slice {
        ops,
        ops_per_s: ops as f64 / elapsed.as_secs_f64(),
        cpu: used.cpu,
        context_switches: used.context_switches,
    })
}
