//! The socket of a server: its path, who may connect, and messages with descriptors.
//!
//! The socket keeps message boundaries. Its directory has mode 0700 and the socket 0600, and both sides ask the kernel for the
//! user of the peer.

use std::ffi::OsString;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use millpond::internals::shared::process_number;
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    sockopt,
};
use rustix::process::{PidfdFlags, geteuid, pidfd_open};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Connections that wait for the server.
const BACKLOG: i32 = 1024;
/// The kernel refuses a message that is longer than the send buffer less these bytes (unix_dgram_sendmsg).
const MESSAGE_OVERHEAD_BYTES: usize = 32;
/// The most descriptors in one message.
const DESCRIPTORS_MAX: usize = 2;

/// The path of a user's server: `millpond/serve.sock` in the directory for run-time files, `XDG_RUNTIME_DIR`. Root has the directory
/// `/run` where the environment names none, as in containers and under cron.
///
/// `None`: the environment does not name an absolute directory, and the effective user is not root.
///
/// # Examples
///
/// ```
/// if let Some(socket) = millpond_serve::default_socket() {
///     assert!(socket.is_absolute());
/// }
/// ```
#[must_use]
pub fn default_socket() -> Option<PathBuf> {
    default_socket_of(std::env::var_os("XDG_RUNTIME_DIR"), geteuid().is_root())
}

fn default_socket_of(named: Option<OsString>, is_root: bool) -> Option<PathBuf> {
    let named = named.map(PathBuf::from).filter(|directory| directory.is_absolute());
    // Other users can't write to /run.
    let directory = named.or_else(|| is_root.then(|| PathBuf::from("/run")))?;
    Some(directory.join("millpond/serve.sock"))
}

fn refused(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, what)
}

fn new_socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    Ok(rustix::net::socket_with(family, kind, flags, None)?)
}

/// Two connected sockets.
#[cfg(test)]
pub(crate) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    Ok(rustix::net::socketpair(family, kind, flags, None)?)
}

/// Connects without waiting. `WouldBlock`: the server has not accepted many others yet.
fn connect(path: &Path) -> io::Result<OwnedFd> {
    let socket = new_socket()?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// The same, to a server of this process's user, or to a socket that root made for it. Where no server listens yet, another
/// user may have taken the path, and would choose the bytes that this process reads.
pub(crate) fn connect_to_own(path: &Path) -> io::Result<OwnedFd> {
    let socket = connect(path)?;
    let (server, user) = (peer_user(&socket)?, geteuid().as_raw());
    if server != user && server != 0 {
        return Err(refused(format!(
            "the server at {} is of user {server}, and this process is user {user}",
            path.display()
        )));
    }
    Ok(socket)
}

/// A file's device and inode.
type FileIdentity = (u64, u64);

fn identity_at(path: &Path) -> Option<FileIdentity> {
    std::fs::symlink_metadata(path).ok().map(|found| (found.dev(), found.ino()))
}

/// The right to a path: an exclusive lock of the file `PATH.lock`, which ends with the process at the latest.
///
/// The look at a path and the start of a server there are two steps, and so are the look at its socket and its removal. Both
/// are done by the owner of this lock alone.
#[derive(Debug)]
struct PathLock {
    path: PathBuf,
    _file: OwnedFd,
    /// A child of fork leaves the file, which is its parent's.
    process: u64,
}

impl PathLock {
    fn acquire(socket: &Path) -> io::Result<PathLock> {
        let mut path = socket.as_os_str().to_owned();
        path.push(".lock");
        let path = PathBuf::from(path);
        let failed = |error: rustix::io::Errno| {
            let error = io::Error::from(error);
            io::Error::new(error.kind(), format!("the lock file {}: {error}", path.display()))
        };
        loop {
            let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
            let file = rustix::fs::open(&path, flags, Mode::RUSR | Mode::WUSR).map_err(failed)?;
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Err(rustix::io::Errno::WOULDBLOCK) => {
                    let what = format!(
                        "another server starts or listens at {}: it has locked {}",
                        socket.display(),
                        path.display()
                    );
                    return Err(io::Error::new(io::ErrorKind::AlreadyExists, what));
                }
                locked => locked.map_err(failed)?,
            }
            // The previous owner removes the file before its lock ends.
            let found = rustix::fs::fstat(&file).map_err(failed)?;
            if identity_at(&path) == Some((found.st_dev, found.st_ino)) {
                return Ok(PathLock { path, _file: file, process: process_number() });
            }
        }
    }
}

impl Drop for PathLock {
    fn drop(&mut self) {
        if self.process == process_number() {
            _ = std::fs::remove_file(&self.path);
        }
    }
}

/// The file of a listening socket, which is removed when this is dropped.
#[derive(Debug)]
pub(crate) struct SocketFile {
    path: PathBuf,
    /// A program without the lock may have replaced the file since.
    identity: FileIdentity,
    /// Dropped last.
    _lock: PathLock,
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let is_own = self._lock.process == process_number();
        if is_own && identity_at(&self.path) == Some(self.identity) {
            _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Listens at `path`. Creates its directory, and replaces the socket of a server that is gone.
pub(crate) fn listen(path: &Path) -> io::Result<(OwnedFd, SocketFile)> {
    let user = geteuid().as_raw();
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let directory = directory.unwrap_or(Path::new("."));
    if SocketAddrUnix::new(path).is_err() {
        let what = format!("the path of the socket is too long: {}", path.display());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    }
    check_directory(directory, user)?;
    // Before the lock: of a server that listens, or another file, the error says more.
    check_path(path, user)?;
    let lock = PathLock::acquire(path)?;
    check_path(path, user)?;
    let socket = new_socket()?;
    // Bound under another name first: a connect before the mode is set would be another user's chance, and a path that
    // exists belongs to a server that listens.
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    // Relaxed: numbers that differ.
    let number = NUMBER.fetch_add(1, Relaxed);
    let hidden_name = format!(".millpond-serve-{}-{number}", std::process::id());
    let hidden = directory.join(&hidden_name);
    _ = std::fs::remove_file(&hidden);
    let placed = bind_in(&socket, directory, &hidden_name).and_then(|()| {
        std::fs::set_permissions(&hidden, std::os::unix::fs::PermissionsExt::from_mode(0o600))?;
        rustix::net::listen(&socket, BACKLOG)?;
        std::fs::rename(&hidden, path)?;
        let found = std::fs::symlink_metadata(path)?;
        let identity = (found.dev(), found.ino());
        Ok(SocketFile { path: path.to_owned(), identity, _lock: lock })
    });
    if placed.is_err() {
        _ = std::fs::remove_file(&hidden);
    }
    Ok((socket, placed?))
}

/// Binds a socket to a name in a directory. The path may be longer than an address, and the name is longer than the socket's own.
fn bind_in(socket: &OwnedFd, directory: &Path, name: &str) -> io::Result<()> {
    if let Ok(address) = SocketAddrUnix::new(directory.join(name)) {
        return Ok(rustix::net::bind(socket, &address)?);
    }
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let opened = rustix::fs::open(directory, flags, Mode::empty())?;
    let path = format!("/proc/self/fd/{}/{name}", opened.as_raw_fd());
    Ok(rustix::net::bind(socket, &SocketAddrUnix::new(path)?)?)
}

/// The directory belongs to the user, or root, and no other user may replace its files.
pub(crate) fn check_directory(directory: &Path, user: u32) -> io::Result<()> {
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
    let found = std::fs::metadata(directory)?;
    let (owner, mode) = (found.uid(), found.mode() & 0o7777);
    if owner != user && owner != 0 {
        return Err(refused(format!(
            "the directory {} belongs to user {owner}, and this process is user {user}",
            directory.display()
        )));
    }
    // In a directory with the sticky bit, others can't replace the file, but they could take its name first.
    if mode & 0o022 != 0 {
        return Err(refused(format!(
            "the directory {} has mode {mode:o}, so other users may replace the socket: use a directory of mode 700, such \
             as a new one in it",
            directory.display()
        )));
    }
    Ok(())
}

/// The path is free, or has the socket of an own server that is gone.
fn check_path(path: &Path, user: u32) -> io::Result<()> {
    let found = match std::fs::symlink_metadata(path) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    let name = path.display();
    let exists = |what: String| Err(io::Error::new(io::ErrorKind::AlreadyExists, what));
    if !found.file_type().is_socket() {
        return exists(format!("{name} exists and is no socket"));
    }
    if found.uid() != user {
        return Err(refused(format!("{name} is a socket of user {}", found.uid())));
    }
    match connect(path) {
        Ok(_) => exists(format!("a server listens at {name} already")),
        Err(error) if error.raw_os_error() == Some(libc::ECONNREFUSED) => Ok(()),
        // Its server has just removed it.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) if error.raw_os_error() == Some(libc::EPROTOTYPE) => {
            exists(format!("{name} is a socket of another program"))
        }
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            exists(format!("a server listens at {name} already, and does not accept clients"))
        }
        Err(error) => Err(error),
    }
}

/// A descriptor that is not closed by others.
///
/// # Safety
///
/// The descriptor stays open, and the same, as long as the value exists.
pub(crate) unsafe trait Owned: AsRawFd {}

// SAFETY: it owns the descriptor.
unsafe impl Owned for OwnedFd {}

// SAFETY: it owns a part of the descriptor.
unsafe impl Owned for Arc<OwnedFd> {}

/// Registers a descriptor with the runtime of the caller.
pub(crate) fn watch<D: Owned>(descriptor: D, interest: Interest) -> io::Result<AsyncFd<D>> {
    // SAFETY: the descriptor stays open, and the same, until the `AsyncFd` drops it (`Owned`).
    Ok(unsafe { AsyncFd::register_with_interest(descriptor, interest) }?)
}

/// The user of a peer, at the time when it connected, or began to listen.
pub(crate) fn peer_user(socket: impl AsFd) -> io::Result<u32> {
    Ok(sockopt::socket_peercred(socket)?.uid.as_raw())
}

/// A pidfd of the process that connected.
pub(crate) fn peer_process(socket: impl AsFd) -> io::Result<OwnedFd> {
    let mut number: libc::c_int = -1;
    let mut len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes to `number`.
    let outcome = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERPIDFD,
            (&raw mut number).cast(),
            &raw mut len,
        )
    };
    if outcome == 0 && number >= 0 {
        // SAFETY: a new descriptor, which no other code has.
        return Ok(unsafe { OwnedFd::from_raw_fd(number) });
    }
    // Before Linux 6.5.
    let process = sockopt::socket_peercred(&socket)?.pid;
    Ok(pidfd_open(process, PidfdFlags::empty())?)
}

/// Sends a message with descriptors.
pub(crate) fn send_with(
    socket: impl AsFd,
    message: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)), "there is room");
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    rustix::net::sendmsg(socket, &[IoSlice::new(message)], &mut control, flags)?;
    Ok(())
}

/// Makes sure that messages of up to `len` bytes can be sent. The kernel refuses a message that is longer than the send buffer
/// (EMSGSIZE), whose length is a setting of the system.
pub(crate) fn ensure_room(socket: impl AsFd, len: usize) -> io::Result<()> {
    let is_enough = || {
        let found = sockopt::socket_send_buffer_size(&socket)?;
        io::Result::Ok(found >= len + MESSAGE_OVERHEAD_BYTES)
    };
    if is_enough()? {
        return Ok(());
    }
    // The kernel doubles the value, and takes no more than net.core.wmem_max.
    sockopt::set_socket_send_buffer_size(&socket, len)?;
    if is_enough()? {
        return Ok(());
    }
    let what = format!(
        "the system's buffers of sockets are too short for messages of {len} bytes: set net.core.wmem_max to {len} or more"
    );
    Err(io::Error::new(io::ErrorKind::OutOfMemory, what))
}

/// Sends a message, or none of it.
pub(crate) fn send(socket: impl AsFd, message: &[u8]) -> io::Result<()> {
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    rustix::net::send(socket, message, flags)?;
    Ok(())
}

fn too_long() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "a message is too long")
}

/// Receives a message, and the descriptors with it. Returns its length; 0 at the end.
pub(crate) fn receive_with(
    socket: impl AsFd,
    buffer: &mut [u8],
) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(buffer)];
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let received = rustix::net::recvmsg(socket, &mut parts, &mut control, flags)?;
    let rights = control.drain().filter_map(|one| match one {
        RecvAncillaryMessage::ScmRights(rights) => Some(rights),
        _ => None,
    });
    // All of them are taken, so that the ones that are not wanted are closed.
    let descriptors: Vec<OwnedFd> = rights.flatten().collect();
    if received.flags.contains(ReturnFlags::TRUNC) {
        return Err(too_long());
    }
    Ok((received.bytes, descriptors))
}

/// Receives a message. Returns its length; 0 at the end. Descriptors with it are closed by the kernel.
pub(crate) fn receive(socket: impl AsFd, buffer: &mut [u8]) -> io::Result<usize> {
    let room = buffer.len();
    let flags = RecvFlags::TRUNC | RecvFlags::DONTWAIT;
    let (_, len) = rustix::net::recv(socket, buffer, flags)?;
    if len > room { Err(too_long()) } else { Ok(len) }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn mode(path: &Path) -> u32 {
        std::fs::metadata(path).unwrap().mode() & 0o777
    }

    /// Incident: without XDG_RUNTIME_DIR, as in containers, the server of root ended with status 2.
    #[test]
    fn root_has_a_default_without_the_environment() {
        let of = |named: &str, is_root| default_socket_of(Some(named.into()), is_root);
        for is_root in [false, true] {
            let socket = of("/run/user/7", is_root);
            assert_eq!(socket.as_deref(), Some(Path::new("/run/user/7/millpond/serve.sock")));
        }
        let of_root = PathBuf::from("/run/millpond/serve.sock");
        for named in ["", "run"] {
            assert_eq!(of(named, true), Some(of_root.clone()));
            assert_eq!(of(named, false), None);
        }
        assert_eq!(default_socket_of(None, true), Some(of_root));
        assert_eq!(default_socket_of(None, false), None);
    }

    /// Leaves the files as a server that was killed: its lock has ended.
    fn end_as_killed(file: SocketFile) {
        let (socket, lock) = (file.path.clone(), file._lock.path.clone());
        let aside = socket.with_extension("aside");
        std::fs::rename(&socket, &aside).unwrap();
        drop(file);
        std::fs::rename(&aside, &socket).unwrap();
        std::fs::write(&lock, "").unwrap();
    }

    /// Method: the number of the process differs, as in a child of fork. A real child would keep the sockets of other tests.
    #[test]
    fn a_child_of_fork_leaves_the_files() {
        let dir = tempfile::tempdir().unwrap();
        let (_socket, mut file) = listen(&dir.path().join("socket")).unwrap();
        file._lock.process += 1;
        drop(file);
        let names = std::fs::read_dir(dir.path()).unwrap().count();
        assert_eq!(names, 2, "the socket and its lock");
    }

    /// Incident: a path that has room in an address failed with "File name too long", as the socket's first name is longer.
    #[test]
    fn the_longest_path_has_a_socket() {
        let dir = tempfile::tempdir().unwrap();
        let room = 108 - dir.path().as_os_str().len() - "/".len() - "/s".len();
        let path = dir.path().join("d".repeat(room)).join("s");
        assert_eq!(path.as_os_str().len(), 108);
        let (_socket, file) = listen(&path).unwrap();
        connect(&path).unwrap();
        assert_eq!(mode(&path), 0o600);
        let names = std::fs::read_dir(path.parent().unwrap()).unwrap().count();
        assert_eq!(names, 2, "the socket and its lock");
        drop(file);
        let error = listen(&path.with_file_name("of")).unwrap_err().to_string();
        assert!(error.contains("too long"), "{error}");
    }

    #[test]
    fn a_message_has_room() {
        let (ours, theirs) = pair().unwrap();
        let message = vec![7; 128 << 10];
        sockopt::set_socket_send_buffer_size(&ours, 4096).unwrap();
        assert_eq!(send(&ours, &message).unwrap_err().raw_os_error(), Some(libc::EMSGSIZE));
        ensure_room(&ours, message.len()).unwrap();
        send(&ours, &message).unwrap();
        assert_eq!(receive(&theirs, &mut vec![0; 256 << 10]).unwrap(), message.len());
        let error = ensure_room(&ours, usize::MAX >> 34).unwrap_err().to_string();
        assert!(error.contains("net.core.wmem_max"), "{error}");
    }

    #[test]
    fn a_socket_is_private_and_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/b/socket");
        let (socket, file) = listen(&path).unwrap();
        assert_eq!((mode(&path), mode(path.parent().unwrap())), (0o600, 0o700));
        let taken = listen(&path).unwrap_err();
        assert!(taken.to_string().contains("listens at"), "{taken}");
        drop(socket);
        end_as_killed(file);
        let (socket, file) = listen(&path).unwrap();
        connect(&path).unwrap();
        assert_eq!(peer_user(connect(&path).unwrap()).unwrap(), geteuid().as_raw());
        drop((socket, file));
        assert!(!path.exists());
        let names = std::fs::read_dir(path.parent().unwrap()).unwrap().count();
        assert_eq!(names, 0, "nothing else is left");
    }

    /// Goal: of servers that start at the same time, at a free path or at that of a server that was killed, one listens.
    #[test]
    fn one_of_several_servers_gets_the_path() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        for round in 0..200 {
            let barrier = std::sync::Barrier::new(4);
            let start = || {
                barrier.wait();
                listen(&path)
            };
            let started: Vec<_> = std::thread::scope(|scope| {
                let all = [0; 4].map(|_| scope.spawn(start));
                all.into_iter().map(|one| one.join().unwrap()).collect()
            });
            let listening = started.iter().filter(|one| one.is_ok()).count();
            assert_eq!(listening, 1, "{started:?}");
            for refused in started.iter().filter_map(|one| one.as_ref().err()) {
                assert_eq!(refused.kind(), io::ErrorKind::AlreadyExists);
                assert!(refused.to_string().contains(&path.display().to_string()), "{refused}");
            }
            connect(&path).unwrap();
            let (socket, file) = started.into_iter().flatten().next().unwrap();
            drop(socket);
            if round % 2 == 0 {
                end_as_killed(file);
            }
        }
    }

    #[test]
    fn other_files_and_open_directories_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        std::fs::write(&path, "text").unwrap();
        assert!(listen(&path).unwrap_err().to_string().contains("no socket"));
        assert_eq!(std::fs::read(&path).unwrap(), b"text");
        std::fs::remove_file(&path).unwrap();
        let stream = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let error = listen(&path).unwrap_err().to_string();
        assert!(error.contains("another program"), "{error}");
        drop(stream);
        let open = dir.path().join("open");
        std::fs::create_dir(&open).unwrap();
        std::fs::set_permissions(&open, PermissionsExt::from_mode(0o777)).unwrap();
        let error = listen(&open.join("socket")).unwrap_err().to_string();
        assert!(error.contains("mode 777"), "{error}");
        let long = dir.path().join("x".repeat(200));
        assert!(listen(&long).unwrap_err().to_string().contains("too long"));
    }

    #[test]
    fn messages_keep_their_boundaries_and_descriptors() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let (listener, _file) = listen(&path).unwrap();
        let client = connect(&path).unwrap();
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let server = rustix::net::accept_with(&listener, flags).unwrap();
        peer_process(&server).unwrap();
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        send_with(&client, b"first", &[file.as_fd(), file.as_fd()]).unwrap();
        send(&client, b"second").unwrap();
        send_with(&client, b"third", &[file.as_fd()]).unwrap();
        send(&client, &[0; 100]).unwrap();
        let mut buffer = [0; 64];
        let (len, descriptors) = receive_with(&server, &mut buffer).unwrap();
        assert_eq!((&buffer[..len], descriptors.len()), (&b"first"[..], 2));
        assert_eq!(receive(&server, &mut buffer).unwrap(), 6);
        assert_eq!(receive(&server, &mut buffer).unwrap(), 5, "without its descriptor");
        assert_eq!(receive(&server, &mut buffer).unwrap_err().kind(), io::ErrorKind::InvalidData);
        assert_eq!(receive(&server, &mut buffer).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        drop(client);
        assert_eq!(receive(&server, &mut buffer).unwrap(), 0);
    }
}
