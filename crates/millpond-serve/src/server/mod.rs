//! The server: listens, and has a task for each client.
//!
//! ```text
//!   bind -> run: accept -> greet: user? Hello? -> attach -> requests until the client is gone
//! ```

mod connection;
mod descriptors;
mod greet;
mod server_parts;

pub use server_parts::ServerCounts;

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use millpond_objects::CachedStore;
use millpond_objects::serving::ServingScope;
use tokio::io::{Interest, Ready};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

#[cfg(feature = "systemd")]
use crate::inherited::InheritedSocket;
use crate::server::descriptors::{Accepted, SpareDescriptor};
use crate::server::server_parts::ServerParts;
use crate::socket::{self, SocketFile};
use crate::stores::StoreSet;

/// Clients at a time. Each takes two descriptors, three after it was slow to read, and 600 KiB of address space. Chosen.
const CLIENTS_MAX: usize = 1000;
/// Wait after a failed accept, such as for want of descriptors. Chosen.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A server of one cache.
///
/// # Examples
///
/// See the [crate's documentation](crate).
pub struct Server {
    parts: Arc<ServerParts>,
    /// Dropped before the next server may listen: no client hits by then.
    serving: ServingScope,
    listener: OwnedFd,
    /// `None`: the socket is a service manager's.
    file: Option<SocketFile>,
}

/// A view of a running server.
#[derive(Clone)]
pub struct ServerHandle {
    parts: Arc<ServerParts>,
}

impl ServerHandle {
    /// The cache.
    #[must_use]
    pub fn store(&self) -> &CachedStore {
        &self.parts.store
    }

    /// Clients that are attached now.
    #[must_use]
    pub fn clients(&self) -> u64 {
        self.counts().clients()
    }

    /// Clients that were attached so far.
    #[must_use]
    pub fn attached(&self) -> u64 {
        self.counts().attached()
    }

    /// The counts, without the cache.
    ///
    /// # Examples
    ///
    /// ```
    /// fn show(counts: &millpond_serve::ServerCounts) {
    ///     println!("{} clients, {} requests", counts.clients(), counts.requests());
    /// }
    /// ```
    #[must_use]
    pub fn counts(&self) -> ServerCounts {
        ServerCounts { counters: Arc::clone(&self.parts.counters) }
    }

    /// Connections that were refused.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.counts().refused()
    }

    /// Requests of clients, of any kind.
    #[must_use]
    pub fn requests(&self) -> u64 {
        self.counts().requests()
    }
}

impl Server {
    /// Listens at `path`, which is free or has the socket of an own server that is gone. Its directory is created with mode
    /// 700 if it does not exist. `store` was built with [`shared`](millpond_objects::Builder::shared).
    ///
    /// The process does not fork without `exec` while the server lives: such a child keeps the lock of the path until it ends.
    ///
    /// # Errors
    ///
    /// `Unsupported`: the store is not shared. `AlreadyExists`: a server listens there, or the path is another file.
    /// `PermissionDenied`: the directory or the socket belongs to another user, or others may write to the directory.
    /// `InvalidInput`: the path is too long for a socket.
    pub fn bind(store: CachedStore, path: impl AsRef<Path>) -> io::Result<Server> {
        let (listener, file) = socket::listen(path.as_ref())?;
        Self::new(store, None, listener, Some(file))
    }

    /// The same with several stores: `cache` is a cache of the set. Each client names one of them, and others are refused.
    ///
    /// # Errors
    ///
    /// As [`Server::bind`].
    pub fn bind_stores(
        cache: CachedStore,
        stores: &StoreSet,
        path: impl AsRef<Path>,
    ) -> io::Result<Server> {
        let (listener, file) = socket::listen(path.as_ref())?;
        Self::new(cache, Some(stores.clone()), listener, Some(file))
    }

    /// The same on a socket that a service manager has passed to this process. The socket stays when the server ends.
    ///
    /// # Errors
    ///
    /// `Unsupported`: the cache is not shared.
    #[cfg(feature = "systemd")]
    pub fn on_inherited(
        cache: CachedStore,
        stores: &StoreSet,
        socket: InheritedSocket,
    ) -> io::Result<Server> {
        Self::new(cache, Some(stores.clone()), socket.into_descriptor(), None)
    }

    fn new(
        store: CachedStore,
        stores: Option<StoreSet>,
        listener: OwnedFd,
        file: Option<SocketFile>,
    ) -> io::Result<Server> {
        let Some(serving) = store.begin_serving() else {
            let what = "the cache of the store is not in shared memory";
            return Err(io::Error::new(io::ErrorKind::Unsupported, what));
        };
        let places = Arc::new(Semaphore::new(CLIENTS_MAX));
        let parts = ServerParts { store, stores, counters: Arc::default(), places };
        Ok(Server { parts: Arc::new(parts), serving, listener, file })
    }

    /// A view that stays when the server runs.
    #[must_use]
    pub fn handle(&self) -> ServerHandle {
        ServerHandle { parts: Arc::clone(&self.parts) }
    }

    /// Serves clients, in a tokio runtime with timers, until the future is dropped. Then the clients are detached, and the
    /// socket is removed, unless it is inherited.
    ///
    /// # Errors
    ///
    /// The runtime can't watch the socket.
    pub async fn run(self) -> io::Result<()> {
        let Server { parts, file: _file, listener, serving } = self;
        let mut spare = SpareDescriptor::new(&listener)?;
        let listener = socket::watch(listener, Interest::READABLE)?;
        let mut clients = JoinSet::new();
        // Dropped first: before a client can notice the end.
        let scope = serving;
        loop {
            while clients.try_join_next().is_some() {}
            let accepted = {
                let mut ready = listener.readable().await?;
                let accepted = spare.accept(listener.get_ref());
                if accepted.as_ref().is_err_and(|error| *error == rustix::io::Errno::AGAIN) {
                    ready.clear_ready_matching(Ready::READABLE);
                    continue;
                }
                accepted
            };
            match accepted {
                Ok(Accepted::Client(socket)) => {
                    let guard = scope.guard();
                    clients.spawn(greet::serve_client(Arc::clone(&parts), socket, guard));
                }
                Ok(Accepted::OneTooMany(socket)) => {
                    parts.refuse(&socket, &descriptors::refusal());
                    drop(socket);
                    spare.restore(listener.get_ref());
                }
                Err(error) => {
                    tracing::warn!(%error, "a client can't be accepted");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }
}
