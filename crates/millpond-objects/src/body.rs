//! Bodies of responses, which have the length that the response announced, or end with an error.
//!
//! `object_store` does not promise that. If a local file is truncated during a read, the stream returns empty pieces without an
//! end.

use bytes::Bytes;
use futures_util::stream::{self, BoxStream, StreamExt};
use object_store::{Error, GetResult, GetResultPayload, Result};

use crate::response::take_body;

/// Empty pieces in a row that are no end: frames of HTTP/2 may be empty.
const EMPTY_PIECES_MAX: u32 = 16;

/// The pieces of a response's body, none of which is empty. Instead of an end before the announced length, or a byte after it, they have an error that
/// names the object and the lengths.
///
/// # Examples
///
/// ```
/// use futures_util::TryStreamExt;
/// use object_store::{ObjectStoreExt, local::LocalFileSystem, path::Path};
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = tempfile::tempdir()?;
///
/// let store = LocalFileSystem::new_with_prefix(folder.path())?;
/// store.put(&Path::from("pond"), "water lilies".into()).await?;
/// let response = store.get(&Path::from("pond")).await?;
/// // Another program truncates the file.
/// std::fs::File::options().write(true).open(folder.path().join("pond"))?.set_len(5)?;
/// let body: Result<Vec<_>, _> = millpond_objects::checked_body(response).try_collect().await;
/// assert!(body.unwrap_err().to_string().contains("pond: 5 bytes were received of 12 announced ones"));
/// # Ok(()) }
/// ```
pub fn checked_body(response: GetResult) -> BoxStream<'static, Result<Bytes>> {
    let expected = response.range.end - response.range.start;
    let object = response.meta.location.to_string();
    let body = Body { pieces: response.into_stream(), object, expected, received: 0 };
    let next = |body: Option<Body>| async move {
        let mut body = body?;
        match body.next_piece().await {
            Ok(Some(piece)) => Some((Ok(piece), Some(body))),
            Ok(None) => None,
            Err(error) => Some((Err(error), None)),
        }
    };
    stream::unfold(Some(body), next).fuse().boxed()
}

/// The same of a response that is read as a whole. A file's is checked by `object_store` then.
pub(crate) fn with_checked_body(mut response: GetResult) -> GetResult {
    if matches!(response.payload, GetResultPayload::Stream(_)) {
        let body = checked_body(take_body(&mut response));
        response.payload = GetResultPayload::Stream(body);
    }
    response
}

struct Body {
    pieces: BoxStream<'static, Result<Bytes>>,
    object: String,
    expected: u64,
    received: u64,
}

impl Body {
    async fn next_piece(&mut self) -> Result<Option<Bytes>> {
        for _ in 0..=EMPTY_PIECES_MAX {
            // Polled at the end, too: an error may follow the last byte.
            match self.pieces.next().await.transpose()? {
                Some(piece) if piece.is_empty() => {}
                Some(piece) => {
                    self.received += piece.len() as u64;
                    if self.received > self.expected {
                        return Err(self.wrong_length());
                    }
                    return Ok(Some(piece));
                }
                None if self.received == self.expected => return Ok(None),
                None => break,
            }
        }
        // As many empty pieces are an end, which may come after the last byte.
        if self.received == self.expected { Ok(None) } else { Err(self.wrong_length()) }
    }

    fn wrong_length(&self) -> Error {
        let Body { object, expected, received, .. } = self;
        let what = format!("{object}: {received} bytes were received of {expected} announced ones");
        Error::Generic { store: crate::NAME, source: what.into() }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::TryStreamExt;
    use object_store::memory::InMemory;
    use object_store::path::Path;
    use object_store::{ObjectStore, ObjectStoreExt};

    use super::*;

    async fn read(pieces: &[&'static str]) -> Result<Vec<Bytes>> {
        let (store, path) = (InMemory::new(), Path::from("pond"));
        store.put(&path, "water".into()).await?;
        let mut response = store.get_opts(&path, Default::default()).await?;
        let pieces: Vec<_> = pieces.iter().map(|&piece| Ok(Bytes::from(piece))).collect();
        response.payload = GetResultPayload::Stream(stream::iter(pieces).boxed());
        checked_body(response).try_collect().await
    }

    #[tokio::test]
    async fn bodies_have_their_length() {
        assert_eq!(read(&["wat", "er"]).await.unwrap(), ["wat", "er"]);
        let some = ["", "wat", "", "", "er", ""];
        assert_eq!(read(&some).await.unwrap(), ["wat", "er"]);
        let mut whole = vec!["water"];
        whole.extend([""; 1000]);
        assert_eq!(read(&whole).await.unwrap(), ["water"]);
        let mut many = vec!["wat"];
        many.extend([""; 1000]);
        many.push("er");
        let (longer, shorter) = (["water", "!"], ["wat"]);
        for (pieces, received) in [(&longer[..], 6), (&shorter, 3), (&[], 0), (&many, 3)] {
            let error = read(pieces).await.unwrap_err().to_string();
            let what = format!("pond: {received} bytes were received of 5 announced ones");
            assert!(error.contains(&what), "{error}");
        }
    }
}
