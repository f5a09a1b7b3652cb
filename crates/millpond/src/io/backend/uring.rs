//! The io_uring backend.
//!
//! A caller waits for its submissions. A single transfer is one `preadv2`, which is one system call
//! as well. Several transfers use a ring of the calling thread, submitted and reaped by one
//! `io_uring_enter`. Background reads go to the
//! [`Driver`](crate::io::backend::driver::Driver).

use std::cell::RefCell;

use io_uring::types;
use smallvec::SmallVec;

use crate::io::backend::descriptors::Descriptors;
use crate::io::backend::entry::entry;
use crate::io::backend::local_ring::LocalRing;
use crate::io::transfer::{Direction, Transfer, is_transient};
use crate::process_local::ProcessLocal;

/// The maximum number of transfers of a batch in flight. Untuned.
const RING_ENTRIES: u32 = 64;
/// The maximum number of writes, which belong to a flush if they are many: the device must have
/// room for reads, which have waiters. Measured (docs/scaling.md), with a device that takes 32 at
/// once.
const WRITES_MAX: usize = 24;

/// The length of the transfers of a flush that are in flight at once. Untuned.
pub(crate) const TRANSFER_BYTES: u64 = 1 << 20;

/// [`BackingFile::try_all`](crate::io::backend::BackingFile::try_all).
pub(crate) fn try_all(descriptors: &Descriptors, batch: &mut [Transfer<'_>]) {
    let fits_ring = batch.len() > 1
        && !descriptors.are_lost()
        && !batch.iter().any(|transfer| descriptors.meets_buffered_writer(transfer));
    if fits_ring && try_in_ring(descriptors, batch).is_some() {
        return;
    }
    descriptors.try_each(batch);
}

thread_local! {
    /// The ring of a thread for its synchronous transfers.
    static RING: RefCell<Option<ProcessLocal<Box<LocalRing>>>> = const { RefCell::new(None) };
}

/// Performs `batch` in the ring of this thread. `None`: there is no ring, and nothing was done.
fn try_in_ring(descriptors: &Descriptors, batch: &mut [Transfer<'_>]) -> Option<()> {
    RING.try_with(|ring| {
        // A signal handler that interrupts this function does not use the ring.
        let mut ring = ring.try_borrow_mut().ok()?;
        // A child of fork has no ring yet: the memory of its parent's ring is not mapped there.
        if ring.as_ref().is_none_or(|ring| ring.is_inherited()) {
            *ring = Some(ProcessLocal::new(Box::new(LocalRing::new(RING_ENTRIES).ok()?)));
        }
        try_all_in(ring.as_mut().expect("made above"), descriptors, batch);
        Some(())
    })
    .ok()?
}

/// Keeps as many transfers of `batch` in progress as possible, until all have ended.
fn try_all_in(ring: &mut LocalRing, descriptors: &Descriptors, batch: &mut [Transfer<'_>]) {
    let writes = batch.iter().any(|transfer| transfer.direction == Direction::Write);
    let under_way_max = if writes { WRITES_MAX } else { RING_ENTRIES as usize };
    let mut again: SmallVec<[u32; 4]> = SmallVec::new();
    let (mut next, mut under_way) = (0, 0);
    loop {
        while next < batch.len() && under_way < under_way_max && !ring.is_broken() {
            let transfer = &mut batch[next];
            match descriptors.route(transfer) {
                Ok((fd, flags)) => {
                    // SAFETY: ring.R1: the transfers and their memory outlive this call, which
                    // returns when all have ended. There is room: the ring was empty, and no more
                    // are in progress than it has entries.
                    unsafe { ring.push(next as u32, entry(types::Fd(fd), flags, transfer, None)) };
                    under_way += 1;
                }
                Err(error) => transfer.set(Err(error)),
            }
            next += 1;
        }
        if under_way == 0 {
            break;
        }
        // A few at a time: a system call for each would cost more than a short idle time.
        let min = if next < batch.len() { under_way.div_ceil(4) } else { under_way };
        ring.wait(min, Some(&|| descriptors.are_intact()), |number, outcome| {
            under_way -= 1;
            match outcome {
                // Also if the ring has broken, and not taken it.
                Err(error) if is_transient(&error) => again.push(number),
                outcome => batch[number as usize].set(outcome),
            }
        });
    }
    for number in again {
        let transfer = &mut batch[number as usize];
        transfer.set(descriptors.try_one(transfer));
    }
    // If the ring has broken.
    descriptors.try_each(&mut batch[next..]);
}
