//! The socket to a server, and the requests that wait for its replies.
//!
//! A task of each multi-threaded runtime that asks receives, as a reply then wakes one thread and not two. A thread
//! watches the connection, and receives for all others: a runtime of one thread may not be driven while another waits, and one
//! without I/O has no way to receive. It
//! sleeps without a timer while no request is in flight. While requests are, it asks a silent server for a sign of life.
//!
//! - **LK1** A message is sent whole or queued: the socket keeps message boundaries. The thread sends the queue. Messages keep their order.
//!   A message that can't be sent ends the connection, and with it all requests: the server would not reply to this one.
//! - **LK2** `is_gone` is set under the lock of the pending requests, so no request is added after they have failed.
//! - **LK3** One receiver at a time takes and delivers messages, so the parts of a reply keep their order.
//! - **LK4** A child of fork sends nothing, takes no lock and does not end the connection: all of these are its parent's. Its
//!   requests have no answer, so the store serves its reads until it has attached itself.
//!
//! Locks: the buffer of the receivers, then the pending requests. The queue and the list of runtimes are leaf locks.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use bytes::Bytes;
use millpond::internals::shared::process_number;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use tokio::io::Interest;
use tokio::runtime::{self, Handle, RuntimeFlavor};
use tokio::sync::{Semaphore, oneshot};

use crate::protocol::{Failure, ObjectHead, REPLY_BYTES_MAX, Reply, Request};
use crate::socket;

/// Requests in flight. Fewer than the server's limit.
const IN_FLIGHT_MAX: usize = 512;
/// A server that sends nothing for so long is asked for a sign of life, which it has as long again to give. Chosen.
const SILENCE: Duration = Duration::from_secs(1);

/// The reply of a server.
#[derive(Debug)]
pub(crate) enum Answer {
    /// With the bytes of all parts, if the head says so.
    Object(Box<ObjectHead>, Bytes),
    Bypass,
    Failed(Failure),
    Done(u64),
}

/// The server is gone, or the request is too long for it.
#[derive(Debug)]
pub(crate) struct Unanswered;

struct Pending {
    answer: oneshot::Sender<Answer>,
    /// The head, while its data arrive.
    partial: Option<(Box<ObjectHead>, Vec<u8>)>,
    /// The most bytes that the request asked for.
    bytes_max: u64,
}

/// The thread's view of the last second.
#[derive(Default)]
struct Patience {
    /// No request was in flight at its end, and none has begun.
    is_quiet: bool,
    /// The server has been asked for a sign of life.
    has_asked: bool,
    /// The messages received by its end.
    received: u64,
}

/// The multi-threaded runtimes that have asked.
#[derive(Default)]
struct Runtimes {
    /// They have a receiver.
    receiving: Vec<runtime::Id>,
    /// They can't receive: they were built without I/O, which shows by a panic only.
    without_io: Vec<runtime::Id>,
}

pub(crate) struct Link {
    socket: OwnedFd,
    /// Wakes the thread while it rests.
    bell: OwnedFd,
    /// The thread sleeps without a timer.
    is_resting: AtomicBool,
    is_gone: AtomicBool,
    pending: Mutex<HashMap<u64, Pending>>,
    unsent: Mutex<VecDeque<Vec<u8>>>,
    /// LK3.
    buffer: Mutex<Vec<u8>>,
    runtimes: Mutex<Runtimes>,
    in_flight: Semaphore,
    last_number: AtomicU64,
    /// Messages received, by any receiver. Relaxed: a count.
    received: AtomicU64,
    process: u64,
}

impl Link {
    pub(crate) fn new(socket: OwnedFd) -> io::Result<Link> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Link {
            socket,
            bell: rustix::event::eventfd(0, flags)?,
            is_resting: false.into(),
            is_gone: false.into(),
            pending: Mutex::default(),
            unsent: Mutex::default(),
            buffer: Mutex::new(vec![0; REPLY_BYTES_MAX]),
            runtimes: Mutex::default(),
            in_flight: Semaphore::new(IN_FLIGHT_MAX),
            last_number: 0.into(),
            received: 0.into(),
            process: process_number(),
        })
    }

    pub(crate) fn is_gone(&self) -> bool {
        // Relaxed: a request finds out under the lock (LK2).
        self.is_gone.load(Relaxed)
    }

    /// Whether this process has connected, and not an ancestor of it.
    fn is_own(&self) -> bool {
        self.process == process_number()
    }

    /// Ends the connection, and with it the thread.
    pub(crate) fn close(&self) {
        // LK4.
        if self.is_own() {
            _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
        }
    }

    fn pending(&self) -> MutexGuard<'_, HashMap<u64, Pending>> {
        self.pending.lock().expect("no panic under the lock")
    }

    /// Sends a request, and waits for the answer. `bytes_max`: the most bytes that it may have.
    pub(crate) async fn ask(
        self: &Arc<Self>,
        request: &Request,
        bytes_max: u64,
    ) -> Result<Answer, Unanswered> {
        if !self.is_own() {
            // LK4, before the semaphore.
            return Err(Unanswered);
        }
        let _permit = self.in_flight.acquire().await.expect("not closed");
        self.start(request, bytes_max).ok_or(Unanswered)?.1.await.map_err(|_| Unanswered)
    }

    /// Sends a request. Returns its number, and where the answer arrives. `None`: the server is gone, the request is too
    /// long, or this is a child of fork (LK4).
    pub(crate) fn start(
        self: &Arc<Self>,
        request: &Request,
        bytes_max: u64,
    ) -> Option<(u64, oneshot::Receiver<Answer>)> {
        if !self.is_own() {
            return None;
        }
        self.receive_by_runtime();
        self.send_request(request, bytes_max)
    }

    fn send_request(
        &self,
        request: &Request,
        bytes_max: u64,
    ) -> Option<(u64, oneshot::Receiver<Answer>)> {
        // Relaxed: numbers that differ.
        let number = self.last_number.fetch_add(1, Relaxed) + 1;
        let message = request.encode(number)?;
        let (sender, answer) = oneshot::channel();
        {
            let mut pending = self.pending();
            // LK2.
            if self.is_gone.load(Relaxed) {
                return None;
            }
            // Requests whose caller is gone keep their entry until the reply. SeqCst: see `rest`.
            pending.insert(number, Pending { answer: sender, partial: None, bytes_max });
        }
        self.send(message);
        // SeqCst: either this sees that the thread rests, or the thread sees the request.
        if self.is_resting.load(SeqCst) && self.is_resting.swap(false, SeqCst) {
            self.ring();
        }
        Some((number, answer))
    }

    /// Sends requests and waits for all answers, before the thread watches. Blocks, as long as the server answers.
    pub(crate) fn ask_at_first(&self, requests: &[Request]) -> io::Result<()> {
        let gone = || io::Error::from(io::ErrorKind::UnexpectedEof);
        let sent = requests.iter().map(|request| self.send_request(request, 0).ok_or_else(gone));
        let answers = sent.collect::<io::Result<Vec<_>>>()?;
        let mut patience = Patience::default();
        for (_, mut answer) in answers {
            while let Err(error) = answer.try_recv() {
                if error == oneshot::error::TryRecvError::Closed {
                    return Err(gone());
                }
                self.watch_once(&mut patience)?;
            }
        }
        Ok(())
    }

    fn runtimes(&self) -> MutexGuard<'_, Runtimes> {
        self.runtimes.lock().expect("no panic under the lock")
    }

    /// Has the caller's runtime receive, if its threads run while others wait.
    fn receive_by_runtime(self: &Arc<Self>) {
        let Ok(runtime) = Handle::try_current() else { return };
        if runtime.runtime_flavor() == RuntimeFlavor::CurrentThread {
            return;
        }
        let mut runtimes = self.runtimes();
        let id = runtime.id();
        if runtimes.receiving.contains(&id) || runtimes.without_io.contains(&id) {
            return;
        }
        let Ok(socket) = self.socket.try_clone() else { return };
        runtimes.receiving.push(id);
        drop(runtimes);
        let receiver = RuntimeReceiver { link: Arc::clone(self), runtime: id };
        runtime.spawn(receiver.receive_all(socket));
    }

    fn ring(&self) {
        // The counter of the bell can't overflow, as rings are one for each rest and for each queued message.
        _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }

    /// LK1.
    fn send(&self, message: Vec<u8>) {
        let mut unsent = self.unsent.lock().expect("no panic under the lock");
        if unsent.is_empty() {
            match socket::send(&self.socket, &message) {
                Ok(()) => return,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                // The thread finds the end.
                Err(_) => return self.close(),
            }
        }
        unsent.push_back(message);
        drop(unsent);
        self.ring();
    }

    /// Sends queued messages. Returns whether some are left.
    fn send_queued(&self) -> bool {
        let mut unsent = self.unsent.lock().expect("no panic under the lock");
        while let Some(message) = unsent.front() {
            match socket::send(&self.socket, message) {
                Ok(()) => _ = unsent.pop_front(),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return true,
                Err(_) => {
                    unsent.clear();
                    self.close();
                }
            }
        }
        false
    }

    /// Watches the connection until the server is gone, or does not answer. Runs on the link's thread, and calls `settle`
    /// after the first second, if the program lives so long.
    pub(crate) fn watch(&self, settle: impl FnOnce()) -> io::Error {
        let (mut patience, mut settle) = (Patience::default(), Some(settle));
        let error = loop {
            match self.watch_once(&mut patience) {
                Ok(is_silent) => {
                    if is_silent && let Some(settle) = settle.take() {
                        settle();
                    }
                }
                Err(error) => break error,
            }
        };
        {
            let mut pending = self.pending();
            // LK2.
            self.is_gone.store(true, Relaxed);
            // Their callers find that the sender is gone.
            pending.clear();
        }
        self.close();
        error
    }

    /// Waits for an event. Delivers messages, if no runtime does. True: a second has passed without an event.
    fn watch_once(&self, patience: &mut Patience) -> io::Result<bool> {
        // Only after a second without requests: the next request of a busy client need not wake the thread.
        let rests = patience.is_quiet && self.rest();
        let has_unsent = self.send_queued();
        let mut wanted = PollFlags::empty();
        wanted.set(PollFlags::OUT, has_unsent);
        // Also beside a runtime that does not deliver.
        wanted.set(PollFlags::IN, patience.has_asked || self.runtimes().receiving.is_empty());
        let mut events =
            [PollFd::new(&self.socket, wanted), PollFd::new(&self.bell, PollFlags::IN)];
        let silence = Timespec { tv_sec: SILENCE.as_secs() as i64, tv_nsec: 0 };
        let ready = match rustix::event::poll(&mut events, (!rests).then_some(&silence)) {
            Err(rustix::io::Errno::INTR) => return Ok(false),
            ready => ready?,
        };
        // SeqCst: see `rest`.
        self.is_resting.store(false, SeqCst);
        let (of_socket, of_bell) = (events[0].revents(), events[1].revents());
        if ready == 0 {
            return self.note_silence(patience).map(|()| true);
        }
        patience.is_quiet = false;
        if of_bell.contains(PollFlags::IN) {
            _ = rustix::io::read(&self.bell, &mut [0u8; 8][..]);
        }
        if of_socket.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR) {
            self.receive_ready()?;
        }
        Ok(false)
    }

    /// A second has passed without an event for the thread.
    fn note_silence(&self, patience: &mut Patience) -> io::Result<()> {
        let received = self.received.load(Relaxed);
        let is_silent = std::mem::replace(&mut patience.received, received) == received;
        patience.is_quiet = self.pending().is_empty();
        if patience.is_quiet || !is_silent {
            patience.has_asked = false;
        } else if patience.has_asked {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "the server is silent"));
        } else {
            patience.has_asked = true;
            _ = self.send_request(&Request::Ping, 0);
        }
        Ok(())
    }

    /// Whether the thread may sleep without a timer: no request is in flight.
    fn rest(&self) -> bool {
        // SeqCst: pairs with `start`.
        self.is_resting.store(true, SeqCst);
        let rests = self.pending().is_empty();
        if !rests {
            self.is_resting.store(false, SeqCst);
        }
        rests
    }

    /// Delivers the messages that are there.
    fn receive_ready(&self) -> io::Result<()> {
        // LK3.
        let mut buffer = self.buffer.lock().expect("no panic under the lock");
        loop {
            let len = match socket::receive(&self.socket, &mut buffer) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(len) => len,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            };
            self.received.fetch_add(1, Relaxed);
            let decoded = Reply::decode(&buffer[..len]);
            let (number, reply) =
                decoded.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
            self.deliver(number, reply)?;
        }
    }

    fn deliver(&self, number: u64, reply: Reply<'_>) -> io::Result<()> {
        let unexpected = |what| Err(io::Error::new(io::ErrorKind::InvalidData, what));
        let mut all = self.pending();
        // A request whose caller is gone still has its entry.
        let Some(pending) = all.get_mut(&number) else {
            return unexpected("a reply to no request");
        };
        let answer = match reply {
            Reply::Object(head, bytes) => {
                let sum = head.part_bytes();
                if sum > pending.bytes_max || pending.partial.is_some() {
                    return unexpected("a reply with more bytes than asked for");
                }
                if head.has_bytes && bytes.len() as u64 != sum {
                    pending.partial = Some((head, Vec::new()));
                    return Ok(());
                }
                Answer::Object(head, Bytes::copy_from_slice(&bytes))
            }
            Reply::Data(bytes) => {
                let Some((head, collected)) = &mut pending.partial else {
                    return unexpected("data without an object");
                };
                let (sum, now) = (head.part_bytes(), (collected.len() + bytes.len()) as u64);
                if now > sum {
                    return unexpected("more data than announced");
                }
                if collected.try_reserve_exact(sum as usize - collected.len()).is_err() {
                    return unexpected("no memory for the data");
                }
                collected.extend_from_slice(&bytes);
                if now < sum {
                    return Ok(());
                }
                let (head, collected) = pending.partial.take().expect("checked");
                Answer::Object(head, collected.into())
            }
            Reply::Bypass => Answer::Bypass,
            Reply::Failed(failure) => Answer::Failed(failure),
            Reply::Done(value) => Answer::Done(value),
        };
        let pending = all.remove(&number).expect("found above");
        drop(all);
        // The caller may be gone.
        _ = pending.answer.send(answer);
        Ok(())
    }
}

/// Receives on a runtime, until the connection or the runtime ends.
struct RuntimeReceiver {
    link: Arc<Link>,
    runtime: runtime::Id,
}

impl RuntimeReceiver {
    async fn receive_all(self, socket: OwnedFd) {
        let Ok(socket) = socket::watch(socket, Interest::READABLE) else { return };
        while let Ok(mut ready) = socket.readable().await {
            if self.link.receive_ready().is_err() {
                // The thread finds the end.
                self.link.close();
                return;
            }
            // No message was left.
            ready.clear_ready();
        }
    }
}

impl Drop for RuntimeReceiver {
    fn drop(&mut self) {
        if self.link.is_own() {
            let mut runtimes = self.link.runtimes();
            runtimes.receiving.retain(|runtime| *runtime != self.runtime);
            if std::thread::panicking() {
                runtimes.without_io.push(self.runtime);
            }
            drop(runtimes);
            // The thread may have to receive from now on.
            self.link.ring();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a request that the socket does not take has an end, although the server lives and answers.
    #[test]
    fn a_request_that_cannot_be_sent_has_no_answer() {
        for is_queued in [false, true] {
            let (ours, theirs) = socket::pair().unwrap();
            // Too small for the request: EMSGSIZE.
            rustix::net::sockopt::set_socket_send_buffer_size(&ours, 4096).unwrap();
            let link = Arc::new(Link::new(ours).unwrap());
            let forget = |len| Request::Forget { location: "p".repeat(len) };
            if is_queued {
                // Until the socket is full.
                while link.unsent.lock().unwrap().is_empty() {
                    link.start(&forget(1000), 0).unwrap();
                }
            }
            let (_, mut answer) = link.start(&forget(20_000), 0).unwrap();
            let has_ended = AtomicBool::new(false);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    link.watch(|| ());
                    has_ended.store(true, SeqCst);
                });
                // A server that answers all that it receives.
                let (mut buffer, mut tries) = (vec![0; REPLY_BYTES_MAX], 0);
                while !has_ended.load(SeqCst) {
                    match socket::receive(&theirs, &mut buffer) {
                        Ok(0) | Err(_) => std::thread::sleep(Duration::from_millis(1)),
                        Ok(len) => {
                            let (number, _) = Request::decode(&buffer[..len]).unwrap();
                            let reply = Reply::Done(0).encode(number).unwrap();
                            _ = socket::send(&theirs, &reply);
                        }
                    }
                    tries += 1;
                    if tries > 20_000 {
                        link.close();
                    }
                }
                assert!(tries <= 20_000, "the request waits for an answer");
            });
            assert!(answer.try_recv().is_err() && link.is_gone());
        }
    }
}
