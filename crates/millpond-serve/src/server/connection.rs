//! The requests of one client.
//!
//! - **CN1** One task reads requests; each read of an object is a task of its own. Requests in flight and the bytes of
//!   their replies are bounded. At a bound no more is read, so the client's sends meet a full socket.
//! - **CN2** A message that can't be decoded, a client that does not read for [`SEND_TIMEOUT`], or a reply that can't be sent ends
//!   its connection, and no other. Each other request has a reply, also if its task panics: a client waits for it without limit.
//! - **CN3** The end of the connection ends the client's writes, which removes their objects from the cache, and drops its
//!   reads. Requests to the store go on, as other clients may wait for them.
//! - **CN4** A child of fork has a copy of the client's socket. So the end of the client's process is the end as well.
//! - **CN5** The socket is watched for room only after it was full: otherwise each message that the client receives makes
//!   room, and wakes a thread of the server.

use std::borrow::Cow;
use std::collections::HashMap;
use std::future::Future;
use std::io;
use std::os::fd::OwnedFd;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use futures_util::FutureExt;
use millpond_objects::serving::{PIECE_BYTES_MAX, SharedRead, SharedRequest, WriteGuard};
use object_store::{Error, Result};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::{Notify, Semaphore};
use tokio::task::JoinSet;

use crate::protocol::{
    DATA_BYTES_MAX, Failure, ObjectHead, PartHead, REQUEST_BYTES_MAX, ReadMessage, Reply, Request,
};
use crate::server::server_parts::ServerParts;
use crate::socket;
use crate::stores::{ClientScope, Located};

/// Requests of a client in flight. More than a client of this crate sends.
const IN_FLIGHT_MAX: usize = 1024;
/// Bytes of a client's reads in flight. Chosen.
const BYTES_IN_FLIGHT_MAX: u64 = 64 << 20;
/// The unit in which they are counted.
const PERMIT_BYTES: u64 = 4096;
/// For so long a client may not read. Chosen.
pub(super) const SEND_TIMEOUT: Duration = Duration::from_secs(5);
/// Longer parts are read from the cache by the client itself.
const INLINE_BYTES_MAX: u64 = 32 << 10;
/// Tries to reach a lower limit, which pages that are being read or filled delay.
const LIMIT_TRIES: u32 = 100;
const LIMIT_PAUSE: Duration = Duration::from_millis(10);
/// Writes of a client at a time.
const WRITES_MAX: usize = 1 << 16;

/// A client's socket.
pub(super) struct Connection {
    parts: Arc<ServerParts>,
    socket: AsyncFd<OwnedFd>,
    scope: Option<ClientScope>,
    /// Another descriptor of the socket, watched for room (CN5).
    room: OnceLock<AsyncFd<OwnedFd>>,
    in_flight: Arc<Semaphore>,
    bytes_in_flight: Semaphore,
    /// Why the connection has to end (CN2).
    failure: Mutex<Option<io::Error>>,
    has_failed: Notify,
}

impl Connection {
    pub(super) fn new(
        parts: Arc<ServerParts>,
        socket: AsyncFd<OwnedFd>,
        scope: Option<ClientScope>,
    ) -> Arc<Connection> {
        Arc::new(Connection {
            parts,
            socket,
            scope,
            room: OnceLock::new(),
            in_flight: Arc::new(Semaphore::new(IN_FLIGHT_MAX)),
            bytes_in_flight: Semaphore::new((BYTES_IN_FLIGHT_MAX / PERMIT_BYTES) as usize),
            failure: Mutex::default(),
            has_failed: Notify::new(),
        })
    }

    /// Serves the client until it is gone. `process`: its pidfd.
    pub(super) async fn run(self: Arc<Self>, process: AsyncFd<Arc<OwnedFd>>) -> io::Result<()> {
        let outcome = tokio::select! {
            outcome = self.serve() => outcome,
            // CN4.
            gone = process.readable() => gone.map(drop),
            () = self.has_failed.notified() => Err(self.take_failure()),
        };
        // Before the client is detached, which the drop of the socket does not do if a task has it.
        _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
        outcome
    }

    /// CN2.
    fn fail(&self, error: io::Error) {
        self.failure.lock().expect("no panic under the lock").get_or_insert(error);
        self.has_failed.notify_one();
    }

    fn take_failure(&self) -> io::Error {
        let failure = self.failure.lock().expect("no panic under the lock").take();
        failure.expect("set before the notice")
    }

    async fn serve(self: &Arc<Self>) -> io::Result<()> {
        // CN3: dropped with this future.
        let mut reads = JoinSet::new();
        let mut writes: HashMap<u64, WriteGuard> = HashMap::new();
        let mut buffer = vec![0; REQUEST_BYTES_MAX];
        loop {
            while reads.try_join_next().is_some() {}
            // CN1.
            let permit = Arc::clone(&self.in_flight).acquire_owned().await.expect("not closed");
            let received = (self.socket)
                .async_io(Interest::READABLE, |fd| socket::receive(fd, &mut buffer))
                .await;
            let len = match received {
                Ok(len) => len,
                // The client is gone, and has left replies. The kernel reports that once, before its last messages.
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => continue,
                Err(error) => return Err(error),
            };
            if len == 0 {
                return Ok(());
            }
            // Relaxed: a count.
            self.parts.counters.requests.fetch_add(1, Relaxed);
            let decoded = Request::decode(&buffer[..len]);
            let (number, request) =
                decoded.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
            let reply = match request {
                Request::Read(read) => {
                    let this = Arc::clone(self);
                    reads.spawn(async move {
                        this.reply_always(number, this.read(number, read)).await;
                        drop(permit);
                    });
                    continue;
                }
                Request::SetMemory { bytes } => {
                    let this = Arc::clone(self);
                    reads.spawn(async move {
                        this.reply_always(number, this.set_memory(number, bytes)).await;
                        drop(permit);
                    });
                    continue;
                }
                other => self.reply_at_once(number, other, &mut writes),
            };
            self.send(&reply.encode(number).expect("a short reply")).await;
        }
    }

    /// Replies to a request also if its future panics, such as by a panic of the store (CN2).
    async fn reply_always(&self, number: u64, request: impl Future<Output = ()>) {
        // The request's state is dropped with its future.
        if let Err(panic) = AssertUnwindSafe(request).catch_unwind().await {
            let text = (panic.downcast_ref::<&str>().copied())
                .or_else(|| panic.downcast_ref::<String>().map(String::as_str));
            let source = format!("the request has panicked: {}", text.unwrap_or("no text")).into();
            let error = Error::Generic { store: crate::NAME, source };
            self.reply(number, &self.failed(&error)).await;
        }
    }

    /// Replies to a request that waits for nothing.
    fn reply_at_once(
        &self,
        number: u64,
        request: Request,
        writes: &mut HashMap<u64, WriteGuard>,
    ) -> Reply<'static> {
        let store = &self.parts.store;
        let outcome = match request {
            Request::BeginWrite { location } => self.locate(&location).and_then(|located| {
                let Located::Inside(location) = located else { return Ok(0) };
                if writes.len() >= WRITES_MAX {
                    let source = format!("more than {WRITES_MAX} writes at a time").into();
                    return Err(Error::Generic { store: crate::NAME, source });
                }
                writes.insert(number, store.begin_write(&location));
                Ok(0)
            }),
            Request::EndWrite { begun } => {
                drop(writes.remove(&begun));
                Ok(0)
            }
            Request::Forget { location } => self.locate(&location).map(|located| {
                if let Located::Inside(location) = located {
                    store.forget(&location);
                }
                0
            }),
            Request::ForgetAll => {
                store.forget_all();
                Ok(0)
            }
            Request::Ping => Ok(0),
            Request::Read(_) | Request::SetMemory { .. } => unreachable!("a task of its own"),
        };
        match outcome {
            Ok(value) => Reply::Done(value),
            Err(error) => self.failed(&error),
        }
    }

    /// Lowers or raises the limit, and tries for some time to reach it. Replies with the limit that is reached.
    async fn set_memory(&self, number: u64, bytes: u64) {
        let mut reached = Ok(u64::MAX);
        for _ in 0..LIMIT_TRIES {
            let store = self.parts.store.clone();
            let set = tokio::task::spawn_blocking(move || store.set_memory_bytes(bytes));
            reached = set.await.unwrap_or_else(|error| {
                Err(Error::Generic { store: crate::NAME, source: error.into() })
            });
            if reached.as_ref().is_ok_and(|reached| *reached > bytes) {
                tokio::time::sleep(LIMIT_PAUSE).await;
            } else {
                break;
            }
        }
        let reply = match reached {
            Ok(reached) => Reply::Done(reached),
            Err(error) => self.failed(&error),
        };
        self.reply(number, &reply).await;
    }

    async fn read(&self, number: u64, read: ReadMessage) {
        let bytes_max = read.bytes_max().min(PIECE_BYTES_MAX);
        let permits = bytes_max.div_ceil(PERMIT_BYTES) as u32;
        let _room = self.bytes_in_flight.acquire_many(permits).await.expect("not closed");
        let wants_bytes = read.wants_bytes;
        let outcome = match self.locate(&read.location) {
            Ok(Located::Outside) => Ok(SharedRead::Bypass),
            // Several ranges are collected whole.
            Ok(_) if read.ranges.len() > 1 && read.bytes_max() > PIECE_BYTES_MAX => {
                let source = "more bytes of ranges than a request may ask for".into();
                Err(Error::Generic { store: crate::NAME, source })
            }
            Ok(Located::Inside(location)) => {
                let request = SharedRequest {
                    ranges: read.ranges,
                    conditions: read.conditions.into_options(),
                    held: read.held,
                };
                // On the heap, as it takes kilobytes.
                Box::pin(self.parts.store.read_shared(&location, &request)).await
            }
            Err(error) => Err(error),
        };
        match outcome {
            Ok(SharedRead::Bypass) => {
                // Relaxed: a count.
                self.parts.counters.bypassed.fetch_add(1, Relaxed);
                self.reply(number, &Reply::Bypass).await;
            }
            Err(error) => self.reply(number, &self.failed(&error)).await,
            Ok(SharedRead::Object { meta, attributes, place, parts }) => {
                let part = |part: &millpond_objects::serving::ObjectPart| PartHead {
                    start: part.start,
                    len: part.bytes.len() as u64,
                };
                let head = ObjectHead {
                    size: meta.size,
                    last_modified: meta.last_modified,
                    e_tag: meta.e_tag.clone(),
                    version: meta.version.clone(),
                    attributes,
                    place,
                    parts: parts.iter().map(part).collect(),
                    has_bytes: false,
                };
                self.reply_object(number, head, parts, wants_bytes).await;
            }
        }
    }

    async fn reply_object(
        &self,
        number: u64,
        mut head: ObjectHead,
        parts: Vec<millpond_objects::serving::ObjectPart>,
        wants_bytes: bool,
    ) {
        let all = head.part_bytes();
        head.has_bytes = wants_bytes || head.place.is_none() || all <= INLINE_BYTES_MAX;
        let is_inline = head.has_bytes && all <= DATA_BYTES_MAX as u64;
        let bytes: Cow<'_, [u8]> = match &parts[..] {
            [part] if is_inline => Cow::Borrowed(&part.bytes),
            parts if is_inline => {
                parts.iter().flat_map(|part| part.bytes.iter().copied()).collect()
            }
            _ => Cow::Borrowed(&[]),
        };
        let sends_data = head.has_bytes && !is_inline;
        let Some(message) = Reply::Object(Box::new(head), bytes).encode(number) else {
            // Attributes that no message has room for.
            return self.reply(number, &Reply::Bypass).await;
        };
        if !self.send(&message).await || !sends_data {
            return;
        }
        for bytes in parts.iter().flat_map(|part| part.bytes.chunks(DATA_BYTES_MAX)) {
            let message = Reply::Data(Cow::Borrowed(bytes)).encode(number).expect("of that length");
            if !self.send(&message).await {
                return;
            }
        }
    }

    /// The name in the cache of an object of the client's store.
    fn locate(&self, location: &str) -> Result<Located> {
        let Some(scope) = &self.scope else {
            let source = "the client has named no store".into();
            return Err(Error::Generic { store: crate::NAME, source });
        };
        scope.locate(location)
    }

    fn failed(&self, error: &Error) -> Reply<'static> {
        // Relaxed: a count.
        self.parts.counters.failed.fetch_add(1, Relaxed);
        let mut failure = Failure::of(error);
        if let Some(scope) = &self.scope {
            failure.path = scope.name_for_client(failure.path);
        }
        Reply::Failed(failure)
    }

    async fn reply(&self, number: u64, reply: &Reply<'_>) {
        let message = reply.encode(number).or_else(|| Reply::Bypass.encode(number));
        self.send(&message.expect("a bypass is short")).await;
    }

    /// False: the connection ends.
    async fn send(&self, message: &[u8]) -> bool {
        match self.try_send(message).await {
            Ok(()) => true,
            // The client is gone. Its last requests may still be there, so the end is found after them.
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset
                ) =>
            {
                false
            }
            Err(error) => {
                self.fail(error);
                false
            }
        }
    }

    async fn try_send(&self, message: &[u8]) -> io::Result<()> {
        match socket::send(&self.socket, message) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            sent => return sent,
        }
        // CN5.
        let sending = self.room()?.async_io(Interest::WRITABLE, |fd| socket::send(fd, message));
        let is_stuck =
            |_| io::Error::new(io::ErrorKind::TimedOut, "the client does not read its replies");
        tokio::time::timeout(SEND_TIMEOUT, sending).await.map_err(is_stuck)?
    }

    fn room(&self) -> io::Result<&AsyncFd<OwnedFd>> {
        if let Some(room) = self.room.get() {
            return Ok(room);
        }
        let room = socket::watch(self.socket.get_ref().try_clone()?, Interest::WRITABLE)?;
        // Of two tasks that find the socket full, one's is dropped.
        Ok(self.room.get_or_init(|| room))
    }
}

#[cfg(test)]
mod tests {
    use millpond::internals::shared::MemoryChoice;
    use millpond_objects::CachedStore;
    use object_store::ObjectStoreExt;
    use object_store::memory::InMemory;
    use object_store::path::Path;

    use super::*;
    use crate::protocol::Conditions;

    /// A connection to a server whose cache has the object `pond`, the pidfd of this process, and the client's socket.
    async fn connection() -> (Arc<Connection>, AsyncFd<Arc<OwnedFd>>, OwnedFd) {
        let store = Arc::new(InMemory::new());
        store.put(&Path::from("pond"), vec![7; 60_000].into()).await.unwrap();
        let cache = CachedStore::builder(store).memory_bytes(16 << 20);
        let store = cache.shared(MemoryChoice::Small).build().unwrap();
        store.get_range(&Path::from("pond"), 0..60_000).await.unwrap();
        let places = Arc::new(Semaphore::new(1));
        let parts = ServerParts { store, stores: None, counters: Arc::default(), places };
        let scope = parts.scope(&parts.store.store_name()).unwrap();
        let (ours, theirs) = socket::pair().unwrap();
        let own = rustix::process::getpid();
        let own = rustix::process::pidfd_open(own, rustix::process::PidfdFlags::empty()).unwrap();
        let process = socket::watch(Arc::new(own), Interest::READABLE).unwrap();
        let ours = socket::watch(ours, Interest::READABLE).unwrap();
        (Connection::new(Arc::new(parts), ours, Some(scope)), process, theirs)
    }

    /// Goal: the last requests of a client count, also if it ends without having read its replies.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn the_last_requests_are_read_after_a_reset() {
        let (connection, process, theirs) = connection().await;
        let store = connection.parts.store.clone();
        assert_eq!(store.recent_objects().len(), 1);
        connection.send(&Reply::Done(0).encode(1).unwrap()).await;
        let forget = Request::Forget { location: "pond".into() };
        socket::send(&theirs, &forget.encode(2).unwrap()).unwrap();
        // With a reply that was not read, the kernel reports a reset before it gives the message.
        drop(theirs);
        connection.run(process).await.unwrap();
        assert_eq!(store.recent_objects().len(), 0);
    }

    /// Goal: a reply that the socket does not take ends the connection, so the client does not wait for it.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_reply_that_cannot_be_sent_ends_the_connection() {
        let (connection, process, theirs) = connection().await;
        // Too small for the reply: EMSGSIZE.
        rustix::net::sockopt::set_socket_send_buffer_size(&connection.socket, 4096).unwrap();
        let serving = tokio::spawn(connection.run(process));
        let read = Request::Read(ReadMessage {
            location: "pond".into(),
            ranges: vec![Some(object_store::GetRange::Bounded(0..60_000))],
            conditions: Conditions::default(),
            held: None,
            wants_bytes: true,
        });
        socket::send(&theirs, &read.encode(1).unwrap()).unwrap();
        let ended = tokio::time::timeout(Duration::from_secs(20), serving).await;
        let error = ended.expect("the connection ends").unwrap().unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EMSGSIZE), "{error}");
        assert_eq!(socket::receive(&theirs, &mut [0; 100]).unwrap(), 0);
    }
}
