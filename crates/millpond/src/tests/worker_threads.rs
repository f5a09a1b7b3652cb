//! A thread for operations that may wait exists before they begin.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use millpond_rangelock::Mode;

use crate::inode::CachedFile;
use crate::queue::Request;
use crate::tests::slow::{Kind, Slow};
use crate::workers::{JobOutcome, THREADS_MAX};
use crate::{Advice, AsyncFile, BackendChoice, Engine, Error, File, OpenOptions};

const PAGE: usize = 4096;

fn engine(threads: bool) -> Engine {
    let engine = Engine::builder().backend(BackendChoice::Memory).cache_bytes(1 << 20);
    let engine = engine.build().unwrap();
    engine.shared().workers.refused.store(!threads, Relaxed);
    engine
}

fn file(engine: &Engine, dir: &tempfile::TempDir, name: &str) -> Arc<File> {
    let options = OpenOptions::new().read(true).write(true).create(true);
    let file = engine.open(dir.path().join(name), &options).unwrap();
    file.write_all_at(&[7; 2 * PAGE], 0).unwrap();
    Arc::new(file)
}

fn poll_once<T>(future: impl Future<Output = T>) -> Poll<T> {
    pin!(future).poll(&mut Context::from_waker(Waker::noop()))
}

fn is_refused<T>(outcome: Result<T, Error>) -> bool {
    outcome.is_err_and(|error| error.errno() == libc::EAGAIN)
}

/// Goal: if the system refuses a thread, a queue is refused, instead of its submitters having to
/// wait.
#[test]
fn without_a_thread_there_is_no_queue() {
    let engine = engine(false);
    assert!(is_refused(engine.queue(8)));
    engine.shared().workers.refused.store(false, Relaxed);
    let queue = engine.queue(8).unwrap();
    // Later operations use that one.
    engine.shared().workers.refused.store(true, Relaxed);
    let dir = tempfile::tempdir().unwrap();
    let file = file(&engine, &dir, "file");
    queue.submit_all((0..8).map(|n| Request::write(&file, vec![1; 9], n))).unwrap();
    assert!(queue.wait(8, 8, None).unwrap().iter().all(|one| one.result().is_ok()));
}

/// Goal: a request for a file of another engine, which cannot get a thread, completes with the
/// error; a submitter that holds a conflicting guard does not wait for itself.
#[test]
fn a_request_of_an_engine_without_a_thread_is_refused() {
    let (one, other) = (engine(true), engine(false));
    let dir = tempfile::tempdir().unwrap();
    let file = file(&other, &dir, "file");
    let queue = one.queue(8).unwrap();
    let guard = file.cached().lock(0, PAGE as u64, Mode::Exclusive);
    let mut requests = vec![
        Request::write(&file, vec![1; 100], 0).user_data(0),
        Request::read(&file, vec![0; 100], 0).user_data(1),
        Request::sync_all(&file).user_data(2),
    ];
    queue.submit_all(requests.drain(..)).unwrap();
    drop(guard);
    let done = queue.wait(3, 3, None).unwrap();
    assert!(done.iter().all(|one| one.result().is_err_and(|error| error.errno() == libc::EAGAIN)));
    let mut bytes = [0; 100];
    file.read_at(&mut bytes, 0).unwrap();
    assert_eq!(bytes, [7; 100], "a refused write wrote nothing");
}

/// Goal: the same for futures, except for hits, which need no thread.
#[test]
fn a_future_of_an_engine_without_a_thread_is_refused() {
    let engine = engine(false);
    let dir = tempfile::tempdir().unwrap();
    let file = AsyncFile::from(file(&engine, &dir, "file"));
    let guard = file.file().cached().lock(0, PAGE as u64, Mode::Exclusive);
    let Poll::Ready(written) = poll_once(file.write_at(&[1; 100], 0)) else { panic!("waits") };
    assert!(is_refused(written));
    drop(guard);
    let mut bytes = [0; 100];
    let Poll::Ready(hit) = poll_once(file.read_at(&mut bytes, 0)) else { panic!("no hit") };
    assert_eq!((hit.unwrap(), bytes), (100, [7; 100]));
    file.file().invalidate(0, 2 * PAGE as u64).unwrap();
    let Poll::Ready(missed) = poll_once(file.read_at(&mut bytes, 0)) else { panic!("waits") };
    assert!(is_refused(missed));
}

/// Goal: a read whose task has dropped it before a worker began does not run: it would keep the file open.
#[test]
fn a_read_that_was_dropped_does_not_run() {
    use std::sync::atomic::AtomicBool;
    use std::sync::mpsc::channel;
    let engine = engine(true);
    let workers = &engine.shared().workers;
    let busy: Vec<_> = (0..THREADS_MAX)
        .map(|_| {
            let ((begun, begins), (end, ends)) = (channel(), channel::<()>());
            workers.run(Box::new(move || {
                begun.send(()).unwrap();
                let _ = ends.recv();
            }));
            begins.recv().unwrap();
            end
        })
        .collect();
    let ran = Arc::new(AtomicBool::new(false));
    let read = |ran: &Arc<AtomicBool>| {
        let ran = Arc::clone(ran);
        JobOutcome::of_read(workers, move || ran.store(true, Relaxed))
    };
    drop(read(&ran));
    let awaited = Arc::new(AtomicBool::new(false));
    let outcome = read(&awaited);
    drop(busy);
    while outcome.poll(Waker::noop()).is_pending() {
        std::thread::yield_now();
    }
    // Jobs begin in their order. A job that does not run is dropped.
    while Arc::strong_count(&ran) > 1 {
        std::thread::yield_now();
    }
    assert!(awaited.load(Relaxed) && !ran.load(Relaxed));
}

/// Goal: a read of a queue that is too long for a task goes into the memory of the request, by a worker. It can be
/// cancelled until the worker begins. Method: the device blocks the reads of all workers; one more read waits for a
/// worker.
#[test]
fn a_long_read_of_a_queue_can_be_cancelled_until_a_worker_begins() {
    const LEN: usize = 65 * PAGE;
    let engine = engine(true);
    let bytes: Vec<u8> =
        (0..=THREADS_MAX).flat_map(|n| std::iter::repeat_n(n as u8 + 1, LEN)).collect();
    let slow = Slow::new(bytes, Duration::ZERO);
    let options = OpenOptions::new().read(true);
    let cached = CachedFile::on(engine.shared(), slow.clone(), &options).unwrap();
    let file = Arc::new(File::new(cached, None, &options));
    // Read-ahead would be in the queue of the device, too.
    file.advise(0, 0, Advice::Random).unwrap();
    let queue = engine.queue(THREADS_MAX + 1).unwrap();
    slow.hold(Kind::Read, true);
    let submit = |n: usize| {
        let request = Request::read(&file, vec![0; LEN], (n * LEN) as u64);
        queue.submit(request.user_data(n as u64)).unwrap();
    };
    (0..THREADS_MAX).for_each(submit);
    slow.wait_for(Kind::Read, THREADS_MAX);
    submit(THREADS_MAX);
    assert!(!queue.cancel(0), "a worker reads into its memory");
    assert!(queue.cancel(THREADS_MAX as u64));
    let cancelled = queue.wait(1, 1, None).unwrap().remove(0);
    assert_eq!(cancelled.result().unwrap_err().errno(), libc::ECANCELED);
    slow.hold(Kind::Read, false);
    for done in queue.wait(THREADS_MAX, THREADS_MAX, None).unwrap() {
        assert_eq!(done.result().unwrap(), LEN);
        let byte = done.user_data() as u8 + 1;
        assert!(done.into_buffer().iter().all(|&read| read == byte));
    }
}
