//! Sizes that all of the engine agrees on.

/// The smallest and the default page size, in bytes.
pub const PAGE_BYTES_MIN: u32 = 4096;
/// The largest page size, in bytes.
pub const PAGE_BYTES_MAX: u32 = 65536;
