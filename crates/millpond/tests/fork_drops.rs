//! Children of fork that drop inherited objects, map memory where the parent's rings and tables lay, and exit.
//!
//! Each round builds every kind of resource, with operations pending and threads at work, and forks several times. A
//! child fills the holes in its address space with a pattern, drops a random part of the resources in random order,
//! may build an engine of its own, and exits with thread-local destructors. After these an exit handler
//! compares the pattern. The parent then finishes all of its operations and compares their bytes.
//!
//! `MILLPOND_TEST_SEED` replays a run, `MILLPOND_TEST_SCALE` makes it longer.

mod common;

use std::ffi::CString;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use millpond::direct::{DirectRequest, SegmentList};
use millpond::internals::shared::ClientMemory;
use millpond::queue::{Queue, Request};
use millpond::{AsyncFile, BackendChoice, Backing, Engine, File, WriteMode};

use common::{Random, block_on, has_uring, in_own_process, read_write, scaled, temp_dir};

const PAGE: u64 = 4096;
const FILE_BYTES: u64 = 4 << 20;
/// A child that hangs is killed after so many seconds.
const CHILD_SECONDS: u32 = 20;
/// The exit status of a child that finds other bytes than the pattern.
const CHANGED: i32 = 77;
const PATTERN: u8 = 0xa5;

fn byte_at(offset: u64) -> u8 {
    (offset.wrapping_mul(41) ^ (offset >> 12).wrapping_mul(19)) as u8
}

fn content(offset: u64, len: usize) -> Vec<u8> {
    (offset..offset + len as u64).map(byte_at).collect()
}

/// An address range.
type Span = (usize, usize);

/// The mappings of this process, in ascending order.
fn mapped() -> Vec<Span> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let span = |line: &str| {
        let (from, to) = line.split_whitespace().next()?.split_once('-')?;
        Some((usize::from_str_radix(from, 16).ok()?, usize::from_str_radix(to, 16).ok()?))
    };
    maps.lines().filter_map(span).collect()
}

/// The parts of `before` that `now` does not cover.
fn holes(before: &[Span], now: &[Span]) -> Vec<Span> {
    let mut holes = Vec::new();
    for &(first, to) in before {
        let mut from = first;
        for &(start, end) in now.iter().filter(|(start, end)| *start < to && *end > first) {
            if start > from {
                holes.push((from, start));
            }
            from = end.max(from);
        }
        if from < to {
            holes.push((from, to));
        }
    }
    holes
}

/// The mappings of a child, for its exit handler: addresses and lengths in turn.
static FILLED: [AtomicUsize; 512] = [const { AtomicUsize::new(0) }; 512];

/// Maps memory in each of `holes`, at most 64 KiB, and writes the pattern to it; how many.
fn fill(holes: &[Span]) -> usize {
    let mut places = FILLED.chunks(2);
    let mut count = 0;
    for &(from, to) in holes {
        let len = (to - from).min(64 << 10);
        let Some(place) = places.next() else { break };
        // SAFETY: a new mapping, where none is.
        let at = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
            let access = libc::PROT_READ | libc::PROT_WRITE;
            libc::mmap(from as *mut _, len, access, flags, -1, 0)
        };
        if at as usize == from {
            // SAFETY: mapped above.
            unsafe { std::ptr::write_bytes(at.cast::<u8>(), PATTERN, len) };
            place[1].store(len, SeqCst);
            place[0].store(from, SeqCst);
            count += 1;
        }
    }
    count
}

/// Compares the child's mappings with the pattern; a mapping that vanished raises SIGSEGV.
extern "C" fn compare() {
    for place in FILLED.chunks(2) {
        let (from, len) = (place[0].load(SeqCst), place[1].load(SeqCst));
        if from != 0 {
            // SAFETY: mapped by `fill`, and not unmapped unless the engine is at fault.
            let bytes = unsafe { std::slice::from_raw_parts(from as *const u8, len) };
            if bytes.iter().any(|&byte| byte != PATTERN) {
                // SAFETY: ends the process.
                unsafe { libc::_exit(CHANGED) };
            }
        }
    }
}

/// A resource that a child drops, and that the parent finishes.
trait Resource {
    fn finish(self: Box<Self>);
}

struct Held<T, F: FnOnce(T)>(T, F);

impl<T, F: FnOnce(T)> Resource for Held<T, F> {
    fn finish(self: Box<Self>) {
        (self.1)(self.0);
    }
}

fn held<T: 'static>(value: T, finish: impl FnOnce(T) + 'static) -> Box<dyn Resource> {
    Box::new(Held(value, finish))
}

/// Polls a future once.
fn begin<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
    Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
}

/// A future that was polled once; `check` gets its output in the parent.
fn pending_future<F: Future + 'static>(
    future: F,
    check: impl FnOnce(F::Output) + 'static,
) -> Box<dyn Resource> {
    let mut future = Box::pin(future);
    let ready = match begin(&mut future) {
        Poll::Ready(output) => Some(output),
        Poll::Pending => None,
    };
    held((future, ready), |(future, ready)| {
        check(ready.unwrap_or_else(|| block_on(future)));
    })
}

/// Every kind of resource of one engine. References are to leaked objects: the process is the test's own.
fn resources(
    backend: BackendChoice,
    keeper: bool,
    path: &std::path::Path,
    random: &mut Random,
) -> Vec<Box<dyn Resource>> {
    std::fs::write(path, content(0, FILE_BYTES as usize)).unwrap();
    let mut builder = common::builder(8 << 20, backend);
    if keeper {
        builder = builder.keeper(millpond::keeper::spawn().unwrap());
    }
    let engine = builder.build().unwrap();
    let options = read_write().write_mode(WriteMode::Back);
    let file: &'static Arc<File> =
        Box::leak(Box::new(Arc::new(engine.open(path, &options).unwrap())));
    // Several runs in one sync: the ring of this thread.
    for run in 0..16 {
        file.write_all_at(&content(run * (256 << 10), PAGE as usize), run * (256 << 10)).unwrap();
    }
    file.sync_all().unwrap();
    let at = |random: &mut Random| random.below(FILE_BYTES / PAGE - 4) * PAGE;
    let mut all = Vec::new();
    // A pending operation of each asynchronous kind.
    let tasks: &'static AsyncFile = Box::leak(Box::new(AsyncFile::from(Arc::clone(file))));
    for len in [100usize, 9000, 1 << 20] {
        let offset = random.below(FILE_BYTES - (1 << 20));
        let read = async move {
            let mut bytes = vec![0; len];
            let moved = tasks.read_at(&mut bytes, offset).await.unwrap();
            bytes.truncate(moved);
            bytes
        };
        all.push(pending_future(read, move |bytes| assert!(bytes == content(offset, len))));
        let offset = random.below(FILE_BYTES - (1 << 20));
        let write = async move { tasks.write_at(&content(offset, len), offset).await };
        all.push(pending_future(write, move |moved| assert_eq!(moved.unwrap(), len)));
    }
    all.push(pending_future(tasks.sync_all(), |synced| synced.unwrap()));
    let offset = at(random);
    all.push(pending_future(tasks.view(offset, 100), move |view| {
        assert!(view.unwrap()[..] == content(offset, 100));
    }));
    // A queue with operations in flight, an eventfd and a task that waits.
    let queue: &'static Queue = Box::leak(Box::new(engine.queue(64).unwrap()));
    queue.eventfd().unwrap();
    let mut requests: Vec<Request> = (0..32)
        .map(|number| {
            let offset = at(random);
            match number % 8 {
                0 => Request::write(file, content(offset, 9000), offset),
                _ => Request::read(file, vec![0; 9000], offset),
            }
            .user_data(offset)
        })
        .collect();
    queue.submit_all(requests.drain(..)).unwrap();
    all.push(pending_future(queue.wait_async(32, 64).unwrap(), |done| {
        assert_eq!(done.len(), 32);
        for one in done {
            assert_eq!(one.result().unwrap(), 9000);
            let offset = one.user_data();
            assert!(one.into_buffer() == content(offset, 9000));
        }
    }));
    // A queue that has been used, and can be dropped.
    let own = engine.queue(8).unwrap();
    let requests = [Request::sync_all(file), Request::read(file, vec![0; 1], 0)];
    let (done, _) = own.submit_and_wait(requests, 2, 8, None).unwrap();
    assert_eq!(done.len(), 2);
    all.push(held(own, |own| assert_eq!(own.counts(), (0, 0))));
    // A view, a blob with pages of each state, and a task that waits for one of them.
    let offset = at(random);
    all.push(held(file.view(offset, 50).unwrap(), move |view| {
        assert!(view[..] == content(offset, 50));
    }));
    let blob: &'static _ = Box::leak(Box::new(engine.blob(FILE_BYTES, PAGE as u32).unwrap()));
    blob.claim(0..PAGE).fills.pop().unwrap().bring(&content(0, PAGE as usize));
    let fill = blob.claim(PAGE..3 * PAGE).fills.pop().unwrap();
    let mut arrival = Box::pin(blob.arrival(PAGE..2 * PAGE));
    assert!(begin(&mut arrival).is_pending());
    all.push(held(arrival, drop));
    all.push(held(fill, |fill| fill.bring(&content(PAGE, 2 * PAGE as usize))));
    all.push(held(blob.try_view(0..PAGE), |view| {
        assert!(view.unwrap().as_ref() == content(0, PAGE as usize));
    }));
    all.push(held(engine.blob(100, PAGE as u32).unwrap(), drop));
    // Direct requests: a pipeline with registered buffers, batches of a thread (AIO on the threads back end).
    let direct_path = path.with_extension("direct");
    std::fs::write(&direct_path, content(0, FILE_BYTES as usize)).unwrap();
    match engine.open(&direct_path, &common::direct()) {
        Err(error) => common::skip(format_args!("direct I/O: {error}")),
        Ok(direct) => {
            let mut buffers = engine.alloc_buffers(4, PAGE as usize).unwrap();
            let mut pipeline = engine.pipeline(4).unwrap();
            let mut left = 8;
            pipeline.run(|lane| {
                let ended = lane.into_ended().map(|(request, outcome)| {
                    assert_eq!(outcome.unwrap(), PAGE as usize);
                    request
                });
                if left == 0 {
                    return None;
                }
                left -= 1;
                let mut request = ended.unwrap_or_else(|| {
                    let list = SegmentList::from_buffers(buffers.pop().into_iter().collect());
                    DirectRequest::read(&direct, list, left * PAGE)
                });
                request.set_offset(left * PAGE);
                Some(request)
            });
            all.push(held(pipeline, drop));
            let tasks: &'static AsyncFile = Box::leak(Box::new(AsyncFile::from(direct)));
            let offset = at(random);
            let buffers = engine.alloc_buffers(1, PAGE as usize).unwrap();
            all.push(pending_future(
                tasks.read_buffers_at(buffers, offset),
                move |(moved, buffers)| {
                    assert_eq!(moved.unwrap(), PAGE as usize);
                    assert!(buffers[0][..] == content(offset, PAGE as usize));
                },
            ));
        }
    }
    let backing = [Backing::Direct, Backing::DirectInPlace][random.below(2) as usize];
    match engine.open(path.with_extension("backing"), &options.clone().backing(backing)) {
        Err(error) => common::skip(format_args!("{backing:?}: {error}")),
        Ok(other) => {
            for run in 0..16 {
                other.write_all_at(&[1; 100], run * 3 * PAGE).unwrap();
            }
            other.sync_all().unwrap();
            other.write_all_at(&[2; 100], 0).unwrap();
            all.push(held(other, |other| other.close().unwrap()));
        }
    }
    all.push(held(engine.open(path, &options).unwrap(), |second| second.close().unwrap()));
    all.push(held(ClientMemory::create().unwrap(), drop));
    all.push(held(engine.clone(), |engine| assert!(engine.dump().limit_bytes > 0)));
    all.push(held(engine, |engine| assert!(engine.stats().hits > 0)));
    all
}

/// How a child ends.
#[derive(Clone, Copy, Debug)]
enum End {
    Exit,
    Exec,
}

/// The life of a child.
fn in_child(mut all: Vec<Box<dyn Resource>>, before: &[Span], mut random: Random, end: End) -> ! {
    // SAFETY: the handler touches memory of this process alone; the time limit is this child's.
    unsafe {
        libc::alarm(CHILD_SECONDS);
        libc::atexit(compare);
    }
    if random.chance(800) {
        fill(&holes(before, &mapped()));
    }
    if random.chance(500) {
        Engine::forget_parent();
        if random.chance(500) {
            use_own_engine();
        }
    }
    while !all.is_empty() {
        let resource = all.swap_remove(random.below(all.len() as u64) as usize);
        if random.chance(800) { drop(resource) } else { std::mem::forget(resource) }
    }
    if matches!(end, End::Exec) {
        let program = CString::new("/bin/true").unwrap();
        // SAFETY: the arguments are valid for the call.
        unsafe {
            compare();
            libc::execv(program.as_ptr(), [program.as_ptr(), std::ptr::null()].as_ptr());
            libc::_exit(100);
        }
    }
    // SAFETY: the test is about the destructors and handlers that run.
    unsafe { libc::exit(0) }
}

/// An engine of the child's, with several transfers in one sync.
fn use_own_engine() {
    let dir = temp_dir();
    let engine = common::engine(1 << 20, BackendChoice::Auto);
    let file = engine.open(dir.path().join("own"), &common::write_back()).unwrap();
    for run in 0..8 {
        file.write_all_at(&content(run * (64 << 10), 100), run * (64 << 10)).unwrap();
    }
    file.sync_all().unwrap();
    let mut bytes = [0; 100];
    assert_eq!(file.read_at(&mut bytes, 0).unwrap(), 100);
    assert!(bytes[..] == content(0, 100));
    file.close().unwrap();
}

/// The status of a child that has ended.
fn status_of(child: libc::pid_t) -> String {
    let mut status = 0;
    // SAFETY: the argument is valid for the call.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    match status {
        _ if libc::WIFSIGNALED(status) => format!("signal {}", libc::WTERMSIG(status)),
        _ => format!("exit {}", libc::WEXITSTATUS(status)),
    }
}

fn run_children(backend: &BackendChoice, keeper: bool, rounds: u32, random: &mut Random) {
    let dir = temp_dir();
    for round in 0..rounds {
        let path = dir.path().join(format!("file-{round}"));
        let before_all = mapped();
        let mut all = resources(backend.clone(), keeper, &path, random);
        let before = mapped();
        assert!(before.len() > before_all.len());
        for number in 0..3 {
            let end = if random.chance(800) { End::Exit } else { End::Exec };
            let childs = random.fork();
            // SAFETY: the C library allocates after a fork, and this crate's objects are under test.
            let child = unsafe { libc::fork() };
            if child == 0 {
                let body = || in_child(std::mem::take(&mut all), &before, childs, end);
                let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body));
                // SAFETY: ends the child.
                unsafe { libc::_exit(101) };
            }
            assert!(child > 0);
            let status = status_of(child);
            assert_eq!(status, "exit 0", "round {round}, child {number}: {end:?}, {backend:?}");
        }
        while !all.is_empty() {
            all.swap_remove(random.below(all.len() as u64) as usize).finish();
        }
    }
}

/// Goal: a child that drops inherited objects, in any order, loses none of its own memory, does not hang, and
/// leaves the parent's operations and files alone.
/// Incident: the exit of a child unmapped the ring of the forking thread, and with it the memory that the child had
/// mapped at the same address: the child, which had not used the crate, was killed by SIGSEGV.
#[test]
fn a_child_drops_inherited_objects() {
    let test = "a_child_drops_inherited_objects";
    in_own_process(test, Duration::from_secs(600), || {
        let mut random = Random::from_environment();
        let mut all = vec![(BackendChoice::Threads, false), (BackendChoice::Threads, true)];
        if has_uring() {
            all.extend([(BackendChoice::Uring, false), (BackendChoice::Uring, true)]);
        }
        for (backend, keeper) in all {
            println!("{backend:?}, keeper: {keeper}");
            run_children(&backend, keeper, scaled(2), &mut random);
        }
    });
}

/// Goal: a child does not hang on a lock that another thread of the parent held at the fork.
/// Method: threads that take the locks of statistics, queues, the registry and the eviction queues, and many children
/// that drop inherited objects.
#[test]
fn a_child_takes_no_lock_of_its_parent() {
    let test = "a_child_takes_no_lock_of_its_parent";
    in_own_process(test, Duration::from_secs(600), || {
        let mut random = Random::from_environment();
        let dir = temp_dir();
        let path = dir.path().join("busy");
        std::fs::write(&path, content(0, FILE_BYTES as usize)).unwrap();
        let engine = common::engine(1 << 20, BackendChoice::Auto);
        let file = Arc::new(engine.open(&path, &read_write()).unwrap());
        let queue = Arc::new(engine.queue(16).unwrap());
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let busy = [
                scope.spawn(|| {
                    while !stop.load(SeqCst) {
                        let _ = (engine.stats(), engine.dump());
                        std::thread::scope(|scope| {
                            scope.spawn(|| file.read_at(&mut [0; 10], 0).unwrap());
                        });
                    }
                }),
                scope.spawn(|| {
                    let mut page = 0;
                    while !stop.load(SeqCst) {
                        page = (page + 77) % (FILE_BYTES / PAGE);
                        let read = Request::read(&file, vec![0; 100], page * PAGE);
                        queue.submit_and_wait([read], 1, 16, None).unwrap();
                    }
                }),
                scope.spawn(|| {
                    while !stop.load(SeqCst) {
                        engine.open(&path, &read_write()).unwrap().close().unwrap();
                    }
                }),
            ];
            for _ in 0..scaled(60) {
                let tasks = AsyncFile::from(Arc::clone(&file));
                let mut bytes = [0; 10];
                let mut read = Box::pin(tasks.read_at(&mut bytes, random.below(FILE_BYTES - 10)));
                let _ = begin(&mut read);
                let mut sync = Box::pin(tasks.sync_all());
                let _ = begin(&mut sync);
                let mut waits = Box::pin(queue.wait_async(16, 16).unwrap());
                let _ = begin(&mut waits);
                // SAFETY: as in `run_children`.
                let child = unsafe { libc::fork() };
                if child == 0 {
                    // SAFETY: the time limit is this child's; the test is about the destructors.
                    unsafe { libc::alarm(CHILD_SECONDS) };
                    drop((read, sync, waits));
                    let _ = (engine.stats(), engine.dump());
                    engine.detach_keeper();
                    let requests = &mut vec![Request::sync_all(&file)];
                    let rejected = queue.submit_all(requests.drain(..)).unwrap_err();
                    requests.extend(rejected.into_requests());
                    assert!(queue.wait(1, 1, None).is_err() && !queue.cancel(0));
                    assert!(queue.wait_async(1, 1).is_err() && queue.eventfd().is_err());
                    // SAFETY: as above.
                    unsafe { libc::exit(0) };
                }
                assert!(child > 0);
                assert_eq!(status_of(child), "exit 0");
            }
            stop.store(true, SeqCst);
            busy.into_iter().for_each(|thread| thread.join().unwrap());
        });
    });
}

/// Goal: a thread that ends while its operations are in flight, with children forked at the same time, leaves them to
/// their ends: each completes once, with its bytes.
#[test]
fn a_thread_ends_while_its_operations_are_pending() {
    let test = "a_thread_ends_while_its_operations_are_pending";
    in_own_process(test, Duration::from_secs(600), || {
        let mut random = Random::from_environment();
        let mut all = vec![BackendChoice::Threads];
        all.extend(has_uring().then_some(BackendChoice::Uring));
        for backend in all {
            let dir = temp_dir();
            let path = dir.path().join("file");
            std::fs::write(&path, content(0, FILE_BYTES as usize)).unwrap();
            let engine = common::engine(1 << 20, backend);
            let file = Arc::new(engine.open(&path, &read_write()).unwrap());
            let queue = Arc::new(engine.queue(64).unwrap());
            for _ in 0..scaled(10) {
                let offsets: Vec<u64> = (0..16).map(|_| random.below(FILE_BYTES - 9000)).collect();
                let thread = std::thread::spawn({
                    let (file, queue, offsets) =
                        (Arc::clone(&file), Arc::clone(&queue), offsets.clone());
                    move || {
                        let read =
                            |&offset| Request::read(&file, vec![0; 9000], offset).user_data(offset);
                        let mut requests: Vec<Request> = offsets.iter().map(read).collect();
                        queue.submit_all(requests.drain(..)).unwrap();
                        let tasks = AsyncFile::from(Arc::clone(&file));
                        let mut bytes = [0; 9000];
                        for &offset in &offsets {
                            // Dropped with the thread, while it is pending.
                            let _ = begin(&mut Box::pin(tasks.read_at(&mut bytes, offset + 7)));
                        }
                    }
                });
                // SAFETY: the child does nothing but exit.
                let child = unsafe { libc::fork() };
                if child == 0 {
                    // SAFETY: as above.
                    unsafe { libc::exit(0) };
                }
                thread.join().unwrap();
                assert_eq!(status_of(child), "exit 0");
                let done = queue.wait(16, 16, Some(Duration::from_secs(60))).unwrap();
                assert_eq!(done.len(), 16, "completions are missing");
                for one in done {
                    assert_eq!(one.result().unwrap(), 9000);
                    let offset = one.user_data();
                    assert!(one.into_buffer() == content(offset, 9000));
                }
            }
        }
    });
}
