//! The mark of a file that a keeper has: lets an open of the file find out that a dead process left dirty
//! pages of it, and wait until they are written.
//!
//! ```text
//!   adopt -> mark: listens at a name made of device and inode       (keeper)
//!     the process lives:  connected -> closed by the keeper at once  -> the open continues
//!     the process died:   connected -> closed with the mark, when the file is written
//!   forget, or written -> the mark closes
//! ```
//!
//! A mark is a listening socket in the abstract name space. A process that opens an inode that it does not
//! have open yet connects to the inode's mark, if there is one, and waits for the end of the connection.
//! The keeper checks for deaths before it ends one, so an open that begins when the program is known to be
//! dead does not finish before its pages are in the file.
//!
//! A mark is not a lock on the file. A lock of the keeper would conflict with the program's own locks
//! (whole files are usually locked by `fcntl`, and a lock of another description conflicts, also within one
//! process), and does not distinguish a living owner from a dead one. A lease would, but excludes all other
//! processes while the program lives; `replay` takes one once it is dead.
//!
//! - **MK1** One keeper has an inode: a file that is marked already is not adopted, and its writes are
//!   written through.
//! - **MK2** A mark whose owner is neither this process's user, nor the file's owner, nor root is ignored:
//!   it could make the open wait for nothing. Also one with a full backlog, if the kernel says who made it
//!   (`mark_owner`).
//! - **MK3** Any user may connect to a mark, and send messages that are never received. No such connection
//!   is closed by a thread that serves clients or writes files, unless the kernel has refused all
//!   descriptors that were sent (`closer`).
//! - **MK4** A datagram socket of the mark has the same name as the listener, for at least as long. An open looks for
//!   it first: a search that finds no datagram socket allocates nothing, and one that finds no listener allocates a
//!   socket. If another program has a datagram socket of that name, the file is not adopted: it could close the socket
//!   while the mark is needed. The socket takes no messages, so its close has none to discard, nor descriptors in them.
//!
//! *Not covered*: processes in another network name space, and programs that do not use Millpond. They may
//! read the file before the pages are written, but their own writes stay: see `replay`.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::Stat;
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::{Pid, PidfdFlags};

use crate::file_id::FileId;
use crate::recovery::closer::Closer;
use crate::recovery::{mark_owner, wire};
use crate::sync::MutexExt;

/// The maximum number of connections that wait for one file; later ones try again. Chosen, not measured.
const BACKLOG: i32 = 256;
/// The time that an open waits for a keeper: longer than the kernel makes one wait for a lease (45 s).
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
/// The time between two attempts. Chosen, not measured.
const RETRY_PAUSE: Duration = Duration::from_millis(1);
/// The time between two searches for the owner of a mark with a full backlog. Chosen, not measured.
const OWNER_PAUSE: Duration = Duration::from_millis(200);

/// The mark of a file that this keeper has; the file is marked until this is dropped.
#[derive(Debug)]
pub(super) struct Mark {
    pub(super) listener: OwnedFd,
    /// MK4. After the listener: a field is dropped after the ones before it.
    _datagram: OwnedFd,
    /// Connections that wait for the end of the mark.
    waiting: Mutex<Vec<OwnedFd>>,
    is_buried: AtomicBool,
    /// The kernel accepts no descriptors for its connections, so their close does not block.
    refuses_descriptors: bool,
    closer: Arc<Closer>,
}

fn name(device: u64, inode: u64) -> io::Result<SocketAddrUnix> {
    Ok(SocketAddrUnix::new_abstract_name(text(device, inode).as_bytes())?)
}

fn text(device: u64, inode: u64) -> String {
    format!("millpond-kept/{device:x}/{inode:x}")
}

fn socket(kind: SocketType) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None)?)
}

impl Mark {
    /// Marks a file; EBUSY if it is marked (MK1).
    pub(super) fn set(device: u64, inode: u64, closer: &Arc<Closer>) -> io::Result<Mark> {
        let listener = socket(SocketType::SEQPACKET)?;
        // Before it listens: MK3.
        let refuses_descriptors = wire::refuse_descriptors(&listener);
        let datagram = socket(SocketType::DGRAM)?;
        // Before it has a name.
        rustix::net::shutdown(&datagram, Shutdown::Read)?;
        let name = name(device, inode)?;
        // MK4: the datagram socket has the name before the listener listens.
        for one in [&listener, &datagram] {
            match rustix::net::bind(one, &name) {
                Err(Errno::ADDRINUSE) => return Err(Errno::BUSY.into()),
                bound => bound?,
            }
        }
        rustix::net::listen(&listener, BACKLOG)?;
        Ok(Mark {
            listener,
            _datagram: datagram,
            waiting: Mutex::default(),
            is_buried: AtomicBool::new(false),
            refuses_descriptors,
            closer: Arc::clone(closer),
        })
    }

    /// Accepts waiting connections, at most this many. They wait until they are closed.
    pub(super) fn accept(&self, at_most: usize) -> Vec<OwnedFd> {
        let accept = || rustix::net::accept_with(&self.listener, SocketFlags::CLOEXEC).ok();
        std::iter::from_fn(accept).take(at_most).collect()
    }

    /// The process whose file it marks is dead, and its dirty pages are being written.
    pub(super) fn begin_recovery(&self) {
        // Relaxed: only the server's thread reads it.
        self.is_buried.store(true, Relaxed);
    }

    pub(super) fn is_buried(&self) -> bool {
        self.is_buried.load(Relaxed)
    }

    /// Keeps connections open until the mark is dropped.
    pub(super) fn keep_waiting(&self, connections: Vec<OwnedFd>) {
        self.waiting.acquire().extend(connections);
    }

    /// Ends connections (MK3).
    pub(super) fn hang_up(&self, connections: Vec<OwnedFd>) {
        for socket in connections {
            if self.refuses_descriptors {
                drop(socket);
            } else {
                self.closer.hang_up(socket);
            }
        }
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        // A process that was forked from this one may have the descriptor, too, so closing it is not
        // enough. Shut down first, so that no connection arrives later.
        let _ = rustix::net::shutdown(&self.listener, Shutdown::Both);
        let waiting = std::mem::take(self.waiting.get_mut().expect("no panic under the lock"));
        self.hang_up(waiting);
        self.hang_up(self.accept(usize::MAX));
    }
}

/// Looks for marks with a datagram socket (MK4) that it reuses as long as there are none: creating one takes as long
/// as the rest of an open. It searches the network name space of the thread that created it.
#[derive(Default)]
pub(crate) struct Marks {
    socket: Mutex<Option<KeptSocket>>,
}

struct KeptSocket {
    socket: OwnedFd,
    /// Identifies the socket: a program may close all descriptors.
    id: FileId,
}

impl KeptSocket {
    fn new() -> io::Result<KeptSocket> {
        let socket = out_of_the_way(socket(SocketType::DGRAM)?);
        let id = FileId::of(&rustix::fs::fstat(&socket)?);
        Ok(KeptSocket { socket, id })
    }

    /// Closes it, unless the number has been reused.
    fn close(self) {
        let is_ours =
            rustix::fs::fstat(&self.socket).is_ok_and(|stat| FileId::of(&stat) == self.id);
        if !is_ours {
            std::mem::forget(self.socket);
        }
    }
}

impl Marks {
    /// [`await_written`].
    pub(crate) fn await_written(&self, file: &Stat, patience: Duration) -> io::Result<()> {
        let is_marked = !self.has_none(&name(file.st_dev, file.st_ino)?);
        if is_marked { await_written(file, patience) } else { Ok(()) }
    }

    /// Whether there is certainly no mark.
    fn has_none(&self, name: &SocketAddrUnix) -> bool {
        let kept = || self.socket.acquire();
        // A separate statement, so that the lock is released at once.
        let known = kept().take();
        let Some(mine) = known.or_else(|| KeptSocket::new().ok()) else { return false };
        let has_none = rustix::net::connect(&mine.socket, name) == Err(Errno::CONNREFUSED);
        let left = if has_none { kept().replace(mine) } else { Some(mine) };
        if let Some(left) = left {
            left.close();
        }
        has_none
    }
}

impl Drop for Marks {
    fn drop(&mut self) {
        if let Some(kept) = self.socket.get_mut().expect("no panic under the lock").take() {
            kept.close();
        }
    }
}

/// Waits until no dead process has dirty pages of the file to be written.
///
/// # Errors
///
/// EBUSY, with the reason, after `patience`. The error of `socket(2)` if none can be created; but not if a
/// sandbox forbids sockets, as no keeper can be reached from there.
pub(crate) fn await_written(file: &Stat, patience: Duration) -> io::Result<()> {
    let until = Instant::now() + patience;
    let name = name(file.st_dev, file.st_ino)?;
    let mut keeper = None;
    let mut next_search = Instant::now();
    loop {
        let socket = match socket(SocketType::SEQPACKET) {
            Ok(socket) => socket,
            Err(error) if is_forbidden(&error) => return Ok(()),
            Err(error) => return Err(error),
        };
        match rustix::net::connect(&socket, &name) {
            Ok(()) => {}
            Err(Errno::INTR) => continue,
            // More connections wait than the backlog holds.
            Err(Errno::AGAIN) if Instant::now() < until => {
                if Instant::now() >= next_search {
                    let text = text(file.st_dev, file.st_ino);
                    let owner = mark_owner::listener_user(text.as_bytes());
                    if owner.is_ok_and(|user| user.is_some_and(|user| !is_trusted(file, user))) {
                        return Ok(());
                    }
                    next_search = Instant::now() + OWNER_PAUSE;
                }
                std::thread::sleep(RETRY_PAUSE);
                continue;
            }
            Err(Errno::AGAIN) => return Err(still_written(keeper)),
            // There is no mark; or a sandbox forbids the connection.
            Err(_) => return Ok(()),
        }
        // MK2.
        let peer = wire::peer(socket.as_fd())?;
        if !is_trusted(file, peer.uid) {
            return Ok(());
        }
        // A dead keeper writes nothing more, even if copies of its descriptors exist.
        if let Some(pid) = Pid::from_raw(peer.pid)
            && rustix::process::pidfd_open(pid, PidfdFlags::empty()).err() == Some(Errno::SRCH)
        {
            return Ok(());
        }
        keeper = Some(peer.pid);
        let left = until.saturating_duration_since(Instant::now());
        let timeout =
            Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        let socket = out_of_the_way(socket);
        let mut polled = [PollFd::new(&socket, PollFlags::IN)];
        return match retry_on_intr(|| rustix::event::poll(&mut polled, Some(&timeout)))? {
            0 => Err(still_written(keeper)),
            // The program has closed the descriptor.
            _ if polled[0].revents().contains(PollFlags::NVAL) => {
                std::mem::forget(socket);
                continue;
            }
            _ => Ok(()),
        };
    }
}

/// MK2.
fn is_trusted(file: &Stat, owner: u32) -> bool {
    [rustix::process::geteuid().as_raw(), file.st_uid, 0].contains(&owner)
}

/// Moves the socket to a high descriptor number, if there is one: a program may depend on the lowest being
/// free, and this one may be open for long.
fn out_of_the_way(socket: OwnedFd) -> OwnedFd {
    const NUMBER_MAX: u64 = 1024;
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let first = limit.map_or(NUMBER_MAX, |limit| NUMBER_MAX.min(limit / 2));
    rustix::io::fcntl_dupfd_cloexec(&socket, first as i32).unwrap_or(socket)
}

fn is_forbidden(error: &io::Error) -> bool {
    let forbidden = [libc::EPERM, libc::EACCES, libc::EAFNOSUPPORT, libc::ENOSYS, libc::EINVAL];
    error.raw_os_error().is_some_and(|errno| forbidden.contains(&errno))
}

fn still_written(keeper: Option<i32>) -> io::Error {
    let what = match keeper {
        Some(pid) => format!("process {pid}, a keeper, still writes"),
        None => "a keeper still writes".into(),
    };
    let text = format!("{what} the dirty pages of a dead process to the file");
    io::Error::new(io::ErrorKind::ResourceBusy, text)
}
