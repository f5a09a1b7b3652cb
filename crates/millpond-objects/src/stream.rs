//! Streams long reads: bytes are returned as they arrive and cached at the same time.
//!
//! ```text
//!   CACHED page by page -> page missing: on the disk? -> yes: read it into the cache
//!     ^                                  |                   |
//!     +----------------------------------|-------------------+
//!                                        no -> one request for all the rest, If-Match -> STORE to the end
//! ```
//!
//! If an object has no entry but more than `gap_bytes` of it may be on the disk, its head is requested first: reading
//! the disk then saves more time than the request costs.
//!
//! A page is claimed when all of its bytes have arrived (fetch.F1). So no caller waits for a stream that is not polled.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::stream::{self, BoxStream, StreamExt};
use object_store::path::Path;
use object_store::{Error, GetOptions, GetRange, GetResult, GetResultPayload, Result};

use crate::body::checked_body;
use crate::directory::{ObjectEntry, Stamp};
use crate::fetch::version_condition;
use crate::get::resolve_range;
use crate::inner::{Inner, VERSIONS_MAX};
use crate::response::{self, stream_response};
use crate::stats::Counters;
use crate::store::is_plain_read;

/// Most bytes that a stream reads from the disk at a time. Untuned.
const DISK_RUN_BYTES_MAX: u64 = 256 << 10;
const DISK_RUN_SHARE: u64 = 64;

impl Inner {
    /// Requests all of a range. `None`: the object has another version now.
    async fn request_rest(
        &self,
        path: &Path,
        entry: &ObjectEntry,
        range: Range<u64>,
        watch: &Option<Stamp>,
    ) -> Result<Option<BoxStream<'static, Result<Bytes>>>> {
        let options =
            version_condition(&entry.meta).with_range(Some(GetRange::Bounded(range.clone())));
        let response = self.request(path, options).await;
        if self.may_be_of_another_version(entry, watch) {
            return Ok(None);
        }
        match response {
            Ok(response) if entry.is_same_version(&response.meta) && response.range == range => {
                Ok(Some(checked_body(response)))
            }
            Ok(_) | Err(Error::Precondition { .. } | Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Starts a streaming read of a range, under conditions. The request for the first bytes is sent before it returns.
    pub(crate) async fn read_stream(
        self: &Arc<Self>,
        path: &Path,
        options: GetOptions,
    ) -> Result<GetResult> {
        let key = path.as_ref();
        let mut checked = None;
        let mut may_ask_head =
            self.tier.as_ref().is_some_and(|tier| tier.bytes_of_location(key) > self.gap_bytes);
        for _ in 0..VERSIONS_MAX {
            let stamp = self.stamp(key);
            let entry = self.directory.find(key);
            let is_current = |entry: &Arc<ObjectEntry>| {
                checked.as_ref().is_some_and(|it| Arc::ptr_eq(it, entry))
            };
            let Some(entry) = entry else {
                if std::mem::take(&mut may_ask_head) {
                    let head = self.request(path, GetOptions::new().with_head(true)).await?;
                    checked = self.admit(key, &stamp, &head);
                    continue;
                }
                let response = self.request(path, options.clone()).await?;
                return self.cache_while_streaming(path, stamp, &options, response);
            };
            entry.mark_used();
            let is_usable = self.is_fresh(&entry) || is_current(&entry);
            if is_usable {
                options.check_preconditions(&entry.meta)?;
            }
            let Some(range) = resolve_range(&options.range, entry.meta.size) else { break };
            let first = entry.cached_page(range.start, range.end);
            let is_local =
                first.is_some() || !self.disk_prefix(&entry, range.start, range.end).is_empty();
            if !is_usable {
                let mut ask = options.clone();
                let is_plain = is_plain_read(&options);
                if is_plain && is_local {
                    ask = ask.with_if_none_match(entry.meta.e_tag.clone());
                }
                match self.request(path, ask).await {
                    Ok(response) => {
                        return self.cache_while_streaming(path, stamp, &options, response);
                    }
                    Err(Error::NotModified { .. }) if is_plain => {
                        Counters::add(&self.counters.not_modified, 1);
                        entry.validate(stamp.requested_ms);
                        checked = Some(entry);
                        continue;
                    }
                    Err(error) => {
                        if matches!(error, Error::NotFound { .. }) {
                            self.directory.forget_version(&entry);
                        }
                        return Err(error);
                    }
                }
            }
            let Some(watch) = self.watch(&entry) else { continue };
            let mut reading = StreamRead::new(self, path, &entry, range.clone(), watch);
            reading.has_asked = checked.is_some();
            match first {
                first @ Some(_) => reading.first = first,
                None if is_local => {}
                None => {
                    match self.request_rest(path, &entry, range.clone(), &reading.watch).await {
                        Ok(Some(rest)) => reading.rest = Some(rest),
                        Ok(None) => {
                            self.directory.forget_version(&entry);
                            continue;
                        }
                        // Possibly the resolved range exceeds the length of the present version (get.V3).
                        Err(_) if !matches!(options.range, Some(GetRange::Bounded(_))) => break,
                        Err(error) => return Err(error),
                    }
                }
            }
            return Ok(stream_response(&entry, range, reading.into_stream()));
        }
        self.store.get_opts(path, options).await
    }

    /// Caches a response while its body is read, whichever version it has, if it meets the conditions.
    fn cache_while_streaming(
        self: &Arc<Self>,
        path: &Path,
        stamp: Stamp,
        conditions: &GetOptions,
        mut response: GetResult,
    ) -> Result<GetResult> {
        conditions.check_preconditions(&response.meta)?;
        let body = checked_body(response::take_body(&mut response));
        if let Some(entry) = self.admit(path.as_ref(), &stamp, &response) {
            let watch = entry.is_unversioned().then_some(stamp);
            let mut reading = StreamRead::new(self, path, &entry, response.range.clone(), watch);
            reading.rest = Some(body);
            response.payload = GetResultPayload::Stream(reading.into_stream());
        } else {
            response.payload = GetResultPayload::Stream(body);
        }
        Ok(response)
    }
}

/// A streaming read in progress.
struct StreamRead {
    inner: Arc<Inner>,
    path: Path,
    entry: Arc<ObjectEntry>,
    /// The bytes not yet returned.
    range: Range<u64>,
    first: Option<Bytes>,
    rest: Option<BoxStream<'static, Result<Bytes>>>,
    /// A request was sent, if only to revalidate the entry.
    has_asked: bool,
    /// Stamp of an entry without ETag and version.
    watch: Option<Stamp>,
    assembler: PageAssembler,
}

impl StreamRead {
    fn new(
        inner: &Arc<Inner>,
        path: &Path,
        entry: &Arc<ObjectEntry>,
        range: Range<u64>,
        watch: Option<Stamp>,
    ) -> StreamRead {
        let assembler =
            PageAssembler { page_bytes: inner.allocator.page_bytes(), ..PageAssembler::default() };
        let (inner, path, entry) = (Arc::clone(inner), path.clone(), Arc::clone(entry));
        let (first, rest, has_asked) = (None, None, false);
        StreamRead { inner, path, entry, range, first, rest, has_asked, watch, assembler }
    }

    async fn next_bytes(&mut self) -> Option<Result<Bytes>> {
        if self.range.is_empty() {
            let Some(mut rest) = self.rest.take() else {
                if !std::mem::replace(&mut self.has_asked, true) {
                    self.inner.counters.saved.add();
                }
                return None;
            };
            // An error may follow the last byte.
            return rest.next().await.filter(Result::is_err);
        }
        if self.rest.is_none() {
            let cached = self
                .first
                .take()
                .or_else(|| self.entry.cached_page(self.range.start, self.range.end));
            if let Some(bytes) = cached {
                self.range.start += bytes.len() as u64;
                return Some(Ok(bytes));
            }
            // Few enough pages that a small cache still has them when they are returned.
            let few = self.inner.allocator.engine().cache_bytes() / DISK_RUN_SHARE;
            let few = few.clamp(self.inner.allocator.page_bytes(), DISK_RUN_BYTES_MAX);
            let run = self.range.start..self.range.end.min(self.range.start + few);
            if let Some(bytes) = self.inner.read_disk_prefix(&self.entry, run).await {
                self.range.start += bytes.len() as u64;
                return Some(Ok(bytes));
            }
            let (inner, path) = (Arc::clone(&self.inner), self.path.clone());
            let (entry, range) = (Arc::clone(&self.entry), self.range.clone());
            let watch = self.watch.clone();
            self.has_asked = true;
            let asked = async move { inner.request_rest(&path, &entry, range, &watch).await };
            match asked.await {
                Ok(Some(rest)) => self.rest = Some(rest),
                Ok(None) => {
                    self.inner.directory.forget_version(&self.entry);
                    let path = self.path.to_string();
                    let what = "the object was replaced while it was read, and the rest of the old version is not cached";
                    return self.fail(Error::Precondition { path, source: what.into() });
                }
                Err(error) => return self.fail(error),
            }
        }
        let rest = self.rest.as_mut().expect("set above");
        match rest.next().await {
            Some(Ok(bytes)) => {
                Counters::add(&self.inner.counters.bytes, bytes.len() as u64);
                self.assembler.append(&self.inner, &self.entry, self.range.start, &bytes);
                self.range.start += bytes.len() as u64;
                Some(Ok(bytes))
            }
            Some(Err(error)) => self.fail(error),
            // Its length is checked.
            None => None,
        }
    }

    fn fail(&mut self, error: Error) -> Option<Result<Bytes>> {
        self.range.start = self.range.end;
        (self.rest, self.has_asked) = (None, true);
        Some(Err(error))
    }

    fn into_stream(self) -> BoxStream<'static, Result<Bytes>> {
        let next =
            |mut reading: StreamRead| async move { Some((reading.next_bytes().await?, reading)) };
        stream::unfold(self, next).fuse().boxed()
    }
}

/// Assembles pages from body chunks of any size.
#[derive(Default)]
struct PageAssembler {
    page_bytes: u64,
    /// The bytes of an incomplete page.
    begun: Vec<u8>,
}

impl PageAssembler {
    /// Adds bytes at offset `at` of the object, which follow the previous ones.
    fn append(&mut self, inner: &Inner, entry: &ObjectEntry, mut at: u64, mut bytes: &[u8]) {
        let (page_bytes, size) = (self.page_bytes, entry.meta.size);
        while !bytes.is_empty() && at < size {
            let in_page = at % page_bytes;
            // To the end of the page, or of the object.
            let lacking = (page_bytes - in_page).min(size - at) as usize;
            let part = &bytes[..lacking.min(bytes.len())];
            if in_page != self.begun.len() as u64 {
                // The read starts inside a page, so the page's first bytes are missing.
            } else if in_page == 0 && bytes.len() >= lacking {
                let whole = (bytes.len() as u64 / page_bytes * page_bytes).max(lacking as u64);
                let whole = if at + bytes.len() as u64 >= size { size - at } else { whole };
                let whole = &bytes[..whole as usize];
                inner.populate(entry, at, whole, Vec::new());
                at += whole.len() as u64;
                bytes = &bytes[whole.len()..];
                continue;
            } else {
                self.begun.extend_from_slice(part);
                if part.len() == lacking {
                    inner.populate(entry, at - in_page, &self.begun, Vec::new());
                    self.begun.clear();
                }
            }
            at += part.len() as u64;
            bytes = &bytes[part.len()..];
        }
    }
}

impl ObjectEntry {
    /// Cached bytes from `at` to the end of the page or to `end`: borrowed, or copied if too many pages are borrowed.
    fn cached_page(&self, at: u64, end: u64) -> Option<Bytes> {
        let range = self.allocation.to_blob(&(at..end));
        if let Some(view) = self.allocation.blob.try_view(range) {
            return Some(Bytes::from_owner(view));
        }
        let page_bytes = u64::from(self.allocation.blob.page_bytes());
        self.cached(&(at..end.min(at - at % page_bytes + page_bytes)))
    }
}
