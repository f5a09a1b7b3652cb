//! Stores that break a promise on purpose.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::stream::BoxStream;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    Attributes, CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, ObjectStoreExt, PutMode, PutMultipartOptions, PutOptions, PutPayload, PutResult,
    Result,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flaw {
    None,
    IgnoresConditions,
    /// Checks the condition, and writes the object some time later.
    ChecksThenWrites,
    RefusesAndWrites,
    IgnoresConditionsOfReads,
    DropsMetadata,
    /// Reads return the replaced object for a moment.
    ReadsStale,
    /// Each conditional write conflicts with another one that never ends: 409.
    Conflicts,
}

#[derive(Debug)]
pub struct Bad {
    pub store: Arc<InMemory>,
    pub flaw: Flaw,
}

impl Bad {
    /// Whether the condition holds now.
    async fn holds(&self, at: &Path, mode: &PutMode) -> Result<()> {
        let exists = self.store.head(at).await;
        let path = at.to_string();
        match (mode, exists) {
            (PutMode::Create, Ok(_)) => Err(Error::AlreadyExists { path, source: "exists".into() }),
            (PutMode::Update(version), found)
                if found.as_ref().ok().and_then(|meta| meta.e_tag.as_ref())
                    != version.e_tag.as_ref() =>
            {
                Err(Error::Precondition { path, source: "another version".into() })
            }
            _ => Ok(()),
        }
    }
}

impl fmt::Display for Bad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "bad: {:?}", self.flaw)
    }
}

#[async_trait]
impl ObjectStore for Bad {
    async fn put_opts(
        &self,
        at: &Path,
        bytes: PutPayload,
        mut options: PutOptions,
    ) -> Result<PutResult> {
        let conditional = !matches!(options.mode, PutMode::Overwrite);
        match self.flaw {
            Flaw::IgnoresConditions => options.mode = PutMode::Overwrite,
            Flaw::ChecksThenWrites if conditional => {
                self.holds(at, &options.mode).await?;
                tokio::time::sleep(Duration::from_millis(1)).await;
                options.mode = PutMode::Overwrite;
            }
            Flaw::RefusesAndWrites if matches!(options.mode, PutMode::Create) => {
                let refused = self.holds(at, &options.mode).await;
                options.mode = PutMode::Overwrite;
                let put = self.store.put_opts(at, bytes, options).await?;
                return refused.map(|()| put);
            }
            Flaw::Conflicts if conditional => {
                let source = "Server returned non-2xx status code: 409 Conflict: ".into();
                return Err(Error::AlreadyExists { path: at.to_string(), source });
            }
            Flaw::DropsMetadata => options.attributes = Attributes::new(),
            _ => {}
        }
        if self.flaw == Flaw::ReadsStale && !conditional && self.store.head(at).await.is_ok() {
            let (store, at) = (Arc::clone(&self.store), at.clone());
            tokio::spawn(async move {
                tokio::time::sleep(Duration::from_millis(5)).await;
                store.put_opts(&at, bytes, options).await
            });
            return Ok(PutResult { e_tag: None, version: None, extensions: Default::default() });
        }
        self.store.put_opts(at, bytes, options).await
    }

    async fn get_opts(&self, at: &Path, mut options: GetOptions) -> Result<GetResult> {
        if self.flaw == Flaw::IgnoresConditionsOfReads {
            options = GetOptions { range: options.range, head: options.head, ..GetOptions::new() };
        }
        self.store.get_opts(at, options).await
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
