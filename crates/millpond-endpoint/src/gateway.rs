//! The operations of S3, by name: each is in the module of its kind.
//!
//! `s3s` answers operations that are missing here with `NotImplemented` and their name.

use std::collections::BTreeMap;
use std::sync::Arc;

use http::header::{IF_MATCH, IF_NONE_MATCH};
use object_store::path::Path;
use s3s::dto::*;
use s3s::{S3, S3Request, S3Response, S3Result, s3_error};

use crate::Limits;
use crate::bucket::{Bucket as StoreBucket, path_of};
use crate::failures::refuse;
use crate::memory::UploadMemory;
use crate::uploads::Uploads;

/// The buckets, and what their uploads share.
#[derive(Debug)]
pub(crate) struct Gateway {
    pub(crate) buckets: BTreeMap<String, Arc<StoreBucket>>,
    pub(crate) uploads: Arc<Uploads>,
    pub(crate) memory: Arc<UploadMemory>,
    pub(crate) limits: Limits,
}

impl Gateway {
    pub(crate) fn bucket(&self, name: &str) -> S3Result<&Arc<StoreBucket>> {
        let found = self.buckets.get(name);
        found.ok_or_else(|| s3_error!(NoSuchBucket, "the endpoint has no bucket {name:?}"))
    }

    /// The store and the path of an object that is read. A key without a path has no object.
    pub(crate) fn object(&self, bucket: &str, key: &str) -> S3Result<(&Arc<StoreBucket>, Path)> {
        let bucket = self.bucket(bucket)?;
        let path = path_of(key);
        Ok((bucket, path.ok_or_else(|| s3_error!(NoSuchKey, "there is no object {key:?}"))?))
    }
}

type Answer<T> = S3Result<S3Response<T>>;

#[async_trait::async_trait]
impl S3 for Gateway {
    async fn get_object(&self, request: S3Request<GetObjectInput>) -> Answer<GetObjectOutput> {
        self.get(request.input).await
    }

    async fn head_object(&self, request: S3Request<HeadObjectInput>) -> Answer<HeadObjectOutput> {
        self.head(request.input).await
    }

    async fn list_objects_v2(
        &self,
        request: S3Request<ListObjectsV2Input>,
    ) -> Answer<ListObjectsV2Output> {
        self.list_v2(request.input).await
    }

    async fn list_objects(
        &self,
        request: S3Request<ListObjectsInput>,
    ) -> Answer<ListObjectsOutput> {
        self.list_v1(request.input).await
    }

    async fn put_object(&self, request: S3Request<PutObjectInput>) -> Answer<PutObjectOutput> {
        self.put(request).await
    }

    async fn copy_object(&self, request: S3Request<CopyObjectInput>) -> Answer<CopyObjectOutput> {
        // `s3s` does not parse the conditions on the target.
        let has = |name| request.headers.contains_key(name);
        refuse(&[(
            "CopyObject with a condition on the target",
            has(IF_MATCH) || has(IF_NONE_MATCH),
        )])?;
        self.copy(request.input).await
    }

    async fn delete_object(
        &self,
        request: S3Request<DeleteObjectInput>,
    ) -> Answer<DeleteObjectOutput> {
        self.delete(request.input).await
    }

    async fn delete_objects(
        &self,
        request: S3Request<DeleteObjectsInput>,
    ) -> Answer<DeleteObjectsOutput> {
        self.delete_many(request.input).await
    }

    async fn create_multipart_upload(
        &self,
        request: S3Request<CreateMultipartUploadInput>,
    ) -> Answer<CreateMultipartUploadOutput> {
        self.create_upload(request.input)
    }

    async fn upload_part(&self, request: S3Request<UploadPartInput>) -> Answer<UploadPartOutput> {
        self.put_part(request).await
    }

    async fn upload_part_copy(
        &self,
        request: S3Request<UploadPartCopyInput>,
    ) -> Answer<UploadPartCopyOutput> {
        self.copy_part(request.input).await
    }

    async fn complete_multipart_upload(
        &self,
        request: S3Request<CompleteMultipartUploadInput>,
    ) -> Answer<CompleteMultipartUploadOutput> {
        self.complete_upload(request.input).await
    }

    async fn abort_multipart_upload(
        &self,
        request: S3Request<AbortMultipartUploadInput>,
    ) -> Answer<AbortMultipartUploadOutput> {
        let AbortMultipartUploadInput { bucket, key, upload_id, .. } = request.input;
        self.bucket(&bucket)?;
        self.uploads.remove(&bucket, &key, &upload_id)?;
        Ok(S3Response::new(AbortMultipartUploadOutput::default()))
    }

    async fn list_parts(&self, request: S3Request<ListPartsInput>) -> Answer<ListPartsOutput> {
        self.list_upload_parts(request.input)
    }

    async fn list_multipart_uploads(
        &self,
        request: S3Request<ListMultipartUploadsInput>,
    ) -> Answer<ListMultipartUploadsOutput> {
        self.list_uploads(request.input)
    }

    async fn list_buckets(&self, _: S3Request<ListBucketsInput>) -> Answer<ListBucketsOutput> {
        let bucket = |name: &String| Bucket {
            name: Some(name.clone()),
            // Clients expect a date, and stores have none.
            creation_date: Some(Timestamp::default()),
            ..Bucket::default()
        };
        let buckets = Some(self.buckets.keys().map(bucket).collect());
        Ok(S3Response::new(ListBucketsOutput { buckets, ..ListBucketsOutput::default() }))
    }

    async fn head_bucket(&self, request: S3Request<HeadBucketInput>) -> Answer<HeadBucketOutput> {
        self.bucket(&request.input.bucket)?;
        Ok(S3Response::new(HeadBucketOutput::default()))
    }

    async fn get_bucket_location(
        &self,
        request: S3Request<GetBucketLocationInput>,
    ) -> Answer<GetBucketLocationOutput> {
        self.bucket(&request.input.bucket)?;
        // No constraint: us-east-1. Signatures for other regions are accepted as well.
        Ok(S3Response::new(GetBucketLocationOutput::default()))
    }

    async fn create_bucket(
        &self,
        request: S3Request<CreateBucketInput>,
    ) -> Answer<CreateBucketOutput> {
        // Some clients create the bucket before they write.
        Err(match self.bucket(&request.input.bucket) {
            Ok(_) => s3_error!(BucketAlreadyOwnedByYou),
            Err(_) => s3_error!(
                AccessDenied,
                "CreateBucket: the buckets are set when the endpoint starts"
            ),
        })
    }
}
