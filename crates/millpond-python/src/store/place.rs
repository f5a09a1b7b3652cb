//! Opens the store of a URL: `file://`, `memory://`, and with the feature `s3` `s3://` and `http(s)://`.

use std::collections::HashMap;
use std::sync::Arc;

use arc_swap::ArcSwapOption;
use millpond_objects::LocalFiles;
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{Error, ObjectStore};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::process;
use crate::store::failure;
#[cfg(not(feature = "s3"))]
use crate::store::failure::StoreError;

/// An open store.
pub(crate) struct Place {
    pub(crate) store: Arc<dyn ObjectStore>,
    /// The name by which a server and a disk tier know the store.
    pub(crate) name: String,
    /// The prefix of the URL, below which all names are.
    pub(crate) prefix: Path,
    pub(crate) is_read_only: bool,
    #[cfg(feature = "endpoint")]
    pub(crate) keeps_metadata: bool,
    /// Its lists, page by page.
    #[cfg(feature = "endpoint")]
    pub(crate) lists: Option<Arc<dyn object_store::list::PaginatedListStore>>,
}

impl Place {
    fn new(store: Arc<dyn ObjectStore>) -> Place {
        Place {
            name: store.to_string(),
            store,
            prefix: Path::default(),
            is_read_only: false,
            #[cfg(feature = "endpoint")]
            keeps_metadata: true,
            #[cfg(feature = "endpoint")]
            lists: None,
        }
    }
}

/// Why a store can't be opened.
pub(crate) enum PlaceError {
    /// The URL or an option can't be used.
    Invalid(String),
    /// A part that this build lacks, and the URL.
    #[cfg(not(feature = "s3"))]
    Unsupported(&'static str, String),
    /// The error of the store at the URL.
    Store(Error, String),
}

pub(crate) type Result<T> = std::result::Result<T, PlaceError>;

impl From<PlaceError> for PyErr {
    fn from(error: PlaceError) -> PyErr {
        match error {
            PlaceError::Invalid(text) => PyValueError::new_err(text),
            #[cfg(not(feature = "s3"))]
            PlaceError::Unsupported(what, url) => StoreError::new_err((libc::ENOTSUP, what, url)),
            PlaceError::Store(error, url) => failure::of_store(&error, &url),
        }
    }
}

/// For a store that is opened again in a child of fork.
impl From<PlaceError> for Error {
    fn from(error: PlaceError) -> Error {
        match error {
            PlaceError::Invalid(text) => Error::Generic { store: "millpond", source: text.into() },
            #[cfg(not(feature = "s3"))]
            PlaceError::Unsupported(what, _) => Error::NotSupported { source: what.into() },
            PlaceError::Store(error, _) => error,
        }
    }
}

/// Opens the store at `url`. May wait for a disk, and runs detached from the interpreter.
pub(crate) fn open(url: &str, options: &[(String, String)]) -> Result<Place> {
    let refuse = |what: &str| Err(PlaceError::Invalid(format!("store {url:?}: {what}")));
    let Some((scheme, rest)) = url.split_once("://") else {
        return refuse("not a URL: SCHEME://...");
    };
    if !matches!(scheme, "s3" | "http" | "https")
        && let Some((name, _)) = options.first()
    {
        return refuse(&format!("option {name:?}: only s3:// and http(s):// have options"));
    }
    match scheme {
        "file" if rest.starts_with('/') => {
            let store = LocalFileSystem::new_with_prefix(rest)
                .map_err(|error| PlaceError::Store(error, url.to_owned()))?;
            let place = Place::new(Arc::new(LocalFiles::new(store)));
            #[cfg(feature = "endpoint")]
            let place = Place { keeps_metadata: false, ..place };
            Ok(place)
        }
        "file" => refuse("no absolute path: file:///DIRECTORY"),
        "memory" if rest.trim_end_matches('/').contains('/') => {
            refuse("a store in memory has a name and no path: memory://NAME")
        }
        "memory" => Ok(Place::new(in_memory(rest.trim_end_matches('/')))),
        "s3" => remote::open_s3(url, rest, options),
        "http" | "https" => remote::open_http(url, options),
        _ => refuse("unknown scheme: use s3, http, https, file or memory"),
    }
}

/// The stores `memory://NAME` of a process.
struct MemoryStores {
    stores: HashMap<String, Arc<InMemory>>,
    generation: u64,
}

/// The store `memory://NAME` of this process. It lives as long as the process, like those of fsspec.
///
/// Called without the interpreter's lock, so a mutex could be locked at a fork.
fn in_memory(name: &str) -> Arc<dyn ObjectStore> {
    static NAMED: ArcSwapOption<MemoryStores> = ArcSwapOption::const_empty();
    loop {
        let named = NAMED.load_full();
        let own = named.as_ref().filter(|named| named.generation == process::generation());
        if let Some(store) = own.and_then(|named| named.stores.get(name)) {
            return Arc::clone(store) as Arc<dyn ObjectStore>;
        }
        let mut stores = own.map(|named| named.stores.clone()).unwrap_or_default();
        stores.insert(name.to_owned(), Arc::default());
        let more = Some(Arc::new(MemoryStores { stores, generation: process::generation() }));
        drop(NAMED.compare_and_swap(&named, more));
        if own.is_none() {
            // A thread of the parent may have locked one of its stores at the fork, so a child leaks them.
            std::mem::forget(named);
        }
    }
}

#[cfg(not(feature = "s3"))]
mod remote {
    use super::{Place, PlaceError, Result};

    pub(super) fn open_s3(url: &str, _: &str, _: &[(String, String)]) -> Result<Place> {
        let what = "this millpond was built without S3: build the wheel with `--features s3`, as released ones are";
        Err(PlaceError::Unsupported(what, url.to_owned()))
    }

    pub(super) fn open_http(url: &str, _: &[(String, String)]) -> Result<Place> {
        let what = "this millpond was built without HTTP: build the wheel with `--features s3`, as released ones are";
        Err(PlaceError::Unsupported(what, url.to_owned()))
    }
}

#[cfg(feature = "s3")]
mod remote {
    use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
    use object_store::http::HttpBuilder;
    use object_store::{ClientConfigKey, ClientOptions};

    use super::{Arc, Path, Place, PlaceError, Result};

    /// The short names of options; other names are those of `object_store`, such as `virtual_hosted_style_request`.
    const SHORT: [(&str, &str); 4] = [
        ("key", "access_key_id"),
        ("secret", "secret_access_key"),
        ("token", "session_token"),
        ("anonymous", "skip_signature"),
    ];

    /// Settings that are not among the options are those of the environment (`AWS_ACCESS_KEY_ID` and so on).
    pub(super) fn open_s3(url: &str, rest: &str, options: &[(String, String)]) -> Result<Place> {
        let refuse = |what: String| PlaceError::Invalid(format!("store {url:?}: {what}"));
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        if bucket.is_empty() {
            return Err(refuse("no bucket: s3://BUCKET/PREFIX".into()));
        }
        let prefix = Path::parse(prefix).map_err(|error| refuse(error.to_string()))?;
        let mut builder = AmazonS3Builder::from_env().with_bucket_name(bucket);
        for (name, value) in options {
            let short = SHORT.iter().find(|(short, _)| short == name);
            let key: AmazonS3ConfigKey = short
                .map_or(name.as_str(), |(_, long)| long)
                .parse()
                .map_err(|_| refuse(format!("unknown option {name:?}")))?;
            builder = builder.with_config(key, value);
        }
        let value = |key: &str| {
            let key = key.parse().expect("a key of this list");
            builder.get_config_value(&key).unwrap_or_default()
        };
        let (endpoint, allow_http) = (value("endpoint"), value("allow_http"));
        if endpoint.starts_with("http://") && !matches!(allow_http.as_str(), "true" | "1") {
            let what =
                "needs the option allow_http=True, or AWS_ALLOW_HTTP=true in the environment";
            return Err(refuse(format!("endpoint {endpoint:?} {what}")));
        }
        let store = builder.build().map_err(|error| PlaceError::Store(error, url.to_owned()))?;
        let store = Arc::new(store);
        Ok(Place {
            name: millpond_serve::store_name(&*store, Some(&endpoint)),
            prefix,
            #[cfg(feature = "endpoint")]
            lists: Some(Arc::clone(&store) as Arc<_>),
            ..Place::new(store)
        })
    }

    /// Files of a web server. Its options are those of HTTP, such as `timeout`.
    pub(super) fn open_http(url: &str, options: &[(String, String)]) -> Result<Place> {
        let mut client = ClientOptions::new().with_allow_http(url.starts_with("http://"));
        for (name, value) in options {
            let key: ClientConfigKey = name.parse().map_err(|_| {
                PlaceError::Invalid(format!("store {url:?}: unknown option {name:?}"))
            })?;
            client = client.with_config(key, value);
        }
        let builder = HttpBuilder::new().with_url(url).with_client_options(client);
        let store = builder.build().map_err(|error| PlaceError::Store(error, url.to_owned()))?;
        Ok(Place { is_read_only: true, ..Place::new(Arc::new(store)) })
    }
}
