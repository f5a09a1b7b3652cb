//! The engines of the table, and how each is started.

pub mod foyer;
pub mod http;
pub mod lmdb;
pub mod memcached;
pub mod mounts;
pub mod own;

use std::time::Instant;

use crate::process::Done;
use crate::synthetic_store::word;

/// The measured object's number.
pub const OBJECT: u64 = 0;
/// The lengths of reads.
pub const LENGTHS: [usize; 3] = [4 << 10, 64 << 10, 1 << 20];

/// A cache with one warm object.
pub trait Peer {
    fn name(&self) -> String;

    /// Reads `len` bytes at each place, and appends the time of each read in nanoseconds.
    fn read_all(&mut self, places: &[u64], len: usize, times: &mut Vec<u32>) -> Done<()>;

    /// The processes of the cache, beside this one.
    fn processes(&self) -> Vec<u32>;
}

/// Measures a loop of reads by a call that returns the first eight bytes.
pub fn timed(
    places: &[u64],
    times: &mut Vec<u32>,
    mut read: impl FnMut(u64) -> Done<u64>,
) -> Done<()> {
    for &place in places {
        let started = Instant::now();
        let found = read(place)?;
        times.push(started.elapsed().as_nanos().min(u128::from(u32::MAX)) as u32);
        check(place, found)?;
    }
    Ok(())
}

pub fn check(place: u64, found: u64) -> Done<()> {
    let right = word(OBJECT, place);
    if found == right {
        return Ok(());
    }
    Err(format!("wrong bytes at {place}: {found:x} for {right:x}").into())
}

pub fn first_word(bytes: &[u8]) -> u64 {
    bytes.first_chunk().map_or(0, |word| u64::from_le_bytes(*word))
}
