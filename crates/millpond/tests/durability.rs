//! Durable operations: errors that several operations share, and errors that are not the device's.

mod common;

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use millpond::direct::{DirectRequest, SegmentList};
use millpond::sim::SimOptions;
use millpond::{Advice, BackendChoice, Error, OpenOptions, WriteMode};

use common::{
    Simulated, cache_for, direct, engine, in_own_process, read_write, scaled, set_limit, temp_dir,
    write_back,
};

const PAGE: usize = 4096;
const LIMIT: Duration = Duration::from_secs(60);

/// A device that fails each sync while errors are on; they are off at first.
fn failing_syncs(seed: u64, options: &OpenOptions) -> Simulated {
    let sim = SimOptions::new(seed).fail_every_kth_sync(1);
    let sim = Simulated::new(sim, cache_for(64, PAGE as u64), options);
    sim.errors(false);
    sim
}

fn direct_dsync(mode: WriteMode) -> OpenOptions {
    read_write().write_mode(mode).direct(true).bounce(true).dsync(true)
}

/// Goal: a durable write whose bytes are lost does not succeed, even if another sync has already
/// returned the error.
/// Incident: the write's own transfer returned no error, as a concurrent sync had consumed it. The
/// two outcomes were not compared.
/// Method: the device accepts the bytes of a durable write; a sync fails and loses some of them;
/// then the device completes the write successfully.
#[test]
fn a_durable_write_shares_the_error_of_a_sync_beside_it() {
    let (mut reported, mut succeeded) = (0, 0);
    for seed in 0..u64::from(scaled(40)) {
        // In mode back a sync waits for the page.
        for options in [read_write(), direct_dsync(WriteMode::Through)] {
            let sim = failing_syncs(seed, &options);
            let file = Arc::new(sim.engine.open(&sim.path, &options).unwrap());
            file.write_all_at(&[1; 4 * PAGE], 0).unwrap();
            file.sync_data().unwrap();
            sim.device.hold_next_sync();
            let writer = Arc::clone(&file);
            let writer = thread::spawn(move || writer.write_at_dsync(&[2; PAGE], 0));
            assert!(sim.device.wait_for_held_sync(LIMIT));
            sim.errors(true);
            sim.file.sync_data().unwrap_err();
            sim.errors(false);
            sim.device.release_sync();
            match writer.join().unwrap() {
                Ok(moved) => {
                    succeeded += 1;
                    let durable = sim.device.durable();
                    assert_eq!((moved, &durable[..PAGE]), (PAGE, &[2; PAGE][..]), "{options:?}");
                }
                Err(error) => {
                    reported += 1;
                    assert_eq!(error.errno(), libc::EIO, "{error}");
                }
            }
        }
    }
    assert!(reported > 0, "{succeeded} succeeded: the test shows nothing");
}

/// Goal: the same for two durable writes.
/// Method: the second one fails, and loses bytes of the first, which the device completes
/// successfully.
#[test]
fn a_durable_write_shares_the_error_of_another() {
    let mut reported = 0;
    for seed in 0..u64::from(scaled(40)) {
        for options in [read_write(), write_back(), direct_dsync(WriteMode::Back)] {
            let sim = failing_syncs(seed, &options);
            let file = Arc::new(sim.engine.open(&sim.path, &options).unwrap());
            file.write_all_at(&[1; 4 * PAGE], 0).unwrap();
            file.sync_data().unwrap();
            sim.device.hold_next_sync();
            let writer = Arc::clone(&file);
            let writer = thread::spawn(move || writer.write_at_dsync(&[2; PAGE], 0));
            assert!(sim.device.wait_for_held_sync(LIMIT));
            sim.errors(true);
            file.write_at_dsync(&[3; PAGE], 2 * PAGE as u64).unwrap_err();
            sim.errors(false);
            sim.device.release_sync();
            match writer.join().unwrap() {
                Ok(_) => assert_eq!(sim.device.durable()[..PAGE], [2; PAGE], "{options:?}"),
                Err(error) => {
                    reported += 1;
                    assert_eq!(error.errno(), libc::EIO, "{error}");
                }
            }
        }
    }
    assert!(reported > 0, "the test shows nothing");
}

/// Goal: a sync does not succeed while a direct request holds an error that it has not reported yet
/// and that may concern bytes of the sync.
/// Incident: the error counted only when the request's outcome was reported, and syncs did not wait
/// for that.
/// Method: the durable write of a pipeline fails and loses earlier writes; another thread syncs
/// before the pipeline is asked for its completions.
#[test]
fn a_sync_waits_for_durable_direct_requests() {
    let mut reported = 0;
    for seed in 0..u64::from(scaled(40)) {
        let sim = failing_syncs(seed, &read_write());
        sim.file.write_all_at(&[0; 8 * PAGE], 0).unwrap();
        sim.file.sync_data().unwrap();
        sim.file.write_all_at(&[1; 4 * PAGE], 0).unwrap();
        let direct = sim.engine.open(&sim.path, &direct_dsync(WriteMode::Through)).unwrap();
        let mut buffers = sim.engine.alloc_buffers(1, PAGE).unwrap();
        thread::scope(|scope| {
            let mut syncing = None;
            sim.engine.pipeline(2).unwrap().run(|lane| {
                let number = lane.number();
                match lane.into_ended() {
                    Some((_, outcome)) => drop(outcome.unwrap_err()),
                    None if number == 0 => {
                        let list = SegmentList::from_buffers(buffers.pop().into_iter().collect());
                        sim.errors(true);
                        return Some(DirectRequest::write(&direct, list, 5 * PAGE as u64));
                    }
                    None => {
                        // The device has failed the write.
                        sim.errors(false);
                        syncing = Some(scope.spawn(|| sim.file.sync_data()));
                        thread::sleep(Duration::from_millis(20));
                    }
                }
                None
            });
            match syncing.take().unwrap().join().unwrap() {
                Ok(()) => {
                    assert_eq!(sim.device.durable()[..4 * PAGE], [1; 4 * PAGE], "seed {seed}")
                }
                Err(error) => {
                    reported += 1;
                    assert_eq!(error.errno(), libc::EIO, "{error}");
                }
            }
        });
    }
    assert!(reported > 0, "the test shows nothing");
}

/// Goal: a durable request of a pipeline does not succeed if another one has lost its bytes, and
/// its slot goes on.
/// Method: two slots with two durable writes each; the device fails the second of them.
#[test]
fn durable_requests_share_their_errors() {
    let (mut reported, mut succeeded) = (0, 0);
    for seed in 0..u64::from(scaled(60)) {
        let sim = SimOptions::new(seed).fail_every_kth_sync(2 + seed % 4);
        let sim = Simulated::new(sim, cache_for(64, PAGE as u64), &read_write());
        sim.errors(false);
        sim.file.write_all_at(&[0; 16 * PAGE], 0).unwrap();
        sim.file.sync_data().unwrap();
        sim.errors(true);
        let direct = sim.engine.open(&sim.path, &direct_dsync(WriteMode::Through)).unwrap();
        let mut next = 0;
        let mut ended = Vec::new();
        sim.engine.pipeline(3).unwrap().run(|lane| {
            if let Some((request, outcome)) = lane.into_ended() {
                ended.push((request.offset() as usize, outcome));
            }
            if next == 12 {
                return None;
            }
            let mut buffers = sim.engine.alloc_buffers(1, PAGE).unwrap();
            buffers[0].fill(next as u8 + 1);
            let list = SegmentList::from_buffers(buffers);
            let request = DirectRequest::write(&direct, list, (next * PAGE) as u64);
            next += 1;
            Some(request)
        });
        assert_eq!(ended.len(), 12);
        let durable = sim.device.durable();
        for (offset, outcome) in ended {
            match outcome {
                Ok(moved) => {
                    succeeded += 1;
                    let stamp = (offset / PAGE) as u8 + 1;
                    assert_eq!(moved, PAGE);
                    assert_eq!(durable[offset..offset + PAGE], [stamp; PAGE], "seed {seed}");
                }
                Err(error) => {
                    reported += 1;
                    assert_eq!(error.errno(), libc::EIO, "{error}");
                }
            }
        }
    }
    assert!(reported > 0 && succeeded > 0, "{reported} failed, {succeeded} succeeded");
}

/// Goal: direct reads return the written bytes, even if the device has lost them and a sync has
/// returned the error.
/// Incident: the page became DIRTY again only at the next sync, so a direct read went to the
/// device.
/// Method: cached pages that the device has; a durable write elsewhere fails, and the pages are
/// lost with it.
#[test]
fn direct_reads_return_bytes_that_the_device_lost() {
    let mut lost = 0;
    for seed in 0..u64::from(scaled(40)) {
        for options in [read_write(), write_back()] {
            let sim = failing_syncs(seed, &options);
            sim.file.write_all_at(&[0; 16 * PAGE], 0).unwrap();
            sim.file.sync_data().unwrap();
            sim.file.write_all_at(&[7; 4 * PAGE], 0).unwrap();
            sim.file.write_back().unwrap();
            sim.file.read_at(&mut [0; 4 * PAGE], 0).unwrap();
            let direct = direct_dsync(WriteMode::Through);
            let direct = sim.engine.open(&sim.path, &direct).unwrap();
            sim.errors(true);
            direct.write_at(&[9; PAGE], 8 * PAGE as u64).unwrap_err();
            sim.errors(false);
            lost += usize::from(sim.device.image()[..4 * PAGE] != [7; 4 * PAGE]);
            let mut seen = vec![0; 4 * PAGE];
            assert_eq!(direct.read_at(&mut seen, 0).unwrap(), seen.len());
            assert_eq!(seen, [7; 4 * PAGE], "seed {seed}, {options:?}");
            // The rest of the page does not come from the device, either.
            direct.write_at(&[8; 100], 50).unwrap();
            sim.file.sync_data().unwrap();
            let mut expected = vec![7; 4 * PAGE];
            expected[50..150].fill(8);
            assert_eq!(sim.device.durable()[..4 * PAGE], expected, "seed {seed}, {options:?}");
        }
    }
    assert!(lost > 0, "the device lost nothing: the test shows nothing");
}

/// Goal: a write-back error that no caller has seen is returned once to the next opener of the
/// file, as the kernel does.
/// Incident: the error was lost when the last handle was closed.
/// Method: bytes without a copy; the flusher's sync of them fails; the file is closed and opened
/// again.
#[test]
fn a_background_error_is_returned_to_the_next_opener() {
    let sim = SimOptions::new(5).fail_every_kth_sync(1);
    let sim = Simulated::new(sim, cache_for(64, PAGE as u64), &write_back());
    // Past the cache, then more bytes than may be unsynced.
    sim.file.write_all_at(&vec![1; 40 * PAGE], 0).unwrap();
    let begun = std::time::Instant::now();
    while sim.device.failed_syncs() == 0 {
        for page in 0..24 {
            sim.file.write_all_at(&[2; PAGE], page * PAGE as u64).unwrap();
        }
        // Bytes that the device accepted before the failure was reported have to be written again.
        assert!(sim.file.write_back().is_ok() || sim.device.failed_syncs() > 0);
        assert!(begun.elapsed() < LIMIT, "nothing was synced in the background");
    }
    sim.errors(false);
    let Simulated { engine, file, path, .. } = sim;
    drop(file);
    // A thread of the engine may still hold the file for a moment. Until then the open gets the
    // same file object, which reports the error as long as it is open.
    let returns_error = || {
        let file = engine.open(&path, &write_back()).unwrap();
        matches!(file.sync_data(), Err(Error::Lost { .. }))
    };
    let within_a_moment = |is_so: &dyn Fn() -> bool, what: &str| {
        let begun = std::time::Instant::now();
        while !is_so() {
            assert!(begun.elapsed() < Duration::from_secs(5), "{what}");
        }
    };
    within_a_moment(&returns_error, "no open returns the error");
    within_a_moment(&|| !returns_error(), "the error is returned again and again");
    assert!(!returns_error(), "the error is returned again");
    // Another file of the same name, and possibly of the same inode number, gets no error.
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, b"new").unwrap();
    engine.open(&path, &write_back()).unwrap().sync_all().unwrap();
}

/// Goal: a durable write that is refused loses nothing, and syncs succeed.
/// Incident: after a write past the cache, a durable one that met a full disk or a limit made every
/// sync say that bytes are lost.
/// Method: a device that has no room; a limit of the process, with SIGXFSZ ignored.
#[test]
fn refused_durable_writes_lose_nothing() {
    for options in [read_write(), write_back(), direct_dsync(WriteMode::Through).dsync(false)] {
        let sim = SimOptions::new(1).fail_every_kth_write(1, libc::ENOSPC);
        let sim = Simulated::new(sim, cache_for(64, PAGE as u64), &options);
        sim.errors(false);
        // Without a copy.
        sim.file.write_all_at(&vec![1; 40 * PAGE], 0).unwrap();
        sim.errors(true);
        let refused = sim.file.write_at_dsync(&[2; PAGE], 50 * PAGE as u64).unwrap_err();
        assert_eq!(refused.errno(), libc::ENOSPC, "{options:?}: {refused}");
        sim.errors(false);
        // In mode back the cached bytes stay, and are written again.
        sim.file.sync_data().unwrap_or_else(|error| panic!("{options:?}: {error}"));
        assert_eq!(sim.device.durable()[..40 * PAGE], [1; 40 * PAGE]);
    }
    in_own_process("refused_durable_writes_lose_nothing", LIMIT, || {
        // SAFETY: no handler.
        unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
        for backend in [BackendChoice::Threads, BackendChoice::Auto] {
            for options in [read_write(), write_back(), direct().bounce(true)] {
                let dir = temp_dir();
                let path = dir.path().join("file");
                let engine = engine(8 << 20, backend.clone());
                let file = match engine.open(&path, &options) {
                    Ok(file) => file,
                    Err(error) => {
                        common::skip(format_args!("{options:?}: {error}"));
                        continue;
                    }
                };
                file.write_all_at(&vec![1; 4 << 20], 0).unwrap();
                assert!(set_limit(libc::RLIMIT_FSIZE, 8 << 20, libc::RLIM_INFINITY));
                let refused = file.write_at_dsync(&[2; PAGE], 8 << 20).unwrap_err();
                assert!(set_limit(libc::RLIMIT_FSIZE, libc::RLIM_INFINITY, libc::RLIM_INFINITY));
                assert_eq!(refused.errno(), libc::EFBIG, "{options:?}: {refused}");
                file.sync_data().unwrap_or_else(|error| panic!("{options:?}: {error}"));
                file.close().unwrap();
                assert_eq!(std::fs::read(&path).unwrap(), [1; 4 << 20]);
            }
        }
    });
}

/// Goal: where a sandbox refuses `RWF_DSYNC`, durable writes are a write and a sync.
/// Incident: each of them failed, and with it each sync.
/// Method: a seccomp filter in a process of its own.
#[test]
fn durable_writes_do_without_a_flag_that_is_refused() {
    in_own_process("durable_writes_do_without_a_flag_that_is_refused", LIMIT, || {
        let dir = temp_dir();
        let path = dir.path().join("file");
        let engine = engine(8 << 20, BackendChoice::Threads);
        refuse_dsync();
        let probe = std::fs::File::create(dir.path().join("probe")).unwrap();
        let flags = rustix::io::ReadWriteFlags::DSYNC;
        let slices = [std::io::IoSlice::new(b"x")];
        let refused = rustix::io::pwritev2(&probe, &slices, 0, flags).unwrap_err();
        assert_eq!(refused, rustix::io::Errno::OPNOTSUPP);
        for options in [read_write(), write_back(), direct().bounce(true)] {
            let file = match engine.open(&path, &options) {
                Ok(file) => file,
                Err(error) => {
                    common::skip(format_args!("{options:?}: {error}"));
                    continue;
                }
            };
            for page in 0..3 {
                assert_eq!(file.write_at_dsync(&[7; PAGE], page * PAGE as u64).unwrap(), PAGE);
            }
            file.sync_data().unwrap();
            file.close().unwrap();
            assert_eq!(std::fs::read(&path).unwrap(), [7; 3 * PAGE]);
            std::fs::remove_file(&path).unwrap();
        }
    });
}

/// From here on `pwritev2` with `RWF_DSYNC` answers EOPNOTSUPP, in all threads.
fn refuse_dsync() {
    const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const JUMP_IF_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const JUMP_IF_SET: u16 = (libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    let step = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    // The number of the call; the low half of its sixth argument.
    let (number, flags) = (0, 16 + 5 * 8);
    let refusal = libc::SECCOMP_RET_ERRNO | libc::EOPNOTSUPP as u32;
    let filter = [
        step(LOAD, 0, 0, number),
        step(JUMP_IF_EQUAL, 0, 3, libc::SYS_pwritev2 as u32),
        step(LOAD, 0, 0, flags),
        step(JUMP_IF_SET, 0, 1, libc::RWF_DSYNC as u32),
        step(RETURN, 0, 0, refusal),
        step(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
    // SAFETY: the program is valid for the call.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let all = libc::SECCOMP_FILTER_FLAG_TSYNC;
        let set = libc::SECCOMP_SET_MODE_FILTER;
        assert_eq!(libc::syscall(libc::SYS_seccomp, set, all, &raw const program), 0);
    }
}

/// Goal: a sync releases all pages that write-back pins, in any number of leaves of the table.
/// Incident: pages of more than a thousand leaves were not recorded. They stayed in the cache until
/// the file was closed, and a failed sync reported them lost.
/// Method: a page in each of more leaves than that, of a sparse file.
#[test]
fn pages_in_many_leaves_are_released() {
    const LEAVES: u64 = 1300;
    const LEAF_BYTES: u64 = 512 * PAGE as u64;
    let dir = temp_dir();
    let engine = engine(64 << 20, BackendChoice::Threads);
    let file = engine.open(dir.path().join("file"), &write_back().create(true)).unwrap();
    for leaf in 0..LEAVES {
        file.write_all_at(&[1; PAGE], leaf * LEAF_BYTES).unwrap();
    }
    file.sync_data().unwrap();
    file.advise(0, 0, Advice::DontNeed).unwrap();
    let before = engine.stats();
    for leaf in 0..LEAVES {
        file.read_at(&mut [0; PAGE], leaf * LEAF_BYTES).unwrap();
    }
    let after = engine.stats();
    assert_eq!(after.misses - before.misses, LEAVES, "some were kept");
}
