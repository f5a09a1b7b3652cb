//! Direct requests to the disk, against fio with registered files and buffers.

use std::ffi::OsString;
use std::io;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use millpond::{Engine, OpenOptions};

use super::request_stream::RequestStream;
use crate::bench::data::{KIB, MIB, NamedFile, Random};
use crate::bench::fio::{Moved, parse};
use crate::bench::harness::{Pair, Slice};
use crate::bench::outcome::{Outcome, Row};
use crate::bench::plan::Plan;
use crate::failure::{Context, Result};

const MILLPOND: &str = "millpond, direct";
const FIO: &str = "fio, io_uring, O_DIRECT, fixed";

struct DeviceCase {
    name: &'static str,
    /// fio's name of the access pattern.
    pattern: &'static str,
    block_bytes: u32,
    depth: u32,
    moved: Moved,
}

const CASES: [DeviceCase; 3] = [
    DeviceCase {
        name: "direct-read-4k-random",
        pattern: "randread",
        block_bytes: 4 * KIB,
        depth: 32,
        moved: Moved::Read,
    },
    DeviceCase {
        name: "direct-read-1m",
        pattern: "read",
        block_bytes: 1024 * KIB,
        depth: 8,
        moved: Moved::Read,
    },
    DeviceCase {
        name: "direct-write-1m",
        pattern: "write",
        block_bytes: 1024 * KIB,
        depth: 8,
        moved: Moved::Written,
    },
];

pub fn run(plan: &Plan, outcome: &mut Outcome) -> Result<()> {
    let cases: Vec<_> = CASES.iter().filter(|case| plan.wants(case.name)).collect();
    if cases.is_empty() {
        return Ok(());
    }
    let bytes = plan.bytes_of(1024 * MIB, 256 * MIB);
    let named = NamedFile::create(&plan.dir, bytes)?;
    let engine =
        Engine::builder().cache_bytes(16 * MIB).build().context("building a Millpond engine")?;
    for case in cases {
        plan.report_progress(case.name);
        measure(case, &named.path, bytes, &engine, plan, outcome)?;
    }
    Ok(())
}

fn measure(
    case: &DeviceCase,
    path: &Path,
    bytes: u64,
    engine: &Engine,
    plan: &Plan,
    outcome: &mut Outcome,
) -> Result<()> {
    let options = OpenOptions::new().read(true).write(true).direct(true);
    let file = match engine.open(path, &options) {
        Ok(file) => file,
        Err(error) => {
            outcome.skip(case.name, MILLPOND, &error);
            outcome.skip(case.name, FIO, format!("{MILLPOND} failed: {error}"));
            return Ok(());
        }
    };
    let blocks = (bytes / u64::from(case.block_bytes)) as u32;
    let mut random = Random::seeded(1);
    let offsets = (0..blocks).map(|number| match case.pattern {
        "randread" => u64::from(random.below(blocks)) * u64::from(case.block_bytes),
        _ => u64::from(number) * u64::from(case.block_bytes),
    });
    let (depth, block_bytes) = (case.depth as usize, case.block_bytes);
    let stream = RequestStream::new(engine, &file, depth, 1, block_bytes, offsets.collect());
    let mut stream = stream.context(case.name)?;
    stream.writes = matches!(case.moved, Moved::Written);
    let length = plan.slice(1000, 80).max(Duration::from_millis(50));
    stream.slice(length, 0).context(case.name)?;
    outcome.note(format!("{}: {:?}", case.name, stream.registration()));
    let pair = Pair {
        case: case.name,
        threads: 1,
        block_bytes: Some(block_bytes),
        subject: MILLPOND,
        baseline: FIO,
    };
    let fio = || fio(case, path, bytes, length);
    if pair.try_baseline(fio(), outcome) {
        let rows = pair.measure(plan.rounds(), || stream.slice(length, 0), fio)?;
        outcome.rows.extend(rows.map(|row| Row { queue_depth: Some(case.depth), ..row }));
    }
    Ok(())
}

/// fio's processor time is that of the thread which submits, without the kernel's helpers.
fn fio(case: &DeviceCase, path: &Path, bytes: u64, length: Duration) -> io::Result<Slice> {
    let mut filename = OsString::from("--filename=");
    filename.push(path);
    let output = Command::new("fio")
        .args(["--name=millpond-bench", "--thread", "--ioengine=io_uring", "--direct=1"])
        .args(["--registerfiles=1", "--fixedbufs=1", "--gtod_reduce=1", "--norandommap"])
        .args([
            "--time_based",
            "--overwrite=1",
            "--fallocate=none",
            "--scramble_buffers=0",
            "--output-format=json",
        ])
        // Takes all available completions at once: fio's default is one call for each.
        .args(["--iodepth_batch_complete_min=1".into(), format!("--iodepth_batch={}", case.depth)])
        .arg(format!("--iodepth_batch_complete_max={}", case.depth))
        .arg(format!("--rw={}", case.pattern))
        .arg(format!("--iodepth={}", case.depth))
        .arg(format!("--bs={}", case.block_bytes))
        .arg(format!("--size={bytes}"))
        .arg(format!("--runtime={}us", length.as_micros()))
        .arg(filename)
        // Its buffers are in huge pages, as Millpond's are (glibc 2.35 and later).
        .env("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
        .stdin(Stdio::null())
        .output()
        .map_err(|error| io::Error::other(format!("fio can't be run: {error}")))?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        return Err(io::Error::other(format!("fio: {}\n{stderr}", output.status)));
    }
    parse(&output.stdout, case.moved)
}
