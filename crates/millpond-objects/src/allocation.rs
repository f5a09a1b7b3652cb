//! Allocates the pages of objects in blobs.
//!
//! Objects share a blob, and each takes whole pages of it: a page table per object would take as much memory as a small
//! object. Pages are allocated in order and never reused, so two versions never share a page. A full blob is freed when
//! the last entry that refers to it is removed.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use millpond::Engine;
use millpond::blob::Blob;

/// Reach of two levels of a page table, with pages of 4 KiB.
const SHARED_BYTES: u64 = 1 << 30;
/// Larger objects get a separate blob. Untuned.
const SHARING_BYTES_MAX: u64 = SHARED_BYTES / 16;

/// The pages of an object.
#[derive(Debug)]
pub(crate) struct Allocation {
    pub(crate) blob: Arc<Blob>,
    base: u64,
}

impl Allocation {
    /// Translates a range of the object to one of the blob.
    pub(crate) fn to_blob(&self, range: &Range<u64>) -> Range<u64> {
        self.base + range.start..self.base + range.end
    }

    /// Translates a range of the blob to one of the object.
    pub(crate) fn to_object(&self, range: &Range<u64>) -> Range<u64> {
        range.start - self.base..range.end - self.base
    }
}

/// Allocates ranges of blobs.
#[derive(Debug)]
pub(crate) struct BlobAllocator {
    engine: Engine,
    page_bytes: u32,
    /// The blob that is being filled, and its first free byte.
    current: Mutex<Option<(Arc<Blob>, u64)>>,
}

impl BlobAllocator {
    pub(crate) fn new(engine: Engine, page_bytes: u32) -> BlobAllocator {
        BlobAllocator { engine, page_bytes, current: Mutex::new(None) }
    }

    pub(crate) fn engine(&self) -> &Engine {
        &self.engine
    }

    pub(crate) fn page_bytes(&self) -> u64 {
        u64::from(self.page_bytes)
    }

    /// A range rounded out to whole pages.
    pub(crate) fn round_to_pages(&self, range: &Range<u64>) -> Range<u64> {
        let page_bytes = self.page_bytes();
        let end = range.end.checked_next_multiple_of(page_bytes).unwrap_or(u64::MAX);
        range.start - range.start % page_bytes..end
    }

    /// Allocates pages for an object of `bytes` bytes. `None` if there is no memory for the page table.
    pub(crate) fn allocate(&self, bytes: u64) -> Option<Allocation> {
        let bytes = bytes.checked_next_multiple_of(self.page_bytes())?;
        let blob = |len| self.engine.blob(len, self.page_bytes).ok().map(Arc::new);
        if bytes > SHARING_BYTES_MAX {
            return Some(Allocation { blob: blob(bytes)?, base: 0 });
        }
        let mut current = self.current.lock().expect("no panic under the lock");
        if let Some((blob, next)) = current.as_mut()
            && *next + bytes <= SHARED_BYTES
        {
            let base = *next;
            *next += bytes;
            return Some(Allocation { blob: Arc::clone(blob), base });
        }
        let blob = blob(SHARED_BYTES)?;
        *current = Some((Arc::clone(&blob), bytes));
        Some(Allocation { blob, base: 0 })
    }
}
