//! The stores of a server: each is opened from its URL.

use std::sync::Arc;

use object_store::ObjectStore;
use object_store::list::PaginatedListStore;
use object_store::local::LocalFileSystem;

use crate::failure::{Failure, REFUSED, Result};

/// A store at a URL.
pub struct OpenedStore {
    pub url: String,
    pub store: Arc<dyn ObjectStore>,
    /// The bucket of the endpoint.
    pub bucket: String,
    /// The lists of the store, page by page.
    pub lists: Option<Arc<dyn PaginatedListStore>>,
    pub keeps_metadata: bool,
}

fn refused(what: impl Into<String>) -> Failure {
    Failure::new(REFUSED, what)
}

impl OpenedStore {
    pub fn open(url: &str) -> Result<OpenedStore> {
        let Some((scheme, rest)) = url.split_once("://") else {
            return Err(refused(format!("--store {url:?} is not a URL: SCHEME://...")));
        };
        let opened = |store, bucket: String, keeps_metadata| OpenedStore {
            url: url.to_owned(),
            store,
            bucket,
            lists: None,
            keeps_metadata,
        };
        match scheme {
            "memory" if rest.trim_matches('/').is_empty() => {
                let store = Arc::new(object_store::memory::InMemory::new());
                Ok(opened(store, "memory".into(), true))
            }
            "memory" => Err(refused(format!("--store {url:?}: a store in memory has no path"))),
            "file" if rest.starts_with('/') => {
                let store = LocalFileSystem::new_with_prefix(rest)
                    .map_err(|error| refused(format!("--store {url:?}: {error}")))?;
                // A folder ends with its last object, as in other stores.
                let store = Arc::new(store.with_automatic_cleanup(true));
                Ok(opened(store, bucket_of_directory(rest), false))
            }
            "file" => Err(refused(format!("--store {url:?} has no absolute path: file:///DIR"))),
            "s3" => {
                let bucket = rest.trim_end_matches('/');
                if bucket.is_empty() || bucket.contains('/') {
                    let what = format!("--store {url:?}: the whole bucket is served: s3://BUCKET");
                    return Err(refused(what));
                }
                open_s3(url, bucket)
            }
            _ => {
                Err(refused(format!("--store: unknown scheme {scheme:?}: use s3, file or memory")))
            }
        }
    }
}

/// The last name of a path, in the characters of a bucket's name.
fn bucket_of_directory(path: &str) -> String {
    let last = path.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
    let character = |character: char| match character.to_ascii_lowercase() {
        allowed @ ('a'..='z' | '0'..='9') => allowed,
        _ => '-',
    };
    let name: String = last.chars().map(character).take(BUCKET_LENGTH_MAX).collect();
    let name = name.trim_matches('-');
    if name.len() < BUCKET_LENGTH_MIN { "files".into() } else { name.into() }
}

/// The lengths of S3's bucket names.
const BUCKET_LENGTH_MIN: usize = 3;
const BUCKET_LENGTH_MAX: usize = 63;

#[cfg(not(feature = "s3"))]
fn open_s3(_: &str, _: &str) -> Result<OpenedStore> {
    Err(refused("this program was built without S3: build it with `--features s3`"))
}

#[cfg(feature = "s3")]
fn open_s3(url: &str, bucket: &str) -> Result<OpenedStore> {
    let store = object_store::aws::AmazonS3Builder::from_env().with_bucket_name(bucket).build();
    let store = Arc::new(store.map_err(|error| refused(format!("--store {url}: {error}")))?);
    Ok(OpenedStore {
        url: url.to_owned(),
        bucket: bucket.to_owned(),
        lists: Some(Arc::clone(&store) as Arc<dyn PaginatedListStore>),
        store,
        keeps_metadata: true,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_have_names_of_buckets() {
        for (path, bucket) in [
            ("/srv/Lake_2/", "lake-2"),
            ("/srv/.cache", "cache"),
            ("/", "files"),
            ("/a", "files"),
            ("/données", "donn-es"),
        ] {
            assert_eq!(bucket_of_directory(path), bucket, "{path}");
        }
        assert_eq!(bucket_of_directory(&format!("/{}", "x".repeat(100))).len(), 63);
    }
}
