//! foyer's cache in memory, in the process: pages of 16 KiB, by number.

use bytes::Bytes;
use foyer_memory::{Cache, CacheBuilder, S3FifoConfig};

use super::{OBJECT, Peer, first_word, timed};
use crate::process::Done;
use crate::synthetic_store::content;

const PAGE_BYTES: u64 = 16 << 10;

pub struct Foyer {
    cache: Cache<u64, Bytes>,
    buffer: Vec<u8>,
}

impl Foyer {
    pub fn new(object_bytes: u64, memory_bytes: u64) -> Foyer {
        let builder = CacheBuilder::new(memory_bytes as usize).with_shards(16);
        let builder = builder.with_eviction_config(S3FifoConfig::default());
        let cache = builder.with_weighter(|_: &u64, page: &Bytes| page.len() + 128).build();
        for page in 0..object_bytes / PAGE_BYTES {
            let start = page * PAGE_BYTES;
            cache.insert(page, content(OBJECT, start..start + PAGE_BYTES).into());
        }
        Foyer { cache, buffer: Vec::with_capacity(1 << 20) }
    }
}

impl Peer for Foyer {
    fn name(&self) -> String {
        "foyer 0.22 in the process".into()
    }

    fn read_all(&mut self, places: &[u64], len: usize, times: &mut Vec<u32>) -> Done<()> {
        let Self { cache, buffer } = self;
        timed(places, times, |at| {
            buffer.clear();
            while buffer.len() < len {
                let from = at + buffer.len() as u64;
                let page = cache.get(&(from / PAGE_BYTES)).ok_or("a miss")?;
                let start = (from % PAGE_BYTES) as usize;
                let end = page.value().len().min(start + len - buffer.len());
                buffer.extend_from_slice(&page.value()[start..end]);
            }
            Ok(first_word(buffer))
        })
    }

    fn processes(&self) -> Vec<u32> {
        Vec::new()
    }
}
