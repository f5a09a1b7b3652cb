//! The store: objects that are computed from their names, so that they take no memory. It waits before each response, and
//! counts its requests.

use std::fmt;
use std::ops::Range;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::stream::{self, BoxStream, StreamExt};
use object_store::path::Path;
use object_store::{
    Attributes, CopyOptions, Error, GetOptions, GetResult, GetResultPayload, ListResult,
    MultipartUpload, ObjectMeta, ObjectStore, PutMultipartOptions, PutOptions, PutPayload,
    PutResult, Result,
};

#[derive(Debug)]
pub struct SyntheticStore {
    object_bytes: u64,
    delay: Duration,
    requests: AtomicU64,
}

/// The eight bytes at byte `at` of an object.
pub fn word(object: u64, at: u64) -> u64 {
    (object << 40 | at >> 3).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

/// A range of an object whose bounds are multiples of eight.
pub fn content(object: u64, range: Range<u64>) -> Vec<u8> {
    range.step_by(8).flat_map(|at| word(object, at).to_le_bytes()).collect()
}

pub fn path(object: u64) -> Path {
    Path::from(format!("measured/{object}"))
}

impl SyntheticStore {
    pub fn new(object_bytes: u64, delay: Duration) -> SyntheticStore {
        SyntheticStore { object_bytes, delay, requests: AtomicU64::new(0) }
    }

    /// Relaxed: a count.
    pub fn requests(&self) -> u64 {
        self.requests.load(Relaxed)
    }
}

impl fmt::Display for SyntheticStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("synthetic")
    }
}

#[async_trait]
impl ObjectStore for SyntheticStore {
    async fn get_opts(&self, at: &Path, options: GetOptions) -> Result<GetResult> {
        self.requests.fetch_add(1, Relaxed);
        if !self.delay.is_zero() {
            // Finer than a timer of the runtime.
            let delay = self.delay;
            let slept = tokio::task::spawn_blocking(move || std::thread::sleep(delay)).await;
            slept.map_err(|error| Error::Generic { store: "synthetic", source: error.into() })?;
        }
        let number = at.as_ref().rsplit('/').next().and_then(|number| number.parse().ok());
        let Some(object) = number else {
            return Err(Error::NotFound { path: at.to_string(), source: "no number".into() });
        };
        let size = self.object_bytes;
        let range = match &options.range {
            None => 0..size,
            Some(range) => range
                .as_range(size)
                .map_err(|source| Error::Generic { store: "synthetic", source: source.into() })?,
        };
        let meta = ObjectMeta {
            location: at.clone(),
            last_modified: chrono::DateTime::UNIX_EPOCH,
            size,
            e_tag: Some("\"1\"".into()),
            version: None,
        };
        let whole = range.start & !7..range.end.next_multiple_of(8);
        let bytes =
            Bytes::from(if options.head { Vec::new() } else { content(object, whole.clone()) });
        let skipped = (range.start - whole.start) as usize;
        let bytes = if options.head {
            bytes
        } else {
            bytes.slice(skipped..skipped + (range.end - range.start) as usize)
        };
        Ok(GetResult {
            payload: GetResultPayload::Stream(stream::iter([Ok(bytes)]).boxed()),
            meta,
            range,
            attributes: Attributes::default(),
            extensions: Default::default(),
        })
    }

    async fn put_opts(&self, _: &Path, _: PutPayload, _: PutOptions) -> Result<PutResult> {
        Err(not_supported())
    }

    async fn put_multipart_opts(
        &self,
        _: &Path,
        _: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        Err(not_supported())
    }

    fn delete_stream(
        &self,
        _: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        stream::iter([Err(not_supported())]).boxed()
    }

    fn list(&self, _: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        stream::iter([Err(not_supported())]).boxed()
    }

    async fn list_with_delimiter(&self, _: Option<&Path>) -> Result<ListResult> {
        Err(not_supported())
    }

    async fn copy_opts(&self, _: &Path, _: &Path, _: CopyOptions) -> Result<()> {
        Err(not_supported())
    }
}

fn not_supported() -> Error {
    Error::NotSupported { source: "the store is only read".into() }
}
