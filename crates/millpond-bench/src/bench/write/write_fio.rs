//! fio as the baseline of sequential writes: O_DIRECT with several of them in flight.

use std::ffi::OsString;
use std::io;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::bench::fio::{Moved, parse};
use crate::bench::harness::Slice;

pub const QUEUE_DEPTH: u32 = 8;

/// Writes the file in order. fio's time includes the sync in the end, and its processor time is
/// that of the thread which submits, without the kernel's helpers.
pub fn write(path: &Path, bytes: u64, block_bytes: u32, overwrite: bool) -> io::Result<Slice> {
    let mut filename = OsString::from("--filename=");
    filename.push(path);
    let output = Command::new("fio")
        .args(["--name=millpond-bench", "--thread", "--ioengine=io_uring", "--rw=write"])
        .args(["--direct=1", "--end_fsync=1", "--scramble_buffers=0", "--output-format=json"])
        .args(["--registerfiles=1", "--fixedbufs=1"])
        .args([format!("--iodepth_batch={QUEUE_DEPTH}"), "--iodepth_batch_complete_min=1".into()])
        .arg(format!("--iodepth_batch_complete_max={QUEUE_DEPTH}"))
        // Millpond reserves ahead, too.
        .arg(format!("--fallocate={}", if overwrite { "none" } else { "native" }))
        .arg(format!("--overwrite={}", u32::from(overwrite)))
        .arg(format!("--iodepth={QUEUE_DEPTH}"))
        .arg(format!("--bs={block_bytes}"))
        .arg(format!("--size={bytes}"))
        .arg(filename)
        // Its buffers are in huge pages, as Millpond's are (glibc 2.35 and later).
        .env("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
        .stdin(Stdio::null())
        .output()
        .map_err(|error| io::Error::other(format!("fio can't be run: {error}")))?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        return Err(io::Error::other(format!("fio: {}\n{stderr}", output.status)));
    }
    let slice = parse(&output.stdout, Moved::Written)?;
    let wanted = bytes / u64::from(block_bytes);
    if slice.ops != wanted {
        return Err(io::Error::other(format!("fio: {} writes of {wanted}", slice.ops)));
    }
    Ok(slice)
}
