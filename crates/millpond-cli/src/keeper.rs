//! `millpond keeper`: a keeper as a process of its own.

use std::io::Write;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use millpond::keeper::{Address, Report};

use crate::failure::{Context, Result};

/// How long a keeper that is done waits for somebody to read what it says.
const SAYING_PATIENCE: Duration = Duration::from_secs(10);

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
    // From a thread of its own, and whether or not anybody reads it: a keeper that waited for that, or
    // died of it, would be no keeper.
    let (send, reports) = channel::<Report>();
    let (said, all_said) = channel::<()>();
    thread::spawn(move || {
        for report in reports {
            let _ = writeln!(std::io::stderr(), "millpond keeper: {report}");
        }
        drop(said);
    });
    let report = |report| drop(send.send(report));
    let served = millpond::keeper::run(address, report).context(format!("keeper at {address}"));
    drop(send);
    let _ = all_said.recv_timeout(SAYING_PATIENCE);
    served
}
