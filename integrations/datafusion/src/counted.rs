//! A store that counts its requests.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use async_trait::async_trait;
use futures_util::stream::BoxStream;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};

/// Implements `ObjectStore` with given reads; all other calls go to the underlying store.
macro_rules! implement {
    ($store:ty, $($reads:tt)*) => {
        #[async_trait]
        impl ObjectStore for $store {
            $($reads)*

            async fn put_opts(
                &self,
                at: &Path,
                bytes: PutPayload,
                options: PutOptions,
            ) -> Result<PutResult> {
                self.store.put_opts(at, bytes, options).await
            }

            async fn put_multipart_opts(
                &self,
                at: &Path,
                options: PutMultipartOptions,
            ) -> Result<Box<dyn MultipartUpload>> {
                self.store.put_multipart_opts(at, options).await
            }

            fn delete_stream(
                &self,
                at: BoxStream<'static, Result<Path>>,
            ) -> BoxStream<'static, Result<Path>> {
                self.store.delete_stream(at)
            }

            fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
                self.store.list(prefix)
            }

            async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
                self.store.list_with_delimiter(prefix).await
            }

            async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
                self.store.copy_opts(from, to, options).await
            }
        }
    };
}
pub(crate) use implement;

/// Number of requests for bytes or metadata, and of requested bytes.
#[derive(Debug, Clone, Copy, Default)]
pub struct Counts {
    pub requests: u64,
    pub bytes: u64,
}

impl std::ops::Sub for Counts {
    type Output = Counts;

    fn sub(self, before: Counts) -> Counts {
        Counts { requests: self.requests - before.requests, bytes: self.bytes - before.bytes }
    }
}

#[derive(Debug)]
pub struct Counted {
    store: Arc<dyn ObjectStore>,
    requests: AtomicU64,
    bytes: AtomicU64,
}

impl Counted {
    pub fn new(store: Arc<dyn ObjectStore>) -> Arc<Counted> {
        Arc::new(Counted { store, requests: AtomicU64::new(0), bytes: AtomicU64::new(0) })
    }

    pub fn counts(&self) -> Counts {
        Counts { requests: self.requests.load(Relaxed), bytes: self.bytes.load(Relaxed) }
    }
}

impl fmt::Display for Counted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.store.fmt(f)
    }
}

implement! {
    Counted,
    async fn get_opts(&self, at: &Path, options: GetOptions) -> Result<GetResult> {
        self.requests.fetch_add(1, Relaxed);
        let is_head = options.head;
        let answer = self.store.get_opts(at, options).await?;
        if !is_head {
            self.bytes.fetch_add(answer.range.end - answer.range.start, Relaxed);
        }
        Ok(answer)
    }
}
