//! The files of mode back: which are served, decided when they are opened, and which were handed to the kernel.
//!
//! The registry lock covers the table's slots of descriptions, the inodes below and the leases. It
//! is held over short system calls on our own descriptors, never over one that opens a file:
//! opening may wait for a lease, and the watcher needs this lock to give one up.
//!
//! - R1. A file is served only while each of its descriptions here holds a lease, so no other process
//!   can change it unnoticed. Otherwise all its descriptions are passed.
//! - R2. Descriptions of one file are served side by side if all are read-only; or if they share one
//!   (`multi_open`): a write lease is refused while a second description exists, even our own.
//! - R3. A file that was passed to the kernel stays passed until its last descriptor is closed here.
//! - R4. A description takes its lease before the engine looks at the file. The engine drops cached pages of an
//!   earlier time when the first description of a file is served.
//!
//! Order at close: clear the slot, end or share the description, give up the lease, close the
//! program's number. The engine's duplicate is closed last.
//!
//! Lock order: registry -> offset -> (engine's) -> process locks -> pool, heap.

use std::collections::BTreeMap;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicUsize};

use millpond::stats::Stats;
use millpond::{Backing, Engine, File};

use crate::files::hand_over::pass;
use crate::files::identity::{self, FileId};
use crate::files::lease::Break;
use crate::files::offset::IN_KERNEL;
use crate::files::open_file::{Access, OpenFile};
use crate::files::pin::{Closed, Pin};
use crate::files::serving::{Opened, Serving};
use crate::files::table::{self, NumberState};
use crate::files::unshare::{pass_together, unshare_descriptions};
use crate::files::{lease, mode_back, pending_close, process_locks, unserved};
use crate::report::reason::Reason;
use crate::report::{accounts, counts};
use crate::runtime::lock::{Lock, LockGuard};
use crate::runtime::{config, section, thread};

/// See the module header.
pub struct Registry {
    pub(in crate::files) inodes: BTreeMap<FileId, Inode>,
    pub(in crate::files) serving: Serving,
    pub closing: Closed,
    /// The program has met the limit of open descriptors.
    is_crowded: bool,
}

/// A regular file that the program has open.
#[derive(Default)]
pub struct Inode {
    pub descriptions: Vec<&'static OpenFile>,
    /// Set once the file was left to the kernel.
    pub passed: Option<Reason>,
}

static REGISTRY: Lock<Registry> = Lock::new(Registry::new());
/// The highest number of a standard stream.
pub const STDERR: RawFd = 2;
/// See [`Registry::release_all_files`].
static IS_BLIND: AtomicBool = AtomicBool::new(false);
/// Files that hold leases: zero means that an open can't meet one of ours.
static FILES_LEASED: AtomicUsize = AtomicUsize::new(0);

pub fn lock() -> LockGuard<'static, Registry> {
    REGISTRY.lock()
}

/// Before fork: no thread is halfway through a change. The lock is kept until `after_fork_parent`, because the locks
/// that the fork takes later come after it in the order of locks.
pub fn before_fork(registry: LockGuard<'static, Registry>) {
    std::mem::forget(registry);
}

pub fn after_fork_parent() {
    REGISTRY.release();
}

/// In a forked child: everything of the parent is left alone, and the library starts afresh.
///
/// # Safety
///
/// No other thread exists.
pub unsafe fn after_fork_child() {
    // SAFETY: the caller's duty.
    unsafe { REGISTRY.reset(Registry::new()) };
    Engine::forget_parent();
    FILES_LEASED.store(0, Relaxed);
}

/// Whether the engine was made.
pub fn has_engine() -> bool {
    lock().serving.made().is_some()
}

/// Whether some file here holds a lease, which an open of the program could break.
#[inline]
pub fn holds_leases() -> bool {
    FILES_LEASED.load(Relaxed) != 0
}

/// Another process waits for a lease of ours.
pub fn lease_broken(found: Break) {
    let mut registry = lock();
    let fd = match found {
        Break::Of(fd) => Some(fd),
        Break::OfSome => None,
        Break::Untold => return registry.release_all_files(),
    };
    let broken: Vec<FileId> = registry
        .inodes
        .iter()
        .filter(|(_, inode)| {
            inode.descriptions.iter().any(|description| {
                description.is_served()
                    && match fd {
                        Some(fd) => fd == description.kernel_fd(),
                        None => !lease::stands(description.kernel_fd(), description.leased()),
                    }
            })
        })
        .map(|(id, _)| *id)
        .collect();
    for id in &broken {
        registry.pass_file(*id, Reason::OpenedElsewhere);
    }
}

impl Registry {
    const fn new() -> Self {
        Self {
            inodes: BTreeMap::new(),
            serving: Serving::new(),
            closing: Closed(Vec::new()),
            is_crowded: false,
        }
    }

    /// Describes `fd`, which the program has just opened with `flags`, and decides who serves it.
    /// It is a regular file in a served directory; `refusal` is a reason not to serve it, if there
    /// is one already, such as its file system.
    pub fn describe(&mut self, fd: RawFd, id: FileId, flags: i32, refusal: Option<Reason>) {
        self.closing.end();
        self.serving.tell_lost_keeper();
        if matches!(table::get(fd), NumberState::File(_)) {
            self.forget_lost(fd);
        }
        let row = if accounts::is_kept() { unserved::row_of(fd) } else { None };
        let access = Access::of_flags(flags);
        let served = match refusal.or_else(|| self.refusal(fd, id, access, flags)) {
            Some(reason) => Err(reason),
            None => {
                let is_first =
                    self.inodes.get(&id).is_none_or(|inode| inode.descriptions.is_empty());
                self.serve(&Opened { fd, id, access, is_first })
            }
        };
        let served = match served {
            Err(Reason::OpenElsewhere) if access.write && fd > STDERR && !self.is_known(id) => {
                unserved::note_writer(fd, row);
                match self.serve_together(fd, id) {
                    Ok(()) | Err(Reason::OpenElsewhere) => return,
                    // `multi_open.G3`: it is one of the descriptions that share the file.
                    Err(_) if matches!(table::get(fd), NumberState::File(_)) => return,
                    Err(reason) => {
                        unserved::uncount(fd);
                        Err(reason)
                    }
                }
            }
            served => served,
        };
        if let Err(reason) = &served {
            self.pass_file(id, *reason);
        }
        let internal_fd = served.as_ref().map_or(-1, |(internal_fd, _)| *internal_fd);
        let passed = served.as_ref().err().copied();
        let description =
            OpenFile::acquire(id, flags, 0, internal_fd, served.map(|(_, file)| Arc::new(file)));
        match passed {
            None => self.push_served(id, description),
            Some(reason) => {
                let inode = self.inodes.entry(id).or_default();
                inode.passed.get_or_insert(reason);
                inode.descriptions.push(description);
                description.row().inspect(|row| row.left(reason));
                counts::count_file_passed(reason);
            }
        }
        table::set(fd, NumberState::File(description));
    }

    /// The reason against serving the file, if one is known without trying.
    pub(in crate::files) fn refusal(
        &mut self,
        fd: RawFd,
        id: FileId,
        access: Access,
        flags: i32,
    ) -> Option<Reason> {
        if IS_BLIND.load(Relaxed) {
            return Some(Reason::Unseen);
        }
        if fd <= STDERR {
            return Some(Reason::Stdio);
        }
        if self.is_crowded && fd >= config::get().internal_fd_min / 2 {
            return Some(Reason::Descriptors);
        }
        if flags & libc::O_DIRECT != 0 {
            return Some(Reason::Direct);
        }
        if access.append && !identity::can_ignore_append(fd) {
            return Some(Reason::Append);
        }
        if let Some(reason) = self.inodes.get(&id).and_then(|inode| inode.passed) {
            return Some(reason);
        }
        if access.write
            && let Some(reason) = mode_back::refusal(flags)
        {
            return Some(reason);
        }
        let inode = self.inodes.get(&id)?;
        let is_written = access.write || inode.descriptions.iter().any(|d| d.access().write);
        if is_written && !inode.descriptions.is_empty() {
            // R2. The open has broken the lease already, unless `before_open` came first; or it came
            // before that was taken.
            self.pass_file(id, Reason::OpenTwice);
            return Some(Reason::OpenTwice);
        }
        None
    }

    /// Notes a description that is served.
    pub(in crate::files) fn push_served(&mut self, id: FileId, description: &'static OpenFile) {
        let inode = self.inodes.entry(id).or_default();
        if inode.descriptions.is_empty() {
            FILES_LEASED.fetch_add(1, Relaxed);
        }
        inode.descriptions.push(description);
        description.row().inspect(|row| row.begin());
        counts::count_file_served();
    }

    /// The inode is no longer in the registry, and was served until then.
    pub(in crate::files) fn note_unleased() {
        FILES_LEASED.fetch_sub(1, Relaxed);
    }

    pub(in crate::files) fn serve(&mut self, opened: &Opened) -> Result<(RawFd, File), Reason> {
        self.serving.serve(opened, lease_broken, &mut self.closing)
    }

    /// The program is about to open `id`, which would wait for our own lease. Makes way: R2.
    pub fn before_open(&mut self, id: FileId, access: Access, truncates: bool) {
        let Some(inode) = self.inodes.get(&id) else { return };
        let is_written = access.write || inode.descriptions.iter().any(|d| d.access().write);
        if inode.passed.is_none() && (is_written || truncates) {
            self.pass_file(id, Reason::OpenTwice);
        }
    }

    /// Whether the program has the file open.
    pub fn is_known(&self, id: FileId) -> bool {
        self.inodes.contains_key(&id)
    }

    /// Hands the file to the kernel for good: writes dirty pages back, and gives the lease up.
    pub fn pass_file(&mut self, id: FileId, reason: Reason) {
        let Some(inode) = self.inodes.get_mut(&id) else { return };
        if inode.passed.is_some() {
            // multi_open.G3: perhaps it can be had by now.
            if unshare_descriptions(&inode.descriptions, reason) {
                self.renew(id, reason);
            }
            return;
        }
        inode.passed = Some(reason);
        FILES_LEASED.fetch_sub(1, Relaxed);
        if inode.descriptions.iter().any(|description| description.shares()) {
            pass_together(&inode.descriptions, reason);
            // The description that they shared is open for writing: other processes could not execute the file.
            self.renew(id, reason);
        } else {
            inode.descriptions.iter().for_each(|description| pass(description, reason));
        }
    }

    /// Gives each description that the kernel has a successor without a descriptor of the library's.
    fn renew(&mut self, id: FileId, reason: Reason) {
        let Some(inode) = self.inodes.get_mut(&id) else { return };
        for description in &mut inode.descriptions {
            let old = *description;
            if old.is_served() || old.is_unwritten() || old.kernel_fd() < 0 {
                // multi_open.G3: it is still what all its numbers are, with an offset that is here.
                continue;
            }
            let fresh = OpenFile::acquire(id, old.flags(), IN_KERNEL, -1, Err(reason));
            // SAFETY: the registry is locked.
            let (cold, old_cold) = unsafe { (fresh.cold(), old.cold()) };
            (cold.slots, cold.is_locked) = (old_cold.slots, old_cold.is_locked);
            for fd in table::numbers_of(old) {
                table::set(fd, NumberState::File(fresh));
            }
            *description = fresh;
            self.closing.add(old);
        }
        self.closing.end();
    }

    /// The program is about to get a way to read and write that no hook sees: it gets all files
    /// from the kernel from now on, in children of fork too.
    pub fn release_all_files(&mut self) {
        // Relaxed: read under the registry lock.
        if !IS_BLIND.swap(true, Relaxed) {
            self.pass_all(Reason::Unseen);
        }
    }

    /// After [`Registry::release_all_files`]: forgets all files, and the engine, which ends when no call uses it any more.
    /// Descriptions that still share one of the kernel's (`multi_open.G3`), and those with bytes that could
    /// not be written back, stay.
    pub fn end_serving(&mut self) {
        let stays = |description: &OpenFile| description.is_served() || description.is_unwritten();
        for (fd, slot) in table::known(0, u32::MAX) {
            match slot {
                NumberState::Internal => {}
                NumberState::File(description) if stays(description) => {}
                _ => {
                    table::set(fd, NumberState::Foreign);
                }
            }
        }
        let closing = &mut self.closing;
        self.inodes.retain(|_, inode| {
            inode.descriptions.retain(|description| {
                if !stays(description) {
                    description.stop_hits();
                    closing.add(description);
                }
                stays(description)
            });
            !inode.descriptions.is_empty()
        });
        self.serving.end();
        self.closing.end();
    }

    /// Leaves `fd` to the kernel for good, if it is UNSERVED.
    pub fn release_descriptor(&mut self, fd: RawFd) {
        table::try_change(fd, NumberState::Unserved, NumberState::Left);
    }

    /// Leaves the file behind `fd` to the kernel for good.
    pub fn pass_fd(&mut self, fd: RawFd, reason: Reason) {
        self.release_descriptor(fd);
        if let Some(description) = table::description(fd) {
            // SAFETY: the registry is locked.
            let id = unsafe { description.cold() }.id;
            self.pass_file(id, reason);
        }
    }

    /// Leaves all files and descriptors to the kernel for good: another process gets them, or may.
    pub fn pass_all(&mut self, reason: Reason) {
        let files = self.inodes.iter().filter(|(_, inode)| inode.passed.is_none());
        let ids: Vec<FileId> = files.map(|(id, _)| *id).collect();
        ids.iter().for_each(|id| self.pass_file(*id, reason));
        table::known(0, u32::MAX).for_each(|(fd, _)| self.release_descriptor(fd));
    }

    /// The program finds no free descriptor: gives it those of the engine's. Their files are
    /// passed, and get descriptions without one. Not those that the process may have locked. Returns
    /// whether there were any.
    pub fn shed(&mut self) -> bool {
        self.is_crowded = true;
        self.pass_shared();
        let ids: Vec<FileId> = self
            .inodes
            .iter()
            .filter(|(id, _)| !process_locks::is_noted(**id))
            .filter(|(_, inode)| inode.descriptions.iter().any(|d| d.kernel_fd() >= 0))
            .map(|(id, _)| *id)
            .collect();
        for id in &ids {
            self.pass_file(*id, Reason::Descriptors);
            self.renew(*id, Reason::Descriptors);
        }
        self.closing.end();
        !ids.is_empty()
    }

    /// The descriptors of the engine's, retired ones excepted, for a forked child to close.
    pub fn internal_fds(&self) -> Vec<RawFd> {
        let of_inode = |inode: &Inode| inode.descriptions.clone();
        self.inodes
            .values()
            .flat_map(of_inode)
            .chain(self.closing.0.iter().map(|(_, description)| *description))
            .map(OpenFile::kernel_fd)
            .filter(|fd| *fd >= 0)
            .chain(pending_close::fds())
            .collect()
    }

    /// A description of a file in mode back, held: all that it has share one.
    pub fn find_late(&self, id: FileId) -> Option<Pin> {
        let descriptions = &self.inodes.get(&id)?.descriptions;
        descriptions.iter().find(|d| d.late_file().is_some()).map(|d| Pin::of_registered(d))
    }

    /// The file behind `fd`, if this is its last number.
    pub fn last_slot_of(&self, fd: RawFd) -> Option<FileId> {
        let is_alone = |inode: &Inode| inode.descriptions.len() == 1;
        self.last_number_of(fd).filter(|id| self.inodes.get(id).is_none_or(is_alone))
    }

    /// The file of the description at `fd`, if that has no other number.
    pub fn last_number_of(&self, fd: RawFd) -> Option<FileId> {
        let description = table::description(fd)?;
        // SAFETY: the registry is locked.
        let cold = unsafe { description.cold() };
        (cold.slots == 1).then_some(cold.id)
    }
}

/// See [`Registry::release_all_files`]; not for the library's own work.
pub fn release_all_files() {
    if !thread::record().is_inside() {
        section::run(|_| lock().release_all_files());
    }
}

/// Before a call for which the kernel must have what `fd` is: hands it over for good. Not for the library's own work.
pub fn hand_over(fd: RawFd, reason: Reason) {
    let is_ours =
        is_served(fd) || matches!(table::get(fd), NumberState::Unserved | NumberState::Claimed);
    if is_ours && !thread::record().is_inside() {
        section::run(|_| lock().pass_fd(fd, reason));
    }
}

/// Whether the file behind `fd` is served just now.
pub fn is_served(fd: RawFd) -> bool {
    matches!(table::get(fd), NumberState::File(description) if description.is_served())
}

/// Before exec: nothing waits.
pub fn detach_keeper() {
    let engine = lock().serving.made().cloned();
    if let Some(engine) = engine {
        engine.detach_keeper();
    }
}

/// Before the report: the engine's statistics, where the report has them. In a section.
pub fn before_report() -> Option<Stats> {
    let registry = lock();
    registry.serving.tell_lost_keeper();
    let engine = registry.serving.made().cloned();
    drop(registry);
    // Takes time in proportion to the cached pages.
    engine.filter(|_| config::get().backing == Backing::Direct).as_ref().map(Engine::stats)
}

/// All descriptions in mode back, held.
pub fn late_files() -> Vec<Pin> {
    let registry = lock();
    let all = registry.inodes.values().flat_map(|inode| &inode.descriptions);
    all.filter(|d| d.late_file().is_some()).map(|d| Pin::of_registered(d)).collect()
}
