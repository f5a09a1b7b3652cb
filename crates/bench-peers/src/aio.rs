//! Linux AIO (the system calls of libaio) as a baseline: reads, and waits for a number of completions.

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

/// An AIO context, and the file that is read through it.
///
/// There is a buffer for each read that may be in flight; the buffers live until the context is destroyed (A1).
pub struct Aio {
    context: u64,
    file: File,
    buffers: Vec<Aligned>,
    /// Addresses of the buffers. The kernel writes there while other threads may submit.
    places: Vec<usize>,
    submitted: AtomicUsize,
}

impl Aio {
    /// Creates a context for `capacity` reads of `block_bytes` bytes each.
    ///
    /// # Errors
    ///
    /// The kernel's error.
    pub fn new(file: File, capacity: u32, block_bytes: u32) -> io::Result<Self> {
        let mut context = 0u64;
        // SAFETY: the kernel writes one context number, for which there is room.
        check(unsafe { libc::syscall(libc::SYS_io_setup, capacity, &raw mut context) })?;
        let mut buffers: Vec<Aligned> =
            (0..capacity).map(|_| Aligned::new(block_bytes as usize)).collect();
        let places = buffers.iter_mut().map(|buffer| buffer.as_mut_ptr().expose_provenance());
        let places = places.collect();
        Ok(Self { context, file, buffers, places, submitted: AtomicUsize::new(0) })
    }

    /// Starts a read of the block at `offset`, into the buffers in turn. The bytes are never read.
    ///
    /// # Errors
    ///
    /// The kernel's error; `WouldBlock` if the context is full.
    pub fn submit(&self, offset: u64) -> io::Result<()> {
        // Relaxed: any buffer will do, as the bytes are never read.
        let number = self.submitted.fetch_add(1, Relaxed) % self.places.len();
        let mut control = Control {
            fd: self.file.as_raw_fd() as u32,
            buffer: self.places[number] as u64,
            bytes: self.buffers[number].len as u64,
            offset: offset as i64,
            ..Control::default()
        };
        let pointers = [&raw mut control];
        // SAFETY: the kernel reads the control block during the call. It writes to the buffer until the read
        // completes, for which the destruction of the context waits (A1). The buffers are never read, so two
        // reads may share one.
        let started =
            unsafe { libc::syscall(libc::SYS_io_submit, self.context, 1, pointers.as_ptr()) };
        check(started).map(drop)
    }

    /// Waits for `min` to `max` completions, or for `timeout`; returns the number of completions.
    ///
    /// # Errors
    ///
    /// The kernel's error.
    pub fn wait(&self, min: usize, max: usize, timeout: Duration) -> io::Result<usize> {
        let mut events = vec![Event::default(); max];
        let mut timeout = libc::timespec {
            tv_sec: timeout.as_secs() as i64,
            tv_nsec: i64::from(timeout.subsec_nanos()),
        };
        // SAFETY: `events` has room for `max` events, and the kernel writes no more.
        let count = unsafe {
            libc::syscall(
                libc::SYS_io_getevents,
                self.context,
                min as i64,
                max as i64,
                events.as_mut_ptr(),
                &raw mut timeout,
            )
        };
        check(count).map(|count| count as usize)
    }
}

impl Drop for Aio {
    fn drop(&mut self) {
        // SAFETY: the context belongs to this value, and is not used afterwards. The call waits for the reads in
        // flight (A1).
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
    fn submitted_reads_complete() {
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
