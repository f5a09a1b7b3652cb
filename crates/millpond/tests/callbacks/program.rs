//! Wakers that misbehave.

use std::any::Any;
use std::future::Future;
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, RawWaker, RawWakerVTable, Waker};
use std::time::Duration;

/// The call by the engine that misbehaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    Wake,
    Clone,
    Drop,
}

/// The kind of misbehavior.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Misbehavior {
    Panic,
    /// With a payload that panics as it is dropped.
    PanicTwice,
    Block,
    CallEngine,
    /// Drops an engine, and the last handle of a file with dirty pages.
    DropLast,
}

pub const CALLS: [Call; 3] = [Call::Wake, Call::Clone, Call::Drop];
pub const MISBEHAVIORS: [Misbehavior; 5] = [
    Misbehavior::Panic,
    Misbehavior::PanicTwice,
    Misbehavior::Block,
    Misbehavior::CallEngine,
    Misbehavior::DropLast,
];

/// The code behind the wakers of one task.
pub struct Program {
    call: Call,
    misbehavior: Misbehavior,
    /// Of the wakers that the engine has.
    wakes: AtomicUsize,
    /// What `CallEngine` does.
    engine: Box<dyn Fn() + Send + Sync>,
    /// What `DropLast` drops.
    last: Mutex<Option<Box<dyn Any + Send>>>,
}

thread_local! {
    /// Set while the program's code runs: it does not call itself.
    static INSIDE: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Panics without a word on standard error, which thousands of cases would fill.
pub fn panic_quietly(twice: bool) -> ! {
    struct PanicsAgain;
    impl Drop for PanicsAgain {
        fn drop(&mut self) {
            resume_unwind(Box::new("the payload of a panic"));
        }
    }
    match twice {
        true => resume_unwind(Box::new(PanicsAgain)),
        false => resume_unwind(Box::new("a callback")),
    }
}

impl Program {
    pub fn new(
        (call, misbehavior): (Call, Misbehavior),
        engine: impl Fn() + Send + Sync + 'static,
        last: impl Any + Send,
    ) -> Arc<Program> {
        Arc::new(Program {
            call,
            misbehavior,
            wakes: AtomicUsize::new(0),
            engine: Box::new(engine),
            last: Mutex::new(Some(Box::new(last))),
        })
    }

    fn called(&self, call: Call) {
        if call != self.call {
            return;
        }
        match self.misbehavior {
            Misbehavior::Panic => panic_quietly(false),
            Misbehavior::PanicTwice => panic_quietly(true),
            Misbehavior::Block => std::thread::sleep(Duration::from_millis(2)),
            Misbehavior::CallEngine => {
                if !INSIDE.replace(true) {
                    (self.engine)();
                    INSIDE.set(false);
                }
            }
            Misbehavior::DropLast => {
                let last = self.last.lock().unwrap().take();
                drop(last);
            }
        }
    }

    /// How often the engine has woken the task.
    pub fn wakes(&self) -> usize {
        self.wakes.load(SeqCst)
    }

    /// Polls as the program's task. Returns `None` if the task's own waker panics in the poll.
    pub fn poll<F: Future + ?Sized>(
        self: &Arc<Self>,
        future: Pin<&mut F>,
    ) -> Option<Poll<F::Output>> {
        let data = Arc::into_raw(Arc::clone(self)).cast();
        // SAFETY: the functions of `TASK_WAKER` count the references of the program, as an `Arc` does.
        let waker = unsafe { Waker::from_raw(RawWaker::new(data, &TASK_WAKER)) };
        let poll = || future.poll(&mut Context::from_waker(&waker));
        caught(poll)
    }
}

/// What `body` returns; `None` if it panics.
pub fn caught<R>(body: impl FnOnce() -> R) -> Option<R> {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(result) => Some(result),
        Err(payload) => {
            if let Err(again) = catch_unwind(AssertUnwindSafe(|| drop(payload))) {
                std::mem::forget(again);
            }
            None
        }
    }
}

/// The waker that the task has; its clones are the engine's.
static TASK_WAKER: RawWakerVTable = RawWakerVTable::new(clone, wake, wake_by_ref, drop_own);
static ENGINES: RawWakerVTable = RawWakerVTable::new(clone, wake, wake_by_ref, drop_engines);

fn program(data: *const ()) -> Arc<Program> {
    // SAFETY: the data of a waker of ours, which has a reference.
    unsafe { Arc::from_raw(data.cast()) }
}

unsafe fn clone(data: *const ()) -> RawWaker {
    let program = ManuallyDrop::new(program(data));
    program.called(Call::Clone);
    RawWaker::new(Arc::into_raw(Arc::clone(&program)).cast(), &ENGINES)
}

unsafe fn wake(data: *const ()) {
    let program = program(data);
    program.wakes.fetch_add(1, SeqCst);
    program.called(Call::Wake);
}

unsafe fn wake_by_ref(data: *const ()) {
    let program = ManuallyDrop::new(program(data));
    program.wakes.fetch_add(1, SeqCst);
    program.called(Call::Wake);
}

unsafe fn drop_own(data: *const ()) {
    drop(program(data));
}

unsafe fn drop_engines(data: *const ()) {
    program(data).called(Call::Drop);
}
