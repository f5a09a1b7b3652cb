//! Direct I/O at its limits: alignment, the ends of files and of memory, many segments and none.

mod common;

use std::io::{IoSlice, IoSliceMut};
use std::time::Duration;

use millpond::direct::{DirectRequest, SegmentList};
use millpond::{Backing, Engine, Error, File, OpenOptions, WriteMode};

use common::requests::each;
use common::{back_ends_with_direct, direct, engine, is_on_disk, read_write, same, temp_dir};

/// An engine of each back end that uses a real file, with direct I/O where the file has it.
fn engines() -> Vec<(&'static str, Engine)> {
    let all = back_ends_with_direct(1).into_iter().filter(|&(name, _)| is_on_disk(name));
    all.map(|(name, backend)| (name, engine(1 << 20, backend))).collect()
}

fn content(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at / 4096 * 3 + at % 253) as u8 | 1).collect()
}

/// The alignment of offsets and lengths that a handle needs, or 1.
fn limit_bytes(file: &File) -> u64 {
    match file.read_at(&mut [0; 1], 1) {
        Err(Error::Unaligned { limit_bytes, .. }) => limit_bytes.into(),
        other => panic!("{other:?}"),
    }
}

fn refused(outcome: Result<usize, Error>, named: &str, limit: u64) {
    match outcome {
        Err(error @ Error::Unaligned { what, limit_bytes, .. }) => {
            assert_eq!((what, u64::from(limit_bytes)), (named, limit));
            let text = error.to_string();
            assert!(text.contains(named) && text.contains(&limit.to_string()), "{text}");
            assert_eq!(error.errno(), libc::EINVAL);
        }
        other => panic!("{named}: {other:?}"),
    }
}

/// Goal: an unaligned request fails before it has any effect, and the error names the limit. A
/// request without bytes succeeds.
#[test]
fn errors_name_what_is_not_aligned() {
    for (name, engine) in engines() {
        let dir = temp_dir();
        let path = dir.path().join("file");
        std::fs::write(&path, content(40_000)).unwrap();
        let file = engine.open(&path, &direct()).unwrap();
        let limit = limit_bytes(&file);
        let block = limit as usize;
        println!("{name}: limit {limit}");
        let mut buffer = engine.alloc_buffers(1, 16384).unwrap().pop().unwrap();
        let (one, other) = buffer.split_at_mut(8192);
        for off in [1, 3, limit / 2, limit - 1, limit + 1] {
            let cut = off as usize;
            refused(file.read_at(&mut one[..4096], off), "offset", limit);
            refused(file.write_at(&one[..4096], off), "offset", limit);
            refused(file.write_at_dsync(&one[..4096], off), "offset", limit);
            refused(file.read_at(&mut one[..cut], 0), "length of a segment", limit);
            refused(file.write_at(&one[..cut], 0), "length of a segment", limit);
            // The sum is aligned, the segments are not.
            let mut slices = [&mut one[..cut], &mut other[..block * 2 - cut]].map(IoSliceMut::new);
            refused(file.read_vectored_at(&mut slices, 0), "length of a segment", limit);
            let slices = [&one[..cut], &other[..block * 2 - cut]].map(IoSlice::new);
            refused(file.write_vectored_at(&slices, 0), "length of a segment", limit);
        }
        // Memory: devices differ.
        let memory = file.read_at(&mut one[1..4097], 0);
        if let Err(Error::Unaligned { limit_bytes, .. }) = memory {
            refused(memory, "memory of a segment", limit_bytes.into());
            let slices = [&one[..block], &other[1..=block]].map(IoSlice::new);
            refused(file.write_vectored_at(&slices, 0), "memory of a segment", limit_bytes.into());
            let mut pipeline = engine.pipeline(2).unwrap();
            let mut requests = vec![
                DirectRequest::write(&file, SegmentList::from_slice(&one[1..=block]), 0),
                DirectRequest::write(&file, SegmentList::from_slice(&one[..block]), 1),
                DirectRequest::write(&file, SegmentList::from_slice(&one[..block + 1]), 0),
            ];
            each(&mut pipeline, |done| {
                if let Some(done) = done {
                    assert!(matches!(done.outcome, Err(Error::Unaligned { .. })));
                }
                requests.pop()
            });
        }
        for at in [0, 1, 4096, 50_000, i64::MAX as u64] {
            assert_eq!(file.read_at(&mut [], at).unwrap(), 0);
            assert_eq!(file.write_at(&[], at).unwrap(), 0, "at {at}");
            assert_eq!(file.write_at_dsync(&[], at).unwrap(), 0);
            assert_eq!(file.read_vectored_at(&mut [], at).unwrap(), 0);
            assert_eq!(file.write_vectored_at(&[], at).unwrap(), 0);
            let empty: [&[u8]; 3] = [&one[3..3], &[], &other[1..1]];
            assert_eq!(file.write_vectored_at(&empty.map(IoSlice::new), at).unwrap(), 0);
        }
        assert_eq!(file.append(&[]).unwrap(), 40_000);
        // Pieces of no length may lie anywhere.
        let slices = [&one[1..1], &one[..block], &other[7..7], &other[..block]].map(IoSlice::new);
        assert_eq!(file.write_vectored_at(&slices, 0).unwrap(), 2 * block);
        let list = SegmentList::from_io_slices(&slices);
        assert_eq!((list.segments(), list.len()), (2, 2 * limit));
        assert_eq!(SegmentList::from_slice(&[]).segments(), 0);
        assert!(SegmentList::from_slice_mut(&mut []).is_empty());
        assert!(SegmentList::from_buffers(vec![]).is_empty());
        assert_eq!(SegmentList::from_buffers(vec![]).slices().count(), 0);
        // The end of the file is within a block.
        let append = file.append(&other[..4096]).map(|at| at as usize);
        refused(append, "offset", limit);
        assert_eq!(file.len().unwrap(), 40_000);
        let last = i64::MAX as u64 / limit * limit;
        for at in [last, last - limit] {
            let dst = &mut one[..2 * block];
            assert!(matches!(file.read_at(dst, at), Err(Error::InvalidRange { .. })));
            assert!(matches!(file.write_at(dst, at), Err(Error::InvalidRange { .. })));
        }
        assert_eq!(file.read_at(&mut one[..2 * block], last - 2 * limit).unwrap(), 0);
        // A valid offset, but beyond the maximum of the file system.
        let error = file.write_at(&one[..block], last - 2 * limit).unwrap_err();
        assert!(matches!(error.errno(), libc::EFBIG | libc::EINVAL), "{error}");
        assert_eq!(file.len().unwrap(), 40_000);
        let before = engine.stats();
        file.write_at(&one[..block], 0).unwrap();
        file.read_at(&mut one[..4096], 0).unwrap();
        let after = engine.stats();
        assert_eq!(after.bytes_passed - before.bytes_passed, limit + 4096);
        assert_eq!(after.bytes_served - before.bytes_served, limit + 4096);
        assert_eq!(after.bounced, 0);
    }
}

/// Goal: `bounce` serves unaligned requests of any offset, length and memory, and counts them.
/// Aligned requests are not copied.
#[test]
fn bounced_operations_of_any_alignment() {
    for (name, engine) in engines() {
        let dir = temp_dir();
        for (number, mode) in [WriteMode::Through, WriteMode::Back].into_iter().enumerate() {
            let path = dir.path().join(number.to_string());
            let mut expected = content(3_000_000);
            std::fs::write(&path, &expected).unwrap();
            let options = direct().bounce(true).write_mode(mode);
            let file = engine.open(&path, &options).unwrap();
            let cached = engine.open(&path, &read_write()).unwrap();
            let mut buffer = engine.alloc_buffers(1, 3 << 20).unwrap().pop().unwrap();
            let mut count = engine.stats().bounced;
            let mut random = common::Random(7);
            for round in 0..60u64 {
                let at = random.below(3_000_000) as usize;
                let len = match round % 10 {
                    0 => 2_500_000,
                    1 => 1,
                    2 => 4096,
                    _ => random.below(20_000) as usize + 1,
                };
                let (at, shift) = match round % 3 {
                    0 => (at / 4096 * 4096, 1),
                    _ => (at, random.below(513) as usize),
                };
                let memory = &mut buffer[shift..shift + len];
                let is_aligned = (at | len) % 4096 == 0 && shift % 512 == 0;
                if round % 2 == 0 {
                    let moved = file.read_at(memory, at as u64).unwrap();
                    let end = expected.len().min(at + len);
                    same(&memory[..moved], &expected[at.min(end)..end], name);
                } else {
                    memory.fill(round as u8);
                    assert_eq!(file.write_at(memory, at as u64).unwrap(), len);
                    expected.resize(expected.len().max(at + len), 0);
                    expected[at..at + len].fill(round as u8);
                }
                let now = engine.stats().bounced;
                assert!(
                    is_aligned || now == count + 1,
                    "{name} {round}: {count}, {now}; {at} {len}"
                );
                count = now;
                if round % 7 == 0 {
                    let end = file.append(b"odd end").unwrap();
                    assert_eq!(end, expected.len() as u64);
                    expected.extend(b"odd end");
                    count += 1;
                }
            }
            buffer[..4096].fill(1);
            file.write_at(&buffer[..4096], 8192).unwrap();
            expected[8192..8192 + 4096].fill(1);
            assert_eq!(engine.stats().bounced, count, "{name}: aligned");
            let mut seen = vec![0; expected.len()];
            cached.read_exact_at(&mut seen, 0).unwrap();
            same(&seen, &expected, name);
            drop((file, cached));
            same(&std::fs::read(&path).unwrap(), &expected, name);
        }
    }
}

/// Goal: files of every length within a block are read to their end, directly, and after a cached
/// write that waits.
#[test]
fn tails_of_every_length() {
    for (name, engine) in engines() {
        let dir = temp_dir();
        let path = dir.path().join("file");
        let file = engine.open(&path, &direct().write_mode(WriteMode::Back)).unwrap();
        let bounce = engine.open(&path, &direct().bounce(true)).unwrap();
        let cached = engine.open(&path, &read_write()).unwrap();
        let mut buffer = engine.alloc_buffers(1, 16384).unwrap().pop().unwrap();
        let step = (64.0 / common::scale()).max(1.0) as usize;
        let lens = (0..=4097).step_by(step).chain([511, 512, 513, 4095, 4097, 8191]);
        for len in lens {
            let expected: Vec<u8> = (0..len).map(|at| (at + len) as u8).collect();
            cached.truncate(0).unwrap();
            match len % 3 {
                0 => cached.write_all_at(&expected, 0).unwrap(),
                1 => bounce.write_all_at(&expected, 0).unwrap(),
                _ => assert_eq!(bounce.append(&expected).unwrap(), 0),
            }
            for at in [0, 4096, 8192] {
                buffer.fill(0xEE);
                let moved = file.read_at(&mut buffer, at).unwrap();
                same(&buffer[..moved], &expected[(at as usize).min(len)..], name);
            }
            let mut list = Some(SegmentList::from_slice_mut(&mut buffer));
            each(&mut engine.pipeline(1).unwrap(), |done| {
                if let Some(done) = done {
                    assert_eq!(done.outcome.unwrap(), len, "{name}");
                }
                Some(DirectRequest::read(&file, list.take()?, 0))
            });
            same(&buffer[..len], &expected, name);
        }
    }
}

/// Goal: without direct I/O in the file system, opening fails or the handle works. An adopted
/// descriptor serves directly. Permissions are those of the handle.
#[test]
fn other_file_systems_descriptors_and_permissions() {
    for (name, engine) in engines() {
        for path in ["/dev/shm", "/proc/self/comm", "/sys/kernel/mm/transparent_hugepage/enabled"] {
            let dir;
            let path = match std::path::Path::new(path).is_dir() {
                true => {
                    dir = tempfile::tempdir_in(path).unwrap();
                    dir.path().join("file")
                }
                false => path.into(),
            };
            if !path.starts_with("/dev/shm") && !path.exists() {
                common::skip(format_args!("no {}", path.display()));
                continue;
            }
            let options = if path.exists() { OpenOptions::new().read(true) } else { read_write() };
            match engine.open(&path, &options.direct(true)) {
                Ok(file) => {
                    let mut buffer = engine.alloc_buffers(2, 4096).unwrap().pop().unwrap();
                    println!("{name}: {}: {:?}", path.display(), file.read_at(&mut buffer, 0));
                }
                Err(error) => {
                    println!("{name}: {}: {error}", path.display());
                    // Files of the kernel's own are refused for their lengths before direct I/O is tried.
                    let (errno, reason) = match path.starts_with("/dev/shm") {
                        true => (libc::EINVAL, "no direct I/O on this file"),
                        false => (libc::EOPNOTSUPP, "length is not the number of its bytes"),
                    };
                    assert_eq!(error.errno(), errno, "{error}");
                    assert!(error.to_string().contains(reason), "{error}");
                }
            }
        }
        let dir = temp_dir();
        let path = dir.path().join("file");
        std::fs::write(&path, content(8192)).unwrap();
        let mut buffer = engine.alloc_buffers(1, 4096).unwrap().pop().unwrap();
        let fd = std::fs::File::open(&path).unwrap();
        let read = OpenOptions::new().read(true).direct(true);
        let reader = engine.from_fd(fd.into(), &read).unwrap();
        assert_eq!(reader.read_at(&mut buffer, 4096).unwrap(), 4096);
        same(&buffer, &content(8192)[4096..], name);
        assert_eq!(reader.write_at(&buffer, 0).unwrap_err().errno(), libc::EBADF);
        assert_eq!(reader.append(&buffer).unwrap_err().errno(), libc::EBADF);
        let fd = std::fs::OpenOptions::new().append(true).open(&path).unwrap();
        let write = OpenOptions::new().append(true).direct(true);
        let writer = engine.from_fd(fd.into(), &write).unwrap();
        buffer.fill(9);
        // O_APPEND does not disturb.
        assert_eq!(writer.write_at(&buffer, 0).unwrap(), 4096);
        assert_eq!(writer.append(&buffer).unwrap(), 8192);
        assert_eq!(writer.read_at(&mut buffer, 0).unwrap_err().errno(), libc::EBADF);
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 12288);
        assert_eq!(std::fs::read(&path).unwrap()[..4096], [9; 4096]);
        let error = engine.open(&path, &read_write().bounce(true)).unwrap_err();
        assert!(error.to_string().contains("bounce needs direct"), "{error}");
        drop((reader, writer));
        // The cache's own I/O bypasses the kernel's cache, too.
        let modes = [WriteMode::Through, WriteMode::Back];
        let all = modes.map(|mode| [(Backing::Direct, mode), (Backing::Uncached, mode)]);
        for (backing, write_mode) in all.into_iter().flatten() {
            let options = read_write().backing(backing).write_mode(write_mode);
            let cached = engine.open(&path, &options).unwrap();
            let file = engine.open(&path, &direct().bounce(true)).unwrap();
            cached.write_all_at(b"cached", 4000).unwrap();
            buffer.fill(0);
            assert_eq!(file.read_at(&mut buffer[1..2000], 3999).unwrap(), 1999);
            assert_eq!(&buffer[2..8], b"cached");
            file.write_all_at(b"direct", 4003).unwrap();
            cached.read_exact_at(&mut buffer[..9], 4000).unwrap();
            assert_eq!(&buffer[..9], b"cacdirect");
        }
    }
}

/// Goal: lists of many more segments than one system call takes.
#[test]
fn thousands_of_segments() {
    for (name, engine) in engines() {
        let dir = temp_dir();
        let path = dir.path().join("file");
        let count = 2500;
        let file = engine.open(&path, &direct()).unwrap();
        let block = limit_bytes(&file) as usize;
        let expected = content(count * block);
        let mut memory = engine.alloc_buffers(2, count * block).unwrap();
        let (mut src, mut dst) = (memory.pop().unwrap(), memory.pop().unwrap());
        // In an order in which no two of them are adjacent.
        let place = |number: usize| number * 999 % count * block;
        for (number, bytes) in expected.chunks(block).enumerate() {
            src[place(number)..][..block].copy_from_slice(bytes);
        }
        let slices: Vec<_> =
            (0..count).map(|number| IoSlice::new(&src[place(number)..][..block])).collect();
        assert_eq!(file.write_vectored_at(&slices, 0).unwrap(), expected.len());
        same(&std::fs::read(&path).unwrap(), &expected, name);
        file.truncate(0).unwrap();
        let mut pipeline = engine.pipeline(3).unwrap();
        let mut list = Some(SegmentList::from_io_slices(&slices));
        each(&mut pipeline, |done| {
            if let Some(done) = done {
                assert_eq!(done.outcome.unwrap(), expected.len(), "{name}");
            }
            Some(DirectRequest::write(&file, list.take()?, 0))
        });
        same(&std::fs::read(&path).unwrap(), &expected, name);
        for by_pipeline in [false, true] {
            dst.fill(0);
            let mut pieces: Vec<_> = dst.chunks_mut(block).map(Some).collect();
            let mut slices: Vec<_> = (0..count)
                .map(|number| IoSliceMut::new(pieces[place(number) / block].take().unwrap()))
                .collect();
            if by_pipeline {
                let mut list = Some(SegmentList::from_io_slices_mut(&mut slices));
                each(&mut pipeline, |done| {
                    if let Some(done) = done {
                        assert_eq!(done.outcome.unwrap(), expected.len(), "{name}");
                    }
                    Some(DirectRequest::read(&file, list.take()?, 0))
                });
            } else {
                assert_eq!(file.read_vectored_at(&mut slices, 0).unwrap(), expected.len());
            }
            assert!(*dst == *src, "{name}: by pipeline {by_pipeline}");
        }
        // And buffers, of one region and of several, in an order that differs from their addresses.
        let len = expected.len();
        for count in [200, 1000, 1500] {
            let mut buffers = engine.alloc_buffers(count, 4096).unwrap();
            buffers.reverse();
            let mut list = Some(SegmentList::from_buffers(buffers));
            let mut back = Vec::new();
            each(&mut pipeline, |done| {
                if let Some(done) = done {
                    assert_eq!(done.outcome.unwrap(), len.min(count * 4096), "{name}");
                    back = done.request.into_buffers();
                }
                Some(DirectRequest::read(&file, list.take()?, 0))
            });
            let seen: Vec<u8> = back.iter().flat_map(|it| it.iter().copied()).take(len).collect();
            same(&seen, &expected[..seen.len()], name);
            let mut written = 0;
            let mut list = Some(SegmentList::from_buffers(back));
            let end = len.next_multiple_of(block) as u64;
            each(&mut pipeline, |done| {
                if let Some(done) = done {
                    written = done.outcome.unwrap();
                }
                Some(DirectRequest::write(&file, list.take()?, end))
            });
            assert_eq!(written, count * 4096, "{name}");
            let bytes = std::fs::read(&path).unwrap();
            same(&bytes[end as usize..][..seen.len()], &seen, name);
            file.truncate(len as u64).unwrap();
        }
    }
}

/// Two pages with an unmapped one behind them.
struct Cliff(*mut u8);

impl Cliff {
    fn new() -> Cliff {
        // SAFETY: a new mapping, and a change of its own last page.
        unsafe {
            let access = libc::PROT_READ | libc::PROT_WRITE;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let at = libc::mmap(std::ptr::null_mut(), 3 * 4096, access, flags, -1, 0);
            assert_ne!(at, libc::MAP_FAILED);
            assert_eq!(libc::mprotect(at.byte_add(2 * 4096), 4096, libc::PROT_NONE), 0);
            Cliff(at.cast())
        }
    }

    fn piece(&self, from: usize, len: usize) -> libc::iovec {
        libc::iovec { iov_base: self.0.wrapping_add(from).cast(), iov_len: len }
    }
}

/// Goal: segments up to the last mapped byte are served. Segments beyond it are EFAULT, or short;
/// no guard stays held, and all readers see the same file.
#[test]
fn segments_at_the_end_of_mapped_memory() {
    for (name, engine) in engines() {
        let dir = temp_dir();
        let path = dir.path().join("file");
        let expected = content(64 * 1024);
        std::fs::write(&path, &expected).unwrap();
        let file = engine.open(&path, &direct()).unwrap();
        let cached = engine.open(&path, &read_write()).unwrap();
        let block = limit_bytes(&file) as usize;
        let cliff = Cliff::new();
        let read = |iovecs: &[libc::iovec], at| {
            // SAFETY: the handle is direct and does not bounce, so only the kernel accesses the
            // segments, and it checks them.
            unsafe { file.raw().read_vectored_at(iovecs, at) }
        };
        // SAFETY: as above.
        let write =
            |iovecs: &[libc::iovec], at| unsafe { file.raw().write_vectored_at(iovecs, at) };
        let end = 2 * 4096;
        for len in [block, 4096, 8192] {
            let list = [cliff.piece(0, 0), cliff.piece(end - len, len), cliff.piece(end, 0)];
            assert_eq!(read(&list, 4096).unwrap(), len, "{name}");
            // SAFETY: mapped.
            let seen = unsafe { std::slice::from_raw_parts(cliff.0.add(end - len), len) };
            same(seen, &expected[4096..4096 + len], name);
            assert_eq!(write(&list, 4096).unwrap(), len, "{name}");
        }
        for list in [
            vec![cliff.piece(end, block)],
            vec![cliff.piece(end - block, 2 * block)],
            vec![cliff.piece(0, 4096), cliff.piece(end - block, 3 * block)],
            vec![cliff.piece(0, 4096), cliff.piece(4096, 4096), cliff.piece(end, 4096)],
            vec![libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 4096 }],
        ] {
            for _ in 0..3 {
                let outcome = read(&list, 0);
                assert_eq!(outcome.unwrap_err().errno(), libc::EFAULT, "{name}");
                match write(&list, 0) {
                    Ok(moved) => assert!(moved % block == 0 && moved <= 2 * 4096, "{moved}"),
                    Err(error) => assert_eq!(error.errno(), libc::EFAULT, "{error}"),
                }
            }
        }
        cached.invalidate(0, i64::MAX as u64).unwrap();
        let (mut one, mut other) = (vec![0; 65536], vec![0; 65536]);
        cached.read_exact_at(&mut one, 0).unwrap();
        let mut buffer = engine.alloc_buffers(1, 65536).unwrap().pop().unwrap();
        file.read_exact_at(&mut buffer, 0).unwrap();
        other.copy_from_slice(&buffer);
        same(&one, &other, name);
        common::within(Duration::from_secs(5), "close", move || drop((file, cached)));
    }
}
