//! The caller's memory faults: errors instead of a dead process.
#![cfg(target_arch = "x86_64")]

mod common;

use std::time::Duration;

use millpond::{BackendChoice, Error, File};

use common::{engine, in_own_process, read_write, temp_dir};

/// Continues where the copy stopped, or gives the fault back to the system.
extern "C" fn on_fault(_: libc::c_int, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes the context of the interrupted thread.
    let registers = unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs };
    let pc = registers[libc::REG_RIP as usize] as usize;
    match millpond::fault::resume_address(pc) {
        Some(address) => registers[libc::REG_RIP as usize] = address as i64,
        // SAFETY: back to the default, so that the fault kills the process when it is repeated.
        None => unsafe {
            libc::signal(libc::SIGSEGV, libc::SIG_DFL);
            libc::signal(libc::SIGBUS, libc::SIG_DFL);
        },
    }
}

fn install() {
    let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = on_fault;
    // SAFETY: a zeroed sigaction is valid; the handler touches its context only.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as usize;
        action.sa_flags = libc::SA_SIGINFO;
        assert_eq!(libc::sigaction(libc::SIGSEGV, &action, std::ptr::null_mut()), 0);
        assert_eq!(libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut()), 0);
    }
}

/// A mapped page, and behind it as many as the file has that can't be accessed.
fn half_mapped() -> *mut u8 {
    // SAFETY: a new mapping, and a change of its own pages.
    unsafe {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let at = libc::mmap(std::ptr::null_mut(), 4096 + CLOSED, access, flags, -1, 0);
        assert_ne!(at, libc::MAP_FAILED);
        assert_eq!(libc::mprotect(at.byte_add(4096), CLOSED, libc::PROT_NONE), 0);
        at.cast()
    }
}

fn read(file: &File, dst: *mut u8, len: usize, offset: u64) -> Result<usize, Error> {
    // SAFETY: the memory may fault: the handler consults `millpond::fault`.
    unsafe { file.raw().read_at(dst, len, offset) }
}

fn write(file: &File, src: *const u8, len: usize, offset: u64) -> Result<usize, Error> {
    // SAFETY: as above.
    unsafe { file.raw().write_at(src, len, offset) }
}

const FILE_LEN: usize = 40 * 4096;
const CLOSED: usize = FILE_LEN + 4096;

fn content(at: usize) -> u8 {
    (at % 253) as u8 + 1
}

fn check_all(file: &File, expected: &[u8]) {
    let mut bytes = vec![0; expected.len() + 1];
    assert_eq!(file.read_at(&mut bytes, 0).unwrap(), expected.len());
    assert!(bytes[..expected.len()] == *expected);
}

/// Goal: a read into, or a write from, inaccessible memory is EFAULT. Such a write changes nothing
/// or is short, and the cache stays correct.
/// Method: memory that is inaccessible from its second page on, as a whole, or from the middle of
/// an operation on; cached and not, one page and many, with the lock-free path and without.
#[test]
fn faults_are_errors_and_leave_the_cache_intact() {
    in_own_process("faults_are_errors_and_leave_the_cache_intact", Duration::from_secs(60), || {
        install();
        for (name, backend) in common::back_ends(1) {
            if matches!(backend, BackendChoice::Memory | BackendChoice::Sim(_)) {
                // They touch the memory themselves, where a kernel says EFAULT.
                continue;
            }
            for cache_bytes in [16 << 10, 64 << 10, 4 << 20] {
                for hit_path in [true, false] {
                    faults(name, backend.clone(), cache_bytes, hit_path);
                }
            }
        }
    });
}

fn faults(name: &str, backend: BackendChoice, cache_bytes: u64, hit_path: bool) {
    let dir = temp_dir();
    let path = dir.path().join("file");
    let expected: Vec<u8> = (0..FILE_LEN).map(content).collect();
    std::fs::write(&path, &expected).unwrap();
    let engine = engine(cache_bytes, backend);
    engine.set_hit_path(hit_path);
    let file = engine.open(&path, &read_write()).unwrap();
    let memory = half_mapped();
    let closed = memory.wrapping_add(4096);
    let is_fault = |error: &Error| {
        assert_eq!(error.errno(), libc::EFAULT, "{name}: {error}");
        let text = error.to_string();
        assert!(text.contains("bytes at offset"), "{text}");
    };
    for round in 0..2 {
        for (offset, len) in [(0, 4096), (100, 50), (4000, 4096), (8192, 60_000), (0, FILE_LEN)] {
            is_fault(&read(&file, closed, len, offset).unwrap_err());
        }
        // Inaccessible from the middle on: an error, or the bytes before it.
        for (offset, len) in [(0u64, 4096), (5000, 20_000)] {
            match read(&file, closed.wrapping_sub(1000), len, offset) {
                Ok(moved) => assert!(moved <= 1000),
                Err(error) => is_fault(&error),
            }
        }
        // SAFETY: the page before the closed one is ours.
        unsafe { memory.write_bytes(0xAB, 4096) };
        for (offset, len) in [(0, 4096), (100, 50), (4000, 4096), (8192, 60_000)] {
            is_fault(&write(&file, closed, len, offset).unwrap_err());
            check_all(&file, &expected);
        }
        // A new last page: its other bytes are known, so it is built from the closed memory.
        is_fault(&write(&file, closed, 10, FILE_LEN as u64).unwrap_err());
        check_all(&file, &expected);
        // All is cached now, as far as it fits, in the second round.
        if round == 0 {
            check_all(&file, &expected);
        }
    }
    // Partly accessible memory: short, or nothing at all.
    let mut expected = expected;
    for offset in [4096usize, 12_300] {
        let len = 3000;
        match write(&file, closed.wrapping_sub(1000), len, offset as u64) {
            Ok(moved) => {
                assert!(moved <= 1000);
                expected[offset..offset + moved].fill(0xAB);
            }
            Err(error) => is_fault(&error),
        }
        check_all(&file, &expected);
    }
    // SAFETY: as for `read`; the iovecs name memory that may fault.
    let outcome = unsafe {
        let good = libc::iovec { iov_base: memory.cast(), iov_len: 100 };
        let bad = libc::iovec { iov_base: closed.cast(), iov_len: 5000 };
        file.raw().read_vectored_at(&[good, bad], 0)
    };
    match outcome {
        Ok(moved) => assert!(moved <= 100),
        Err(error) => is_fault(&error),
    }
    // SAFETY: as above.
    if let Err(error) = unsafe { file.raw().append(closed, 100) } {
        is_fault(&error);
    } else {
        panic!("appended from memory that can't be read");
    }
    assert_eq!(file.write_at(b"fine", 50).unwrap(), 4);
    expected[50..54].copy_from_slice(b"fine");
    check_all(&file, &expected);
    file.invalidate(0, FILE_LEN as u64).unwrap();
    check_all(&file, &expected);
    drop(file);
    assert!(std::fs::read(&path).unwrap() == expected);
}

/// Goal: a durable write from inaccessible memory does not count as a failed sync: earlier bytes
/// that are not cached are not reported lost.
#[test]
fn a_fault_of_a_durable_write_loses_nothing() {
    in_own_process("a_fault_of_a_durable_write_loses_nothing", Duration::from_secs(60), || {
        install();
        let dir = temp_dir();
        let engine = engine(64 << 10, BackendChoice::Threads);
        for (number, options) in [read_write(), common::write_back()].iter().enumerate() {
            let path = dir.path().join(number.to_string());
            let file = engine.open(&path, &options.clone().dsync(true)).unwrap();
            let plain = engine.open(&path, options).unwrap();
            // More than stays cached.
            plain.write_all_at(&[7; FILE_LEN], 0).unwrap();
            let closed = half_mapped().wrapping_add(4096);
            for (offset, len) in [(FILE_LEN as u64, 10), (0, 4096), (100, 10), (0, FILE_LEN)] {
                let error = write(&file, closed, len, offset).unwrap_err();
                assert_eq!(error.errno(), libc::EFAULT, "{error}");
            }
            file.sync_all().unwrap();
            check_all(&file, &[7; FILE_LEN]);
        }
    });
}
