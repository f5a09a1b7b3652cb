//! Contexts of Linux AIO: requests for served files and for others, in one queue of completions.
//!
//! A program's context is a context of the kernel, under a handle of ours. Requests for files that are
//! not served go to it as they came. Those for served files are carried out by the engine; when one
//! has ended, a *stand-in* is submitted to the kernel's context: a read of nothing, which completes at
//! once. So there is one queue, the kernel's, with its order, counts, timeouts, signals and eventfds;
//! who takes a stand-in's completion from it finds the served request's in its place.
//!
//! ```text
//!   io_submit: served -> a hit, a write of a few pages: ended        -> stand-in -> kernel's queue
//!                     -> a read that misses: `File::start_read_raw`  -> ended, on the engine's thread
//!                     -> other writes, syncs, long reads: `aside`    -> ended, on the engine's thread
//!              else   -> the kernel's queue
//!   io_getevents: the kernel's; then stand-ins are replaced -> slot free
//! ```
//!
//! - **A1** A slot is its request's from submission on. Who ends the request fills in the result and
//!   submits the slot's stand-in; from then on the slot is whose `io_getevents` takes the completion.
//! - **A2** While requests for served files are under way or not taken, all requests together are at
//!   most as many as the context was made for, which the kernel always has room for: a stand-in is not
//!   refused. While there are none, the kernel alone counts.
//! - **A3** The program keeps the memory of a request valid until it has taken its completion: that is
//!   the contract of Linux AIO. A request keeps its description pinned, so it is carried out on the
//!   file that was open, whatever became of the number, and its memory until its end.
//! - **A4** A context is destroyed when all requests for served files have ended. Its memory lives as
//!   long as somebody uses the context: who wants to counts himself, and then looks whether the handle
//!   stands yet; who destroys it takes the handle away, and frees the memory when nobody is counted,
//!   he or whoever makes or destroys a context later.
//! - **A5** Requests that end in one batch of the engine's have their stand-ins submitted together, by
//!   who ends the first of them.
//!
//! The handle is the address of memory of ours that is zero at first: programs that look for completions
//! in the ring that a kernel's handle points to find no ring, and call. A forked child has no contexts:
//! the kernel knows none of its handles. The eventfd of a request is the program's number: who closes it
//! before the completion came gives up being told.
//!
//! Locks: the places of contexts, what has ended of a context; leaves both. Waiting for completions
//! takes none.

use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize};

use millpond::File;

use crate::io::{Direction, Memory, Request, Unserved};
use crate::lock::{self, Lock};
use crate::real::sys;
use crate::report::{self, Reason};
use crate::table::{self, Slot as Known};
use crate::{config, fault, hooks_process, late, registry, section, thread};

pub type Block = libc::iocb;

/// As the kernel's `io_event`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub struct Event {
    data: u64,
    block: u64,
    pub result: i64,
    pub more: i64,
}

impl Event {
    /// What libaio's `io_queue_run` takes it for: the block, and the address of a function.
    pub fn callback(&self) -> (*mut Block, usize) {
        (std::ptr::with_exposed_provenance_mut(self.block as usize), self.data as usize)
    }
}

#[cfg(target_arch = "x86_64")]
pub const SYS_IO_PGETEVENTS: i64 = 333;
#[cfg(target_arch = "aarch64")]
pub const SYS_IO_PGETEVENTS: i64 = 292;
const PREAD: u16 = 0;
const PWRITE: u16 = 1;
const FSYNC: u16 = 2;
const FDSYNC: u16 = 3;
const PREADV: u16 = 7;
const PWRITEV: u16 = 8;
/// In a block's `aio_flags`: there is an eventfd.
const HAS_EVENTFD: u32 = 1;
/// Reads of more are carried out by a thread, which reads to the program's memory.
const START_BYTES_MAX: usize = 64 * 4096;
/// Whole pages up to so many bytes are written at once.
const WRITE_BYTES_MAX: usize = 64 * 4096;
const HEADER_BYTES: usize = 4096;
/// Contexts at a time; more are the kernel's alone, and what they are asked for of served files makes
/// those the kernel's, too.
const PLACES: usize = 1024;

/// A request for a served file.
#[repr(C)]
struct Slot {
    stand_in: Block,
    /// Where the program's block is, and what it wants to be told.
    block: u64,
    data: u64,
    result: i64,
    /// The slot after this one in the list of free ones, plus one.
    next: AtomicU32,
}

pub struct Context {
    /// The kernel's handle.
    kernel: usize,
    /// Our handle: a zero page, and the slots behind it.
    memory: NonNull<u8>,
    capacity: u32,
    /// Requests that are under way or not taken: for served files in the low half, others in the high.
    counts: AtomicU64,
    /// The first free slot, plus one, and above it a number that grows with every change.
    free: AtomicU64,
    /// Slots from here on were never used.
    fresh: AtomicU32,
    /// Requests for served files that have not ended; who destroys the context sleeps on it (A4).
    under_way: AtomicU32,
    /// Stand-ins to be submitted (A5).
    ended: Lock<Vec<StandIn>>,
}

#[repr(transparent)]
struct StandIn(*mut Block);

// SAFETY: a slot's, which the holder has (A1).
unsafe impl Send for StandIn {}

// SAFETY: the memory is shared by A1.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// Where a context can be found.
struct Place {
    /// 0 where there is none, or none any more.
    handle: AtomicUsize,
    users: AtomicU32,
    context: AtomicPtr<Context>,
}

static CONTEXTS: [Place; PLACES] = [const {
    Place {
        handle: AtomicUsize::new(0),
        users: AtomicU32::new(0),
        context: AtomicPtr::new(std::ptr::null_mut()),
    }
}; PLACES];
/// One more than the highest place ever used.
static PLACES_USED: AtomicUsize = AtomicUsize::new(0);
/// Held by who makes or destroys a context.
static MAKING: Lock<()> = Lock::new(());

/// A context that lives as long as this does.
struct InUse {
    place: &'static Place,
}

impl InUse {
    fn of(place: &'static Place, handle: usize) -> Option<Self> {
        // SeqCst, with the look that follows, and the two of who destroys the context (A4): he sees
        // the count, or the handle is seen to be gone.
        place.users.fetch_add(1, SeqCst);
        let in_use = Self { place };
        (place.handle.load(SeqCst) == handle).then_some(in_use)
    }
}

impl Clone for InUse {
    fn clone(&self) -> Self {
        // Relaxed: it is counted already.
        self.place.users.fetch_add(1, Relaxed);
        Self { place: self.place }
    }
}

impl Deref for InUse {
    type Target = Context;
    fn deref(&self) -> &Context {
        // SAFETY: A4: counted while the handle stood.
        unsafe { &*self.place.context.load(Acquire) }
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        // Release: all that was done with the context comes before it is freed.
        self.place.users.fetch_sub(1, Release);
    }
}

/// Frees what nobody uses any more (A4). `MAKING` is held.
fn free_destroyed() {
    for place in &CONTEXTS[..PLACES_USED.load(Relaxed)] {
        let context = place.context.load(Relaxed);
        if !context.is_null()
            && place.handle.load(SeqCst) == 0
            // SeqCst: see `InUse::of`.
            && place.users.load(SeqCst) == 0
        {
            place.context.store(std::ptr::null_mut(), Relaxed);
            // SAFETY: made by `Box::into_raw`, and nobody finds or uses it.
            drop(unsafe { Box::from_raw(context) });
        }
    }
}

/// Puts a context where it can be found; its handle. `MAKING` is held.
fn place(context: Context) -> Option<usize> {
    let at = CONTEXTS.iter().position(|place| place.context.load(Relaxed).is_null())?;
    let handle = context.handle();
    PLACES_USED.fetch_max(at + 1, Relaxed);
    // Release: who finds the handle finds the context.
    CONTEXTS[at].context.store(Box::into_raw(Box::new(context)), Release);
    CONTEXTS[at].handle.store(handle, SeqCst);
    Some(handle)
}

/// What stand-ins read nothing of; -1 before the first context.
static NOTHING: AtomicI32 = AtomicI32::new(-1);
/// Writes and syncs that have not ended; who ends the process sleeps on it.
static WRITES: AtomicU32 = AtomicU32::new(0);

const SERVED_ONE: u64 = 1;
const OTHERS_ONE: u64 = 1 << 32;

fn served(counts: u64) -> u64 {
    counts & (OTHERS_ONE - 1)
}

fn others(counts: u64) -> u64 {
    counts >> 32
}

/// Before the process ends, or becomes another program: what was submitted to be written is.
pub fn finish_writes() {
    // In a child of a fork that no handler saw there is nobody to carry them out.
    while table::is_initialised() {
        // Acquire: pairs with the end of the last write.
        match WRITES.load(Acquire) {
            0 => return,
            left => lock::wait(&WRITES, left),
        }
    }
}

/// The library's own descriptor here, for a forked child to close.
pub fn internal_fd() -> Option<i32> {
    Some(NOTHING.load(Relaxed)).filter(|fd| *fd >= 0)
}

/// In a forked child.
///
/// # Safety
///
/// No other thread exists.
pub unsafe fn after_fork() {
    // SAFETY: the caller's duty.
    unsafe { MAKING.reset(()) };
    for place in &CONTEXTS[..PLACES_USED.swap(0, Relaxed)] {
        // The parent's, and left behind.
        place.handle.store(0, Relaxed);
        place.users.store(0, Relaxed);
        place.context.store(std::ptr::null_mut(), Relaxed);
    }
    NOTHING.store(-1, Relaxed);
    WRITES.store(0, Relaxed);
}

/// The context of a handle; `None` for one of the kernel's.
fn find(handle: usize) -> Option<InUse> {
    if handle == 0 || thread::record().is_inside() {
        return None;
    }
    hooks_process::ensure_initialised();
    CONTEXTS[..PLACES_USED.load(Relaxed)]
        .iter()
        .filter(|place| place.handle.load(Relaxed) == handle)
        .find_map(|place| InUse::of(place, handle))
}

/// `io_setup`.
///
/// # Safety
///
/// As the system call; `handle` may be any address.
pub unsafe fn set_up(capacity: u32, handle: *mut usize) -> isize {
    // SAFETY: the kernel checks the address.
    let made = unsafe { sys!(libc::SYS_io_setup, capacity, handle) };
    if made < 0 || thread::record().is_inside() {
        return made;
    }
    hooks_process::ensure_initialised();
    section::run(|_| {
        // SAFETY: the kernel has read and written it.
        let kernel = unsafe { handle.read() };
        // Where there is no memory or no descriptor for it, the kernel's it stays.
        let _making = MAKING.lock();
        free_destroyed();
        if nothing().is_some()
            && let Some(ours) = Context::new(kernel, capacity).and_then(place)
        {
            // SAFETY: as above.
            unsafe { handle.write(ours) };
        }
    });
    made
}

/// `io_destroy`.
pub fn destroy(handle: usize) -> isize {
    let Some(context) = find(handle) else {
        // SAFETY: no memory involved.
        return unsafe { sys!(libc::SYS_io_destroy, handle) };
    };
    section::run(|_| {
        // SeqCst: see `InUse::of`.
        if context.place.handle.compare_exchange(handle, 0, SeqCst, SeqCst).is_err() {
            // Another thread was faster.
            return -(libc::EINVAL as isize);
        }
        context.wait_for_all();
        // Who waits in it finds it gone.
        // SAFETY: no memory involved.
        let destroyed = unsafe { sys!(libc::SYS_io_destroy, context.kernel) };
        drop(context);
        let _making = MAKING.lock();
        free_destroyed();
        destroyed
    })
}

/// `io_cancel`: the kernel knows no request for a served file, and says so; those that it has for other
/// files it can't cancel, either.
///
/// # Safety
///
/// As the system call; the pointers may be any address.
pub unsafe fn cancel(handle: usize, block: *mut Block, result: *mut Event) -> isize {
    let context = find(handle);
    let kernel = context.as_ref().map_or(handle, |context| context.kernel);
    // SAFETY: the kernel checks the addresses.
    unsafe { sys!(libc::SYS_io_cancel, kernel, block, result) }
}

/// What `io_getevents` is asked for.
#[derive(Clone, Copy)]
pub struct Wanted {
    pub min: isize,
    pub max: isize,
    pub events: *mut Event,
    pub timeout: *const libc::timespec,
    /// Of `io_pgetevents`, as the system call takes it.
    pub signals: Option<usize>,
}

/// `io_getevents` and `io_pgetevents`.
///
/// # Safety
///
/// As the system calls; the pointers may be any address.
pub unsafe fn get_events(handle: usize, wanted: Wanted) -> isize {
    let context = find(handle);
    let kernel = context.as_ref().map_or(handle, |context| context.kernel);
    let Wanted { min, max, events, timeout, signals } = wanted;
    // SAFETY: the kernel checks the addresses.
    let got = unsafe {
        match signals {
            None => sys!(libc::SYS_io_getevents, kernel, min, max, events, timeout),
            Some(signals) => {
                sys!(SYS_IO_PGETEVENTS, kernel, min, max, events, timeout, signals)
            }
        }
    };
    if let Some(context) = context
        && got > 0
    {
        // SAFETY: the kernel has written so many.
        context.take(unsafe { std::slice::from_raw_parts_mut(events, got as usize) });
    }
    got
}

/// `io_submit`.
///
/// # Safety
///
/// As the system call, A3 included; the pointers may be any address.
pub unsafe fn submit(handle: usize, count: isize, blocks: *const *mut Block) -> isize {
    let Some(context) = find(handle) else {
        if !thread::record().is_inside() {
            // SAFETY: the caller's duty.
            section::run(|_| unsafe { leave_all(count, blocks) });
        }
        // SAFETY: as above; the kernel checks the addresses.
        return unsafe { sys!(libc::SYS_io_submit, handle, count, blocks) };
    };
    section::run(|_| {
        if !fault::is_installed() || count <= 0 || blocks.is_null() {
            // SAFETY: the caller's duty. Nothing was served yet.
            unsafe { context.pass_on(count, blocks) }
        } else {
            let mut submission = Submission::new(&context);
            // SAFETY: as above.
            File::start_together(|| unsafe { submission.run(count as usize, blocks) })
        }
    })
}

/// Requests that go past us: the kernel is to find and to keep what it reads and writes.
unsafe fn leave_all(count: isize, blocks: *const *mut Block) {
    if !fault::is_installed() {
        return;
    }
    for index in 0..count.max(0) as usize {
        // SAFETY: the caller's duty.
        let Some((_, block)) = (unsafe { read_block(blocks, index) }) else { return };
        let fd = block.aio_fildes as i32;
        match block.aio_lio_opcode {
            PREAD | PREADV => late::go_through_inside(fd),
            PWRITE | PWRITEV => registry::lock().pass_fd(fd, Reason::InLibc),
            _ => {}
        }
    }
}

/// A block of the program's and where it is; `None` if the kernel could not read it, either.
unsafe fn read_block(blocks: *const *mut Block, index: usize) -> Option<(*mut Block, Block)> {
    let mut at: *mut Block = std::ptr::null_mut();
    // SAFETY: an iocb is of integers.
    let mut block: Block = unsafe { std::mem::zeroed() };
    // SAFETY: what is copied to is ours; what from may be any address, as the handlers are installed.
    let copied = unsafe {
        fault::copy_in(
            (&raw mut at).cast(),
            blocks.wrapping_add(index).cast(),
            size_of::<*mut Block>(),
        ) && fault::copy_in((&raw mut block).cast(), at.cast(), size_of::<Block>())
    };
    copied.then_some((at, block))
}

/// One `io_submit` under way.
struct Submission<'a> {
    context: &'a InUse,
    /// Blocks for the kernel, in a row, that it was not told of yet.
    run: Vec<*mut Block>,
    /// Stand-ins of requests that ended at once.
    ended: Vec<StandIn>,
    submitted: usize,
}

/// Whose a request is.
enum Plan {
    Kernel,
    Request(Request),
    Sync(Request, bool),
}

impl<'a> Submission<'a> {
    fn new(context: &'a InUse) -> Self {
        Self { context, run: Vec::new(), ended: Vec::new(), submitted: 0 }
    }

    /// # Safety
    ///
    /// As [`submit`].
    unsafe fn run(&mut self, count: usize, blocks: *const *mut Block) -> isize {
        let mut failed = None;
        for index in 0..count {
            // SAFETY: the caller's duty.
            let tried = unsafe { self.one(blocks, index) };
            if let Err(errno) = tried {
                failed = Some(errno);
                break;
            }
        }
        // What came before the one that failed.
        if let Err(errno) = self.end_run() {
            failed = Some(errno);
        }
        self.context.submit_stand_ins(&self.ended);
        match failed {
            Some(errno) if self.submitted == 0 => -(errno as isize),
            _ => self.submitted as isize,
        }
    }

    unsafe fn one(&mut self, blocks: *const *mut Block, index: usize) -> Result<(), i32> {
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
            // The kernel writes its key there, by which it knows the block again.
            // SAFETY: a faulting address gives false, as the handlers are installed.
            let written =
                unsafe { fault::copy_in((&raw mut (*at).aio_key).cast(), [0; 4].as_ptr(), 4) };
            if !written {
                return Err(libc::EFAULT);
            }
        }
        let slot = self.context.begin(at, &block).ok_or(libc::EAGAIN)?;
        self.submitted += 1;
        let ending = Ending { context: self.context.clone(), slot, writes: false };
        let ended = match request {
            Plan::Kernel => None,
            Plan::Sync(request, data_only) => {
                request.aside(ending.counted(), move |request| request.sync(data_only));
                None
            }
            Plan::Request(request) if request.is_write_of_pages(WRITE_BYTES_MAX) => {
                // It may wait for a moment, as in the kernel, which writes to its cache before it
                // returns; not for a read from the device.
                File::start_now();
                // SAFETY: A3.
                let result = unsafe { request.carry_out() };
                Some((ending, result))
            }
            Plan::Request(request) if request.direction() == Direction::Write => {
                // SAFETY: A3.
                request.aside(ending.counted(), |request| unsafe { request.carry_out() });
                None
            }
            Plan::Request(request) if request.bytes() > START_BYTES_MAX => {
                // SAFETY: A3.
                request.aside(ending, |request| unsafe { request.carry_out() });
                None
            }
            // SAFETY: A3.
            Plan::Request(request) => unsafe { request.start(ending) },
        };
        if let Some((ending, result)) = ended {
            self.ended.push(ending.fill(result));
        }
        Ok(())
    }

    /// Tells the kernel of the blocks that are its own.
    fn end_run(&mut self) -> Result<(), i32> {
        if self.run.is_empty() {
            return Ok(());
        }
        let run = std::mem::take(&mut self.run);
        // Of a file in its cache, or not open for direct I/O, the kernel reads before it returns.
        File::start_now();
        // SAFETY: the program's blocks, as it gave them.
        let submitted = unsafe { self.context.pass_on(run.len() as isize, run.as_ptr()) };
        match usize::try_from(submitted) {
            Err(_) => Err(-submitted as i32),
            Ok(taken) => {
                self.submitted += taken;
                // The rest has something that the kernel tells when it is the first.
                if taken < run.len() { Err(libc::EAGAIN) } else { Ok(()) }
            }
        }
    }
}

/// Decides whose a request is; an error is what the kernel says of it at once.
unsafe fn plan(block: &Block) -> Result<Plan, i32> {
    let fd = block.aio_fildes as i32;
    if matches!(table::get(fd), Known::Internal) {
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
            // What is not late the kernel has.
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
                // As many as asked for: what is moved is known when nobody looks at the block.
                report::count_bytes_passed(reason, len as isize);
            }
            Ok(Plan::Kernel)
        }
    }
}

impl Context {
    fn new(kernel: usize, capacity: u32) -> Option<Self> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let bytes = memory_bytes(capacity);
        // SAFETY: memory wherever there is some.
        let memory = unsafe { sys!(libc::SYS_mmap, 0, bytes, protection, flags, usize::MAX, 0) };
        if memory < 0 {
            return None;
        }
        Some(Self {
            kernel,
            memory: NonNull::new(std::ptr::with_exposed_provenance_mut(memory as usize))?,
            capacity,
            counts: AtomicU64::new(0),
            free: AtomicU64::new(0),
            fresh: AtomicU32::new(0),
            under_way: AtomicU32::new(0),
            ended: Lock::new(Vec::new()),
        })
    }

    fn handle(&self) -> usize {
        self.memory.as_ptr().addr()
    }

    fn slot(&self, index: u32) -> *mut Slot {
        let first = self.memory.as_ptr().wrapping_add(HEADER_BYTES).cast::<Slot>();
        first.wrapping_add(index as usize)
    }

    /// The slot whose stand-in this is.
    fn slot_of(&self, block: u64) -> Option<u32> {
        let from_first = (block as usize).checked_sub(self.slot(0).addr())?;
        let index = from_first / size_of::<Slot>();
        (index < self.capacity as usize).then_some(index as u32)
    }

    /// Has the kernel take blocks as they are, as many as there is room for (A2); says what it says.
    unsafe fn pass_on(&self, count: isize, blocks: *const *mut Block) -> isize {
        let wanted = count.clamp(0, i32::MAX as isize) as u64;
        let mut room = wanted;
        let admitted = self.counts.fetch_update(Relaxed, Relaxed, |counts| {
            let left = u64::from(self.capacity).saturating_sub(served(counts) + others(counts));
            room = if served(counts) == 0 { wanted } else { wanted.min(left) };
            Some(counts + room * OTHERS_ONE)
        });
        if admitted.is_ok() && room == 0 && wanted > 0 {
            return -(libc::EAGAIN as isize);
        }
        let count = if wanted == 0 { count } else { room as isize };
        // SAFETY: the caller's duty; the kernel checks the addresses.
        let submitted = unsafe { sys!(libc::SYS_io_submit, self.kernel, count, blocks) };
        let taken = submitted.max(0) as u64;
        self.counts.fetch_sub((room - taken) * OTHERS_ONE, Relaxed);
        submitted
    }

    /// A slot for a request, if there is room for one more (A2).
    fn begin(&self, at: *mut Block, block: &Block) -> Option<u32> {
        let admit = |counts| {
            let all = served(counts) + others(counts);
            (all < u64::from(self.capacity)).then_some(counts + SERVED_ONE)
        };
        // Acquire: pairs with the Release in `take`, so that what was freed is in the list.
        self.counts.fetch_update(Acquire, Relaxed, admit).ok()?;
        // As many slots as requests: where none was freed, there is one that was never used.
        let index = self.pop_free().unwrap_or_else(|| self.fresh.fetch_add(1, Relaxed));
        let has_eventfd = block.aio_flags & HAS_EVENTFD != 0;
        // SAFETY: a slot of this context that nobody else has (A1).
        unsafe {
            let stand_in = stand_in(has_eventfd.then_some(block.aio_resfd));
            let block_at = at.expose_provenance() as u64;
            let slot = self.slot(index);
            // Not `next`, which who is late may look at.
            (&raw mut (*slot).stand_in).write(stand_in);
            (&raw mut (*slot).block).write(block_at);
            (&raw mut (*slot).data).write(block.aio_data);
        }
        self.under_way.fetch_add(1, Relaxed);
        Some(index)
    }

    /// What the kernel says of the eventfd of a request: of one that it refuses for another reason.
    fn check_eventfd(&self, fd: u32) -> Result<(), i32> {
        let mut block = stand_in(Some(fd));
        // Not a flag that there is.
        block.aio_rw_flags = 1 << 30;
        let refused = self.submit_block(&mut block);
        if refused == -(libc::EOPNOTSUPP as isize) { Ok(()) } else { Err(-refused as i32) }
    }

    fn submit_block(&self, block: *mut Block) -> isize {
        // SAFETY: a valid block that names no memory.
        unsafe { sys!(libc::SYS_io_submit, self.kernel, 1, &raw const block) }
    }

    /// A free slot.
    fn pop_free(&self) -> Option<u32> {
        // Acquire: pairs with the Release in `push_free`.
        let mut seen = self.free.load(Acquire);
        loop {
            let index = (seen as u32).checked_sub(1)?;
            // SAFETY: a slot of this context; its `next` is atomic. If somebody else has popped it
            // meanwhile, the number above has grown, and what is read here is not used.
            let next = unsafe { (*self.slot(index)).next.load(Relaxed) };
            let after = ((seen >> 32).wrapping_add(1) << 32) | u64::from(next);
            match self.free.compare_exchange_weak(seen, after, AcqRel, Acquire) {
                Ok(_) => return Some(index),
                Err(now) => seen = now,
            }
        }
    }

    /// The slot was the caller's.
    fn push_free(&self, index: u32) {
        let mut seen = self.free.load(Relaxed);
        loop {
            // SAFETY: as in `pop_free`.
            unsafe { (*self.slot(index)).next.store(seen as u32, Relaxed) };
            let after = ((seen >> 32).wrapping_add(1) << 32) | u64::from(index + 1);
            // Release: who pops it finds `next`, and comes after all that was done with the slot.
            match self.free.compare_exchange_weak(seen, after, Release, Relaxed) {
                Ok(_) => return,
                Err(now) => seen = now,
            }
        }
    }

    /// Submits the stand-ins of requests that have ended (A1).
    fn submit_stand_ins(&self, ended: &[StandIn]) {
        let mut rest = ended;
        while let Some(first) = rest.first() {
            let blocks = rest.as_ptr().cast::<*mut Block>();
            // SAFETY: valid blocks, which name no memory.
            let submitted = unsafe { sys!(libc::SYS_io_submit, self.kernel, rest.len(), blocks) };
            match usize::try_from(submitted) {
                Ok(taken) => rest = &rest[taken..],
                // SAFETY: the stand-in was not taken, so it is still ours (A1).
                Err(_) => unsafe { mend(&mut *first.0, -submitted as i32) },
            }
        }
        self.count_ended(ended.len() as u32);
    }

    fn count_ended(&self, count: u32) {
        // AcqRel: who finds none under way finds all that they did.
        if count > 0 && self.under_way.fetch_sub(count, AcqRel) == count {
            lock::wake(&self.under_way);
        }
    }

    /// A4.
    fn wait_for_all(&self) {
        loop {
            // Acquire: pairs with `count_ended`.
            match self.under_way.load(Acquire) {
                0 => return,
                left => lock::wait(&self.under_way, left),
            }
        }
    }

    /// Puts the completions of requests for served files in the place of their stand-ins'.
    fn take(&self, events: &mut [Event]) {
        let mut served = 0;
        for event in &mut *events {
            let Some(index) = self.slot_of(event.block) else { continue };
            // SAFETY: A1: its stand-in's completion was taken, by this thread. Who submitted it did
            // that after it had filled the slot, and a system call on both sides is between.
            let (block, data, result) = unsafe {
                let slot = self.slot(index);
                ((*slot).block, (*slot).data, (*slot).result)
            };
            *event = Event { data, block, result, more: 0 };
            self.push_free(index);
            served += 1;
        }
        let others = events.len() as u64 - served;
        // Release: pairs with the Acquire in `begin`: who is admitted finds a slot.
        self.counts.fetch_sub(served * SERVED_ONE + others * OTHERS_ONE, Release);
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: nobody uses the context any more (A4).
        unsafe { sys!(libc::SYS_munmap, self.handle(), memory_bytes(self.capacity)) };
    }
}

fn memory_bytes(capacity: u32) -> usize {
    HEADER_BYTES + capacity as usize * size_of::<Slot>()
}

/// A read of nothing.
fn stand_in(eventfd: Option<u32>) -> Block {
    // SAFETY: an iocb is of integers.
    let mut block: Block = unsafe { std::mem::zeroed() };
    block.aio_lio_opcode = PREAD;
    block.aio_fildes = NOTHING.load(Relaxed) as u32;
    if let Some(fd) = eventfd {
        block.aio_flags = HAS_EVENTFD;
        block.aio_resfd = fd;
    }
    block
}

/// Makes a stand-in one that the kernel takes, if it did not for `errno`.
#[cold]
fn mend(block: &mut Block, errno: i32) {
    match errno {
        // There is memory in a moment (A2: there is room).
        libc::EAGAIN | libc::ENOMEM | libc::EINTR => {
            std::thread::sleep(std::time::Duration::from_micros(100));
        }
        // The program has closed its eventfd, or has another file by that number.
        _ if block.aio_flags & HAS_EVENTFD != 0 => block.aio_flags = 0,
        // Or closed ours, past all hooks.
        _ => {
            NOTHING.store(-1, Relaxed);
            block.aio_fildes = nothing().unwrap_or(-1) as u32;
        }
    }
}

/// The descriptor of an empty file in memory, with a number of the library's. Who finds none at the same
/// time as another makes one more.
fn nothing() -> Option<i32> {
    let fd = NOTHING.load(Relaxed);
    if fd >= 0 {
        return Some(fd);
    }
    // SAFETY: the name is NUL-terminated; no other memory is involved.
    let copy = unsafe {
        let fd = sys!(libc::SYS_memfd_create, c"millpond".as_ptr(), libc::MFD_CLOEXEC);
        let first = config::get().internal_fd_min;
        let copy = sys!(libc::SYS_fcntl, fd, libc::F_DUPFD_CLOEXEC, first);
        sys!(libc::SYS_close, fd);
        copy as i32
    };
    if copy < 0 {
        return None;
    }
    if !table::set(copy, Known::Internal) {
        // SAFETY: the duplicate made above, which nobody has seen.
        unsafe { sys!(libc::SYS_close, copy) };
        return None;
    }
    NOTHING.store(copy, Relaxed);
    Some(copy)
}

/// The end of a request that is still to come: to be called once.
pub struct Ending {
    context: InUse,
    slot: u32,
    /// Counted in [`WRITES`].
    writes: bool,
}

impl Ending {
    fn counted(mut self) -> Self {
        WRITES.fetch_add(1, Relaxed);
        self.writes = true;
        self
    }

    /// Notes the result; returns the stand-in, which the caller is to submit.
    fn fill(&self, result: isize) -> StandIn {
        let slot = self.context.slot(self.slot);
        // SAFETY: A1: the request is at its end, and its stand-in not submitted.
        unsafe {
            (*slot).result = result as i64;
            StandIn(&raw mut (*slot).stand_in)
        }
    }

    /// The request has ended with `result`: bytes, or a negative errno. In a section.
    pub fn end(self, result: isize) {
        let stand_in = self.fill(result);
        let mut ended = self.context.ended.lock();
        ended.push(stand_in);
        let is_first = ended.len() == 1;
        drop(ended);
        let (context, writes) = (self.context, self.writes);
        if is_first {
            // A5.
            File::at_end(Box::new(move || {
                let ended = std::mem::take(&mut *context.ended.lock());
                context.submit_stand_ins(&ended);
            }));
        }
        // Release: pairs with `finish_writes`.
        if writes && WRITES.fetch_sub(1, Release) == 1 {
            lock::wake(&WRITES);
        }
    }
}
