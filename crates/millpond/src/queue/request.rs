//! The requests and the completions of a queue.

use std::sync::Arc;

use crate::api::file::File;
use crate::buffers::Buffer;
use crate::error::{Error, Op, Result};
use crate::io::segment::{Segment, SegmentIter};
use crate::io::segment_list::{RawList, SegmentList};
use crate::read::plan::BypassPolicy;

/// A request for a [`Queue`](crate::queue::Queue).
///
/// It owns its buffer, which is returned with the [`Completion`], and keeps its file open. Requests of one
/// queue run concurrently, in any order: submit a request that must follow another one after that has
/// completed.
///
/// The handle is dropped before the completion is reported. If it is the last one of its file, dirty pages
/// of [`WriteMode::Back`](crate::WriteMode::Back) are written back first.
///
/// # Examples
///
/// ```
/// # use std::sync::Arc;
/// # use millpond::queue::Request;
/// # use millpond::{Engine, OpenOptions};
/// # let engine = Engine::builder().cache_bytes(1 << 20).build()?;
/// # let path = tempfile::NamedTempFile::new().unwrap();
/// # let file = Arc::new(engine.open(&path, &OpenOptions::new().read(true).write(true))?);
/// # let queue = engine.queue(8)?;
/// queue.submit_all([
///     Request::write(&file, b"a pond".to_vec(), 0),
///     Request::write_buffers(&file, engine.alloc_buffers(1, 4096)?, 4096),
/// ])?;
/// assert!(queue.wait(2, 8, None)?.iter().all(|done| done.result().is_ok()));
/// queue.submit_all([Request::sync_data(&file), Request::sync_all(&file)])?;
/// assert!(queue.wait(2, 8, None)?.iter().all(|done| done.result().is_ok()));
/// let mut memory = [0u8; 4];
/// let lent = [libc::iovec { iov_base: memory.as_mut_ptr().cast(), iov_len: memory.len() }];
/// // SAFETY: the memory is valid, and not used elsewhere, until the request has completed.
/// queue.submit(unsafe { Request::read_lent(&file, &lent, 2) })?;
/// assert_eq!(queue.wait(1, 8, None)?[0].result().unwrap(), 4);
/// assert_eq!(&memory, b"pond");
/// // SAFETY: the same.
/// queue.submit(unsafe { Request::write_lent(&file, &lent, 0) })?;
/// assert_eq!(queue.wait(1, 8, None)?.len(), 1);
/// # Ok::<(), millpond::Error>(())
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub struct Request {
    pub(super) file: Arc<File>,
    pub(super) user_data: u64,
    pub(super) kind: Kind,
}

/// Lists name memory of a lender, which is valid until the completion; or memory of buffers, which they own.
#[derive(Debug)]
pub(super) enum Kind {
    Read { buffer: Vec<u8>, offset: u64 },
    Write { buffer: Vec<u8>, offset: u64 },
    ReadList { list: RawList<'static>, offset: u64 },
    WriteList { list: RawList<'static>, offset: u64 },
    Sync { data_only: bool },
}

impl Request {
    /// Prefetches the memory that the start of this request needs.
    pub(super) fn ask_for(&self) {
        if let Kind::Read { offset, .. } | Kind::ReadList { offset, .. } = self.kind {
            let cached = &self.file.cached;
            cached.core().prefetch(&cached.cache().frames, cached.page_of(offset));
        }
    }

    fn new(file: &Arc<File>, kind: Kind) -> Request {
        Request { file: Arc::clone(file), user_data: 0, kind }
    }

    /// [`File::read_at`] of `buffer.len()` bytes from byte `offset`. The result is the number of bytes
    /// read; the buffer's length does not change.
    ///
    /// # Examples
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use millpond::queue::Request;
    /// # use millpond::{Engine, OpenOptions};
    /// # let engine = Engine::builder().cache_bytes(1 << 20).build()?;
    /// # let path = tempfile::NamedTempFile::new().unwrap();
    /// std::fs::write(&path, "a pond").unwrap();
    /// let file = Arc::new(engine.open(&path, &OpenOptions::new().read(true))?);
    /// let queue = engine.queue(8)?;
    /// let request = Request::read(&file, vec![0; 4], 2).user_data(7);
    /// queue.submit(request)?;
    /// let done = queue.wait(1, 8, None)?.remove(0);
    /// assert_eq!((done.user_data(), done.result().unwrap()), (7, 4));
    /// assert_eq!(done.into_buffer(), b"pond");
    /// # Ok::<(), millpond::Error>(())
    /// ```
    #[must_use]
    pub fn read(file: &Arc<File>, buffer: Vec<u8>, offset: u64) -> Request {
        Request::new(file, Kind::Read { buffer, offset })
    }

    /// [`File::write_at`] of all of `buffer`. The result is the number of bytes written.
    #[must_use]
    pub fn write(file: &Arc<File>, buffer: Vec<u8>, offset: u64) -> Request {
        Request::new(file, Kind::Write { buffer, offset })
    }

    /// [`File::read_vectored_at`] into all of `buffers`, in turn. They are returned with the completion.
    ///
    /// From a file that was opened [`direct`](crate::OpenOptions::direct) the device reads into them
    /// without a copy, and without a thread on io_uring.
    ///
    /// # Examples
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use millpond::queue::Request;
    /// # use millpond::{Engine, OpenOptions};
    /// # let dir = tempfile::tempdir_in(".").unwrap();
    /// # let path = dir.path().join("data");
    /// # std::fs::write(&path, vec![7; 8192]).unwrap();
    /// # let engine = Engine::builder().cache_bytes(1 << 20).build()?;
    /// let file = match engine.open(&path, &OpenOptions::new().read(true).direct(true)) {
    ///     Ok(file) => Arc::new(file),
    ///     Err(error) => return Ok(println!("no direct I/O here: {error}")),
    /// };
    /// let queue = engine.queue(8)?;
    /// let request = Request::read_buffers(&file, engine.alloc_buffers(2, 4096)?, 0);
    /// queue.submit(request)?;
    /// let done = queue.wait(1, 8, None)?.remove(0);
    /// assert_eq!(done.result().unwrap(), 8192);
    /// assert!(done.into_buffers().iter().all(|buffer| buffer.iter().all(|&byte| byte == 7)));
    /// # Ok::<(), millpond::Error>(())
    /// ```
    #[must_use]
    pub fn read_buffers(file: &Arc<File>, buffers: Vec<Buffer>, offset: u64) -> Request {
        let list = SegmentList::from_buffers(buffers).into_raw();
        Request::new(file, Kind::ReadList { list, offset })
    }

    /// [`File::write_vectored_at`] of all of `buffers`, in turn, by a thread of the engine.
    #[must_use]
    pub fn write_buffers(file: &Arc<File>, buffers: Vec<Buffer>, offset: u64) -> Request {
        let list = SegmentList::from_buffers(buffers).into_raw();
        Request::new(file, Kind::WriteList { list, offset })
    }

    /// [`RawFile::read_vectored_at`](crate::file::RawFile::read_vectored_at) into memory that is lent to the request: for memory that no Rust type
    /// owns, as with callers in C. From a file that was opened [`direct`](crate::OpenOptions::direct) the
    /// device reads into it as into [`Buffer`]s.
    ///
    /// # Safety
    ///
    /// Each of `dst` must be valid for writes, and not used elsewhere, until the request's completion has
    /// been taken from its queue (by [`Queue::wait`](crate::queue::Queue::wait) or a similar method), the process
    /// has ended, or the request was dropped without having been submitted. Dropping the queue does not end
    /// submitted requests: so the queue must live until then. Access must not fault, except as for
    /// [`RawFile::read_at`](crate::file::RawFile::read_at).
    ///
    /// # Examples
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use millpond::queue::Request;
    /// # use millpond::{Engine, OpenOptions};
    /// # let engine = Engine::builder().cache_bytes(1 << 20).build()?;
    /// # let path = tempfile::NamedTempFile::new().unwrap();
    /// std::fs::write(&path, "a pond").unwrap();
    /// let file = Arc::new(engine.open(&path, &OpenOptions::new().read(true))?);
    /// let queue = engine.queue(8)?;
    /// let mut memory = [0u8; 4];
    /// let dst = [libc::iovec { iov_base: memory.as_mut_ptr().cast(), iov_len: memory.len() }];
    /// // SAFETY: the completion is taken below, and until then the memory is not used.
    /// let request = unsafe { Request::read_lent(&file, &dst, 2) };
    /// queue.submit(request)?;
    /// let done = queue.wait(1, 8, None)?.remove(0);
    /// assert_eq!((done.result().unwrap(), &memory), (4, b"pond"));
    /// # Ok::<(), millpond::Error>(())
    /// ```
    #[must_use]
    pub unsafe fn read_lent(file: &Arc<File>, dst: &[libc::iovec], offset: u64) -> Request {
        // SAFETY: the caller's promise: the request, and all that the queue derives from it, is dropped
        // before the memory.
        let list = unsafe { RawList::borrowed(dst, None) };
        Request::new(file, Kind::ReadList { list, offset })
    }

    /// [`RawFile::write_vectored_at`](crate::file::RawFile::write_vectored_at) from memory that is lent to the request.
    ///
    /// # Safety
    ///
    /// As for [`Request::read_lent`], but the memory is only read. If it changes during the write, either
    /// the old or the new bytes are written.
    #[must_use]
    pub unsafe fn write_lent(file: &Arc<File>, src: &[libc::iovec], offset: u64) -> Request {
        // SAFETY: as in `read_lent`; a write only reads the memory.
        let list = unsafe { RawList::borrowed(src, None) };
        Request::new(file, Kind::WriteList { list, offset })
    }

    /// [`File::sync_all`]. The result is 0.
    #[must_use]
    pub fn sync_all(file: &Arc<File>) -> Request {
        Request::new(file, Kind::Sync { data_only: false })
    }

    /// [`File::sync_data`]. The result is 0.
    #[must_use]
    pub fn sync_data(file: &Arc<File>) -> Request {
        Request::new(file, Kind::Sync { data_only: true })
    }

    /// A number that the completion repeats. 0 if not set.
    #[must_use]
    pub fn user_data(mut self, user_data: u64) -> Request {
        self.user_data = user_data;
        self
    }

    /// Checks the request without running it.
    pub(super) fn check(&self) -> Result<()> {
        match &self.kind {
            Kind::Read { buffer, offset } => self.file.check_read(*offset, buffer.len() as u64),
            Kind::ReadList { list, offset } => self.file.check_read(*offset, list.total()),
            Kind::Write { .. } | Kind::WriteList { .. } => self.file.check_process(Op::Write),
            Kind::Sync { .. } => self.file.check_process(Op::Sync),
        }
    }

    /// Runs it, blocking where it has to wait.
    pub(super) fn carry_out(mut self) -> Completion {
        let file = &*self.file;
        let kind = &mut self.kind;
        let result = match kind {
            Kind::Read { .. } | Kind::ReadList { .. } => kind
                .with_read(|dst, offset| file.read_segments(dst, offset, BypassPolicy::FirstMiss)),
            Kind::Write { buffer, offset } => file.write_at(buffer, *offset),
            Kind::WriteList { list, offset } => file.write_segments(list.iter(), *offset),
            Kind::Sync { data_only: true } => file.sync_data().map(|()| 0),
            Kind::Sync { data_only: false } => file.sync_all().map(|()| 0),
        };
        self.complete(result)
    }

    /// Completes it with an error, without running it.
    pub(super) fn fail(self, error: Error) -> Completion {
        self.complete(Err(error))
    }

    pub(super) fn complete(self, result: Result<usize>) -> Completion {
        self.into_completion(result).1
    }

    /// The handle of its file, which is to be dropped before the completion is reported, and the
    /// completion.
    #[inline]
    pub(super) fn into_completion(self, result: Result<usize>) -> (Arc<File>, Completion) {
        let (buffer, buffers) = self.kind.into_memory();
        (self.file, Completion { user_data: self.user_data, result, buffer, buffers })
    }

    /// ECANCELED.
    pub(super) fn cancelled(self) -> Completion {
        self.refused(std::io::Error::from_raw_os_error(libc::ECANCELED))
    }

    /// Completes it with an error of the system from before its start.
    pub(super) fn refused(self, error: std::io::Error) -> Completion {
        let (op, offset, len) = match &self.kind {
            Kind::Read { buffer, offset } => (Op::Read, *offset, buffer.len() as u64),
            Kind::Write { buffer, offset } => (Op::Write, *offset, buffer.len() as u64),
            Kind::ReadList { list, offset } => (Op::Read, *offset, list.total()),
            Kind::WriteList { list, offset } => (Op::Write, *offset, list.total()),
            Kind::Sync { .. } => (Op::Sync, 0, 0),
        };
        self.fail(Error::io(op, offset, len, error))
    }
}

impl Kind {
    /// The memory that the completion returns.
    pub(super) fn into_memory(self) -> (Vec<u8>, Vec<Buffer>) {
        match self {
            Kind::Read { buffer, .. } | Kind::Write { buffer, .. } => (buffer, Vec::new()),
            Kind::ReadList { list, .. } | Kind::WriteList { list, .. } => {
                (Vec::new(), list.into_buffers())
            }
            Kind::Sync { .. } => (Vec::new(), Vec::new()),
        }
    }

    /// Converts the memory of a read that may hit into a list, which owns its buffers, and otherwise the owner of
    /// the memory, which must outlive the list.
    pub(super) fn into_list(self) -> (RawList<'static>, Vec<u8>) {
        match self {
            Kind::Read { mut buffer, .. } => {
                let all =
                    libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
                // SAFETY: the buffer's own memory, which is returned with the list and not used elsewhere.
                (unsafe { RawList::borrowed(&[all], None) }, buffer)
            }
            Kind::ReadList { list, .. } => (list, Vec::new()),
            _ => unreachable!("a read"),
        }
    }

    /// Whether it is a read that may hit.
    pub(super) fn is_read(&self) -> bool {
        matches!(self, Kind::Read { .. } | Kind::ReadList { .. })
    }

    /// Runs `step` with the memory and the offset of a read that may hit; the request owns the memory
    /// during that time.
    pub(super) fn with_read<R>(&mut self, step: impl FnOnce(SegmentIter<'_>, u64) -> R) -> R {
        match self {
            Kind::Read { buffer, offset } => {
                // SAFETY: the buffer is borrowed until the step has returned, and the step can't keep the
                // segment.
                let dst = unsafe { [Segment::new(buffer.as_mut_ptr(), buffer.len())] };
                step((&dst).into(), *offset)
            }
            Kind::ReadList { list, offset } => step(list.iter(), *offset),
            _ => unreachable!("a read"),
        }
    }
}

/// The outcome of a [`Request`].
///
/// # Examples
///
/// ```
/// # use std::sync::Arc;
/// # use millpond::queue::Request;
/// # use millpond::{Engine, OpenOptions};
/// # let engine = Engine::builder().cache_bytes(1 << 20).build()?;
/// # let path = tempfile::NamedTempFile::new().unwrap();
/// # let file = Arc::new(engine.open(&path, &OpenOptions::new().read(true).write(true))?);
/// # let queue = engine.queue(8)?;
/// queue.submit(Request::read(&file, vec![0; 512], 0).user_data(7))?;
/// let done = queue.wait(1, 8, None)?.remove(0);
/// match done.result() {
///     Ok(moved) => println!("request {}: {moved} bytes", done.user_data()),
///     Err(error) => println!("request {}: {error}", done.user_data()),
/// }
/// let buffer: Vec<u8> = done.into_buffer(); // to be used again
/// queue.submit(Request::write_buffers(&file, engine.alloc_buffers(2, 512)?, 0))?;
/// let buffers = queue.wait(1, 8, None)?.remove(0).into_buffers();
/// assert_eq!((buffer.len(), buffers.len()), (512, 2));
/// queue.submit(Request::read(&file, buffer, 0))?;
/// let (moved, buffer) = queue.wait(1, 8, None)?.remove(0).into_parts();
/// assert_eq!((moved?, buffer.len()), (512, 512));
/// # Ok::<(), millpond::Error>(())
/// ```
#[derive(Debug)]
pub struct Completion {
    pub(super) user_data: u64,
    pub(super) result: Result<usize>,
    pub(super) buffer: Vec<u8>,
    pub(super) buffers: Vec<Buffer>,
}

impl Completion {
    /// The number that the request was given.
    #[must_use]
    pub fn user_data(&self) -> u64 {
        self.user_data
    }

    /// The result of the operation.
    ///
    /// # Errors
    ///
    /// Those of the operation; [`Error::Io`] with ECANCELED if it was cancelled.
    pub fn result(&self) -> std::result::Result<usize, &Error> {
        self.result.as_ref().map(|&moved| moved)
    }

    /// The request's buffer; empty for a sync, and for requests of [`Buffer`]s.
    #[must_use]
    pub fn into_buffer(self) -> Vec<u8> {
        self.buffer
    }

    /// The request's buffers, if it was made of [`Buffer`]s.
    #[must_use]
    pub fn into_buffers(self) -> Vec<Buffer> {
        self.buffers
    }

    /// Result and buffer.
    pub fn into_parts(self) -> (Result<usize>, Vec<u8>) {
        (self.result, self.buffer)
    }
}
