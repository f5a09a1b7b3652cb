//! Direct system calls: for the library's own work, and for the program's calls that
//! return at once. A call that may block goes through libc: see `libc_calls`.

use std::ffi::c_int;

/// Sets errno and returns -1, which is how libc reports a failure.
#[cold]
pub fn fail(errno: c_int) -> isize {
    set_errno(errno);
    -1
}

pub fn errno() -> c_int {
    // SAFETY: libc gives every thread an errno that lives as long as the thread.
    unsafe { *libc::__errno_location() }
}

pub fn set_errno(errno: c_int) {
    // SAFETY: libc gives every thread an errno that lives as long as the thread.
    unsafe { *libc::__errno_location() = errno }
}

/// The result of a raw system call in libc's form: -1 and errno on failure.
pub fn to_libc(result: isize) -> isize {
    if (-4095..0).contains(&result) { fail(-result as c_int) } else { result }
}

/// One system call; returns the kernel's result, a negative errno on failure. Does not change the
/// thread's errno.
///
/// # Safety
///
/// The arguments must be valid for the system call `number`.
#[cfg(target_arch = "x86_64")]
pub unsafe fn sys6(number: i64, a: [usize; 6]) -> isize {
    let result;
    // SAFETY: the kernel clobbers rcx and r11 only; the caller vouches for the arguments.
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") number as isize => result,
            in("rdi") a[0], in("rsi") a[1], in("rdx") a[2],
            in("r10") a[3], in("r8") a[4], in("r9") a[5],
            lateout("rcx") _, lateout("r11") _,
            options(nostack),
        );
    }
    result
}

/// One system call; returns the kernel's result, a negative errno on failure. Does not change the
/// thread's errno.
///
/// # Safety
///
/// The arguments must be valid for the system call `number`.
#[cfg(target_arch = "aarch64")]
pub unsafe fn sys6(number: i64, a: [usize; 6]) -> isize {
    let result;
    // SAFETY: the kernel preserves all registers but x0; the caller vouches for the arguments.
    unsafe {
        std::arch::asm!(
            "svc 0",
            in("x8") number,
            inlateout("x0") a[0] as isize => result,
            in("x1") a[1], in("x2") a[2], in("x3") a[3], in("x4") a[4], in("x5") a[5],
            options(nostack),
        );
    }
    result
}

/// A raw system call with up to six integer arguments.
macro_rules! sys {
    (@pad $number:expr; $($a:expr),*; $($zero:expr),*) => {
        $crate::runtime::sys::sys6($number, [$($a as usize,)* $($zero),*])
    };
    ($number:expr) => { sys!(@pad $number; ; 0, 0, 0, 0, 0, 0) };
    ($number:expr, $a:expr) => { sys!(@pad $number; $a; 0, 0, 0, 0, 0) };
    ($number:expr, $a:expr, $b:expr) => { sys!(@pad $number; $a, $b; 0, 0, 0, 0) };
    ($number:expr, $a:expr, $b:expr, $c:expr) => { sys!(@pad $number; $a, $b, $c; 0, 0, 0) };
    ($number:expr, $a:expr, $b:expr, $c:expr, $d:expr) => {
        sys!(@pad $number; $a, $b, $c, $d; 0, 0)
    };
    ($number:expr, $a:expr, $b:expr, $c:expr, $d:expr, $e:expr) => {
        sys!(@pad $number; $a, $b, $c, $d, $e; 0)
    };
    ($number:expr, $a:expr, $b:expr, $c:expr, $d:expr, $e:expr, $f:expr) => {
        sys!(@pad $number; $a, $b, $c, $d, $e, $f; )
    };
}
pub(crate) use sys;

/// New memory, or that of the file `fd` from its start, to read and write; `None`: the kernel refuses it.
pub fn map(bytes: usize, flags: c_int, fd: c_int) -> Option<*mut u8> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping, at an address that the kernel chooses.
    let mapped = unsafe { sys!(libc::SYS_mmap, 0, bytes, protection, flags, fd, 0) };
    (!(-4095..0).contains(&mapped)).then(|| std::ptr::with_exposed_provenance_mut(mapped as usize))
}

/// Flags for new memory that no other process has.
pub const PRIVATE: c_int = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
