//! Plain io_uring as a baseline: a ring with a fixed number of reads of a file in flight, and registered file and buffers.
//!
//! It does not poll (IORING_SETUP_IOPOLL), as Millpond's rings do not: polling occupies a processor, and devices have poll
//! queues only if the system was booted with them.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use io_uring::{IoUring, opcode, squeue, types};

use crate::Aligned;

/// Reads one file from one thread, with a fixed number of reads in flight.
///
/// Each read in flight has a buffer, which does not move until the ring is dropped (U1).
pub struct Uring {
    /// Dropped first, which ends the reads in flight.
    ring: IoUring,
    buffers: Vec<Aligned>,
    block_bytes: u32,
    forced: bool,
    in_flight: u32,
}

impl Uring {
    /// Creates a ring. `forced`: kernel worker threads execute each read (`IOSQE_ASYNC`).
    ///
    /// # Errors
    ///
    /// The system's error if it refuses io_uring.
    pub fn new(file: &File, depth: u32, block_bytes: u32, forced: bool) -> io::Result<Self> {
        let ring =
            IoUring::builder().setup_single_issuer().setup_defer_taskrun().build(depth.max(2))?;
        let mut buffers: Vec<_> = (0..depth).map(|_| Aligned::new(block_bytes as usize)).collect();
        let memory = |buffer: &mut Aligned| libc::iovec {
            iov_base: buffer.as_mut_ptr().cast(),
            iov_len: block_bytes as usize,
        };
        let memory: Vec<_> = buffers.iter_mut().map(memory).collect();
        ring.submitter().register_files(&[file.as_raw_fd()])?;
        // SAFETY: the buffers do not move until the ring is dropped (U1).
        unsafe { ring.submitter().register_buffers(&memory)? };
        Ok(Self { ring, buffers, block_bytes, forced, in_flight: 0 })
    }

    /// Reads blocks at the offsets that `next` returns, and passes each block to `check`, until `next` returns `None` and all
    /// reads are done. Returns the number of reads.
    ///
    /// # Errors
    ///
    /// Errors of reads and of `check`; a short read is an error.
    pub fn run(
        &mut self,
        mut next: impl FnMut() -> Option<u64>,
        mut check: impl FnMut(u64, &[u8]) -> io::Result<()>,
    ) -> io::Result<u64> {
        let depth = self.buffers.len();
        let mut free: Vec<usize> = (0..depth).collect();
        let mut offsets = vec![0; depth];
        let mut done = 0;
        let mut outcome = Ok(());
        loop {
            while outcome.is_ok()
                && let Some(&number) = free.last()
                && let Some(offset) = next()
            {
                free.pop();
                offsets[number] = offset;
                self.push(number, offset);
            }
            if self.in_flight == 0 {
                return outcome.map(|()| done);
            }
            match self.ring.submit_and_wait(1) {
                Err(error) if error.kind() != io::ErrorKind::Interrupted => return Err(error),
                _ => {}
            }
            for completion in self.ring.completion() {
                let number = completion.user_data() as usize;
                free.push(number);
                self.in_flight -= 1;
                done += 1;
                let read = match completion.result() {
                    result if result < 0 => Err(io::Error::from_raw_os_error(-result)),
                    result if result as u32 != self.block_bytes => {
                        Err(io::ErrorKind::UnexpectedEof.into())
                    }
                    _ => check(offsets[number], self.buffers[number].bytes()),
                };
                outcome = outcome.and(read);
            }
        }
    }

    fn push(&mut self, number: usize, offset: u64) {
        let at = self.buffers[number].as_mut_ptr();
        let mut entry =
            opcode::ReadFixed::new(types::Fixed(0), at, self.block_bytes, number as u16)
                .offset(offset)
                .build()
                .user_data(number as u64);
        if self.forced {
            entry = entry.flags(squeue::Flags::ASYNC);
        }
        // SAFETY: the buffer outlives the ring, which is dropped first (U1), and is not read before its
        // read has completed. There is room, as at most as many reads are in flight as the ring has
        // entries.
        unsafe { self.ring.submission().push(&entry) }.expect("room for all");
        self.in_flight += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    #[test]
    fn reads_the_bytes_of_the_file() {
        let file = tempfile::tempfile().unwrap();
        let bytes: Vec<u8> = (0..64 * 512_u32).map(|n| (n / 512) as u8).collect();
        file.write_all_at(&bytes, 0).unwrap();
        for forced in [false, true] {
            let made = Uring::new(&file, 8, 512, forced);
            let Ok(mut ring) = made else {
                crate::skip::skip("no io_uring");
                return;
            };
            let mut offsets = (0..64_u64).map(|n| n * 512);
            let mut seen = 0;
            let done = ring.run(
                || offsets.next(),
                |offset, bytes| {
                    assert!(bytes.iter().all(|&byte| u64::from(byte) == offset / 512));
                    seen += 1;
                    Ok(())
                },
            );
            assert_eq!((done.unwrap(), seen), (64, 64));
        }
    }

    #[test]
    fn a_short_read_is_an_error() {
        let file = tempfile::tempfile().unwrap();
        let Ok(mut ring) = Uring::new(&file, 1, 512, false) else { return };
        let mut once = Some(0);
        assert!(ring.run(|| once.take(), |_, _| Ok(())).is_err());
    }
}
