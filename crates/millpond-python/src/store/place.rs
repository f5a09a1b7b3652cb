//! Opens the store of a URL: `file://`, `memory://`, and with the feature `s3` `s3://`.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use object_store::ObjectStore;
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use object_store::path::Path;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::process::{self, lock};
use crate::store::failure;

/// A store, and the prefix of the URL below which all names are.
pub(crate) type Place = (Arc<dyn ObjectStore>, Path);

/// Opens the store at `url`. May wait for a disk, and runs detached from the interpreter.
pub(crate) fn open(url: &str, options: &[(String, String)]) -> PyResult<Place> {
    let refuse = |what: &str| Err(PyValueError::new_err(format!("store {url:?}: {what}")));
    let Some((scheme, rest)) = url.split_once("://") else {
        return refuse("not a URL: SCHEME://...");
    };
    if scheme != "s3"
        && let Some((name, _)) = options.first()
    {
        return refuse(&format!("option {name:?}: only s3:// has options"));
    }
    match scheme {
        "file" if rest.starts_with('/') => {
            let store = LocalFileSystem::new_with_prefix(rest)
                .map_err(|error| failure::of_store(&error, url))?;
            Ok((Arc::new(store), Path::default()))
        }
        "file" => refuse("no absolute path: file:///DIRECTORY"),
        "memory" if rest.trim_end_matches('/').contains('/') => {
            refuse("a store in memory has a name and no path: memory://NAME")
        }
        "memory" => Ok((in_memory(rest.trim_end_matches('/')), Path::default())),
        "s3" => s3::open(url, rest, options),
        _ => refuse("unknown scheme: use s3, file or memory"),
    }
}

/// The store `memory://NAME` of this process. It lives as long as the process, like those of fsspec.
fn in_memory(name: &str) -> Arc<dyn ObjectStore> {
    type Named = HashMap<String, Arc<InMemory>>;
    static NAMED: Mutex<Option<(Named, u64)>> = Mutex::new(None);
    let mut slot = lock(&NAMED);
    if slot.as_ref().is_none_or(|(_, generation)| *generation != process::generation()) {
        // A thread of the parent may have locked one of its stores at the fork, so a child leaks them.
        std::mem::forget(slot.replace((Named::new(), process::generation())));
    }
    let (named, _) = slot.as_mut().expect("just put in place");
    Arc::clone(named.entry(name.to_owned()).or_default()) as Arc<dyn ObjectStore>
}

#[cfg(not(feature = "s3"))]
mod s3 {
    use super::{Place, PyResult};
    use crate::store::failure::StoreError;

    pub(super) fn open(url: &str, _: &str, _: &[(String, String)]) -> PyResult<Place> {
        let what = "this millpond was built without S3: build the wheel with `--features s3`, as released ones are";
        Err(StoreError::new_err((libc::ENOTSUP, what, url.to_owned())))
    }
}

#[cfg(feature = "s3")]
mod s3 {
    use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};

    use super::{Arc, Path, Place, PyResult, PyValueError, failure};

    /// The short names of options; other names are those of `object_store`, such as `virtual_hosted_style_request`.
    const SHORT: [(&str, &str); 4] = [
        ("key", "access_key_id"),
        ("secret", "secret_access_key"),
        ("token", "session_token"),
        ("anonymous", "skip_signature"),
    ];

    /// Settings that are not among the options are those of the environment (`AWS_ACCESS_KEY_ID` and so on).
    pub(super) fn open(url: &str, rest: &str, options: &[(String, String)]) -> PyResult<Place> {
        let refuse = |what: String| PyValueError::new_err(format!("store {url:?}: {what}"));
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
        let store = builder.build().map_err(|error| failure::of_store(&error, url))?;
        Ok((Arc::new(store), prefix))
    }
}
