//! `millpond keeper`: a keeper as a process of its own.

use millpond::keeper::Address;

use crate::failure::{Context, Result};

/// Writes back what programs left dirty when they died.
///
/// Listens at ADDRESS until told to end by SIGTERM or SIGINT, and then until the last program that
/// uses it has ended. Says on standard error what it wrote, and what it could not write.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The path of a socket, or @NAME for one that no directory shows
    address: Address,
}

pub fn run(args: &Args) -> Result<()> {
    let address = &args.address;
    let report = |report| eprintln!("millpond keeper: {report}");
    millpond::keeper::run(address, report).context(format!("keeper at {address}"))
}
