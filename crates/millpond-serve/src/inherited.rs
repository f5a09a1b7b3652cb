//! A listening socket that a service manager has passed to this process, by the protocol of systemd (`sd_listen_fds`).

use std::ffi::OsStr;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use rustix::fs::OFlags;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, sockopt};
use rustix::process::geteuid;

use crate::socket;

/// A listening socket of this user, and its path.
#[derive(Debug)]
pub struct InheritedSocket {
    descriptor: OwnedFd,
    path: PathBuf,
}

/// The socket that a service manager has passed to this process. `None`: it has passed none, or this function has returned it before.
///
/// # Errors
///
/// `InvalidInput`: the environment is not that of a service manager, there are several sockets, or the socket is none for a
/// server: a listening Unix socket of kind SOCK_SEQPACKET with a path. `PermissionDenied`: the directory of the
/// socket belongs to another user, or others may write to it.
///
/// # Examples
///
/// ```
/// use millpond_serve::{InheritedSocket, inherited_socket};
///
/// let socket: Option<InheritedSocket> = inherited_socket()?;
/// println!("systemd listens at {:?}", socket.as_ref().map(|socket| socket.path()));
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn inherited_socket() -> io::Result<Option<InheritedSocket>> {
    static IS_TAKEN: AtomicBool = AtomicBool::new(false);
    let invalid = |what: String| io::Error::new(io::ErrorKind::InvalidInput, what);
    let mut descriptors =
        sd_notify::listen_fds().map_err(|error| invalid(format!("LISTEN_FDS: {error}")))?;
    let Some(number) = descriptors.next() else { return Ok(None) };
    let more = descriptors.len();
    if more > 0 {
        return Err(invalid(format!(
            "the service manager passes {} sockets, and not one",
            more + 1
        )));
    }
    // Relaxed: only one caller finds false, and nothing else is published.
    if IS_TAKEN.swap(true, Relaxed) {
        return Ok(None);
    }
    // SAFETY: the environment says that the process that started this one has passed the descriptor to this process, so no
    // other code has it as its own. `IS_TAKEN`: this is done once.
    let descriptor = unsafe { OwnedFd::from_raw_fd(number) };
    InheritedSocket::check(descriptor).map(Some)
}

impl InheritedSocket {
    fn check(descriptor: OwnedFd) -> io::Result<InheritedSocket> {
        let invalid = |what: &str| {
            let what = format!(
                "the service manager passes {what}: the unit needs ListenSequentialPacket=PATH"
            );
            io::Error::new(io::ErrorKind::InvalidInput, what)
        };
        let family = sockopt::socket_domain(&descriptor).map_err(|_| invalid("no socket"))?;
        if family != AddressFamily::UNIX {
            return Err(invalid("no Unix socket"));
        }
        if sockopt::socket_type(&descriptor)? != SocketType::SEQPACKET {
            return Err(invalid("a socket of another kind"));
        }
        if !sockopt::socket_acceptconn(&descriptor)? {
            return Err(invalid("a socket that does not listen"));
        }
        let address = SocketAddrUnix::try_from(rustix::net::getsockname(&descriptor)?)?;
        let path = address.path_bytes().filter(|path| path.first() == Some(&b'/'));
        let path = path.ok_or_else(|| invalid("a socket without an absolute path"))?;
        let path = PathBuf::from(OsStr::from_bytes(path));
        socket::check_directory(path.parent().unwrap_or(Path::new("/")), geteuid().as_raw())?;
        let flags = rustix::fs::fcntl_getfl(&descriptor)?;
        rustix::fs::fcntl_setfl(&descriptor, flags | OFlags::NONBLOCK)?;
        Ok(InheritedSocket { descriptor, path })
    }

    /// The path that clients connect to.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn into_descriptor(self) -> OwnedFd {
        self.descriptor
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixDatagram, UnixListener};

    use super::*;

    fn error(descriptor: impl Into<OwnedFd>) -> String {
        InheritedSocket::check(descriptor.into()).unwrap_err().to_string()
    }

    #[test]
    fn only_a_servers_socket_is_taken() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener =
            rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        rustix::net::bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        rustix::net::listen(&listener, 1).unwrap();
        let inherited = InheritedSocket::check(listener).unwrap();
        assert_eq!(inherited.path(), path);
        assert!(error(std::fs::File::open("/dev/null").unwrap()).contains("no socket"));
        let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(error(tcp).contains("no Unix socket"));
        let stream = UnixListener::bind(dir.path().join("stream")).unwrap();
        assert!(error(stream).contains("another kind"));
        assert!(error(UnixDatagram::unbound().unwrap()).contains("another kind"));
        let silent = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        assert!(error(silent).contains("does not listen"));
        let name = format!("millpond-test-{}", std::process::id());
        let unnamed =
            rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        rustix::net::bind(&unnamed, &SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap())
            .unwrap();
        rustix::net::listen(&unnamed, 1).unwrap();
        assert!(error(unnamed).contains("absolute path"));
    }
}
