//! `millpond rescue`: puts what a keeper could not write into the file that it belongs to.

use std::io::ErrorKind;
use std::path::PathBuf;

use crate::failure::{Context, Result};
use crate::printable::printable;

/// Writes the bytes of a rescue file to the file that they belong to.
///
/// A keeper makes one where it can't write what a program left dirty when it died, or must not, as
/// somebody else has changed the file meanwhile. The rescue file is left where it is.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// What a keeper named when it said that it could not write
    rescue: PathBuf,

    /// Write to this file, not to the one that the rescue file names
    #[arg(long, value_name = "FILE")]
    onto: Option<PathBuf>,

    /// Write even if the file was changed since the rescue file was made, or is another one, and even if the rescue file
    /// is of a user who could not write to it
    #[arg(long)]
    force: bool,
}

pub fn run(args: &Args) -> Result<()> {
    let Args { rescue, onto, force } = args;
    let restored = millpond::keeper::restore(rescue, onto.as_deref(), *force)
        .map_err(|error| match error.kind() {
            ErrorKind::StaleNetworkFileHandle => format!("{error}; --force writes all the same"),
            // Not the kernel's, which `--force` does not change.
            ErrorKind::PermissionDenied if error.raw_os_error().is_none() => {
                format!("{error}; --force writes all the same")
            }
            _ => error.to_string(),
        })
        .context(format!("rescue from {}", rescue.display()))?;
    let path = printable(&restored.path.to_string_lossy());
    println!("{} bytes written to {path}", restored.bytes);
    Ok(())
}
