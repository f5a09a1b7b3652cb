//! Commands for a running server, from a program that reads nothing.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use millpond::internals::shared::ClientMemory;
use rustix::event::{PollFd, PollFlags, Timespec};

use crate::protocol::{Greeting, Hello, PROTOCOL_VERSION, REPLY_BYTES_MAX, Reply, Request};
use crate::socket;

/// For so long a server may take to answer. Chosen.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

fn receive_in_time(socket: &OwnedFd, buffer: &mut [u8]) -> io::Result<usize> {
    let mut events = [PollFd::new(socket, PollFlags::IN)];
    let timeout = Timespec { tv_sec: ANSWER_TIMEOUT.as_secs() as i64, tv_nsec: 0 };
    if rustix::io::retry_on_intr(|| rustix::event::poll(&mut events, Some(&timeout)))? == 0 {
        return Err(io::Error::new(io::ErrorKind::TimedOut, "the server does not answer"));
    }
    // Descriptors with the greeting are not needed.
    match socket::receive(socket, buffer)? {
        0 => Err(io::Error::new(
            io::ErrorKind::UnexpectedEof,
            "the server has closed the connection",
        )),
        len => Ok(len),
    }
}

/// Changes the memory limit of the server that listens at `socket`, up to the one that it was started with. Returns the
/// limit that is reached. Blocks for some seconds at most.
///
/// # Errors
///
/// No server listens there, it belongs to another user, it does not answer, or the limit is out of range.
///
/// # Examples
///
/// ```
/// let nowhere = millpond_serve::set_server_memory("/run/no/such/socket".as_ref(), 1 << 30);
/// assert_eq!(nowhere.unwrap_err().kind(), std::io::ErrorKind::NotFound);
/// ```
pub fn set_server_memory(socket: &Path, bytes: u64) -> io::Result<u64> {
    let invalid = |error| io::Error::new(io::ErrorKind::InvalidData, error);
    let socket = socket::connect_to_own(socket)?;
    let memory = ClientMemory::create()?;
    let hello = Hello { version: PROTOCOL_VERSION, store_name: None }.encode().expect("short");
    socket::send_with(&socket, &hello, &[memory.descriptor().as_fd()])?;
    let mut buffer = vec![0; REPLY_BYTES_MAX];
    let len = receive_in_time(&socket, &mut buffer)?;
    if let Greeting::Refused(why) = Greeting::decode(&buffer[..len]).map_err(invalid)? {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
    }
    let request = Request::SetMemory { bytes }.encode(1).expect("a short message");
    socket::send(&socket, &request)?;
    let len = receive_in_time(&socket, &mut buffer)?;
    match Reply::decode(&buffer[..len]).map_err(invalid)? {
        (1, Reply::Done(reached)) => Ok(reached),
        (1, Reply::Failed(failure)) => Err(io::Error::other(failure.text)),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "another answer than expected")),
    }
}
