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
//! It serves processes of its own user, which may change to another user once their engine is built,
//! and takes nothing from others. It writes through the very descriptors that it is given, and to
//! files only, of file systems that are known to hold such: so a client can do nothing by it that it
//! could not do itself. A slow file system is waited for by those alone who use it.
//!
//! What it can't write, and what it must not write, as somebody else has changed the file meanwhile, it
//! keeps in a rescue file, which the report names ([`restore`], `millpond rescue`).
//!
//! Who opens a file through Millpond waits until what a dead process left of it is written. The keeper
//! of another network name space (of another container, mostly) is not known to it.
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

use std::collections::HashMap;
use std::fs::{DirBuilder, Permissions};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Weak};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, epoll};
use rustix::fs::{Access, Mode, OFlags};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{SocketAddrUnix, SocketFlags};

use crate::survival::life::Life;
use crate::survival::mark::{self, Mark};
use crate::survival::memory::Memory;
use crate::survival::replay::{Dead, PATIENCE, replay};
use crate::survival::target::{Adopted, Identity, Medium};
use crate::survival::wire::{self, Peer, Request};
use crate::thread::spawn as spawn_thread;

pub use crate::survival::process::{run, spawn};
pub use crate::survival::report::{Failure, FileReport, Report};
pub use crate::survival::rescue::{Restored, restore};
pub use crate::survival::wire::Address;

/// Connections whose request has not come yet; the oldest goes when there are more.
const CONNECTIONS_MAX: usize = 256;
const BACKLOG: i32 = 1024;
/// Mounts that are remembered.
const MEDIA_MAX: usize = 1024;

/// Waits until no keeper has pages of a dead process left to write to the file; [`crate::Engine::open`]
/// does so itself. This is for who must not wait inside of it, or reads the file past the engine.
///
/// # Errors
///
/// [`io::ErrorKind::ResourceBusy`] where a keeper still writes after `patience`; what the kernel says,
/// if it can't be asked.
pub fn await_written(file: BorrowedFd<'_>, patience: Duration) -> io::Result<()> {
    mark::await_written(&rustix::fs::fstat(file)?, patience)
}

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
    /// What is to be removed in the end: the socket's path, and its directory if we have made that.
    pub(super) made: Vec<PathBuf>,
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

/// How directories of [`Address::unique`] begin: what lies below is not told to others.
const UNIQUE: &str = "millpond-keeper-";

impl Address {
    /// An address that nobody else has, and no other user learns: a socket below a directory that they
    /// can't list, which [`Server::bind`] makes. It works for a client that has become another user, too.
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
            let address = place.join(&names).to_str()?.parse().ok()?;
            is_safe(&place).then_some(address)
        });
        // Where there is no such place, binding fails, and says of what.
        found.unwrap_or_else(|| format!("/tmp/{names}").parse().expect("short, and not empty"))
    }

    /// Whether it was made by [`Address::unique`].
    fn is_unique(&self) -> bool {
        let directory = self.path().and_then(Path::parent).and_then(Path::parent);
        let name = directory.and_then(Path::file_name);
        name.is_some_and(|name| name.as_bytes().starts_with(UNIQUE.as_bytes()))
    }
}

/// Whether we may make a directory there, and nobody else can put another in its place.
fn is_safe(place: &Path) -> bool {
    let may_write = Access::WRITE_OK | Access::EXEC_OK;
    place.is_absolute()
        && rustix::fs::access(place, may_write).is_ok()
        && rustix::fs::stat(place).is_ok_and(|stat| {
            let is_own = [0, rustix::process::geteuid().as_raw()].contains(&stat.st_uid);
            is_own && (stat.st_mode & 0o022 == 0 || stat.st_mode & 0o1000 != 0)
        })
}

impl Server {
    /// Listens at `address`. A socket that a keeper left behind is replaced; anything else that is
    /// there stays. The directory of an address of [`Address::unique`] is made.
    ///
    /// # Errors
    ///
    /// What `bind(2)` answers; EADDRINUSE if a keeper listens there, or what is there is no socket.
    pub fn bind(address: &Address) -> io::Result<Server> {
        let listener = wire::socket()?;
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let stop = Arc::new(Stop { asked: AtomicBool::new(false), wake });
        let address = address.clone();
        let made = Vec::new();
        // Whatever fails from here on, what was made is removed.
        let mut server = Server { address, listener, stop, made, until: None, patience: PATIENCE };
        let Server { address, listener, made, .. } = &mut server;
        match (address.path(), address.is_unique()) {
            (Some(path), true) => bind_hidden(listener, path, made)?,
            (Some(path), false) => bind_at(listener, path, address, made)?,
            (None, _) => rustix::net::bind(&*listener, &address.socket_address()?)?,
        }
        rustix::net::listen(&*listener, BACKLOG)?;
        rustix::io::ioctl_fionbio(&*listener, true)?;
        Ok(server)
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

    /// How long failing writes are tried again, for each file. Default 5 seconds.
    #[must_use]
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// Serves until it is told to stop and no process has anything with it any more; blocks. A
    /// report comes for each engine whose process died, and for each that ended with files still
    /// handed over.
    ///
    /// `on_report` is called by the thread that serves, and nobody is served meanwhile: it should not wait
    /// for anybody, and must not open files that programs have with this keeper.
    ///
    /// Signals of the process do not concern it, but for SIGXFSZ: a process with a file size limit
    /// should ignore that one.
    ///
    /// # Errors
    ///
    /// What `poll(2)` or `accept(2)` answered, if it can't go on.
    pub fn serve(self, mut on_report: impl FnMut(Report)) -> io::Result<()> {
        let mut keeper = Keeper::new(self.patience)?;
        let mut until = self.until.as_ref();
        loop {
            // Acquire: pairs with the Release of `stop_when_idle`.
            let stopping =
                self.stop.asked.load(Acquire) || (self.until.is_some() && until.is_none());
            let mut polled = vec![
                PollFd::new(&self.listener, PollFlags::IN),
                PollFd::new(&*keeper.told, PollFlags::IN),
                PollFd::new(&keeper.marks, PollFlags::IN),
            ];
            // Once stopping, both would stay readable.
            if !stopping {
                polled.push(PollFd::new(&self.stop.wake, PollFlags::IN));
                polled.extend(until.map(|until| PollFd::new(until, PollFlags::IN)));
            }
            let fixed = polled.len();
            let connections = keeper.connections.iter().map(|connection| &connection.socket);
            let processes = keeper.clients.iter().map(|client| &client.process);
            polled.extend(connections.chain(processes).map(|fd| PollFd::new(fd, PollFlags::IN)));
            let idle = stopping && polled.len() == fixed && keeper.under_way == 0;
            let timeout = Timespec { tv_sec: 0, tv_nsec: 0 };
            retry_on_intr(|| rustix::event::poll(&mut polled, idle.then_some(&timeout)))?;
            let ready: Vec<bool> = polled.iter().map(|fd| !fd.revents().is_empty()).collect();
            drop(polled);
            if idle && !ready[0] {
                return Ok(());
            }
            if !stopping && until.is_some() && ready[4] {
                until = None;
            }
            let asked = &ready[fixed..fixed + keeper.connections.len()];
            // Before anybody is answered: an answer may be taken for a word about the dead.
            keeper.bury_dead(&mut on_report)?;
            if ready[1] {
                keeper.hear(&mut on_report);
            }
            keeper.converse(asked, &mut on_report);
            if ready[2] {
                keeper.let_pass();
            }
            if ready[0] {
                keeper.accept(self.listener.as_fd())?;
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        for path in self.made.drain(..) {
            let _ = match path.is_dir() {
                true => std::fs::remove_dir(path),
                false => std::fs::remove_file(path),
            };
        }
    }
}

/// Binds to a path below a new directory that others may pass, but not list; and by a name that tells
/// nobody of it who looks at the sockets of this machine (`/proc/net/unix`).
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
        // Who knows the name may connect, and is looked at then.
        std::fs::set_permissions(path, Permissions::from_mode(0o666))?;
        std::fs::set_permissions(secret, Permissions::from_mode(0o711))?;
        std::fs::set_permissions(outer, Permissions::from_mode(0o711))?;
        Ok(())
    })();
    // Also if it failed.
    made.extend(directories);
    outcome
}

/// Binds to a path that the user has chosen.
fn bind_at(
    listener: &OwnedFd,
    path: &Path,
    address: &Address,
    made: &mut Vec<PathBuf>,
) -> io::Result<()> {
    let at = address.socket_address()?;
    let mut bound = rustix::net::bind(listener, &at);
    if bound == Err(Errno::ADDRINUSE) && is_dead_socket(path, &at)? {
        std::fs::remove_file(path)?;
        bound = rustix::net::bind(listener, &at);
    }
    bound?;
    made.push(path.to_owned());
    Ok(())
}

/// Whether a socket is there at which nobody listens.
fn is_dead_socket(path: &Path, at: &SocketAddrUnix) -> io::Result<bool> {
    let stat = rustix::fs::lstat(path)?;
    if rustix::fs::FileType::from_raw_mode(stat.st_mode) != rustix::fs::FileType::Socket {
        return Ok(false);
    }
    let probe = wire::socket()?;
    // A full backlog is one of somebody who listens.
    rustix::io::ioctl_fionbio(&probe, true)?;
    Ok(rustix::net::connect(&probe, at) == Err(Errno::CONNREFUSED))
}

/// A process that connected and has not asked yet. It is of our user, or a client.
struct Connection {
    socket: OwnedFd,
    peer: Peer,
}

impl Connection {
    fn answer(self, outcome: io::Result<u64>) {
        wire::answer(self.socket.as_fd(), outcome, &[]);
    }
}

/// A mapping, and the files that were handed over with it.
struct Client {
    id: u64,
    pid: i32,
    process: OwnedFd,
    memory: Memory,
    files: Vec<Adopted>,
}

impl Client {
    fn is_dead(&self) -> bool {
        let timeout = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut polled = [PollFd::new(&self.process, PollFlags::IN)];
        retry_on_intr(|| rustix::event::poll(&mut polled, Some(&timeout)))
            .is_ok_and(|ready| ready > 0)
    }
}

/// What threads tell the one that serves.
enum Told {
    /// Of a client that is gone; it is the last that is told of it, if `is_last`.
    Buried {
        report: Report,
        is_last: bool,
        goodbye: Option<Connection>,
    },
    /// What the file of a request lies on.
    Medium {
        mount: Option<u64>,
        medium: io::Result<Option<Medium>>,
        asked: Asked,
    },
    Done,
}

/// A request, and what came with it.
struct Asked {
    connection: Connection,
    request: Request,
    fds: Vec<OwnedFd>,
}

/// Has the main thread's poll return.
struct Teller {
    send: Sender<Told>,
    told: Arc<OwnedFd>,
}

impl Teller {
    fn tell(&self, told: Told) {
        let _ = self.send.send(told);
        let _ = rustix::io::write(&*self.told, &1u64.to_ne_bytes());
    }
}

struct Keeper {
    connections: Vec<Connection>,
    clients: Vec<Client>,
    next_id: u64,
    patience: Duration,
    life: Life,
    /// Threads that have not told yet.
    under_way: usize,
    send: Sender<Told>,
    receive: Receiver<Told>,
    told: Arc<OwnedFd>,
    /// The marks of files whose processes live (epoll), by number.
    marks: OwnedFd,
    marked: HashMap<u64, Weak<Mark>>,
    next_mark: u64,
    /// What is mounted where files have come from, by [`Identity::mount`]; `None`: nothing to be kept.
    media: HashMap<u64, Option<Medium>>,
}

impl Keeper {
    fn new(patience: Duration) -> io::Result<Keeper> {
        let (send, receive) = channel();
        let told = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Keeper {
            connections: Vec::new(),
            clients: Vec::new(),
            next_id: RandomState::new().hash_one(0) >> 1,
            patience,
            life: Life::begin()?,
            under_way: 0,
            send,
            receive,
            told: Arc::new(told),
            marks: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            marked: HashMap::new(),
            next_mark: 0,
            media: HashMap::new(),
        })
    }

    fn teller(&self) -> Teller {
        Teller { send: self.send.clone(), told: Arc::clone(&self.told) }
    }

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
        // D1: nothing is received from others, descriptors least of all. A client whose process is
        // dead is none any more, so that nobody speaks for it who has got its number.
        let is_own = peer.uid == rustix::process::geteuid().as_raw() && peer.pid != 0;
        let is_client =
            self.clients.iter().any(|client| client.pid == peer.pid && !client.is_dead());
        if !is_own && !is_client {
            wire::answer(socket.as_fd(), Err(Errno::PERM.into()), &[]);
            self.hang_up(socket);
            return Ok(());
        }
        if self.connections.len() == CONNECTIONS_MAX {
            let oldest = self.connections.remove(0);
            self.hang_up(oldest.socket);
        }
        self.connections.push(Connection { socket, peer });
        Ok(())
    }

    /// Ends a connection that nothing was received from. With it go the descriptors that were sent, and
    /// the end of one may take as long as its sender likes (a socket that lingers).
    fn hang_up(&mut self, socket: OwnedFd) {
        self.apart(socket, |socket| {
            drop(socket);
            Told::Done
        });
    }

    /// Takes and answers requests: one each, then the connection closes.
    fn converse(&mut self, asked: &[bool], on_report: &mut impl FnMut(Report)) {
        let mut asked = asked.iter();
        for connection in std::mem::take(&mut self.connections) {
            if !asked.next().expect("one for each") {
                self.connections.push(connection);
                continue;
            }
            let (request, fds) = wire::receive_request(connection.socket.as_fd());
            match request {
                Ok(Some(request)) => self.carry_out(Asked { connection, request, fds }, on_report),
                Ok(None) => self.refuse(connection, fds, Errno::PROTO),
                Err(error) => self.refuse(connection, fds, error),
            }
        }
    }

    fn carry_out(&mut self, asked: Asked, on_report: &mut impl FnMut(Report)) {
        let Asked { connection, request, fds } = asked;
        let peer = connection.peer;
        match request {
            Request::Hello => self.greet(connection, fds),
            Request::Adopt { mapping, .. } => match self.client(peer, mapping) {
                Ok(_) => self.adopt(Asked { connection, request, fds }, None),
                Err(error) => self.refuse(connection, fds, error),
            },
            Request::Forget { mapping, slot } => {
                let forgotten = self.client(peer, mapping).map(|client| {
                    let is_it = |file: &mut Adopted| file.slot == slot;
                    client.files.extract_if(.., is_it).collect::<Vec<_>>()
                });
                match forgotten {
                    Ok(files) => self.part(connection, fds, files),
                    Err(error) => self.refuse(connection, fds, error),
                }
            }
            Request::Goodbye { mapping } => {
                match self.client(peer, mapping).map(|client| client.id) {
                    Ok(id) => self.bury(id, Some(connection), on_report),
                    Err(error) => self.refuse(connection, fds, error),
                }
            }
        }
    }

    fn greet(&mut self, connection: Connection, fds: Vec<OwnedFd>) {
        let peer = connection.peer;
        // A client that has become another user speaks for the engines that it has.
        if peer.uid != rustix::process::geteuid().as_raw() || peer.pid == 0 {
            return self.refuse(connection, fds, Errno::PERM);
        }
        let [memory, process] = match <[OwnedFd; 2]>::try_from(fds) {
            Ok(both) => both,
            Err(fds) => return self.refuse(connection, fds, Errno::PROTO),
        };
        // Anything else could keep those waiting who ask whether it is readable.
        if !is_pidfd_of(&process, peer.pid) {
            return self.refuse(connection, vec![memory, process], Errno::INVAL);
        }
        let memory = match Memory::new(memory) {
            Ok(memory) => memory,
            Err((fd, error)) => return self.refuse(connection, vec![fd], error),
        };
        self.next_id += 1;
        let (id, pid) = (self.next_id, peer.pid);
        self.clients.push(Client { id, pid, process, memory, files: Vec::new() });
        wire::answer(connection.socket.as_fd(), Ok(id), &[self.life.shown()]);
    }

    /// Takes a file from a client, if it is one to be kept. To know that, its file system is asked, by a
    /// thread of its own, unless it is known.
    fn adopt(&mut self, asked: Asked, medium: Option<Option<Medium>>) {
        let Asked { connection, request, fds } = asked;
        let Request::Adopt { mapping, slot, device, inode, page_shift } = request else { return };
        let [fd] = match <[OwnedFd; 1]>::try_from(fds) {
            Ok(one) => one,
            Err(fds) => return self.refuse(connection, fds, Errno::PROTO),
        };
        let mount = match Identity::of(&fd) {
            Ok(found) => found.mount,
            Err(_) => return self.refuse(connection, vec![fd], Errno::INVAL),
        };
        let known = || self.media.get(&mount?).copied();
        let medium = match medium.or_else(known) {
            Some(Some(medium)) => medium,
            Some(None) => return self.refuse(connection, vec![fd], Errno::OPNOTSUPP),
            None => {
                let asked = Asked { connection, request, fds: vec![fd] };
                return self.apart(asked, move |asked| {
                    let medium = Medium::ask(&asked.fds[0]);
                    Told::Medium { mount, medium, asked }
                });
            }
        };
        let adopted = match Adopted::new(fd, medium, slot, (device, inode), page_shift) {
            Ok(adopted) => adopted,
            Err((fd, error)) => return self.refuse(connection, vec![fd], error),
        };
        let (peer, id) = (connection.peer, (device, inode));
        let marked = self.client(peer, mapping).and_then(|client| {
            if slot.index >= client.memory.layout.files {
                return Err(Errno::INVAL);
            }
            let known = client.files.iter().find(|file| (file.device, file.inode) == id);
            Ok(known.and_then(|file| file.mark.clone()))
        });
        let mark = match marked {
            Ok(Some(mark)) => Ok(mark),
            Ok(None) => self.mark(device, inode),
            Err(error) => Err(error),
        };
        match mark {
            Ok(mark) => {
                let client = self.client(peer, mapping).expect("asked just now");
                // One file per entry: the keeper holds no more descriptors than there are entries.
                let is_it = |file: &mut Adopted| file.slot.index == slot.index;
                let old: Vec<_> = client.files.extract_if(.., is_it).collect();
                client.files.push(Adopted { mark: Some(mark), ..adopted });
                self.part(connection, Vec::new(), old);
            }
            Err(error) => {
                self.apart((connection, adopted), move |(connection, adopted)| {
                    drop(adopted);
                    connection.answer(Err(error.into()));
                    Told::Done
                });
            }
        }
    }

    /// Marks a file; EBUSY if somebody else has it.
    fn mark(&mut self, device: u64, inode: u64) -> Result<Arc<Mark>, Errno> {
        let mark = Mark::set(device, inode)
            .map_err(|error| error.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error))?;
        let mark = Arc::new(mark);
        self.next_mark += 1;
        let data = epoll::EventData::new_u64(self.next_mark);
        epoll::add(&self.marks, &mark.listener, data, epoll::EventFlags::IN)?;
        self.marked.insert(self.next_mark, Arc::downgrade(&mark));
        let live: usize = self.clients.iter().map(|client| client.files.len()).sum();
        if self.marked.len() > 2 * live + 64 {
            self.marked.retain(|_, mark| mark.strong_count() > 0);
        }
        Ok(mark)
    }

    /// Lets those go on who have opened a marked file: its process lives, or its mark would not be
    /// polled any more.
    fn let_pass(&mut self) {
        let mut events = Vec::with_capacity(64);
        let timeout = Timespec { tv_sec: 0, tv_nsec: 0 };
        let spare = rustix::buffer::spare_capacity(&mut events);
        if epoll::wait(&self.marks, spare, Some(&timeout)).is_err() {
            return;
        }
        for event in &events {
            match self.marked.get(&event.data.u64()).and_then(Weak::upgrade) {
                Some(mark) => mark.let_pass(),
                None => drop(self.marked.remove(&event.data.u64())),
            }
        }
    }

    /// The client that `mapping` names, if it is the one who asks.
    fn client(&mut self, peer: Peer, mapping: u64) -> Result<&mut Client, Errno> {
        let mut clients = self.clients.iter_mut();
        clients.find(|client| client.id == mapping && client.pid == peer.pid).ok_or(Errno::NOTCONN)
    }

    /// Says no, and closes what came with it.
    fn refuse(&mut self, connection: Connection, fds: Vec<OwnedFd>, error: Errno) {
        if fds.is_empty() {
            return connection.answer(Err(error.into()));
        }
        self.apart((connection, fds), move |(connection, fds)| {
            connection.answer(Err(error.into()));
            drop(fds);
            Told::Done
        });
    }

    /// Lets go of files, then says so.
    fn part(&mut self, connection: Connection, fds: Vec<OwnedFd>, files: Vec<Adopted>) {
        if fds.is_empty() && files.iter().all(|file| file.target.closes_at_once()) {
            drop(files);
            return connection.answer(Ok(0));
        }
        self.apart((connection, fds, files), |(connection, fds, files)| {
            drop((fds, files));
            connection.answer(Ok(0));
            Told::Done
        });
    }

    /// Has a thread do what may take as long as somebody else likes.
    fn apart<T: Send + 'static>(&mut self, with: T, body: impl FnOnce(T) -> Told + Send + 'static) {
        let teller = self.teller();
        let (give, take) = channel();
        let thread = move || {
            if let Ok(with) = take.recv() {
                let told = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| body(with)));
                teller.tell(told.unwrap_or(Told::Done));
            }
        };
        self.under_way += 1;
        match spawn_thread("millpond-keeper", thread) {
            Ok(()) => drop(give.send(with)),
            // Who asked is told by the end of the connection.
            Err(_) => {
                drop(with);
                self.under_way -= 1;
            }
        }
    }

    /// Hears what threads tell.
    fn hear(&mut self, on_report: &mut impl FnMut(Report)) {
        let _ = rustix::io::read(&*self.told, &mut [0; 8]);
        while let Ok(told) = self.receive.try_recv() {
            match told {
                Told::Done => self.under_way -= 1,
                Told::Medium { mount, medium, asked } => {
                    self.under_way -= 1;
                    match medium {
                        Ok(medium) => {
                            if self.media.len() >= MEDIA_MAX {
                                self.media.clear();
                            }
                            self.media.extend(mount.map(|mount| (mount, medium)));
                            self.adopt(asked, Some(medium));
                        }
                        Err(_) => self.refuse(asked.connection, asked.fds, Errno::IO),
                    }
                }
                Told::Buried { report, is_last, goodbye } => {
                    self.under_way -= usize::from(is_last);
                    if !report.goodbye || !report.files.is_empty() {
                        on_report(report);
                    }
                    if let Some(connection) = goodbye {
                        connection.answer(Ok(0));
                    }
                }
            }
        }
    }

    /// Buries all whose process is dead.
    fn bury_dead(&mut self, on_report: &mut impl FnMut(Report)) -> io::Result<()> {
        let timeout = Timespec { tv_sec: 0, tv_nsec: 0 };
        let processes = self.clients.iter().map(|client| &client.process);
        let mut polled: Vec<_> = processes.map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        retry_on_intr(|| rustix::event::poll(&mut polled, Some(&timeout)))?;
        let is_dead = polled.iter().map(|fd| !fd.revents().is_empty());
        let dead: Vec<u64> =
            self.clients.iter().zip(is_dead).filter(|(_, dead)| *dead).map(|(c, _)| c.id).collect();
        for id in dead {
            self.bury(id, None, on_report);
        }
        Ok(())
    }

    /// Writes back what a process left, and forgets it: in a thread of its own, so that others wait
    /// neither for the keeper nor for their own dead. `goodbye`: its process lives, and waits.
    fn bury(&mut self, id: u64, goodbye: Option<Connection>, on_report: &mut impl FnMut(Report)) {
        let Some(at) = self.clients.iter().position(|client| client.id == id) else { return };
        let Client { pid, memory, mut files, .. } = self.clients.swap_remove(at);
        for file in &mut files {
            // Now, and not when it is their turn.
            file.note();
            if let Some(mark) = &file.mark {
                let _ = epoll::delete(&self.marks, &mark.listener);
            }
        }
        let dead = Dead { pid, memory, patience: self.patience };
        let is_goodbye = goodbye.is_some();
        let teller = self.teller();
        let (give, take) = channel::<(Dead, Vec<Adopted>, Option<Connection>)>();
        let thread = move || {
            let Ok((dead, files, goodbye)) = take.recv() else { return };
            let lost: Vec<_> = files.iter().map(|file| (file.device, file.inode)).collect();
            let replayed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                let mut kept = None;
                replay(dead, files, |files| {
                    let report = Report { pid, goodbye: is_goodbye, files };
                    if let Some(report) = kept.replace(report) {
                        teller.tell(Told::Buried { report, is_last: false, goodbye: None });
                    }
                });
                kept.expect("told at least once")
            }));
            let report = replayed.unwrap_or_else(|_| Report {
                pid,
                goodbye: is_goodbye,
                files: lost.into_iter().map(FileReport::of_panic).collect(),
            });
            teller.tell(Told::Buried { report, is_last: true, goodbye });
        };
        self.under_way += 1;
        match spawn_thread("millpond-bury", thread) {
            Ok(()) => drop(give.send((dead, files, goodbye))),
            Err(_) => {
                self.under_way -= 1;
                replay(dead, files, |files| {
                    if !is_goodbye || !files.is_empty() {
                        on_report(Report { pid, goodbye: is_goodbye, files });
                    }
                });
                if let Some(connection) = goodbye {
                    connection.answer(Ok(0));
                }
            }
        }
    }
}

/// Whether `fd` is a pidfd of the process; asks nobody but the kernel.
fn is_pidfd_of(fd: &OwnedFd, pid: i32) -> bool {
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd()));
    let info = info.unwrap_or_default();
    let told = info.lines().find_map(|line| line.strip_prefix("Pid:"));
    told.and_then(|number| number.trim().parse().ok()) == Some(pid)
}
