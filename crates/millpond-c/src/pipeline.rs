//! Pipelines: many direct requests in flight, driven by one thread.
//!
//! - **L1** The memory of a request belongs to the caller. It is lent until the next step of the request's
//!   lane, which comes when the request has completed. The engine's pipeline returns after the last request
//!   has completed.
//! - **L2** The file of a request stays open until its lane has its next request, or none, even if its handle
//!   is closed. The engine borrows the file only until the lane's next step (pipeline.P5 of the engine).

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use millpond::File;
use millpond::direct::DirectRequest;

use crate::call::{NO_MEMORY, Outcome, fault, invalid, status};
use crate::engine::millpond_engine;
use crate::file::millpond_file;
use crate::handle::with_buffers;
use crate::objects::{ENGINES, FILES};
use crate::queue::{MILLPOND_OP_READ, MILLPOND_OP_READV, millpond_request};

/// A slot of a pipeline, between two requests.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct millpond_lane {
    /// The lane's number, from 0 on.
    pub number: usize,
    /// The result of the request: bytes, or a negative errno. 0 at first.
    pub result: i64,
    /// The completed request, to be changed into the next one. All 0 at first, `op` included.
    pub request: millpond_request,
}

/// The callback of a pipeline, called for each lane with the `context` of `millpond_pipeline_run`. Returns
/// 0 if the lane has no more requests; otherwise `lane->request` is the next one.
pub type millpond_step =
    Option<unsafe extern "C" fn(context: *mut c_void, lane: *mut millpond_lane) -> c_int>;

/// Runs up to `depth` direct requests concurrently, 1 to 4096, from the calling thread. Returns when all
/// have completed. `step` is called once for each of the `depth` lanes, and again whenever the lane's
/// request has completed, until it returns 0. The requests are reads and writes as for queues, of files
/// that were opened with O_DIRECT. They complete in any order. Each is atomic with respect to all other
/// operations on its file, and coherent with the cache. Overlapping requests take effect in the order in
/// which they were submitted.
///
/// With io_uring the requests go through a private ring with registered files. A buffer of
/// `millpond_buffers_alloc` is registered, too, if a request begins at the buffer's start and fits in it.
/// Registration costs time, so long runs benefit most. With another backend the requests run one after the
/// other.
///
/// The memory that a request names is lent to it until its lane's next step. Until then it must stay valid,
/// memory to read into must not be used, and memory to write from must not change. `step` runs on this
/// thread, within this call. It may close files: a file of which no lane has a request any more gives its
/// descriptors back when the last of these lanes gets its next request, or none. With io_uring the kernel may hold up to
/// 32 closed files until then or until this call returns. It must not otherwise use files that have requests in
/// flight, nor wait for a thread that does, and must not be left by longjmp() or a C++ exception.
///
/// Returns 0, also if requests failed, or
/// -EBADF       there is no such engine
/// -EINVAL      `depth` is out of its range
/// -EFAULT      `step` is NULL
/// or the error of the system when the ring was created. The result of a request is that of `millpond_read` or
/// `millpond_write` with O_DIRECT. -EBADF also: there is no such file; -EINVAL also: no such operation, flags
/// or reserved members are not 0, or the file was not opened with O_DIRECT.
///
/// # Safety
///
/// `step` is a function that keeps to the rules above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millpond_pipeline_run(
    engine: millpond_engine,
    depth: usize,
    step: millpond_step,
    context: *mut c_void,
) -> c_int {
    status(|| {
        let step = step.ok_or(fault("the step is NULL"))?;
        let engine = ENGINES.get(engine.id)?;
        let mut pipeline = engine.pipeline(depth)?;
        let mut requests: Vec<millpond_request> = Vec::new();
        requests.try_reserve_exact(depth).map_err(|_| NO_MEMORY)?;
        requests.resize(depth, EMPTY_REQUEST);
        // L2: dropped after all requests: they have completed when `run` returns or unwinds.
        let mut files: Vec<Option<Arc<File>>> = Vec::new();
        files.try_reserve_exact(depth).map_err(|_| NO_MEMORY)?;
        files.resize(depth, None);
        pipeline.run(|lane| {
            let number = lane.number();
            let mut result = match lane.into_ended() {
                None => 0,
                Some((_, Ok(moved))) => moved as i64,
                Some((_, Err(error))) => -i64::from(error.errno()),
            };
            loop {
                let mut seen = millpond_lane { number, result, request: requests[number] };
                // SAFETY: our caller's promise.
                if unsafe { step(context, &raw mut seen) } == 0 {
                    files[number] = None;
                    return None;
                }
                requests[number] = seen.request;
                // SAFETY: L1, by our caller's promise; L2: the lane's request has been dropped when it is changed here
                // or above.
                match unsafe { to_direct(&seen.request, &mut files[number]) } {
                    Ok(direct) => return Some(direct),
                    Err(failure) => result = -i64::from(failure.errno()),
                }
            }
        });
        Ok(())
    })
}

const EMPTY_REQUEST: millpond_request = millpond_request {
    file: millpond_file { id: 0 },
    user_data: 0,
    offset: 0,
    memory: std::ptr::null_mut(),
    len: 0,
    op: 0,
    flags: 0,
    reserved: [0; 2],
};

/// Puts the file with this id into the lane's place, and borrows it from there.
///
/// # Safety
///
/// No earlier result for this lane is used any more. The result is not used after the place has changed.
unsafe fn file_of_lane<'a>(place: &mut Option<Arc<File>>, id: u64) -> Outcome<&'a File> {
    // Most lanes keep their file: a comparison is cheaper than another reference.
    let is_same =
        FILES.with(id, |file| place.as_ref().is_some_and(|placed| Arc::ptr_eq(placed, file)))?;
    if !is_same {
        *place = Some(FILES.get(id)?);
    }
    let file = Arc::as_ptr(place.as_ref().expect("placed above"));
    // SAFETY: the content of an Arc does not move while the Arc exists; it exists by the caller's
    // promise.
    Ok(unsafe { &*file })
}

/// # Safety
///
/// The memory that the request names is lent to it (L1), and the lane's previous request has been dropped. The result is
/// dropped before `place` changes.
unsafe fn to_direct<'a>(
    request: &millpond_request,
    place: &mut Option<Arc<File>>,
) -> Outcome<DirectRequest<'a>> {
    let millpond_request { file, offset, op, .. } = *request;
    request.check()?;
    let one = [request.piece()];
    // SAFETY: our caller's promise.
    let pieces = unsafe { request.memory(&one) }?
        .ok_or(invalid("an operation that a pipeline does not support"))?;
    // SAFETY: our caller's promise.
    let file = unsafe { file_of_lane(place, file.id) }?;
    let lent = |of: Option<&millpond::Buffer>| match op {
        // SAFETY: L1; the memory lies in the buffer.
        MILLPOND_OP_READ | MILLPOND_OP_READV => unsafe {
            DirectRequest::read_lent(file, pieces, offset, of)
        },
        // SAFETY: the same.
        _ => unsafe { DirectRequest::write_lent(file, pieces, offset, of) },
    };
    let [piece] = pieces else { return Ok(lent(None)) };
    Ok(with_buffers(|all| {
        let buffer = all.get(&piece.iov_base.addr());
        lent(buffer.filter(|buffer| piece.iov_len <= buffer.len()))
    }))
}
