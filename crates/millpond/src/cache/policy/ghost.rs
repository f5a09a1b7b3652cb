//! The ghost: a table of pages that were evicted from the small queue recently.
//!
//! Part of the eviction policy (see `evict`). A fixed table of buckets with four entries, each a
//! fingerprint of file and page and the time (in evictions) of the eviction. It forgets entries
//! that are older than the number of pages that the main queue can hold, and the oldest entry of a
//! full bucket. A false match (probability about 2^-30) only puts a page into the wrong queue.

use std::io;

use crate::cache::policy::admission::hash;
use crate::memory::try_zeros;
use crate::units::PageIndex;

/// Half a line of the processor's caches.
const WAYS: usize = 4;

pub(crate) struct Ghost {
    /// Fingerprint in the high half, time in the low one; 0 is free.
    entries: Box<[u64]>,
    clock: u32,
    lifetime: u32,
}

impl Ghost {
    /// For a cache of `limit_bytes`, in pages of 4 KiB.
    pub(crate) fn new(limit_bytes: u64) -> io::Result<Ghost> {
        let pages = (limit_bytes / 4096).max(1) as usize;
        let entries = pages.next_power_of_two().max(WAYS);
        Ok(Ghost {
            entries: try_zeros(entries)?,
            clock: 1,
            lifetime: pages.min(u32::MAX as usize / 2) as u32,
        })
    }

    pub(crate) fn bytes(&self) -> u64 {
        size_of_val(&*self.entries) as u64
    }

    pub(crate) fn remember(&mut self, file: usize, page: PageIndex) {
        let (fingerprint, bucket) = self.place(file, page);
        self.clock = self.clock.wrapping_add(1).max(1);
        let clock = self.clock;
        let bucket = &mut self.entries[bucket..bucket + WAYS];
        let oldest = bucket
            .iter_mut()
            .max_by_key(
                |entry| if **entry == 0 { u32::MAX } else { clock.wrapping_sub(**entry as u32) },
            )
            .expect("a bucket has entries");
        *oldest = u64::from(fingerprint) << 32 | u64::from(clock);
    }

    /// Removes the page. Returns whether it was remembered.
    pub(crate) fn remove(&mut self, file: usize, page: PageIndex) -> bool {
        let (fingerprint, bucket) = self.place(file, page);
        let (clock, lifetime) = (self.clock, self.lifetime);
        let found = self.entries[bucket..bucket + WAYS].iter_mut().find(|entry| {
            (**entry >> 32) as u32 == fingerprint
                && **entry != 0
                && clock.wrapping_sub(**entry as u32) <= lifetime
        });
        match found {
            Some(entry) => {
                *entry = 0;
                true
            }
            None => false,
        }
    }

    fn place(&self, file: usize, page: PageIndex) -> (u32, usize) {
        let hash = hash(file, page);
        let buckets = self.entries.len() / WAYS;
        ((hash >> 32) as u32, (hash as usize & (buckets - 1)) * WAYS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remembers_once_and_not_forever() {
        let mut ghost = Ghost::new(64 * 4096).unwrap();
        ghost.remember(1, PageIndex(7));
        assert!(!ghost.remove(2, PageIndex(7)));
        assert!(ghost.remove(1, PageIndex(7)));
        assert!(!ghost.remove(1, PageIndex(7)));
        ghost.remember(1, PageIndex(7));
        for page in 100..100 + 65 {
            ghost.remember(1, PageIndex(page));
        }
        assert!(!ghost.remove(1, PageIndex(7)));
        assert!(ghost.remove(1, PageIndex(164)));
    }
}
