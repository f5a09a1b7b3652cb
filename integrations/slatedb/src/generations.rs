//! Keys and values. A generation writes some keys, and its number at a key of its own, in one batch.
//!
//! - **G1** Generation 0 writes all keys, and each later one writes the keys of a [`PARTS`]th.
//! - **G2** A value says of which key and generation it is.
//!
//! So a reader that has seen generation `g` knows the earliest generation that any value may be of.

use crate::common::Done;

/// The key of the latest generation's number.
pub const LATEST: &str = "latest";
const PARTS: u64 = 20;
const VALUE_BYTES: usize = 400;

pub fn key(number: u64) -> String {
    format!("key{number:08}")
}

pub fn value(number: u64, generation: u64) -> Vec<u8> {
    // SplitMix64, so that the value can't be compressed.
    let mut state = number << 32 | generation;
    let mut word = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed ^ (mixed >> 27)
    };
    let mut value = generation.to_le_bytes().to_vec();
    while value.len() < VALUE_BYTES {
        value.extend(word().to_le_bytes());
    }
    value
}

pub fn writes(generation: u64, number: u64) -> bool {
    generation == 0 || generation % PARTS == number % PARTS
}

/// The latest generation up to `latest` that has written a key.
pub fn latest_that_writes(number: u64, latest: u64) -> u64 {
    (latest.saturating_sub(PARTS - 1)..=latest).rev().find(|&one| writes(one, number)).unwrap_or(0)
}

/// The number in a value of [`LATEST`].
pub fn decode_latest(value: &[u8]) -> Done<u64> {
    Ok(u64::from_le_bytes(value.try_into().map_err(|_| "not the number of a generation")?))
}

/// The generation of a value, which is checked to be one that was written.
pub fn generation_of(number: u64, found: &[u8]) -> Done<u64> {
    let words = found.first_chunk::<8>().ok_or_else(|| format!("key {number} has {found:?}"))?;
    let generation = u64::from_le_bytes(*words);
    if !writes(generation, number) || found != value(number, generation) {
        return Err(format!("key {number} has bytes that were not written: {found:?}").into());
    }
    Ok(generation)
}
