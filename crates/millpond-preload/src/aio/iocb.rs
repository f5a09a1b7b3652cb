//! Types of the kernel's AIO interface.

pub type Iocb = libc::iocb;
/// The handle of a program's context.
pub type Handle = usize;

/// Has the layout of the kernel's `io_event`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub struct Event {
    pub data: u64,
    pub block: u64,
    pub result: i64,
    pub more: i64,
}

impl Event {
    /// The fields that libaio's `io_queue_run` uses: the block, and the address of a function.
    pub fn callback(&self) -> (*mut Iocb, usize) {
        (std::ptr::with_exposed_provenance_mut(self.block as usize), self.data as usize)
    }
}

#[cfg(target_arch = "x86_64")]
pub const SYS_IO_PGETEVENTS: i64 = 333;
#[cfg(target_arch = "aarch64")]
pub const SYS_IO_PGETEVENTS: i64 = 292;
pub const PREAD: u16 = 0;
pub const PWRITE: u16 = 1;
pub const FSYNC: u16 = 2;
pub const FDSYNC: u16 = 3;
pub const PREADV: u16 = 7;
pub const PWRITEV: u16 = 8;
/// In a block's `aio_flags`: the request has an eventfd.
pub const HAS_EVENTFD: u32 = 1;
