//! The io_uring back end.
//!
//! A caller waits for what it submits: a single transfer is one `preadv2`, which is one system call as it
//! stands; several go into a ring of the calling thread, submitted and reaped by one `io_uring_enter`.
//! Background reads are the [`Driver`]'s.

use std::cell::RefCell;
use std::sync::Arc;

use io_uring::types;
use smallvec::SmallVec;

use crate::io::backend::descriptor_file::{Carrier, DescriptorFile};
use crate::io::backend::descriptors::Descriptors;
use crate::io::backend::driver::Driver;
use crate::io::backend::entry::entry;
use crate::io::backend::local_ring::LocalRing;
use crate::io::backend::read_ring::RingRead;
use crate::io::transfer::{BackgroundRead, Direction, Transfer, is_transient};
use crate::process_local::ProcessLocal;

/// So many of a batch are under way at once. Chosen, not measured.
const RING_ENTRIES: u32 = 64;
/// Of writes, which are a flush's if they are many: the device is to have room for reads, that somebody waits
/// for. Measured (docs/scaling.md), at a device that takes 32 at once.
const WRITES_MAX: usize = 24;

/// A file whose background reads go to a [`Driver`].
pub(crate) type UringFile = DescriptorFile<Arc<Driver>>;

impl Carrier for Arc<Driver> {
    /// Of a flush, so many transfers of this length are in flight at once. Chosen, not measured.
    const TRANSFER_BYTES: u64 = 1 << 20;

    fn try_all(&self, descriptors: &Descriptors, batch: &mut [Transfer<'_>]) {
        if batch.len() > 1 && !descriptors.are_lost() && try_in_ring(descriptors, batch).is_some() {
            return;
        }
        descriptors.try_each(batch);
    }

    fn start(file: Arc<UringFile>, read: BackgroundRead) -> Result<(), BackgroundRead> {
        Arc::clone(&file.carrier).start(RingRead::new(file, read))
    }
}

thread_local! {
    /// What a thread has for its synchronous transfers.
    static RING: RefCell<Option<ProcessLocal<Box<LocalRing>>>> = const { RefCell::new(None) };
}

/// Carries out `batch` in the ring of this thread. `None`: there is no ring to be had, and nothing
/// was done.
fn try_in_ring(descriptors: &Descriptors, batch: &mut [Transfer<'_>]) -> Option<()> {
    RING.try_with(|ring| {
        // A signal handler that reads while its thread is in here goes without the ring.
        let mut ring = ring.try_borrow_mut().ok()?;
        // A child of fork has no ring yet: the memory of its parent's is not mapped there.
        if ring.as_ref().is_none_or(|ring| ring.is_inherited()) {
            *ring = Some(ProcessLocal::new(Box::new(LocalRing::new(RING_ENTRIES).ok()?)));
        }
        try_all_in(ring.as_mut().expect("made above"), descriptors, batch);
        Some(())
    })
    .ok()?
}

/// Keeps as many of `batch` under way as may be, until all have ended.
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
                    // SAFETY: ring.R1: the transfers and their memory outlive this call, which returns
                    // when all have ended. There is room: the ring was empty, and no more are under way
                    // than it has entries.
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
        // A few at a time: a system call for each would cost more than a gap in the line.
        let min = if next < batch.len() { under_way.div_ceil(4) } else { under_way };
        ring.wait(min, Some(&|| descriptors.are_intact()), |number, outcome| {
            under_way -= 1;
            match outcome {
                // As where the ring has broken, and not taken it.
                Err(error) if is_transient(&error) => again.push(number),
                outcome => batch[number as usize].set(outcome),
            }
        });
    }
    for number in again {
        let transfer = &mut batch[number as usize];
        transfer.set(descriptors.try_one(transfer));
    }
    // Where the ring has broken.
    descriptors.try_each(&mut batch[next..]);
}
