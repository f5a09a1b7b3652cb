//! Tests of survival against a real keeper; `kill_tests` has those that stop at every step.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::cache::frame::FrameIndex;
use crate::survival::keeper::{Address, Report, Server, Stopper};
use crate::survival::{FileSlot, Survival};

/// A keeper in a thread.
pub(super) struct TestKeeper {
    pub(super) address: Address,
    pub(super) reports: Receiver<Report>,
    stopper: Stopper,
    thread: Option<JoinHandle<std::io::Result<()>>>,
}

impl TestKeeper {
    pub(super) fn new() -> TestKeeper {
        let server = Server::bind(&Address::unique()).unwrap().patience(Duration::ZERO);
        let (address, stopper) = (server.address().clone(), server.stopper());
        let (send, reports) = channel();
        let thread = std::thread::spawn(move || server.serve(|report| send.send(report).unwrap()));
        TestKeeper { address, reports, stopper, thread: Some(thread) }
    }
}

impl Drop for TestKeeper {
    fn drop(&mut self) {
        self.stopper.stop_when_idle();
        let served = self.thread.take().unwrap().join();
        if !std::thread::panicking() {
            served.unwrap().unwrap();
        }
    }
}

pub(super) fn adopt(survival: &Survival, file: &File, page_shift: u32) -> FileSlot {
    let stat = file.metadata().unwrap();
    survival.adopt(file.as_fd(), stat.dev(), stat.ino(), stat.len(), page_shift).unwrap()
}

pub(super) fn fill(survival: &Survival, frame: u32, bytes: usize, with: u8) {
    survival.handed_out(FrameIndex(frame));
    // SAFETY: the frame is the test's.
    unsafe { survival.frame(FrameIndex(frame)).write_bytes(with, bytes) };
}

/// Goal: what is dirty when an engine goes is written, to the byte; and what was cleaned or
/// forgotten is not touched.
#[test]
fn dirty_pages_are_written() {
    let keeper = TestKeeper::new();
    let dir = tempfile::tempdir().unwrap();
    let survival = Survival::connect(&keeper.address, 1 << 20, 512).unwrap();
    let open = |name: &str| {
        let file = File::create_new(dir.path().join(name)).unwrap();
        file.write_all_at(&[1; 10_000], 0).unwrap();
        file
    };
    let (file, other) = (open("file"), open("other"));
    let slot = adopt(&survival, &file, 12);
    let other_slot = adopt(&survival, &other, 12);
    for frame in 1..=5 {
        fill(&survival, frame, 4096, 10 + frame as u8);
    }
    survival.commit(slot, [(0, FrameIndex(1))].into_iter(), None);
    survival.commit(slot, [(2, FrameIndex(2)), (3, FrameIndex(3))].into_iter(), Some(13_000));
    survival.commit(slot, [(0, FrameIndex(4))].into_iter(), None);
    survival.commit(other_slot, [(0, FrameIndex(5))].into_iter(), None);
    survival.clean(FrameIndex(5));
    survival.forget(other_slot);
    drop(survival);
    let report = keeper.reports.recv().unwrap();
    assert!(report.is_complete() && report.goodbye, "{report}");
    assert_eq!((report.files.len(), report.pages()), (1, 3), "{report:?}");
    assert!(report.files[0].drained);
    let bytes = std::fs::read(dir.path().join("file")).unwrap();
    let mut expected = vec![1; 13_000];
    expected[..4096].fill(14);
    expected[8192..12_288].fill(12);
    expected[12_288..].fill(13);
    assert!(bytes == expected);
    assert_eq!(std::fs::read(dir.path().join("other")).unwrap(), [1; 10_000]);
}

/// Goal: an engine with a keeper works as any other.
#[test]
fn an_engine_with_a_keeper() {
    use crate::{Engine, OpenOptions};
    let keeper = TestKeeper::new();
    let dir = tempfile::tempdir().unwrap();
    let engine = Engine::builder().cache_bytes(8 << 20).keeper(keeper.address.clone()).build();
    let engine = engine.unwrap();
    let options = OpenOptions::new().read(true).write(true).create(true);
    for page_bytes in [4096, 16384, 65536] {
        let path = dir.path().join(format!("file{page_bytes}"));
        let file = engine.open(path, &options.clone().page_bytes(page_bytes)).unwrap();
        let bytes: Vec<u8> = (0..20_000_000u32).map(|at| (at / 1000) as u8).collect();
        file.write_all_at(&bytes, 0).unwrap();
        let mut back = vec![0; 100_000];
        for round in 0..3 {
            for at in (0..bytes.len() - back.len()).step_by(77_777) {
                assert_eq!(file.read_at(&mut back, at as u64).unwrap(), back.len());
                assert!(back == bytes[at..at + back.len()], "at {at}, round {round}");
            }
        }
        assert!(engine.stats().memory_bytes <= engine.cache_bytes());
    }
}
