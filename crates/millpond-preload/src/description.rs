//! An open file description: what `open` makes, and `dup` shares.
//!
//! ```text
//! FREE -> acquire -> SERVED -> pass -> PASSED      (registry lock)
//!                    SERVED, PASSED -> retire -> .. last unpin -> FREE
//! ```
//!
//! - D1. Descriptions are pooled and type-stable: a late reader may look at one that was closed
//!   and even reused, never at memory that is something else.
//! - D2. `references` counts the table (one for all its slots together) and every pin. A pin is
//!   taken inside a reading section; the table's reference is given up only after every reading
//!   section that may have seen a slot is over. So the count of a description that a reader found
//!   in a slot is never zero, and at zero nobody can find it.
//! - D3. `file` lives from `acquire` to the last unpin, also after `pass`: its descriptor is a
//!   duplicate of the program's, and closing it would drop the process's POSIX locks on the file. After
//!   that unpin, too, it is closed only when that ends none: see `process_locks`.
//! - D4. `hit` is non-null only while SERVED, readable and findable; a reading section that
//!   loaded it may use it to its end (D2, D3).
//! - D5. SERVED -> PASSED happens with the offset locked, after the kernel was told the offset.
//!   Who locks the offset and then finds SERVED has the offset to itself and may use it; an
//!   operation at an explicit offset that was under way meanwhile has overlapped the change, and
//!   may be ordered before it.
//!
//! Close racing with a read on another thread: the read found the slot before it was cleared and
//! works on the file that was open then, or finds it cleared and asks the kernel, which knows the
//! number or not. Neither ever sees the file that is opened under the number next, unless that
//! open came first.

use std::cell::UnsafeCell;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, AtomicU64};
use std::time::{Duration, Instant};

use millpond::File;

use crate::lock::Lock;
use crate::offset::Offset;
use crate::report::Reason;
use crate::thread::record;
use crate::{identity, late, process_locks, table};

const FREE: u32 = 0;
const SERVED: u32 = 1;
const PASSED: u32 = 2;

/// How the program opened the file.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Access {
    pub read: bool,
    pub write: bool,
    pub append: bool,
}

impl Access {
    pub fn of_flags(flags: i32) -> Self {
        let mode = flags & libc::O_ACCMODE;
        Self {
            read: mode == libc::O_RDONLY || mode == libc::O_RDWR,
            write: mode == libc::O_WRONLY || mode == libc::O_RDWR,
            append: flags & libc::O_APPEND != 0,
        }
    }

    fn to_bits(self) -> u32 {
        u32::from(self.read) | u32::from(self.write) << 1 | u32::from(self.append) << 2
    }

    fn of_bits(bits: u32) -> Self {
        Self { read: bits & 1 != 0, write: bits & 2 != 0, append: bits & 4 != 0 }
    }
}

/// Device and inode: which file it is.
pub type FileId = (u64, u64);

/// What only the holder of the registry lock touches.
#[derive(Default)]
pub struct Cold {
    pub id: FileId,
    /// Slots that point here.
    pub slots: u32,
    /// The program has locked it by flock or an open-file-description lock, which must end with
    /// the program's last descriptor, not with ours.
    pub is_locked: bool,
    /// Where the offset was when it was left to the kernel, to see what libc has moved since.
    pub offset_given: Option<u64>,
}

/// See the module header.
#[repr(align(128))]
pub struct Description {
    hit: AtomicPtr<File>,
    pub offset: Offset,
    state: AtomicU32,
    access: AtomicU32,
    reason: AtomicU32,
    kernel_fd: AtomicI32,
    /// Opened in mode back: what is written may wait in the cache; see `late`.
    late: AtomicBool,
    /// How far we moved the offset while the kernel had it; wraps, as it may be backwards.
    moved_in_kernel: AtomicU64,
    references: AtomicU32,
    file: UnsafeCell<Option<Arc<File>>>,
    cold: UnsafeCell<Cold>,
}

// SAFETY: `file` changes only in `acquire` and at the last unpin, when nobody else can reach the
// description (D2); `cold` is touched under the registry lock only. The rest is atomic.
unsafe impl Sync for Description {}

/// Descriptors of ended descriptions that the engine may still hold, and their files.
static LINGERING: Lock<Vec<(RawFd, FileId)>> = Lock::new(Vec::new());
/// Files of descriptors that were found closed, and when. The number is free before the kernel is done
/// with what it stood for, if a thread of the engine closes it: a file system may have much to do then.
/// Its lock may be taken under that of [`LINGERING`].
static LEAVING: Lock<Vec<(Instant, FileId)>> = Lock::new(Vec::new());
/// For so long a file may be in use after its number is free.
const LEAVING_MAX: Duration = Duration::from_millis(100);
static POOL: Lock<Vec<&'static Description>> = Lock::new(Vec::new());

impl Description {
    /// A fresh description of the file `id`, not yet in the table: served where there is a
    /// `file`, passed for `reason` else. The registry is locked.
    pub fn acquire(
        id: FileId,
        access: Access,
        offset: u64,
        internal_fd: RawFd,
        file: Result<File, Reason>,
    ) -> &'static Self {
        let description = POOL.lock().pop().unwrap_or_else(|| Box::leak(Box::new(Self::blank())));
        // SAFETY: taken from the pool, so nobody else can reach it (D2).
        unsafe {
            *description.cold.get() = Cold { id, slots: 1, ..Cold::default() };
            *description.file.get() = None;
        }
        description.moved_in_kernel.store(0, Relaxed);
        description.late.store(false, Relaxed);
        description.kernel_fd.store(internal_fd, Relaxed);
        description.access.store(access.to_bits(), Relaxed);
        description.offset.reset(offset);
        description.references.store(1, Relaxed);
        match file {
            Ok(file) => {
                let file = Arc::new(file);
                let pointer = std::ptr::from_ref(&*file).cast_mut();
                // SAFETY: as above.
                unsafe { *description.file.get() = Some(file) };
                description.state.store(SERVED, Relaxed);
                let hit = if access.read { pointer } else { std::ptr::null_mut() };
                // Release: pairs with the Acquire in `hit`; a late reader of the previous life may
                // look here without the table's Release.
                description.hit.store(hit, Release);
            }
            Err(reason) => {
                description.reason.store(reason as u32, Relaxed);
                description.state.store(PASSED, Relaxed);
            }
        }
        description
    }

    fn blank() -> Self {
        Self {
            hit: AtomicPtr::new(std::ptr::null_mut()),
            offset: Offset::new(),
            state: AtomicU32::new(FREE),
            access: AtomicU32::new(0),
            reason: AtomicU32::new(0),
            kernel_fd: AtomicI32::new(-1),
            late: AtomicBool::new(false),
            moved_in_kernel: AtomicU64::new(0),
            references: AtomicU32::new(0),
            file: UnsafeCell::new(None),
            cold: UnsafeCell::new(Cold::default()),
        }
    }

    /// The file, for a read that may hit. The caller is in a reading section and uses it only
    /// there.
    #[inline]
    pub fn hit(&self) -> Option<&File> {
        // SAFETY: D4.
        unsafe { self.hit.load(Acquire).as_ref() }
    }

    pub fn is_served(&self) -> bool {
        self.state.load(Acquire) == SERVED
    }

    pub fn access(&self) -> Access {
        Access::of_bits(self.access.load(Relaxed))
    }

    /// Why the kernel has it; meaningful once passed.
    pub fn reason(&self) -> Reason {
        Reason::of_bits(self.reason.load(Relaxed))
    }

    /// The engine's duplicate of the program's descriptor, which carries the lease; -1 if the
    /// file was never served. Valid while pinned.
    pub fn kernel_fd(&self) -> RawFd {
        self.kernel_fd.load(Relaxed)
    }

    /// The file, if what is written to it may wait in the cache: also after it was passed, since
    /// what could not be written back then waits still. As for [`Description::file`].
    pub fn late_file(&self) -> Option<&File> {
        if self.late.load(Relaxed) { self.file() } else { None }
    }

    /// The registry is locked, and nobody has found the description yet.
    pub fn set_late(&self) {
        self.late.store(true, Relaxed);
        late::opened();
    }

    pub fn moved_in_kernel(&self) -> u64 {
        self.moved_in_kernel.load(Relaxed)
    }

    pub fn add_moved_in_kernel(&self, bytes: u64) {
        self.moved_in_kernel.fetch_add(bytes, Relaxed);
    }

    /// The fields that the registry lock protects.
    ///
    /// # Safety
    ///
    /// The caller holds the registry lock, and no other reference from here.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn cold(&self) -> &mut Cold {
        // SAFETY: the caller's duty.
        unsafe { &mut *self.cold.get() }
    }

    /// The file. The caller holds a pin, or the registry lock with the description in it.
    pub fn file(&self) -> Option<&File> {
        // SAFETY: `file` does not change while anybody can reach the description.
        unsafe { (*self.file.get()).as_deref() }
    }

    /// [`Description::file`], for who has it longer than his pin.
    pub fn shared_file(&self) -> Option<&Arc<File>> {
        // SAFETY: as in `file`.
        unsafe { (*self.file.get()).as_ref() }
    }

    /// SERVED -> PASSED (D5). The offset is locked; the registry too.
    pub fn set_passed(&self, reason: Reason) {
        self.reason.store(reason as u32, Relaxed);
        self.hit.store(std::ptr::null_mut(), Relaxed);
        // Release: pairs with the Acquire in `is_served`.
        self.state.store(PASSED, Release);
    }

    /// Gives up a reference; the last one returns the description to the pool. In a section.
    pub fn unpin(&self) {
        // AcqRel: all that others did with the description comes before it ends.
        if self.references.fetch_sub(1, AcqRel) == 1 {
            self.end();
        }
    }

    /// Gives up a reference unless it is the last; whether it was given up.
    fn try_unpin(&self) -> bool {
        // AcqRel: as in `unpin`.
        self.references
            .fetch_update(AcqRel, Acquire, |count| (count > 1).then(|| count - 1))
            .is_ok()
    }

    #[cold]
    fn end(&self) {
        // SAFETY: the last reference is gone, so nobody else can reach the description (D2).
        let (id, file) = unsafe { ((*self.cold.get()).id, (*self.file.get()).take()) };
        self.state.store(FREE, Relaxed);
        if self.late.swap(false, Relaxed) {
            late::closed();
        }
        if file.is_some() {
            drop(file);
            // The engine may still use the descriptor, for other descriptions of the file.
            LINGERING.lock().push((self.kernel_fd(), id));
            forget_closed();
        }
        // SAFETY: descriptions are leaked boxes.
        let this: &'static Self = unsafe { &*std::ptr::from_ref(self) };
        POOL.lock().push(this);
    }

    /// Takes the fast way to `hit` away; the slots are cleared already.
    pub fn stop_hits(&self) {
        self.hit.store(std::ptr::null_mut(), Relaxed);
    }
}

/// A description that cannot end while this exists. Dropped in a section.
pub struct Pin {
    description: &'static Description,
}

impl Pin {
    /// The description at `fd`, held.
    pub fn of(fd: RawFd) -> Option<Self> {
        let record = record();
        record.enter();
        let found = table::description(fd);
        if let Some(description) = found {
            // Relaxed: D2 keeps the count above zero here; the slot's Acquire made the
            // description's fields visible.
            description.references.fetch_add(1, Relaxed);
        }
        record.exit();
        found.map(|description| Self { description })
    }

    /// A description of the registry, which is locked.
    pub fn of_registered(description: &'static Description) -> Self {
        // Relaxed: the table's reference keeps the count above zero (D2).
        description.references.fetch_add(1, Relaxed);
        Self { description }
    }
}

impl std::ops::Deref for Pin {
    type Target = Description;
    fn deref(&self) -> &Description {
        self.description
    }
}

impl Pin {
    /// Gives the pin up, unless that ends the description, which may take its time.
    pub fn try_give_up(self) -> Result<(), Self> {
        if self.description.try_unpin() {
            std::mem::forget(self);
            return Ok(());
        }
        Err(self)
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        self.description.unpin();
    }
}

/// Notes which descriptors the engine has closed.
fn forget_closed() {
    // Not used any more, but open: nobody need wait for it, and the number is not free.
    let retired = process_locks::retired();
    LINGERING.lock().retain(|(fd, id)| {
        if retired.contains(fd) {
            return false;
        }
        let is_open = identity::identify(*fd).is_some_and(|found| found.id == *id);
        if !is_open {
            // Its mark in the table went when it was closed: the number may have another by now.
            LEAVING.lock().push((Instant::now(), *id));
        }
        is_open
    });
    LEAVING.lock().retain(|(closed, _)| closed.elapsed() < LEAVING_MAX);
}

/// Whether the kernel may not be done yet with a description of the file that the engine has closed.
pub fn is_leaving(id: FileId) -> bool {
    forget_closed();
    LEAVING.lock().iter().any(|(_, other)| *other == id)
}

/// Whether the engine may still hold a descriptor of an ended description of the file.
pub fn is_lingering(id: FileId) -> bool {
    forget_closed();
    LINGERING.lock().iter().any(|(_, other)| *other == id)
}

/// See [`forget_closed`]; for a forked child to close.
pub fn lingering() -> Vec<RawFd> {
    LINGERING.lock().iter().map(|(fd, _)| *fd).collect()
}

/// In a forked child: the parent's descriptions are left behind, with all they point to.
///
/// # Safety
///
/// No other thread exists.
pub unsafe fn after_fork() {
    // SAFETY: the caller's duty.
    unsafe {
        POOL.reset(Vec::new());
        LINGERING.reset(Vec::new());
        LEAVING.reset(Vec::new());
    }
}
