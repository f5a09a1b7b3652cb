//! The messages between a client and its server.
//!
//! ```text
//!   client                                          server
//!     Hello + memory of the client        ->
//!                                         <-          Welcome + cache + validity table, or Refused
//!     Read, BeginWrite, EndWrite, Forget,
//!     ForgetAll, Ping, SetMemory, each
//!     with a number                       ->
//!                                         <-          Object and Data, Bypass, Failed, Done, with that number
//! ```
//!
//! The socket keeps the boundaries of messages (SOCK_SEQPACKET), so a message is whole or absent. Many requests are in flight, and replies
//! come in any order; the Data of a request come in their order, after its Object.

mod greeting;
mod reply;
mod request;
mod wire;

pub use greeting::{Greeting, Hello, PROTOCOL_VERSION, Welcome};
pub use reply::{Failure, FailureKind, ObjectHead, PartHead, Reply};
pub use request::{Conditions, ReadMessage, Request};
pub use wire::BadMessage;

/// The longest first message.
pub const HELLO_BYTES_MAX: usize = 16 << 10;
/// The longest message to a server.
pub const REQUEST_BYTES_MAX: usize = 48 << 10;
/// The longest message to a client.
pub const REPLY_BYTES_MAX: usize = 128 << 10;
/// The most bytes of an object in one message.
pub const DATA_BYTES_MAX: usize = 64 << 10;
/// The most ranges in a request.
pub const RANGES_MAX: usize = 1024;
