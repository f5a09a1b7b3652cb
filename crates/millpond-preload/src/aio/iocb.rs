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

/// The libc crate has it not for every architecture.
#[allow(non_upper_case_globals)]
pub const SYS_io_pgetevents: i64 = if cfg!(target_arch = "x86_64") { 333 } else { 292 };
pub const PREAD: u16 = 0;
pub const PWRITE: u16 = 1;
pub const FSYNC: u16 = 2;
pub const FDSYNC: u16 = 3;
pub const PREADV: u16 = 7;
pub const PWRITEV: u16 = 8;
/// In a block's `aio_flags`: the request has an eventfd.
pub const HAS_EVENTFD: u32 = 1;
