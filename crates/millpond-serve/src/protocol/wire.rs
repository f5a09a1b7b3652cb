//! Fields of messages: numbers of fixed length in little-endian order, and bytes after their length.
//!
//! A reader checks each length against the bytes that are left, before it takes memory.

use std::fmt;

/// Why a message can't be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum BadMessage {
    /// A field is longer than the rest of the message.
    TooShort,
    /// Bytes are left behind the last field.
    TooLong,
    /// A field has a value that its type does not have.
    BadValue(&'static str),
}

impl fmt::Display for BadMessage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BadMessage::TooShort => f.write_str("the message ends within a field"),
            BadMessage::TooLong => f.write_str("the message has bytes behind its last field"),
            BadMessage::BadValue(what) => write!(f, "the message has a bad {what}"),
        }
    }
}

impl std::error::Error for BadMessage {}

/// The rest of a message.
pub(crate) struct FieldReader<'m> {
    rest: &'m [u8],
}

impl<'m> FieldReader<'m> {
    pub(crate) fn new(message: &'m [u8]) -> Self {
        Self { rest: message }
    }

    pub(crate) fn bytes(&mut self, len: usize) -> Result<&'m [u8], BadMessage> {
        let (bytes, rest) = self.rest.split_at_checked(len).ok_or(BadMessage::TooShort)?;
        self.rest = rest;
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], BadMessage> {
        Ok(self.bytes(N)?.try_into().expect("of that length"))
    }

    pub(crate) fn u8(&mut self) -> Result<u8, BadMessage> {
        Ok(self.array::<1>()?[0])
    }

    pub(crate) fn u16(&mut self) -> Result<u16, BadMessage> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    pub(crate) fn u32(&mut self) -> Result<u32, BadMessage> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(crate) fn u64(&mut self) -> Result<u64, BadMessage> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    pub(crate) fn text(&mut self) -> Result<&'m str, BadMessage> {
        let len = self.u16()?;
        let bytes = self.bytes(len.into())?;
        std::str::from_utf8(bytes).map_err(|_| BadMessage::BadValue("text"))
    }

    /// A field that may be absent.
    pub(crate) fn option<T>(
        &mut self,
        field: impl FnOnce(&mut Self) -> Result<T, BadMessage>,
    ) -> Result<Option<T>, BadMessage> {
        match self.u8()? {
            0 => Ok(None),
            1 => Ok(Some(field(self)?)),
            _ => Err(BadMessage::BadValue("option")),
        }
    }

    /// A list of fields that have at least one byte each.
    pub(crate) fn list<T>(
        &mut self,
        mut field: impl FnMut(&mut Self) -> Result<T, BadMessage>,
    ) -> Result<Vec<T>, BadMessage> {
        let len = usize::from(self.u16()?);
        if len > self.rest.len() {
            return Err(BadMessage::TooShort);
        }
        (0..len).map(|_| field(self)).collect()
    }

    /// All that is left.
    pub(crate) fn rest(self) -> &'m [u8] {
        self.rest
    }

    pub(crate) fn end(self) -> Result<(), BadMessage> {
        if self.rest.is_empty() { Ok(()) } else { Err(BadMessage::TooLong) }
    }
}

/// A message that is being written. Fields that are too long make it invalid, and [`FieldWriter::end`] returns nothing.
#[derive(Default)]
pub(crate) struct FieldWriter {
    bytes: Vec<u8>,
    is_too_long: bool,
}

impl FieldWriter {
    pub(crate) fn u8(&mut self, value: u8) -> &mut Self {
        self.raw(&[value])
    }

    pub(crate) fn u16(&mut self, value: u16) -> &mut Self {
        self.raw(&value.to_le_bytes())
    }

    pub(crate) fn u32(&mut self, value: u32) -> &mut Self {
        self.raw(&value.to_le_bytes())
    }

    pub(crate) fn u64(&mut self, value: u64) -> &mut Self {
        self.raw(&value.to_le_bytes())
    }

    pub(crate) fn raw(&mut self, bytes: &[u8]) -> &mut Self {
        self.bytes.extend_from_slice(bytes);
        self
    }

    fn len(&mut self, len: usize) -> &mut Self {
        let checked = u16::try_from(len);
        self.is_too_long |= checked.is_err();
        self.u16(checked.unwrap_or(u16::MAX))
    }

    pub(crate) fn text(&mut self, text: &str) -> &mut Self {
        self.len(text.len()).raw(text.as_bytes())
    }

    pub(crate) fn option<T>(
        &mut self,
        value: Option<T>,
        field: impl FnOnce(&mut Self, T),
    ) -> &mut Self {
        self.u8(value.is_some().into());
        if let Some(value) = value {
            field(self, value);
        }
        self
    }

    pub(crate) fn list<T>(
        &mut self,
        items: impl ExactSizeIterator<Item = T>,
        mut field: impl FnMut(&mut Self, T),
    ) -> &mut Self {
        self.len(items.len());
        items.for_each(|item| field(self, item));
        self
    }

    /// The bytes so far.
    pub(crate) fn written(&self) -> usize {
        self.bytes.len()
    }

    /// The message, if it has at most `bytes_max` bytes.
    pub(crate) fn end(self, bytes_max: usize) -> Option<Vec<u8>> {
        (!self.is_too_long && self.bytes.len() <= bytes_max).then_some(self.bytes)
    }
}
