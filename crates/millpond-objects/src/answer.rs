//! Answers, as the interface wants them.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::stream::{self, BoxStream, StreamExt};
use object_store::{Attributes, GetResult, GetResultPayload, ObjectMeta, Result};

use crate::directory::Known;

/// An answer of collected bytes.
pub(crate) fn collected(known: &Known, range: Range<u64>, bytes: Bytes) -> GetResult {
    answer_of(known, range, stream::once(std::future::ready(Ok(bytes))).boxed())
}

pub(crate) fn answer_of(
    known: &Known,
    range: Range<u64>,
    payload: BoxStream<'static, Result<Bytes>>,
) -> GetResult {
    result(GetResultPayload::Stream(payload), known.meta.clone(), range, known.attributes.clone())
}

pub(crate) fn result(
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

/// What an answer says beside its bytes.
pub(crate) enum Head {
    Known(Arc<Known>),
    Uncached(ObjectMeta, Attributes),
}

impl Head {
    pub(crate) fn meta(&self) -> &ObjectMeta {
        match self {
            Head::Known(known) => &known.meta,
            Head::Uncached(meta, _) => meta,
        }
    }

    pub(crate) fn answer(self, range: Range<u64>, bytes: Bytes) -> GetResult {
        match self {
            Head::Known(known) => collected(&known, range, bytes),
            Head::Uncached(meta, attributes) => {
                let stream = stream::once(std::future::ready(Ok(bytes))).boxed();
                result(GetResultPayload::Stream(stream), meta, range, attributes)
            }
        }
    }
}
