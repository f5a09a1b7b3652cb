//! The user of a mark whose backlog is full: no connection shows it (mark.MK2), but the kernel's list of sockets does.
//!
//! The list comes from `NETLINK_SOCK_DIAG` (`sock_diag(7)`), with users since Linux 5.3. A kernel or a sandbox without it
//! leaves the user unknown.

use std::io;
use std::os::fd::AsFd;

use rustix::io::retry_on_intr;
use rustix::net::netlink::SOCK_DIAG;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

/// `SOCK_DIAG_BY_FAMILY` of `linux/sock_diag.h`.
const BY_FAMILY: u16 = 20;
/// `NLM_F_REQUEST` and `NLM_F_DUMP` of `linux/netlink.h`.
const DUMP: u16 = 0x301;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
/// The bytes of `struct nlmsghdr`, `struct unix_diag_msg` and `struct nlattr`.
const HEADER_BYTES: usize = 16;
const SOCKET_BYTES: usize = 16;
const ATTRIBUTE_BYTES: usize = 4;
/// `TCP_LISTEN`, as a bit.
const LISTENING: u32 = 1 << 10;
/// `UDIAG_SHOW_NAME` and `UDIAG_SHOW_UID` of `linux/unix_diag.h`.
const SHOWN: u32 = 0x41;
const UNIX_DIAG_NAME: u16 = 0;
const UNIX_DIAG_UID: u16 = 7;
/// The most bytes of a message of the kernel; a list of many sockets takes several messages.
const MESSAGE_BYTES_MAX: usize = 32 << 10;

/// The user that created the SEQPACKET socket that listens at the abstract name `name`, in the network name space of this thread.
/// `None`: there is none, or the kernel does not say.
pub(super) fn listener_user(name: &[u8]) -> io::Result<Option<u32>> {
    let flags = SocketFlags::CLOEXEC;
    let protocol = Some(SOCK_DIAG);
    let socket =
        rustix::net::socket_with(AddressFamily::NETLINK, SocketType::DGRAM, flags, protocol)?;
    let request = request();
    retry_on_intr(|| rustix::net::send(socket.as_fd(), &request, SendFlags::empty()))?;
    let mut buffer = [0; MESSAGE_BYTES_MAX];
    loop {
        // The kernel writes each message when it is asked for.
        let flags = RecvFlags::DONTWAIT;
        let (len, _) = retry_on_intr(|| rustix::net::recv(socket.as_fd(), &mut buffer[..], flags))?;
        let mut rest = &buffer[..len];
        while let Some((kind, body, after)) = message(rest) {
            match kind {
                BY_FAMILY => {
                    // Sockets of other types have names of their own.
                    let is_mark = body.get(1) == Some(&(libc::SOCK_SEQPACKET as u8));
                    let attributes = body.get(SOCKET_BYTES..).filter(|_| is_mark);
                    if let Some(user) = attributes.and_then(|all| user(all, name)) {
                        return Ok(Some(user));
                    }
                }
                NLMSG_DONE | NLMSG_ERROR => return Ok(None),
                _ => {}
            }
            rest = after;
        }
        if len == 0 {
            return Ok(None);
        }
    }
}

/// `struct nlmsghdr` and `struct unix_diag_req`.
fn request() -> [u8; HEADER_BYTES + 24] {
    let mut bytes = [0; HEADER_BYTES + 24];
    let len = bytes.len() as u32;
    bytes[..4].copy_from_slice(&len.to_ne_bytes());
    bytes[4..6].copy_from_slice(&BY_FAMILY.to_ne_bytes());
    bytes[6..8].copy_from_slice(&DUMP.to_ne_bytes());
    bytes[HEADER_BYTES] = libc::AF_UNIX as u8;
    bytes[HEADER_BYTES + 4..][..4].copy_from_slice(&LISTENING.to_ne_bytes());
    bytes[HEADER_BYTES + 12..][..4].copy_from_slice(&SHOWN.to_ne_bytes());
    bytes
}

/// The first message: its kind and its body; and the bytes after it.
fn message(bytes: &[u8]) -> Option<(u16, &[u8], &[u8])> {
    let len = u32::from_ne_bytes(bytes.get(..4)?.try_into().ok()?) as usize;
    let kind = u16::from_ne_bytes(bytes.get(4..6)?.try_into().ok()?);
    let body = bytes.get(HEADER_BYTES..len)?;
    Some((kind, body, bytes.get(len.next_multiple_of(4)..).unwrap_or_default()))
}

/// The user among the attributes of a socket, if the socket has the abstract name `name`.
fn user(mut attributes: &[u8], name: &[u8]) -> Option<u32> {
    let (mut is_it, mut user) = (false, None);
    while attributes.len() >= ATTRIBUTE_BYTES {
        let len = u16::from_ne_bytes(attributes[..2].try_into().ok()?) as usize;
        let kind = u16::from_ne_bytes(attributes[2..4].try_into().ok()?);
        let value = attributes.get(ATTRIBUTE_BYTES..len)?;
        match kind {
            // An abstract name follows a NUL.
            UNIX_DIAG_NAME => is_it = value.split_first() == Some((&0, name)),
            UNIX_DIAG_UID => user = Some(u32::from_ne_bytes(value.try_into().ok()?)),
            _ => {}
        }
        attributes = attributes.get(len.next_multiple_of(4)..).unwrap_or_default();
    }
    user.filter(|_| is_it)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use rustix::net::SocketAddrUnix;

    use super::*;

    #[test]
    fn the_user_of_a_listener_is_found() {
        let name = format!("millpond-test/owner/{}", std::process::id());
        assert_eq!(listener_user(name.as_bytes()).unwrap(), None);
        let (flags, kind) = (SocketFlags::CLOEXEC, SocketType::SEQPACKET);
        let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None).unwrap();
        let kind = SocketType::STREAM;
        let other = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None).unwrap();
        let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
        rustix::net::bind(&socket, &address).unwrap();
        rustix::net::bind(&other, &address).unwrap();
        rustix::net::listen(&other, 1).unwrap();
        assert_eq!(listener_user(name.as_bytes()).unwrap(), None, "it does not listen yet");
        rustix::net::listen(&socket, 1).unwrap();
        let own = rustix::process::geteuid().as_raw();
        assert_eq!(listener_user(name.as_bytes()).unwrap(), Some(own));
        assert_eq!(listener_user(&name.as_bytes()[1..]).unwrap(), None);
    }

    #[test]
    fn malformed_messages_end_the_search() {
        let mut bytes = [0; 64];
        assert!(message(&bytes).is_none());
        bytes[0] = 200;
        assert!(message(&bytes).is_none(), "longer than what arrived");
        bytes[0] = 3;
        assert!(message(&bytes).is_none(), "shorter than its header");
        assert_eq!(user(&[1, 0, 7, 0, 9], b"name"), None);
        assert_eq!(user(&[9, 0, 7, 0], b"name"), None);
    }
}
