//! The engine's side of crash persistence: the mapping, its tables, and the connection to the keeper.
//!
//! No descriptor is kept: the memfd is mapped whole, handed over and closed. Frames get their memory chunk
//! by chunk, by a second mapping of the same pages (`mremap` of length 0) at their place in the engine's
//! reservation. So reservations that were never a chunk of pages stay private memory, which a late reader
//! can read without allocating pages, and tables and file objects stay private, too, with huge pages if the
//! system has them.
//!
//! **The memory limit.** Records count like the other metadata of frames ([`RECORD_BYTES`] per unit), the
//! rest of the tables from the start ([`Recovery::fixed_bytes`]). Not counted is a late reader that copies
//! from a frame after its memory was freed: reading a hole of shared memory allocates a page. It takes an
//! attempt of the hit path during which the page was evicted and its frame freed *and* decommitted, which
//! happens when memory moves from one size class to another or the limit is lowered. Each such attempt
//! brings back 64 pages at most, and they count again when their frames are used again. So it is at most 64
//! pages per decommit that met a stalled reader.

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
use crate::memory;
use crate::recovery::layout::{EntryUse, FREE, Intent, Layout, OPS, RECORD_BYTES, boot_id};
use crate::recovery::liveness_word::Seen;
use crate::recovery::tables::{Tables, unbroken};
use crate::recovery::wire::{self, Address, KeeperRequest, Trust};
use crate::sync::AtomicU64;
use crate::sync::MutexExt;
use crate::units::{FrameIndex, PageIndex, UNIT_BYTES};

/// The keeper of an engine, and the tables that it reads when the engine's process dies. One per
/// engine with a keeper; see the module for the protocol.
pub(crate) struct Recovery {
    address: Address,
    /// The keeper's id for this mapping.
    id: u64,
    layout: Layout,
    mapped: *mut u8,
    sequence: AtomicU64,
    /// Entries that are not in use, with the generation of their last use.
    unused_entries: Mutex<Vec<EntryUse>>,
    said_goodbye: AtomicBool,
    /// The keeper's identity; `None` until it has answered.
    keeper: Option<(Trust, Seen)>,
    /// The engine has said goodbye to the keeper.
    is_over: AtomicBool,
    /// The keeper did not answer in time, and is not asked again under a guard.
    is_silent: AtomicBool,
    /// The loss of the keeper was reported.
    told_lost: AtomicBool,
}

// SAFETY: the mapping lives as long as the value, and its tables are of atomics.
unsafe impl Send for Recovery {}
// SAFETY: as above.
unsafe impl Sync for Recovery {}

impl Recovery {
    /// Bytes that the record of each unit of frames counts against the memory limit.
    pub(crate) const RECORD_BYTES: usize = RECORD_BYTES;

    /// Makes the mapping for a cache of `limit_bytes` whose frames are addressed by `units`, and
    /// hands it to the keeper.
    pub(crate) fn connect(address: &Address, limit_bytes: u64, units: u32) -> io::Result<Recovery> {
        let (mut recovery, memory) = Recovery::map(address, limit_bytes, units)?;
        let own = rustix::process::getpid();
        let process = rustix::process::pidfd_open(own, PidfdFlags::empty())?;
        let fds = [memory.as_fd(), process.as_fd()];
        let answer = wire::send_request(address, Trust::OurUser, KeeperRequest::Hello, &fds)?;
        let [life] = <[OwnedFd; 1]>::try_from(answer.fds).map_err(|_| Errno::PROTO)?;
        recovery.id = answer.value;
        recovery.keeper = Some((Trust::Peer(answer.keeper), Seen::new(life)?));
        recovery.said_goodbye = AtomicBool::new(false);
        event!(debug, keeper = %address, "a keeper has the cache");
        Ok(recovery)
    }

    /// Creates the mapping, before a keeper has it, and its descriptor.
    pub(crate) fn map(
        address: &Address,
        limit_bytes: u64,
        units: u32,
    ) -> io::Result<(Recovery, OwnedFd)> {
        let layout = Layout::new(limit_bytes, units);
        let memory = memfd(layout)?;
        let write = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let mapped = unsafe {
            let flags = MapFlags::SHARED | MapFlags::NORESERVE;
            rustix::mm::mmap(ptr::null_mut(), layout.bytes(), write, flags, &memory, 0)
        }?;
        let recovery = Recovery {
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
        // A child of fork is another process: its writes to the tables would count as the parent's.
        // SAFETY: this mapping is ours; the advice does not change its contents here.
        unsafe { rustix::mm::madvise(mapped, layout.bytes(), Advice::LinuxDontFork) }?;
        let header = layout.header(boot_id());
        // SAFETY: the header lies at the start of the mapping, which no other code has yet.
        unsafe { ptr::copy_nonoverlapping(header.as_ptr(), mapped.cast(), header.len()) };
        Ok((recovery, memory))
    }

    /// Whether pages that become DIRTY from now on survive: the keeper lives, and the engine has not
    /// detached from it. Once false it stays so.
    #[inline]
    pub(crate) fn has_keeper(&self) -> bool {
        // Acquire: pairs with the Release of `part`. Argued: a thread that must not miss it has a guard
        // that `detach_keeper` waits for after it has detached; the flag alone publishes no other data.
        self.is_alive() && !self.said_goodbye.load(Acquire)
    }

    /// Whether the keeper died before the engine detached from it.
    // Argued: as in `has_keeper`.
    pub(crate) fn has_lost_keeper(&self) -> bool {
        !self.said_goodbye.load(Acquire) && !self.is_alive()
    }

    /// Reports once that the keeper is dead, if it is.
    pub(crate) fn report_lost(&self) {
        // Relaxed: the first caller reports it.
        if self.has_lost_keeper() && !self.told_lost.swap(true, Relaxed) {
            event!(warn, keeper = %self.address, "the keeper is lost: writes go through from now on");
        }
    }

    fn is_alive(&self) -> bool {
        self.keeper.as_ref().is_some_and(|(_, life)| life.is_alive())
    }

    /// Sends a request to the keeper, if it is still the same one.
    fn send_request(&self, request: KeeperRequest, fds: &[BorrowedFd<'_>]) -> io::Result<u64> {
        let (keeper, _) = self.keeper.as_ref().ok_or(Errno::NOTCONN)?;
        let outcome = wire::send_request(&self.address, *keeper, request, fds);
        if outcome.as_ref().is_err_and(|error| error.raw_os_error() == Some(libc::ETIMEDOUT)) {
            // Relaxed: a hint, which spares other threads the wait.
            self.is_silent.store(true, Relaxed);
        }
        outcome.map(|answer| answer.value)
    }

    /// The part of the tables that is resident even if few frames are used.
    pub(crate) fn fixed_bytes(&self) -> u64 {
        self.layout.fixed_bytes() as u64
    }

    /// Maps the shared memory of the frames from `first` on at `at`, readable and writable, replacing the
    /// mapping there.
    ///
    /// False: it failed, and the target must not be used again. An error: nothing has changed.
    ///
    /// # Safety
    ///
    /// The `units * UNIT_BYTES` bytes at `at` are a mapping of the caller's that holds only zeros; it may
    /// be read concurrently, but not written.
    pub(crate) unsafe fn place(&self, first: u32, units: u32, at: *mut u8) -> io::Result<bool> {
        let bytes = units as usize * UNIT_BYTES;
        let from = self.layout.frames_at() + first as usize * UNIT_BYTES;
        debug_assert!(from + bytes <= self.layout.bytes());
        // SAFETY: the source lies within our mapping, which stays as it is, as the old length is 0.
        let copy = unsafe {
            rustix::mm::mremap(self.mapped.add(from).cast(), 0, bytes, MremapFlags::MAYMOVE)
        }?;
        // SAFETY: the copy is ours; the target is the caller's promise. A reader sees the old zeros, or
        // those of untouched shared memory.
        Ok(unsafe { memory::move_mapping(copy.cast(), bytes, at) })
    }

    /// Marks the frame as belonging to no page, and so not dirty (recovery.K2). Caller: a release fence
    /// before the frame's next owner writes its first byte; see `Frames::try_alloc`.
    #[inline]
    pub(crate) fn free_record(&self, frame: FrameIndex) {
        let state = &self.tables().record(frame).state;
        // Relaxed: the caller's fence orders it. The load first avoids a needless write.
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

    /// Hands the file to the keeper; blocks until the keeper has it. Called before the first dirty page of
    /// the file. `fd` permits writing; files that are unlinked, renamed or never had a name work, as the
    /// keeper holds its own description.
    ///
    /// # Errors
    ///
    /// ENFILE: as many files are dirty as there are entries; ENOTCONN after [`Recovery::part`], or if the
    /// keeper is dead, or has failed to answer before; EBUSY: another process's keeper has the file;
    /// EOPNOTSUPP: a file system that is not known to hold regular files; or an error of the keeper. The
    /// file's writes then have to be written through.
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
        let unused = self.unused_entries.acquire().pop();
        let mut entry = unused.ok_or(Errno::NFILE)?;
        entry.generation = (entry.generation + 1) & (u32::MAX >> 1);
        self.tables().open_entry(entry, size);
        let request = KeeperRequest::Adopt { mapping: self.id, entry, device, inode, page_shift };
        match self.send_request(request, &[fd]) {
            Ok(_) => Ok(entry),
            Err(error) => {
                self.tables().close_entry(entry);
                self.unused_entries.acquire().push(entry);
                Err(error)
            }
        }
    }

    /// The file has no dirty pages any more: the keeper closes its descriptor, so that no writable one is
    /// left after the last close. Blocks until it has.
    pub(crate) fn forget(&self, entry: EntryUse) {
        // recovery.K6.
        self.tables().close_entry(entry);
        let request = KeeperRequest::Forget { mapping: self.id, entry };
        // A dead keeper has no descriptors any more. One that does not answer keeps them until it
        // continues, but does not use them (recovery.K6).
        if !self.is_silent.load(Relaxed) {
            let _ = self.send_request(request, &[]);
        }
        self.unused_entries.acquire().push(entry);
    }

    /// Records the file's size. Caller: exclusive guard to the end of the file (recovery.K5).
    pub(crate) fn set_size(&self, entry: EntryUse, size: u64) {
        let _ = self.tables().try_set_size(entry, size, unbroken);
    }

    /// Records an operation on the file below the cache before the backend is called. One at a time per
    /// file (recovery.K5).
    pub(crate) fn set_intent(&self, entry: EntryUse, intent: Intent) {
        let _ = self.tables().try_set_intent(entry, intent, unbroken);
    }

    /// The intended operation is done, in the tables too (size set, removed pages cleaned); or it failed
    /// without an effect.
    pub(crate) fn clear_intent(&self, entry: EntryUse) {
        let _ = self.tables().try_clear_intent(entry, unbroken);
    }

    /// Makes complete new contents of pages (frames not visible to other threads yet), and a new size if
    /// given, survive together: one store commits all or none. No allocation, no system call, no lock
    /// except the claim of an op slot by CAS; a single page without a new size needs no op slot.
    ///
    /// Caller: the exclusive guard over the pages (recovery.K3). Before any of the new frames
    /// becomes visible to write-back, the dirty frames that they replace are cleaned (recovery.K4).
    ///
    /// A page that becomes dirty again with the same bytes (a sync failed) is committed again with its
    /// frame, under the same guard: the commit counts as its latest.
    #[inline]
    pub(crate) fn commit(
        &self,
        entry: EntryUse,
        pages: impl Iterator<Item = (PageIndex, FrameIndex)> + Clone,
        size: Option<u64>,
    ) {
        let _ = self.tables().try_commit(entry, pages, size, unbroken);
    }

    /// Marks a frame as clean: the backend acknowledged its bytes, or its page was dropped permanently, or
    /// a newer frame of the page was committed.
    ///
    /// recovery.K4: the last of these comes *before* the newer frame can be cleaned, which means before the
    /// page is published with the newer frame. [`crate::cache::frames::Frames::release`] cleans, too, but may
    /// come too late for this. recovery.K7: the frame can't be allocated during that time; a write-back
    /// that has it pinned cleans it before it unpins.
    #[inline]
    pub(crate) fn clean(&self, frame: FrameIndex) {
        let _ = self.tables().try_clean(frame, unbroken);
    }

    /// Starts to detach: no file can be adopted any more, and a write that finds [`Recovery::has_keeper`]
    /// false does not stay in the cache.
    pub(crate) fn begin_detach(&self) {
        // Release: pairs with the Acquire of `has_keeper`. Argued: there.
        self.said_goodbye.store(true, Release);
    }

    /// Says goodbye, as the engine is done, or the process is about to call exec: the keeper writes the
    /// dirty pages, and closes the mapping and all files. Blocks until it has. Otherwise the keeper would
    /// wait for the end of the process after an exec, with the old program's dirty pages. Caller: no page
    /// becomes dirty or changes its contents during the call.
    pub(crate) fn detach(&self) {
        self.begin_detach();
        // Relaxed: the first caller does it.
        if self.is_over.swap(true, Relaxed) {
            return;
        }
        let _ = self.send_request(KeeperRequest::Goodbye { mapping: self.id }, &[]);
    }
}

impl Drop for Recovery {
    fn drop(&mut self) {
        self.detach();
        // SAFETY: the mapping of `connect`; `&mut self` shows that it is not used any more. The mappings of
        // `place` belong to the frames.
        let _ = unsafe { rustix::mm::munmap(self.mapped.cast(), self.layout.bytes()) };
    }
}

#[cfg(test)]
impl Recovery {
    /// The first byte of a frame, in the keeper's mapping.
    pub(crate) fn frame(&self, frame: FrameIndex) -> *mut u8 {
        assert!(frame.0 < self.layout.units);
        // SAFETY: within the mapping.
        unsafe { self.mapped.add(self.layout.frames_at() + frame.0 as usize * UNIT_BYTES) }
    }
}

/// The memory of a mapping: sparse, and of a fixed length.
fn memfd(layout: Layout) -> io::Result<OwnedFd> {
    let bytes = layout.bytes() as u64;
    // Beyond this limit `ftruncate` would end the process by SIGXFSZ.
    if rustix::process::getrlimit(Resource::Fsize).current.is_some_and(|most| most < bytes) {
        return Err(Errno::FBIG.into());
    }
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let memory = rustix::fs::memfd_create("millpond-frames", flags)?;
    rustix::fs::ftruncate(&memory, bytes)?;
    // The keeper requires the first two; pages may still be written and freed.
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&memory, seals)?;
    Ok(memory)
}
