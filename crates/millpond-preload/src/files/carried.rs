//! The process's POSIX locks on a file, carried over closes of descriptors of the file.
//!
//! A close of any descriptor of a file ends all POSIX locks of the process there, and to put another
//! description behind a number of the program's (`several`, `parting`) is a close, too. The locks that the
//! process reads by are carried over it:
//!
//! ```text
//! the locks, by /proc/thread-self/fdinfo/N of each number             K1, K2
//! the same ranges once more, for an open description that stays       K3
//! the closes; those that were put off (process_locks.P1)
//! the locks again, by a descriptor that stays; the description's go
//! ```
//!
//! - K1. Nobody locks or unlocks by a number of the file meanwhile: the registry is locked; a number that is
//!   watched is claimed, with no call in flight; one that shares a description is locked by
//!   `hooks::lock`, with the registry locked, but where it waits: then nothing is carried.
//! - K2. What the kernel does not show there, such as a lock from before an exec by a number that is gone,
//!   would be lost: if it shows more in `/proc/locks`, nothing is carried.
//! - K3. Two owners may read the same range, so at each moment one of the two locks is held, and no other
//!   process can get a lock to write. Who asks by F_GETLK in these microseconds may be told of a lock of
//!   a description, without our process id. Two can't write: with a lock to write nothing is carried.

use std::collections::BTreeSet;
use std::os::fd::RawFd;

use crate::files::identity::FileId;
use crate::files::process_locks::{self, GivingUp, is_locked, is_noted, read_whole};
use crate::report::lines;
use crate::runtime::link::format_info;
use crate::runtime::sys::sys;

/// Where a lock begins, and its length; zero: to the end, wherever that is.
type Range = (i64, i64);

/// The locks on a file, none of which is to write.
pub struct Locks {
    id: FileId,
    ranges: BTreeSet<Range>,
}

impl Locks {
    /// Those taken by `numbers`. `None`: they can't be carried, or there are others.
    pub fn look(id: FileId, numbers: &[RawFd]) -> Option<Self> {
        let mut ranges = BTreeSet::new();
        for number in numbers {
            ranges.append(&mut ranges_of(*number)?);
        }
        let has_all = if ranges.is_empty() && !is_noted(id) {
            !is_locked(*numbers.first()?, id)
        } else {
            process_locks::count(id)? <= ranges.len()
        };
        has_all.then_some(Self { id, ranges })
    }

    /// From here on descriptors of the file are closed, and not `by`, which is open to read.
    pub fn carry(self, by: RawFd) -> Option<Carried> {
        let Self { id, ranges } = self;
        hold(by, &ranges).then(|| Carried { ranges, by, closes: process_locks::giving_up(id) })
    }
}

/// Locks that are held twice just now. Ended by [`Carried::end`].
#[must_use]
pub struct Carried {
    ranges: BTreeSet<Range>,
    by: RawFd,
    closes: GivingUp,
}

impl Carried {
    /// It is `fd` that stays, and the other one may be closed.
    pub fn rest_on(&mut self, fd: RawFd) {
        if hold(fd, &self.ranges) {
            self.by = fd;
        }
    }

    /// The closes are done; `reader` is open to read, and stays.
    pub fn end(self, reader: RawFd) {
        let Self { ranges, by, closes } = self;
        closes.end_with(|| {
            for range in &ranges {
                if !lock(reader, libc::F_SETLK, *range) {
                    lines::warn_lost_lock(reader);
                }
            }
        });
        if !ranges.is_empty() {
            unlock(by);
        }
    }
}

/// K3.
fn hold(fd: RawFd, ranges: &BTreeSet<Range>) -> bool {
    let is_held = ranges.iter().all(|range| lock(fd, libc::F_OFD_SETLK, *range));
    if !is_held {
        unlock(fd);
    }
    is_held
}

/// A lock to read.
fn lock(fd: RawFd, command: i32, (start, len): Range) -> bool {
    // SAFETY: all integers.
    let mut lock: libc::flock64 = unsafe { std::mem::zeroed() };
    lock.l_type = libc::F_RDLCK as i16;
    (lock.l_start, lock.l_len) = (start, len);
    // SAFETY: the kernel reads `lock`.
    unsafe { sys!(libc::SYS_fcntl, fd, command, &raw const lock) == 0 }
}

fn unlock(fd: RawFd) {
    // SAFETY: an all-zero lock is the whole file's.
    let mut whole: libc::flock64 = unsafe { std::mem::zeroed() };
    whole.l_type = libc::F_UNLCK as i16;
    // SAFETY: the kernel reads `whole`.
    unsafe { sys!(libc::SYS_fcntl, fd, libc::F_OFD_SETLK, &raw const whole) };
}

/// What the process has locked to read by `fd`, if it has no other lock there.
fn ranges_of(fd: RawFd) -> Option<BTreeSet<Range>> {
    let path = &mut [0; 48];
    let info = read_whole(format_info(fd, path))?;
    let info = String::from_utf8_lossy(&info);
    let locks = info.lines().filter_map(|line| line.strip_prefix("lock:"));
    let mut ranges = BTreeSet::new();
    for lock in locks {
        // 1: POSIX  ADVISORY  READ  1234 08:01:5678 0 EOF
        let fields: Vec<&str> = lock.split_ascii_whitespace().skip(1).collect();
        match fields[..] {
            ["LEASE", ..] => {}
            ["POSIX", _, "READ", _, _, start, end] => {
                let start: i64 = start.parse().ok()?;
                let len = if end == "EOF" { 0 } else { end.parse::<i64>().ok()? - start + 1 };
                ranges.insert((start, len));
            }
            _ => return None,
        }
    }
    Some(ranges)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    /// Goal: what the kernel shows of a descriptor's locks is understood: to read, to write, of the
    /// description, and where they end.
    #[test]
    fn locks_of_a_number() {
        let file = tempfile::tempfile().unwrap();
        let fd = file.as_raw_fd();
        assert_eq!(ranges_of(fd), Some(BTreeSet::new()));
        let ranges = [(3, 1), (10, 20), (4096, 0)];
        assert!(ranges.iter().all(|range| lock(fd, libc::F_SETLK, *range)));
        assert_eq!(ranges_of(fd), Some(ranges.into()));
        assert!(lock(fd, libc::F_OFD_SETLK, (100, 1)));
        assert_eq!(ranges_of(fd), None);
        unlock(fd);
        assert_eq!(ranges_of(fd), Some(ranges.into()));
    }
}
