//! `O_DIRECT` on a shared description: the flag is set only while a transfer needs it.
//!
//! A separate description would be simpler, but opening one breaks a lease that the caller may have
//! on the file. `F_SETFL` does not. But then all users of the description see the flag, and
//! unaligned transfers fail while it is set. So each transfer passes a gate:
//!
//! ```text
//!                 try_direct, the first             the last has ended
//!   flag clear ---------------------------> set ---------------------> clear
//! ```
//!
//! - **IP1** The flag is set if and only if direct transfers are inside.
//! - **IP2** A transfer that needs the flag clear is counted first, and then waits for the direct
//!   transfers that are inside. While any is counted, no direct transfer enters: it is made without
//!   the gate, uncounted, as an aligned transfer works with and without the flag. So a transfer
//!   that needs the flag clear waits only for the transfers that the kernel is processing, and no
//!   other one waits; and a steady stream of transfers does not prolong the wait.
//! - **IP3** Flags are read, changed and written back, so a concurrent change of other flags may be
//!   undone. A caller that makes such a change suspends the gate.
//! - **IP4** Flags are set only on the file: see [`Switch`].
//!
//! Locks: the gate's lock, a leaf; the flag is changed under it.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Condvar, Mutex};

use rustix::fs::OFlags;

use crate::io::backend::alignment::{Alignment, direct_alignment};
use crate::sync::MutexExt;

/// Sets and clears the flag.
pub(crate) trait Switch {
    /// Sets the flag, or clears it, if the descriptor still refers to the file.
    fn set_direct(&self, on: bool) -> io::Result<()>;
}

/// See the module header.
#[derive(Default)]
pub(crate) struct Gate {
    inside: Mutex<Counts>,
    cleared: Condvar,
    /// The kernel has refused a direct transfer that should have been possible.
    refused: AtomicBool,
}

#[derive(Default)]
struct Counts {
    direct: usize,
    plain: usize,
}

impl Gate {
    /// Admits a direct transfer, unless a transfer needs the flag clear, or the flag cannot be set.
    pub(crate) fn try_direct<'a, S: Switch>(&'a self, switch: &'a S) -> Option<Inside<'a, S>> {
        let mut inside = self.inside.acquire();
        if inside.plain > 0 || self.is_refused() {
            return None;
        }
        if inside.direct == 0 && switch.set_direct(true).is_err() {
            // It may be set on one of two descriptions.
            let _ = switch.set_direct(false);
            return None;
        }
        inside.direct += 1;
        Some(Inside { gate: self, switch })
    }

    /// IP2: when this returns the flag is clear, until [`Gate::end_plain`].
    pub(crate) fn begin_plain(&self) {
        let mut inside = self.inside.acquire();
        inside.plain += 1;
        while inside.direct > 0 {
            inside = self.cleared.wait(inside).expect("no panic under the lock");
        }
    }

    pub(crate) fn end_plain(&self) {
        self.inside.acquire().plain -= 1;
    }

    /// The flag is clear while the value lives.
    pub(crate) fn plain(&self) -> Plain<'_> {
        self.begin_plain();
        Plain(self)
    }

    /// Admits no direct transfer any more.
    pub(crate) fn refuse(&self) {
        self.refused.store(true, Relaxed);
    }

    pub(crate) fn is_refused(&self) -> bool {
        self.refused.load(Relaxed)
    }
}

/// A direct transfer that is inside.
pub(crate) struct Inside<'a, S: Switch> {
    gate: &'a Gate,
    switch: &'a S,
}

impl<S: Switch> Drop for Inside<'_, S> {
    fn drop(&mut self) {
        let mut inside = self.gate.inside.acquire();
        inside.direct -= 1;
        if inside.direct == 0 {
            // Fails only if the descriptor does not refer to the file any more (IP4).
            let _ = self.switch.set_direct(false);
            if inside.plain > 0 {
                self.gate.cleared.notify_all();
            }
        }
    }
}

/// See [`Gate::plain`].
pub(crate) struct Plain<'a>(&'a Gate);

impl Drop for Plain<'_> {
    fn drop(&mut self) {
        self.0.end_plain();
    }
}

pub(super) fn set_direct(fd: BorrowedFd<'_>, on: bool) -> io::Result<()> {
    let mut flags = rustix::fs::fcntl_getfl(fd)?;
    if flags.contains(OFlags::DIRECT) != on {
        flags.set(OFlags::DIRECT, on);
        rustix::fs::fcntl_setfl(fd, flags)?;
    }
    Ok(())
}

/// `None`: the file system has no direct I/O, or accepts the flag and ignores it.
pub(super) fn in_place_alignment(fd: BorrowedFd<'_>) -> Option<Alignment> {
    const IN_MEMORY: [i64; 2] = [0x0102_1994, 0x8584_58F6]; // tmpfs, ramfs
    let system = rustix::fs::fstatfs(fd).ok()?;
    if IN_MEMORY.contains(&(system.f_type as i64)) {
        return None;
    }
    let alignment = direct_alignment(fd).ok()?;
    let taken = set_direct(fd, true);
    set_direct(fd, false).and(taken).ok().map(|()| alignment)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering::SeqCst;

    /// A flag, and whether it can be set.
    #[derive(Default)]
    struct Flag {
        is_set: AtomicBool,
        stuck: AtomicBool,
    }

    impl Switch for Flag {
        fn set_direct(&self, on: bool) -> io::Result<()> {
            if on && self.stuck.load(SeqCst) {
                return Err(io::ErrorKind::InvalidInput.into());
            }
            assert_ne!(self.is_set.swap(on, SeqCst), on && !self.stuck.load(SeqCst));
            Ok(())
        }
    }

    /// Goal: IP1 and IP2, with transfers of both kinds on several threads.
    #[test]
    fn the_flag_is_as_each_needs_it() {
        let (gate, flag) = (Gate::default(), Flag::default());
        std::thread::scope(|scope| {
            for number in 0..4u64 {
                let (gate, flag) = (&gate, &flag);
                scope.spawn(move || {
                    for round in 0..1000u64 {
                        if (round * 7 + number) % 9 > 0 {
                            let _inside = loop {
                                match gate.try_direct(flag) {
                                    Some(inside) => break inside,
                                    None => std::thread::yield_now(),
                                }
                            };
                            assert!(flag.is_set.load(SeqCst));
                            std::thread::yield_now();
                            assert!(flag.is_set.load(SeqCst));
                        } else {
                            let _plain = gate.plain();
                            assert!(!flag.is_set.load(SeqCst));
                            let _nested = gate.plain();
                            std::thread::yield_now();
                            assert!(!flag.is_set.load(SeqCst));
                        }
                    }
                });
            }
        });
        assert!(!flag.is_set.load(SeqCst));
    }

    #[test]
    fn a_flag_that_cannot_be_set_is_left_alone() {
        let (gate, flag) = (Gate::default(), Flag::default());
        flag.stuck.store(true, SeqCst);
        // Cleared as a precaution.
        flag.is_set.store(true, SeqCst);
        assert!(gate.try_direct(&flag).is_none());
        assert!(!flag.is_set.load(SeqCst));
        flag.stuck.store(false, SeqCst);
        drop(gate.try_direct(&flag).unwrap());
        gate.refuse();
        assert!(gate.try_direct(&flag).is_none());
        drop(gate.plain());
    }
}
