//! Tests runs of a few threads, each run in a separate process.

use std::process::{Command, Output};

use millpond_schedule as scheduled;
use scheduled::sync::atomic::{AtomicU32, Ordering::Relaxed};
use scheduled::sync::{Condvar, Mutex, OnceLock, mpsc};
use scheduled::time::{Duration, Instant};
use scheduled::{futex, run, thread};

const INSIDE: &str = "MILLPOND_SCHEDULE_TEST";

/// The seed, if this process is a run of `test`.
fn seed(test: &str) -> Option<u64> {
    let inside = std::env::var(INSIDE).ok()?;
    let (name, seed) = inside.split_once(':')?;
    (name == test).then(|| seed.parse().expect("a seed"))
}

fn process(test: &str, seed: u64) -> Output {
    Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture"])
        .env(INSIDE, format!("{test}:{seed}"))
        .output()
        .unwrap()
}

/// The line of the output that starts with `begin`.
fn line(output: &Output, begin: &str) -> String {
    let text = String::from_utf8_lossy(&output.stdout);
    let at = text
        .find(begin)
        .unwrap_or_else(|| panic!("{text}{}", String::from_utf8_lossy(&output.stderr)));
    text[at..].lines().next().unwrap().to_string()
}

/// Goal: a few runs find a lost update, which needs a switch between two operations; the same seed gives the same run, and
/// different seeds give different runs.
#[test]
fn finds_lost_updates() {
    const TEST: &str = "finds_lost_updates";
    if let Some(seed) = seed(TEST) {
        let count = AtomicU32::new(0);
        let (_, report) = run(seed, || {
            thread::scope(|scope| {
                for _ in 0..2 {
                    scope.spawn(|| count.store(count.load(Relaxed) + 1, Relaxed));
                }
            });
        });
        println!("count {}, {report}", count.load(Relaxed));
        return;
    }
    let lines: Vec<String> = (0..30).map(|seed| line(&process(TEST, seed), "count ")).collect();
    assert!(lines.iter().any(|line| line.starts_with("count 1")), "{lines:?}");
    assert!(lines.iter().any(|line| line.starts_with("count 2")), "{lines:?}");
    for (seed, first) in lines.iter().enumerate() {
        assert_eq!(*first, line(&process(TEST, seed as u64), "count "));
    }
}

/// Goal: locks exclude, condition variables and futexes wake, messages and unparks arrive, and timed waits take virtual
/// time only.
#[test]
fn every_wait_ends() {
    const TEST: &str = "every_wait_ends";
    let Some(seed) = seed(TEST) else {
        for seed in 0..20 {
            let output = process(TEST, seed);
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        }
        return;
    };
    static MADE: OnceLock<u32> = OnceLock::new();
    let started = std::time::Instant::now();
    let (_, report) = run(seed, || {
        let (count, changed) = (Mutex::new(0), Condvar::new());
        let word = AtomicU32::new(0);
        let (sender, receiver) = mpsc::channel();
        thread::scope(|scope| {
            for number in 0..3 {
                let (count, changed, sender) = (&count, &changed, sender.clone());
                scope.spawn(move || {
                    for _ in 0..100 {
                        let mut count = count.lock().unwrap();
                        let before = *count;
                        thread::yield_now();
                        *count = before + 1;
                        changed.notify_all();
                    }
                    assert_eq!(*MADE.get_or_init(|| 7), 7);
                    sender.send(number).unwrap();
                });
            }
            let sleeper = scope.spawn(|| {
                while word.load(Relaxed) == 0 {
                    let _ = futex::wait(&word, futex::Flags::PRIVATE, 0, None);
                }
                thread::park();
            });
            let until = |count: &mut u32| *count < 300;
            drop(changed.wait_while(count.lock().unwrap(), until).unwrap());
            let hour = Duration::from_secs(3600);
            let now = Instant::now();
            let late = changed.wait_timeout(count.lock().unwrap(), hour).unwrap().1.timed_out();
            assert!(!late || now.elapsed() >= hour);
            thread::sleep(hour);
            assert!(now.elapsed() >= hour);
            word.store(1, Relaxed);
            let _ = futex::wake(&word, futex::Flags::PRIVATE, 1);
            sleeper.thread().unpark();
            sleeper.join().unwrap();
        });
        drop(sender);
        assert_eq!(receiver.iter().sum::<u32>(), 3);
    });
    assert!(report.virtual_ns > 3_600_000_000_000 && report.left.is_empty(), "{report}");
    assert!(started.elapsed() < std::time::Duration::from_secs(60), "{report}");
}

/// Goal: a deadlock ends the process, with a report of the seed and of the object that each thread waits for.
/// Method: two threads lock two mutexes in opposite orders; some runs succeed.
#[test]
fn reports_a_deadlock() {
    const TEST: &str = "reports_a_deadlock";
    if let Some(seed) = seed(TEST) {
        run(seed, || {
            let (one, two) = (Mutex::new(()), Mutex::new(()));
            thread::scope(|scope| {
                scope.spawn(|| drop((one.lock(), two.lock())));
                scope.spawn(|| drop((two.lock(), one.lock())));
            });
        });
        return;
    }
    let outputs: Vec<Output> = (0..30).map(|seed| process(TEST, seed)).collect();
    let failed: Vec<_> = outputs.iter().filter(|output| !output.status.success()).collect();
    assert!(!failed.is_empty() && failed.len() < outputs.len(), "{} of 30", failed.len());
    for output in failed {
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(text.contains("deadlocks") && text.matches("a mutex").count() == 2, "{text}");
    }
}

/// Goal: a panic propagates from the thread through the run, and the seed is printed.
#[test]
fn propagates_panics() {
    const TEST: &str = "propagates_panics";
    if let Some(seed) = seed(TEST) {
        run(seed, || thread::spawn(move || assert_eq!(seed, 0, "at last")).join().unwrap());
        return;
    }
    let output = process(TEST, 77);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && text.contains("seed 77 panicked"), "{text}");
}
