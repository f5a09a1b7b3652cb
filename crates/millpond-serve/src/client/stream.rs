//! Long reads: pieces from the mapping, or by the server, or from the store when no server answers any more.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::stream::{self, BoxStream, StreamExt};
use millpond_objects::checked_body;
use millpond_objects::serving::PIECE_BYTES_MAX;
use object_store::path::Path;
use object_store::{Error, GetRange, Result};

use crate::client::attachment::Attachment;
use crate::client::client_parts::ClientParts;
use crate::client::objects::{is_named, is_same_version, strong_tag};
use crate::client::read::{Outcome, ReadVersion, ServerRequest, version_condition};
use crate::client::stats::ClientCounters;
use crate::protocol::Conditions;

/// The most bytes that are copied from the mapping at a time.
const COPY_BYTES_MAX: u64 = 1 << 20;

/// The rest of a read of one version.
pub(crate) struct RestOfRead {
    parts: Arc<ClientParts>,
    attachment: Arc<Attachment>,
    location: Path,
    version: ReadVersion,
    range: Range<u64>,
    /// The rest, from the store.
    from_store: Option<BoxStream<'static, Result<Bytes>>>,
}

impl RestOfRead {
    pub(crate) fn new(
        parts: &Arc<ClientParts>,
        attachment: &Arc<Attachment>,
        location: &Path,
        version: ReadVersion,
        range: Range<u64>,
    ) -> RestOfRead {
        RestOfRead {
            parts: Arc::clone(parts),
            attachment: Arc::clone(attachment),
            location: location.clone(),
            version,
            range,
            from_store: None,
        }
    }

    pub(crate) fn into_stream(self) -> BoxStream<'static, Result<Bytes>> {
        let next = |reading: Option<RestOfRead>| async move {
            let mut reading = reading?;
            match Box::pin(reading.next_piece()).await {
                Ok(Some(bytes)) => Some((Ok(bytes), Some(reading))),
                Ok(None) => None,
                Err(error) => Some((Err(error), None)),
            }
        };
        stream::unfold(Some(self), next).boxed()
    }

    async fn next_piece(&mut self) -> Result<Option<Bytes>> {
        if let Some(rest) = &mut self.from_store {
            return rest.next().await.transpose();
        }
        let Range { start, end } = self.range.clone();
        if start >= end {
            return Ok(None);
        }
        let piece = match self.cached_piece() {
            Some(bytes) => {
                self.parts.counters.hit(bytes.len() as u64);
                bytes
            }
            None => {
                ClientCounters::add(&self.parts.counters.misses);
                match self.piece_of_server().await? {
                    Some(bytes) => bytes,
                    None => return self.read_store().await,
                }
            }
        };
        self.range.start += piece.len() as u64;
        Ok(Some(piece))
    }

    /// The version was validated by this read (client.CL3).
    fn cached_piece(&self) -> Option<Bytes> {
        let ReadVersion::Known(object) = &self.version else { return None };
        if self.attachment.link.is_gone() {
            return None;
        }
        let len = (self.range.end - self.range.start).min(COPY_BYTES_MAX);
        self.attachment.copy(object, self.range.start, len)
    }

    async fn piece_of_server(&mut self) -> Result<Option<Bytes>> {
        let Range { start, end } = self.range.clone();
        let ReadVersion::Known(object) = &self.version else { return Ok(None) };
        let piece = start..end.min(start + PIECE_BYTES_MAX);
        let if_match = strong_tag(&object.meta).map(str::to_owned);
        let request = ServerRequest {
            location: &self.location,
            ranges: vec![Some(GetRange::Bounded(piece))],
            conditions: Conditions { if_match, ..Conditions::default() },
            held: Some(object),
        };
        match self.parts.ask_server(&self.attachment, request).await? {
            Outcome::FromStore => Ok(None),
            Outcome::Read(mut read) => {
                let part = read.parts.pop().filter(|part| part.0 == start && !part.1.is_empty());
                match part {
                    Some((_, bytes)) if self.version.is_same(&read.version) => Ok(Some(bytes)),
                    _ => Err(self.changed()),
                }
            }
        }
    }

    /// Requests the rest from the store.
    async fn read_store(&mut self) -> Result<Option<Bytes>> {
        let meta = self.version.meta();
        let options =
            version_condition(meta).with_range(Some(GetRange::Bounded(self.range.clone())));
        let response = self.parts.store.get_opts(&self.location, options).await?;
        // Without a name of the version, the time of the last write is all that shows another one.
        let is_same = is_same_version(meta, &response.meta)
            && (is_named(meta) || meta.last_modified == response.meta.last_modified);
        if !is_same || response.range != self.range {
            return Err(self.changed());
        }
        let rest = self.from_store.insert(checked_body(response));
        rest.next().await.transpose()
    }

    fn changed(&self) -> Error {
        let source = "the object was replaced while it was read".into();
        Error::Precondition { path: self.location.to_string(), source }
    }
}
