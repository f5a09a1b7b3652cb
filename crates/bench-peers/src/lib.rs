//! The parts of `millpond-bench` and of the command that need unsafe code, behind safe functions: both programs forbid
//! unsafe code.
//!
//! - [`Arena`]: the upper bound for cached reads, a `memcpy` from plain memory.
//! - [`Mapped`]: reads cached bytes without a system call, through `mmap`.
//! - [`Uring`], [`Aio`]: the kernel's asynchronous reads.
//! - [`Nops`]: the minimal cost of a request in the kernel.
//! - [`Counting`]: an allocator that counts allocations.
//! - [`Usage`]: processor time and context switches of this process, or of a thread.
//! - [`processor_name`], [`file_system_name`]: the machine, for the heading of results.
//! - [`send_signal`], [`send_signal_by_id`], [`end_by_signal`], [`stop_ignoring_children`]: signals by number, for `millpond run`.

mod allocations;
mod host;
mod nops;
mod signals;

use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::ptr::{self, NonNull};
use std::time::Duration;

pub use allocations::{Counting, allocations};
pub use host::{file_system_name, processor_name, value_of};
pub use nops::Nops;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
pub use signals::{end_by_signal, send_signal, send_signal_by_id, stop_ignoring_children};

mod aio;
#[cfg(test)]
#[path = "../../millpond/tests/common/skip.rs"]
mod skip;
mod uring;

pub use aio::Aio;
pub use uring::Uring;

/// Memory aligned for O_DIRECT, at a fixed address.
struct Aligned {
    memory: Box<[u8]>,
    len: usize,
}

impl Aligned {
    const ALIGNMENT: usize = 4096;

    fn new(len: usize) -> Self {
        Self { memory: vec![0; len + Self::ALIGNMENT].into(), len }
    }

    fn start(&self) -> usize {
        self.memory.as_ptr().align_offset(Self::ALIGNMENT)
    }

    fn bytes(&self) -> &[u8] {
        &self.memory[self.start()..self.start() + self.len]
    }

    fn as_mut_ptr(&mut self) -> *mut u8 {
        let start = self.start();
        self.memory[start..].as_mut_ptr()
    }
}

/// The page size of Millpond's frames if the system provides it: a transparent huge page.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// A memory mapping, unmapped on drop.
///
/// `ptr` points to `len` mapped, readable bytes while the value lives (M1).
#[derive(Debug)]
struct Mapping {
    ptr: NonNull<c_void>,
    len: usize,
}

// SAFETY: the mapping is plain memory that belongs to no thread; a shared reference allows only reads.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(ptr: *mut c_void, len: usize) -> io::Result<Self> {
        let ptr = NonNull::new(ptr).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { ptr, len })
    }

    /// Copies up to `dst.len()` bytes at `offset`, fewer at the end, as `pread` does.
    #[inline]
    fn copy_to(&self, dst: &mut [u8], offset: u64, end: usize) -> usize {
        let offset = usize::try_from(offset).unwrap_or(usize::MAX).min(end);
        let len = dst.len().min(end - offset);
        // SAFETY: offset + len <= end <= self.len, which is mapped (M1). `dst` is borrowed exclusively, and
        // this type returns no reference to its memory, so the two can't overlap.
        unsafe {
            ptr::copy_nonoverlapping(
                self.ptr.as_ptr().cast::<u8>().add(offset),
                dst.as_mut_ptr(),
                len,
            );
        }
        len
    }

    /// Unmaps the first `bytes` bytes, which are whole system pages.
    fn unmap_head(&mut self, bytes: usize) {
        if bytes == 0 {
            return;
        }
        // SAFETY: `bytes` is the distance to the first huge page boundary. It is less than `len`, and a
        // multiple of the page size, as every mapping starts at a page. No reference to the memory exists.
        unsafe {
            let kept = self.ptr.add(bytes);
            if munmap(self.ptr.as_ptr(), bytes).is_ok() {
                self.ptr = kept;
                self.len -= bytes;
            }
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping has this address and length, and no reference to it is left.
        let unmapped = unsafe { munmap(self.ptr.as_ptr(), self.len) };
        debug_assert!(unmapped.is_ok());
    }
}

/// A copy of a file in anonymous memory, with the page size of Millpond's frames.
#[derive(Debug)]
pub struct Arena {
    mapping: Mapping,
    bytes: usize,
}

impl Arena {
    /// Copies the whole of `file` into memory.
    ///
    /// # Errors
    ///
    /// Those of reading the file and of mapping memory.
    pub fn read(file: &File) -> io::Result<Self> {
        let bytes = usize::try_from(file.metadata()?.len()).map_err(io::Error::other)?;
        // Huge pages start at multiples of their size, so the copy has to start at one.
        let len = bytes.next_multiple_of(HUGE_PAGE_BYTES) + HUGE_PAGE_BYTES;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses affects no other memory.
        let whole = unsafe { mmap_anonymous(ptr::null_mut(), len, protection, MapFlags::PRIVATE)? };
        let mut whole = Mapping::new(whole, len)?;
        // SAFETY: the mapping belongs to this function and is not shared; MADV_HUGEPAGE changes no contents.
        // If the kernel has no huge pages, Millpond's frames have none either, so the error is ignored.
        let _ = unsafe { madvise(whole.ptr.as_ptr(), len, Advice::LinuxHugepage) };
        let start = whole.ptr.as_ptr().align_offset(HUGE_PAGE_BYTES);
        let contents = {
            // SAFETY: all `len` bytes are mapped, readable, writable and zeroed by the kernel. This is the
            // only reference, from the only owner.
            unsafe { std::slice::from_raw_parts_mut(whole.ptr.as_ptr().cast::<u8>(), len) }
        };
        file.read_exact_at(&mut contents[start..start + bytes], 0)?;
        whole.unmap_head(start);
        Ok(Self { mapping: whole, bytes })
    }

    /// Copies into `dst` from `offset`; returns the bytes copied, fewer at the end.
    #[inline]
    pub fn read_at(&self, dst: &mut [u8], offset: u64) -> usize {
        self.mapping.copy_to(dst, offset, self.bytes)
    }
}

/// A file mapped from the kernel's page cache.
#[derive(Debug)]
pub struct Mapped {
    mapping: Mapping,
}

impl Mapped {
    /// Maps the whole of `file` and populates the page tables.
    ///
    /// # Errors
    ///
    /// Errors of the mapping; [`io::ErrorKind::InvalidInput`] for a file that still has a name: another process could
    /// truncate it, and a read would then raise SIGBUS.
    pub fn new(file: &File) -> io::Result<Self> {
        let metadata = file.metadata()?;
        if metadata.nlink() != 0 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let len = usize::try_from(metadata.len()).map_err(io::Error::other)?;
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: a new mapping at an address that the kernel chooses affects no other memory. The file has no
        // name, so no other program changes its bytes while they are copied.
        let ptr = unsafe { mmap(ptr::null_mut(), len, ProtFlags::READ, flags, file, 0)? };
        Ok(Self { mapping: Mapping::new(ptr, len)? })
    }

    /// Copies into `dst` from `offset`; returns the bytes copied, fewer at the end.
    #[inline]
    pub fn read_at(&self, dst: &mut [u8], offset: u64) -> usize {
        self.mapping.copy_to(dst, offset, self.mapping.len)
    }
}

/// Resource usage so far: of this process with all threads, or of one thread.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Processor time, in user and kernel mode.
    pub cpu: Duration,
    /// Context switches, voluntary and not.
    pub context_switches: u64,
    /// Voluntary context switches: the number of sleeps.
    pub sleeps: u64,
}

impl Usage {
    /// The usage up to now.
    #[must_use]
    pub fn now() -> Self {
        Self::of(rustix::time::ClockId::ProcessCPUTime, libc::RUSAGE_SELF)
    }

    /// The usage of the calling thread up to now.
    #[must_use]
    pub fn of_thread() -> Self {
        Self::of(rustix::time::ClockId::ThreadCPUTime, libc::RUSAGE_THREAD)
    }

    /// The usage of all children that were waited for, and of their children. The processor time has a resolution of
    /// microseconds.
    #[must_use]
    pub fn of_children() -> Self {
        let usage = rusage(libc::RUSAGE_CHILDREN);
        let time = |time: libc::timeval| {
            Duration::from_secs(time.tv_sec.unsigned_abs())
                + Duration::from_micros(time.tv_usec.unsigned_abs())
        };
        Self::with(time(usage.ru_utime) + time(usage.ru_stime), &usage)
    }

    fn of(clock: rustix::time::ClockId, who: i32) -> Self {
        // A finer resolution than `rusage` has.
        let cpu = rustix::time::clock_gettime(clock);
        let cpu = Duration::new(cpu.tv_sec.unsigned_abs(), cpu.tv_nsec.unsigned_abs() as u32);
        Self::with(cpu, &rusage(who))
    }

    fn with(cpu: Duration, usage: &libc::rusage) -> Self {
        Self {
            cpu,
            context_switches: (usage.ru_nvcsw + usage.ru_nivcsw).unsigned_abs(),
            sleeps: usage.ru_nvcsw.unsigned_abs(),
        }
    }

    /// The usage between `earlier` and this.
    #[must_use]
    pub fn since(self, earlier: Self) -> Self {
        Self {
            cpu: self.cpu.saturating_sub(earlier.cpu),
            context_switches: self.context_switches.saturating_sub(earlier.context_switches),
            sleeps: self.sleeps.saturating_sub(earlier.sleeps),
        }
    }
}

fn rusage(who: i32) -> libc::rusage {
    let mut usage = MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: getrusage writes one rusage, for which there is room. All zeros are a valid value, so it is
    // initialised even if the call fails.
    unsafe {
        libc::getrusage(who, usage.as_mut_ptr());
        usage.assume_init()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> (File, Vec<u8>) {
        let file = tempfile::tempfile().unwrap();
        let bytes: Vec<u8> = (0..70_000_u32).map(|n| (n % 251) as u8).collect();
        file.write_all_at(&bytes, 0).unwrap();
        (file, bytes)
    }

    /// Checks that reads behave as `pread`: whole, short at the end, empty past the end.
    fn check(read_at: impl Fn(&mut [u8], u64) -> usize) {
        let (_, bytes) = sample();
        let mut dst = [0; 4096];
        for (offset, len) in [(0, 4096), (8191, 4096), (69_999, 1), (70_000, 0), (u64::MAX, 0)] {
            assert_eq!(read_at(&mut dst, offset), len);
            let offset = offset.min(70_000) as usize;
            assert_eq!(dst[..len], bytes[offset..offset + len]);
        }
    }

    #[test]
    fn arena_reads_the_file() {
        let arena = Arena::read(&sample().0).unwrap();
        assert_eq!(arena.mapping.ptr.as_ptr().align_offset(HUGE_PAGE_BYTES), 0);
        check(|dst, offset| arena.read_at(dst, offset));
    }

    #[test]
    fn mapped_reads_the_file_and_refuses_one_with_a_name() {
        let mapped = Mapped::new(&sample().0).unwrap();
        check(|dst, offset| mapped.read_at(dst, offset));
        let named = tempfile::NamedTempFile::new().unwrap();
        assert_eq!(Mapped::new(named.as_file()).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn usage_grows() {
        let before = Usage::now();
        std::thread::sleep(Duration::from_millis(1));
        let busy = std::time::Instant::now();
        while busy.elapsed() < Duration::from_millis(2) {}
        let used = Usage::now().since(before);
        assert!(used.cpu > Duration::ZERO && used.context_switches > 0, "{used:?}");
    }
}
