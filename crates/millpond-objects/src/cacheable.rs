//! Which reads the cache may serve.

use std::fmt;
use std::sync::Arc;

use object_store::path::Path;
use object_store::{Extensions, GetOptions};

type MayCache = dyn Fn(&Path, &GetOptions) -> bool + Send + Sync;

/// Chooses the reads that the cache may serve: by default all that have no extensions.
///
/// ```
/// use millpond_objects::serving::CacheableReads;
/// use object_store::{GetOptions, path::Path};
///
/// let tables_only = CacheableReads::new(|location, _| location.as_ref().ends_with(".parquet"));
/// assert!(tables_only.admit(&Path::from("a.parquet"), &mut GetOptions::new()));
/// assert!(!tables_only.admits_ranges(&Path::from("a.json")));
/// ```
#[derive(Clone, Default)]
pub struct CacheableReads(Option<Arc<MayCache>>);

impl CacheableReads {
    /// Admits a read if `may_cache` returns `true`. A thread that reads calls it before each read.
    pub fn new(may_cache: impl Fn(&Path, &GetOptions) -> bool + Send + Sync + 'static) -> Self {
        CacheableReads(Some(Arc::new(may_cache)))
    }

    /// Whether the cache may serve a read. Removes the extensions of such a read.
    pub fn admit(&self, location: &Path, options: &mut GetOptions) -> bool {
        let Some(may_cache) = &self.0 else { return options.extensions.is_empty() };
        let is_admitted = may_cache(location, options);
        if is_admitted && !options.extensions.is_empty() {
            options.extensions = Extensions::default();
        }
        is_admitted
    }

    /// The same for a read of ranges, which has no options.
    pub fn admits_ranges(&self, location: &Path) -> bool {
        self.0.as_ref().is_none_or(|may_cache| may_cache(location, &GetOptions::new()))
    }
}

impl fmt::Debug for CacheableReads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CacheableReads").field(&self.0.is_some()).finish()
    }
}
