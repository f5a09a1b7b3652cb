//! The frame of every call: turns the result or a panic into a number, and saves the error's text.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CStr, OsStr, c_char, c_int};
use std::os::unix::ffi::OsStrExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use libc::iovec;
use millpond::Error;

use crate::handle::protect::Refusal;

/// Why a call failed.
pub(crate) enum Failure {
    Engine(Error),
    System(std::io::Error),
    /// Refused by this crate: the errno, and the reason.
    Refused(c_int, &'static str),
}

/// A list as long as the caller's request was refused.
pub(crate) const NO_MEMORY: Failure =
    Failure::Refused(libc::ENOMEM, "there is no memory for a list of the call");

pub(crate) type Outcome<T> = Result<T, Failure>;

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Engine(error)
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Failure {
        Failure::System(error)
    }
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Failure {
        match refusal {
            Refusal::Unknown => Failure::Refused(
                libc::EBADF,
                "the handle names no such object: it was never returned, has been closed, is of another \
                 kind, or belongs to a parent process",
            ),
            Refusal::Nested => Failure::Refused(
                libc::EDEADLK,
                "called by a signal handler that interrupted another call of the same thread",
            ),
        }
    }
}

impl Failure {
    /// A positive errno.
    pub(crate) fn errno(&self) -> c_int {
        match self {
            Failure::Engine(error) => error.errno(),
            Failure::System(error) => error.raw_os_error().unwrap_or(libc::EIO),
            Failure::Refused(errno, _) => *errno,
        }
    }

    fn text(&self) -> String {
        match self {
            Failure::Engine(error) => error.to_string(),
            Failure::System(error) => error.to_string(),
            Failure::Refused(_, reason) => (*reason).to_string(),
        }
    }
}

pub(crate) const fn invalid(reason: &'static str) -> Failure {
    Failure::Refused(libc::EINVAL, reason)
}

pub(crate) const fn fault(reason: &'static str) -> Failure {
    Failure::Refused(libc::EFAULT, reason)
}

thread_local! {
    static LAST: RefCell<Option<Failure>> = const { RefCell::new(None) };
}

fn save_failure(failure: Failure) -> i64 {
    let errno = failure.errno();
    // Fails if the thread's local storage has been destroyed: then there is no text.
    let _ = LAST.try_with(|last| last.replace(Some(failure)));
    -i64::from(errno)
}

/// The reason of this thread's last failure.
pub(crate) fn last_text() -> Option<String> {
    LAST.try_with(|last| last.borrow().as_ref().map(Failure::text)).ok().flatten()
}

/// Runs a call.
#[inline]
pub(crate) fn call(body: impl FnOnce() -> Outcome<i64>) -> i64 {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(value)) => value,
        Ok(Err(failure)) => failed(failure),
        Err(panic) => panicked(panic),
    }
}

/// [`call`] for functions that return 0 or an error.
#[inline]
pub(crate) fn status(body: impl FnOnce() -> Outcome<()>) -> c_int {
    call(|| body().map(|()| 0)) as c_int
}

#[cold]
fn failed(failure: Failure) -> i64 {
    catch_unwind(AssertUnwindSafe(|| save_failure(failure))).unwrap_or_else(panicked)
}

#[cold]
fn panicked(panic: Box<dyn Any + Send>) -> i64 {
    // The payload's drop could panic.
    std::mem::forget(panic);
    let reason = "an internal error in Millpond (a panic); see standard error";
    catch_unwind(|| save_failure(Failure::Refused(libc::ENOTRECOVERABLE, reason)))
        .unwrap_or(-i64::from(libc::ENOTRECOVERABLE))
}

/// A path from the caller.
///
/// # Safety
///
/// `path` is null, or a string that ends with a NUL and stays unchanged for `'a`.
pub(crate) unsafe fn path<'a>(path: *const c_char) -> Outcome<&'a Path> {
    if path.is_null() {
        return Err(fault("the path is NULL"));
    }
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(path) };
    Ok(Path::new(OsStr::from_bytes(text.to_bytes())))
}

/// Stores a result at an address of the caller.
///
/// # Safety
///
/// `at` is null, or valid for a write.
pub(crate) unsafe fn store<T>(at: *mut T, value: T) -> Outcome<()> {
    if at.is_null() {
        return Err(fault("the address for a result is NULL"));
    }
    // SAFETY: the caller's promise.
    unsafe { at.write(value) };
    Ok(())
}

/// Refuses NULL, unless the length is 0.
pub(crate) fn check_memory<T>(memory: *const T, len: usize) -> Outcome<()> {
    if memory.is_null() && len > 0 { Err(fault("the memory is NULL")) } else { Ok(()) }
}

/// The vectors of a call.
///
/// # Safety
///
/// `vectors` is NULL, or valid for reads of `count` of them, which stay unchanged for `'a`.
pub(crate) unsafe fn vectors<'a>(vectors: *const iovec, count: c_int) -> Outcome<&'a [iovec]> {
    let count = usize::try_from(count).map_err(|_| invalid("a negative number of vectors"))?;
    if count == 0 {
        return Ok(&[]);
    }
    check_memory(vectors, count)?;
    // SAFETY: our caller's promise.
    let vectors = unsafe { std::slice::from_raw_parts(vectors, count) };
    if vectors.iter().any(|one| one.iov_base.is_null() && one.iov_len > 0) {
        return Err(fault("the memory of a vector is NULL"));
    }
    Ok(vectors)
}

/// Reads a struct of options whose size the caller states; its version may be older or newer. Members that
/// an older caller does not have are 0, the default. Members that this version does not know must be 0.
///
/// # Safety
///
/// `at` is null, or valid for reads of as many bytes as its first member, a `size_t`, says. Any bytes are a
/// valid `T`.
pub(crate) unsafe fn read_options<T: Default>(at: *const T, known_bytes_min: usize) -> Outcome<T> {
    let mut value = T::default();
    if at.is_null() {
        return Ok(value);
    }
    // SAFETY: the caller's promise.
    let bytes = unsafe { at.cast::<usize>().read() };
    if bytes < known_bytes_min || bytes > 4096 {
        return Err(invalid("the size member of the options is not the size of the struct"));
    }
    let known = bytes.min(size_of::<T>());
    // SAFETY: both are valid for `known` bytes.
    unsafe {
        std::ptr::copy_nonoverlapping(at.cast::<u8>(), (&raw mut value).cast::<u8>(), known);
    }
    // SAFETY: the caller's promise.
    let rest = unsafe { std::slice::from_raw_parts(at.cast::<u8>().add(known), bytes - known) };
    if rest.iter().any(|&byte| byte != 0) {
        return Err(Failure::Refused(libc::E2BIG, "an option that this version does not know"));
    }
    Ok(value)
}

/// Writes text as `snprintf` does: as much as fits, and a NUL. Returns the text's length.
///
/// # Safety
///
/// `to` is valid for writes of `bytes` bytes; null if that is 0.
pub(crate) unsafe fn write_text(text: &str, to: *mut c_char, bytes: usize) -> Outcome<i64> {
    check_memory(to, bytes)?;
    if bytes > 0 {
        let len = text.len().min(bytes - 1);
        // SAFETY: the caller's promise; `text` is valid for its length.
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr(), to.cast(), len);
            to.add(len).write(0);
        }
    }
    Ok(text.len() as i64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_panic_leaves_a_call() {
        assert_eq!(call(|| panic!("as tested")), -i64::from(libc::ENOTRECOVERABLE));
        assert!(last_text().unwrap().contains("internal error in Millpond"));
        assert_eq!(status(|| panic!("as tested")), -libc::ENOTRECOVERABLE);
        assert_eq!(call(|| Ok(7)), 7);
    }

    #[derive(Debug, Default, PartialEq)]
    #[repr(C)]
    struct Two {
        size: usize,
        first: u64,
        second: u64,
    }

    #[test]
    fn structs_of_other_versions_are_understood_or_refused() {
        let read = |words: &[u64]| {
            // SAFETY: `words` has as many bytes as its first word says, or the size is refused.
            match unsafe { read_options::<Two>(words.as_ptr().cast(), 16) } {
                Ok(two) => Ok((two.first, two.second)),
                Err(failure) => Err(failure.errno()),
            }
        };
        assert_eq!(read(&[24, 1, 2]), Ok((1, 2)));
        assert_eq!(read(&[16, 1]), Ok((1, 0)), "of an older program");
        assert_eq!(read(&[32, 1, 2, 0]), Ok((1, 2)), "of a newer program");
        assert_eq!(read(&[32, 1, 2, 3]), Err(libc::E2BIG), "with an unknown option");
        assert_eq!(read(&[8]), Err(libc::EINVAL));
        assert_eq!(read(&[u64::MAX]), Err(libc::EINVAL));
    }
}
