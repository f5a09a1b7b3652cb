//! Completion queues.
//!
//! - **U1** What a request reads into or writes from is the caller's, lent until its completion has been
//!   returned, or its queue destroyed. So a queue is destroyed when nothing of it is under way any more.
//! - **U2** Nobody submits once that has begun: who submits holds `is_over` shared, who destroys sets it
//!   under the exclusive lock. Nor while somebody waits: a waiter counts itself under the same lock.

use std::ffi::c_int;
use std::ffi::c_void;
use std::os::fd::AsRawFd;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use libc::iovec;
use millpond::{Completion, File, Request};

use crate::call::{Failure, Outcome, call, check_memory, fault, invalid, status, store, vectors};
use crate::engine::millpond_engine;
use crate::file::millpond_file;
use crate::objects::{ENGINES, FILES, QUEUES, Queued};

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
    /// 0 is no queue.
    pub id: u64,
}

/// Something for a queue to do.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct millpond_request {
    /// The file, which stays open until the request has completed.
    pub file: millpond_file,
    /// A number that comes back with the completion.
    pub user_data: u64,
    /// The first byte of the file that is concerned. Of syncs 0.
    pub offset: u64,
    /// What is read into or written from. Of syncs NULL.
    pub memory: *mut c_void,
    /// How many bytes, or vectors. Of syncs 0.
    pub len: usize,
    /// `MILLPOND_OP_...`.
    pub op: u32,
    /// 0.
    pub flags: u32,
    /// 0.
    pub reserved: [u64; 2],
}

/// How a request ended.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct millpond_completion {
    /// The number that the request was given.
    pub user_data: u64,
    /// What the call would have returned: bytes, or a negative errno. -ECANCELED: cancelled.
    pub result: i64,
}

/// Makes a completion queue with room for `capacity` requests that are under way, or complete and not
/// waited for, 1 to 1,048,576, and stores its handle at `queue`. Its requests may be of files of any engine.
/// Any number of threads may submit and wait.
///
/// Returns 0, or
/// -EBADF       there is no such engine
/// -EFAULT      `queue` is NULL
/// -EINVAL      another capacity
/// -EAGAIN      the system gives no thread
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
        let made = Queued {
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

/// Destroys a queue. Blocks until all its requests have ended; their completions are lost, and their memory
/// is the caller's again when this returns.
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
            return Err(gone());
        }
        if queued.waiters.load(Relaxed) > 0 {
            return Err(Failure::Refused(libc::EBUSY, "a thread waits for the queue"));
        }
        *is_over = true;
        drop(is_over);
        // U2: what is under way now is all that there will be.
        let inner = &queued.queue;
        while inner.counts().1 > 0 {
            drop(inner.wait(1, inner.capacity(), None)?);
        }
        drop(QUEUES.take(queue.id)?);
        Ok(())
    })
}

fn gone() -> Failure {
    Failure::Refused(libc::EBADF, "the queue is being destroyed")
}

/// Submits the first of `count` requests, in turn, as many as the queue has room for. Requests that are
/// under way together are carried out in any order, at the same time: what must come after something else
/// is submitted when that has completed.
///
/// Does not wait for I/O. Reads of what is cached complete at once. The array of requests is the caller's
/// again when this returns; the memory that they name is lent to the queue until their completions have
/// been returned, or the queue is destroyed: until then it must stay valid, what is read into must not be
/// used, and what is written must not change. Whatever becomes of the thread that submitted.
///
/// Returns how many were submitted, fewer than `count` where the queue is full, or the next request can't
/// be submitted as it is; if that is the first one,
/// -EAGAIN      the queue is full: wait first
/// -EBADF       there is no such queue, or no such file
/// -EINVAL      no such operation; flags, reserved members, or members of a sync are not 0
/// -EFAULT      `requests`, a request's memory or that of a vector is NULL
/// What is wrong with what a request asks of its file, its completion says.
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
            return Err(gone());
        }
        let (ready, inflight) = queued.queue.counts();
        let room = queued.queue.capacity().saturating_sub(ready + inflight);
        // Others may wait meanwhile, and leave room for more: then the caller comes again.
        let asked = count.min(room);
        if count > 0 && asked == 0 {
            return Err(Failure::Refused(libc::EAGAIN, "the queue is full"));
        }
        let mut taken = Vec::with_capacity(asked);
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
        let submitted = queued.queue.submit(&mut taken);
        if count > 0 && submitted == 0 {
            return Err(Failure::Refused(libc::EAGAIN, "the queue is full"));
        }
        Ok(submitted as i64)
    })
}

impl millpond_request {
    /// Whether the members that are to be 0 are.
    pub(crate) fn check(&self) -> Outcome<()> {
        if self.flags != 0 || self.reserved != [0; 2] {
            return Err(invalid("a member of the request that is to be 0 is not"));
        }
        Ok(())
    }

    /// Its memory as one vector.
    pub(crate) fn piece(&self) -> iovec {
        iovec { iov_base: self.memory, iov_len: self.len }
    }

    /// What it reads into or writes from: `one`, which is its [`piece`](Self::piece), or its vectors.
    /// `None`: it does neither.
    ///
    /// # Safety
    ///
    /// Its vectors stay as they are for `'a`.
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

/// `last` is the file of the request before: mostly that of this one, too.
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
            return Err(invalid("an operation that there is not"));
        }
        None if memory.is_null() && len == 0 && offset == 0 => &[],
        None => return Err(invalid("a sync of a part")),
    };
    let request = match op {
        // SAFETY: U1: lent until the completion was returned, or the queue destroyed, which waits for it.
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

/// A thread that waits (U2). The lock orders the count with who destroys; who is done with the queue has a
/// reference to it, so that nothing hangs on its leaving.
struct Waiter<'q>(&'q Queued);

impl<'q> Waiter<'q> {
    fn enter(queued: &'q Queued) -> Outcome<Waiter<'q>> {
        let is_over = queued.is_over.read().unwrap_or_else(PoisonError::into_inner);
        if *is_over {
            return Err(gone());
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

/// A time in nanoseconds; less than 0: none.
fn duration(time_ns: i64) -> Option<Duration> {
    u64::try_from(time_ns).ok().map(Duration::from_nanos)
}

fn is_bad(errno: &millpond::Error) -> i64 {
    -i64::from(errno.errno())
}

/// # Safety
///
/// `completions` is valid for as many writes.
unsafe fn give(done: Vec<Completion>, completions: *mut millpond_completion) -> i64 {
    for (number, one) in done.iter().enumerate() {
        let result = one.result().map_or_else(is_bad, |moved| moved as i64);
        let completion = millpond_completion { user_data: one.user_data(), result };
        // SAFETY: our caller's promise.
        unsafe { completions.add(number).write(completion) };
    }
    done.len() as i64
}

/// Waits until `min` requests have completed, and stores `min` to `max` completions at `completions`, an
/// array of `max`; when `timeout_ns` nanoseconds have passed (less than 0: never), what is there, maybe
/// nothing. `min` 0 takes what is there and never blocks. Among several waiters who wants least is served first, and exactly `min` are
/// returned to each, but nobody is passed by for ever.
///
/// Blocks without spinning, and is woken once; not interrupted by signals.
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
        Ok(unsafe { give(done, completions) })
    })
}

/// `millpond_queue_wait`, but for `min` completions for no longer than `min_wait_ns` nanoseconds: after
/// that, one is enough (as with io_uring's `min_wait`).
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
        Ok(unsafe { give(done, completions) })
    })
}

/// Cancels one request that was submitted with `user_data` and has not completed: it completes with
/// -ECANCELED, and has done nothing.
///
/// Returns 0, or
/// -EBADF       there is no such queue
/// -ENOENT      there is no such request, or it can't be stopped any more
#[unsafe(no_mangle)]
pub extern "C" fn millpond_queue_cancel(queue: millpond_queue, user_data: u64) -> c_int {
    status(|| match QUEUES.get(queue.id)?.queue.cancel(user_data) {
        true => Ok(()),
        false => Err(Failure::Refused(libc::ENOENT, "no request that can be stopped")),
    })
}

/// An eventfd for loops of `poll(2)` and the like: readable when there are completions that no waiter was
/// given. Its count is of those that came since it was last read; somebody else may take them first.
/// Non-blocking, close-on-exec; to be read, not written nor closed: it is the queue's, and goes with it.
///
/// Returns the descriptor, or
/// -EBADF       there is no such queue
/// -EMFILE, -ENFILE     the system has no descriptor
#[unsafe(no_mangle)]
pub extern "C" fn millpond_queue_eventfd(queue: millpond_queue) -> c_int {
    call(|| Ok(i64::from(QUEUES.get(queue.id)?.queue.eventfd()?.as_raw_fd()))) as c_int
}

/// How many requests have completed and were given to nobody (at `ready`), and how many are under way (at
/// `in_flight`). Each may be NULL.
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
