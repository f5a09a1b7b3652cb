//! Threads that repeat one operation: fio, and loops in C.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::child::Ended;
use super::fixtures::{self, WorkDirectory, program};
use super::job::{JobRunner, JobTarget, ProgramJob, Reading, remove, slice, target};
use super::produced::files_below;
use crate::bench::data::{self, MIB};
use crate::bench::fio::{self, LENGTH_MIN, Moved};
use crate::bench::harness::Slice;
use crate::bench::loop_mount::LoopMount;
use crate::failure::{Context, Result};

const FIO_BACK: [JobTarget; 2] = [target("fio-4+4-reads", 10.0), target("fio-4+4-writes", 0.9)];
const FIO_MAPPED: [JobTarget; 2] =
    [target("fio-4+4-mapped-reads", 5.0), target("fio-4+4-mapped-writes", 0.4)];
const PREAD: JobTarget = target("pread-4k", 8.0);
const PWRITE: JobTarget = target("pwrite-4k-through", 0.9);
const PWRITE_BACK: JobTarget = target("pwrite-4k-back", 1.3);
const OPEN: JobTarget = target("open-read-close", 0.95);

/// Size of a loop's file: it stays in the processor's cache, where a copy costs least.
const LOOP_BYTES: u64 = 4 * MIB;
const BLOCK_BYTES: u32 = 4096;
const FIO_BLOCK_BYTES: u32 = 8192;

pub fn run(work_dir: &WorkDirectory, runner: &mut JobRunner<'_>) -> Result<()> {
    readers_and_writers(runner)?;
    loops(work_dir, runner)
}

/// 4 threads that read and 4 that write one file, each with a descriptor of its own.
fn readers_and_writers(runner: &mut JobRunner<'_>) -> Result<()> {
    let cases = [FIO_BACK, FIO_MAPPED].concat();
    if !runner.wants(&cases) {
        return Ok(());
    }
    let full = if runner.plan.quick { 64 * MIB } else { 256 * MIB };
    let bytes = runner.plan.bytes(full);
    let mount = program("fio", "fio")
        .and_then(|_| program("mkfs.xfs", "xfsprogs"))
        .and_then(|_| LoopMount::new(&runner.plan.dir, "xfs", 2 * bytes));
    let mount = match mount {
        Ok(mount) => mount,
        Err(reason) => {
            runner.skip(&cases, reason);
            return Ok(());
        }
    };
    let file = mount.at.join("file");
    filled(&file, bytes, FIO_BLOCK_BYTES).context(file.display())?;
    let ramp = runner.plan.slice(1000, 400);
    let length = runner.plan.slice(1000, 400).max(LENGTH_MIN);
    let common = "fio --name=global --filename=file --thread --group_reporting --ioengine=psync \
                  --norandommap --gtod_reduce=1 --invalidate=0 --time_based --output-format=json";
    let jobs = "--name=reads --rw=randread --numjobs=4 --name=writes --rw=randwrite --numjobs=4";
    let lengths = format!(
        "--bs={FIO_BLOCK_BYTES} --size={bytes} --ramp_time={}us --runtime={}us",
        ramp.as_micros(),
        length.as_micros()
    );
    let words = [common, &lengths, jobs].join(" ");
    let words: Vec<&str> = words.split_whitespace().collect();
    let read = |ended: &Ended| {
        let moved =
            [Moved::Read, Moved::Written].map(|moved| fio::parse(ended.stdout.as_bytes(), moved));
        let slices = moved.into_iter().collect::<io::Result<_>>()?;
        Ok(Reading { slices, said: String::new() })
    };
    for (targets, options) in [(FIO_BACK, &["--mode", "back"][..]), (FIO_MAPPED, &[])] {
        if runner.wants(&targets) {
            let job = ProgramJob::timing_itself(targets, words.clone(), read);
            let job = job.threads(4).blocks(FIO_BLOCK_BYTES).options(options);
            runner.measure(&mount.at, &job.reads(&[&file]));
        }
    }
    Ok(())
}

/// Creates a file of `bytes` bytes by writes of `block_bytes`. The kernel caches it in folios of
/// the size of the writes, and ext4 checks all of a folio at each write to it (4.5 us for 4 KiB in
/// folios of megabytes, 1.3 us in single pages).
fn filled(path: &Path, bytes: u64, block_bytes: u32) -> io::Result<()> {
    let mut file = fs::File::create(path)?;
    let mut block = vec![0; block_bytes as usize];
    for offset in (0..bytes).step_by(block.len()) {
        data::contents(offset, &mut block);
        file.write_all(&block)?;
    }
    file.sync_all()
}

fn loops(work_dir: &WorkDirectory, runner: &mut JobRunner<'_>) -> Result<()> {
    let targets = [PREAD, PWRITE, PWRITE_BACK, OPEN];
    if !runner.wants(&targets) {
        return Ok(());
    }
    let program = match compile(work_dir, "loops", include_str!("loops.c"), &[]) {
        Ok(program) => program,
        Err(reason) => {
            runner.skip(&targets, reason);
            return Ok(());
        }
    };
    let words = |what: &str, passes: usize, threads: u32, files: &[&Path]| {
        let mut words = vec![program.clone().into_os_string(), what.into()];
        words.extend([passes.to_string().into(), threads.to_string().into()]);
        words.extend(files.iter().map(|file| file.as_os_str().to_owned()));
        words
    };
    let files = [work_dir.at("file0"), work_dir.at("file1")];
    for file in &files {
        filled(file, LOOP_BYTES, BLOCK_BYTES).context(file.display())?;
    }
    for threads in [1, 2] {
        let passes = runner.plan.count(1000, 250);
        if runner.wants(&[PREAD]) {
            let command = words("pread", passes, threads, &[&files[0]]);
            let job = ProgramJob::timing_itself([PREAD], command, own_time).threads(threads);
            runner.measure(&work_dir.path, &job.blocks(BLOCK_BYTES).reads(&[&files[0]]));
        }
        let passes = runner.plan.count(500, 100);
        for (target, mode) in [(PWRITE, "through"), (PWRITE_BACK, "back")] {
            if !runner.wants(&[target]) {
                continue;
            }
            let used: Vec<&Path> = files[..threads as usize].iter().map(PathBuf::as_path).collect();
            let command = words("pwrite", passes, threads, &used);
            let job = ProgramJob::timing_itself([target], command, own_time).threads(threads);
            let job = job.blocks(BLOCK_BYTES).options(&["--mode", mode]);
            runner.measure(&work_dir.path, &job.changes(used.iter().map(PathBuf::from).collect()));
        }
    }
    if runner.wants(&[OPEN]) {
        let (tree, list) = (work_dir.at("opened"), work_dir.at("opened.list"));
        fixtures::tree(&tree, runner.plan.count(10_000, 2_500)).context(tree.display())?;
        let names: Vec<String> = files_below(&tree)
            .context(tree.display())?
            .iter()
            .map(|path| format!("{}\n", path.display()))
            .collect();
        fs::write(&list, names.concat()).context(list.display())?;
        fixtures::settle(&work_dir.path)?;
        let command = words("open", runner.plan.count(5, 5), 1, &[&list]);
        let job = ProgramJob::timing_itself([OPEN], command, own_time).blocks(BLOCK_BYTES);
        runner.measure(&work_dir.path, &job.reads(&[&tree]));
        remove(&list).context(list.display())?;
    }
    Ok(())
}

/// Compiles one of the bundled programs; returns the reason if that is not possible.
pub fn compile(
    work_dir: &WorkDirectory,
    name: &str,
    source: &str,
    libraries: &[&str],
) -> std::result::Result<PathBuf, String> {
    let compiler = program("cc", "gcc")?;
    let (file, built) = (work_dir.at(&format!("{name}.c")), work_dir.at(name));
    fs::write(&file, source).map_err(|error| format!("{}: {error}", file.display()))?;
    let mut command = Command::new(compiler);
    command.args(["-O2", "-pthread", "-o"]).arg(&built).arg(&file).args(libraries);
    fixtures::make(&mut command).map_err(|failure| failure.message)?;
    Ok(built)
}

/// The time of a program that prints `ops N ns N cpu N` on standard error.
pub fn own_time(ended: &Ended) -> io::Result<Reading> {
    let told = ended.stderr.lines().find_map(|line| {
        let (ops, rest) = line.strip_prefix("ops ")?.split_once(" ns ")?;
        let (ns, cpu) = rest.split_once(" cpu ")?;
        let time = |ns: &str| ns.parse().ok().map(Duration::from_nanos);
        Some((ops.parse().ok()?, time(ns)?, time(cpu)?))
    });
    let Some((ops, elapsed, cpu)) = told else {
        return Err(io::Error::other(format!("says no time: {}", ended.stderr.trim())));
    };
    let slices = vec![Slice { cpu, ..slice(ops, elapsed, ended) }];
    Ok(Reading { slices, said: ended.stdout.clone() })
}
