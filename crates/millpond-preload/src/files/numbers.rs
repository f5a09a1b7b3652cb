//! The descriptor numbers of a description: duplicates, closes, replacements, and locks taken by them.

use std::os::fd::RawFd;

use crate::files::hand_over::{end_locks, go_through};
use crate::files::open_file::OpenFile;
use crate::files::registry::{Registry, STDERR};
use crate::files::table::{self, NumberState};
use crate::files::{lease, process_locks};
use crate::report::reason::Reason;

impl Registry {
    /// The program is about to take a POSIX lock on the file behind `fd`. A file that descriptions share is handed over
    /// first (multi_open.G7).
    pub fn note_process_lock(&mut self, fd: RawFd) {
        let Some(description) = table::description(fd) else { return };
        // SAFETY: the registry is locked.
        let id = unsafe { description.cold() }.id;
        if description.shares() && description.is_served() {
            self.pass_file(id, Reason::Locked);
        }
        // It may be another one by now.
        if table::description(fd).is_some_and(|description| !description.shares()) {
            process_locks::note(id);
        }
    }

    /// The program locks the description at `fd`; see `Cold::is_locked`.
    pub fn note_lock(&mut self, fd: RawFd) {
        if let Some(description) = table::description(fd) {
            // SAFETY: the registry is locked.
            unsafe { description.cold() }.is_locked = true;
        }
        self.release_descriptor(fd);
    }

    /// A second number for the description at `fd`.
    pub fn share(&mut self, fd: RawFd, new: RawFd) {
        match table::get(fd) {
            NumberState::File(description) => {
                // SAFETY: the registry is locked.
                let cold = unsafe { description.cold() };
                if table::set(new, NumberState::File(description)) {
                    cold.slots += 1;
                }
                if new as usize >= table::SLOTS {
                    let id = cold.id;
                    self.pass_file(id, Reason::Descriptors);
                } else if new <= STDERR {
                    self.pass_fd(new, Reason::Stdio);
                }
            }
            NumberState::Foreign => {
                table::set(new, NumberState::Foreign);
            }
            NumberState::Unserved | NumberState::Left => {
                // in_flight.I5.
                self.release_descriptor(fd);
                table::set(new, NumberState::Left);
            }
            NumberState::Unknown | NumberState::Internal | NumberState::Claimed => {
                table::set(new, NumberState::Unknown);
            }
        }
    }

    /// The program gives the number `fd` up: its close follows.
    pub fn forget(&mut self, fd: RawFd) {
        let slot = table::get(fd);
        table::set(fd, NumberState::Unknown);
        if let NumberState::File(description) = slot {
            // SAFETY: the registry is locked.
            let id = unsafe { description.cold() }.id;
            self.release_slot(description);
            process_locks::give_up(id);
        }
    }

    /// The number `fd` was closed where no hook saw it.
    pub fn forget_lost(&mut self, fd: RawFd) {
        let slot = table::get(fd);
        table::set(fd, NumberState::Unknown);
        if let NumberState::File(description) = slot {
            self.release_slot(description);
        }
    }

    /// `new`, which was something else perhaps, has become a second number for the description at
    /// `fd`. It changes in one step: a concurrent call finds the one or the other file.
    pub fn replace(&mut self, fd: RawFd, new: RawFd) {
        let old = table::get(new);
        self.share(fd, new);
        if let NumberState::File(description) = old {
            self.release_slot(description);
        }
    }

    /// A number of the description is no longer in the table.
    fn release_slot(&mut self, description: &'static OpenFile) {
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
                process_locks::forget(id);
            }
        }
        if description.is_served() && !description.is_bypassed() {
            description.row().inspect(|row| row.end(None));
        }
        if description.is_served() && !others_share {
            if description.shares() && !description.is_bypassed() {
                // writeback_policy.L4: those who closed the others did not know that they were the last.
                go_through(description);
            }
            lease::release_lease(description.kernel_fd());
        }
        let is_shared = matches!(description.reason(), Reason::Forked | Reason::Given);
        if is_locked && !is_shared && description.kernel_fd() >= 0 {
            end_locks(description.kernel_fd());
        }
        description.stop_hits();
        self.closing.add(description);
        if others_share {
            self.release_readers(id);
        }
        self.closing.end();
    }
}
