//! The second tier: pages of objects in a file on a local disk.
//!
//! ```text
//!   bytes from the store -> offer: copied into a draft, a chunk of pages in memory
//!                           full draft -> the writer's thread: pages of the oldest chunk out of the index,
//!                           its place overwritten by one direct write, the new pages into the index
//!   a miss in memory     -> index -> one direct read of pages in a row into the cache's memory -> checksums
//!                           -> right: cached; wrong: a miss, and out of the index
//! ```
//!
//! What is on the disk when: `DIR/lock`, held (flock) while a store uses the directory, and `DIR/pages`, which
//! [`layout`] describes: a ring of chunks that are overwritten in turn. Nothing is synced and nothing is in an
//! order that matters: a header and its pages are one write, of which a kill, a power cut or a full disk may
//! leave any part.
//!
//! - **T1** Bytes are believed for their checksum alone, which object, version and page go into
//!   (layout.L1): so a page that is torn, stale or overwritten meanwhile is a miss, and readers and the
//!   writer need not know of each other.
//! - **T2** After a restart, headers say what may be there: those that are whole (layout.L2) fill the
//!   index. The chunk after the one of the highest sequence is the oldest.
//! - **T3** The file is never longer than was allowed: it has so many chunks. Of a smaller limit than before
//!   it is cut.
//! - **T4** Oldest first (FIFO), but pages that were read since they were written are written once more,
//!   up to half a chunk of a chunk: so what is in use stays.
//! - **T5** Nobody waits for the writer: what is brought while all drafts are taken is not kept.
//! - **T6** Where a write fails, writing stops for a while, longer each time; a full disk has the ring go on
//!   at its beginning, which is there already. Where a read fails its page is a miss, and out of the index.
//! - **T7** Only objects of a version are kept: what has neither ETag nor version may have changed
//!   while nobody looked.
//! - **T8** No other user can have chosen the directory's files ([`owned`]).

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
use millpond::Fill;
use object_store::ObjectMeta;

use crate::directory::is_unversioned;
use crate::disk::index::PageLocation;
pub(crate) use crate::disk::layout::Object;
use crate::disk::layout::PageId;
use crate::disk::shared::{DiskCounters, TierShared};
use crate::disk::writer::Writer;
use crate::stats::Stats;

/// Where it is to be, and how large.
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
    /// Which objects of the same name are others.
    store: String,
}

impl DiskTier {
    /// What names an object's bytes; `None`: they are not kept (T7).
    pub(crate) fn object(&self, meta: &ObjectMeta) -> Option<Object> {
        let tags = [meta.e_tag.as_deref(), meta.version.as_deref()];
        (!is_unversioned(meta))
            .then(|| Object::new(&self.store, meta.location.as_ref(), tags, meta.size))
    }

    /// How many bytes there may be of objects of that name, of whatever version.
    pub(crate) fn bytes_of_location(&self, location: &str) -> u64 {
        let pages = self.shared.index.pages_of_location(Object::location(&self.store, location));
        u64::from(pages) * self.shared.layout.page_bytes
    }

    /// How many of the pages from `first` on are as the first: there, or not.
    pub(crate) fn leading_run(&self, object: &Object, pages: std::ops::Range<u64>) -> (bool, u64) {
        let has = |page| self.shared.index.has(&PageId { object: *object, page });
        let is_there = has(pages.start);
        let others = (pages.start + 1..pages.end).take_while(|&page| has(page) == is_there);
        (is_there, 1 + others.count() as u64)
    }

    /// Keeps the pages that `bytes` are, from page `first` on; the last may be the object's end.
    pub(crate) fn enqueue_pages(&self, object: &Object, first: u64, bytes: &[u8]) {
        let page_bytes = self.shared.layout.page_bytes as usize;
        for (page, bytes) in (first..).zip(bytes.chunks(page_bytes)) {
            let id = PageId { object: *object, page };
            if !self.shared.index.has(&id) {
                self.writer.enqueue_page(&self.shared, id, bytes);
            }
        }
    }

    /// Reads pages that were claimed, the first of which is page `first` of the object, into the cache;
    /// returns those that it could not.
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

    /// The first of the pages, and those that follow it in the file, too: one read.
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
            // T6; overwritten meanwhile it is no damage.
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
    /// What was brought is written before it returns.
    fn drop(&mut self) {
        self.writer.close();
        if let Some(thread) = self.thread.take()
            && self.process == std::process::id()
        {
            // It has said why on the way out.
            let _ = thread.join();
        }
    }
}
