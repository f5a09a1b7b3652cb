//! Long reads: bytes are handed on as they come, and cached on the way.
//!
//! ```text
//!   CACHED page by page -> a page is missing: on the disk? -> read into the cache
//!     ^                                       |               |
//!     +---------------------------------------|---------------+
//!                                             no -> one request for all the rest, If-Match -> STORE to the end
//! ```
//!
//! Of an object of which nothing is known, but of whose name the disk has more than is transferred in the time
//! of a request (`gap_bytes`), the head is asked for first.
//!
//! A page is claimed when all of its bytes are there (fetch.F1): so nobody waits for a reader that does not
//! go on.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use bytes::Bytes;
use futures_util::stream::{self, BoxStream, StreamExt};
use object_store::path::Path;
use object_store::{Error, GetOptions, GetRange, GetResult, GetResultPayload, Result};

use crate::answer::{self, answer_of};
use crate::directory::{Known, Stamp};
use crate::fetch::only_if;
use crate::get::resolve;
use crate::inner::{Inner, VERSIONS_MAX};
use crate::stats::Counters;
use crate::store::plain;

/// What a stream reads of the disk at a time. Chosen, not measured.
const DISK_RUN_BYTES_MAX: u64 = 256 << 10;
const DISK_RUN_SHARE: u64 = 64;

impl Inner {
    /// Asks for all of a range; `None`: the object is of another version by now.
    async fn ask_version(
        &self,
        path: &Path,
        known: &Known,
        range: Range<u64>,
        watch: &Option<Stamp>,
    ) -> Result<Option<BoxStream<'static, Result<Bytes>>>> {
        let options = only_if(&known.meta).with_range(Some(GetRange::Bounded(range.clone())));
        let answer = self.request(path, options).await;
        if self.is_void(known, watch) {
            return Ok(None);
        }
        match answer {
            Ok(answer) if known.is_of(&answer.meta) && answer.range == range => {
                Ok(Some(answer.into_stream()))
            }
            Ok(_) | Err(Error::Precondition { .. } | Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Reads a range of an object, under conditions; the first bytes are asked for before it returns.
    pub(crate) async fn stream(
        self: &Arc<Self>,
        path: &Path,
        options: GetOptions,
    ) -> Result<GetResult> {
        let key = path.as_ref();
        let mut checked = None;
        let mut may_ask_head =
            self.tier.as_ref().is_some_and(|tier| tier.bytes_at(key) > self.gap_bytes);
        for _ in 0..VERSIONS_MAX {
            let stamp = self.stamp(key);
            let known = self.directory.find(key);
            let is_current =
                |known: &Arc<Known>| checked.as_ref().is_some_and(|it| Arc::ptr_eq(it, known));
            let Some(known) = known else {
                if std::mem::take(&mut may_ask_head) {
                    let head = self.request(path, GetOptions::new().with_head(true)).await?;
                    checked = self.admit(key, &stamp, &head);
                    continue;
                }
                let answer = self.request(path, options.clone()).await?;
                return self.tee(path, stamp, &options, answer);
            };
            known.note_use();
            let is_usable = self.is_fresh(&known) || is_current(&known);
            if is_usable {
                options.check_preconditions(&known.meta)?;
            }
            let Some(range) = resolve(&options.range, known.meta.size) else { break };
            let first = known.cached_page(range.start, range.end);
            let is_at_hand =
                first.is_some() || !self.disk_run(&known, range.start, range.end).is_empty();
            if !is_usable {
                let mut ask = options.clone();
                let is_plain = plain(&options);
                if is_plain && is_at_hand {
                    ask = ask.with_if_none_match(known.meta.e_tag.clone());
                }
                match self.request(path, ask).await {
                    Ok(answer) => return self.tee(path, stamp, &options, answer),
                    Err(Error::NotModified { .. }) if is_plain => {
                        Counters::add(&self.counters.not_modified, 1);
                        known.checked_ms.fetch_max(stamp.asked_ms, Relaxed);
                        checked = Some(known);
                        continue;
                    }
                    Err(error) => {
                        if matches!(error, Error::NotFound { .. }) {
                            self.directory.forget_version(&known);
                        }
                        return Err(error);
                    }
                }
            }
            let Some(watch) = self.watch(&known) else { continue };
            let mut reading = Reading::new(self, path, &known, range.clone(), watch);
            reading.has_asked = checked.is_some();
            match first {
                first @ Some(_) => reading.first = first,
                None if is_at_hand => {}
                None => match self.ask_version(path, &known, range.clone(), &reading.watch).await {
                    Ok(Some(rest)) => reading.rest = Some(rest),
                    Ok(None) => {
                        self.directory.forget_version(&known);
                        continue;
                    }
                    // Possibly the range of a version that is longer than the present one (V3 of `get`).
                    Err(_) if !matches!(options.range, Some(GetRange::Bounded(_))) => break,
                    Err(error) => return Err(error),
                },
            }
            return Ok(answer_of(&known, range, reading.into_stream()));
        }
        self.store.get_opts(path, options).await
    }

    /// Caches an answer as it is read, whichever version it is of, if that meets the conditions.
    fn tee(
        self: &Arc<Self>,
        path: &Path,
        stamp: Stamp,
        conditions: &GetOptions,
        mut answer: GetResult,
    ) -> Result<GetResult> {
        conditions.check_preconditions(&answer.meta)?;
        if let Some(known) = self.admit(path.as_ref(), &stamp, &answer) {
            let watch = known.is_blind().then_some(stamp);
            let mut reading = Reading::new(self, path, &known, answer.range.clone(), watch);
            let nothing = GetResultPayload::Stream(stream::empty().boxed());
            let payload = std::mem::replace(&mut answer.payload, nothing);
            let (meta, range) = (answer.meta.clone(), answer.range.clone());
            let rest = answer::result(payload, meta, range, answer.attributes.clone());
            reading.rest = Some(rest.into_stream());
            answer.payload = GetResultPayload::Stream(reading.into_stream());
        }
        Ok(answer)
    }
}

/// A long read under way.
struct Reading {
    inner: Arc<Inner>,
    path: Path,
    known: Arc<Known>,
    /// What is left.
    range: Range<u64>,
    first: Option<Bytes>,
    rest: Option<BoxStream<'static, Result<Bytes>>>,
    /// The store, be it for the version only.
    has_asked: bool,
    /// For an entry whose version answers do not show.
    watch: Option<Stamp>,
    assembler: Assembler,
}

impl Reading {
    fn new(
        inner: &Arc<Inner>,
        path: &Path,
        known: &Arc<Known>,
        range: Range<u64>,
        watch: Option<Stamp>,
    ) -> Reading {
        let assembler = Assembler { page_bytes: inner.places.page_bytes(), ..Assembler::default() };
        let (inner, path, known) = (Arc::clone(inner), path.clone(), Arc::clone(known));
        let (first, rest, has_asked) = (None, None, false);
        Reading { inner, path, known, range, first, rest, has_asked, watch, assembler }
    }

    async fn next(&mut self) -> Option<Result<Bytes>> {
        if self.range.is_empty() {
            if self.rest.is_none() && !self.has_asked {
                self.inner.counters.saved.add();
            }
            return None;
        }
        if self.rest.is_none() {
            let cached = self
                .first
                .take()
                .or_else(|| self.known.cached_page(self.range.start, self.range.end));
            if let Some(bytes) = cached {
                self.range.start += bytes.len() as u64;
                return Some(Ok(bytes));
            }
            // What a small cache keeps until it is read.
            let few = self.inner.places.engine().cache_bytes() / DISK_RUN_SHARE;
            let few = few.clamp(self.inner.places.page_bytes(), DISK_RUN_BYTES_MAX);
            let run = self.range.start..self.range.end.min(self.range.start + few);
            if let Some(bytes) = self.inner.read_run(&self.known, run).await {
                self.range.start += bytes.len() as u64;
                return Some(Ok(bytes));
            }
            let (inner, path) = (Arc::clone(&self.inner), self.path.clone());
            let (known, range) = (Arc::clone(&self.known), self.range.clone());
            let watch = self.watch.clone();
            self.has_asked = true;
            let asked = async move { inner.ask_version(&path, &known, range, &watch).await };
            match asked.await {
                Ok(Some(rest)) => self.rest = Some(rest),
                Ok(None) => {
                    self.inner.directory.forget_version(&self.known);
                    let path = self.path.to_string();
                    let what =
                        "the object was replaced while it was read, and what was left is gone";
                    return self.fail(Error::Precondition { path, source: what.into() });
                }
                Err(error) => return self.fail(error),
            }
        }
        let rest = self.rest.as_mut().expect("set above");
        match rest.next().await {
            Some(Ok(bytes)) if bytes.len() as u64 > self.range.end - self.range.start => {
                let what = "more bytes than were announced";
                self.fail(Error::Generic { store: crate::NAME, source: what.into() })
            }
            Some(Ok(bytes)) => {
                Counters::add(&self.inner.counters.bytes, bytes.len() as u64);
                self.assembler.feed(&self.inner, &self.known, self.range.start, &bytes);
                self.range.start += bytes.len() as u64;
                Some(Ok(bytes))
            }
            Some(Err(error)) => self.fail(error),
            None => {
                let what = format!("{} bytes are missing", self.range.end - self.range.start);
                self.fail(Error::Generic { store: crate::NAME, source: what.into() })
            }
        }
    }

    fn fail(&mut self, error: Error) -> Option<Result<Bytes>> {
        self.range.start = self.range.end;
        Some(Err(error))
    }

    fn into_stream(self) -> BoxStream<'static, Result<Bytes>> {
        let next = |mut reading: Reading| async move { Some((reading.next().await?, reading)) };
        stream::unfold(self, next).fuse().boxed()
    }
}

/// Puts pages together from what comes in pieces of any size.
#[derive(Default)]
struct Assembler {
    page_bytes: u64,
    /// The first bytes of a page.
    begun: Vec<u8>,
}

impl Assembler {
    /// Takes bytes of the object from `at` on, which follow those before.
    fn feed(&mut self, inner: &Inner, known: &Known, mut at: u64, mut bytes: &[u8]) {
        let (page_bytes, size) = (self.page_bytes, known.meta.size);
        while !bytes.is_empty() && at < size {
            let in_page = at % page_bytes;
            // To the end of the page, or of the object.
            let lacking = (page_bytes - in_page).min(size - at) as usize;
            let part = &bytes[..lacking.min(bytes.len())];
            if in_page != self.begun.len() as u64 {
                // Begins within a page: nobody has the bytes before.
            } else if in_page == 0 && bytes.len() >= lacking {
                let whole = (bytes.len() as u64 / page_bytes * page_bytes).max(lacking as u64);
                let whole = if at + bytes.len() as u64 >= size { size - at } else { whole };
                let whole = &bytes[..whole as usize];
                inner.bring(known, at, whole, Vec::new());
                at += whole.len() as u64;
                bytes = &bytes[whole.len()..];
                continue;
            } else {
                self.begun.extend_from_slice(part);
                if part.len() == lacking {
                    inner.bring(known, at - in_page, &self.begun, Vec::new());
                    self.begun.clear();
                }
            }
            at += part.len() as u64;
            bytes = &bytes[part.len()..];
        }
    }
}

impl Known {
    /// Cached bytes from `at` to the end of the page, or `end`: borrowed, or copied where too many are.
    fn cached_page(&self, at: u64, end: u64) -> Option<Bytes> {
        let range = self.place.locate(&(at..end));
        if let Some(view) = self.place.blob.try_view(range) {
            return Some(Bytes::from_owner(view));
        }
        let page_bytes = u64::from(self.place.blob.page_bytes());
        self.cached(&(at..end.min(at - at % page_bytes + page_bytes)))
    }
}
