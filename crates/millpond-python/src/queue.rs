//! The queue of one asyncio loop: requests that the engine carries out, and the futures that wait for them.
//!
//! - No thread of the engine enters Python. The loop watches the queue's eventfd, and takes completions itself.
//! - The memory of a request is in `in_flight` from before its submission until its completion is taken. If the queue is
//!   dropped earlier, the memory is leaked.

use std::collections::HashMap;
use std::mem;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex};

use millpond::queue::Request;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::buffer::{PyMemory, new_bytes, start_of};
use crate::engine::Engine;
use crate::error;
use crate::file::opened::File;
use crate::process::{self, lock};

/// The requests in flight of one loop; more wait in Python.
const CAPACITY: usize = 1024;

struct InFlight {
    /// `None`: cancelled. A future refers to its loop, and the loop's entry to this.
    future: Option<Py<PyAny>>,
    file: Py<File>,
    memory: Memory,
}

/// The memory of a request.
enum Memory {
    None,
    Buffer(#[expect(dead_code, reason = "keeps the memory")] PyMemory),
    /// A new bytes object, which nothing else refers to until its read has ended.
    Bytes(Py<PyBytes>),
}

#[derive(Default)]
struct Table {
    last: u64,
    in_flight: HashMap<u64, InFlight>,
}

/// For `millpond._aio`.
#[pyclass(frozen, weakref, module = "millpond._millpond", name = "_Queue")]
pub(crate) struct LoopQueue {
    queue: Arc<millpond::queue::Queue>,
    table: Mutex<Table>,
    generation: u64,
}

impl LoopQueue {
    /// Starts a request for `memory`; `None`: the queue is full.
    fn submit(
        &self,
        file: &Bound<'_, File>,
        future: Bound<'_, PyAny>,
        memory: Memory,
        request: Request,
    ) -> PyResult<Option<u64>> {
        let py = file.py();
        let waiter =
            InFlight { future: Some(future.unbind()), file: file.clone().unbind(), memory };
        let number = {
            let mut table = lock(&self.table);
            table.last += 1;
            let number = table.last;
            table.in_flight.insert(number, waiter);
            number
        };
        // Detached: it may call wakers, and drop the last handle of a file that another thread has closed.
        let submitted = py.detach(|| self.queue.submit(request.user_data(number)).is_ok());
        if submitted {
            return Ok(Some(number));
        }
        let rejected = lock(&self.table).in_flight.remove(&number);
        drop(rejected);
        Ok(None)
    }
}

#[pymethods]
impl LoopQueue {
    #[new]
    fn new(engine: &Engine) -> PyResult<LoopQueue> {
        let queue =
            engine.get()?.queue(CAPACITY).map_err(|error| error::of_engine(&error, None))?;
        Ok(LoopQueue {
            queue: Arc::new(queue),
            table: Mutex::default(),
            generation: process::generation(),
        })
    }

    /// Whether the queue is of this process and not of one that forked it.
    fn is_usable(&self) -> bool {
        self.generation == process::generation()
    }

    /// Readable when there are completions.
    fn fileno(&self) -> PyResult<i32> {
        let fd = self.queue.eventfd().map_err(|error| error::of_engine(&error, None))?;
        Ok(fd.as_raw_fd())
    }

    /// Starts a read into `buffer`; returns its number, or `None` if the queue is full.
    fn read(
        &self,
        file: &Bound<'_, File>,
        future: Bound<'_, PyAny>,
        buffer: &Bound<'_, PyAny>,
        offset: i64,
    ) -> PyResult<Option<u64>> {
        let own = file.get().readable_file(file.py())?;
        let offset = file.get().offset(offset)?;
        let memory = PyMemory::writable(buffer)?;
        // SAFETY: the memory is in the table until the completion is taken (module header).
        let request = unsafe { Request::read_lent(&own, &[memory.iovec()], offset) };
        self.submit(file, future, Memory::Buffer(memory), request)
    }

    /// Starts a read of `size` bytes, whose result is a bytes object.
    fn read_bytes(
        &self,
        file: &Bound<'_, File>,
        future: Bound<'_, PyAny>,
        size: usize,
        offset: i64,
    ) -> PyResult<Option<u64>> {
        let own = file.get().readable_file(file.py())?;
        let offset = file.get().offset(offset)?;
        let left = usize::try_from(file.get().size()?.saturating_sub(offset)).unwrap_or(usize::MAX);
        let bytes = new_bytes(file.py(), size.min(left))?;
        let iovec = libc::iovec { iov_base: start_of(&bytes).cast(), iov_len: size.min(left) };
        // SAFETY: as in `read`.
        let request = unsafe { Request::read_lent(&own, &[iovec], offset) };
        self.submit(file, future, Memory::Bytes(bytes.unbind()), request)
    }

    /// Starts a write of `data` without its first `skipped` bytes.
    fn write(
        &self,
        file: &Bound<'_, File>,
        future: Bound<'_, PyAny>,
        data: &Bound<'_, PyAny>,
        offset: i64,
        skipped: usize,
    ) -> PyResult<Option<u64>> {
        let own = file.get().writable_file(file.py())?;
        let offset = file.get().offset(offset)?;
        let memory = PyMemory::readable(data)?;
        let skipped = skipped.min(memory.len());
        let start = memory.start().wrapping_add(skipped);
        let iovec = libc::iovec { iov_base: start.cast(), iov_len: memory.len() - skipped };
        // SAFETY: as in `read`.
        let request = unsafe { Request::write_lent(&own, &[iovec], offset) };
        self.submit(file, future, Memory::Buffer(memory), request)
    }

    /// Starts a sync.
    fn sync(
        &self,
        file: &Bound<'_, File>,
        future: Bound<'_, PyAny>,
        data_only: bool,
    ) -> PyResult<Option<u64>> {
        let own = file.get().shared()?;
        let request = if data_only { Request::sync_data(&own) } else { Request::sync_all(&own) };
        self.submit(file, future, Memory::None, request)
    }

    /// Cancels a request, if that is possible; it completes in any case.
    fn cancel(&self, py: Python<'_>, number: u64) -> bool {
        let request = |table: &mut Table| table.in_flight.get_mut(&number)?.future.take();
        let future = request(&mut lock(&self.table));
        drop(future);
        py.detach(|| self.queue.cancel(number))
    }

    /// Drops all futures, for a loop that has ended.
    fn forget_futures(&self) {
        let take = |table: &mut Table| -> Vec<_> {
            table.in_flight.values_mut().filter_map(|request| request.future.take()).collect()
        };
        let futures = take(&mut lock(&self.table));
        drop(futures);
    }

    /// The completions that a future waits for: tuples of the future, its result and its error, one of which is `None`.
    fn completions<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let list = PyList::empty(py);
        let fd = self.queue.eventfd().map_err(|error| error::of_engine(&error, None))?;
        // Before the completions are taken: a later one makes it readable again.
        let _ = rustix::io::read(fd, &mut [0u8; 8]);
        let done = py.detach(|| self.queue.wait(0, CAPACITY, None));
        for completion in done.map_err(|error| error::of_engine(&error, None))? {
            let Some(waiter) = lock(&self.table).in_flight.remove(&completion.user_data()) else {
                continue;
            };
            let Some(future) = waiter.future else { continue };
            match completion.result() {
                Ok(moved) => match waiter.memory {
                    Memory::Bytes(bytes) => {
                        let bytes = bytes.into_bound(py);
                        let is_whole = bytes.as_bytes().len() == moved;
                        let cut = |bytes: Bound<'py, PyBytes>| {
                            PyBytes::new(py, &bytes.as_bytes()[..moved])
                        };
                        let bytes = if is_whole { bytes } else { cut(bytes) };
                        list.append((future, bytes, py.None()))?;
                    }
                    Memory::None | Memory::Buffer(_) => {
                        list.append((future, moved, py.None()))?;
                    }
                },
                Err(error) => {
                    let exception = waiter.file.get().error(error);
                    list.append((future, py.None(), exception.into_value(py)))?;
                }
            }
        }
        Ok(list)
    }
}

impl Drop for LoopQueue {
    fn drop(&mut self) {
        self.forget_futures();
        let table = mem::take(&mut *lock(&self.table));
        if !table.in_flight.is_empty() {
            // Requests in flight write to this memory, and the queue must live until they end.
            mem::forget(table);
            mem::forget(Arc::clone(&self.queue));
        }
    }
}
