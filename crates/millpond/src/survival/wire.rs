//! The messages between an engine and its keeper.
//!
//! A request is one message on a connection of its own, with descriptors beside it where it needs
//! them; the answer is one message; then the connection closes. So no descriptor stays open in the
//! program, which may close all that it has. A request names its mapping by the id that the keeper
//! gave it, and is taken only from the process that the mapping came from.

use std::fmt;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::str::FromStr;

use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use crate::survival::layout::FileSlot;

const MAGIC: u64 = u64::from_le_bytes(*b"MPKEEP01");
const REQUEST_WORDS: usize = 8;
const ANSWER_WORDS: usize = 2;
/// Descriptors that one message can carry.
const FDS_MAX: usize = 2;

/// Where a keeper listens: the path of a socket, or `@` and a name in the abstract name space,
/// which no file system shows and which is gone with the keeper.
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

/// Process and user at the other end of a connection, as they were when it connected.
pub(super) struct Peer {
    /// 0 for a process that is not in our pid name space.
    pub(super) pid: i32,
    pub(super) uid: u32,
}

/// SO_PEERCRED. (Of rustix's the process id can't be 0.)
pub(super) fn peer(socket: BorrowedFd<'_>) -> io::Result<Peer> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: `peer` has room for what is written.
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

/// What an engine asks of its keeper.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Request {
    /// With the mapping and a pidfd of the process. The answer's value is the mapping's id.
    Hello,
    /// With a descriptor that permits writing the file.
    Adopt {
        mapping: u64,
        slot: FileSlot,
        device: u64,
        inode: u64,
        page_shift: u32,
    },
    Forget {
        mapping: u64,
        slot: FileSlot,
    },
    /// The engine is done: the keeper writes what is dirty, and lets go of the mapping.
    Goodbye {
        mapping: u64,
    },
}

impl Request {
    fn words(self) -> [u64; REQUEST_WORDS] {
        match self {
            Request::Hello => [MAGIC, 1, 0, 0, 0, 0, 0, 0],
            Request::Adopt { mapping, slot, device, inode, page_shift } => {
                let shift = u64::from(page_shift);
                [MAGIC, 2, mapping, slot.index.into(), slot.generation.into(), device, inode, shift]
            }
            Request::Forget { mapping, slot } => {
                [MAGIC, 3, mapping, slot.index.into(), slot.generation.into(), 0, 0, 0]
            }
            Request::Goodbye { mapping } => [MAGIC, 4, mapping, 0, 0, 0, 0, 0],
        }
    }

    fn from_words(words: [u64; REQUEST_WORDS]) -> Option<Request> {
        let [magic, kind, mapping, index, generation, device, inode, shift] = words;
        let slot = FileSlot {
            index: u32::try_from(index).ok()?,
            generation: u32::try_from(generation).ok()?,
        };
        let page_shift = u32::try_from(shift).ok()?;
        Some(match (magic, kind) {
            (MAGIC, 1) => Request::Hello,
            (MAGIC, 2) => Request::Adopt { mapping, slot, device, inode, page_shift },
            (MAGIC, 3) => Request::Forget { mapping, slot },
            (MAGIC, 4) => Request::Goodbye { mapping },
            _ => return None,
        })
    }
}

/// Sends a request and waits for the answer, however long the keeper takes.
pub(super) fn ask(address: &Address, request: Request, fds: &[BorrowedFd<'_>]) -> io::Result<u64> {
    let socket = socket()?;
    let to = address.socket_address()?;
    retry_on_intr(|| rustix::net::connect(&socket, &to))?;
    send(socket.as_fd(), &request.words(), fds, SendFlags::NOSIGNAL)?;
    let mut answer = [0; ANSWER_WORDS];
    let (words, _) = receive(socket.as_fd(), &mut answer, RecvFlags::empty())?;
    match (words, answer) {
        (ANSWER_WORDS, [0, value]) => Ok(value),
        (ANSWER_WORDS, [errno, _]) => Err(io::Error::from_raw_os_error(errno as i32)),
        // The keeper died, or the address is somebody else's.
        _ => Err(Errno::CONNRESET.into()),
    }
}

/// Takes a request that has arrived; `None` for anything else.
pub(super) fn receive_request(
    socket: BorrowedFd<'_>,
) -> io::Result<Option<(Request, Vec<OwnedFd>)>> {
    let mut words = [0; REQUEST_WORDS];
    let (count, fds) = receive(socket, &mut words, RecvFlags::DONTWAIT)?;
    let request = (count == REQUEST_WORDS).then(|| Request::from_words(words)).flatten();
    Ok(request.map(|request| (request, fds)))
}

/// Answers without waiting; who does not listen misses it.
pub(super) fn answer(socket: BorrowedFd<'_>, outcome: io::Result<u64>) {
    let words = match outcome {
        Ok(value) => [0, value],
        Err(error) => [error.raw_os_error().unwrap_or(libc::EIO) as u64, 0],
    };
    let _ = send(socket, &words, &[], SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
}

fn send(
    socket: BorrowedFd<'_>,
    words: &[u64],
    fds: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> io::Result<()> {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::INVAL.into());
    }
    let slices = [IoSlice::new(&bytes)];
    let sent = retry_on_intr(|| rustix::net::sendmsg(socket, &slices, &mut control, flags))?;
    // A message of a SEQPACKET socket goes whole.
    if sent == bytes.len() { Ok(()) } else { Err(Errno::MSGSIZE.into()) }
}

/// One message, cut into words: how many, and the descriptors that came with it.
fn receive(
    socket: BorrowedFd<'_>,
    words: &mut [u64],
    flags: RecvFlags,
) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut bytes = [0; REQUEST_WORDS * 8];
    let bytes = &mut bytes[..words.len() * 8];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = flags | RecvFlags::CMSG_CLOEXEC;
    let message = retry_on_intr(|| {
        rustix::net::recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut control, flags)
    })?;
    let mut fds = Vec::new();
    for item in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = item {
            fds.extend(received);
        }
    }
    if message.flags.contains(ReturnFlags::CTRUNC) {
        // Most likely our limit of open files.
        return Err(Errno::NFILE.into());
    }
    if message.bytes % 8 != 0 || message.flags.contains(ReturnFlags::TRUNC) {
        return Ok((0, fds));
    }
    for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = u64::from_ne_bytes(bytes.try_into().expect("eight bytes"));
    }
    Ok((message.bytes / 8, fds))
}
