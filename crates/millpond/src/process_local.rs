//! Which process created an object.
//!
//! A child of fork has a copy of each object of its parent. Rings, mapped files and the keeper's tables are mapped with
//! `MADV_DONTFORK`: the child's address space has holes there, in which its own mappings may lie. Locks may be
//! held by threads that the child does not have, with their data half changed. So a copy must not unmap,
//! lock or free anything when the child drops it: [`ProcessLocal`] leaks it there.
//!
//! A process is known by a number in a page that the kernel clears in a child (`MADV_WIPEONFORK`, Linux 4.14). On
//! older systems the process id is used, which a grandchild may have in common with a dead ancestor.

use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::ptr;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicPtr, AtomicU64};

use rustix::mm::{Advice, MapFlags, ProtFlags};

const PAGE_BYTES: usize = 4096;

/// The page with the number of this process; [`NO_PAGE`] where the kernel does not clear it; null before the first use.
static PAGE: AtomicPtr<AtomicU64> = AtomicPtr::new(ptr::null_mut());
static NO_PAGE: AtomicU64 = AtomicU64::new(0);
/// The largest number that this process or an ancestor took. In ordinary memory, so that a child has its parent's.
static LAST: AtomicU64 = AtomicU64::new(0);

/// The number of this process: no ancestor has it.
pub(crate) fn number() -> u64 {
    // Acquire: pairs with the exchange in `map`. Argued: the page is all zeros before and after it.
    let mut page = PAGE.load(Acquire);
    if page.is_null() {
        page = map();
    }
    if ptr::eq(page, &raw const NO_PAGE) {
        return u64::from(std::process::id());
    }
    // SAFETY: the mapping is never unmapped, and a word of zeros is an atomic.
    let word = unsafe { &*page };
    // Relaxed: a number that carries nothing.
    match word.load(Relaxed) {
        0 => {
            let fresh = LAST.fetch_add(1, Relaxed) + 1;
            word.compare_exchange(0, fresh, Relaxed, Relaxed).map_or_else(|taken| taken, |_| fresh)
        }
        taken => taken,
    }
}

#[cold]
fn map() -> *mut AtomicU64 {
    let none = (&raw const NO_PAGE).cast_mut();
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let mapped = unsafe {
        rustix::mm::mmap_anonymous(ptr::null_mut(), PAGE_BYTES, access, MapFlags::PRIVATE)
    };
    let fresh = match mapped {
        // SAFETY: the mapping above; the advice does not change its contents here.
        Ok(at) => match unsafe { rustix::mm::madvise(at, PAGE_BYTES, Advice::LinuxWipeOnFork) } {
            Ok(()) => at.cast(),
            Err(_) => none,
        },
        Err(_) => none,
    };
    // AcqRel, Acquire: pairs with itself and the load in `number`. The page of a thread that was slower stays unused.
    // Argued: the page is all zeros before and after the exchange, and its word is an atomic that carries nothing. A
    // model can't map pages.
    match PAGE.compare_exchange(ptr::null_mut(), fresh, AcqRel, Acquire) {
        Ok(_) => fresh,
        Err(first) => first,
    }
}

/// A value that only the process that created it drops.
pub(crate) struct ProcessLocal<T> {
    value: ManuallyDrop<T>,
    creator: u64,
}

impl<T> ProcessLocal<T> {
    pub(crate) fn new(value: T) -> ProcessLocal<T> {
        ProcessLocal { value: ManuallyDrop::new(value), creator: number() }
    }

    /// Whether another process created it, of which this one is a descendant.
    pub(crate) fn is_inherited(&self) -> bool {
        self.creator != number()
    }
}

impl<T> Drop for ProcessLocal<T> {
    fn drop(&mut self) {
        if !self.is_inherited() {
            // SAFETY: it is not used again.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}

impl<T> Deref for ProcessLocal<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for ProcessLocal<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

/// A clone has the creator of its original.
impl<T: Clone> Clone for ProcessLocal<T> {
    fn clone(&self) -> ProcessLocal<T> {
        ProcessLocal { value: self.value.clone(), creator: self.creator }
    }
}

impl<T: fmt::Debug> fmt::Debug for ProcessLocal<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.value.fmt(f)
    }
}

/// A value of this process that is created at its first use and never freed. Threads that create it at once wait for
/// no other thread, so a child of fork does not meet a lock that a thread of the parent holds.
pub(crate) struct ProcessStatic<T: 'static>(AtomicPtr<T>);

impl<T: Default> ProcessStatic<T> {
    pub(crate) const fn new() -> ProcessStatic<T> {
        ProcessStatic(AtomicPtr::new(ptr::null_mut()))
    }

    /// The value, if a thread has created it.
    pub(crate) fn get(&self) -> Option<&'static T> {
        // Acquire: pairs with the release of its creator. Argued: a model can't reset a static.
        // SAFETY: values are never freed.
        unsafe { self.0.load(Acquire).as_ref() }
    }

    pub(crate) fn get_or_create(&self) -> &'static T {
        self.get().unwrap_or_else(|| self.create())
    }

    #[cold]
    fn create(&self) -> &'static T {
        let fresh = Box::into_raw(Box::<T>::default());
        // Argued: as in `get`.
        match self.0.compare_exchange(ptr::null_mut(), fresh, AcqRel, Acquire) {
            // SAFETY: values are never freed.
            Ok(_) => unsafe { &*fresh },
            Err(first) => {
                // SAFETY: created above and never published, so no other thread has the pointer.
                drop(unsafe { Box::from_raw(fresh) });
                // SAFETY: values are never freed.
                unsafe { &*first }
            }
        }
    }

    /// Called in a forked child: abandons the parent's value, whose locks may be held.
    pub(crate) fn abandon(&self) {
        // Argued: a child of fork has one thread.
        self.0.store(ptr::null_mut(), Release);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::Arc;

    use super::*;

    /// Goal: a child, and its own child, have numbers of their own and drop nothing that they inherit.
    #[test]
    fn descendants_drop_nothing_that_they_inherit() {
        let shared = Arc::new(());
        let value = ProcessLocal::new(Arc::clone(&shared));
        let own = number();
        assert!(!value.is_inherited() && number() == own);
        // SAFETY: the children call only functions that a child of fork may call, and end without unwinding.
        let status = unsafe {
            let child = libc::fork();
            if child == 0 {
                let first = number();
                let inherited = value.is_inherited() && value.clone().is_inherited();
                let mine = ProcessLocal::new(7);
                let grandchild = libc::fork();
                if grandchild == 0 {
                    let all = [own, first, number()];
                    drop(value);
                    let is_leaked = Arc::strong_count(&shared) == 3;
                    let is_right =
                        is_leaked && mine.is_inherited() && all[0] < all[1] && all[1] < all[2];
                    libc::_exit(i32::from(!is_right));
                }
                let mut status = 0;
                libc::waitpid(grandchild, &mut status, 0);
                libc::_exit(i32::from(status != 0 || !inherited || mine.is_inherited()));
            }
            let mut status = 0;
            assert_eq!(libc::waitpid(child, &mut status, 0), child);
            status
        };
        assert_eq!(status, 0);
        drop(value);
        assert_eq!(Arc::strong_count(&shared), 1);
    }
}
