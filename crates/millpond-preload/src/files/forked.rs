//! Files that are open across a fork: the kernel's as long as several processes have the description, and
//! watched meanwhile in each.
//!
//! Parent and child have one description, with one offset: who serves it would miss what the other one does.
//! To a lease a description of several processes is one, so the kernel does not tell. The processes tell
//! each other (`runtime::holders`, `runtime::tree`):
//!
//! ```text
//! fork: served -> passed -> WATCHED                          claim
//!       WATCHED: gets a number in the tree, SHARED           share_watched, by the parent
//!       the child: the same slots, the same watches          inherit
//! then, in each of them:
//!       use shows that it pays -> look: Held                 postponed, as ever (adoption.N1)
//!                                 Alone: not SHARED          adopted, as ever
//!                                 Given                      LEFT
//!       close: CLAIMED; no call in flight; closed; the number goes       begin_release, end_release
//!       exec, death: by the kernel                           tree
//! ```
//!
//! - **K1** A description has a number while it is SHARED, in all processes the same. Who has none for it (there was no
//!   room, a number of several, what libc reads by itself) left it for good at the fork, and the child does not know it.
//! - **K2** The number goes from the process's slot only when its last descriptor is closed, by a close that the
//!   library makes, and no call goes on there. What makes that uncertain keeps the number there until the
//!   process ends or execs: a second number (`dup`, in_flight.I5), a mapping, a call of the engine's from before the
//!   fork (adoption.N3), a close that no hook saw, LEFT of any reason.
//! - **K3** Who gives it away (exec or spawn without close-on-exec, SCM_RIGHTS, io_uring, a clone that is no
//!   fork) says so before: nobody serves it again.
//! - **K4** Only a fork makes a description of one process one of several, with the registry locked, and so is a look.
//!   What a look has found alone stays so until the next fork, or K3.
//! - **K5** What could not be given back before the fork (`several`: G3, G7) is one description of all its numbers, which the
//!   parent serves on. The child gets none: those numbers are opened anew there so that they can be closed, compared and
//!   asked for their file, and nothing else (O_PATH; EBADF).
//!   No number of the child's is free for it: what opens next there would be taken for what was hidden.
//! - **K6** What a child has from its parent is noted in its table before it runs. It counts the file only if it
//!   serves it: the parent has counted it.
//! - **K7** Another thread may have opened a file that the fork does not find in the table yet, and the child gets it. Then
//!   the open finds that there was a fork, or is one (`runtime::forks`), and leaves the file for good.
//!
//! Limits: a child that closes, duplicates, sends or maps what it shares by an instruction of its own: the
//! close is not noticed, nor are the others, and who finds the description alone then is wrong. So it is with a fork by
//! such an instruction, or a child that ends its lock by closing the library's descriptor so.

use std::os::fd::RawFd;

use crate::files::claim::patience;
use crate::files::identity;
use crate::files::registry::Registry;
use crate::files::table::{self, Known};
use crate::files::watch::{self, MAPPED, SHARED};
use crate::report::reason::Reason;
use crate::runtime::forks::Forks;
use crate::runtime::holders::Found;
use crate::runtime::link::format_link;
use crate::runtime::sys::sys;
use crate::runtime::thread::await_calls;
use crate::runtime::tree;

/// K7. Opens are from before one to when the file is in the table, or will be with the registry locked.
pub static FORKS: Forks = Forks::new();

/// What a child has from its parent: its slot in the tree, and the numbers that it knows.
#[derive(Default)]
pub struct Inheritance {
    slot: Option<usize>,
    watched: Vec<RawFd>,
    left: Vec<RawFd>,
    /// K5.
    together: Vec<RawFd>,
}

/// A number that is being closed, or replaced; see [`Registry::end_release`].
#[must_use]
pub struct Release {
    fd: RawFd,
    /// Nobody uses it any more.
    number: Option<u32>,
}

impl Registry {
    /// Before a fork that our handlers see: what was served is watched, and what is watched is shared.
    pub fn share_watched(&mut self) -> Inheritance {
        // K7.
        FORKS.begin();
        self.pass_where(Reason::Forked, |_| true);
        let mut inheritance = Inheritance::default();
        for (fd, slot) in table::known(0, u32::MAX) {
            if matches!(slot, Known::File(description) if description.shares()) {
                inheritance.together.push(fd);
            }
            let Some(watch) = watch::of(fd) else { continue };
            match slot {
                Known::Watched if watch.number().is_some() || share(fd) => {
                    inheritance.watched.push(fd);
                }
                Known::Watched | Known::Left if watch.number().is_none() => {
                    self.leave(fd, Reason::Forked);
                    watch.note(SHARED);
                }
                Known::Left => inheritance.left.push(fd),
                _ => {}
            }
        }
        if let Some(place) = tree::place()
            && !place.holders.is_empty(place.slot)
        {
            inheritance.slot = place.holders.before_fork(place.slot, tree::is_gone);
            if inheritance.slot.is_none() {
                // K3: no slot tells of the child.
                place.holders.give_all(place.slot);
            }
        }
        inheritance
    }

    /// K7: a child may have what was just opened at `fd`.
    pub fn leave_to_child(&mut self, fd: RawFd) {
        self.leave(fd, Reason::Forked);
        watch::of(fd).inspect(|watch| watch.note(SHARED));
    }

    /// Whether the description at `fd` is this process's alone, or was never another's.
    pub fn unshare(&mut self, fd: RawFd) -> Result<(), Option<Reason>> {
        let watch = watch::of(fd).ok_or(None)?;
        if watch.flags() & SHARED == 0 {
            return Ok(());
        }
        let (Some(number), Some(place)) = (watch.number(), tree::place()) else {
            return Err(Some(Reason::Given));
        };
        match place.holders.look(place.slot, number, tree::is_gone) {
            Found::Held => Err(Some(Reason::Forked)),
            Found::Given => Err(Some(Reason::Given)),
            Found::Alone => {
                place.holders.remove(place.slot, number);
                watch.end_sharing();
                Ok(())
            }
        }
    }

    /// K2: the program gives up `fd`, and nobody uses it until [`Registry::end_release`] or
    /// [`Registry::cancel_release`]. Where it is not shared there is nothing to do.
    pub fn begin_release(&mut self, fd: RawFd) -> Option<Release> {
        let watch = watch::of(fd)?;
        let number = watch.number()?;
        if !table::try_change(fd, Known::Watched, Known::Claimed) {
            return None;
        }
        let is_quiet = watch.flags() & MAPPED == 0
            && await_calls(&[fd], patience())
            && (self.former.is_empty()
                || identity::identify(fd).is_some_and(|identity| !self.has_former(identity.id)));
        Some(Release { fd, number: is_quiet.then_some(number) })
    }

    /// It is closed, or another description's.
    pub fn end_release(&mut self, release: Release) {
        table::try_change(release.fd, Known::Claimed, Known::Unknown);
        if let (Some(number), Some(place)) = (release.number, tree::place()) {
            place.holders.remove(place.slot, number);
        }
    }

    /// It is not.
    pub fn cancel_release(&mut self, release: Release) {
        table::try_change(release.fd, Known::Claimed, Known::Watched);
    }
}

/// Whether the watched number, which nobody shares yet, is from here on one that several may hold.
fn share(fd: RawFd) -> bool {
    let Some(watch) = watch::of(fd).filter(|watch| watch.flags() & SHARED == 0) else {
        return false;
    };
    let Some(place) = tree::take_place() else { return false };
    table::set(tree::locks(), Known::Internal);
    let Some(number) = place.holders.add(place.slot) else { return false };
    watch.begin_sharing(number);
    true
}

/// In a parent: there is no child.
pub fn cancel(inheritance: &Inheritance) {
    if let (Some(slot), Some(place)) = (inheritance.slot, tree::place()) {
        place.holders.cancel(slot);
    }
}

/// In a child that has its parent's memory: K5.
pub fn hide_from_child(inheritance: &Inheritance) {
    inheritance.together.iter().for_each(|fd| hide(*fd));
}

/// In a child, whose table knows nothing yet. One that no handler saw inherits nothing.
pub fn inherit(inheritance: Option<&Inheritance>) {
    FORKS.reset();
    let Some(inheritance) = inheritance else {
        tree::leave();
        return;
    };
    inheritance.together.iter().for_each(|fd| hide(*fd));
    tree::after_fork(inheritance.slot);
    if tree::locks() >= 0 {
        table::set(tree::locks(), Known::Internal);
    }
    if tree::place().is_none() {
        return;
    }
    for (numbers, slot) in
        [(&inheritance.watched, Known::Watched), (&inheritance.left, Known::Left)]
    {
        for fd in numbers {
            // K7: none where the number is another file's by now.
            if let Some(watch) = watch::of(*fd).filter(|watch| watch.number().is_some()) {
                watch.inherit();
                table::set(*fd, slot);
            }
        }
    }
}

/// K5: leaves of the number only what it names. Where there is no `/proc`, or no number, something else that can be
/// neither read nor written.
fn hide(fd: RawFd) {
    let link = &mut [0; 32];
    let link = format_link(fd, link);
    // SAFETY: the texts are NUL-terminated, and the number is made here.
    unsafe {
        let closes = sys!(libc::SYS_fcntl, fd, libc::F_GETFD) & libc::FD_CLOEXEC as isize != 0;
        let flags = libc::O_PATH | if closes { libc::O_CLOEXEC } else { 0 };
        let open = |path| sys!(libc::SYS_openat, libc::AT_FDCWD, path, flags);
        let mut name = open(link.as_ptr().cast());
        if name < 0 {
            name = open(c"/".as_ptr());
        }
        let is_hidden = name >= 0 && sys!(libc::SYS_dup3, name, fd, flags & libc::O_CLOEXEC) >= 0;
        if name >= 0 {
            sys!(libc::SYS_close, name);
        }
        if is_hidden {
            return;
        }
        // There was no number, or the limit on numbers is not above this one, and it can't be one again.
        sys!(libc::SYS_close, fd);
        let other = open(c"/".as_ptr());
        if other >= 0 && other != fd as isize {
            sys!(libc::SYS_close, other);
        }
    }
}
