//! Blobs: bytes that their owner supplies, cached as a file's are, without a file below.
//!
//! ```text
//!   Blob::claim:  EMPTY -> FILLING, contiguous pages as one Fill      (one filler of a page, page.W9)
//!   Fill::bring:  the caller's bytes into the frames, READY, wake
//!   Fill::read_direct, then Fill::bring_read:  the same of bytes of a file, read in place
//!   dropped:      EMPTY again, wake
//! ```
//!
//! - **BO1** A blob is not written to, truncated or extended: no page of it is ever HIDDEN or DIRTY, and
//!   its size is fixed. So its fills need no guard, whose purpose is to exclude writers (page.W3).
//! - **BO2** A page is FILLING as long as its [`Fill`] exists, which may be for as long as a remote server
//!   takes. The engine never waits for that: only an [`Arrival`] does, whose owner knows.
//! - **BO3** A `Fill` keeps the file, so the table is not freed while a page is FILLING.

use std::future::Future;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use crate::api::async_file::AsyncFile;
use crate::api::background_read;
use crate::api::view::Detached;
use crate::cache::table::page::PageState;
use crate::cache::table::wait_queue::{WaitEntry, wait_table};
use crate::copy;
use crate::error::{Error, Op, Result};
use crate::inode::leaves::Leaves;
use crate::inode::{CachedFile, Shared};
use crate::io::backend::nowhere::Nowhere;
use crate::io::segment::Segment;
use crate::io::segment_list::RawList;
use crate::options::OpenOptions;
use crate::process_local::ProcessLocal;
use crate::read::hit::{HIT_PAGES_MAX, HitPath, TRIES_MAX};
use crate::read::run::{Claims, Next, Run};
use crate::workers::JobOutcome;

/// Immutable bytes that the caller has elsewhere, of which the engine caches pages: an object of a store,
/// or many, each at its own offset.
///
/// The engine can't fetch them. A read of cached bytes is a hit like a file's: no lock, no shared write.
/// For other bytes, [`Blob::claim`] reserves pages that no other caller is filling; the caller fetches them
/// and supplies them with [`Fill::bring`].
///
/// Pages are evicted as those of files are, and count against the same limit. All methods take `&self`; any
/// number of threads may use one blob. None blocks for I/O. In a child of fork nothing is cached, and
/// nothing can be.
///
/// # Examples
///
/// ```
/// # use millpond::Engine;
/// let engine = Engine::builder().cache_bytes(1 << 20).build()?;
/// let far = vec![7; 10_000];
/// let blob = engine.blob(10_000, 4096)?;
/// let mut bytes = Vec::new();
/// assert!(!blob.try_read(&mut bytes, 5000..5010), "no caller has supplied it");
/// for fill in blob.claim(5000..5010).fills {
///     let range = fill.range();
///     fill.bring(&far[range.start as usize..range.end as usize]);
/// }
/// assert!(blob.try_read(&mut bytes, 5000..5010));
/// assert_eq!(bytes, [7; 10]);
/// # Ok::<(), millpond::Error>(())
/// ```
///
/// Pages that arrive in parts, and borrowed bytes:
///
/// ```
/// # use millpond::blob::{BlobView, Claim, Fill};
/// # use millpond::Engine;
/// # let engine = Engine::builder().cache_bytes(1 << 20).build()?;
/// # let far = vec![7; 10_000];
/// let blob = engine.blob(far.len() as u64, 4096)?;
/// assert_eq!((blob.len(), blob.page_bytes()), (10_000, 4096));
/// let mut claim: Claim = blob.claim(0..10_000);
/// assert!(claim.is_complete && blob.claim(0..10_000).fills.is_empty(), "each page is given out once");
/// let mut all: Fill = claim.fills.remove(0);
/// // The first page has arrived, the rest has not; the last one ends with the blob.
/// all.split_front(1).bring(&far[..4096]);
/// assert_eq!(all.range(), 4096..10_000);
/// all.bring_last(&far[4096..]);
/// let view: BlobView = blob.try_view(9000..10_000).expect("it is cached");
/// assert_eq!(view.as_ref(), &far[9000..]);
/// drop(view);
/// blob.forget(0..10_000);
/// assert!(blob.try_view(9000..10_000).is_none());
/// # Ok::<(), millpond::Error>(())
/// ```
pub struct Blob {
    cached: ProcessLocal<Arc<CachedFile>>,
}

impl Blob {
    /// See [`Engine::blob`](crate::Engine::blob).
    pub(crate) fn new(shared: &Arc<Shared>, len: u64, page_bytes: u32) -> Result<Blob> {
        let options = OpenOptions::new().read(true).page_bytes(page_bytes);
        options.check()?;
        if len > i64::MAX as u64 {
            let what = format!("a blob of {len} bytes: at most {} are possible", i64::MAX);
            return Err(Error::InvalidInput { op: Op::Open, what });
        }
        if shared.cache.frames.are_the_parents() {
            return Err(Error::Forked { op: Op::Open });
        }
        let cached = CachedFile::on(shared, Arc::new(Nowhere { len }), &options)?;
        Ok(Blob { cached: ProcessLocal::new(cached) })
    }

    #[cfg(feature = "internals")]
    pub(crate) fn cached(&self) -> &CachedFile {
        &self.cached
    }

    /// Its length in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "as for files, whose length it is")]
    pub fn len(&self) -> u64 {
        self.cached.core().size.get()
    }

    /// The size of its pages, in bytes.
    #[must_use]
    pub fn page_bytes(&self) -> u32 {
        self.cached.core().page_bytes() as u32
    }

    /// Whether this is a child of the process that created it; a child inherits nothing of its cache.
    fn is_the_parents(&self) -> bool {
        self.cached.cache().frames.are_the_parents()
    }

    /// Appends the bytes of a range to `dst` if all of them are cached; otherwise leaves it unchanged. The
    /// part beyond the end is ignored. No lock, no shared write; a longer range is read 64 pages at a time.
    pub fn try_read(&self, dst: &mut Vec<u8>, range: Range<u64>) -> bool {
        if self.is_the_parents() {
            return false;
        }
        let (was, end) = (dst.len(), range.end.min(self.len()));
        let mut offset = range.start.min(end);
        let capacity = dst.capacity();
        let slot = self.cached.cache().counters.local();
        let most = (HIT_PAGES_MAX as u64 - 1) * u64::from(self.page_bytes());
        while offset < end {
            let part = (end - offset).min(most) as usize;
            // Reserves room for all once the first part has been a hit.
            let room = if dst.len() == was { part } else { (end - offset) as usize };
            if dst.try_reserve(room).is_err() {
                dst.truncate(was);
                dst.shrink_to(capacity);
                return false;
            }
            let path = HitPath::new(&self.cached, slot, TRIES_MAX);
            // SAFETY: room for the part was reserved behind the content of `dst`.
            let memory = unsafe { dst.as_mut_ptr().add(dst.len()) };
            // SAFETY: as above.
            if unsafe { path.try_read(memory, part, offset) } != Some(part) {
                dst.truncate(was);
                dst.shrink_to(capacity);
                return false;
            }
            // SAFETY: the hit wrote that many bytes there.
            unsafe { dst.set_len(dst.len() + part) };
            offset += part as u64;
        }
        true
    }

    /// Copies the bytes from `start` on to `dst` if all of them are cached. Otherwise, or if the blob ends before, the
    /// content of `dst` is not specified. As [`Blob::try_read`].
    pub fn try_read_into(&self, dst: &mut [MaybeUninit<u8>], start: u64) -> bool {
        let is_inside = start.checked_add(dst.len() as u64).is_some_and(|end| end <= self.len());
        if self.is_the_parents() || !is_inside {
            return false;
        }
        let slot = self.cached.cache().counters.local();
        let most = (HIT_PAGES_MAX - 1) * self.page_bytes() as usize;
        let mut offset = start;
        for part in dst.chunks_mut(most) {
            let path = HitPath::new(&self.cached, slot, TRIES_MAX);
            // SAFETY: the slice is valid for writes.
            let read = unsafe { path.try_read(part.as_mut_ptr().cast(), part.len(), offset) };
            if read != Some(part.len()) {
                return false;
            }
            offset += part.len() as u64;
        }
        true
    }

    /// Borrows cached bytes of one page, from the start of the range to its end, or that of the page or
    /// blob, whichever is first; `None` if they are not cached, or views pin half of the cache already.
    #[must_use]
    pub fn try_view(&self, range: Range<u64>) -> Option<BlobView> {
        if self.is_the_parents() {
            return None;
        }
        let len = usize::try_from(range.end.saturating_sub(range.start)).ok()?;
        let view = self.cached.try_view(range.start, len).ok()?;
        Some(BlobView { view: view.detach(Arc::clone(&self.cached)) })
    }

    /// Reserves the pages of a range that are not cached and that no other caller is filling.
    #[must_use]
    pub fn claim(&self, range: Range<u64>) -> Claim {
        let file = &self.cached;
        let end = range.end.min(self.len());
        let mut claim = Claim { fills: Vec::new(), is_complete: !self.is_the_parents() };
        if range.start >= end || !claim.is_complete {
            return claim;
        }
        let pages = file.page_of(range.start)..file.page_of(end - 1) + 1;
        let mut claims = Claims::new(file, pages, self.len());
        loop {
            match claims.next_run(&mut || true) {
                Next::Run(run) => {
                    file.cache().counters.local().missed(run.frames.len() as u64);
                    claim.fills.push(Fill { cached: self.cached.clone(), run: Some(run), read: 0 });
                }
                Next::NoFrame => {
                    claim.is_complete = false;
                    return claim;
                }
                Next::End | Next::NoSlot => return claim,
            }
        }
    }

    /// Waits until no page of a range is being filled by another caller. Use it only if the other callers
    /// make progress without this one: a page of a [`Fill`] whose future is not polled stays pending as
    /// long as that exists.
    ///
    /// # Examples
    ///
    /// ```
    /// # use std::{future::Future, pin::pin, task::{Context, Waker}};
    /// # use millpond::Engine;
    /// # let engine = Engine::builder().cache_bytes(1 << 20).build()?;
    /// let blob = engine.blob(4096, 4096)?;
    /// let fill = blob.claim(0..4096).fills.remove(0);
    /// let mut arrival = pin!(blob.arrival(0..4096));
    /// let mut cx = Context::from_waker(Waker::noop());
    /// assert!(arrival.as_mut().poll(&mut cx).is_pending());
    /// fill.bring(&[7; 4096]);
    /// assert!(arrival.poll(&mut cx).is_ready());
    /// # Ok::<(), millpond::Error>(())
    /// ```
    #[must_use]
    pub fn arrival(&self, range: Range<u64>) -> Arrival<'_> {
        Arrival { blob: self, range, parked: None }
    }

    /// Drops the cached pages of a range, except those that are being filled or borrowed.
    pub fn forget(&self, range: Range<u64>) {
        let (file, end) = (&self.cached, range.end.min(self.len()));
        if range.start < end {
            let (first, last) = (file.page_of(range.start), file.page_of(end - 1));
            file.cache().evict_range(file.core(), first, last);
        }
    }
}

impl std::fmt::Debug for Blob {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Blob").field("len", &self.len()).finish_non_exhaustive()
    }
}

/// The result of [`Blob::claim`].
#[derive(Debug)]
#[non_exhaustive]
pub struct Claim {
    /// Pages that the caller is to supply.
    pub fills: Vec<Fill>,
    /// Whether `fills` has all pages that no other caller is filling. If not, the cache has no room for the rest of
    /// them: they can't be cached now.
    pub is_complete: bool,
}

/// Contiguous reserved pages of a blob. Dropped, they can be reserved again.
///
/// # Examples
///
/// Read directly from a file into the cache:
///
/// ```
/// # use std::{future::Future, pin::pin, task::{Context, Poll, Waker}};
/// # use millpond::{AsyncFile, Engine, OpenOptions};
/// # fn block_on<F: Future>(future: F) -> F::Output {
/// #     let mut future = pin!(future);
/// #     loop {
/// #         if let Poll::Ready(out) = future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
/// #             return out;
/// #         }
/// #     }
/// # }
/// # let engine = Engine::builder().cache_bytes(1 << 20).build()?;
/// # let dir = tempfile::tempdir_in(".").unwrap();
/// # let path = dir.path().join("tier");
/// # std::fs::write(&path, vec![7; 8192]).unwrap();
/// # let Ok(tier) = engine.open(&path, &OpenOptions::new().read(true).direct(true)) else {
/// #     return Ok(()); // no direct I/O here
/// # };
/// // What is far away is in a file, too, 4096 bytes into it.
/// let tier = AsyncFile::from(tier);
/// let blob = engine.blob(4096, 4096)?;
/// let fill = blob.claim(0..4096).fills.remove(0);
/// # block_on(async {
/// let (read, fill) = fill.read_direct(&tier, 4096).await;
/// assert_eq!(read?, 4096);
/// if fill.pages_read().all(|page| page == [7; 4096]) {
///     fill.bring_read(); // else it is dropped, and nothing is cached
/// }
/// # Ok::<(), millpond::Error>(())
/// # })?;
/// let mut bytes = Vec::new();
/// assert!(blob.try_read(&mut bytes, 0..3));
/// assert_eq!(bytes, [7; 3]);
/// # Ok::<(), millpond::Error>(())
/// ```
///
/// Supplied in parts, as they arrive:
///
/// ```
/// # use millpond::Engine;
/// # let engine = Engine::builder().cache_bytes(1 << 20).build()?;
/// let blob = engine.blob(10_000, 4096)?;
/// let mut fill = blob.claim(0..10_000).fills.remove(0);
/// let first = fill.split_front(1);
/// assert_eq!((first.range(), fill.range()), (0..4096, 4096..10_000));
/// first.bring(&[7; 4096]); // it came before the rest
/// fill.bring_last(&[8; 5904]); // the last page is not whole, and no more will come
/// # Ok::<(), millpond::Error>(())
/// ```
pub struct Fill {
    cached: ProcessLocal<Arc<CachedFile>>,
    /// `None`: finished.
    run: Option<Run>,
    /// The number of bytes that were read directly.
    read: usize,
}

impl Fill {
    fn run(&self) -> &Run {
        self.run.as_ref().expect("taken only as `self` goes")
    }

    /// The bytes to supply: whole pages, or to the end of the blob.
    #[must_use]
    pub fn range(&self) -> Range<u64> {
        let (run, page_bytes) = (self.run(), self.cached.core().page_bytes());
        let start = self.cached.start_of(run.first).min(run.size);
        start..(start + (run.frames.len() * page_bytes) as u64).min(run.size)
    }

    /// Splits off the first `pages` pages; all, if there are no more.
    #[must_use]
    pub fn split_front(&mut self, pages: usize) -> Fill {
        let run = self.run.as_mut().expect("taken only as `self` goes");
        let at = pages.min(run.frames.len());
        let frames = run.frames.drain(..at).collect();
        let front = Run { first: run.first, frames, ..*run };
        run.first += at as u64;
        let bytes = at * self.cached.core().page_bytes();
        let read = self.read.min(bytes);
        self.read -= read;
        Fill { cached: self.cached.clone(), run: Some(front), read }
    }

    /// Supplies the bytes, from the first on, which are cached afterwards. Pages that they don't cover
    /// wholly are not cached.
    pub fn bring(mut self, bytes: &[u8]) {
        let valid = self.copy(bytes);
        self.end(valid);
    }

    /// The same if the bytes end within the last page, and the rest of it will not be requested: that reads
    /// as zeros.
    pub fn bring_last(mut self, bytes: &[u8]) {
        let valid = self.copy(bytes);
        let page_bytes = self.cached.core().page_bytes();
        let rest = valid.next_multiple_of(page_bytes) - valid;
        if let Some(frame) = self.run().frames.get(valid / page_bytes) {
            // SAFETY: the rest of a frame of this fill.
            unsafe {
                let end = self.cached.cache().frames.bytes(*frame).add(valid % page_bytes);
                copy::zero(end, rest);
            }
        }
        self.end(valid + rest);
    }

    /// Reads from a file that was opened [`direct`](crate::OpenOptions::direct), at `offset`, as many bytes
    /// as the pages have, straight into the cache's memory. The pages are returned with the result, and are
    /// not readable yet: the caller checks them ([`Fill::pages_read`]), and publishes them
    /// ([`Fill::bring_read`]) or drops them.
    ///
    /// Dropping the future does not stop the read; the pages are released at its end.
    ///
    /// # Errors
    ///
    /// As for [`File::read_at`](crate::File::read_at) of a direct file; [`Error::InvalidInput`]: it is not
    /// direct.
    pub async fn read_direct(self, file: &AsyncFile, offset: u64) -> (Result<usize>, Fill) {
        let outcome = match self.start_direct(file, offset) {
            Ok(outcome) => outcome,
            Err((error, fill)) => return (Err(error), fill),
        };
        let (moved, mut fill) = std::future::poll_fn(|cx| outcome.poll(cx.waker())).await;
        fill.read = *moved.as_ref().unwrap_or(&0);
        (moved, fill)
    }

    #[expect(clippy::type_complexity, reason = "what the future waits for, or all that it returns")]
    fn start_direct(
        mut self,
        file: &AsyncFile,
        offset: u64,
    ) -> std::result::Result<JobOutcome<(Result<usize>, Fill)>, (Error, Fill)> {
        let segments = self.run().memory(&self.cached);
        let len = segments.iter().map(|segment| segment.len() as u64).sum();
        if self.cached.cache().frames.are_the_parents() {
            return Err((Error::Forked { op: Op::Read }, self));
        }
        let handle = match file.for_direct(offset, len) {
            Ok(handle) => handle,
            Err(error) => return Err((error, self)),
        };
        self.read = 0;
        let iovec =
            |one: &Segment<'_>| libc::iovec { iov_base: one.base().cast(), iov_len: one.len() };
        let memory: Vec<libc::iovec> = segments.iter().map(iovec).collect();
        // SAFETY: frames of FILLING pages, which the closure below owns, so they are released after the read (BO2,
        // BO3).
        let list = unsafe { RawList::borrowed(&memory, None) };
        let (outcome, teller) = JobOutcome::new();
        background_read::start_read(handle, list, offset, None, |moved, _| {
            teller.complete_job((moved, self))
        });
        Ok(outcome)
    }

    /// The pages that [`Fill::read_direct`] has read wholly, in turn.
    pub fn pages_read(&self) -> impl Iterator<Item = &[u8]> {
        let page_bytes = self.cached.core().page_bytes();
        let is_the_parents = self.cached.cache().frames.are_the_parents();
        let whole = if is_the_parents { 0 } else { self.read / page_bytes };
        self.run().frames[..whole].iter().map(move |&frame| {
            // SAFETY: a frame of a page that this fill has in state FILLING: it is not written to.
            unsafe {
                std::slice::from_raw_parts(self.cached.cache().frames.bytes(frame), page_bytes)
            }
        })
    }

    /// Publishes the pages that [`Fill::read_direct`] has read wholly: they are cached afterwards. Other
    /// pages are not cached.
    pub fn bring_read(mut self) {
        self.end(self.read);
    }

    /// Copies as many bytes as there is room for; returns the number.
    fn copy(&self, bytes: &[u8]) -> usize {
        if self.cached.cache().frames.are_the_parents() {
            return 0;
        }
        let page_bytes = self.cached.core().page_bytes();
        let frames = &self.run().frames;
        for (page, &frame) in bytes.chunks(page_bytes).zip(frames) {
            // SAFETY: a frame of this fill, without references; late readers of its previous content detect
            // the change (page.W2). The caller's bytes are not memory that may fault.
            let _ = unsafe {
                copy::copy(self.cached.cache().frames.bytes(frame), page.as_ptr(), page.len())
            };
        }
        bytes.len().min(frames.len() * page_bytes)
    }

    fn end(&mut self, valid: usize) {
        // In a child of fork the table does not exist.
        if let Some(run) = self.run.take()
            && !self.cached.cache().frames.are_the_parents()
        {
            let mut leaves = Leaves::new(&self.cached);
            let _ = run.finish(&self.cached, &mut leaves, valid as u64, &mut |_| {});
        }
    }
}

impl Drop for Fill {
    fn drop(&mut self) {
        self.end(0);
    }
}

impl std::fmt::Debug for Fill {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fill").field("range", &self.range()).finish_non_exhaustive()
    }
}

/// Borrowed bytes of one cached page of a [`Blob`]: the page stays until this is dropped.
pub struct BlobView {
    view: Detached,
}

impl AsRef<[u8]> for BlobView {
    fn as_ref(&self) -> &[u8] {
        self.view.bytes()
    }
}

impl std::fmt::Debug for BlobView {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BlobView").field("len", &self.as_ref().len()).finish_non_exhaustive()
    }
}

/// The future of [`Blob::arrival`].
#[derive(Debug)]
pub struct Arrival<'b> {
    blob: &'b Blob,
    range: Range<u64>,
    parked: Option<WaitEntry>,
}

impl Arrival<'_> {
    fn leave(&mut self) {
        if let Some(parked) = self.parked.take()
            && !self.blob.is_the_parents()
        {
            wait_table().deregister(&parked);
        }
    }
}

impl Future for Arrival<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        self.leave();
        let blob = self.blob;
        let (file, end) = (&blob.cached, self.range.end.min(blob.len()));
        if self.range.start >= end {
            return Poll::Ready(());
        }
        let mut parked = None;
        let (first, last) = (file.page_of(self.range.start), file.page_of(end - 1));
        file.core().for_each_page(&file.cache().frames, first, last, &mut |_, _, word| {
            if parked.is_none() && word.load().state() == PageState::Filling {
                parked = wait_table().register(word, cx.waker());
            }
        });
        if parked.is_some() {
            self.parked = parked;
            return Poll::Pending;
        }
        Poll::Ready(())
    }
}

impl Drop for Arrival<'_> {
    fn drop(&mut self) {
        self.leave();
    }
}
