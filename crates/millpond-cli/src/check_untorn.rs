//! `millpond check-untorn`: which blocks of files in a directory a power cut leaves whole.

use std::path::PathBuf;
use std::process::ExitCode;

use millpond::{Backing, Engine, Error, OpenOptions, PAGE_BYTES_MAX, PAGE_BYTES_MIN};

use crate::failure::{Context, Result};
use crate::standard_output::print_line;

/// No block is written as a whole.
const NOT_OFFERED: u8 = 3;

/// Shows which blocks of files in a directory a power cut can't tear
///
/// Creates a file in the directory, writes a block of each size with RWF_ATOMIC, and removes the file. Names
/// the requirements of the sizes that the file system or the device does not offer. Exit status: 0 if a size is offered, 3 if
/// none is.
#[derive(Debug, clap::Args)]
pub struct CheckUntornArgs {
    /// The directory of the files
    dir: PathBuf,
}

pub fn run(args: &CheckUntornArgs) -> Result<ExitCode> {
    let engine = Engine::builder().cache_bytes(4 << 20).build().context("engine")?;
    let in_dir = || args.dir.display();
    let mut offered = Vec::new();
    let mut reason = None;
    let sizes = std::iter::successors(Some(PAGE_BYTES_MIN), |bytes| Some(bytes * 2));
    for bytes in sizes.take_while(|&bytes| bytes <= PAGE_BYTES_MAX) {
        let file = tempfile::NamedTempFile::new_in(&args.dir).context(in_dir())?;
        match write_block(&engine, file.path(), bytes) {
            Ok(()) => offered.push(bytes),
            Err(error @ Error::Unsupported { .. }) => {
                reason.get_or_insert_with(|| error.to_string());
            }
            Err(error) => return Err(error).context(in_dir()),
        }
    }
    match (offered.first(), offered.last()) {
        (Some(least), Some(most)) => {
            print_line(format_args!(
                "{}: a power cut tears no block of {least} to {most} bytes\n\
                 open files with direct backing and OpenOptions::untorn({most}), or less",
                in_dir()
            ))?;
        }
        _ => print_line(format_args!("{}: a power cut may tear any block", in_dir()))?,
    }
    if let Some(reason) = reason {
        print_line(reason)?;
    }
    Ok(if offered.is_empty() { ExitCode::from(NOT_OFFERED) } else { ExitCode::SUCCESS })
}

/// Writes a block, overwrites it, and reads it past the cache.
fn write_block(engine: &Engine, path: &std::path::Path, bytes: u32) -> millpond::Result<()> {
    let options = OpenOptions::new().read(true).write(true).backing(Backing::Direct);
    let options = options.untorn(bytes).dsync(true);
    let file = engine.open(path, &options)?;
    let mut found = vec![0; bytes as usize];
    for value in [1, 2] {
        file.write_all_at(&vec![value; bytes as usize], 0)?;
        engine
            .open(path, &options.clone().direct(true).bounce(true))?
            .read_exact_at(&mut found, 0)?;
        assert!(found.iter().all(|&byte| byte == value), "the block is not as it was written");
    }
    file.close()
}
