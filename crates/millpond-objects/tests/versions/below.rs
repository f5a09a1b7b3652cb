//! The underlying store of the model test: it keeps every version of every object, and when each became current.

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant, SystemTime};

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::stream::{self, BoxStream, StreamExt};
use object_store::path::Path;
use object_store::{
    CopyMode, CopyOptions, Error, GetOptions, GetResult, GetResultPayload, ListResult,
    MultipartUpload, ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutMultipartOptions,
    PutOptions, PutPayload, PutResult, Result, UploadPart,
};

use crate::random::Random;

pub const LEN_MAX: usize = 4_600_000;
const BASE_LEN: usize = LEN_MAX + (1 << 20);

/// Contents are slices of these bytes, so versions need no memory and differ at each offset.
static BASE: LazyLock<Bytes> = LazyLock::new(|| {
    let mut random = Random(1);
    (0..BASE_LEN / 8).flat_map(|_| random.next().to_le_bytes()).collect::<Vec<_>>().into()
});

/// The content with a number.
pub fn content(number: u64, len: usize) -> Bytes {
    let start = (number as usize * 7919) % (1 << 20);
    BASE.slice(start..start + len)
}

/// A hash of the length and of both ends, which suffices for random contents.
fn hash(bytes: &[u8]) -> u64 {
    let ends = [&bytes[..bytes.len().min(16)], &bytes[bytes.len().saturating_sub(16)..]].concat();
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    ends.iter().fold(bytes.len() as u64, step)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tags {
    /// An ETag that no other version has.
    Unique,
    /// An ETag that depends on the content only.
    OfContent,
    /// A version and no ETag.
    Versions,
    /// Neither.
    Nothing,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Start,
    Put,
    Copy,
    Delete,
}

/// The state of a location from a moment on: an object, or none.
#[derive(Clone)]
pub struct Entry {
    pub kind: Kind,
    pub at: Instant,
    /// No bytes: there is no object.
    pub object: Option<(Bytes, ObjectMeta)>,
}

#[derive(Clone, Debug)]
pub struct Options {
    pub tags: Tags,
    pub ignores_conditions: bool,
    /// Failing requests per 1000: before and after they take effect, and in the body.
    pub faults: u64,
}

pub struct Below {
    pub options: Options,
    logs: Mutex<HashMap<Path, Vec<Entry>>>,
    random: Mutex<Random>,
}

impl fmt::Debug for Below {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Below")
    }
}

impl fmt::Display for Below {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("below")
    }
}

fn not_found(at: &Path) -> Error {
    Error::NotFound { path: at.to_string(), source: "no object".into() }
}

fn injected() -> Error {
    Error::Generic { store: "below", source: "injected".into() }
}

impl Below {
    pub fn new(options: Options, random: Random, paths: &[Path]) -> Below {
        let start = Entry { kind: Kind::Start, at: Instant::now(), object: None };
        let logs = paths.iter().map(|path| (path.clone(), vec![start.clone()])).collect();
        Below { options, logs: Mutex::new(logs), random: Mutex::new(random) }
    }

    /// The history of a location.
    pub fn log(&self, at: &Path) -> Vec<Entry> {
        self.logs.lock().unwrap()[at].clone()
    }

    fn roll<T>(&self, roll: impl FnOnce(&mut Random) -> T) -> T {
        roll(&mut self.random.lock().unwrap())
    }

    /// Lets other tasks run.
    async fn pause(&self) {
        let turns = self.roll(|random| if random.chance(500) { 0 } else { random.below(6) });
        for _ in 0..turns {
            tokio::task::yield_now().await;
        }
    }

    /// A pause, and then possibly a failure.
    async fn way(&self) -> Result<()> {
        self.pause().await;
        let faults = self.options.faults;
        if self.roll(|random| random.chance(faults)) { Err(injected()) } else { Ok(()) }
    }

    fn enter(&self, at: &Path, kind: Kind, bytes: Option<Bytes>) -> PutResult {
        let mut logs = self.logs.lock().unwrap();
        let log = logs.get_mut(at).unwrap();
        let number = log.len() as u64;
        let object = bytes.map(|bytes| {
            let e_tag = match self.options.tags {
                Tags::Unique => Some(format!("\"{number}\"")),
                Tags::OfContent => Some(format!("\"{:x}\"", hash(&bytes))),
                Tags::Versions | Tags::Nothing => None,
            };
            let version = (self.options.tags == Tags::Versions).then(|| format!("v{number}"));
            let modified = SystemTime::UNIX_EPOCH + Duration::from_secs(number);
            let (location, size) = (at.clone(), bytes.len() as u64);
            let last_modified = modified.into();
            (bytes, ObjectMeta { location, last_modified, size, e_tag, version })
        });
        let meta = object.as_ref().map(|(_, meta)| meta);
        let (e_tag, version) =
            (meta.and_then(|m| m.e_tag.clone()), meta.and_then(|m| m.version.clone()));
        let result = PutResult { e_tag, version, extensions: Default::default() };
        // The clock is read under the lock, so times are in the order of the log.
        log.push(Entry { kind, at: Instant::now(), object });
        result
    }

    fn current(&self, at: &Path) -> Result<(Bytes, ObjectMeta)> {
        let logs = self.logs.lock().unwrap();
        let entry = logs.get(at).and_then(|log| log.last());
        entry.and_then(|entry| entry.object.clone()).ok_or_else(|| not_found(at))
    }

    fn of_version(&self, at: &Path, version: &str) -> Result<(Bytes, ObjectMeta)> {
        let log = self.log(at);
        let objects = log.into_iter().filter_map(|entry| entry.object);
        let mut found = objects.filter(|(_, meta)| meta.version.as_deref() == Some(version));
        found.next().ok_or_else(|| not_found(at))
    }

    /// The bytes in pieces, with pauses between them; they may fail, or end early.
    fn body(self: &Arc<Self>, bytes: Bytes) -> BoxStream<'static, Result<Bytes>> {
        let faults = self.options.faults;
        let (pieces, fails, ends) =
            self.roll(|r| (1 + r.below(5), r.chance(faults), r.chance(faults)));
        let piece_len = bytes.len().div_ceil(pieces as usize).max(1);
        let mut parts: Vec<Result<Bytes>> = (0..bytes.len())
            .step_by(piece_len)
            .map(|at| Ok(bytes.slice(at..bytes.len().min(at + piece_len))))
            .collect();
        if fails || ends {
            parts.truncate(parts.len() / 2);
        }
        if fails {
            parts.push(Err(injected()));
        }
        let below = Arc::clone(self);
        let parts = stream::iter(parts).then(move |part| {
            let below = Arc::clone(&below);
            async move {
                below.pause().await;
                part
            }
        });
        parts.boxed()
    }

    async fn answer(self: &Arc<Self>, at: &Path, options: GetOptions) -> Result<GetResult> {
        self.way().await?;
        let (bytes, meta) = match &options.version {
            Some(version) => self.of_version(at, version)?,
            None => self.current(at)?,
        };
        if !self.options.ignores_conditions {
            options.check_preconditions(&meta)?;
        }
        let range = match &options.range {
            _ if options.head => Ok(0..0),
            None => Ok(0..meta.size),
            Some(range) => range.as_range(meta.size),
        };
        let range =
            range.map_err(|source| Error::Generic { store: "below", source: source.into() })?;
        self.way().await?;
        let bytes = bytes.slice(range.start as usize..range.end as usize);
        let payload = GetResultPayload::Stream(self.body(bytes));
        let (attributes, extensions) = Default::default();
        Ok(GetResult { payload, meta, range, attributes, extensions })
    }

    async fn write(&self, at: &Path, kind: Kind, bytes: Option<Bytes>) -> Result<PutResult> {
        self.way().await?;
        let result = self.enter(at, kind, bytes);
        self.way().await?;
        Ok(result)
    }
}

/// A handle of the store.
#[derive(Clone, Debug)]
pub struct Handle(pub Arc<Below>);

impl fmt::Display for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[async_trait]
impl ObjectStore for Handle {
    async fn put_opts(&self, at: &Path, bytes: PutPayload, opts: PutOptions) -> Result<PutResult> {
        let below = &self.0;
        below.way().await?;
        let refused = |why: &str| Error::Precondition { path: at.to_string(), source: why.into() };
        match opts.mode {
            PutMode::Overwrite => {}
            PutMode::Create => {
                if below.current(at).is_ok() {
                    let (path, source) = (at.to_string(), "it exists".into());
                    return Err(Error::AlreadyExists { path, source });
                }
            }
            PutMode::Update(version) => match below.current(at) {
                Ok((_, meta)) if meta.e_tag == version.e_tag && meta.version == version.version => {
                }
                _ => return Err(refused("another version")),
            },
        }
        let result = below.enter(at, Kind::Put, Some(bytes.into()));
        below.way().await?;
        Ok(result)
    }

    async fn put_multipart_opts(
        &self,
        at: &Path,
        _: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.0.way().await?;
        Ok(Box::new(Upload { below: Arc::clone(&self.0), at: at.clone(), parts: Vec::new() }))
    }

    async fn get_opts(&self, at: &Path, options: GetOptions) -> Result<GetResult> {
        self.0.answer(at, options).await
    }

    /// Reads each range separately, so the ranges may be of several versions.
    async fn get_ranges(&self, at: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        let mut parts = Vec::new();
        for range in ranges {
            parts.push(self.get_range(at, range.clone()).await?);
        }
        Ok(parts)
    }

    fn delete_stream(
        &self,
        at: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        let below = Arc::clone(&self.0);
        let deleted = at.then(move |at| {
            let below = Arc::clone(&below);
            async move {
                let at = at?;
                below.write(&at, Kind::Delete, None).await?;
                Ok(at)
            }
        });
        deleted.boxed()
    }

    fn list(&self, _: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        stream::empty().boxed()
    }

    async fn list_with_delimiter(&self, _: Option<&Path>) -> Result<ListResult> {
        Err(Error::NotImplemented { operation: "list".into(), implementer: "below".into() })
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.0.way().await?;
        let (bytes, _) = self.0.current(from)?;
        if matches!(options.mode, CopyMode::Create) && self.0.current(to).is_ok() {
            let (path, source) = (to.to_string(), "it exists".into());
            return Err(Error::AlreadyExists { path, source });
        }
        self.0.write(to, Kind::Copy, Some(bytes)).await?;
        Ok(())
    }
}

#[derive(Debug)]
struct Upload {
    below: Arc<Below>,
    at: Path,
    parts: Vec<Bytes>,
}

#[async_trait]
impl MultipartUpload for Upload {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        self.parts.push(data.into());
        Box::pin(std::future::ready(Ok(())))
    }

    async fn complete(&mut self) -> Result<PutResult> {
        let bytes = self.parts.concat().into();
        self.below.write(&self.at, Kind::Put, Some(bytes)).await
    }

    async fn abort(&mut self) -> Result<()> {
        self.parts.clear();
        Ok(())
    }
}
