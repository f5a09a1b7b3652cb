//! Common rules of io_uring rings.
//!
//! There are two kinds: [`local_ring`](crate::io::backend::local_ring), of one thread that waits
//! for its submissions, and [`read_ring`](crate::io::backend::read_ring), of background reads. For
//! both:
//!
//! - **R1** Memory passed to a ring is kept until its completion was reaped.
//! - **R2** EINTR, EAGAIN and ECANCELED are unrelated to the bytes of a transfer: it is retried, a
//!   limited number of times ([`TransientRetries`](crate::io::transfer::TransientRetries)).
//! - **R3** A ring that the kernel refuses permanently (a sandbox that was entered later, a program
//!   that closes unknown descriptors) is *broken*: nothing is submitted to it again. The entries
//!   that it had not taken, which are the last ones, are performed by plain system calls. Entries
//!   in flight end by themselves, and their completions are in shared memory. So no ring defers its
//!   completions until its thread requests them (`DEFER_TASKRUN`), which would be impossible then.
//!   A broken ring is not closed, as its descriptor may belong to another file by now.
//! - **R4** An entry must not wait forever because the kernel took it with a descriptor number that
//!   now refers to a pipe, a socket or a ring, for whose readability it waits. After [`CHECK_AFTER`]
//!   without a completion the descriptors are checked, and if they do not refer to their files, the
//!   entries are cancelled. They end as in R2, and the file's transfers use no ring from then on. A
//!   pipeline registers its files with its ring instead; files without a place there are not
//!   checked. (Between the check before each transfer and the kernel's lookup lie microseconds; a
//!   program that closes unknown descriptors hit them in one of fifty runs.)

use std::io;
use std::time::Duration;

use io_uring::IoUring;

/// The pause between two polls of a broken ring.
pub(crate) const PAUSE: Duration = Duration::from_millis(1);

/// The time of R4. Untuned.
pub(crate) const CHECK_AFTER: Duration = Duration::from_secs(1);

/// A ring to which one thread submits, and which the same thread reaps.
pub(crate) fn new_ring(entries: u32, completions: u32) -> io::Result<IoUring> {
    // A forked child must not find the queues in its memory: they belong to the parent.
    let mut plain = IoUring::builder();
    plain.dontfork().setup_cqsize(completions);
    // Linux 6.0; completion work does not interrupt the thread (R3).
    match plain.clone().setup_single_issuer().setup_coop_taskrun().build(entries) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => plain.build(entries),
        other => other,
    }
}

/// R3: whether a ring whose call returned this error is broken. Other errors mean that submitting
/// or waiting was interrupted, or that memory was short temporarily.
pub(crate) fn is_broken(error: &io::Error) -> bool {
    use libc::{EAGAIN, EBUSY, EINTR, ENOMEM, ETIME};
    ![EAGAIN, EBUSY, EINTR, ENOMEM, ETIME].contains(&error.raw_os_error().unwrap_or(EAGAIN))
}

pub(crate) fn outcome(result: i32) -> io::Result<usize> {
    if result < 0 { Err(io::Error::from_raw_os_error(-result)) } else { Ok(result as usize) }
}
