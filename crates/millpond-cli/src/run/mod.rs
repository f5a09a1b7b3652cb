//! `millpond run` executes another program and serves its file I/O.
//!
//! The program's file is checked. Then the program is started with the preload library in `LD_PRELOAD`. The library
//! gets its options from the environment; see [`environment`].
//!
//! In mode through the program replaces this process (exec), so process id, exit status, signals and terminal are the
//! program's own.
//! In mode back this process stays as the program's parent, and keeps its dirty pages ([`kept`]). It also stays to
//! report about the files ([`explain`]).

pub mod explain;
mod kept;
#[allow(dead_code, reason = "some words are the writers' alone")]
#[path = "../../../millpond-preload/src/report/layout.rs"]
mod layout;
mod preload;
mod program;
#[allow(dead_code, reason = "only the texts are of use here")]
#[path = "../../../millpond-preload/src/report/reason.rs"]
mod reason;
#[cfg(test)]
#[path = "../../../millpond/tests/common/skip.rs"]
mod skip;
#[path = "../../../millpond/src/recovery/keeper/trusted_directory.rs"]
mod trusted_directory;
mod unused_libraries;

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use clap::ValueEnum;

use self::explain::Explained;
use crate::failure::{Failure, NOT_EXECUTABLE, NOT_FOUND, REFUSED, Result};

/// Runs a program with its file reads and writes served by Millpond.
///
/// Regular files under the given directories are served; the kernel serves all other files. When
/// the program ends, one line on standard error has the numbers of served files and bytes. Exit status: that
/// of the program; 2 for arguments or a program that can't be served, 126 for a program that can't be executed,
/// 127 for one that is not found.
#[derive(Debug, PartialEq, clap::Args)]
#[command(group = clap::ArgGroup::new("telling").args(["stats", "explain"]).multiple(true))]
pub struct Args {
    /// In mode back: memory for cached file pages, 512m, 4g (k, m and g are powers of 1024)
    ///
    /// At least 256k. The default is a quarter of the machine's memory or of the cgroup's limit, whichever is less.
    #[arg(long, value_name = "SIZE", value_parser = parse_cache_bytes)]
    cache: Option<u64>,

    /// Serve files under this directory; may be given again [default: the current directory]
    #[arg(long = "path", value_name = "DIR")]
    paths: Vec<PathBuf>,

    /// Serve files from their first read on, not only when they show that it pays
    ///
    /// Mode through then maps files at their first read, and not at the 64th of a descriptor. Mode back also serves files that
    /// are open for reading only. A file that is opened and read once then costs several times as much as on the kernel.
    #[arg(long)]
    eager: bool,

    /// Don't print the last line, with the numbers of served files and bytes
    #[arg(long)]
    quiet: bool,

    /// Where cached pages are: mapped in mode through; buffered or direct in mode back [default: buffered]
    ///
    /// `mapped`: in the kernel's page cache, which reads copy from. `buffered`: in a cache of the
    /// program, which reads and writes through the kernel's cache. `direct`: in a cache of the
    /// program, which reads and writes with O_DIRECT; a last close then waits for the device.
    #[arg(long, value_enum)]
    backing: Option<Backing>,

    /// When a write reaches the kernel: before it returns, or later, and even if the program is
    /// killed first
    #[arg(long, value_enum, default_value_t = Mode::Through)]
    mode: Mode,

    /// Report the totals of all files when the program has exited or was killed
    ///
    /// `millpond run` then stays as the program's parent, also in mode through. Read hits are counted,
    /// which adds some nanoseconds to each.
    #[arg(long)]
    stats: bool,

    /// Also report each file: when it was served and when not, and why; the bytes read and written
    #[arg(long)]
    explain: bool,

    /// Write the report as JSON
    #[arg(long, requires = "telling")]
    json: bool,

    /// Write the report to this file, not to standard error
    #[arg(long, value_name = "FILE", requires = "telling")]
    report: Option<PathBuf>,

    /// The program and its arguments
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Backing {
    Mapped,
    Buffered,
    Direct,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Mode {
    Through,
    Back,
}

const CACHE_BYTES: &str = "MILLPOND_CACHE_BYTES";
const EAGER: &str = "MILLPOND_EAGER";
const QUIET: &str = "MILLPOND_QUIET";
/// Variables that not every run sets. In a run within another one they would be the outer run's options. The memory files of the
/// outer run's report and of its last line are handed on: their counts include the inner run.
const OF_OPTIONS: [&str; 4] = [CACHE_BYTES, EAGER, QUIET, kept::KEEPER];
/// The least of an engine with a keeper, whose tables are part of the cache; see `millpond::EngineBuilder::keeper`. Only mode
/// back has a cache, and its engine has a keeper.
const CACHE_BYTES_MIN: u64 = 256 << 10;

fn parse_cache_bytes(text: &str) -> std::result::Result<u64, String> {
    let bytes = parse_size(text)?;
    if bytes < CACHE_BYTES_MIN {
        return Err(format!("{bytes} bytes are too few: at least 256k"));
    }
    Ok(bytes)
}

/// A size as fio writes it: `4k` is 4096.
pub(crate) fn parse_size(text: &str) -> std::result::Result<u64, String> {
    ::parse_size::Config::new().with_binary().parse_size(text).map_err(|error| error.to_string())
}

/// Starts the program; returns only if that fails, or with the program's exit status.
pub fn run(args: &Args) -> Result<ExitCode> {
    let [name, arguments @ ..] = args.program.as_slice() else {
        return Err(Failure::new(REFUSED, "no program given"));
    };
    check_backing(args)?;
    let served = served_directories(&args.paths)?;
    let path = program::find(name)?;
    program::check(&path)?;
    let library = preload::library()?;

    let mut command = Command::new(&path);
    command.arg0(name).args(arguments);
    for name in OF_OPTIONS {
        command.env_remove(name);
    }
    command.envs(environment(args, &served, &library));
    let error = if args.mode == Mode::Back || args.stats || args.explain {
        match stay(args, &mut command)? {
            Ok(status) => return Ok(status),
            Err(error) => error,
        }
    } else {
        command.exec()
    };
    let status = match error.kind() {
        // The program's file exists, so its interpreter is missing.
        std::io::ErrorKind::NotFound => NOT_FOUND,
        _ => NOT_EXECUTABLE,
    };
    Err(Failure::new(status, format!("{}: {error}", path.display())))
}

impl Args {
    fn backing(&self) -> Backing {
        self.backing.unwrap_or(match self.mode {
            Mode::Through => Backing::Mapped,
            Mode::Back => Backing::Buffered,
        })
    }
}

/// Each mode has its own backings, and only mode back has a cache.
fn check_backing(args: &Args) -> Result<()> {
    let (backing, mode) = (args.backing(), args.mode);
    let refused = match (mode, backing) {
        (Mode::Back, Backing::Mapped) => {
            "--backing mapped is for mode through: use --backing buffered or --backing direct with --mode back"
        }
        (Mode::Through, Backing::Buffered) => {
            "--backing buffered needs --mode back: mode through has no cache of its own"
        }
        (Mode::Through, Backing::Direct) => {
            "--backing direct needs --mode back: mode through has no cache of its own"
        }
        (Mode::Through, Backing::Mapped) if args.cache.is_some() => {
            "--cache needs --mode back: in mode through the pages are in the kernel's page cache"
        }
        _ => return Ok(()),
    };
    Err(Failure::new(REFUSED, refused))
}

/// Runs the program as a child, to its end. `Err` inside: the program could not be started.
fn stay(args: &Args, command: &mut Command) -> Result<std::io::Result<ExitCode>> {
    let mut explained = None;
    if args.stats || args.explain {
        let report = Explained::new(args.report.as_ref(), args.json, args.explain)?;
        // The report includes the counts of the program's own line.
        command.env(explain::VARIABLE, report.name()?).env(QUIET, "1");
        explained = Some(report);
    }
    let status = match kept::run(command, args.mode == Mode::Back, args.quiet)? {
        Ok(status) => status,
        Err(error) => return Ok(Err(error)),
    };
    if let Some(Err(failure)) = explained.map(|explained| explained.say(status)) {
        // Not returned: the program's exit status must be passed on.
        failure.report("millpond");
    }
    Ok(Ok(kept::end_as(status)))
}

/// Environment variables that the preload library reads when it is loaded.
fn environment(args: &Args, served: &OsStr, library: &Path) -> Vec<(&'static str, OsString)> {
    let mut environment = vec![
        ("LD_PRELOAD", preload::prepended(library, env::var_os("LD_PRELOAD"))),
        ("MILLPOND_PATHS", served.to_owned()),
    ];
    if let Some(bytes) = args.cache {
        environment.push((CACHE_BYTES, bytes.to_string().into()));
    }
    if args.eager {
        environment.push((EAGER, "1".into()));
    }
    if args.quiet {
        environment.push((QUIET, "1".into()));
    }
    let backing = match args.backing() {
        Backing::Mapped => "mapped",
        Backing::Buffered => "buffered",
        Backing::Direct => "direct",
    };
    environment.push(("MILLPOND_BACKING", backing.into()));
    let mode = match args.mode {
        Mode::Through => "through",
        Mode::Back => "back",
    };
    environment.push((kept::MODE, mode.into()));
    environment
}

/// The directories to serve, free of symbolic links, joined by colons.
fn served_directories(paths: &[PathBuf]) -> Result<OsString> {
    let default = [PathBuf::from(".")];
    let paths = if paths.is_empty() { &default } else { paths };
    let mut joined = OsString::new();
    for path in paths {
        let refuse = |why: &dyn std::fmt::Display| {
            Failure::new(REFUSED, format!("--path {}: {why}", path.display()))
        };
        let canonical = fs::canonicalize(path).map_err(|error| refuse(&error))?;
        if !canonical.is_dir() {
            return Err(refuse(&"not a directory"));
        }
        if canonical.as_os_str().as_bytes().contains(&b':') {
            return Err(refuse(&"a directory with a colon in its name can't be served"));
        }
        if !joined.is_empty() {
            joined.push(":");
        }
        joined.push(canonical);
    }
    Ok(joined)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_binary() {
        assert_eq!(parse_cache_bytes("256k"), Ok(256 << 10));
        assert_eq!(parse_cache_bytes("1GiB"), Ok(1 << 30));
        assert_eq!(parse_cache_bytes("2000000"), Ok(2_000_000));
        assert!(parse_cache_bytes("255k").is_err());
        assert!(parse_cache_bytes("lots").is_err());
    }

    #[test]
    fn served_directories_are_canonical() {
        let joined = served_directories(&["/usr/../usr".into(), "/".into()]).unwrap();
        assert_eq!(joined, "/usr:/");
        assert_eq!(served_directories(&["/no/such".into()]).unwrap_err().status, REFUSED);
        assert_eq!(served_directories(&["/dev/null".into()]).unwrap_err().status, REFUSED);
    }
}
