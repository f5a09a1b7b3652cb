//! A file that the process has open several times, a writer among them: served by one description.
//!
//! The kernel refuses a write lease while the inode has a second open description, even of the same process. So all
//! descriptors of the file become duplicates of one description, the *real* one, which carries the lease. The library
//! keeps the rights, the flags and the offset of each descriptor.
//!
//! A further open of a file that is served gets a duplicate at once (`reopen`). The other order is this module's: the
//! process has a file open several times, and the kernel serves its descriptors (`unserved`).
//!
//! ```text
//! claim the descriptors that are UNSERVED; no call in flight on any     in_flight.I1, I2, I5
//! note flags, offset and close-on-exec of each                           G1
//! real: /proc/self/fd/N, opened for reading and writing
//! dup3(real, number) of each: its own description ends
//! the lease, the engine's handle                                         G2; refused: each is opened again
//! slots -> descriptions that share the file                              open_file.D6
//! ```
//!
//! The file is handed to the kernel in the other direction, for good:
//!
//! ```text
//! write back; bypass all                                                 open_file.D7
//! drop cached pages; give up the lease
//! each: /proc/self/fd/REAL, opened with its flags; its offset; dup3 over its number; PASSED
//! ```
//!
//! - G1. Opening a file again loses locks, mappings, and flags other than O_APPEND and O_NONBLOCK. A file with any of
//!   these, opened by another path, or without the rights to open it again, stays with the kernel.
//! - G2. The lease proves that no other description is open: of another process, of a descriptor that is unknown here,
//!   or of a closed descriptor in a call that goes on.
//! - G3. No other process gets a lease while the real one is open for writing, so an open of the file with the registry
//!   locked does not wait. Before the process changes its rights, or the file's, the file is handed over. Parting may
//!   still fail: another process has changed the file's rights, or no number is free. Then the descriptions stay
//!   bypassed. Each later hand-over tries again, and calls about the description itself are refused: O_APPEND and
//!   other flags, locks, writable mappings.
//! - G4. A call about the description itself, such as `flock` or a mapping, hands the file over first: [`make_real`].
//! - G5. So does the close of the last descriptor that may write. Other processes could not execute the file.
//! - G6. The kernel's memory of advice is lost, and processes that watch the file see it opened and closed.
//! - G7. POSIX locks end with any close of a descriptor of the file, so with a dup3 over one. A file on which the process
//!   has such locks is not shared, and the first lock hands a shared file over.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::files::identity::{self, FileId, status_flags};
use crate::files::offset::{OFFSET_END, kernel_offset};
use crate::files::open_file::{Access, OpenFile};
use crate::files::registry::{self, Registry};
use crate::files::serving::Opened;
use crate::files::table::{self, NumberState};
use crate::files::unshare::{have_spare, make_own, open_anew, replace};
use crate::files::{mode_back, process_locks, unserved};
use crate::report::reason::Reason;
use crate::runtime::link::path_of;
use crate::runtime::sys::{errno, set_errno, sys};
use crate::runtime::{section, thread};

/// G1.
pub const LOST: i32 = libc::O_DIRECT | libc::O_DSYNC | libc::O_NOATIME;
/// G1: flags that a description may have. O_NOFOLLOW is of the open only; the last two are the kernel's own,
/// and a lease's.
const PLAIN: i32 = libc::O_ACCMODE
    | libc::O_NOFOLLOW
    | libc::O_APPEND
    | libc::O_NONBLOCK
    | libc::O_CLOEXEC
    | LARGE_FILE
    | libc::O_ASYNC;
const LARGE_FILE: i32 = if cfg!(target_arch = "x86_64") { 0o100_000 } else { 0o400_000 };

/// For how long a claim waits for calls in flight, while new calls on the descriptors wait for it. Chosen: a thread that
/// was preempted amid a call gets its next time slice.
fn patience() -> impl FnMut() -> bool {
    const PATIENCE: Duration = Duration::from_millis(10);
    let mut end = None;
    move || {
        let end = *end.get_or_insert_with(|| Instant::now() + PATIENCE);
        // SAFETY: no memory involved.
        unsafe { sys!(libc::SYS_sched_yield) };
        Instant::now() < end
    }
}

/// One of the descriptions, as it was opened.
struct Member {
    fd: RawFd,
    flags: i32,
    offset: u64,
}

impl Member {
    /// G1. The number is claimed.
    fn of_descriptor(fd: RawFd, id: FileId) -> Option<Self> {
        let flags = status_flags(fd);
        let offset = u64::try_from(kernel_offset(fd)).unwrap_or(OFFSET_END);
        let is_it = identity::identify(fd).is_some_and(|identity| identity.id == id);
        let is_plain = flags >= 0 && flags & !PLAIN == 0 && offset < OFFSET_END;
        (is_it && is_plain).then_some(Self { fd, flags, offset })
    }

    fn access(&self) -> Access {
        Access::of_flags(self.flags)
    }
}

impl Registry {
    /// Serves a file that is open for writing at `fd`, which is UNSERVED, with all its descriptors of this process.
    pub fn serve_together(&mut self, fd: RawFd, id: FileId) -> Result<(), Reason> {
        let mut numbers = Vec::new();
        for (number, slot) in table::known(0, u32::MAX) {
            let is_it = || identity::identify(number).is_some_and(|found| found.id == id);
            match slot {
                NumberState::Unserved if is_it() => numbers.push(number),
                NumberState::Left if is_it() => return Err(Reason::OpenTwice),
                _ => {}
            }
        }
        if numbers.len() < 2 {
            return Err(Reason::OpenElsewhere);
        }
        if process_locks::is_noted(id) || process_locks::is_locked(fd, id) {
            return Err(Reason::Locked);
        }
        let count = numbers.len();
        numbers.retain(|number| {
            table::try_change(*number, NumberState::Unserved, NumberState::Claimed)
        });
        let is_free = numbers.len() == count && thread::await_calls(&numbers, patience());
        let members = numbers.iter().map(|number| Member::of_descriptor(*number, id));
        let outcome = if is_free {
            let members = members.collect::<Option<Vec<_>>>().ok_or(Reason::OpenTwice);
            members.and_then(|members| self.take_over(id, &members))
        } else {
            // Another try may find it free.
            Err(Reason::OpenElsewhere)
        };
        if let Err(reason) = outcome {
            let next = if reason == Reason::OpenElsewhere {
                NumberState::Unserved
            } else {
                NumberState::Left
            };
            for number in numbers {
                table::try_change(number, NumberState::Claimed, next);
            }
        }
        outcome
    }

    /// The kernel has no call in flight on any of them, and gets none.
    fn take_over(&mut self, id: FileId, members: &[Member]) -> Result<(), Reason> {
        let Some(writer) = members.iter().find(|member| member.access().write) else {
            return Err(Reason::OpenElsewhere);
        };
        if let Some(reason) = mode_back::refusal(writer.flags) {
            return Err(reason);
        }
        if members.iter().any(|member| !have_one_path(member.fd, writer.fd)) {
            return Err(Reason::OpenTwice);
        }
        if !have_spare() {
            return Err(Reason::Descriptors);
        }
        let real = open_anew(writer.fd, libc::O_RDWR).ok_or(Reason::OpenTwice)?;
        let done = members.iter().take_while(|member| replace(real, member.fd)).count();
        if done < members.len() {
            self.restore(id, &members[..done], real, Reason::Descriptors);
            return Err(Reason::Descriptors);
        }
        let access = Access { read: true, write: true, append: false };
        let opened = Opened { fd: real, id, access, is_first: true };
        let mut served = self.serve(&opened);
        let mut goes_on = patience();
        // A call that names no number, such as fstat, may hold the former description.
        while matches!(served, Err(Reason::OpenElsewhere)) && goes_on() {
            served = self.serve(&opened);
        }
        let (internal_fd, file) = match served {
            Ok((internal_fd, file)) => (internal_fd, Arc::new(file)),
            Err(reason) => {
                self.restore(id, members, real, reason);
                return Err(reason);
            }
        };
        process_locks::close(real);
        for Member { fd, flags, offset } in members {
            let file = Arc::clone(&file);
            let description = OpenFile::acquire(id, *flags, *offset, internal_fd, Ok(file));
            description.set_sharing(*flags);
            self.push_served(id, description);
            unserved::uncount(*fd);
            table::set(*fd, NumberState::File(description));
        }
        Ok(())
    }

    /// The lease was refused: each gets a description of its own again, or G3.
    fn restore(&mut self, id: FileId, members: &[Member], real: RawFd, reason: Reason) {
        let mut is_needed = false;
        for Member { fd, flags, offset } in members {
            if make_own(real, &[*fd], *flags, *offset) {
                continue;
            }
            is_needed = true;
            let description = OpenFile::acquire(id, *flags, *offset, real, Err(reason));
            description.set_sharing(*flags);
            description.begin_bypassed();
            let inode = self.inodes.entry(id).or_default();
            inode.passed = Some(reason);
            inode.descriptions.push(description);
            table::set(*fd, NumberState::File(description));
        }
        if !is_needed {
            process_locks::close(real);
        }
    }

    /// G3: hands all files over that descriptions share.
    pub fn pass_shared(&mut self) {
        let shared: Vec<FileId> = self
            .inodes
            .iter()
            .filter(|(_, inode)| inode.descriptions.iter().any(|d| d.shares()))
            .map(|(id, _)| *id)
            .collect();
        for id in shared {
            self.pass_file(id, Reason::OpenTwice);
        }
    }

    /// G5, before the one number is given up by which the file is written: handed over, if it is that.
    pub fn release_last_writer(&mut self, fd: RawFd) -> Option<FileId> {
        let writer = table::description(fd)?;
        // SAFETY: the registry is locked.
        let cold = unsafe { writer.cold() };
        let others = self.inodes.get(&cold.id)?.descriptions.iter();
        let is_last = writer.shares()
            && writer.access().write
            && cold.slots == 1
            && others.filter(|other| !std::ptr::eq(**other, writer)).all(|d| !d.access().write);
        is_last.then(|| {
            self.pass_file(cold.id, Reason::OpenTwice);
            cold.id
        })
    }

    /// G5, after a number that shares the file was given up.
    pub fn release_readers(&mut self, id: FileId) {
        let Some(inode) = self.inodes.get(&id) else { return };
        let is_read_only = inode.descriptions.iter().all(|d| d.shares() && !d.access().write);
        if is_read_only && !inode.descriptions.is_empty() {
            self.pass_file(id, Reason::OpenTwice);
        }
    }
}

/// Tries to serve a file that is open for writing at `fd`, which is UNSERVED and in use. Between two calls.
#[cold]
pub fn try_to_serve(fd: RawFd) {
    if thread::record().is_inside() {
        return;
    }
    let told = errno();
    section::run(|record| {
        // In a handler that has interrupted such a call.
        if record.is_calling(&[fd]) {
            return;
        }
        let Some(identity) = identity::identify(fd).filter(|identity| identity.is_regular) else {
            return;
        };
        let mut registry = registry::lock();
        if matches!(table::get(fd), NumberState::Unserved) && !registry.is_known(identity.id) {
            // It stays the kernel's otherwise.
            let _ = registry.serve_together(fd, identity.id);
        }
    });
    set_errno(told);
}

/// Whether both were opened by the same name, and have it still: the one's would become the other's.
fn have_one_path(one: RawFd, other: RawFd) -> bool {
    let mut paths = [[0; libc::PATH_MAX as usize]; 2];
    let [first, second] = &mut paths;
    path_of(one, first) == path_of(other, second)
}

/// G4: before a call on `fd` that is about its description.
pub fn make_real(fd: RawFd) {
    if matches!(table::get(fd), NumberState::File(description) if description.shares()) {
        registry::hand_over(fd, Reason::OpenTwice);
    }
}

/// G3: before this process is allowed less, or more, than when it opened its files.
pub fn before_rights() {
    if registry::holds_leases() && !thread::record().is_inside() {
        section::run(|_| registry::lock().pass_shared());
    }
}

/// G3: whether the kernel would take a call on `fd` that is about its description for one about another:
/// it is refused then.
pub fn is_bypassed(fd: RawFd) -> bool {
    matches!(table::get(fd), NumberState::File(description)
        if description.is_bypassed() && description.is_served())
}

/// Whether the library has to refuse a write at `fd`, as the kernel would not.
pub fn may_not_write(fd: RawFd) -> bool {
    matches!(table::get(fd), NumberState::File(description)
        if description.shares() && description.is_served() && !description.access().write)
}
