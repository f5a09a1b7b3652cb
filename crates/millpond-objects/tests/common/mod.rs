//! An in-memory store that records requests, delays them, and injects failures.
#![allow(dead_code, reason = "each test program uses a part")]

use std::fmt;
use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::stream::{self, BoxStream, StreamExt, TryStreamExt};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetRange, GetResult, GetResultPayload, ListResult,
    MultipartUpload, ObjectMeta, ObjectStore, PutMultipartOptions, PutOptions, PutPayload,
    PutResult, Result,
};

#[derive(Debug, Default)]
pub struct Faults {
    /// The range of each `get_opts`.
    pub gets: Mutex<Vec<Option<GetRange>>>,
    pub delay_ms: AtomicU64,
    /// Delay between the response and its arrival.
    pub way_back_ms: AtomicU64,
    /// Every n-th request fails; 0: none.
    pub fail_every: AtomicU64,
    pub count: AtomicU64,
    pub without_tags: AtomicBool,
    /// Bodies have an extra first byte that is not in their range.
    pub has_longer_bodies: AtomicBool,
    /// Bodies lack their last byte. A thousand empty pieces are there instead, as of a local file that was truncated.
    pub lacks_last_byte: AtomicBool,
    /// The empty pieces that were taken.
    pub empty_pieces: AtomicU64,
    /// Each object has the same weak ETag.
    pub weak_tag: AtomicBool,
    /// Each request panics.
    pub panics: AtomicBool,
    /// Ignores conditions, as some stores do.
    pub ignores_conditions: AtomicBool,
}

#[derive(Debug, Clone, Default)]
pub struct Far {
    pub store: Arc<InMemory>,
    pub faults: Arc<Faults>,
}

impl Far {
    pub fn gets(&self) -> Vec<Option<GetRange>> {
        std::mem::take(&mut self.faults.gets.lock().unwrap())
    }
}

pub fn bounded(range: Range<u64>) -> Option<GetRange> {
    Some(GetRange::Bounded(range))
}

/// Bytes that differ by offset and by `seed`.
pub fn content(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64)
        .map(|at| (at.wrapping_mul(2_654_435_761).rotate_left(17) ^ seed) as u8)
        .collect()
}

fn take_body(answer: &mut GetResult) -> BoxStream<'static, Result<Bytes>> {
    let empty = GetResultPayload::Stream(stream::empty().boxed());
    match std::mem::replace(&mut answer.payload, empty) {
        GetResultPayload::Stream(body) => body,
        _ => unreachable!("a store in memory has streams"),
    }
}

impl fmt::Display for Far {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("far")
    }
}

#[async_trait]
impl ObjectStore for Far {
    async fn put_opts(&self, at: &Path, bytes: PutPayload, opts: PutOptions) -> Result<PutResult> {
        self.store.put_opts(at, bytes, opts).await
    }

    async fn put_multipart_opts(
        &self,
        at: &Path,
        opts: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.store.put_multipart_opts(at, opts).await
    }

    async fn get_opts(&self, at: &Path, mut options: GetOptions) -> Result<GetResult> {
        let faults = &self.faults;
        faults.gets.lock().unwrap().push(options.range.clone());
        let number = faults.count.fetch_add(1, Relaxed) + 1;
        let delay = faults.delay_ms.load(Relaxed);
        if delay > 0 {
            tokio::time::sleep(Duration::from_millis(delay)).await;
        }
        assert!(!faults.panics.load(Relaxed), "the store panics");
        let fail_every = faults.fail_every.load(Relaxed);
        if fail_every > 0 && number.is_multiple_of(fail_every) {
            return Err(Error::Generic { store: "far", source: format!("fault {number}").into() });
        }
        if faults.ignores_conditions.load(Relaxed) {
            options = GetOptions { range: options.range, ..GetOptions::new() };
        }
        const WEAK_TAG: &str = "W/\"weak\"";
        let has_weak_tag = faults.weak_tag.load(Relaxed);
        if has_weak_tag {
            let (path, source) = (at.to_string(), "the tag is weak".into());
            if options.if_match.take().is_some() {
                return Err(Error::Precondition { path, source });
            }
            if options.if_none_match.take().is_some_and(|tag| tag == WEAK_TAG) {
                return Err(Error::NotModified { path, source });
            }
        }
        let mut answer = self.store.get_opts(at, options).await?;
        if has_weak_tag {
            answer.meta.e_tag = Some(WEAK_TAG.to_owned());
        }
        if faults.has_longer_bodies.load(Relaxed) {
            let body = take_body(&mut answer);
            let longer = body.chain(stream::once(std::future::ready(Ok("!".into()))));
            answer.payload = GetResultPayload::Stream(longer.boxed());
        }
        if faults.lacks_last_byte.load(Relaxed) {
            let mut left = (answer.range.end - answer.range.start).saturating_sub(1) as usize;
            let body = take_body(&mut answer).map_ok(move |piece| {
                let piece = piece.slice(..left.min(piece.len()));
                left -= piece.len();
                piece
            });
            let taken = Arc::clone(faults);
            let empty = stream::iter(0..1000).map(move |_| {
                taken.empty_pieces.fetch_add(1, Relaxed);
                Ok(Bytes::new())
            });
            answer.payload = GetResultPayload::Stream(body.chain(empty).boxed());
        }
        let way_back = faults.way_back_ms.load(Relaxed);
        if way_back > 0 {
            tokio::time::sleep(Duration::from_millis(way_back)).await;
        }
        if faults.without_tags.load(Relaxed) {
            answer.meta.e_tag = None;
        }
        Ok(answer)
    }

    fn delete_stream(
        &self,
        at: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        self.store.delete_stream(at)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.store.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.store.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.store.copy_opts(from, to, options).await
    }
}
