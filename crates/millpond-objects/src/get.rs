//! How ranges of one object are read, all of one version.
//!
//! ```text
//!            +-- none known: one caller asks, others wait for its answer's head --+
//!            |                                                                    v
//!   known? --+-- too old: asked with what is missing, or If-None-Match ------> a version
//!            +-- fresh -----------------------------------------------------------^
//!   version: cached? -> else claim, spawn requests with If-Match, wait for own and others' -> bytes
//!               ^                                                     |
//!               +---- another version by now: forget, begin anew -----+
//! ```
//!
//! - **V1** What one call returns is of one version: what was collected is dropped when another one shows up.
//!   The conditions of the call are checked on that version, whether it was cached or has just been fetched.
//! - **V2** Nobody waits for another caller more than once: if what that one was to bring is not there
//!   afterwards, each makes its own request. So a failing store fails all at once, not one by one.
//! - **V3** A range that depends on the object's length (all of it, from an offset on, a suffix) is resolved by the
//!   length of the version that is served, each time that the read begins again. The store gets it as the caller gave it
//!   unless the request names a version: so an error of the store is the error of the caller's own range.

use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use futures_util::future::try_join_all;
use millpond::Fill;
use object_store::path::Path;
use object_store::{Error, GetOptions, GetRange, GetResult, ObjectMeta, Result, coalesce_ranges};

use crate::answer::Head;
use crate::directory::{Known, Stamp};
use crate::fetch::{Fetched, Piece, Wanted, run};
use crate::inner::{Inner, VERSIONS_MAX};
use crate::opening::Turn;
use crate::stats::Counters;

/// The first window of read-ahead, in multiples of what was asked for. Chosen, not measured.
const WINDOW_FACTOR: u64 = 4;

/// A longer range is a stream of its own, and not collected. Chosen, not measured.
pub(crate) const COLLECTED_BYTES_MAX: u64 = 4 << 20;

/// The result of a collected read of an object.
pub(crate) enum Collected {
    /// A piece for each range that was asked for.
    Pieces(Head, Vec<Piece>),
    /// The answer is too long to be collected, or nothing is known of the object.
    Stream,
    /// The store below answers, possibly with an error.
    Pass,
}

/// What of some ranges is cached, and fresh.
pub(crate) enum Cached {
    All(Vec<Bytes>),
    /// Of that version.
    Part(Arc<Known>, Vec<Piece>),
    Unknown,
}

/// What is known of an object when its bytes are asked for.
enum Opened {
    /// Its version, which nobody had to be asked for, and bytes of it that are at hand.
    Fresh(Arc<Known>, Vec<Piece>),
    /// Its version, and bytes of it that are at hand.
    Known(Arc<Known>, Vec<Piece>),
    /// An answer that can't be cached.
    Uncached(Head, Piece),
    /// The version has more bytes in the range than are collected, or is unknown.
    Stream,
    /// Somebody else has asked meanwhile.
    Again,
}

impl Inner {
    /// What of some ranges is cached; where all is, that is found without a lock or a shared write.
    pub(crate) fn look_up(&self, path: &Path, ranges: &[Range<u64>]) -> Cached {
        let look = |known: &Arc<Known>| {
            let size = known.meta.size;
            if !self.is_fresh(known) || ranges.iter().any(|range| range.start >= size) {
                return Cached::Unknown;
            }
            let mut pieces = Vec::with_capacity(ranges.len());
            for range in ranges {
                let range = range.start..range.end.min(size);
                pieces.extend(known.cached(&range).map(|bytes| Piece { range, bytes }));
            }
            if pieces.len() < ranges.len() {
                return Cached::Part(Arc::clone(known), pieces);
            }
            known.note_use();
            self.counters.saved.add();
            Cached::All(pieces.into_iter().map(|piece| piece.bytes).collect())
        };
        self.directory.with(path.as_ref(), look).unwrap_or(Cached::Unknown)
    }

    /// Ranges of an object, each as far as it lies within it. `asked`: either bounded ranges, or one that depends on
    /// the object's length (V3).
    pub(crate) async fn ranges(
        self: &Arc<Self>,
        path: &Path,
        asked: &[Option<GetRange>],
        conditions: &GetOptions,
        mut found: Option<(Arc<Known>, Vec<Piece>)>,
    ) -> Result<Collected> {
        let key = path.as_ref();
        let mut may_wait = self.home.may_claim() && self.home.may_wait();
        let (mut versions, mut has_asked) = (0, false);
        while versions < VERSIONS_MAX {
            let opened = match found.take() {
                Some((known, pieces)) => Opened::Fresh(known, pieces),
                None => self.open(path, key, asked, may_wait).await?,
            };
            let (known, pieces) = match opened {
                Opened::Fresh(known, pieces) => (known, pieces),
                Opened::Known(known, pieces) => {
                    has_asked = true;
                    (known, pieces)
                }
                Opened::Uncached(head, piece) => {
                    let [asked] = asked else { return Ok(Collected::Pass) };
                    conditions.check_preconditions(head.meta())?;
                    let range = resolve(asked, head.meta().size);
                    let part = range.and_then(|range| piece.of(range));
                    return Ok(
                        part.map_or(Collected::Pass, |part| Collected::Pieces(head, vec![part]))
                    );
                }
                Opened::Stream => return Ok(Collected::Stream),
                Opened::Again => {
                    may_wait = false;
                    continue;
                }
            };
            known.note_use();
            // V1
            conditions.check_preconditions(&known.meta)?;
            // V3
            let resolved = asked.iter().map(|range| resolve(range, known.meta.size));
            let Some(ranges) = resolved.collect::<Option<Vec<_>>>() else {
                return Ok(Collected::Pass);
            };
            if is_open(asked) && ranges[0].end - ranges[0].start > COLLECTED_BYTES_MAX {
                return Ok(Collected::Stream);
            }
            match self.serve(path, &known, &ranges, pieces, &mut has_asked).await {
                Ok(Some(bytes)) => {
                    if !has_asked {
                        self.counters.saved.add();
                    }
                    let pieces = ranges.into_iter().zip(bytes);
                    let pieces = pieces.map(|(range, bytes)| Piece { range, bytes }).collect();
                    return Ok(Collected::Pieces(Head::Known(known), pieces));
                }
                Ok(None) => {}
                // A store that ignores If-Match refuses a range beyond the end of the next version.
                Err(_) if is_open(asked) || known.has_first_byte(&ranges) => {
                    return Ok(Collected::Pass);
                }
                Err(error) => return Err(error),
            }
            self.directory.forget_version(&known);
            versions += 1;
        }
        Ok(Collected::Pass)
    }

    /// Finds out an object's version, as far as it has to be asked for.
    async fn open(
        self: &Arc<Self>,
        path: &Path,
        key: &str,
        asked: &[Option<GetRange>],
        may_wait: bool,
    ) -> Result<Opened> {
        if let Some(known) = self.directory.find(key) {
            if self.is_fresh(&known) {
                return Ok(Opened::Fresh(known, Vec::new()));
            }
            return self.check(path, key, known, asked).await;
        }
        let stamp = self.stamp(key);
        let Some(ranges) = bounded(asked) else { return Ok(Opened::Stream) };
        let place = may_wait.then(|| self.opening.enter(key));
        let turn = match place {
            Some(Err(mut other)) => {
                // Its sender goes with its turn, and never sends.
                let _ = other.changed().await;
                return Ok(Opened::Again);
            }
            Some(Ok(turn)) => Some(turn),
            None => None,
        };
        let (inner, path, key) = (Arc::clone(self), path.clone(), key.to_owned());
        let first = self.groups(&ranges).remove(0);
        run(async move { inner.ask(path, key, stamp, first, turn).await }).await?
    }

    /// Asks for bytes of an object of which nothing is known. `turn` ends with the head of the answer: then
    /// pages are claimed, and others find them so.
    async fn ask(
        self: Arc<Self>,
        path: Path,
        key: String,
        stamp: Stamp,
        range: Range<u64>,
        turn: Option<Turn>,
    ) -> Result<Opened> {
        let options = GetOptions::new().with_range(Some(GetRange::Bounded(range)));
        let answer = self.request(&path, options).await?;
        let Some(known) = self.admit(&key, &stamp, &answer) else {
            drop(turn);
            return self.uncached(answer).await;
        };
        let fills = match &turn {
            Some(_) => known.claim(&answer.range).fills,
            None => Vec::new(),
        };
        drop(turn);
        let piece = self.receive(answer).await?;
        self.bring(&known, piece.range.start, &piece.bytes, fills);
        known.reached.store(piece.range.end, Relaxed);
        Ok(Opened::Known(known, vec![piece]))
    }

    /// Ranges past the cache, all of one version as far as the answers show it: the store's own `get_ranges` may make
    /// several requests without a condition.
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
                let answer = self.request(path, options).await?;
                let (meta, first) = (&answer.meta, first.get_or_init(|| answer.meta.clone()));
                let is_same = (&meta.e_tag, &meta.version, meta.size, meta.last_modified)
                    == (&first.e_tag, &first.version, first.size, first.last_modified);
                if !is_same {
                    let source = "the object was replaced while its ranges were read".into();
                    return Err(Error::Precondition { path: path.to_string(), source });
                }
                // A merged range hides it that one of its parts begins beyond the end.
                if let Some(beyond) = ranges.iter().find(|range| range.start >= first.size) {
                    let beyond = Some(GetRange::Bounded(beyond.clone()));
                    self.request(path, GetOptions::new().with_range(beyond)).await?;
                    let source = "the object has grown while its ranges were read".into();
                    return Err(Error::Precondition { path: path.to_string(), source });
                }
                Ok(self.receive(answer).await?.bytes)
            };
            outcome = coalesce_ranges(ranges, fetch, self.gap_bytes).await;
            if !matches!(outcome, Err(Error::Precondition { .. })) {
                break;
            }
        }
        outcome
    }

    async fn uncached(&self, answer: GetResult) -> Result<Opened> {
        let head = Head::Uncached(answer.meta.clone(), answer.attributes.clone());
        Ok(Opened::Uncached(head, self.receive(answer).await?))
    }

    /// Asks whether an object is still of the version that is known: with what is missing of it, or alone.
    async fn check(
        self: &Arc<Self>,
        path: &Path,
        key: &str,
        known: Arc<Known>,
        asked: &[Option<GetRange>],
    ) -> Result<Opened> {
        let stamp = self.stamp(key);
        let mut cached = Vec::new();
        let mut missing = Vec::new();
        for asked in asked {
            // The length of the known version serves to find cached bytes only.
            let within = resolve(asked, known.meta.size);
            let bytes = within.as_ref().and_then(|within| known.cached(within));
            match (within, bytes) {
                (Some(range), Some(bytes)) => cached.push(Piece { range, bytes }),
                // Read when its version is known to be the newest.
                (Some(range), None) if self.disk_run(&known, range.start, range.end) == range => {}
                _ => missing.push(asked.clone()),
            }
        }
        let range = match bounded(if missing.is_empty() { asked } else { &missing }) {
            Some(ranges) => Some(GetRange::Bounded(self.groups(&ranges).remove(0))),
            // V3
            None => asked[0].clone(),
        };
        let mut options = GetOptions::new().with_range(range);
        if missing.is_empty() {
            options = options.with_if_none_match(known.meta.e_tag.clone());
        }
        let answer = match self.request(path, options).await {
            Ok(answer) => answer,
            Err(Error::NotModified { .. }) => {
                Counters::add(&self.counters.not_modified, 1);
                known.checked_ms.fetch_max(stamp.asked_ms, Relaxed);
                return Ok(Opened::Known(known, cached));
            }
            Err(error) => {
                if matches!(error, Error::NotFound { .. }) {
                    self.directory.forget_version(&known);
                }
                return Err(error);
            }
        };
        if is_open(asked) && answer.range.end - answer.range.start > COLLECTED_BYTES_MAX {
            return Ok(Opened::Stream);
        }
        let Some(now) = self.admit(key, &stamp, &answer) else {
            return self.uncached(answer).await;
        };
        if !Arc::ptr_eq(&known, &now) {
            // V1
            cached.clear();
        }
        let piece = self.receive(answer).await?;
        self.bring(&now, piece.range.start, &piece.bytes, Vec::new());
        cached.push(piece);
        Ok(Opened::Known(now, cached))
    }

    /// Bytes of ranges of a version, of which `pieces` are at hand; `None`: it is not the object's any more. Sets
    /// `has_asked` where the store was asked.
    async fn serve(
        self: &Arc<Self>,
        path: &Path,
        known: &Arc<Known>,
        ranges: &[Range<u64>],
        mut pieces: Vec<Piece>,
        has_asked: &mut bool,
    ) -> Result<Option<Vec<Bytes>>> {
        let mut found: Vec<_> = ranges
            .iter()
            .map(|range| part(&pieces, range).or_else(|| known.cached(range)))
            .collect();
        let missing = |found: &[Option<Bytes>]| -> Vec<Range<u64>> {
            let missing = ranges.iter().zip(found).filter(|(_, found)| found.is_none());
            missing.map(|(range, _)| range.clone()).collect()
        };
        if missing(&found).is_empty() {
            return Ok(found.into_iter().collect());
        }
        let Some(watch) = self.watch(known) else { return Ok(None) };
        // With others, and if they did not bring it, alone (V2).
        let (claims, waits) = (self.home.may_claim(), self.home.may_wait());
        for is_first in [true, false] {
            let (claims, waits) = (claims && is_first, waits && is_first);
            let wanted = missing(&found);
            if wanted.is_empty() {
                break;
            }
            let mut requests = Vec::new();
            for wanted in self.requests(known, &wanted, claims, waits) {
                let known = Arc::clone(known);
                let fetch = Arc::clone(self).fetch(path.clone(), known, wanted, watch.clone());
                requests.push(run(fetch));
            }
            if claims && let [range] = ranges {
                self.read_ahead(path, known, range, &watch);
            }
            for fetched in try_join_all(requests).await? {
                match fetched? {
                    Fetched::Piece(piece) => {
                        *has_asked = true;
                        pieces.push(piece);
                    }
                    Fetched::Cached => {}
                    Fetched::Changed => return Ok(None),
                }
            }
            for (range, found) in ranges.iter().zip(&mut found).filter(|(_, found)| found.is_none())
            {
                *found = part(&pieces, range).or_else(|| known.cached(range));
                if found.is_none() && waits {
                    known.place.blob.arrival(known.place.locate(range)).await;
                    *found = known.cached(range);
                }
            }
        }
        Ok(found.into_iter().collect())
    }

    /// What is to be fetched of what is missing, with the pages that each is to bring, if it `claims` them.
    /// `waits`: what others bring is waited for, and not asked for again.
    fn requests(
        &self,
        known: &Arc<Known>,
        wanted: &[Range<u64>],
        claims: bool,
        waits: bool,
    ) -> Vec<Wanted> {
        let unclaimed = |range| Wanted { range, fills: Vec::new(), on_disk: false };
        let within = |range: Range<u64>| range.start..range.end.min(known.meta.size);
        if !(claims && waits) {
            let groups = self.groups(wanted).into_iter();
            return groups.map(|range| unclaimed(within(range))).collect();
        }
        let mut requests: Vec<Wanted> = Vec::new();
        let mut on_disk = Vec::new();
        for range in self.merged(wanted, 0) {
            let claim = known.claim(&within(range.clone()));
            if claim.has_no_room {
                // Its pages are let go again: there is no telling which are missing.
                requests.push(unclaimed(within(range)));
                continue;
            }
            for fill in self.without_disk(known, claim.fills, &mut on_disk) {
                let range = within(known.place.of_object(&fill.range()));
                match requests.last_mut() {
                    Some(last)
                        if !last.fills.is_empty()
                            && range.start - last.range.end <= self.gap_bytes =>
                    {
                        last.range.end = range.end;
                        last.fills.push(fill);
                    }
                    _ => requests.push(Wanted { range, fills: vec![fill], on_disk: false }),
                }
            }
        }
        if !on_disk.is_empty() {
            requests.push(Wanted { range: 0..0, fills: on_disk, on_disk: true });
        }
        requests
    }

    /// Pages that were claimed, without those that are on the disk.
    fn without_disk(&self, known: &Known, fills: Vec<Fill>, on_disk: &mut Vec<Fill>) -> Vec<Fill> {
        let Some((tier, object)) = self.on_disk(known) else { return fills };
        let page_bytes = self.places.page_bytes();
        let mut others = Vec::new();
        for mut fill in fills {
            let range = known.place.of_object(&fill.range());
            let mut pages = range.start / page_bytes..range.end.div_ceil(page_bytes);
            while !pages.is_empty() {
                let (is_there, run) = tier.run(&object, pages.clone());
                let part = fill.split_front(run as usize);
                if is_there {
                    on_disk.push(part)
                } else {
                    others.push(part)
                }
                pages.start += run;
            }
        }
        others
    }

    /// Goes on where misses in order got to: a request of its own, which nobody waits for.
    fn read_ahead(
        self: &Arc<Self>,
        path: &Path,
        known: &Arc<Known>,
        range: &Range<u64>,
        watch: &Option<Stamp>,
    ) {
        let asked = self.places.rounded(range);
        let reached = known.reached.swap(asked.end, Relaxed);
        if !(asked.start..asked.end).contains(&reached) {
            known.window.store(0, Relaxed);
            return;
        }
        let least = WINDOW_FACTOR * (asked.end - asked.start);
        let window = known.window.load(Relaxed).max(least).min(self.readahead_bytes_max);
        known.window.store(window * 2, Relaxed);
        let ahead = asked.end..self.places.rounded(&(0..asked.end + window)).end;
        if window == 0 || ahead.start >= known.meta.size {
            return;
        }
        known.reached.store(ahead.end, Relaxed);
        for wanted in self.requests(known, &[ahead], true, true) {
            if !wanted.fills.is_empty() {
                let known = Arc::clone(known);
                let fetch = Arc::clone(self).fetch(path.clone(), known, wanted, watch.clone());
                // Whoever comes to read it asks again where it fails.
                drop(tokio::spawn(fetch));
            }
        }
    }

    /// What is asked for at once: ranges rounded out to pages, those near each other as one, in order.
    fn groups(&self, ranges: &[Range<u64>]) -> Vec<Range<u64>> {
        self.merged(ranges, self.gap_bytes)
    }

    fn merged(&self, ranges: &[Range<u64>], gap_bytes: u64) -> Vec<Range<u64>> {
        let mut rounded: Vec<_> = ranges.iter().map(|range| self.places.rounded(range)).collect();
        rounded.sort_unstable_by_key(|range| range.start);
        let mut merged: Vec<Range<u64>> = Vec::new();
        for range in rounded {
            match merged.last_mut() {
                Some(last) if range.start <= last.end.saturating_add(gap_bytes) => {
                    last.end = last.end.max(range.end);
                }
                _ => merged.push(range),
            }
        }
        merged
    }
}

/// Whether the bounds of the ranges depend on the length of the object.
fn is_open(asked: &[Option<GetRange>]) -> bool {
    !asked.iter().all(|range| matches!(range, Some(GetRange::Bounded(_))))
}

/// The ranges, if all of them are bounded.
fn bounded(asked: &[Option<GetRange>]) -> Option<Vec<Range<u64>>> {
    let bounds = |range: &Option<GetRange>| match range {
        Some(GetRange::Bounded(range)) => Some(range.clone()),
        _ => None,
    };
    asked.iter().map(bounds).collect()
}

/// The bytes of a range in an object of `size` bytes; `None` if there are none, or if the store has to return
/// the error.
pub(crate) fn resolve(asked: &Option<GetRange>, size: u64) -> Option<Range<u64>> {
    let range = match asked {
        None => 0..size,
        Some(range) => range.as_range(size).ok()?,
    };
    (range.start < range.end).then_some(range)
}

/// A range out of the pieces that were fetched.
fn part(pieces: &[Piece], range: &Range<u64>) -> Option<Bytes> {
    pieces.iter().find_map(|piece| piece.part(range))
}
