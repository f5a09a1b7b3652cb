//! Direct writes beside dirty pages, in a process that is killed: the keeper's write-back does not
//! overwrite newer direct writes.

mod common;

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::sync::mpsc::channel;
use std::time::Duration;

use millpond::direct::{DirectRequest, SegmentList};
use millpond::keeper::{Address, Server};
use millpond::{BackendChoice, Engine};

use common::requests::each;
use common::{Random, read_write, scaled, temp_dir, write_back};

const PAGE: usize = 4096;
/// Pages of each thread of the child.
const PAGES: u64 = 8;
const THREADS: u64 = 2;
const ROLE: &str = "MILLPOND_TEST_DIRECT_KEEPER";

/// The place where the child reports a page's number, before the write and after it.
fn place(page: u64, is_done: bool) -> u64 {
    (page * 2 + u64::from(is_done)) * 8
}

fn child(dir: &Path, address: &str) {
    let backend = match common::has_uring() {
        true => BackendChoice::Uring,
        false => BackendChoice::Threads,
    };
    let builder =
        Engine::builder().admission(common::admission()).cache_bytes(1 << 20).backend(backend);
    let engine = builder.keeper(address.parse::<Address>().unwrap()).build().unwrap();
    let path = dir.join("file");
    let cached = engine.open(&path, &write_back()).unwrap();
    let direct = engine.open(&path, &read_write().direct(true)).unwrap();
    let log = std::fs::OpenOptions::new().write(true).open(dir.join("log")).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (engine, cached, direct, log) = (&engine, &cached, &direct, &log);
            scope.spawn(move || {
                let mut random = Random(u64::from(std::process::id()) << 8 | thread);
                let mut pipeline = engine.pipeline(2).unwrap();
                let mut memory = engine.alloc_buffers(2, PAGES as usize * PAGE).unwrap();
                let mut buffer = memory.pop();
                let mut other = memory.pop().unwrap();
                for number in 1u64.. {
                    let first = random.below(PAGES);
                    let count = 1 + random.below(PAGES - first);
                    let pages = thread * PAGES + first..thread * PAGES + first + count;
                    let say = |is_done| {
                        for page in pages.clone() {
                            log.write_all_at(&number.to_ne_bytes(), place(page, is_done)).unwrap();
                        }
                    };
                    let (at, len) = (pages.start * PAGE as u64, count as usize * PAGE);
                    say(false);
                    let mut bytes = buffer.take().unwrap();
                    bytes
                        .chunks_mut(8)
                        .for_each(|word| word.copy_from_slice(&number.to_ne_bytes()));
                    match random.below(8) {
                        0..4 => assert_eq!(cached.write_at(&bytes[..len], at).unwrap(), len),
                        4 | 5 => assert_eq!(direct.write_at(&bytes[..len], at).unwrap(), len),
                        _ => {
                            other.copy_from_slice(&bytes);
                            let mut list = Some(SegmentList::from_slice(&other[..len]));
                            each(&mut pipeline, |done| {
                                if let Some(done) = done {
                                    assert_eq!(done.outcome.unwrap(), len);
                                }
                                Some(DirectRequest::write(direct, list.take()?, at))
                            });
                        }
                    }
                    say(true);
                    match random.below(30) {
                        0 => cached.sync_data().unwrap(),
                        1 => drop(cached.read_at(&mut bytes, at).unwrap()),
                        2 => drop(direct.read_at(&mut bytes, at / 4096 * 4096).unwrap()),
                        _ => {}
                    }
                    buffer = Some(bytes);
                }
            });
        }
    });
}

/// Goal: after a kill at any moment each page has the bytes of its last write, cached or direct.
/// Method: a process whose threads write numbers to pages, cached and directly, and report each
/// number before and after the write. The process is killed. After the keeper's report each page
/// has one number, between the last acknowledged and the last started one.
#[test]
fn a_killed_process_loses_no_direct_write() {
    if let Ok(role) = std::env::var(ROLE) {
        let (dir, address) = role.split_once('|').unwrap();
        return child(Path::new(dir), address);
    }
    let mut random = Random::from_environment();
    let mut written_back = 0;
    // With fewer children, all may die without dirty pages.
    for _ in 0..scaled(8).max(4) {
        let dir = temp_dir();
        std::fs::write(dir.path().join("log"), vec![0; (THREADS * PAGES * 16) as usize]).unwrap();
        std::fs::write(dir.path().join("file"), []).unwrap();
        let (path, engine) =
            (dir.path().join("probe"), common::engine(1 << 20, BackendChoice::Threads));
        if let Err(error) = engine.open(&path, &read_write().direct(true)) {
            return common::skip(error);
        }
        let server = Server::bind(&Address::unique()).unwrap();
        let (address, stopper) = (server.address().clone(), server.stopper());
        let (send, reports) = channel();
        let thread = std::thread::spawn(move || server.serve(|report| send.send(report).unwrap()));
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["a_killed_process_loses_no_direct_write", "--exact", "--nocapture"])
            .env(ROLE, format!("{}|{address}", dir.path().display()))
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_millis(100 + random.below(200)));
        assert!(child.try_wait().unwrap().is_none(), "the child ended by itself");
        child.kill().unwrap();
        child.wait().unwrap();
        let report = reports.recv_timeout(Duration::from_secs(30)).expect("the keeper's report");
        stopper.stop_when_idle();
        thread.join().unwrap().unwrap();
        assert!(report.is_complete(), "{report}");
        written_back += report.pages();
        let log = std::fs::read(dir.path().join("log")).unwrap();
        let bytes = std::fs::read(dir.path().join("file")).unwrap();
        let word = |bytes: &[u8], at: u64| {
            let at = at as usize;
            u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap())
        };
        for page in 0..THREADS * PAGES {
            let (begun, done) = (word(&log, place(page, false)), word(&log, place(page, true)));
            let start = page as usize * PAGE;
            assert!(done == 0 || bytes.len() >= start + PAGE, "page {page} is cut off");
            if bytes.len() < start + PAGE {
                continue;
            }
            let seen = word(&bytes, start as u64);
            assert!(
                seen >= done && seen <= begun,
                "page {page}: {seen}, but {done} was acknowledged, {begun} begun"
            );
            assert!(
                bytes[start..start + PAGE].chunks(8).all(|it| it == seen.to_ne_bytes()),
                "torn"
            );
        }
    }
    assert!(written_back > 0, "the keeper had nothing to write: the test shows nothing");
}
