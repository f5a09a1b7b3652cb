//! Metadata of objects: S3's headers and `object_store`'s attributes.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use object_store::{Attribute, Attributes, TagSet};
use s3s::dto::{Metadata, StorageClass, Timestamp};
use s3s::{S3Result, s3_error};

use crate::bucket::Bucket;

/// What an object without a content type gets from S3.
const DEFAULT_TYPE: &str = "binary/octet-stream";

/// The headers of a write that become attributes.
#[derive(Debug, Default)]
pub(crate) struct MetadataHeaders {
    pub(crate) cache_control: Option<String>,
    pub(crate) content_disposition: Option<String>,
    pub(crate) content_encoding: Option<String>,
    pub(crate) content_language: Option<String>,
    pub(crate) content_type: Option<String>,
    pub(crate) metadata: Option<Metadata>,
    pub(crate) storage_class: Option<StorageClass>,
}

/// Takes the fields of the same names from the input of an operation.
macro_rules! metadata_headers {
    ($input:expr) => {
        $crate::attributes::MetadataHeaders {
            cache_control: $input.cache_control.take(),
            content_disposition: $input.content_disposition.take(),
            content_encoding: $input.content_encoding.take(),
            content_language: $input.content_language.take(),
            content_type: $input.content_type.take(),
            metadata: $input.metadata.take(),
            storage_class: $input.storage_class.take(),
        }
    };
}
pub(crate) use metadata_headers;

impl MetadataHeaders {
    pub(crate) fn into_attributes(self, bucket: &Bucket) -> Attributes {
        let mut attributes = Attributes::new();
        if bucket.drops_metadata {
            return attributes;
        }
        // The encoding of the transfer, which ends here.
        let encoding = self.content_encoding.map(|value| {
            let kept = value.split(',').map(str::trim).filter(|name| *name != "aws-chunked");
            kept.collect::<Vec<_>>().join(",")
        });
        let class = self.storage_class.map(|class| class.as_str().to_owned());
        for (attribute, value) in [
            (Attribute::CacheControl, self.cache_control),
            (Attribute::ContentDisposition, self.content_disposition),
            (Attribute::ContentEncoding, encoding.filter(|value| !value.is_empty())),
            (Attribute::ContentLanguage, self.content_language),
            (Attribute::ContentType, self.content_type),
            (Attribute::StorageClass, class.filter(|class| class != StorageClass::STANDARD)),
        ] {
            if let Some(value) = value {
                attributes.insert(attribute, value.into());
            }
        }
        for (name, value) in self.metadata.into_iter().flatten() {
            attributes.insert(Attribute::Metadata(name.into()), value.into());
        }
        attributes
    }
}

/// Attributes as headers of a response.
pub(crate) fn headers_of(attributes: &Attributes) -> MetadataHeaders {
    let value = |attribute| attributes.get(&attribute).map(|value| value.to_string());
    let mut metadata = Metadata::new();
    for (attribute, value) in attributes {
        if let Attribute::Metadata(name) = attribute {
            metadata.insert(name.to_string(), value.to_string());
        }
    }
    MetadataHeaders {
        cache_control: value(Attribute::CacheControl),
        content_disposition: value(Attribute::ContentDisposition),
        content_encoding: value(Attribute::ContentEncoding),
        content_language: value(Attribute::ContentLanguage),
        content_type: value(Attribute::ContentType).or_else(|| Some(DEFAULT_TYPE.into())),
        metadata: (!metadata.is_empty()).then_some(metadata),
        storage_class: value(Attribute::StorageClass).map(StorageClass::from),
    }
}

/// The tags of a write: `name=value&...`, percent-encoded.
pub(crate) fn tags_of(header: Option<&str>) -> S3Result<TagSet> {
    let mut tags = TagSet::default();
    for pair in header.unwrap_or("").split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let decoded = |text: &str| {
            let spaced = text.replace('+', " ");
            let decoded = percent_encoding::percent_decode_str(&spaced).decode_utf8();
            decoded.map(|text| text.into_owned()).map_err(|error| {
                s3_error!(InvalidTag, "x-amz-tagging: {pair:?} is not UTF-8: {error}")
            })
        };
        tags.push(&decoded(name)?, &decoded(value)?);
    }
    Ok(tags)
}

/// From the start of year 0, in seconds before 1970, to the end of year 9999: formats of S3 have four digits. Local files may
/// have any time.
const TIMES: (u64, u64) = (62_167_219_200, 253_402_300_799);

/// The time, or the nearest one that has a format.
pub(crate) fn timestamp(time: impl Into<SystemTime>) -> Timestamp {
    let least = UNIX_EPOCH - Duration::from_secs(TIMES.0);
    let most = UNIX_EPOCH + Duration::from_secs(TIMES.1);
    Timestamp::from(time.into().clamp(least, most))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use object_store::memory::InMemory;
    use s3s::dto::TimestampFormat;

    use super::*;

    #[test]
    fn headers_become_attributes_and_headers_again() {
        let bucket = Bucket::new(Arc::new(InMemory::new()));
        let headers = MetadataHeaders {
            content_encoding: Some("gzip, aws-chunked".into()),
            content_type: Some("text/plain".into()),
            metadata: Some([("a".into(), "b".into())].into()),
            storage_class: Some(StorageClass::from_static("STANDARD")),
            ..MetadataHeaders::default()
        };
        let attributes = headers.into_attributes(&bucket);
        assert_eq!(attributes.len(), 3, "{attributes:?}");
        let back = headers_of(&attributes);
        assert_eq!(back.content_encoding.as_deref(), Some("gzip"));
        assert_eq!(back.content_type.as_deref(), Some("text/plain"));
        assert_eq!(back.metadata.unwrap()["a"], "b");
        assert_eq!(headers_of(&Attributes::new()).content_type.as_deref(), Some(DEFAULT_TYPE));
        let mut drops = bucket;
        drops.drops_metadata = true;
        let headers = MetadataHeaders { content_type: Some("a/b".into()), ..Default::default() };
        assert!(headers.into_attributes(&drops).is_empty());
    }

    #[test]
    fn times_have_a_format() {
        let text = |seconds: i64| {
            let time = Duration::from_secs(seconds.unsigned_abs());
            let time = if seconds < 0 { UNIX_EPOCH - time } else { UNIX_EPOCH + time };
            let mut text = Vec::new();
            timestamp(time).format(TimestampFormat::DateTime, &mut text).unwrap();
            timestamp(time).format(TimestampFormat::HttpDate, &mut Vec::new()).unwrap();
            String::from_utf8(text).unwrap()
        };
        assert_eq!(text(0), "1970-01-01T00:00:00.000Z");
        for (seconds, year) in [(300_000_000_000, "9999-12-31"), (-300_000_000_000, "0000-01-01")] {
            assert!(text(seconds).starts_with(year), "{}", text(seconds));
        }
    }

    #[test]
    fn tags_are_decoded_and_encoded() {
        let tags = tags_of(Some("a=b+c&d%26=%C3%A9&e")).unwrap();
        assert_eq!(tags.encoded(), "a=b+c&d%26=%C3%A9&e=");
        assert!(tags_of(Some("a=%FF")).is_err());
    }
}
