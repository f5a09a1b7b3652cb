//! Turning faults on the caller's memory into errors.
//!
//! The kernel answers EFAULT for a buffer that can't be accessed; code in the same process gets
//! SIGSEGV or SIGBUS instead. A program (or a library that stands between a program and the
//! kernel) that wants the kernel's answer installs a handler for both, and lets it continue the
//! interrupted thread at the address that this module gives: the copy then stops, and the
//! operation returns [`crate::Error::Fault`].

/// Where to continue a thread that faulted at program counter `pc`, if that was in a copy between
/// the caller's memory and the cache; `None` if the fault was not ours.
///
/// Async-signal-safe. Always `None` on architectures other than x86-64, where such a fault can't
/// be turned into an error yet.
///
/// # Examples
///
/// ```
/// assert_eq!(millpond::fault::resume_address(0), None);
/// ```
#[must_use]
pub fn resume_address(pc: usize) -> Option<usize> {
    crate::copy::resume_address(pc)
}
