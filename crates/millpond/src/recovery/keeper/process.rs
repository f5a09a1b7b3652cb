//! A keeper's process: forked by a program, or started as a keeper.

use std::io::{self, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicI32;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::channel;
use std::time::Duration;

use rustix::io::Errno;

use crate::recovery::keeper::report::Report;
use crate::recovery::keeper::server::Server;
use crate::recovery::wire::Address;
use crate::thread::spawn as spawn_thread;

/// How long a keeper that has finished waits for its reports to be read. Chosen.
const SAYING_PATIENCE: Duration = Duration::from_secs(10);
/// Signals that ask a process to end.
const TERMINAL_SIGNALS: [i32; 4] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT];

/// Starts a keeper in a separate process, and returns its address.
///
/// Call it before the program starts threads. The keeper has its own session, ignores the signals that a
/// terminal sends, and closes the program's descriptors except standard error, where it reports the pages
/// that it could not write. It exits when the program has died and no process uses it any more. It is not a
/// child of the program, which does not have to wait for it.
///
/// # Errors
///
/// The error of `fork(2)` or `bind(2)`.
pub fn spawn() -> io::Result<Address> {
    let mut server = Server::bind(&Address::unique())?;
    let own = rustix::process::getpid();
    server.until = Some(rustix::process::pidfd_open(own, rustix::process::PidfdFlags::empty())?);
    let address = server.address.clone();
    // SAFETY: the caller has no other thread that could hold locks in the child.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            // The keeper is a child of this process, which ends at once: so init adopts it.
            // SAFETY: as above.
            let forked = unsafe { libc::fork() };
            let status = match forked {
                // In any case, it does not continue with the parent's code.
                0 => match catch_unwind(AssertUnwindSafe(|| live(server))) {
                    Ok(Ok(())) => 0,
                    _ => 1,
                },
                -1 => 1,
                _ => 0,
            };
            // SAFETY: ends this process without the parent's exit handlers.
            unsafe { libc::_exit(status) }
        }
        child => {
            let mut status = 0;
            // SAFETY: `status` is a local variable.
            while unsafe { libc::waitpid(child, &raw mut status, 0) } == -1 {
                if io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
                    // The program ignores its children, or has already waited for all of them.
                    status = 0;
                    break;
                }
            }
            if status != 0 {
                return Err(Errno::AGAIN.into());
            }
            // The keeper removes the socket at its end.
            server.made.clear();
            Ok(address)
        }
    }
}

/// Makes this process a keeper that listens at `address`, as `millpond keeper` does; blocks.
///
/// SIGTERM, SIGINT, SIGHUP and SIGQUIT make it stop once no process uses it any more. Their handlers stay
/// installed.
///
/// # Errors
///
/// As for [`Server::bind`] and [`Server::serve`].
///
/// # Examples
///
/// ```no_run
/// let address = "/run/user/1000/millpond-keeper".parse()?;
/// millpond::keeper::run(&address, |report| eprintln!("{report}"))?;
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn run(address: &Address, on_report: impl FnMut(Report)) -> io::Result<()> {
    let mut server = Server::bind(address)?;
    server.until = Some(signals_to_end()?);
    ignore(&[libc::SIGPIPE, libc::SIGXFSZ]);
    use_all_descriptors();
    server.serve(on_report)
}

/// The write end of the pipe that reports signals.
static SIGNALLED: AtomicI32 = AtomicI32::new(-1);

/// A descriptor that becomes readable when a signal asks this process to end.
fn signals_to_end() -> io::Result<OwnedFd> {
    extern "C" fn note_signal(_signal: libc::c_int) {
        // SAFETY: async-signal-safe, errno is restored, and the byte is a local variable. If the pipe is
        // full, the signal was reported already.
        unsafe {
            let errno = *libc::__errno_location();
            libc::write(SIGNALLED.load(Relaxed), [0u8].as_ptr().cast(), 1);
            *libc::__errno_location() = errno;
        }
    }
    let mut ends = [-1; 2];
    // SAFETY: room for two descriptors, which this function owns afterwards.
    if unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC | libc::O_NONBLOCK) } == -1 {
        return Err(io::Error::last_os_error());
    }
    // Relaxed: the handlers are installed after it, by this thread.
    SIGNALLED.store(ends[1], Relaxed);
    for signal in TERMINAL_SIGNALS {
        // SAFETY: the handler is async-signal-safe.
        unsafe { libc::signal(signal, note_signal as *const () as libc::sighandler_t) };
    }
    // SAFETY: newly created.
    Ok(unsafe { OwnedFd::from_raw_fd(ends[0]) })
}

/// The main function of a spawned keeper.
fn live(server: Server) -> io::Result<()> {
    rustix::process::setsid()?;
    ignore(&TERMINAL_SIGNALS);
    ignore(&[libc::SIGPIPE, libc::SIGXFSZ, libc::SIGTSTP, libc::SIGTTIN, libc::SIGTTOU]);
    close_descriptors(&server);
    use_all_descriptors();
    let (send, reports) = channel();
    let (said, all_said) = channel::<()>();
    let teller = spawn_thread("millpond-say", move || {
        for report in reports {
            print_report(&report);
        }
        drop(said);
    });
    let served = server.serve(|report| {
        if !report.is_complete() {
            let _ = send.send(report);
        }
    });
    drop(send);
    if teller.is_ok() {
        let _ = all_said.recv_timeout(SAYING_PATIENCE);
    }
    served
}

/// Writes a report to standard error, on a separate thread: a full pipe or a stopped terminal blocks. A
/// closed standard error must not end the keeper.
fn print_report(report: &Report) {
    let _ = writeln!(io::stderr(), "millpond keeper: {report}");
}

fn ignore(signals: &[i32]) {
    for &signal in signals {
        // SAFETY: no handler is installed.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
}

/// Closes the program's descriptors except standard error, and leaves its directory.
fn close_descriptors(server: &Server) {
    let kept = [&server.listener, &server.stop.wake].into_iter().chain(&server.until);
    let mut kept: Vec<u32> = kept.map(|fd| fd.as_raw_fd() as u32).collect();
    kept.push(2);
    kept.sort_unstable();
    let mut from = 0;
    for to in kept.into_iter().chain([u32::MAX]) {
        if from < to {
            let last = if to == u32::MAX { to } else { to - 1 };
            // SAFETY: no other code in this process uses them: it no longer runs the program.
            unsafe { libc::syscall(libc::SYS_close_range, from, last, 0) };
        }
        from = to.saturating_add(1);
    }
    // So that no file gets the number of a standard stream.
    while let Ok(null) = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null") {
        if null.as_raw_fd() > 2 {
            break;
        }
        std::mem::forget(null);
    }
    let _ = std::env::set_current_dir("/");
}

/// Raises the limit of open files as far as possible: the keeper holds one for each dirty file.
fn use_all_descriptors() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    let _ = setrlimit(Resource::Nofile, limit);
}
