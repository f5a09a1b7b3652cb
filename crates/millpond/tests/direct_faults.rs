//! Direct and cached operations on a failing device: which bytes are acknowledged, and which are
//! durable.

mod common;

use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use millpond::direct::{DirectRequest, SegmentList};
use millpond::sim::SimOptions;
use millpond::{BackendChoice, Error, WriteMode};

use common::requests::each;
use common::{
    Random, cache_for, direct, engine, read_write, same, scaled, sync_until_success, temp_dir,
    within,
};

/// Goal: whichever request a device fails, cached and direct readers see the same file, with all
/// acknowledged bytes.
/// Method: operations of all kinds on a device that fails after moving a part. A byte has the last
/// acknowledged value, or one of a failed write after it. Once a read of either kind has returned a
/// value, it does not change by itself.
#[test]
fn direct_and_cached_agree_where_the_device_fails() {
    let seed = Random::from_environment().next();
    for mode in [WriteMode::Through, WriteMode::Back] {
        for round in 0..scaled(6) {
            let seed = seed.wrapping_add(u64::from(round));
            within(Duration::from_secs(60), "sim", move || failing(mode, seed));
        }
    }
}

fn failing(mode: WriteMode, seed: u64) {
    const LIMIT: usize = 100_000;
    let sim = SimOptions::new(seed).error_per_mille(150).short_per_mille(300);
    let errors = sim.errors_switch();
    let dir = temp_dir();
    let path = dir.path().join("file");
    std::fs::write(&path, vec![0; LIMIT]).unwrap();
    let engine = engine(cache_for(12, 4096), BackendChoice::Sim(sim));
    let cached = engine.open(&path, &read_write().write_mode(mode)).unwrap();
    let direct = engine.open(&path, &direct()).unwrap();
    let mut random = Random(seed);
    let mut bytes = vec![0u8; LIMIT];
    let mut others = vec![Vec::new(); LIMIT];
    let mut pipeline = engine.pipeline(4).unwrap();
    let failed = |error: &Error| assert_eq!(error.errno(), libc::EIO, "{error}");
    for step in 0..400u64 {
        errors.store(step < 360, SeqCst);
        let at = random.below(LIMIT as u64 - 1) as usize;
        let len = (random.below(16_000) as usize + 1).min(LIMIT - at);
        let way = random.below(3);
        if random.chance(450) {
            let src = vec![step as u8 | 1; len];
            let mut outcome = Ok(0);
            match way {
                0 => outcome = cached.write_at(&src, at as u64),
                1 => outcome = direct.write_at(&src, at as u64),
                _ => {
                    let mut list = Some(SegmentList::from_slice(&src));
                    each(&mut pipeline, |done| {
                        if let Some(done) = done {
                            outcome = done.outcome;
                        }
                        Some(DirectRequest::write(&direct, list.take()?, at as u64))
                    });
                }
            }
            let moved = outcome.unwrap_or_else(|error| {
                failed(&error);
                0
            });
            bytes[at..at + moved].fill(src[0]);
            others[at..at + moved].iter_mut().for_each(Vec::clear);
            others[at + moved..at + len].iter_mut().for_each(|it| it.push(src[0]));
        } else if random.chance(100) {
            if let Err(error) = cached.write_back() {
                failed(&error);
            }
        } else {
            let mut dst = vec![0; len];
            let mut outcome = Ok(0);
            match way {
                0 => outcome = cached.read_at(&mut dst, at as u64),
                1 => outcome = direct.read_at(&mut dst, at as u64),
                _ => {
                    let mut list = Some(SegmentList::from_slice_mut(&mut dst));
                    each(&mut pipeline, |done| {
                        if let Some(done) = done {
                            outcome = done.outcome;
                        }
                        Some(DirectRequest::read(&direct, list.take()?, at as u64))
                    });
                }
            }
            match outcome {
                Ok(moved) => {
                    // Or the part before the bytes that could not be read.
                    assert!((1..=len).contains(&moved));
                    for (place, &byte) in dst[..moved].iter().enumerate() {
                        let (was, others) = (&mut bytes[at + place], &mut others[at + place]);
                        assert!(
                            byte == *was || others.contains(&byte),
                            "{mode:?} seed {seed} step {step} way {way}: byte {} is {byte}, not \
                             {was} or one of {others:?}",
                            at + place
                        );
                        *was = byte;
                        others.clear();
                    }
                }
                Err(error) => failed(&error),
            }
        }
    }
    errors.store(false, SeqCst);
    sync_until_success(&cached);
    let (mut one, mut other) = (vec![0; LIMIT], vec![0; LIMIT]);
    direct.read_exact_at(&mut one, 0).unwrap();
    cached.read_exact_at(&mut other, 0).unwrap();
    same(&one, &other, "direct and cached");
}

/// Goal: a write past the cache that fails leaves the dirty pages that it would have overwritten whole: they have the only copy
/// of acknowledged bytes.
#[test]
fn a_failed_write_past_the_cache_keeps_dirty_pages() {
    const LEN: usize = 8 * 4096;
    let sim = SimOptions::new(1).error_per_mille(1000);
    let errors = sim.errors_switch();
    errors.store(false, SeqCst);
    let dir = temp_dir();
    let path = dir.path().join("file");
    std::fs::write(&path, [0; LEN]).unwrap();
    let engine = engine(cache_for(64, 4096), BackendChoice::Sim(sim));
    let cached = engine.open(&path, &read_write().write_mode(WriteMode::Back)).unwrap();
    let direct = engine.open(&path, &direct()).unwrap();
    for page in 0..LEN / 4096 {
        cached.write_all_at(&[1; 4096], page as u64 * 4096).unwrap();
    }
    errors.store(true, SeqCst);
    assert_eq!(direct.write_at(&[2; LEN], 0).unwrap_err().errno(), libc::EIO);
    errors.store(false, SeqCst);
    let mut bytes = [0; LEN];
    cached.read_exact_at(&mut bytes, 0).unwrap();
    same(&bytes, &[1; LEN], "cached");
    sync_until_success(&cached);
    direct.read_exact_at(&mut bytes, 0).unwrap();
    same(&bytes, &[1; LEN], "direct");
}

/// Goal: a durable direct write is durable when it returns; any other direct write is durable after
/// the next successful sync. As direct writes have no copy in the cache, a failed sync is reported
/// until the file is closed.
/// Method: a device whose syncs fail occasionally; the durable bytes on it are checked after each
/// operation.
#[test]
fn durable_direct_writes_are_durable() {
    for seed in 0..u64::from(scaled(10)) {
        let sim = SimOptions::new(seed).fail_every_kth_sync(4).short_per_mille(200);
        let device = sim.device();
        let errors = sim.errors_switch();
        let dir = temp_dir();
        let path = dir.path().join("file");
        std::fs::write(&path, vec![0; 16 * 4096]).unwrap();
        let engine = engine(1 << 20, BackendChoice::Sim(sim));
        let mode = if seed % 2 == 0 { WriteMode::Through } else { WriteMode::Back };
        let cached = engine.open(&path, &read_write().write_mode(mode)).unwrap();
        let direct = engine.open(&path, &direct()).unwrap();
        let mut pipeline = engine.pipeline(4).unwrap();
        let mut random = Random(seed);
        let mut known: Vec<Option<u8>> = vec![None; 16];
        let mut pending: Vec<(usize, u8)> = Vec::new();
        let mut is_lost = false;
        for step in 1..60u8 {
            let page = random.below(16) as usize;
            let at = page as u64 * 4096;
            let src = [step; 4096];
            match random.below(5) {
                0 => {
                    cached.write_at(&src, at).unwrap();
                    known[page] = None;
                    pending.retain(|&(other, _)| other != page);
                    pending.push((page, step));
                }
                1 => {
                    direct.write_at(&src, at).unwrap();
                    known[page] = None;
                    pending.retain(|&(other, _)| other != page);
                    pending.push((page, step));
                }
                2 => match cached.sync_data() {
                    Ok(()) => {
                        assert!(!is_lost, "seed {seed} step {step}: success after a loss");
                        pending.drain(..).for_each(|(page, byte)| known[page] = Some(byte));
                    }
                    Err(Error::Lost { .. }) => is_lost = true,
                    Err(error) => assert_eq!(error.errno(), libc::EIO),
                },
                way => {
                    let mut outcome = direct.write_at_dsync(&src[..0], at);
                    if way == 3 {
                        outcome = direct.write_at_dsync(&src, at);
                    } else {
                        let mut list = Some(SegmentList::from_slice(&src));
                        each(&mut pipeline, |done| {
                            if let Some(done) = done {
                                outcome = done.outcome;
                            }
                            Some(DirectRequest::write(&direct, list.take()?, at).durable(true))
                        });
                    }
                    pending.retain(|&(other, _)| other != page);
                    // A part may have been durable before the rest failed.
                    let is_whole = outcome.is_ok_and(|moved| moved == 4096);
                    known[page] = is_whole.then_some(step);
                }
            }
            let durable = device.durable();
            for (page, byte) in known.iter().enumerate() {
                if let Some(byte) = byte {
                    let bytes = &durable[page * 4096..][..4096];
                    assert!(bytes == [*byte; 4096], "seed {seed} step {step}: page {page}");
                }
            }
        }
        errors.store(false, SeqCst);
        let last = cached.sync_all().and_then(|()| cached.sync_all());
        assert!(last.is_ok() || matches!(last, Err(Error::Lost { .. } | Error::Io { .. })));
    }
}

/// Goal: a sync that fails does not make bytes count as lost that a durable write has stored since.
/// Incident: a page was written through the cache, and then overwritten by a durable direct write, which
/// dropped it from the cache. After one failed sync all syncs said `Lost`, as they found no copy of the page.
/// Method: a whole page, the last page of a file, and a page that was evicted and read back.
#[test]
fn durable_bytes_are_not_lost_by_a_failed_sync() {
    for mode in [WriteMode::Through, WriteMode::Back] {
        for (case, at, len) in [("whole", 0, 4096), ("tail", 15 * 4096, 2048), ("cached", 0, 4096)]
        {
            let what = format!("{mode:?}, {case}");
            let dir = temp_dir();
            let path = dir.path().join("file");
            std::fs::write(&path, vec![0; 15 * 4096 + 2048]).unwrap();
            let sim = SimOptions::new(1).fail_every_kth_sync(2);
            let engine = engine(1 << 20, BackendChoice::Sim(sim));
            let cached = engine.open(&path, &read_write().write_mode(mode)).unwrap();
            let direct = engine.open(&path, &direct().dsync(true).bounce(true)).unwrap();
            cached.write_all_at(&vec![1; len], at).unwrap();
            let file = if case == "cached" { &cached } else { &direct };
            let mut memory = engine.alloc_buffers(1, len).unwrap();
            memory[0].fill(2);
            file.write_at_dsync(&memory[0], at).unwrap();
            // Each second sync fails.
            let outcomes: Vec<_> = (0..6).map(|_| cached.sync_all()).collect();
            assert!(outcomes.iter().any(Result::is_err), "{what}: no sync failed");
            for outcome in outcomes {
                assert!(!matches!(outcome, Err(Error::Lost { .. })), "{what}: {outcome:?}");
            }
            let mut found = vec![0; len];
            cached.read_exact_at(&mut found, at).unwrap();
            assert_eq!(found, vec![2; len], "{what}");
        }
    }
}

/// Goal: durable writes of a pipeline that have succeeded are not lost by a later sync that fails.
/// Incident: two durable writes were under way at once. The first to end was noted as bytes without a copy that
/// only a sync makes durable, and stayed noted when the other had ended. After one failed sync all syncs said `Lost`.
/// Method: some of the pages were written through the cache before; a write between the two failures as well.
#[test]
fn durable_writes_under_way_at_once_are_not_lost_by_a_failed_sync() {
    for mode in [WriteMode::Through, WriteMode::Back] {
        for depth in [1, 2, 4] {
            let what = format!("{mode:?}, {depth} at once");
            let dir = temp_dir();
            let path = dir.path().join("file");
            std::fs::write(&path, vec![0; 8 * 4096]).unwrap();
            let sim = SimOptions::new(1).fail_every_kth_sync(1);
            let errors = sim.errors_switch();
            errors.store(false, SeqCst);
            let engine = engine(1 << 20, BackendChoice::Sim(sim));
            let cached = engine.open(&path, &read_write().write_mode(mode)).unwrap();
            let direct = engine.open(&path, &direct()).unwrap();
            cached.write_all_at(&[1; 3 * 4096], 0).unwrap();
            let mut memory = engine.alloc_buffers(8, 4096).unwrap();
            memory.iter_mut().for_each(|buffer| buffer.fill(2));
            let mut pages = memory.iter().enumerate();
            let mut pipeline = engine.pipeline(depth).unwrap();
            each(&mut pipeline, |done| {
                if let Some(done) = done {
                    assert_eq!(done.outcome.unwrap(), 4096, "{what}");
                }
                let (page, buffer) = pages.next()?;
                let list = SegmentList::from_slice(buffer);
                Some(DirectRequest::write(&direct, list, page as u64 * 4096).durable(true))
            });
            errors.store(true, SeqCst);
            let error = cached.sync_all().expect_err("the device fails");
            assert!(!matches!(error, Error::Lost { .. }), "{what}: {error}");
            errors.store(false, SeqCst);
            cached.sync_all().unwrap_or_else(|error| panic!("{what}: {error}"));
            let mut found = vec![0; 8 * 4096];
            cached.read_exact_at(&mut found, 0).unwrap();
            assert_eq!(found, vec![2; 8 * 4096], "{what}");
        }
    }
}
