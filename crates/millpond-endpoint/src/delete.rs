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
        // In S3 the deletion of a missing object succeeds.
        if let Some(path) = path_of(&input.key) {
            match bucket.store.delete(&path).await {
                Ok(()) | Err(object_store::Error::NotFound { .. }) => {}
                Err(error) => return Err(failure(error)),
            }
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
        let mut failures = Vec::new();
        while let Some(result) = results.next().await {
            match result {
                Ok(path) => drop(done.insert(path.to_string())),
                // Stores add their own prefix to this path.
                Err(object_store::Error::NotFound { path, .. }) => {
                    let named = keys.iter().filter(|key| path.ends_with(key.as_str()));
                    done.extend(named.max_by_key(|key| key.len()).cloned());
                }
                Err(error) => failures.push(error),
            }
        }
        let failed = failures.into_iter().next().map(failure);
        let (mut deleted, mut errors) = (Vec::new(), Vec::new());
        for key in keys {
            if done.contains(&key) || path_of(&key).is_none() {
                deleted.push(DeletedObject { key: Some(key), ..DeletedObject::default() });
            } else {
                let code = failed.as_ref().map_or("InternalError", |error| error.code().as_str());
                let message = failed.as_ref().and_then(|error| error.message());
                errors.push(Error {
                    code: Some(code.into()),
                    message: Some(
                        message
                            .unwrap_or("the store does not say that the object is deleted")
                            .into(),
                    ),
                    key: Some(key),
                    version_id: None,
                });
            }
        }
        Ok(S3Response::new(DeleteObjectsOutput {
            deleted: (quiet != Some(true)).then_some(deleted),
            errors: (!errors.is_empty()).then_some(errors),
            ..DeleteObjectsOutput::default()
        }))
    }
}
