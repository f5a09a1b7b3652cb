//! Starts a thread by `pthread_create`.

use std::ffi::{CString, c_void};
use std::io;
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;

/// The stack of a thread, as in the standard library. The C library's own part is added.
const STACK_BYTES: usize = 2 << 20;

/// The start of a thread.
struct ThreadStart {
    name: CString,
    body: Box<dyn FnOnce() + Send>,
}

/// Spawns a thread that takes no signals: they belong to the program's own threads. The exception is memory faults,
/// which a copy to a caller's memory may raise here as well ([`crate::fault`]).
///
/// A thread of the standard library ends the process if there is no memory for its alternative signal stack. So the
/// thread is made by `pthread_create`, whose error is returned.
pub(crate) fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let name = CString::new(name).expect("a name without NUL");
    let start = Box::into_raw(Box::new(ThreadStart { name, body: Box::new(body) }));
    let mut all = MaybeUninit::uninit();
    let mut old = MaybeUninit::uninit();
    let mut attributes = MaybeUninit::uninit();
    let mut thread = MaybeUninit::uninit();
    // SAFETY: the masks and the attributes are valid for the calls, and initialised by the first call on each. The
    // mask of this thread is restored. `start` belongs to the thread, if there is one.
    let errno = unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::sigdelset(all.as_mut_ptr(), libc::SIGSEGV);
        libc::sigdelset(all.as_mut_ptr(), libc::SIGBUS);
        libc::pthread_attr_init(attributes.as_mut_ptr());
        libc::pthread_attr_setdetachstate(attributes.as_mut_ptr(), libc::PTHREAD_CREATE_DETACHED);
        libc::pthread_sigmask(libc::SIG_BLOCK, all.as_ptr(), old.as_mut_ptr());
        let stack_bytes = STACK_BYTES + reserved_bytes(attributes.as_ptr());
        libc::pthread_attr_setstacksize(attributes.as_mut_ptr(), stack_bytes);
        let errno =
            libc::pthread_create(thread.as_mut_ptr(), attributes.as_ptr(), run, start.cast());
        libc::pthread_sigmask(libc::SIG_SETMASK, old.as_ptr(), ptr::null_mut());
        libc::pthread_attr_destroy(attributes.as_mut_ptr());
        errno
    };
    if errno == 0 {
        return Ok(());
    }
    // SAFETY: it was made above, and no thread has it.
    drop(unsafe { Box::from_raw(start) });
    Err(io::Error::from_raw_os_error(errno))
}

/// The part of a thread's stack that the C library uses, for the program's static thread-local variables above all.
///
/// # Safety
///
/// The attributes are initialised.
unsafe fn reserved_bytes(attributes: *const libc::pthread_attr_t) -> usize {
    type MinimumStack = unsafe extern "C" fn(*const libc::pthread_attr_t) -> usize;
    // SAFETY: the name is NUL-terminated.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"__pthread_get_minstack".as_ptr()) };
    if found.is_null() {
        // Not glibc: the variables lie elsewhere.
        return 0;
    }
    // SAFETY: glibc's function has this type; the caller's promise.
    unsafe { std::mem::transmute::<*mut c_void, MinimumStack>(found)(attributes) }
}

extern "C" fn run(start: *mut c_void) -> *mut c_void {
    // SAFETY: `spawn` made it for this thread.
    let ThreadStart { name, body } = *unsafe { Box::from_raw(start.cast::<ThreadStart>()) };
    // SAFETY: the name is NUL-terminated.
    unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr()) };
    // The panic has printed its message; it ends the thread, as with the standard library.
    let _ = catch_unwind(AssertUnwindSafe(body));
    ptr::null_mut()
}
