//! fio, an unmodified program: on the kernel, under `millpond run`, and under a library whose
//! `pread` is only a `memcpy`, the limit of any preloaded library.

use std::env;
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde::Deserialize;

use super::data::{MIB, NamedFile};
use super::harness::{Engine, Slice, compare};
use super::load::Load;
use super::outcome::Outcome;
use super::plan::Plan;
use crate::failure::{Context, Result};
use crate::millpond_command::launcher;

const BLOCK_BYTES: u32 = 4096;
const MILLPOND: &str = "fio, millpond run";
const KERNEL: &str = "fio, kernel";
const MEMCPY: &str = "fio, memcpy shim";
const MEMCPY_SHIM: &str = "libmemcpy_shim.so";

/// The cases, and the milliseconds for which fio runs before the measurement: it reads each page a
/// few times.
const CASES: [(&str, u64, u64); 2] =
    [("fio-randread-4k-16m", 16 * MIB, 300), ("fio-randread-4k-256m", 256 * MIB, 1000)];

/// A shorter run of fio may end before its first read on a busy machine.
pub const LENGTH_MIN: Duration = Duration::from_millis(50);

pub fn run(plan: &Plan, outcome: &mut Outcome) -> Result<()> {
    let cases: Vec<_> = CASES.iter().filter(|(name, ..)| plan.wants(name)).collect();
    if let Err(error) = Command::new("fio").arg("--version").output() {
        for (case, ..) in cases {
            skip(outcome, case, &format!("fio can't be run: {error}"));
        }
        return Ok(());
    }
    for &(case, bytes, ramp) in cases {
        plan.report_progress(case);
        let bytes = plan.bytes(bytes);
        let file = NamedFile::create(&plan.dir, bytes)?;
        let load = Load::random(bytes, BLOCK_BYTES, 1);
        let ramp = plan.slice(ramp, ramp * 7 / 10);
        let job = |name, launcher, preload, ramp| Fio {
            name,
            launcher,
            preload,
            path: file.path.clone(),
            bytes,
            ramp,
        };
        let launcher = match launcher(&[], &plan.dir) {
            Ok(launcher) => launcher,
            Err(failure) => {
                skip(outcome, case, &failure.message);
                continue;
            }
        };
        let telling = launcher.iter().filter(|word| *word != "--quiet").cloned().collect();
        let subject = job(MILLPOND, launcher, None, ramp);
        // The kernel and the shim have cached the file before fio starts.
        let short = ramp.min(Duration::from_millis(100));
        let kernel = job(KERNEL, Vec::new(), None, short);
        let length = plan.slice(500, 80).max(LENGTH_MIN);
        // A failure on the kernel is a gap; a failure under Millpond only is an error.
        if let Err(error) = kernel.run(length) {
            skip(outcome, case, &error.to_string());
            continue;
        }
        check_served(&job(MILLPOND, telling, None, ramp), plan)
            .context(format!("{case}: {MILLPOND}"))?;
        outcome.rows.extend(compare(case, &subject, &kernel, &load, plan, length)?);
        match memcpy_shim() {
            Ok(shim) => {
                let baseline = job(MEMCPY, Vec::new(), Some(shim), short);
                outcome.rows.extend(compare(case, &subject, &baseline, &load, plan, length)?);
            }
            Err(reason) => outcome.skip(case, MEMCPY, reason),
        }
    }
    Ok(())
}

fn skip(outcome: &mut Outcome, case: &'static str, reason: &str) {
    for engine in [MILLPOND, KERNEL, MEMCPY] {
        outcome.skip(case, engine, reason);
    }
}

/// Fails unless Millpond serves fio's file: otherwise both runs would measure the kernel.
fn check_served(subject: &Fio, plan: &Plan) -> io::Result<()> {
    let mut command = subject.command(Duration::ZERO, plan.slice(250, 250).max(LENGTH_MIN));
    let output = command.output()?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        return Err(io::Error::other(stderr));
    }
    let sentence = stderr.split_once("millpond: served ").map_or("", |(_, sentence)| sentence);
    let mut figures =
        sentence.split(|c: char| !c.is_ascii_digit()).filter_map(|word| word.parse::<u64>().ok());
    // Files, then bytes.
    let [served, passed] = [(); 2].map(|()| figures.nth(1).unwrap_or(0));
    if served == 0 || passed * 20 > served {
        let what = format!("millpond run left {passed} bytes to the kernel, and served {served}");
        return Err(io::Error::other(what));
    }
    Ok(())
}

/// Cargo builds the shim, an example of the preload crate, in the same target directory as this program.
fn memcpy_shim() -> std::result::Result<PathBuf, String> {
    let named = env::var_os("MILLPOND_MEMCPY_SHIM").map(PathBuf::from);
    let beside = || {
        let program = env::current_exe().ok()?;
        Some(program.parent()?.join("examples").join(MEMCPY_SHIM))
    };
    named.or_else(beside).filter(|path| path.exists()).ok_or_else(|| {
        format!(
            "{MEMCPY_SHIM} is not there; build it with: cargo build --release -p millpond-preload \
             --example memcpy_shim"
        )
    })
}

/// fio, started in some way, reading some file.
struct Fio {
    name: &'static str,
    /// Words of the command line before `fio`.
    launcher: Vec<OsString>,
    preload: Option<PathBuf>,
    path: PathBuf,
    bytes: u64,
    /// Time for which fio runs before the measurement, so that the file is cached.
    ramp: Duration,
}

impl Fio {
    fn command(&self, ramp: Duration, length: Duration) -> Command {
        let mut words = self.launcher.iter().cloned().chain([OsString::from("fio")]);
        let mut command = Command::new(words.next().unwrap_or_default());
        command.args(words);
        if let Some(preload) = &self.preload {
            command.env("LD_PRELOAD", preload);
        }
        let mut filename = OsString::from("--filename=");
        filename.push(&self.path);
        command
            .args(["--name=millpond-bench", "--thread", "--ioengine=psync", "--rw=randread"])
            .args(["--norandommap", "--gtod_reduce=1", "--invalidate=0", "--time_based"])
            .args(["--output-format=json", &format!("--bs={BLOCK_BYTES}")])
            .arg(format!("--size={}", self.bytes))
            .arg(format!("--ramp_time={}us", ramp.as_micros()))
            .arg(format!("--runtime={}us", length.as_micros()))
            .arg(filename)
            .stdin(Stdio::null());
        command
    }

    fn run(&self, length: Duration) -> io::Result<Slice> {
        let output = self.command(self.ramp, length).output()?;
        if !output.status.success() {
            let stderr = String::from_utf8_lossy(&output.stderr);
            return Err(io::Error::other(format!("fio: {}\n{stderr}", output.status)));
        }
        parse(&output.stdout, Moved::Read)
    }
}

impl Engine for Fio {
    fn name(&self) -> &str {
        self.name
    }

    /// Each fio warms up by itself, in its ramp time. This reads the file into the kernel's cache.
    /// fio does not check the contents, for speed; tests of `run` do (`fio --verify`).
    fn warm_up(&self, _: &Load) -> io::Result<()> {
        io::copy(&mut File::open(&self.path)?, &mut io::sink()).map(|_| ())
    }

    fn slice(&self, _: &Load, length: Duration) -> io::Result<Slice> {
        self.run(length)
    }
}

#[derive(Deserialize)]
struct Output {
    jobs: Vec<Job>,
}

/// fio's report of a job; processor use is in per cent of the run time.
#[derive(Deserialize)]
struct Job {
    error: i32,
    #[serde(default)]
    read: Direction,
    #[serde(default)]
    write: Direction,
    usr_cpu: f64,
    sys_cpu: f64,
    ctx: u64,
}

#[derive(Deserialize, Default)]
struct Direction {
    iops: f64,
    total_ios: u64,
    runtime: u64,
}

/// The direction of a fio job.
#[derive(Debug, Clone, Copy)]
pub enum Moved {
    Read,
    Written,
}

/// Parses fio's JSON report of its only job.
pub fn parse(stdout: &[u8], moved: Moved) -> io::Result<Slice> {
    // fio may print text before its JSON.
    let start = stdout.iter().position(|byte| *byte == b'{').unwrap_or(0);
    let output: Output = serde_json::from_slice(&stdout[start..])?;
    let job = output.jobs.first().ok_or_else(|| io::Error::other("fio reports no job"))?;
    let (did, what) = match moved {
        Moved::Read => (&job.read, "reads"),
        Moved::Written => (&job.write, "writes"),
    };
    if job.error != 0 || did.total_ios == 0 {
        let what = format!("fio: error {}, {} {what}", job.error, did.total_ios);
        return Err(io::Error::other(what));
    }
    let busy = (job.usr_cpu + job.sys_cpu) / 100.0;
    Ok(Slice {
        ops: did.total_ios,
        ops_per_s: did.iops,
        cpu: Duration::from_millis(did.runtime).mul_f64(busy),
        context_switches: job.ctx,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_are_understood() {
        let report = |error, ios| {
            format!(
                r#"note: something
{{"jobs": [{{"error": {error}, "usr_cpu": 25.0, "sys_cpu": 50.0, "ctx": 7, "other": [],
"read": {{"iops": 2000.5, "total_ios": {ios}, "runtime": 500}}}}]}}"#
            )
        };
        let slice = parse(report(0, 1000).as_bytes(), Moved::Read).unwrap();
        let cpu = Duration::from_millis(375);
        let expected = Slice { ops: 1000, ops_per_s: 2000.5, cpu, context_switches: 7 };
        assert_eq!(slice, expected);
        assert!(parse(report(0, 1000).as_bytes(), Moved::Written).is_err());
        assert!(parse(report(5, 1000).as_bytes(), Moved::Read).is_err());
        assert!(parse(report(0, 0).as_bytes(), Moved::Read).is_err());
        assert!(parse(b"{\"jobs\": []}", Moved::Read).is_err());
        assert!(parse(b"killed", Moved::Read).is_err());
    }
}
