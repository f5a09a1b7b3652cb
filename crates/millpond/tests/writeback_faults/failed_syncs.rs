//! Failed syncs: bytes that they may have lost are written again, or reported.

use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use millpond::sim::SimOptions;
use millpond::{Advice, Engine, WriteMode};

use crate::common::{Simulated, cache_for, read_write, same, scaled, write_back};
use crate::{LIMIT, PAGE};

/// Goal: where a failed sync may have lost bytes without a cached copy, no later sync succeeds as
/// if they were durable, and close returns the error, too.
/// Method: writes through a cache that holds a few of their pages.
#[test]
fn evicted_bytes_do_not_count_as_durable() {
    let mut refused = 0;
    for seed in 0..u64::from(scaled(40)) {
        let sim = SimOptions::new(seed).fail_every_kth_sync(1);
        let sim = Simulated::new(sim, cache_for(4, PAGE as u64), &read_write());
        let content: Vec<u8> = (0..64 * PAGE).map(|i| (i / 512) as u8 | 1).collect();
        for (number, page) in content.chunks(PAGE).enumerate() {
            sim.file.write_all_at(page, (number * PAGE) as u64).unwrap();
        }
        sim.errors(true);
        sim.file.sync_data().unwrap_err();
        sim.errors(false);
        let mut claimed = false;
        let mut message = String::new();
        for _ in 0..3 {
            match sim.file.sync_data() {
                Ok(()) => {
                    claimed = true;
                    same(&sim.device.durable(), &content, "claimed to be durable");
                }
                Err(error) => {
                    assert_eq!(error.errno(), libc::EIO, "{error}");
                    message = error.to_string();
                }
            }
        }
        if !claimed {
            refused += 1;
            let close = sim.file.close().expect_err("close is silent");
            assert_eq!(close.errno(), libc::EIO);
            if seed == 0 {
                println!("{message}; {close}");
            }
            // A new start.
            let file = sim.engine.open(&sim.path, &read_write()).unwrap();
            file.write_all_at(b"again", 0).unwrap();
            file.sync_all().unwrap();
            file.close().unwrap();
        }
    }
    assert!(refused > 0, "the bytes were still cached: the test shows nothing");
}

/// Goal: bytes that a failed sync may have lost do not count as safe because they were read back
/// since.
/// Incident: a durable write that fails drops its pages. They were read again, after the device had
/// lost the bytes of an earlier write there, and written back in place of them.
/// Method: a write; a durable one to a part of it that fails, or a sync that does, with the pages
/// dropped before or after; reads of all; syncs. A successful sync has made one of the possible
/// contents durable.
#[test]
fn bytes_read_back_do_not_count_as_durable() {
    let (mut reported, mut settled) = (0, 0);
    for seed in 0..u64::from(scaled(40)) {
        let [is_write, drops_before, drops_after] = [1, 2, 4].map(|bit| seed & bit != 0);
        let sim = SimOptions::new(seed).fail_every_kth_sync(1);
        let sim = Simulated::new(sim, cache_for(40, PAGE as u64), &read_write());
        let mut bytes = vec![7; 3 * PAGE];
        let mut read_again = |is_to_drop: bool| {
            if is_to_drop {
                sim.file.advise(0, 0, Advice::DontNeed).unwrap();
            }
            sim.file.read_at(&mut bytes, 0).unwrap();
        };
        sim.errors(false);
        sim.file.write_all_at(&[7; 3 * PAGE], 0).unwrap();
        read_again(drops_before);
        sim.errors(true);
        if is_write {
            sim.file.write_at_dsync(&[8; 100], PAGE as u64 + 50).unwrap_err();
        } else {
            sim.file.sync_data().unwrap_err();
        }
        sim.errors(false);
        read_again(drops_after);
        for _ in 0..3 {
            match sim.file.sync_data() {
                Ok(()) => {
                    settled += 1;
                    let durable = sim.device.durable();
                    let (written, rest): (Vec<_>, Vec<_>) =
                        (0..3 * PAGE).partition(|at| (PAGE + 50..PAGE + 150).contains(at));
                    assert_eq!(durable.len(), 3 * PAGE, "seed {seed}");
                    assert!(rest.iter().all(|&at| durable[at] == 7), "seed {seed}: lost");
                    let may_be = |at: usize| durable[at] == 7 || (is_write && durable[at] == 8);
                    assert!(written.iter().all(|&at| may_be(at)), "seed {seed}: lost");
                }
                Err(error) => {
                    reported += 1;
                    assert_eq!(error.errno(), libc::EIO, "{error}");
                }
            }
        }
    }
    assert!(reported > 0 && settled > 0, "{reported} failed, {settled} succeeded");
}

/// Goal: the same where a write reads back the rest of its page, which another thread has dropped.
/// Method: mode back; a page that is at the device and not synced, of which a part is made zero; a
/// durable direct write elsewhere that fails; a write to another part of the page.
#[test]
fn a_partial_write_does_not_repair_lost_bytes() {
    let mut reported = 0;
    for seed in 0..u64::from(scaled(20)) {
        let sim = SimOptions::new(seed).fail_every_kth_sync(1);
        let sim = Simulated::new(sim, cache_for(40, PAGE as u64), &write_back());
        sim.errors(false);
        let direct = read_write().write_mode(WriteMode::Back).direct(true).bounce(true).dsync(true);
        let direct = sim.engine.open(&sim.path, &direct).unwrap();
        for page in 0..9 {
            sim.file.write_all_at(&[7; PAGE], page * PAGE as u64).unwrap();
        }
        sim.file.write_back().unwrap();
        sim.file.zero_range(PAGE as u64, 100).unwrap();
        sim.errors(true);
        direct.write_at(&[9; PAGE], 8 * PAGE as u64).unwrap_err();
        sim.errors(false);
        sim.file.write_all_at(&[8; 100], PAGE as u64 + 200).unwrap();
        match sim.file.sync_data() {
            Ok(()) => {
                let durable = sim.device.durable();
                let rest = (0..8 * PAGE).filter(|at| !(PAGE..PAGE + 300).contains(at));
                assert!(rest.into_iter().all(|at| durable[at] == 7), "seed {seed}: lost");
            }
            Err(error) => {
                reported += 1;
                assert_eq!(error.errno(), libc::EIO, "{error}");
            }
        }
    }
    assert!(reported > 0, "nothing was lost: the test shows nothing");
}

/// Goal: bytes that were truncated during a failing sync do not make later syncs fail.
#[test]
fn bytes_truncated_during_a_failing_sync_are_not_lost() {
    for (seed, options) in (0..20).zip([write_back(), read_write()].iter().cycle()) {
        let sim = SimOptions::new(seed).fail_every_kth_sync(1).delay_us_max(20_000);
        let sim = Simulated::new(sim, 1 << 20, options);
        sim.errors(false);
        sim.file.write_all_at(&[7; 3 * PAGE], 0).unwrap();
        sim.file.write_back().unwrap();
        sim.errors(true);
        std::thread::scope(|scope| {
            scope.spawn(|| sim.file.sync_all().unwrap_err());
            std::thread::sleep(Duration::from_millis(1));
            sim.file.truncate(0).unwrap();
        });
        sim.assert_stored(&[]);
    }
}

/// Goal: pages that are dirty again after a failed sync are written back by age, in both modes.
#[test]
fn after_a_failed_sync_pages_are_written_again_by_age() {
    for options in [write_back(), read_write()] {
        let builder = Engine::builder()
            .admission(crate::common::admission())
            .cache_bytes(1 << 20)
            .dirty_age_max(LIMIT / 100);
        let sim = SimOptions::new(1).fail_every_kth_sync(1);
        let sim = Simulated::with(sim, &builder, &options);
        sim.file.write_all_at(&[7; 9000], 100).unwrap();
        sim.file.sync_all().unwrap_err();
        let (writes, started) = (sim.device.writes(), Instant::now());
        while sim.device.writes() == writes {
            assert!(started.elapsed() < LIMIT / 6, "nobody writes back");
            std::thread::sleep(Duration::from_millis(5));
        }
        sim.assert_stored(&[vec![0; 100], vec![7; 9000]].concat());
    }
}

/// Goal: a failed sync in the background is retried at intervals.
/// Incident: it was retried at once, as the pages were over the limit again, which used a whole
/// processor.
#[test]
fn failing_syncs_in_the_background_are_retried_with_pauses() {
    let builder = Engine::builder().admission(crate::common::admission()).cache_bytes(1 << 20);
    let sim = SimOptions::new(1).fail_every_kth_sync(1);
    let sim = Simulated::with(sim, &builder, &write_back());
    let expected = vec![7; 450_000];
    for (number, page) in expected.chunks(PAGE).enumerate() {
        sim.file.write_all_at(page, (number * PAGE) as u64).unwrap();
        if number == 100 {
            // May return the error of an earlier sync.
            let _ = sim.file.write_back();
        }
    }
    let started = Instant::now();
    while sim.device.failed_syncs() == 0 {
        assert!(started.elapsed() < LIMIT, "nobody syncs");
        std::thread::sleep(Duration::from_millis(1));
    }
    let before = sim.device.failed_syncs();
    std::thread::sleep(Duration::from_secs(1));
    let failed = sim.device.failed_syncs() - before;
    assert!(failed < 50, "{failed} failed syncs in a second");
    sim.assert_stored(&expected);
}

/// Goal: pages that a failing sync leaves dirty after the last handle was closed are written.
/// Method: a sync in the background is held; the file is closed; the sync fails, and may lose any
/// bytes that the device has.
#[test]
fn a_file_is_closed_during_a_failing_sync() {
    let sim = SimOptions::new(1).fail_every_kth_sync(1);
    let errors = sim.errors_switch();
    let sim = Simulated::new(sim, 1 << 20, &write_back());
    let wait_for = |what: &str, is_so: &dyn Fn() -> bool| {
        let started = Instant::now();
        while !is_so() {
            assert!(started.elapsed() < LIMIT, "{what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    // More than a quarter of the cache.
    let content = |stamp: u8| vec![stamp; 75 * PAGE];
    sim.file.write_all_at(&content(7), 0).unwrap();
    sim.file.write_back().unwrap();
    sim.device.hang_syncs(true);
    // Only the flusher syncs, and it scans when many pages are dirty.
    for (number, page) in content(8).chunks(PAGE).enumerate() {
        sim.file.write_all_at(page, (number * PAGE) as u64).unwrap();
    }
    wait_for("nobody syncs", &|| sim.device.hanging() > 0);
    let (device, _engine) = (sim.device.clone(), sim.engine.clone());
    drop(sim.file);
    assert_eq!(device.failed_syncs(), 0, "the last handle waited for the sync");
    let writes = device.writes();
    device.hang_syncs(false);
    wait_for("the sync did not fail", &|| device.failed_syncs() > 0);
    errors.store(false, SeqCst);
    wait_for("dirty pages of a failed sync were dropped", &|| {
        device.writes() > writes && device.image() == content(8)
    });
}
