//! Bounds of the chunks of an upload in `aws-chunked` framing, which `s3s` holds in memory as a whole.
//!
//! A chunk's signature is checked before its bytes are used, so a long signed chunk is refused. A long chunk without a
//! signature is divided: clients such as the SDK for Go send a whole part as one. The chunks together have the length that
//! the request declares.
//!
//! `s3s` takes each part of a divided chunk for a whole chunk. So this module reports a body that ends before its last chunk.
//!
//! ```text
//! HEAD -> read_head -> DATA -> read_data -> END -> read_end -> HEAD
//! HEAD (size 0, or not understood) -> REST: trailers, or bytes that `s3s` refuses
//! ```

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};

/// Longer signed chunks are refused. Those of SDKs have 64 KiB to 1 MiB. Chosen.
const SIGNED_BYTES_MAX: u64 = 8 << 20;
/// Longer chunks without a signature are divided; in a body without signatures, longer ones with an extension are refused. Chosen.
const UNSIGNED_BYTES_MAX: u64 = 1 << 20;
/// The limit of `s3s` for the line before a chunk.
const HEAD_BYTES_MAX: usize = 1024;
/// A part of the error of a chunk that is too long, by which it is found.
pub(crate) const TOO_LONG: &str = "signed chunk of";

#[derive(Debug)]
enum ChunkState {
    /// The line before a chunk, as far as it has been received.
    Head(Vec<u8>),
    Data {
        left: u64,
        divides: bool,
    },
    /// Bytes of the line end after a chunk.
    End {
        seen: usize,
        divides: bool,
    },
    Rest,
}

/// A body in this framing.
#[derive(Debug)]
struct Chunks {
    state: ChunkState,
    /// The most bytes of a chunk that is not divided.
    whole_bytes_max: u64,
    /// The bytes of the declared length that have not come yet. `None`: `s3s` refuses the request.
    left: Option<u64>,
    /// Received bytes, possibly divided.
    ready: VecDeque<Bytes>,
}

const LINE_END: &[u8] = b"\r\n";
/// The start of the values of `x-amz-content-sha256` for this framing.
const STREAMING: &[u8] = b"STREAMING-";

fn invalid(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// The most bytes that `s3s` holds of a body with this value of `x-amz-content-sha256`, besides those that it has passed on.
pub(crate) fn held_bytes_max(content: Option<&[u8]>) -> u64 {
    match content {
        Some(content) if content.starts_with(b"STREAMING-UNSIGNED-") => UNSIGNED_BYTES_MAX,
        Some(content) if content.starts_with(STREAMING) => SIGNED_BYTES_MAX,
        _ => 0,
    }
}

/// The declared length of the decoded body.
pub(crate) fn decoded_bytes(headers: &HeaderMap) -> Option<u64> {
    headers.get("x-amz-decoded-content-length")?.to_str().ok()?.parse().ok()
}

/// The size of a chunk, if the line is as `s3s` reads it.
fn size_in(head: &[u8]) -> Option<u64> {
    let digits = head.split(|byte| matches!(byte, b';' | b'\r')).next()?;
    let is_number = (1..=8).contains(&digits.len()) && digits.iter().all(u8::is_ascii_hexdigit);
    is_number.then(|| u64::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok())?
}

impl Chunks {
    fn push(&mut self, bytes: Bytes) {
        if !bytes.is_empty() {
            self.ready.push_back(bytes);
        }
    }

    /// Whether the last chunk has begun, which has no data.
    fn is_complete(&self) -> bool {
        matches!(self.state, ChunkState::Rest)
    }

    fn receive(&mut self, mut bytes: Bytes) -> io::Result<()> {
        while bytes.has_remaining() {
            match &mut self.state {
                ChunkState::Head(_) => self.read_head(&mut bytes)?,
                ChunkState::Data { .. } => self.read_data(&mut bytes),
                ChunkState::End { .. } => self.read_end(&mut bytes)?,
                ChunkState::Rest => self.push(std::mem::take(&mut bytes)),
            }
        }
        Ok(())
    }

    fn read_head(&mut self, bytes: &mut Bytes) -> io::Result<()> {
        let ChunkState::Head(head) = &mut self.state else { return Ok(()) };
        let line_end = bytes.iter().position(|byte| *byte == b'\n');
        head.extend_from_slice(&bytes.split_to(line_end.map_or(bytes.len(), |at| at + 1)));
        if head.len() > HEAD_BYTES_MAX {
            return Err(invalid("the line before a chunk is too long".into()));
        }
        if line_end.is_none() {
            return Ok(());
        }
        let head = std::mem::take(head);
        let Some(size) = size_in(&head) else {
            return Err(invalid("the line before a chunk has no size of 1 to 8 digits".into()));
        };
        let is_signed = head.contains(&b';');
        let most = self.whole_bytes_max;
        if is_signed && size > most {
            let what = format!("a {TOO_LONG} {size} bytes: at most {most} are accepted");
            return Err(invalid(what));
        }
        if let Some(left) = &mut self.left {
            if size > *left || (size == 0 && *left > 0) {
                let what = format!(
                    "a chunk of {size} bytes, where {left} are left of x-amz-decoded-content-length"
                );
                return Err(invalid(what));
            }
            *left -= size;
        }
        let divides = !is_signed && size > UNSIGNED_BYTES_MAX;
        if !divides {
            self.push(head.into());
        }
        self.state =
            if size == 0 { ChunkState::Rest } else { ChunkState::Data { left: size, divides } };
        Ok(())
    }

    fn read_data(&mut self, bytes: &mut Bytes) {
        let ChunkState::Data { left, divides } = &mut self.state else { return };
        let most = if *divides { (*left).min(UNSIGNED_BYTES_MAX) } else { *left };
        let taken = usize::try_from(most).unwrap_or(usize::MAX).min(bytes.len());
        *left -= taken as u64;
        let (is_last, divides) = (*left == 0, *divides);
        if is_last {
            self.state = ChunkState::End { seen: 0, divides };
        }
        if divides {
            self.push(format!("{taken:x}\r\n").into());
        }
        self.push(bytes.split_to(taken));
        if divides {
            self.push(Bytes::from_static(LINE_END));
        }
    }

    fn read_end(&mut self, bytes: &mut Bytes) -> io::Result<()> {
        let ChunkState::End { seen, divides } = &mut self.state else { return Ok(()) };
        if LINE_END.get(*seen) != Some(&bytes.get_u8()) {
            return Err(invalid("a chunk is longer than the line before it says".into()));
        }
        *seen += 1;
        if *seen == LINE_END.len() {
            let divides = *divides;
            self.state = ChunkState::Head(Vec::new());
            if !divides {
                self.push(Bytes::from_static(LINE_END));
            }
        }
        Ok(())
    }
}

/// The body of a request, with chunks of limited length.
#[derive(Debug)]
pub(crate) struct BoundedChunks<B> {
    body: B,
    /// `None`: the body has another framing.
    chunks: Option<Chunks>,
}

impl<B> BoundedChunks<B> {
    /// `content`: the value of `x-amz-content-sha256`. `decoded_bytes`: the declared length.
    pub(crate) fn new(body: B, content: Option<&[u8]>, decoded_bytes: Option<u64>) -> Self {
        let is_chunked = content.is_some_and(|content| content.starts_with(STREAMING));
        let chunks = || Chunks {
            state: ChunkState::Head(Vec::new()),
            whole_bytes_max: held_bytes_max(content),
            left: decoded_bytes,
            ready: VecDeque::new(),
        };
        Self { body, chunks: is_chunked.then(chunks) }
    }
}

impl<B> Body for BoundedChunks<B>
where
    B: Body<Data = Bytes, Error = io::Error> + Unpin,
{
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        let Self { body, chunks } = &mut *self;
        let Some(chunks) = chunks else { return Pin::new(body).poll_frame(context) };
        loop {
            if let Some(bytes) = chunks.ready.pop_front() {
                return Poll::Ready(Some(Ok(Frame::data(bytes))));
            }
            match ready!(Pin::new(&mut *body).poll_frame(context)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(bytes) => {
                        if let Err(error) = chunks.receive(bytes) {
                            return Poll::Ready(Some(Err(error)));
                        }
                    }
                    Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
                },
                None if !chunks.is_complete() => {
                    let what = "the body ends before its last chunk";
                    let error = io::Error::new(io::ErrorKind::UnexpectedEof, what);
                    return Poll::Ready(Some(Err(error)));
                }
                other => return Poll::Ready(other),
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        let is_complete = |chunks: &Chunks| chunks.ready.is_empty() && chunks.is_complete();
        self.chunks.as_ref().is_none_or(is_complete) && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        if self.chunks.is_some() { SizeHint::default() } else { self.body.size_hint() }
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::{BodyExt, StreamBody};

    use super::*;

    /// What `s3s` would get of a body that arrives in pieces of `piece` bytes.
    async fn passed(body: &[u8], piece: usize) -> io::Result<Vec<u8>> {
        passed_of(body, piece, None).await
    }

    async fn passed_of(body: &[u8], piece: usize, decoded: Option<u64>) -> io::Result<Vec<u8>> {
        let frames: Vec<io::Result<Frame<Bytes>>> = body
            .chunks(piece)
            .map(|bytes| Ok(Frame::data(Bytes::copy_from_slice(bytes))))
            .collect();
        let body = StreamBody::new(futures_util::stream::iter(frames));
        let chunks = BoundedChunks::new(body, Some(b"STREAMING-UNSIGNED-PAYLOAD-TRAILER"), decoded);
        Ok(chunks.collect().await?.to_bytes().to_vec())
    }

    #[tokio::test]
    async fn short_chunks_pass_as_they_are() {
        let body =
            b"5;chunk-signature=abc\r\nwater\r\n3\r\n\r\n\r\r\n0\r\nx-amz-checksum: 1\r\n\r\n";
        for piece in 1..body.len() {
            assert_eq!(passed(body, piece).await.unwrap(), body, "{piece}");
        }
    }

    #[tokio::test]
    async fn long_chunks_without_a_signature_are_divided() {
        let data: Vec<u8> = (0..UNSIGNED_BYTES_MAX + 5000).map(|at| (at % 251) as u8).collect();
        let body = [format!("{:x}\r\n", data.len()).as_bytes(), &data, b"\r\n0\r\n\r\n"].concat();
        for piece in [1000, 65_536, body.len()] {
            let passed = passed(&body, piece).await.unwrap();
            let (mut rest, mut found) = (&passed[..], Vec::new());
            loop {
                let end = rest.iter().position(|byte| *byte == b'\n').unwrap();
                let size = size_in(&rest[..end]).unwrap() as usize;
                rest = &rest[end + 1..];
                if size == 0 {
                    break;
                }
                assert!(size as u64 <= UNSIGNED_BYTES_MAX, "{size}");
                found.extend_from_slice(&rest[..size]);
                rest = rest[size..].strip_prefix(LINE_END).unwrap();
            }
            assert!(found == data && rest == LINE_END, "{piece}");
        }
    }

    #[tokio::test]
    async fn long_signed_chunks_and_other_lines_are_refused() {
        let long = format!("{:x};chunk-signature=abc\r\n", UNSIGNED_BYTES_MAX + 1);
        for (body, why) in [
            (long.as_str(), "a signed chunk of 1048577 bytes"),
            // `s3s` would read the first eight digits.
            ("0000000010\r\n", "1 to 8 digits"),
            ("+5\r\nwater\r\n", "1 to 8 digits"),
            ("5\r\nwaters\r\n", "longer than"),
            (&"a".repeat(2000), "too long"),
        ] {
            for piece in [1, 7, body.len()] {
                let error = passed(body.as_bytes(), piece).await.unwrap_err().to_string();
                assert!(error.contains(why), "{body}: {error}");
            }
        }
    }

    /// Goal: a body that is cut anywhere before its last chunk is an error, also where `s3s` has received whole chunks.
    #[tokio::test]
    async fn a_body_without_its_last_chunk_is_an_error() {
        let data = vec![7; UNSIGNED_BYTES_MAX as usize + 1];
        let body = [format!("5\r\nwater\r\n{:x}\r\n", data.len()).as_bytes(), &data].concat();
        let body = [&body[..], b"\r\n0\r\n\r\n"].concat();
        let last = body.len() - 2;
        for cut in (0..40).chain(body.len() - 40..last) {
            let error = passed(&body[..cut], 65_536).await.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "{cut} bytes");
        }
        passed(&body[..last], 65_536).await.unwrap();
    }

    #[tokio::test]
    async fn chunks_have_the_declared_length() {
        let body = b"5\r\nwater\r\n3\r\nday\r\n0\r\n\r\n";
        assert_eq!(passed_of(body, 7, Some(8)).await.unwrap(), body);
        for (declared, why) in [
            (0, "a chunk of 5 bytes, where 0 are left"),
            (7, "a chunk of 3 bytes, where 2 are left"),
            (9, "a chunk of 0 bytes, where 1 are left"),
        ] {
            let error = passed_of(body, 7, Some(declared)).await.unwrap_err().to_string();
            assert!(error.contains(why), "{declared}: {error}");
        }
    }
}
