//! The descriptors of the server's process: clients are refused before the last ones are in use.
//!
//! A new descriptor has the lowest free number. So a number near the limit says that almost all below it are in use. The
//! rest is for stores, disk tiers and endpoints. If even accept fails, a spare descriptor is closed for it, so that the
//! client hears why it is refused, and does not wait in the queue of the socket.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::SocketFlags;
use rustix::process::{Resource, getrlimit};

/// The part of the descriptors that is not for clients. Chosen.
const RESERVED_PART: u64 = 8;

fn limit() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// Why a client that has this descriptor is refused. `None`: there are enough.
pub(super) fn shortage(newest: &impl AsRawFd) -> Option<String> {
    let limit = limit();
    let number = u64::try_from(newest.as_raw_fd()).unwrap_or(0);
    (number >= limit - limit / RESERVED_PART).then(refusal)
}

pub(super) fn refusal() -> String {
    format!(
        "the server has no descriptors left for another client: the limit of its process (RLIMIT_NOFILE) is {}",
        limit()
    )
}

/// A connection that was accepted.
pub(super) enum Accepted {
    Client(OwnedFd),
    /// By the spare descriptor: the client is to be refused.
    OneTooMany(OwnedFd),
}

/// A descriptor that is closed to accept a client when there is no other.
pub(super) struct SpareDescriptor(Option<OwnedFd>);

impl SpareDescriptor {
    pub(super) fn new(listener: &OwnedFd) -> io::Result<SpareDescriptor> {
        listener.try_clone().map(|spare| SpareDescriptor(Some(spare)))
    }

    pub(super) fn accept(&mut self, listener: &OwnedFd) -> Result<Accepted, Errno> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        match rustix::net::accept_with(listener, flags) {
            Ok(socket) => Ok(Accepted::Client(socket)),
            // Also if no client waits: the kernel takes a descriptor before it looks.
            Err(Errno::MFILE | Errno::NFILE) => {
                self.0 = None;
                let accepted = rustix::net::accept_with(listener, flags);
                if accepted.is_err() {
                    self.restore(listener);
                }
                accepted.map(Accepted::OneTooMany)
            }
            Err(error) => Err(error),
        }
    }

    /// Makes another spare descriptor, after the refused client's is closed. If another thread has taken the number, the
    /// next call of `accept` does without.
    pub(super) fn restore(&mut self, listener: &OwnedFd) {
        self.0 = listener.try_clone().ok();
    }
}
