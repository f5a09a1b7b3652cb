//! A configured endpoint.

use std::future::Future;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use crate::Error;
use crate::counts::RequestCounts;
use crate::key::AccessKey;
use crate::serve::Server;

/// An S3-compatible server on loopback or on a Unix socket; its listeners are bound.
///
/// # Examples
///
/// ```
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// use std::sync::Arc;
///
/// use millpond_endpoint::Endpoint;
/// use object_store::memory::InMemory;
///
/// # let dir = tempfile::tempdir().unwrap();
/// let endpoint = Endpoint::builder()
///     .store("data", Arc::new(InMemory::new()))
///     .listen("127.0.0.1:0".parse().unwrap())
///     .key_file(dir.path().join("key/credentials"))
///     .build()
///     .unwrap();
/// let address = endpoint.address().unwrap();
/// println!("the key {} is in {}", endpoint.access_key_id(), endpoint.key_path().display());
/// assert!(endpoint.secret_access_key().len() > 20);
/// let endpoint_counts = endpoint.counts();
/// let (end, ended) = tokio::sync::oneshot::channel::<()>();
/// let serving = tokio::spawn(endpoint.serve(async move { drop(ended.await) }));
/// println!("serving on http://{address}");
/// assert_eq!(endpoint_counts.all().map(|(_, _, count)| count).sum::<u64>(), 0);
/// drop(end);
/// serving.await.unwrap().unwrap();
/// # });
/// ```
#[derive(Debug)]
pub struct Endpoint {
    pub(crate) server: Server,
    pub(crate) key_path: PathBuf,
    pub(crate) key: AccessKey,
}

impl Endpoint {
    /// The address that the endpoint listens on, with its port.
    #[must_use]
    pub fn address(&self) -> Option<SocketAddr> {
        self.server.tcp.as_ref().map(|(_, address)| *address)
    }

    /// The file of the access key: an AWS credentials file.
    #[must_use]
    pub fn key_path(&self) -> &Path {
        &self.key_path
    }

    /// The ID of the access key, which is no secret.
    #[must_use]
    pub fn access_key_id(&self) -> &str {
        &self.key.id
    }

    /// The secret of the access key, as in the [key file](Self::key_path). It belongs neither into logs nor into command lines.
    #[must_use]
    pub fn secret_access_key(&self) -> &str {
        self.key.secret.expose()
    }

    /// Counts of its requests, for as long as they are of interest.
    #[must_use]
    pub fn counts(&self) -> RequestCounts {
        self.server.counts.clone()
    }

    /// Serves requests until `shutdown` is ready. Requests in progress then get [`Limits::shutdown_grace`](crate::Limits::shutdown_grace).
    ///
    /// Runs in a tokio runtime with timers and I/O; the stores are called in its tasks.
    ///
    /// # Errors
    ///
    /// [`Error::Listen`] if the runtime does not take a listener. Errors of connections concern their clients alone.
    pub async fn serve(self, shutdown: impl Future<Output = ()>) -> Result<(), Error> {
        self.server.run(shutdown).await
    }
}
