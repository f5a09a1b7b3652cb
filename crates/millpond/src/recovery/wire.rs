//! The messages between an engine and its keeper, the process that writes the engine's dirty pages back after a
//! crash.
//!
//! A request is one message on its own connection, with descriptors if it needs them; the answer is one
//! message; then the connection closes. So no descriptor stays open in the program, which may close all
//! that it has. A request names its shared memory, which has the cached pages, by the id that the keeper assigned,
//! and is accepted only from the process that the memory came from.
//!
//! - **WR1** Both ends check the other's credentials (`SO_PEERCRED`, from the kernel, of the moment at
//!   which the one listened and the other connected) before they send or receive. So a descriptor is
//!   neither sent to an untrusted process nor accepted from one.
//! - **WR2** No wait for the other end is unbounded, except for that of a disconnect, which takes as
//!   long as the keeper's write-back. The keeper never waits: it receives the messages that are there, and answers without
//!   waiting.

use std::fmt;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    sockopt,
};

use crate::recovery::layout::EntryUse;

const MAGIC: u64 = u64::from_le_bytes(*b"MPKEEP02");
const REQUEST_WORDS: usize = 8;
const ANSWER_WORDS: usize = 2;
/// The number of descriptors that a protocol message carries.
const FDS_MAX: usize = 2;
/// The number of descriptors that any message can carry (SCM_MAX_FD).
const FDS_RECEIVED_MAX: usize = 253;
/// The time limit for an answer of the keeper: requests are made under exclusive guards. It answers in
/// microseconds, unless it is stopped, or has no processor.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);

/// Where a keeper listens: the path of a socket, or `@` and a name in the abstract name space, which no
/// file system shows and which disappears with the keeper. Any user of the network name space may connect
/// to an abstract address; the keeper ignores other users, but they can keep it busy.
///
/// # Examples
///
/// ```
/// let address: millpond::keeper::Address = "@millpond/example".parse()?;
/// assert_eq!(address.to_string(), "@millpond/example");
/// assert!("@".parse::<millpond::keeper::Address>().is_err());
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq, Debug, Hash)]
pub struct Address(String);

impl Address {
    /// The path, unless the address is an abstract one.
    pub(super) fn path(&self) -> Option<&Path> {
        (!self.0.starts_with('@')).then(|| Path::new(&self.0))
    }

    pub(super) fn socket_address(&self) -> io::Result<SocketAddrUnix> {
        Ok(match self.path() {
            Some(path) => SocketAddrUnix::new(path.as_os_str().as_bytes())?,
            None => SocketAddrUnix::new_abstract_name(&self.0.as_bytes()[1..])?,
        })
    }
}

impl FromStr for Address {
    type Err = io::Error;

    fn from_str(text: &str) -> io::Result<Self> {
        let address = Address(text.to_string());
        if text.is_empty() || text == "@" {
            return Err(Errno::INVAL.into());
        }
        // Too long, or with a NUL inside.
        address.socket_address()?;
        Ok(address)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

pub(super) fn socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC;
    Ok(rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

/// Process and user at the other end of a connection, at the time when it connected, or listened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Peer {
    /// 0 for a process that is not in our pid name space.
    pub(super) pid: i32,
    pub(super) uid: u32,
}

/// The user that must be at the other end of an engine's connection.
#[derive(Clone, Copy, Debug)]
pub(super) enum Trust {
    /// A user with full power over this process: our user, or root.
    OurUser,
    /// The keeper that has answered before; this process may have become another user since.
    Peer(Peer),
}

impl Trust {
    fn is(self, peer: Peer) -> bool {
        match self {
            Trust::OurUser => peer.uid == rustix::process::geteuid().as_raw() || peer.uid == 0,
            Trust::Peer(known) => peer == known,
        }
    }
}

/// The answer of a keeper.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) value: u64,
    pub(super) fds: Vec<OwnedFd>,
    pub(super) keeper: Peer,
}

/// Makes the kernel refuse descriptors in messages to the connections of `listener` (Linux 6.16); false if
/// it does not support that. A connection that holds none is closed without waiting.
pub(super) fn refuse_descriptors(listener: &OwnedFd) -> bool {
    const SO_PASSRIGHTS: libc::c_int = 83;
    let passes: libc::c_int = 0;
    // SAFETY: the kernel reads `passes`, with its length.
    let outcome = unsafe {
        libc::setsockopt(
            listener.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PASSRIGHTS,
            (&raw const passes).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    outcome == 0
}

/// SO_PEERCRED. (In rustix's type the process id can't be 0.)
pub(super) fn peer(socket: BorrowedFd<'_>) -> io::Result<Peer> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: `peer` has room for the result.
    let outcome = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut len,
        )
    };
    if outcome == -1 {
        return Err(io::Error::last_os_error());
    }
    Ok(Peer { pid: peer.pid, uid: peer.uid })
}

/// A request of an engine to its keeper.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum KeeperRequest {
    /// With the mapping and a pidfd of the process. The answer's value is the mapping's id.
    Hello,
    /// With a descriptor that permits writing the file.
    Adopt {
        mapping: u64,
        entry: EntryUse,
        device: u64,
        inode: u64,
        page_shift: u32,
    },
    Forget {
        mapping: u64,
        entry: EntryUse,
    },
    /// The engine is done: the keeper writes the dirty pages, and closes the mapping.
    Goodbye {
        mapping: u64,
    },
}

impl KeeperRequest {
    fn words(self) -> [u64; REQUEST_WORDS] {
        match self {
            KeeperRequest::Hello => [MAGIC, 1, 0, 0, 0, 0, 0, 0],
            KeeperRequest::Adopt { mapping, entry, device, inode, page_shift } => {
                let shift = u64::from(page_shift);
                [
                    MAGIC,
                    2,
                    mapping,
                    entry.index.into(),
                    entry.generation.into(),
                    device,
                    inode,
                    shift,
                ]
            }
            KeeperRequest::Forget { mapping, entry } => {
                [MAGIC, 3, mapping, entry.index.into(), entry.generation.into(), 0, 0, 0]
            }
            KeeperRequest::Goodbye { mapping } => [MAGIC, 4, mapping, 0, 0, 0, 0, 0],
        }
    }

    fn from_words(words: [u64; REQUEST_WORDS]) -> Option<KeeperRequest> {
        let [magic, kind, mapping, index, generation, device, inode, shift] = words;
        let entry = EntryUse {
            index: u32::try_from(index).ok()?,
            generation: u32::try_from(generation).ok()?,
        };
        let page_shift = u32::try_from(shift).ok()?;
        Some(match (magic, kind) {
            (MAGIC, 1) => KeeperRequest::Hello,
            (MAGIC, 2) => KeeperRequest::Adopt { mapping, entry, device, inode, page_shift },
            (MAGIC, 3) => KeeperRequest::Forget { mapping, entry },
            (MAGIC, 4) => KeeperRequest::Goodbye { mapping },
            _ => return None,
        })
    }
}

/// Sends a request and waits for the answer.
///
/// # Errors
///
/// The keeper's error; EPERM: another user listens there; ETIMEDOUT; the error of `connect(2)`, or
/// ECONNRESET: the keeper is gone.
pub(super) fn send_request(
    address: &Address,
    keeper: Trust,
    request: KeeperRequest,
    fds: &[BorrowedFd<'_>],
) -> io::Result<Answer> {
    let patience = (!matches!(request, KeeperRequest::Goodbye { .. })).then_some(PATIENCE);
    ask_within(address, keeper, request, fds, patience)
}

pub(super) fn ask_within(
    address: &Address,
    keeper: Trust,
    request: KeeperRequest,
    fds: &[BorrowedFd<'_>],
    patience: Option<Duration>,
) -> io::Result<Answer> {
    let timed_out = |error| if error == Errno::AGAIN { Errno::TIMEDOUT } else { error };
    let socket = socket()?;
    let to = address.socket_address()?;
    // A connection waits for room in the backlog for as long as a message may.
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(PATIENCE))?;
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, patience)?;
    retry_on_intr(|| rustix::net::connect(&socket, &to)).map_err(timed_out)?;
    // WR1.
    let peer = peer(socket.as_fd())?;
    if !keeper.is(peer) {
        return Err(Errno::PERM.into());
    }
    send(socket.as_fd(), &request.words(), fds, SendFlags::NOSIGNAL).map_err(timed_out)?;
    let mut answer = [0; ANSWER_WORDS];
    let (received, fds) = receive(socket.as_fd(), &mut answer, RecvFlags::empty());
    let words = received.map_err(timed_out)?;
    match (words, answer) {
        (ANSWER_WORDS, [0, value]) => Ok(Answer { value, fds, keeper: peer }),
        (ANSWER_WORDS, [errno, _]) => Err(io::Error::from_raw_os_error(errno as i32)),
        // The keeper died.
        _ => Err(Errno::CONNRESET.into()),
    }
}

/// Receives a request that has arrived; `None` if it is invalid. An invalid message may carry descriptors,
/// too: closing them may block.
pub(super) fn receive_request(
    socket: BorrowedFd<'_>,
) -> (rustix::io::Result<Option<KeeperRequest>>, Vec<OwnedFd>) {
    let mut words = [0; REQUEST_WORDS];
    let (received, fds) = receive(socket, &mut words, RecvFlags::DONTWAIT);
    let is_whole = |count| count == REQUEST_WORDS;
    let request =
        received.map(|count| is_whole(count).then(|| KeeperRequest::from_words(words)).flatten());
    (request, fds)
}

/// Answers without waiting; a client that does not listen misses the answer.
pub(super) fn answer(socket: BorrowedFd<'_>, outcome: io::Result<u64>, fds: &[BorrowedFd<'_>]) {
    let words = match outcome {
        Ok(value) => [0, value],
        Err(error) => [error.raw_os_error().unwrap_or(libc::EIO) as u64, 0],
    };
    let _ = send(socket, &words, fds, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
}

/// The descriptors of an answer.
#[cfg(all(test, not(loom)))]
pub(super) fn receive_fds(socket: BorrowedFd<'_>) -> Vec<OwnedFd> {
    receive(socket, &mut [0; ANSWER_WORDS], RecvFlags::empty()).1
}

fn send(
    socket: BorrowedFd<'_>,
    words: &[u64],
    fds: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> rustix::io::Result<()> {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::INVAL);
    }
    let slices = [IoSlice::new(&bytes)];
    let sent = retry_on_intr(|| rustix::net::sendmsg(socket, &slices, &mut control, flags))?;
    // A SEQPACKET socket sends a message as a whole.
    if sent == bytes.len() { Ok(()) } else { Err(Errno::MSGSIZE) }
}

/// Receives one message, split into words: returns their number, and the descriptors that came with it,
/// also with an error. There is room for all descriptors that a message can carry: the kernel closes those
/// without room in the receiving thread, which may block.
fn receive(
    socket: BorrowedFd<'_>,
    words: &mut [u64],
    flags: RecvFlags,
) -> (rustix::io::Result<usize>, Vec<OwnedFd>) {
    let mut bytes = [0; REQUEST_WORDS * 8];
    let bytes = &mut bytes[..words.len() * 8];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_RECEIVED_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = flags | RecvFlags::CMSG_CLOEXEC;
    let received = retry_on_intr(|| {
        rustix::net::recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut control, flags)
    });
    let mut fds = Vec::new();
    let message = match received {
        Ok(message) => message,
        Err(error) => return (Err(error), fds),
    };
    for item in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = item {
            fds.extend(received);
        }
    }
    if message.flags.contains(ReturnFlags::CTRUNC) {
        // Most likely this process's limit of open files.
        return (Err(Errno::NFILE), fds);
    }
    if message.bytes % 8 != 0 || message.flags.contains(ReturnFlags::TRUNC) {
        return (Ok(0), fds);
    }
    for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = u64::from_ne_bytes(bytes.try_into().expect("eight bytes"));
    }
    (Ok(message.bytes / 8), fds)
}
