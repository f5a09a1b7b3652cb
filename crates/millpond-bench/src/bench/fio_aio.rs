//! fio with libaio, an unmodified program: several reads that miss in flight, on the kernel's cache
//! and under `millpond run`. Linux AIO through the kernel's cache is not asynchronous: each read is
//! done during its submission.

use std::ffi::OsString;
use std::io;
use std::process::{Command, Stdio};
use std::time::Duration;

use super::data::NamedFile;
use super::fio::{LENGTH_MIN, Moved, parse};
use super::harness::{Engine, Slice, compare};
use super::load::Load;
use super::outcome::Outcome;
use super::plan::Plan;
use crate::failure::Result;
use crate::millpond_command::launcher;

pub const CASE: &str = "fio-libaio-cold-4k";
const MILLPOND: &str = "fio libaio, millpond run";
const KERNEL: &str = "fio libaio, kernel";
const DIRECT: &str = "fio libaio, O_DIRECT";
const BLOCK_BYTES: u32 = 4096;
const DEPTH: u32 = 32;
const FILE_BYTES: u64 = 1 << 30;
const FILE_BYTES_QUICK: u64 = 256 << 20;
/// This part of the file fits the cache.
const CACHE_SHARE: u64 = 8;

pub fn run(plan: &Plan, outcome: &mut Outcome) -> Result<()> {
    plan.report_progress(CASE);
    let skip = |outcome: &mut Outcome, reason: String| {
        for engine in [MILLPOND, KERNEL, DIRECT] {
            outcome.skip(CASE, engine, &reason);
        }
    };
    if let Err(error) = Command::new("fio").arg("--version").output() {
        skip(outcome, format!("fio can't be run: {error}"));
        return Ok(());
    }
    let bytes = plan.bytes_of(FILE_BYTES, FILE_BYTES_QUICK);
    let file = NamedFile::create(&plan.dir, bytes)?;
    let load = Load::random(bytes, BLOCK_BYTES, 1);
    let job = |name, launcher, is_direct| FioAio { name, launcher, is_direct, file: &file, bytes };
    let cache = (bytes / CACHE_SHARE).to_string();
    let options = ["--mode", "back", "--backing", "direct", "--cache", &cache];
    let launcher = match launcher(&options, &plan.dir) {
        Ok(launcher) => launcher,
        Err(failure) => {
            skip(outcome, failure.message);
            return Ok(());
        }
    };
    let subject = job(MILLPOND, launcher, false);
    let length = plan.slice(1000, 100).max(LENGTH_MIN);
    for baseline in [job(KERNEL, Vec::new(), false), job(DIRECT, Vec::new(), true)] {
        // A failure on the kernel is a gap; a later one, or one under Millpond, is an error.
        if let Err(error) = baseline.slice(&load, length) {
            outcome.skip(CASE, baseline.name, error);
            continue;
        }
        let rows = compare(CASE, &subject, &baseline, &load, plan, length)?;
        outcome.rows.extend(rows.map(|row| row.in_flight(DEPTH)));
    }
    Ok(())
}

struct FioAio<'a> {
    name: &'static str,
    /// Words of the command line before `fio`.
    launcher: Vec<OsString>,
    is_direct: bool,
    file: &'a NamedFile,
    bytes: u64,
}

impl Engine for FioAio<'_> {
    fn name(&self) -> &str {
        self.name
    }

    /// A cold read is measured: fio drops the file from the kernel's cache each time.
    fn warm_up(&self, _: &Load) -> io::Result<()> {
        Ok(())
    }

    fn slice(&self, _: &Load, length: Duration) -> io::Result<Slice> {
        let mut words = self.launcher.iter().cloned().chain([OsString::from("fio")]);
        let mut command = Command::new(words.next().unwrap_or_default());
        let mut filename = OsString::from("--filename=");
        filename.push(&self.file.path);
        let output = command
            .args(words)
            .args(["--name=millpond-bench", "--thread", "--ioengine=libaio", "--rw=randread"])
            .args(["--readonly", "--norandommap", "--invalidate=1", "--time_based"])
            .args(["--output-format=json", &format!("--bs={BLOCK_BYTES}")])
            .arg(format!("--iodepth={DEPTH}"))
            .arg(format!("--direct={}", u8::from(self.is_direct)))
            .arg(format!("--size={}", self.bytes))
            .arg(format!("--runtime={}us", length.as_micros()))
            .arg(filename)
            .stdin(Stdio::null())
            .output()?;
        if !output.status.success() {
            let stderr = String::from_utf8_lossy(&output.stderr);
            return Err(io::Error::other(format!("fio: {}\n{stderr}", output.status)));
        }
        parse(&output.stdout, Moved::Read)
    }
}
