//! The engine's side: the mapping, the tables in it, and talking to the keeper.
//!
//! No descriptor is kept: the memfd is mapped whole, handed over and closed. Frames get their
//! memory chunk by chunk, by a second mapping of the same pages (`mremap` of length 0) at the place
//! in the engine's reservation: so what was never a chunk of pages stays private memory, which a
//! late reader can read without allocating anything, and tables and file objects stay private, too,
//! with huge pages where the system has them.
//!
//! **The memory limit.** Records count like the other metadata of frames ([`RECORD_BYTES`] per
//! unit), the rest of the tables from the start ([`Survival::fixed_bytes`]). What is left is the
//! late reader who copies from a frame after its memory was given back: a hole of shared memory
//! that is read becomes a page. It takes an attempt of the hit path during which the page was
//! evicted and its frame freed *and* decommitted, which happens when memory goes from one size
//! class to another or the limit goes down; each such attempt brings back 64 pages at most, and they
//! count again when their frames are used again. So it is at most 64 pages per decommit that met a
//! stalled reader.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::slice;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, MremapFlags, ProtFlags};
use rustix::process::{PidfdFlags, Resource};

use crate::event::event;
use crate::survival::layout::{EntryUse, FREE, Intent, Layout, OPS, RECORD_BYTES, boot_id};
use crate::survival::life::Seen;
use crate::survival::tables::{Tables, unbroken};
use crate::survival::wire::{self, Address, KeeperRequest, Trust};
use crate::sync::AtomicU64;
use crate::units::{FrameIndex, PageIndex, UNIT_BYTES};

/// The keeper of an engine, and the tables that it reads when the engine's process dies. One per
/// engine with a keeper; see the module for the protocol.
pub(crate) struct Survival {
    address: Address,
    /// What the keeper calls our mapping.
    id: u64,
    layout: Layout,
    mapped: *mut u8,
    sequence: AtomicU64,
    /// Entries that are not in use, as the use before left them.
    unused_entries: Mutex<Vec<EntryUse>>,
    said_goodbye: AtomicBool,
    /// Who that is; `None` until it has answered.
    keeper: Option<(Trust, Seen)>,
    /// The keeper was told that we are done.
    is_over: AtomicBool,
    /// It did not answer in time, and is not asked for anything more under a guard.
    is_silent: AtomicBool,
    /// It was told that the keeper is dead.
    told_lost: AtomicBool,
}

// SAFETY: the mapping lives as long as the value, and its tables are of atomics.
unsafe impl Send for Survival {}
// SAFETY: as above.
unsafe impl Sync for Survival {}

impl Survival {
    /// What the record of each unit of frames counts against the memory limit.
    pub(crate) const RECORD_BYTES: usize = RECORD_BYTES;

    /// Makes the mapping for a cache of `limit_bytes` whose frames are addressed by `units`, and
    /// hands it to the keeper.
    pub(crate) fn connect(address: &Address, limit_bytes: u64, units: u32) -> io::Result<Survival> {
        let (mut survival, memory) = Survival::map(address, limit_bytes, units)?;
        let own = rustix::process::getpid();
        let process = rustix::process::pidfd_open(own, PidfdFlags::empty())?;
        let fds = [memory.as_fd(), process.as_fd()];
        let answer = wire::ask(address, Trust::OurUser, KeeperRequest::Hello, &fds)?;
        let [life] = <[OwnedFd; 1]>::try_from(answer.fds).map_err(|_| Errno::PROTO)?;
        survival.id = answer.value;
        survival.keeper = Some((Trust::Peer(answer.keeper), Seen::new(life)?));
        survival.said_goodbye = AtomicBool::new(false);
        event!(debug, keeper = %address, "a keeper has the cache");
        Ok(survival)
    }

    /// The mapping, of which no keeper knows yet, and its descriptor.
    pub(crate) fn map(
        address: &Address,
        limit_bytes: u64,
        units: u32,
    ) -> io::Result<(Survival, OwnedFd)> {
        let layout = Layout::new(limit_bytes, units);
        let memory = memfd(layout)?;
        let write = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let mapped = unsafe {
            let flags = MapFlags::SHARED | MapFlags::NORESERVE;
            rustix::mm::mmap(ptr::null_mut(), layout.bytes(), write, flags, &memory, 0)
        }?;
        let survival = Survival {
            address: address.clone(),
            id: 0,
            layout,
            mapped: mapped.cast(),
            sequence: AtomicU64::new(0),
            unused_entries: Mutex::new(
                (0..layout.files).rev().map(|index| EntryUse { index, generation: 0 }).collect(),
            ),
            said_goodbye: AtomicBool::new(true),
            keeper: None,
            is_over: AtomicBool::new(false),
            is_silent: AtomicBool::new(false),
            told_lost: AtomicBool::new(false),
        };
        // A child of fork is another process: what it did to our tables would count as ours.
        // SAFETY: our own mapping; the advice does not change its contents here.
        unsafe { rustix::mm::madvise(mapped, layout.bytes(), Advice::LinuxDontFork) }?;
        let header = layout.header(boot_id());
        // SAFETY: the header lies at the start of the mapping, which nobody else has yet.
        unsafe { ptr::copy_nonoverlapping(header.as_ptr(), mapped.cast(), header.len()) };
        Ok((survival, memory))
    }

    /// Whether what is DIRTY from now on survives: the keeper lives, and we have not parted from
    /// it. Once false it stays so.
    #[inline]
    pub(crate) fn has_keeper(&self) -> bool {
        // Acquire: pairs with the Release of `part`. Argued: a thread that must not miss it has a
        // guard that `leave_keeper` waits for after it has parted; a flag alone carries nothing
        // else.
        self.is_alive() && !self.said_goodbye.load(Acquire)
    }

    /// Whether the keeper died before we parted from it.
    // Argued: as in `has_keeper`.
    pub(crate) fn has_lost_keeper(&self) -> bool {
        !self.said_goodbye.load(Acquire) && !self.is_alive()
    }

    /// Says once that the keeper is dead, if it is.
    pub(crate) fn tell_lost(&self) {
        // Relaxed: who is first says it.
        if self.has_lost_keeper() && !self.told_lost.swap(true, Relaxed) {
            event!(warn, keeper = %self.address, "the keeper is lost: writes go through from now on");
        }
    }

    fn is_alive(&self) -> bool {
        self.keeper.as_ref().is_some_and(|(_, life)| life.is_alive())
    }

    /// Asks the keeper, if it is still the one that we know.
    fn ask(&self, request: KeeperRequest, fds: &[BorrowedFd<'_>]) -> io::Result<u64> {
        let (keeper, _) = self.keeper.as_ref().ok_or(Errno::NOTCONN)?;
        let outcome = wire::ask(&self.address, *keeper, request, fds);
        if outcome.as_ref().is_err_and(|error| error.raw_os_error() == Some(libc::ETIMEDOUT)) {
            // Relaxed: a hint, that spares others the wait.
            self.is_silent.store(true, Relaxed);
        }
        outcome.map(|answer| answer.value)
    }

    /// What of the tables is resident however few frames are used.
    pub(crate) fn fixed_bytes(&self) -> u64 {
        self.layout.fixed_bytes() as u64
    }

    /// Puts the shared memory of the frames from `first` on at `at`, readable and writable, in
    /// place of what is mapped there.
    ///
    /// False: it failed, and the target must not be used again. An error: nothing has changed.
    ///
    /// # Safety
    ///
    /// The `units * UNIT_BYTES` bytes at `at` are a mapping of the caller's that holds nothing but
    /// zeros, and may be read meanwhile, but not written.
    pub(crate) unsafe fn place(&self, first: u32, units: u32, at: *mut u8) -> io::Result<bool> {
        let bytes = units as usize * UNIT_BYTES;
        let from = self.layout.frames_at() + first as usize * UNIT_BYTES;
        debug_assert!(from + bytes <= self.layout.bytes());
        // By way of another place: a call that copies to the target unmaps it before it finds that the limits have no
        // room for a copy.
        // SAFETY: the source lies within our mapping, which stays as it is, as the old length is 0.
        let copy = unsafe {
            rustix::mm::mremap(self.mapped.add(from).cast(), 0, bytes, MremapFlags::MAYMOVE)
        }?;
        // SAFETY: the copy is ours; the target is the caller's promise. A reader sees the old zeros, or those of
        // untouched shared memory.
        let moved = unsafe {
            rustix::mm::mremap_fixed(copy, bytes, bytes, MremapFlags::MAYMOVE, at.cast())
        };
        if moved.is_err() {
            let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED_NOREPLACE;
            // SAFETY: the copy, which no other thread knows, and a new mapping where none is.
            unsafe {
                let _ = rustix::mm::munmap(copy, bytes);
                let _ = rustix::mm::mmap_anonymous(at.cast(), bytes, ProtFlags::READ, flags);
            }
        }
        Ok(moved.is_ok())
    }

    /// The frame belongs to no page, and so is not dirty (survival.K2). Caller: a release fence
    /// before the frame's next owner writes its first byte; see `Frames::try_alloc`.
    #[inline]
    pub(crate) fn free_record(&self, frame: FrameIndex) {
        let state = &self.tables().record(frame).state;
        // Relaxed: the caller's fence orders it. The first look spares the write.
        if state.load(Relaxed) != FREE {
            state.store(FREE, Relaxed);
        }
    }

    #[inline]
    pub(crate) fn tables(&self) -> Tables<'_> {
        let layout = self.layout;
        // SAFETY: the sections lie within the mapping, which lives as long as `self`, and are
        // aligned; all-zero bytes, which fresh memory holds, are valid entries, and their fields
        // are atomic.
        unsafe {
            Tables {
                ops: slice::from_raw_parts(self.mapped.add(layout.ops_at()).cast(), OPS as usize),
                files: slice::from_raw_parts(
                    self.mapped.add(layout.files_at()).cast(),
                    layout.files as usize,
                ),
                records: slice::from_raw_parts(
                    self.mapped.add(layout.records_at()).cast(),
                    layout.units as usize,
                ),
                sequence: &self.sequence,
            }
        }
    }

    /// Hands the file to the keeper; blocks until the keeper has it. Called before the first dirty
    /// page of the file. `fd` permits writing; files that are unlinked, renamed or never had a name
    /// work, as the keeper holds its own description.
    ///
    /// # Errors
    ///
    /// ENFILE: as many files are dirty as there are entries; ENOTCONN after [`Survival::part`], or
    /// where the keeper is dead, or did not answer before; EBUSY: another process's keeper has the
    /// file; EOPNOTSUPP: a file system of which it is not known that it holds files; what else the
    /// keeper met. The file's writes then have to go through.
    pub(crate) fn adopt(
        &self,
        fd: BorrowedFd<'_>,
        device: u64,
        inode: u64,
        size: u64,
        page_shift: u32,
    ) -> io::Result<EntryUse> {
        if !self.has_keeper() || self.is_silent.load(Relaxed) {
            return Err(Errno::NOTCONN.into());
        }
        let unused = self.unused_entries.lock().expect("no panic under the lock").pop();
        let mut entry = unused.ok_or(Errno::NFILE)?;
        entry.generation = (entry.generation + 1) & (u32::MAX >> 1);
        self.tables().open_entry(entry, size);
        let request = KeeperRequest::Adopt { mapping: self.id, entry, device, inode, page_shift };
        match self.ask(request, &[fd]) {
            Ok(_) => Ok(entry),
            Err(error) => {
                self.tables().close_entry(entry);
                self.unused_entries.lock().expect("no panic under the lock").push(entry);
                Err(error)
            }
        }
    }

    /// Nothing of the file is dirty any more: the keeper drops its descriptor, so that no writable
    /// one is left after the last close. Blocks until it has.
    pub(crate) fn forget(&self, entry: EntryUse) {
        // survival.K6.
        self.tables().close_entry(entry);
        let request = KeeperRequest::Forget { mapping: self.id, entry };
        // A keeper that is dead has no descriptors any more. One that does not answer keeps them
        // until it goes on, but makes nothing of them (survival.K6).
        if !self.is_silent.load(Relaxed) {
            let _ = self.ask(request, &[]);
        }
        self.unused_entries.lock().expect("no panic under the lock").push(entry);
    }

    /// The file has this size from now on. Caller: exclusive guard to the end of the file
    /// (survival.K5).
    pub(crate) fn set_size(&self, entry: EntryUse, size: u64) {
        let _ = self.tables().try_set_size(entry, size, unbroken);
    }

    /// Records what is about to be done to the file below the cache, before the back end is told.
    /// One at a time per file (survival.K5).
    pub(crate) fn set_intent(&self, entry: EntryUse, intent: Intent) {
        let _ = self.tables().try_set_intent(entry, intent, unbroken);
    }

    /// The intended operation is done, in the tables too (size set, pages that went cleaned); or
    /// it failed and did nothing.
    pub(crate) fn clear_intent(&self, entry: EntryUse) {
        let _ = self.tables().try_clear_intent(entry, unbroken);
    }

    /// Makes complete new contents of pages (frames not yet visible to anybody), and a new size if
    /// given, survive together: one store commits all or nothing. No allocation, no system call, no
    /// lock beyond claiming an op slot by CAS; a single page without a new size needs no op slot.
    ///
    /// Caller: the exclusive guard over the pages (survival.K3). Before any of the new frames
    /// becomes visible to write-back, the dirty frames that they replace are cleaned (survival.K4).
    ///
    /// A page that becomes dirty again with the bytes that it has (a sync failed) is committed
    /// again with its frame, under the same guard: the commit counts as its latest.
    #[inline]
    pub(crate) fn commit(
        &self,
        entry: EntryUse,
        pages: impl Iterator<Item = (PageIndex, FrameIndex)> + Clone,
        size: Option<u64>,
    ) {
        let _ = self.tables().try_commit(entry, pages, size, unbroken);
    }

    /// The back end acknowledged the frame's bytes, or its page was dropped for good, or a newer
    /// frame of the page was committed.
    ///
    /// survival.K4: the last of these comes *before* the newer frame can be cleaned, which means
    /// before its page is shown with it. [`crate::cache::frame::Frames::release`] cleans, too, but
    /// may come too late for this. survival.K7: the frame can't be handed out meanwhile; a
    /// write-back that has it pinned cleans it before it unpins.
    #[inline]
    pub(crate) fn clean(&self, frame: FrameIndex) {
        let _ = self.tables().try_clean(frame, unbroken);
    }

    /// Nothing can be adopted any more, and no write is to wait in the cache any more that finds
    /// [`Survival::has_keeper`] false.
    pub(crate) fn part(&self) {
        // Release: pairs with the Acquire of `has_keeper`. Argued: there.
        self.said_goodbye.store(true, Release);
    }

    /// The engine is done, or about to be replaced by another program (exec): the keeper writes
    /// what is dirty, lets go of the mapping and of all files. Blocks until it has. Without it an
    /// exec leaves the keeper waiting for the end of the process, with the old program's dirty
    /// pages. Caller: nothing becomes dirty meanwhile, and no dirty page gets other contents.
    pub(crate) fn goodbye(&self) {
        self.part();
        // Relaxed: the first caller does.
        if self.is_over.swap(true, Relaxed) {
            return;
        }
        let _ = self.ask(KeeperRequest::Goodbye { mapping: self.id }, &[]);
    }
}

impl Drop for Survival {
    fn drop(&mut self) {
        self.goodbye();
        // SAFETY: the mapping of `connect`; `&mut self` says that nobody uses it any more. What
        // `place` made of it is the frames' own.
        let _ = unsafe { rustix::mm::munmap(self.mapped.cast(), self.layout.bytes()) };
    }
}

#[cfg(test)]
impl Survival {
    /// The first byte of a frame, in the keeper's mapping.
    pub(crate) fn frame(&self, frame: FrameIndex) -> *mut u8 {
        assert!(frame.0 < self.layout.units);
        // SAFETY: within the mapping.
        unsafe { self.mapped.add(self.layout.frames_at() + frame.0 as usize * UNIT_BYTES) }
    }
}

/// The memory of a mapping: sparse, and of one length for good.
fn memfd(layout: Layout) -> io::Result<OwnedFd> {
    let bytes = layout.bytes() as u64;
    // Beyond this limit `ftruncate` would end the process by SIGXFSZ.
    if rustix::process::getrlimit(Resource::Fsize).current.is_some_and(|most| most < bytes) {
        return Err(Errno::FBIG.into());
    }
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let memory = rustix::fs::memfd_create("millpond-frames", flags)?;
    rustix::fs::ftruncate(&memory, bytes)?;
    // The keeper insists on the first two; pages may still be written and given back.
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&memory, seals)?;
    Ok(memory)
}
