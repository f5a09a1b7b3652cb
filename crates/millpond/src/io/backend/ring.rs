//! What rings of io_uring have in common.
//!
//! There are two kinds: [`local_ring`](crate::io::backend::local_ring), of one thread that waits for what it
//! submits, and [`read_ring`](crate::io::backend::read_ring), of background reads. For both:
//!
//! - **R1** Memory given to a ring is kept until its completion was reaped.
//! - **R2** EINTR, EAGAIN and ECANCELED say nothing of a transfer: it is tried again, a
//!   limited number of times ([`TransientRetries`](crate::io::transfer::TransientRetries)).
//! - **R3** A ring that the kernel refuses for good (a sandbox that was entered later, a program that closes
//!   descriptors that it does not know) is *broken*: nothing is submitted to it again. Plain system
//!   calls carry out the entries that it had not taken, which are the last. What is in flight ends
//!   by itself, and its completions are found in memory, so no ring has its completions deferred
//!   until its thread asks for them (`DEFER_TASKRUN`): nobody could ask. A broken ring is not
//!   closed, as its descriptor may be somebody else's by now.
//! - **R4** Nor does an entry wait for ever that the kernel took with a number that was not the file's any more,
//!   but a pipe's, a socket's or a ring's, which it waits for to become readable: after [`LOOK_AFTER`] without a
//!   completion the descriptors are looked at, and where they are not the file's its entries are cancelled. They end
//!   as R2 has it, and the file's transfers go to no ring from then on. A
//!   pipeline registers its files with its ring instead; those that it has no place for are not looked at. (Between the look before each transfer and the kernel's own
//!   lie microseconds; a program that closes what it does not know met them in one of fifty runs.)

use std::io;
use std::time::Duration;

use io_uring::IoUring;

/// Between two looks at a broken ring.
pub(crate) const PAUSE: Duration = Duration::from_millis(1);

/// R4. Chosen, not measured.
pub(crate) const LOOK_AFTER: Duration = Duration::from_secs(1);

/// A ring to which one thread submits, and which that one reaps.
pub(crate) fn new_ring(entries: u32, completions: u32) -> io::Result<IoUring> {
    // A forked child must not find the queues in its memory: they are the parent's.
    let mut plain = IoUring::builder();
    plain.dontfork().setup_cqsize(completions);
    // Linux 6.0; and completion work does not interrupt the thread (R3).
    match plain.clone().setup_single_issuer().setup_coop_taskrun().build(entries) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => plain.build(entries),
        other => other,
    }
}

/// R3: whether a ring that refused a call with this is broken. Others say that submitting or waiting was
/// interrupted, or that memory was short for a moment.
pub(crate) fn is_broken(error: &io::Error) -> bool {
    use libc::{EAGAIN, EBUSY, EINTR, ENOMEM, ETIME};
    ![EAGAIN, EBUSY, EINTR, ENOMEM, ETIME].contains(&error.raw_os_error().unwrap_or(EAGAIN))
}

pub(crate) fn outcome(result: i32) -> io::Result<usize> {
    if result < 0 { Err(io::Error::from_raw_os_error(-result)) } else { Ok(result as usize) }
}
