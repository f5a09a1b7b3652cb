//! Completion queues on files, with real threads.

mod common;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use millpond::queue::{Completion, Queue, Rejected, Request};
use millpond::sim::SimOptions;
use millpond::{Advice, BackendChoice, Engine, File, OpenOptions};

use common::{Random, back_ends, has_uring, in_own_process, read_write, temp_dir, threads, within};

const PAGE: u64 = 4096;

/// The byte of the test files at an offset.
fn byte_at(offset: u64) -> u8 {
    (offset.wrapping_mul(31) ^ (offset >> 12).wrapping_mul(7)) as u8
}

fn content(offset: u64, len: usize) -> Vec<u8> {
    (offset..offset + len as u64).map(byte_at).collect()
}

struct Case {
    engine: Engine,
    file: Arc<File>,
    _dir: tempfile::TempDir,
}

fn open(backend: BackendChoice, cache_bytes: u64, file_bytes: u64) -> Case {
    let builder = common::builder(cache_bytes, backend);
    open_with(builder, file_bytes, &read_write())
}

fn open_with(builder: millpond::EngineBuilder, file_bytes: u64, options: &OpenOptions) -> Case {
    let dir = temp_dir();
    let path = dir.path().join("file");
    std::fs::write(&path, content(0, file_bytes as usize)).unwrap();
    let engine = builder.build().unwrap();
    let file = Arc::new(engine.open(&path, options).unwrap());
    Case { engine, file, _dir: dir }
}

/// A device with a random delay of up to `delay_ms` for each transfer.
fn slow(delay_ms: u64) -> BackendChoice {
    BackendChoice::Sim(SimOptions::new(3).delay_us_max(delay_ms * 1000))
}

fn submit(queue: &Queue, request: Request) {
    queue.submit(request).unwrap();
}

#[test]
fn hits_complete_at_submission() {
    let case = open(BackendChoice::Threads, 16 << 20, 1 << 20);
    let mut all = vec![0; 1 << 20];
    case.file.read_at(&mut all, 0).unwrap();
    let queue = case.engine.queue(256).unwrap();
    let mut requests: Vec<Request> = (0..200u64)
        .map(|n| Request::read(&case.file, vec![0; 5000], n * 5000).user_data(n))
        .collect();
    requests.push(Request::read(&case.file, vec![0; 100], 1 << 20).user_data(200));
    requests.push(Request::read(&case.file, Vec::new(), 0).user_data(201));
    queue.submit_all(requests.drain(..)).unwrap();
    assert_eq!(queue.counts(), (202, 0), "all are complete");
    for done in queue.wait(0, 1000, None).unwrap() {
        let n = done.user_data();
        let (result, buffer) = done.into_parts();
        if n < 200 {
            assert_eq!((result.unwrap(), buffer.len()), (5000, 5000));
            assert!(buffer == content(n * 5000, 5000));
        } else {
            assert_eq!(result.unwrap(), 0);
        }
    }
}

/// Goal: reads that miss, in any number and of any length, return the file's bytes, on every back
/// end, with short transfers, caches of few pages, and few reads in flight.
#[test]
fn misses_return_the_files_bytes() {
    let mut random = Random::from_environment();
    for (name, backend) in back_ends(random.next()) {
        for (cache_bytes, in_flight) in [(64 << 10, 1024), (1 << 20, 1024), (1 << 20, 1)] {
            let builder = common::builder(cache_bytes, backend.clone());
            let builder = builder.reads_in_flight_max(in_flight);
            let case = open_with(builder, 4 << 20, &read_write());
            within(Duration::from_secs(60), name, {
                let mut random = random.fork();
                move || {
                    if random.chance(500) {
                        case.file.advise(0, 0, Advice::Random).unwrap();
                    }
                    read_at_random(&case, &mut random, 1500);
                    drop(case.engine);
                }
            });
        }
    }
}

fn read_at_random(case: &Case, random: &mut Random, total: usize) {
    let queue = case.engine.queue(64).unwrap();
    let (mut submitted, mut done) = (0, 0);
    let mut places = std::collections::HashMap::new();
    while done < total {
        let mut requests = Vec::new();
        for _ in 0..random.below(64).min((total - submitted) as u64) {
            let pages = if random.chance(100) { 1 + random.below(80) } else { 1 + random.below(3) };
            let len = 1 + random.below(pages * PAGE);
            let offset = random.below(4 << 20);
            let id = submitted as u64 + requests.len() as u64;
            places.insert(id, (offset, len as usize));
            requests.push(Request::read(&case.file, vec![0; len as usize], offset).user_data(id));
        }
        submitted += requests.len();
        submitted -= queue.submit_all(requests).err().map_or(0, |rest| rest.requests().len());
        // Reads that were not submitted get their numbers again.
        let least = (submitted - done).min(1 + random.below(8) as usize);
        for one in queue.wait(least, 64, None).unwrap() {
            let (offset, len) = places[&one.user_data()];
            let (result, buffer) = one.into_parts();
            let expected = len.min((4 << 20) - offset as usize);
            assert_eq!(result.unwrap(), expected);
            assert!(buffer[..expected] == content(offset, expected), "at {offset}, {len}");
            done += 1;
        }
    }
    assert_eq!(queue.counts(), (0, 0));
}

/// Goal: on io_uring only the driver's thread works for pending reads, for any number of them.
#[test]
fn reads_that_miss_take_no_thread() {
    if !has_uring() {
        return;
    }
    in_own_process("reads_that_miss_take_no_thread", Duration::from_secs(60), || {
        let case = open(BackendChoice::Uring, 1 << 20, 8 << 20);
        let before = threads().len();
        let queue = case.engine.queue(512).unwrap();
        let mut random = Random(5);
        case.file.advise(0, 0, Advice::Random).unwrap();
        for _ in 0..20 {
            let requests: Vec<Request> = (0..512)
                .map(|_| Request::read(&case.file, vec![0; 4096], random.below(2048) * PAGE))
                .collect();
            queue.submit_all(requests).unwrap();
            assert!(queue.wait(512, 512, None).unwrap().iter().all(|one| one.result().is_ok()));
        }
        let names: Vec<_> = threads().into_iter().map(|(_, name)| name).collect();
        // The driver, and one idle worker.
        assert_eq!(names.len(), before + 2, "{names:?}");
        assert!(names.contains(&"millpond-driver".into()), "{names:?}");
    });
}

/// Goal: the waiter for 2 completions is woken, and submits the read that the waiter for 3 needs.
/// Every other waiter gets whole batches only.
#[test]
fn the_waiter_for_two_submits_for_the_waiter_for_three() {
    let case = open(BackendChoice::Threads, 16 << 20, 64 << 10);
    let queue = case.engine.queue(8).unwrap();
    within(Duration::from_secs(30), "2 and 3", move || {
        for _ in 0..200 {
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    assert_eq!(queue.wait(3, 3, None).unwrap().len(), 3);
                });
                scope.spawn(|| {
                    assert_eq!(queue.wait(2, 2, None).unwrap().len(), 2);
                    let mut three: Vec<Request> =
                        (0..3).map(|n| Request::read(&case.file, vec![0; 9], n)).collect();
                    queue.submit_all(three.drain(..)).unwrap();
                });
                for n in 0..2 {
                    submit(&queue, Request::write(&case.file, vec![1; 9], n));
                }
            });
            assert_eq!(queue.counts(), (0, 0));
        }
    });
}

/// Goal: waiters for 1, 2, 8 and 32 completions get whole batches without long waits, while the
/// queue is kept full.
#[test]
fn waiters_of_many_sizes_get_whole_batches() {
    let case = open(slow(1), 256 << 10, 4 << 20);
    case.file.advise(0, 0, Advice::Random).unwrap();
    let queue = case.engine.queue(64).unwrap();
    let stop = AtomicBool::new(false);
    let shares = std::thread::scope(|scope| {
        let waiters = [1usize, 2, 8, 32].map(|min| {
            let (queue, stop) = (&queue, &stop);
            scope.spawn(move || {
                let (mut batches, mut longest) = (0u64, Duration::ZERO);
                while !stop.load(SeqCst) {
                    let begun = Instant::now();
                    let got = queue.wait(min, min, Some(Duration::from_secs(10))).unwrap();
                    assert!(got.len() == min || stop.load(SeqCst), "{} of {min}", got.len());
                    batches += 1;
                    longest = longest.max(begun.elapsed());
                }
                (batches, longest)
            })
        });
        let started = Instant::now();
        let mut random = Random(9);
        while !waiters.iter().all(|waiter| waiter.is_finished()) {
            if started.elapsed() >= Duration::from_millis(1500) {
                stop.store(true, SeqCst);
            }
            let mut requests: Vec<Request> = (0..8)
                .map(|_| Request::read(&case.file, vec![0; 64], random.below(1024) * PAGE))
                .collect();
            while !requests.is_empty() && !waiters.iter().all(|waiter| waiter.is_finished()) {
                let before = requests.len();
                requests =
                    queue.submit_all(requests).map_or_else(Rejected::into_requests, |()| vec![]);
                if requests.len() == before {
                    std::thread::sleep(Duration::from_micros(100));
                }
            }
        }
        waiters.map(|waiter| waiter.join().unwrap())
    });
    println!("batches, longest wait: {shares:?}");
    assert!(shares.iter().all(|(batches, _)| *batches >= 8), "{shares:?}");
    assert!(shares.iter().all(|(_, longest)| *longest < Duration::from_secs(2)), "{shares:?}");
}

#[test]
fn invalid_waits_are_refused() {
    let case = open(BackendChoice::Memory, 1 << 20, 100);
    assert!(case.engine.queue(0).is_err() && case.engine.queue(usize::MAX).is_err());
    let queue = case.engine.queue(4).unwrap();
    for (min, max) in [(5, 5), (2, 1), (0, 0)] {
        let refused = queue.wait(min, max, None).unwrap_err();
        assert_eq!(refused.errno(), libc::EINVAL);
        assert!(queue.wait_async(min, max).is_err());
    }
}

#[test]
fn invalid_requests_fail_by_completion() {
    let case = open(BackendChoice::Threads, 1 << 20, 100);
    let path = case._dir.path().join("file");
    let reader = Arc::new(case.engine.open(&path, &OpenOptions::new().read(true)).unwrap());
    let writer = Arc::new(case.engine.open(&path, &OpenOptions::new().write(true)).unwrap());
    let queue = case.engine.queue(4).unwrap();
    let mut requests = vec![
        Request::read(&writer, vec![0; 4], 0).user_data(0),
        Request::read(&reader, vec![0; 4], u64::MAX - 2).user_data(1),
        Request::write(&reader, vec![7; 4], 0).user_data(2),
    ];
    queue.submit_all(requests.drain(..)).unwrap();
    for one in queue.wait(3, 3, None).unwrap() {
        let expected = [libc::EBADF, libc::EINVAL, libc::EBADF][one.user_data() as usize];
        assert_eq!(one.result().unwrap_err().errno(), expected, "{}", one.user_data());
    }
    let mut bytes = [0; 4];
    reader.read_at(&mut bytes, 0).unwrap();
    assert_eq!(bytes, *content(0, 4), "a refused write wrote nothing");
}

#[test]
fn a_full_queue_takes_no_more() {
    let case = open(slow(5), 1 << 20, 1 << 20);
    let queue = case.engine.queue(4).unwrap();
    let requests = (0..10).map(|n| Request::read(&case.file, vec![0; 10], n * PAGE).user_data(n));
    let submit = |requests: Vec<Request>, left: usize| {
        let rest = queue.submit_all(requests).unwrap_err().into_requests();
        assert_eq!(rest.len(), left);
        rest
    };
    let rest = submit(requests.collect(), 6);
    let rest = submit(rest, 6);
    let error = millpond::Error::from(queue.submit(Request::sync_all(&case.file)).unwrap_err());
    assert_eq!(error.errno(), libc::EAGAIN);
    assert_eq!(queue.wait(4, 4, None).unwrap().len(), 4);
    let rest = submit(rest, 2);
    assert_eq!(queue.wait(4, 4, None).unwrap().len(), 4);
    queue.submit_all(rest).unwrap();
    let mut numbers: Vec<u64> =
        queue.wait(2, 4, None).unwrap().iter().map(Completion::user_data).collect();
    numbers.sort_unstable();
    assert_eq!(numbers, [8, 9], "the last ones were left each time");
}

#[test]
fn a_timeout_returns_what_is_there() {
    let case = open(BackendChoice::Threads, 1 << 20, 1 << 20);
    let queue = case.engine.queue(8).unwrap();
    assert!(queue.wait(1, 8, Some(Duration::ZERO)).unwrap().is_empty());
    let begun = Instant::now();
    assert!(queue.wait(1, 8, Some(Duration::from_millis(30))).unwrap().is_empty());
    assert!(begun.elapsed() >= Duration::from_millis(30));
    for _ in 0..2 {
        submit(&queue, Request::sync_data(&case.file));
    }
    assert_eq!(queue.wait(3, 8, Some(Duration::from_millis(300))).unwrap().len(), 2);
    // After the time for the minimum, one completion is enough.
    submit(&queue, Request::sync_all(&case.file));
    let begun = Instant::now();
    let got = queue.wait_at_least(3, 8, Duration::from_millis(300), None).unwrap();
    assert_eq!(got.len(), 1);
    assert!(begun.elapsed() >= Duration::from_millis(300));
    let nothing = queue
        .wait_at_least(3, 8, Duration::from_millis(5), Some(Duration::from_millis(20)))
        .unwrap();
    assert!(nothing.is_empty());
}

#[test]
fn an_eventfd_signals_completions_without_a_waiter() {
    use std::io::Read;
    let case = open(BackendChoice::Threads, 1 << 20, 1 << 20);
    let queue = case.engine.queue(8).unwrap();
    submit(&queue, Request::read(&case.file, vec![0; 10], 0));
    while queue.counts() != (1, 0) {
        std::thread::yield_now();
    }
    // Completions from before the eventfd count, too.
    let fd = queue.eventfd().unwrap();
    let mut counter = std::fs::File::from(fd.try_clone_to_owned().unwrap());
    let mut count = move || {
        let mut bytes = [0; 8];
        counter.read_exact(&mut bytes).map(|()| u64::from_ne_bytes(bytes)).unwrap_or(0)
    };
    assert_eq!(count(), 1);
    for n in 0..3 {
        submit(&queue, Request::write(&case.file, vec![0; 10], n));
    }
    let mut fds = [rustix::event::PollFd::new(&fd, rustix::event::PollFlags::IN)];
    let mut signaled = 0;
    while signaled < 3 {
        assert_eq!(rustix::event::poll(&mut fds, None).unwrap(), 1);
        signaled += count();
    }
    assert_eq!(queue.wait(0, 8, None).unwrap().len(), 4);
    assert_eq!(count(), 0);
}

#[test]
fn requests_can_be_cancelled_before_they_start() {
    let case = open(slow(40), 1 << 20, 4 << 20);
    let queue = case.engine.queue(64).unwrap();
    let mut requests: Vec<Request> = (0..8)
        .map(|n| Request::read(&case.file, vec![0; 10], n * 16 * PAGE).user_data(n))
        .collect();
    // More requests than workers, so that the last one has not started.
    requests.extend((100..140).map(|n| {
        let offset = (n - 100) * 16 * PAGE;
        Request::write(&case.file, vec![9; 10], offset + 8 * PAGE).user_data(n)
    }));
    queue.submit_all(requests.drain(..)).unwrap();
    assert!(!queue.cancel(77), "there is no such request");
    let cancelled: Vec<u64> =
        [7, 6, 139].into_iter().filter(|&user_data| queue.cancel(user_data)).collect();
    assert!(cancelled.contains(&139), "{cancelled:?}");
    assert!(!queue.cancel(139), "only once");
    let done = queue.wait(48, 48, None).unwrap();
    for one in done {
        let n = one.user_data();
        match one.result() {
            Ok(10) => assert!(!cancelled.contains(&n)),
            Err(error) if error.errno() == libc::ECANCELED => assert!(cancelled.contains(&n)),
            other => panic!("{n}: {other:?}"),
        }
        assert_eq!(one.into_buffer().len(), 10);
    }
    let mut bytes = [0; 10];
    let last = 39 * 16 * PAGE + 8 * PAGE;
    case.file.read_at(&mut bytes, last).unwrap();
    assert_eq!(bytes, *content(last, 10), "a cancelled write wrote nothing");
}

/// Goal: a device's error completes the reads concerned, and no others; later reads succeed.
#[test]
fn errors_complete_only_their_requests() {
    let sim = SimOptions::new(11).error_per_mille(600).short_per_mille(300).delay_us_max(50);
    let errors = sim.errors_switch();
    errors.store(false, SeqCst);
    let case = open(BackendChoice::Sim(sim), 256 << 10, 2 << 20);
    let queue = case.engine.queue(64).unwrap();
    let mut random = Random::from_environment();
    let mut outcomes = [0u32; 2];
    for on in [true, false] {
        errors.store(on, SeqCst);
        for _ in 0..20 {
            let mut requests: Vec<Request> = (0..64)
                .map(|_| {
                    let offset = random.below((2 << 20) - 3 * PAGE);
                    Request::read(&case.file, vec![0; 5000], offset).user_data(offset)
                })
                .collect();
            queue.submit_all(requests.drain(..)).unwrap();
            for one in queue.wait(64, 64, None).unwrap() {
                let offset = one.user_data();
                match one.into_parts() {
                    (Ok(moved), buffer) => {
                        // Or the part before the bytes that could not be read.
                        assert!(moved == 5000 || (on && moved > 0));
                        assert!(buffer[..moved] == content(offset, moved));
                        outcomes[usize::from(moved < 5000)] += 1;
                    }
                    (Err(error), _) => {
                        assert!(on && error.errno() == libc::EIO, "{error}");
                        outcomes[1] += 1;
                    }
                }
            }
        }
    }
    assert!(outcomes.iter().all(|&count| count > 20), "{outcomes:?}");
}

/// Goal: concurrent queued reads and writes of the same pages are atomic, and do not hang.
#[test]
fn reads_and_writes_of_one_range_are_atomic() {
    const LEN: usize = 3 * 4096;
    let mut random = Random::from_environment();
    for (name, backend) in back_ends(random.next()) {
        let case = open(backend, 128 << 10, 64 * PAGE);
        let seed = random.next();
        within(Duration::from_secs(60), name, move || {
            let mut random = Random(seed);
            let queue = case.engine.queue(32).unwrap();
            let slots = 20;
            for slot in 0..slots {
                case.file.write_all_at(&[0; LEN], slot * LEN as u64).unwrap();
            }
            let mut under_way = 0;
            for step in 0..3000u64 {
                let offset = random.below(slots) * LEN as u64;
                let request = match random.chance(400) {
                    true => Request::write(&case.file, vec![step as u8; LEN], offset).user_data(1),
                    false => Request::read(&case.file, vec![0; LEN], offset),
                };
                under_way += usize::from(queue.submit(request).is_ok());
                if random.chance(5) {
                    let first = offset / PAGE * PAGE;
                    case.file.advise(first, LEN as u64, Advice::DontNeed).unwrap();
                }
                while under_way == 32 || (step == 2999 && under_way > 0) {
                    for one in queue.wait(1, 32, None).unwrap() {
                        under_way -= 1;
                        assert_eq!(one.result().unwrap(), LEN);
                        let read = one.user_data() == 0;
                        let buffer = one.into_buffer();
                        assert!(!read || buffer.iter().all(|&b| b == buffer[0]), "torn");
                    }
                }
            }
        });
    }
}

/// Goal: a queue, its file and its engine may be dropped while reads are in flight: all reads end,
/// and no thread is left.
#[test]
fn everything_may_be_dropped_with_reads_in_flight() {
    let test = "everything_may_be_dropped_with_reads_in_flight";
    in_own_process(test, Duration::from_secs(60), || {
        let mut all = vec![slow(3)];
        if has_uring() {
            all.push(BackendChoice::Uring);
        }
        for backend in all {
            for _ in 0..10 {
                let case = open(backend.clone(), 256 << 10, 4 << 20);
                let queue = case.engine.queue(128).unwrap();
                let mut requests: Vec<Request> = (0..128)
                    .map(|n| match n % 8 {
                        0 => Request::write(&case.file, vec![0; 100], n * 7 * PAGE),
                        _ => Request::read(&case.file, vec![0; 6000], n * 7 * PAGE),
                    })
                    .collect();
                queue.submit_all(requests.drain(..)).unwrap();
            }
        }
        let ours = || threads().into_iter().filter(|(_, name)| name.starts_with("millpond-"));
        while ours().count() > 0 {
            std::thread::sleep(Duration::from_millis(5));
        }
    });
}

/// Goal: a thread that submits and waits in one call gets its completions on every back end: alone
/// or beside other threads of the queue, for hits and misses, and without leaving a request
/// unsubmitted.
/// Method: each thread submits hits and misses, and waits for one or for all; a plain wait takes
/// the remaining completions.
#[test]
fn submitting_and_waiting_leaves_nothing_behind() {
    let mut random = Random::from_environment();
    for (name, backend) in back_ends(random.next()) {
        let seed = random.next();
        within(Duration::from_secs(60), name, move || {
            let case = open(backend, 2 << 20, 8 << 20);
            case.file.advise(0, 0, Advice::Random).unwrap();
            for threads in [1, 3] {
                let queue = case.engine.queue(64).unwrap();
                std::thread::scope(|scope| {
                    for who in 0..threads {
                        let (queue, file) = (&queue, &case.file);
                        scope.spawn(move || submit_and_wait_for_a_while(queue, file, seed + who));
                    }
                });
                assert_eq!(queue.counts(), (0, 0));
            }
        });
    }
}

/// Takes as many completions as it submits requests; they may be another thread's.
fn submit_and_wait_for_a_while(queue: &Queue, file: &Arc<File>, seed: u64) {
    let mut random = Random(seed);
    let check = |done: millpond::queue::Completion| {
        let offset = done.user_data();
        let (result, buffer) = done.into_parts();
        assert_eq!(result.unwrap(), 4000);
        assert!(buffer == content(offset, 4000));
    };
    for round in 0..300 {
        let count = 1 + round % 5;
        let request = |_| {
            let at = if random.below(3) == 0 { 0 } else { random.below(2000) * PAGE };
            Request::read(file, vec![0; 4000], at).user_data(at)
        };
        let min = if round % 2 == 0 { 1 } else { count };
        let requests = (0..count).map(request);
        let (done, rest) = queue.submit_and_wait(requests, min, count, None).unwrap();
        assert!(rest.is_empty());
        let left = count - done.len();
        done.into_iter().for_each(check);
        if left > 0 {
            queue.wait(left, left, None).unwrap().into_iter().for_each(check);
        }
    }
}

/// Goal: an invalid wait submits nothing; a full queue still waits.
#[test]
fn a_wait_that_is_refused_submits_nothing() {
    let case = open(slow(1), 2 << 20, 1 << 20);
    let queue = case.engine.queue(2).unwrap();
    let request = |n| Request::read(&case.file, vec![0; 10], n * PAGE).user_data(n * PAGE);
    queue.submit_and_wait((0..3).map(request), 3, 3, None).unwrap_err();
    assert_eq!(queue.counts(), (0, 0));
    let (done, rest) = queue.submit_and_wait((0..3).map(request), 2, 2, None).unwrap();
    assert_eq!((done.len(), rest.len()), (2, 1));
    let (done, rest) = queue.submit_and_wait(rest, 1, 2, None).unwrap();
    assert_eq!((done.len(), rest.len()), (1, 0));
    let soon = Some(Duration::from_millis(1));
    let (done, _) = queue.submit_and_wait(rest, 1, 2, soon).unwrap();
    assert_eq!(done.len(), 0, "there is nothing to come");
}
