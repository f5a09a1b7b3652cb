//! The S3 endpoint of a server: its settings, and its end.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use crate::failure::{Failure, REFUSED, Result};

/// Where the endpoint listens, and its key.
#[derive(Debug)]
pub struct EndpointSettings {
    pub address: Option<SocketAddr>,
    pub socket: Option<PathBuf>,
    pub key_file: PathBuf,
}

/// An address, or a port of 127.0.0.1. The endpoint itself refuses addresses that are not loopback.
pub fn parse_address(text: &str) -> std::result::Result<SocketAddr, String> {
    let port = || Some(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), text.parse().ok()?));
    let address: Option<SocketAddr> = text.parse().ok().or_else(port);
    let address =
        address.ok_or("neither IP:PORT, such as 127.0.0.1:9000, nor the port of 127.0.0.1")?;
    if address.ip().to_canonical().is_loopback() {
        Ok(address)
    } else {
        Err(format!(
            "{} is no loopback address: the endpoint serves this machine only",
            address.ip()
        ))
    }
}

impl EndpointSettings {
    /// None: the server has no endpoint. `directory`: that of the server's socket.
    pub fn new(
        (address, socket): (Option<SocketAddr>, Option<&Path>),
        key_file: Option<&Path>,
        directory: &Path,
    ) -> Result<Option<EndpointSettings>> {
        if address.is_none() && socket.is_none() {
            if key_file.is_some() {
                let what = "--key-file is of an endpoint: give --endpoint or --endpoint-socket";
                return Err(Failure::new(REFUSED, what));
            }
            return Ok(None);
        }
        if cfg!(not(feature = "endpoint")) {
            let what =
                "this program was built without the endpoint: build it with `--features endpoint`";
            return Err(Failure::new(REFUSED, what));
        }
        let key_file = key_file.map_or_else(|| directory.join("credentials"), Path::to_owned);
        let socket = socket.map(Path::to_owned);
        Ok(Some(EndpointSettings { address, socket, key_file }))
    }
}

#[cfg(feature = "endpoint")]
pub use running::RunningEndpoint;

/// A program that was built without the endpoint has none: its settings are refused.
#[cfg(not(feature = "endpoint"))]
pub enum RunningEndpoint {}

#[cfg(not(feature = "endpoint"))]
impl RunningEndpoint {
    pub fn start(
        _: &EndpointSettings,
        _: &crate::serve::stores::OpenedStore,
        _: &millpond_objects::CachedStore,
        _: &Path,
    ) -> Result<RunningEndpoint> {
        unreachable!("the settings were refused")
    }

    pub async fn failed(&mut self) -> std::io::Error {
        match *self {}
    }

    pub async fn end(self) {
        match self {}
    }
}

#[cfg(feature = "endpoint")]
mod running {
    use std::io;
    use std::path::Path;
    use std::sync::Arc;

    use millpond_endpoint::Endpoint;
    use millpond_objects::CachedStore;
    use tokio::sync::oneshot;
    use tokio::task::JoinHandle;

    use super::EndpointSettings;
    use crate::failure::{Context, FAILED, Failure, REFUSED, Result};
    use crate::serve::endpoint_file::{Description, EndpointFile};
    use crate::serve::stores::OpenedStore;

    /// An endpoint that serves, and the file by which programs find it.
    pub struct RunningEndpoint {
        serving: JoinHandle<std::result::Result<(), millpond_endpoint::Error>>,
        end: oneshot::Sender<()>,
        _file: EndpointFile,
    }

    impl RunningEndpoint {
        /// Binds the listeners, and serves in the background. The caller listens at `server_socket`.
        pub fn start(
            settings: &EndpointSettings,
            store: &OpenedStore,
            cache: &CachedStore,
            server_socket: &Path,
        ) -> Result<RunningEndpoint> {
            let mut builder = Endpoint::builder()
                .key_file(&settings.key_file)
                .store(&store.bucket, Arc::new(cache.clone()));
            if let Some(lists) = &store.lists {
                builder = builder.lists(Arc::clone(lists));
            }
            if !store.keeps_metadata {
                builder = builder.drop_metadata();
            }
            if let Some(address) = settings.address {
                builder = builder.listen(address);
            }
            if let Some(socket) = &settings.socket {
                builder = builder.unix(socket);
            }
            let endpoint = builder.build().map_err(|error| {
                use millpond_endpoint::Error;
                let status = match error {
                    Error::Listen { .. } => FAILED,
                    _ => REFUSED,
                };
                Failure::new(status, format!("the endpoint: {error}"))
            })?;
            let url = endpoint.address().map(|address| format!("http://{address}"));
            let key = (endpoint.access_key_id(), endpoint.secret_access_key());
            let socket = settings.socket.as_deref().map(std::path::absolute).transpose();
            let mut description = Description::new(url, socket.context("--endpoint-socket")?, key);
            description.add_bucket(&store.bucket, &store.url);
            let (end, ended) = oneshot::channel::<()>();
            if let Some(url) = &description.url {
                println!("endpoint:      {url}");
            }
            if let Some(socket) = &description.socket {
                println!("endpoint:      {}", socket.display());
            }
            let file = EndpointFile::write(server_socket, &description)
                .context("the description of the endpoint")?;
            let serving = tokio::spawn(endpoint.serve(async { drop(ended.await) }));
            Ok(RunningEndpoint { serving, end, _file: file })
        }

        /// Waits for the end, which is a failure.
        pub async fn failed(&mut self) -> io::Error {
            match (&mut self.serving).await {
                Ok(Ok(())) => io::Error::other("it has ended"),
                Ok(Err(error)) => io::Error::other(error),
                Err(error) => error.into(),
            }
        }

        /// Ends the endpoint. Requests in progress get some seconds.
        pub async fn end(self) {
            let Self { serving, end, _file } = self;
            drop(end);
            // It has nothing to report at its end.
            _ = serving.await;
        }
    }
}
