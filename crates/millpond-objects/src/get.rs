//! Reads ranges of one object such that all returned bytes are of one version.
//!
//! ```text
//!            +-- no: one caller sends a request, others wait for its response head -+
//!            |                                                                      v
//!   entry? --+-- stale: request the missing bytes, or send If-None-Match -------> entry
//!            +-- fresh -------------------------------------------------------------^
//!   entry: cached? -> else claim pages, spawn requests with If-Match, wait for them and for other claims -> bytes
//!               ^                                                     |
//!               +------ version changed: remove the entry, restart ---+
//! ```
//!
//! - **V1** A call returns bytes of one version: when another version shows up, the bytes collected so far are dropped.
//!   The conditions of the call are checked on the returned version, cached or just fetched.
//! - **V2** A caller waits for another caller at most once. If the bytes are still missing afterwards, each caller sends
//!   its own request. So a failing store fails all callers at the same time, not one after the other.
//! - **V3** A range that depends on the object's length (whole object, from an offset, suffix) is resolved by the length
//!   of the served version, again at each restart. The store receives the range in the caller's form unless the request
//!   names a version. So an error of the store is the error of the caller's own range.

use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use futures_util::future::try_join_all;
use millpond::blob::Fill;
use object_store::path::Path;
use object_store::{Error, GetOptions, GetRange, GetResult, ObjectMeta, Result, coalesce_ranges};

use crate::directory::{ObjectEntry, Stamp};
use crate::fetch::{Fetch, FetchOutcome, Piece, spawn_if_runtime};
use crate::inner::{Inner, VERSIONS_MAX};
use crate::lists::{is_no_memory, try_empty, try_list};
use crate::response::ResponseHead;
use crate::single_flight::Leader;
use crate::stats::Counters;

/// The gaps between the ranges of one call that are read in addition, together. Their bytes are in memory at the same time.
const GAPS_BYTES_MAX: u64 = 32 << 20;
/// The first read-ahead window, in multiples of the requested length. Untuned.
const WINDOW_FACTOR: u64 = 4;

/// Longer ranges are streamed and not collected. Untuned.
pub(crate) const COLLECTED_BYTES_MAX: u64 = 4 << 20;

/// The result of a collected read of an object.
pub(crate) enum Collected {
    /// A piece for each requested range.
    Pieces(ResponseHead, Vec<Piece>),
    /// The response is too long to be collected, or the object has no entry.
    Stream,
    /// The underlying store has to serve the read, possibly with an error.
    Bypass,
}

/// Requests that a read has sent.
#[derive(Default)]
struct SentRequests {
    /// The store has answered one with the version.
    has_asked: bool,
    /// The one that failed began behind the first byte of each range, as others had requested or cached that.
    failed_late: bool,
}

/// The cached and fresh part of the requested ranges.
pub(crate) enum CachedRanges {
    All(Vec<Bytes>),
    /// Pieces of this version.
    Part(Arc<ObjectEntry>, Vec<Piece>),
    Unknown,
}

/// Outcome of opening an object for a read.
enum Opened {
    /// A fresh entry, and pieces that are already read.
    Fresh(Arc<ObjectEntry>, Vec<Piece>),
    /// An entry that the store has confirmed, and pieces that are already read.
    Validated(Arc<ObjectEntry>, Vec<Piece>),
    /// A response that can't be cached.
    Uncached(ResponseHead, Piece),
    /// The range is too long to be collected, or the object has no entry.
    Stream,
    /// Another caller has sent the first request: look up the entry again.
    Again,
}

impl Inner {
    /// Reads the cached and fresh part of some ranges. If all is cached: without a lock or a write to shared memory.
    pub(crate) fn cached_ranges(&self, path: &Path, ranges: &[Range<u64>]) -> CachedRanges {
        let look = |entry: &Arc<ObjectEntry>| {
            let size = entry.meta.size;
            if !self.is_fresh(entry) || ranges.iter().any(|range| range.start >= size) {
                return CachedRanges::Unknown;
            }
            let mut pieces = Vec::new();
            if pieces.try_reserve_exact(ranges.len()).is_err() {
                return CachedRanges::Unknown;
            }
            for range in ranges {
                let range = range.start..range.end.min(size);
                pieces.extend(entry.cached(&range).map(|bytes| Piece { range, bytes }));
            }
            if pieces.len() < ranges.len() {
                return CachedRanges::Part(Arc::clone(entry), pieces);
            }
            entry.mark_used();
            self.counters.saved.add();
            CachedRanges::All(pieces.into_iter().map(|piece| piece.bytes).collect())
        };
        self.directory.with_entry(path.as_ref(), look).unwrap_or(CachedRanges::Unknown)
    }

    /// Reads ranges of an object, each clipped to the object's length. `asked`: either bounded ranges, or one range that
    /// depends on the object's length (V3).
    pub(crate) async fn read_ranges(
        self: &Arc<Self>,
        path: &Path,
        asked: &[Option<GetRange>],
        conditions: &GetOptions,
        mut found: Option<(Arc<ObjectEntry>, Vec<Piece>)>,
    ) -> Result<Collected> {
        let key = path.as_ref();
        let mut may_wait = self.home.may_claim_pages() && self.home.may_wait_for_claims();
        let (mut versions, mut sent) = (0, SentRequests::default());
        while versions < VERSIONS_MAX {
            let opened = match found.take() {
                Some((entry, pieces)) => Opened::Fresh(entry, pieces),
                None => self.open_object(path, key, asked, may_wait).await?,
            };
            let (entry, pieces) = match opened {
                Opened::Fresh(entry, pieces) => (entry, pieces),
                Opened::Validated(entry, pieces) => {
                    sent.has_asked = true;
                    (entry, pieces)
                }
                Opened::Uncached(head, piece) => {
                    let [asked] = asked else { return Ok(Collected::Bypass) };
                    conditions.check_preconditions(head.meta())?;
                    let range = resolve_range(asked, head.meta().size);
                    let part = range.and_then(|range| piece.sub_piece(range));
                    return Ok(
                        part.map_or(Collected::Bypass, |part| Collected::Pieces(head, vec![part]))
                    );
                }
                Opened::Stream => return Ok(Collected::Stream),
                Opened::Again => {
                    may_wait = false;
                    continue;
                }
            };
            entry.mark_used();
            // V1.
            conditions.check_preconditions(&entry.meta)?;
            // V3.
            let resolved = asked.iter().map_while(|range| resolve_range(range, entry.meta.size));
            let ranges = try_list(asked.len(), resolved)?;
            if ranges.len() < asked.len() {
                return Ok(Collected::Bypass);
            }
            if is_open(asked) && ranges[0].end - ranges[0].start > COLLECTED_BYTES_MAX {
                return Ok(Collected::Stream);
            }
            sent.failed_late = false;
            match self.read_version(path, &entry, &ranges, pieces, &mut sent).await {
                Ok(Some(bytes)) => {
                    if !sent.has_asked {
                        self.counters.saved.add();
                    }
                    let pieces = ranges.into_iter().zip(bytes);
                    let pieces = pieces.map(|(range, bytes)| Piece { range, bytes });
                    let pieces = try_list(asked.len(), pieces)?;
                    return Ok(Collected::Pieces(ResponseHead::Cached(entry), pieces));
                }
                Ok(None) => {}
                // The lists of another way to the bytes would be as long.
                Err(error) if is_no_memory(&error) => return Err(error),
                // A store that ignores If-Match refuses a range beyond the end of the next version.
                Err(_) if is_open(asked) || sent.failed_late => return Ok(Collected::Bypass),
                Err(error) => return Err(error),
            }
            self.directory.forget_version(&entry);
            versions += 1;
        }
        Ok(Collected::Bypass)
    }

    /// Finds the version of an object, by a request if there is no fresh entry.
    async fn open_object(
        self: &Arc<Self>,
        path: &Path,
        key: &str,
        asked: &[Option<GetRange>],
        may_wait: bool,
    ) -> Result<Opened> {
        if let Some(entry) = self.directory.find(key) {
            if self.is_fresh(&entry) {
                return Ok(Opened::Fresh(entry, Vec::new()));
            }
            return self.revalidate(path, key, entry, asked).await;
        }
        let stamp = self.stamp(key);
        let Some(ranges) = bounded(asked)? else { return Ok(Opened::Stream) };
        let joined = may_wait.then(|| self.first_requests.join(key));
        let leader = match joined {
            Some(Err(mut other)) => {
                // The sender is dropped with the leader, and never sends.
                let _ = other.changed().await;
                return Ok(Opened::Again);
            }
            // The previous leader has inserted the entry since, maybe.
            Some(Ok(_)) if self.directory.find(key).is_some_and(|entry| self.is_fresh(&entry)) => {
                return Ok(Opened::Again);
            }
            Some(Ok(leader)) => Some(leader),
            None => None,
        };
        let (inner, path, key) = (Arc::clone(self), path.clone(), key.to_owned());
        let first = self.coalesced_pages(&ranges)?.remove(0);
        spawn_if_runtime(
            async move { inner.request_first_range(path, key, stamp, first, leader).await },
        )
        .await?
    }

    /// Requests bytes of an object that has no entry. `leader` is dropped when the response head has arrived and the
    /// pages are claimed, so the waiting callers find the claims.
    async fn request_first_range(
        self: Arc<Self>,
        path: Path,
        key: String,
        stamp: Stamp,
        range: Range<u64>,
        leader: Option<Leader>,
    ) -> Result<Opened> {
        let options = GetOptions::new().with_range(Some(GetRange::Bounded(range)));
        let response = self.request(&path, options).await?;
        let claimed = leader.is_some().then(|| response.range.clone());
        let admitted = self.admit_claimed(&key, &stamp, &response, claimed);
        drop(leader);
        let Some((entry, fills)) = admitted else { return self.uncached(response).await };
        // Before the bytes are there, as the callers that wait for them read on at once.
        entry.sequential_end.store(response.range.end, Relaxed);
        let piece = self.receive_body(response).await?;
        self.populate(&entry, piece.range.start, &piece.bytes, fills);
        Ok(Opened::Validated(entry, vec![piece]))
    }

    /// Reads ranges without the cache, all of one version as far as the responses show it. The store's own `get_ranges`
    /// would not do, as it may send several requests without a condition.
    pub(crate) async fn uncached_ranges(
        &self,
        path: &Path,
        ranges: &[Range<u64>],
    ) -> Result<Vec<Bytes>> {
        let mut outcome = Ok(Vec::new());
        for _ in 0..VERSIONS_MAX {
            let first: OnceLock<ObjectMeta> = OnceLock::new();
            let fetch = |range: Range<u64>| async {
                let options = GetOptions::new().with_range(Some(GetRange::Bounded(range)));
                let response = self.request(path, options).await?;
                let (meta, first) = (&response.meta, first.get_or_init(|| response.meta.clone()));
                let is_same = (&meta.e_tag, &meta.version, meta.size, meta.last_modified)
                    == (&first.e_tag, &first.version, first.size, first.last_modified);
                if !is_same {
                    let source = "the object was replaced while its ranges were read".into();
                    return Err(Error::Precondition { path: path.to_string(), source });
                }
                // A merged range succeeds even if one of its parts starts past the end of the object.
                if let Some(beyond) = ranges.iter().find(|range| range.start >= first.size) {
                    let beyond = Some(GetRange::Bounded(beyond.clone()));
                    self.request(path, GetOptions::new().with_range(beyond)).await?;
                    let source = "the object has grown while its ranges were read".into();
                    return Err(Error::Precondition { path: path.to_string(), source });
                }
                Ok(self.receive_body(response).await?.bytes)
            };
            outcome = coalesce_ranges(ranges, fetch, self.gap_of(ranges.len())).await;
            if !matches!(outcome, Err(Error::Precondition { .. })) {
                break;
            }
        }
        outcome
    }

    async fn uncached(&self, response: GetResult) -> Result<Opened> {
        let head = ResponseHead::Uncached(response.meta.clone(), response.attributes.clone());
        Ok(Opened::Uncached(head, self.receive_body(response).await?))
    }

    /// Revalidates an entry: by a request for its missing bytes, or by a conditional one.
    async fn revalidate(
        self: &Arc<Self>,
        path: &Path,
        key: &str,
        entry: Arc<ObjectEntry>,
        asked: &[Option<GetRange>],
    ) -> Result<Opened> {
        let stamp = self.stamp(key);
        let mut cached = try_empty(asked.len())?;
        let mut missing = try_empty(asked.len())?;
        for asked in asked {
            // The length of the cached version serves only to find cached bytes.
            let within = resolve_range(asked, entry.meta.size);
            let bytes = within.as_ref().and_then(|within| entry.cached(within));
            match (within, bytes) {
                (Some(range), Some(bytes)) => cached.push(Piece { range, bytes }),
                // On the disk: read once the store has confirmed the version.
                (Some(range), None)
                    if self.disk_prefix(&entry, range.start, range.end) == range => {}
                _ => missing.push(asked.clone()),
            }
        }
        let range = match bounded(if missing.is_empty() { asked } else { &missing })? {
            Some(ranges) => Some(GetRange::Bounded(self.coalesced_pages(&ranges)?.remove(0))),
            // V3.
            None => asked[0].clone(),
        };
        let mut options = GetOptions::new().with_range(range);
        if missing.is_empty() {
            options = options.with_if_none_match(entry.meta.e_tag.clone());
        }
        let response = match self.request(path, options).await {
            Ok(response) => response,
            Err(Error::NotModified { .. }) => {
                Counters::add(&self.counters.not_modified, 1);
                entry.validate(stamp.requested_ms);
                return Ok(Opened::Validated(entry, cached));
            }
            Err(error) => {
                if matches!(error, Error::NotFound { .. }) {
                    self.directory.forget_version(&entry);
                }
                return Err(error);
            }
        };
        if is_open(asked) && response.range.end - response.range.start > COLLECTED_BYTES_MAX {
            return Ok(Opened::Stream);
        }
        let Some(now) = self.admit(key, &stamp, &response) else {
            return self.uncached(response).await;
        };
        if !Arc::ptr_eq(&entry, &now) {
            // V1.
            cached.clear();
        }
        let piece = self.receive_body(response).await?;
        self.populate(&now, piece.range.start, &piece.bytes, Vec::new());
        cached.push(piece);
        Ok(Opened::Validated(now, cached))
    }

    /// Reads ranges of a version; `pieces` are already read. `None`: the object has another version now.
    async fn read_version(
        self: &Arc<Self>,
        path: &Path,
        entry: &Arc<ObjectEntry>,
        ranges: &[Range<u64>],
        mut pieces: Vec<Piece>,
        sent: &mut SentRequests,
    ) -> Result<Option<Vec<Bytes>>> {
        let cached =
            |range: &Range<u64>| part_of_pieces(&pieces, range).or_else(|| entry.cached(range));
        let mut found = try_list(ranges.len(), ranges.iter().map(cached))?;
        let missing = |found: &[Option<Bytes>]| {
            let missing = ranges.iter().zip(found).filter(|(_, found)| found.is_none());
            try_list(ranges.len(), missing.map(|(range, _)| range.clone()))
        };
        if found.iter().all(Option::is_some) {
            return Ok(found.into_iter().collect());
        }
        let Some(watch) = self.watch(entry) else { return Ok(None) };
        // First share requests with other callers; then request the bytes still missing alone (V2).
        let (claims, waits) = (self.home.may_claim_pages(), self.home.may_wait_for_claims());
        for is_first in [true, false] {
            let (claims, waits) = (claims && is_first, waits && is_first);
            let wanted = missing(&found)?;
            if wanted.is_empty() {
                break;
            }
            let planned = self.plan_fetches(entry, &wanted, claims, waits)?;
            let mut requests = try_empty(planned.len())?;
            for wanted in planned {
                let entry = Arc::clone(entry);
                let fetch = Arc::clone(self).fetch(path.clone(), entry, wanted, watch.clone());
                requests.push(spawn_if_runtime(fetch));
            }
            // A read whose pages others have claimed follows them, so it says nothing about the order.
            if claims
                && !requests.is_empty()
                && let [range] = ranges
            {
                self.read_ahead(path, entry, range, &watch);
            }
            for fetched in try_join_all(requests).await? {
                let fetched = fetched.map_err(|failed| {
                    let begins = |range: &Range<u64>| failed.range.contains(&range.start);
                    sent.failed_late = !ranges.iter().any(begins);
                    failed.error
                });
                match fetched? {
                    FetchOutcome::Piece(piece) => {
                        sent.has_asked = true;
                        pieces.push(piece);
                    }
                    FetchOutcome::Cached => {}
                    FetchOutcome::Changed => return Ok(None),
                }
            }
            for (range, found) in ranges.iter().zip(&mut found).filter(|(_, found)| found.is_none())
            {
                *found = part_of_pieces(&pieces, range).or_else(|| entry.cached(range));
                if found.is_none() && waits {
                    entry.allocation.blob.arrival(entry.allocation.to_blob(range)).await;
                    *found = entry.cached(range);
                }
            }
        }
        Ok(found.into_iter().collect())
    }

    /// Plans the requests for missing ranges. `claims`: claim their pages. `waits`: leave out pages that other callers have
    /// claimed, as the caller waits for these.
    fn plan_fetches(
        &self,
        entry: &Arc<ObjectEntry>,
        wanted: &[Range<u64>],
        claims: bool,
        waits: bool,
    ) -> Result<Vec<Fetch>> {
        let unclaimed = |range| Fetch { range, fills: Vec::new(), on_disk: false };
        let within = |range: Range<u64>| range.start..range.end.min(entry.meta.size);
        if !(claims && waits) {
            let groups = self.coalesced_pages(wanted)?;
            let len = groups.len();
            return try_list(len, groups.into_iter().map(|range| unclaimed(within(range))));
        }
        let merged = self.merged_pages(wanted, 0)?;
        let mut requests: Vec<Fetch> = try_empty(merged.len() + 1)?;
        let mut on_disk = Vec::new();
        let gap_bytes = self.gap_of(wanted.len());
        for range in merged {
            let claim = entry.claim(&within(range.clone()));
            if !claim.is_complete {
                // No free frames for the whole range. The claims are dropped, and the range is requested without them.
                requests.push(unclaimed(within(range)));
                continue;
            }
            for fill in self.split_off_disk_pages(entry, claim.fills, &mut on_disk) {
                let range = within(entry.allocation.to_object(&fill.range()));
                match requests.last_mut() {
                    Some(last)
                        if !last.fills.is_empty() && range.start - last.range.end <= gap_bytes =>
                    {
                        last.range.end = range.end;
                        last.fills.push(fill);
                    }
                    _ => requests.push(Fetch { range, fills: vec![fill], on_disk: false }),
                }
            }
        }
        if !on_disk.is_empty() {
            requests.push(Fetch { range: 0..0, fills: on_disk, on_disk: true });
        }
        Ok(requests)
    }

    /// Moves the claimed pages that are on the disk to `on_disk`, and returns the rest.
    fn split_off_disk_pages(
        &self,
        entry: &ObjectEntry,
        fills: Vec<Fill>,
        on_disk: &mut Vec<Fill>,
    ) -> Vec<Fill> {
        let Some((tier, object)) = self.disk_object(entry) else { return fills };
        let page_bytes = self.allocator.page_bytes();
        let mut missing = Vec::new();
        for mut fill in fills {
            let range = entry.allocation.to_object(&fill.range());
            let mut pages = range.start / page_bytes..range.end.div_ceil(page_bytes);
            while !pages.is_empty() {
                let (is_present, run) = tier.leading_run(&object, pages.clone());
                let part = fill.split_front(run as usize);
                if is_present {
                    on_disk.push(part)
                } else {
                    missing.push(part)
                }
                pages.start += run;
            }
        }
        missing
    }

    /// Reads ahead of sequential misses, by background requests.
    fn read_ahead(
        self: &Arc<Self>,
        path: &Path,
        entry: &Arc<ObjectEntry>,
        range: &Range<u64>,
        watch: &Option<Stamp>,
    ) {
        let asked = self.allocator.round_to_pages(range);
        let sequential_end = entry.sequential_end.swap(asked.end, Relaxed);
        if !(asked.start..asked.end).contains(&sequential_end) {
            entry.readahead_bytes.store(0, Relaxed);
            return;
        }
        let least = WINDOW_FACTOR * (asked.end - asked.start);
        let window = entry.readahead_bytes.load(Relaxed).max(least).min(self.readahead_bytes_max);
        entry.readahead_bytes.store(window * 2, Relaxed);
        let ahead = asked.end..self.allocator.round_to_pages(&(0..asked.end + window)).end;
        if window == 0 || ahead.start >= entry.meta.size {
            return;
        }
        entry.sequential_end.store(ahead.end, Relaxed);
        let Ok(planned) = self.plan_fetches(entry, &[ahead], true, true) else { return };
        for wanted in planned {
            if !wanted.fills.is_empty() {
                let entry = Arc::clone(entry);
                let fetch = Arc::clone(self).fetch(path.clone(), entry, wanted, watch.clone());
                // If it fails, a later read of these pages sends its own request.
                drop(tokio::spawn(fetch));
            }
        }
    }

    /// The ranges of the requests to send: rounded out to pages, merged across gaps of `gap_bytes`, sorted.
    fn coalesced_pages(&self, ranges: &[Range<u64>]) -> Result<Vec<Range<u64>>> {
        self.merged_pages(ranges, self.gap_of(ranges.len()))
    }

    /// The largest gap across which a call merges that many ranges.
    fn gap_of(&self, ranges: usize) -> u64 {
        self.gap_bytes.min(GAPS_BYTES_MAX / ranges.max(1) as u64)
    }

    fn merged_pages(&self, ranges: &[Range<u64>], gap_bytes: u64) -> Result<Vec<Range<u64>>> {
        let rounded = ranges.iter().map(|range| self.allocator.round_to_pages(range));
        let mut merged = try_list(ranges.len(), rounded)?;
        merged.sort_unstable_by_key(|range| range.start);
        merged.dedup_by(|range, last| {
            let is_near = range.start <= last.end.saturating_add(gap_bytes);
            if is_near {
                last.end = last.end.max(range.end);
            }
            is_near
        });
        Ok(merged)
    }
}

/// Whether the bounds of the ranges depend on the length of the object.
fn is_open(asked: &[Option<GetRange>]) -> bool {
    !asked.iter().all(|range| matches!(range, Some(GetRange::Bounded(_))))
}

/// The ranges, if all of them are bounded.
fn bounded(asked: &[Option<GetRange>]) -> Result<Option<Vec<Range<u64>>>> {
    let bounds = |range: &Option<GetRange>| match range {
        Some(GetRange::Bounded(range)) => Some(range.clone()),
        _ => None,
    };
    let ranges = try_list(asked.len(), asked.iter().map_while(bounds))?;
    Ok((ranges.len() == asked.len()).then_some(ranges))
}

/// Resolves a range in an object of `size` bytes. `None` if it is empty or if the store has to return the error.
pub(crate) fn resolve_range(asked: &Option<GetRange>, size: u64) -> Option<Range<u64>> {
    let range = match asked {
        None => 0..size,
        Some(range) => range.as_range(size).ok()?,
    };
    (range.start < range.end).then_some(range)
}

/// The bytes of a range, if one of the pieces contains all of it.
fn part_of_pieces(pieces: &[Piece], range: &Range<u64>) -> Option<Bytes> {
    pieces.iter().find_map(|piece| piece.bytes_of(range))
}
