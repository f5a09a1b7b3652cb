//! Completion queues.
//!
//! - **U1** The memory of a request belongs to the caller. It is lent until the request's completion has
//!   been returned, or its queue destroyed. So a queue is destroyed when no request of it is in flight.
//! - **U2** No request is submitted once the destruction has begun: a submitter holds `is_over` shared, the
//!   destroyer sets it under the exclusive lock. A queue with waiters is not destroyed: a waiter counts
//!   itself under the same lock.

use std::ffi::c_int;
use std::ffi::c_void;
use std::os::fd::AsRawFd;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use libc::iovec;
use millpond::File;
use millpond::queue::{Completion, Request};

use crate::call::{
    Failure, NO_MEMORY, Outcome, call, check_memory, fault, invalid, status, store, vectors,
};
use crate::engine::millpond_engine;
use crate::file::millpond_file;
use crate::objects::{ENGINES, FILES, QUEUES, QueueObject};

/// `millpond_read` of `len` bytes into `memory`.
pub const MILLPOND_OP_READ: u32 = 1;
/// `millpond_write` of `len` bytes from `memory`.
pub const MILLPOND_OP_WRITE: u32 = 2;
/// `millpond_readv` into `len` vectors, the first of which is at `memory`. The array of vectors is read
/// before the submission returns.
pub const MILLPOND_OP_READV: u32 = 3;
/// `millpond_writev`, as MILLPOND_OP_READV.
pub const MILLPOND_OP_WRITEV: u32 = 4;
/// `millpond_sync`.
pub const MILLPOND_OP_SYNC: u32 = 5;
/// `millpond_sync_data`.
pub const MILLPOND_OP_SYNC_DATA: u32 = 6;

/// A completion queue.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct millpond_queue {
    /// 0: no queue.
    pub id: u64,
}

/// A request for a queue.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct millpond_request {
    /// The file, which stays open until the request has completed.
    pub file: millpond_file,
    /// A number that the completion repeats.
    pub user_data: u64,
    /// The offset in the file of the first byte. For a sync 0.
    pub offset: u64,
    /// The memory to read into or to write from, or the vectors. For a sync NULL.
    pub memory: *mut c_void,
    /// The number of bytes, or of vectors. For a sync 0.
    pub len: usize,
    /// `MILLPOND_OP_...`.
    pub op: u32,
    /// Must be 0.
    pub flags: u32,
    /// Reserved; must be 0.
    pub reserved: [u64; 2],
}

/// The completion of a request.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct millpond_completion {
    /// The request's `user_data`.
    pub user_data: u64,
    /// The result of the corresponding call: bytes, or a negative errno. -ECANCELED: cancelled.
    pub result: i64,
}

/// Creates a completion queue and stores its handle at `queue`. `capacity`, 1 to 1,048,576, is the maximum
/// number of requests that are in flight, or completed and not yet returned. The requests may be for files
/// of any engine. Any number of threads may submit and wait.
///
/// Returns 0, or
/// -EBADF       there is no such engine
/// -EFAULT      `queue` is NULL
/// -EINVAL      `capacity` is out of its range
/// -EAGAIN      the system can't start a thread
/// -EMFILE      there are 1,048,576 queues
///
/// # Safety
///
/// `queue` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millpond_queue_create(
    engine: millpond_engine,
    capacity: usize,
    queue: *mut millpond_queue,
) -> c_int {
    status(|| {
        if queue.is_null() {
            return Err(fault("the address for the queue is NULL"));
        }
        let made = QueueObject {
            queue: ENGINES.get(engine.id)?.queue(capacity)?,
            is_over: RwLock::new(false),
            waiters: AtomicUsize::new(0),
        };
        let id = QUEUES
            .insert(Arc::new(made))
            .map_err(|_| Failure::Refused(libc::EMFILE, "there are too many queues"))?;
        // SAFETY: our caller's promise.
        unsafe { store(queue, millpond_queue { id }) }
    })
}

/// Destroys a queue. Blocks until all its requests have completed. Their completions are lost, and their
/// memory belongs to the caller again on return.
///
/// Returns 0, or
/// -EBADF       there is no such queue
/// -EBUSY       a thread waits for it; nothing has changed
#[unsafe(no_mangle)]
pub extern "C" fn millpond_queue_destroy(queue: millpond_queue) -> c_int {
    status(|| {
        let queued = QUEUES.get(queue.id)?;
        let mut is_over = queued.is_over.write().unwrap_or_else(PoisonError::into_inner);
        if *is_over {
            return Err(being_destroyed());
        }
        if queued.waiters.load(Relaxed) > 0 {
            return Err(Failure::Refused(libc::EBUSY, "a thread waits for the queue"));
        }
        *is_over = true;
        drop(is_over);
        // U2: no request is added to those in flight.
        let inner = &queued.queue;
        while inner.counts().1 > 0 {
            drop(inner.wait(1, inner.capacity(), None)?);
        }
        drop(QUEUES.take(queue.id)?);
        Ok(())
    })
}

fn being_destroyed() -> Failure {
    Failure::Refused(libc::EBADF, "the queue is being destroyed")
}

/// Submits requests in array order, as many of `count` as the queue has room for. Requests in flight run
/// concurrently and complete in any order: submit a request that must follow another one when that has
/// completed.
///
/// Does not wait for I/O. Reads of cached bytes complete at once. The array of requests may be reused on
/// return. The memory that the requests name is lent to the queue until their completions have been
/// returned, or the queue is destroyed, even if the submitting thread ends. Until then the memory must stay
/// valid, memory to read into must not be used, and memory to write from must not change.
///
/// Returns the number of requests submitted. It is less than `count` if the queue is full, or if the next
/// request is malformed; if that is the first one,
/// -EAGAIN      the queue is full: wait first
/// -EBADF       there is no such queue, or no such file
/// -EINVAL      no such operation; flags, reserved members, or members of a sync are not 0
/// -EFAULT      `requests`, a request's memory or that of a vector is NULL
/// -ENOMEM      there is no memory for a list of them
/// Other errors of a request are reported by its completion.
///
/// # Safety
///
/// `requests` is NULL, or valid for reads of `count`, and the memory that they name as said above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millpond_queue_submit(
    queue: millpond_queue,
    requests: *const millpond_request,
    count: usize,
) -> i64 {
    call(|| {
        let queued = QUEUES.get(queue.id)?;
        check_memory(requests, count)?;
        let is_over = queued.is_over.read().unwrap_or_else(PoisonError::into_inner);
        if *is_over {
            return Err(being_destroyed());
        }
        let (ready, inflight) = queued.queue.counts();
        let room = queued.queue.capacity().saturating_sub(ready + inflight);
        // Waiting threads may free more room during this call; the caller submits the rest with its next
        // call.
        let asked = count.min(room);
        if count > 0 && asked == 0 {
            return Err(Failure::Refused(libc::EAGAIN, "the queue is full"));
        }
        let mut taken = Vec::new();
        taken.try_reserve_exact(asked).map_err(|_| NO_MEMORY)?;
        let mut last: Option<(u64, Arc<File>)> = None;
        for number in 0..asked {
            // SAFETY: our caller's promise (U1).
            let request = unsafe { requests.add(number).read() };
            // SAFETY: our caller's promise.
            match unsafe { to_request(&request, &mut last) } {
                Ok(request) => taken.push(request),
                Err(failure) if number == 0 => return Err(failure),
                Err(_) => break,
            }
        }
        let asked = taken.len();
        let rest = queued.queue.submit_all(taken).err().map_or(0, |rest| rest.requests().len());
        let submitted = asked - rest;
        if count > 0 && submitted == 0 {
            return Err(Failure::Refused(libc::EAGAIN, "the queue is full"));
        }
        Ok(submitted as i64)
    })
}

impl millpond_request {
    /// Checks that the reserved members are 0.
    pub(crate) fn check(&self) -> Outcome<()> {
        if self.flags != 0 || self.reserved != [0; 2] {
            return Err(invalid("a reserved member of the request is not 0"));
        }
        Ok(())
    }

    /// The request's memory as one vector.
    pub(crate) fn piece(&self) -> iovec {
        iovec { iov_base: self.memory, iov_len: self.len }
    }

    /// The memory to read into or to write from: `one`, which is the request's [`piece`](Self::piece), or
    /// its vectors. `None`: the operation has no memory.
    ///
    /// # Safety
    ///
    /// The vectors stay valid and unchanged for `'a`.
    pub(crate) unsafe fn memory<'a>(&self, one: &'a [iovec; 1]) -> Outcome<Option<&'a [iovec]>> {
        match self.op {
            MILLPOND_OP_READ | MILLPOND_OP_WRITE => {
                check_memory(self.memory, self.len)?;
                Ok(Some(one))
            }
            MILLPOND_OP_READV | MILLPOND_OP_WRITEV => {
                let count = c_int::try_from(self.len).map_err(|_| invalid("too many vectors"))?;
                // SAFETY: our caller's promise.
                unsafe { vectors(self.memory.cast(), count) }.map(Some)
            }
            _ => Ok(None),
        }
    }
}

/// `last` caches the file of the previous request, which is mostly the same.
///
/// # Safety
///
/// The memory that the request names is lent to it (U1).
unsafe fn to_request(
    request: &millpond_request,
    last: &mut Option<(u64, Arc<File>)>,
) -> Outcome<Request> {
    let millpond_request { file, user_data, offset, memory, len, op, .. } = *request;
    request.check()?;
    if last.as_ref().is_none_or(|(id, _)| *id != file.id) {
        *last = Some((file.id, FILES.get(file.id)?));
    }
    let Some((_, file)) = last else { unreachable!("set above") };
    let one = [request.piece()];
    // SAFETY: our caller's promise.
    let pieces = match unsafe { request.memory(&one) }? {
        Some(pieces) => pieces,
        None if op != MILLPOND_OP_SYNC && op != MILLPOND_OP_SYNC_DATA => {
            return Err(invalid("an unknown operation"));
        }
        None if memory.is_null() && len == 0 && offset == 0 => &[],
        None => return Err(invalid("a sync request with an offset, a length or memory")),
    };
    let request = match op {
        // SAFETY: U1: lent until the completion is returned, or the queue destroyed, which waits for it.
        MILLPOND_OP_READ | MILLPOND_OP_READV => unsafe { Request::read_lent(file, pieces, offset) },
        // SAFETY: the same.
        MILLPOND_OP_WRITE | MILLPOND_OP_WRITEV => unsafe {
            Request::write_lent(file, pieces, offset)
        },
        MILLPOND_OP_SYNC => Request::sync_all(file),
        _ => Request::sync_data(file),
    };
    Ok(request.user_data(user_data))
}

/// A waiting thread (U2). The lock orders the count with the destroyer. A waiter that has finished still
/// holds a reference to the queue, so its decrement needs no order.
struct Waiter<'q>(&'q QueueObject);

impl<'q> Waiter<'q> {
    fn enter(queued: &'q QueueObject) -> Outcome<Waiter<'q>> {
        let is_over = queued.is_over.read().unwrap_or_else(PoisonError::into_inner);
        if *is_over {
            return Err(being_destroyed());
        }
        queued.waiters.fetch_add(1, Relaxed);
        Ok(Waiter(queued))
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        self.0.waiters.fetch_sub(1, Relaxed);
    }
}

/// A time in nanoseconds; negative: none.
fn duration(time_ns: i64) -> Option<Duration> {
    u64::try_from(time_ns).ok().map(Duration::from_nanos)
}

fn negative_errno(error: &millpond::Error) -> i64 {
    -i64::from(error.errno())
}

/// # Safety
///
/// `completions` is valid for as many writes.
unsafe fn store_completions(done: Vec<Completion>, completions: *mut millpond_completion) -> i64 {
    for (number, one) in done.iter().enumerate() {
        let result = one.result().map_or_else(negative_errno, |moved| moved as i64);
        let completion = millpond_completion { user_data: one.user_data(), result };
        // SAFETY: our caller's promise.
        unsafe { completions.add(number).write(completion) };
    }
    done.len() as i64
}

/// Waits until `min` requests have completed, and stores `min` to `max` completions at `completions`, an
/// array of `max`. After `timeout_ns` nanoseconds (negative: no limit) it returns the completions that are
/// there, maybe none. With `min` 0 it never blocks. Among several waiters, the smallest `min` is served
/// first, and each waiter gets exactly its `min`. A waiter is not starved while enough requests for its
/// `min` are in flight.
///
/// Blocks without spinning, and is woken once. Signals do not interrupt it.
///
/// Returns the number of completions, or
/// -EBADF       there is no such queue
/// -EFAULT      `completions` is NULL
/// -EINVAL      `min` is more than the queue's capacity or than `max`, or `max` is 0
///
/// # Safety
///
/// `completions` is NULL, or valid for writes of `max`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millpond_queue_wait(
    queue: millpond_queue,
    completions: *mut millpond_completion,
    min: usize,
    max: usize,
    timeout_ns: i64,
) -> i64 {
    call(|| {
        let queued = QUEUES.get(queue.id)?;
        check_memory(completions, 1)?;
        let waiter = Waiter::enter(&queued)?;
        let done = waiter.0.queue.wait(min, max, duration(timeout_ns))?;
        // SAFETY: our caller's promise; no more than `max`.
        Ok(unsafe { store_completions(done, completions) })
    })
}

/// `millpond_queue_wait` that waits for `min` completions for at most `min_wait_ns` nanoseconds, and then
/// for one (as with io_uring's `min_wait`).
///
/// Returns as for `millpond_queue_wait`.
///
/// # Safety
///
/// As for `millpond_queue_wait`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millpond_queue_wait_at_least(
    queue: millpond_queue,
    completions: *mut millpond_completion,
    min: usize,
    max: usize,
    min_wait_ns: u64,
    timeout_ns: i64,
) -> i64 {
    call(|| {
        let queued = QUEUES.get(queue.id)?;
        check_memory(completions, 1)?;
        let (min_wait, timeout) = (Duration::from_nanos(min_wait_ns), duration(timeout_ns));
        let waiter = Waiter::enter(&queued)?;
        let done = waiter.0.queue.wait_at_least(min, max, min_wait, timeout)?;
        // SAFETY: our caller's promise; no more than `max`.
        Ok(unsafe { store_completions(done, completions) })
    })
}

/// Cancels one request that was submitted with `user_data` and has not completed. It completes with
/// -ECANCELED, and has no effect.
///
/// Returns 0, or
/// -EBADF       there is no such queue
/// -ENOENT      there is no such request, or it can't be cancelled any more
#[unsafe(no_mangle)]
pub extern "C" fn millpond_queue_cancel(queue: millpond_queue, user_data: u64) -> c_int {
    status(|| match QUEUES.get(queue.id)?.queue.cancel(user_data) {
        true => Ok(()),
        false => Err(Failure::Refused(libc::ENOENT, "no request that can be cancelled")),
    })
}

/// Returns an eventfd for event loops (`poll(2)`): readable when there are completions that no waiter has
/// taken. Its count is the number of completions since its last read; another thread may take them first.
/// Non-blocking and close-on-exec. The queue owns it: read it only, and do not close it.
///
/// Returns the descriptor, or
/// -EBADF       there is no such queue
/// -EMFILE, -ENFILE     no descriptor is free
#[unsafe(no_mangle)]
pub extern "C" fn millpond_queue_eventfd(queue: millpond_queue) -> c_int {
    call(|| Ok(i64::from(QUEUES.get(queue.id)?.queue.eventfd()?.as_raw_fd()))) as c_int
}

/// Stores the number of completed requests that have not been returned at `ready`, and of requests in
/// flight at `in_flight`. Each may be NULL.
///
/// Returns 0, or
/// -EBADF       there is no such queue
///
/// # Safety
///
/// Both are NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millpond_queue_counts(
    queue: millpond_queue,
    ready: *mut usize,
    in_flight: *mut usize,
) -> c_int {
    status(|| {
        let counts = QUEUES.get(queue.id)?.queue.counts();
        for (at, count) in [(ready, counts.0), (in_flight, counts.1)] {
            if !at.is_null() {
                // SAFETY: our caller's promise.
                unsafe { store(at, count) }?;
            }
        }
        Ok(())
    })
}
