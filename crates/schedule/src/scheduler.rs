//! The scheduler: decides which thread runs, and keeps the virtual time.

use std::cell::Cell;
use std::fmt;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::sync::{Mutex, MutexGuard};
use std::thread as real;

/// The number of a thread outside of a run.
const NO_THREAD: usize = usize::MAX;
/// Turns after which a run is considered endless.
const TURNS_MAX: u64 = 3_000_000;
/// Virtual time of a turn.
const TURN_NS: u64 = 1_000;
/// Virtual time that other threads have to end after the first one, and how often it is extended while some of them are
/// active.
const DRAIN_NS: u64 = 60_000_000_000;
const DRAIN_ROUNDS_MAX: usize = 100;

static STATE: Mutex<Option<State>> = Mutex::new(None);
/// The running thread (B1). Release: the next thread sees everything that this thread did before the switch.
static RUNNING: AtomicUsize = AtomicUsize::new(NO_THREAD);
/// Points that the running thread passes before its turn ends. Relaxed: only that thread uses it.
static POINTS_LEFT: AtomicU64 = AtomicU64::new(0);
static HAS_RUN: AtomicBool = AtomicBool::new(false);

thread_local! {
    static CURRENT: Cell<usize> = const { Cell::new(NO_THREAD) };
}

/// Summary of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// The seed of the run.
    pub seed: u64,
    /// Number of turns.
    pub turns: u64,
    /// Number of threads.
    pub threads: usize,
    /// Virtual time of the run, in nanoseconds.
    pub virtual_ns: u64,
    /// A hash of the threads and lengths of all turns. Equal hashes mean equal runs.
    pub trace: u64,
    /// Threads that still waited at the end of the run, each with the object of its wait.
    pub left: Vec<String>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Report { seed, turns, threads, virtual_ns, trace, left } = self;
        let ms = *virtual_ns as f64 / 1e6;
        write!(
            f,
            "seed {seed}: {turns} turns of {threads} threads, {ms:.3} ms, trace {trace:016x}"
        )?;
        if !left.is_empty() {
            write!(f, "; left: {}", left.join(", "))?;
        }
        Ok(())
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum ThreadState {
    Ready,
    Blocked { key: usize, what: &'static str, until: Option<u64> },
    Done,
}

struct Thread {
    name: String,
    state: ThreadState,
    /// Whether a wake ended its last wait.
    woken: bool,
    /// Its share of turns.
    weight: u64,
    /// The thread polls in a loop.
    is_spinning: bool,
    system: Option<real::Thread>,
    /// An unpark that the thread has not consumed yet.
    token: bool,
}

struct State {
    seed: u64,
    random: u64,
    /// Turns have fewer points than two to this power.
    orders: u64,
    threads: Vec<Thread>,
    turns: u64,
    now: u64,
    trace: u64,
}

fn state() -> MutexGuard<'static, Option<State>> {
    STATE.lock().unwrap_or_else(|poison| poison.into_inner())
}

/// Calls `act` with the state of the run.
fn with_state<T>(act: impl FnOnce(&mut State) -> T) -> T {
    act(state().as_mut().expect("there is a run"))
}

impl State {
    fn random(&mut self) -> u64 {
        // SplitMix64 (Steele et al., OOPSLA 2014).
        self.random = self.random.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, below: u64) -> u64 {
        self.random() % below.max(1)
    }

    fn add(&mut self, name: String) -> usize {
        // Threads get turns at different rates.
        let weight = 1 << (3 * self.below(3));
        self.threads.push(Thread {
            name,
            state: ThreadState::Ready,
            woken: false,
            weight,
            is_spinning: false,
            system: None,
            token: false,
        });
        self.threads.len() - 1
    }

    /// Makes the threads ready whose deadline has passed.
    fn expire(&mut self) {
        let now = self.now;
        for thread in &mut self.threads {
            if let ThreadState::Blocked { until: Some(until), .. } = thread.state
                && until <= now
            {
                (thread.state, thread.woken) = (ThreadState::Ready, false);
            }
        }
    }

    fn next_deadline(&self) -> Option<u64> {
        let deadline = |thread: &Thread| match thread.state {
            ThreadState::Blocked { until, .. } => until,
            _ => None,
        };
        self.threads.iter().filter_map(deadline).min()
    }

    /// Chooses the next thread, not `not` if another one is ready, and the number of points of its turn.
    fn choose(&mut self, not: Option<usize>) -> usize {
        self.turns += 1;
        self.now += TURN_NS;
        if self.turns > TURNS_MAX {
            self.abort_run("does not end");
        }
        // A thread may be arbitrarily slow, so deadlines may pass before it continues (B3). This is more likely if the
        // ready threads only poll.
        let is_at_work =
            |thread: &Thread| thread.state == ThreadState::Ready && !thread.is_spinning;
        let slow = if self.threads.iter().any(is_at_work) { 512 } else { 4 };
        if self.below(slow) == 0
            && let Some(deadline) = self.next_deadline()
        {
            self.now = self.now.max(deadline);
        }
        self.expire();
        if !self.threads.iter().any(|thread| thread.state == ThreadState::Ready) {
            match self.next_deadline() {
                Some(deadline) => {
                    self.now = self.now.max(deadline);
                    self.expire();
                }
                None => self.abort_run("deadlocks"),
            }
        }
        let weight = |(number, thread): (usize, &Thread)| match thread.state {
            ThreadState::Ready if Some(number) == not => 0,
            ThreadState::Ready if thread.is_spinning => thread.weight,
            // Threads that do not poll get more turns, as polling threads wait for them.
            ThreadState::Ready => 32 * thread.weight,
            _ => 0,
        };
        let weights: Vec<u64> = self.threads.iter().enumerate().map(weight).collect();
        let mut at = self.below(weights.iter().sum());
        let chosen = weights.iter().position(|&weight| {
            let is_here = at < weight;
            at = at.saturating_sub(weight);
            is_here
        });
        // A thread that yields continues if no other thread is ready.
        let chosen = chosen.or(not).expect("one is ready");
        self.threads[chosen].is_spinning = false;
        // Turns have very different lengths; in some runs all are short.
        let order = self.below(self.orders);
        let points = self.below(1 << order);
        POINTS_LEFT.store(points, Relaxed);
        for part in [chosen as u64, points, self.now] {
            self.trace = (self.trace ^ part).wrapping_mul(0x0000_0100_0000_01B3).rotate_left(17);
        }
        chosen
    }

    fn waiting(&self) -> Vec<String> {
        let one = |thread: &Thread| match thread.state {
            ThreadState::Blocked { what, .. } => Some(format!("{} ({what})", thread.name)),
            _ => None,
        };
        self.threads[1..].iter().filter_map(one).collect()
    }

    /// Aborts the process, as the other threads of the run can't be unwound.
    fn abort_run(&self, what: &str) -> ! {
        eprintln!("schedule: seed {} {what}, after {} turns:", self.seed, self.turns);
        for (number, thread) in self.threads.iter().enumerate() {
            let doing = match thread.state {
                ThreadState::Ready => "is ready".to_string(),
                ThreadState::Done => continue,
                ThreadState::Blocked { what, until: None, .. } => format!("waits for {what}"),
                ThreadState::Blocked { what, until: Some(_), .. } => {
                    format!("waits for {what}, with a time limit")
                }
            };
            eprintln!("schedule: thread {number}, {}: {doing}", thread.name);
        }
        std::process::abort()
    }
}

/// The number of the calling thread, if it is in a run.
pub(crate) fn current() -> Option<usize> {
    let me = CURRENT.get();
    (me != NO_THREAD).then_some(me)
}

/// A point at which the scheduler may switch threads. For code without atomics whose intermediate states other threads may
/// observe.
#[inline]
pub fn point() {
    if CURRENT.get() != NO_THREAD {
        match POINTS_LEFT.load(Relaxed) {
            0 => reschedule(false),
            left => POINTS_LEFT.store(left - 1, Relaxed),
        }
    }
}

/// Switches to another thread, if one is ready.
pub(crate) fn yield_now() {
    if CURRENT.get() != NO_THREAD {
        reschedule(true);
    }
}

#[cold]
fn reschedule(away: bool) {
    let me = CURRENT.get();
    let next = with_state(|state| {
        state.threads[me].is_spinning = away;
        state.choose(away.then_some(me))
    });
    switch_from(me, next);
}

/// Switches from thread `me` to `next`, and waits for the next turn of `me`.
fn switch_from(me: usize, next: usize) {
    if next != me {
        resume(next);
        wait_for_turn(me);
    }
}

fn resume(next: usize) {
    let system = with_state(|state| state.threads[next].system.clone());
    RUNNING.store(next, Release);
    system.expect("a thread is registered before it is chosen").unpark();
}

fn wait_for_turn(me: usize) {
    while RUNNING.load(Acquire) != me {
        real::park();
    }
}

/// Blocks until a wake of `key`, or until the time `until`. Returns whether it was woken.
pub(crate) fn block(key: usize, what: &'static str, until: Option<u64>) -> bool {
    let Some(me) = current() else {
        panic!("wait for {what} outside of a run: no thread could end it");
    };
    let next = with_state(|state| {
        state.threads[me].state = ThreadState::Blocked { key, what, until };
        state.choose(None)
    });
    switch_from(me, next);
    with_state(|state| state.threads[me].woken)
}

/// Wakes at most `count` threads that wait for `key`, in random order; returns their number.
pub(crate) fn wake(key: usize, count: usize) -> usize {
    if current().is_none() {
        return 0;
    }
    with_state(|state| {
        let waits = |thread: &Thread| matches!(thread.state, ThreadState::Blocked { key: its, .. } if its == key);
        let mut woken = 0;
        while woken < count {
            let waiting: Vec<usize> =
                (0..state.threads.len()).filter(|&number| waits(&state.threads[number])).collect();
            if waiting.is_empty() {
                break;
            }
            let chosen = waiting[state.below(waiting.len() as u64) as usize];
            (state.threads[chosen].state, state.threads[chosen].woken) = (ThreadState::Ready, true);
            woken += 1;
        }
        woken
    })
}

/// The virtual time, in nanoseconds.
pub(crate) fn now() -> u64 {
    point();
    state().as_mut().map_or(0, |state| {
        state.now += 10;
        state.now
    })
}

/// The key of waits for the end of thread `number`.
fn exit_key(number: usize) -> usize {
    // Odd, so it is not the address of a lock.
    2 * number + 1
}

/// The key on which a parked thread waits.
fn unpark_key(number: usize) -> usize {
    // Odd as well, and no exit key.
    usize::MAX - 2 * number
}

/// As `std::thread::park`, until a time.
pub(crate) fn park(until: Option<u64>) {
    let me = current().expect("within a run");
    let take = |state: &mut State| std::mem::take(&mut state.threads[me].token);
    if !with_state(take) {
        block(unpark_key(me), "an unpark", until);
        with_state(take);
    }
}

pub(crate) fn unpark(number: usize) {
    if STATE.lock().is_ok_and(|state| state.is_some()) {
        with_state(|state| state.threads[number].token = true);
        wake(unpark_key(number), 1);
    }
}

/// Registers a new thread, and returns its number.
pub(crate) fn add_thread(name: Option<&str>) -> usize {
    assert!(current().is_some(), "threads are started within millpond_schedule::run");
    with_state(|state| {
        let name = name.map_or_else(|| format!("thread {}", state.threads.len()), str::to_string);
        state.add(name)
    })
}

/// Marks a thread as done that could not be started.
pub(crate) fn mark_done(number: usize) {
    with_state(|state| state.threads[number].state = ThreadState::Done);
}

/// Sets the system thread of a thread (B4).
pub(crate) fn set_system(number: usize, system: real::Thread) {
    with_state(|state| state.threads[number].system = Some(system));
}

pub(crate) fn name_of(number: usize) -> String {
    with_state(|state| state.threads[number].name.clone())
}

pub(crate) fn is_done(number: usize) -> bool {
    with_state(|state| state.threads[number].state == ThreadState::Done)
}

pub(crate) fn wait_for_end(number: usize) {
    while !is_done(number) {
        block(exit_key(number), "the end of a thread", None);
    }
}

/// Ends a thread. It is the first thread-local created on the thread, so its destructor runs last.
struct ThreadExit(usize);

impl Drop for ThreadExit {
    fn drop(&mut self) {
        let me = self.0;
        with_state(|state| state.threads[me].state = ThreadState::Done);
        wake(exit_key(me), usize::MAX);
        let next = with_state(|state| state.choose(None));
        CURRENT.set(NO_THREAD);
        resume(next);
    }
}

thread_local! {
    static END: Cell<Option<ThreadExit>> = const { Cell::new(None) };
}

/// Makes the calling system thread the thread `number` of the run, and waits for its first turn.
pub(crate) fn begin_thread(number: usize) {
    END.set(Some(ThreadExit(number)));
    wait_for_turn(number);
    CURRENT.set(number);
}

/// Runs `body` and all threads that it starts, one thread at a time, scheduled by `seed`. Then waits until no thread can
/// continue.
///
/// # Panics
///
/// If `body` panics, after printing the seed; and if this process had a run before. In a deadlock or an endless run, it
/// prints which object each thread waits for, and aborts the process.
pub fn run<T>(seed: u64, body: impl FnOnce() -> T) -> (T, Report) {
    assert!(!HAS_RUN.swap(true, Relaxed), "a process has one run, as statics keep their values");
    assert!(current().is_none(), "runs don't nest");
    let mut first = State {
        seed,
        random: seed,
        orders: 0,
        threads: Vec::new(),
        turns: 0,
        now: 1 << 50,
        trace: 0xCBF2_9CE4_8422_2325,
    };
    first.orders = 3 + first.below(9);
    let began = first.now;
    // One thread runs at a time: on one processor a switch takes a third of the time.
    let allowed = rustix::thread::sched_getaffinity(None).ok();
    if let Some(allowed) = &allowed {
        let processors: Vec<usize> = (0..rustix::thread::CpuSet::MAX_CPU)
            .filter(|&processor| allowed.is_set(processor))
            .collect();
        let mut one = rustix::thread::CpuSet::new();
        one.set(processors[std::process::id() as usize % processors.len()]);
        let _ = rustix::thread::sched_setaffinity(None, &one);
    }
    let number = first.add("main".to_string());
    first.threads[number].system = Some(real::current());
    *state() = Some(first);
    RUNNING.store(number, Release);
    CURRENT.set(number);
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body));
    if outcome.is_ok() {
        // Run until no thread can continue, or only periodic work is left.
        let does_something = |thread: &Thread| match thread.state {
            ThreadState::Ready => true,
            ThreadState::Blocked { until, .. } => until.is_some(),
            ThreadState::Done => false,
        };
        for _ in 0..DRAIN_ROUNDS_MAX {
            block(exit_key(number), "all other threads", Some(now() + DRAIN_NS));
            if !with_state(|state| state.threads[1..].iter().any(does_something)) {
                break;
            }
        }
    } else {
        eprintln!("schedule: seed {seed} panicked");
    }
    CURRENT.set(NO_THREAD);
    RUNNING.store(NO_THREAD, Release);
    if let Some(allowed) = &allowed {
        let _ = rustix::thread::sched_setaffinity(None, allowed);
    }
    let report = with_state(|state| Report {
        seed,
        turns: state.turns,
        threads: state.threads.len(),
        virtual_ns: state.now - began,
        trace: state.trace,
        left: state.waiting(),
    });
    match outcome {
        Ok(value) => (value, report),
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

/// Replaces the C library's function, with which std seeds its hash maps: their order influences the program's behaviour.
///
/// # Safety
///
/// `buffer` is valid for writes of `len` bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn getrandom(buffer: *mut u8, len: usize, _flags: u32) -> isize {
    // SAFETY: the caller guarantees that `buffer` is valid for `len` bytes.
    unsafe { std::ptr::write_bytes(buffer, 0x5A, len) };
    len as isize
}
