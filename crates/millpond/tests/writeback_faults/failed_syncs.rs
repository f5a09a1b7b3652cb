//! Syncs that fail: what they may have lost is written again, or told of.

use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use millpond::{Advice, Engine, SimOptions, WriteMode};

use crate::common::{Simulated, cache_for, read_write, same, scaled, write_back};
use crate::{LIMIT, PAGE};

/// Goal: where a failed sync may have lost bytes of which there is no copy any more, no later sync
/// claims that they are durable, and close tells of it, too.
/// Method: writes through a cache that holds a few of their pages.
#[test]
fn what_is_not_cached_any_more_is_not_claimed_to_be_durable() {
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

/// Goal: what a failed sync may have lost is not taken for safe because it was read back since.
/// Incident: a durable write that fails drops its pages; they were read again, after the device had
/// lost what an earlier write left there, and written back as if they were that.
/// Method: a write; a durable one to a part of it that fails, or a sync that does, with the pages
/// dropped before or after; reads of all; syncs. One that succeeds has made durable what may be there.
#[test]
fn what_was_lost_and_read_back_is_not_claimed_to_be_durable() {
    let (mut told, mut settled) = (0, 0);
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
                    told += 1;
                    assert_eq!(error.errno(), libc::EIO, "{error}");
                }
            }
        }
    }
    assert!(told > 0 && settled > 0, "{told} told, {settled} settled");
}

/// Goal: so it is where a write reads the rest of its page back, which somebody else has dropped.
/// Method: mode back; a page that is at the device and not synced, of which a part is made zero; a
/// durable direct write elsewhere that fails; a write to another part of the page.
#[test]
fn what_was_lost_is_not_made_up_of_what_a_write_read_back() {
    let mut told = 0;
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
                told += 1;
                assert_eq!(error.errno(), libc::EIO, "{error}");
            }
        }
    }
    assert!(told > 0, "nothing was lost: the test shows nothing");
}

/// Goal: bytes that were cut off while a sync failed are not missed for ever after.
#[test]
fn what_was_cut_off_during_a_failing_sync_is_not_lost() {
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
        sim.settles(&[]);
    }
}

/// Goal: what is dirty again after a failed sync is written back by itself, in both modes.
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
        sim.settles(&[vec![0; 100], vec![7; 9000]].concat());
    }
}

/// Goal: what a sync in the background could not make durable is tried again, now and then.
/// Incident: at once, as the pages were over the limit again; at the expense of a whole processor.
#[test]
fn failing_syncs_in_the_background_are_retried_with_pauses() {
    let builder = Engine::builder().admission(crate::common::admission()).cache_bytes(1 << 20);
    let sim = SimOptions::new(1).fail_every_kth_sync(1);
    let sim = Simulated::with(sim, &builder, &write_back());
    let expected = vec![7; 450_000];
    for (number, page) in expected.chunks(PAGE).enumerate() {
        sim.file.write_all_at(page, (number * PAGE) as u64).unwrap();
        if number == 100 {
            // May be told of a sync that has failed already.
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
    sim.settles(&expected);
}

/// Goal: pages that a sync leaves dirty, which the last handle did not wait for, are written.
/// Method: a sync in the background is held; the file is closed; the sync fails, and may lose any of what
/// the device has.
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
    // Nobody but the flusher syncs, which looks when much is dirty.
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
    wait_for("what a failed sync left dirty was dropped", &|| {
        device.writes() > writes && device.image() == content(8)
    });
}
