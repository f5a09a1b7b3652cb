//! What an endpoint serves and where it listens.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use object_store::ObjectStore;
use object_store::list::PaginatedListStore;
use s3s::auth::{S3Auth, SecretKey};
use s3s::config::{S3Config, StaticConfigProvider};
use s3s::service::S3ServiceBuilder;
use s3s::validation::{AwsNameValidation, NameValidation};
use s3s::{S3Result, s3_error};

use crate::bucket::Bucket;
use crate::counts::RequestCounts;
use crate::filter::SignedOnly;
use crate::gateway::Gateway;
use crate::key::AccessKey;
use crate::listeners::{self, UnixSocket};
use crate::memory::UploadMemory;
use crate::serve::Server;
use crate::uploads::Uploads;
use crate::{Endpoint, Error, Limits, key};

/// 1,000 keys of 1,024 bytes with their XML, or 10,000 parts with their checksums.
const XML_BYTES_MAX: usize = 4 << 20;

/// The configuration of an endpoint; see [`Endpoint::builder`].
///
/// # Examples
///
/// ```
/// use std::sync::Arc;
///
/// use millpond_endpoint::{Endpoint, Limits};
/// use object_store::ObjectStore;
/// use object_store::list::PaginatedListStore;
/// use object_store::local::LocalFileSystem;
///
/// /// Serves a cached store, a client of the same store for its lists, and local files.
/// fn configured(
///     cached: Arc<dyn ObjectStore>,
///     client: Arc<dyn PaginatedListStore>,
/// ) -> Result<Endpoint, Box<dyn std::error::Error>> {
///     let local = LocalFileSystem::new_with_prefix("/srv/data")?;
///     Ok(Endpoint::builder()
///         .store("cloud", cached)
///         .lists(client)
///         .store("local", Arc::new(local))
///         .drop_metadata()
///         .listen("127.0.0.1:9000".parse()?)
///         .unix("/run/user/1000/millpond/s3.sock")
///         .key_file("/home/user/.millpond/credentials")
///         .spool("/var/cache/uploads")
///         .limits(Limits { connections: 64, ..Limits::default() })
///         .build()?)
/// }
/// ```
#[derive(Debug, Default)]
pub struct Builder {
    buckets: Vec<(String, Bucket)>,
    tcp: Option<SocketAddr>,
    unix: Option<PathBuf>,
    key_file: Option<PathBuf>,
    spool: Option<PathBuf>,
    limits: Limits,
}

impl Builder {
    /// Serves `store` as the bucket `name`. Reads and writes go through it, so a cached store caches them.
    #[must_use]
    pub fn store(mut self, name: impl Into<String>, store: Arc<dyn ObjectStore>) -> Self {
        self.buckets.push((name.into(), Bucket::new(store)));
        self
    }

    /// Lists the last bucket through `lists`, the same objects as its store's.
    ///
    /// Without this, each page of a list reads the whole list of the folder from the store, as the order of
    /// [`ObjectStore::list`] is not defined. The clients of S3, Google and Azure have this interface.
    ///
    /// # Panics
    ///
    /// Without a [`Builder::store`] before.
    #[must_use]
    pub fn lists(mut self, lists: Arc<dyn PaginatedListStore>) -> Self {
        self.buckets.last_mut().expect("`lists` belongs to a store").1.lists = Some(lists);
        self
    }

    /// Drops the content type and other metadata of objects that are written to the last bucket, if its store keeps
    /// none. Otherwise such writes fail: `object_store`'s local file system refuses metadata, and most clients send some.
    ///
    /// # Panics
    ///
    /// Without a [`Builder::store`] before.
    #[must_use]
    pub fn drop_metadata(mut self) -> Self {
        self.buckets.last_mut().expect("`drop_metadata` belongs to a store").1.drops_metadata =
            true;
        self
    }

    /// Listens on a loopback address; port 0 chooses a free port.
    #[must_use]
    pub fn listen(mut self, address: SocketAddr) -> Self {
        self.tcp = Some(address);
        self
    }

    /// Listens on a Unix socket of mode 0600. A socket that no process listens on any more is replaced.
    #[must_use]
    pub fn unix(mut self, path: impl Into<PathBuf>) -> Self {
        self.unix = Some(path.into());
        self
    }

    /// The file of the access key, by default `$XDG_RUNTIME_DIR/millpond/credentials`, or for root without that variable
    /// `/run/millpond/credentials`. If it does not exist, a key is generated, and the directory created with mode 0700.
    #[must_use]
    pub fn key_file(mut self, path: impl Into<PathBuf>) -> Self {
        self.key_file = Some(path.into());
        self
    }

    /// The directory for the parts of multipart uploads, by default `/var/tmp`. The files have no names, so nothing is
    /// left behind.
    #[must_use]
    pub fn spool(mut self, dir: impl Into<PathBuf>) -> Self {
        self.spool = Some(dir.into());
        self
    }

    /// Replaces the default limits.
    #[must_use]
    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// Checks the addresses, the names of the buckets, and the file of the access key if it exists. Creates and binds nothing.
    ///
    /// # Errors
    ///
    /// Those of [`Builder::build`], but for listeners.
    ///
    /// # Examples
    ///
    /// ```
    /// use millpond_endpoint::{Endpoint, Error};
    ///
    /// let store = std::sync::Arc::new(object_store::memory::InMemory::new());
    /// let builder = Endpoint::builder().store("Lake", store).listen("127.0.0.1:9000".parse().unwrap());
    /// assert!(matches!(builder.check(), Err(Error::BucketName { .. })));
    /// ```
    pub fn check(self) -> Result<(), Error> {
        let Self { buckets, tcp, unix, key_file, .. } = self;
        if tcp.is_none() && unix.is_none() {
            return Err(Error::NoListener);
        }
        by_name(buckets)?;
        tcp.map(listeners::check_loopback).transpose()?;
        let key_path = key_file.map_or_else(key::default_path, Ok)?;
        if key_path.symlink_metadata().is_ok() {
            AccessKey::open(&key_path)?;
        }
        Ok(())
    }

    /// Reads or generates the access key, and binds the listeners. Blocks for a moment.
    ///
    /// # Errors
    ///
    /// Each variant of [`Error`]: an address that is not loopback, a key file that others can read, and so on.
    pub fn build(self) -> Result<Endpoint, Error> {
        let Self { buckets, tcp, unix, key_file, spool, limits } = self;
        if tcp.is_none() && unix.is_none() {
            return Err(Error::NoListener);
        }
        let buckets = by_name(buckets)?;
        let tcp = match tcp {
            None => None,
            Some(address) => {
                let listener = listeners::tcp(address)?;
                let failed = |source| Error::Listen { on: address.to_string(), source };
                let bound = listener.local_addr().map_err(failed)?;
                Some((listener, bound))
            }
        };
        let key_path = key_file.map_or_else(key::default_path, Ok)?;
        let key = AccessKey::open(&key_path)?;
        let spool = spool.unwrap_or_else(|| PathBuf::from("/var/tmp"));
        let uploads = Arc::new(Uploads::new(&spool, &limits)?);
        let unix = unix.map(|path| UnixSocket::bind(&path)).transpose()?;
        let gateway = Gateway {
            buckets,
            uploads: Arc::clone(&uploads),
            memory: Arc::new(UploadMemory::new(&limits)),
            limits: limits.clone(),
        };
        let mut service = S3ServiceBuilder::new(gateway);
        service.set_auth(OneKey(key.clone()));
        service.set_access(SignedOnly);
        let mut config = S3Config::default();
        config.xml_max_body_size = XML_BYTES_MAX;
        // Forms are refused before; a second line of defence.
        config.post_object_max_file_size = 0;
        config.form_max_fields_size = 0;
        service.set_config(Arc::new(StaticConfigProvider::new(Arc::new(config))));
        let service = service.build();
        let counts = RequestCounts::default();
        let server = Server { service, uploads, limits, counts, tcp, unix };
        Ok(Endpoint { server, key_path, key })
    }
}

fn by_name(buckets: Vec<(String, Bucket)>) -> Result<BTreeMap<String, Arc<Bucket>>, Error> {
    let mut named = BTreeMap::new();
    for (name, bucket) in buckets {
        if !AwsNameValidation::new().validate_bucket_name(&name) {
            let reason = "a name has 3 to 63 lower-case letters, digits, dots and hyphens";
            return Err(Error::BucketName { name, reason });
        }
        if named.insert(name.clone(), Arc::new(bucket)).is_some() {
            return Err(Error::BucketName { name, reason: "the name is given twice" });
        }
    }
    Ok(named)
}

/// Knows one key. `s3s` compares signatures in constant time.
struct OneKey(AccessKey);

#[async_trait::async_trait]
impl S3Auth for OneKey {
    async fn get_secret_key(&self, id: &str) -> S3Result<SecretKey> {
        if id == self.0.id {
            Ok(self.0.secret.clone())
        } else {
            Err(s3_error!(
                InvalidAccessKeyId,
                "the access key is not this endpoint's: see its key file"
            ))
        }
    }
}

impl Endpoint {
    /// Starts the configuration of an endpoint.
    #[must_use]
    pub fn builder() -> Builder {
        Builder::default()
    }
}
