//! The bytes of an upload in pieces, with the checksums that the client sent.

use std::future::Future;

use bytes::{Bytes, BytesMut};
use futures_util::{Stream, StreamExt};
use http::{HeaderMap, HeaderValue, StatusCode};
use s3s::checksum::ChecksumHasher;
use s3s::crypto::{Checksum as _, Crc32, Crc32c, Crc64Nvme, Md5, Sha1, Sha256};
use s3s::dto::{Checksum, StreamingBlob};
use s3s::{S3Error, S3ErrorCode, S3Result, TrailingHeaders, s3_error};

use crate::chunks::{self, TOO_LONG};
use crate::failures::failure;

/// Bytes that are written to a store, from a client, another object or a file.
pub(crate) trait Pieces: Send {
    /// The next `bytes` bytes, or fewer at the end; true if no more follow.
    fn piece(&mut self, bytes: usize) -> impl Future<Output = S3Result<(Bytes, bool)>> + Send;

    /// Bytes in memory besides the pieces, at most.
    fn held_bytes(&self) -> usize {
        0
    }

    /// Checks the whole, after the end and before it becomes an object.
    fn verify(&mut self) -> S3Result<()>;
}

/// Collects pieces from a stream. The bytes are copied: a frame of one byte may keep a whole buffer of the connection.
#[derive(Debug)]
struct Collector<S> {
    stream: S,
    rest: Bytes,
    ended: bool,
}

impl<S, E> Collector<S>
where
    S: Stream<Item = Result<Bytes, E>> + Unpin,
{
    fn new(stream: S) -> Self {
        Self { stream, rest: Bytes::new(), ended: false }
    }

    /// `expected` is the number of bytes to allocate at first.
    async fn piece(&mut self, bytes: usize, expected: usize) -> Result<(Bytes, bool), E> {
        let mut piece = BytesMut::with_capacity(expected.min(bytes));
        loop {
            let taken = self.rest.len().min(bytes - piece.len());
            piece.extend_from_slice(&self.rest.split_to(taken));
            // A full piece, too, needs to know whether it is the last.
            if !self.rest.is_empty() || self.ended {
                return Ok((piece.freeze(), self.ended && self.rest.is_empty()));
            }
            match self.stream.next().await {
                Some(frame) => self.rest = frame?,
                None => self.ended = true,
            }
        }
    }
}

/// The body of a request, with the checksums of its headers and trailers.
pub(crate) struct UploadBody {
    frames: Collector<StreamingBlob>,
    declared_bytes: Option<u64>,
    received_bytes: u64,
    md5: Option<Md5>,
    declared_md5: Option<String>,
    hasher: ChecksumHasher,
    declared: Checksum,
    trailers: Option<TrailingHeaders>,
    /// The names that `x-amz-trailer` announces.
    announced: Vec<String>,
    /// Of a chunk that `s3s` collects.
    held_bytes_max: u64,
    /// The base64 checksums of the received bytes, set by [`Pieces::verify`].
    pub(crate) checksum: Checksum,
    /// The MD5 of the received bytes, set by [`Pieces::verify`].
    pub(crate) md5_sum: [u8; 16],
}

/// The body and the checksums from the input of an operation.
macro_rules! upload_body {
    ($request:expr) => {{
        let input = &mut $request.input;
        let declared = s3s::dto::Checksum {
            checksum_crc32: input.checksum_crc32.take(),
            checksum_crc32c: input.checksum_crc32c.take(),
            checksum_crc64nvme: input.checksum_crc64nvme.take(),
            checksum_sha1: input.checksum_sha1.take(),
            checksum_sha256: input.checksum_sha256.take(),
            checksum_type: None,
        };
        $crate::body::UploadBody::new(
            input.body.take(),
            input.content_length,
            input.content_md5.take(),
            declared,
            &$request.headers,
            $request.trailing_headers.take(),
        )
    }};
}
pub(crate) use upload_body;

impl UploadBody {
    pub(crate) fn new(
        body: Option<StreamingBlob>,
        bytes: Option<i64>,
        declared_md5: Option<String>,
        declared: Checksum,
        headers: &HeaderMap,
        trailers: Option<TrailingHeaders>,
    ) -> Self {
        let body = body.unwrap_or_else(|| StreamingBlob::from(s3s::Body::empty()));
        let of_trailer = headers.get_all("x-amz-trailer").iter();
        let names = of_trailer.filter_map(|names| names.to_str().ok()).flat_map(|n| n.split(','));
        let names = names.map(|name| name.trim().to_ascii_lowercase());
        let announced: Vec<String> = names.filter(|name| !name.is_empty()).collect();
        let wanted = |declared: &Option<String>, name: &str| {
            declared.is_some() || announced.iter().any(|found| found == name)
        };
        let hasher = ChecksumHasher {
            crc32: wanted(&declared.checksum_crc32, CRC32).then(Crc32::new),
            crc32c: wanted(&declared.checksum_crc32c, CRC32C).then(Crc32c::new),
            sha1: wanted(&declared.checksum_sha1, SHA1).then(Sha1::new),
            sha256: wanted(&declared.checksum_sha256, SHA256).then(Sha256::new),
            crc64nvme: wanted(&declared.checksum_crc64nvme, CRC64NVME).then(Crc64Nvme::new),
        };
        let bytes = bytes.and_then(|bytes| u64::try_from(bytes).ok());
        // A request in HTTP's chunks has no other length.
        let declared_bytes = bytes.or_else(|| chunks::decoded_bytes(headers));
        let framing = headers.get("x-amz-content-sha256").map(HeaderValue::as_bytes);
        Self {
            frames: Collector::new(body),
            declared_bytes,
            received_bytes: 0,
            md5: declared_md5.is_some().then(Md5::new),
            declared_md5,
            hasher,
            declared,
            trailers,
            announced,
            held_bytes_max: chunks::held_bytes_max(framing),
            checksum: Checksum::default(),
            md5_sum: [0; 16],
        }
    }

    pub(crate) fn declared_bytes(&self) -> Option<u64> {
        self.declared_bytes
    }

    /// Computes the MD5 in any case.
    pub(crate) fn with_md5(mut self) -> Self {
        self.md5 = Some(Md5::new());
        self
    }
}

const CRC32: &str = "x-amz-checksum-crc32";
const CRC32C: &str = "x-amz-checksum-crc32c";
const CRC64NVME: &str = "x-amz-checksum-crc64nvme";
const SHA1: &str = "x-amz-checksum-sha1";
const SHA256: &str = "x-amz-checksum-sha256";

impl Pieces for UploadBody {
    async fn piece(&mut self, bytes: usize) -> S3Result<(Bytes, bool)> {
        let expected = self.declared_bytes.map_or(0, |all| all.saturating_sub(self.received_bytes));
        let expected = usize::try_from(expected).unwrap_or(usize::MAX);
        let (piece, ended) = self.frames.piece(bytes, expected).await.map_err(body_failure)?;
        self.received_bytes += piece.len() as u64;
        self.hasher.update(&piece);
        if let Some(md5) = &mut self.md5 {
            md5.update(&piece);
        }
        Ok((piece, ended))
    }

    fn held_bytes(&self) -> usize {
        // No chunk is longer than the declared length.
        self.declared_bytes.unwrap_or(u64::MAX).min(self.held_bytes_max) as usize
    }

    fn verify(&mut self) -> S3Result<()> {
        if let Some(declared) = self.declared_bytes.filter(|&all| all != self.received_bytes) {
            let received = self.received_bytes;
            return Err(s3_error!(IncompleteBody, "{received} bytes were sent of {declared}"));
        }
        if let Some(md5) = self.md5.take() {
            self.md5_sum = md5.finalize();
            let same = |declared: &String| *declared == base64(&self.md5_sum);
            if !self.declared_md5.as_ref().is_none_or(same) {
                return Err(s3_error!(BadDigest, "Content-MD5 is not that of the body"));
            }
        }
        let is_chunked = self.trailers.is_some();
        let trailers =
            self.trailers.take().and_then(|trailers| trailers.take()).unwrap_or_default();
        let is_missing = |name: &&String| is_chunked && !trailers.contains_key(name.as_str());
        if let Some(name) = self.announced.iter().find(is_missing) {
            let code = S3ErrorCode::Custom("MalformedTrailerError".into());
            let what = format!("the body ends without {name}, which x-amz-trailer announces");
            let mut error = S3Error::with_message(code, what);
            error.set_status_code(StatusCode::BAD_REQUEST);
            return Err(error);
        }
        self.checksum = std::mem::take(&mut self.hasher).finalize();
        for (name, declared, computed) in [
            (CRC32, &self.declared.checksum_crc32, &self.checksum.checksum_crc32),
            (CRC32C, &self.declared.checksum_crc32c, &self.checksum.checksum_crc32c),
            (CRC64NVME, &self.declared.checksum_crc64nvme, &self.checksum.checksum_crc64nvme),
            (SHA1, &self.declared.checksum_sha1, &self.checksum.checksum_sha1),
            (SHA256, &self.declared.checksum_sha256, &self.checksum.checksum_sha256),
        ] {
            let trailer = trailers.get(name).map(|value| value.as_bytes().trim_ascii());
            let declared = declared.as_ref().map(String::as_bytes).or(trailer);
            if declared.is_some_and(|declared| {
                computed.as_ref().is_none_or(|sum| sum.as_bytes() != declared)
            }) {
                return Err(s3_error!(BadDigest, "{name} is not that of the body"));
            }
        }
        Ok(())
    }
}

pub(crate) fn base64(bytes: &[u8]) -> String {
    base64_simd::STANDARD.encode_to_string(bytes)
}

/// An error while the body was received. The types of `s3s`'s errors are private.
fn body_failure(error: Box<dyn std::error::Error + Send + Sync>) -> S3Error {
    let text = error.to_string();
    let code = if text.contains("Sha256Mismatch") {
        let mut error = s3_error!(BadDigest, "x-amz-content-sha256 is not that of the body");
        error.set_code(S3ErrorCode::Custom("XAmzContentSHA256Mismatch".into()));
        error.set_status_code(StatusCode::BAD_REQUEST);
        return error;
    } else if text.contains("SignatureMismatch") {
        S3ErrorCode::SignatureDoesNotMatch
    } else if text.contains(TOO_LONG) {
        S3ErrorCode::EntityTooLarge
    } else if text.contains("the client has stopped") {
        S3ErrorCode::RequestTimeout
    } else {
        S3ErrorCode::IncompleteBody
    };
    S3Error::with_message(code, format!("the body of the request: {text}"))
}

/// The bytes of another object.
#[derive(Debug)]
pub(crate) struct SourceObject<S> {
    frames: Collector<S>,
}

impl<S> SourceObject<S>
where
    S: Stream<Item = object_store::Result<Bytes>> + Unpin,
{
    pub(crate) fn new(stream: S) -> Self {
        Self { frames: Collector::new(stream) }
    }
}

impl<S> Pieces for SourceObject<S>
where
    S: Stream<Item = object_store::Result<Bytes>> + Unpin + Send,
{
    async fn piece(&mut self, bytes: usize) -> S3Result<(Bytes, bool)> {
        self.frames.piece(bytes, 0).await.map_err(failure)
    }

    fn verify(&mut self) -> S3Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use futures_util::stream;

    use super::*;

    #[test]
    fn a_chunk_is_held_as_a_whole() {
        let held = |content: &'static str, bytes: i64| {
            let mut headers = HeaderMap::new();
            headers.insert("x-amz-content-sha256", HeaderValue::from_static(content));
            let declared = Checksum::default();
            UploadBody::new(None, Some(bytes), None, declared, &headers, None).held_bytes()
        };
        let (signed, unsigned) =
            ("STREAMING-AWS4-HMAC-SHA256-PAYLOAD", "STREAMING-UNSIGNED-PAYLOAD-TRAILER");
        for (content, bytes, expected) in [
            (signed, 5, 5),
            (signed, 1 << 40, 8 << 20),
            (unsigned, 5, 5),
            (unsigned, 1 << 40, 1 << 20),
            ("UNSIGNED-PAYLOAD", 1 << 40, 0),
        ] {
            assert_eq!(held(content, bytes), expected, "{content}, {bytes} bytes");
        }
    }

    #[tokio::test]
    async fn pieces_are_full_until_the_end() {
        for frames in [vec![10_usize], vec![1; 10], vec![3, 0, 7], vec![4, 4, 2], vec![]] {
            let bytes: Vec<u8> = (0..frames.iter().sum::<usize>() as u8).collect();
            let mut rest = &bytes[..];
            let parts: Vec<Result<Bytes, ()>> = frames
                .iter()
                .map(|&length| Ok(Bytes::copy_from_slice(rest.split_off(..length).unwrap())))
                .collect();
            for size in [1, 2, 5, 10, 11] {
                let mut collector = Collector::new(stream::iter(parts.clone()));
                let mut found = Vec::new();
                loop {
                    let (piece, ended) = collector.piece(size, 0).await.unwrap();
                    assert!(piece.len() == size || ended, "{frames:?} {size}");
                    found.extend_from_slice(&piece);
                    if ended {
                        break;
                    }
                }
                assert_eq!(found, bytes, "{frames:?} {size}");
            }
        }
    }
}
