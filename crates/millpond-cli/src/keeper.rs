//! `millpond keeper`: a keeper as a process of its own.

use std::io::Write;

use millpond::keeper::{Address, Report};

use crate::failure::{Context, Result};

/// Writes back what programs left dirty when they died.
///
/// Listens at ADDRESS until told to end by SIGTERM or SIGINT, and then until the last program that
/// uses it has ended. Says on standard error what it wrote, what it could not write, and in which
/// rescue file that is kept; see `millpond rescue`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The path of a socket, or @NAME for one that no directory shows
    address: Address,
}

pub fn run(args: &Args) -> Result<()> {
    let address = &args.address;
    // Whether or not anybody reads it: a keeper that died of that would be no keeper.
    let report = |report: Report| {
        let _ = writeln!(std::io::stderr(), "millpond keeper: {report}");
    };
    millpond::keeper::run(address, report).context(format!("keeper at {address}"))
}
