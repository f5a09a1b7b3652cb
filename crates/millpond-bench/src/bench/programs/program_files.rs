//! Programs that read or write each file once. A cache gains nothing here, and its costs show.

use super::fixtures::{self, WorkDirectory, program};
use super::job::{JobRunner, JobTarget, ProgramJob, clear, remove, target};
use crate::bench::data::{MIB, NamedFile};
use crate::failure::{Context, Result};

const SEARCH: JobTarget = target("search", 0.95);
const TAR_CREATE: JobTarget = target("tar-create", 0.95);
const TAR_EXTRACT: JobTarget = target("tar-extract", 0.95);
const CP_TREE: JobTarget = target("cp-tree", 0.95);
const RSYNC: JobTarget = target("rsync", 0.95);

const CP_FILE: JobTarget = target("cp-file", 0.95);
const DD: JobTarget = target("dd-1m", 0.95);
const MD5SUM: JobTarget = target("md5sum", 0.95);

const SMALL_FILES: usize = 10_000;
const SMALL_FILES_QUICK: usize = 2_500;
const FILE_BYTES: u64 = 512 * MIB;
const FILE_BYTES_QUICK: u64 = 256 * MIB;

pub fn run(work_dir: &WorkDirectory, runner: &mut JobRunner<'_>) -> Result<()> {
    small(work_dir, runner)?;
    large(work_dir, runner)
}

/// Many small files.
fn small(work_dir: &WorkDirectory, runner: &mut JobRunner<'_>) -> Result<()> {
    let cases = [SEARCH, TAR_CREATE, TAR_EXTRACT, CP_TREE, RSYNC];
    if !runner.wants(&cases) {
        return Ok(());
    }
    let count = runner.plan.count(SMALL_FILES, SMALL_FILES_QUICK);
    let (tree, out, archive) = (work_dir.at("tree"), work_dir.at("out"), work_dir.at("tree.tar"));
    fixtures::tree(&tree, count).context(tree.display())?;
    let searching = match program("rg", "ripgrep") {
        // The usual options: neither one thread nor a fixed order.
        Ok(rg) => [rg.into_os_string(), "--count".into()],
        Err(reason) => {
            runner.outcome.note(format!("{}: grep -r, as {reason}", SEARCH.case));
            ["grep".into(), "-rc".into()]
        }
    };
    if runner.wants(&[TAR_EXTRACT]) && program("tar", "tar").is_ok() {
        let mut command = std::process::Command::new("tar");
        fixtures::make(command.current_dir(&work_dir.path).args(["cf", "tree.tar", "tree"]))?;
    }
    fixtures::settle(&work_dir.path)?;

    let job = |target, words: &[&str]| ProgramJob::new(target, count, words).reads(&[&tree]);
    let search = ProgramJob::new(
        SEARCH,
        count,
        searching.into_iter().chain(["needle".into(), "tree".into()]),
    );
    let jobs = [
        (SEARCH, "grep", "grep", search.reads(&[&tree])),
        (TAR_CREATE, "tar", "tar", job(TAR_CREATE, &["tar", "cf", "out", "tree"]).makes(&out)),
        (
            TAR_EXTRACT,
            "tar",
            "tar",
            ProgramJob::new(
                TAR_EXTRACT,
                count,
                ["sh", "-c", "mkdir out && exec tar xf tree.tar -C out"],
            )
            .reads(&[&archive])
            .makes(&out)
            .sets_times(),
        ),
        (CP_TREE, "cp", "coreutils", job(CP_TREE, &["cp", "-r", "tree", "out"]).makes(&out)),
        (
            RSYNC,
            "rsync",
            "rsync",
            job(RSYNC, &["rsync", "-a", "tree/", "out/"]).makes(&out).sets_times(),
        ),
    ];
    for (target, name, package, job) in jobs {
        measure(work_dir, runner, target, (name, package), &job);
    }
    // Directories stay until the end.
    remove(&archive).context(archive.display())?;
    clear(&out).context(out.display())
}

/// One large file.
fn large(work_dir: &WorkDirectory, runner: &mut JobRunner<'_>) -> Result<()> {
    if !runner.wants(&[CP_FILE, DD, MD5SUM]) {
        return Ok(());
    }
    let full = if runner.plan.quick { FILE_BYTES_QUICK } else { FILE_BYTES };
    let bytes = runner.plan.bytes(full);
    let file = NamedFile::create(&work_dir.path, bytes)?;
    let (name, out) = (file.path.as_os_str(), work_dir.at("out"));
    let ops = (bytes / MIB) as usize;
    let named = |option: &str| {
        let mut word = std::ffi::OsString::from(option);
        word.push(name);
        word
    };
    let cp = ProgramJob::new(CP_FILE, ops, ["cp".into(), named(""), "out".into()]);
    let dd = ["dd".into(), named("if="), "of=out".into(), "bs=1M".into(), "status=none".into()];
    let md5sum = ProgramJob::new(MD5SUM, ops, ["md5sum".into(), named("")]);
    let jobs = [
        (CP_FILE, "cp", cp.makes(&out)),
        (DD, "dd", ProgramJob::new(DD, ops, dd).makes(&out)),
        (MD5SUM, "md5sum", md5sum),
    ];
    for (target, name, job) in jobs {
        measure(work_dir, runner, target, (name, "coreutils"), &job.reads(&[&file.path]));
    }
    remove(&out).context(out.display())
}

fn measure(
    work_dir: &WorkDirectory,
    runner: &mut JobRunner<'_>,
    target: JobTarget,
    (name, package): (&str, &str),
    job: &ProgramJob,
) {
    if !runner.wants(&[target]) {
        return;
    }
    match program(name, package) {
        Ok(_) => runner.measure(&work_dir.path, job),
        Err(reason) => runner.skip(&[target], reason),
    }
}
