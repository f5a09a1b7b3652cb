//! The blocks that engines read, and their order: lists made before the measurement, the same for
//! all engines.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use super::data::Random;

/// The load of an engine: for each thread, the blocks that it reads repeatedly.
#[derive(Debug)]
pub struct Load {
    pub block_bytes: u32,
    /// Block numbers, one list per thread.
    pub blocks: Vec<Vec<u32>>,
    /// The time limit of the check before the measurement, if not all is checked.
    pub checked_max: Option<Duration>,
    /// Whether an engine goes on in the list where its last slice ended, so that its last blocks
    /// are not read again soon.
    pub goes_on: bool,
    slices: AtomicUsize,
}

impl Load {
    /// Blocks in a random list, which must not fill the processor's cache.
    const RANDOM_BLOCKS: usize = 1 << 16;

    fn new(block_bytes: u32, blocks: Vec<Vec<u32>>) -> Self {
        Self { block_bytes, blocks, checked_max: None, goes_on: false, slices: AtomicUsize::new(0) }
    }

    /// Each thread reads blocks of the whole file at random.
    pub fn random(file_bytes: u64, block_bytes: u32, threads: u32) -> Self {
        let blocks = (file_bytes / u64::from(block_bytes)) as u32;
        let list = |thread| {
            let mut random = Random::seeded(u64::from(thread) << 32);
            (0..Self::RANDOM_BLOCKS).map(|_| random.below(blocks)).collect()
        };
        Self::new(block_bytes, (0..threads).map(list).collect())
    }

    /// Each thread reads the whole file in order.
    pub fn sequential(file_bytes: u64, block_bytes: u32, threads: u32) -> Self {
        let blocks = (file_bytes / u64::from(block_bytes)) as u32;
        Self::new(block_bytes, (0..threads).map(|_| (0..blocks).collect()).collect())
    }

    /// Each thread reads its own part of the file in order.
    pub fn partitioned(file_bytes: u64, block_bytes: u32, threads: u32) -> Self {
        let share = (file_bytes / u64::from(block_bytes)) as u32 / threads;
        let part = |thread| (thread * share..(thread + 1) * share).collect();
        Self::new(block_bytes, (0..threads).map(part).collect())
    }

    /// Each thread reads its own part of the file at random, and no block again before all others
    /// of the part.
    pub fn shuffled(file_bytes: u64, block_bytes: u32, threads: u32) -> Self {
        let mut load = Self::partitioned(file_bytes, block_bytes, threads);
        for (thread, blocks) in load.blocks.iter_mut().enumerate() {
            let mut random = Random::seeded((thread as u64) << 32 | 1);
            for last in (1..blocks.len()).rev() {
                blocks.swap(last, random.below(last as u32 + 1) as usize);
            }
        }
        load.goes_on = true;
        load
    }

    /// The first `count` places of each thread, where it has as many.
    pub fn first(mut self, count: usize) -> Self {
        self.blocks.iter_mut().for_each(|blocks| blocks.truncate(count));
        self
    }

    /// For loads that must not be cached: only a sample is checked, for this time.
    pub fn checked_for(mut self, length: Duration) -> Self {
        self.checked_max = Some(length);
        self
    }

    /// Every block of the load once, in the order of the first thread that reads it.
    pub fn distinct_blocks(&self) -> impl Iterator<Item = u32> {
        let blocks = || self.blocks.iter().flatten().copied();
        let mut seen = vec![false; blocks().max().map_or(0, |last| last as usize + 1)];
        blocks().filter(move |block| !std::mem::replace(&mut seen[*block as usize], true))
    }

    pub fn threads(&self) -> u32 {
        self.blocks.len() as u32
    }

    /// The position in their lists where the threads start next. It changes from slice to slice, so
    /// that the last blocks of a slice are not the first ones of the next.
    pub fn next_start(&self) -> usize {
        // Relaxed: slices are started by one thread at a time.
        self.slices.fetch_add(1, Relaxed).wrapping_mul(7919)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loads_stay_in_the_file() {
        let random = Load::random(1 << 20, 4096, 2);
        assert_eq!(random.threads(), 2);
        assert_ne!(random.blocks[0], random.blocks[1]);
        assert!(random.blocks.iter().flatten().all(|block| *block < 256));
        let mut shuffled = Load::shuffled(1 << 20, 4096, 2).blocks;
        assert!(!shuffled[1].is_sorted());
        shuffled[1].sort_unstable();
        assert!(shuffled[1].iter().copied().eq(128..256));
        let parts = Load::partitioned(1 << 20, 4096, 2);
        assert_eq!((parts.blocks[0][0], parts.blocks[1][0]), (0, 128));
        assert_eq!(parts.blocks[1].last(), Some(&255));
        assert_eq!(Load::sequential(1 << 20, 512, 1).blocks[0].len(), 2048);
        assert_eq!(Load::sequential(1 << 20, 512, 2).distinct_blocks().count(), 2048);
    }
}
