//! Conformance tests of every storage backend, through the trait alone.
//!
//! Each test runs on each backend that works here, with both backings if it has a choice. The memory is
//! aligned, as frames are, unless the test states otherwise.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use crate::file_id::FileId;
use crate::io::backend::descriptor_file::{DescriptorFile, TransferDriver};
use crate::io::backend::descriptors::{self, Backing, Descriptors};
use crate::io::backend::driver::Driver;
use crate::io::backend::local_ring::probe;
use crate::io::backend::nowhere::Nowhere;
use crate::io::backend::threads::Threads;
use crate::io::backend::{BackingFile, OpenedFor, Seek};
use crate::io::batch;
use crate::io::retry;
use crate::io::segment::Segment;
use crate::io::transfer::{BackgroundRead, Direction, Transfer};
use crate::sim::memory_backend::MemoryFile;
use crate::sim::{SimFile, SimOptions};

const BLOCK: usize = 4096;

/// Memory aligned to a block, like frames.
struct Memory {
    bytes: Vec<u8>,
    skip: usize,
}

impl Memory {
    fn new(len: usize, fill: impl Fn(usize) -> u8) -> Memory {
        Memory::of(&(0..len).map(fill).collect::<Vec<u8>>())
    }

    fn of(content: &[u8]) -> Memory {
        let mut memory = Memory::zeroed(content.len());
        memory.bytes[memory.skip..][..content.len()].copy_from_slice(content);
        memory
    }

    fn zeroed(len: usize) -> Memory {
        let bytes = vec![0; len + BLOCK];
        let skip = bytes.as_ptr().align_offset(BLOCK);
        Memory { bytes, skip }
    }

    fn get(&self) -> &[u8] {
        &self.bytes[self.skip..self.bytes.len() - BLOCK + self.skip]
    }

    /// Segments of `piece` bytes each.
    fn segments(&mut self, piece: usize) -> Vec<Segment<'static>> {
        let end = self.bytes.len() - BLOCK + self.skip;
        self.bytes[self.skip..end]
            .chunks_mut(piece)
            // SAFETY: the tests keep the memory until the transfers have ended.
            .map(|piece| unsafe { Segment::new(piece.as_mut_ptr(), piece.len()) })
            .collect()
    }
}

fn offered(read: bool, write: bool) -> OpenedFor {
    OpenedFor { read, write, direct: false, is_own: false }
}

/// A backend, and how to make a file of it.
struct Subject {
    name: &'static str,
    file: Arc<dyn BackingFile>,
    path: std::path::PathBuf,
    stop: Box<dyn Fn()>,
    _dir: tempfile::TempDir,
}

impl Drop for Subject {
    fn drop(&mut self) {
        (self.stop)();
    }
}

/// One of each, over a new file with `content`.
fn subjects(content: &[u8]) -> Vec<Subject> {
    let mut all = Vec::new();
    let mut add = |name, make: &dyn Fn(&OwnedFd, &Arc<Threads>) -> io::Result<Made>| {
        let dir = tempfile::tempdir_in(target_dir()).unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, content).unwrap();
        let fd: OwnedFd =
            std::fs::File::options().read(true).write(true).open(&path).unwrap().into();
        let threads: Arc<Threads> = Arc::default();
        match make(&fd, &threads) {
            Ok((file, driver)) => {
                file.attach(fd, offered(true, true)).unwrap();
                let stop = Box::new(move || {
                    threads.stop();
                    driver.iter().for_each(|driver| driver.stop());
                });
                all.push(Subject { name, file, path, stop, _dir: dir });
            }
            Err(error) => crate::skip::skip(format_args!("{name}: {error}")),
        }
    };
    for (name, backing) in [
        ("uring", Backing::Buffered),
        ("uring, direct", Backing::Direct),
        ("uring, uncached", Backing::Uncached),
    ] {
        add(name, &|fd, _| {
            probe()?;
            let driver = Arc::new(Driver::new()?);
            let file = file_of(fd, backing, TransferDriver::Uring(Arc::clone(&driver)))?;
            Ok((Arc::new(file), Some(driver)))
        });
    }
    for (name, backing) in [
        ("threads", Backing::Buffered),
        ("threads, direct", Backing::Direct),
        ("threads, direct in place", Backing::DirectInPlace),
        ("threads, uncached", Backing::Uncached),
    ] {
        add(name, &|fd, threads| {
            let file = file_of(fd, backing, TransferDriver::Threads(Arc::clone(threads)))?;
            Ok((Arc::new(file), None))
        });
    }
    add("memory", &|_, threads| {
        Ok((Arc::new(MemoryFile::new(content.to_vec(), &threads.readers)), None))
    });
    add("sim", &|_, threads| {
        let options = SimOptions::new(1).delay_us_max(20).short_per_mille(500);
        Ok((Arc::new(SimFile::new(content.to_vec(), &options, &threads.readers)), None))
    });
    add("sim, watched", &|_, threads| {
        let options = SimOptions::new(2).short_per_mille(500);
        let _ = options.device();
        Ok((Arc::new(SimFile::new(content.to_vec(), &options, &threads.readers)), None))
    });
    all
}

type Made = (Arc<dyn BackingFile>, Option<Arc<Driver>>);

fn file_of(fd: &OwnedFd, backing: Backing, carrier: TransferDriver) -> io::Result<DescriptorFile> {
    let id = FileId::of_fd(fd);
    let descriptors = Descriptors::new(fd.as_fd(), id, backing, None, &Arc::default())?;
    Ok(DescriptorFile::new(descriptors, carrier))
}

/// On the disk of the build, as /tmp may not support O_DIRECT.
fn target_dir() -> std::path::PathBuf {
    let exe = std::env::current_exe().unwrap();
    exe.parent().unwrap().to_path_buf()
}

fn pattern(i: usize) -> u8 {
    (i / BLOCK * 31 + i % 251) as u8
}

fn content(len: usize) -> Vec<u8> {
    (0..len).map(pattern).collect()
}

/// Runs one transfer to its end.
fn transfer(
    file: &dyn BackingFile,
    direction: Direction,
    offset: u64,
    segments: &[Segment<'_>],
) -> (u64, Option<io::Error>) {
    let mut batch = [Transfer::new(direction, offset, segments)];
    retry::run(file, &mut batch);
    let [transfer] = batch;
    (transfer.moved, transfer.error)
}

fn read(file: &dyn BackingFile, offset: u64, len: usize) -> Vec<u8> {
    let mut memory = Memory::zeroed(len);
    let (moved, error) = transfer(file, Direction::Read, offset, &memory.segments(len.max(1)));
    assert!(error.is_none(), "{error:?}");
    memory.get()[..moved as usize].to_vec()
}

#[test]
fn reads_what_is_there_and_stops_at_the_end() {
    let content = content(5 * BLOCK + 100);
    for subject in subjects(&content) {
        let file = &*subject.file;
        assert_eq!(file.len().unwrap(), content.len() as u64, "{}", subject.name);
        assert_eq!(read(file, 0, 6 * BLOCK), content, "{}", subject.name);
        assert_eq!(read(file, 4096, 4096), content[4096..8192], "{}", subject.name);
        assert_eq!(read(file, 5 * 4096, BLOCK), content[5 * BLOCK..], "{}", subject.name);
        assert_eq!(read(file, 6 * 4096, BLOCK), [], "{}", subject.name);
        assert_eq!(read(file, 1 << 40, BLOCK), [], "{}", subject.name);
    }
}

#[test]
fn an_empty_file_ends_at_once() {
    for subject in subjects(&[]) {
        assert_eq!(subject.file.len().unwrap(), 0);
        assert_eq!(read(&*subject.file, 0, BLOCK), [], "{}", subject.name);
    }
}

#[test]
fn writes_are_read_back_whatever_their_alignment() {
    for subject in subjects(&content(4 * BLOCK)) {
        let file = &*subject.file;
        let mut expected = content(4 * BLOCK);
        // Aligned, within a block, across blocks, at the end, beyond the end.
        for (offset, len) in [
            (4096, 4096),
            (0, 8192),
            (100, 7),
            (4000, 5000),
            (16384, 4096),
            (20480, 10),
            (30000, 1),
        ] {
            let mut memory = Memory::new(len, |i| pattern(i + offset) ^ 0xA5);
            let segments = memory.segments(len);
            let (moved, error) = transfer(file, Direction::Write, offset as u64, &segments);
            assert!(error.is_none() && moved == len as u64, "{}: {error:?}", subject.name);
            expected.resize(expected.len().max(offset + len), 0);
            expected[offset..offset + len].copy_from_slice(memory.get());
            assert_eq!(file.len().unwrap(), expected.len() as u64, "{}", subject.name);
        }
        assert!(read(file, 0, 8 * BLOCK) == expected, "{}", subject.name);
        if !matches!(subject.name, "memory" | "sim" | "sim, watched") {
            assert!(std::fs::read(&subject.path).unwrap() == expected, "{}", subject.name);
        }
    }
}

/// Goal: vectors of any shape work, also longer ones than a system call accepts.
/// Method: 1, 2, 1024, 1025 and 3000 segments of a block and of odd lengths, empty ones among them.
#[test]
fn vectors_of_any_length_go_through() {
    let content = content(3001 * BLOCK);
    for subject in subjects(&[]) {
        let file = &*subject.file;
        for count in [1usize, 2, 1024, 1025, 3000] {
            for piece in [BLOCK, 512, 7] {
                let len = count * piece;
                let mut memory = Memory::of(&content[count..][..len]);
                let mut segments = memory.segments(piece);
                if piece == 7 {
                    // SAFETY: no byte of it is used.
                    segments.insert(count / 2, unsafe { Segment::new(std::ptr::null_mut(), 0) });
                }
                let (moved, error) = transfer(file, Direction::Write, 0, &segments);
                assert!(error.is_none() && moved == len as u64, "{}: {error:?}", subject.name);
                // Direct reads need aligned pieces.
                let aligned = len.next_multiple_of(BLOCK);
                let mut back = Memory::zeroed(aligned);
                let piece = if file.alignment(false).offset_bytes > 1 { BLOCK } else { piece };
                let segments = back.segments(piece);
                let (moved, error) = transfer(file, Direction::Read, 0, &segments);
                assert!(error.is_none() && moved >= len as u64, "{}: {error:?}", subject.name);
                assert!(back.get()[..len] == *memory.get(), "{}: {count}", subject.name);
            }
        }
    }
}

/// Goal: a batch of any length runs as a whole, and each transfer gets its own result.
/// Method: batches up to several rings long, some transfers of which lie beyond the end.
#[test]
fn batches_of_any_length_end_with_their_own_outcomes() {
    const BLOCKS: usize = 100;
    for subject in subjects(&content(BLOCKS * BLOCK)) {
        for count in [1usize, 2, 64, 65, 200] {
            let mut memories: Vec<Memory> = (0..count).map(|_| Memory::zeroed(BLOCK)).collect();
            let segments: Vec<_> = memories.iter_mut().map(|it| it.segments(BLOCK)).collect();
            let place = |i: usize| i * 7 % (BLOCKS + 20);
            let mut batch: Vec<Transfer<'_>> = (0..count)
                .map(|i| Transfer::new(Direction::Read, (place(i) * BLOCK) as u64, &segments[i]))
                .collect();
            retry::run(&*subject.file, &mut batch);
            for (i, transfer) in batch.iter().enumerate() {
                let expected = if place(i) < BLOCKS { BLOCK } else { 0 };
                assert!(transfer.error.is_none(), "{}: {:?}", subject.name, transfer.error);
                assert_eq!(transfer.moved, expected as u64, "{}", subject.name);
                let at = place(i) * BLOCK;
                assert!((0..expected).all(|b| memories[i].get()[b] == pattern(at + b)));
            }
        }
    }
}

#[test]
fn lengths_change_and_new_bytes_are_zero() {
    for subject in subjects(&content(3 * BLOCK)) {
        let file = &*subject.file;
        for len in [100u64, 3 * 4096, 0, 5000, 1 << 20] {
            file.set_len(len).unwrap();
            assert_eq!(file.len().unwrap(), len, "{}", subject.name);
        }
        let bytes = read(file, 0, 1 << 20);
        assert!(bytes.len() == 1 << 20 && bytes.iter().all(|&byte| byte == 0));
        file.sync(true).unwrap();
        file.sync(false).unwrap();
        file.descriptor(true).map_or(Ok(()), descriptors::flush).unwrap();
    }
}

#[test]
fn lengths_that_no_file_can_have_are_refused() {
    for subject in subjects(&content(10)) {
        let error = subject.file.set_len(i64::MAX as u64).unwrap_err();
        let errno = error.raw_os_error();
        assert!(matches!(errno, Some(libc::EFBIG | libc::EINVAL)), "{}: {error}", subject.name);
        assert_eq!(subject.file.len().unwrap(), 10);
    }
}

/// Goal: punched and zeroed bytes are zero, all others are as before, and the length stays.
/// Method: ranges within a block, across blocks, whole blocks, up to the end, across it and beyond.
#[test]
fn punched_and_zeroed_bytes_are_zero() {
    const LEN: usize = 20 * BLOCK + 1234;
    for subject in subjects(&content(LEN)) {
        let (file, name) = (&*subject.file, subject.name);
        let mut expected = content(LEN);
        let ranges = [
            (10, 100),
            (4000, 200),
            (3 * BLOCK, 2 * BLOCK),
            (6 * BLOCK + 1, 3 * BLOCK),
            (11 * BLOCK, 1),
            (19 * BLOCK - 1, BLOCK + 1),
            (20 * BLOCK + 1000, 234),
            (20 * BLOCK + 900, 5000),
            (30 * BLOCK, BLOCK),
        ];
        for (number, (offset, len)) in ranges.into_iter().enumerate() {
            let outcome = file.zero(offset as u64, len as u64, number % 2 == 1);
            if let Err(error) = outcome {
                assert_eq!(error.raw_os_error(), Some(libc::EOPNOTSUPP), "{name}: {error}");
                crate::skip::skip(format_args!("{name}: {error}"));
                continue;
            }
            expected[offset.min(LEN)..(offset + len).min(LEN)].fill(0);
            assert_eq!(file.len().unwrap(), LEN as u64, "{name}");
            assert!(read(file, 0, 32 * BLOCK) == expected, "{name}: {len} bytes at {offset}");
        }
        if !matches!(name, "memory" | "sim" | "sim, watched") {
            assert!(std::fs::read(&subject.path).unwrap() == expected, "{name}");
        }
    }
}

#[test]
fn allocation_changes_no_byte_and_the_length_only_if_asked_to() {
    for subject in subjects(&content(2 * BLOCK + 10)) {
        let (file, name) = (&*subject.file, subject.name);
        let mut len = 2 * BLOCK as u64 + 10;
        for (offset, more, keep_size) in
            [(0, 100, false), (100, 50_000, true), (0, 3 * 4096, false), (60_000, 1, false)]
        {
            file.allocate(offset, more, keep_size).unwrap();
            len = if keep_size { len } else { len.max(offset + more) };
            assert_eq!(file.len().unwrap(), len, "{name}");
        }
        let mut expected = content(2 * BLOCK + 10);
        expected.resize(len as usize, 0);
        assert!(read(file, 0, 100_000 / BLOCK * BLOCK) == expected, "{name}");
        let error = file.allocate(0, i64::MAX as u64, false).unwrap_err();
        assert!(matches!(error.raw_os_error(), Some(libc::EFBIG | libc::ENOSPC)), "{name}");
    }
}

/// Goal: a walk over data and holes visits the whole file, and holes read as zeros; a punched hole is
/// found; no file offset moves.
#[test]
fn seeks_find_data_and_holes() {
    const BLOCKS: usize = 64;
    for subject in subjects(&content(BLOCKS * BLOCK)) {
        let (file, name) = (&*subject.file, subject.name);
        let punched = file.zero(16 * BLOCK as u64, 32 * BLOCK as u64, false);
        let bytes = read(file, 0, BLOCKS * BLOCK);
        let (mut at, mut holes) = (0, 0);
        while let Some(data) = file.seek(at, Seek::Data).unwrap() {
            assert!(bytes[at as usize..data as usize].iter().all(|&byte| byte == 0), "{name}");
            holes += data - at;
            at = file.seek(data, Seek::Hole).unwrap().expect("the end, at least");
            assert!(at > data && at <= (BLOCKS * BLOCK) as u64, "{name}");
        }
        assert!(bytes[at as usize..].iter().all(|&byte| byte == 0), "{name}");
        if !matches!(name, "memory" | "sim" | "sim, watched") && punched.is_ok() {
            assert_eq!(holes, 32 * BLOCK as u64, "{name}");
        }
        let end = (BLOCKS * BLOCK) as u64;
        for beyond in [end, end + 1, 1 << 40, i64::MAX as u64] {
            assert_eq!(file.seek(beyond, Seek::Data).unwrap(), None, "{name}");
            assert_eq!(file.seek(beyond, Seek::Hole).unwrap(), None, "{name}");
        }
        assert_eq!(file.seek(end - 1, Seek::Hole).unwrap(), Some(end), "{name}");
    }
}

/// Goal: a seek does not change the offset of the descriptor that the file was made from, also if the file
/// is unlinked or the descriptor permits one direction only.
#[test]
fn seeks_use_a_description_of_their_own() {
    let dir = tempfile::tempdir_in(target_dir()).unwrap();
    let path = dir.path().join("file");
    let threads: Arc<Threads> = Arc::default();
    for (read, write) in [(true, false), (false, true), (true, true)] {
        std::fs::write(&path, content(BLOCK)).unwrap();
        let opened = std::fs::File::options().read(read).write(write).open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let fd: OwnedFd = opened.into();
        for backing in [Backing::Buffered, Backing::Direct] {
            let carrier = TransferDriver::Threads(Arc::clone(&threads));
            let Ok(file) = file_of(&fd, backing, carrier) else {
                crate::skip::skip(format_args!("{backing:?}"));
                continue;
            };
            file.attach(fd.try_clone().unwrap(), offered(read, write)).unwrap();
            assert_eq!(file.seek(1, Seek::Data).unwrap(), Some(1));
            assert_eq!(file.seek(1, Seek::Hole).unwrap(), Some(BLOCK as u64));
            assert_eq!(rustix::fs::tell(&fd).unwrap(), 0, "the offset moved");
        }
    }
}

/// Goal: a background read completes once, with its bytes in place; a refused caller gets the whole read
/// back.
/// Method: more concurrent reads than any backend queues, in segments, some of them beyond the end; with
/// and without a waiter, singly and in batches.
#[test]
fn background_reads_end_once_each() {
    for (wanted, together) in [(false, false), (true, false), (true, true)] {
        background_reads(wanted, together);
    }
}

fn background_reads(wanted: bool, together: bool) {
    const BLOCKS: usize = 40;
    let content = content(BLOCKS * BLOCK);
    for subject in subjects(&content) {
        let batch = together.then(batch::open);
        let (send, ended) = mpsc::channel();
        let (mut started, mut refused) = (0, 0);
        for i in 0..300usize {
            let at = i % (BLOCKS + 2);
            let mut memory = Memory::zeroed(2 * BLOCK);
            let segments = memory.segments(BLOCK).into();
            let send = send.clone();
            let read = BackgroundRead {
                direct: false,
                wanted,
                offset: (at * BLOCK) as u64,
                segments,
                done: Box::new(move |outcome| send.send((at, outcome, memory)).unwrap()),
            };
            match Arc::clone(&subject.file).start(read) {
                Ok(()) => started += 1,
                Err(read) => {
                    assert_eq!(read.segments.len(), 2);
                    refused += 1;
                }
            }
        }
        drop(batch);
        for _ in 0..started {
            let (at, outcome, memory) =
                ended.recv_timeout(Duration::from_secs(20)).expect("every read ends");
            let moved = outcome.unwrap();
            let there = (BLOCKS.saturating_sub(at) * BLOCK).min(2 * BLOCK);
            assert!(moved <= there && (moved > 0) == (there > 0), "{}: {moved}", subject.name);
            assert!(moved == 0 || memory.get()[..moved] == content[at * BLOCK..][..moved]);
        }
        assert!(ended.recv_timeout(Duration::from_millis(5)).is_err(), "completed twice");
        assert!(started > 0 && started + refused == 300);
        assert!(refused == 0 || !wanted || subject.name.starts_with("sim"));
        println!("{}: {started} started, {refused} refused", subject.name);
    }
}

/// Goal: when the completion of a background read runs, the read has no reference to its file
/// (inode.CF1). Method: the completion waits until the test has dropped the file, and then looks for
/// references and open descriptors.
#[test]
fn completions_run_without_the_file() {
    for wanted in [false, true] {
        for mut subject in subjects(&content(4 * BLOCK)) {
            let stat = rustix::fs::stat(&subject.path).unwrap();
            let id = (stat.st_dev, stat.st_ino);
            let file = Arc::downgrade(&subject.file);
            let (tell, dropped) = mpsc::channel::<()>();
            let (send, ended) = mpsc::channel();
            let mut memory = Memory::zeroed(BLOCK);
            let segments = memory.segments(BLOCK).into();
            let done = Box::new(move |outcome: io::Result<usize>| {
                dropped.recv().unwrap();
                send.send((outcome, file.strong_count(), is_closed(id))).unwrap();
            });
            let mut read = BackgroundRead { offset: 0, wanted, direct: false, segments, done };
            while let Err(refused) = Arc::clone(&subject.file).start(read) {
                read = refused;
            }
            drop(std::mem::replace(&mut subject.file, Arc::new(Nowhere { len: 0 })));
            tell.send(()).unwrap();
            let (outcome, references, is_closed) =
                ended.recv_timeout(Duration::from_secs(20)).expect("the read ends");
            assert_eq!(outcome.unwrap(), BLOCK, "{}", subject.name);
            assert_eq!(references, 0, "{}", subject.name);
            assert!(is_closed, "{}: a descriptor is open", subject.name);
        }
    }
}

/// Whether no descriptor of the file is open within a few seconds: another thread may close it.
fn is_closed((device, inode): (u64, u64)) -> bool {
    let is_it = |fd: std::fs::DirEntry| {
        rustix::fs::stat(fd.path()).is_ok_and(|stat| (stat.st_dev, stat.st_ino) == (device, inode))
    };
    let begun = Instant::now();
    while std::fs::read_dir("/proc/self/fd").unwrap().flatten().any(is_it) {
        if begun.elapsed() > Duration::from_secs(5) {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    true
}

/// Goal: a steady stream of signals does not make a transfer fail or end short.
/// Method: another thread sends a signal, whose handler does not restart system calls, every few
/// microseconds during batches of writes and reads.
#[test]
fn interrupted_transfers_are_continued() {
    static CAUGHT: AtomicUsize = AtomicUsize::new(0);
    extern "C" fn caught(_: libc::c_int) {
        CAUGHT.fetch_add(1, SeqCst);
    }
    let handler: extern "C" fn(libc::c_int) = caught;
    // SAFETY: a zeroed sigaction is valid: no flags, an empty mask; the handler only counts.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as usize;
        assert_eq!(libc::sigaction(libc::SIGUSR2, &action, std::ptr::null_mut()), 0);
    }
    // SAFETY: no arguments.
    let target = unsafe { libc::pthread_self() } as usize;
    let stop = Arc::new(AtomicBool::new(false));
    let sender = std::thread::spawn({
        let stop = Arc::clone(&stop);
        move || {
            while !stop.load(SeqCst) {
                // SAFETY: the target joins this thread before it ends.
                unsafe { libc::pthread_kill(target as libc::pthread_t, libc::SIGUSR2) };
                std::thread::sleep(Duration::from_micros(20));
            }
        }
    });
    let outcome = std::panic::catch_unwind(|| {
        for subject in subjects(&[]) {
            let started = Instant::now();
            for round in 0.. {
                if started.elapsed() > Duration::from_millis(150) {
                    break;
                }
                let mut memory = Memory::new(64 * BLOCK, |i| pattern(i + round));
                let segments = memory.segments(BLOCK);
                for direction in [Direction::Write, Direction::Read] {
                    let mut batch: Vec<Transfer<'_>> = segments
                        .chunks(8)
                        .zip(0u64..)
                        .map(|(part, i)| Transfer::new(direction, i * 8 * BLOCK as u64, part))
                        .collect();
                    retry::run(&*subject.file, &mut batch);
                    for transfer in &batch {
                        assert!(transfer.error.is_none(), "{}: {:?}", subject.name, transfer.error);
                        assert_eq!(transfer.moved, 8 * BLOCK as u64);
                    }
                }
                assert!((0..64 * BLOCK).all(|i| memory.get()[i] == pattern(i + round)));
            }
        }
    });
    stop.store(true, SeqCst);
    sender.join().unwrap();
    if let Err(panic) = outcome {
        std::panic::resume_unwind(panic);
    }
    assert!(CAUGHT.load(SeqCst) > 0);
}

/// Goal: an access that the device refuses is an error, not the end of the file.
/// Method: a descriptor for one direction only, offered for that one.
#[test]
fn a_direction_without_a_descriptor_is_an_error() {
    let dir = tempfile::tempdir_in(target_dir()).unwrap();
    let path = dir.path().join("file");
    std::fs::write(&path, content(BLOCK)).unwrap();
    let threads: Arc<Threads> = Arc::default();
    let fd: OwnedFd = std::fs::File::open(&path).unwrap().into();
    assert!(fd.as_raw_fd() >= 0);
    let file = file_of(&fd, Backing::Buffered, TransferDriver::Threads(threads)).unwrap();
    assert!(file.attach(fd, offered(true, false)).unwrap().is_none());
    assert!(file.permits(false) && !file.permits(true));
    let mut memory = Memory::new(BLOCK, |_| 9);
    let (moved, error) = transfer(&file, Direction::Write, 0, &memory.segments(BLOCK));
    assert_eq!((moved, error.unwrap().raw_os_error()), (0, Some(libc::EBADF)));
    assert!(file.set_len(0).is_err());
    let refused = [file.zero(0, 1, false), file.zero(0, 1, true), file.allocate(0, 1, true)];
    for outcome in refused {
        assert_eq!(outcome.unwrap_err().raw_os_error(), Some(libc::EBADF));
    }
    assert_eq!(read(&file, 0, BLOCK), content(BLOCK));
}
