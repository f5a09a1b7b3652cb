//! The numbers of a description: a second one, one that goes, one that becomes another's; and what
//! is noted of them.

use std::os::fd::RawFd;

use crate::files::description::Description;
use crate::files::hand_over::{count_moved_by_libc, end_locks, go_through};
use crate::files::identity::{self, FileId};
use crate::files::registry::{Registry, STDERR};
use crate::files::table::{self, Known};
use crate::files::watch::{self, LOCKED, PROCESS_LOCKED};
use crate::files::{lease, process_locks};
use crate::report::reason::Reason;
use crate::runtime::thread::{Snapshot, record};

/// Whether it is known already that the process locks the file behind `fd`, so that
/// [`Registry::note_process_lock`] has nothing to do.
pub fn is_lock_noted(fd: RawFd) -> bool {
    match table::get(fd) {
        Known::Watched | Known::Left => {
            watch::of(fd).is_some_and(|watch| watch.flags() & PROCESS_LOCKED != 0)
        }
        Known::File(_) => {
            let record = record();
            record.enter();
            let is_noted = table::description(fd).is_some_and(Description::is_lock_noted);
            record.exit();
            is_noted
        }
        _ => false,
    }
}

impl Registry {
    /// The program is about to take a POSIX lock on the file behind `fd`.
    pub fn note_process_lock(&mut self, fd: RawFd) {
        if let Some(description) = table::description(fd) {
            // SAFETY: the registry is locked.
            process_locks::note(unsafe { description.cold() }.id);
            description.note_lock();
            return;
        }
        let Some(watch) = watch::of(fd) else { return };
        let slot = table::get(fd);
        let is_noted =
            matches!(slot, Known::Watched | Known::Left) && watch.flags() & PROCESS_LOCKED != 0;
        if is_noted || !matches!(slot, Known::Watched | Known::Left | Known::Unknown) {
            return;
        }
        let Some(identity) = identity::identify(fd).filter(|identity| identity.is_regular) else {
            return;
        };
        if matches!(slot, Known::Unknown) {
            // From here on it has to be known when it is closed.
            watch::begin(fd, 0);
            watch.set_reason(Reason::Inherited);
            table::set(fd, Known::Left);
        }
        self.locked.retain(|(_, number)| *number != fd);
        self.locked.push((identity.id, fd));
        process_locks::note(identity.id);
        watch.note(PROCESS_LOCKED);
    }

    /// The program locks the description at `fd`; see `Cold::is_locked`.
    pub fn note_lock(&mut self, fd: RawFd) {
        if let Some(description) = table::description(fd) {
            // SAFETY: the registry is locked.
            unsafe { description.cold() }.is_locked = true;
        } else if matches!(table::get(fd), Known::Watched | Known::Left) {
            for watch in watch::numbers(fd).into_iter().filter_map(watch::of) {
                watch.note(LOCKED);
            }
        }
    }

    /// A second number for the description at `fd`.
    pub fn share(&mut self, fd: RawFd, new: RawFd) {
        match table::get(fd) {
            Known::File(description) => {
                // SAFETY: the registry is locked.
                let cold = unsafe { description.cold() };
                if table::set(new, Known::File(description)) {
                    cold.slots += 1;
                    watch::duplicate(fd, new);
                }
                if new as usize >= table::SLOTS {
                    let id = cold.id;
                    self.pass_file(id, Reason::Descriptors);
                } else if new <= STDERR {
                    self.share_with_libc(new);
                }
            }
            Known::Foreign => {
                table::set(new, Known::Foreign);
            }
            Known::Watched | Known::Left => {
                let is_joined = watch::join(fd, new);
                table::set(new, if is_joined { Known::Left } else { Known::Foreign });
                // in_flight.I5.
                self.leave(fd, if new <= STDERR { Reason::Stdio } else { Reason::Duplicated });
            }
            Known::Unknown | Known::Internal | Known::Claimed => {
                table::set(new, Known::Unknown);
            }
        }
    }

    /// The program gives the number `fd` up: its close follows.
    pub fn forget(&mut self, fd: RawFd) {
        let slot = table::get(fd);
        if matches!(slot, Known::Watched | Known::Left)
            && watch::of(fd).is_some_and(|watch| watch.flags() & LOCKED != 0)
        {
            self.end_locks_of_watched(fd);
        }
        table::set(fd, Known::Unknown);
        match slot {
            Known::File(description) => {
                // SAFETY: the registry is locked.
                let _ending = process_locks::giving_up(unsafe { description.cold() }.id);
                self.give_up_slot(description);
            }
            Known::Watched | Known::Left => self.forget_watch(fd, true),
            _ => {}
        }
    }

    /// [`Registry::forget`], of a number that is released (`forked`) and stays claimed until it is closed.
    pub fn forget_released(&mut self, fd: RawFd) {
        self.forget_watch(fd, true);
    }

    /// The watched number `fd` is no longer in the table; `is_closing`: the program gives it up.
    fn forget_watch(&mut self, fd: RawFd, is_closing: bool) {
        let Some(watch) = watch::of(fd) else { return };
        watch.tell();
        if watch.flags() & PROCESS_LOCKED == 0 {
            return;
        }
        let Some(index) = self.locked.iter().position(|(_, number)| *number == fd) else { return };
        let (id, _) = self.locked.swap_remove(index);
        let _ending = is_closing.then(|| process_locks::giving_up(id));
        if !self.is_known(id) {
            self.forget_process_locks(id);
        }
    }

    /// No description of the file is known any more.
    fn forget_process_locks(&self, id: FileId) {
        if self.locked.iter().all(|(other, _)| *other != id) {
            process_locks::forget(id);
        }
    }

    /// The number `fd` was closed where no hook saw it.
    pub fn forget_lost(&mut self, fd: RawFd) {
        let slot = table::get(fd);
        table::set(fd, Known::Unknown);
        match slot {
            Known::File(description) => self.give_up_slot(description),
            Known::Watched | Known::Left => self.forget_watch(fd, false),
            _ => {}
        }
    }

    /// `new`, which was something else perhaps, has become a second number for the description at
    /// `fd`. It changes in one step: whoever uses it meanwhile meets the one or the other file.
    pub fn replace(&mut self, fd: RawFd, new: RawFd) {
        let old = table::get(new);
        // The registry is locked: what is claimed is released (`forked`).
        if matches!(old, Known::Watched | Known::Left | Known::Claimed) {
            self.forget_watch(new, false);
        }
        self.share(fd, new);
        if let Known::File(description) = old {
            self.give_up_slot(description);
        }
    }

    /// A number of the description is no longer in the table.
    fn give_up_slot(&mut self, description: &'static Description) {
        // SAFETY: the registry is locked.
        let cold = unsafe { description.cold() };
        cold.slots -= 1;
        if cold.slots > 0 {
            return;
        }
        let (id, is_locked) = (cold.id, cold.is_locked);
        let mut others_share = false;
        if let Some(inode) = self.inodes.get_mut(&id) {
            inode.descriptions.retain(|other| !std::ptr::eq(*other, description));
            others_share = description.shares() && !inode.descriptions.is_empty();
            if inode.descriptions.is_empty() {
                if inode.passed.is_none() {
                    Self::note_unleased();
                }
                self.inodes.remove(&id);
                self.forget_process_locks(id);
            }
        }
        count_moved_by_libc(description);
        if description.is_served() && !description.is_bypassed() {
            description.row().inspect(|row| row.end(None));
        }
        if description.is_served() && !others_share {
            if description.shares() && !description.is_bypassed() {
                // late.L4: those who closed the others did not know that they were the last.
                go_through(description);
            }
            lease::give_up(description.kernel_fd());
        }
        let is_shared = matches!(description.reason(), Reason::Forked | Reason::Given);
        if is_locked && !is_shared && description.kernel_fd() >= 0 {
            end_locks(description.kernel_fd());
        }
        description.stop_hits();
        self.closing.push((Snapshot::take(), description));
        if others_share {
            self.leave_readers(id);
        }
        self.end_closing();
    }
}
