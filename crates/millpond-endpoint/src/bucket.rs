//! A bucket: its store, and the form of the store's ETags.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicU8;
use std::sync::atomic::Ordering::Relaxed;

use object_store::list::PaginatedListStore;
use object_store::path::Path;
use object_store::{GetOptions, ObjectStore};
use s3s::dto::{ETag, ETagCondition};

const UNKNOWN: u8 = 0;
const QUOTED: u8 = 1;
const BARE: u8 = 2;

pub(crate) struct Bucket {
    pub(crate) store: Arc<dyn ObjectStore>,
    pub(crate) lists: Option<Arc<dyn PaginatedListStore>>,
    pub(crate) drops_metadata: bool,
    /// Whether the store's ETags have quotes, as HTTP's have. Stores on disk and in memory have bare ones.
    quotes: AtomicU8,
}

impl Bucket {
    pub(crate) fn new(store: Arc<dyn ObjectStore>) -> Self {
        Self { store, lists: None, drops_metadata: false, quotes: AtomicU8::new(UNKNOWN) }
    }

    /// HTTP's form of an ETag of the store.
    pub(crate) fn e_tag(&self, of_store: Option<&str>) -> Option<ETag> {
        let of_store = of_store?;
        let weak = of_store.strip_prefix("W/");
        let opaque = weak.unwrap_or(of_store);
        let inner = opaque.strip_prefix('"').and_then(|rest| rest.strip_suffix('"'));
        // Relaxed: each value is right by itself.
        self.quotes.store(if inner.is_some() { QUOTED } else { BARE }, Relaxed);
        let value = inner.unwrap_or(opaque).to_owned();
        let tag = if weak.is_some() { ETag::Weak(value) } else { ETag::Strong(value) };
        tag.to_http_header().is_ok().then_some(tag)
    }

    /// The store's form of the ETag in a condition on `path`.
    pub(crate) async fn condition(&self, path: &Path, condition: &ETagCondition) -> String {
        let ETagCondition::ETag(tag) = condition else { return "*".into() };
        if self.quotes.load(Relaxed) == UNKNOWN {
            let head = GetOptions { head: true, ..GetOptions::new() };
            // If this fails, the form does not matter: there is no ETag to compare with.
            if let Ok(found) = self.store.get_opts(path, head).await {
                self.e_tag(found.meta.e_tag.as_deref());
            }
        }
        let quote = if self.quotes.load(Relaxed) == BARE { "" } else { "\"" };
        let weak = if matches!(tag, ETag::Weak(_)) { "W/" } else { "" };
        format!("{weak}{quote}{}{quote}", tag.value())
    }
}

impl fmt::Debug for Bucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { store, drops_metadata, .. } = self;
        f.debug_struct("Bucket")
            .field("store", store)
            .field("drops_metadata", drops_metadata)
            .finish_non_exhaustive()
    }
}

/// The path of a key. None for keys that `object_store` has no path for: with empty segments, a slash at either end,
/// segments `.` and `..`, or control characters.
pub(crate) fn path_of(key: &str) -> Option<Path> {
    Path::parse(key).ok().filter(|path| !key.is_empty() && path.as_ref() == key)
}

#[cfg(test)]
mod tests {
    use object_store::memory::InMemory;

    use super::*;

    #[test]
    fn keys_without_a_path_are_found() {
        for key in ["a", "a/b c/d%2F+é", "..a/.b", "a\\b"] {
            assert_eq!(path_of(key).unwrap().as_ref(), key);
        }
        for key in ["", "/", "/a", "a/", "a//b", "a/../b", ".", "a\nb"] {
            assert_eq!(path_of(key), None, "{key:?}");
        }
    }

    #[tokio::test]
    async fn e_tags_keep_the_form_of_the_store() {
        let bucket = Bucket::new(Arc::new(InMemory::new()));
        let tag = ETagCondition::ETag(ETag::Strong("12-3".into()));
        let path = Path::from("a");
        assert_eq!(bucket.condition(&path, &tag).await, "\"12-3\"");
        assert_eq!(bucket.e_tag(Some("12-3")), Some(ETag::Strong("12-3".into())));
        assert_eq!(bucket.condition(&path, &tag).await, "12-3");
        assert_eq!(bucket.e_tag(Some("W/\"12-3\"")), Some(ETag::Weak("12-3".into())));
        assert_eq!(bucket.condition(&path, &tag).await, "\"12-3\"");
        assert_eq!(bucket.e_tag(Some("a\nb")), None, "no header can have it");
    }
}
