//! Closing descriptors of ours without ending the program's POSIX locks.
//!
//! POSIX drops all of a process's locks on a file when the process closes *any* descriptor of it.
//! The engine's duplicates are in the program's descriptor table, and the last of a duplicate's
//! users may be done long after the program's own close: by then the program may have opened the file
//! and locked it again. So the library closes all its descriptors by [`close`]:
//!
//! - P1. A descriptor of ours is closed only while the program itself gives up a descriptor of that
//!   file ([`give_up`]), which ends the locks anyway; or when the process has no lock on the
//!   file. Until then it is *retired*: open, and not used.
//! - P2. Whether there is a lock, the kernel says; but between its answer and the close the program
//!   may take one. So a thread that is about to take one says so first ([`note`]), which holds
//!   until the program has closed its last known descriptor of the file, and with it dropped its
//!   locks. The kernel's answer is for locks that no hook has seen: of before an exec, or taken by
//!   an inline system call.
//! - P3. Exec closes the descriptors that are close-on-exec, those of the library as well, and the locks on those files end. They
//!   must stay where all of the program's own descriptors of the file stay open, and so ours do
//!   there ([`before_exec`]). The next program does not know of them; they are open until it ends.
//!
//! A retired descriptor costs a number, and keeps the file open, which the program does itself:
//! once it has closed all of its own, there are no locks, and ours are closed.
//!
//! Its lock is taken with the registry's or the engine's held, and takes none but the heap's.

use std::collections::BTreeSet;
use std::ffi::CStr;
use std::os::fd::RawFd;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;

use crate::files::identity::{self, FileId};
use crate::files::table::{self, NumberState};
use crate::runtime::lock::Lock;
use crate::runtime::section;
use crate::runtime::sys::sys;

struct Held {
    /// Files on which the program takes locks (P2).
    noted: BTreeSet<FileId>,
    retired: Vec<(RawFd, FileId)>,
    /// Not close-on-exec just now (P3).
    kept: Vec<RawFd>,
}

static HELD: Lock<Held> = Lock::new(Held::new());
/// How many are retired: zero means that a close of the program's need not look.
static RETIRED: AtomicUsize = AtomicUsize::new(0);

/// The program is about to take a POSIX lock on a file of the registry's, which is locked.
pub fn note(id: FileId) {
    HELD.lock().noted.insert(id);
}

/// Whether [`note`] was called and not [`forget`].
pub fn is_noted(id: FileId) -> bool {
    HELD.lock().noted.contains(&id)
}

/// The program has closed its last known descriptor of the file, or is about to. The registry is
/// locked.
pub fn forget(id: FileId) {
    HELD.lock().noted.remove(&id);
}

/// P1. The program gives up a descriptor of the file, which ends its locks: its close comes after. The registry is locked.
pub fn give_up(id: FileId) {
    HELD.lock().close_retired(Some(id));
}

/// Marks a descriptor that was just made as the library's own; closes it if its number is too high for that.
pub fn adopt(fd: RawFd) -> Option<RawFd> {
    let is_marked = table::set(fd, NumberState::Internal);
    if !is_marked {
        close(fd);
    }
    is_marked.then_some(fd)
}

/// Closes a descriptor of the library's own, at once or as soon as that ends no lock. Returns the kernel's result.
pub fn close(fd: RawFd) -> isize {
    if matches!(table::get(fd), NumberState::File(_)) {
        // The program has closed ours by its number, and has the number now.
        return -libc::EBADF as isize;
    }
    match identity::identify(fd).filter(|identity| identity.is_regular) {
        Some(identity) => {
            let mut held = HELD.lock();
            held.retired.push((fd, identity.id));
            held.close_retired(None);
            0
        }
        None => close_now(fd),
    }
}

fn close_now(fd: RawFd) -> isize {
    // Before the close: right after it the number may be another descriptor of the library's,
    // marked by another thread, and the mark would go.
    table::forget(fd, NumberState::Internal);
    table::forget(fd, NumberState::Foreign);
    // SAFETY: a descriptor of the library's own, which its owner gives up.
    unsafe { sys!(libc::SYS_close, fd) }
}

/// After a close of the program's: closes descriptors that were retired for locks that have ended with it.
#[inline]
pub fn close_retired() {
    // SeqCst: either this load, which follows the program's close, sees what another thread has
    // just retired; or that thread asked the kernel after its store, hence after the close.
    if RETIRED.load(SeqCst) != 0 {
        section::run(|_| HELD.lock().close_retired(None));
    }
}

/// The retired descriptors.
pub fn retired() -> Vec<RawFd> {
    HELD.lock().retired_fds()
}

impl Held {
    const fn new() -> Self {
        Self { noted: BTreeSet::new(), retired: Vec::new(), kept: Vec::new() }
    }

    fn retired_fds(&self) -> Vec<RawFd> {
        self.retired.iter().map(|(fd, _)| *fd).collect()
    }

    /// `ending`: the file whose locks are about to end.
    fn close_retired(&mut self, ending: Option<FileId>) {
        let Self { noted, retired, kept } = self;
        RETIRED.store(retired.len(), SeqCst);
        retired.retain(|(fd, id)| {
            let stays = ending != Some(*id) && (noted.contains(id) || is_locked(*fd, *id));
            if !stays {
                kept.retain(|other| other != fd);
                close_now(*fd);
            }
            stays
        });
        RETIRED.store(retired.len(), SeqCst);
    }
}

/// Whether this process has POSIX locks on the file behind `fd`.
pub fn is_locked(fd: RawFd, id: FileId) -> bool {
    // SAFETY: an all-zero lock is the whole file's.
    let mut whole: libc::flock64 = unsafe { std::mem::zeroed() };
    whole.l_type = libc::F_WRLCK as i16;
    // Asked for the description, whose lock conflicts with the process's own.
    // SAFETY: the kernel writes `whole`.
    let asked = unsafe { sys!(libc::SYS_fcntl, fd, libc::F_OFD_GETLK, &raw mut whole) };
    if asked == 0 && whole.l_type == libc::F_UNLCK as i16 {
        return false;
    }
    // The kernel has reported one lock, of any process.
    count(id) != Some(0)
}

/// How many POSIX locks this process has on the file, if the kernel reports them.
pub fn count(id: FileId) -> Option<usize> {
    let own = std::process::id().to_string();
    let locks = read_whole(c"/proc/locks")?;
    let is_own = |line: &&str| {
        // 7: POSIX  ADVISORY  WRITE 1234 08:01:5678 0 EOF. Not the device: it may differ from that of `stat`.
        let mut fields = line.split_ascii_whitespace().skip(1);
        fields.next() == Some("POSIX")
            && fields.nth(2) == Some(&own)
            && fields.next().and_then(|file| file.rsplit(':').next()?.parse().ok()) == Some(id.1)
    };
    Some(String::from_utf8_lossy(&locks).lines().filter(is_own).count())
}

/// Not by `std::fs`, whose close would come back here.
pub fn read_whole(path: &CStr) -> Option<Vec<u8>> {
    let flags = libc::O_RDONLY | libc::O_CLOEXEC;
    let mut bytes = Vec::new();
    let mut part = [0u8; 4096];
    // SAFETY: the path is NUL-terminated, and the kernel writes at most the length of `part`.
    unsafe {
        let fd = sys!(libc::SYS_openat, libc::AT_FDCWD, path.as_ptr(), flags);
        if fd < 0 {
            return None;
        }
        let read = loop {
            let read = sys!(libc::SYS_read, fd, part.as_mut_ptr(), part.len());
            if read <= 0 {
                break read;
            }
            bytes.extend_from_slice(&part[..read as usize]);
        };
        sys!(libc::SYS_close, fd);
        (read == 0).then_some(bytes)
    }
}

/// P3: lets descriptors of ours survive an exec where the program's locks do.
pub fn before_exec() {
    let locked: Vec<(RawFd, FileId)> = {
        let held = HELD.lock();
        table::known(0, u32::MAX)
            .filter(|(_, slot)| matches!(slot, NumberState::Internal))
            .filter_map(|(fd, _)| Some((fd, identity::identify(fd)?)))
            .filter(|(fd, file)| {
                file.is_regular && (held.noted.contains(&file.id) || is_locked(*fd, file.id))
            })
            .map(|(fd, file)| (fd, file.id))
            .collect()
    };
    if locked.is_empty() {
        return;
    }
    // Read whole before it is looked at: its own descriptor is among them.
    let open = std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    let open: Vec<RawFd> =
        open.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    let mut closed_by_exec = BTreeSet::new();
    let mut ours = Vec::new();
    for fd in open {
        // SAFETY: no memory involved.
        let flags = unsafe { sys!(libc::SYS_fcntl, fd, libc::F_GETFD) };
        let Some(file) = identity::identify(fd) else { continue };
        if matches!(table::get(fd), NumberState::Internal) {
            ours.push((fd, file.id));
        } else if flags > 0 && flags as i32 & libc::FD_CLOEXEC != 0 {
            closed_by_exec.insert(file.id);
        }
    }
    let mut held = HELD.lock();
    for (fd, id) in ours {
        if !closed_by_exec.contains(&id) && locked.iter().any(|(_, other)| *other == id) {
            // SAFETY: no memory involved.
            unsafe { sys!(libc::SYS_fcntl, fd, libc::F_SETFD, 0) };
            held.kept.push(fd);
        }
    }
}

/// After an exec that failed.
pub fn after_exec() {
    for fd in HELD.lock().kept.drain(..) {
        // SAFETY: no memory involved.
        unsafe { sys!(libc::SYS_fcntl, fd, libc::F_SETFD, libc::FD_CLOEXEC) };
    }
}

/// Before fork: nothing is closed until [`after_fork_parent`], so that the child can close it.
/// Returns the retired descriptors.
pub fn before_fork() -> Vec<RawFd> {
    let held = HELD.lock();
    let fds = held.retired_fds();
    // Given back by `after_fork_parent`.
    std::mem::forget(held);
    fds
}

pub fn after_fork_parent() {
    HELD.release();
}

/// In a forked child, which has no POSIX locks.
///
/// # Safety
///
/// No other thread exists.
pub unsafe fn after_fork_child() {
    // SAFETY: the caller's duty.
    unsafe { HELD.reset(Held::new()) };
    RETIRED.store(0, SeqCst);
}
