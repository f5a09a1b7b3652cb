//! Signals by their numbers, real-time ones too, for which rustix has no names.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Sends a signal to the process of a pidfd.
///
/// # Errors
///
/// Those of `pidfd_send_signal`; `ESRCH`: the process has ended.
pub fn send_signal(process: BorrowedFd<'_>, number: i32) -> io::Result<()> {
    let (process, info) = (process.as_raw_fd(), std::ptr::null::<libc::siginfo_t>());
    // SAFETY: the kernel reads no memory, as `info` is null.
    match unsafe { libc::syscall(libc::SYS_pidfd_send_signal, process, number, info, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Sends a signal to a child that has not been waited for, where the kernel has no pidfds.
///
/// # Errors
///
/// Those of `kill`.
pub fn send_signal_by_id(child: u32, number: i32) -> io::Result<()> {
    // SAFETY: the call accesses no memory.
    match unsafe { libc::kill(child.cast_signed(), number) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Has the kernel keep the exit status of children until they are waited for, if this process was started to ignore SIGCHLD. The
/// child of `command` then ignores it, as it would without this call.
pub fn stop_ignoring_children(command: &mut Command) {
    // SAFETY: the default action is no handler, so no code of this process runs in it.
    if unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) } == libc::SIG_IGN {
        let ignore_again = || {
            // SAFETY: as above.
            unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
            Ok(())
        };
        // SAFETY: between fork and exec the closure makes one system call, and allocates nothing.
        unsafe { command.pre_exec(ignore_again) };
    }
}

/// Ends this process by a signal. Returns if the signal does not end processes by default.
pub fn end_by_signal(number: i32) {
    // SAFETY: the default action is no handler, so no code of this process runs in it. The set is a local, which
    // `sigemptyset` initialises.
    unsafe {
        libc::signal(number, libc::SIG_DFL);
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, number);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const set, std::ptr::null_mut());
        libc::raise(number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    #[test]
    fn a_real_time_signal_ends_a_process() {
        let mut child = Command::new("sleep").arg("100").spawn().unwrap();
        let pid = rustix::process::Pid::from_child(&child);
        let process =
            rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap();
        send_signal(process.as_fd(), 40).unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(40));
        let error = send_signal(process.as_fd(), 40).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ESRCH));
    }

    #[test]
    fn a_child_gets_a_signal_by_its_id() {
        let mut child = Command::new("sleep").arg("100").spawn().unwrap();
        send_signal_by_id(child.id(), 40).unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(40));
    }
}
