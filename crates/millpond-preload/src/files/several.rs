//! A file that the process has open several times, a writer among them: served by one description.
//!
//! A write lease is refused while its inode has a second open description, even of the same process.
//! So where there are several, each by one number, all their numbers become duplicates of a new one,
//! the *real* one, which carries the lease. The library keeps what each was opened for, and its offset:
//!
//! ```text
//! claim all numbers of the inode; no call in flight on any    in_flight.I1, I2, I5
//! note how each is open: flags, offset, close-on-exec         G1
//! real: /proc/self/fd/N, opened for reading and writing
//! dup3(real, number) of each: its own description ends          G7
//! the lease, the engine's handle                              G2; refused: each is opened anew
//! slots -> descriptions that share the file                   description.D6
//! ```
//!
//! and back:
//!
//! ```text
//! write back; bypass all                                      description.D7
//! drop what is cached; give up the lease
//! each: /proc/self/fd/REAL, opened with its flags; its offset; dup3 over its number; PASSED
//! ```
//!
//! - G1. What opening anew would lose forbids it: locks of the description, or of the process to write; mappings, which keep a description open; other flags than O_APPEND and
//!   O_NONBLOCK; another path; and a right to the file that is gone. Who is about to lock, to map, to duplicate or
//!   to change flags says so with the registry locked, or names the number meanwhile.
//! - G2. The lease says that no description is open but the real one: nobody else's, none of a number
//!   that is not known here, none of a closed number in a call that goes on.
//! - G3. Nobody else gets a lease while the real one is open for writing, so what is opened anew, with the
//!   registry locked, waits for nobody. Before the process changes its rights, or the file's, it comes
//!   back. It may fail still: others have changed the file's rights, no number is free and the one in
//!   reserve (`parting`) was taken meanwhile, or the limit on numbers is lower than the number. Then the
//!   description stays bypassed; whatever would give the file back tries again, and until then calls
//!   that are about the description itself are refused: O_APPEND and its kin, locks, writable mappings.
//! - G4. A call that is about the description itself, such as `flock` or a mapping, gives the file back
//!   first: [`make_real`].
//! - G5. So does the close of the last number that may write: others could not execute the file.
//! - G6. Lost are the kernel's memory of advice, and of whom it has told of an error of write-back that
//!   came before; others who watch the file see it opened and closed.
//! - G7. The process's POSIX locks are by inode and process: any number may take them, whatever description
//!   it stands for (`hooks::lock` minds its rights and its offset), and a close of any of the numbers
//!   ends them all, as ever. Those to read are `carried` over the closes above. With one to write
//!   the numbers are not parted: the description stays bypassed (G3), which such locks do not
//!   mind, until it is given up. A child of fork can't use them then (`forked.K5`).

use std::os::fd::RawFd;
use std::sync::Arc;

use crate::files::carried::{Carried, Locks};
use crate::files::description::{Access, Description};
use crate::files::identity::{self, FileId, status_flags};
use crate::files::offset::{OFFSET_END, kernel_offset};
use crate::files::parting::{have_spare, make_own, open_anew, replace};
use crate::files::registry::{self, Registry};
use crate::files::serving::Opened;
use crate::files::table::{self, Known};
use crate::files::watch::{self, LOCKED, MAPPED, POSTPONED, SHARED};
use crate::files::{mode_back, process_locks};
use crate::report::reason::Reason;
use crate::runtime::link::path_of;
use crate::runtime::sys::sys;
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

/// One of the descriptions, as it was opened.
struct Member {
    fd: RawFd,
    flags: i32,
    offset: u64,
}

impl Member {
    /// G1. The number is claimed.
    fn look(fd: RawFd, id: FileId) -> Result<Self, Option<Reason>> {
        if identity::identify(fd).is_none_or(|identity| identity.id != id) {
            return Err(None);
        }
        let noted = watch::of(fd).map_or(0, |watch| watch.flags());
        let flags = status_flags(fd);
        let offset = u64::try_from(kernel_offset(fd)).unwrap_or(OFFSET_END);
        if noted & LOCKED != 0 {
            Err(Some(Reason::Locked))
        } else if noted & MAPPED != 0 {
            Err(Some(Reason::Mapped))
        } else if noted & SHARED != 0 || flags < 0 || flags & !PLAIN != 0 || offset >= OFFSET_END {
            Err(Some(Reason::OpenTwice))
        } else {
            Ok(Self { fd, flags, offset })
        }
    }

    fn access(&self) -> Access {
        Access::of_flags(self.flags)
    }
}

impl Registry {
    /// Adopts a file of which the lease was refused, if that is for descriptions of this process's.
    pub fn adopt_several(
        &mut self,
        fd: RawFd,
        id: FileId,
        patience: impl FnMut() -> bool,
    ) -> Result<(), Option<Reason>> {
        let mut numbers = Vec::new();
        for (number, slot) in table::known(0, u32::MAX) {
            let is_it = || identity::identify(number).is_some_and(|found| found.id == id);
            match slot {
                Known::Watched if is_it() => numbers.push(number),
                Known::Left if is_it() => return Err(Some(Reason::OpenTwice)),
                _ => {}
            }
        }
        // One of ours that was put off (process_locks.P1) is in the way of a lease as well.
        if numbers.len() < 2 && !process_locks::has_retired(id) {
            return Err(Some(Reason::OpenElsewhere));
        }
        let count = numbers.len();
        numbers.iter().try_for_each(|number| self.unshare(*number))?;
        numbers.retain(|number| table::try_change(*number, Known::Watched, Known::Claimed));
        let outcome = if numbers.len() == count && thread::await_calls(&numbers, patience) {
            let members: Result<Vec<_>, _> =
                numbers.iter().map(|number| Member::look(*number, id)).collect();
            members.and_then(|members| match members[..] {
                [Member { fd, flags, .. }] if Access::of_flags(flags).read => {
                    let locks = Locks::look(id, &[fd]).ok_or(Some(Reason::Locked))?;
                    locks.carry(fd).ok_or(Some(Reason::Locked))?.end(fd);
                    // Another try may do better.
                    Err(Some(Reason::OpenElsewhere))
                }
                [_] => Err(Some(Reason::OpenElsewhere)),
                _ => self.take_over_several(id, &members),
            })
        } else {
            Err(None)
        };
        if let Err(reason) = outcome {
            for number in numbers {
                table::try_change(number, Known::Claimed, Known::Watched);
                // That of `fd` is told by who tried.
                if let Some(watch) = watch::of(number).filter(|_| number != fd) {
                    watch.postpone(POSTPONED, reason);
                }
            }
        }
        outcome
    }

    /// The kernel has no call in flight on any of them, and gets none.
    fn take_over_several(&mut self, id: FileId, members: &[Member]) -> Result<(), Option<Reason>> {
        const TRIES: usize = 3;
        let Some(writer) = members.iter().find(|member| member.access().write) else {
            return Err(Some(Reason::OpenElsewhere));
        };
        if members.iter().any(|member| !have_one_path(member.fd, writer.fd)) {
            return Err(Some(Reason::OpenTwice));
        }
        if !have_spare() {
            return Err(Some(Reason::Descriptors));
        }
        let numbers: Vec<RawFd> = members.iter().map(|member| member.fd).collect();
        let locks = Locks::look(id, &numbers).ok_or(Some(Reason::Locked))?;
        let real = open_anew(writer.fd, libc::O_RDWR).ok_or(Some(Reason::OpenTwice))?;
        let Some(mut carried) = locks.carry(real) else {
            process_locks::close(real);
            return Err(Some(Reason::Locked));
        };
        // Locks to read were taken by one that reads.
        let reader = members.iter().find(|member| member.access().read).unwrap_or(writer).fd;
        let done = members.iter().take_while(|member| replace(real, member.fd)).count();
        if done < members.len() {
            self.restore(id, &members[..done], real, Reason::Descriptors, (carried, reader));
            return Err(Some(Reason::Descriptors));
        }
        let is_late = members
            .iter()
            .any(|member| member.access().write && mode_back::is_wanted(member.flags));
        let access = Access { read: true, write: true, append: false };
        let opened = Opened { fd: real, id, access, is_late, is_first: true, waits: false };
        let mut served = self.serve(&opened);
        for _ in 1..TRIES {
            if !matches!(served, Err(Reason::OpenElsewhere)) {
                break;
            }
            // A call that neither reads nor writes may hold what it was made on.
            // SAFETY: no memory involved.
            unsafe { sys!(libc::SYS_sched_yield) };
            served = self.serve(&opened);
        }
        let (internal_fd, file) = match served {
            Ok((internal_fd, file)) => (internal_fd, Arc::new(file)),
            Err(reason) => {
                self.restore(id, members, real, reason, (carried, reader));
                return Err(Some(reason));
            }
        };
        // By then a number of the same.
        carried.rest_on(reader);
        process_locks::close(real);
        carried.end(reader);
        self.locked.retain(|(_, number)| !numbers.contains(number));
        // Asked again: it may be the first file, and no keeper there.
        let is_late = is_late && mode_back::is_kept();
        for Member { fd, flags, offset } in members {
            let access = Access::of_flags(*flags);
            let file = Arc::clone(&file);
            let description = Description::acquire(id, access, *offset, internal_fd, Ok(file));
            description.set_sharing(*flags);
            if is_late {
                description.set_late();
            }
            self.push_served(id, description);
            watch::of(*fd).inspect(|watch| watch.note_served());
            table::set(*fd, Known::File(description));
        }
        Ok(())
    }

    /// The lease was not to be had: all become what they were, or G3.
    fn restore(
        &mut self,
        id: FileId,
        members: &[Member],
        real: RawFd,
        reason: Reason,
        (mut carried, reader): (Carried, RawFd),
    ) {
        let mut is_needed = false;
        for Member { fd, flags, offset } in members {
            if make_own(real, &[*fd], *flags, *offset) {
                continue;
            }
            is_needed = true;
            let access = Access::of_flags(*flags);
            let description = Description::acquire(id, access, *offset, real, Err(reason));
            description.set_sharing(*flags);
            description.begin_bypassed();
            let inode = self.inodes.entry(id).or_default();
            inode.passed = Some(reason);
            inode.descriptions.push(description);
            self.locked.retain(|(_, number)| number != fd);
            table::set(*fd, Known::File(description));
        }
        if !is_needed {
            carried.rest_on(reader);
            process_locks::close(real);
        }
        carried.end(reader);
    }

    /// G3.
    fn pass_if_shared(&mut self, id: FileId) {
        if self.inodes.get(&id).is_some_and(|inode| inode.descriptions.iter().any(|d| d.shares())) {
            self.pass_file(id, Reason::OpenTwice);
        }
    }

    /// G3: gives back all files that descriptions share.
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

    /// G5, before the one number is given up by which the file is written: given back, if it is that.
    pub fn leave_last_writer(&mut self, fd: RawFd) -> Option<FileId> {
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
    pub fn leave_readers(&mut self, id: FileId) {
        let Some(inode) = self.inodes.get(&id) else { return };
        let is_read_only = inode.descriptions.iter().all(|d| d.shares() && !d.access().write);
        if is_read_only && !inode.descriptions.is_empty() {
            self.pass_file(id, Reason::OpenTwice);
        }
    }
}

/// Whether both were opened by the same name, and have it still: the one's would become the other's.
fn have_one_path(one: RawFd, other: RawFd) -> bool {
    let mut paths = [[0; libc::PATH_MAX as usize]; 2];
    let [first, second] = &mut paths;
    path_of(one, first) == path_of(other, second)
}

/// G4: before a call on `fd` that is about its description.
pub fn make_real(fd: RawFd) {
    if let Known::File(description) = table::get(fd)
        && description.shares()
        && !thread::record().is_inside()
    {
        section::run(|_| registry::lock().pass_fd(fd, Reason::OpenTwice));
    }
}

/// G3: before the rights to the file of a path change, by this process.
pub fn before_rights_at(dir: RawFd, path: *const libc::c_char, flags: i32) {
    if !registry::holds_leases() || thread::record().is_inside() {
        return;
    }
    if path.is_null() || flags & libc::AT_EMPTY_PATH != 0 {
        return make_real(dir);
    }
    section::run(|_| {
        let is_followed = flags & libc::AT_SYMLINK_NOFOLLOW == 0;
        if let Some(identity) = identity::identify_path(dir, path, is_followed) {
            registry::lock().pass_if_shared(identity.id);
        }
    });
}

/// G3: whether the kernel would take a call on `fd` that is about its description for one about another:
/// it is refused then.
pub fn is_bypassed(fd: RawFd) -> bool {
    matches!(table::get(fd), Known::File(description)
        if description.is_bypassed() && description.is_served())
}

/// Whether the library has to refuse a write at `fd`, as the kernel would not.
pub fn may_not_write(fd: RawFd) -> bool {
    matches!(table::get(fd), Known::File(description)
        if description.shares() && !description.access().write)
}
