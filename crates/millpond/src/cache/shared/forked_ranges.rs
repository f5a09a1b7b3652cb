//! Zeros in a child of fork where its parent has shared memory.
//!
//! Private memory of a cache reads as zeros in a child, by `MADV_WIPEONFORK` (frames, "Fork"). The kernel has no such
//! advice for shared memory, so a handler that runs in the child maps zeros there. It runs after `fork` only; a child
//! that is made by a raw system call and touches the cache gets a SIGSEGV.
//!
//! Locks: none: a thread that holds a lock may not exist in the child.

use std::io;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

use rustix::mm::{MapFlags, ProtFlags};

/// Shared caches that a process can have at the same time. Chosen.
const RANGES_MAX: usize = 16;
/// In a slot whose range is being entered.
const TAKEN: usize = 1;

/// An address, 0 for none, and a number of bytes.
struct RangeSlot {
    address: AtomicUsize,
    bytes: AtomicUsize,
}

static RANGES: [RangeSlot; RANGES_MAX] =
    [const { RangeSlot { address: AtomicUsize::new(0), bytes: AtomicUsize::new(0) } }; RANGES_MAX];

/// A range that children find zeros in, until it is dropped.
pub(in crate::cache) struct ForkedRange {
    slot: &'static RangeSlot,
}

impl ForkedRange {
    /// # Safety
    ///
    /// The range is a mapping of the caller's, which stays until the value is dropped. In a child it has holes, and
    /// no code relies on its contents there.
    pub(in crate::cache) unsafe fn add(base: *mut u8, bytes: usize) -> io::Result<ForkedRange> {
        register()?;
        let slot = RANGES.iter().find(|slot| {
            // Relaxed: one thread takes the slot, and enters its range below.
            slot.address.compare_exchange(0, TAKEN, Relaxed, Relaxed).is_ok()
        });
        let Some(slot) = slot else {
            let what = format!("more than {RANGES_MAX} shared caches in a process");
            return Err(io::Error::new(io::ErrorKind::QuotaExceeded, what));
        };
        slot.bytes.store(bytes, Relaxed);
        // Release: pairs with the acquire in `map_zeros`, for the number of bytes. Argued: a handler is not in a model.
        slot.address.store(base.expose_provenance(), Release);
        Ok(ForkedRange { slot })
    }
}

impl Drop for ForkedRange {
    fn drop(&mut self) {
        // AcqRel: the range is unmapped after this. Argued: as above.
        self.slot.address.swap(0, AcqRel);
    }
}

fn register() -> io::Result<()> {
    static IS_REGISTERED: OnceLock<libc::c_int> = OnceLock::new();
    // SAFETY: the handler stays in memory as long as the process: libc drops handlers of a library that is unloaded.
    let error =
        *IS_REGISTERED.get_or_init(|| unsafe { libc::pthread_atfork(None, None, Some(map_zeros)) });
    if error == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(error)) }
}

/// Runs in a child of fork, before `fork` returns there.
unsafe extern "C" fn map_zeros() {
    for slot in &RANGES {
        // Acquire: pairs with `add`. Argued: the child's one thread is a copy of the one that called fork.
        let address = slot.address.load(Acquire);
        if address <= TAKEN {
            continue;
        }
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the owner's promise in `add`. The call is one system call. If it fails, the range keeps its holes.
        unsafe {
            let at = ptr::with_exposed_provenance_mut(address);
            _ = rustix::mm::mmap_anonymous(at, slot.bytes.load(Relaxed), access, flags);
        }
    }
}
