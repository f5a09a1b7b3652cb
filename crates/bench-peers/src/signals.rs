//! Signals by their numbers, real-time ones too, for which rustix has no names.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

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
}
