//! Reads that return fewer bytes than requested: the returned bytes, and the memory beyond them.

use std::future::Future;
use std::io::IoSliceMut;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::Duration;

use crate::inode::CachedFile;
use crate::queue::Request;
use crate::tests::slow::Slow;
use crate::{Admission, Advice, AsyncFile, BackendChoice, Engine, File, OpenOptions};

const PAGES: u64 = 24;

fn byte_at(offset: u64) -> u8 {
    (offset % 249) as u8 + 1
}

struct Unpark(thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

fn block_on<F: Future>(future: F) -> F::Output {
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(done) => return done,
            Poll::Pending => thread::park(),
        }
    }
}

struct Case {
    slow: Arc<Slow>,
    engine: Engine,
    cached: Arc<CachedFile>,
    options: OpenOptions,
    page: u64,
}

impl Case {
    fn new(page: u64, cache_bytes: u64) -> Case {
        Case::admitting(page, cache_bytes, Admission::Adaptive)
    }

    fn admitting(page: u64, cache_bytes: u64, admission: Admission) -> Case {
        let builder = Engine::builder().cache_bytes(cache_bytes).backend(BackendChoice::Memory);
        let builder = builder.readahead_bytes_max(0).admission(admission);
        let engine = builder.build().unwrap();
        let slow = Slow::new((0..PAGES * page).map(byte_at).collect(), Duration::ZERO);
        let options = OpenOptions::new().read(true).write(true).page_bytes(page as u32);
        let cached = CachedFile::on(engine.shared(), slow.clone(), &options).unwrap();
        Case { slow, engine, cached, options, page }
    }

    fn file(&self) -> File {
        File::new(Arc::clone(&self.cached), None, &self.options)
    }

    fn forget(&self) {
        self.file().advise(0, 0, Advice::DontNeed).unwrap();
    }

    /// Reads in every available way.
    fn reads(&self, offset: u64, len: u64) -> Vec<(&'static str, Result<usize, i32>, Vec<u8>)> {
        let fresh = || vec![0xEE; len as usize];
        let errno = |outcome: crate::Result<usize>| outcome.map_err(|error| error.errno());
        let mut all = Vec::new();
        let (file, mut bytes) = (self.file(), fresh());
        all.push(("read", errno(file.read_at(&mut bytes, offset)), bytes));
        self.forget();
        let mut bytes = fresh();
        let (one, two) = bytes.split_at_mut(len as usize / 3);
        let mut slices = [IoSliceMut::new(one), IoSliceMut::new(two)];
        all.push(("vectored", errno(file.read_vectored_at(&mut slices, offset)), bytes));
        self.forget();
        let (torn, mut bytes) = (self.file(), fresh());
        torn.advise(0, 0, Advice::TornReads).unwrap();
        all.push(("torn", errno(torn.read_at(&mut bytes, offset)), bytes));
        self.forget();
        let (file, mut bytes) = (AsyncFile::from(self.file()), fresh());
        all.push(("async", errno(block_on(file.read_at(&mut bytes, offset))), bytes));
        self.forget();
        let queue = self.engine.queue(4).unwrap();
        let file = Arc::new(self.file());
        queue.submit(Request::read(&file, fresh(), offset)).unwrap();
        let done = queue.wait(1, 1, None).unwrap().pop().expect("one has ended");
        let (outcome, bytes) = done.into_parts();
        all.push(("queue", errno(outcome), bytes));
        self.forget();
        let alone = [Request::read(&file, fresh(), offset)];
        let (mut done, _) = queue.submit_and_wait(alone, 1, 1, None).unwrap();
        let (outcome, bytes) = done.pop().expect("it has ended").into_parts();
        all.push(("alone in a queue", errno(outcome), bytes));
        self.forget();
        all
    }
}

/// Goal: reads of unreadable bytes behave as the kernel's. Incident: an unreadable page failed the
/// whole of a read, although the kernel returns the bytes before it, and reads the other parts of a
/// partly unreadable page.
#[test]
fn reads_end_before_unreadable_bytes() {
    for (page, cache_bytes, admission) in [
        (4096, 4 << 20, Admission::Adaptive),
        (4096, 4 << 20, Admission::Never),
        (4096, 16 << 10, Admission::Adaptive),
        (65536, 4 << 20, Admission::Adaptive),
    ] {
        let case = Case::admitting(page, cache_bytes, admission);
        let bad = 5 * page + page / 2;
        case.slow.set_bad(bad..bad + 512);
        for offset in [0, page + 7, 5 * page, 5 * page + 9, bad - 1, bad, bad + 512, 6 * page] {
            for len in [1, page / 2, 2 * page, 9 * page] {
                let expected = match offset + len <= bad || offset >= bad + 512 {
                    true => Ok(len as usize),
                    false if offset < bad => Ok((bad - offset) as usize),
                    false => Err(libc::EIO),
                };
                for (way, outcome, bytes) in case.reads(offset, len) {
                    let what =
                        format!("{way} of {len} at {offset}, pages of {page}, {admission:?}");
                    assert_eq!(outcome, expected, "{what}");
                    let moved = outcome.unwrap_or(0);
                    let is_content = |(at, &byte): (u64, &u8)| byte == byte_at(at);
                    assert!((offset..).zip(&bytes[..moved]).all(is_content), "{what}");
                    let is_clean = |byte: &u8| *byte == 0xEE || *byte == 0;
                    assert!(bytes[moved..].iter().all(is_clean), "{what}");
                }
            }
        }
        // The error is not cached: the device has recovered.
        case.slow.set_bad(0..0);
        let mut bytes = vec![0; (PAGES * page) as usize];
        case.file().read_exact_at(&mut bytes, 0).unwrap();
        assert!((0..).zip(&bytes).all(|(at, &byte)| byte == byte_at(at)));
    }
}

/// Goal: a caller that requests an exact length receives the error, and not an end of the file.
#[test]
fn exact_reads_return_the_error() {
    let case = Case::new(4096, 4 << 20);
    case.slow.set_bad(9 * case.page..10 * case.page);
    let mut bytes = vec![0; 12 * case.page as usize];
    let error = case.file().read_exact_at(&mut bytes, 0).unwrap_err();
    assert_eq!(error.errno(), libc::EIO);
    bytes.resize((PAGES * case.page) as usize, 0);
    let error = case.file().read_exact_at(&mut bytes, 10 * case.page).unwrap_err();
    assert!(error.to_string().contains("end of file"), "{error}");
}

/// Goal: beyond the returned count, memory is unchanged or zero. Incident: an attempt without a
/// lock that failed, because a page changed during it, had copied already. If the next attempt
/// found the file truncated, the bytes beyond the returned count were old bytes of this file or
/// another. Method: reads concurrent with a writer that truncates the file and extends it again.
#[test]
fn nothing_old_is_left_beyond_the_count() {
    let case = Case::new(4096, 4 << 20);
    let ways: [fn(&File, &mut [u8]) -> usize; 3] = [
        |file, bytes| file.read_at(bytes, 0).unwrap(),
        |file, bytes| file.read_at(&mut bytes[..4000], 0).unwrap(),
        |file, bytes| {
            let (one, two) = bytes.split_at_mut(100);
            file.read_vectored_at(&mut [IoSliceMut::new(one), IoSliceMut::new(two)], 0).unwrap()
        },
    ];
    // Races show at full speed.
    let reads = if cfg!(debug_assertions) { 1000 } else { 10_000 };
    for way in ways {
        let stop = std::sync::atomic::AtomicBool::new(false);
        let stop = &stop;
        thread::scope(|scope| {
            let writer = case.file();
            scope.spawn(move || {
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    writer.write_all_at(&[1; 65536], 0).unwrap();
                    writer.truncate(10).unwrap();
                }
            });
            let file = case.file();
            let mut bytes = vec![0; 65536];
            for _ in 0..reads {
                bytes.fill(0xEE);
                let moved = way(&file, &mut bytes);
                let left = bytes[moved..].iter().find(|&&byte| byte != 0xEE && byte != 0);
                if left.is_some() {
                    stop.store(true, std::sync::atomic::Ordering::Relaxed);
                }
                assert_eq!(left, None, "beyond {moved} bytes");
            }
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
        });
    }
}
