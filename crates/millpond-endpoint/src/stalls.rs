//! Time limits for clients that stop sending or receiving.
//!
//! hyper limits the time of a request's head. This module limits the pauses within a request's body ([`PacedBody`]) and
//! within the output ([`PacedOutput`]).

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

/// The longest pause; the timer runs while the operation is pending.
#[derive(Debug)]
struct PauseLimit {
    limit: Duration,
    timer: Option<Pin<Box<Sleep>>>,
}

impl PauseLimit {
    fn new(limit: Duration) -> Self {
        Self { limit, timer: None }
    }

    fn check<T>(&mut self, context: &mut Context<'_>, poll: Poll<T>) -> Poll<Result<T, io::Error>> {
        match poll {
            Poll::Ready(value) => {
                self.timer = None;
                Poll::Ready(Ok(value))
            }
            Poll::Pending => {
                let limit = self.limit;
                let timer = self.timer.get_or_insert_with(|| Box::pin(sleep(limit)));
                ready!(timer.as_mut().poll(context));
                Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client has stopped")))
            }
        }
    }
}

/// A connection whose writes fail if the client receives nothing for a time.
#[derive(Debug)]
pub(crate) struct PacedOutput<S> {
    stream: S,
    pause: PauseLimit,
}

impl<S> PacedOutput<S> {
    pub(crate) fn new(stream: S, limit: Duration) -> Self {
        Self { stream, pause: PauseLimit::new(limit) }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for PacedOutput<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for PacedOutput<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.pause.check(context, written).map(|written| written?)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        self.pause.check(context, written).map(|written| written?)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(context);
        self.pause.check(context, flushed).map(|flushed| flushed?)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shut = Pin::new(&mut self.stream).poll_shutdown(context);
        self.pause.check(context, shut).map(|shut| shut?)
    }
}

/// The body of a request: fails if the client sends nothing for a time while the server waits for it.
#[derive(Debug)]
pub(crate) struct PacedBody<B> {
    body: B,
    pause: PauseLimit,
    asked: Arc<AtomicBool>,
}

impl<B> PacedBody<B> {
    /// `asked` is set when the body is asked for bytes.
    pub(crate) fn new(body: B, limit: Duration, asked: Arc<AtomicBool>) -> Self {
        Self { body, pause: PauseLimit::new(limit), asked }
    }
}

impl<B> Body for PacedBody<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: std::error::Error + Send + Sync + 'static,
{
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        // Relaxed: read by the task that polls this body.
        self.asked.store(true, Relaxed);
        let frame = Pin::new(&mut self.body).poll_frame(context);
        Poll::Ready(match ready!(self.pause.check(context, frame)) {
            Ok(frame) => frame.map(|frame| frame.map_err(io::Error::other)),
            Err(stopped) => Some(Err(stopped)),
        })
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
