//! Block devices that fail, below real file systems: after a sync has succeeded, a remount finds the bytes.
//!
//! A loop device whose image lies in a small tmpfs fails its writes while that tmpfs is full, and works again
//! when it has room. The tests compare with the file as a fresh mount of the same image shows it, so the
//! kernel's page cache has no say.

mod common;

#[path = "failing_devices/device.rs"]
mod device;

#[path = "failing_devices/server.rs"]
mod server;

use std::sync::Arc;
use std::time::Duration;

use millpond::{AsyncFile, BackendChoice, Backing, File, OpenOptions, Request, WriteMode};

use common::{block_on, engine, has_uring, read_write, sync_in_the_end, within};
use device::{FailingDisk, Kind};
use server::{Faults, Server};

const PAGE: usize = 4096;

fn back_ends() -> Vec<BackendChoice> {
    match has_uring() {
        true => vec![BackendChoice::Threads, BackendChoice::Uring],
        false => vec![BackendChoice::Threads],
    }
}

fn fill(file: &File, pages: std::ops::Range<usize>, value: u8) {
    for page in pages {
        // A full device may refuse a write already; the bytes are written again below then.
        let _ = file.write_at(&[value; PAGE], (page * PAGE) as u64);
    }
}

/// The same, of writes that must all succeed.
fn fill_all(file: &File, pages: std::ops::Range<usize>, value: u8) {
    pages.for_each(|page| file.write_all_at(&[value; PAGE], (page * PAGE) as u64).unwrap());
}

/// The first page that lacks `value`, as a fresh mount shows the file.
fn first_wrong(found: &[u8], pages: std::ops::Range<usize>, value: u8) -> Option<usize> {
    pages.into_iter().find(|page| {
        let bytes = found.get(page * PAGE..(page + 1) * PAGE);
        bytes.is_none_or(|bytes| bytes.iter().any(|&byte| byte != value))
    })
}

/// Goal: bytes that a failed sync did not store are on the device once a later sync succeeds.
/// Incident: ext4 leaves the blocks of a failed write-back unwritten, and the kernel's page cache believes them
/// mapped. The same pages written again reached those blocks, the sync succeeded, and a remount read zeros.
/// Method: new pages while the device fails; with and without an overwrite before the next sync.
#[test]
fn a_good_sync_after_a_failed_one_has_stored_the_bytes() {
    for backend in back_ends() {
        for mode in [WriteMode::Through, WriteMode::Back] {
            for (backing, overwritten) in [
                (Backing::Buffered, false),
                (Backing::Buffered, true),
                (Backing::Direct, false),
                (Backing::Uncached, false),
            ] {
                let what =
                    format!("{backend:?}, {mode:?}, {backing:?}, overwritten: {overwritten}");
                let Some(mut disk) = FailingDisk::new(Kind::EXT4) else { return };
                let path = disk.path("file");
                let engine = engine(16 << 20, backend.clone());
                let options: OpenOptions = read_write().write_mode(mode).backing(backing);
                let file = engine.open(&path, &options).unwrap();
                fill(&file, 0..64, 1);
                file.sync_all().unwrap();
                disk.fail();
                fill(&file, 64..512, 2);
                // Direct writes that go through fail themselves, and leave nothing to a sync.
                let is_told = mode == WriteMode::Through && backing == Backing::Direct;
                for _ in 0..2 {
                    assert_eq!(file.sync_all().is_ok(), is_told, "{what}");
                }
                let value = if overwritten { 3 } else { 2 };
                if overwritten {
                    fill(&file, 64..512, value);
                }
                disk.work();
                if is_told {
                    fill_all(&file, 64..512, value);
                }
                file.sync_all().unwrap_or_else(|error| panic!("{what}: {error}"));
                file.close().unwrap();
                drop(engine);
                disk.remount();
                let found = std::fs::read(&path).unwrap();
                assert_eq!(found.len(), 512 * PAGE, "{what}");
                assert_eq!(first_wrong(&found, 0..64, 1), None, "{what}");
                assert_eq!(first_wrong(&found, 64..512, value), None, "{what}");
            }
        }
    }
}

/// Goal: the same of durable writes, each of which is its own sync.
#[test]
fn a_durable_write_after_a_failed_one_is_stored() {
    for backend in back_ends() {
        for (mode, backing) in [
            (WriteMode::Through, Backing::Buffered),
            (WriteMode::Through, Backing::Direct),
            (WriteMode::Back, Backing::Buffered),
        ] {
            let what = format!("{backend:?}, {mode:?}, {backing:?}");
            let Some(mut disk) = FailingDisk::new(Kind::EXT4) else { return };
            let path = disk.path("file");
            let engine = engine(16 << 20, backend.clone());
            let file = engine.open(&path, &read_write().write_mode(mode).backing(backing)).unwrap();
            fill(&file, 0..64, 1);
            file.sync_all().unwrap();
            disk.fail();
            // The tmpfs has room for some of them.
            let pages = 64..192;
            let write = |page: usize| file.write_at_dsync(&[2; PAGE], (page * PAGE) as u64);
            let refused = pages.clone().filter(|&page| write(page).is_err()).count();
            assert!(refused > 0, "{what}: the device did not fail");
            disk.work();
            for page in pages.clone() {
                // One may be told of an error that an earlier write left behind.
                write(page)
                    .or_else(|_| write(page))
                    .unwrap_or_else(|error| panic!("{what}: {error}"));
            }
            drop((file, engine));
            disk.remount();
            let found = std::fs::read(&path).unwrap();
            assert_eq!(first_wrong(&found, pages, 2), None, "{what}");
        }
    }
}

/// Goal: an operation that meets a server's EAGAIN, EINTR or ECANCELED time after time says so, and gives up
/// its range. Once the server answers, the same operation succeeds.
/// Incident: a read of a FUSE file whose server said EAGAIN kept a processor busy and its range locked, and a
/// write of the page waited behind it, without end.
#[test]
fn transient_errors_without_end_are_told() {
    // Mostly pauses: all cases at once.
    std::thread::scope(|threads| {
        for backend in back_ends() {
            for errno in [libc::EAGAIN, libc::EINTR, libc::ECANCELED] {
                let backend = backend.clone();
                threads.spawn(move || transient_errors(backend, errno));
            }
        }
    });
}

fn transient_errors(backend: BackendChoice, errno: i32) {
    let Some(server) = Server::new(1, vec![7; 1 << 20]) else { return };
    let what = format!("{backend:?}, {errno}");
    within(Duration::from_secs(120), &what.clone(), move || {
        let engine = engine(1 << 20, backend);
        let options = read_write().create(false);
        let through = Arc::new(engine.open(server.path("f"), &options).unwrap());
        let direct = engine.open(server.path("f"), &options.clone().direct(true)).map(Arc::new);
        let always = (1000, errno);
        let (read_error, write_error, sync_error) = (always, always, always);
        let faults = Faults { read_error, write_error, sync_error, ..Faults::default() };
        let tell = |operation: &str, outcome: millpond::Result<()>| {
            let error = outcome.expect_err(operation);
            assert_eq!(error.errno(), errno, "{what}, {operation}: {error}");
        };
        server.set(faults);
        let handles = [("cached", Some(&through)), ("direct", direct.as_ref().ok())];
        for (name, file) in handles.into_iter().filter_map(|(name, file)| Some((name, file?))) {
            let mut memory = engine.alloc_buffers(1, PAGE).unwrap();
            let queue = engine.queue(4).unwrap();
            let task = AsyncFile::from(Arc::clone(file));
            let at = |operation: &str| format!("{name} {operation}");
            tell(&at("read"), file.read_at(&mut memory[0], 0).map(drop));
            tell(&at("write"), file.write_at(&memory[0], 0).map(drop));
            tell(&at("durable write"), file.write_at_dsync(&memory[0], 0).map(drop));
            tell(&at("sync"), file.sync_all());
            let (read, buffers) = block_on(task.read_buffers_at(memory, 0));
            tell(&at("asynchronous read"), read.map(drop));
            let mut requests = vec![Request::read_buffers(file, buffers, 0)];
            let (_, mut done) = queue.submit_and_wait(&mut requests, 1, 1, None).unwrap();
            tell(&at("queued read"), done.remove(0).into_parts().0.map(drop));
        }
        server.set(Faults::default());
        assert_eq!(through.read_at(&mut [0; PAGE], 0).unwrap(), PAGE);
        through.write_all_at(&[8; PAGE], 0).unwrap();
        sync_in_the_end(&through);
        assert_eq!(server.state().data[..PAGE], [8; PAGE]);
    });
}
