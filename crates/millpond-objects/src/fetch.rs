//! Requests to the store below.
//!
//! - **F1** A page is claimed before its request only if that runs on its own, on a runtime: who waits for
//!   the page waits for the store, and never for a caller that does not poll. Else pages are claimed when
//!   their bytes are there. A runtime of one thread runs only while somebody is in it: so those of one such
//!   runtime, the home, wait for each other, and nobody else for them ([`Home`](crate::home::Home)).
//! - **F2** Bytes are put into pages only if the answer names the version of those pages.

use std::future::Future;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use millpond::Fill;
use object_store::path::Path;
use object_store::{Error, GetOptions, GetRange, GetResult, ObjectMeta, Result};
use tokio::runtime::Handle;

use crate::directory::Known;
use crate::inner::Inner;
use crate::stats::Counters;

/// Bytes of an object that a request brought.
#[derive(Clone, Debug)]
pub(crate) struct Piece {
    pub(crate) range: Range<u64>,
    pub(crate) bytes: Bytes,
}

impl Piece {
    /// Those of a range, if all are there.
    pub(crate) fn part(&self, range: &Range<u64>) -> Option<Bytes> {
        if range.start < self.range.start || range.end > self.range.end {
            return None;
        }
        let (from, to) = (range.start - self.range.start, range.end - self.range.start);
        let (from, to) = (usize::try_from(from).ok()?, usize::try_from(to).ok()?);
        let part = self.bytes.slice(from..to);
        // A small part would keep all of it in memory, where nobody counts it.
        Some(if part.len() * 2 < self.bytes.len() { Bytes::copy_from_slice(&part) } else { part })
    }
}

/// How a request for bytes of a known version ended.
pub(crate) enum Fetched {
    Piece(Piece),
    /// The object is of another version by now, or gone.
    Changed,
}

/// Runs something on the runtime if there is one, so that it ends whoever waits for it; else in the caller.
pub(crate) async fn run<T: Send + 'static>(
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
    /// A request to the store, counted.
    pub(crate) async fn request(&self, path: &Path, options: GetOptions) -> Result<GetResult> {
        Counters::add(&self.counters.requests, 1);
        self.store.get_opts(path, options).await
    }

    /// All bytes of an answer.
    pub(crate) async fn receive(&self, answer: GetResult) -> Result<Piece> {
        let range = answer.range.clone();
        let bytes = answer.bytes().await?;
        Counters::add(&self.counters.bytes, bytes.len() as u64);
        if bytes.len() as u64 != range.end - range.start {
            let (sent, said) = (bytes.len(), range.end - range.start);
            let what = format!("{sent} bytes where {said} were announced");
            return Err(Error::Generic { store: crate::NAME, source: what.into() });
        }
        Ok(Piece { range, bytes })
    }

    /// Asks for a range of a known version, and caches it; `fills` are pages of it that were claimed.
    pub(crate) async fn fetch(
        self: Arc<Self>,
        path: Path,
        known: Arc<Known>,
        range: Range<u64>,
        fills: Vec<Fill>,
    ) -> Result<Fetched> {
        let options = only_if(&known.meta).with_range(Some(GetRange::Bounded(range.clone())));
        let answer = match self.request(&path, options).await {
            Ok(answer) => answer,
            Err(Error::Precondition { .. } | Error::NotFound { .. }) => {
                return Ok(Fetched::Changed);
            }
            Err(error) => return Err(error),
        };
        if !known.is_of(&answer.meta) || answer.range != range {
            return Ok(Fetched::Changed);
        }
        let piece = self.receive(answer).await?;
        known.bring(piece.range.start, &piece.bytes, fills);
        Ok(Fetched::Piece(piece))
    }
}

/// Only of that version, as far as the store can tell; the answer is looked at, too.
pub(crate) fn only_if(meta: &ObjectMeta) -> GetOptions {
    let options = GetOptions::new();
    match &meta.version {
        None => options.with_if_match(meta.e_tag.clone()),
        version => options.with_version(version.clone()),
    }
}

impl Known {
    /// Caches bytes of this version, from `start` on: in pages that were claimed for it, or else in those that
    /// nobody has.
    pub(crate) fn bring(&self, start: u64, bytes: &[u8], mut fills: Vec<Fill>) {
        let end = start + bytes.len() as u64;
        if fills.is_empty() {
            fills = self.claim(&(start..end)).fills;
        }
        for fill in fills {
            let wanted = self.place.of_object(&fill.range());
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
    pub(crate) fn claim(&self, range: &Range<u64>) -> millpond::Claim {
        self.place.blob.claim(self.place.locate(range))
    }

    /// Bytes of the object, if they are cached.
    pub(crate) fn cached(&self, range: &Range<u64>) -> Option<Bytes> {
        let mut bytes = Vec::with_capacity((range.end - range.start) as usize);
        let is_hit = self.place.blob.try_read(&mut bytes, self.place.locate(range));
        is_hit.then(|| bytes.into())
    }
}
