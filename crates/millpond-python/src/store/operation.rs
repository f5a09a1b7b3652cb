//! A call for an object store: its future, and the two ways to wait for it.
//!
//! - A thread waits by polling the future itself ([`Operation::run`]). Ctrl-C drops the future.
//! - An asyncio loop polls it once ([`Pending::try_now`]). If that is not enough, a task of the runtime completes it and
//!   writes to an eventfd ([`Completions`]), which the loop watches.
//!
//! - **O1** A future holds no Python object, so a thread of the runtime may drop it (runtime.R2). Its result is a
//!   [`Reply`], which makes the Python objects on the thread of the caller.
//! - **O2** A coroutine calls its reply after it has resumed, with no wait after that. If it is cancelled, even in the turn of the
//!   loop in which the future gets its result, the reply is never called (item_source.SO1).

use std::collections::HashMap;
use std::future::{Future, poll_fn};
use std::mem;
use std::os::fd::{AsRawFd, OwnedFd};
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

use object_store::{Error, Result};
use pyo3::IntoPyObjectExt;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyList;
use rustix::event::{EventfdFlags, eventfd};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

use crate::error;
use crate::process::{self, LastTask, lock};
use crate::store::failure;
use crate::store::runtime::{self, OfProcess};
use crate::store::server_watch::{self, ServerWatch};
use crate::wait::wait_for;

/// Makes the result of a call.
pub(crate) type Reply = Box<dyn FnOnce(Python<'_>) -> PyResult<Answer> + Send>;

/// The result of a reply.
pub(crate) enum Answer {
    Value(Py<PyAny>),
    /// The call goes on with another operation.
    Repeat(Operation),
}

impl Answer {
    pub(crate) fn reply(
        make: impl FnOnce(Python<'_>) -> PyResult<Answer> + Send + 'static,
    ) -> Reply {
        Box::new(make)
    }

    /// For `millpond._store_aio`: a tuple of the result, or the next operation.
    fn into_python(self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        match self {
            Answer::Value(value) => (value,).into_py_any(py),
            Answer::Repeat(operation) => Pending(Mutex::new(Some(operation))).into_py_any(py),
        }
    }
}

/// A reply from a function that makes any Python object.
pub(crate) fn reply<T>(make: impl FnOnce(Python<'_>) -> PyResult<T> + Send + 'static) -> Reply
where
    T: for<'py> IntoPyObject<'py>,
{
    Box::new(move |py| Ok(Answer::Value(make(py)?.into_py_any(py)?)))
}

type Work = Pin<Box<dyn Future<Output = Result<Reply>> + Send>>;

/// A call for an object store that has not ended.
pub(crate) struct Operation {
    work: Work,
    subject: Subject,
}

/// The object of a call and its server, for errors and log lines.
struct Subject {
    /// The object's URL.
    name: String,
    server: Option<Arc<ServerWatch>>,
}

impl Operation {
    pub(crate) fn new(
        name: String,
        work: impl Future<Output = Result<Reply>> + Send + 'static,
    ) -> Operation {
        Operation { work: Box::pin(work), subject: Subject { name, server: None } }
    }

    /// A call that a server may serve.
    pub(crate) fn watching(mut self, server: Option<&Arc<ServerWatch>>) -> Operation {
        self.subject.server = server.cloned();
        self
    }

    /// Waits for the end, detached from the interpreter.
    pub(crate) fn run(mut self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        loop {
            match self.run_once(py)? {
                Answer::Value(value) => return Ok(value),
                Answer::Repeat(operation) => self = operation,
            }
        }
    }

    fn run_once(self, py: Python<'_>) -> PyResult<Answer> {
        let Operation { mut work, subject } = self;
        let runtime = runtime::handle()?;
        let waited = {
            let entered = poll_fn(|context| poll_in(&runtime, &mut work, context));
            wait_for(py, pin!(entered), None)
        };
        // The end of a request that was interrupted may close a connection or a file.
        py.detach(|| drop(work));
        finish(py, waited?.expect("there is no deadline"), &subject)
    }

    /// A coroutine that waits for the end.
    pub(crate) fn coroutine(self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let pending = Pending(Mutex::new(Some(self)));
        Ok(py.import("millpond._store_aio")?.call_method1("run", (pending,))?.unbind())
    }

    /// The same for `__anext__`: a result of `None` is the end of the iteration.
    pub(crate) fn next_coroutine(self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let pending = Pending(Mutex::new(Some(self)));
        Ok(py.import("millpond._store_aio")?.call_method1("run_next", (pending,))?.unbind())
    }
}

/// A coroutine of a call that has ended without a wait.
pub(crate) fn ready(py: Python<'_>, result: Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
    static READY: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let import = || Ok::<_, PyErr>(py.import("millpond._store_aio")?.getattr("ready")?.unbind());
    READY.get_or_try_init(py, import)?.call1(py, (result,))
}

fn poll_in(runtime: &Handle, work: &mut Work, context: &mut Context<'_>) -> Poll<Result<Reply>> {
    let _entered = runtime.enter();
    work.as_mut().poll(context)
}

fn finish(py: Python<'_>, ended: Result<Reply>, subject: &Subject) -> PyResult<Answer> {
    if let Some(server) = &subject.server {
        server.tell(py);
    }
    server_watch::log_noted(py);
    match ended {
        Ok(reply) => reply(py),
        Err(error) => Err(failure::of_store(&error, &subject.name)),
    }
}

/// An operation that a coroutine waits for. For `millpond._store_aio`.
#[pyclass(frozen, module = "millpond._millpond", name = "_Operation")]
pub(crate) struct Pending(Mutex<Option<Operation>>);

#[pymethods]
impl Pending {
    /// A tuple of the result, if the operation ends without a wait, as reads of cached bytes do; or the next operation.
    fn try_now(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        let mut operation = self.take()?;
        let runtime = runtime::handle()?;
        let polled = py.detach(|| {
            let mut context = Context::from_waker(Waker::noop());
            poll_in(&runtime, &mut operation.work, &mut context)
        });
        match polled {
            Poll::Ready(ended) => Ok(Some(finish(py, ended, &operation.subject)?.into_python(py)?)),
            Poll::Pending => {
                *lock(&self.0) = Some(operation);
                Ok(None)
            }
        }
    }
}

impl Pending {
    fn take(&self) -> PyResult<Operation> {
        let what = "this operation was started already";
        lock(&self.0).take().ok_or_else(|| PyRuntimeError::new_err(what))
    }
}

/// The end of an operation, in the process that started it.
type OwnEnd = OfProcess<(Result<Reply>, Subject)>;

/// An operation that a task of the runtime has completed, as the result of a future.
#[pyclass(frozen, module = "millpond._millpond", name = "_Completed")]
pub(crate) struct Completed(Mutex<Option<OwnEnd>>);

#[pymethods]
impl Completed {
    /// A tuple of the call's result, or the next operation. The coroutine returns or goes on without a wait (O2).
    fn take(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let completed = lock(&self.0).take();
        let completed = completed.filter(OfProcess::is_of_this_process);
        let what = "this result was taken already, or is of a process that forked this one";
        let (ended, subject) = completed.ok_or_else(|| PyRuntimeError::new_err(what))?.into_inner();
        finish(py, ended, &subject)?.into_python(py)
    }
}

/// The ends of operations that tasks of the runtime have completed.
struct Ended {
    eventfd: OwnedFd,
    list: Mutex<Vec<(u64, Result<Reply>)>>,
}

impl Ended {
    fn add(&self, number: u64, ended: Result<Reply>) {
        self.list.lock().unwrap_or_else(PoisonError::into_inner).push((number, ended));
        // It can't fail: the counter has room for 2^64 ends.
        let _ = rustix::io::write(&self.eventfd, &1u64.to_ne_bytes());
    }
}

/// Reports the end of a task, also if it panics or is aborted.
struct Report {
    ended: Arc<Ended>,
    number: u64,
    outcome: Option<Result<Reply>>,
}

impl Report {
    fn end(mut self, outcome: Result<Reply>) {
        self.outcome = Some(outcome);
    }
}

impl Drop for Report {
    fn drop(&mut self) {
        let lost = || {
            Err(Error::Generic {
                store: "millpond",
                source: "the task ended without result".into(),
            })
        };
        self.ended.add(self.number, self.outcome.take().unwrap_or_else(lost));
    }
}

struct Started {
    subject: Subject,
    /// The future that waits, and the task. `None`: cancelled. A future refers to its loop, and the loop's entry to this.
    waiting: Option<(Py<PyAny>, JoinHandle<()>)>,
}

#[derive(Default)]
struct StartedTasks {
    last: u64,
    tasks: HashMap<u64, Started>,
}

/// The operations of one asyncio loop. For `millpond._store_aio`.
#[pyclass(frozen, weakref, module = "millpond._millpond", name = "_Completions")]
pub(crate) struct Completions {
    ended: Arc<Ended>,
    started: Mutex<StartedTasks>,
    generation: u64,
}

#[pymethods]
impl Completions {
    #[new]
    fn new() -> PyResult<Completions> {
        let eventfd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| error::os_error(errno.raw_os_error(), errno, None))?;
        process::watch_forks();
        Ok(Completions {
            ended: Arc::new(Ended { eventfd, list: Mutex::default() }),
            started: Mutex::default(),
            generation: process::generation(),
        })
    }

    /// Whether the object is of this process and not of one that forked it.
    fn is_usable(&self) -> bool {
        self.generation == process::generation()
    }

    /// Readable when operations have ended.
    fn fileno(&self) -> i32 {
        self.ended.eventfd.as_raw_fd()
    }

    /// Starts an operation as a task; returns its number.
    fn start(&self, operation: &Pending, future: Py<PyAny>) -> PyResult<u64> {
        let Operation { work, subject } = operation.take()?;
        let runtime = runtime::handle()?;
        let mut started = lock(&self.started);
        started.last += 1;
        let number = started.last;
        let report = Report { ended: Arc::clone(&self.ended), number, outcome: None };
        let task = runtime.spawn(async move { report.end(work.await) });
        started.tasks.insert(number, Started { subject, waiting: Some((future, task)) });
        Ok(number)
    }

    /// Drops the operation's future; it completes in any case. The end of the interpreter waits for the drop, which may begin
    /// the end of an upload (parts.MU1).
    fn cancel(&self, number: u64) -> PyResult<()> {
        let waiting =
            lock(&self.started).tasks.get_mut(&number).and_then(|started| started.waiting.take());
        let Some((_, task)) = waiting else { return Ok(()) };
        task.abort();
        let last = LastTask::new();
        runtime::handle()?.spawn(async move {
            // Cancelled, or ended before.
            drop(task.await);
            drop(last);
        });
        Ok(())
    }

    /// Drops all futures, for a loop that has ended.
    fn forget_futures(&self) {
        let take = |started: &mut StartedTasks| -> Vec<_> {
            started.tasks.values_mut().filter_map(|started| started.waiting.take()).collect()
        };
        let waiting = take(&mut lock(&self.started));
        drop(waiting);
    }

    /// The ended operations that a future waits for: tuples of the future and its result.
    fn completions<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        // Before the list is taken: a later end makes it readable again.
        let _ = rustix::io::read(&self.ended.eventfd, &mut [0u8; 8]);
        let ended = py.detach(|| {
            mem::take(&mut *self.ended.list.lock().unwrap_or_else(PoisonError::into_inner))
        });
        let list = PyList::empty(py);
        for (number, ended) in ended {
            let Some(started) = lock(&self.started).tasks.remove(&number) else { continue };
            let Some((future, _)) = started.waiting else { continue };
            if future.call_method0(py, "done")?.is_truthy(py)? {
                continue;
            }
            let completed = OfProcess::new((ended, started.subject));
            list.append((future, Completed(Mutex::new(Some(completed)))))?;
        }
        Ok(list)
    }
}
