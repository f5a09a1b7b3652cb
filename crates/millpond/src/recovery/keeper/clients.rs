//! The clients of a keeper: their requests, mappings and files.
//!
//! One thread serves all clients; operations that another party can delay run on other threads, which
//! report by a channel.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Weak};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, epoll};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{Shutdown, SocketFlags};

use crate::recovery::closer::Closer;
use crate::recovery::keeper::client_memory::Memory;
use crate::recovery::keeper::liveness::Life;
use crate::recovery::keeper::report::Report;
use crate::recovery::keeper::target::{Adopted, Identity, Medium};
use crate::recovery::mark::Mark;
use crate::recovery::wire::{self, KeeperRequest, Peer};
use crate::thread::spawn as spawn_thread;

/// Connections without a request yet; the oldest is closed when there are more. A quarter of the usual
/// limit of descriptors of a process.
const CONNECTIONS_MAX: usize = 256;
/// Opens of marked files that are processed together: each takes a descriptor.
const OPENS_TOGETHER: usize = 64;
/// The number of mounts that are remembered: more than a machine usually has; beyond it they are queried
/// again.
const MEDIA_MAX: usize = 1024;

/// A process that has connected and sent no request yet. It belongs to our user, or is a client.
pub(super) struct Connection {
    pub(super) socket: OwnedFd,
    peer: Peer,
}

impl Connection {
    pub(super) fn answer(self, outcome: io::Result<u64>) {
        wire::answer(self.socket.as_fd(), outcome, &[]);
    }
}

/// A mapping, and the files that were handed over with it.
pub(super) struct Client {
    pub(super) id: u64,
    pub(super) pid: i32,
    pub(super) process: OwnedFd,
    pub(super) memory: Memory,
    pub(super) files: Vec<Adopted>,
}

impl Client {
    fn is_dead(&self) -> bool {
        let timeout = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut polled = [PollFd::new(&self.process, PollFlags::IN)];
        retry_on_intr(|| rustix::event::poll(&mut polled, Some(&timeout)))
            .is_ok_and(|ready| ready > 0)
    }
}

/// Messages from the other threads to the serving thread.
pub(super) enum Message {
    /// About a client that is gone; `is_last`: the last message about it.
    Buried {
        report: Report,
        is_last: bool,
        goodbye: Option<Connection>,
    },
    /// The medium of the file of a request.
    Medium {
        mount: Option<u64>,
        medium: io::Result<Option<Medium>>,
        asked: Asked,
    },
    Done,
}

/// A request, and the descriptors that came with it.
pub(super) struct Asked {
    connection: Connection,
    request: KeeperRequest,
    fds: Vec<OwnedFd>,
}

/// Sends a message and wakes the serving thread's poll.
pub(super) struct KeeperNotifier {
    send: Sender<Message>,
    told: Arc<OwnedFd>,
}

impl KeeperNotifier {
    pub(super) fn notify(&self, told: Message) {
        let _ = self.send.send(told);
        let _ = rustix::io::write(&*self.told, &1u64.to_ne_bytes());
    }
}

pub(super) struct Keeper {
    pub(super) connections: Vec<Connection>,
    pub(super) clients: Vec<Client>,
    next_id: u64,
    pub(super) patience: Duration,
    life: Life,
    /// Threads that have not sent their last message.
    pub(super) under_way: usize,
    send: Sender<Message>,
    receive: Receiver<Message>,
    pub(super) told: Arc<OwnedFd>,
    pub(super) closer: Arc<Closer>,
    /// The marks of files whose processes live (epoll), by number.
    pub(super) marks: OwnedFd,
    marked: HashMap<u64, Weak<Mark>>,
    next_mark: u64,
    /// The media of known mounts, by [`Identity::mount`]; `None`: files on it are refused.
    media: HashMap<u64, Option<Medium>>,
}

impl Keeper {
    pub(super) fn new(patience: Duration) -> io::Result<Keeper> {
        let (send, receive) = channel();
        let told = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let told = Arc::new(told);
        Ok(Keeper {
            connections: Vec::new(),
            clients: Vec::new(),
            next_id: RandomState::new().hash_one(0) >> 1,
            patience,
            life: Life::begin()?,
            under_way: 0,
            send,
            receive,
            closer: Closer::new(Arc::clone(&told)),
            told,
            marks: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            marked: HashMap::new(),
            next_mark: 0,
            media: HashMap::new(),
        })
    }

    pub(super) fn teller(&self) -> KeeperNotifier {
        KeeperNotifier { send: self.send.clone(), told: Arc::clone(&self.told) }
    }

    pub(super) fn accept(&mut self, listener: BorrowedFd<'_>) -> io::Result<()> {
        let socket = match rustix::net::accept_with(listener, SocketFlags::CLOEXEC) {
            Ok(socket) => socket,
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => return Ok(()),
            Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => {
                // It stays in the backlog; another descriptor may be closed soon.
                std::thread::sleep(Duration::from_millis(10));
                return Ok(());
            }
            Err(error) => return Err(error.into()),
        };
        let Ok(peer) = wire::peer(socket.as_fd()) else { return Ok(()) };
        // wire.WR1: nothing is received from other users, descriptors least of all. A client whose process
        // is dead does not count, so that a process that reuses its number can't act for it.
        let is_own = peer.uid == rustix::process::geteuid().as_raw() && peer.pid != 0;
        let is_client =
            self.clients.iter().any(|client| client.pid == peer.pid && !client.is_dead());
        if !is_own && !is_client {
            wire::answer(socket.as_fd(), Err(Errno::PERM.into()), &[]);
            self.closer.hang_up(socket);
            return Ok(());
        }
        if self.connections.len() == CONNECTIONS_MAX {
            let oldest = self.connections.remove(0);
            self.closer.hang_up(oldest.socket);
        }
        self.connections.push(Connection { socket, peer });
        Ok(())
    }

    /// Stops accepting, and ends the connections that came last.
    pub(super) fn end(&self, listener: BorrowedFd<'_>) {
        let _ = rustix::net::shutdown(listener, Shutdown::Both);
        while let Ok(socket) = rustix::net::accept_with(listener, SocketFlags::CLOEXEC) {
            self.closer.hang_up(socket);
        }
    }

    /// Receives and answers requests: one per connection, which then closes.
    pub(super) fn converse(&mut self, asked: &[bool], on_report: &mut impl FnMut(Report)) {
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
            KeeperRequest::Hello => self.greet(connection, fds),
            KeeperRequest::Adopt { mapping, .. } => match self.client(peer, mapping) {
                Ok(_) => self.adopt(Asked { connection, request, fds }, None),
                Err(error) => self.refuse(connection, fds, error),
            },
            KeeperRequest::Forget { mapping, entry } => {
                let forgotten = self.client(peer, mapping).map(|client| {
                    let is_it = |file: &mut Adopted| file.entry == entry;
                    client.files.extract_if(.., is_it).collect::<Vec<_>>()
                });
                match forgotten {
                    Ok(files) => self.close_files(connection, fds, files),
                    Err(error) => self.refuse(connection, fds, error),
                }
            }
            KeeperRequest::Goodbye { mapping } => {
                match self.client(peer, mapping).map(|client| client.id) {
                    Ok(id) => self.recover_client(id, Some(connection), on_report),
                    Err(error) => self.refuse(connection, fds, error),
                }
            }
        }
    }

    fn greet(&mut self, connection: Connection, fds: Vec<OwnedFd>) {
        let peer = connection.peer;
        // A client that has become another user may act for its existing engines.
        if peer.uid != rustix::process::geteuid().as_raw() || peer.pid == 0 {
            return self.refuse(connection, fds, Errno::PERM);
        }
        let [memory, process] = match <[OwnedFd; 2]>::try_from(fds) {
            Ok(both) => both,
            Err(fds) => return self.refuse(connection, fds, Errno::PROTO),
        };
        // Any other descriptor could block a caller that polls it.
        if !is_pidfd_of(&process, peer.pid) {
            return self.refuse(connection, vec![memory, process], Errno::INVAL);
        }
        if self.clients.try_reserve(1).is_err() {
            return self.refuse(connection, vec![memory, process], Errno::NOMEM);
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

    /// Accepts a file from a client, if its file system is supported. A separate thread queries the file
    /// system, unless it is known.
    fn adopt(&mut self, asked: Asked, medium: Option<Option<Medium>>) {
        let Asked { connection, request, fds } = asked;
        let KeeperRequest::Adopt { mapping, entry, device, inode, page_shift } = request else {
            return;
        };
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
                    let medium = Medium::query_medium(&asked.fds[0]);
                    Message::Medium { mount, medium, asked }
                });
            }
        };
        let adopted = match Adopted::new(fd, medium, entry, (device, inode), page_shift) {
            Ok(adopted) => adopted,
            Err((fd, error)) => return self.refuse(connection, vec![fd], error),
        };
        let (peer, id) = (connection.peer, (device, inode));
        let marked = self.client(peer, mapping).and_then(|client| {
            if entry.index >= client.memory.layout.files {
                return Err(Errno::INVAL);
            }
            client.files.try_reserve(1).map_err(|_| Errno::NOMEM)?;
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
                let is_it = |file: &mut Adopted| file.entry.index == entry.index;
                let old: Vec<_> = client.files.extract_if(.., is_it).collect();
                client.files.push(Adopted { mark: Some(mark), ..adopted });
                self.close_files(connection, Vec::new(), old);
            }
            Err(error) => {
                self.apart((connection, adopted), move |(connection, adopted)| {
                    drop(adopted);
                    connection.answer(Err(error.into()));
                    Message::Done
                });
            }
        }
    }

    /// Marks a file; EBUSY if another keeper has it.
    fn mark(&mut self, device: u64, inode: u64) -> Result<Arc<Mark>, Errno> {
        // With more marks, more untrusted connections would have to be closed.
        if !self.closer.has_room() {
            return Err(Errno::BUSY);
        }
        self.marked.try_reserve(1).map_err(|_| Errno::NOMEM)?;
        let mark = Mark::set(device, inode, &self.closer)
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

    /// Releases the opens of marked files whose processes live. Checks for deaths between accepting
    /// connections and closing them: a later open may know of a death that the keeper has not seen.
    pub(super) fn let_pass(&mut self, on_report: &mut impl FnMut(Report)) -> io::Result<()> {
        let mut events = Vec::with_capacity(64);
        let timeout = Timespec { tv_sec: 0, tv_nsec: 0 };
        let spare = rustix::buffer::spare_capacity(&mut events);
        if epoll::wait(&self.marks, spare, Some(&timeout)).is_err() {
            return Ok(());
        }
        let (mut opens, mut left) = (Vec::new(), OPENS_TOGETHER);
        for event in &events {
            match self.marked.get(&event.data.u64()).and_then(Weak::upgrade) {
                Some(mark) => {
                    let connections = mark.accept(left);
                    left -= connections.len();
                    opens.push((connections, mark));
                }
                None => drop(self.marked.remove(&event.data.u64())),
            }
        }
        self.bury_dead(on_report)?;
        for (connections, mark) in opens {
            // No open waits for the close of a file that a living process has released.
            if mark.is_buried() {
                mark.keep_waiting(connections);
            } else {
                mark.hang_up(connections);
            }
        }
        Ok(())
    }

    /// The client with the mapping `mapping`, if it is the sender.
    fn client(&mut self, peer: Peer, mapping: u64) -> Result<&mut Client, Errno> {
        let mut clients = self.clients.iter_mut();
        clients.find(|client| client.id == mapping && client.pid == peer.pid).ok_or(Errno::NOTCONN)
    }

    /// Answers with an error, and closes the descriptors of the request.
    fn refuse(&mut self, connection: Connection, fds: Vec<OwnedFd>, error: Errno) {
        if fds.is_empty() {
            return connection.answer(Err(error.into()));
        }
        self.apart((connection, fds), move |(connection, fds)| {
            connection.answer(Err(error.into()));
            drop(fds);
            Message::Done
        });
    }

    /// Closes files, then answers.
    fn close_files(&mut self, connection: Connection, fds: Vec<OwnedFd>, files: Vec<Adopted>) {
        if fds.is_empty() && files.iter().all(|file| file.target.closes_at_once()) {
            drop(files);
            return connection.answer(Ok(0));
        }
        self.apart((connection, fds, files), |(connection, fds, files)| {
            drop((fds, files));
            connection.answer(Ok(0));
            Message::Done
        });
    }

    /// Runs `body` on a separate thread, as another party can delay it.
    fn apart<T: Send + 'static>(
        &mut self,
        with: T,
        body: impl FnOnce(T) -> Message + Send + 'static,
    ) {
        let teller = self.teller();
        let (give, take) = channel();
        let thread = move || {
            if let Ok(with) = take.recv() {
                let told = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| body(with)));
                teller.notify(told.unwrap_or(Message::Done));
            }
        };
        self.under_way += 1;
        match spawn_thread("millpond-keeper", thread) {
            Ok(()) => drop(give.send(with)),
            // The client sees the end of the connection.
            Err(_) => {
                drop(with);
                self.under_way -= 1;
            }
        }
    }

    /// Processes the messages of the other threads.
    pub(super) fn process_messages(&mut self, on_report: &mut impl FnMut(Report)) {
        let _ = rustix::io::read(&*self.told, &mut [0; 8]);
        while let Ok(told) = self.receive.try_recv() {
            match told {
                Message::Done => self.under_way -= 1,
                Message::Medium { mount, medium, asked } => {
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
                Message::Buried { report, is_last, goodbye } => {
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
}

/// Whether `fd` is a pidfd of the process; queries only the kernel.
fn is_pidfd_of(fd: &OwnedFd, pid: i32) -> bool {
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd()));
    let info = info.unwrap_or_default();
    let told = info.lines().find_map(|line| line.strip_prefix("Pid:"));
    told.and_then(|number| number.trim().parse().ok()) == Some(pid)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::os::fd::AsFd;
    use std::sync::mpsc;

    use super::*;
    use crate::recovery::mark;

    /// Opens the file of a mark in a thread; the result shows whether it timed out.
    fn opens(file: &std::fs::File) -> mpsc::Receiver<io::Result<()>> {
        let stat = rustix::fs::fstat(file.as_fd()).unwrap();
        let (tell, told) = mpsc::channel();
        spawn_thread("opener", move || {
            let _ = tell.send(mark::await_written(&stat, Duration::from_secs(60)));
        })
        .unwrap();
        told
    }

    /// Runs the server's loop until the opener was released, or for long enough to see that it is not.
    fn passes(keeper: &mut Keeper, opened: &mpsc::Receiver<io::Result<()>>, rounds: usize) -> bool {
        (0..rounds).any(|_| {
            keeper.let_pass(&mut |_| unreachable!("nobody died")).unwrap();
            opened.recv_timeout(Duration::from_millis(10)).is_ok_and(|outcome| outcome.is_ok())
        })
    }

    /// Goal: a mark makes an open wait once its process is dead, until the file is written, but not for the
    /// time that the keeper takes to close a living process's file.
    /// Incident: an open of a file during its close by the keeper, which may take long, waited for that.
    #[test]
    fn only_the_marks_of_the_dead_keep_waiting() {
        let mut keeper = Keeper::new(Duration::from_secs(1)).unwrap();
        let file = tempfile::tempfile().unwrap();
        let stat = rustix::fs::fstat(&file).unwrap();
        // No client has it: it was released, and a thread is closing it.
        let mark = keeper.mark(stat.st_dev, stat.st_ino).unwrap();
        assert!(passes(&mut keeper, &opens(&file), 6000), "it waits for a living process");
        mark.begin_recovery();
        let opened = opens(&file);
        assert!(!passes(&mut keeper, &opened, 20), "it did not wait for the write-back");
        drop(mark);
        opened.recv().unwrap().unwrap();
    }

    /// Goal: with any number of concurrent opens of marked files, all continue, and each round takes only a
    /// few descriptors.
    #[test]
    fn many_opens_at_once_go_on() {
        let mut keeper = Keeper::new(Duration::from_secs(1)).unwrap();
        let file = tempfile::tempfile().unwrap();
        let stat = rustix::fs::fstat(&file).unwrap();
        let _mark = keeper.mark(stat.st_dev, stat.st_ino).unwrap();
        let openers: Vec<_> = (0..3 * OPENS_TOGETHER).map(|_| opens(&file)).collect();
        for opened in openers {
            assert!(passes(&mut keeper, &opened, 6000));
        }
    }
}
