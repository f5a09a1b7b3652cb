//! A multipart upload that leaves no parts on the store.
//!
//! - **MU1** An upload completes or is aborted. If it is dropped before that, because its call failed, was interrupted or was
//!   cancelled, a task of the runtime aborts it. The end of the interpreter waits for this task
//!   ([`process::_wait_for_last_tasks`]).
//! - **MU2** Parts that are being sent end before the abort, as a part that arrives after it would stay.
//! - **MU3** A task begins the upload. If its caller ends in the meantime, the upload is dropped (MU1): before that, no other
//!   place has its number.

use std::sync::Arc;

use bytes::Bytes;
use object_store::path::Path;
use object_store::{Error, MultipartUpload, ObjectStore, PutMultipartOptions, PutResult, Result};
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::task::JoinSet;

use crate::process::{self, LastTask};

pub(crate) struct PartUpload {
    /// `None`: completed or aborted.
    upload: Option<Box<dyn MultipartUpload>>,
    parts: JoinSet<Result<()>>,
    runtime: Handle,
    generation: u64,
}

fn lost(what: &'static str) -> Error {
    Error::Generic { store: "millpond", source: what.into() }
}

impl PartUpload {
    /// Begins an upload, in the runtime.
    pub(crate) async fn begin(
        store: &Arc<dyn ObjectStore>,
        path: &Path,
        options: PutMultipartOptions,
    ) -> Result<PartUpload> {
        let (sender, begun) = oneshot::channel();
        let (store, path) = (Arc::clone(store), path.clone());
        let (runtime, task) = (Handle::current(), LastTask::new());
        let own = runtime.clone();
        runtime.spawn(async move {
            let upload = store.put_multipart_opts(&path, options).await;
            let begun = upload.map(|upload| PartUpload {
                upload: Some(upload),
                parts: JoinSet::new(),
                runtime: own,
                generation: process::generation(),
            });
            // MU3.
            drop(sender.send(begun));
            drop(task);
        });
        begun.await.unwrap_or_else(|_| Err(lost("the task that begins an upload has ended")))
    }

    /// Waits until fewer than `parts_max` parts are on their way, or none.
    pub(crate) async fn wait_for_capacity(&mut self, parts_max: usize) -> Result<()> {
        while self.parts.len() >= parts_max.max(1)
            && let Some(ended) = self.parts.join_next().await
        {
            ended.unwrap_or_else(|_| Err(lost("the task of a part has ended")))?;
        }
        Ok(())
    }

    /// Sends a part.
    pub(crate) fn put(&mut self, part: Bytes) {
        if let Some(upload) = &mut self.upload {
            self.parts.spawn_on(upload.put_part(part.into()), &self.runtime);
        }
    }

    /// Sends the last bytes in parts, waits for all parts, and makes the object of them. After an error no part is left.
    pub(crate) async fn complete(
        mut self,
        rest: Bytes,
        part_bytes: usize,
        parts_max: usize,
    ) -> Result<PutResult> {
        let completed = self.try_complete(rest, part_bytes, parts_max).await;
        match completed {
            Ok(_) => self.upload = None,
            // The caller gets the first error.
            Err(_) => drop(self.abort().await),
        }
        completed
    }

    async fn try_complete(
        &mut self,
        mut rest: Bytes,
        part_bytes: usize,
        parts_max: usize,
    ) -> Result<PutResult> {
        while !rest.is_empty() {
            self.wait_for_capacity(parts_max).await?;
            self.put(rest.split_to(part_bytes.min(rest.len())));
        }
        self.wait_for_capacity(0).await?;
        match &mut self.upload {
            Some(upload) => upload.complete().await,
            None => Err(lost("the upload was aborted")),
        }
    }

    /// Removes all parts.
    pub(crate) async fn abort(mut self) -> Result<()> {
        // MU2.
        self.parts.shutdown().await;
        let Some(upload) = &mut self.upload else { return Ok(()) };
        let aborted = upload.abort().await;
        self.upload = None;
        aborted
    }
}

impl Drop for PartUpload {
    fn drop(&mut self) {
        let Some(mut upload) = self.upload.take() else { return };
        let mut parts = std::mem::take(&mut self.parts);
        if self.generation != process::generation() {
            // The parent's, as its runtime (runtime.R1).
            std::mem::forget((upload, parts));
            return;
        }
        // MU1.
        let task = LastTask::new();
        self.runtime.spawn(async move {
            parts.shutdown().await;
            let aborted = upload.abort().await;
            // Nothing waits for the result. An upload that completed after the interruption has no parts.
            drop((aborted, upload, task));
        });
    }
}
