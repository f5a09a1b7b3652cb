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
//!   in a slot is never zero, and at zero no thread can find it.
//! - D3. `file` lives from `acquire` to the last unpin, also after `pass`: its descriptor is a
//!   duplicate of the program's, and closing it would drop the process's POSIX locks on the file.
//!   After that unpin, too, it is closed only when that ends none: see `process_locks`.
//! - D4. `hit` is non-null only while SERVED, readable and findable; a reading section that loaded it may use it to its end (D2, D3).
//! - D5. SERVED -> PASSED happens with the offset locked, after the kernel's offset was set.
//!   A thread that locks the offset and then finds SERVED has the offset to itself. An operation at
//!   an explicit offset that overlaps the change may be ordered before it.
//! - D6. One that *shares* has no description of the kernel's: its numbers are duplicates of one that
//!   all descriptions of the file have together (`multi_open`). The kernel's offset there is not used.
//! - D7. While it is *bypassed* it is SERVED by the kernel in the engine's place, at the offset that is
//!   kept here: there are no hits, and a new call finds no file. It is bypassed at the same moment as all
//!   descriptions of its file: see `bypass`.
//!
//! Close racing with a read on another thread: the read found the slot before it was cleared and
//! works on the file that was open then, or finds it cleared and asks the kernel, which knows the
//! number or not. Neither ever sees the file that is opened under the number next, unless that
//! open came first.

use std::cell::UnsafeCell;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32};

use millpond::File;

use crate::files::bypass::{Bypass, SWITCH};
use crate::files::identity::FileId;
use crate::files::mode_back;
use crate::files::offset::Offset;
use crate::files::references::References;
use crate::report::accounts::{self, Row};
use crate::report::reason::Reason;
use crate::runtime::lock::Lock;

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
}

/// What only the holder of the registry lock touches.
#[derive(Default)]
pub struct Cold {
    pub id: FileId,
    /// Slots that point here.
    pub slots: u32,
    /// The program has locked it by flock or an open-file-description lock, which must end with
    /// the program's last descriptor, not with ours.
    pub is_locked: bool,
}

/// See the module header.
#[repr(align(128))]
pub struct OpenFile {
    hit: AtomicPtr<File>,
    /// Where the report by file was asked for.
    row: AtomicPtr<Row>,
    pub offset: Offset,
    state: AtomicU32,
    reason: AtomicU32,
    kernel_fd: AtomicI32,
    /// D6.
    shares: AtomicBool,
    /// D7.
    bypass: Bypass,
    /// How it was opened; the status flags that the program sees, of one that shares.
    flags: AtomicI32,
    /// See [`OpenFile::is_unwritten`].
    unwritten: AtomicBool,
    references: References,
    file: UnsafeCell<Option<Arc<File>>>,
    cold: UnsafeCell<Cold>,
}

// SAFETY: `file` changes only in `acquire` and at the last unpin, when no other thread can reach the
// description (D2); `cold` is touched under the registry lock only. The rest is atomic.
unsafe impl Sync for OpenFile {}

static POOL: Lock<Vec<&'static OpenFile>> = Lock::new(Vec::new());

impl OpenFile {
    /// A fresh description of the file `id`, not yet in the table: served where there is a
    /// `file`, passed for `reason` else. The registry is locked.
    pub fn acquire(
        id: FileId,
        flags: i32,
        offset: u64,
        internal_fd: RawFd,
        file: Result<Arc<File>, Reason>,
    ) -> &'static Self {
        let description = POOL.lock().pop().unwrap_or_else(|| Box::leak(Box::new(Self::blank())));
        // SAFETY: taken from the pool, so no other thread can reach it (D2).
        unsafe {
            *description.cold.get() = Cold { id, slots: 1, ..Cold::default() };
            *description.file.get() = None;
        }
        description.shares.store(false, Relaxed);
        description.bypass.reset(false);
        description.unwritten.store(false, Relaxed);
        description.kernel_fd.store(internal_fd, Relaxed);
        description.flags.store(flags, Relaxed);
        description.offset.reset(offset);
        description.references.begin();
        let row =
            accounts::of(id).map_or(std::ptr::null_mut(), |row| std::ptr::from_ref(row).cast_mut());
        description.row.store(row, Relaxed);
        match file {
            Ok(file) => {
                let pointer = std::ptr::from_ref(&*file).cast_mut();
                // SAFETY: as above.
                unsafe { *description.file.get() = Some(file) };
                mode_back::opened();
                description.state.store(SERVED, Relaxed);
                let hit = if description.access().read { pointer } else { std::ptr::null_mut() };
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
            row: AtomicPtr::new(std::ptr::null_mut()),
            offset: Offset::new(),
            state: AtomicU32::new(FREE),
            reason: AtomicU32::new(0),
            kernel_fd: AtomicI32::new(-1),
            shares: AtomicBool::new(false),
            bypass: Bypass::none(),
            flags: AtomicI32::new(0),
            unwritten: AtomicBool::new(false),
            references: References::none(),
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

    /// The file's row in the report by file, where that was asked for.
    pub fn row(&self) -> Option<&'static Row> {
        // SAFETY: rows are never freed (`accounts.C2`).
        unsafe { self.row.load(Relaxed).as_ref() }
    }

    pub fn is_served(&self) -> bool {
        self.state.load(Acquire) == SERVED
    }

    pub fn access(&self) -> Access {
        Access::of_flags(self.flags.load(Relaxed))
    }

    /// What its lease protects.
    pub fn leased(&self) -> Access {
        let access = self.access();
        Access { write: access.write || self.shares(), ..access }
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

    pub fn flags(&self) -> i32 {
        self.flags.load(Relaxed)
    }

    /// D6: how the program has opened it, if it shares.
    pub fn shared_flags(&self) -> Option<i32> {
        (self.shares() && self.is_served()).then(|| self.flags.load(Relaxed))
    }

    /// D6.
    pub fn shares(&self) -> bool {
        self.shares.load(Relaxed)
    }

    /// D6. The registry is locked, and no thread has found the description yet.
    pub fn set_sharing(&self, flags: i32) {
        self.flags.store(flags, Relaxed);
        self.shares.store(true, Relaxed);
    }

    /// D7.
    pub fn is_bypassed(&self) -> bool {
        self.bypass.is_set(&SWITCH, self.kernel_fd())
    }

    /// D7: the kernel serves `all`, which share a description, from one moment on. The registry is locked.
    pub fn bypass_together(all: &[&'static Self], real: RawFd) {
        all.iter().for_each(|description| description.stop_hits());
        SWITCH.begin(real);
        all.iter().for_each(|description| description.bypass.set());
        SWITCH.end();
    }

    /// D7, of one that was not served before. As for [`OpenFile::set_sharing`].
    pub fn begin_bypassed(&self) {
        self.bypass.reset(true);
        self.state.store(SERVED, Release);
    }

    /// The file, if the engine serves it just now. As for [`OpenFile::file`].
    pub fn served_file(&self) -> Option<&File> {
        self.file().filter(|_| self.is_served() && !self.is_bypassed())
    }

    /// The file, if its pages may be dirty (see `writeback_policy`): also after it was passed, since pages that could
    /// not be written back stay dirty. As for [`OpenFile::file`].
    pub fn late_file(&self) -> Option<&File> {
        if self.leased().write { self.file() } else { None }
    }

    /// Passed, with dirty pages left: it must be found until they are written back.
    pub fn is_unwritten(&self) -> bool {
        self.unwritten.load(Relaxed)
    }

    pub fn set_unwritten(&self) {
        self.unwritten.store(true, Relaxed);
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
        // SAFETY: `file` does not change while a thread can reach the description.
        unsafe { (*self.file.get()).as_deref() }
    }

    /// [`OpenFile::file`], for callers that keep it longer than their pin.
    pub fn shared_file(&self) -> Option<&Arc<File>> {
        // SAFETY: as in `file`.
        unsafe { (*self.file.get()).as_ref() }
    }

    /// SERVED -> PASSED (D5). The offset is locked; the registry too.
    pub fn set_passed(&self, reason: Reason) {
        self.reason.store(reason as u32, Relaxed);
        self.stop_hits();
        // Release: pairs with the Acquire in `is_served`.
        self.state.store(PASSED, Release);
    }

    /// One more reference, by a caller that has one or found the description in a slot (D2).
    pub fn pin(&self) {
        self.references.pin();
    }

    /// Gives up a reference; whether it was the last. Then [`OpenFile::end`] follows.
    #[must_use]
    pub fn unpin(&self) -> bool {
        self.references.unpin()
    }

    /// Gives up a reference unless it is the last; whether it was given up.
    pub fn try_unpin(&self) -> bool {
        self.references.try_unpin()
    }

    /// Ends it, which no other thread can reach any more (D2). Returns its file's id, and the engine's file.
    ///
    /// # Safety
    ///
    /// The last reference is gone.
    pub unsafe fn end(&self) -> (FileId, Option<Arc<File>>) {
        self.state.store(FREE, Relaxed);
        // SAFETY: the caller's duty.
        let (id, file) = unsafe { ((*self.cold.get()).id, (*self.file.get()).take()) };
        if file.is_some() {
            mode_back::closed();
        }
        (id, file)
    }

    /// Back to the pool, after its end.
    pub fn recycle(&self) {
        // SAFETY: descriptions are leaked boxes.
        let this: &'static Self = unsafe { &*std::ptr::from_ref(self) };
        POOL.lock().push(this);
    }

    /// Takes the fast way to `hit` away; the slots are cleared already.
    pub fn stop_hits(&self) {
        self.hit.store(std::ptr::null_mut(), Relaxed);
    }
}

/// In a forked child: the parent's descriptions are left behind, with all they point to.
///
/// # Safety
///
/// No other thread exists.
pub unsafe fn after_fork() {
    // SAFETY: the caller's duty.
    unsafe { POOL.reset(Vec::new()) };
    SWITCH.reset();
}
