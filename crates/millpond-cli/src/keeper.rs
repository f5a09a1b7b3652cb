//! `millpond keeper`: runs a keeper (recovery daemon) as a process.

use std::io::Write;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use millpond::keeper::{Address, Report};

use crate::failure::{Context, Result};

/// How long a keeper that has finished waits for its reports to be read.
const SAYING_PATIENCE: Duration = Duration::from_secs(10);

/// Writes back the dirty pages of programs that died.
///
/// Listens at ADDRESS until SIGTERM, SIGINT, SIGHUP or SIGQUIT, and then until the last program that uses it has ended.
/// Reports on standard error the bytes that it wrote, the bytes that it could not write, and the rescue
/// file that keeps them; see `millpond rescue`.
#[derive(Debug, clap::Args)]
pub struct KeeperArgs {
    /// The path of a socket, or @NAME for an abstract socket
    address: Address,
}

pub fn run(args: &KeeperArgs) -> Result<()> {
    let address = &args.address;
    // A separate thread prints, whether or not the output is read: the keeper must neither wait for a
    // reader nor die of a closed pipe.
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
