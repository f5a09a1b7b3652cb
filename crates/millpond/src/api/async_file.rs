//! [`AsyncFile`]: the asynchronous API of an open file.
//!
//! A read polls the hit path, and then the states of `read::miss`, with the caller's buffer borrowed:
//! between two polls only the caller has it. Other operations are those of `file`, run by a worker that
//! owns its arguments; the future only waits for the result.

use std::future::Future;
use std::io::{IoSlice, IoSliceMut};
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use crate::advice::Advice;
use crate::api::background_read;
use crate::api::file::{File, in_range};
use crate::api::view::View;
use crate::buffers::Buffer;
use crate::cache::accounting::copies;
use crate::copy::Source;
use crate::error::{Error, Op, Result};
use crate::io::segment::{Segment, SegmentIter};
use crate::io::segment_list::SegmentList;
use crate::memory::try_with_capacity;
use crate::process_local::ProcessLocal;
use crate::read::hit::copy_out;
use crate::read::miss::{Miss, PendingRead, Step, StepScope};
use crate::read::plan::BypassPolicy;
use crate::workers::JobOutcome;

/// A [`File`] with asynchronous methods. Clones are the same handle.
///
/// The futures run in any runtime. Cached bytes are read at the first poll, without an allocation or a
/// lock. A miss is started at the first poll; its completion wakes the task, whose next poll copies. No
/// thread waits for it. The future of a read may be dropped at any time, or leaked: it is the only user of
/// its buffer.
///
/// A waker is called by the thread that completes an operation, which may belong to another caller. It may
/// poll futures, submit requests and drop handles, but must not wait for the engine: that thread may have
/// to complete the very operation. A panic of a waker is caught, after the panic hook: no other operation
/// is affected, and its task is not woken.
///
/// Methods without an asynchronous form here never block, or are for the owner of the file's description:
/// see [`AsyncFile::file`].
///
/// The first operation of an engine that is not a hit starts a thread for blocking work. If the system
/// can't start one, the operation fails with [`Error::Io`], without an effect.
///
/// # Examples
///
/// ```
/// # use std::{future::Future, pin::pin, task::{Context, Poll, Waker}};
/// use millpond::{AsyncFile, Engine, OpenOptions};
/// # fn block_on<F: Future>(future: F) -> F::Output {
/// #     let mut future = pin!(future);
/// #     loop {
/// #         if let Poll::Ready(out) = future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
/// #             return out;
/// #         }
/// #     }
/// # }
/// # let path = tempfile::NamedTempFile::new().unwrap();
/// let engine = Engine::builder().cache_bytes(1 << 20).build()?;
/// let options = OpenOptions::new().read(true).write(true);
/// let file = AsyncFile::from(engine.open(&path, &options)?);
/// # block_on(async {
/// file.write_at(b"a pond", 0).await?;
/// let mut bytes = [0; 4];
/// assert_eq!(file.read_at(&mut bytes, 2).await?, 4);
/// assert_eq!(&bytes, b"pond");
/// file.sync_data().await?;
/// # Ok::<(), millpond::Error>(())
/// # })?;
/// # Ok::<(), millpond::Error>(())
/// ```
///
/// Several concurrently, and appends:
///
/// ```
/// # use std::{future::Future, pin::pin, task::{Context, Poll, Waker}};
/// # use std::io::{IoSlice, IoSliceMut};
/// # use millpond::{Advice, AsyncFile, Engine, OpenOptions};
/// # fn block_on<F: Future>(future: F) -> F::Output {
/// #     let mut future = pin!(future);
/// #     loop {
/// #         if let Poll::Ready(out) = future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
/// #             return out;
/// #         }
/// #     }
/// # }
/// # let engine = Engine::builder().cache_bytes(1 << 20).build()?;
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("data");
/// # let options = OpenOptions::new().read(true).write(true).create(true);
///
/// # block_on(async {
///
/// let file = AsyncFile::from(engine.open(&path, &options)?);
/// file.write_all_at(b"one", 0).await?;
/// assert_eq!(file.append(b"two").await?, 3);
/// assert_eq!(file.append_vectored(&[IoSlice::new(b"thr"), IoSlice::new(b"ee")]).await?, 6);
/// file.write_vectored_at(&[IoSlice::new(b"O")], 0).await?;
/// file.advise(0, 0, Advice::Random)?;
/// let (mut first, mut rest) = ([0; 3], [0; 8]);
/// file.read_vectored_at(&mut [IoSliceMut::new(&mut first), IoSliceMut::new(&mut rest)], 0).await?;
/// assert_eq!((&first, &rest), (b"One", b"twothree"));
/// file.read_exact_at(&mut first, 3).await?;
/// assert_eq!(file.file().len()?, 11, "what never waits is the file's");
/// # Ok::<(), millpond::Error>(())
/// # })?;
/// # Ok::<(), millpond::Error>(())
/// ```
///
/// Buffers are passed in and returned:
///
/// ```
/// # use std::{future::Future, pin::pin, task::{Context, Poll, Waker}};
/// # use std::io::{IoSlice, IoSliceMut};
/// # use millpond::{Advice, AsyncFile, Engine, OpenOptions};
/// # fn block_on<F: Future>(future: F) -> F::Output {
/// #     let mut future = pin!(future);
/// #     loop {
/// #         if let Poll::Ready(out) = future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
/// #             return out;
/// #         }
/// #     }
/// # }
/// # let engine = Engine::builder().cache_bytes(1 << 20).build()?;
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("data");
/// # let options = OpenOptions::new().read(true).write(true).create(true);
///
/// # block_on(async {
///
/// let file = AsyncFile::from(engine.open(&path, &options)?);
/// let mut buffers = engine.alloc_buffers(2, 4096)?;
/// buffers[1].fill(7);
/// let (written, buffers) = file.write_buffers_at(buffers, 0).await;
/// assert_eq!(written?, 8192);
/// let (read, buffers) = file.read_buffers_at(buffers, 4096).await;
/// assert_eq!((read?, buffers[0][0]), (4096, 7));
/// # Ok::<(), millpond::Error>(())
/// # })?;
/// # Ok::<(), millpond::Error>(())
/// ```
///
/// Extents, durability and names:
///
/// ```
/// # use std::{future::Future, pin::pin, task::{Context, Poll, Waker}};
/// # use std::io::{IoSlice, IoSliceMut};
/// # use millpond::{Advice, AsyncFile, Engine, OpenOptions};
/// # fn block_on<F: Future>(future: F) -> F::Output {
/// #     let mut future = pin!(future);
/// #     loop {
/// #         if let Poll::Ready(out) = future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
/// #             return out;
/// #         }
/// #     }
/// # }
/// # let engine = Engine::builder().cache_bytes(1 << 20).build()?;
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("data");
/// # let options = OpenOptions::new().read(true).write(true).create(true);
///
/// # block_on(async {
///
/// let file = AsyncFile::from(engine.open(&path, &options)?);
/// # if matches!(file.allocate(0, 1).await, Err(ref e) if e.errno() == libc::EOPNOTSUPP) { return Ok(()) }
/// file.allocate(0, 1 << 20).await?;
/// file.truncate(1 << 20).await?;
/// file.write_at_dsync(b"durable", 0).await?;
/// file.zero_range(4096, 4096).await?;
/// file.punch_hole(64 << 10, 64 << 10).await?;
/// assert_eq!(file.seek_data(0).await?, Some(0));
/// assert!(file.seek_hole(0).await?.is_some());
/// file.write_back().await?;
/// file.sync_range(0, 4096).await?;
/// file.sync_all().await?;
/// file.invalidate(0, 1 << 20).await?; // another program has written to it
/// let current = dir.path().join("CURRENT");
/// file.persist(&path, &current).await?;
/// assert!(file.persist_noclobber(&current, &path).await.is_ok());
/// # Ok::<(), millpond::Error>(())
/// # })?;
/// # Ok::<(), millpond::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct AsyncFile {
    file: Arc<File>,
}

impl From<File> for AsyncFile {
    fn from(file: File) -> AsyncFile {
        AsyncFile { file: Arc::new(file) }
    }
}

impl From<Arc<File>> for AsyncFile {
    fn from(file: Arc<File>) -> AsyncFile {
        AsyncFile { file }
    }
}

/// Methods of [`File`] that a worker runs: name, arguments and result, and the operation and range that an error names
/// if no worker can be started.
macro_rules! by_worker {
    ($(pub fn $name:ident($($arg:ident: $kind:ty),*) -> $out:ty: $op:ident($offset:expr, $len:expr);)*) => {$(
        #[doc = concat!("[`File::", stringify!($name), "`], by a worker. Dropping the future after its first poll")]
        /// does not stop it.
        ///
        /// # Errors
        ///
        #[doc = concat!("As for [`File::", stringify!($name), "`].")]
        pub async fn $name(&self, $($arg: $kind),*) -> Result<$out> {
            self.by_worker((Op::$op, $offset, $len), move |file| file.$name($($arg),*)).await
        }
    )*};
}

impl AsyncFile {
    /// The same handle with the methods that block; some that never do, such as [`File::len`] and
    /// [`File::try_read_at`], exist only there. Also for requests of a [`Queue`](crate::queue::Queue).
    #[must_use]
    pub fn file(&self) -> &Arc<File> {
        &self.file
    }

    /// [`File::read_at`].
    ///
    /// Reads of more than 64 pages, or of more than an eighth of the cache, are run by a worker, with one
    /// more copy.
    ///
    /// # Errors
    ///
    /// As for [`File::read_at`].
    #[inline]
    pub fn read_at<'a>(&'a self, dst: &'a mut [u8], offset: u64) -> ReadAt<'a> {
        ReadAt { file: &self.file, dst, offset, missed: None }
    }

    /// [`File::read_vectored_at`]. Longer reads as for [`AsyncFile::read_at`].
    ///
    /// # Errors
    ///
    /// As for [`File::read_vectored_at`].
    pub fn read_vectored_at<'a, 'b>(
        &'a self,
        dst: &'a mut [IoSliceMut<'b>],
        offset: u64,
    ) -> ReadVectoredAt<'a, 'b> {
        ReadVectoredAt { file: &self.file, dst, offset, missed: None }
    }

    /// [`File::read_exact_at`]. Longer reads as for [`AsyncFile::read_at`].
    ///
    /// # Errors
    ///
    /// As for [`File::read_exact_at`].
    pub async fn read_exact_at(&self, dst: &mut [u8], offset: u64) -> Result<()> {
        let len = dst.len();
        let moved = self.read_at(dst, offset).await?;
        if moved < len {
            // As in `File::read_exact_at`.
            self.read_at(&mut dst[moved..], offset + moved as u64).await?;
            let end = std::io::ErrorKind::UnexpectedEof;
            return Err(Error::io(Op::Read, offset, len as u64, end));
        }
        Ok(())
    }

    /// [`File::view`]. Cached bytes are borrowed at the first poll, without an allocation; otherwise a
    /// worker fills the page. The page is pinned from then on, until view and future are dropped.
    ///
    /// # Errors
    ///
    /// As for [`File::view`].
    ///
    /// # Examples
    ///
    /// ```
    /// # use std::{future::Future, pin::pin, task::{Context, Poll, Waker}};
    /// # use millpond::{AsyncFile, Engine, Error, OpenOptions};
    /// # fn block_on<F: Future>(future: F) -> F::Output {
    /// #     let mut future = pin!(future);
    /// #     loop {
    /// #         if let Poll::Ready(out) = future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
    /// #             return out;
    /// #         }
    /// #     }
    /// # }
    /// # let engine = Engine::builder().cache_bytes(1 << 20).build()?;
    /// # let path = tempfile::NamedTempFile::new().unwrap();
    /// # std::fs::write(&path, "a pond").unwrap();
    /// let file = AsyncFile::from(engine.open(&path, &OpenOptions::new().read(true))?);
    /// # block_on(async {
    /// assert_eq!(&*file.view(2, 100).await?, b"pond");
    /// # Ok::<(), Error>(())
    /// # })?;
    /// # Ok::<(), Error>(())
    /// ```
    pub async fn view(&self, offset: u64, len: usize) -> Result<View<'_>> {
        self.file.check_view(offset, len)?;
        match self.file.cached.try_view(offset, len) {
            Err(Error::WouldBlock { .. }) => {}
            done => return done,
        }
        let by_worker = self.by_worker((Op::View, offset, len as u64), move |file| {
            Ok(file.view(offset, len)?.detach(Arc::clone(&file.cached)))
        });
        Ok(by_worker.await?.attach(&self.file.cached))
    }

    /// [`File::advise`], which never blocks.
    ///
    /// # Errors
    ///
    /// As for [`File::advise`].
    pub fn advise(&self, offset: u64, len: u64, advice: Advice) -> Result<()> {
        self.file.advise(offset, len, advice)
    }

    /// [`File::read_vectored_at`] into all of `buffers`, in turn, which are returned with the result: for
    /// files that were opened [`direct`](crate::OpenOptions::direct), without a copy and, on io_uring,
    /// without a thread. A worker reads other files.
    ///
    /// The buffers belong to the read until it completes; dropping the future does not stop it.
    ///
    /// # Errors
    ///
    /// As for [`File::read_vectored_at`].
    pub async fn read_buffers_at(
        &self,
        buffers: Vec<Buffer>,
        offset: u64,
    ) -> (Result<usize>, Vec<Buffer>) {
        if !self.file.is_for_direct() {
            return self.move_buffers(Op::Read, buffers, offset).await;
        }
        if let Err(error) = self.start_workers(Op::Read, offset, total(&buffers)) {
            return (Err(error), buffers);
        }
        let (outcome, teller) = JobOutcome::new();
        let on_end = move |result, buffers| teller.complete_job((result, buffers));
        let list = SegmentList::from_buffers(buffers).into_raw();
        background_read::start_read(Arc::clone(&self.file), list, offset, None, on_end);
        std::future::poll_fn(|cx| outcome.poll(cx.waker())).await
    }

    /// [`File::write_vectored_at`] of all of `buffers`, in turn, which are returned with the result; by a
    /// worker, without a copy to a file that was opened [`direct`](crate::OpenOptions::direct). Dropping
    /// the future after its first poll does not stop the write.
    ///
    /// # Errors
    ///
    /// As for [`File::write_vectored_at`].
    pub async fn write_buffers_at(
        &self,
        buffers: Vec<Buffer>,
        offset: u64,
    ) -> (Result<usize>, Vec<Buffer>) {
        self.move_buffers(Op::Write, buffers, offset).await
    }

    /// [`File::write_at`] of a copy of `src`, by a worker. The copies of all pending writes take an eighth
    /// of the memory limit, and one more copy at most: a write waits for room first. Once it is copied, at
    /// its first poll if there is room, dropping the future does not stop the write.
    ///
    /// # Errors
    ///
    /// As for [`File::write_at`].
    pub async fn write_at(&self, src: &[u8], offset: u64) -> Result<usize> {
        self.by_writer(&[IoSlice::new(src)], offset, move |file, src| file.write_at(src, offset))
            .await
    }

    /// [`File::write_vectored_at`], as [`AsyncFile::write_at`]: of a copy of all buffers, in turn.
    ///
    /// # Errors
    ///
    /// As for [`File::write_vectored_at`].
    pub async fn write_vectored_at(&self, src: &[IoSlice<'_>], offset: u64) -> Result<usize> {
        self.by_writer(src, offset, move |file, src| file.write_at(src, offset)).await
    }

    /// [`File::write_at_dsync`], as [`AsyncFile::write_at`].
    ///
    /// # Errors
    ///
    /// As for [`File::write_at_dsync`].
    pub async fn write_at_dsync(&self, src: &[u8], offset: u64) -> Result<usize> {
        let write = move |file: &File, src: &[u8]| file.write_at_dsync(src, offset);
        self.by_writer(&[IoSlice::new(src)], offset, write).await
    }

    /// [`File::write_all_at`], as [`AsyncFile::write_at`].
    ///
    /// # Errors
    ///
    /// As for [`File::write_all_at`].
    pub async fn write_all_at(&self, src: &[u8], offset: u64) -> Result<()> {
        let write = move |file: &File, src: &[u8]| file.write_all_at(src, offset);
        self.by_writer(&[IoSlice::new(src)], offset, write).await
    }

    /// [`File::append`], as [`AsyncFile::write_at`].
    ///
    /// # Errors
    ///
    /// As for [`File::append`].
    pub async fn append(&self, src: &[u8]) -> Result<u64> {
        self.by_writer(&[IoSlice::new(src)], 0, move |file, src| file.append(src)).await
    }

    /// [`File::append_vectored`], as [`AsyncFile::write_vectored_at`].
    ///
    /// # Errors
    ///
    /// As for [`File::append_vectored`].
    pub async fn append_vectored(&self, src: &[IoSlice<'_>]) -> Result<u64> {
        self.by_writer(src, 0, move |file, src| file.append(src)).await
    }

    by_worker! {
        pub fn truncate(len: u64) -> (): Truncate(len, 0);
        pub fn punch_hole(offset: u64, len: u64) -> (): Punch(offset, len);
        pub fn zero_range(offset: u64, len: u64) -> (): Zero(offset, len);
        pub fn allocate(offset: u64, len: u64) -> (): Allocate(offset, len);
        pub fn seek_data(offset: u64) -> Option<u64>: Seek(offset, 0);
        pub fn seek_hole(offset: u64) -> Option<u64>: Seek(offset, 0);
        pub fn sync_all() -> (): Sync(0, 0);
        pub fn sync_data() -> (): Sync(0, 0);
        pub fn sync_range(offset: u64, len: u64) -> (): Sync(offset, len);
        pub fn write_back() -> (): Sync(0, 0);
        pub fn invalidate(offset: u64, len: u64) -> (): Advise(offset, len);
    }

    /// [`File::persist`], by a worker, as [`AsyncFile::truncate`].
    ///
    /// # Errors
    ///
    /// As for [`File::persist`].
    pub async fn persist(&self, from: impl Into<PathBuf>, to: impl Into<PathBuf>) -> Result<()> {
        let (from, to) = (from.into(), to.into());
        self.by_worker((Op::Sync, 0, 0), move |file| file.persist(from, to)).await
    }

    /// [`File::persist_noclobber`], as [`AsyncFile::persist`].
    ///
    /// # Errors
    ///
    /// As for [`File::persist_noclobber`].
    pub async fn persist_noclobber(
        &self,
        from: impl Into<PathBuf>,
        to: impl Into<PathBuf>,
    ) -> Result<()> {
        let (from, to) = (from.into(), to.into());
        self.by_worker((Op::Sync, 0, 0), move |file| file.persist_noclobber(from, to)).await
    }

    /// The handle, for direct reads by another part of the engine, which owns the memory.
    pub(crate) fn for_direct(&self, offset: u64, len: u64) -> Result<Arc<File>> {
        if !self.file.is_for_direct() {
            let what = "the file was not opened direct, to be read".to_string();
            return Err(Error::InvalidInput { op: Op::Read, what });
        }
        self.start_workers(Op::Read, offset, len)?;
        Ok(Arc::clone(&self.file))
    }

    async fn by_worker<T: Send + 'static>(
        &self,
        (op, offset, len): (Op, u64, u64),
        body: impl FnOnce(&File) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.start_workers(op, offset, len)?;
        self.worked(body).await
    }

    /// Lets a worker write a copy of `src`; waits for room for the copy first.
    async fn by_writer<T: Send + 'static>(
        &self,
        src: &[IoSlice<'_>],
        offset: u64,
        write: impl FnOnce(&File, &[u8]) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let len = src.iter().map(|slice| slice.len() as u64).sum();
        self.file.check_process(Op::Write)?;
        self.start_workers(Op::Write, offset, len)?;
        let shared = &self.file.cached.shared;
        let mut waiting = ProcessLocal::new(copies::WaitingCopy::new(shared, len));
        let counted = std::future::poll_fn(|cx| waiting.poll(cx.waker())).await;
        drop(waiting);
        let copy = gathered(src, offset)?;
        self.worked(move |file| {
            let outcome = write(file, &copy);
            // The copy is freed before the task is woken (copies.CO1).
            drop((copy, counted));
            outcome
        })
        .await
    }

    async fn move_buffers(
        &self,
        op: Op,
        buffers: Vec<Buffer>,
        offset: u64,
    ) -> (Result<usize>, Vec<Buffer>) {
        if let Err(error) = self.start_workers(op, offset, total(&buffers)) {
            return (Err(error), buffers);
        }
        self.worked(move |file| {
            let list = SegmentList::from_buffers(buffers).into_raw();
            let moved = match op {
                Op::Write => file.write_segments(list.iter(), offset),
                _ => file.read_segments(list.iter(), offset, BypassPolicy::Filtered),
            };
            (moved, list.into_buffers())
        })
        .await
    }

    fn start_workers(&self, op: Op, offset: u64, len: u64) -> Result<()> {
        let started = self.file.cached.shared.workers.start();
        started.map_err(|error| Error::io(op, offset, len, error))
    }

    /// Lets a worker run `body`.
    async fn worked<T: Send + 'static>(&self, body: impl FnOnce(&File) -> T + Send + 'static) -> T {
        let file = Arc::clone(&self.file);
        let outcome = JobOutcome::of(&self.file.cached.shared.workers, move || {
            let done = body(&file);
            // Before the result is published: a task that waits for it may close the last handle then.
            drop(file);
            done
        });
        std::future::poll_fn(|cx| outcome.poll(cx.waker())).await
    }
}

fn total(buffers: &[Buffer]) -> u64 {
    buffers.iter().map(|buffer| buffer.len() as u64).sum()
}

fn gathered(src: &[IoSlice<'_>], offset: u64) -> Result<Vec<u8>> {
    let total = src.iter().map(|slice| slice.len()).sum();
    let mut bytes = try_with_capacity(total)
        .map_err(|error| Error::io(Op::Write, offset, total as u64, error))?;
    src.iter().for_each(|slice| bytes.extend_from_slice(slice));
    Ok(bytes)
}

/// The future of [`AsyncFile::read_at`].
#[must_use = "futures do nothing unless they are polled"]
pub struct ReadAt<'a> {
    file: &'a File,
    dst: &'a mut [u8],
    offset: u64,
    /// From the first miss on.
    missed: Option<ProcessLocal<Missed>>,
}

impl Future for ReadAt<'_> {
    type Output = Result<usize>;

    #[inline]
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        // SAFETY: the slice is borrowed for as long as the future lives; the segment is not used after this
        // call.
        let dst = unsafe { [Segment::new(this.dst.as_mut_ptr(), this.dst.len())] };
        poll_read(this.file, (&dst).into(), this.offset, &mut this.missed, cx)
    }
}

/// The future of [`AsyncFile::read_vectored_at`].
#[must_use = "futures do nothing unless they are polled"]
pub struct ReadVectoredAt<'a, 'b> {
    file: &'a File,
    dst: &'a mut [IoSliceMut<'b>],
    offset: u64,
    missed: Option<ProcessLocal<Missed>>,
}

impl Future for ReadVectoredAt<'_, '_> {
    type Output = Result<usize>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        let list = SegmentList::from_io_slices_mut(this.dst).into_raw();
        poll_read(this.file, list.iter(), this.offset, &mut this.missed, cx)
    }
}

/// A read that is no hit.
enum Missed {
    Steps(Miss),
    /// A worker reads.
    Worker(JobOutcome<Result<Vec<u8>>>),
}

#[inline]
fn poll_read(
    file: &File,
    dst: SegmentIter<'_>,
    offset: u64,
    missed: &mut Option<ProcessLocal<Missed>>,
    cx: &mut Context<'_>,
) -> Poll<Result<usize>> {
    let policy = BypassPolicy::Filtered;
    let read = PendingRead { file: &file.cached, dst, offset, ring: None, policy };
    if missed.is_none()
        && file.is_for_cached_reads()
        && in_range(offset, dst.left())
        && let Some(moved) = read.try_hit()
    {
        return Poll::Ready(Ok(moved));
    }
    poll_missed(file, &read, missed, cx)
}

#[cold]
fn poll_missed(
    file: &File,
    read: &PendingRead<'_>,
    missed: &mut Option<ProcessLocal<Missed>>,
    cx: &mut Context<'_>,
) -> Poll<Result<usize>> {
    let (offset, len) = (read.offset, read.dst.left());
    file.check_read(offset, len)?;
    file.check_cached()?;
    if len == 0 {
        return Poll::Ready(Ok(0));
    }
    if missed.is_none() {
        // The miss may need a worker later.
        let started = file.cached.shared.workers.start();
        started.map_err(|error| Error::io(Op::Read, offset, len, error))?;
        file.read_ahead(offset, len);
    }
    let state = missed.get_or_insert_with(|| ProcessLocal::new(Missed::Steps(Miss::new())));
    if let Missed::Steps(miss) = &mut **state {
        match read.step(miss, cx.waker(), StepScope::Full) {
            Step::Done(result) => {
                *missed = None;
                return Poll::Ready(result);
            }
            Step::Pending => return Poll::Pending,
            Step::NeedsThread => {
                let miss = std::mem::replace(miss, Miss::new());
                **state = Missed::Worker(read_by_worker(read, miss));
            }
            Step::Hit | Step::NeedsFullScope => unreachable!("there is no more than full scope"),
        }
    }
    let Missed::Worker(outcome) = &mut **state else { unreachable!("it has become that") };
    let Poll::Ready(outcome) = outcome.poll(cx.waker()) else { return Poll::Pending };
    *missed = None;
    let bytes = outcome?;
    // SAFETY: the worker's bytes; the segments are valid for writes of at least as many, as their maker
    // vouched.
    let copied =
        unsafe { copy_out(read.dst.limited(bytes.len() as u64), bytes.as_ptr(), Source::Near) };
    let fault = |_| Error::Fault { op: Op::Read, offset, len };
    Poll::Ready(copied.map(|()| bytes.len()).map_err(fault))
}

/// Has a worker read into memory of its own: that of the future may be gone by then.
fn read_by_worker(read: &PendingRead<'_>, miss: Miss) -> JobOutcome<Result<Vec<u8>>> {
    let (file, len) = (Arc::clone(read.file), read.dst.left());
    let PendingRead { offset, policy, .. } = *read;
    JobOutcome::of_read(&read.file.shared.workers, move || {
        let mut bytes: Vec<u8> = try_with_capacity(len as usize)
            .map_err(|error| Error::io(Op::Read, offset, len, error))?;
        // SAFETY: the vector's own memory, of at least `len` bytes. It outlives the read, which returns when
        // no thread and no kernel request uses the memory any more.
        let segment = unsafe { [Segment::new(bytes.as_mut_ptr(), len as usize)] };
        let dst = (&segment).into();
        let read = PendingRead { file: &file, dst, offset, ring: None, policy };
        let moved = miss.read_waiting(&read)?;
        // SAFETY: that many bytes were read into it.
        unsafe { bytes.set_len(moved) };
        Ok(bytes)
    })
}
