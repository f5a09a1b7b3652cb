//! [`SharedStore`]: an [`ObjectStore`] that reads by a server of this machine.

use std::fmt;
use std::io;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::stream::{self, BoxStream, StreamExt};
use millpond_objects::Freshness;
use millpond_objects::serving::CacheableReads;
use object_store::path::Path;
use object_store::{
    Attributes, CopyOptions, GetOptions, GetRange, GetResult, GetResultPayload, ListResult,
    MultipartUpload, ObjectMeta, ObjectStore, PutMultipartOptions, PutOptions, PutPayload,
    PutResult, RenameOptions, Result, UploadPart,
};

use crate::client::attachment::Attachment;
use crate::client::client_parts::ClientParts;
use crate::client::objects::KnownObject;
use crate::client::read::{Outcome, ReadVersion, ServerRead, ServerRequest};
use crate::client::stats::{ClientCounters, ClientStats};
use crate::client::stream::RestOfRead;
use crate::client::writes::{WriteNotice, forget, forget_soon};
use crate::protocol::{Conditions, Request};

/// Objects that a client knows: about 2 MiB. Chosen.
const OBJECTS_MAX: usize = 4096;

/// An object store that reads by the cache server of this machine, over the program's own store of the same objects.
///
/// Clones share one connection. Any number of tasks and threads may use it, in any runtime or none; no call blocks its thread.
/// A child of fork may use it as well, and connects itself.
///
/// Cached and fresh bytes are copied from the server's memory, without a system call. The server reads others, and
/// requests for the same bytes are merged, whichever process they come from. Lists, writes, copies and deletes go to
/// the program's own store, and so do reads for a named version, with extensions (see [`cache_if`](SharedStore::cache_if)), and
/// conditional ones of objects that are not cached and fresh. Each write notifies the server.
///
/// If no server answers, all goes to the store itself. That is logged once, and counted. A read that misses tries again
/// to connect, at most twice a second.
///
/// # Examples
///
/// See the [crate's documentation](crate).
#[derive(Clone)]
pub struct SharedStore {
    parts: Arc<ClientParts>,
}

impl SharedStore {
    /// A client of the server that listens at `socket`, for instance [`default_socket`](crate::default_socket). The server reads the
    /// same store as `store`: both have the same `Display`, or [`named`](SharedStore::named). It is connected at the first read
    /// that needs it.
    pub fn new(store: Arc<dyn ObjectStore>, socket: impl Into<PathBuf>) -> SharedStore {
        SharedStore { parts: Arc::new(ClientParts::new(store, socket.into(), OBJECTS_MAX)) }
    }

    /// Names the store as the server does, where that is not its `Display`: see [`store_name`](crate::store_name).
    ///
    /// # Panics
    ///
    /// The store has a clone.
    #[must_use]
    pub fn named(mut self, name: String) -> SharedStore {
        Arc::get_mut(&mut self.parts).expect("a store without clones").store_name = name;
        self
    }

    /// A server is used only if it validates versions at least as often as `freshness` says. Without this call the choice is
    /// the server's.
    ///
    /// # Panics
    ///
    /// The store has a clone.
    #[must_use]
    pub fn require_freshness(mut self, freshness: Freshness) -> SharedStore {
        let parts = Arc::get_mut(&mut self.parts).expect("a store without clones");
        parts.max_age = freshness.max_age();
        self
    }

    /// Which reads the server may serve: those for whose object and options `may_cache` returns true. The others go to the program's
    /// own store, as by default reads with extensions do. See
    /// [`cache_if`](millpond_objects::Builder::cache_if) of a cache in the process.
    ///
    /// # Panics
    ///
    /// The store has a clone.
    #[must_use]
    pub fn cache_if(
        mut self,
        may_cache: impl Fn(&Path, &GetOptions) -> bool + Send + Sync + 'static,
    ) -> SharedStore {
        let parts = Arc::get_mut(&mut self.parts).expect("a store without clones");
        parts.cacheable_reads = CacheableReads::new(may_cache);
        self
    }

    /// The length of an object that is known and fresh. Asks neither the server nor the store.
    #[must_use]
    pub fn cached_size(&self, location: &Path) -> Option<u64> {
        let attachment = self.parts.current.load();
        let attachment = attachment.as_deref()?;
        let look =
            |object: &Arc<KnownObject>| attachment.is_fresh(object).then_some(object.meta.size);
        attachment.objects.with(location, look).flatten()
    }

    /// Copies bytes of an object from byte `start` on to memory of the caller, if all of them are cached and fresh. Returns the
    /// length of the object's version that they are of. Asks neither the server nor the store.
    ///
    /// `None`: they are not cached, or the object ends before. The content of `dst` is then not specified.
    #[must_use]
    pub fn try_read_into(
        &self,
        location: &Path,
        dst: &mut [MaybeUninit<u8>],
        start: u64,
    ) -> Option<u64> {
        self.try_read_ranges_into(location, &mut [(start, dst)])
    }

    /// [`try_read_into`](SharedStore::try_read_into) of several ranges of one version, each by its start and its memory.
    #[must_use]
    pub fn try_read_ranges_into(
        &self,
        location: &Path,
        ranges: &mut [(u64, &mut [MaybeUninit<u8>])],
    ) -> Option<u64> {
        let attachment = self.parts.current.load();
        let attachment = attachment.as_deref()?;
        let look = |object: &Arc<KnownObject>| {
            let size = object.meta.size;
            let mut total = 0;
            let mut copy = |(start, dst): &mut (u64, &mut [MaybeUninit<u8>])| {
                let len = dst.len() as u64;
                total += len;
                start.checked_add(len).is_some_and(|end| end <= size)
                    && attachment.copy_into(object, *start, dst)
            };
            if !attachment.is_fresh(object) || !ranges.iter_mut().all(&mut copy) {
                return None;
            }
            object.mark_used();
            self.parts.counters.hit(total);
            Some(size)
        };
        attachment.objects.with(location, look).flatten()
    }

    /// Whether a server answered a moment ago. Does not connect.
    #[must_use]
    pub fn is_attached(&self) -> bool {
        self.parts.attachment().is_some()
    }

    /// Whether no server is attached, and the next read tries to attach. A program with a cache of its own, from which it serves
    /// reads while no server answers, sends such a read through this store.
    #[must_use]
    pub fn is_attach_due(&self) -> bool {
        self.parts.attachment().is_none() && self.parts.gate().is_due()
    }

    /// Why the last attempt to attach has failed; `None` after a success or before any.
    ///
    /// The kinds `NotFound` and `ConnectionRefused` mean that no server runs. Others are of a server that was not used, such as that
    /// of another store.
    #[must_use]
    pub fn attach_failure(&self) -> Option<io::Error> {
        self.parts.gate().failure()
    }

    /// Connects now, if that is not done yet. Returns whether a server answers.
    pub async fn attach(&self) -> bool {
        self.parts.attached().await.is_some()
    }

    /// Statistics since the store was created.
    #[must_use]
    pub fn stats(&self) -> ClientStats {
        let attachment = self.parts.attachment();
        ClientStats {
            is_attached: attachment.is_some(),
            objects: attachment.map_or(0, |attachment| attachment.objects.len() as u64),
            ..self.parts.counters.stats()
        }
    }

    /// Removes an object from the server's cache: call it after another program has changed the object.
    pub async fn forget(&self, location: &Path) {
        forget(&self.parts, location).await;
    }

    /// Changes the server's memory limit, up to the one that it was started with. Returns the limit that is reached; `None`: no
    /// server answers.
    ///
    /// # Errors
    ///
    /// [`object_store::Error::Generic`]: the limit is out of range.
    pub async fn set_memory_bytes(&self, bytes: u64) -> Result<Option<u64>> {
        use crate::client::link::Answer;
        let Some(attachment) = self.parts.attached().await else { return Ok(None) };
        match attachment.link.ask(&Request::SetMemory { bytes }, 0).await {
            Ok(Answer::Done(reached)) => Ok(Some(reached)),
            Ok(Answer::Failed(failure)) => Err(failure.into_error()),
            Ok(_) | Err(_) => Ok(None),
        }
    }
}

impl fmt::Debug for SharedStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (store, socket) = (&self.parts.store, &self.parts.socket);
        f.debug_struct("SharedStore").field("store", store).field("socket", socket).finish()
    }
}

impl fmt::Display for SharedStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedStore({})", self.parts.store)
    }
}

/// Whether a request is a read without conditions or version.
fn is_plain_read(options: &GetOptions) -> bool {
    options.if_match.is_none()
        && options.if_none_match.is_none()
        && options.if_modified_since.is_none()
        && options.if_unmodified_since.is_none()
        && options.version.is_none()
}

fn response(
    meta: &ObjectMeta,
    attributes: &Attributes,
    range: Range<u64>,
    payload: BoxStream<'static, Result<Bytes>>,
) -> GetResult {
    GetResult {
        payload: GetResultPayload::Stream(payload),
        meta: meta.clone(),
        range,
        attributes: attributes.clone(),
        #[cfg(feature = "object_store_0_14")]
        extensions: Default::default(),
    }
}

fn collected(object: &KnownObject, range: Range<u64>, bytes: Bytes) -> GetResult {
    let payload = stream::once(std::future::ready(Ok(bytes))).boxed();
    response(&object.meta, &object.attributes, range, payload)
}

/// The range in an object of `size` bytes. `None`: it is empty, or an error for the store to return.
fn resolve_range(range: &Option<GetRange>, size: u64) -> Option<Range<u64>> {
    let range = match range {
        None => 0..size,
        Some(range) => range.as_range(size).ok()?,
    };
    (range.start < range.end).then_some(range)
}

impl ClientParts {
    /// Serves a bounded, plain read of cached and fresh bytes.
    #[inline]
    fn hit(&self, location: &Path, options: &GetOptions) -> Option<GetResult> {
        let Some(GetRange::Bounded(range)) = &options.range else { return None };
        if options.head || range.start >= range.end || !is_plain_read(options) {
            return None;
        }
        let attachment = self.current.load();
        let attachment = attachment.as_deref()?;
        let look = |object: &Arc<KnownObject>| {
            if range.end > object.meta.size || !attachment.is_fresh(object) {
                return None;
            }
            let len = range.end - range.start;
            let bytes = attachment.copy(object, range.start, len)?;
            object.mark_used();
            self.counters.hit(len);
            Some(collected(object, range.clone(), bytes))
        };
        attachment.objects.with(location, look).flatten()
    }

    /// Serves a read of a known and fresh object. `None`: the server has to be asked.
    fn serve_known(
        self: &Arc<Self>,
        attachment: &Arc<Attachment>,
        location: &Path,
        options: &GetOptions,
    ) -> Result<Option<GetResult>> {
        let known = attachment.objects.find(location).filter(|known| attachment.is_fresh(known));
        let Some(object) = known else { return Ok(None) };
        if options.head {
            options.check_preconditions(&object.meta)?;
            object.mark_used();
            self.counters.hit(0);
            let nothing = stream::empty().boxed();
            return Ok(Some(response(&object.meta, &object.attributes, 0..0, nothing)));
        }
        let Some(range) = resolve_range(&options.range, object.meta.size) else { return Ok(None) };
        let first = (range.end - range.start).min(1 << 20);
        let Some(bytes) = attachment.copy(&object, range.start, first) else { return Ok(None) };
        options.check_preconditions(&object.meta)?;
        object.mark_used();
        self.counters.hit(first);
        let version = ReadVersion::Known(object);
        let read = ServerRead { version, parts: vec![(range.start, bytes)] };
        Ok(self.respond(attachment, location, &options.range, read))
    }

    /// The response, whose first bytes are read. `None`: they are not those that the caller asked for.
    fn respond(
        self: &Arc<Self>,
        attachment: &Arc<Attachment>,
        location: &Path,
        asked: &Option<GetRange>,
        mut read: ServerRead,
    ) -> Option<GetResult> {
        let version = read.version;
        let range = resolve_range(asked, version.meta().size)?;
        let (start, bytes) = read.parts.pop()?;
        let end = start + bytes.len() as u64;
        if start != range.start || end > range.end || bytes.is_empty() {
            return None;
        }
        if end < range.end && !version.is_identified() {
            // RD1: the rest could be of another version.
            return None;
        }
        let first = stream::once(std::future::ready(Ok(bytes)));
        let payload = if end == range.end {
            first.boxed()
        } else {
            let rest = RestOfRead::new(self, attachment, location, version.clone(), end..range.end);
            first.chain(rest.into_stream()).boxed()
        };
        Some(response(version.meta(), version.attributes(), range, payload))
    }

    async fn get(self: &Arc<Self>, location: &Path, options: GetOptions) -> Result<GetResult> {
        if options.version.is_none()
            && let Some(response) = self.get_shared(location, &options).await?
        {
            return Ok(response);
        }
        self.store.get_opts(location, options).await
    }

    /// Reads by the server. `None`: the store has to serve the read.
    async fn get_shared(
        self: &Arc<Self>,
        location: &Path,
        options: &GetOptions,
    ) -> Result<Option<GetResult>> {
        let Some(attachment) = self.attached().await else {
            ClientCounters::add(&self.counters.fallbacks);
            return Ok(None);
        };
        if let Some(response) = self.serve_known(&attachment, location, options)? {
            return Ok(Some(response));
        }
        ClientCounters::add(&self.counters.misses);
        let is_empty = |range: &Range<u64>| range.start >= range.end;
        if matches!(&options.range, Some(GetRange::Bounded(range)) if is_empty(range)) {
            return Ok(None);
        }
        let ranges = if options.head { Vec::new() } else { vec![options.range.clone()] };
        let conditions = Conditions::of(options);
        let request = ServerRequest { location, ranges, conditions, held: None };
        let Outcome::Read(read) = self.ask_server(&attachment, request).await? else {
            return Ok(None);
        };
        if options.head {
            let version = &read.version;
            let nothing = stream::empty().boxed();
            return Ok(Some(response(version.meta(), version.attributes(), 0..0, nothing)));
        }
        Ok(self.respond(&attachment, location, &options.range, read))
    }

    /// Serves ranges of cached and fresh bytes.
    fn hit_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Option<Vec<Bytes>> {
        let attachment = self.current.load();
        let attachment = attachment.as_deref()?;
        let look = |object: &Arc<KnownObject>| {
            let size = object.meta.size;
            if !attachment.is_fresh(object) || ranges.iter().any(|range| range.start >= size) {
                return None;
            }
            let copy = |range: &Range<u64>| {
                attachment.copy(object, range.start, range.end.min(size) - range.start)
            };
            let all: Option<Vec<Bytes>> = ranges.iter().map(copy).collect();
            if let Some(all) = &all {
                object.mark_used();
                self.counters.hit(all.iter().map(|bytes| bytes.len() as u64).sum());
            }
            all
        };
        attachment.objects.with(location, look).flatten()
    }
}

#[async_trait]
impl ObjectStore for SharedStore {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        opts: PutOptions,
    ) -> Result<PutResult> {
        let notice = WriteNotice::begin(&self.parts, location).await;
        let outcome = self.parts.store.put_opts(location, payload, opts).await;
        notice.end().await;
        outcome
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        opts: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        let upload = self.parts.store.put_multipart_opts(location, opts).await?;
        let (parts, location) = (Arc::clone(&self.parts), location.clone());
        Ok(Box::new(SharedUpload { upload, parts, location }))
    }

    async fn get_opts(&self, location: &Path, mut options: GetOptions) -> Result<GetResult> {
        if !self.parts.cacheable_reads.admit(location, &mut options) {
            return self.parts.store.get_opts(location, options).await;
        }
        if let Some(response) = self.parts.hit(location, &options) {
            return Ok(response);
        }
        // Boxed, as the future takes kilobytes, which a hit must not allocate.
        Box::pin(self.parts.get(location, options)).await
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        let is_odd = |range: &Range<u64>| range.start >= range.end;
        let is_admitted = self.parts.cacheable_reads.admits_ranges(location);
        if is_admitted && !ranges.is_empty() && !ranges.iter().any(is_odd) {
            if let Some(all) = self.parts.hit_ranges(location, ranges) {
                return Ok(all);
            }
            if let Some(all) = Box::pin(self.parts.read_ranges(location, ranges)).await? {
                return Ok(all);
            }
        }
        self.parts.store.get_ranges(location, ranges).await
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        // Objects whose deletion failed or was not awaited are forgotten when the stream is dropped.
        let begun: Arc<Mutex<Vec<WriteNotice>>> = Arc::default();
        let (parts, notices) = (Arc::clone(&self.parts), Arc::clone(&begun));
        let locations = locations.then(move |location| {
            let (parts, notices) = (Arc::clone(&parts), Arc::clone(&notices));
            async move {
                let location = location?;
                let notice = WriteNotice::begin(&parts, &location).await;
                notices.lock().expect("no panic under the lock").push(notice);
                Ok(location)
            }
        });
        let parts = Arc::clone(&self.parts);
        let deleted = self.parts.store.delete_stream(locations.boxed());
        let deleted = deleted.then(move |deleted| {
            let (parts, _begun) = (Arc::clone(&parts), Arc::clone(&begun));
            async move {
                if let Ok(location) = &deleted {
                    forget(&parts, location).await;
                }
                deleted
            }
        });
        deleted.boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.parts.store.list(prefix)
    }

    fn list_with_offset(
        &self,
        prefix: Option<&Path>,
        offset: &Path,
    ) -> BoxStream<'static, Result<ObjectMeta>> {
        self.parts.store.list_with_offset(prefix, offset)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.parts.store.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        let notice = WriteNotice::begin(&self.parts, to).await;
        let outcome = self.parts.store.copy_opts(from, to, options).await;
        notice.end().await;
        outcome
    }

    async fn rename_opts(&self, from: &Path, to: &Path, options: RenameOptions) -> Result<()> {
        let of_source = WriteNotice::begin(&self.parts, from).await;
        let of_target = WriteNotice::begin(&self.parts, to).await;
        let outcome = self.parts.store.rename_opts(from, to, options).await;
        of_source.end().await;
        of_target.end().await;
        outcome
    }
}

/// An upload that has its object forgotten when it ends.
#[derive(Debug)]
struct SharedUpload {
    upload: Box<dyn MultipartUpload>,
    parts: Arc<ClientParts>,
    location: Path,
}

impl Drop for SharedUpload {
    fn drop(&mut self) {
        forget_soon(&self.parts, &self.location);
    }
}

#[async_trait]
impl MultipartUpload for SharedUpload {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        self.upload.put_part(data)
    }

    async fn complete(&mut self) -> Result<PutResult> {
        let notice = WriteNotice::begin(&self.parts, &self.location).await;
        let outcome = self.upload.complete().await;
        notice.end().await;
        outcome
    }

    async fn abort(&mut self) -> Result<()> {
        self.upload.abort().await
    }
}
