//! Write-back with a keeper: the messages to the keeper, and its final changes of files.

mod common;

use std::os::unix::fs::FileExt;
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;

use millpond::keeper::{Address, Report, Server, Stopper};
use millpond::{BackendChoice, Engine, OpenOptions, WriteMode};

use common::{same, temp_dir, write_back};

const PAGE: usize = 4096;

/// A keeper on its own thread.
struct Keeper {
    address: Address,
    reports: Receiver<Report>,
    stopper: Stopper,
    thread: JoinHandle<std::io::Result<()>>,
}

impl Keeper {
    fn new() -> Keeper {
        let server = Server::bind(&Address::unique()).unwrap();
        let (address, stopper) = (server.address().clone(), server.stopper());
        let (send, reports) = channel();
        let thread = std::thread::spawn(move || server.serve(|report| send.send(report).unwrap()));
        Keeper { address, reports, stopper, thread }
    }

    fn engine(&self) -> Engine {
        let builder = Engine::builder().cache_bytes(8 << 20).backend(BackendChoice::Threads);
        builder.keeper(self.address.clone()).build().unwrap()
    }

    /// The engines are gone.
    fn end(self) -> Vec<Report> {
        self.stopper.stop_when_idle();
        self.thread.join().unwrap().unwrap();
        self.reports.try_iter().collect()
    }
}

/// Goal: a page that is not cached is overwritten whole.
/// Incident: it was committed twice.
#[test]
fn a_page_that_is_not_cached_is_overwritten() {
    let keeper = Keeper::new();
    let dir = temp_dir();
    let path = dir.path().join("file");
    let mut expected = vec![1; 8 * PAGE];
    std::fs::write(&path, &expected).unwrap();
    let engine = keeper.engine();
    let file = engine.open(&path, &write_back()).unwrap();
    for (stamp, at) in [(2, 3 * PAGE), (3, 3 * PAGE), (4, 5 * PAGE)] {
        file.write_all_at(&[stamp; PAGE], at as u64).unwrap();
        expected[at..at + PAGE].fill(stamp);
    }
    file.close().unwrap();
    drop(engine);
    same(&std::fs::read(&path).unwrap(), &expected, "closed");
    assert!(keeper.end().iter().all(|report| report.files.is_empty()));
}

/// Goal: the keeper does not touch a file that was closed, even if none of its writes could wait in
/// the cache.
/// Method: a write to a part of a page through a handle that may not read it.
/// Incident: the keeper still had the file, and in the end cut off bytes that another process had
/// appended.
#[test]
fn the_keeper_does_not_touch_a_closed_file() {
    let keeper = Keeper::new();
    let dir = temp_dir();
    let path = dir.path().join("file");
    std::fs::write(&path, [1; 100]).unwrap();
    let engine = keeper.engine();
    let options = OpenOptions::new().write(true).write_mode(WriteMode::Back);
    let file = engine.open(&path, &options).unwrap();
    file.write_all_at(&[2; 10], 50).unwrap();
    file.close().unwrap();
    let mut expected = vec![1; 100];
    expected[50..60].fill(2);
    same(&std::fs::read(&path).unwrap(), &expected, "closed");
    let other = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    other.write_all_at(&[3; 100], 100).unwrap();
    expected.resize(200, 3);
    drop(engine);
    let reports = keeper.end();
    assert!(reports.iter().all(|report| report.files.is_empty()), "{reports:?}");
    same(&std::fs::read(&path).unwrap(), &expected, "in the end");
}
