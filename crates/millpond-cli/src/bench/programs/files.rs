//! Programs that go through files once: whoever caches for them what they don't read again, loses.

use super::fixtures::{self, Workplace, program};
use super::job::{Bar, Job, Site, bar, clear, remove};
use crate::bench::data::{MIB, NamedFile};
use crate::failure::{Context, Result};

const SEARCH: Bar = bar("search", 0.95);
const TAR_CREATE: Bar = bar("tar-create", 0.95);
const TAR_EXTRACT: Bar = bar("tar-extract", 0.95);
const CP_TREE: Bar = bar("cp-tree", 0.95);
const RSYNC: Bar = bar("rsync", 0.95);

const CP_FILE: Bar = bar("cp-file", 0.95);
const DD: Bar = bar("dd-1m", 0.95);
const MD5SUM: Bar = bar("md5sum", 0.95);

const SMALL_FILES: usize = 10_000;
const SMALL_FILES_QUICK: usize = 2_500;
const FILE_BYTES: u64 = 512 * MIB;
const FILE_BYTES_QUICK: u64 = 256 * MIB;

pub fn run(place: &Workplace, site: &mut Site<'_>) -> Result<()> {
    small(place, site)?;
    large(place, site)
}

/// Many small files.
fn small(place: &Workplace, site: &mut Site<'_>) -> Result<()> {
    let cases = [SEARCH, TAR_CREATE, TAR_EXTRACT, CP_TREE, RSYNC];
    if !site.wants(&cases) {
        return Ok(());
    }
    let count = site.plan.count(SMALL_FILES, SMALL_FILES_QUICK);
    let (tree, out, archive) = (place.at("tree"), place.at("out"), place.at("tree.tar"));
    fixtures::tree(&tree, count).context(tree.display())?;
    let searching = match program("rg", "ripgrep") {
        // One thread and a fixed order would not be what people run.
        Ok(rg) => [rg.into_os_string(), "--count".into()],
        Err(reason) => {
            site.outcome.note(format!("{}: grep -r, as {reason}", SEARCH.case));
            ["grep".into(), "-rc".into()]
        }
    };
    if site.wants(&[TAR_EXTRACT]) && program("tar", "tar").is_ok() {
        let mut command = std::process::Command::new("tar");
        fixtures::make(command.current_dir(&place.path).args(["cf", "tree.tar", "tree"]))?;
    }
    fixtures::settle(&place.path)?;

    let job = |bar, words: &[&str]| Job::new(bar, count, words).reads(&[&tree]);
    let search =
        Job::new(SEARCH, count, searching.into_iter().chain(["needle".into(), "tree".into()]));
    let jobs = [
        (SEARCH, "grep", "grep", search.reads(&[&tree])),
        (TAR_CREATE, "tar", "tar", job(TAR_CREATE, &["tar", "cf", "out", "tree"]).makes(&out)),
        (
            TAR_EXTRACT,
            "tar",
            "tar",
            Job::new(TAR_EXTRACT, count, ["sh", "-c", "mkdir out && exec tar xf tree.tar -C out"])
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
    for (bar, name, package, job) in jobs {
        measure(place, site, bar, (name, package), &job);
    }
    // Directories stay until the end.
    remove(&archive).context(archive.display())?;
    clear(&out).context(out.display())
}

/// One large file.
fn large(place: &Workplace, site: &mut Site<'_>) -> Result<()> {
    if !site.wants(&[CP_FILE, DD, MD5SUM]) {
        return Ok(());
    }
    let full = if site.plan.quick { FILE_BYTES_QUICK } else { FILE_BYTES };
    let bytes = site.plan.bytes(full);
    let file = NamedFile::create(&place.path, bytes)?;
    let (name, out) = (file.path.as_os_str(), place.at("out"));
    let ops = (bytes / MIB) as usize;
    let named = |option: &str| {
        let mut word = std::ffi::OsString::from(option);
        word.push(name);
        word
    };
    let cp = Job::new(CP_FILE, ops, ["cp".into(), named(""), "out".into()]);
    let dd = ["dd".into(), named("if="), "of=out".into(), "bs=1M".into(), "status=none".into()];
    let md5sum = Job::new(MD5SUM, ops, ["md5sum".into(), named("")]);
    let jobs = [
        (CP_FILE, "cp", cp.makes(&out)),
        (DD, "dd", Job::new(DD, ops, dd).makes(&out)),
        (MD5SUM, "md5sum", md5sum),
    ];
    for (bar, name, job) in jobs {
        measure(place, site, bar, (name, "coreutils"), &job.reads(&[&file.path]));
    }
    remove(&out).context(out.display())
}

fn measure(
    place: &Workplace,
    site: &mut Site<'_>,
    bar: Bar,
    (name, package): (&str, &str),
    job: &Job,
) {
    if !site.wants(&[bar]) {
        return;
    }
    match program(name, package) {
        Ok(_) => site.measure(&place.path, job),
        Err(reason) => site.skip(&[bar], reason),
    }
}
