//! A file with a position, for code that uses tokio's `AsyncRead`, `AsyncWrite` and `AsyncSeek`.
//!
//! A read that hits is copied at once. Another read, and each write, is a future of [`AsyncFile`] that owns its memory, as
//! the caller's memory may be gone when the future ends. At most one is pending.

use std::future::Future;
use std::io::{self, SeekFrom};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncSeek, AsyncWrite, ReadBuf};

use crate::api::async_file::AsyncFile;
use crate::api::file::cursor::position_after;
use crate::error::{Error, Result};
use crate::memory::try_with_capacity;

/// The longest read or write of one call: longer ones are done in parts, as with `tokio::fs::File`. Chosen.
const PIECE_BYTES_MAX: usize = 256 << 10;

type BoxedFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;
/// The memory of a read, and how many bytes of it were read.
type ReadBytes = (Vec<u8>, Result<usize>);

/// An [`AsyncFile`] with a position, for code that is generic over tokio's `AsyncRead`, `AsyncWrite` and `AsyncSeek`.
///
/// With the feature `tokio`. It works in any runtime. As with `tokio::fs::File`, a write has been carried out when
/// `flush` is ready, which returns its error; a write that is pending when the cursor is dropped may not be carried out.
/// Reads of a handle for direct I/O fail, as those of [`AsyncFile::read_at`] do.
///
/// # Examples
///
/// ```
/// use millpond::file::AsyncCursor;
/// use millpond::{AsyncFile, Engine, OpenOptions};
/// use tokio::io::{AsyncReadExt, AsyncSeekExt, AsyncWriteExt};
///
/// # tokio::runtime::Builder::new_multi_thread().build().unwrap().block_on(async {
/// # let dir = tempfile::tempdir()?;
/// # let path = dir.path().join("data");
/// let engine = Engine::builder().cache_bytes(1 << 20).build()?;
/// let file = engine.open(&path, &OpenOptions::new().read(true).write(true).create(true))?;
/// let mut cursor = AsyncCursor::new(AsyncFile::from(file));
/// cursor.write_all(b"a pond").await?;
/// cursor.flush().await?;
/// assert_eq!(cursor.position(), 6);
/// cursor.seek(std::io::SeekFrom::Start(2)).await?;
/// let mut text = String::new();
/// cursor.read_to_string(&mut text).await?;
/// assert_eq!(text, "pond");
/// assert_eq!(cursor.get_ref().file().len()?, 6);
/// # Ok::<(), std::io::Error>(())
/// # }).unwrap();
/// ```
pub struct AsyncCursor {
    file: AsyncFile,
    position: u64,
    /// The offset and the length that were asked for, and the read.
    read: Option<(u64, usize, BoxedFuture<ReadBytes>)>,
    write: Option<BoxedFuture<Result<()>>>,
    seek: Option<SeekFrom>,
}

impl AsyncCursor {
    /// A cursor at the start of the file.
    #[must_use]
    pub fn new(file: AsyncFile) -> AsyncCursor {
        AsyncCursor { file, position: 0, read: None, write: None, seek: None }
    }

    /// The offset of the next byte that is read or written.
    #[must_use]
    pub fn position(&self) -> u64 {
        self.position
    }

    /// The file.
    #[must_use]
    pub fn get_ref(&self) -> &AsyncFile {
        &self.file
    }

    /// Ready when no write is pending.
    fn poll_written(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let Some(write) = &mut self.write {
            let written = ready!(write.as_mut().poll(cx));
            self.write = None;
            written?;
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncRead for AsyncCursor {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        dst: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        ready!(this.poll_written(cx))?;
        let len = dst.remaining().min(PIECE_BYTES_MAX);
        if len == 0 {
            return Poll::Ready(Ok(()));
        }
        // A read that was begun for a caller that went away, at another place or for more bytes.
        let position = this.position;
        if this.read.as_ref().is_some_and(|&(offset, asked, _)| offset != position || asked > len) {
            this.read = None;
        }
        if this.read.is_none() {
            match this.file.file().try_read_at(dst.initialize_unfilled_to(len), position) {
                Ok(moved) => {
                    dst.advance(moved);
                    this.position += moved as u64;
                    return Poll::Ready(Ok(()));
                }
                Err(Error::WouldBlock { .. }) => {}
                Err(error) => return Poll::Ready(Err(error.into())),
            }
            let mut bytes = try_with_capacity(len)?;
            let file = this.file.clone();
            let read = async move {
                bytes.resize(len, 0);
                let moved = file.read_at(&mut bytes, position).await;
                (bytes, moved)
            };
            this.read = Some((position, len, Box::pin(read)));
        }
        let (_, _, read) = this.read.as_mut().expect("begun above");
        let (bytes, moved) = ready!(read.as_mut().poll(cx));
        this.read = None;
        let moved = moved?;
        dst.put_slice(&bytes[..moved]);
        this.position += moved as u64;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for AsyncCursor {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        src: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = &mut *self;
        ready!(this.poll_written(cx))?;
        this.read = None;
        let src = &src[..src.len().min(PIECE_BYTES_MAX)];
        let mut bytes = try_with_capacity(src.len())?;
        bytes.extend_from_slice(src);
        let (file, offset, len) = (this.file.clone(), this.position, bytes.len());
        this.write = Some(Box::pin(async move { file.write_all_at(&bytes, offset).await }));
        this.position += len as u64;
        match this.poll_written(cx) {
            Poll::Ready(Err(error)) => {
                this.position = offset;
                Poll::Ready(Err(error))
            }
            // The next call waits for it.
            _ => Poll::Ready(Ok(len)),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_written(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_written(cx)
    }
}

impl AsyncSeek for AsyncCursor {
    fn start_seek(mut self: Pin<&mut Self>, to: SeekFrom) -> io::Result<()> {
        self.seek = Some(to);
        Ok(())
    }

    fn poll_complete(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<u64>> {
        let this = &mut *self;
        // A pending write may change the end of the file.
        ready!(this.poll_written(cx))?;
        if let Some(to) = this.seek.take() {
            this.position = position_after(this.file.file(), this.position, to)?;
        }
        Poll::Ready(Ok(this.position))
    }
}

impl std::fmt::Debug for AsyncCursor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AsyncCursor").field("position", &self.position).finish_non_exhaustive()
    }
}
