//! Buffers beyond the limit of locked memory are served, and reported.

mod common;

use std::time::Duration;

use millpond::BackendChoice;
use millpond::direct::{DirectRequest, SegmentList};

use common::requests::each;
use common::{engine, in_own_process, read_write, same, set_limit, temp_dir};

/// Drops CAP_IPC_LOCK, which lifts the limit, in this thread; returns whether it is dropped.
fn drop_ipc_lock() -> bool {
    const VERSION_3: u32 = 0x2008_0522;
    const IPC_LOCK: u32 = 14;
    let header = [VERSION_3, 0];
    let mut sets = [0u32; 6];
    // SAFETY: a header and two sets of three words, as version 3 has them, for this thread.
    unsafe {
        if libc::syscall(libc::SYS_capget, header.as_ptr(), sets.as_mut_ptr()) != 0 {
            return false;
        }
        sets[0] &= !(1 << IPC_LOCK);
        sets[1] &= !(1 << IPC_LOCK);
        libc::syscall(libc::SYS_capset, header.as_ptr(), sets.as_ptr()) == 0
    }
}

/// Goal: memory is registered up to the limit, the rest is not, and requests work with both. Freed
/// memory makes room for other memory.
/// Method: 8 MiB may be locked; requests of 64 MiB of buffers.
#[test]
fn buffers_beyond_the_limit_of_locked_memory() {
    in_own_process("buffers_beyond_the_limit_of_locked_memory", Duration::from_secs(60), || {
        const LIMIT: u64 = 8 << 20;
        const EACH: usize = 256 << 10;
        const COUNT: usize = 256;
        if !common::has_uring() {
            return;
        }
        if !drop_ipc_lock() || !set_limit(libc::RLIMIT_MEMLOCK, LIMIT, LIMIT) {
            return common::skip("the limit can't be set");
        }
        let dir = temp_dir();
        let path = dir.path().join("file");
        let engine = engine(1 << 20, BackendChoice::Uring);
        let file = match engine.open(&path, &read_write().direct(true)) {
            Ok(file) => file,
            Err(error) => return common::skip(error),
        };
        let mut pipeline = match engine.pipeline(8) {
            Ok(pipeline) => pipeline,
            Err(error) => return common::skip(format_args!("no ring within the limit: {error}")),
        };
        for round in 0..2u8 {
            let mut buffers = engine.alloc_buffers(COUNT, EACH).unwrap();
            for (number, buffer) in buffers.iter_mut().enumerate() {
                buffer.fill(number as u8 ^ round);
            }
            let mut written = Vec::new();
            let mut number = 0u64;
            each(&mut pipeline, |done| {
                if let Some(done) = done {
                    assert_eq!(done.outcome.unwrap(), EACH);
                    written.extend(done.request.into_buffers());
                }
                number += 1;
                let list = SegmentList::from_buffers(vec![buffers.pop()?]);
                Some(DirectRequest::write(&file, list, (COUNT as u64 - number) * EACH as u64))
            });
            let registration = pipeline.registration();
            println!("{registration:?}");
            let total = (COUNT * EACH) as u64;
            assert!(registration.registered_bytes <= LIMIT, "more than may be");
            assert!(
                registration.registered_bytes >= LIMIT / 2,
                "less than may be: {registration:?}"
            );
            // Of the memory that is in use, and no other.
            let known = registration.registered_bytes + registration.refused_bytes;
            assert_eq!(known, total, "{registration:?}");
            assert_eq!(written.len(), COUNT);
            let mut reads = 0;
            each(&mut pipeline, |done| {
                if let Some(mut done) = done {
                    assert_eq!(done.outcome.unwrap(), EACH);
                    let expected = (done.request.offset() / EACH as u64) as u8 ^ round;
                    let seen = done.request.slices_mut().next().unwrap();
                    assert!(seen[..4096] == [expected; 4096] && seen.ends_with(&[expected; 4096]));
                }
                let list = SegmentList::from_buffers(vec![written.pop()?]);
                reads += 1;
                Some(DirectRequest::read(&file, list, (reads - 1) * EACH as u64))
            });
            let bytes = std::fs::read(&path).unwrap();
            for (number, bytes) in bytes.chunks(EACH).enumerate() {
                same(bytes, &vec![number as u8 ^ round; EACH], "on the disk");
            }
        }
    });
}
