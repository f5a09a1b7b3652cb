//! In-memory index of the pages in the tier's file.
//!
//! A hash table of page numbers with open addressing and linear probing. A removal moves later entries back, so a search
//! ends at the first free bucket. All memory is allocated at creation.
//!
//! - **X1** A result is a hint: the reader verifies the page's checksum (layout.L1). So two pages with the same hash cost
//!   a miss, and the writer may overwrite a page while it is being read.

use std::io;
use std::sync::Mutex;

use crate::disk::layout::{Entry, Layout, PageId};
use crate::lists::try_block;

const FREE: u32 = u32::MAX;
/// Buckets per two pages: at most two thirds of the buckets are in use.
const BUCKETS_PER_TWO_PAGES: usize = 3;

#[derive(Clone, Copy, Debug, Default)]
struct Page {
    hash: u64,
    checksum: u64,
    location: u32,
    is_present: bool,
    /// Read since it was written.
    is_used: bool,
}

/// Where a page is in the file, and its checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PageLocation {
    pub(crate) page_number: u32,
    pub(crate) checksum: u64,
}

#[derive(Debug)]
struct Table {
    buckets: Box<[u32]>,
    pages: Box<[Page]>,
    /// Number of stored pages by hash of the object name.
    locations: Box<[u32]>,
    count: usize,
}

#[derive(Debug)]
pub(crate) struct Index {
    table: Mutex<Table>,
    slots: u32,
}

fn buckets(page_count: usize) -> usize {
    page_count * BUCKETS_PER_TWO_PAGES / 2 + 1
}

fn location_counts(page_count: usize) -> usize {
    page_count / 4 + 1
}

impl Index {
    /// Memory of an index.
    pub(crate) fn bytes(layout: &Layout) -> u64 {
        let page_count = layout.page_count();
        let numbers = (buckets(page_count) + location_counts(page_count)) * size_of::<u32>();
        (numbers + page_count * size_of::<Page>()) as u64
    }

    pub(crate) fn new(layout: &Layout) -> io::Result<Index> {
        let page_count = layout.page_count();
        let table = Table {
            buckets: try_block(FREE, buckets(page_count))?,
            pages: try_block(Page::default(), page_count)?,
            locations: try_block(0, location_counts(page_count))?,
            count: 0,
        };
        Ok(Index { table: Mutex::new(table), slots: layout.slots })
    }

    fn table(&self) -> std::sync::MutexGuard<'_, Table> {
        self.table.lock().expect("no panic under the lock")
    }

    pub(crate) fn has(&self, id: &PageId) -> bool {
        let table = self.table();
        table.bucket_of(id.hash()).is_ok()
    }

    /// Finds a page that the caller is about to read, and marks it used.
    pub(crate) fn use_page(&self, id: &PageId) -> Option<PageLocation> {
        let mut table = self.table();
        let bucket = table.bucket_of(id.hash()).ok()?;
        let page_number = table.buckets[bucket];
        let page = &mut table.pages[page_number as usize];
        page.is_used = true;
        Some(PageLocation { page_number, checksum: page.checksum })
    }

    /// Number of stored pages of an object name, and of other names with the same hash.
    pub(crate) fn pages_of_location(&self, location: u32) -> u32 {
        let table = self.table();
        table.locations[location as usize % table.locations.len()]
    }

    /// Inserts the pages that were written to a chunk, from its first slot on.
    pub(crate) fn insert(&self, chunk: u32, entries: &[Entry]) {
        let mut table = self.table();
        for (page_number, entry) in (chunk * self.slots..).zip(entries) {
            let hash = entry.id.hash();
            if let Ok(bucket) = table.bucket_of(hash) {
                // The page was written before, or another page has the same hash (X1).
                table.remove_bucket(bucket);
            }
            table.remove_page_number(page_number);
            table.insert(page_number, hash, entry);
        }
    }

    /// Removes all pages of a chunk, before it is overwritten.
    pub(crate) fn remove_chunk(&self, chunk: u32) {
        let mut table = self.table();
        (chunk * self.slots..(chunk + 1) * self.slots)
            .for_each(|page_number| table.remove_page_number(page_number));
    }

    /// Removes a page with wrong bytes. Returns whether the index still had it at that location.
    pub(crate) fn remove(&self, id: &PageId, found: PageLocation) -> bool {
        let mut table = self.table();
        let Ok(bucket) = table.bucket_of(id.hash()) else { return false };
        let page_number = table.buckets[bucket];
        let is_it =
            (PageLocation { page_number, checksum: table.pages[page_number as usize].checksum })
                == found;
        if is_it {
            table.remove_bucket(bucket);
        }
        is_it
    }

    /// The slots of a chunk whose pages were read since they were written.
    pub(crate) fn used(&self, chunk: u32) -> Vec<usize> {
        let (table, first) = (self.table(), (chunk * self.slots) as usize);
        let pages = &table.pages[first..first + self.slots as usize];
        let used = pages.iter().enumerate().filter(|(_, page)| page.is_present && page.is_used);
        used.map(|(slot, _)| slot).collect()
    }

    pub(crate) fn count(&self) -> usize {
        self.table().count
    }
}

impl Table {
    fn home(&self, hash: u64) -> usize {
        ((u128::from(hash) * self.buckets.len() as u128) >> 64) as usize
    }

    fn next(&self, bucket: usize) -> usize {
        if bucket + 1 == self.buckets.len() { 0 } else { bucket + 1 }
    }

    /// The bucket of a hash, or the free one where it would be inserted.
    fn bucket_of(&self, hash: u64) -> Result<usize, usize> {
        let mut bucket = self.home(hash);
        while self.buckets[bucket] != FREE {
            if self.pages[self.buckets[bucket] as usize].hash == hash {
                return Ok(bucket);
            }
            bucket = self.next(bucket);
        }
        Err(bucket)
    }

    fn insert(&mut self, page_number: u32, hash: u64, entry: &Entry) {
        let Err(bucket) = self.bucket_of(hash) else { return };
        let location = entry.id.object.location;
        self.buckets[bucket] = page_number;
        self.pages[page_number as usize] =
            Page { hash, checksum: entry.checksum, location, is_present: true, is_used: false };
        let at = location as usize % self.locations.len();
        self.locations[at] += 1;
        self.count += 1;
    }

    fn remove_page_number(&mut self, page_number: u32) {
        let page = self.pages[page_number as usize];
        if page.is_present
            && let Ok(bucket) = self.bucket_of(page.hash)
        {
            self.remove_bucket(bucket);
        }
    }

    fn remove_bucket(&mut self, mut free: usize) {
        let page = std::mem::take(&mut self.pages[self.buckets[free] as usize]);
        let at = page.location as usize % self.locations.len();
        self.locations[at] -= 1;
        self.count -= 1;
        // Later entries move back, unless that would place them before their home bucket.
        let mut bucket = self.next(free);
        while self.buckets[bucket] != FREE {
            let home = self.home(self.pages[self.buckets[bucket] as usize].hash);
            let len = self.buckets.len();
            let distance = |from: usize, to: usize| (to + len - from) % len;
            if distance(home, bucket) >= distance(free, bucket) {
                self.buckets[free] = self.buckets[bucket];
                free = bucket;
            }
            bucket = self.next(bucket);
        }
        self.buckets[free] = FREE;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::disk::layout::Object;

    fn entry(number: u64) -> Entry {
        let object = Object { id: u128::from(number / 3) << 70, location: number as u32 / 3 };
        Entry { id: PageId { object, page: number % 3 }, checksum: number }
    }

    /// Goal: each page is found at its last location until it is removed, after any sequence of written chunks,
    /// overwritten chunks and removed pages.
    /// Method: random operations, compared with a map.
    #[test]
    fn the_index_matches_a_map() {
        let layout = Layout::new(1 << 20, 4096).unwrap();
        let index = Index::new(&layout).unwrap();
        let slots = u64::from(layout.slots);
        let mut model: HashMap<u64, u32> = HashMap::new();
        let mut random = 1u64;
        let mut next = move |below: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 33) % below
        };
        for _ in 0..20_000 {
            match next(4) {
                0 => {
                    let number = next(600);
                    let found = index.use_page(&entry(number).id);
                    assert_eq!(found.map(|found| found.page_number), model.get(&number).copied());
                    let found = found.filter(|found| found.checksum == number);
                    if let Some(found) = found.filter(|_| next(2) == 0) {
                        assert!(index.remove(&entry(number).id, found));
                        assert!(!index.remove(&entry(number).id, found));
                        model.remove(&number);
                    }
                }
                _ => {
                    let chunk = next(layout.chunks.into()) as u32;
                    index.remove_chunk(chunk);
                    model.retain(|_, page_number| *page_number / layout.slots != chunk);
                    let first = next(600);
                    let numbers = first..first + next(slots + 1);
                    let entries: Vec<_> = numbers.clone().map(entry).collect();
                    index.insert(chunk, &entries);
                    model.extend(numbers.zip(chunk * layout.slots..));
                }
            }
            assert_eq!(index.count(), model.len());
        }
        for number in 0..700 {
            assert_eq!(index.has(&entry(number).id), model.contains_key(&number), "{number}");
        }
        for chunk in 0..layout.chunks {
            index.remove_chunk(chunk);
        }
        assert_eq!(index.count(), 0);
        assert!((0..300).all(|location| index.pages_of_location(location) == 0));
    }

    #[test]
    fn a_read_page_counts_as_used_until_it_is_rewritten() {
        let index = Index::new(&Layout::new(1 << 20, 4096).unwrap()).unwrap();
        let entries: Vec<_> = (0..8).map(entry).collect();
        index.insert(2, &entries);
        index.use_page(&entries[5].id).unwrap();
        assert_eq!((index.used(2), index.used(1)), (vec![5], vec![]));
        index.insert(1, &entries[5..6]);
        assert_eq!((index.used(2), index.used(1)), (vec![], vec![]));
        assert!(index.pages_of_location(1) >= 3 && index.has(&entries[5].id));
    }
}
