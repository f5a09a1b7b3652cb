//! Threads that do one thing over and over: fio, and loops in C.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::child::Ended;
use super::fixtures::{self, Workplace, program};
use super::job::{Bar, Job, Reading, Site, bar, remove, slice};
use super::produced::files_below;
use crate::bench::data::{self, MIB};
use crate::bench::fio::{self, LENGTH_MIN, Moved};
use crate::bench::harness::Slice;
use crate::bench::loop_mount::LoopMount;
use crate::failure::{Context, Result};

const FIO: [Bar; 2] = [bar("fio-4+4-reads", 10.0), bar("fio-4+4-writes", 0.9)];
const PREAD: Bar = bar("pread-4k", 8.0);
const PWRITE: Bar = bar("pwrite-4k-through", 0.9);
const PWRITE_BACK: Bar = bar("pwrite-4k-back", 1.3);
const OPEN: Bar = bar("open-read-close", 0.95);

/// What a loop goes over: it stays in the processor's cache, where a copy costs least.
const LOOP_BYTES: u64 = 4 * MIB;
const BLOCK_BYTES: u32 = 4096;
const FIO_BLOCK_BYTES: u32 = 8192;

pub fn run(place: &Workplace, site: &mut Site<'_>) -> Result<()> {
    readers_and_writers(site)?;
    loops(place, site)
}

/// 4 threads that read and 4 that write one file, each with a descriptor of its own.
fn readers_and_writers(site: &mut Site<'_>) -> Result<()> {
    if !site.wants(&FIO) {
        return Ok(());
    }
    let full = if site.plan.quick { 64 * MIB } else { 256 * MIB };
    let bytes = site.plan.bytes(full);
    let mount = program("fio", "fio")
        .and_then(|_| program("mkfs.xfs", "xfsprogs"))
        .and_then(|_| LoopMount::new(&site.plan.dir, "xfs", 2 * bytes));
    let mount = match mount {
        Ok(mount) => mount,
        Err(reason) => {
            site.skip(&FIO, reason);
            return Ok(());
        }
    };
    let file = mount.at.join("file");
    filled(&file, bytes, FIO_BLOCK_BYTES).context(file.display())?;
    let ramp = site.plan.slice(1000, 400);
    let length = site.plan.slice(1000, 400).max(LENGTH_MIN);
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
    let job = Job::timing_itself(FIO, words, read).threads(4).blocks(FIO_BLOCK_BYTES);
    site.measure(&mount.at, &job.options(&["--mode", "back"]).reads(&[&file]));
    Ok(())
}

/// Makes a file of so many bytes, by writes of `block_bytes`: the kernel caches it in folios that are as
/// large as what was written, and looks at all of a folio for each write to it (ext4: 4.5 us for 4 KiB in
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

fn loops(place: &Workplace, site: &mut Site<'_>) -> Result<()> {
    let bars = [PREAD, PWRITE, PWRITE_BACK, OPEN];
    if !site.wants(&bars) {
        return Ok(());
    }
    let program = match compile(place, "loops", include_str!("loops.c"), &[]) {
        Ok(program) => program,
        Err(reason) => {
            site.skip(&bars, reason);
            return Ok(());
        }
    };
    let words = |what: &str, passes: usize, threads: u32, files: &[&Path]| {
        let mut words = vec![program.clone().into_os_string(), what.into()];
        words.extend([passes.to_string().into(), threads.to_string().into()]);
        words.extend(files.iter().map(|file| file.as_os_str().to_owned()));
        words
    };
    let files = [place.at("file0"), place.at("file1")];
    for file in &files {
        filled(file, LOOP_BYTES, BLOCK_BYTES).context(file.display())?;
    }
    for threads in [1, 2] {
        let passes = site.plan.count(1000, 250);
        if site.wants(&[PREAD]) {
            let command = words("pread", passes, threads, &[&files[0]]);
            let job = Job::timing_itself([PREAD], command, own_time).threads(threads);
            site.measure(&place.path, &job.blocks(BLOCK_BYTES).reads(&[&files[0]]));
        }
        let passes = site.plan.count(500, 100);
        for (bar, mode) in [(PWRITE, "through"), (PWRITE_BACK, "back")] {
            if !site.wants(&[bar]) {
                continue;
            }
            let used: Vec<&Path> = files[..threads as usize].iter().map(PathBuf::as_path).collect();
            let command = words("pwrite", passes, threads, &used);
            let job = Job::timing_itself([bar], command, own_time).threads(threads);
            let job = job.blocks(BLOCK_BYTES).options(&["--mode", mode]);
            site.measure(&place.path, &job.changes(used.iter().map(PathBuf::from).collect()));
        }
    }
    if site.wants(&[OPEN]) {
        let (tree, list) = (place.at("opened"), place.at("opened.list"));
        fixtures::tree(&tree, site.plan.count(10_000, 2_500)).context(tree.display())?;
        let names: Vec<String> = files_below(&tree)
            .context(tree.display())?
            .iter()
            .map(|path| format!("{}\n", path.display()))
            .collect();
        fs::write(&list, names.concat()).context(list.display())?;
        fixtures::settle(&place.path)?;
        let command = words("open", site.plan.count(5, 5), 1, &[&list]);
        let job = Job::timing_itself([OPEN], command, own_time).blocks(BLOCK_BYTES);
        site.measure(&place.path, &job.reads(&[&tree]));
        remove(&list).context(list.display())?;
    }
    Ok(())
}

/// Compiles one of the programs that come with this one; the reason if that can't be done here.
pub fn compile(
    place: &Workplace,
    name: &str,
    source: &str,
    libraries: &[&str],
) -> std::result::Result<PathBuf, String> {
    let compiler = program("cc", "gcc")?;
    let (file, built) = (place.at(&format!("{name}.c")), place.at(name));
    fs::write(&file, source).map_err(|error| format!("{}: {error}", file.display()))?;
    let mut command = Command::new(compiler);
    command.args(["-O2", "-pthread", "-o"]).arg(&built).arg(&file).args(libraries);
    fixtures::make(&mut command).map_err(|failure| failure.message)?;
    Ok(built)
}

/// The time of a program that says `ops N ns N cpu N` on standard error.
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
