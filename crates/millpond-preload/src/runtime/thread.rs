//! The library's record of each thread, which its owner writes and all threads read.
//!
//! A [`Record`] is claimed from a pool on a thread's first use of the library. It returns to the pool when the thread
//! ends. A single writer needs no read-modify-write instruction: atomic loads and stores suffice. The fields are:
//!
//! - the thread's read-side sections, as of RCU: the end of a description waits for them (`runtime::reading`);
//! - its system calls in flight on files that the library may serve later (`runtime::in_flight`);
//! - the nesting depth of its work inside the library (`runtime::section`);
//! - the address of its counters (`runtime::count_words`).

use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::os::fd::RawFd;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, compiler_fence, fence,
};

use crate::runtime::cancel::cancel_request::{self, CancelRequest, Mark};
use crate::runtime::count_blocks::{self, CountBlock};
use crate::runtime::count_words::{PASSED_BYTES, REASONS_MAX, SERVED_BYTES, WORDS};
use crate::runtime::in_flight::{InFlight, SavedCall, after_claim};
use crate::runtime::reading::{Readers, Sections};
use crate::runtime::stack;
use crate::runtime::sys::sys;

/// Per-thread state; see the module header. Padded so that two threads never share a line.
#[repr(align(128))]
pub struct Record {
    sections: Sections,
    in_flight: InFlight,
    inside: AtomicU32,
    /// The mask to restore, if a signal came while the thread was inside; see `handlers`.
    is_mask_noted: AtomicBool,
    mask: AtomicU64,
    claimed: AtomicBool,
    request: CancelRequest,
    /// Set when the record is made.
    block: AtomicPtr<CountBlock>,
    /// The block may have counts. Never unset.
    is_counting: AtomicBool,
    /// The end of the thread's stack for sections; zero: not made yet. See `stack`.
    stack: AtomicUsize,
    /// The start of the thread's stack for handlers, and its size; zero: it has none.
    handler_stack: [AtomicUsize; 2],
    /// The thread's state while the child of its vfork runs.
    vfork: AtomicPtr<c_void>,
    /// The innermost write in progress on the thread's stack; see `page_cache::mapped_io`.
    writes: AtomicPtr<c_void>,
    /// Whether the thread has SIGBUS and SIGSEGV open: [`FAULTS_UNKNOWN`] and the next two.
    faults: AtomicU32,
    next: AtomicPtr<Record>,
}

const FAULTS_UNKNOWN: u32 = 0;
const FAULTS_OPEN: u32 = 1;
const FAULTS_BLOCKED: u32 = 2;

/// All records ever made, newest first. Records are never freed.
static RECORDS: AtomicPtr<Record> = AtomicPtr::new(std::ptr::null_mut());
/// Readers must issue a full fence themselves.
static STRONG: AtomicBool = AtomicBool::new(false);
static KEY: AtomicU32 = AtomicU32::new(u32::MAX);
/// Every hook goes straight to the kernel: until the library is loaded, as allocators and sanitizers call hooks
/// while they are set up; and after [`disable_hooks`].
static AWAY: AtomicBool = AtomicBool::new(true);
/// In a record's `inside`, beside the depth: the thread runs the child of its vfork.
const IN_VFORK: u32 = 1 << 16;

/// Whether every hook goes straight to the kernel.
#[inline]
pub fn is_away() -> bool {
    // Relaxed: the thread that sets it waits for hooks that found the old value.
    AWAY.load(Relaxed)
}

/// Whether some thread is in a write.
pub fn is_any_writing() -> bool {
    let mut is_any = false;
    // Acquire: pairs with the Release in `set_writes`.
    for_each(|record| is_any |= !record.writes.load(Acquire).is_null());
    is_any
}

/// The library is loaded: hooks do their work.
pub fn begin_work() {
    AWAY.store(false, Relaxed);
}

/// From here on every hook goes straight to the kernel, in children of fork too.
pub fn disable_hooks() {
    AWAY.store(true, SeqCst);
}

impl Record {
    /// Enters a reading section. Paired with [`Record::exit`].
    #[inline]
    pub fn enter(&self) {
        self.sections.enter(STRONG.load(Relaxed));
    }

    /// Whether the thread is in a reading section: a signal handler may have interrupted one.
    pub fn is_reading(&self) -> bool {
        self.sections.is_inside()
    }

    /// Leaves a reading section.
    #[inline]
    pub fn exit(&self) {
        self.sections.exit();
    }

    /// Names `fd` as the number of a call in flight. Paired with [`Record::end_call`].
    #[inline(always)]
    pub fn begin_call(&self, fd: RawFd) -> SavedCall {
        self.in_flight.begin(fd, STRONG.load(Relaxed))
    }

    #[inline(always)]
    pub fn end_call(&self, before: SavedCall) {
        self.in_flight.end(before);
    }

    /// Whether the thread names one of `fds`: then it is in a handler that has interrupted the call.
    pub fn is_calling(&self, fds: &[RawFd]) -> bool {
        self.in_flight.names(fds)
    }

    /// Whether the engine knows this thread, and no cancellation of it was requested. A thread's first
    /// hit makes the engine set up thread-local state of its own, under a lock: that must happen in
    /// a section.
    #[inline]
    pub fn is_warm(&self) -> bool {
        self.request.is_warm()
    }

    /// Whether cancellation of the thread was requested, and whether it has hits.
    pub fn request(&self) -> &CancelRequest {
        &self.request
    }

    /// Whether a hook goes directly to the kernel: the thread does the library's own work, or runs the child of
    /// a vfork, or the library [is away](is_away).
    #[inline]
    pub fn is_inside(&self) -> bool {
        self.inside.load(Relaxed) != 0 || is_away()
    }

    /// Whether the caller is the program, and its calls are the kernel's: the library is away, or the thread runs the
    /// child of a vfork.
    pub fn is_left_alone(&self) -> bool {
        self.is_inside() && self.inside_depth() == 0
    }

    /// How deep the thread is in the library's own work.
    pub fn inside_depth(&self) -> u32 {
        self.inside.load(Relaxed) & (IN_VFORK - 1)
    }

    /// The thread is about to run the child of its vfork, until [`Record::end_vfork`].
    pub fn begin_vfork(&self) {
        self.inside.store(self.inside.load(Relaxed) | IN_VFORK, Relaxed);
    }

    pub fn end_vfork(&self) {
        self.inside.store(self.inside.load(Relaxed) & !IN_VFORK, Relaxed);
    }

    /// The value of the last [`Record::keep_over_vfork`].
    pub fn kept_over_vfork(&self) -> *mut c_void {
        self.vfork.load(Relaxed)
    }

    pub fn keep_over_vfork(&self, kept: *mut c_void) {
        self.vfork.store(kept, Relaxed);
    }

    /// The program has set the thread's stack for handlers.
    pub fn set_handler_stack(&self, start: usize, bytes: usize) {
        self.handler_stack[0].store(start, Relaxed);
        self.handler_stack[1].store(bytes, Relaxed);
    }

    /// Whether the thread runs on its stack for handlers.
    pub fn is_on_handler_stack(&self) -> bool {
        let [start, bytes] = self.handler_stack.each_ref().map(|word| word.load(Relaxed));
        let here = 0_u8;
        (&raw const here).addr().wrapping_sub(start) < bytes
    }

    /// The end of the thread's stack for sections; `None`: there is no memory for it.
    pub fn stack(&self) -> Option<usize> {
        match self.stack.load(Relaxed) {
            0 => stack::make().inspect(|end| self.stack.store(*end, Relaxed)),
            end => Some(end),
        }
    }

    pub fn enter_inside(&self) {
        self.inside.store(self.inside.load(Relaxed) + 1, Relaxed);
        compiler_fence(SeqCst);
    }

    pub fn exit_inside(&self) {
        compiler_fence(SeqCst);
        self.inside.store(self.inside.load(Relaxed) - 1, Relaxed);
    }

    /// Called in a handler, which does not return before all signals are blocked.
    pub fn note_mask(&self, mask: u64) {
        self.mask.store(mask, Relaxed);
        self.is_mask_noted.store(true, Relaxed);
    }

    /// Called outside: the mask to set, if there is one.
    #[inline]
    pub fn take_mask(&self) -> Option<u64> {
        if !self.is_mask_noted.load(Relaxed) {
            return None;
        }
        // No signal interrupts this: all are blocked.
        self.is_mask_noted.store(false, Relaxed);
        Some(self.mask.load(Relaxed))
    }

    /// The innermost write in progress on the thread's stack, or null.
    pub fn writes(&self) -> *const c_void {
        self.writes.load(Relaxed)
    }

    pub fn set_writes(&self, writes: *const c_void) {
        // Release: pairs with the Acquire in `is_any_writing`: the thread's changes of counters come before.
        self.writes.store(writes.cast_mut(), Release);
        compiler_fence(SeqCst);
    }

    /// Whether the thread is in a write: then it runs a signal handler that has interrupted it.
    pub fn has_writes(&self) -> bool {
        !self.writes().is_null()
    }

    /// Whether the thread may copy from a mapping: its faults are handled, and it need not first check for a request
    /// to cancel it.
    #[inline(always)]
    pub fn is_ready_to_copy(&self) -> bool {
        self.is_warm() && self.faults.load(Relaxed) == FAULTS_OPEN
    }

    /// Whether the thread blocks SIGBUS or SIGSEGV: a fault of it would end the process. Asks the kernel once.
    pub fn is_fault_blocked(&self) -> bool {
        if self.faults.load(Relaxed) == FAULTS_UNKNOWN {
            let faults = 1 << (libc::SIGBUS - 1) | 1 << (libc::SIGSEGV - 1);
            let mut mask = 0_u64;
            // SAFETY: the kernel writes the eight bytes of `mask`.
            unsafe { sys!(libc::SYS_rt_sigprocmask, libc::SIG_BLOCK, 0, &raw mut mask, 8) };
            let is_blocked = mask & faults != 0;
            let known = if is_blocked { FAULTS_BLOCKED } else { FAULTS_OPEN };
            self.faults.store(known, Relaxed);
        }
        self.faults.load(Relaxed) == FAULTS_BLOCKED
    }

    /// The thread's mask may have changed.
    pub fn forget_fault_mask(&self) {
        self.faults.store(FAULTS_UNKNOWN, Relaxed);
    }

    #[inline]
    fn word(&self, word: usize) -> &'static AtomicU64 {
        // SAFETY: set when the record was made, to a block that is never unmapped.
        unsafe { &*self.block.load(Relaxed) }.word(word)
    }

    /// Whether its block may have counts. A read of eight blocks without counts would fault in a page.
    fn has_counts(&self) -> bool {
        self.is_counting.load(Relaxed)
    }

    /// Adds to the bytes that this thread was served. A handler that interrupts between the load
    /// and the store loses its own addition: the count is only reported.
    #[inline]
    pub fn count_served(&self, bytes: u64) {
        let count = self.word(SERVED_BYTES);
        count.store(count.load(Relaxed) + bytes, Relaxed);
    }

    /// Adds to the bytes that the kernel moved for this thread, for a reason; accuracy as for `count_served`.
    #[inline]
    pub fn count_passed(&self, reason: usize, bytes: u64) {
        let count = self.word(PASSED_BYTES + reason.min(REASONS_MAX - 1));
        // Another thread may have counted bytes that this one has taken back.
        count.store(count.load(Relaxed).wrapping_add(bytes), Relaxed);
    }

    /// The thread has ended: another may claim the record.
    fn reset(&self) {
        // It was cancelled in a call.
        self.in_flight.reset();
        self.request.reset();
        self.inside.store(0, Relaxed);
        self.set_writes(std::ptr::null());
        self.forget_fault_mask();
        self.is_mask_noted.store(false, Relaxed);
        self.set_handler_stack(0, 0);
        // A thread that ended in a handler that had interrupted a hit has not left the hit.
        while self.is_reading() {
            self.exit();
        }
        // Release: pairs with the Acquire in `claim`.
        self.claimed.store(false, Release);
    }

    /// Adds to a word of the block, around which it may wrap; no addition is lost.
    pub fn count(&self, word: usize, count: u64) {
        self.word(word).fetch_add(count, Relaxed);
    }
}

#[cfg(target_arch = "x86_64")]
mod local {
    //! One thread-local word, reached in two instructions. The initial-exec model is allowed
    //! because the library is loaded with the program; std offers only the model that calls
    //! `__tls_get_addr`.
    use super::Record;

    std::arch::global_asm!(
        ".pushsection .tbss,\"awT\",@nobits",
        ".p2align 3",
        ".hidden millpond_preload_record",
        ".globl millpond_preload_record",
        ".type millpond_preload_record, @object",
        ".size millpond_preload_record, 8",
        "millpond_preload_record:",
        ".zero 8",
        ".popsection",
    );

    #[inline]
    pub fn get() -> *const Record {
        let record;
        // SAFETY: reads this thread's own word of the variable defined above.
        unsafe {
            std::arch::asm!(
                "mov {0}, qword ptr [rip + millpond_preload_record@GOTTPOFF]",
                "mov {0}, qword ptr fs:[{0}]",
                out(reg) record,
                options(nostack, preserves_flags, readonly),
            );
        }
        record
    }

    pub fn set(record: *const Record) {
        // SAFETY: writes this thread's own word of the variable defined above.
        unsafe {
            std::arch::asm!(
                "mov {0}, qword ptr [rip + millpond_preload_record@GOTTPOFF]",
                "mov qword ptr fs:[{0}], {1}",
                out(reg) _,
                in(reg) record,
                options(nostack, preserves_flags),
            );
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod local {
    //! One thread-local word.
    use super::Record;
    use std::cell::Cell;

    thread_local! {
        static RECORD: Cell<*const Record> = const { Cell::new(std::ptr::null()) };
    }

    #[inline]
    pub fn get() -> *const Record {
        RECORD.with(Cell::get)
    }

    pub fn set(record: *const Record) {
        RECORD.with(|word| word.set(record));
    }
}

/// This thread's record, if it has one.
#[inline]
pub fn try_record() -> Option<&'static Record> {
    // SAFETY: the word is null or points to a record, and records are never freed.
    unsafe { local::get().as_ref() }
}

/// This thread's record; claims one on first use.
#[inline]
pub fn record() -> &'static Record {
    try_record().unwrap_or_else(claim)
}

#[cold]
fn claim() -> &'static Record {
    let mut next = RECORDS.load(Acquire);
    // SAFETY: list entries are records, which are never freed.
    while let Some(record) = unsafe { next.as_ref() } {
        if !record.claimed.load(Relaxed)
            // Acquire: pairs with the Release in `reset`, so the last owner's stores are done.
            && record.claimed.compare_exchange(false, true, Acquire, Relaxed).is_ok()
        {
            return adopt(record);
        }
        next = record.next.load(Relaxed);
    }
    for record in make_chunk() {
        loop {
            let head = RECORDS.load(Relaxed);
            record.next.store(head, Relaxed);
            // Release: publishes the record's fields to threads that walk the list (Acquire in
            // `for_each`). SeqCst on both sides is not needed: a reader that a walk misses claimed
            // its record after the walk began, hence after the slot was cleared.
            let new = std::ptr::from_ref(record).cast_mut();
            if RECORDS.compare_exchange(head, new, Release, Relaxed).is_ok() {
                break;
            }
        }
    }
    claim()
}

const CHUNK_BYTES: usize = 4096;

const RECORDS_IN_CHUNK: usize = CHUNK_BYTES / size_of::<Record>();

/// The first records, which need no system call: most processes have few threads, and are short.
static FIRST: [Record; RECORDS_IN_CHUNK] =
    // SAFETY: as in `make_chunk`.
    unsafe { MaybeUninit::zeroed().assume_init() };
static IS_FIRST_USED: AtomicBool = AtomicBool::new(false);

/// Fresh records. Mapped by a direct system call: a signal handler may need one.
fn make_chunk() -> &'static [Record] {
    let records = if !IS_FIRST_USED.swap(true, Relaxed) {
        &FIRST[..]
    } else {
        let chunk = count_blocks::map(CHUNK_BYTES).cast();
        // SAFETY: a new private mapping, never unmapped. Zero bytes are a valid, unclaimed `Record`, once it has
        // its block: atomics of zero and null pointers.
        unsafe { std::slice::from_raw_parts(chunk, RECORDS_IN_CHUNK) }
    };
    let blocks = count_blocks::take(RECORDS_IN_CHUNK);
    for (index, record) in records.iter().enumerate() {
        record.block.store(blocks.wrapping_add(index), Relaxed);
    }
    records
}

fn adopt(record: &'static Record) -> &'static Record {
    // SAFETY: no precondition.
    record.request.claim(unsafe { libc::pthread_self() } as usize, &UNFOUND);
    // Relaxed: a thread that sums up the counts of an ended thread has waited for its end.
    record.is_counting.store(true, Relaxed);
    local::set(record);
    let key = KEY.load(Relaxed);
    if key != u32::MAX {
        // SAFETY: the key was created in `initialise`; the value is only handed back to `release`.
        unsafe { libc::pthread_setspecific(key, std::ptr::from_ref(record).cast()) };
    }
    record
}

unsafe extern "C" fn release(record: *mut libc::c_void) {
    local::set(std::ptr::null());
    // SAFETY: the value of the key is a record, which is never freed.
    let record = unsafe { &*record.cast::<Record>() };
    record.reset();
}

static UNFOUND: Mark = Mark::new(false);

/// Disables the hits of a thread that libc has been asked to cancel.
pub fn request_cancel(thread: libc::pthread_t) {
    // Libc has noted the request before. Pairs with the fence in `CancelRequest::act`.
    fence(SeqCst);
    let ask = || {
        let mut is_found = false;
        for_each(|record| {
            if record.request.is_of(thread as usize) {
                is_found = true;
                record.request.request_cancel();
            }
        });
        is_found
    };
    cancel_request::ask_until_found(ask, &UNFOUND);
}

fn for_each(mut visit: impl FnMut(&'static Record)) {
    let mut next = RECORDS.load(Acquire);
    // SAFETY: list entries are records, which are never freed.
    while let Some(record) = unsafe { next.as_ref() } {
        visit(record);
        next = record.next.load(Relaxed);
    }
}

/// Sets the records up; once, when the library is loaded.
pub fn initialise() {
    STRONG.store(!register_membarrier(), Relaxed);
    let mut key = 0;
    // SAFETY: `key` is ours to write, and `release` accepts what `adopt` stores.
    if unsafe { libc::pthread_key_create(&mut key, Some(release)) } == 0 {
        KEY.store(key, Relaxed);
    }
}

/// In a forked child: the records of all other threads are free.
pub fn after_fork() {
    let own = local::get();
    for_each(|record| {
        if !std::ptr::eq(record, own) {
            record.reset();
        }
        record.request.cool_down();
        if record.has_counts() {
            (0..WORDS).for_each(|word| record.word(word).store(0, Relaxed));
        }
    });
    // The registration is per memory, which the child has its own of.
    register_membarrier();
}

/// Whether the kernel lets the process fence all its threads.
fn register_membarrier() -> bool {
    const REGISTER_PRIVATE_EXPEDITED: usize = 1 << 4;
    // SAFETY: registering for membarrier has no memory effects.
    unsafe { sys!(libc::SYS_membarrier, REGISTER_PRIVATE_EXPEDITED, 0) == 0 }
}

/// The counts of all threads, including ended ones.
pub fn sums() -> [u64; WORDS] {
    let mut sums = [0_u64; WORDS];
    for_each(|record| {
        if !record.has_counts() {
            return;
        }
        for (word, sum) in sums.iter_mut().enumerate() {
            *sum = sum.wrapping_add(record.word(word).load(Relaxed));
        }
    });
    sums
}

/// After a claim: waits until no thread names one of `fds`, while `goes_on` returns true. Returns whether
/// none does.
pub fn await_calls(fds: &[RawFd], mut goes_on: impl FnMut() -> bool) -> bool {
    let mut is_fenced = false;
    after_claim(|| is_fenced = membarrier());
    if !is_fenced {
        return false;
    }
    loop {
        let mut is_named = false;
        for_each(|record| is_named |= record.is_calling(fds));
        if !is_named || !goes_on() {
            return !is_named;
        }
    }
}

/// A full fence on all threads, where they do not fence themselves. Whether it was one: a filter of
/// system calls that came later may refuse it.
fn membarrier() -> bool {
    const PRIVATE_EXPEDITED: usize = 1 << 3;
    // SAFETY: a fence on all threads; no memory effects.
    STRONG.load(Relaxed) || unsafe { sys!(libc::SYS_membarrier, PRIVATE_EXPEDITED, 0) } == 0
}

/// The reading sections that were under way at some moment.
pub struct Snapshot(Readers<&'static Sections>);

impl Snapshot {
    /// Notes the threads that are reading now. An object that was unpublished before this call is unreachable for all
    /// threads that are not in the snapshot.
    pub fn take() -> Self {
        let fence = || {
            membarrier();
        };
        Self(Readers::take(fence, |note| for_each(|record| note(&record.sections))))
    }

    /// Whether all of them have been seen outside since.
    pub fn is_over(&mut self) -> bool {
        self.0.is_over()
    }
}
