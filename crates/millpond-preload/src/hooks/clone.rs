//! `clone` and its kin, by name and by number: which of them are forks, and which files are handed over before the others.

use std::ffi::{c_int, c_long, c_void};

use crate::fork::{fork_by, release_shared_files};
use crate::hooks::process::release_all_files;
use crate::runtime::elf::libcs;
use crate::runtime::libc_calls::slots;
use crate::runtime::sys::{sys, to_libc};
use crate::runtime::{fault, section, thread};

/// libc's `clone`, whose child runs a function of the program's on a stack of its own.
pub extern "C" fn route_clone(_: *const c_void, stack: usize, flags: c_int) -> *const c_void {
    let request = NewTask { flags: flags as u64, stack: stack as u64 };
    if !thread::record().is_inside() && !request.is_thread() {
        request.before();
    }
    libcs(&slots::clone, c"clone")
}

/// Whether the system call makes a thread or process that is not as after a fork, on a stack of its
/// own. Does the library's part before it.
pub fn leaves_for_good(number: c_long, a: usize, b: usize) -> bool {
    let request = match number {
        libc::SYS_clone => Some(NewTask { flags: a as u64, stack: b as u64 }),
        libc::SYS_clone3 => NewTask::of_clone3(a, b),
        // As libc has it, where no hook does anything.
        #[cfg(target_arch = "x86_64")]
        libc::SYS_vfork => return thread::record().is_inside(),
        _ => return false,
    };
    // Others the kernel refuses.
    let Some(request) = request else { return true };
    if thread::record().is_inside() || request.is_thread() {
        return true;
    }
    if request.is_fork() {
        return false;
    }
    request.before();
    true
}

/// `fork` by number: it calls no handlers but ours.
#[cfg(target_arch = "x86_64")]
pub fn fork() -> isize {
    // SAFETY: no memory involved.
    to_libc(fork_by(|| unsafe { sys!(libc::SYS_fork) }))
}

/// `clone` by number, as a fork. A child on our stack and in our memory, while we wait for it: in
/// its own.
pub unsafe fn clone(flags: usize, c: usize, d: usize, e: usize) -> isize {
    let flags = flags & !((libc::CLONE_VM | libc::CLONE_VFORK) as usize);
    // SAFETY: the caller's duty.
    to_libc(fork_by(|| unsafe { sys!(libc::SYS_clone, flags, 0, c, d, e) }))
}

/// `clone3` by number, as a fork.
pub unsafe fn clone3(args: usize, bytes: usize) -> isize {
    // SAFETY: the caller's duty.
    let call = || unsafe { sys!(libc::SYS_clone3, args, bytes) };
    match NewTask::of_clone3(args, bytes) {
        Some(request) if request.flags & NewTask::VM != 0 => {
            // SAFETY: no precondition.
            unsafe { libc::fork() as isize }
        }
        Some(_) => to_libc(fork_by(call)),
        // The kernel refuses it.
        None => to_libc(call()),
    }
}

struct NewTask {
    flags: u64,
    stack: u64,
}

impl NewTask {
    const VM: u64 = libc::CLONE_VM as u64;
    const FILES: u64 = libc::CLONE_FILES as u64;

    /// The arguments of `clone3`; `None` if there are too few, or they can't be read.
    fn of_clone3(args: usize, bytes: usize) -> Option<Self> {
        // Those of the first version. The sixth is the stack.
        const WORDS: usize = 8;
        let mut words = [0u64; WORDS];
        if args == 0 || bytes < size_of_val(&words) {
            return None;
        }
        let is_read = section::run(|_| {
            fault::install();
            let args = std::ptr::with_exposed_provenance::<u8>(args);
            // SAFETY: `words` has room; `args` may be any address.
            unsafe { fault::copy_in(words.as_mut_ptr().cast(), args, size_of_val(&words)) }
        });
        is_read.then(|| Self { flags: words[0], stack: words[5] })
    }

    /// Shares memory and descriptors.
    fn is_thread(&self) -> bool {
        self.flags & Self::VM != 0 && self.flags & Self::FILES != 0
    }

    /// As `fork` or `vfork`: both come back from the same call.
    fn is_fork(&self) -> bool {
        let is_vfork = self.flags & libc::CLONE_VFORK as u64 != 0;
        self.stack == 0 && self.flags & Self::FILES == 0 && (self.flags & Self::VM == 0 || is_vfork)
    }

    /// Before one that is neither.
    fn before(&self) {
        if self.flags & Self::FILES != 0 {
            // The child opens and closes here.
            release_all_files();
        } else {
            release_shared_files();
        }
    }
}
