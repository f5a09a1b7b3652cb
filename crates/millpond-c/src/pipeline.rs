//! Pipelines: many direct requests under way from one thread.
//!
//! - **L1** What a request reads into or writes from is the caller's, lent until its lane's next step, which
//!   comes when it has ended; the engine's pipeline returns no earlier than the last has.
//! - **L2** A file that a request was of is kept until then, whoever closes its handle.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use millpond::{DirectRequest, File};

use crate::call::{Outcome, fault, invalid, status};
use crate::engine::millpond_engine;
use crate::file::millpond_file;
use crate::handle::with_buffers;
use crate::objects::{ENGINES, FILES};
use crate::queue::{MILLPOND_OP_READ, MILLPOND_OP_READV, millpond_request};

/// One of the places of a pipeline, between two requests.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct millpond_lane {
    /// Which place it is, from 0 on.
    pub number: usize,
    /// What became of the request: bytes, or a negative errno. 0 at first.
    pub result: i64,
    /// The request that has ended, to be changed into the next one. All 0 at first, so also `op`.
    pub request: millpond_request,
}

/// What a pipeline calls for each lane, with the `context` that `millpond_pipeline_run` was given: returns
/// 0 if there is nothing more for the lane to do, else the lane's request is the next one.
pub type millpond_step =
    Option<unsafe extern "C" fn(context: *mut c_void, lane: *mut millpond_lane) -> c_int>;

/// Keeps up to `depth` direct requests under way, 1 to 4096, from the calling thread, and returns when all
/// have ended. `step` is called for each lane, as many as `depth`, and again whenever its request has ended,
/// until it returns 0. Requests are those of queues, to read and to write, of files that were opened with
/// O_DIRECT. They end in any order; each is atomic with respect to all other operations on its file, and
/// coherent with the cache; those that overlap take effect in the order in which they were given.
///
/// With io_uring they go through a ring of this call's own, with files registered, and memory, too, where a
/// request's begins where a piece of `millpond_buffers_alloc` does, and lies in it: so long runs are the ones
/// that pay. With another back end they are carried out one after the other.
///
/// The memory that a request names is lent to it until its lane's next step: until then it must stay valid,
/// what is read into must not be used, and what is written must not change. `step` is called by this
/// thread, within this call. It may close files; it must not otherwise use files that have requests under
/// way, nor wait for a thread that does, and is not to be left by longjmp() or a C++ exception.
///
/// Returns 0, whatever became of requests, or
/// -EBADF       there is no such engine
/// -EINVAL      another depth
/// -EFAULT      `step` is NULL
/// or what the system said when it was asked for a ring. The result of a request is that of `millpond_read` or
/// `millpond_write` with O_DIRECT; -EBADF also: there is no such file; -EINVAL also: no such
/// operation, flags or reserved members are not 0, or the file was not opened with O_DIRECT.
///
/// # Safety
///
/// `step` is a function that keeps to the above.
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
        let mut requests: Vec<millpond_request> = vec![NONE; depth];
        // Dropped after all requests (L2): `run` returns, or unwinds, when they have ended.
        let mut files = Files::default();
        pipeline.run(|lane| {
            let mut result = match lane.outcome {
                None => 0,
                Some(Ok(moved)) => moved as i64,
                Some(Err(error)) => -i64::from(error.errno()),
            };
            loop {
                let request = requests[lane.number];
                let mut seen = millpond_lane { number: lane.number, result, request };
                // SAFETY: our caller's promise.
                if unsafe { step(context, &raw mut seen) } == 0 {
                    return false;
                }
                requests[lane.number] = seen.request;
                // SAFETY: L1, by our caller's promise.
                match unsafe { to_direct(&seen.request, &mut files) } {
                    Ok(direct) => {
                        *lane.request = Some(direct);
                        return true;
                    }
                    Err(failure) => result = -i64::from(failure.errno()),
                }
            }
        });
        Ok(())
    })
}

const NONE: millpond_request = millpond_request {
    file: millpond_file { id: 0 },
    user_data: 0,
    offset: 0,
    memory: std::ptr::null_mut(),
    len: 0,
    op: 0,
    flags: 0,
    reserved: [0; 2],
};

/// The files of a run's requests (L2): few, each once.
#[derive(Default)]
struct Files(Vec<Arc<File>>);

impl Files {
    /// # Safety
    ///
    /// The result is not used when these files have been dropped.
    unsafe fn get<'a>(&mut self, id: u64) -> Outcome<&'a File> {
        let known = FILES
            .with(id, |file| self.0.iter().find(|one| Arc::ptr_eq(one, file)).map(Arc::as_ptr))?;
        let file = match known {
            Some(known) => known,
            None => {
                let file = FILES.get(id)?;
                let at = Arc::as_ptr(&file);
                self.0.push(file);
                at
            }
        };
        // SAFETY: what an Arc has stays where it is as long as the Arc is kept; the caller's promise.
        Ok(unsafe { &*file })
    }
}

/// # Safety
///
/// The memory that the request names is lent to it (L1), and it is gone before `files` are.
unsafe fn to_direct<'a>(
    request: &millpond_request,
    files: &mut Files,
) -> Outcome<DirectRequest<'a>> {
    let millpond_request { file, offset, op, .. } = *request;
    request.check()?;
    let one = [request.piece()];
    // SAFETY: our caller's promise.
    let pieces =
        unsafe { request.memory(&one) }?.ok_or(invalid("an operation that pipelines have not"))?;
    // SAFETY: our caller's promise.
    let file = unsafe { files.get(file.id) }?;
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
