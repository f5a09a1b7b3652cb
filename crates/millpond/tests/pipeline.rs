//! Pipelines: many requests under way from one thread, beside others.

mod common;

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use millpond::{Buffer, Engine, File, OpenOptions, Request, SegmentList, WriteMode};

use common::{engine, read_write, temp_dir, within};

fn direct() -> OpenOptions {
    read_write().direct(true)
}

const PAGE: usize = 4096;

/// A file of `pages` pages in an engine of each kind that has direct I/O here.
struct Bench {
    name: &'static str,
    engine: Engine,
    path: std::path::PathBuf,
    _dir: tempfile::TempDir,
}

fn content(at: usize) -> u8 {
    (at / PAGE * 7 + at % 251) as u8
}

fn for_each_engine(pages: usize, body: impl Fn(&Bench) + Clone + Send + 'static) {
    for (name, backend) in common::back_ends(1) {
        let body = body.clone();
        within(Duration::from_secs(60), name, move || {
            let dir = temp_dir();
            let path = dir.path().join("file");
            let bytes: Vec<u8> = (0..pages * PAGE).map(content).collect();
            std::fs::write(&path, &bytes).unwrap();
            let engine = engine(4 << 20, backend);
            match engine.open(&path, &direct()) {
                Ok(file) => drop(file),
                Err(error) => return println!("skipped: {name}: {error}"),
            }
            body(&Bench { name, engine, path, _dir: dir });
        });
    }
}

impl Bench {
    fn open(&self, options: &OpenOptions) -> File {
        self.engine.open(&self.path, options).unwrap()
    }

    fn buffer(&self, pages: usize, byte: u8) -> Buffer {
        let mut buffer = self.engine.alloc_buffers(1, pages * PAGE).unwrap().pop().unwrap();
        buffer.fill(byte);
        buffer
    }

    fn write<'a>(&self, file: &'a File, page: usize, pages: usize, byte: u8) -> Request<'a> {
        let list = SegmentList::from_buffers(vec![self.buffer(pages, byte)]);
        Request::write(file, list, (page * PAGE) as u64)
    }

    fn read<'a>(&self, file: &'a File, page: usize, pages: usize) -> Request<'a> {
        let list = SegmentList::from_buffers(vec![self.buffer(pages, 0xEE)]);
        Request::read(file, list, (page * PAGE) as u64)
    }
}

/// Goal: nobody who has requests under way waits for who waits for them: not for a flush, either.
/// Method: a write to a page that is dirty, and so hidden, is under way; another thread syncs, and
/// waits for the page; then a request comes for what is dirty elsewhere.
#[test]
fn requests_do_not_wait_for_a_sync_that_waits_for_them() {
    for_each_engine(400, |bench| {
        let cached = bench.open(&read_write().write_mode(WriteMode::Back));
        let file = bench.open(&direct());
        for (case, request) in [
            ("read of one page", bench.read(&file, 50, 1)),
            ("long read", bench.read(&file, 40, 300)),
            ("write", bench.write(&file, 50, 1, 9)),
            ("read of what is clean", bench.read(&file, 60, 1)),
            ("long read of what is clean", bench.read(&file, 60, 200)),
        ] {
            cached.write_all_at(&[1; PAGE], (5 * PAGE) as u64).unwrap();
            cached.write_all_at(&[2; PAGE], (50 * PAGE) as u64).unwrap();
            println!("{}: {case}", bench.name);
            let syncing = AtomicBool::new(false);
            std::thread::scope(|scope| {
                let mut number = 0;
                let mut request = Some(request);
                let mut pipeline = bench.engine.pipeline(4).unwrap();
                pipeline.run(|done| {
                    if let Some(done) = done {
                        done.outcome.unwrap();
                        return None;
                    }
                    number += 1;
                    match number {
                        1 => Some(bench.write(&file, 5, 1, 3)),
                        2 => {
                            scope.spawn(|| {
                                syncing.store(true, SeqCst);
                                cached.sync_all().unwrap();
                            });
                            while !syncing.load(SeqCst) {}
                            std::thread::sleep(Duration::from_millis(30));
                            request.take()
                        }
                        _ => None,
                    }
                });
            });
            let mut bytes = [0; PAGE];
            cached.read_exact_at(&mut bytes, (5 * PAGE) as u64).unwrap();
            assert_eq!(bytes, [3; PAGE]);
        }
    });
}

/// Goal: a file that somebody else has cut is read up to where it ends, and its new length is
/// found, without waiting for oneself.
/// Method: many reads are under way beyond the new end.
#[test]
fn a_file_that_was_cut_below_is_read_to_its_end() {
    for_each_engine(64, |bench| {
        if !matches!(bench.name, "uring" | "threads") {
            return;
        }
        let file = bench.open(&direct());
        let other = std::fs::OpenOptions::new().write(true).open(&bench.path).unwrap();
        other.set_len(20 * PAGE as u64).unwrap();
        let mut page = 0;
        let mut moved = 0;
        bench.engine.pipeline(16).unwrap().run(|done| {
            moved += done.map_or(0, |done| done.outcome.unwrap());
            page += 2;
            (page <= 64).then(|| bench.read(&file, page - 2, 2))
        });
        assert_eq!(moved, 20 * PAGE);
        assert_eq!(file.len().unwrap(), 20 * PAGE as u64);
    });
}
