//! GetObject and HeadObject.

use std::time::{Duration, SystemTime};

use futures_util::TryStreamExt;
use http::header::{CONTENT_RANGE, ETAG};
use http::{HeaderMap, HeaderValue, StatusCode};
use http_body::Frame;
use http_body_util::StreamBody;
use millpond_objects::checked_body;
use object_store::path::Path;
use object_store::{GetOptions, GetRange, GetResult};
use s3s::dto::*;
use s3s::{Body, S3Error, S3Response, S3Result, s3_error};

use crate::attributes::{headers_of, timestamp};
use crate::bucket::Bucket as StoreBucket;
use crate::failures::{failure, refuse};
use crate::gateway::Gateway;

/// The last moment of a second: HTTP's dates have whole seconds, and stores compare with fractions.
const SECOND_END: Duration = Duration::from_nanos(999_999_999);

/// The conditions of a read, or on the source of a copy.
#[derive(Debug, Default)]
pub(crate) struct ReadConditions {
    pub(crate) if_match: Option<ETagCondition>,
    pub(crate) if_none_match: Option<ETagCondition>,
    pub(crate) if_modified_since: Option<Timestamp>,
    pub(crate) if_unmodified_since: Option<Timestamp>,
}

impl ReadConditions {
    pub(crate) fn is_empty(&self) -> bool {
        let Self { if_match, if_none_match, if_modified_since, if_unmodified_since } = self;
        if_match.is_none()
            && if_none_match.is_none()
            && if_modified_since.is_none()
            && if_unmodified_since.is_none()
    }

    pub(crate) async fn options(&self, bucket: &StoreBucket, path: &Path) -> GetOptions {
        let date = |date: &Option<Timestamp>| {
            let date = date.clone().map(|date| SystemTime::from(time::OffsetDateTime::from(date)));
            date.map(|date| (date + SECOND_END).into())
        };
        let mut options = GetOptions {
            if_modified_since: date(&self.if_modified_since),
            if_unmodified_since: date(&self.if_unmodified_since),
            ..GetOptions::new()
        };
        if let Some(condition) = &self.if_match {
            options.if_match = Some(bucket.condition(path, condition).await);
        }
        if let Some(condition) = &self.if_none_match {
            options.if_none_match = Some(bucket.condition(path, condition).await);
        }
        options
    }
}

pub(crate) fn store_range(range: Range) -> GetRange {
    match range {
        Range::Int { first, last: Some(last) } => GetRange::Bounded(first..last.saturating_add(1)),
        Range::Int { first, last: None } => GetRange::Offset(first),
        Range::Suffix { length } => GetRange::Suffix(length),
    }
}

/// Sends a request to the store, and finds out whether a failure is due to the range.
pub(crate) async fn read(
    bucket: &StoreBucket,
    path: &Path,
    options: GetOptions,
) -> S3Result<GetResult> {
    let (range, version) = (options.range.clone(), options.version.clone());
    let found = bucket.store.get_opts(path, options).await;
    // Stores without versions serve the present one. `null` is S3's name of a version without an ID.
    if let (Ok(found), Some(version)) = (&found, version)
        && found.meta.version.as_deref().unwrap_or("null") != version
    {
        return Err(s3_error!(NoSuchVersion, "the object has no version {version:?}"));
    }
    let size = match (&found, &range) {
        // Of an empty object, or the last 0 bytes.
        (Ok(found), Some(_)) if found.range.is_empty() => found.meta.size,
        // `object_store` has no error for ranges.
        (
            Err(object_store::Error::Generic { .. } | object_store::Error::NotSupported { .. }),
            Some(range),
        ) => {
            let head = GetOptions { head: true, ..GetOptions::new() };
            match bucket.store.get_opts(path, head).await {
                Ok(head) if range.as_range(head.meta.size).is_err() => head.meta.size,
                _ => return found.map_err(failure),
            }
        }
        _ => return found.map_err(failure),
    };
    let mut error = s3_error!(InvalidRange, "the object has {size} bytes");
    if let Ok(value) = HeaderValue::try_from(format!("bytes */{size}")) {
        error.set_headers([(CONTENT_RANGE, value)].into_iter().collect());
    }
    Err(error)
}

/// Adds the ETag to a 304 response: HTTP requires it.
fn with_e_tag(mut error: S3Error, condition: Option<&ETagCondition>) -> S3Error {
    if error.status_code() == Some(StatusCode::NOT_MODIFIED)
        && let Some(Ok(value)) =
            condition.and_then(ETagCondition::as_etag).map(ETag::to_http_header)
    {
        let headers: HeaderMap = [(ETAG, value)].into_iter().collect();
        error.set_headers(headers);
    }
    error
}

/// The parameters of GetObject and HeadObject, which are the same.
macro_rules! read_request {
    ($gateway:expr, $input:expr, $head:expr) => {{
        let input = &$input;
        refuse(&[
            ("partNumber", input.part_number.is_some()),
            ("encryption with a customer's key", input.sse_customer_algorithm.is_some()),
        ])?;
        let (bucket, path) = $gateway.object(&input.bucket, &input.key)?;
        let conditions = ReadConditions {
            if_match: input.if_match.clone(),
            if_none_match: input.if_none_match.clone(),
            if_modified_since: input.if_modified_since.clone(),
            if_unmodified_since: input.if_unmodified_since.clone(),
        };
        let options = GetOptions {
            range: input.range.map(store_range),
            version: input.version_id.clone(),
            head: $head,
            ..conditions.options(bucket, &path).await
        };
        let found = read(bucket, &path, options).await;
        let found = found.map_err(|error| with_e_tag(error, input.if_none_match.as_ref()))?;
        let partial = input.range.is_some() && !found.range.is_empty();
        let status = if partial { StatusCode::PARTIAL_CONTENT } else { StatusCode::OK };
        (bucket, found, partial, status)
    }};
}

/// The output of GetObject or HeadObject.
macro_rules! read_output {
    ($output:ident, $bucket:expr, $found:expr, $partial:expr, $input:expr) => {{
        let (found, input) = (&$found, $input);
        let headers = headers_of(&found.attributes);
        let range = &found.range;
        let bytes = i64::try_from(range.end - range.start).map_err(S3Error::internal_error)?;
        let content_range =
            || format!("bytes {}-{}/{}", range.start, range.end - 1, found.meta.size);
        $output {
            accept_ranges: Some("bytes".into()),
            cache_control: input.response_cache_control.or(headers.cache_control),
            content_disposition: input.response_content_disposition.or(headers.content_disposition),
            content_encoding: input.response_content_encoding.or(headers.content_encoding),
            content_language: input.response_content_language.or(headers.content_language),
            content_type: input.response_content_type.or(headers.content_type),
            expires: input.response_expires,
            content_length: Some(bytes),
            content_range: $partial.then(content_range),
            e_tag: $bucket.e_tag(found.meta.e_tag.as_deref()),
            last_modified: Some(timestamp(found.meta.last_modified)),
            metadata: headers.metadata,
            storage_class: headers.storage_class,
            version_id: found.meta.version.clone(),
            ..$output::default()
        }
    }};
}

impl Gateway {
    pub(crate) async fn get(&self, input: GetObjectInput) -> S3Result<S3Response<GetObjectOutput>> {
        let (bucket, found, partial, status) = read_request!(self, input, false);
        let mut output = read_output!(GetObjectOutput, bucket, found, partial, input);
        let frames = checked_body(found).map_ok(Frame::data);
        output.body = Some(Body::http_body_unsync(StreamBody::new(frames)).into());
        Ok(S3Response::with_status(output, status))
    }

    pub(crate) async fn head(
        &self,
        input: HeadObjectInput,
    ) -> S3Result<S3Response<HeadObjectOutput>> {
        let (bucket, mut found, partial, status) = read_request!(self, input, true);
        // A head request of a store ignores the range.
        let size = found.meta.size;
        found.range = match input.range.map(|range| store_range(range).as_range(size)) {
            None => 0..size,
            Some(Ok(range)) if !range.is_empty() => range,
            Some(_) => return Err(s3_error!(InvalidRange, "the object has {size} bytes")),
        };
        let output = read_output!(HeadObjectOutput, bucket, found, partial, input);
        Ok(S3Response::with_status(output, status))
    }
}
