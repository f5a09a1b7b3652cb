//! Builds the [`GetResult`] that a read returns.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::stream::{self, BoxStream, StreamExt};
use object_store::{Attributes, GetResult, GetResultPayload, ObjectMeta, Result};

use crate::directory::ObjectEntry;

/// A response whose bytes are already in memory.
pub(crate) fn collected_response(
    entry: &ObjectEntry,
    range: Range<u64>,
    bytes: Bytes,
) -> GetResult {
    stream_response(entry, range, stream::once(std::future::ready(Ok(bytes))).boxed())
}

pub(crate) fn stream_response(
    entry: &ObjectEntry,
    range: Range<u64>,
    payload: BoxStream<'static, Result<Bytes>>,
) -> GetResult {
    get_result(
        GetResultPayload::Stream(payload),
        entry.meta.clone(),
        range,
        entry.attributes.clone(),
    )
}

pub(crate) fn get_result(
    payload: GetResultPayload,
    meta: ObjectMeta,
    range: Range<u64>,
    attributes: Attributes,
) -> GetResult {
    GetResult {
        payload,
        meta,
        range,
        attributes,
        #[cfg(feature = "object_store_0_14")]
        extensions: Default::default(),
    }
}

/// Takes the body of a response, with the metadata that belong to it.
pub(crate) fn take_body(response: &mut GetResult) -> GetResult {
    let nothing = GetResultPayload::Stream(stream::empty().boxed());
    let payload = std::mem::replace(&mut response.payload, nothing);
    let (meta, range) = (response.meta.clone(), response.range.clone());
    get_result(payload, meta, range, response.attributes.clone())
}

/// The metadata of a response.
pub(crate) enum ResponseHead {
    Cached(Arc<ObjectEntry>),
    Uncached(ObjectMeta, Attributes),
}

impl ResponseHead {
    pub(crate) fn meta(&self) -> &ObjectMeta {
        match self {
            ResponseHead::Cached(entry) => &entry.meta,
            ResponseHead::Uncached(meta, _) => meta,
        }
    }

    pub(crate) fn into_response(self, range: Range<u64>, bytes: Bytes) -> GetResult {
        match self {
            ResponseHead::Cached(entry) => collected_response(&entry, range, bytes),
            ResponseHead::Uncached(meta, attributes) => {
                let stream = stream::once(std::future::ready(Ok(bytes))).boxed();
                get_result(GetResultPayload::Stream(stream), meta, range, attributes)
            }
        }
    }
}
