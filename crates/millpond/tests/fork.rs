//! A fork while the engine has work in hand. In a program of its own: the children have but one thread,
//! and must not touch what the parent's others had in hand.

mod common;

use std::ffi::CString;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use millpond::{Advice, BackendChoice, Backing, Request, SimOptions};

use common::{Random, has_uring, in_own_process, read_write, temp_dir};

const PAGE: u64 = 4096;
const FILE_BYTES: u64 = 8 << 20;

fn byte_at(offset: u64) -> u8 {
    (offset.wrapping_mul(41) ^ (offset >> 12).wrapping_mul(19)) as u8
}

fn content(offset: u64, len: usize) -> Vec<u8> {
    (offset..offset + len as u64).map(byte_at).collect()
}

/// What a child does.
#[derive(Clone, Copy, Debug)]
enum Child {
    Exits,
    BecomesAnother,
}

/// The id of a child that ends at once.
fn fork(child: Child, program: &CString) -> libc::pid_t {
    let arguments = [program.as_ptr(), std::ptr::null()];
    // SAFETY: the child calls nothing but what may be called there, and touches no memory but this.
    unsafe {
        let id = libc::fork();
        if id == 0 {
            if matches!(child, Child::BecomesAnother) {
                libc::execv(program.as_ptr(), arguments.as_ptr());
                libc::_exit(100);
            }
            libc::_exit(0);
        }
        id
    }
}

fn wait_for(child: libc::pid_t) {
    let mut status = 0;
    // SAFETY: the argument is valid for the call.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "{status:x}");
}

/// Goal: children that are forked while reads and writes are in flight, and end or become another program,
/// take no completion from the parent: all arrive, with the right bytes, and so do those of synchronous
/// reads beside them.
#[test]
fn a_child_disturbs_nothing_that_is_in_flight() {
    let test = "a_child_disturbs_nothing_that_is_in_flight";
    in_own_process(test, Duration::from_secs(120), || {
        let sim = SimOptions::new(5).delay_us_max(2000);
        let mut all = vec![
            ("sim", BackendChoice::Sim(sim), Backing::Buffered),
            ("threads", BackendChoice::Threads, Backing::Buffered),
        ];
        if has_uring() {
            all.push(("uring", BackendChoice::Uring, Backing::Buffered));
            // Past the kernel's cache: reads that are in flight for a while.
            all.push(("uring, direct", BackendChoice::Uring, Backing::Direct));
        }
        let program = CString::new("/bin/true").unwrap();
        for (name, backend, backing) in all {
            let dir = temp_dir();
            let path = dir.path().join("file");
            std::fs::write(&path, content(0, FILE_BYTES as usize)).unwrap();
            let engine = common::engine(512 << 10, backend);
            let file = match engine.open(&path, &read_write().backing(backing)) {
                Ok(file) => Arc::new(file),
                Err(error) => {
                    println!("skipped: {name}: {error}");
                    continue;
                }
            };
            file.advise(0, 0, Advice::Random).unwrap();
            let queue = engine.queue(96).unwrap();
            let mut random = Random::from_environment();
            let stop = AtomicBool::new(false);
            std::thread::scope(|scope| {
                let reader = scope.spawn(|| {
                    let (mut bytes, mut page) = (vec![0; 2 * PAGE as usize], 0);
                    while !stop.load(SeqCst) {
                        page = (page + 7) % (FILE_BYTES / PAGE - 2);
                        let moved = file.read_at(&mut bytes, page * PAGE).unwrap();
                        assert!(bytes[..moved] == content(page * PAGE, moved));
                    }
                });
                for round in 0..12 {
                    let mut requests: Vec<Request> = (0..96)
                        .map(|n| {
                            let offset = random.below(FILE_BYTES - 9000);
                            // Bytes that are there already.
                            match n % 8 {
                                0 => Request::write(&file, content(offset, 9000), offset),
                                _ => Request::read(&file, vec![0; 9000], offset),
                            }
                            .user_data(offset)
                        })
                        .collect();
                    assert_eq!(queue.submit(&mut requests), 96);
                    let children = [Child::Exits, Child::BecomesAnother];
                    let children = children.map(|child| fork(child, &program));
                    assert!(children.iter().all(|&id| id > 0));
                    let done = queue.wait(96, 96, Some(Duration::from_secs(60))).unwrap();
                    assert_eq!(done.len(), 96, "{name}, round {round}: completions are missing");
                    for one in done {
                        assert_eq!(one.result().unwrap(), 9000, "{name}");
                        let offset = one.user_data();
                        assert!(one.into_buffer() == content(offset, 9000), "{name}");
                    }
                    children.into_iter().for_each(wait_for);
                }
                stop.store(true, SeqCst);
                reader.join().unwrap();
            });
            assert_eq!(queue.counts(), (0, 0));
            file.sync_all().unwrap();
        }
    });
}
