//! The operations of multipart uploads.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use s3s::dto::*;
use s3s::{S3Error, S3Request, S3Response, S3Result, s3_error};

use crate::Limits;
use crate::attributes::{metadata_headers, tags_of, timestamp};
use crate::body::{Pieces, upload_body};
use crate::bucket::{Bucket as StoreBucket, path_of};
use crate::failures::{refuse, unsupported_key};
use crate::gateway::Gateway;
use crate::get::{ReadConditions, store_range};
use crate::memory::UploadMemory;
use crate::put::{NewObject, PUT_BYTES_MAX, mode_of, refuse_features, write_object};
use crate::uploads::spool::{SpooledBytes, SpooledParts};
use crate::uploads::{Completed, Upload, UploadedPart, lock};

const PART_NUMBER_MAX: i32 = 10_000;
const PARTS_OF_LIST_MAX: i32 = 1000;
/// Bytes of a part in memory.
const PIECE_BYTES: usize = 1 << 20;
/// A completion that takes longer is answered in advance, and its result follows in the body, so that the client does not
/// give up.
const REPLY_AFTER: Duration = Duration::from_secs(5);

fn hex(sum: &[u8]) -> String {
    sum.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Gateway {
    pub(crate) fn create_upload(
        &self,
        mut input: CreateMultipartUploadInput,
    ) -> S3Result<S3Response<CreateMultipartUploadOutput>> {
        refuse_features!(input);
        let bucket = self.bucket(&input.bucket)?;
        let path = path_of(&input.key).ok_or_else(|| unsupported_key(&input.key))?;
        let tags = tags_of(input.tagging.as_deref())?;
        let attributes = metadata_headers!(input).into_attributes(bucket);
        let id = self.uploads.create(input.bucket.clone(), path, attributes, tags)?;
        Ok(S3Response::new(CreateMultipartUploadOutput {
            bucket: Some(input.bucket),
            key: Some(input.key),
            upload_id: Some(id),
            ..CreateMultipartUploadOutput::default()
        }))
    }

    /// Stores a part; it replaces an earlier one of the same number.
    async fn receive_part(
        &self,
        upload: &Upload,
        number: i32,
        source: &mut impl Pieces,
    ) -> S3Result<SpooledBytes> {
        if !(1..=PART_NUMBER_MAX).contains(&number) {
            return Err(s3_error!(
                InvalidArgument,
                "part number {number} is not between 1 and {PART_NUMBER_MAX}"
            ));
        }
        let _reserved = self.memory.reserve(PIECE_BYTES + source.held_bytes()).await;
        let mut bytes = SpooledBytes::new(&upload.file);
        loop {
            let (piece, ended) = source.piece(PIECE_BYTES).await?;
            bytes.append(piece).await?;
            if bytes.bytes() > PUT_BYTES_MAX {
                return Err(s3_error!(EntityTooLarge, "a part has 5 GiB at most"));
            }
            if ended {
                source.verify()?;
                return Ok(bytes);
            }
        }
    }

    fn add_part(
        &self,
        upload: &Upload,
        number: i32,
        bytes: SpooledBytes,
        md5: String,
    ) -> S3Result<ETag> {
        let e_tag = ETag::Strong(md5.clone());
        let part = UploadedPart { bytes: Arc::new(bytes), md5, received: SystemTime::now() };
        let mut progress = lock(&upload.progress);
        if progress.is_completed {
            return Err(s3_error!(NoSuchUpload, "the upload is completed"));
        }
        let replaced = progress.parts.insert(number, Arc::new(part));
        drop(progress);
        drop(replaced);
        Ok(e_tag)
    }

    pub(crate) async fn put_part(
        &self,
        mut request: S3Request<UploadPartInput>,
    ) -> S3Result<S3Response<UploadPartOutput>> {
        let customer_key = request.input.sse_customer_algorithm.is_some();
        refuse(&[("encryption with a customer's key", customer_key)])?;
        let mut body = upload_body!(request).with_md5();
        let input = request.input;
        self.bucket(&input.bucket)?;
        let upload = self.uploads.find(&input.bucket, &input.key, &input.upload_id)?;
        let bytes = self.receive_part(&upload, input.part_number, &mut body).await?;
        let e_tag = self.add_part(&upload, input.part_number, bytes, hex(&body.md5_sum))?;
        let checksum = body.checksum;
        Ok(S3Response::new(UploadPartOutput {
            e_tag: Some(e_tag),
            checksum_crc32: checksum.checksum_crc32,
            checksum_crc32c: checksum.checksum_crc32c,
            checksum_crc64nvme: checksum.checksum_crc64nvme,
            checksum_sha1: checksum.checksum_sha1,
            checksum_sha256: checksum.checksum_sha256,
            ..UploadPartOutput::default()
        }))
    }

    pub(crate) async fn copy_part(
        &self,
        mut input: UploadPartCopyInput,
    ) -> S3Result<S3Response<UploadPartCopyOutput>> {
        refuse(&[(
            "encryption with a customer's key",
            input.sse_customer_algorithm.is_some()
                || input.copy_source_sse_customer_algorithm.is_some(),
        )])?;
        self.bucket(&input.bucket)?;
        let upload = self.uploads.find(&input.bucket, &input.key, &input.upload_id)?;
        let range = match input.copy_source_range.as_deref().map(Range::parse) {
            None => None,
            Some(Ok(range)) => Some(store_range(range)),
            Some(Err(_)) => {
                return Err(s3_error!(
                    InvalidArgument,
                    "x-amz-copy-source-range is not bytes=FIRST-LAST"
                ));
            }
        };
        let conditions = ReadConditions {
            if_match: input.copy_source_if_match.take(),
            if_none_match: input.copy_source_if_none_match.take(),
            if_modified_since: input.copy_source_if_modified_since.take(),
            if_unmodified_since: input.copy_source_if_unmodified_since.take(),
        };
        let wanted = match &range {
            Some(object_store::GetRange::Bounded(range)) => Some(range.end - range.start),
            _ => None,
        };
        let from = self.read_for_copy(&input.copy_source, &conditions, range).await?;
        if let Some(wanted) = wanted.filter(|&wanted| wanted != from.bytes) {
            let there = from.bytes;
            return Err(s3_error!(
                InvalidRange,
                "the source has {there} bytes of the {wanted} in x-amz-copy-source-range"
            ));
        }
        let mut source = Md5Pieces {
            source: from.source,
            md5: s3s::crypto::Checksum::new(),
            sum: String::new(),
        };
        let bytes = self.receive_part(&upload, input.part_number, &mut source).await?;
        let e_tag = self.add_part(&upload, input.part_number, bytes, source.sum)?;
        let result = CopyPartResult {
            e_tag: Some(e_tag),
            last_modified: Some(timestamp(SystemTime::now())),
            ..CopyPartResult::default()
        };
        Ok(S3Response::new(UploadPartCopyOutput {
            copy_part_result: Some(result),
            ..UploadPartCopyOutput::default()
        }))
    }

    pub(crate) async fn complete_upload(
        &self,
        input: CompleteMultipartUploadInput,
    ) -> S3Result<S3Response<CompleteMultipartUploadOutput>> {
        let bucket = Arc::clone(self.bucket(&input.bucket)?);
        let upload = self.uploads.find(&input.bucket, &input.key, &input.upload_id)?;
        let (memory, limits) = (Arc::clone(&self.memory), self.limits.clone());
        // A task of its own: it goes on if the client goes away.
        let mut completion = tokio::spawn(async move {
            let completed = complete(&memory, &limits, &bucket, &upload, &input).await?;
            Ok(CompleteMultipartUploadOutput {
                bucket: Some(input.bucket),
                key: Some(input.key),
                e_tag: completed.e_tag,
                version_id: completed.version,
                ..CompleteMultipartUploadOutput::default()
            })
        });
        match tokio::time::timeout(REPLY_AFTER, &mut completion).await {
            Ok(done) => Ok(S3Response::new(done.map_err(S3Error::internal_error)??)),
            Err(_) => Ok(S3Response::new(CompleteMultipartUploadOutput {
                future: Some(Box::pin(async move {
                    completion.await.map_err(S3Error::internal_error)?
                })),
                ..CompleteMultipartUploadOutput::default()
            })),
        }
    }

    pub(crate) fn list_upload_parts(
        &self,
        input: ListPartsInput,
    ) -> S3Result<S3Response<ListPartsOutput>> {
        self.bucket(&input.bucket)?;
        let upload = self.uploads.find(&input.bucket, &input.key, &input.upload_id)?;
        let most = input.max_parts.unwrap_or(PARTS_OF_LIST_MAX).clamp(1, PARTS_OF_LIST_MAX);
        let marker = input.part_number_marker.unwrap_or(0);
        let progress = lock(&upload.progress);
        if progress.is_completed {
            return Err(s3_error!(NoSuchUpload, "the upload is completed"));
        }
        let mut rest = progress.parts.range(marker.saturating_add(1)..);
        let parts: Vec<Part> = rest
            .by_ref()
            .take(most as usize)
            .map(|(&number, part)| Part {
                e_tag: Some(ETag::Strong(part.md5.clone())),
                last_modified: Some(timestamp(part.received)),
                part_number: Some(number),
                size: i64::try_from(part.bytes.bytes()).ok(),
                ..Part::default()
            })
            .collect();
        Ok(S3Response::new(ListPartsOutput {
            bucket: Some(input.bucket),
            key: Some(input.key),
            upload_id: Some(input.upload_id),
            max_parts: Some(most),
            part_number_marker: Some(marker),
            next_part_number_marker: parts.last().and_then(|part| part.part_number),
            is_truncated: Some(rest.next().is_some()),
            parts: Some(parts),
            ..ListPartsOutput::default()
        }))
    }

    /// Lists all uploads at once: they are few.
    pub(crate) fn list_uploads(
        &self,
        input: ListMultipartUploadsInput,
    ) -> S3Result<S3Response<ListMultipartUploadsOutput>> {
        refuse(&[("ListMultipartUploads with a delimiter", input.delimiter.is_some())])?;
        self.bucket(&input.bucket)?;
        let prefix = input.prefix.clone().unwrap_or_default();
        let after = |upload: &Upload| match (&input.key_marker, &input.upload_id_marker) {
            (None, _) => true,
            (Some(key), None) => upload.path.as_ref() > key.as_str(),
            (Some(key), Some(id)) => (upload.path.as_ref(), upload.id.as_str()) > (key, id),
        };
        let uploads = self.uploads.open(&input.bucket).into_iter();
        let uploads = uploads
            .filter(|upload| upload.path.as_ref().starts_with(&prefix) && after(upload))
            .map(|upload| MultipartUpload {
                initiated: Some(timestamp(upload.started)),
                key: Some(upload.path.to_string()),
                upload_id: Some(upload.id.clone()),
                ..MultipartUpload::default()
            })
            .collect();
        Ok(S3Response::new(ListMultipartUploadsOutput {
            bucket: Some(input.bucket),
            prefix: input.prefix,
            is_truncated: Some(false),
            uploads: Some(uploads),
            ..ListMultipartUploadsOutput::default()
        }))
    }
}

/// Writes the named parts to the store, once.
async fn complete(
    memory: &UploadMemory,
    limits: &Limits,
    bucket: &StoreBucket,
    upload: &Upload,
    input: &CompleteMultipartUploadInput,
) -> S3Result<Completed> {
    let mut completed = upload.completed.lock().await;
    if let Some(completed) = &*completed {
        return Ok(completed.clone());
    }
    let parts = named_parts(upload, input)?;
    let bytes = parts.iter().map(|part| part.bytes()).sum();
    if let Some(declared) =
        input.mpu_object_size.filter(|&declared| u64::try_from(declared) != Ok(bytes))
    {
        return Err(s3_error!(
            InvalidRequest,
            "the parts have {bytes} bytes, and the request says {declared}"
        ));
    }
    let (if_match, if_none_match) = (input.if_match.as_ref(), input.if_none_match.as_ref());
    let mode = mode_of(bucket, &upload.path, if_match, if_none_match).await?;
    let object =
        NewObject { mode, attributes: upload.attributes.clone(), tags: upload.tags.clone() };
    let mut source = SpooledParts::new(&parts);
    let put =
        write_object((memory, limits), bucket, &upload.path, &mut source, Some(bytes), object)
            .await?;
    let done = Completed { e_tag: bucket.e_tag(put.e_tag.as_deref()), version: put.version };
    *completed = Some(done.clone());
    let mut progress = lock(&upload.progress);
    progress.is_completed = true;
    let parts = std::mem::take(&mut progress.parts);
    drop(progress);
    drop(parts);
    Ok(done)
}

fn named_parts(
    upload: &Upload,
    input: &CompleteMultipartUploadInput,
) -> S3Result<Vec<Arc<SpooledBytes>>> {
    let named =
        input.multipart_upload.as_ref().and_then(|named| named.parts.as_deref()).unwrap_or(&[]);
    if named.is_empty() {
        return Err(s3_error!(MalformedXML, "the request names no parts"));
    }
    let progress = lock(&upload.progress);
    let mut last = 0;
    let mut parts = Vec::with_capacity(named.len());
    for part in named {
        let number = part.part_number.unwrap_or(0);
        if number <= last {
            return Err(s3_error!(InvalidPartOrder, "part {number} is named after part {last}"));
        }
        last = number;
        let same = |found: &&Arc<UploadedPart>| {
            part.e_tag.as_ref().is_none_or(|tag| tag.value() == found.md5)
        };
        match progress.parts.get(&number).filter(same) {
            Some(found) => parts.push(Arc::clone(&found.bytes)),
            None => return Err(s3_error!(InvalidPart, "there is no part {number} with this ETag")),
        }
    }
    Ok(parts)
}

/// Computes the MD5 of what passes.
struct Md5Pieces<P> {
    source: P,
    md5: s3s::crypto::Md5,
    sum: String,
}

impl<P: Pieces> Pieces for Md5Pieces<P> {
    async fn piece(&mut self, bytes: usize) -> S3Result<(bytes::Bytes, bool)> {
        let (piece, ended) = self.source.piece(bytes).await?;
        s3s::crypto::Checksum::update(&mut self.md5, &piece);
        Ok((piece, ended))
    }

    fn verify(&mut self) -> S3Result<()> {
        let fresh = s3s::crypto::Checksum::new();
        self.sum = hex(&s3s::crypto::Checksum::finalize(std::mem::replace(&mut self.md5, fresh)));
        self.source.verify()
    }
}
