//! Transfers by the descriptors of a file: the choice of descriptor and flags, and plain system
//! calls.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::atomic::Ordering::Relaxed;

use crate::io::backend::aio::{AioRequest, Contexts};
use crate::io::backend::alignment::Alignment;
use crate::io::backend::descriptors::{Descriptors, RWF_NOAPPEND, can_ignore_append};
use crate::io::backend::in_place::Inside;
use crate::io::backend::untorn_blocks::{RWF_ATOMIC, UntornBlocks};
use crate::io::batch;
use crate::io::transfer::{Direction, SEGMENTS_MAX, Transfer, retry_interrupted};

/// Drop the transferred bytes from the kernel's page cache (Linux 6.14).
const RWF_DONTCACHE: i32 = 0x80;

impl Descriptors {
    /// The descriptor and flags with which `transfer` goes to the kernel.
    pub(crate) fn route(&self, transfer: &Transfer<'_>) -> io::Result<(RawFd, i32)> {
        if let (Some(blocks), Direction::Write) = (&self.untorn, transfer.direction) {
            return self.untorn_route(blocks, transfer);
        }
        let own = match transfer.direction {
            Direction::Read => &self.direct_read,
            Direction::Write => &self.direct_write,
        };
        let alignment = match transfer.direct {
            true => self.handles_direct.get().copied(),
            false => self.direct.filter(|_| self.in_place.is_none()),
        };
        // The last block that a file can have is one byte short (see `Transfer::new`).
        let is_last = transfer.offset + transfer.segments.left() == i64::MAX as u64;
        let is_direct = alignment.is_some_and(|alignment| {
            let is_whole = transfer.direction == Direction::Read && !is_last;
            is_whole || is_aligned(transfer, alignment)
        });
        if !is_direct {
            self.transfers.add(transfer.direction, false);
            return self.plain_route(transfer);
        }
        let fd = own.get().ok_or_else(|| io::Error::from_raw_os_error(libc::EBADF))?;
        if transfer.direction == Direction::Read && !transfer.direct {
            // As for `verify`, but once for reads that are submitted together. Relaxed: a thread
            // finds the number of its own batch only if it has stored it itself, after a check.
            let batch = batch::number();
            if batch.is_none_or(|batch| self.checked_in.load(Relaxed) != batch) {
                self.check(fd)?;
                self.checked_in.store(batch.unwrap_or(0), Relaxed);
            }
        }
        self.transfers.add(transfer.direction, true);
        Ok((fd.as_raw_fd(), durable_flag(transfer)))
    }

    /// The same for a write of a file that was opened for untorn writes (untorn_blocks.UB1).
    fn untorn_route(
        &self,
        blocks: &UntornBlocks,
        transfer: &Transfer<'_>,
    ) -> io::Result<(RawFd, i32)> {
        let is_aligned = self.direct.is_some_and(|alignment| is_aligned(transfer, alignment));
        if !is_aligned || !blocks.is_block(transfer) {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let fd =
            self.direct_write.get().ok_or_else(|| io::Error::from_raw_os_error(libc::EBADF))?;
        self.transfers.add(Direction::Write, true);
        Ok((fd.as_raw_fd(), RWF_ATOMIC | durable_flag(transfer)))
    }

    /// The same for a transfer in a ring. `None`: it cannot use a ring. The kernel reads the flags
    /// of a description when it starts the transfer, and they must be the right ones then; and it
    /// could wait for another file that has the number by now (ring.R4).
    pub(crate) fn ring_route(&self, transfer: &Transfer<'_>) -> Option<io::Result<(RawFd, i32)>> {
        if self.untorn.is_some() && transfer.direction == Direction::Write {
            // Block by block, in the order of untorn_blocks.UB2. The kernel refuses WRITE_FIXED with RWF_ATOMIC.
            return None;
        }
        if self.meets_buffered_writer(transfer) {
            return None;
        }
        let is_safe = transfer.direct || self.in_place.is_none();
        (is_safe && !self.are_lost()).then(|| self.route(transfer))
    }

    /// Whether `transfer` is a direct write of a file to which cached handles have written through the
    /// kernel's page cache. The kernel keeps the two coherent only if the direct write is a plain system
    /// call.
    ///
    /// *Not covered*: a direct write that is in a ring when the first such buffered write begins, and the
    /// edges of unaligned direct writes. If the kernel cannot drop a page then, a sync reports EIO.
    pub(crate) fn meets_buffered_writer(&self, transfer: &Transfer<'_>) -> bool {
        // Relaxed: a direct write that does not see the store began before that buffered write ended.
        let is_direct_write = transfer.direct && transfer.direction == Direction::Write;
        is_direct_write && self.has_buffered_writer.load(Relaxed)
    }

    /// The same, by the caller's descriptors.
    fn plain_route(&self, transfer: &Transfer<'_>) -> io::Result<(RawFd, i32)> {
        let is_buffered = !transfer.direct && self.direct.is_none();
        if is_buffered
            && transfer.direction == Direction::Write
            && !self.has_buffered_writer.load(Relaxed)
        {
            self.has_buffered_writer.store(true, Relaxed);
        }
        let (fd, flags) = match transfer.direction {
            Direction::Read => (&self.read, 0),
            Direction::Write if self.write_is_own.load(Relaxed) => (&self.write, 0),
            // Other users of the description may set O_APPEND at any time.
            Direction::Write if can_ignore_append() => (&self.write, RWF_NOAPPEND),
            Direction::Write => (&self.write, 0),
        };
        let fd = fd.get().ok_or_else(|| io::Error::from_raw_os_error(libc::EBADF))?;
        Ok((fd.as_raw_fd(), flags | durable_flag(transfer)))
    }

    /// One attempt at each transfer, one after the other.
    pub(crate) fn try_each(&self, batch: &mut [Transfer<'_>]) {
        for transfer in batch {
            transfer.set(self.try_one(transfer));
        }
    }

    /// One attempt at each transfer, concurrently. False: not all of them are direct ones in place,
    /// or it is not possible, and nothing was done.
    pub(crate) fn try_at_once(&self, contexts: &Contexts, batch: &mut [Transfer<'_>]) -> bool {
        let (Some(gate), Some(alignment)) = (&self.in_place, self.direct) else { return false };
        if !batch.iter().all(|transfer| is_aligned(transfer, alignment)) {
            return false;
        }
        let Some(_inside) = gate.try_direct(self) else { return false };
        let mut requests = Vec::with_capacity(batch.len());
        for transfer in &*batch {
            let Ok((fd, flags)) = self.plain_route(transfer) else { return false };
            requests.push(AioRequest::new(transfer, fd, flags));
        }
        let Some(outcomes) = contexts.try_all(&requests) else { return false };
        for (transfer, outcome) in batch.iter_mut().zip(outcomes) {
            self.transfers.add(transfer.direction, true);
            transfer.set(outcome.map_err(|error| match error.raw_os_error() {
                // Retried separately, where these errors are handled.
                Some(libc::EINVAL | libc::EFAULT) => io::Error::from_raw_os_error(libc::EAGAIN),
                _ => error,
            }));
        }
        true
    }

    /// The descriptor and flags for `read` as a direct one, and the guard that is kept until the
    /// kernel has taken it. `None`: it cannot be direct. The kernel reads the flags of the
    /// description when it takes a request, and not again.
    pub(crate) fn direct_route(
        &self,
        read: &Transfer<'_>,
    ) -> Option<(RawFd, i32, Option<Inside<'_, Descriptors>>)> {
        if !is_aligned(read, self.direct?) {
            return None;
        }
        let Some(gate) = &self.in_place else {
            let (fd, flags) = self.route(read).ok()?;
            return Some((fd, flags, None));
        };
        let inside = gate.try_direct(self)?;
        let (fd, flags) = self.plain_route(read).ok()?;
        self.transfers.add(read.direction, true);
        Some((fd, flags, Some(inside)))
    }

    /// Our descriptor for `read` as a direct one, which does not depend on flags of other
    /// descriptions.
    pub(crate) fn own_direct_route(&self, read: &Transfer<'_>) -> Option<RawFd> {
        if !self.reads_directly() {
            return None;
        }
        let (fd, flags, _) = self.direct_route(read)?;
        (flags == 0).then_some(fd)
    }

    /// Whether we have a description for direct reads.
    pub(crate) fn reads_directly(&self) -> bool {
        self.in_place.is_none() && self.direct.is_some() && self.direct_read.get().is_some()
    }

    /// One attempt by one system call.
    pub(crate) fn try_one(&self, transfer: &Transfer<'_>) -> io::Result<usize> {
        let (Some(gate), Some(alignment), false) = (&self.in_place, self.direct, transfer.direct)
        else {
            let (fd, flags) = self.route(transfer)?;
            return self.call(transfer, fd, flags);
        };
        let (fd, flags) = self.plain_route(transfer)?;
        if is_aligned(transfer, alignment) && !gate.is_refused() {
            // Without it the transfer uses the present flags, which are both right.
            let inside = gate.try_direct(self);
            match self.call(transfer, fd, flags) {
                // Some file systems accept the flag, and then refuse transfers.
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => gate.refuse(),
                // If a part of the memory is invalid, a transfer through the kernel's page cache
                // fills the valid part.
                Err(error) if error.raw_os_error() == Some(libc::EFAULT) => {}
                moved => {
                    self.transfers.add(transfer.direction, inside.is_some());
                    return moved;
                }
            }
        }
        let _plain = gate.plain();
        self.transfers.add(transfer.direction, false);
        self.call(transfer, fd, flags)
    }

    fn call(&self, transfer: &Transfer<'_>, fd: RawFd, flags: i32) -> io::Result<usize> {
        let front = transfer.segments.front(SEGMENTS_MAX);
        let segments = front.as_slice();
        let (iovecs, count) = (segments.as_ptr().cast::<libc::iovec>(), segments.len());
        let (low, high) = (transfer.offset, 0u64);
        let number = match transfer.direction {
            Direction::Read => libc::SYS_preadv2,
            Direction::Write => libc::SYS_pwritev2,
        };
        let call = |flags: i32| {
            // The raw system call: a library that replaces libc's functions does not see it.
            // Without a vector the kernel has none to copy and to check.
            // SAFETY: the segments describe memory that is valid for the transfer. If an access
            // faults, the kernel returns EFAULT.
            let moved = unsafe {
                // Each argument has the width of a register, as this is a variadic function.
                match (transfer.direction, segments, libc::c_long::from(flags)) {
                    (Direction::Read, [one], 0) => {
                        libc::syscall(libc::SYS_pread64, fd, one.base(), one.len(), low)
                    }
                    (Direction::Write, [one], 0) => {
                        libc::syscall(libc::SYS_pwrite64, fd, one.base(), one.len(), low)
                    }
                    (_, _, flags) => libc::syscall(number, fd, iovecs, count, low, high, flags),
                }
            };
            if moved < 0 { Err(io::Error::last_os_error()) } else { Ok(moved as usize) }
        };
        // The kernel, the file system or a sandbox does not know a flag.
        let is_refused = |moved: &io::Result<usize>| {
            moved.as_ref().is_err_and(|error| error.raw_os_error() == Some(libc::EOPNOTSUPP))
        };
        if self.uncached.load(Relaxed) {
            let moved = call(flags | RWF_DONTCACHE);
            if !is_refused(&moved) {
                return moved;
            }
            self.uncached.store(false, Relaxed);
        }
        let moved = call(flags);
        if transfer.durable && is_refused(&moved) {
            let moved = call(flags & !libc::RWF_DSYNC)?;
            // SAFETY: open as long as the descriptors, which the caller holds.
            let fd = unsafe { BorrowedFd::borrow_raw(fd) };
            retry_interrupted(|| rustix::fs::fdatasync(fd))?;
            return Ok(moved);
        }
        moved
    }
}

fn durable_flag(transfer: &Transfer<'_>) -> i32 {
    if transfer.durable { libc::RWF_DSYNC } else { 0 }
}

fn is_aligned(transfer: &Transfer<'_>, alignment: Alignment) -> bool {
    let found = transfer.segments.misalignment();
    (transfer.offset as u32 | found.len) & (alignment.offset_bytes - 1) == 0
        && found.base & (alignment.memory_bytes - 1) == 0
}
