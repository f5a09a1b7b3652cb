//! PutObject, and how all new objects are written to a store.

use bytes::Bytes;
use object_store::path::Path;
use object_store::{
    Attributes, PutMode, PutMultipartOptions, PutOptions, PutPayload, PutResult, TagSet,
    UpdateVersion, WriteMultipart,
};
use s3s::dto::*;
use s3s::{S3Request, S3Response, S3Result, s3_error};

use crate::Limits;
use crate::attributes::{metadata_headers, tags_of};
use crate::body::{Pieces, upload_body};
use crate::bucket::{Bucket as StoreBucket, path_of};
use crate::failures::{failure, refuse, unsupported_key, write_failure};
use crate::gateway::Gateway;
use crate::memory::{PARTS, ReservedMemory, UploadMemory};

/// S3's limit of PutObject.
pub(crate) const PUT_BYTES_MAX: u64 = 5 << 30;
/// Stores take 10,000 parts of one upload at most.
const PARTS_MAX: u64 = 9_000;

/// What an object gets besides its bytes.
#[derive(Debug)]
pub(crate) struct NewObject {
    pub(crate) mode: PutMode,
    pub(crate) attributes: Attributes,
    pub(crate) tags: TagSet,
}

/// The mode of a write with conditions.
pub(crate) async fn mode_of(
    bucket: &StoreBucket,
    path: &Path,
    if_match: Option<&ETagCondition>,
    if_none_match: Option<&ETagCondition>,
) -> S3Result<PutMode> {
    match (if_match, if_none_match) {
        (None, None) => Ok(PutMode::Overwrite),
        (None, Some(ETagCondition::Any)) => Ok(PutMode::Create),
        (Some(condition @ ETagCondition::ETag(_)), None) => {
            let e_tag = Some(bucket.condition(path, condition).await);
            Ok(PutMode::Update(UpdateVersion { e_tag, version: None }))
        }
        (Some(ETagCondition::Any), _) => {
            Err(s3_error!(NotImplemented, "If-Match: * of a write is not implemented"))
        }
        _ => Err(s3_error!(NotImplemented, "If-None-Match of a write is implemented for * alone")),
    }
}

/// Refuses what `object_store` has no interface for.
macro_rules! refuse_features {
    ($input:expr) => {{
        let input = &$input;
        let private = |acl: &ObjectCannedACL| {
            matches!(
                acl.as_str(),
                ObjectCannedACL::PRIVATE | ObjectCannedACL::BUCKET_OWNER_FULL_CONTROL
            )
        };
        let grants = [
            &input.grant_full_control,
            &input.grant_read,
            &input.grant_read_acp,
            &input.grant_write_acp,
        ];
        let encryption = input.server_side_encryption.as_ref();
        $crate::failures::refuse(&[
            ("an ACL other than private", !input.acl.as_ref().is_none_or(private)),
            ("a grant of access", grants.iter().any(|grant| grant.is_some())),
            ("the header Expires", input.expires.is_some()),
            ("encryption with a customer's key", input.sse_customer_algorithm.is_some()),
            ("encryption with a key of KMS", input.ssekms_key_id.is_some()),
            ("server-side encryption", encryption.is_some()),
            ("a redirection of a website", input.website_redirect_location.is_some()),
            (
                "object lock",
                input.object_lock_mode.is_some()
                    || input.object_lock_legal_hold_status.is_some()
                    || input.object_lock_retain_until_date.is_some(),
            ),
        ])?;
    }};
}
pub(crate) use refuse_features;

/// Writes a multipart upload of the store, and aborts it when it is dropped before the end.
struct PartWriter(Option<WriteMultipart>);

impl PartWriter {
    async fn write(&mut self, part: Bytes) -> object_store::Result<()> {
        let Some(writer) = &mut self.0 else { return Ok(()) };
        writer.wait_for_capacity(PARTS - 1).await?;
        writer.put(part);
        Ok(())
    }

    async fn finish(mut self, reserved: ReservedMemory) -> object_store::Result<PutResult> {
        let failed = |source| object_store::Error::Generic { store: "endpoint", source };
        let writer = self.0.take().ok_or_else(|| failed("already ended".into()))?;
        // A task of its own: it goes on if the client goes away. It aborts the upload if the end fails.
        let ending = tokio::spawn(async move {
            let _reserved = reserved;
            writer.finish().await
        });
        ending.await.map_err(|error| failed(error.into()))?
    }
}

impl Drop for PartWriter {
    fn drop(&mut self) {
        if let (Some(writer), Ok(runtime)) = (self.0.take(), tokio::runtime::Handle::try_current())
        {
            // The error of an abort has no receiver; stores can expire such parts.
            runtime.spawn(async move { drop(writer.abort().await) });
        }
    }
}

/// Writes an object of `bytes` bytes, if they are known. Holds a few parts in memory.
pub(crate) async fn write_object(
    (memory, limits): (&UploadMemory, &Limits),
    bucket: &StoreBucket,
    path: &Path,
    source: &mut impl Pieces,
    bytes: Option<u64>,
    object: NewObject,
) -> S3Result<PutResult> {
    let NewObject { mode, attributes, tags } = object;
    let conditional = mode != PutMode::Overwrite;
    let too_long = || {
        let most = limits.conditional_bytes_max;
        s3_error!(
            NotImplemented,
            "a conditional write of more than {most} bytes is not implemented"
        )
    };
    let least = bytes.unwrap_or(0).div_ceil(PARTS_MAX);
    let part = usize::try_from(least).unwrap_or(usize::MAX).max(limits.part_bytes);
    if part > memory.part_bytes_max() && part > limits.part_bytes {
        return Err(s3_error!(
            EntityTooLarge,
            "the parts of the object exceed the memory for uploads"
        ));
    }
    let single = if conditional { limits.conditional_bytes_max } else { part };
    let fits = |bytes: u64| bytes <= single as u64;
    if conditional && !bytes.is_none_or(fits) {
        return Err(too_long());
    }
    let needed = match bytes {
        Some(bytes) if fits(bytes) => bytes as usize,
        _ if conditional => single,
        _ => PARTS * part,
    };
    let reserved = memory.reserve(needed.saturating_add(source.held_bytes())).await;
    let (first, ended) = source.piece(single).await?;
    if ended {
        source.verify()?;
        let options = PutOptions { mode, attributes, tags, ..PutOptions::default() };
        let put = bucket.store.put_opts(path, PutPayload::from_bytes(first), options).await;
        return put.map_err(write_failure);
    }
    if conditional {
        return Err(too_long());
    }
    let options = PutMultipartOptions { attributes, tags, ..PutMultipartOptions::default() };
    let upload = bucket.store.put_multipart_opts(path, options).await.map_err(failure)?;
    let mut writer = PartWriter(Some(WriteMultipart::new_with_chunk_size(upload, part)));
    let mut piece = (first, false);
    loop {
        writer.write(piece.0).await.map_err(failure)?;
        if piece.1 {
            break;
        }
        piece = source.piece(part).await?;
    }
    source.verify()?;
    writer.finish(reserved).await.map_err(write_failure)
}

impl Gateway {
    pub(crate) async fn put(
        &self,
        mut request: S3Request<PutObjectInput>,
    ) -> S3Result<S3Response<PutObjectOutput>> {
        refuse_features!(request.input);
        refuse(&[("an append by offset", request.input.write_offset_bytes.is_some())])?;
        let mut body = upload_body!(request);
        let mut input = request.input;
        let bucket = self.bucket(&input.bucket)?;
        let bytes = body.declared_bytes();
        if bytes.is_some_and(|bytes| bytes > PUT_BYTES_MAX) {
            return Err(s3_error!(
                EntityTooLarge,
                "PutObject takes 5 GiB at most: use a multipart upload"
            ));
        }
        let Some(path) = path_of(&input.key) else {
            return directory_marker(&input.key, &mut body).await;
        };
        let (if_match, if_none_match) = (input.if_match.as_ref(), input.if_none_match.as_ref());
        let mode = mode_of(bucket, &path, if_match, if_none_match).await?;
        let tags = tags_of(input.tagging.as_deref())?;
        let attributes = metadata_headers!(input).into_attributes(bucket);
        let object = NewObject { mode, attributes, tags };
        let resources = (&*self.memory, &self.limits);
        let put = write_object(resources, bucket, &path, &mut body, bytes, object).await?;
        let checksum = body.checksum;
        Ok(S3Response::new(PutObjectOutput {
            e_tag: bucket.e_tag(put.e_tag.as_deref()),
            version_id: put.version,
            checksum_crc32: checksum.checksum_crc32,
            checksum_crc32c: checksum.checksum_crc32c,
            checksum_crc64nvme: checksum.checksum_crc64nvme,
            checksum_sha1: checksum.checksum_sha1,
            checksum_sha256: checksum.checksum_sha256,
            ..PutObjectOutput::default()
        }))
    }
}

/// An empty object whose key ends in a slash marks a directory for some clients. `object_store` has no such keys, and its
/// directories need no marker: the write succeeds and stores nothing.
async fn directory_marker(
    key: &str,
    body: &mut impl Pieces,
) -> S3Result<S3Response<PutObjectOutput>> {
    let is_directory = key.strip_suffix('/').is_some_and(|directory| path_of(directory).is_some());
    if !is_directory || body.piece(1).await? != (Bytes::new(), true) {
        return Err(unsupported_key(key));
    }
    body.verify()?;
    // The MD5 of no bytes.
    let e_tag = Some(ETag::Strong("d41d8cd98f00b204e9800998ecf8427e".into()));
    Ok(S3Response::new(PutObjectOutput { e_tag, ..PutObjectOutput::default() }))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use std::sync::atomic::AtomicBool;
    use std::sync::atomic::Ordering::SeqCst;

    use async_trait::async_trait;
    use futures_util::FutureExt;
    use futures_util::stream::BoxStream;
    use object_store::memory::InMemory;
    use object_store::{
        CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
        ObjectStoreExt, Result, UploadPart,
    };
    use tokio::sync::Notify;

    use super::*;

    /// A body that holds some bytes besides its piece, and looks at the memory that is left.
    struct HeldBody {
        memory: Arc<UploadMemory>,
        left: usize,
    }

    impl Pieces for HeldBody {
        async fn piece(&mut self, _: usize) -> S3Result<(Bytes, bool)> {
            assert!(self.memory.reserve(self.left).now_or_never().is_some());
            assert!(self.memory.reserve(self.left + 1024).now_or_never().is_none());
            Ok((Bytes::from_static(b"water"), true))
        }

        fn held_bytes(&self) -> usize {
            3 << 20
        }

        fn verify(&mut self) -> S3Result<()> {
            Ok(())
        }
    }

    /// Goal: the limit of memory has the chunks that are held until their signature is checked.
    #[tokio::test]
    async fn held_bytes_are_reserved() {
        let limits = Limits {
            upload_memory_bytes: 40 << 20,
            part_bytes: 8 << 20,
            conditional_bytes_max: 0,
            ..Limits::default()
        };
        let memory = Arc::new(UploadMemory::new(&limits));
        let bucket = StoreBucket::new(Arc::new(InMemory::new()));
        let (mode, attributes) = (PutMode::Overwrite, Attributes::new());
        let object = NewObject { mode, attributes, tags: TagSet::default() };
        let mut body = HeldBody { memory: Arc::clone(&memory), left: 36 << 20 };
        let (resources, path) = ((&*memory, &limits), Path::from("pond"));
        write_object(resources, &bucket, &path, &mut body, Some(1 << 20), object).await.unwrap();
    }

    /// A store whose uploads end when the test lets them.
    #[derive(Debug, Default)]
    struct SlowEnd {
        store: InMemory,
        has_begun: Arc<Notify>,
        may_end: Arc<Notify>,
        is_aborted: Arc<AtomicBool>,
    }

    impl std::fmt::Display for SlowEnd {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("slow end")
        }
    }

    #[derive(Debug)]
    struct SlowUpload {
        upload: Box<dyn MultipartUpload>,
        has_begun: Arc<Notify>,
        may_end: Arc<Notify>,
        is_aborted: Arc<AtomicBool>,
    }

    #[async_trait]
    impl MultipartUpload for SlowUpload {
        fn put_part(&mut self, data: PutPayload) -> UploadPart {
            self.upload.put_part(data)
        }

        async fn complete(&mut self) -> Result<PutResult> {
            self.has_begun.notify_one();
            self.may_end.notified().await;
            self.upload.complete().await
        }

        async fn abort(&mut self) -> Result<()> {
            self.is_aborted.store(true, SeqCst);
            self.upload.abort().await
        }
    }

    #[async_trait]
    impl ObjectStore for SlowEnd {
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
            Ok(Box::new(SlowUpload {
                upload: self.store.put_multipart_opts(at, options).await?,
                has_begun: Arc::clone(&self.has_begun),
                may_end: Arc::clone(&self.may_end),
                is_aborted: Arc::clone(&self.is_aborted),
            }))
        }

        async fn get_opts(&self, at: &Path, options: GetOptions) -> Result<GetResult> {
            self.store.get_opts(at, options).await
        }

        fn delete_stream(
            &self,
            locations: BoxStream<'static, Result<Path>>,
        ) -> BoxStream<'static, Result<Path>> {
            self.store.delete_stream(locations)
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

    /// So many more pieces.
    struct PiecesLeft(u32);

    impl Pieces for PiecesLeft {
        async fn piece(&mut self, bytes: usize) -> S3Result<(Bytes, bool)> {
            self.0 -= 1;
            Ok((vec![7; bytes].into(), self.0 == 0))
        }

        fn held_bytes(&self) -> usize {
            0
        }

        fn verify(&mut self) -> S3Result<()> {
            Ok(())
        }
    }

    /// Incident: an upload whose client went away while the store completed it was neither ended nor aborted.
    #[tokio::test]
    async fn an_upload_ends_without_its_client() {
        let limits = Limits { part_bytes: 1 << 20, ..Limits::default() };
        let memory = Arc::new(UploadMemory::new(&limits));
        let store = Arc::new(SlowEnd::default());
        let (begun, may_end) = (Arc::clone(&store.has_begun), Arc::clone(&store.may_end));
        let bucket = StoreBucket::new(store.clone());
        let (mode, attributes) = (PutMode::Overwrite, Attributes::new());
        let object = NewObject { mode, attributes, tags: TagSet::default() };
        let (path, mut body) = (Path::from("pond"), PiecesLeft(3));
        {
            let resources = (&*memory, &limits);
            let writing = write_object(resources, &bucket, &path, &mut body, None, object);
            tokio::select! {
                written = writing => panic!("{written:?}"),
                () = begun.notified() => {}
            }
        }
        may_end.notify_one();
        for _ in 0..1000 {
            if store.is_aborted.load(SeqCst) || store.store.head(&path).await.is_ok() {
                return;
            }
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
        panic!("the upload was neither ended nor aborted");
    }
}
