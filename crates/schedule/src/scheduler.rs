//! Who runs.

use std::cell::Cell;
use std::fmt;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::sync::{Mutex, MutexGuard};
use std::thread as real;

/// Of a thread that is in no run.
const NO_THREAD: usize = usize::MAX;
/// Turns after which a run is taken for one that will not end.
const TURNS_MAX: u64 = 3_000_000;
/// How much time a turn takes.
const TURN_NS: u64 = 1_000;
/// How much time threads have to end in after the first one, and how often that is given to those that do something.
const DRAIN_NS: u64 = 60_000_000_000;
const DRAIN_ROUNDS_MAX: usize = 100;

static STATE: Mutex<Option<State>> = Mutex::new(None);
/// Whose turn it is (B1). Release: what it did until it gave the turn away is seen by the next.
static RUNNING: AtomicUsize = AtomicUsize::new(NO_THREAD);
/// Points that the running thread may pass until its turn ends. Relaxed: only that thread uses it.
static POINTS_LEFT: AtomicU64 = AtomicU64::new(0);
static HAS_RUN: AtomicBool = AtomicBool::new(false);

thread_local! {
    static CURRENT: Cell<usize> = const { Cell::new(NO_THREAD) };
}

/// What was seen of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// The seed that decided.
    pub seed: u64,
    /// How often a thread had its turn.
    pub turns: u64,
    /// Threads that there were.
    pub threads: usize,
    /// How much time has passed, in nanoseconds.
    pub virtual_ns: u64,
    /// A hash of who ran, and for how long: the same of two runs means that they were the same.
    pub trace: u64,
    /// Threads that waited for something when it ended, and for what.
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
    /// Whether its last wait ended by a wake.
    woken: bool,
    /// Its share of turns.
    weight: u64,
    /// It waits for something by looking again and again.
    is_spinning: bool,
    system: Option<real::Thread>,
    /// An unpark that it did not wait for yet.
    token: bool,
}

struct State {
    seed: u64,
    random: u64,
    /// Of two, of the points of a turn.
    orders: u64,
    threads: Vec<Thread>,
    turns: u64,
    now: u64,
    trace: u64,
}

fn state() -> MutexGuard<'static, Option<State>> {
    STATE.lock().unwrap_or_else(|poison| poison.into_inner())
}

/// What the calling thread does to the state of its run.
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
        // Some have many turns where others have few.
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

    /// Lets those go on whose time has come.
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

    /// Whose turn is next, and for how many points; not `not`, if there is another.
    fn choose(&mut self, not: Option<usize>) -> usize {
        self.turns += 1;
        self.now += TURN_NS;
        if self.turns > TURNS_MAX {
            self.abort_run("does not end");
        }
        // A thread may be as slow as it likes, so all that wait for a time may be there before it (B3); the more so
        // if it only looks for what others do.
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
                None => self.abort_run("waits for ever"),
            }
        }
        let weight = |(number, thread): (usize, &Thread)| match thread.state {
            ThreadState::Ready if Some(number) == not => 0,
            ThreadState::Ready if thread.is_spinning => thread.weight,
            // What somebody waits for is more likely to be its doing.
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
        // Who wants no turn has one if there is nobody else.
        let chosen = chosen.or(not).expect("one is ready");
        self.threads[chosen].is_spinning = false;
        // Of very different lengths, and in some runs all of them short.
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

    /// A run that can't go on takes the process with it: there are threads that would have to be unwound.
    fn abort_run(&self, what: &str) -> ! {
        eprintln!("schedule: seed {} {what}, after {} turns:", self.seed, self.turns);
        for (number, thread) in self.threads.iter().enumerate() {
            let doing = match thread.state {
                ThreadState::Ready => "could go on".to_string(),
                ThreadState::Done => continue,
                ThreadState::Blocked { what, until: None, .. } => format!("waits for {what}"),
                ThreadState::Blocked { what, until: Some(_), .. } => {
                    format!("waits for {what}, for a time")
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

/// Where it may be another one's turn: for what is not made of atomics, and may be met by others halfway.
#[inline]
pub fn point() {
    if CURRENT.get() != NO_THREAD {
        match POINTS_LEFT.load(Relaxed) {
            0 => reschedule(false),
            left => POINTS_LEFT.store(left - 1, Relaxed),
        }
    }
}

/// Another one's turn, if one is ready.
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

/// Gives the turn to `next`, and waits for the next one.
fn switch_from(me: usize, next: usize) {
    if next != me {
        resume(next);
        wait_for_turn(me);
    }
}

fn resume(next: usize) {
    let system = with_state(|state| state.threads[next].system.clone());
    RUNNING.store(next, Release);
    system.expect("a thread is known before it can be chosen").unpark();
}

fn wait_for_turn(me: usize) {
    while RUNNING.load(Acquire) != me {
        real::park();
    }
}

/// Waits for a wake of `key`, or for the time `until`. Whether it was woken.
pub(crate) fn block(key: usize, what: &'static str, until: Option<u64>) -> bool {
    let Some(me) = current() else {
        panic!("outside of a run nobody would wake who waits for {what}");
    };
    let next = with_state(|state| {
        state.threads[me].state = ThreadState::Blocked { key, what, until };
        state.choose(None)
    });
    switch_from(me, next);
    with_state(|state| state.threads[me].woken)
}

/// Wakes so many of those that wait for `key`, in no particular order; how many there were.
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

/// Nanoseconds since before the run.
pub(crate) fn now() -> u64 {
    point();
    state().as_mut().map_or(0, |state| {
        state.now += 10;
        state.now
    })
}

/// What those wait for that want the end of thread `number`.
fn exit_key(number: usize) -> usize {
    // No address of anything else: odd.
    2 * number + 1
}

/// What a thread waits for that is parked.
fn unpark_key(number: usize) -> usize {
    // Odd, too, and of no end.
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

/// The number of a new thread.
pub(crate) fn add_thread(name: Option<&str>) -> usize {
    assert!(current().is_some(), "threads are started within millpond_schedule::run");
    with_state(|state| {
        let name = name.map_or_else(|| format!("thread {}", state.threads.len()), str::to_string);
        state.add(name)
    })
}

/// It could not be started.
pub(crate) fn mark_done(number: usize) {
    with_state(|state| state.threads[number].state = ThreadState::Done);
}

/// The system's thread of that number (B4).
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

/// Ends a thread; as the first of its thread-locals that was made, its destructor is the last to run.
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

/// Makes the calling thread, of the system, thread `number` of the run, and waits for its first turn.
pub(crate) fn begin_thread(number: usize) {
    END.set(Some(ThreadExit(number)));
    wait_for_turn(number);
    CURRENT.set(number);
}

/// Carries out `body`, and all threads that it starts, one at a time, as `seed` decides; then waits for those that
/// can still do something.
///
/// # Panics
///
/// As `body` does, having said the seed; and if this process had a run before. Where all threads wait, or the run
/// does not end, the process is aborted, and what each waits for is on standard error.
pub fn run<T>(seed: u64, body: impl FnOnce() -> T) -> (T, Report) {
    assert!(!HAS_RUN.swap(true, Relaxed), "a process has one run: what is static stays");
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
    // One thread runs at a time: on one processor a turn is given away in a third of the time.
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
        // In the end nobody can do anything any more, save what is done time and again.
        let does_something = |thread: &Thread| match thread.state {
            ThreadState::Ready => true,
            ThreadState::Blocked { until, .. } => until.is_some(),
            ThreadState::Done => false,
        };
        for _ in 0..DRAIN_ROUNDS_MAX {
            block(exit_key(number), "all others", Some(now() + DRAIN_NS));
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

/// Stands in for the one of the C library, by which std seeds its hash maps: their order is a part of what a program does.
///
/// # Safety
///
/// `buffer` is valid for writes of `len` bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn getrandom(buffer: *mut u8, len: usize, _flags: u32) -> isize {
    // SAFETY: the caller promises it.
    unsafe { std::ptr::write_bytes(buffer, 0x5A, len) };
    len as isize
}
