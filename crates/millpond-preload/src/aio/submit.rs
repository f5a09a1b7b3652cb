//! The calls of Linux AIO. Rules `aio.A1` to `A6`: see the folder.

use millpond::File;
use smallvec::SmallVec;

use crate::aio::context::{
    Context, ContextInUse, Ending, StandIn, find, free_removed, nothing, place, remove,
};
use crate::aio::iocb::{
    Event, FDSYNC, FSYNC, HAS_EVENTFD, Iocb, PREAD, PREADV, PWRITE, PWRITEV, SYS_io_pgetevents,
};
use crate::aio::request::{Request, Started, Unserved};
use crate::files::segments::{Direction, Memory};
use crate::files::table::{self, NumberState};
use crate::files::{registry, served_io};
use crate::page_cache;
use crate::report::counts;
use crate::report::reason::Reason;
use crate::runtime::sys::sys;
use crate::runtime::{fault, section, thread};

/// A thread carries out longer reads, and copies to the program's memory. Chosen: the pages of a
/// hit.
const START_BYTES_MAX: usize = 64 * 4096;

/// `io_setup`.
///
/// # Safety
///
/// As the system call; `handle` may be any address.
pub unsafe fn set_up(capacity: u32, handle: *mut usize) -> isize {
    // SAFETY: the kernel checks the address.
    let made = unsafe { sys!(libc::SYS_io_setup, capacity, handle) };
    if made < 0 || page_cache::is_on() || thread::record().is_inside() {
        return made;
    }
    section::run(|_| {
        fault::install();
        // SAFETY: the kernel has read and written it.
        let kernel = unsafe { handle.read() };
        // If there is no memory or no descriptor for a context of the library, the context stays the kernel's.
        if nothing().is_some()
            && let Some(ours) = Context::new(kernel, capacity)
        {
            // SAFETY: as above.
            unsafe { handle.write(place(ours)) };
        }
    });
    made
}

/// `io_destroy`.
pub fn destroy(handle: usize) -> isize {
    if find(handle).is_none() {
        // SAFETY: no memory involved.
        return unsafe { sys!(libc::SYS_io_destroy, handle) };
    }
    section::run(|_| {
        // Else another thread has destroyed it.
        let Some(context) = remove(handle) else { return -(libc::EINVAL as isize) };
        context.close();
        // A thread that waits in the context gets an error. SAFETY: no memory involved.
        let destroyed = unsafe { sys!(libc::SYS_io_destroy, context.kernel) };
        drop(context);
        free_removed();
        destroyed
    })
}

/// `io_cancel`: the kernel does not know requests for served files, and returns an error. It can't
/// cancel its requests for regular files either.
///
/// # Safety
///
/// As the system call; the pointers may be any address.
pub unsafe fn cancel(handle: usize, block: *mut Iocb, result: *mut Event) -> isize {
    let context = find(handle);
    let kernel = context.as_ref().map_or(handle, |context| context.kernel);
    // SAFETY: the kernel checks the addresses.
    unsafe { sys!(libc::SYS_io_cancel, kernel, block, result) }
}

/// `io_getevents` and `io_pgetevents`. `signals`: the mask, in the form of the system call.
///
/// # Safety
///
/// As the system calls; the pointers may be any address.
pub unsafe fn get_events(
    handle: usize,
    min: isize,
    max: isize,
    events: *mut Event,
    timeout: *const libc::timespec,
    signals: Option<usize>,
) -> isize {
    let context = find(handle);
    let kernel = context.as_ref().map_or(handle, |context| context.kernel);
    // SAFETY: the kernel checks the addresses.
    let got = unsafe {
        match signals {
            None => sys!(libc::SYS_io_getevents, kernel, min, max, events, timeout),
            Some(signals) => {
                sys!(SYS_io_pgetevents, kernel, min, max, events, timeout, signals)
            }
        }
    };
    if let Some(context) = context
        && got > 0
    {
        // SAFETY: the kernel has written this number of events.
        let events = unsafe { std::slice::from_raw_parts_mut(events, got as usize) };
        section::open(|_| context.take(events));
    }
    got
}

/// `io_submit`.
///
/// # Safety
///
/// As the system call, aio.A3 included; the pointers may be any address.
pub unsafe fn submit(handle: usize, count: isize, blocks: *const *mut Iocb) -> isize {
    let Some(context) = find(handle) else {
        if !page_cache::is_on() && !thread::record().is_inside() {
            // It may be for any file.
            section::run(|_| registry::lock().pass_all(Reason::InLibc));
        }
        // SAFETY: as above; the kernel checks the addresses.
        return unsafe { sys!(libc::SYS_io_submit, handle, count, blocks) };
    };
    section::open(|_| {
        if count <= 0 || blocks.is_null() {
            // SAFETY: the caller's duty.
            unsafe { context.pass_on(count, blocks) }
        } else {
            let mut submission = Submission::new(&context);
            // SAFETY: as above.
            File::start_together(|| unsafe { submission.run(count as usize, blocks) })
        }
    })
}

/// A block of the program and its address; `None` if the kernel could not read it either.
unsafe fn read_block(blocks: *const *mut Iocb, index: usize) -> Option<(*mut Iocb, Iocb)> {
    let mut at: *mut Iocb = std::ptr::null_mut();
    // SAFETY: an iocb consists of integers.
    let mut block: Iocb = unsafe { std::mem::zeroed() };
    // SAFETY: the destination is this function's; the source may be any address, as the handlers are
    // installed.
    let copied = unsafe {
        fault::copy_in(
            (&raw mut at).cast(),
            blocks.wrapping_add(index).cast(),
            size_of::<*mut Iocb>(),
        ) && fault::copy_in((&raw mut block).cast(), at.cast(), size_of::<Iocb>())
    };
    copied.then_some((at, block))
}

/// One `io_submit` under way.
struct Submission<'a> {
    context: &'a ContextInUse,
    /// Consecutive blocks for the kernel that are not submitted yet.
    run: Vec<*mut Iocb>,
    /// Stand-ins of requests that ended at once, and optimistic reads (aio.A6).
    ended: SmallVec<[StandIn; 8]>,
    submitted: usize,
}

/// How a request is carried out.
enum Plan {
    Kernel,
    Request(Request),
    Sync(Request, bool),
}

impl<'a> Submission<'a> {
    fn new(context: &'a ContextInUse) -> Self {
        Self { context, run: Vec::new(), ended: SmallVec::new(), submitted: 0 }
    }

    /// # Safety
    ///
    /// As [`submit`].
    unsafe fn run(&mut self, count: usize, blocks: *const *mut Iocb) -> isize {
        let mut failed = None;
        for index in 0..count {
            // SAFETY: the caller's duty.
            let tried = unsafe { self.one(blocks, index) };
            if let Err(errno) = tried {
                failed = Some(errno);
                break;
            }
        }
        // Submits the blocks before the failed one.
        if let Err(errno) = self.end_run() {
            failed = Some(errno);
        }
        self.context.submit_stand_ins(&self.ended);
        match failed {
            Some(errno) if self.submitted == 0 => -(errno as isize),
            _ => self.submitted as isize,
        }
    }

    unsafe fn one(&mut self, blocks: *const *mut Iocb, index: usize) -> Result<(), i32> {
        // SAFETY: the caller's duty.
        let (at, block) = unsafe { read_block(blocks, index) }.ok_or(libc::EFAULT)?;
        // SAFETY: as above.
        let request = match unsafe { plan(&block) }? {
            Plan::Kernel => {
                self.run.push(at);
                return Ok(());
            }
            request => request,
        };
        self.end_run()?;
        if block.aio_flags & HAS_EVENTFD != 0 {
            self.context.check_eventfd(block.aio_resfd)?;
        }
        if block.aio_key != 0 {
            // The kernel writes its key there, which identifies the block later.
            // SAFETY: a faulting address gives false, as the handlers are installed.
            let written =
                unsafe { fault::copy_in((&raw mut (*at).aio_key).cast(), [0; 4].as_ptr(), 4) };
            if !written {
                return Err(libc::EFAULT);
            }
        }
        let slot = self.context.begin(at, &block)?;
        self.submitted += 1;
        let ending = Ending::new(self.context, slot);
        let ended = match request {
            Plan::Kernel => None,
            Plan::Sync(request, data_only) => {
                request.aside(ending, move |request| request.sync(data_only));
                None
            }
            Plan::Request(request) if request.direction() == Direction::Write => {
                // It may wait, as in the kernel, which writes to its cache before it returns.
                File::start_now();
                // SAFETY: aio.A3.
                let result = unsafe { request.carry_out() };
                Some((ending, result))
            }
            Plan::Request(request) if request.bytes() > START_BYTES_MAX => {
                // SAFETY: aio.A3.
                request.aside(ending, |request| unsafe { request.carry_out() });
                None
            }
            // SAFETY: aio.A3.
            Plan::Request(request) => match unsafe { request.start(ending) } {
                Started::Ended(ending, result) => Some((ending, result)),
                Started::UnderWay => None,
                Started::OptimisticRead(block) => {
                    self.ended.push(block);
                    None
                }
            },
        };
        if let Some((ending, result)) = ended {
            self.ended.push(ending.fill(result));
        }
        Ok(())
    }

    /// Submits the collected blocks to the kernel.
    fn end_run(&mut self) -> Result<(), i32> {
        if self.run.is_empty() {
            return Ok(());
        }
        let run = std::mem::take(&mut self.run);
        // The kernel reads before it returns if the file is in its cache, or not open for direct I/O.
        File::start_now();
        // SAFETY: the program's blocks, unchanged.
        let submitted = unsafe { self.context.pass_on(run.len() as isize, run.as_ptr()) };
        match usize::try_from(submitted) {
            Err(_) => Err(-submitted as i32),
            Ok(taken) => {
                self.submitted += taken;
                // The kernel reports the error of the next block only if that block comes first.
                if taken < run.len() { Err(libc::EAGAIN) } else { Ok(()) }
            }
        }
    }
}

/// Decides how a request is carried out; an error is the kernel's immediate result.
unsafe fn plan(block: &Iocb) -> Result<Plan, i32> {
    let fd = block.aio_fildes as i32;
    if matches!(table::get(fd), NumberState::Internal) {
        return Err(libc::EBADF);
    }
    let (at, len) = (block.aio_buf as usize as *mut u8, block.aio_nbytes as usize);
    let (direction, memory) = match block.aio_lio_opcode {
        PREAD => (Direction::Read, Memory::One(at, len)),
        PWRITE => (Direction::Write, Memory::One(at, len)),
        PREADV => (Direction::Read, Memory::Many(at as *const libc::iovec, len)),
        PWRITEV => (Direction::Write, Memory::Many(at as *const libc::iovec, len)),
        FSYNC | FDSYNC => {
            let data_only = block.aio_lio_opcode == FDSYNC;
            // If the file has no late writes, the kernel already has all its bytes.
            return Ok(
                Request::to_sync(fd).map_or(Plan::Kernel, |request| Plan::Sync(request, data_only))
            );
        }
        _ => return Ok(Plan::Kernel),
    };
    if (len as isize) < 0 {
        return Err(libc::EINVAL);
    }
    // SAFETY: the caller's duty.
    match unsafe { Request::prepare(fd, memory, block.aio_offset, direction, block.aio_rw_flags) } {
        Ok(request) => Ok(Plan::Request(request)),
        Err(Unserved::Fail(errno)) => Err(errno),
        Err(Unserved::Kernel(reason)) => {
            if let (Some(reason), PREAD | PWRITE) = (reason, block.aio_lio_opcode) {
                // The requested length: the moved length is known only after the last look at the block.
                counts::count_bytes_passed(reason, len as isize);
                served_io::explain_passed(fd, direction, len as isize);
            }
            Ok(Plan::Kernel)
        }
    }
}
