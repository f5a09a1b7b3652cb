//! DeleteObject and DeleteObjects.

use std::collections::HashSet;

use futures_util::{StreamExt, stream};
use object_store::ObjectStoreExt;
use object_store::path::Path;
use s3s::dto::*;
use s3s::{S3Response, S3Result, s3_error};

use crate::bucket::path_of;
use crate::failures::{failure, refuse};
use crate::gateway::Gateway;

/// S3's limit of DeleteObjects.
const KEYS_MAX: usize = 1000;

/// Deletions at a time of keys that a deletion of many has left.
const DELETIONS_AT_ONCE: usize = 8;

/// The outcome of a deletion. In S3 that of a missing object succeeds.
fn deleted(outcome: object_store::Result<()>) -> S3Result<()> {
    match outcome {
        Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
        Err(error) => Err(failure(error)),
    }
}

impl Gateway {
    pub(crate) async fn delete(
        &self,
        input: DeleteObjectInput,
    ) -> S3Result<S3Response<DeleteObjectOutput>> {
        refuse(&[
            ("DeleteObject with a version", input.version_id.is_some()),
            (
                "DeleteObject with a condition",
                input.if_match.is_some()
                    || input.if_match_last_modified_time.is_some()
                    || input.if_match_size.is_some(),
            ),
        ])?;
        let bucket = self.bucket(&input.bucket)?;
        if let Some(path) = path_of(&input.key) {
            deleted(bucket.store.delete(&path).await)?;
        }
        Ok(S3Response::new(DeleteObjectOutput::default()))
    }

    pub(crate) async fn delete_many(
        &self,
        input: DeleteObjectsInput,
    ) -> S3Result<S3Response<DeleteObjectsOutput>> {
        let bucket = self.bucket(&input.bucket)?;
        let Delete { objects, quiet } = input.delete;
        if objects.is_empty() || objects.len() > KEYS_MAX {
            return Err(s3_error!(MalformedXML, "DeleteObjects takes 1 to {KEYS_MAX} keys"));
        }
        let versioned = |object: &ObjectIdentifier| {
            object.version_id.is_some()
                || object.e_tag.is_some()
                || object.last_modified_time.is_some()
                || object.size.is_some()
        };
        refuse(&[("DeleteObjects with a version or a condition", objects.iter().any(versioned))])?;
        let keys: Vec<String> = objects.into_iter().map(|object| object.key).collect();
        let paths: Vec<Path> = keys.iter().filter_map(|key| path_of(key)).collect();
        let mut results =
            bucket.store.delete_stream(stream::iter(paths.into_iter().map(Ok)).boxed());
        let mut done = HashSet::new();
        while let Some(result) = results.next().await {
            // The path of an error may have a prefix of the store's own, so it is not the key of one object for sure.
            done.extend(result.map(String::from));
        }
        drop(results);
        let outcomes = keys.into_iter().map(|key| {
            let is_done = done.contains(&key);
            async move {
                let outcome = match path_of(&key) {
                    // The others are deleted one by one, so that each outcome is of its key.
                    Some(path) if !is_done => deleted(bucket.store.delete(&path).await),
                    _ => Ok(()),
                };
                (key, outcome)
            }
        });
        let mut outcomes = stream::iter(outcomes).buffered(DELETIONS_AT_ONCE);
        let (mut gone, mut errors) = (Vec::new(), Vec::new());
        while let Some((key, outcome)) = outcomes.next().await {
            match outcome {
                Ok(()) => gone.push(DeletedObject { key: Some(key), ..DeletedObject::default() }),
                Err(error) => errors.push(Error {
                    code: Some(error.code().as_str().into()),
                    message: error.message().map(Into::into),
                    key: Some(key),
                    version_id: None,
                }),
            }
        }
        drop(outcomes);
        Ok(S3Response::new(DeleteObjectsOutput {
            deleted: (quiet != Some(true)).then_some(gone),
            errors: (!errors.is_empty()).then_some(errors),
            ..DeleteObjectsOutput::default()
        }))
    }
}
