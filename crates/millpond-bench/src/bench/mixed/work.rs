//! The measured loops, compiled for each target: threads that read and write blocks of one file at
//! random, and one that disturbs them.
//!
//! - X1. Every 8-byte word of the file identifies its writer, the time, and the block: a write
//!   fills its block with one word. So an atomic read shows one word, and of its own block. One of
//!   64 reads is checked for that, for every engine.
//! - X2. All threads start together, and count from the end of the ramp until the end of the slice.
//!   Rates are of the time until the last thread was done.

use std::hint::black_box;
use std::io;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use millpond_bench_peers::Usage;
use rustix::time::{ClockId, clock_gettime};

use super::mixed_target::MixedTarget;
use crate::bench::data::Random;
use crate::bench::harness::AlignedBuffer;
use crate::bench::histogram::Histogram;

/// One of this number of reads is checked.
const CHECKED_SHARE: u64 = 64;

/// The blocks that the threads read and write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Places {
    /// Everyone anywhere.
    Random,
    /// Each writer in its own part.
    Disjoint,
    /// All threads the first block.
    One,
    /// All threads any block of the lower half.
    LowerHalf,
}

/// The repeated operation of an additional thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Disturbance {
    None,
    /// Writes a block and makes it durable.
    Sync,
    /// Punches, fills, truncates, extends and appends in the upper half.
    Extents,
}

/// Interval of two extent changes, which take less time.
const EXTENTS_GAP: Duration = Duration::from_micros(500);

/// The work of an engine.
#[derive(Debug, Clone)]
pub struct Work {
    pub block_bytes: u32,
    pub file_bytes: u64,
    pub readers: u32,
    pub writers: u32,
    pub places: Places,
    pub disturbance: Disturbance,
    /// Not counted, at the start of each slice.
    pub ramp: Duration,
}

impl Work {
    pub fn blocks(&self) -> u32 {
        (self.file_bytes / u64::from(self.block_bytes)) as u32
    }

    /// First block and number of blocks that a thread goes over.
    fn range(&self, writer: Option<u32>) -> (u32, u32) {
        let blocks = self.blocks();
        match (self.places, writer) {
            (Places::One, _) => (0, 1),
            (Places::LowerHalf, _) => (0, blocks / 2),
            (Places::Disjoint, Some(number)) => {
                let share = blocks / self.writers;
                (number * share, share)
            }
            _ => (0, blocks),
        }
    }
}

/// The results of one kind of operations, reads or writes, in a slice.
#[derive(Debug, Clone, Default)]
pub struct Ops {
    pub ops: u64,
    pub ops_per_s: f64,
    /// Reads: of their threads. Writes: of all other threads of this process.
    pub cpu: Duration,
    pub latencies: Histogram,
}

/// The result of one slice.
#[derive(Debug, Clone, Default)]
pub struct MixedSlice {
    pub reads: Ops,
    pub writes: Ops,
    pub context_switches: u64,
    pub checked: u64,
    pub torn: u64,
    pub disturbances: u64,
}

/// The word that fills block `block`.
fn word(writer: u32, sequence: u32, block: u32) -> u64 {
    u64::from(writer) << 56 | u64::from(block & 0xff_ffff) << 32 | u64::from(sequence)
}

/// Fills a block of a new file.
pub fn fill(dst: &mut [u8], block: u32) {
    fill_with(dst, word(0, 0, block));
}

#[inline]
fn fill_with(dst: &mut [u8], word: u64) {
    dst.as_chunks_mut().0.fill(word.to_le_bytes());
}

/// Whether a block is of one write, to this block (X1).
pub fn is_whole(src: &[u8], block: u32) -> bool {
    let words = src.as_chunks::<8>().0;
    let first = u64::from_le_bytes(words[0]);
    (first >> 32) as u32 & 0xff_ffff == block & 0xff_ffff && words.iter().all(|w| *w == words[0])
}

/// The state that the threads of a slice share.
struct WorkSlice<'a, T> {
    target: &'a T,
    work: &'a Work,
    number: u32,
    start: Barrier,
    /// The threads of the load are done.
    over: AtomicBool,
    length: Duration,
}

#[derive(Default)]
struct Counted {
    ops: u64,
    checked: u64,
    torn: u64,
    latencies: Histogram,
    /// The counted time.
    span: Option<(Instant, Instant)>,
    cpu: Duration,
}

fn thread_cpu() -> Duration {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs() as u32)
}

impl<T: MixedTarget> WorkSlice<'_, T> {
    fn random(&self, thread: u32) -> Random {
        Random::seeded(u64::from(self.number) << 32 | u64::from(thread))
    }

    fn reader(&self, thread: u32) -> io::Result<Counted> {
        let work = self.work;
        let mut buffer = AlignedBuffer::new(work.block_bytes as usize);
        let (mut random, (first, blocks)) = (self.random(thread), work.range(None));
        self.counted(|counted, op| {
            let block = first + random.below(blocks);
            let dst = buffer.bytes();
            let (from, begun) = (u64::from(block) * u64::from(work.block_bytes), Instant::now());
            let len = self.target.read_at(black_box(&mut *dst), from)?;
            let ended = Instant::now();
            whole("read", len, dst.len(), from)?;
            if op % CHECKED_SHARE == 0 {
                counted.checked += 1;
                counted.torn += u64::from(!is_whole(dst, block));
            }
            Ok((begun, ended))
        })
    }

    fn writer(&self, thread: u32, number: u32) -> io::Result<Counted> {
        let work = self.work;
        let mut buffer = AlignedBuffer::new(work.block_bytes as usize);
        let (mut random, (first, blocks)) = (self.random(thread), work.range(Some(number)));
        self.counted(|_, op| {
            let block = first + random.below(blocks);
            let src = buffer.bytes();
            fill_with(src, word(number + 1, self.number << 20 ^ op as u32, block));
            let (from, begun) = (u64::from(block) * u64::from(work.block_bytes), Instant::now());
            let len = self.target.write_at(black_box(&*src), from)?;
            let ended = Instant::now();
            whole("write", len, src.len(), from)?;
            Ok((begun, ended))
        })
    }

    /// Repeats an operation, which returns its start and end, until the slice ends.
    fn counted(
        &self,
        mut operation: impl FnMut(&mut Counted, u64) -> io::Result<(Instant, Instant)>,
    ) -> io::Result<Counted> {
        self.start.wait();
        let ramp_end = Instant::now() + self.work.ramp;
        let end = ramp_end + self.length;
        let (mut counted, mut cpu) = (Counted::default(), thread_cpu());
        let mut ramp = true;
        for op in 0.. {
            let (begun, ended) = operation(&mut counted, op)?;
            if ramp {
                if begun < ramp_end {
                    continue;
                }
                (ramp, cpu) = (false, thread_cpu());
            }
            counted.ops += 1;
            counted.latencies.add(ended - begun);
            if ended >= end {
                counted.span = Some((ramp_end, ended));
                break;
            }
        }
        counted.cpu = thread_cpu() - cpu;
        Ok(counted)
    }

    /// Disturbs until the other threads are done; returns the number of operations. Extent changes
    /// come at a fixed rate, so that their number is the same for each file.
    fn disturber(&self, on: &T) -> io::Result<u64> {
        let work = self.work;
        let mut buffer = AlignedBuffer::new(work.block_bytes as usize);
        let (half, blocks) = (work.blocks() / 2, work.blocks());
        let mut random = self.random(u32::MAX);
        self.start.wait();
        let started = Instant::now();
        for turn in 0.. {
            if self.over.load(Relaxed) {
                return Ok(turn);
            }
            if work.disturbance == Disturbance::Extents {
                let due = EXTENTS_GAP * turn as u32;
                thread::sleep(due.saturating_sub(started.elapsed()));
            }
            let block = half + random.below(blocks - half);
            fill_with(buffer.bytes(), word(255, turn as u32, block));
            let offset = u64::from(block) * u64::from(work.block_bytes);
            match work.disturbance {
                Disturbance::None => return Ok(0),
                Disturbance::Sync => {
                    on.write_at(buffer.bytes(), offset)?;
                    on.sync_data()?;
                }
                Disturbance::Extents => match turn % 3 {
                    0 => on.punch(offset, u64::from(work.block_bytes))?,
                    1 => on.truncate(offset)?,
                    _ => on.append(buffer.bytes()).map(|_| ())?,
                },
            }
        }
        unreachable!()
    }
}

/// Runs the work for about `length` on `mixed_target`, and the disturbance on `disturbed`.
pub fn slice<T: MixedTarget>(
    target: &T,
    disturbed: &T,
    work: &Work,
    length: Duration,
) -> io::Result<MixedSlice> {
    static SLICES: AtomicU32 = AtomicU32::new(0);
    let threads = work.readers + work.writers;
    let disturbers = u32::from(work.disturbance != Disturbance::None);
    let slice = WorkSlice {
        target,
        work,
        // Relaxed: only the numbers must differ.
        number: SLICES.fetch_add(1, Relaxed),
        start: Barrier::new((threads + disturbers) as usize + 1),
        over: AtomicBool::new(false),
        length,
    };
    thread::scope(|scope| {
        let slice = &slice;
        let reader = |thread| scope.spawn(move || slice.reader(thread));
        let readers: Vec<_> = (0..work.readers).map(reader).collect();
        let writer = |number| scope.spawn(move || slice.writer(work.readers + number, number));
        let writers: Vec<_> = (0..work.writers).map(writer).collect();
        let disturber = (disturbers > 0).then(|| scope.spawn(move || slice.disturber(disturbed)));
        slice.start.wait();
        // The ramp is short compared with the slice; its share of the processor time is subtracted.
        let before = Usage::now();
        let joined = |threads: Vec<thread::ScopedJoinHandle<'_, io::Result<Counted>>>| {
            let all =
                threads.into_iter().map(|thread| thread.join().expect("a thread of the load"));
            all.collect::<io::Result<Vec<Counted>>>()
        };
        let (reads, writes) = (joined(readers), joined(writers));
        slice.over.store(true, Relaxed);
        let disturbances = disturber.map(|thread| thread.join().expect("the disturber"));
        let used = Usage::now().since(before);
        let (reads, writes) = (reads?, writes?);
        // From the first thread's start: this thread may be late.
        let spans = || reads.iter().chain(&writes).filter_map(|counted| counted.span);
        let (started, ended) = (spans().map(|span| span.0).min(), spans().map(|span| span.1).max());
        let elapsed = ended.zip(started).map_or(length, |(ended, started)| ended - started);
        let sum = |all: Vec<Counted>| {
            let mut ops = Ops::default();
            for counted in all {
                ops.ops += counted.ops;
                ops.cpu += counted.cpu;
                ops.latencies = ops.latencies.merged(counted.latencies);
            }
            ops.ops_per_s = ops.ops as f64 / elapsed.as_secs_f64();
            ops
        };
        let checked = reads.iter().map(|counted| counted.checked).sum();
        let torn = reads.iter().map(|counted| counted.torn).sum();
        let (reads, mut writes) = (sum(reads), sum(writes));
        if work.writers > 0 {
            let share = elapsed.as_secs_f64() / (elapsed + work.ramp).as_secs_f64();
            writes.cpu = used.cpu.mul_f64(share).saturating_sub(reads.cpu);
        }
        let context_switches = used.context_switches;
        let disturbances = disturbances.transpose()?.unwrap_or(0);
        Ok(MixedSlice { reads, writes, context_switches, checked, torn, disturbances })
    })
}

fn whole(what: &str, len: usize, wanted: usize, offset: u64) -> io::Result<()> {
    match len == wanted {
        true => Ok(()),
        false => {
            let message = format!("{what} of {wanted} bytes at offset {offset} returned {len}");
            Err(io::Error::other(message))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    /// A file that is written whole, or in two parts.
    struct Memory {
        halves: bool,
        bytes: [Mutex<Vec<u8>>; 2],
    }

    impl MixedTarget for Memory {
        fn read_at(&self, dst: &mut [u8], offset: u64) -> io::Result<usize> {
            let half = dst.len() / 2;
            for (part, bytes) in dst.chunks_mut(half).zip(&self.bytes) {
                let at = offset as usize / 2;
                part.copy_from_slice(&bytes.lock().unwrap()[at..at + half]);
            }
            Ok(dst.len())
        }

        fn write_at(&self, src: &[u8], offset: u64) -> io::Result<usize> {
            let (half, at) = (src.len() / 2, offset as usize / 2);
            let mut first = self.bytes[0].lock().unwrap();
            first[at..at + half].copy_from_slice(&src[..half]);
            if self.halves {
                drop(first);
                thread::yield_now();
            }
            self.bytes[1].lock().unwrap()[at..at + half].copy_from_slice(&src[half..]);
            Ok(src.len())
        }

        fn sync_data(&self) -> io::Result<()> {
            Ok(())
        }

        fn punch(&self, _: u64, _: u64) -> io::Result<()> {
            Ok(())
        }

        fn truncate(&self, _: u64) -> io::Result<()> {
            Ok(())
        }

        fn append(&self, src: &[u8]) -> io::Result<usize> {
            Ok(src.len())
        }
    }

    fn work() -> Work {
        Work {
            block_bytes: 4096,
            file_bytes: 8192,
            readers: 2,
            writers: 1,
            places: Places::One,
            disturbance: Disturbance::Sync,
            ramp: Duration::from_millis(1),
        }
    }

    fn memory(halves: bool) -> Memory {
        let mut bytes = vec![0; 4096];
        fill(&mut bytes, 0);
        let bytes = [Mutex::new(bytes.clone()), Mutex::new(bytes)];
        Memory { halves, bytes }
    }

    #[test]
    fn torn_reads_are_found() {
        let torn = memory(true);
        let found = (0..50).any(|_| {
            let slice = slice(&torn, &torn, &work(), Duration::from_millis(20)).unwrap();
            assert!(slice.reads.ops > 0 && slice.writes.ops > 0 && slice.checked > 0, "{slice:?}");
            assert!(slice.reads.ops_per_s > 0.0 && slice.disturbances > 0, "{slice:?}");
            slice.torn > 0
        });
        assert!(found);
    }

    #[test]
    fn blocks_know_their_place() {
        let mut bytes = vec![0; 4096];
        fill(&mut bytes, 7);
        assert!(is_whole(&bytes, 7) && !is_whole(&bytes, 8));
        bytes[4095] ^= 1;
        assert!(!is_whole(&bytes, 7));
    }

    #[test]
    fn writers_have_parts_of_their_own_where_they_should() {
        let work = Work { writers: 2, places: Places::Disjoint, ..work() };
        assert_eq!(
            (work.range(Some(0)), work.range(Some(1)), work.range(None)),
            ((0, 1), (1, 1), (0, 2))
        );
    }
}
