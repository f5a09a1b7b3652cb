//! Runs a program on the kernel and under `millpond run`, and produces its rows.

use std::ffi::OsString;
use std::fmt::Display;
use std::fs;
use std::hint::black_box;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use super::child::{self, Ended};
use super::produced::{Produced, each_chunk, files_below};
use crate::bench::data::MIB;
use crate::bench::harness::{Pair, Slice, alternate};
use crate::bench::outcome::{Outcome, Row};
use crate::bench::plan::Plan;
use crate::millpond_command::millpond;

pub const RUN: &str = "run";
pub const KERNEL: &str = "kernel";

/// Rounds: full and quick.
const ROUNDS_MAX: [u32; 2] = [7, 3];
/// Time after which a program counts as hung: full and quick. Many times as long as it takes on the
/// kernel.
const LIMITS_S: [u64; 2] = [300, 60];

/// The result of a run of a program: a slice for each row, and the output that must be the same on
/// both sides.
pub struct Reading {
    pub slices: Vec<Slice>,
    pub said: String,
}

type Read = Box<dyn Fn(&Ended) -> io::Result<Reading>>;

/// A row, and its target ratio.
#[derive(Debug, Clone, Copy)]
pub struct JobTarget {
    pub case: &'static str,
    pub ratio_min: f64,
}

pub const fn target(case: &'static str, ratio_min: f64) -> JobTarget {
    JobTarget { case, ratio_min }
}

/// A command line and its properties.
pub struct ProgramJob {
    targets: Vec<JobTarget>,
    threads: u32,
    block_bytes: Option<u32>,
    options: Vec<&'static str>,
    command: Vec<OsString>,
    reads: Vec<PathBuf>,
    makes: Option<PathBuf>,
    changes: Vec<PathBuf>,
    sets_times: bool,
    read: Read,
}

impl ProgramJob {
    /// A program whose whole run is measured; it does `ops` operations.
    pub fn new(
        target: JobTarget,
        ops: usize,
        command: impl IntoIterator<Item = impl Into<OsString>>,
    ) -> Self {
        let whole = move |ended: &Ended| {
            let mut lines: Vec<&str> = ended.stdout.lines().collect();
            // The order of a program's threads is random.
            lines.sort_unstable();
            let slices = vec![slice(ops as u64, ended.elapsed, ended)];
            Ok(Reading { slices, said: lines.join("\n") })
        };
        Self::timing_itself([target], command, whole)
    }

    /// A program that measures its own parts.
    pub fn timing_itself(
        targets: impl Into<Vec<JobTarget>>,
        command: impl IntoIterator<Item = impl Into<OsString>>,
        read: impl Fn(&Ended) -> io::Result<Reading> + 'static,
    ) -> Self {
        Self {
            targets: targets.into(),
            threads: 1,
            block_bytes: None,
            options: Vec::new(),
            command: command.into_iter().map(Into::into).collect(),
            reads: Vec::new(),
            makes: None,
            changes: Vec::new(),
            sets_times: false,
            read: Box::new(read),
        }
    }

    pub fn threads(self, threads: u32) -> Self {
        Self { threads, ..self }
    }

    pub fn blocks(self, bytes: u32) -> Self {
        Self { block_bytes: Some(bytes), ..self }
    }

    /// Options of `millpond run`.
    pub fn options(self, options: &[&'static str]) -> Self {
        Self { options: options.to_vec(), ..self }
    }

    /// Files and directories that it reads: the kernel has them in its cache at the start.
    pub fn reads(self, paths: &[&Path]) -> Self {
        Self { reads: paths.iter().map(|path| path.to_path_buf()).collect(), ..self }
    }

    /// The path that it creates: absent at the start, and the same on both sides.
    pub fn makes(self, path: impl Into<PathBuf>) -> Self {
        Self { makes: Some(path.into()), ..self }
    }

    /// Files that it changes, in the same way each time.
    pub fn changes(self, paths: Vec<PathBuf>) -> Self {
        Self { changes: paths, ..self }
    }

    /// It sets modification times of the files that it creates.
    pub fn sets_times(self) -> Self {
        Self { sets_times: true, ..self }
    }
}

/// `ops` operations that took `elapsed`.
pub fn slice(ops: u64, elapsed: Duration, ended: &Ended) -> Slice {
    Slice {
        ops,
        ops_per_s: ops as f64 / elapsed.as_secs_f64(),
        cpu: ended.used.cpu,
        context_switches: ended.used.context_switches,
    }
}

/// The measurement of all jobs, and its results.
pub struct JobRunner<'a> {
    pub plan: &'a Plan,
    pub outcome: Outcome,
    reached: Vec<String>,
    missed: Vec<String>,
}

/// The reason for missing rows: the side on which the job failed, and the error.
type Fault = (&'static str, String);

impl<'a> JobRunner<'a> {
    pub fn new(plan: &'a Plan) -> Self {
        Self { plan, outcome: Outcome::default(), reached: Vec::new(), missed: Vec::new() }
    }

    pub fn wants(&self, targets: &[JobTarget]) -> bool {
        targets.iter().any(|target| self.plan.wants(target.case))
    }

    /// Records why the rows are missing.
    pub fn skip(&mut self, targets: &[JobTarget], reason: impl Display) {
        for target in targets {
            self.outcome.skip(target.case, RUN, &reason);
            self.outcome.skip(target.case, KERNEL, &reason);
        }
    }

    /// Measures `job` in `dir`. A failure on the kernel is a gap; a failure under `run` only is an
    /// error.
    pub fn measure(&mut self, dir: &Path, job: &ProgramJob) {
        let case = job.targets[0].case;
        self.plan.report_progress(&format!("{case}, {} threads", job.threads));
        match self.slices(dir, job) {
            Ok((slices, summary)) => {
                self.rows(job, &slices);
                if let Some(summary) = summary {
                    self.outcome.note(format!("{case}, {} threads: {summary}", job.threads));
                }
            }
            Err((KERNEL, reason)) => self.skip(&job.targets, reason),
            Err((engine, reason)) => {
                for target in &job.targets {
                    self.outcome.fail(target.case, engine, &reason);
                }
            }
        }
    }

    /// The slices of both sides, and the summary of `run`.
    #[expect(clippy::type_complexity, reason = "used once")]
    fn slices(
        &self,
        dir: &Path,
        job: &ProgramJob,
    ) -> Result<([Vec<Vec<Slice>>; 2], Option<String>), Fault> {
        let limit = Duration::from_secs(LIMITS_S[usize::from(self.plan.quick)]);
        let millpond = millpond().map_err(|failure| (RUN, failure.message))?;
        let on_kernel = JobRun { job, dir, limit, engine: KERNEL, launcher: Vec::new() };
        let launcher: Vec<OsString> = [millpond.into(), "run".into()]
            .into_iter()
            .chain(job.options.iter().map(OsString::from))
            .chain(["--".into()])
            .collect();
        let under_run = JobRun { launcher, engine: RUN, ..on_kernel.clone() };

        // These runs are not counted; all of their files are compared.
        let (said, made, _) = on_kernel.checked()?;
        let (own_said, own_made, summary) = under_run.checked()?;
        same(&said, &own_said).map_err(|reason| (RUN, reason))?;
        if let Some(difference) = made.difference(&own_made) {
            return Err((RUN, format!("leaves something else than on the kernel: {difference}")));
        }
        let rounds = self.plan.rounds().at_most(ROUNDS_MAX[usize::from(self.plan.quick)]);
        let timed = |side: &JobRun<'_>| {
            let reading = side.run()?.0;
            same(&said, &reading.said).map_err(|reason| (side.engine, reason))?;
            Ok(reading.slices)
        };
        let slices = alternate(rounds, || timed(&under_run), || timed(&on_kernel))?;
        Ok((slices, summary))
    }

    fn rows(&mut self, job: &ProgramJob, slices: &[Vec<Vec<Slice>>; 2]) {
        for (index, target) in job.targets.iter().enumerate() {
            let of_row = slices.each_ref().map(|side| side.iter().map(|all| all[index]).collect());
            let pair = Pair {
                case: target.case,
                threads: job.threads,
                block_bytes: job.block_bytes,
                subject: RUN,
                baseline: KERNEL,
            };
            let rows = pair.rows(&of_row);
            self.judge(*target, &rows[0]);
            self.outcome.rows.extend(rows);
        }
    }

    fn judge(&mut self, target: JobTarget, row: &Row) {
        let ratio = row.ratio_median.unwrap_or(0.0);
        let told = format!("{} x{} {ratio:.2} ({})", target.case, row.threads, target.ratio_min);
        if ratio >= target.ratio_min { &mut self.reached } else { &mut self.missed }.push(told);
    }

    /// The results, with a summary of the targets.
    pub fn finish(self) -> Outcome {
        let Self { mut outcome, reached, missed, .. } = self;
        for (what, cases) in [("reached", reached), ("missed", missed)] {
            if !cases.is_empty() {
                outcome.note(format!("{what}, ratio (to be reached): {}", cases.join(", ")));
            }
        }
        outcome
    }
}

/// One of the two ways to run a job: on the kernel, or under `run`.
#[derive(Clone)]
struct JobRun<'a> {
    job: &'a ProgramJob,
    dir: &'a Path,
    limit: Duration,
    engine: &'static str,
    /// Words of the command line before the program's own.
    launcher: Vec<OsString>,
}

impl JobRun<'_> {
    /// Runs the job once; it must succeed.
    fn run(&self) -> Result<(Reading, Option<String>), Fault> {
        self.ready()
            .and_then(|()| child::run(&mut self.command(), self.limit))
            .and_then(|ended| {
                if !ended.status.success() {
                    let complaint = ended.stderr.trim();
                    return Err(io::Error::other(format!("{}: {complaint}", ended.status)));
                }
                Ok(((self.job.read)(&ended)?, ended.summary().map(str::to_owned)))
            })
            .map_err(|error| (self.engine, error.to_string()))
    }

    /// Runs the job once: its output, its files, and the summary of `run`.
    fn checked(&self) -> Result<(String, Produced, Option<String>), Fault> {
        let (reading, summary) = self.run()?;
        let ProgramJob { makes, changes, sets_times, .. } = self.job;
        let paths: Vec<PathBuf> = makes.iter().chain(changes).cloned().collect();
        let made =
            Produced::of(&paths, *sets_times).map_err(|error| (self.engine, error.to_string()))?;
        Ok((reading.said, made, summary))
    }

    fn command(&self) -> Command {
        let mut words = self.launcher.iter().chain(&self.job.command);
        let mut command = Command::new(words.next().cloned().unwrap_or_default());
        command.args(words).current_dir(self.dir);
        // Messages in English, without a user's settings.
        command.envs([("LC_ALL", "C"), ("GIT_CONFIG_GLOBAL", "/dev/null")]);
        command.env("GIT_CONFIG_NOSYSTEM", "1").stdin(Stdio::null());
        command
    }

    /// The same start for each run of either side: no created files, memory available, files
    /// cached.
    fn ready(&self) -> io::Result<()> {
        if let Some(made) = &self.job.makes {
            clear(made)?;
        }
        let mut files = Vec::new();
        for path in self.job.reads.iter().chain(&self.job.changes) {
            files.extend(files_below(path)?);
        }
        let bytes: u64 =
            files.iter().map(|file| Ok(fs::metadata(file)?.len())).sum::<io::Result<_>>()?;
        // No cache takes more than the bytes that are read and written. On a virtual machine memory
        // that was not used lately is slow.
        drop(black_box(vec![1_u8; (2 * bytes + 64 * MIB) as usize]));
        for file in files {
            each_chunk(&file, |chunk| {
                black_box(chunk);
            })?;
        }
        Ok(())
    }
}

fn same(expected: &str, said: &str) -> Result<(), String> {
    if expected == said {
        return Ok(());
    }
    let mut lines = expected.lines().zip(said.lines());
    Err(match lines.find(|(expected, said)| expected != said) {
        Some((expected, said)) => format!("says {said:?}, and on the kernel {expected:?}"),
        None => {
            let [own, other] = [said, expected].map(|text| text.lines().count());
            format!("says {own} lines, and on the kernel {other}")
        }
    })
}

/// Removes the file or directory at `path`. A directory is renamed, to be removed at the end: ext4
/// checks each inode that was removed in the last half minute before it takes a free one, which
/// makes repeated extraction of 2,500 files ten times as slow.
pub fn clear(path: &Path) -> io::Result<()> {
    static CLEARED: AtomicU32 = AtomicU32::new(0);
    if !path.is_dir() {
        return remove(path);
    }
    // Relaxed: only the numbers must differ.
    let number = CLEARED.fetch_add(1, Relaxed);
    let aside = path.with_file_name(format!("cleared-{number}"));
    fs::rename(path, aside)
}

pub fn remove(path: &Path) -> io::Result<()> {
    let removed = match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(error) => Err(error),
    };
    removed.or_else(|error| match error.kind() {
        io::ErrorKind::NotFound => Ok(()),
        _ => Err(error),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_must_be_the_same() {
        assert_eq!(same("a\nb", "a\nb"), Ok(()));
        assert!(same("a\nb", "a\nc").unwrap_err().contains("says \"c\", and on the kernel \"b\""));
        assert!(same("a\nb", "a").unwrap_err().contains("says 1 lines, and on the kernel 2"));
    }

    #[test]
    fn what_was_made_is_cleared() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("made");
        for take_away in [clear, remove] {
            take_away(&path).unwrap();
            fs::write(&path, "file").unwrap();
            take_away(&path).unwrap();
            assert!(!path.exists());
            fs::create_dir_all(path.join("sub")).unwrap();
            take_away(&path).unwrap();
            assert!(!path.exists());
        }
        // One directory was renamed.
        let left: Vec<_> = fs::read_dir(dir.path()).unwrap().collect();
        assert!(matches!(&left[..], [Ok(one)] if one.path().join("sub").is_dir()), "{left:?}");
    }
}
