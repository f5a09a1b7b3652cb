//! The disk tier: pages of objects in a file on a local disk.
//!
//! ```text
//!   bytes from the store -> enqueue_pages: copied into a chunk buffer
//!                           full buffer -> writer thread: removes the pages of the oldest chunk from the index,
//!                           overwrites the chunk by one direct write, inserts the new pages into the index
//!   miss in memory       -> index -> one direct read of adjacent pages into the cache's memory -> checksums
//!                           -> right: cached; wrong: a miss, and removed from the index
//! ```
//!
//! Files: `DIR/lock`, locked while a store uses the directory ([`directory_lock`]), and `DIR/pages`, a ring of chunks that are
//! overwritten in turn ([`layout`]). Nothing is synced, and no write order matters: a header and its pages are one
//! write, of which a kill, a power cut or a full disk may leave any part.
//!
//! - **T1** A page is used only if its checksum is right; object, version and page number go into the checksum
//!   (layout.L1). So a page that is torn, stale or overwritten during the read is a miss, and readers and the writer need
//!   no synchronization.
//! - **T2** After a restart, the valid headers (layout.L2) fill the index. The oldest chunk is the one after the chunk with
//!   the highest sequence number.
//! - **T3** The file never exceeds its limit, which sets the number of chunks. A lower limit than before truncates it.
//! - **T4** Chunks are overwritten in FIFO order. Pages that were read since they were written are written again, at most
//!   half of a chunk's pages. So pages in use stay.
//! - **T5** No caller waits for the writer: pages that arrive while all chunk buffers are in use are dropped.
//! - **T6** After a failed write, writing pauses, longer after each consecutive failure. If the disk is full, the ring
//!   continues at its first chunk, whose blocks are already allocated. A page whose read fails is a miss, and is removed
//!   from the index.
//! - **T7** Only objects with a strong ETag or a version are stored: others may change without a sign.
//! - **T8** No other user can have chosen the directory's files ([`owned`]).

pub(crate) mod directory_lock;
mod index;
mod layout;
mod open;
mod owned;
mod shared;
mod writer;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::thread::JoinHandle;

use futures_util::future::join_all;
use millpond::blob::Fill;
use object_store::ObjectMeta;

use crate::directory::is_unversioned;
use crate::disk::index::PageLocation;
pub(crate) use crate::disk::layout::Object;
use crate::disk::layout::PageId;
use crate::disk::shared::{DiskCounters, TierShared};
use crate::disk::writer::Writer;
use crate::stats::Stats;

/// Directory and size limit of a disk tier.
#[derive(Clone, Debug)]
pub(crate) struct DiskOptions {
    pub(crate) dir: PathBuf,
    pub(crate) bytes: u64,
}

#[derive(Debug)]
pub(crate) struct DiskTier {
    shared: Arc<TierShared>,
    writer: Arc<Writer>,
    thread: Option<JoinHandle<()>>,
    /// A child of fork has no thread to wait for.
    process: u32,
    /// Name of the store, which distinguishes objects of equal names.
    store: String,
}

impl DiskTier {
    /// Identity of an object version. `None`: its pages are not stored (T7).
    pub(crate) fn object(&self, meta: &ObjectMeta) -> Option<Object> {
        let tags = [meta.e_tag.as_deref(), meta.version.as_deref()];
        (!is_unversioned(meta))
            .then(|| Object::new(&self.store, meta.location.as_ref(), tags, meta.size))
    }

    /// Upper bound of the stored bytes of an object name, all versions together.
    pub(crate) fn bytes_of_location(&self, location: &str) -> u64 {
        let pages = self.shared.index.pages_of_location(Object::location(&self.store, location));
        u64::from(pages) * self.shared.layout.page_bytes
    }

    /// Whether the first of the pages is stored, and how many pages from it on are in the same state.
    pub(crate) fn leading_run(&self, object: &Object, pages: std::ops::Range<u64>) -> (bool, u64) {
        let has = |page| self.shared.index.has(&PageId { object: *object, page });
        let is_present = has(pages.start);
        let following = (pages.start + 1..pages.end).take_while(|&page| has(page) == is_present);
        (is_present, 1 + following.count() as u64)
    }

    /// Queues pages for writing. `bytes` starts at page `first`; its last page may be the partial last one of the object.
    pub(crate) fn enqueue_pages(&self, object: &Object, first: u64, bytes: &[u8]) {
        let page_bytes = self.shared.layout.page_bytes as usize;
        for (page, bytes) in (first..).zip(bytes.chunks(page_bytes)) {
            let id = PageId { object: *object, page };
            if !self.shared.index.has(&id) {
                self.writer.enqueue_page(&self.shared, id, bytes);
            }
        }
    }

    /// Reads claimed pages, the first of which is page `first` of the object, into the cache. Returns the ones that it
    /// could not read.
    pub(crate) async fn read(&self, object: &Object, first: u64, mut fill: Fill) -> Vec<Fill> {
        let end =
            first + (fill.range().end - fill.range().start).div_ceil(self.shared.layout.page_bytes);
        let mut page = first;
        let (mut reads, mut left) = (Vec::new(), Vec::new());
        while page < end {
            let run = self.next_adjacent_run(object, page..end);
            let part = fill.split_front(run.len().max(1));
            if run.is_empty() {
                left.push(part);
                page += 1;
            } else {
                let len = run.len() as u64;
                reads.push(self.read_run(*object, page, run, part));
                page += len;
            }
        }
        left.extend(join_all(reads).await.into_iter().flatten());
        left
    }

    /// The longest prefix of the pages that is contiguous in the file: one read.
    fn next_adjacent_run(&self, object: &Object, pages: std::ops::Range<u64>) -> Vec<PageLocation> {
        let mut run: Vec<PageLocation> = Vec::new();
        for page in pages {
            let Some(found) = self.shared.index.use_page(&PageId { object: *object, page }) else {
                break;
            };
            let follows = |last: &PageLocation| {
                found.page_number == last.page_number + 1
                    && !found.page_number.is_multiple_of(self.shared.layout.slots)
            };
            if !run.last().is_none_or(follows) {
                break;
            }
            run.push(found);
        }
        run
    }

    async fn read_run(
        &self,
        object: Object,
        first: u64,
        run: Vec<PageLocation>,
        fill: Fill,
    ) -> Vec<Fill> {
        let TierShared { layout, index, file, counts, .. } = &*self.shared;
        let (outcome, mut fill) =
            fill.read_direct(file, layout.page_offset(run[0].page_number)).await;
        if outcome.is_err() {
            DiskCounters::add(&counts.errors, 1);
        }
        let ids = || (first..).map(|page| PageId { object, page });
        let mut is_right: Vec<bool> = ids()
            .zip(&run)
            .zip(fill.pages_read())
            .map(|((id, found), bytes)| id.checksum(bytes) == found.checksum)
            .collect();
        is_right.resize(run.len(), false);
        let mut left = Vec::new();
        for ((id, found), is_right) in ids().zip(run).zip(is_right) {
            let page = fill.split_front(1);
            if is_right {
                page.bring_read();
                DiskCounters::add(&counts.pages_read, 1);
                continue;
            }
            // T6. If `remove` fails, the page was overwritten during the read, and is not damaged.
            if index.remove(&id, found) && outcome.is_ok() {
                DiskCounters::add(&counts.pages_damaged, 1);
            }
            left.push(page);
        }
        left
    }

    pub(crate) fn add_to(&self, stats: &mut Stats) {
        let TierShared { layout, index, counts, .. } = &*self.shared;
        // Relaxed: as for `Counts::add`.
        let get = |counter: &AtomicU64| counter.load(Relaxed);
        stats.disk_hits = get(&counts.pages_read);
        stats.bytes_from_disk = stats.disk_hits * layout.page_bytes;
        stats.disk_pages = index.count() as u64;
        stats.disk_bytes_written = get(&counts.bytes_written);
        stats.disk_pages_dropped = get(&counts.pages_dropped);
        stats.disk_pages_damaged = get(&counts.pages_damaged);
        stats.disk_errors = get(&counts.errors);
        stats.disk_is_off = counts.is_off.load(Relaxed);
    }
}

impl Drop for DiskTier {
    /// Waits until the queued pages are written.
    fn drop(&mut self) {
        self.writer.close();
        if let Some(thread) = self.thread.take()
            && self.process == std::process::id()
        {
            // A panic of the thread has already printed its message.
            let _ = thread.join();
        }
    }
}
