//! Concurrent direct transfers without a descriptor, by Linux AIO.
//!
//! A ring has a descriptor, but in a program that manages its descriptor numbers itself there must
//! be none. Linux AIO has contexts instead, which are memory. It is asynchronous only for direct
//! I/O, and is used only for that. If it is forbidden, or there are too many contexts, transfers
//! are made one after the other.
//!
//! - **A1** The kernel may access the memory of a request until its completion was reaped: the
//!   submitter reaps all completions before it returns.
//! - **A2** A context is used by one batch at a time, and is empty in between.
//!
//! Locks: the list of contexts, a leaf.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::RawFd;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use crate::io::segment::Front;
use crate::io::transfer::{Direction, SEGMENTS_MAX, Transfer};
use crate::sync::MutexExt;

/// The requests of a batch in flight: as many as in a thread's ring. Untuned.
const IN_FLIGHT_MAX: usize = 64;
const IOCB_CMD_PREADV: u16 = 7;
const IOCB_CMD_PWRITEV: u16 = 8;

/// A transfer in the form for the kernel.
pub(crate) struct AioRequest<'a> {
    pub(crate) fd: RawFd,
    /// The flags of `pwritev2`.
    pub(crate) flags: i32,
    pub(crate) direction: Direction,
    pub(crate) offset: u64,
    pub(crate) segments: Front<'a>,
}

impl<'a> AioRequest<'a> {
    pub(crate) fn new(transfer: &Transfer<'a>, fd: RawFd, flags: i32) -> Self {
        let segments = transfer.segments.front(SEGMENTS_MAX);
        AioRequest { fd, flags, direction: transfer.direction, offset: transfer.offset, segments }
    }

    /// The memory that the request names must outlive its completion (A1).
    pub(super) fn block(&self, number: u64) -> libc::iocb {
        // SAFETY: an iocb consists of integers.
        let mut block: libc::iocb = unsafe { MaybeUninit::zeroed().assume_init() };
        block.aio_data = number;
        block.aio_rw_flags = self.flags;
        block.aio_lio_opcode = match self.direction {
            Direction::Read => IOCB_CMD_PREADV,
            Direction::Write => IOCB_CMD_PWRITEV,
        };
        block.aio_fildes = self.fd as u32;
        // Within the request, or the array from which it was made: both outlive the batch (A1).
        let segments = self.segments.as_slice();
        block.aio_buf = segments.as_ptr() as u64;
        block.aio_nbytes = segments.len() as u64;
        block.aio_offset = self.offset as i64;
        block
    }
}

/// As the kernel's `io_event`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct Event {
    pub(super) number: u64,
    block: u64,
    outcome: i64,
    more: i64,
}

impl Event {
    pub(super) fn outcome(&self) -> io::Result<usize> {
        match self.outcome {
            moved if moved >= 0 => Ok(moved as usize),
            errno => Err(io::Error::from_raw_os_error(-errno as i32)),
        }
    }
}

/// The contexts of an engine.
#[derive(Default)]
pub(crate) struct Contexts {
    free: Mutex<Vec<Context>>,
    refused: AtomicBool,
}

impl Contexts {
    /// Tries each request once, and returns the outcome of each. `None`: nothing was done.
    pub(crate) fn try_all(&self, requests: &[AioRequest<'_>]) -> Option<Vec<io::Result<usize>>> {
        if self.refused.load(Relaxed) {
            return None;
        }
        let free = self.free.acquire().pop();
        let context = match free.map_or_else(|| Context::new(IN_FLIGHT_MAX), Ok) {
            Ok(context) => context,
            Err(error) => {
                // Memory or contexts may be short for a moment.
                let is_for_now =
                    [Some(libc::EAGAIN), Some(libc::ENOMEM)].contains(&error.raw_os_error());
                self.refused.store(!is_for_now, Relaxed);
                return None;
            }
        };
        let mut outcomes = Vec::with_capacity(requests.len());
        for part in requests.chunks(IN_FLIGHT_MAX) {
            outcomes.extend(context.run(part));
        }
        self.free.acquire().push(context);
        Some(outcomes)
    }
}

/// An `aio_context_t`.
pub(super) struct Context(libc::c_ulong);

impl Context {
    /// A context with room for at least `capacity` requests.
    pub(super) fn new(capacity: usize) -> io::Result<Context> {
        let mut context: libc::c_ulong = 0;
        // SAFETY: the kernel writes the context's name to `context`.
        let made = unsafe { libc::syscall(libc::SYS_io_setup, capacity, &raw mut context) };
        if made < 0 { Err(io::Error::last_os_error()) } else { Ok(Context(context)) }
    }

    /// Submits the first of `blocks`, as many as the kernel takes. Returns their number.
    ///
    /// # Safety
    ///
    /// The blocks are valid, and the memory named by the submitted ones stays valid until their
    /// completions were reaped (A1). The blocks themselves need not.
    pub(super) unsafe fn submit(&self, blocks: &[*mut libc::iocb]) -> io::Result<usize> {
        // SAFETY: guaranteed by the caller.
        let submitted =
            unsafe { libc::syscall(libc::SYS_io_submit, self.0, blocks.len(), blocks.as_ptr()) };
        if submitted < 0 { Err(io::Error::last_os_error()) } else { Ok(submitted as usize) }
    }

    /// Waits for at least one completion, and takes those that exist, up to the length of `events`.
    /// Returns their number.
    pub(super) fn wait(&self, events: &mut [Event]) -> usize {
        loop {
            // SAFETY: the kernel writes to `events`, at most as many as there are.
            let came = unsafe {
                let (events, max) = (events.as_mut_ptr(), events.len());
                libc::syscall(libc::SYS_io_getevents, self.0, 1, max, events, 0)
            };
            if came > 0 {
                return came as usize;
            }
            // A1: without the context, it is unknown when the remaining requests end.
            if came < 0 && io::Error::last_os_error().raw_os_error() != Some(libc::EINTR) {
                std::process::abort();
            }
        }
    }

    /// At most as many as the context holds.
    fn run(&self, requests: &[AioRequest<'_>]) -> Vec<io::Result<usize>> {
        let mut blocks: Vec<libc::iocb> =
            requests.iter().zip(0..).map(|(request, number)| request.block(number)).collect();
        let pointers: Vec<*mut libc::iocb> = blocks.iter_mut().map(std::ptr::from_mut).collect();
        let mut outcomes: Vec<io::Result<usize>> = Vec::with_capacity(requests.len());
        let (mut next, mut in_flight) = (0, 0);
        outcomes.resize_with(requests.len(), || Ok(0));
        while next < requests.len() {
            let rest = &pointers[next..];
            // SAFETY: A1: the blocks, and the memory that they name, stay until `reap` has seen
            // their completions.
            let error = match unsafe { self.submit(rest) } {
                Ok(submitted) => {
                    next += submitted;
                    in_flight += submitted;
                    continue;
                }
                Err(error) => error,
            };
            match error.raw_os_error() {
                Some(libc::EINTR) => {}
                Some(libc::EAGAIN) if in_flight > 0 => in_flight -= self.reap(&mut outcomes),
                // The error is about the first of the rest.
                _ => {
                    outcomes[next] = Err(error);
                    next += 1;
                }
            }
        }
        while in_flight > 0 {
            in_flight -= self.reap(&mut outcomes);
        }
        outcomes
    }

    /// Waits for at least one completion; returns the number of completions.
    fn reap(&self, outcomes: &mut [io::Result<usize>]) -> usize {
        let mut events = [Event::default(); IN_FLIGHT_MAX];
        let came = self.wait(&mut events);
        for event in &events[..came] {
            outcomes[event.number as usize] = event.outcome();
        }
        came
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: A2: nothing is in flight.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.0) };
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::io::segment::Segment;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::OpenOptionsExt;

    const BLOCK: usize = 4096;

    /// Goal: more requests than fit in a context are all performed, and each has its own outcome.
    /// Method: blocks are written backwards, and read in the same way, with one bad descriptor
    /// among them, and one block past the end.
    #[test]
    fn each_request_has_its_outcome() {
        const BLOCKS: usize = IN_FLIGHT_MAX * 2 + 5;
        const BAD: usize = 70;
        let dir = tempfile::tempdir_in(std::env::current_exe().unwrap().parent().unwrap()).unwrap();
        let mut options = std::fs::File::options();
        options.read(true).write(true).create(true).custom_flags(libc::O_DIRECT);
        let file = match options.open(dir.path().join("file")) {
            Ok(file) => file,
            Err(error) => return crate::skip::skip(format_args!("no direct I/O here: {error}")),
        };
        let contexts = Contexts::default();
        let mut memory = vec![0u8; (BLOCKS + 1) * BLOCK];
        let at = memory.as_ptr().align_offset(BLOCK);
        let blocks = &mut memory[at..at + BLOCKS * BLOCK];
        for (number, block) in blocks.chunks_mut(BLOCK).enumerate() {
            block.fill(number as u8 + 1);
        }
        let base = blocks.as_mut_ptr();
        let segments: Vec<Segment<'_>> = (0..BLOCKS)
            // SAFETY: within `memory`, which only the requests use until they have ended.
            .map(|number| unsafe { Segment::new(base.add(number * BLOCK), BLOCK) })
            .collect();
        let requests = |direction, up_to: usize| -> Vec<AioRequest<'_>> {
            let request = |number: usize| AioRequest {
                fd: if number == BAD { -1 } else { file.as_raw_fd() },
                flags: 0,
                direction,
                offset: ((up_to - number) * BLOCK) as u64,
                segments: Front::Many(&segments[number..=number]),
            };
            (0..BLOCKS).map(request).collect()
        };
        let check = |outcomes: Option<Vec<io::Result<usize>>>, beyond: Option<usize>| {
            let Some(outcomes) = outcomes else { return false };
            for (number, outcome) in outcomes.into_iter().enumerate() {
                let expected = if beyond == Some(number) { Ok(0) } else { Ok(BLOCK) };
                let outcome = outcome.map_err(|error| error.raw_os_error());
                let bad = Err(Some(libc::EBADF));
                assert_eq!(outcome, if number == BAD { bad } else { expected }, "{number}");
            }
            true
        };
        if !check(contexts.try_all(&requests(Direction::Write, BLOCKS - 1)), None) {
            return crate::skip::skip("no AIO here");
        }
        assert!(check(contexts.try_all(&requests(Direction::Read, BLOCKS)), Some(0)));
        assert_eq!(contexts.free.lock().unwrap().len(), 1);
        let read: Vec<u8> = memory[at..].chunks(BLOCK).take(BLOCKS).map(|b| b[7]).collect();
        for (number, &byte) in read.iter().enumerate() {
            // The previous block, as all were read one block further on.
            let expected = match number {
                0 => 1,
                BAD => BAD as u8 + 1,
                // Never written.
                number if number - 1 == BAD => 0,
                number => number as u8,
            };
            assert_eq!(byte, expected, "{number}");
        }
    }
}
