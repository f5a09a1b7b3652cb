//! A running endpoint, and `object_store`'s S3 client with plain HTTP and without TLS, which would take a minute to build.
//! Not every test uses all of it.
#![allow(dead_code)]

pub mod client;
pub mod signed;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use millpond_endpoint::{Builder, Endpoint};
use object_store::ObjectStore;
use object_store::aws::{AmazonS3, AmazonS3Builder, S3CopyIfNotExists};
use object_store::memory::InMemory;
use tempfile::TempDir;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

pub const BUCKET: &str = "bucket";

/// Ends with the endpoint when it is dropped.
pub struct Running {
    pub address: SocketAddr,
    pub socket: PathBuf,
    pub key: (String, String),
    pub store: Arc<dyn ObjectStore>,
    end: Option<oneshot::Sender<()>>,
    pub serving: JoinHandle<Result<(), millpond_endpoint::Error>>,
    _dir: TempDir,
}

/// The key of a credentials file.
pub fn key_of(path: &std::path::Path) -> (String, String) {
    let text = std::fs::read_to_string(path).unwrap();
    let value = |name: &str| {
        let line = text.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_once(" = ").unwrap().1.to_owned()
    };
    (value("aws_access_key_id"), value("aws_secret_access_key"))
}

impl Running {
    /// Serves an in-memory store.
    pub fn start() -> Self {
        Self::start_with(Arc::new(InMemory::new()), |builder| builder)
    }

    pub fn start_with(store: Arc<dyn ObjectStore>, set: impl FnOnce(Builder) -> Builder) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("s3.sock");
        let builder = Endpoint::builder()
            .store(BUCKET, Arc::clone(&store))
            .listen("127.0.0.1:0".parse().unwrap())
            .unix(&socket)
            .key_file(dir.path().join("key/credentials"))
            .spool(dir.path());
        let endpoint = set(builder).build().unwrap();
        let (end, ended) = oneshot::channel();
        Self {
            address: endpoint.address().unwrap(),
            socket,
            key: key_of(endpoint.key_path()),
            store,
            end: Some(end),
            serving: tokio::spawn(endpoint.serve(async move { drop(ended.await) })),
            _dir: dir,
        }
    }

    pub fn end(&mut self) {
        drop(self.end.take());
    }

    pub fn builder(&self) -> AmazonS3Builder {
        AmazonS3Builder::new()
            .with_bucket_name(BUCKET)
            .with_endpoint(format!("http://{}", self.address))
            .with_allow_http(true)
            .with_access_key_id(&self.key.0)
            .with_secret_access_key(&self.key.1)
            // By UploadPartCopy and a conditional CompleteMultipartUpload.
            .with_copy_if_not_exists(S3CopyIfNotExists::Multipart)
            .with_crypto_provider(Arc::new(client::PlainCrypto))
            .with_http_connector(client::Connector::tcp(self.address))
    }

    /// A client that connects over TCP.
    pub fn client(&self) -> AmazonS3 {
        self.builder().build().unwrap()
    }

    /// A client that connects over the Unix socket.
    pub fn local_client(&self) -> AmazonS3 {
        let connector = client::Connector::unix(self.socket.clone());
        self.builder().with_http_connector(connector).build().unwrap()
    }
}
