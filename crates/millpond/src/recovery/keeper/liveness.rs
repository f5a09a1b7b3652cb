//! The keeper's side of its liveness word (see [`liveness`](crate::recovery::liveness_word)): the thread that holds the
//! futex.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Sender, channel};

use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::ProtFlags;

use crate::recovery::liveness_word::{OWNER, PAGE_BYTES, Page};
use crate::thread::spawn;

/// Keeps the keeper alive for its clients until this is dropped, or the process ends.
pub(super) struct Life {
    shown: OwnedFd,
    page: Arc<Page>,
    /// The holder waits for this to be dropped.
    _until: Sender<()>,
}

/// `struct robust_list_head`, and its one entry.
#[repr(C)]
struct RobustList {
    next: *mut RobustEntry,
    /// The offset from an entry to its futex.
    offset: libc::c_long,
    pending: *mut RobustEntry,
    entry: RobustEntry,
}

#[repr(C)]
struct RobustEntry {
    next: *mut RobustEntry,
}

impl Life {
    /// Starts the holder, a thread.
    pub(super) fn begin() -> io::Result<Life> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let memory = rustix::fs::memfd_create("millpond-keeper-life", flags)?;
        rustix::fs::ftruncate(&memory, PAGE_BYTES as u64)?;
        let page = Arc::new(Page::map(memory.as_fd(), ProtFlags::READ | ProtFlags::WRITE)?);
        // liveness_word.LF1: no new writable mapping is possible.
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&memory, seals)?;
        let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
        let read_only = OFlags::RDONLY | OFlags::CLOEXEC;
        let shown = rustix::fs::open(path, read_only, Mode::empty()).unwrap_or(memory);
        let (until, ended) = channel();
        let (told, holds) = channel();
        let held = Arc::clone(&page);
        spawn("millpond-life", move || {
            let _ = told.send(hold(&held));
            // Until the sender is dropped. Then the page may be unmapped, and the kernel must not access
            // it.
            let _ = ended.recv();
            let _ = set_list(list());
        })?;
        holds.recv().map_err(|_| Errno::AGAIN)??;
        Ok(Life { shown, page, _until: until })
    }

    /// The descriptor that clients get.
    pub(super) fn shown(&self) -> BorrowedFd<'_> {
        self.shown.as_fd()
    }
}

impl Drop for Life {
    fn drop(&mut self) {
        // Relaxed: as `Seen::is_alive`.
        self.page.word().store(0, Relaxed);
    }
}

/// An empty list; leaked, as the kernel reads it when the thread ends.
fn list() -> *mut RobustList {
    let list = Box::into_raw(Box::new(RobustList {
        next: ptr::null_mut(),
        offset: 0,
        pending: ptr::null_mut(),
        entry: RobustEntry { next: ptr::null_mut() },
    }));
    // SAFETY: newly allocated.
    unsafe { (*list).next = list.cast() };
    list
}

/// Makes the calling thread the holder of the page's futex.
fn hold(page: &Page) -> io::Result<()> {
    let list = list();
    // SAFETY: owned by this thread until the kernel has the list.
    unsafe {
        let entry = &raw mut (*list).entry;
        (*entry).next = list.cast();
        (*list).next = entry;
        (*list).offset =
            (ptr::from_ref(page.word()) as libc::c_long).wrapping_sub(entry as libc::c_long);
    }
    let thread = rustix::thread::gettid().as_raw_nonzero().get() as u32;
    // Relaxed: clients get the page after this.
    page.word().store(thread & OWNER, Relaxed);
    set_list(list)
}

/// Registers the calling thread's list with the kernel. It replaces the C library's list, which is for
/// robust mutexes; this thread takes none.
fn set_list(head: *mut RobustList) -> io::Result<()> {
    let bytes = std::mem::offset_of!(RobustList, entry);
    // SAFETY: the kernel keeps the address of memory that is never freed, with the size that it requires:
    // the entry is part of it.
    match unsafe { libc::syscall(libc::SYS_set_robust_list, head, bytes) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::recovery::liveness_word::Seen;

    fn see(life: &Life) -> Seen {
        Seen::new(life.shown().try_clone_to_owned().unwrap()).unwrap()
    }

    /// Goal: clients see the end of a keeper that stops, and can't write to its memory.
    #[test]
    fn a_life_ends() {
        let life = Life::begin().unwrap();
        let seen = see(&life);
        assert!(seen.is_alive());
        let write = ProtFlags::READ | ProtFlags::WRITE;
        assert!(Page::map(life.shown(), write).is_err(), "a client could write to it");
        drop(life);
        while seen.is_alive() {
            std::thread::yield_now();
        }
    }

    /// Goal: clients see the end of a keeper that is killed, at once.
    #[test]
    fn a_life_is_ended() {
        let (ours, theirs) = rustix::net::socketpair(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::SEQPACKET,
            rustix::net::SocketFlags::empty(),
            None,
        )
        .unwrap();
        // SAFETY: the child calls only functions that a forked thread may call, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let begun = Life::begin();
            let fds: Vec<_> = begun.iter().map(Life::shown).collect();
            crate::recovery::wire::answer(theirs.as_fd(), Ok(0), &fds);
            loop {
                // SAFETY: waits for the signal that ends it.
                unsafe { libc::pause() };
            }
        }
        let mut fds = crate::recovery::wire::receive_fds(ours.as_fd());
        let seen = Seen::new(fds.pop().unwrap()).unwrap();
        assert!(seen.is_alive());
        // SAFETY: the child of above.
        unsafe {
            libc::kill(child, libc::SIGKILL);
            libc::waitpid(child, std::ptr::null_mut(), 0);
        }
        assert!(!seen.is_alive());
    }
}
