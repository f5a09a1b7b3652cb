//! A connection's service, around that of `s3s`: refuses requests whose bodies `s3s` would read before it checks the
//! signature, and headers that a presigned URL does not sign; limits pauses, and marks the connection as busy. A request
//! without a valid signature ends its connection, unless one with a valid signature came before.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::header::{AUTHORIZATION, CONNECTION, CONTENT_RANGE, CONTENT_TYPE, EXPECT};
use http::{HeaderValue, Method, Request, Response, StatusCode};
use http_body::{Body as _, Frame, SizeHint};
use hyper::body::Incoming;
use s3s::access::{S3Access, S3AccessContext};
use s3s::service::S3Service;
use s3s::{Body, S3Error, S3ErrorCode, S3Result, s3_error};

use crate::chunks::{BoundedChunks, decoded_bytes};
use crate::connections::{ConnectionState, RequestGuard};
use crate::counts::{RequestCounts, kind_of};
use crate::stalls::PacedBody;

const CONTENT_SHA256: &str = "x-amz-content-sha256";

/// The service of one connection.
#[derive(Debug, Clone)]
pub(crate) struct Filter {
    pub(crate) service: S3Service,
    pub(crate) counts: RequestCounts,
    pub(crate) connection: Arc<ConnectionState>,
    pub(crate) body_pause_max: Duration,
}

impl hyper::service::Service<Request<Incoming>> for Filter {
    type Response = Response<BusyBody>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        let Some(guard) = self.connection.start_request() else {
            // The task of the connection drops this future.
            return Box::pin(std::future::pending());
        };
        let (service, pause) = (self.service.clone(), self.body_pause_max);
        // hyper replies to this when an expected body is asked for bytes.
        let expects = request.headers().contains_key(EXPECT);
        let (counts, kind) = (self.counts.clone(), kind_of(request.method(), request.uri().path()));
        let is_empty = request.body().is_end_stream();
        let connection = Arc::clone(&self.connection);
        Box::pin(async move {
            let asked = Arc::new(AtomicBool::new(false));
            let mut response = match refusal(&request) {
                Some(error) => error_response(error),
                None => {
                    let framing = request.headers().get(CONTENT_SHA256).cloned();
                    let decoded = decoded_bytes(request.headers());
                    let body = |body| {
                        let body = PacedBody::new(body, pause, Arc::clone(&asked));
                        let framing = framing.as_ref().map(HeaderValue::as_bytes);
                        BoundedChunks::new(body, framing, decoded)
                    };
                    let mut request =
                        request.map(|incoming| Body::http_body_unsync(body(incoming)));
                    request.extensions_mut().insert(SignatureNote(Arc::clone(&connection)));
                    let internal = |error| S3Error::with_source(S3ErrorCode::InternalError, error);
                    match service.call(request).await {
                        Ok(response) => response,
                        Err(error) => error_response(internal(error.into())),
                    }
                }
            };
            // `s3s` answers a head request with 200 in any case.
            if response.headers().contains_key(CONTENT_RANGE) && response.status() == StatusCode::OK
            {
                *response.status_mut() = StatusCode::PARTIAL_CONTENT;
            }
            // After a reply without `100 Continue`, botocore 1.43 misreads the next reply on the connection, and hangs.
            let misleads = expects && (is_empty || !asked.load(Relaxed));
            if misleads || !connection.is_signed() {
                response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
            }
            counts.add(kind, response.status());
            Ok(response.map(|body| BusyBody { body, _guard: guard }))
        })
    }
}

/// Where a valid signature of a request is noted.
#[derive(Clone)]
struct SignatureNote(Arc<ConnectionState>);

/// Accepts requests with a valid signature, and no others.
pub(crate) struct SignedOnly;

#[async_trait::async_trait]
impl S3Access for SignedOnly {
    /// `s3s` calls it after it has checked the signature, and before it reads the body.
    async fn check(&self, context: &mut S3AccessContext<'_>) -> S3Result<()> {
        if context.credentials().is_none() {
            return Err(s3_error!(AccessDenied, "a signature is required"));
        }
        if let Some(SignatureNote(connection)) = context.extensions_mut().get() {
            connection.note_signature();
        }
        Ok(())
    }
}

fn error_response(error: S3Error) -> Response<Body> {
    error.to_http_response().unwrap_or_else(|_| {
        let mut response = Response::new(Body::empty());
        *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
        response
    })
}

/// `s3s` reads the fields and the file of a form into memory before it checks the signature. Version 2 of the signature
/// covers neither the body nor most headers. A header such as `x-amz-copy-source` makes another request of a presigned
/// one, so all of these have to be signed, as S3 demands.
fn refusal<B>(request: &Request<B>) -> Option<S3Error> {
    let header = |name| request.headers().get(name).map(HeaderValue::as_bytes);
    let starts_with = |value: &[u8], start: &[u8]| {
        value.get(..start.len()).is_some_and(|found| found.eq_ignore_ascii_case(start))
    };
    let form = header(CONTENT_TYPE)
        .is_some_and(|value| starts_with(value.trim_ascii_start(), b"multipart/"));
    if request.method() == Method::POST && form {
        return Some(s3_error!(
            NotImplemented,
            "PostObject (uploads by HTML forms) is not implemented"
        ));
    }
    let query = request.uri().query().unwrap_or("");
    if header(AUTHORIZATION).is_some_and(|value| starts_with(value, b"AWS "))
        || parameter(query, "Signature").is_some()
    {
        return Some(s3_error!(
            InvalidRequest,
            "signatures of version 2 are not accepted: use AWS4-HMAC-SHA256"
        ));
    }
    parameter(query, "X-Amz-Signature")?;
    let signed = parameter(query, "X-Amz-SignedHeaders").unwrap_or_default();
    let unsigned = request.headers().keys().find(|name| {
        let name = name.as_str();
        name.starts_with("x-amz-")
            // The hash of the body, which `s3s` checks.
            && name != CONTENT_SHA256
            && !signed.split(';').any(|signed| signed == name)
    });
    unsigned
        .map(|name| s3_error!(AccessDenied, "the presigned URL does not sign the header {name}"))
}

/// The value of a parameter of the query. `s3s` decodes names as well.
fn parameter(query: &str, name: &str) -> Option<String> {
    let decoded = |text: &str| {
        let spaced = text.replace('+', " ");
        percent_encoding::percent_decode_str(&spaced).decode_utf8_lossy().into_owned()
    };
    let pairs = query.split('&').map(|pair| pair.split_once('=').unwrap_or((pair, "")));
    pairs
        .map(|(found, value)| (decoded(found), value))
        .find_map(|(found, value)| (found == name).then(|| decoded(value)))
}

/// A response's body; its connection is busy until it is sent.
#[derive(Debug)]
pub(crate) struct BusyBody {
    body: Body,
    _guard: RequestGuard,
}

impl http_body::Body for BusyBody {
    type Data = Bytes;
    type Error = <Body as http_body::Body>::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
