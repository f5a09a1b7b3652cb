//! The stores of a server: each is opened from its URL.

use std::sync::Arc;

use millpond_objects::LocalFiles;
use millpond_serve::{StoreSet, store_name};
use object_store::ObjectStore;
use object_store::list::PaginatedListStore;
use object_store::local::LocalFileSystem;
use object_store::path::Path;

use crate::failure::{Failure, REFUSED, Result};

/// A store, or some prefixes of it.
pub struct OpenedStore {
    pub url: String,
    pub store: Arc<dyn ObjectStore>,
    /// The name by which clients know it.
    name: String,
    /// The bucket of the endpoint.
    pub bucket: String,
    is_named: bool,
    /// Empty: all of the store.
    prefixes: Vec<Path>,
    lists: Option<Arc<dyn PaginatedListStore>>,
    pub keeps_metadata: bool,
}

fn refused(what: impl Into<String>) -> Failure {
    Failure::new(REFUSED, what)
}

/// Opens stores at URLs, with or without a bucket's name before: `NAME=URL`. Prefixes of one bucket are one store.
pub fn open_all(arguments: &[String]) -> Result<Vec<OpenedStore>> {
    let mut all: Vec<OpenedStore> = Vec::new();
    for argument in arguments {
        let opened = OpenedStore::open(argument)?;
        match all.iter_mut().find(|earlier| earlier.name == opened.name) {
            Some(earlier) => earlier.join(opened)?,
            None => all.push(opened),
        }
    }
    Ok(all)
}

/// The stores behind one cache.
pub fn set_of(all: &[OpenedStore]) -> Result<StoreSet> {
    let mut set = StoreSet::default();
    for opened in all {
        set = set
            .with_named(
                opened.name.clone(),
                Arc::clone(&opened.store),
                opened.prefixes.iter().cloned(),
            )
            .map_err(|error| refused(format!("--store {:?}: {error}", opened.url)))?;
    }
    Ok(set)
}

impl OpenedStore {
    fn open(argument: &str) -> Result<OpenedStore> {
        let (name, url) = match argument.split_once('=') {
            Some((name, url)) if !name.contains([':', '/']) => (Some(name), url),
            _ => (None, argument),
        };
        let mut opened = Self::open_url(url)?;
        if let Some(name) = name {
            opened.bucket = name.to_owned();
            opened.is_named = true;
        }
        Ok(opened)
    }

    fn open_url(url: &str) -> Result<OpenedStore> {
        let Some((scheme, rest)) = url.split_once("://") else {
            return Err(refused(format!("--store {url:?} is not a URL: SCHEME://...")));
        };
        let opened = |store: Arc<dyn ObjectStore>, bucket: String, keeps_metadata| OpenedStore {
            url: url.to_owned(),
            name: store.to_string(),
            store,
            bucket,
            is_named: false,
            prefixes: Vec::new(),
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
                let store = Arc::new(LocalFiles::new(store.with_automatic_cleanup(true)));
                Ok(opened(store, bucket_of_directory(rest), false))
            }
            "file" => Err(refused(format!("--store {url:?} has no absolute path: file:///DIR"))),
            "s3" => {
                let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
                if bucket.is_empty() {
                    let what = format!("--store {url:?} has no bucket: s3://BUCKET[/PREFIX]");
                    return Err(refused(what));
                }
                let prefix = Path::parse(prefix)
                    .map_err(|error| refused(format!("--store {url:?}: {error}")))?;
                let (store, lists, endpoint) = open_s3(url, bucket)?;
                let mut opened = opened(store, bucket.to_owned(), true);
                opened.lists = Some(lists);
                opened.name = store_name(&*opened.store, endpoint.as_deref());
                opened.prefixes.extend((!prefix.as_ref().is_empty()).then_some(prefix));
                Ok(opened)
            }
            _ => {
                Err(refused(format!("--store: unknown scheme {scheme:?}: use s3, file or memory")))
            }
        }
    }

    /// Adds the prefix of another URL of the same store.
    fn join(&mut self, other: OpenedStore) -> Result<()> {
        let (url, earlier) = (&other.url, &self.url);
        if self.prefixes.is_empty() || other.prefixes.is_empty() {
            return Err(refused(format!(
                "--store {url:?}: --store {earlier:?} has its objects already"
            )));
        }
        if other.is_named && other.bucket != self.bucket {
            let (name, bucket) = (&other.bucket, &self.bucket);
            let what = "prefixes of one bucket have one name";
            return Err(refused(format!(
                "--store {url:?}: the names {bucket:?} and {name:?}: {what}"
            )));
        }
        self.url = format!("{earlier} {url}");
        self.prefixes.extend(other.prefixes);
        Ok(())
    }

    /// The lists of the store, page by page. None: they are made from whole lists, which prefixes limit.
    pub fn paginated_lists(&self) -> Option<Arc<dyn PaginatedListStore>> {
        self.lists.clone().filter(|_| self.prefixes.is_empty())
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

/// A store, its lists page by page, and its URL if it is not S3 itself.
type StoreWithLists = (Arc<dyn ObjectStore>, Arc<dyn PaginatedListStore>, Option<String>);

#[cfg(not(feature = "s3"))]
fn open_s3(_: &str, _: &str) -> Result<StoreWithLists> {
    Err(refused("this program was built without S3: build it with `--features s3`"))
}

#[cfg(feature = "s3")]
fn open_s3(url: &str, bucket: &str) -> Result<StoreWithLists> {
    use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};

    let builder = AmazonS3Builder::from_env().with_bucket_name(bucket);
    let endpoint = builder.get_config_value(&AmazonS3ConfigKey::Endpoint);
    let store = builder.build().map_err(|error| refused(format!("--store {url}: {error}")))?;
    let store = Arc::new(store);
    Ok((Arc::clone(&store) as _, store, endpoint))
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
