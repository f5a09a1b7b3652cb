//! Messages to a client.

use std::borrow::Cow;

use chrono::{DateTime, Utc};
use millpond::internals::shared::SharedFile;
use millpond_objects::serving::ObjectPlace;
use object_store::path::Path;
use object_store::{Attribute, Attributes, Error, ObjectMeta};

use crate::protocol::request::{owned, time, write_time};
use crate::protocol::wire::{BadMessage, FieldReader, FieldWriter};
use crate::protocol::{DATA_BYTES_MAX, RANGES_MAX, REPLY_BYTES_MAX};

/// A part of an object that a reply is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartHead {
    pub start: u64,
    pub len: u64,
}

/// A version of an object, and the parts that were read.
#[derive(Clone, Debug, PartialEq)]
pub struct ObjectHead {
    pub size: u64,
    pub last_modified: DateTime<Utc>,
    pub e_tag: Option<String>,
    pub version: Option<String>,
    pub attributes: Attributes,
    /// `None`: the object is not cached.
    pub place: Option<ObjectPlace>,
    pub parts: Vec<PartHead>,
    /// The bytes of the parts follow: in this message, if they are short, else as Data.
    pub has_bytes: bool,
}

impl ObjectHead {
    /// The metadata of the object at `location`.
    #[must_use]
    pub fn meta(&self, location: Path) -> ObjectMeta {
        ObjectMeta {
            location,
            last_modified: self.last_modified,
            size: self.size,
            e_tag: self.e_tag.clone(),
            version: self.version.clone(),
        }
    }

    /// The bytes of all parts.
    #[must_use]
    pub fn part_bytes(&self) -> u64 {
        self.parts.iter().fold(0, |sum, part| sum.saturating_add(part.len))
    }
}

/// The kind of an error of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FailureKind {
    NotFound = 1,
    AlreadyExists = 2,
    Precondition = 3,
    NotModified = 4,
    PermissionDenied = 5,
    Unauthenticated = 6,
    NotSupported = 7,
    Generic = 8,
}

/// An error of the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub kind: FailureKind,
    pub path: String,
    pub text: String,
}

/// The longest text of an error that is sent.
const TEXT_BYTES_MAX: usize = 16 << 10;

impl Failure {
    #[must_use]
    pub fn of(error: &Error) -> Failure {
        let (kind, path, source) = match error {
            Error::NotFound { path, source } => (FailureKind::NotFound, path.as_str(), source),
            Error::AlreadyExists { path, source } => {
                (FailureKind::AlreadyExists, path.as_str(), source)
            }
            Error::Precondition { path, source } => {
                (FailureKind::Precondition, path.as_str(), source)
            }
            Error::NotModified { path, source } => {
                (FailureKind::NotModified, path.as_str(), source)
            }
            Error::PermissionDenied { path, source } => {
                (FailureKind::PermissionDenied, path.as_str(), source)
            }
            Error::Unauthenticated { path, source } => {
                (FailureKind::Unauthenticated, path.as_str(), source)
            }
            Error::NotSupported { source } => (FailureKind::NotSupported, "", source),
            Error::Generic { source, .. } => (FailureKind::Generic, "", source),
            other => {
                let text = cut(&other.to_string());
                return Failure { kind: FailureKind::Generic, path: String::new(), text };
            }
        };
        Failure { kind, path: cut(path), text: cut(&with_causes(&**source)) }
    }

    /// The error for the client's caller.
    #[must_use]
    pub fn into_error(self) -> Error {
        let (path, source) = (self.path, self.text.into());
        match self.kind {
            FailureKind::NotFound => Error::NotFound { path, source },
            FailureKind::AlreadyExists => Error::AlreadyExists { path, source },
            FailureKind::Precondition => Error::Precondition { path, source },
            FailureKind::NotModified => Error::NotModified { path, source },
            FailureKind::PermissionDenied => Error::PermissionDenied { path, source },
            FailureKind::Unauthenticated => Error::Unauthenticated { path, source },
            FailureKind::NotSupported => Error::NotSupported { source },
            FailureKind::Generic => Error::Generic { store: crate::NAME, source },
        }
    }
}

/// The error and its causes, as a type does not cross the socket.
fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = text + ": " + &more;
        }
        cause = error.source();
    }
    text
}

fn cut(text: &str) -> String {
    text[..text.floor_char_boundary_of(TEXT_BYTES_MAX)].to_owned()
}

trait CharBoundary {
    fn floor_char_boundary_of(&self, at: usize) -> usize;
}

impl CharBoundary for str {
    fn floor_char_boundary_of(&self, at: usize) -> usize {
        (0..=at.min(self.len())).rev().find(|at| self.is_char_boundary(*at)).unwrap_or(0)
    }
}

/// A message to a client, after the first.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Reply<'m> {
    /// A version of an object. The bytes of all its parts, if they fit into the message.
    Object(Box<ObjectHead>, Cow<'m, [u8]>),
    /// Further bytes of the parts, in their order.
    Data(Cow<'m, [u8]>),
    /// The client has to read from the store.
    Bypass,
    Failed(Failure),
    Done(u64),
}

fn read_place(fields: &mut FieldReader<'_>) -> Result<ObjectPlace, BadMessage> {
    Ok(ObjectPlace {
        file: SharedFile::from_words([fields.u64()?, fields.u64()?]),
        base: fields.u64()?,
        slot: fields.u32()?,
        number: fields.u64()?,
    })
}

fn read_attribute(fields: &mut FieldReader<'_>) -> Result<(Attribute, String), BadMessage> {
    let key = match fields.u8()? {
        0 => Attribute::ContentDisposition,
        1 => Attribute::ContentEncoding,
        2 => Attribute::ContentLanguage,
        3 => Attribute::ContentType,
        4 => Attribute::CacheControl,
        5 => Attribute::Metadata(owned(fields)?.into()),
        6 => Attribute::StorageClass,
        _ => return Err(BadMessage::BadValue("attribute")),
    };
    Ok((key, owned(fields)?))
}

/// False: an attribute that this version does not know.
fn write_attribute(fields: &mut FieldWriter, key: &Attribute, value: &str) -> bool {
    match key {
        Attribute::ContentDisposition => fields.u8(0),
        Attribute::ContentEncoding => fields.u8(1),
        Attribute::ContentLanguage => fields.u8(2),
        Attribute::ContentType => fields.u8(3),
        Attribute::CacheControl => fields.u8(4),
        Attribute::Metadata(name) => fields.u8(5).text(name),
        Attribute::StorageClass => fields.u8(6),
        _ => return false,
    };
    fields.text(value);
    true
}

pub(super) fn read_head(fields: &mut FieldReader<'_>) -> Result<ObjectHead, BadMessage> {
    let size = fields.u64()?;
    let last_modified = time(fields)?;
    let e_tag = fields.option(owned)?;
    let version = fields.option(owned)?;
    let attributes = fields.list(read_attribute)?;
    let attributes = attributes.into_iter().collect();
    let place = fields.option(read_place)?;
    let parts = fields.list(|fields| Ok(PartHead { start: fields.u64()?, len: fields.u64()? }))?;
    if parts.len() > RANGES_MAX {
        return Err(BadMessage::BadValue("list of parts"));
    }
    let has_bytes = fields.u8()? != 0;
    Ok(ObjectHead { size, last_modified, e_tag, version, attributes, place, parts, has_bytes })
}

/// False: an attribute that messages do not have.
pub(super) fn write_head(fields: &mut FieldWriter, head: &ObjectHead) -> bool {
    let mut is_known = true;
    fields.u64(head.size);
    write_time(fields, head.last_modified);
    let text = |fields: &mut FieldWriter, text: &String| _ = fields.text(text);
    fields.option(head.e_tag.as_ref(), text).option(head.version.as_ref(), text);
    let attributes: Vec<_> = head.attributes.iter().collect();
    fields.list(attributes.into_iter(), |fields, (key, value)| {
        is_known &= write_attribute(fields, key, value);
    });
    fields.option(head.place, |fields, place| {
        let [core, generation] = place.file.to_words();
        fields.u64(core).u64(generation).u64(place.base);
        fields.u32(place.slot).u64(place.number);
    });
    fields.list(head.parts.iter(), |fields, part| {
        fields.u64(part.start).u64(part.len);
    });
    fields.u8(head.has_bytes.into());
    is_known
}

fn read_object<'m>(mut fields: FieldReader<'m>) -> Result<Reply<'m>, BadMessage> {
    let head = read_head(&mut fields)?;
    let bytes = fields.rest();
    let all = head.part_bytes();
    let is_inside =
        |part: &PartHead| part.start.checked_add(part.len).is_some_and(|end| end <= head.size);
    if !head.parts.iter().all(is_inside) {
        return Err(BadMessage::BadValue("part"));
    }
    if !bytes.is_empty() && (!head.has_bytes || bytes.len() as u64 != all) {
        return Err(BadMessage::TooLong);
    }
    if head.has_bytes && bytes.is_empty() && all > 0 && all <= DATA_BYTES_MAX as u64 {
        return Err(BadMessage::TooShort);
    }
    Ok(Reply::Object(Box::new(head), Cow::Borrowed(bytes)))
}

impl<'m> Reply<'m> {
    /// The reply, and the number of its request.
    ///
    /// # Errors
    ///
    /// [`BadMessage`]: it is no such message.
    pub fn decode(message: &'m [u8]) -> Result<(u64, Reply<'m>), BadMessage> {
        if message.len() > REPLY_BYTES_MAX {
            return Err(BadMessage::TooLong);
        }
        let mut fields = FieldReader::new(message);
        let kind = fields.u8()?;
        let number = fields.u64()?;
        let reply = match kind {
            1 => return Ok((number, read_object(fields)?)),
            2 => return Ok((number, Reply::Data(Cow::Borrowed(fields.rest())))),
            3 => Reply::Bypass,
            4 => {
                let kind = match fields.u8()? {
                    1 => FailureKind::NotFound,
                    2 => FailureKind::AlreadyExists,
                    3 => FailureKind::Precondition,
                    4 => FailureKind::NotModified,
                    5 => FailureKind::PermissionDenied,
                    6 => FailureKind::Unauthenticated,
                    7 => FailureKind::NotSupported,
                    8 => FailureKind::Generic,
                    _ => return Err(BadMessage::BadValue("failure")),
                };
                let (path, text) = (owned(&mut fields)?, owned(&mut fields)?);
                Reply::Failed(Failure { kind, path, text })
            }
            5 => Reply::Done(fields.u64()?),
            _ => return Err(BadMessage::BadValue("kind")),
        };
        fields.end()?;
        Ok((number, reply))
    }

    /// `None`: it is too long for a message, or has an attribute that messages do not have.
    #[must_use]
    pub fn encode(&self, number: u64) -> Option<Vec<u8>> {
        let mut fields = FieldWriter::default();
        let mut is_known = true;
        match self {
            Reply::Object(head, bytes) => {
                fields.u8(1).u64(number);
                is_known = write_head(&mut fields, head);
                fields.raw(bytes);
            }
            Reply::Data(bytes) => _ = fields.u8(2).u64(number).raw(bytes),
            Reply::Bypass => _ = fields.u8(3).u64(number),
            Reply::Failed(failure) => {
                fields.u8(4).u64(number).u8(failure.kind as u8);
                fields.text(&failure.path).text(&failure.text);
            }
            Reply::Done(value) => _ = fields.u8(5).u64(number).u64(*value),
        }
        fields.end(REPLY_BYTES_MAX).filter(|_| is_known)
    }
}
