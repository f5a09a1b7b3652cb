//! Transfers that end early, at every byte: short ones, failed ones, interrupted ones.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use crate::direct::{DirectRequest, SegmentList};
use crate::inode::CachedFile;
use crate::io::backend::{Alignment, BackingFile, OpenedFor, Seek};
use crate::io::retry;
use crate::io::segment::Segment;
use crate::io::transfer::{BackgroundRead, Direction, Transfer};
use crate::sim::memory_backend::move_bytes;
use crate::{BackendChoice, Engine, Error, File, OpenOptions, WriteMode};

/// The outcome of one attempt at a transfer.
#[derive(Clone, Copy, Debug)]
enum Attempt {
    /// Moves at most that many bytes.
    Moves(u64),
    /// Fails, after moving some bytes that are not reported.
    Fails(i32, u64),
}

/// A file in memory that follows a script, and afterwards moves all requested bytes.
struct Scripted {
    bytes: Mutex<Vec<u8>>,
    block_bytes: u32,
    script: Mutex<VecDeque<Attempt>>,
}

impl Scripted {
    fn new(bytes: Vec<u8>, block_bytes: u32) -> Arc<Scripted> {
        Arc::new(Scripted { bytes: Mutex::new(bytes), block_bytes, script: Mutex::default() })
    }

    fn expect(&self, script: &[Attempt]) {
        *self.script.lock().unwrap() = script.iter().copied().collect();
    }

    fn is_done(&self) -> bool {
        self.script.lock().unwrap().is_empty()
    }

    fn contents(&self) -> Vec<u8> {
        self.bytes.lock().unwrap().clone()
    }

    fn blocks(&self) -> Alignment {
        Alignment { memory_bytes: self.block_bytes, offset_bytes: self.block_bytes }
    }
}

impl BackingFile for Scripted {
    fn try_all(&self, batch: &mut [Transfer<'_>]) {
        for transfer in batch {
            if transfer.direct {
                // Reads continue only from whole blocks; writes may use another descriptor.
                let is_read = transfer.direction == Direction::Read;
                assert!(!is_read || transfer.offset % u64::from(self.block_bytes) == 0);
            }
            let mut bytes = self.bytes.lock().unwrap();
            let attempt = self.script.lock().unwrap().pop_front();
            let outcome = match attempt.unwrap_or(Attempt::Moves(u64::MAX)) {
                Attempt::Moves(limit) => move_bytes(&mut bytes, transfer, limit as usize),
                Attempt::Fails(errno, limit) => {
                    move_bytes(&mut bytes, transfer, limit as usize).unwrap();
                    Err(io::Error::from_raw_os_error(errno))
                }
            };
            transfer.set(outcome);
        }
    }

    fn start(self: Arc<Self>, read: BackgroundRead) -> Result<(), BackgroundRead> {
        Err(read)
    }

    fn attach(&self, fd: OwnedFd, _: OpenedFor) -> io::Result<Option<OwnedFd>> {
        Ok(Some(fd))
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.bytes.lock().unwrap().len() as u64)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.bytes.lock().unwrap().resize(len as usize, 0);
        Ok(())
    }

    fn zero(&self, _offset: u64, _len: u64, _: bool) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn allocate(&self, _offset: u64, _len: u64, _keep_size: bool) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn seek(&self, _offset: u64, _to: Seek) -> io::Result<Option<u64>> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn sync(&self, _data_only: bool) -> io::Result<()> {
        Ok(())
    }

    fn alignment(&self, direct: bool) -> Alignment {
        if direct { self.blocks() } else { Alignment::NONE }
    }
}

fn old(at: usize) -> u8 {
    (at % 251) as u8
}

fn new(at: usize) -> u8 {
    (at % 241) as u8 ^ 0xA5
}

/// Pieces of `lens` of some memory, in an order that is not that of their addresses.
fn pieces(memory: &mut [u8], lens: &[usize]) -> Vec<Segment<'static>> {
    let mut at = lens.iter().sum::<usize>();
    let base = memory.as_mut_ptr();
    let mut segments = Vec::new();
    for &len in lens {
        at -= len;
        // SAFETY: the callers keep the memory until the transfers are over.
        segments.push(unsafe { Segment::new(base.wrapping_add(at), len) });
    }
    segments
}

fn flat(segments: &[Segment<'_>]) -> Vec<u8> {
    // SAFETY: as in `pieces`.
    let slice = |it: &Segment<'_>| unsafe { std::slice::from_raw_parts(it.base(), it.len()) };
    segments.iter().flat_map(slice).copied().collect()
}

fn pour(segments: &[Segment<'_>], bytes: impl Fn(usize) -> u8) {
    let mut at = 0;
    for segment in segments {
        for byte in 0..segment.len() {
            // SAFETY: as in `pieces`.
            unsafe { segment.base().add(byte).write(bytes(at)) };
            at += 1;
        }
    }
}

const LENS: [usize; 7] = [3, 0, 17, 1, 40, 0, 9];
const TOTAL: usize = 70;
const AT: usize = 1000;

/// Goal: a short transfer is continued, an interrupted one is repeated, and a failed one ends with
/// the bytes that were moved before the error, at any position. Method: every length of the first
/// attempt, and of the second, and all continuations.
#[test]
fn transfers_end_early_at_every_byte() {
    let mut memory = vec![0; TOTAL];
    let segments = pieces(&mut memory, &LENS);
    for direction in [Direction::Read, Direction::Write] {
        for first in 0..=TOTAL as u64 {
            for second in [0, 1, 2, 3, 4, 16, 17, 20, 35, 60, 69, 70] {
                for last in [Attempt::Moves(u64::MAX), Attempt::Fails(libc::EIO, 5)] {
                    let file = Scripted::new((0..2000).map(old).collect(), 1);
                    let interrupt = Attempt::Fails(libc::EINTR, 0);
                    let script =
                        [interrupt, Attempt::Moves(first), interrupt, Attempt::Moves(second), last];
                    file.expect(&script);
                    pour(&segments, new);
                    let mut batch = [Transfer::new(direction, AT as u64, &segments)];
                    retry::run(&*file, &mut batch);
                    let [transfer] = batch;
                    let case = format!("{direction:?} {script:?}");
                    // No bytes moved means the end of the file.
                    let is_over = |moved: u64| moved == 0 || moved == TOTAL as u64;
                    let before = match is_over(first) {
                        true => first,
                        false => (first + second).min(TOTAL as u64),
                    };
                    let ended = is_over(first) || second == 0 || is_over(before);
                    let (moved, errno) = match last {
                        _ if ended => (before, None),
                        Attempt::Moves(_) => (TOTAL as u64, None),
                        Attempt::Fails(errno, _) => (before, Some(errno)),
                    };
                    assert_eq!(transfer.moved, moved, "{case}");
                    let is_short = moved < TOTAL as u64 && direction == Direction::Write;
                    match (errno, &transfer.error) {
                        (Some(errno), Some(error)) => assert_eq!(error.raw_os_error(), Some(errno)),
                        (None, Some(error)) => {
                            assert!(is_short && error.kind() == io::ErrorKind::WriteZero, "{case}");
                        }
                        (errno, None) => assert!(errno.is_none() && !is_short, "{case}"),
                    }
                    let moved = moved as usize;
                    if direction == Direction::Read {
                        let expected: Vec<u8> = (AT..AT + moved).map(old).collect();
                        assert!(flat(&segments)[..moved] == expected, "{case}");
                    } else {
                        let expected: Vec<u8> = (0..moved).map(new).collect();
                        assert!(file.contents()[AT..AT + moved] == expected, "{case}");
                    }
                }
            }
        }
    }
}

/// Goal: direct reads stop when a block is moved in part: there the file ends, and they could not
/// continue from there.
#[test]
fn direct_reads_end_within_a_block() {
    let mut memory = vec![0; 2048];
    let segments = pieces(&mut memory, &[512, 1024, 512]);
    for first in 0..=2048 {
        let file = Scripted::new((0..4096).map(old).collect(), 512);
        file.expect(&[Attempt::Moves(first)]);
        let mut batch = [Transfer::new(Direction::Read, 512, &segments)];
        batch[0].direct = true;
        retry::run(&*file, &mut batch);
        let moved = if first > 0 && first % 512 == 0 { 2048 } else { first };
        assert_eq!((batch[0].moved, batch[0].error.is_none()), (moved, true));
        let expected: Vec<u8> = (512..512 + moved as usize).map(old).collect();
        assert!(flat(&segments)[..moved as usize] == expected);
    }
}

/// A cached and a direct handle of a scripted file.
struct Both {
    scripted: Arc<Scripted>,
    cached: File,
    direct: File,
    engine: Engine,
}

const FILE_BYTES: usize = 5 * 4096 + 100;

impl Both {
    fn new(mode: WriteMode, block_bytes: u32) -> Both {
        let engine =
            Engine::builder().cache_bytes(1 << 20).backend(BackendChoice::Memory).build().unwrap();
        let scripted = Scripted::new((0..FILE_BYTES).map(old).collect(), block_bytes);
        let options = OpenOptions::new().read(true).write(true).write_mode(mode);
        let file = CachedFile::on(engine.shared(), scripted.clone(), &options).unwrap();
        let cached = File::new(Arc::clone(&file), None, &options);
        let direct = File::new(file, None, &options.direct(true).bounce(true));
        Both { scripted, cached, direct, engine }
    }

    /// All bytes of the file, which are the same by both handles.
    fn read(&self, case: &str) -> Vec<u8> {
        let len = self.cached.len().unwrap() as usize;
        let (mut one, mut other) = (vec![0; len + 1], vec![0; len + 1]);
        assert_eq!(self.direct.read_at(&mut one, 0).unwrap(), len, "{case}");
        assert_eq!(self.cached.read_at(&mut other, 0).unwrap(), len, "{case}");
        one.truncate(len);
        other.truncate(len);
        let at = one.iter().zip(&other).position(|(one, other)| one != other);
        assert_eq!(at, None, "{case}: direct and cached reads differ");
        one
    }
}

/// Points at which a transfer of `total` bytes stops: around the ends of blocks, segments and
/// pages; with MILLPOND_TEST_SCALE at more bytes.
fn stops(total: usize) -> impl Iterator<Item = usize> {
    let scale = std::env::var("MILLPOND_TEST_SCALE").ok().and_then(|scale| scale.parse().ok());
    let step = (1009.0 / scale.unwrap_or(1.0f64)).max(1.0) as usize;
    let ends = [0, 511, 512, 513, 2048, 3072, 3073, 3584, 4095, 4096, 4097, 7680, 8191, 8192];
    ends.into_iter().chain((1..total).step_by(step)).filter(move |&stop| stop <= total)
}

/// The ways to write or read directly.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    File,
    Pipeline,
    /// By a bounce buffer, as the memory is not aligned.
    Bounced,
}

/// Performs one request.
fn pipelined(engine: &Engine, request: DirectRequest<'_>) -> Result<usize, Error> {
    let mut request = Some(request);
    let mut outcome = None;
    engine.pipeline(1).unwrap().run(|lane| {
        outcome = lane.into_ended().map(|(_, outcome)| outcome);
        request.take()
    });
    outcome.unwrap()
}

fn write(both: &Both, way: Way, memory: &[u8], cuts: &[usize], at: u64) -> Result<usize, Error> {
    let mut slices = Vec::new();
    for pair in cuts.windows(2) {
        slices.push(IoSlice::new(&memory[pair[0]..pair[1]]));
    }
    if way != Way::Pipeline {
        return both.direct.write_vectored_at(&slices, at);
    }
    let list = SegmentList::from_io_slices(&slices);
    pipelined(&both.engine, DirectRequest::write(&both.direct, list, at))
}

fn read(both: &Both, way: Way, memory: &mut [u8], cuts: &[usize], at: u64) -> Result<usize, Error> {
    let mut slices = Vec::new();
    let mut rest = &mut memory[..*cuts.last().unwrap()];
    for pair in cuts.windows(2) {
        let (piece, after) = rest.split_at_mut(pair[1] - pair[0]);
        slices.push(IoSliceMut::new(piece));
        rest = after;
    }
    if way != Way::Pipeline {
        return both.direct.read_vectored_at(&mut slices, at);
    }
    let list = SegmentList::from_io_slices_mut(&mut slices);
    pipelined(&both.engine, DirectRequest::read(&both.direct, list, at))
}

/// Goal: a direct write that is short, or fails, at any point leaves a file that is the same for
/// cached and direct readers, has the acknowledged bytes, and has lost nothing that was not
/// durable. Method: writes of several segments over pages that are cached, clean or dirty, within
/// the file and across its end; the backend stops at some byte of each, and then continues or
/// fails.
#[test]
fn direct_writes_end_early_at_every_byte() {
    let page = 4096;
    let lens = [512usize, 2560, 1024, 4096];
    let total: usize = lens.iter().sum();
    let mut cuts = vec![0];
    lens.iter().for_each(|len| cuts.push(cuts.last().unwrap() + len));
    let before = |by: u8| (0..FILE_BYTES).map(|at| old(at).wrapping_add(by)).collect::<Vec<u8>>();
    let befores = [before(0), before(1)];
    let written: Vec<u8> = (0..total).map(new).collect();
    for (mode, is_dirty) in
        [(WriteMode::Through, false), (WriteMode::Back, false), (WriteMode::Back, true)]
    {
        for way in [Way::File, Way::Pipeline, Way::Bounced] {
            let both = Both::new(mode, 512);
            let mut buffer = both.engine.alloc_buffers(1, total + 512).unwrap().pop().unwrap();
            let skip = if way == Way::Bounced { 1 } else { 0 };
            for at in [512, page, 4 * page] {
                for first in stops(total) {
                    for then in [
                        Attempt::Moves(u64::MAX),
                        Attempt::Moves(0),
                        Attempt::Fails(libc::EIO, 0),
                        Attempt::Fails(libc::ENOSPC, 300),
                    ] {
                        let case =
                            format!("{mode:?} dirty {is_dirty} {way:?} at {at}: {first}, {then:?}");
                        // The initial state.
                        both.scripted.expect(&[]);
                        both.cached.truncate(FILE_BYTES as u64).unwrap();
                        let before = &befores[first % 2];
                        both.cached.write_all_at(before, 0).unwrap();
                        if !is_dirty {
                            both.cached.sync_all().unwrap();
                        }
                        // Some of the pages are cached.
                        both.cached.read_at(&mut vec![0; 3 * page], 0).unwrap();
                        buffer[skip..skip + total].copy_from_slice(&written);
                        if is_dirty {
                            // The edges are written back before.
                            both.cached.sync_range(0, 1).unwrap();
                            both.cached.sync_range(5 * page as u64, 1).unwrap();
                            both.cached.write_all_at(&before[page..2 * page], page as u64).unwrap();
                        }
                        let edge = !at.is_multiple_of(page) || !(at + total).is_multiple_of(page);
                        if edge && is_dirty {
                            both.cached.write_back().unwrap();
                        }
                        both.scripted.expect(&[Attempt::Moves(first as u64), then]);
                        let outcome =
                            write(&both, way, &buffer[skip..skip + total], &cuts, at as u64);
                        both.scripted.expect(&[]);
                        let is_all = first == total
                            || (first > 0 && matches!(then, Attempt::Moves(u64::MAX)));
                        let moved = match outcome {
                            Ok(moved) => moved,
                            Err(error) => {
                                assert!(matches!(error, Error::Io { .. }), "{case}: {error}");
                                0
                            }
                        };
                        assert_eq!(moved == total, is_all, "{case}: {moved}");
                        assert!(moved <= if is_all { total } else { first }, "{case}: {moved}");
                        if !is_dirty && way != Way::Bounced {
                            assert_eq!(moved, if is_all { total } else { first }, "{case}");
                        }
                        let seen = both.read(&case);
                        assert!(seen.len() >= (at + moved).max(FILE_BYTES), "{case}");
                        assert!(seen.len() <= (at + total).max(FILE_BYTES), "{case}");
                        assert!(seen[at..at + moved] == written[..moved], "{case}: acknowledged");
                        let end = (at + total).min(FILE_BYTES);
                        assert!(seen[..at] == before[..at], "{case}: before it");
                        assert!(seen[end..FILE_BYTES] == before[end..], "{case}: behind it");
                        for (place, &byte) in seen.iter().enumerate().skip(at + moved) {
                            if place >= at + total {
                                break;
                            }
                            let was = before.get(place).copied().unwrap_or(0);
                            let is = byte == was || byte == written[place - at];
                            assert!(is, "{case}: byte {place} is {byte}, was {was}");
                        }
                        both.cached.sync_all().unwrap();
                        assert!(both.scripted.contents() == both.read(&case), "{case}: below");
                    }
                }
            }
        }
    }
}

/// Goal: a short direct read is continued, or ends at a partly read block, or before unreadable
/// bytes; a read that fails at once returns the error; and no guard or page stays held.
#[test]
fn direct_reads_end_early_at_every_byte() {
    let lens = [512usize, 2560, 1024, 4096];
    let total: usize = lens.iter().sum();
    let mut cuts = vec![0];
    lens.iter().for_each(|len| cuts.push(cuts.last().unwrap() + len));
    for mode in [WriteMode::Through, WriteMode::Back] {
        let both = Both::new(mode, 512);
        let mut buffer = both.engine.alloc_buffers(1, total + 512).unwrap().pop().unwrap();
        for way in [Way::File, Way::Pipeline, Way::Bounced] {
            let skip = if way == Way::Bounced { 1 } else { 0 };
            for at in [0, 512, 4 * 4096] {
                let here = total.min(FILE_BYTES - at);
                for first in stops(here).chain([here]) {
                    for then in [Attempt::Moves(u64::MAX), Attempt::Fails(libc::EIO, 700)] {
                        let case = format!("{mode:?} {way:?} at {at}: {first}, {then:?}");
                        both.scripted.expect(&[Attempt::Moves(first as u64), then]);
                        let memory = &mut buffer[skip..skip + total];
                        let outcome = read(&both, way, memory, &cuts, at as u64);
                        let is_met = both.scripted.is_done();
                        both.scripted.expect(&[]);
                        match outcome {
                            Ok(moved) => {
                                let goes_on = first > 0 && first % 512 == 0 && first < here;
                                // The bytes before unreadable ones are returned.
                                let fails = matches!(then, Attempt::Fails(..));
                                let expected = if goes_on && !fails { here } else { first };
                                assert_eq!(moved, expected, "{case}");
                                let expected: Vec<u8> = (at..at + moved).map(old).collect();
                                assert!(buffer[skip..skip + moved] == expected, "{case}");
                            }
                            Err(error) => {
                                assert_eq!(error.errno(), libc::EIO, "{case}");
                                assert!(is_met && matches!(then, Attempt::Fails(..)), "{case}");
                            }
                        }
                        // Nothing is held.
                        both.cached.invalidate(0, i64::MAX as u64).unwrap();
                    }
                }
            }
        }
        assert!(both.read("last") == (0..FILE_BYTES).map(old).collect::<Vec<u8>>());
    }
}
