//! The keeper: the process that writes back what others left dirty when they died.
//!
//! An engine that was built with a keeper's [`Address`] hands each file over before its first dirty
//! page, and has its cached pages in memory that the keeper shares. When its process dies, however
//! it dies, the keeper writes the dirty pages to their files, and says what it did in a [`Report`].
//!
//! The keeper must outlive the program: [`spawn`] makes a process of its own for it, `millpond
//! keeper` is one, and [`Server`] is for a parent that is there anyway. What kills the keeper, too
//! (the machine, a container as a whole), is not survived.
//!
//! It serves processes of its own user, which may change to another user once their engine is built.
//! A client can do nothing to files but what the descriptors that it sends permit anyway; it can
//! make the keeper, and so the keeper's other clients, wait for a slow file system.
//!
//! ```no_run
//! use millpond::{Engine, keeper};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // Before the first thread starts.
//! let address = keeper::spawn()?;
//! let engine = Engine::builder().keeper(address).build()?;
//! # Ok(())
//! # }
//! ```

use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::SocketFlags;

use crate::survival::memory::Memory;
use crate::survival::replay::{PATIENCE, replay};
use crate::survival::target::Adopted;
use crate::survival::wire::{self, Request};

pub use crate::survival::process::{run, spawn};
pub use crate::survival::report::{Failure, FileReport, Report};
pub use crate::survival::wire::Address;

/// Connections whose request has not come yet; the oldest goes when there are more.
const CONNECTIONS_MAX: usize = 256;
const BACKLOG: i32 = 1024;

/// A keeper that listens, and serves in whatever thread calls [`Server::serve`].
///
/// # Examples
///
/// ```
/// use millpond::keeper::{Address, Server};
///
/// let server = Server::bind(&Address::unique())?;
/// let (address, stopper) = (server.address().clone(), server.stopper());
/// let keeper = std::thread::spawn(move || server.serve(|report| println!("{report}")));
/// let engine = millpond::Engine::builder().cache_bytes(1 << 20).keeper(address).build().unwrap();
/// drop(engine);
/// stopper.stop_when_idle();
/// keeper.join().unwrap()?;
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct Server {
    pub(super) address: Address,
    pub(super) listener: OwnedFd,
    pub(super) stop: Arc<Stop>,
    /// Readable when there is another reason to stop: the parent's pidfd, or a pipe from a
    /// signal handler.
    pub(super) until: Option<OwnedFd>,
    patience: Duration,
}

/// Tells a [`Server`] to stop, from any thread.
#[derive(Debug, Clone)]
pub struct Stopper(Arc<Stop>);

#[derive(Debug)]
pub(super) struct Stop {
    asked: AtomicBool,
    pub(super) wake: OwnedFd,
}

impl Stopper {
    /// Makes [`Server::serve`] return once no process has anything with the keeper any more, which
    /// is at once if none has. Until then it goes on serving, new processes too.
    pub fn stop_when_idle(&self) {
        // Release: pairs with the Acquire of `serve`.
        self.0.asked.store(true, Release);
        let _ = rustix::io::write(&self.0.wake, &1u64.to_ne_bytes());
    }
}

impl Address {
    /// An abstract address that nobody else has.
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
        let random = RandomState::new().hash_one(pid);
        format!("@millpond-keeper/{pid}/{random:016x}").parse().expect("short, and not empty")
    }
}

impl Server {
    /// Listens at `address`. A socket file that a keeper left behind is replaced.
    ///
    /// # Errors
    ///
    /// What `bind(2)` answers; EADDRINUSE if a keeper listens there.
    pub fn bind(address: &Address) -> io::Result<Server> {
        let listener = wire::socket()?;
        let at = address.socket_address()?;
        match (rustix::net::bind(&listener, &at), address.path()) {
            (Err(Errno::ADDRINUSE), Some(path))
                if rustix::net::connect(&wire::socket()?, &at) == Err(Errno::CONNREFUSED) =>
            {
                std::fs::remove_file(path)?;
                rustix::net::bind(&listener, &at)?;
            }
            (bound, _) => bound?,
        }
        rustix::net::listen(&listener, BACKLOG)?;
        rustix::io::ioctl_fionbio(&listener, true)?;
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let stop = Arc::new(Stop { asked: AtomicBool::new(false), wake });
        let address = address.clone();
        Ok(Server { address, listener, stop, until: None, patience: PATIENCE })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// What stops it.
    #[must_use]
    pub fn stopper(&self) -> Stopper {
        Stopper(Arc::clone(&self.stop))
    }

    /// How long failing writes are tried again for one dead process. Default 5 seconds. Other
    /// processes wait meanwhile.
    #[must_use]
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// Serves until it is told to stop and no process has anything with it any more; blocks. A
    /// report comes for each engine whose process died, and for each that ended with files still
    /// handed over.
    ///
    /// Signals of the process do not concern it, but for SIGXFSZ: a process with a file size limit
    /// should ignore that one.
    ///
    /// # Errors
    ///
    /// What `poll(2)` or `accept(2)` answered, if it can't go on.
    pub fn serve(self, mut on_report: impl FnMut(Report)) -> io::Result<()> {
        let mut keeper = Keeper {
            connections: Vec::new(),
            clients: Vec::new(),
            next_id: RandomState::new().hash_one(0) >> 1,
            patience: self.patience,
        };
        let mut until = self.until.as_ref();
        loop {
            // Acquire: pairs with the Release of `stop_when_idle`.
            let stopping =
                self.stop.asked.load(Acquire) || (self.until.is_some() && until.is_none());
            let mut polled = vec![PollFd::new(&self.listener, PollFlags::IN)];
            // Once stopping, both would stay readable.
            if !stopping {
                polled.push(PollFd::new(&self.stop.wake, PollFlags::IN));
                polled.extend(until.map(|until| PollFd::new(until, PollFlags::IN)));
            }
            let fixed = polled.len();
            let connections = keeper.connections.iter().map(|connection| &connection.socket);
            let processes = keeper.clients.iter().map(|client| &client.process);
            polled.extend(connections.chain(processes).map(|fd| PollFd::new(fd, PollFlags::IN)));
            let idle = stopping && polled.len() == fixed;
            let timeout = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
            retry_on_intr(|| rustix::event::poll(&mut polled, idle.then_some(&timeout)))?;
            let ready: Vec<bool> = polled.iter().map(|fd| !fd.revents().is_empty()).collect();
            drop(polled);
            if idle && !ready[0] {
                return Ok(());
            }
            if !stopping && until.is_some() && ready[2] {
                until = None;
            }
            keeper.serve_ready(&ready[fixed..], &mut on_report);
            if ready[0] {
                keeper.accept(self.listener.as_fd())?;
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(path) = self.address.path() {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// A process that connected and has not asked yet.
struct Connection {
    socket: OwnedFd,
    pid: i32,
    may_greet: bool,
}

/// A mapping, and the files that were handed over with it.
struct Client {
    id: u64,
    pid: i32,
    process: OwnedFd,
    memory: Memory,
    files: Vec<Adopted>,
}

struct Keeper {
    connections: Vec<Connection>,
    clients: Vec<Client>,
    next_id: u64,
    patience: Duration,
}

impl Keeper {
    fn accept(&mut self, listener: BorrowedFd<'_>) -> io::Result<()> {
        let socket = match rustix::net::accept_with(listener, SocketFlags::CLOEXEC) {
            Ok(socket) => socket,
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => return Ok(()),
            Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => {
                // It stays in the backlog; something may be closed meanwhile.
                std::thread::sleep(Duration::from_millis(10));
                return Ok(());
            }
            Err(error) => return Err(error.into()),
        };
        let Ok(peer) = wire::peer(socket.as_fd()) else { return Ok(()) };
        if self.connections.len() == CONNECTIONS_MAX {
            self.connections.remove(0);
        }
        // A process that we can't tell from others could speak for them.
        let may_greet = peer.uid == rustix::process::geteuid().as_raw() && peer.pid != 0;
        let pid = peer.pid;
        self.connections.push(Connection { socket, pid, may_greet });
        Ok(())
    }

    /// `ready` is for the connections, then for the clients.
    fn serve_ready(&mut self, ready: &[bool], on_report: &mut impl FnMut(Report)) {
        let (asked, died) = ready.split_at(self.connections.len());
        let died: Vec<u64> =
            self.clients.iter().zip(died).filter(|(_, died)| **died).map(|(c, _)| c.id).collect();
        let mut asked = asked.iter();
        let connections = std::mem::take(&mut self.connections);
        for connection in connections {
            if *asked.next().expect("one for each") {
                self.converse(&connection, on_report);
            } else {
                self.connections.push(connection);
            }
        }
        for id in died {
            self.bury(id, false, on_report);
        }
    }

    /// Takes one request and answers it; the connection closes.
    fn converse(&mut self, connection: &Connection, on_report: &mut impl FnMut(Report)) {
        let outcome = match wire::receive_request(connection.socket.as_fd()) {
            Ok(Some((request, fds))) => self.carry_out(connection, request, fds, on_report),
            Ok(None) => Err(Errno::PROTO.into()),
            Err(error) => Err(error),
        };
        wire::answer(connection.socket.as_fd(), outcome);
    }

    fn carry_out(
        &mut self,
        connection: &Connection,
        request: Request,
        fds: Vec<OwnedFd>,
        on_report: &mut impl FnMut(Report),
    ) -> io::Result<u64> {
        match request {
            Request::Hello => self.greet(connection, fds),
            Request::Adopt { mapping, slot, device, inode, page_shift } => {
                let client = self.client(connection, mapping)?;
                let [fd] = <[OwnedFd; 1]>::try_from(fds).map_err(|_| Errno::PROTO)?;
                if slot.index >= client.memory.layout.files {
                    return Err(Errno::INVAL.into());
                }
                let adopted = Adopted::new(fd, slot, (device, inode), page_shift)?;
                // One file per entry: the keeper holds no more descriptors than there are entries.
                client.files.retain(|file| file.slot.index != slot.index);
                client.files.push(adopted);
                Ok(0)
            }
            Request::Forget { mapping, slot } => {
                self.client(connection, mapping)?.files.retain(|file| file.slot != slot);
                Ok(0)
            }
            Request::Goodbye { mapping } => {
                let id = self.client(connection, mapping)?.id;
                self.bury(id, true, on_report);
                Ok(0)
            }
        }
    }

    fn greet(&mut self, connection: &Connection, fds: Vec<OwnedFd>) -> io::Result<u64> {
        if !connection.may_greet {
            return Err(Errno::PERM.into());
        }
        let [memory, process] = <[OwnedFd; 2]>::try_from(fds).map_err(|_| Errno::PROTO)?;
        let memory = Memory::new(memory)?;
        self.next_id += 1;
        let (id, pid) = (self.next_id, connection.pid);
        self.clients.push(Client { id, pid, process, memory, files: Vec::new() });
        Ok(id)
    }

    /// The client that `mapping` names, if it is the one who asks.
    fn client(&mut self, connection: &Connection, mapping: u64) -> io::Result<&mut Client> {
        let mut clients = self.clients.iter_mut();
        let found = clients.find(|client| client.id == mapping && client.pid == connection.pid);
        found.ok_or_else(|| Errno::NOTCONN.into())
    }

    /// Writes back what a process left, and forgets it.
    fn bury(&mut self, id: u64, goodbye: bool, on_report: &mut impl FnMut(Report)) {
        let Some(at) = self.clients.iter().position(|client| client.id == id) else { return };
        let client = self.clients.swap_remove(at);
        let files = replay(&client.memory, &client.files, self.patience);
        if !goodbye || !files.is_empty() {
            on_report(Report { pid: client.pid, goodbye, files });
        }
    }
}
