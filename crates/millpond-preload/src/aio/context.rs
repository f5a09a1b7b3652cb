//! A context of Linux AIO: the kernel's context and the library's slots. Rules `aio.A1` to `A6`: see the
//! folder.
//!
//! ```text
//!   begin -> slot -> Ending::end -> stand-in, in the kernel's queue -> take -> slot free
//! ```
//!
//! Locks: one over the list of stand-ins of ended requests, and one over the contexts, both leaves.

use std::collections::BTreeMap;
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicI32;
use std::sync::atomic::Ordering::Relaxed;

use millpond::File;
use millpond::internals::KernelRead;
use smallvec::SmallVec;

use crate::aio::iocb::{Event, HAS_EVENTFD, Iocb, PREAD};
use crate::aio::optimistic_read::OptimisticRead;
use crate::aio::slots::Slots;
use crate::files::process_locks;
use crate::page_cache;
use crate::runtime::lock::Lock;
use crate::runtime::sys::{self, PRIVATE, sys};
use crate::runtime::{config, section, thread};

const HEADER_BYTES: usize = 4096;

/// A request for a served file.
#[repr(C)]
struct Slot {
    stand_in: Iocb,
    /// The address of the program's block, and the completion that the program asked for.
    block: u64,
    data: u64,
    result: i64,
    /// Whether `optimistic` is initialised.
    is_optimistic: bool,
    optimistic: MaybeUninit<OptimisticRead>,
}

impl Slot {
    fn take_optimistic(&mut self) -> Option<OptimisticRead> {
        // SAFETY: `optimistic` is initialised, and not taken again.
        std::mem::take(&mut self.is_optimistic)
            .then(|| unsafe { self.optimistic.assume_init_read() })
    }

    /// Changes the stand-in so that the kernel accepts it, after it was refused with `errno`.
    #[cold]
    fn mend(&mut self, errno: i32) {
        let Some(optimistic) = self.take_optimistic() else {
            return mend(&mut self.stand_in, errno);
        };
        // The request waits, perhaps for reads that this thread has not submitted yet.
        File::start_now();
        self.result = optimistic.carry_out() as i64;
        let block = &self.stand_in;
        self.stand_in = stand_in((block.aio_flags & HAS_EVENTFD != 0).then_some(block.aio_resfd));
    }
}

pub struct Context {
    /// The kernel's handle.
    pub kernel: usize,
    /// The library's handle: a zero page, followed by the slots.
    memory: NonNull<u8>,
    slots: Slots,
    /// Stand-ins to be submitted (aio.A5).
    ended: Lock<Vec<StandIn>>,
}

#[repr(transparent)]
pub struct StandIn(*mut Iocb);

// SAFETY: the block is in a slot that the holder owns (aio.A1).
unsafe impl Send for StandIn {}

// SAFETY: the memory is shared by aio.A1.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// The descriptor of the empty file that stand-ins read; -1 before the first context.
static NOTHING: AtomicI32 = AtomicI32::new(-1);

struct Contexts {
    by_handle: BTreeMap<usize, ContextInUse>,
    removed: Vec<ContextInUse>,
}

impl Contexts {
    const fn none() -> Self {
        Self { by_handle: BTreeMap::new(), removed: Vec::new() }
    }
}

static CONTEXTS: Lock<Contexts> = Lock::new(Contexts::none());

/// A reference to a context, which lives as long as the reference.
pub type ContextInUse = Arc<Context>;

/// The context of a handle; `None` if the context is the kernel's.
pub fn find(handle: usize) -> Option<ContextInUse> {
    if handle == 0 || page_cache::is_on() || thread::record().inside_depth() > 0 {
        return None;
    }
    section::open(|_| CONTEXTS.lock().by_handle.get(&handle).cloned())
}

/// Registers a context and returns its handle. In a section.
pub fn place(context: Context) -> usize {
    free_removed();
    let handle = context.handle();
    CONTEXTS.lock().by_handle.insert(handle, Arc::new(context));
    handle
}

/// Removes the handle of its context; `None` if it was not there. In a section.
pub fn remove(handle: usize) -> Option<ContextInUse> {
    let mut contexts = CONTEXTS.lock();
    let context = contexts.by_handle.remove(&handle)?;
    contexts.removed.push(Arc::clone(&context));
    Some(context)
}

/// Frees the contexts that were removed and have no users (aio.A4). In a section.
pub fn free_removed() {
    let mut contexts = CONTEXTS.lock();
    let removed = std::mem::take(&mut contexts.removed);
    let (unused, used) = removed.into_iter().partition(|context| Arc::strong_count(context) == 1);
    contexts.removed = used;
    drop(contexts);
    // Without the lock, as the drop may take others.
    drop::<Vec<_>>(unused);
}

/// The library's own descriptor of this module, for a forked child to close.
pub fn internal_fd() -> Option<i32> {
    Some(NOTHING.load(Relaxed)).filter(|fd| *fd >= 0)
}

impl Context {
    pub fn new(kernel: usize, capacity: u32) -> Option<Self> {
        let memory = sys::map(memory_bytes(capacity), PRIVATE | libc::MAP_NORESERVE, -1)?;
        Some(Self {
            kernel,
            memory: NonNull::new(memory)?,
            slots: Slots::new(capacity),
            ended: Lock::new(Vec::new()),
        })
    }

    pub fn handle(&self) -> usize {
        self.memory.as_ptr().addr()
    }

    fn slot(&self, index: u32) -> *mut Slot {
        let first = self.memory.as_ptr().wrapping_add(HEADER_BYTES).cast::<Slot>();
        first.wrapping_add(index as usize)
    }

    /// The slot of a stand-in.
    fn slot_of(&self, block: u64) -> Option<u32> {
        let from_first = (block as usize).checked_sub(self.slot(0).addr())?;
        let index = from_first / size_of::<Slot>();
        (index < self.slots.capacity() as usize).then_some(index as u32)
    }

    /// Submits blocks to the kernel unchanged, as many as there is room for (aio.A2). Returns the
    /// kernel's result.
    pub unsafe fn pass_on(&self, count: isize, blocks: *const *mut Iocb) -> isize {
        let wanted = count.clamp(0, i32::MAX as isize) as u64;
        let room = self.slots.admit_others(wanted);
        if room == 0 && wanted > 0 {
            return -(libc::EAGAIN as isize);
        }
        let count = if wanted == 0 { count } else { room as isize };
        // SAFETY: the caller's duty; the kernel checks the addresses.
        let submitted = unsafe { sys!(libc::SYS_io_submit, self.kernel, count, blocks) };
        let taken = submitted.max(0) as u64;
        self.slots.free(&[], room - taken);
        submitted
    }

    /// A slot for a request. An errno if there is no room for another request (aio.A2), or the context
    /// is being destroyed (aio.A4).
    pub fn begin(&self, at: *mut Iocb, block: &Iocb) -> Result<u32, i32> {
        let index = self.slots.begin()?;
        let has_eventfd = block.aio_flags & HAS_EVENTFD != 0;
        // SAFETY: the caller alone owns this slot of this context (aio.A1).
        unsafe {
            let stand_in = stand_in(has_eventfd.then_some(block.aio_resfd));
            let block_at = at.expose_provenance() as u64;
            let slot = self.slot(index);
            (&raw mut (*slot).stand_in).write(stand_in);
            (&raw mut (*slot).block).write(block_at);
            (&raw mut (*slot).data).write(block.aio_data);
        }
        Ok(index)
    }

    /// The kernel's error for the eventfd of a request. The probe is a request that the kernel refuses anyway.
    pub fn check_eventfd(&self, fd: u32) -> Result<(), i32> {
        let mut block = stand_in(Some(fd));
        // An undefined flag.
        block.aio_rw_flags = 1 << 30;
        let blocks = [&raw mut block];
        // SAFETY: a valid block without a memory address.
        let refused = unsafe { sys!(libc::SYS_io_submit, self.kernel, 1, blocks.as_ptr()) };
        if refused == -(libc::EOPNOTSUPP as isize) { Ok(()) } else { Err(-refused as i32) }
    }

    /// Submits the stand-ins of requests that have ended (aio.A1).
    pub fn submit_stand_ins(&self, ended: &[StandIn]) {
        let mut rest = ended;
        while let Some(first) = rest.first() {
            let blocks = rest.as_ptr().cast::<*mut Iocb>();
            // SAFETY: valid blocks without memory addresses.
            let submitted = unsafe { sys!(libc::SYS_io_submit, self.kernel, rest.len(), blocks) };
            match usize::try_from(submitted) {
                Ok(taken) => rest = &rest[taken..],
                // SAFETY: the kernel did not take the stand-in. So this thread still owns it and its slot (aio.A1),
                // of which the stand-in is the first field.
                Err(_) => unsafe { (*first.0.cast::<Slot>()).mend(-submitted as i32) },
            }
        }
        self.slots.end(ended.len() as u32);
    }

    /// Refuses new requests, and waits for those that have begun (aio.A4).
    pub fn close(&self) {
        self.slots.close();
    }

    /// Replaces the completions of stand-ins by those of their requests for served files.
    pub fn take(&self, events: &mut [Event]) {
        let mut served = SmallVec::<[u32; 32]>::new();
        for event in &mut *events {
            let Some(index) = self.slot_of(event.block) else { continue };
            // SAFETY: aio.A1: this thread took the completion of the stand-in. The submitter filled the
            // slot before it submitted the stand-in, and the system calls of both order the accesses.
            let (block, data, result) = unsafe {
                let slot = self.slot(index);
                let optimistic = (*slot).take_optimistic();
                let result =
                    optimistic.map_or((*slot).result, |optimistic| optimistic.end(event.result));
                ((*slot).block, (*slot).data, result)
            };
            *event = Event { data, block, result, more: 0 };
            served.push(index);
        }
        self.slots.free(&served, (events.len() - served.len()) as u64);
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        for index in 0..self.slots.used() {
            // SAFETY: the context has no users, and the kernel has ended all its requests
            // (aio.A4). In a section.
            drop(unsafe { (*self.slot(index)).take_optimistic() });
        }
        // SAFETY: the context has no users (aio.A4).
        unsafe { sys!(libc::SYS_munmap, self.handle(), memory_bytes(self.slots.capacity())) };
    }
}

fn memory_bytes(capacity: u32) -> usize {
    HEADER_BYTES + capacity as usize * size_of::<Slot>()
}

/// A read of an empty file.
fn stand_in(eventfd: Option<u32>) -> Iocb {
    // SAFETY: an iocb consists of integers.
    let mut block: Iocb = unsafe { std::mem::zeroed() };
    block.aio_lio_opcode = PREAD;
    block.aio_fildes = NOTHING.load(Relaxed) as u32;
    if let Some(fd) = eventfd {
        block.aio_flags = HAS_EVENTFD;
        block.aio_resfd = fd;
    }
    block
}

/// Changes a stand-in so that the kernel accepts it, after it was refused with `errno`.
#[cold]
fn mend(block: &mut Iocb, errno: i32) {
    match errno {
        // The shortage of memory is transient (the context has room: aio.A2).
        libc::EAGAIN | libc::ENOMEM | libc::EINTR => {
            std::thread::sleep(std::time::Duration::from_micros(100));
        }
        // The program has closed the eventfd, or reused its number for another file.
        _ if block.aio_flags & HAS_EVENTFD != 0 => block.aio_flags = 0,
        // Or the program has closed the library's descriptor with a direct system call.
        _ => {
            NOTHING.store(-1, Relaxed);
            block.aio_fildes = nothing().unwrap_or(-1) as u32;
        }
    }
}

/// The descriptor of an empty file in memory, with a number of the library's. If two threads find
/// none at the same time, each makes one.
pub fn nothing() -> Option<i32> {
    let fd = NOTHING.load(Relaxed);
    if fd >= 0 {
        return Some(fd);
    }
    // SAFETY: the name is NUL-terminated; no other memory is involved.
    let made = unsafe { sys!(libc::SYS_memfd_create, c"millpond".as_ptr(), libc::MFD_CLOEXEC) };
    let fd = process_locks::adopt(config::renumber(made)?)?;
    NOTHING.store(fd, Relaxed);
    Some(fd)
}

/// The pending end of a request; called once.
pub struct Ending {
    context: ContextInUse,
    slot: u32,
}

impl Ending {
    /// For the request that owns `slot` since [`Context::begin`].
    pub fn new(context: &ContextInUse, slot: u32) -> Self {
        Self { context: context.clone(), slot }
    }

    /// Stores the result; returns the stand-in, which the caller must submit.
    pub fn fill(&self, result: isize) -> StandIn {
        let slot = self.context.slot(self.slot);
        // SAFETY: aio.A1: the request is ending, and its stand-in is not submitted.
        unsafe {
            (*slot).result = result as i64;
            StandIn(&raw mut (*slot).stand_in)
        }
    }

    /// Prepares a read for the kernel to carry out; returns its stand-in, which the caller must submit.
    pub fn hand_over(&self, optimistic: OptimisticRead, read: &KernelRead) -> StandIn {
        let slot = self.context.slot(self.slot);
        // SAFETY: aio.A1: the request has not ended, and its stand-in is not submitted.
        unsafe {
            let block = &mut (*slot).stand_in;
            block.aio_fildes = read.fd as u32;
            block.aio_buf = read.memory.expose_provenance() as u64;
            block.aio_nbytes = read.len as u64;
            block.aio_offset = optimistic.offset as i64;
            (&raw mut (*slot).optimistic).write(MaybeUninit::new(optimistic));
            (*slot).is_optimistic = true;
            StandIn(&raw mut (*slot).stand_in)
        }
    }

    /// Ends the request with `result`: bytes, or a negative errno. In a section.
    pub fn end(self, result: isize) {
        let stand_in = self.fill(result);
        let mut ended = self.context.ended.lock();
        ended.push(stand_in);
        let is_first = ended.len() == 1;
        drop(ended);
        let context = self.context;
        if is_first {
            // aio.A5.
            File::at_end(Box::new(move || {
                let ended = std::mem::take(&mut *context.ended.lock());
                context.submit_stand_ins(&ended);
            }));
        }
    }
}

/// In a forked child: forgets the parent's descriptor, and its contexts with their reads.
///
/// # Safety
///
/// No other thread exists.
pub unsafe fn after_fork() {
    // SAFETY: the caller's duty.
    unsafe { CONTEXTS.reset(Contexts::none()) };
    NOTHING.store(-1, Relaxed);
}
