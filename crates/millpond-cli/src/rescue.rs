//! `millpond rescue`: writes the content of a rescue file to the file that it belongs to.

use std::io::ErrorKind;
use std::path::PathBuf;

use crate::failure::{Context, Result};
use crate::printable::printable;
use crate::standard_output::print_line;

/// Writes the bytes of a rescue file to the file that they belong to.
///
/// A keeper makes a rescue file if it can't write the dirty pages of a dead program, or must not, as
/// another process has changed the file since. The rescue file is kept.
#[derive(Debug, clap::Args)]
pub struct RescueArgs {
    /// The rescue file that the keeper named in its report
    rescue: PathBuf,

    /// Write to this file instead of the one that the rescue file names
    #[arg(long, value_name = "FILE")]
    onto: Option<PathBuf>,

    /// Write even if the file was changed since the rescue file was made, or is another file, and even if
    /// the rescue file belongs to a user who could not write to it
    #[arg(long)]
    force: bool,
}

pub fn run(args: &RescueArgs) -> Result<()> {
    let RescueArgs { rescue, onto, force } = args;
    let restored = millpond::keeper::restore(rescue, onto.as_deref(), *force)
        .map_err(|error| match error.kind() {
            ErrorKind::StaleNetworkFileHandle => format!("{error}; --force writes anyway"),
            // `--force` does not change an error of the kernel.
            ErrorKind::PermissionDenied if error.raw_os_error().is_none() => {
                format!("{error}; --force writes anyway")
            }
            _ => error.to_string(),
        })
        .context(format!("rescue from {}", rescue.display()))?;
    let path = printable(&restored.path.to_string_lossy());
    print_line(format_args!("{} bytes written to {path}", restored.bytes))
}
