//! The sockets of an endpoint: a loopback address, and a Unix socket that only its user can connect to.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, fchmod};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with,
};

use crate::Error;

const BACKLOG: i32 = 1024;

pub(crate) fn check_loopback(address: SocketAddr) -> Result<(), Error> {
    if address.ip().to_canonical().is_loopback() {
        Ok(())
    } else {
        Err(Error::NotLoopback { address })
    }
}

pub(crate) fn tcp(address: SocketAddr) -> Result<TcpListener, Error> {
    check_loopback(address)?;
    let failed = |source| Error::Listen { on: address.to_string(), source };
    let listener = TcpListener::bind(address).map_err(failed)?;
    // The standard library's 128 are too few for a burst: the kernel drops the rest, and a client tries again after a second.
    listen(&listener, BACKLOG).map_err(|error| failed(error.into()))?;
    listener.set_nonblocking(true).map_err(failed)?;
    Ok(listener)
}

/// Removes the path when it is dropped, unless another socket has taken it.
#[derive(Debug)]
pub(crate) struct UnixSocket {
    pub(crate) listener: UnixListener,
    path: PathBuf,
    inode: (u64, u64),
    /// A child of fork leaves the path, which is its parent's.
    process: u32,
}

impl UnixSocket {
    pub(crate) fn bind(path: &Path) -> Result<Self, Error> {
        Self::try_bind(path)
            .map_err(|source| Error::Listen { on: path.display().to_string(), source })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    fn try_bind(path: &Path) -> io::Result<Self> {
        remove_stale(path)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        // `bind` gives the file the mode of the socket: it is at no time open to others.
        fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
        bind(&socket, &SocketAddrUnix::new(path)?)?;
        listen(&socket, BACKLOG)?;
        let meta = path.symlink_metadata()?;
        let listener = UnixListener::from(socket);
        let inode = (meta.dev(), meta.ino());
        Ok(Self { listener, path: path.into(), inode, process: std::process::id() })
    }
}

impl Drop for UnixSocket {
    fn drop(&mut self) {
        let same = |meta: &std::fs::Metadata| (meta.dev(), meta.ino()) == self.inode;
        let is_own = self.process == std::process::id();
        if is_own && self.path.symlink_metadata().as_ref().is_ok_and(same) {
            // A path that stays is removed by the next `bind`.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Removes a socket that no process listens on any more.
fn remove_stale(path: &Path) -> io::Result<()> {
    match path.symlink_metadata() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
        Ok(meta) if !meta.file_type().is_socket() => Err(io::Error::new(
            io::ErrorKind::AlreadyExists,
            "a file that is no socket has this path",
        )),
        Ok(_) => match UnixStream::connect(path) {
            Ok(_) => Err(io::Error::new(io::ErrorKind::AddrInUse, "another process listens on it")),
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                std::fs::remove_file(path)
            }
            Err(error) => Err(error),
        },
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn only_loopback_addresses_are_bound() {
        for address in ["0.0.0.0:0", "[::]:0", "192.0.2.1:0", "[2001:db8::1]:0"] {
            let refused = tcp(address.parse().unwrap()).unwrap_err();
            assert!(matches!(refused, Error::NotLoopback { .. }), "{address}: {refused}");
            assert!(refused.to_string().contains("loopback"), "{refused}");
        }
        for address in ["127.0.0.1:0", "127.8.9.1:0"] {
            tcp(address.parse().unwrap()).unwrap();
        }
    }

    #[test]
    fn a_unix_socket_is_private_and_replaces_a_stale_one_only() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s3.sock");
        let first = UnixSocket::bind(&path).unwrap();
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        let refused = UnixSocket::bind(&path).unwrap_err().to_string();
        assert!(refused.contains("another process listens"), "{refused}");
        drop(first);
        assert!(!path.exists());
        // A child of fork drops its copy.
        let mut copy = UnixSocket::bind(&path).unwrap();
        copy.process += 1;
        drop(copy);
        assert!(path.exists());
        std::fs::remove_file(&path).unwrap();
        // A killed process leaves its socket.
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let second = UnixSocket::bind(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "").unwrap();
        drop(second);
        assert!(path.exists(), "the path belongs to another file now");
        assert!(UnixSocket::bind(&path).unwrap_err().to_string().contains("no socket"));
    }
}
