//! What an adoption does under the registry's lock, and what undoes it: see `adoption`.

use std::os::fd::{BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use millpond::{Backing, File};

use crate::files::description::{Access, Description};
use crate::files::hand_over::end_locks;
use crate::files::identity::{self, FileId, status_flags};
use crate::files::offset::{OFFSET_END, kernel_offset};
use crate::files::registry::Registry;
use crate::files::serving::Opened;
use crate::files::table::{self, Known};
use crate::files::watch::{self, LOCKED, MAPPED, PROCESS_LOCKED, SHARED, WRITABLE};
use crate::files::{given, lingering, mode_back, process_locks};
use crate::report::reason::Reason;
use crate::runtime::config;
use crate::runtime::sys::sys;
use crate::runtime::thread::{self, Snapshot};

/// A file that may be adopted: by which number, and how that was opened.
pub struct Claim {
    pub fd: RawFd,
    pub id: FileId,
    pub flags: i32,
}

/// `adoption.N5`: who comes again and again is waited for the longer. Adopting and giving back takes
/// 50 microseconds (`watch::READS_AGAIN`, measured). Chosen, not measured: with eight times as many reads
/// before the next time that is a small part of what they take, and less from then on.
const GIVEN_BACK: u32 = 8;

/// For how long a claim waits for calls in flight, while others on the description wait for it. Chosen,
/// not measured: longer than a read from the kernel's cache, shorter than most from the device.
pub fn patience() -> impl FnMut() -> bool {
    const PATIENCE: Duration = Duration::from_micros(200);
    let mut end = None;
    move || {
        let end = *end.get_or_insert_with(|| Instant::now() + PATIENCE);
        // SAFETY: no memory involved.
        unsafe { sys!(libc::SYS_sched_yield) };
        Instant::now() < end
    }
}

impl Registry {
    /// Adopts a watched file, or says why not: no reason where another try may do better.
    pub fn adopt_watched(&mut self, claim: &Claim) -> Result<(), Option<Reason>> {
        let Claim { fd, id, flags } = *claim;
        self.end_closing();
        self.serving.tell_lost_keeper();
        if !matches!(table::get(fd), Known::Watched) || self.has_former(id) {
            return Err(None);
        }
        self.unshare(fd)?;
        if let Some(reason) = self.refusal(fd, id, Access::of_flags(flags), flags) {
            return Err(Some(reason));
        }
        self.serving.prepare().map_err(Some)?;
        // It may have been closed just now.
        if !table::try_change(fd, Known::Watched, Known::Claimed) {
            return Err(None);
        }
        let is_free = thread::await_calls(&[fd], patience())
            && status_flags(fd) == flags
            && identity::identify(fd).is_some_and(|identity| identity.id == id);
        let outcome = if is_free { self.take_over(claim) } else { Err(None) };
        if outcome.is_err() {
            table::set(fd, Known::Watched);
        }
        match outcome {
            Err(Some(Reason::OpenElsewhere)) => self.adopt_several(fd, id, patience()),
            outcome => outcome,
        }
    }

    /// The kernel has no call in flight there, and gets none.
    fn take_over(&mut self, claim: &Claim) -> Result<(), Option<Reason>> {
        let Claim { fd, id, flags } = *claim;
        let watch = watch::of(fd).ok_or(None)?;
        watch.explain_inherited(fd);
        let noted = watch.flags();
        let access = Access::of_flags(flags);
        let is_wanted = || noted & MAPPED == 0 && access.write && mode_back::is_wanted(flags);
        let is_first = self.inodes.get(&id).is_none_or(|inode| inode.descriptions.is_empty());
        let offset = u64::try_from(kernel_offset(fd)).map_err(|_| Some(Reason::Changed))?;
        if offset >= OFFSET_END {
            return Err(Some(Reason::Changed));
        }
        let opened = Opened { fd, id, access, is_late: is_wanted(), is_first, waits: false };
        let (internal_fd, file) = self.serve(&opened)?;
        map(&file, internal_fd, access);
        // Asked again: it may be the first file, and no keeper there.
        let is_late = opened.is_late && is_wanted();
        let description = Description::acquire(id, access, offset, internal_fd, Ok(Arc::new(file)));
        // SAFETY: the registry is locked.
        let cold = unsafe { description.cold() };
        cold.is_locked = noted & LOCKED != 0;
        if is_late {
            description.set_late();
        }
        self.push_served(id, description);
        self.locked.retain(|(_, number)| *number != fd);
        watch.note_served();
        table::set(fd, Known::File(description));
        Ok(())
    }

    /// Its use has ceased to pay.
    pub fn give_back(&mut self, description: &Description) {
        // SAFETY: the registry is locked.
        let id = unsafe { description.cold() }.id;
        let is_served = |inode: &&super::registry::Inode| {
            inode.descriptions.iter().any(|other| std::ptr::eq(*other, description))
        };
        if self.inodes.get(&id).filter(is_served).is_some() {
            self.pass_file(id, Reason::Unused);
        }
    }

    /// After a file was passed, all its bytes are the kernel's: its numbers are watched again, or
    /// left if what stands in the way stays. Its descriptions end.
    pub fn watch_again(&mut self, id: FileId, reason: Reason) {
        let Some(inode) = self.inodes.get_mut(&id) else { return };
        let descriptions = std::mem::take(&mut inode.descriptions);
        let (ended, kept): (Vec<_>, Vec<_>) =
            descriptions.into_iter().partition(|d| !d.is_unwritten() && !d.is_served());
        let is_kept = !kept.is_empty();
        inode.descriptions = kept;
        if !is_kept {
            self.inodes.remove(&id);
        }
        let has_locks = process_locks::is_noted(id);
        for description in ended {
            let numbers = table::numbers_of(description);
            // SAFETY: the registry is locked.
            let cold = unsafe { description.cold() };
            let is_shared = cold.offset_given.is_some();
            let slot = if goes_by(reason) && !is_kept && !is_shared && numbers.len() == 1 {
                Known::Watched
            } else {
                Known::Left
            };
            let group = if numbers.len() > 1 { watch::new_group() } else { 0 };
            let mut flags = 0;
            flags |= if description.access().write { WRITABLE } else { 0 };
            flags |= if cold.is_locked { LOCKED } else { 0 };
            flags |= if has_locks { PROCESS_LOCKED } else { 0 };
            for number in numbers {
                let Some(watch) = watch::of(number) else {
                    table::set(number, Known::Foreign);
                    continue;
                };
                let has_paid = reason == Reason::Forked && watch.has_paid();
                watch.begin_again(flags | watch.flags() & MAPPED, group, reason);
                if has_paid || config::is_eager() {
                    watch.need_anew();
                } else {
                    watch.postpone(GIVEN_BACK, None);
                }
                if has_locks {
                    self.locked.push((id, number));
                }
                table::set(number, slot);
            }
            description.stop_hits();
            self.former.push((id, description, description.life()));
            self.closing.push((Snapshot::take(), description));
        }
        self.end_closing();
    }

    /// `adoption.N3`.
    pub(in crate::files) fn has_former(&mut self, id: FileId) -> bool {
        self.former.retain(|(_, description, life)| description.is_alive(*life));
        self.former.iter().any(|(former, ..)| *former == id)
    }

    /// Leaves the watched description at `fd` to the kernel for good.
    pub fn leave(&mut self, fd: RawFd, reason: Reason) {
        for number in watch::numbers(fd) {
            if reason == Reason::Given {
                given::give(number);
            }
            if let Some(watch) = watch::of(number)
                && matches!(table::get(number), Known::Watched)
            {
                watch.set_reason(reason);
                table::try_change(number, Known::Watched, Known::Left);
            }
        }
    }

    /// Somebody got one of the descriptions of the file, and it is not known which.
    pub fn give(&mut self, id: FileId) {
        self.pass_file(id, Reason::Given);
        for (fd, slot) in table::known(0, u32::MAX) {
            let is_it = || identity::identify(fd).is_some_and(|identity| identity.id == id);
            if matches!(slot, Known::Watched | Known::Left) && is_it() {
                self.leave(fd, Reason::Given);
                watch::of(fd).inspect(|watch| watch.note(SHARED));
            }
        }
    }

    /// Before the watched number `fd`, by which the description was locked, is given up. If it is
    /// the last one, the locks end with it; a duplicate of the engine's may not be closed yet.
    pub fn end_locks_of_watched(&mut self, fd: RawFd) {
        if watch::of(fd).is_some_and(|watch| watch.flags() & SHARED != 0) {
            return;
        }
        let Some(identity) = identity::identify(fd) else { return };
        let is_held = self.has_former(identity.id)
            || lingering::is_lingering(identity.id)
            || !process_locks::retired().is_empty();
        if is_held && watch::numbers(fd) == [fd] {
            end_locks(fd);
        }
    }

    /// Leaves all watched files to the kernel for good: another process gets their descriptions, and does
    /// not tell what it does with them.
    pub fn leave_watched(&mut self, reason: Reason) {
        given::give_all();
        for (fd, slot) in table::known(0, u32::MAX) {
            if matches!(slot, Known::Watched | Known::Left) {
                self.leave(fd, reason);
                watch::of(fd).inspect(|watch| watch.note(SHARED));
            }
        }
    }
}

/// Until it is changed, what the kernel has cached of the file need not be copied to be hit.
fn map(file: &File, fd: RawFd, access: Access) {
    let is_wanted = access.read && config::get().backing == Backing::Buffered;
    if is_wanted && identity::maps_what_it_reads(fd) {
        // SAFETY: `fd` is open, and `file` its only user beside us. Nobody but this process changes the file
        // while there is the lease, which is given up after `File::invalidate`; what this process has the kernel
        // change comes after `File::end_mapping`. Faults are handled since there is an engine (`fault`).
        unsafe { file.map(BorrowedFd::borrow_raw(fd)) };
    }
}

/// Whether a file that was passed for it may be adopted again.
fn goes_by(reason: Reason) -> bool {
    matches!(
        reason,
        Reason::OpenedElsewhere
            | Reason::OpenElsewhere
            | Reason::Forked
            | Reason::OpenTwice
            | Reason::Locked
            | Reason::Unused
            | Reason::Descriptors
    )
}
