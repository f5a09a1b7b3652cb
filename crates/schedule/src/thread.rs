use std::io;
use std::num::NonZero;
use std::sync::Arc;
use std::thread as real;
use std::time::Duration;

pub use std::thread::*;

use crate::scheduler;
use crate::time::nanos;

/// Identifies a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ThreadId(usize);

/// As std's.
#[derive(Clone)]
pub struct Thread {
    number: usize,
    name: Arc<str>,
}

impl Thread {
    fn new(number: usize) -> Thread {
        Thread { number, name: scheduler::name_of(number).into() }
    }

    /// As std's.
    #[must_use]
    pub fn id(&self) -> ThreadId {
        ThreadId(self.number)
    }

    /// As std's.
    #[must_use]
    pub fn name(&self) -> Option<&str> {
        Some(&self.name)
    }

    /// As std's.
    pub fn unpark(&self) {
        scheduler::point();
        scheduler::unpark(self.number);
    }
}

impl std::fmt::Debug for Thread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Thread").field("id", &self.id()).field("name", &self.name()).finish()
    }
}

/// As std's.
///
/// # Panics
///
/// Outside of a run.
#[must_use]
pub fn current() -> Thread {
    Thread::new(scheduler::current().expect("within a run"))
}

fn park_until(until: Option<u64>) {
    scheduler::point();
    scheduler::park(until);
}

/// As std's.
pub fn park() {
    park_until(None);
}

/// As std's.
pub fn park_timeout(limit: Duration) {
    park_until(Some(scheduler::now().saturating_add(nanos(limit))));
}

/// As std's: switches to another thread, if one is ready.
pub fn yield_now() {
    scheduler::yield_now();
}

/// As std's, in virtual time.
pub fn sleep(limit: Duration) {
    let until = scheduler::now().saturating_add(nanos(limit));
    // A key that no thread wakes.
    scheduler::block(0, "a time", Some(until));
}

/// Two, on every machine.
///
/// # Errors
///
/// None.
pub fn available_parallelism() -> io::Result<NonZero<usize>> {
    Ok(NonZero::new(2).expect("two"))
}

/// As std's.
#[derive(Debug, Default)]
pub struct Builder {
    name: Option<String>,
}

impl Builder {
    /// As std's.
    #[must_use]
    pub fn new() -> Builder {
        Builder::default()
    }

    /// As std's.
    #[must_use]
    pub fn name(mut self, name: String) -> Builder {
        self.name = Some(name);
        self
    }

    /// As std's, of no effect.
    #[must_use]
    pub fn stack_size(self, _bytes: usize) -> Builder {
        self
    }

    fn real(&self) -> real::Builder {
        match &self.name {
            Some(name) => real::Builder::new().name(name.clone()),
            None => real::Builder::new(),
        }
    }

    /// As std's.
    ///
    /// # Errors
    ///
    /// As std's.
    pub fn spawn<T: Send + 'static>(
        self,
        body: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<JoinHandle<T>> {
        let number = scheduler::add_thread(self.name.as_deref());
        let spawned = self.real().spawn(move || {
            scheduler::begin_thread(number);
            body()
        });
        match spawned {
            Ok(handle) => {
                scheduler::set_system(number, handle.thread().clone());
                scheduler::point();
                Ok(JoinHandle { number, thread: Thread::new(number), handle })
            }
            Err(error) => {
                scheduler::mark_done(number);
                Err(error)
            }
        }
    }

    /// As std's.
    ///
    /// # Errors
    ///
    /// As std's.
    pub fn spawn_scoped<'scope, 'env, T: Send + 'scope>(
        self,
        scope: &'scope Scope<'scope, 'env>,
        body: impl FnOnce() -> T + Send + 'scope,
    ) -> io::Result<ScopedJoinHandle<'scope, T>> {
        let number = scheduler::add_thread(self.name.as_deref());
        let spawned = self.real().spawn_scoped(scope.real, move || {
            scheduler::begin_thread(number);
            body()
        });
        match spawned {
            Ok(handle) => {
                scheduler::set_system(number, handle.thread().clone());
                scope.numbers.lock().expect("no panic under the lock").push(number);
                scheduler::point();
                Ok(ScopedJoinHandle { number, thread: Thread::new(number), handle })
            }
            Err(error) => {
                scheduler::mark_done(number);
                Err(error)
            }
        }
    }
}

/// As std's.
///
/// # Panics
///
/// As std's; and outside of a run.
pub fn spawn<T: Send + 'static>(body: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
    Builder::new().spawn(body).expect("the system gives a thread")
}

/// As std's.
pub struct JoinHandle<T> {
    number: usize,
    thread: Thread,
    handle: real::JoinHandle<T>,
}

/// The methods of both kinds of handles.
macro_rules! handle {
    ($handle:ty) => {
        impl<T> $handle {
            /// As std's.
            ///
            /// # Errors
            ///
            /// As std's.
            pub fn join(self) -> real::Result<T> {
                scheduler::wait_for_end(self.number);
                self.handle.join()
            }

            /// As std's.
            #[must_use]
            pub fn thread(&self) -> &Thread {
                &self.thread
            }

            /// As std's.
            #[must_use]
            pub fn is_finished(&self) -> bool {
                scheduler::point();
                scheduler::is_done(self.number)
            }
        }
    };
}

handle!(JoinHandle<T>);
handle!(ScopedJoinHandle<'_, T>);

impl<T> std::fmt::Debug for JoinHandle<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("JoinHandle").finish_non_exhaustive()
    }
}

/// As std's.
pub struct Scope<'scope, 'env: 'scope> {
    real: &'scope real::Scope<'scope, 'env>,
    numbers: &'scope std::sync::Mutex<Vec<usize>>,
}

impl<'scope, 'env> Scope<'scope, 'env> {
    /// As std's.
    ///
    /// # Panics
    ///
    /// As std's.
    pub fn spawn<T: Send + 'scope>(
        &'scope self,
        body: impl FnOnce() -> T + Send + 'scope,
    ) -> ScopedJoinHandle<'scope, T> {
        Builder::new().spawn_scoped(self, body).expect("the system gives a thread")
    }
}

/// As std's.
pub struct ScopedJoinHandle<'scope, T> {
    number: usize,
    thread: Thread,
    handle: real::ScopedJoinHandle<'scope, T>,
}

/// As std's.
///
/// # Panics
///
/// As std's.
pub fn scope<'env, T>(body: impl for<'scope> FnOnce(&'scope Scope<'scope, 'env>) -> T) -> T {
    let numbers = &*Box::leak(Box::new(std::sync::Mutex::new(Vec::new())));
    real::scope(|scope| {
        let scope = &*Box::leak(Box::new(Scope { real: scope, numbers }));
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| body(scope)));
        // Before std waits for the threads, in the kernel.
        let mut at = 0;
        loop {
            let number = numbers.lock().expect("no panic under the lock").get(at).copied();
            let Some(number) = number else { break };
            scheduler::wait_for_end(number);
            at += 1;
        }
        outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}
