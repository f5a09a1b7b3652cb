//! The kernel's AIO (libaio's system calls) as a peer: reads, and threads that wait for so many of
//! them.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use crate::Aligned;

/// `struct iocb` of the kernel's ABI.
#[repr(C)]
#[derive(Default)]
struct Control {
    data: u64,
    key: u32,
    rw_flags: i32,
    opcode: u16,
    priority: i16,
    fd: u32,
    buffer: u64,
    bytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    eventfd: u32,
}

/// `struct io_event`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Event {
    data: u64,
    control: u64,
    result: i64,
    result2: i64,
}

/// A context of the kernel's, and a file that is read through it by one thread at a time.
///
/// The buffers, one for each read that may be in flight, live until the context is gone (A1).
pub struct Aio {
    context: u64,
    file: File,
    buffers: Vec<Aligned>,
    /// Where the buffers begin: the kernel writes there while others may submit.
    places: Vec<usize>,
    submitted: AtomicUsize,
}

impl Aio {
    /// # Errors
    ///
    /// What the kernel said.
    pub fn new(file: File, capacity: u32, block_bytes: u32) -> io::Result<Self> {
        let mut context = 0u64;
        // SAFETY: the kernel writes one context number to a place that holds one.
        check(unsafe { libc::syscall(libc::SYS_io_setup, capacity, &raw mut context) })?;
        let mut buffers: Vec<Aligned> =
            (0..capacity).map(|_| Aligned::new(block_bytes as usize)).collect();
        let places = buffers.iter_mut().map(|buffer| buffer.as_mut_ptr().expose_provenance());
        let places = places.collect();
        Ok(Self { context, file, buffers, places, submitted: AtomicUsize::new(0) })
    }

    /// Starts a read of the block at `offset`, into one of the buffers in turn: nobody looks at the
    /// bytes.
    ///
    /// # Errors
    ///
    /// What the kernel said; `WouldBlock` where the context is full.
    pub fn submit(&self, offset: u64) -> io::Result<()> {
        // Relaxed: which buffer it is does not matter, as nobody looks at the bytes.
        let number = self.submitted.fetch_add(1, Relaxed) % self.places.len();
        let mut control = Control {
            fd: self.file.as_raw_fd() as u32,
            buffer: self.places[number] as u64,
            bytes: self.buffers[number].len as u64,
            offset: offset as i64,
            ..Control::default()
        };
        let pointers = [&raw mut control];
        // SAFETY: the kernel reads the control during the call; it writes to the buffer until the read
        // has ended, which the end of the context waits for (A1). Nobody reads the buffers, so that two
        // reads may have the same one.
        let started =
            unsafe { libc::syscall(libc::SYS_io_submit, self.context, 1, pointers.as_ptr()) };
        check(started).map(drop)
    }

    /// Waits for `min` to `max` completions, or `timeout`; how many came.
    ///
    /// # Errors
    ///
    /// What the kernel said.
    pub fn wait(&self, min: usize, max: usize, timeout: Duration) -> io::Result<usize> {
        let mut events = vec![Event::default(); max];
        let mut timeout = libc::timespec {
            tv_sec: timeout.as_secs() as i64,
            tv_nsec: i64::from(timeout.subsec_nanos()),
        };
        // SAFETY: `events` has room for `max` events, and the kernel writes no more.
        let came = unsafe {
            libc::syscall(
                libc::SYS_io_getevents,
                self.context,
                min as i64,
                max as i64,
                events.as_mut_ptr(),
                &raw mut timeout,
            )
        };
        check(came).map(|came| came as usize)
    }
}

impl Drop for Aio {
    fn drop(&mut self) {
        // SAFETY: our own context; nobody uses it any more. Waits for what is in flight (A1).
        unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
    }
}

fn check(result: i64) -> io::Result<i64> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    #[test]
    fn what_is_submitted_completes() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&[7; 4096], 0).unwrap();
        let Ok(aio) = Aio::new(file, 32, 512) else {
            crate::skip::skip("no kernel AIO");
            return;
        };
        assert_eq!(aio.wait(1, 8, Duration::from_millis(1)).unwrap(), 0);
        (0..8).for_each(|block| aio.submit(block * 512).unwrap());
        assert_eq!(aio.wait(8, 8, Duration::from_secs(5)).unwrap(), 8);
    }
}
