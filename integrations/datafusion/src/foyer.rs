//! An object store with foyer's in-memory cache: pages by path and number, as in Millpond. Neighbouring missing pages are one
//! request.

use std::collections::HashMap;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::Range;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use bytes::Bytes;
use equivalent::Equivalent;
use foyer_memory::{Cache, CacheBuilder, S3FifoConfig};
use futures_util::stream::{self, BoxStream, StreamExt};
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetRange, GetResult, GetResultPayload, ListResult, MultipartUpload,
    ObjectMeta, ObjectStore, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};

use crate::counted::implement;

const PAGE_BYTES: u64 = 16 << 10;

#[derive(Debug, PartialEq, Eq)]
struct Key(Box<str>, u64);

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        Asked(&self.0, self.1).hash(state);
    }
}

/// A borrowed key, for lookups without an allocation.
#[derive(Hash)]
struct Asked<'a>(&'a str, u64);

impl Equivalent<Key> for Asked<'_> {
    fn equivalent(&self, key: &Key) -> bool {
        self.0 == &*key.0 && self.1 == key.1
    }
}

/// A store that caches pages in foyer's cache.
pub struct Foyer {
    store: Arc<dyn ObjectStore>,
    cache: Cache<Key, Bytes>,
    metas: Mutex<HashMap<Path, ObjectMeta>>,
}

impl Foyer {
    pub fn new(store: Arc<dyn ObjectStore>, limit_bytes: u64) -> Foyer {
        let builder = CacheBuilder::new(limit_bytes as usize).with_shards(16);
        let builder = builder.with_eviction_config(S3FifoConfig::default());
        let weigh = |key: &Key, page: &Bytes| key.0.len() + page.len() + 128;
        let cache = builder.with_weighter(weigh).build();
        Foyer { store, cache, metas: Mutex::default() }
    }

    /// Fetches the pages `run` from the store into the cache.
    async fn bring(&self, at: &Path, run: Range<u64>) -> Result<(Vec<Bytes>, ObjectMeta)> {
        let range = run.start * PAGE_BYTES..run.end * PAGE_BYTES;
        let answer = self.store.get_opts(at, GetOptions::new().with_range(Some(range))).await?;
        let meta = answer.meta.clone();
        self.metas.lock().unwrap().insert(at.clone(), meta.clone());
        let bytes = answer.bytes().await?;
        // A copy, so that the cache accounts for exactly this memory.
        let pages = bytes.chunks(PAGE_BYTES as usize).map(Bytes::copy_from_slice);
        let pages: Vec<Bytes> = pages.collect();
        for (number, page) in run.zip(&pages) {
            self.cache.insert(Key(at.as_ref().into(), number), page.clone());
        }
        Ok((pages, meta))
    }
}

impl fmt::Debug for Foyer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Foyer")
    }
}

impl fmt::Display for Foyer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Foyer")
    }
}

implement! {
    Foyer,
    async fn get_opts(&self, at: &Path, options: GetOptions) -> Result<GetResult> {
        let Some(GetRange::Bounded(range)) = options.range.clone() else {
            return self.store.get_opts(at, options).await;
        };
        let mut meta = self.metas.lock().unwrap().get(at).cloned();
        let numbers = range.start / PAGE_BYTES..range.end.div_ceil(PAGE_BYTES);
        let find = |number| self.cache.get(&Asked(at.as_ref(), number)).map(|e| e.value().clone());
        let mut found: Vec<Option<Bytes>> = numbers.clone().map(find).collect();
        let mut next = 0;
        while let Some(first) = (next..found.len()).find(|&at| found[at].is_none()) {
            let missing = found[first..].iter().take_while(|page| page.is_none()).count();
            next = first + missing;
            let run = numbers.start + first as u64..numbers.start + next as u64;
            let (pages, seen) = self.bring(at, run).await?;
            meta = Some(seen);
            for (place, page) in found[first..next].iter_mut().zip(pages) {
                *place = Some(page);
            }
        }
        let Some(meta) = meta else { return self.store.get_opts(at, options).await };
        let range = range.start..range.end.min(meta.size);
        let pieces: Vec<Result<Bytes>> = numbers
            .zip(found.into_iter().flatten())
            .map(|(number, page)| {
                let start = number * PAGE_BYTES;
                let from = range.start.saturating_sub(start) as usize;
                let to = ((range.end - start) as usize).min(page.len());
                Ok(page.slice(from..to))
            })
            .collect();
        let payload = GetResultPayload::Stream(stream::iter(pieces).boxed());
        Ok(GetResult { payload, meta, range, attributes: Default::default() })
    }
}
