//! A word in shared memory that says whether the process which owns the memory lives.
//!
//! ```text
//!   0 -> start -> the number of the owner's thread -> retire, or the kernel -> ENDED -> restore -> the number
//! ```
//!
//! - **OW1** The word is an entry of a thread's robust list (set_robust_list(2)). When the thread ends by any cause, the
//!   kernel sets ENDED in it. It does that before it closes the descriptors of the process, so before a socket of the process shows its
//!   end, and before a lock of a file ends. So a process that knows of the end by one of these, or by a message of another
//!   process that knows, finds ENDED.
//! - **OW2** The thread has nothing else to do, and lives as long as the word is in use. Another thread may end earlier, or
//!   have entries of the C library on its list.
//!
//! Before Linux 5.18 a process that is killed for want of memory may lose its list before the kernel has read it. Then, or without that
//! call, the word stays as it is.

use std::io;
use std::ptr::{self, NonNull};
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

/// The bit of a futex whose owner has died (linux/futex.h).
const ENDED: u32 = 0x4000_0000;

/// The word.
#[derive(Debug)]
#[repr(transparent)]
pub(crate) struct OwnerWord(AtomicU32);

impl OwnerWord {
    /// Whether the owner lives, and has not retired.
    #[inline]
    pub(crate) fn is_alive(&self) -> bool {
        // Acquire: pairs with `retire` and with the kernel's store, which other processes learn of before they write (OW1).
        let word = self.0.load(Acquire);
        word != 0 && word & ENDED == 0
    }
}

/// `struct robust_list` (linux/futex.h).
#[repr(C)]
struct ListEntry {
    next: *const ListEntry,
}

/// `struct robust_list_head`.
#[repr(C)]
struct ListHead {
    first: ListEntry,
    /// From an entry to its word.
    word_distance: libc::c_long,
    pending: *const ListEntry,
}

/// A pointer that is sent to the owner's thread.
struct WordPointer(NonNull<OwnerWord>);

// SAFETY: the word is an atomic.
unsafe impl Send for WordPointer {}

/// The thread that owns a word (OW2).
#[derive(Debug)]
pub(crate) struct Owner {
    thread_number: u32,
    /// Dropped to end the thread. `None`: it has ended.
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
    process: u32,
}

impl Owner {
    /// # Safety
    ///
    /// The word is mapped, writable, until the owner is dropped.
    pub(crate) unsafe fn start(word: NonNull<OwnerWord>) -> io::Result<Owner> {
        let (end, ended) = channel::<()>();
        let (number_to, number) = channel();
        let pointer = WordPointer(word);
        let hold = move || {
            let WordPointer(word) = { pointer };
            let own = rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs();
            let held = HeldWord::new(word);
            // SAFETY: mapped, as the caller of `start` has promised.
            unsafe { word.as_ref() }.0.store(own, Release);
            // Its receiver waits.
            _ = number_to.send(own);
            // Until the sender is dropped.
            _ = ended.recv();
            drop(held);
        };
        let thread = std::thread::Builder::new().name("millpond-owner".into()).spawn(hold)?;
        let thread_number = number.recv().map_err(io::Error::other)?;
        let process = std::process::id();
        Ok(Owner { thread_number, end: Some(end), thread: Some(thread), process })
    }

    /// The memory is no longer valid for others, although the process lives.
    pub(crate) fn retire(&self, word: &OwnerWord) {
        // Release: pairs with `is_alive`.
        word.0.store(ENDED, Release);
    }

    /// Ends a retirement.
    pub(crate) fn restore(&self, word: &OwnerWord) {
        // Release: as above.
        word.0.store(self.thread_number, Release);
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let (end, thread) = (self.end.take(), self.thread.take());
        if self.process != std::process::id() {
            // A child of fork has no such thread.
            std::mem::forget((end, thread));
            return;
        }
        drop(end);
        if let Some(thread) = thread {
            // It does not panic.
            _ = thread.join();
        }
    }
}

/// The list of the calling thread has the word alone, until this is dropped by the thread.
struct HeldWord {
    /// On the heap, as the kernel has its address. The entry refers to the head, whose address stays the same.
    list: Box<(ListHead, ListEntry)>,
    /// The C library's.
    before: (usize, usize),
    word: NonNull<OwnerWord>,
}

impl HeldWord {
    fn new(word: NonNull<OwnerWord>) -> HeldWord {
        let none = || ListEntry { next: ptr::null() };
        let head = ListHead { first: none(), word_distance: 0, pending: ptr::null() };
        let mut list = Box::new((head, none()));
        let (head, entry) = (&raw const list.0.first, &raw const list.1);
        list.0.first.next = entry;
        list.1.next = head;
        list.0.word_distance = word.addr().get().wrapping_sub(entry.addr()) as libc::c_long;
        let mut before = (0_usize, 0_usize);
        // SAFETY: the calls write the two words, and keep the address of a head of that length, which stays there until `drop`
        // has replaced it. Without these calls nothing notices the end.
        unsafe {
            let number = libc::SYS_get_robust_list;
            if libc::syscall(number, 0, &raw mut before.0, &raw mut before.1) == 0 {
                libc::syscall(libc::SYS_set_robust_list, &raw const list.0, size_of::<ListHead>());
            }
        }
        HeldWord { list, before, word }
    }
}

impl Drop for HeldWord {
    fn drop(&mut self) {
        // SAFETY: mapped, as the owner is dropped after its thread has ended (`Owner::start`).
        // Release: pairs with `is_alive`.
        unsafe { self.word.as_ref() }.0.store(ENDED, Release);
        if self.before.1 != 0 {
            // SAFETY: the list that the C library has set for this thread.
            unsafe { libc::syscall(libc::SYS_set_robust_list, self.before.0, self.before.1) };
        }
        _ = &self.list;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A word in memory that a child of fork shares.
    fn shared_word() -> NonNull<OwnerWord> {
        let access = rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let at = unsafe {
            rustix::mm::mmap_anonymous(ptr::null_mut(), 4096, access, rustix::mm::MapFlags::SHARED)
        };
        NonNull::new(at.unwrap().cast()).unwrap()
    }

    #[test]
    fn an_owner_retires_returns_and_ends() {
        let word = shared_word();
        // SAFETY: the mapping stays.
        let (word_ref, owner) = unsafe { (word.as_ref(), Owner::start(word).unwrap()) };
        assert!(word_ref.is_alive());
        owner.retire(word_ref);
        assert!(!word_ref.is_alive());
        owner.restore(word_ref);
        assert!(word_ref.is_alive());
        drop(owner);
        assert!(!word_ref.is_alive());
    }

    /// Goal: the end of a process that is killed is in the word before the process closes its descriptors.
    #[test]
    fn a_killed_owner_has_ended_before_its_descriptors_close() {
        for _ in 0..50 {
            let word = shared_word();
            let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
            // SAFETY: the child makes calls that are not async-signal-safe, which glibc allows for memory and threads.
            let child = unsafe { libc::fork() };
            if child == 0 {
                drop(ours);
                // SAFETY: the mapping stays.
                let _owner = unsafe { Owner::start(word) };
                io::Write::write_all(&mut &theirs, &[1]).unwrap();
                loop {
                    std::thread::park();
                }
            }
            drop(theirs);
            io::Read::read_exact(&mut &ours, &mut [0]).unwrap();
            // SAFETY: the mapping stays.
            let word = unsafe { word.as_ref() };
            assert!(word.is_alive());
            // SAFETY: a child of this process, which is not reaped yet.
            unsafe { libc::kill(child, libc::SIGKILL) };
            assert_eq!(io::Read::read(&mut &ours, &mut [0]).unwrap(), 0, "its end is closed");
            assert!(!word.is_alive());
            // SAFETY: as above.
            unsafe { libc::waitpid(child, ptr::null_mut(), 0) };
        }
    }
}
