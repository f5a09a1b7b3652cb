//! Reads by way of the server.
//!
//! - **RD1** A call returns bytes of one version, as the server's replies name it. When another version shows up, the call
//!   starts again; a stream that has returned bytes ends with `Precondition`.
//! - **RD2** A copy from the mapping may fail although the server has just read the bytes, as pages are evicted at any
//!   time. Then the server is asked for the bytes themselves, in messages.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::try_join_all;
use object_store::path::Path;
use object_store::{Attributes, Error, GetOptions, GetRange, ObjectMeta, Result};

use crate::client::attachment::Attachment;
use crate::client::client_parts::ClientParts;
use crate::client::link::Answer;
use crate::client::objects::{KnownObject, is_named, is_same_version, strong_tag};
use crate::client::stats::ClientCounters;
use crate::protocol::{Conditions, ObjectHead, RANGES_MAX, ReadMessage, Request};
use millpond_objects::serving::PIECE_BYTES_MAX;

/// Restarts of a read whose object changes version.
const VERSIONS_MAX: u32 = 4;

/// The outcome of a read by the server.
pub(crate) enum Outcome {
    Read(ServerRead),
    /// The store has to serve the read: no server answers, or it says so.
    FromStore,
}

/// A version of an object, and bytes of it.
pub(crate) struct ServerRead {
    pub(crate) version: ReadVersion,
    /// For each range its start and bytes.
    pub(crate) parts: Vec<(u64, Bytes)>,
}

/// A version that a reply has named.
#[derive(Clone)]
pub(crate) enum ReadVersion {
    Known(Arc<KnownObject>),
    /// The object is not cached.
    Uncached(Box<(ObjectMeta, Attributes)>),
}

impl ReadVersion {
    pub(crate) fn meta(&self) -> &ObjectMeta {
        match self {
            ReadVersion::Known(object) => &object.meta,
            ReadVersion::Uncached(uncached) => &uncached.0,
        }
    }

    pub(crate) fn attributes(&self) -> &Attributes {
        match self {
            ReadVersion::Known(object) => &object.attributes,
            ReadVersion::Uncached(uncached) => &uncached.1,
        }
    }

    /// Whether a later reply can show that it is of this version: by its place, a strong ETag or a version field.
    pub(crate) fn is_identified(&self) -> bool {
        matches!(self, ReadVersion::Known(_)) || is_named(self.meta())
    }

    /// Whether the replies are of one version (RD1).
    pub(crate) fn is_same(&self, other: &ReadVersion) -> bool {
        match (self, other) {
            (ReadVersion::Known(one), ReadVersion::Known(other)) => one.is_same_version(other),
            (one, other) => is_named(one.meta()) && is_same_version(one.meta(), other.meta()),
        }
    }
}

/// A read for the server.
pub(crate) struct ServerRequest<'r> {
    pub(crate) location: &'r Path,
    pub(crate) ranges: Vec<Option<GetRange>>,
    pub(crate) conditions: Conditions,
    /// A version that this call has validated.
    pub(crate) held: Option<&'r KnownObject>,
}

impl ClientParts {
    /// Reads by the server, for which the caller has an attachment.
    pub(crate) async fn ask_server(
        &self,
        attachment: &Arc<Attachment>,
        request: ServerRequest<'_>,
    ) -> Result<Outcome> {
        let ServerRequest { location, ranges, conditions, held } = request;
        let held = held.map(|object| (object.place.slot, object.place.number));
        let location_text = location.to_string();
        let mut message =
            ReadMessage { location: location_text, ranges, conditions, held, wants_bytes: false };
        let bytes_max = message.bytes_max().min(PIECE_BYTES_MAX);
        loop {
            ClientCounters::add(&self.counters.requests);
            let asked = Request::Read(message.clone());
            let (head, bytes) = match attachment.link.ask(&asked, bytes_max).await {
                Ok(Answer::Object(head, bytes)) => (head, bytes),
                Ok(Answer::Failed(failure)) => return Err(failure.into_error()),
                Ok(Answer::Bypass) => {
                    ClientCounters::add(&self.counters.bypassed);
                    return Ok(Outcome::FromStore);
                }
                Ok(Answer::Done(_)) | Err(_) => {
                    ClientCounters::add(&self.counters.fallbacks);
                    return Ok(Outcome::FromStore);
                }
            };
            let version = version_of(location, &head);
            let parts = if head.has_bytes {
                split(&head, &bytes)
            } else if let ReadVersion::Known(object) = &version {
                let copy = |part: &crate::protocol::PartHead| {
                    let bytes = attachment.copy(object, part.start, part.len)?;
                    Some((part.start, bytes))
                };
                head.parts.iter().map(copy).collect()
            } else {
                None
            };
            if let ReadVersion::Known(object) = &version {
                attachment.objects.insert(Arc::clone(object));
            }
            match parts {
                Some(parts) if parts.len() == message.ranges.len() => {
                    return Ok(Outcome::Read(ServerRead { version, parts }));
                }
                // RD2. The version was just validated, but may be another one now.
                None if !message.wants_bytes => {
                    message.wants_bytes = true;
                    if let ReadVersion::Known(object) = &version {
                        message.held = Some((object.place.slot, object.place.number));
                    }
                }
                _ => return Ok(Outcome::FromStore),
            }
        }
    }

    /// Reads bounded ranges of one version. `None`: the store has to serve them.
    pub(crate) async fn read_ranges(
        self: &Arc<Self>,
        location: &Path,
        ranges: &[Range<u64>],
    ) -> Result<Option<Vec<Bytes>>> {
        ClientCounters::add(&self.counters.misses);
        for _ in 0..VERSIONS_MAX {
            let Some(attachment) = self.attached().await else {
                ClientCounters::add(&self.counters.fallbacks);
                return Ok(None);
            };
            match self.try_read_ranges(&attachment, location, ranges).await? {
                RangesRead::All(bytes) => return Ok(Some(bytes)),
                RangesRead::FromStore => return Ok(None),
                RangesRead::Changed => {}
            }
        }
        let source = "the object was replaced while its ranges were read".into();
        Err(Error::Precondition { path: location.to_string(), source })
    }

    async fn try_read_ranges(
        &self,
        attachment: &Arc<Attachment>,
        location: &Path,
        ranges: &[Range<u64>],
    ) -> Result<RangesRead> {
        let known = attachment.objects.find(location).filter(|known| attachment.is_fresh(known));
        let mut found: Vec<Option<Bytes>> = vec![None; ranges.len()];
        let mut version = known.clone().map(ReadVersion::Known);
        // A range may be much longer than the object.
        let size_of = |version: &Option<ReadVersion>| {
            version.as_ref().map_or(u64::MAX, |version| version.meta().size)
        };
        let is_beyond = |size: u64| ranges.iter().any(|range| range.start >= size);
        if let Some(known) = known.filter(|known| !is_beyond(known.meta.size)) {
            let size = known.meta.size;
            for (range, found) in ranges.iter().zip(&mut found) {
                *found = attachment.copy(&known, range.start, range.end.min(size) - range.start);
            }
        }
        let mut parts = Vec::new();
        // The first group alone names the version, if it is not known, and with it the length.
        let first = version.is_none().then_some(RANGES_MAX);
        for pieces_max in first.into_iter().chain([usize::MAX]) {
            let size = size_of(&version);
            if is_beyond(size) {
                // The store's error.
                return Ok(RangesRead::FromStore);
            }
            let missing = ranges.iter().zip(&found).filter(|(_, found)| found.is_none());
            let missing = missing.flat_map(|(range, _)| pieces_of(range, size));
            let pieces: Vec<Range<u64>> = missing.skip(parts.len()).take(pieces_max).collect();
            let mut groups = grouped(&pieces);
            if version.is_none() {
                groups.truncate(1);
            }
            let held = match &version {
                Some(ReadVersion::Known(object)) => Some(Arc::clone(object)),
                _ => None,
            };
            let reads = groups.into_iter().map(|group| {
                let ranges = group.iter().map(|range| Some(GetRange::Bounded(range.clone())));
                let request = ServerRequest {
                    location,
                    ranges: ranges.collect(),
                    conditions: Conditions::default(),
                    held: held.as_deref(),
                };
                self.ask_server(attachment, request)
            });
            for outcome in try_join_all(reads).await? {
                let Outcome::Read(read) = outcome else { return Ok(RangesRead::FromStore) };
                let expected = version.get_or_insert_with(|| read.version.clone());
                if !expected.is_same(&read.version) {
                    // RD1.
                    attachment.objects.remove(location);
                    return Ok(RangesRead::Changed);
                }
                parts.extend(read.parts);
            }
        }
        let size = size_of(&version);
        let mut parts = parts.into_iter().peekable();
        let mut all = Vec::with_capacity(ranges.len());
        for (range, found) in ranges.iter().zip(found) {
            let bytes = match found {
                Some(bytes) => bytes,
                None => {
                    let pieces = pieces_of(range, size).filter_map(|_| parts.next());
                    match joined(pieces.collect(), range) {
                        Some(bytes) => bytes,
                        None => return Ok(RangesRead::FromStore),
                    }
                }
            };
            all.push(bytes);
        }
        Ok(RangesRead::All(all))
    }
}

enum RangesRead {
    All(Vec<Bytes>),
    FromStore,
    /// Another version showed up.
    Changed,
}

/// The range in an object of `size` bytes, in pieces that a server returns whole. The range begins in the object.
fn pieces_of(range: &Range<u64>, size: u64) -> impl Iterator<Item = Range<u64>> + use<> {
    let (start, end) = (range.start, range.end.min(size));
    let starts = (0..(end - start).div_ceil(PIECE_BYTES_MAX))
        .map(move |piece| start + piece * PIECE_BYTES_MAX);
    starts.map(move |start| start..end.min(start.saturating_add(PIECE_BYTES_MAX)))
}

/// Pieces that fit into one request each.
fn grouped(pieces: &[Range<u64>]) -> Vec<&[Range<u64>]> {
    let mut groups = Vec::new();
    let mut rest = pieces;
    while !rest.is_empty() {
        let mut sum = 0;
        let fits = |piece: &&Range<u64>| {
            sum += piece.end - piece.start;
            sum <= PIECE_BYTES_MAX
        };
        let len = rest.iter().take(RANGES_MAX).take_while(fits).count().max(1);
        let (group, left) = rest.split_at(len);
        groups.push(group);
        rest = left;
    }
    groups
}

/// The bytes of a range from those of its pieces, which may end with the object.
fn joined(mut pieces: Vec<(u64, Bytes)>, range: &Range<u64>) -> Option<Bytes> {
    if pieces.len() == 1 {
        let (start, bytes) = pieces.pop()?;
        return (start == range.start && bytes.len() as u64 <= range.end - range.start)
            .then_some(bytes);
    }
    let mut all = Vec::new();
    all.try_reserve_exact(pieces.iter().map(|(_, bytes)| bytes.len()).sum()).ok()?;
    for (start, bytes) in pieces {
        if start != range.start + all.len() as u64 {
            return None;
        }
        all.extend_from_slice(&bytes);
    }
    Some(all.into())
}

fn version_of(location: &Path, head: &ObjectHead) -> ReadVersion {
    let (meta, attributes) = (head.meta(location.clone()), head.attributes.clone());
    match head.place {
        Some(place) => {
            let object = KnownObject::new(meta, attributes, place);
            object.mark_used();
            ReadVersion::Known(Arc::new(object))
        }
        None => ReadVersion::Uncached(Box::new((meta, attributes))),
    }
}

/// The parts of a reply whose bytes are in messages.
fn split(head: &ObjectHead, bytes: &Bytes) -> Option<Vec<(u64, Bytes)>> {
    let mut from = 0;
    let mut part = |part: &crate::protocol::PartHead| {
        let end = from + usize::try_from(part.len).ok()?;
        let bytes = bytes.get(from..end).map(|_| bytes.slice(from..end))?;
        from = end;
        Some((part.start, bytes))
    };
    head.parts.iter().map(&mut part).collect()
}

/// The condition under which the store returns bytes of this version only, if it has such a name.
pub(crate) fn version_condition(meta: &ObjectMeta) -> GetOptions {
    let mut options = GetOptions::new();
    match (strong_tag(meta), &meta.version) {
        (Some(tag), _) => options.if_match = Some(tag.to_owned()),
        (None, version) => options.version.clone_from(version),
    }
    options
}
