//! Alternating slices of two sides, and the loops of reader threads.

use std::hint::black_box;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use super::scratch::{ScratchFile, sequence_of};
use crate::failure::{Context, Result};

/// A file as the load uses it: the kernel's, or the engine's.
pub trait ReadTarget: Sync {
    fn read_at(&self, dst: &mut [u8], offset: u64) -> io::Result<usize>;

    fn write_at(&self, src: &[u8], offset: u64) -> io::Result<usize>;
}

impl ReadTarget for std::fs::File {
    #[inline]
    fn read_at(&self, dst: &mut [u8], offset: u64) -> io::Result<usize> {
        FileExt::read_at(self, dst, offset)
    }

    #[inline]
    fn write_at(&self, src: &[u8], offset: u64) -> io::Result<usize> {
        FileExt::write_at(self, src, offset)
    }
}

impl ReadTarget for millpond::File {
    #[inline]
    fn read_at(&self, dst: &mut [u8], offset: u64) -> io::Result<usize> {
        Ok(Self::read_at(self, dst, offset)?)
    }

    #[inline]
    fn write_at(&self, src: &[u8], offset: u64) -> io::Result<usize> {
        Ok(Self::write_at(self, src, offset)?)
    }
}

/// Medians of a comparison.
#[derive(Debug, Clone, Copy)]
pub struct Compared<const N: usize> {
    pub kernel: [f64; N],
    pub millpond: [f64; N],
    /// The median of the rounds' ratios, Millpond over kernel.
    pub ratio: [f64; N],
}

/// Runs the sides in the order A B B A, `rounds` times, after one uncounted slice of each. A slice returns
/// `N` rates.
pub fn compare<const N: usize>(
    rounds: usize,
    mut kernel: impl FnMut() -> io::Result<[f64; N]>,
    mut millpond: impl FnMut() -> io::Result<[f64; N]>,
) -> Result<Compared<N>> {
    let mut kernel = || kernel().context("the kernel's side");
    let mut millpond = || millpond().context("Millpond's side");
    kernel()?;
    millpond()?;
    let mut measured: Vec<[[f64; N]; 2]> = Vec::new();
    for _ in 0..rounds {
        let first = kernel()?;
        let between = [millpond()?, millpond()?];
        let last = kernel()?;
        measured.extend([[first, between[0]], [last, between[1]]]);
    }
    let medians = |value: &dyn Fn(&[[f64; N]; 2], usize) -> f64| {
        std::array::from_fn(|rate| median(measured.iter().map(|pair| value(pair, rate)).collect()))
    };
    Ok(Compared {
        kernel: medians(&|pair, rate| pair[0][rate]),
        millpond: medians(&|pair, rate| pair[1][rate]),
        ratio: medians(&|pair, rate| pair[1][rate] / pair[0][rate]),
    })
}

pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Operations between two readings of the clock.
const BATCH: u64 = 16;

/// Runs operations on `threads` threads for `length`; returns operations a second. `make` runs on each
/// thread and gets its number.
pub fn rate_of<F: FnMut() -> io::Result<()>>(
    threads: u32,
    length: Duration,
    make: impl Fn(u32) -> F + Sync,
) -> io::Result<f64> {
    let start = Barrier::new(threads as usize);
    let (start, make) = (&start, &make);
    let run = |number| -> io::Result<(u64, Duration)> {
        let mut operation = make(number);
        start.wait();
        let (started, mut count) = (Instant::now(), 0);
        while started.elapsed() < length {
            for _ in 0..BATCH {
                operation()?;
            }
            count += BATCH;
        }
        Ok((count, started.elapsed()))
    };
    let run = &run;
    thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|number| scope.spawn(move || run(number))).collect();
        let mut rate = 0.0;
        for thread in threads {
            let (count, elapsed) = thread.join().expect("a thread of the load")?;
            rate += count as f64 / elapsed.as_secs_f64();
        }
        Ok(rate)
    })
}

/// Random reads of whole blocks; each read is compared with the block's number.
#[inline]
pub fn read_random(
    target: &impl ReadTarget,
    file: &ScratchFile,
    random: &mut BlockRandom,
    dst: &mut [u8],
) -> io::Result<u32> {
    let block = random.below(file.blocks());
    let len = target.read_at(black_box(&mut *dst), file.offset_of(block))?;
    if len != dst.len() {
        return Err(io::Error::new(
            io::ErrorKind::UnexpectedEof,
            format!("block {block}: {len} bytes"),
        ));
    }
    // The first word alone: the comparison costs either side the same few nanoseconds.
    sequence_of(&dst[..8], block)?;
    Ok(block)
}

/// Random numbers (splitmix64), the same in each run.
#[derive(Debug, Clone)]
pub struct BlockRandom(u64);

impl BlockRandom {
    pub fn seeded(seed: u64) -> Self {
        BlockRandom(seed.wrapping_mul(0xbf58_476d_1ce4_e5b9))
    }

    /// A number below `bound`.
    #[inline]
    pub fn below(&mut self, bound: u32) -> u32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let n = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let n = (n ^ (n >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((u128::from(n ^ (n >> 31)) * u128::from(bound)) >> 64) as u32
    }

    /// All numbers below `bound` in random order.
    pub fn shuffled(&mut self, bound: u32) -> Vec<u32> {
        let mut numbers: Vec<u32> = (0..bound).collect();
        for last in (1..bound).rev() {
            numbers.swap(last as usize, self.below(last + 1) as usize);
        }
        numbers
    }
}
