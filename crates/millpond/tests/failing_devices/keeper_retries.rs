//! A keeper writes the pages of a killed process to a device that fails.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use millpond::keeper::{Address, Report, Server, restore};
use millpond::{BackendChoice, Engine};

use super::common::{in_own_process, temp_dir, write_back};
use super::device::{FailingDisk, Kind};
use super::{MappedPages, PAGE, fill, first_wrong};

const ROLE: &str = "MILLPOND_TEST_KEPT_WRITER";
/// The keeper answers within its patience of 5 s, or soon after.
const LIMIT: Duration = Duration::from_secs(60);

/// The writer: leaves pages 64 to 511 dirty, and waits for its end.
#[test]
#[ignore = "a role, in which other tests start this program"]
fn writer() {
    let role = std::env::var(ROLE).unwrap();
    let (address, path) = role.split_once('|').unwrap();
    let builder = Engine::builder().cache_bytes(64 << 20).backend(BackendChoice::Threads);
    let engine = builder.keeper(address.parse::<Address>().unwrap()).build().unwrap();
    let file = engine.open(path, &write_back()).unwrap();
    fill(&file, 0..64, 1);
    file.sync_all().unwrap();
    fill(&file, 64..512, 2);
    println!("\nready");
    loop {
        std::thread::park();
    }
}

fn start_writer(address: &Address, path: &Path) -> Child {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["keeper_retries::writer", "--exact", "--ignored", "--nocapture"])
        .env(ROLE, format!("{address}|{}", path.display()))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let said = BufReader::new(child.stdout.take().unwrap());
    assert!(said.lines().any(|line| line.unwrap().contains("ready")), "the writer ended");
    child
}

/// Kills a writer of `path` while `disk` fails. The keeper's reports.
fn kill_a_writer(disk: &mut FailingDisk, path: &Path) -> Receiver<Report> {
    let server = Server::bind(&Address::unique()).unwrap();
    let (address, stopper) = (server.address().clone(), server.stopper());
    let (send, reports) = channel();
    std::thread::spawn(move || server.serve(|report| send.send(report).unwrap()));
    let mut child = start_writer(&address, path);
    disk.fail();
    child.kill().unwrap();
    child.wait().unwrap();
    stopper.stop_when_idle();
    reports
}

fn assert_stored(disk: &mut FailingDisk, path: &Path) {
    disk.remount();
    let found = std::fs::read(path).unwrap();
    assert_eq!(found.len(), 512 * PAGE);
    assert_eq!(first_wrong(&found, 0..64, 1), None);
    assert_eq!(first_wrong(&found, 64..512, 2), None);
}

/// Goal: after a failed sync the keeper tries again. The pages that it reports as written are on the device.
/// Incident: the second sync of ext4 succeeded, and a remount read zeros.
#[test]
fn a_keeper_that_tries_again_stores_the_pages() {
    let Some(mut disk) = FailingDisk::new(Kind::EXT4) else { return };
    let path = disk.path("file");
    let reports = kill_a_writer(&mut disk, &path);
    // Several attempts of the keeper fail.
    std::thread::sleep(Duration::from_secs(2));
    assert!(reports.try_recv().is_err(), "the device did not fail");
    disk.work();
    let report = reports.recv_timeout(LIMIT).expect("the keeper's report");
    assert!(report.is_complete(), "{report}");
    assert_eq!(report.pages(), 448, "{report}");
    assert_stored(&mut disk, &path);
}

/// Goal: the same while another process maps the pages, and at the next restore from a rescue file.
/// Incident: the kernel does not drop mapped pages by `fadvise`. The sync succeeded, and a remount read zeros.
#[test]
fn mapped_pages_are_stored_by_a_keeper_and_by_a_restore() {
    let test = "keeper_retries::mapped_pages_are_stored_by_a_keeper_and_by_a_restore";
    in_own_process(test, 2 * LIMIT, || {
        let state = temp_dir();
        // SAFETY: the one test of its process, which has started no thread that reads the environment.
        unsafe { std::env::set_var("XDG_STATE_HOME", state.path()) };
        for gives_up in [false, true] {
            let Some(mut disk) = FailingDisk::new(Kind::EXT4) else { return };
            let path = disk.path("file");
            // An open would wait for the keeper.
            std::fs::write(&path, []).unwrap();
            let mapped = MappedPages::of(&path, 512 * PAGE);
            let reports = kill_a_writer(&mut disk, &path);
            // The first attempt of the keeper makes the file this long.
            while std::fs::metadata(&path).unwrap().len() < 512 * PAGE as u64 {
                std::thread::sleep(Duration::from_millis(1));
            }
            mapped.touch();
            if !gives_up {
                std::thread::sleep(Duration::from_secs(1));
                mapped.touch();
                disk.work();
            }
            let report = reports.recv_timeout(LIMIT).expect("the keeper's report");
            assert_eq!(report.is_complete(), !gives_up, "{report}");
            if gives_up {
                let rescue = report.files[0].rescue.clone().expect("a rescue file");
                mapped.touch();
                restore(&rescue, None, true).expect_err("the device did not fail");
                mapped.touch();
                disk.work();
                restore(&rescue, None, true).unwrap();
            }
            drop(mapped);
            assert_stored(&mut disk, &path);
        }
    });
}

/// Goal: pages of a rescue file are on the device once `restore` has succeeded.
/// Incident: the keeper gave up after a failed sync. `restore` wrote the same pages of the kernel's page cache, its
/// sync succeeded, and a remount read zeros.
#[test]
fn pages_that_a_keeper_could_not_write_are_restored() {
    let test = "keeper_retries::pages_that_a_keeper_could_not_write_are_restored";
    in_own_process(test, LIMIT, || {
        let state = temp_dir();
        // SAFETY: the one test of its process, which has started no thread that reads the environment.
        unsafe { std::env::set_var("XDG_STATE_HOME", state.path()) };
        let Some(mut disk) = FailingDisk::new(Kind::EXT4) else { return };
        let path = disk.path("file");
        let reports = kill_a_writer(&mut disk, &path);
        let report = reports.recv_timeout(LIMIT).expect("the keeper's report");
        let rescue = report.files[0].rescue.clone().expect("a rescue file");
        assert!(rescue.starts_with(state.path()), "{report}");
        // A restore meets the failing device as well.
        restore(&rescue, None, true).expect_err("the device did not fail");
        disk.work();
        restore(&rescue, None, true).unwrap();
        assert_stored(&mut disk, &path);
    });
}

/// Goal: a file of which the keeper can't repeat the writes of a failed sync is not reported as complete.
/// Incident: another process changed the file after the failed sync, so the keeper wrote nothing more. The next sync
/// succeeded, and the report had all pages and no failure.
#[test]
fn writes_that_are_not_repeated_are_reported() {
    let test = "keeper_retries::writes_that_are_not_repeated_are_reported";
    in_own_process(test, LIMIT, || {
        let state = temp_dir();
        // SAFETY: the one test of its process, which has started no thread that reads the environment.
        unsafe { std::env::set_var("XDG_STATE_HOME", state.path()) };
        let Some(mut disk) = FailingDisk::new(Kind::EXT4) else { return };
        let path = disk.path("file");
        // An open would wait for the keeper.
        std::fs::write(&path, []).unwrap();
        let other = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
        let reports = kill_a_writer(&mut disk, &path);
        while other.metadata().unwrap().len() < 512 * PAGE as u64 {
            std::thread::sleep(Duration::from_millis(1));
        }
        // One change may count as the keeper's own, if it comes with a write of the keeper.
        for _ in 0..20 {
            std::thread::sleep(Duration::from_millis(50));
            other.write_all_at(&[9], 0).unwrap();
        }
        disk.work();
        let report = reports.recv_timeout(LIMIT).expect("the keeper's report");
        assert!(!report.is_complete(), "{report}");
        assert_eq!(report.pages(), 0, "{report}");
        assert!(report.files[0].rescue.is_some(), "{report}");
    });
}
