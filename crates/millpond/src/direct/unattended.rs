//! Direct reads that no thread waits for: into buffers that they own, told of when they end.
//!
//! ```text
//!   start -> begin (waits for nothing) -> back end: a ring, or who has background reads -> end -> tell
//!         -> conflict, or no slot ------> a worker, which may wait; so do those that were cut short
//! ```
//!
//! - **O1** Buffers, file and guard belong to the read until it ends: what the kernel may write to is
//!   freed by nobody else, whoever lost interest.
//! - **O2** The guard borrows from the file, which is kept beside it and goes after it.
//! - **O3** Its end may be told on the thread that reaped it: what has to wait there (the rest of a short
//!   read, the file's new length, the last handle's write-back) is left to a worker.
//!
//! Writes are carried out by workers. Of a ring that any thread submits to, a direct write may end in
//! the thread that submitted it only, and if that truncates the file meanwhile, the kernel has it wait
//! there for the write.

use std::io::{self, IoSlice, IoSliceMut};
use std::sync::Arc;

use crate::buffers::Buffer;
use crate::cached::{CachedFile, Shared};
use crate::direct::{self, Begun, Extent, Operation, Patience};
use crate::error::{Op, Result};
use crate::file::{File, check_range};
use crate::io::backend::shared_ring::SharedRing;
use crate::io::flight::{Flight, Slot};
use crate::io::request::{self, BackgroundRead, Direction};
use crate::io::segment::Segment;
use crate::io::segment_list::{RawList, SegmentList};

/// Who is told of the end of a read, and gets the buffers back.
pub(crate) type Tell = Box<dyn FnOnce(Result<usize>, Vec<Buffer>) + Send>;

/// A read under way (O1). Its fields are dropped in their order (O2).
struct Read {
    begun: Begun<'static>,
    slot: Slot,
    list: RawList<'static>,
    offset: u64,
    handle: Arc<File>,
    tell: Tell,
}

/// Starts a read of all of `buffers`, or has a worker do it. Waits for nothing.
pub(crate) fn start_read(
    handle: Arc<File>,
    buffers: Vec<Buffer>,
    offset: u64,
    ring: Option<Arc<SharedRing>>,
    tell: Tell,
) {
    let list = SegmentList::from_buffers(buffers).into_raw();
    match begin(&handle, &list, offset) {
        Err(error) => {
            let shared = Arc::clone(&handle.cached.shared);
            end(&shared, handle, list.into_buffers(), tell, Err(error));
        }
        Ok(Some((begun, slot))) => Read { begun, slot, list, offset, handle, tell }.submit(ring),
        Ok(None) => {
            let shared = Arc::clone(&handle.cached.shared);
            let mut buffers = list.into_buffers();
            shared.clone().workers.run(Box::new(move || {
                let outcome = read_buffers(&handle, &mut buffers, offset);
                end(&shared, handle, buffers, tell, outcome);
            }));
        }
    }
}

fn extent<'f>(file: &'f CachedFile, list: &RawList<'_>, offset: u64) -> Extent<'f> {
    Extent { file, direction: Direction::Read, offset, len: list.total(), durable: false }
}

/// Looks at the request, and begins it; `None`: not without waiting.
fn begin(
    handle: &Arc<File>,
    list: &RawList<'_>,
    offset: u64,
) -> Result<Option<(Begun<'static>, Slot)>> {
    check_range(Op::Read, offset, list.total())?;
    handle.check_direct(Op::Read, offset, list.total())?;
    // SAFETY: O2: what is borrowed from it goes before the handle, which keeps the file.
    let file: &'static CachedFile = unsafe { &*Arc::as_ptr(&handle.cached) };
    let extent = extent(file, list, offset);
    match extent.check_alignment(list.misalignment()) {
        Err(_) if handle.bounces() => return Ok(None),
        aligned => aligned?,
    }
    let Some(slot) = Flight::try_enter(&file.shared) else { return Ok(None) };
    let mut begun = None;
    // Where there is nothing to be read, a worker finds that out again.
    direct::begin(extent, Patience::Try, &mut begun)?;
    Ok(begun.map(|begun| (begun, slot)))
}

impl Read {
    fn submit(self, ring: Option<Arc<SharedRing>>) {
        let file = Arc::clone(&self.handle.cached);
        // SAFETY: the memory is that of the list's buffers, which the read keeps (O1).
        let segments = (self.list.iter())
            .map(|piece| unsafe { Segment::new(piece.base(), piece.len()) })
            .collect();
        let offset = self.offset;
        let done = Box::new(move |outcome| self.ended(outcome));
        let read = BackgroundRead { offset, wanted: true, direct: true, ring, segments, done };
        if let Err(read) = Arc::clone(&file.backing).start(read) {
            // There is no thread for it but a worker.
            (read.done)(Err(io::Error::from_raw_os_error(libc::EINTR)));
        }
    }

    /// What the back end's attempt came to.
    fn ended(self, outcome: io::Result<usize>) {
        let total = self.list.total();
        let (moved, error) = match outcome {
            Ok(moved) => (moved as u64, None),
            Err(error) => (0, Some(error)),
        };
        let is_over = match &error {
            Some(error) => !request::is_transient(error),
            None => {
                let backing = &*self.handle.cached.backing;
                let block_bytes = u64::from(backing.direct_alignment().offset_bytes);
                moved == total || request::is_end(moved, block_bytes)
            }
        };
        if is_over {
            return self.end(moved, error);
        }
        // O3.
        let workers = Arc::clone(&self.handle.cached.shared.workers);
        workers.run(Box::new(move || {
            let file = self.handle.cached();
            let operation = Operation {
                extent: extent(file, &self.list, self.offset),
                segments: self.list.iter(),
            };
            let mut transfer = operation.transfer();
            transfer.moved = moved;
            let mut rest = [transfer.rest()];
            request::run(&*file.backing, &mut rest);
            let [rest] = rest;
            let (moved, error) = (moved + rest.moved, rest.error);
            self.end(moved, error);
        }));
    }

    fn end(self, moved: u64, error: Option<io::Error>) {
        let Read { begun, slot, list, offset, handle, tell } = self;
        let shared = Arc::clone(&handle.cached.shared);
        let extent = extent(&handle.cached, &list, offset);
        let (outcome, is_len_in_doubt) = begun.end_apart(extent, moved, error);
        drop(slot);
        if !is_len_in_doubt {
            return end(&shared, handle, list.into_buffers(), tell, outcome);
        }
        // O3.
        shared.clone().workers.run(Box::new(move || {
            let outcome = handle.cached().adopt_size().and(outcome);
            end(&shared, handle, list.into_buffers(), tell, outcome);
        }));
    }
}

/// Gives the handle back, and then tells.
fn end(
    shared: &Arc<Shared>,
    handle: Arc<File>,
    buffers: Vec<Buffer>,
    tell: Tell,
    outcome: Result<usize>,
) {
    if let Some(last) = Arc::into_inner(handle) {
        // O3.
        shared.workers.run(Box::new(move || drop(last)));
    }
    tell(outcome, buffers);
}

/// Reads into all of `buffers`, and waits for it.
pub(crate) fn read_buffers(file: &File, buffers: &mut [Buffer], offset: u64) -> Result<usize> {
    let mut slices: Vec<IoSliceMut<'_>> =
        buffers.iter_mut().map(|buffer| IoSliceMut::new(buffer)).collect();
    file.read_vectored_at(&mut slices, offset)
}

/// Writes all of `buffers`, and waits for it.
pub(crate) fn write_buffers(file: &File, buffers: &[Buffer], offset: u64) -> Result<usize> {
    let slices: Vec<IoSlice<'_>> = buffers.iter().map(|buffer| IoSlice::new(buffer)).collect();
    file.write_vectored_at(&slices, offset)
}
