//! Files whose length is not the number of their bytes.
//!
//! The cache reads up to the length. The kernel makes the bytes of a file in `/proc` or `/sys` as they are
//! read, and its length is 0, or a page. A FUSE server may do the same. Such a file would read as empty, or
//! with zeros behind its bytes, so an open of it is refused.

use std::io;
use std::os::fd::BorrowedFd;

use rustix::fs::Stat;

use crate::io::backend::descriptors::is_local_file_system;

/// File systems whose files the kernel makes as they are read.
const MADE_BY_THE_KERNEL: [u32; 15] = [
    0x0000_9FA0, // procfs
    0x6265_6572, // sysfs
    0x6462_6720, // debugfs
    0x7472_6163, // tracefs
    0x6367_7270, // cgroup2
    0x0027_E0EB, // cgroup
    0x6265_6570, // configfs
    0x7363_6673, // securityfs
    0xCAFE_4A11, // bpf
    0xF97C_FF8C, // selinuxfs
    0x4341_5D53, // smackfs
    0x0765_5821, // resctrl
    0x6573_5543, // fusectl
    0x4249_4E4D, // binfmt_misc
    0xABBA_1974, // xenfs
];

/// Whether `stat` rules such a file out without a system call: they have no blocks, and no block device.
fn is_plain(stat: &Stat) -> bool {
    stat.st_blocks != 0 || rustix::fs::major(stat.st_dev) != 0
}

/// Refuses a file whose length is not the number of its bytes. `reads`: `fd` permits to read.
pub(super) fn check(fd: BorrowedFd<'_>, stat: &Stat, reads: bool) -> io::Result<()> {
    if is_plain(stat) {
        return Ok(());
    }
    let system = rustix::fs::fstatfs(fd)?;
    let is_made = MADE_BY_THE_KERNEL.contains(&(system.f_type as u32));
    if is_made || (stat.st_size == 0 && reads && !is_local_file_system(fd) && has_bytes(fd)?) {
        let what = "the file's length is not the number of its bytes, as in /proc and /sys";
        return Err(io::Error::new(io::ErrorKind::Unsupported, what));
    }
    Ok(())
}

/// Whether a file that claims to be empty has bytes all the same.
fn has_bytes(fd: BorrowedFd<'_>) -> io::Result<bool> {
    // An error says nothing of the length; a later read meets it.
    let found = rustix::io::pread(fd, &mut [0u8; 1], 0).unwrap_or(0);
    // Another program may have written to it since.
    Ok(found > 0 && rustix::fs::fstat(fd)?.st_size == 0)
}
