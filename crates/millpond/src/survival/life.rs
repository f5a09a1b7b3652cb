//! Whether a keeper lives: a word that the kernel changes when it dies.
//!
//! The keeper has a page of memory, which it shows to its clients, for reading. In it is a robust
//! futex that a thread of the keeper holds for as long as the keeper serves: however that thread ends,
//! the kernel marks the word (`get_robust_list(2)`, `FUTEX_OWNER_DIED`). So an engine asks by one load,
//! before each write that is to wait in the cache, and nothing in the program has to stay awake, or
//! open, to learn of it.
//!
//! ```text
//!   0 -- the holder starts --> its thread id -- it ends, or is killed --> FUTEX_OWNER_DIED (or 0)
//! ```
//!
//! - **H1** The list that the kernel walks at the holder's death is in the keeper's own memory, and
//!   the word in a mapping that no client can write to (sealed): so a client can make the kernel or
//!   the keeper believe nothing.
//! - **H2** The kernel marks the word before the process counts as dead, and so before the program can
//!   learn of the death in another way.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Sender, channel};

use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

const PAGE_BYTES: usize = 4096;
const OWNER_DIED: u32 = 0x4000_0000;
const OWNER: u32 = 0x3fff_ffff;

/// The page, mapped.
struct Page(NonNull<AtomicU32>);

// SAFETY: a mapping that lives as long as the value, with an atomic in it.
unsafe impl Send for Page {}
// SAFETY: as above.
unsafe impl Sync for Page {}

impl Page {
    fn map(fd: BorrowedFd<'_>, protection: ProtFlags) -> io::Result<Page> {
        // SAFETY: a new mapping at an address of the kernel's choice.
        let at = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), PAGE_BYTES, protection, MapFlags::SHARED, fd, 0)
        }?;
        Ok(Page(NonNull::new(at.cast()).expect("a mapping is not at 0")))
    }

    fn word(&self) -> &AtomicU32 {
        // SAFETY: the page is mapped until `drop`, and can't shrink (its seals).
        unsafe { self.0.as_ref() }
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: the mapping of `map`; nobody borrows from it any more.
        let _ = unsafe { rustix::mm::munmap(self.0.as_ptr().cast(), PAGE_BYTES) };
    }
}

/// A keeper's life, as its clients see it.
pub(super) struct Seen(Page);

impl Seen {
    /// Takes what the keeper hands over; EINVAL for anything else.
    pub(super) fn new(fd: OwnedFd) -> io::Result<Seen> {
        let seals = rustix::fs::fcntl_get_seals(&fd)?;
        let bytes = rustix::fs::fstat(&fd)?.st_size;
        if !seals.contains(SealFlags::SHRINK) || bytes < PAGE_BYTES as i64 {
            return Err(Errno::INVAL.into());
        }
        Ok(Seen(Page::map(fd.as_fd(), ProtFlags::READ)?))
    }

    /// Whether the keeper lives. Once false it stays so.
    #[inline]
    pub(super) fn is_alive(&self) -> bool {
        // Relaxed: nothing is read on the strength of it.
        let word = self.0.word().load(Relaxed);
        word & OWNER != 0 && word & OWNER_DIED == 0
    }
}

/// A keeper's life, as it leads it: until this is dropped, or the process ends.
pub(super) struct Life {
    shown: OwnedFd,
    page: Arc<Page>,
    /// The holder waits for this to go.
    _until: Sender<()>,
}

/// `struct robust_list_head`, and its one entry.
#[repr(C)]
struct RobustList {
    next: *mut RobustEntry,
    /// From an entry to its futex.
    offset: libc::c_long,
    pending: *mut RobustEntry,
    entry: RobustEntry,
}

#[repr(C)]
struct RobustEntry {
    next: *mut RobustEntry,
}

impl Life {
    /// Begins it; the holder is a thread.
    pub(super) fn begin() -> io::Result<Life> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let memory = rustix::fs::memfd_create("millpond-keeper-life", flags)?;
        rustix::fs::ftruncate(&memory, PAGE_BYTES as u64)?;
        let page = Arc::new(Page::map(memory.as_fd(), ProtFlags::READ | ProtFlags::WRITE)?);
        // H1: nobody maps it for writing any more.
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&memory, seals)?;
        let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
        let read_only = OFlags::RDONLY | OFlags::CLOEXEC;
        let shown = rustix::fs::open(path, read_only, Mode::empty()).unwrap_or(memory);
        let (until, ended) = channel();
        let (told, holds) = channel();
        let held = Arc::clone(&page);
        crate::thread::spawn("millpond-life", move || {
            let _ = told.send(hold(&held));
            // Until the sender is gone. Then the page may go, and the kernel is not to look at it.
            let _ = ended.recv();
            let _ = set_list(list());
        })?;
        holds.recv().map_err(|_| Errno::AGAIN)??;
        Ok(Life { shown, page, _until: until })
    }

    /// What clients are given.
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

/// An empty list; leaked, as the kernel looks at it when the thread ends.
fn list() -> *mut RobustList {
    let list = Box::into_raw(Box::new(RobustList {
        next: std::ptr::null_mut(),
        offset: 0,
        pending: std::ptr::null_mut(),
        entry: RobustEntry { next: std::ptr::null_mut() },
    }));
    // SAFETY: just made.
    unsafe { (*list).next = list.cast() };
    list
}

/// Makes the calling thread the holder of the page's futex.
fn hold(page: &Page) -> io::Result<()> {
    let list = list();
    // SAFETY: ours until the kernel is told of it.
    unsafe {
        let entry = &raw mut (*list).entry;
        (*entry).next = list.cast();
        (*list).next = entry;
        (*list).offset = (page.0.as_ptr() as libc::c_long).wrapping_sub(entry as libc::c_long);
    }
    let thread = rustix::thread::gettid().as_raw_nonzero().get() as u32;
    // Relaxed: clients are given the page after this.
    page.word().store(thread & OWNER, Relaxed);
    set_list(list)
}

/// Tells the kernel of the calling thread's list. That of the C library, which it replaces, is for
/// robust mutexes, of which this thread takes none.
fn set_list(head: *mut RobustList) -> io::Result<()> {
    let bytes = std::mem::offset_of!(RobustList, entry);
    // SAFETY: the kernel keeps the address, of memory that is never freed, and of the size that it
    // asks for: the entry is ours.
    match unsafe { libc::syscall(libc::SYS_set_robust_list, head, bytes) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn see(life: &Life) -> Seen {
        Seen::new(life.shown().try_clone_to_owned().unwrap()).unwrap()
    }

    /// Goal: clients see the end of a keeper that stops, and can write to none of its memory.
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
        // SAFETY: the child does what little a thread may do in it, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let begun = Life::begin();
            let fds: Vec<_> = begun.iter().map(Life::shown).collect();
            super::super::wire::answer(theirs.as_fd(), Ok(0), &fds);
            loop {
                // SAFETY: waits for the signal that ends it.
                unsafe { libc::pause() };
            }
        }
        let mut fds = super::super::wire::receive_fds(ours.as_fd());
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
