//! The first message of each side.

use millpond::internals::shared::ClientMemory;

use crate::protocol::reply::{ObjectHead, read_head, write_head};
use crate::protocol::wire::{BadMessage, FieldReader, FieldWriter};

const MAGIC: u64 = u64::from_le_bytes(*b"MPSERVE\0");
/// The length of a list's number of items.
const LIST_BYTES: usize = size_of::<u16>();
/// The version of all messages, and of the client's memory, which the server reads. Client and server have the same one.
pub const PROTOCOL_VERSION: u32 = 4;
const _: () = assert!(
    ClientMemory::LAYOUT_VERSION == 2 && ClientMemory::BYTES == 8_392_768,
    "the client's memory has another layout: raise PROTOCOL_VERSION, and change the numbers here"
);

/// The first message of a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    pub version: u32,
    /// The store that the client reads, by its `Display`. `None`: the client reads nothing.
    pub store_name: Option<String>,
}

/// The answer to a client that the server accepts.
#[derive(Clone, Debug, PartialEq)]
pub struct Welcome {
    /// The store that the client has named.
    pub store_name: String,
    /// The server's clock, in milliseconds.
    pub now_ms: u64,
    /// How old a validated version may be. `None`: it may be served as long as it is current.
    pub max_age_ms: Option<u64>,
    /// The length of the cache's pages.
    pub page_bytes: u64,
    /// Cached objects of the store, by name, so that the client need not ask for them. The message has as many as it has room
    /// for.
    pub known: Vec<(String, ObjectHead)>,
}

/// The first message of a server.
#[derive(Clone, Debug, PartialEq)]
pub enum Greeting {
    Welcome(Welcome),
    /// Why the server has no place for the client.
    Refused(String),
}

impl Hello {
    /// # Errors
    ///
    /// [`BadMessage`]: it is no such message. The version may be any.
    pub fn decode(message: &[u8]) -> Result<Hello, BadMessage> {
        let mut fields = FieldReader::new(message);
        if fields.u64()? != MAGIC {
            return Err(BadMessage::BadValue("magic number"));
        }
        let version = fields.u32()?;
        // Another version may have other fields.
        if version != PROTOCOL_VERSION {
            return Ok(Hello { version, store_name: None });
        }
        let store_name = fields.option(|fields| fields.text().map(str::to_owned))?;
        fields.end()?;
        Ok(Hello { version, store_name })
    }

    /// `None`: the name is too long.
    #[must_use]
    pub fn encode(&self) -> Option<Vec<u8>> {
        let mut fields = FieldWriter::default();
        fields.u64(MAGIC).u32(self.version);
        fields.option(self.store_name.as_ref(), |fields, name| _ = fields.text(name));
        fields.end(super::HELLO_BYTES_MAX)
    }
}

impl Greeting {
    /// # Errors
    ///
    /// [`BadMessage`]: it is no such message.
    pub fn decode(message: &[u8]) -> Result<Greeting, BadMessage> {
        let mut fields = FieldReader::new(message);
        if fields.u64()? != MAGIC {
            return Err(BadMessage::BadValue("magic number"));
        }
        let greeting = match fields.u8()? {
            0 => Greeting::Refused(fields.text()?.to_owned()),
            1 => Greeting::Welcome(Welcome {
                store_name: fields.text()?.to_owned(),
                now_ms: fields.u64()?,
                max_age_ms: fields.option(FieldReader::u64)?,
                page_bytes: fields.u64()?,
                known: fields.list(|fields| Ok((fields.text()?.to_owned(), read_head(fields)?)))?,
            }),
            _ => return Err(BadMessage::BadValue("greeting")),
        };
        fields.end()?;
        Ok(greeting)
    }

    /// `None`: a text is too long.
    #[must_use]
    pub fn encode(&self) -> Option<Vec<u8>> {
        let mut fields = FieldWriter::default();
        fields.u64(MAGIC);
        match self {
            Greeting::Refused(why) => {
                fields.u8(0).text(why);
            }
            Greeting::Welcome(welcome) => {
                fields.u8(1).text(&welcome.store_name).u64(welcome.now_ms);
                fields.option(welcome.max_age_ms, |fields, age| _ = fields.u64(age));
                fields.u64(welcome.page_bytes);
                let room = super::REPLY_BYTES_MAX.saturating_sub(fields.written() + LIST_BYTES);
                let (mut number, mut heads) = (0, FieldWriter::default());
                for (name, head) in &welcome.known {
                    let mut one = FieldWriter::default();
                    let is_known = write_head(one.text(name), head);
                    let Some(one) = one.end(room - heads.written()).filter(|_| is_known) else {
                        continue;
                    };
                    heads.raw(&one);
                    number += 1;
                }
                fields.u16(number).raw(&heads.end(room).unwrap_or_default());
            }
        }
        fields.end(super::REPLY_BYTES_MAX)
    }
}
