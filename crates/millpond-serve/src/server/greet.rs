//! The start of a connection: checks the peer, and attaches it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use millpond::internals::shared::ClientAttachment;
use millpond_objects::serving::{CachedObject, ServingGuard};
use rustix::process::geteuid;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::OwnedSemaphorePermit;

use crate::protocol::{
    Greeting, HELLO_BYTES_MAX, Hello, ObjectHead, PROTOCOL_VERSION, REPLY_BYTES_MAX, Welcome,
};
use crate::server::connection::Connection;
use crate::server::descriptors;
use crate::server::server_parts::ServerParts;
use crate::socket;
use crate::stores::ClientScope;

/// For so long a peer may take to send its greeting. Chosen.
const GREETING_TIMEOUT: Duration = Duration::from_secs(5);
/// A refusal has names of stores, which are as long as a path.
const REFUSAL_CHARACTERS_MAX: usize = 8 << 10;

/// Counts a client as long as it exists.
pub(super) struct Counted<'c>(&'c AtomicU64);

impl<'c> Counted<'c> {
    fn new(counter: &'c AtomicU64) -> Self {
        // Relaxed: a count publishes no other data.
        counter.fetch_add(1, Relaxed);
        Self(counter)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

/// Tells a client why it is refused. Returns the error for the log.
fn refuse(socket: impl AsFd, why: &str) -> io::Error {
    let why: String = why.chars().take(REFUSAL_CHARACTERS_MAX).collect();
    let greeting = Greeting::Refused(why.clone()).encode().expect("a short text");
    // If it can't be sent, the end of the connection says the same.
    _ = socket::send(socket, &greeting);
    io::Error::new(io::ErrorKind::PermissionDenied, why)
}

impl ServerParts {
    /// Refuses a client that has not been greeted.
    pub(super) fn refuse(&self, socket: impl AsFd, why: &str) {
        self.note_refusal(&refuse(socket, why));
    }

    fn note_refusal(&self, error: &io::Error) {
        // Relaxed: a count.
        self.counters.refused.fetch_add(1, Relaxed);
        tracing::warn!(%error, "a client was refused");
    }
}

/// Serves a client to its end.
pub(super) async fn serve_client(parts: Arc<ServerParts>, socket: OwnedFd, guard: ServingGuard) {
    let greeted = match greet(&parts, socket).await {
        Ok(greeted) => greeted,
        Err(error) => {
            guard.disarm();
            return parts.note_refusal(&error);
        }
    };
    parts.counters.attached.fetch_add(1, Relaxed);
    let _counted = Counted::new(&parts.counters.clients);
    let Greeted { socket, process, attached, scope, _place } = greeted;
    let connection = Connection::new(Arc::clone(&parts), socket, scope);
    let mut running = pin!(connection.run(process));
    // Dropped before the connection, which has the socket, if the runtime ends.
    let held_guard = guard;
    let ended = running.as_mut().await;
    held_guard.disarm();
    if let Err(error) = ended {
        tracing::warn!(%error, "a connection was closed");
    }
    // The client's process is gone, or finds the end of its socket.
    drop(attached);
}

struct Greeted {
    socket: AsyncFd<OwnedFd>,
    process: AsyncFd<Arc<OwnedFd>>,
    attached: ClientAttachment,
    /// `None`: the client reads nothing.
    scope: Option<ClientScope>,
    /// One of the server's clients, to its end.
    _place: OwnedSemaphorePermit,
}

/// Objects in the cache that a client need not ask for.
fn known_objects(parts: &ServerParts, scope: &ClientScope) -> Vec<(String, ObjectHead)> {
    let known = |object: CachedObject| {
        let CachedObject { meta, attributes, place } = object;
        let head = ObjectHead {
            size: meta.size,
            last_modified: meta.last_modified,
            e_tag: meta.e_tag,
            version: meta.version,
            attributes,
            place: Some(place),
            parts: Vec::new(),
            has_bytes: false,
        };
        Some((scope.name_of(&meta.location)?, head))
    };
    parts.store.recent_objects().into_iter().filter_map(known).collect()
}

async fn greet(parts: &ServerParts, socket: OwnedFd) -> io::Result<Greeted> {
    // Not for writing: the client's receipt of each reply would wake the server (connection.CN5).
    let socket = socket::watch(socket, Interest::READABLE)?;
    let refuse = |why: String| refuse(&socket, &why);
    let (user, own) = (socket::peer_user(&socket)?, geteuid().as_raw());
    if user != own {
        return Err(refuse(format!(
            "this server is for user {own}, and the client is user {user}: each user has an own server"
        )));
    }
    if let Some(why) = descriptors::shortage(&socket) {
        return Err(refuse(why));
    }
    socket::ensure_room(&socket, REPLY_BYTES_MAX).map_err(|error| refuse(error.to_string()))?;
    let Ok(place) = Arc::clone(&parts.places).try_acquire_owned() else {
        return Err(refuse("the server has as many clients as it can have".into()));
    };
    let mut buffer = vec![0; HELLO_BYTES_MAX];
    let received = socket.async_io(Interest::READABLE, |fd| socket::receive_with(fd, &mut buffer));
    let (len, descriptors) = tokio::time::timeout(GREETING_TIMEOUT, received)
        .await
        .map_err(|_| refuse("no greeting came in time".into()))??;
    let hello = Hello::decode(&buffer[..len]).map_err(|error| refuse(error.to_string()))?;
    if hello.version != PROTOCOL_VERSION {
        return Err(refuse(format!(
            "the server has version {PROTOCOL_VERSION} of the protocol, and the client version {}",
            hello.version
        )));
    }
    let scope = match &hello.store_name {
        None => None,
        Some(name) => Some(parts.scope(name).map_err(|names| {
            refuse(format!("the server caches {names}, and this client's store is {name}"))
        })?),
    };
    let [memory] = <[OwnedFd; 1]>::try_from(descriptors)
        .map_err(|all| refuse(format!("a greeting with {} descriptors, not 1", all.len())))?;
    let process = socket::peer_process(&socket)
        .map_err(|error| refuse(format!("the client's process can't be watched: {error}")))?;
    let process = Arc::new(process);
    let watched = socket::watch(Arc::clone(&process), Interest::READABLE)
        .map_err(|error| refuse(format!("the client's process can't be watched: {error}")))?;
    let cache = parts.store.shared_cache().expect("checked by bind");
    let attached = cache
        .attach(&memory, process)
        .map_err(|error| refuse(format!("the client can't be attached: {error}")))?;
    let max_age = parts.store.freshness().max_age();
    let welcome = Greeting::Welcome(Welcome {
        store_name: hello.store_name.unwrap_or_default(),
        now_ms: parts.store.now_ms(),
        max_age_ms: max_age.map(|age| u64::try_from(age.as_millis()).unwrap_or(u64::MAX)),
        page_bytes: parts.store.page_bytes(),
        // With an age of zero the client asks for each read.
        known: (scope.as_ref().filter(|_| max_age != Some(Duration::ZERO)))
            .map(|scope| known_objects(parts, scope))
            .unwrap_or_default(),
    });
    let message =
        welcome.encode().ok_or_else(|| refuse("the name of the store is too long".into()))?;
    let validity = (parts.store.validity_for_client())
        .map_err(|error| refuse(format!("no descriptor for the client: {error}")))?;
    let descriptors: [BorrowedFd<'_>; 2] = [attached.descriptor(), validity.as_fd()];
    socket::send_with(&socket, &message, &descriptors)?;
    let attached = attached.close_descriptor();
    Ok(Greeted { socket, process: watched, attached, scope, _place: place })
}

#[cfg(test)]
mod tests {
    use millpond::internals::shared::{ClientMemory, MemoryChoice};
    use millpond_objects::serving::Validity;
    use millpond_objects::{CachedStore, Freshness};
    use object_store::ObjectStoreExt;
    use object_store::memory::InMemory;
    use object_store::path::Path;
    use tokio::sync::Semaphore;

    use super::*;

    const OBJECTS: usize = 300;

    /// The parts of a server whose cache has some objects.
    async fn warm_server() -> Arc<ServerParts> {
        let store = Arc::new(InMemory::new());
        let cache = CachedStore::builder(store.clone()).memory_bytes(16 << 20);
        let cache = cache.freshness(Freshness::Immutable).shared(MemoryChoice::Small);
        let cache = cache.build().unwrap();
        for number in 0..OBJECTS {
            let path = Path::from(format!("pond/{number}"));
            store.put(&path, "water".into()).await.unwrap();
            cache.get_range(&path, 0..5).await.unwrap();
        }
        let places = Arc::new(Semaphore::new(1));
        Arc::new(ServerParts { store: cache, stores: None, counters: Arc::default(), places })
    }

    /// The next message; empty at the end.
    async fn receive(socket: &OwnedFd) -> (Vec<u8>, Vec<OwnedFd>) {
        let mut buffer = vec![0; REPLY_BYTES_MAX];
        loop {
            match socket::receive_with(socket, &mut buffer) {
                Ok((len, descriptors)) => return (buffer[..len].to_vec(), descriptors),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    tokio::time::sleep(Duration::from_micros(100)).await;
                }
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// Sends the greeting of a client, and returns the server's and the validity table.
    async fn greeted(parts: &ServerParts, socket: &OwnedFd) -> (Welcome, Validity) {
        let store_name = Some(parts.store.store_name());
        let hello = Hello { version: PROTOCOL_VERSION, store_name }.encode().unwrap();
        let memory = ClientMemory::create().unwrap();
        socket::send_with(socket, &hello, &[memory.descriptor().as_fd()]).unwrap();
        let (greeting, descriptors) = receive(socket).await;
        assert!(!greeting.is_empty(), "the connection has ended");
        let Greeting::Welcome(welcome) = Greeting::decode(&greeting).unwrap() else {
            panic!("{greeting:?}")
        };
        (welcome, Validity::map(descriptors[1].as_fd()).unwrap())
    }

    /// Goal: a system with short send buffers admits clients of a warm cache.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_long_greeting_fits_into_the_socket() {
        let parts = warm_server().await;
        let scope = parts.store.begin_serving().unwrap();
        let (ours, theirs) = socket::pair().unwrap();
        rustix::net::sockopt::set_socket_send_buffer_size(&ours, 4096).unwrap();
        let serving = tokio::spawn(serve_client(Arc::clone(&parts), ours, scope.guard()));
        let (welcome, _) = greeted(&parts, &theirs).await;
        assert_eq!(welcome.known.len(), OBJECTS);
        drop(theirs);
        serving.await.unwrap();
    }

    /// Goal: a client that finds the end of its connection finds no version current, also if its task is dropped before the
    /// server's, as at the end of a runtime.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn no_version_is_current_after_a_client_was_dropped() {
        let parts = warm_server().await;
        for is_normal in [true, false] {
            let scope = parts.store.begin_serving().unwrap();
            let (ours, theirs) = socket::pair().unwrap();
            let serving = tokio::spawn(serve_client(Arc::clone(&parts), ours, scope.guard()));
            let (welcome, validity) = greeted(&parts, &theirs).await;
            let place = welcome.known[0].1.place.unwrap();
            let is_current = || validity.validated_ms(place.slot, place.number).is_some();
            assert!(is_current());
            if is_normal {
                rustix::net::shutdown(&theirs, rustix::net::Shutdown::Both).unwrap();
                serving.await.unwrap();
                assert!(is_current(), "the server goes on");
            } else {
                serving.abort();
                assert!(receive(&theirs).await.0.is_empty());
                assert!(!is_current());
            }
            drop(scope);
            assert!(!is_current());
        }
    }
}
