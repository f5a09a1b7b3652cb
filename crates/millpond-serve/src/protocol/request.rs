//! Messages to a server.

use std::ops::Range;

use chrono::{DateTime, Utc};
use object_store::{GetOptions, GetRange};

use crate::protocol::wire::{BadMessage, FieldReader, FieldWriter};
use crate::protocol::{RANGES_MAX, REQUEST_BYTES_MAX};

/// The conditions of a read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Conditions {
    pub if_match: Option<String>,
    pub if_none_match: Option<String>,
    pub if_modified_since: Option<DateTime<Utc>>,
    pub if_unmodified_since: Option<DateTime<Utc>>,
}

impl Conditions {
    #[must_use]
    pub fn of(options: &GetOptions) -> Conditions {
        Conditions {
            if_match: options.if_match.clone(),
            if_none_match: options.if_none_match.clone(),
            if_modified_since: options.if_modified_since,
            if_unmodified_since: options.if_unmodified_since,
        }
    }

    #[must_use]
    pub fn into_options(self) -> GetOptions {
        let mut options = GetOptions::new();
        options.if_match = self.if_match;
        options.if_none_match = self.if_none_match;
        options.if_modified_since = self.if_modified_since;
        options.if_unmodified_since = self.if_unmodified_since;
        options
    }
}

/// A read of an object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReadMessage {
    pub location: String,
    /// Bounded ranges, or one range that depends on the object's length. Empty: only the metadata.
    pub ranges: Vec<Option<GetRange>>,
    pub conditions: Conditions,
    /// The slot and number of a version that the caller has validated before.
    pub held: Option<(u32, u64)>,
    /// The bytes come in messages, in any case.
    pub wants_bytes: bool,
}

impl ReadMessage {
    /// The most bytes of a reply, by the ranges.
    #[must_use]
    pub fn bytes_max(&self) -> u64 {
        let len = |range: &Option<GetRange>| match range {
            Some(GetRange::Bounded(range)) => range.end.saturating_sub(range.start),
            _ => u64::MAX,
        };
        self.ranges.iter().map(len).fold(0, u64::saturating_add)
    }
}

/// A message to a server, after the first.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Request {
    Read(ReadMessage),
    /// A write of an object begins. Its number is that of this request.
    BeginWrite {
        location: String,
    },
    /// The write that request number `begun` began has ended.
    EndWrite {
        begun: u64,
    },
    /// The object may have changed.
    Forget {
        location: String,
    },
    /// Any object may have changed.
    ForgetAll,
    Ping,
    /// Another memory limit.
    SetMemory {
        bytes: u64,
    },
}

fn read_time(fields: &mut FieldReader<'_>) -> Result<DateTime<Utc>, BadMessage> {
    let (seconds, nanos) = (fields.u64()?.cast_signed(), fields.u32()?);
    DateTime::from_timestamp(seconds, nanos).ok_or(BadMessage::BadValue("time"))
}

pub(super) fn time(fields: &mut FieldReader<'_>) -> Result<DateTime<Utc>, BadMessage> {
    read_time(fields)
}

pub(super) fn write_time(fields: &mut FieldWriter, time: DateTime<Utc>) {
    fields.u64(time.timestamp().cast_unsigned()).u32(time.timestamp_subsec_nanos());
}

pub(super) fn owned(fields: &mut FieldReader<'_>) -> Result<String, BadMessage> {
    fields.text().map(str::to_owned)
}

fn read_range(fields: &mut FieldReader<'_>) -> Result<Option<GetRange>, BadMessage> {
    Ok(Some(match fields.u8()? {
        0 => return Ok(None),
        1 => GetRange::Bounded(Range { start: fields.u64()?, end: fields.u64()? }),
        2 => GetRange::Offset(fields.u64()?),
        3 => GetRange::Suffix(fields.u64()?),
        _ => return Err(BadMessage::BadValue("range")),
    }))
}

fn write_range(fields: &mut FieldWriter, range: &Option<GetRange>) {
    match range {
        None => fields.u8(0),
        Some(GetRange::Bounded(range)) => fields.u8(1).u64(range.start).u64(range.end),
        Some(GetRange::Offset(from)) => fields.u8(2).u64(*from),
        Some(GetRange::Suffix(len)) => fields.u8(3).u64(*len),
    };
}

impl Request {
    /// The request, and its number.
    ///
    /// # Errors
    ///
    /// [`BadMessage`]: it is no such message.
    pub fn decode(message: &[u8]) -> Result<(u64, Request), BadMessage> {
        if message.len() > REQUEST_BYTES_MAX {
            return Err(BadMessage::TooLong);
        }
        let mut fields = FieldReader::new(message);
        let kind = fields.u8()?;
        let number = fields.u64()?;
        let request = match kind {
            1 => {
                let location = owned(&mut fields)?;
                let ranges = fields.list(read_range)?;
                let is_open =
                    |range: &Option<GetRange>| !matches!(range, Some(GetRange::Bounded(_)));
                if ranges.len() > RANGES_MAX || (ranges.len() > 1 && ranges.iter().any(is_open)) {
                    return Err(BadMessage::BadValue("list of ranges"));
                }
                let conditions = Conditions {
                    if_match: fields.option(owned)?,
                    if_none_match: fields.option(owned)?,
                    if_modified_since: fields.option(read_time)?,
                    if_unmodified_since: fields.option(read_time)?,
                };
                let held = fields.option(|fields| Ok((fields.u32()?, fields.u64()?)))?;
                let wants_bytes = fields.u8()? != 0;
                Request::Read(ReadMessage { location, ranges, conditions, held, wants_bytes })
            }
            2 => Request::BeginWrite { location: owned(&mut fields)? },
            3 => Request::EndWrite { begun: fields.u64()? },
            4 => Request::Forget { location: owned(&mut fields)? },
            5 => Request::Ping,
            6 => Request::SetMemory { bytes: fields.u64()? },
            7 => Request::ForgetAll,
            _ => return Err(BadMessage::BadValue("kind")),
        };
        fields.end()?;
        Ok((number, request))
    }

    /// `None`: it is too long for a message.
    #[must_use]
    pub fn encode(&self, number: u64) -> Option<Vec<u8>> {
        let mut fields = FieldWriter::default();
        let begin = |fields: &mut FieldWriter, kind| _ = fields.u8(kind).u64(number);
        match self {
            Request::Read(read) => {
                begin(&mut fields, 1);
                fields.text(&read.location).list(read.ranges.iter(), write_range);
                let text = |fields: &mut FieldWriter, text: &String| _ = fields.text(text);
                fields.option(read.conditions.if_match.as_ref(), text);
                fields.option(read.conditions.if_none_match.as_ref(), text);
                fields.option(read.conditions.if_modified_since, write_time);
                fields.option(read.conditions.if_unmodified_since, write_time);
                fields.option(read.held, |fields, (slot, number)| {
                    fields.u32(slot).u64(number);
                });
                fields.u8(read.wants_bytes.into());
            }
            Request::BeginWrite { location } => {
                begin(&mut fields, 2);
                fields.text(location);
            }
            Request::EndWrite { begun } => {
                begin(&mut fields, 3);
                fields.u64(*begun);
            }
            Request::Forget { location } => {
                begin(&mut fields, 4);
                fields.text(location);
            }
            Request::ForgetAll => begin(&mut fields, 7),
            Request::Ping => begin(&mut fields, 5),
            Request::SetMemory { bytes } => {
                begin(&mut fields, 6);
                fields.u64(*bytes);
            }
        }
        fields.end(REQUEST_BYTES_MAX)
    }
}
