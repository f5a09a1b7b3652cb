//! A request for a served file, from its preparation to its end.

use std::os::fd::RawFd;
use std::sync::Arc;

use millpond::File;
use millpond::internals::{Begun, ReadDone};

use crate::aio::context::{Ending, StandIn};
use crate::aio::optimistic_read::OptimisticRead;
use crate::aio::transfer::{carry_out, count_read};
use crate::files::pin::Pin;
use crate::files::registry;
use crate::files::segments::{Direction, Memory, Segments, TRANSFER_BYTES_MAX};
use crate::files::served_io::{find, may_be_served};
use crate::files::table::{self, NumberState};
use crate::report::reason::Reason;
use crate::runtime::section;

/// A request for a served file that ends later. It holds its description, and its vectors are
/// copies.
pub struct Request {
    pin: Pin,
    segments: Segments,
    offset: u64,
    direction: Direction,
}

// SAFETY: the memory is valid, for any thread, until the request has ended: see
// `Request::prepare`.
unsafe impl Send for Request {}

/// The result of starting a read.
pub enum Started {
    Ended(Ending, isize),
    /// The stand-in is to be submitted.
    OptimisticRead(StandIn),
    UnderWay,
}

/// Why there is no [`Request`].
pub enum Unserved {
    /// The request fails with the kernel's errno.
    Fail(i32),
    /// The kernel carries it out; bytes count as passed for this reason, if the file counts.
    Kernel(Option<Reason>),
}

impl Request {
    /// Prepares the transfer of a `preadv2` or `pwritev2`, if the file is served. In a section, and perhaps
    /// in [`File::start_together`].
    ///
    /// # Safety
    ///
    /// The memory is the caller's to give until the request has ended; it may be any address.
    pub unsafe fn prepare(
        fd: RawFd,
        memory: Memory,
        offset: i64,
        direction: Direction,
        flags: i32,
    ) -> Result<Self, Unserved> {
        if !may_be_served(fd) {
            return Err(Unserved::Kernel(None));
        }
        if matches!(table::get(fd), NumberState::Unserved | NumberState::Claimed) {
            // The kernel does not report the end of its request: in_flight.I1.
            File::start_now();
            section::run(|_| registry::lock().release_descriptor(fd));
        }
        let pin = find(fd).map_err(Unserved::Kernel)?;
        let access = pin.access();
        if flags != 0 {
            // Passing waits for the file's reads.
            File::start_now();
            section::run(|_| registry::lock().pass_fd(fd, Reason::Changed));
            return Err(Unserved::Kernel(Some(Reason::Changed)));
        }
        if pin.file().is_none() || pin.is_bypassed() {
            return Err(Unserved::Kernel(Some(Reason::Engine)));
        }
        let is_permitted = if direction == Direction::Read { access.read } else { access.write };
        if !is_permitted {
            return Err(Unserved::Fail(libc::EBADF));
        }
        let from = u64::try_from(offset).map_err(|_| Unserved::Fail(libc::EINVAL))?;
        if let Memory::One(_, len) = memory
            && offset.checked_add_unsigned(len as u64).is_none()
        {
            return Err(Unserved::Fail(libc::EINVAL));
        }
        let memory = match memory {
            Memory::One(start, len) => Memory::One(start, len.min(TRANSFER_BYTES_MAX)),
            many => many,
        };
        // SAFETY: the caller's duty.
        let segments = unsafe { Segments::of(memory) }.map_err(Unserved::Fail)?;
        if offset.checked_add_unsigned(segments.bytes() as u64).is_none() {
            return Err(Unserved::Fail(libc::EINVAL));
        }
        Ok(Self { pin, segments, offset: from, direction })
    }

    /// For [`Request::sync`], if the cache may hold unwritten bytes of the file. In a section.
    pub fn to_sync(fd: RawFd) -> Option<Self> {
        let pin = Pin::of(fd)?;
        pin.late_file()?;
        let segments = Segments::One(std::ptr::null_mut(), 0);
        Some(Self { pin, segments, offset: 0, direction: Direction::Write })
    }

    pub fn direction(&self) -> Direction {
        self.direction
    }

    pub fn bytes(&self) -> usize {
        self.segments.bytes()
    }

    /// Carries the request out, and waits for the device if necessary; the result in the kernel's form. In a section.
    ///
    /// # Safety
    ///
    /// The request was prepared for this.
    pub unsafe fn carry_out(&self) -> isize {
        // SAFETY: the caller's duty.
        unsafe { carry_out(&self.pin, &self.segments, self.offset, self.direction) }
    }

    /// `fsync` or `fdatasync`, with the write-back of cached bytes. In a section.
    pub fn sync(&self, data_only: bool) -> isize {
        let synced = self
            .pin
            .late_file()
            .map_or(Ok(()), |file| if data_only { file.sync_data() } else { file.sync_all() });
        synced.map_or_else(|error| -(error.errno() as isize), |()| 0)
    }

    /// Runs `work`, which may wait, on a thread of the engine, and ends the request with its result. In a section.
    pub fn aside(self, ending: Ending, work: impl FnOnce(&Self) -> isize + Send + 'static) {
        let Some(aside) = self.pin.file().map(File::aside) else {
            return ending.end(-(libc::EBADF as isize));
        };
        aside.run(Box::new(move || {
            section::run(|_| {
                let result = work(&self);
                // Before the request ends: if the program closed the file in between, this drop closes it.
                drop(self);
                ending.end(result);
            });
        }));
    }

    /// A read that does not wait. Returns its result if it hits, or the stand-in to submit to the kernel. Otherwise
    /// `ending` ends it later. In a section.
    ///
    /// # Safety
    ///
    /// The request was prepared for this.
    pub unsafe fn start(self, ending: Ending) -> Started {
        let Some(file) = self.pin.shared_file() else {
            return Started::Ended(ending, -(libc::EBADF as isize));
        };
        file.raw().prepare_thread();
        let offset = self.offset;
        let mut fills = false;
        let vectors = match &self.segments {
            &Segments::One(start, len) => {
                // SAFETY: the caller's duty; a fault gives None.
                if let Some(bytes) = unsafe { file.raw().try_read_hit(start, len, offset) } {
                    self.count_read(bytes, true);
                    return Started::Ended(ending, bytes as isize);
                }
                if !self.pin.access().write {
                    // SAFETY: the caller's duty: until the completion was taken.
                    match unsafe { file.begin_unguarded(start, len, offset) } {
                        Begun::ByKernel(kernels, read) => {
                            let optimistic = OptimisticRead {
                                read,
                                pin: self.pin,
                                memory: (start, len),
                                offset,
                            };
                            return Started::OptimisticRead(ending.hand_over(optimistic, &kernels));
                        }
                        Begun::Fills => fills = true,
                        Begun::Not => {}
                    }
                }
                vec![libc::iovec { iov_base: start.cast(), iov_len: len }]
            }
            Segments::Many(vectors) => vectors.clone(),
        };
        let file = Arc::clone(file);
        let mut parts = Some((self, ending));
        let done = || -> ReadDone {
            let (request, ending) = parts.take().expect("called once");
            Box::new(move |result| request.complete_read(ending, result))
        };
        // SAFETY: the caller's duty.
        let Some(result) = (unsafe { file.start_read_raw(&vectors, offset, fills, done) }) else {
            return Started::UnderWay;
        };
        let (request, ending) = parts.take().expect("not told otherwise");
        match result {
            Ok(bytes) => {
                request.count_read(bytes, true);
                Started::Ended(ending, bytes as isize)
            }
            Err(error) => {
                request.complete_read(ending, Err(error));
                Started::UnderWay
            }
        }
    }

    /// A read has ended, on any thread: this function must not wait.
    fn complete_read(self, ending: Ending, result: millpond::Result<usize>) {
        let Ok(bytes) = result else {
            // The kernel repeats the read, so the program gets the kernel's result.
            // SAFETY: it was prepared so.
            return self.aside(ending, |request| unsafe { request.carry_out() });
        };
        self.count_read(bytes, false);
        let aside = self.pin.file().map(File::aside);
        if let (Err(last), Some(aside)) = (self.pin.try_give_up(), aside) {
            aside.run(Box::new(move || section::run(|_| drop(last))));
        }
        ending.end(bytes as isize);
    }

    fn count_read(&self, bytes: usize, is_hit: bool) {
        count_read(&self.pin, bytes, is_hit);
    }
}
