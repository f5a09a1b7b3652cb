//! CopyObject, and the source of UploadPartCopy.

use futures_util::stream::BoxStream;
use millpond_objects::checked_body;
use object_store::{
    CopyOptions, GetOptions, GetRange, ObjectMeta, ObjectStoreExt, PutMode, TagSet,
};
use s3s::dto::*;
use s3s::{S3Response, S3Result, s3_error};

use crate::attributes::{metadata_headers, tags_of, timestamp};
use crate::body::SourceObject;
use crate::bucket::path_of;
use crate::failures::{failure, refuse, unsupported_key};
use crate::gateway::Gateway;
use crate::get::{ReadConditions, read};
use crate::put::{NewObject, refuse_features, write_object};

/// An object that is read for a copy.
pub(crate) struct CopyRead {
    pub(crate) source: SourceObject<BoxStream<'static, object_store::Result<bytes::Bytes>>>,
    pub(crate) bytes: u64,
    attributes: object_store::Attributes,
}

/// The names of a source: bucket, key and version.
fn source_of(source: &CopySource) -> S3Result<(&str, &str, Option<String>)> {
    match source {
        CopySource::Bucket { bucket, key, version_id } => {
            Ok((bucket, key, version_id.as_ref().map(|version| version.to_string())))
        }
        _ => Err(s3_error!(NotImplemented, "a copy from an access point is not implemented")),
    }
}

impl Gateway {
    pub(crate) async fn read_for_copy(
        &self,
        source: &CopySource,
        conditions: &ReadConditions,
        range: Option<GetRange>,
    ) -> S3Result<CopyRead> {
        let (name, key, version) = source_of(source)?;
        let (bucket, path) = self.object(name, key)?;
        let options = GetOptions { range, version, ..conditions.options(bucket, &path).await };
        // A read answers 304 here; a copy fails.
        let found = read(bucket, &path, options).await.map_err(|mut error| {
            if error.status_code() == Some(http::StatusCode::NOT_MODIFIED) {
                error = s3_error!(PreconditionFailed, "a condition on the source does not hold");
            }
            error
        })?;
        let (bytes, attributes) = (found.range.end - found.range.start, found.attributes.clone());
        Ok(CopyRead { source: SourceObject::new(checked_body(found)), bytes, attributes })
    }

    pub(crate) async fn copy(
        &self,
        mut input: CopyObjectInput,
    ) -> S3Result<S3Response<CopyObjectOutput>> {
        refuse_features!(input);
        refuse(&[(
            "encryption of the source with a customer's key",
            input.copy_source_sse_customer_algorithm.is_some(),
        )])?;
        let bucket = self.bucket(&input.bucket)?;
        let path = path_of(&input.key).ok_or_else(|| unsupported_key(&input.key))?;
        let conditions = ReadConditions {
            if_match: input.copy_source_if_match.take(),
            if_none_match: input.copy_source_if_none_match.take(),
            if_modified_since: input.copy_source_if_modified_since.take(),
            if_unmodified_since: input.copy_source_if_unmodified_since.take(),
        };
        let directive = input.metadata_directive.as_ref();
        let replaces = directive.is_some_and(|value| value.as_str() == MetadataDirective::REPLACE);
        let directive = input.tagging_directive.as_ref();
        let replaces_tags =
            directive.is_some_and(|value| value.as_str() == TaggingDirective::REPLACE);
        let (source_bucket, key, version) = source_of(&input.copy_source)?;
        let whole = source_bucket == input.bucket && version.is_none() && conditions.is_empty();
        if whole && !replaces && !replaces_tags {
            let (_, source) = self.object(source_bucket, key)?;
            if source == path {
                let same = "This copy request is illegal because it is trying to copy an object to itself without changing its metadata";
                return Err(s3_error!(InvalidRequest, "{same}"));
            }
            bucket
                .store
                .copy_opts(&source, &path, CopyOptions::default())
                .await
                .map_err(failure)?;
        } else {
            // Stores copy within themselves only, without conditions, and with the metadata as they are.
            let mut from = self.read_for_copy(&input.copy_source, &conditions, None).await?;
            let given = metadata_headers!(input);
            let attributes = match (replaces, bucket.drops_metadata) {
                (false, false) => from.attributes,
                _ => given.into_attributes(bucket),
            };
            let tags =
                if replaces_tags { tags_of(input.tagging.as_deref())? } else { TagSet::default() };
            let object = NewObject { mode: PutMode::Overwrite, attributes, tags };
            let resources = (&*self.memory, &self.limits);
            write_object(resources, bucket, &path, &mut from.source, Some(from.bytes), object)
                .await?;
        }
        let ObjectMeta { e_tag, last_modified, .. } =
            bucket.store.head(&path).await.map_err(failure)?;
        let result = CopyObjectResult {
            e_tag: bucket.e_tag(e_tag.as_deref()),
            last_modified: Some(timestamp(last_modified)),
            ..CopyObjectResult::default()
        };
        Ok(S3Response::new(CopyObjectOutput {
            copy_object_result: Some(result),
            ..CopyObjectOutput::default()
        }))
    }
}
