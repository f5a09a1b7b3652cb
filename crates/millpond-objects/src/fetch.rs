//! Sends requests to the underlying store and caches the bytes of their responses.
//!
//! - **F1** A page is claimed before its request only if the request is a task of a runtime. So a waiter for the page
//!   waits for the store, and never for a caller that does not poll. Otherwise pages are claimed when their bytes have
//!   arrived. A single-threaded runtime runs tasks only while a thread drives it: so tasks on one such runtime, the home,
//!   wait for each other, and no task elsewhere waits for them ([`HomeRuntime`](crate::home_runtime::HomeRuntime)).
//! - **F2** Bytes are cached only if the response names the version of their pages. Without ETag and version: only if no
//!   write of the object has run since a moment at which its entry was in the map (directory.N4).
//! - **F3** Pages that the disk index lists are read from the disk first. If the disk read fails, the same task requests
//!   them from the store, and fills the pages that it claimed.

use std::future::Future;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::join_all;
use millpond::blob::Fill;
use object_store::path::Path;
use object_store::{Error, GetOptions, GetRange, GetResult, ObjectMeta, Result};
use tokio::runtime::Handle;

use crate::body::with_checked_body;
use crate::directory::{ObjectEntry, Stamp, strong_tag};
use crate::disk::{DiskTier, Object};
use crate::inner::Inner;
use crate::stats::Counters;

/// Bytes of an object that a request returned.
#[derive(Clone, Debug)]
pub(crate) struct Piece {
    pub(crate) range: Range<u64>,
    pub(crate) bytes: Bytes,
}

impl Piece {
    /// The bytes of a range, if the piece contains all of it.
    pub(crate) fn bytes_of(&self, range: &Range<u64>) -> Option<Bytes> {
        if range.start < self.range.start || range.end > self.range.end {
            return None;
        }
        let (from, to) = (range.start - self.range.start, range.end - self.range.start);
        let (from, to) = (usize::try_from(from).ok()?, usize::try_from(to).ok()?);
        let part = self.bytes.slice(from..to);
        // A small slice would keep the whole body in memory, outside of the cache's limit.
        let mut copy = Vec::new();
        // Without memory for a copy, the body stays.
        let is_small = part.len() * 2 < self.bytes.len();
        if !is_small || copy.try_reserve_exact(part.len()).is_err() {
            return Some(part);
        }
        copy.extend_from_slice(&part);
        Some(copy.into())
    }

    /// The same, as a piece.
    pub(crate) fn sub_piece(&self, range: Range<u64>) -> Option<Piece> {
        self.bytes_of(&range).map(|bytes| Piece { range, bytes })
    }
}

/// A range to fetch, and the pages claimed for it.
pub(crate) struct Fetch {
    pub(crate) range: Range<u64>,
    pub(crate) fills: Vec<Fill>,
    /// The disk index listed the pages when the fetch was planned.
    pub(crate) on_disk: bool,
}

/// Outcome of a request for bytes of a cached version.
pub(crate) enum FetchOutcome {
    Piece(Piece),
    /// All bytes were read from the disk and are cached.
    Cached,
    /// The object has another version now, or was deleted.
    Changed,
}

/// The error of a request, and the range that it was for.
pub(crate) struct FailedFetch {
    pub(crate) range: Range<u64>,
    pub(crate) error: Error,
}

/// Runs a future as a task of the caller's runtime, so that it completes even if the caller is dropped. Outside of a
/// runtime it runs in the caller.
pub(crate) async fn spawn_if_runtime<T: Send + 'static>(
    task: impl Future<Output = T> + Send + 'static,
) -> Result<T> {
    let Ok(runtime) = Handle::try_current() else { return Ok(task.await) };
    match runtime.spawn(task).await {
        Ok(outcome) => Ok(outcome),
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(error) => Err(Error::Generic { store: crate::NAME, source: error.into() }),
        },
    }
}

impl Inner {
    /// Sends a request to the store and counts it.
    pub(crate) async fn request(&self, path: &Path, options: GetOptions) -> Result<GetResult> {
        Counters::add(&self.counters.requests, 1);
        self.store.get_opts(path, options).await
    }

    /// Whether a response that has just arrived may be of another version than the entry although its metadata match.
    pub(crate) fn may_be_of_another_version(
        &self,
        entry: &ObjectEntry,
        watch: &Option<Stamp>,
    ) -> bool {
        watch
            .as_ref()
            .is_some_and(|watch| self.directory.may_be_of_another_version(watch, &entry.key))
    }

    /// Call before requests about an entry: a stamp, if the entry needs one. `None`: the entry has left the map, so the
    /// read starts again.
    pub(crate) fn watch(&self, entry: &Arc<ObjectEntry>) -> Option<Option<Stamp>> {
        match entry.is_unversioned() {
            true => self.directory.watch_entry(entry, self.now_ms()).map(Some),
            false => Some(None),
        }
    }

    /// Receives the whole body of a response.
    pub(crate) async fn receive_body(&self, response: GetResult) -> Result<Piece> {
        let range = response.range.clone();
        let bytes = with_checked_body(response).bytes().await?;
        Counters::add(&self.counters.bytes, bytes.len() as u64);
        Ok(Piece { range, bytes })
    }

    /// Fetches bytes of a cached version, and caches them.
    pub(crate) async fn fetch(
        self: Arc<Self>,
        path: Path,
        entry: Arc<ObjectEntry>,
        wanted: Fetch,
        watch: Option<Stamp>,
    ) -> Result<FetchOutcome, FailedFetch> {
        let Fetch { mut range, mut fills, on_disk } = wanted;
        if on_disk {
            fills = self.read_disk_pages(&entry, fills).await;
            let missing = |fill: &Fill| entry.allocation.to_object(&fill.range());
            let Some(first) = fills.iter().map(missing).map(|range| range.start).min() else {
                return Ok(FetchOutcome::Cached);
            };
            let end = fills.iter().map(missing).map(|range| range.end).max();
            range = first..end.unwrap_or(first).min(entry.meta.size);
        }
        let options =
            version_condition(&entry.meta).with_range(Some(GetRange::Bounded(range.clone())));
        let response = self.request(&path, options).await;
        if self.may_be_of_another_version(&entry, &watch) {
            return Ok(FetchOutcome::Changed);
        }
        let response = match response {
            Ok(response) => response,
            Err(Error::Precondition { .. } | Error::NotFound { .. }) => {
                return Ok(FetchOutcome::Changed);
            }
            Err(error) => return Err(FailedFetch { range, error }),
        };
        if !entry.is_same_version(&response.meta) || response.range != range {
            return Ok(FetchOutcome::Changed);
        }
        let piece = match self.receive_body(response).await {
            Ok(piece) => piece,
            Err(error) => return Err(FailedFetch { range, error }),
        };
        self.populate(&entry, piece.range.start, &piece.bytes, fills);
        Ok(FetchOutcome::Piece(piece))
    }

    /// Caches bytes that the store sent, which start at `start` in the object: in the pages claimed for them, else in
    /// unclaimed ones; and on the disk.
    pub(crate) fn populate(&self, entry: &ObjectEntry, start: u64, bytes: &[u8], fills: Vec<Fill>) {
        entry.populate(start, bytes, fills);
        let Some(tier) = &self.tier else { return };
        let (page_bytes, size) = (self.allocator.page_bytes(), entry.meta.size);
        // Whole pages, and the object's end.
        let (first, end) = (start.next_multiple_of(page_bytes), start + bytes.len() as u64);
        let end = if end >= size { size } else { end - end % page_bytes };
        if first < end
            && let Some(object) = tier.object(&entry.meta)
        {
            let bytes = &bytes[(first - start) as usize..(end - start) as usize];
            tier.enqueue_pages(&object, first / page_bytes, bytes);
        }
    }

    /// Reads pages from the disk. Returns the ones that it could not read.
    async fn read_disk_pages(&self, entry: &ObjectEntry, fills: Vec<Fill>) -> Vec<Fill> {
        let Some((tier, object)) = self.disk_object(entry) else { return fills };
        let read = |fill: Fill| {
            let first =
                entry.allocation.to_object(&fill.range()).start / self.allocator.page_bytes();
            tier.read(&object, first, fill)
        };
        join_all(fills.into_iter().map(read)).await.into_iter().flatten().collect()
    }

    /// Reads the part of a range that is on the disk, from the range's start, into the cache.
    pub(crate) async fn read_disk_prefix(
        self: &Arc<Self>,
        entry: &Arc<ObjectEntry>,
        range: Range<u64>,
    ) -> Option<Bytes> {
        let found = self.disk_prefix(entry, range.start, range.end);
        if found.is_empty() {
            return None;
        }
        let page_end = self.allocator.round_to_pages(&(found.start..found.start + 1)).end;
        let page = found.start..found.end.min(page_end);
        // In a small cache, reading the later pages may evict the first ones: then one page is read alone.
        for pages in [found, page] {
            let (inner, object, claimed) = (Arc::clone(self), Arc::clone(entry), pages.clone());
            let read = spawn_if_runtime(async move {
                let fills = object.claim(&claimed).fills;
                // Dropping the fills that failed releases their claims.
                drop(inner.read_disk_pages(&object, fills).await);
            });
            read.await.ok()?;
            entry.allocation.blob.arrival(entry.allocation.to_blob(&pages)).await;
            if let Some(bytes) = entry.cached(&pages) {
                return Some(bytes);
            }
        }
        None
    }

    /// The disk tier, and the entry's identity there.
    pub(crate) fn disk_object(&self, entry: &ObjectEntry) -> Option<(&DiskTier, Object)> {
        let tier = self.tier.as_ref()?;
        Some((tier, tier.object(&entry.meta)?))
    }

    /// The range from `at` that is on the disk: up to `end` or the first missing page. Empty where pages may not be
    /// claimed (F1).
    pub(crate) fn disk_prefix(&self, entry: &ObjectEntry, at: u64, end: u64) -> Range<u64> {
        let (page_bytes, end) = (self.allocator.page_bytes(), end.min(entry.meta.size));
        let pages = at / page_bytes..end.div_ceil(page_bytes);
        match self.disk_object(entry) {
            Some((tier, object))
                if at < end && self.home.may_claim_pages() && self.home.may_wait_for_claims() =>
            {
                match tier.leading_run(&object, pages) {
                    (true, pages) => at..end.min((at / page_bytes + pages) * page_bytes),
                    (false, _) => at..at,
                }
            }
            _ => at..at,
        }
    }
}

/// Request options for this version only. Some stores ignore them, so callers check the response as well.
pub(crate) fn version_condition(meta: &ObjectMeta) -> GetOptions {
    let options = GetOptions::new();
    match &meta.version {
        None => options.with_if_match(strong_tag(meta).map(str::to_owned)),
        version => options.with_version(version.clone()),
    }
}

impl ObjectEntry {
    /// Caches bytes of this version, which start at `start`: in the pages claimed for them, then in unclaimed ones. The
    /// latter are gaps between the requested ranges. They are already downloaded, and a query engine that reads two columns
    /// of a file often reads the column between them next.
    pub(crate) fn populate(&self, start: u64, bytes: &[u8], fills: Vec<Fill>) {
        let end = start + bytes.len() as u64;
        let len = |fill: &Fill| fill.range().end - fill.range().start;
        let claimed: u64 = fills.iter().map(len).sum();
        self.fill_claimed(start, bytes, fills);
        if claimed < end - start {
            self.fill_claimed(start, bytes, self.claim(&(start..end)).fills);
        }
    }

    fn fill_claimed(&self, start: u64, bytes: &[u8], fills: Vec<Fill>) {
        let end = start + bytes.len() as u64;
        for fill in fills {
            let wanted = self.allocation.to_object(&fill.range());
            let wanted = wanted.start..wanted.end.min(self.meta.size);
            let Some(from) = wanted.start.checked_sub(start) else { continue };
            let to = wanted.end.min(end).saturating_sub(start);
            let Some(part) = bytes.get(from as usize..to as usize) else { continue };
            if wanted.start + part.len() as u64 == self.meta.size {
                fill.bring_last(part);
            } else {
                fill.bring(part);
            }
        }
    }

    /// Claims the pages of a range of the object.
    pub(crate) fn claim(&self, range: &Range<u64>) -> millpond::blob::Claim {
        self.allocation.blob.claim(self.allocation.to_blob(range))
    }

    /// Bytes of the object, if they are cached, and there is memory for a copy of them.
    pub(crate) fn cached(&self, range: &Range<u64>) -> Option<Bytes> {
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(usize::try_from(range.end - range.start).ok()?).ok()?;
        let is_hit = self.allocation.blob.try_read(&mut bytes, self.allocation.to_blob(range));
        is_hit.then(|| bytes.into())
    }

    /// Copies bytes of the object, from byte `start` on, if they are cached. Otherwise the content of `dst` is not specified.
    pub(crate) fn copy_cached(&self, dst: &mut [MaybeUninit<u8>], start: u64) -> bool {
        let range = start..start.saturating_add(dst.len() as u64);
        range.end <= self.meta.size
            && self.allocation.blob.try_read_into(dst, self.allocation.to_blob(&range).start)
    }
}
