//! The listening socket of a keeper, and its address.

use std::fs::{DirBuilder, Permissions};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{Access, FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::SocketAddrUnix;

use crate::recovery::keeper::trusted_directory;
use crate::recovery::wire::{self, Address};

/// Connections that wait to be accepted; the kernel also has a limit (`net.core.somaxconn`).
const BACKLOG: i32 = 1024;
/// How long a starting keeper waits for other keepers that start in the same directory. Chosen: each takes
/// milliseconds.
const TURN_PATIENCE: Duration = Duration::from_secs(5);
/// The prefix of directories of [`Address::unique`], whose content is hidden from other users.
const UNIQUE: &str = "millpond-keeper-";

impl Address {
    /// A unique address that no other user can find out: a socket below a directory that other users can't
    /// list, which [`Server::bind`](crate::keeper::Server::bind) creates. It also works for a client that
    /// has become another user.
    ///
    /// # Examples
    ///
    /// ```
    /// use millpond::keeper::Address;
    /// assert_ne!(Address::unique(), Address::unique());
    /// ```
    #[must_use]
    pub fn unique() -> Address {
        let pid = std::process::id();
        let random = || RandomState::new().hash_one(pid);
        let (one, two, three) = (random(), random(), random());
        let names = format!("{UNIQUE}{pid}-{one:016x}/{two:016x}{three:016x}/door");
        let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
        let places = [std::env::temp_dir(), "/tmp".into(), "/dev/shm".into()];
        let found = places.into_iter().chain(runtime).find_map(|place| {
            let place = writable(&place)?;
            place.join(&names).to_str()?.parse().ok()
        });
        // If there is no such directory, binding fails with the path.
        found.unwrap_or_else(|| format!("/tmp/{names}").parse().expect("short, and not empty"))
    }

    /// Whether it was made by [`Address::unique`].
    fn is_unique(&self) -> bool {
        let directory = self.path().and_then(Path::parent).and_then(Path::parent);
        let name = directory.and_then(Path::file_name);
        name.is_some_and(|name| name.as_bytes().starts_with(UNIQUE.as_bytes()))
    }
}

/// The path of `place` without symbolic links, if the calling user may create a directory there, and no
/// other user can replace one on the way.
fn writable(place: &Path) -> Option<PathBuf> {
    let may_write = Access::WRITE_OK | Access::EXEC_OK;
    let place = place.is_absolute().then(|| trusted_directory::resolve(place).ok())??;
    rustix::fs::access(&place, may_write).is_ok().then_some(place)
}

/// Listens at `address`; adds the paths to be removed at the end to `made`, also on failure.
pub(super) fn bind(
    listener: &OwnedFd,
    address: &Address,
    made: &mut Vec<PathBuf>,
) -> io::Result<()> {
    match (address.path(), address.is_unique()) {
        (Some(path), true) => bind_hidden(listener, path, made)?,
        (Some(path), false) => bind_at(listener, path, address, made)?,
        (None, _) => rustix::net::bind(listener, &address.socket_address()?)?,
    }
    rustix::net::listen(listener, BACKLOG)?;
    Ok(rustix::io::ioctl_fionbio(listener, true)?)
}

/// Binds to a path below a new directory that other users may pass, but not list; by a name that does not
/// reveal the path in the list of this machine's sockets (`/proc/net/unix`).
fn bind_hidden(listener: &OwnedFd, path: &Path, made: &mut Vec<PathBuf>) -> io::Result<()> {
    let (Some(secret), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(Errno::INVAL.into());
    };
    let outer = secret.parent().ok_or(Errno::INVAL)?;
    let mut directories = Vec::new();
    let outcome = (|| {
        let mut last = None;
        for directory in [outer, secret] {
            DirBuilder::new().mode(0o700).create(directory)?;
            directories.insert(0, directory.to_owned());
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            last = Some(rustix::fs::open(directory, flags, Mode::empty())?);
        }
        let fd = last.expect("two directories");
        let mut hidden = format!("/proc/self/fd/{}/", fd.as_raw_fd()).into_bytes();
        hidden.extend_from_slice(name.as_bytes());
        match rustix::net::bind(listener, &SocketAddrUnix::new(hidden)?) {
            // No /proc.
            Err(Errno::NOENT) => {
                rustix::net::bind(listener, &SocketAddrUnix::new(path.as_os_str().as_bytes())?)
            }
            bound => bound,
        }?;
        directories.insert(0, path.to_owned());
        // Any process that knows the name may connect; the server checks it then.
        std::fs::set_permissions(path, Permissions::from_mode(0o666))?;
        std::fs::set_permissions(secret, Permissions::from_mode(0o711))?;
        std::fs::set_permissions(outer, Permissions::from_mode(0o711))?;
        Ok(())
    })();
    // Also on failure.
    made.extend(directories);
    outcome
}

/// Binds to a path that the user has chosen. The socket appears there when it is listening: a client that
/// finds it may connect. Other keepers that want to replace a dead socket wait until this one has replaced
/// it, or failed.
fn bind_at(
    listener: &OwnedFd,
    path: &Path,
    address: &Address,
    made: &mut Vec<PathBuf>,
) -> io::Result<()> {
    let at = address.socket_address()?;
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let directory = directory.unwrap_or(Path::new("."));
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let turn = rustix::fs::open(directory, flags, Mode::empty())?;
    take_turn(&turn);
    let random = RandomState::new().hash_one(std::process::id()) as u32;
    let early = directory.join(format!(".{random:08x}"));
    let Ok(early_at) = SocketAddrUnix::new(early.as_os_str().as_bytes()) else {
        // The path has the maximum length.
        rustix::net::bind(listener, &at)?;
        made.push(path.to_owned());
        return Ok(());
    };
    rustix::net::bind(listener, &early_at)?;
    let outcome = (|| {
        rustix::net::listen(listener, BACKLOG)?;
        let mut linked = rustix::fs::link(&early, path);
        if linked == Err(Errno::EXIST) && is_dead_socket(path, &at)? {
            std::fs::remove_file(path)?;
            linked = rustix::fs::link(&early, path);
        }
        linked.map_err(|error| if error == Errno::EXIST { Errno::ADDRINUSE } else { error })?;
        made.push(path.to_owned());
        Ok(())
    })();
    let removed = std::fs::remove_file(&early);
    outcome.and(removed)
}

/// Locks the directory while it is open. Continues without the lock if the file system has none, or if the
/// holder keeps it too long: in a shared directory any user can.
fn take_turn(directory: &OwnedFd) {
    let until = Instant::now() + TURN_PATIENCE;
    let lock = || rustix::fs::flock(directory, FlockOperation::NonBlockingLockExclusive);
    while lock() == Err(Errno::WOULDBLOCK) && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Whether the path is a socket without a listener.
fn is_dead_socket(path: &Path, at: &SocketAddrUnix) -> io::Result<bool> {
    let stat = rustix::fs::lstat(path)?;
    if rustix::fs::FileType::from_raw_mode(stat.st_mode) != rustix::fs::FileType::Socket {
        return Ok(false);
    }
    let probe = wire::socket()?;
    // A full backlog shows that there is a listener.
    rustix::io::ioctl_fionbio(&probe, true)?;
    Ok(rustix::net::connect(&probe, at) == Err(Errno::CONNREFUSED))
}
