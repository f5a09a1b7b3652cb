//! `copy_file_range` and `sendfile` between two served files: reads and writes through the engine,
//! as a copy in the kernel would go past the cache on both sides.
//!
//! One call moves as much as the kernel's would: up to [`TRANSFER_BYTES_MAX`], less only at the end of
//! the input or where a write fails. Callers that call once and trust the result exist.
//!
//! Either file may be passed at any moment, because another process opens it. The kernel does the rest of a part
//! then, at the same place: passing a file sets the kernel's offset, and the bytes that were read and not written
//! yet are in the buffer.
//!
//! Offsets that the program gives are read at the beginning and stored at the end, as the kernel
//! does: both may be in one place, where the second stays.
//!
//! Each part is a few sections, so signals are taken between them. A handler may leave by `longjmp`
//! or `pthread_exit`: nothing here is dropped by unwinding, which loses the buffer and nothing
//! else. The bytes copied by then are not reported.

use std::ffi::c_int;
use std::mem::ManuallyDrop;

use crate::files::identity;
use crate::files::pin::Pin;
use crate::files::seek::seek;
use crate::files::segments::{Direction, Memory, TRANSFER_BYTES_MAX};
use crate::files::served_io::{self, At, Outcome};
use crate::runtime::sys::sys;
use crate::runtime::{fault, section};

/// Bytes that are read before they are written. Chosen, not measured.
const PART_BYTES: usize = 256 << 10;

/// Copies `len` bytes from the served file at `from` to the one at `to`. A null offset stands for
/// the description's own, else it is read and moved. Returns the kernel's result; `None` where the
/// kernel should do it, or refuse it.
pub fn between_served(
    from: c_int,
    from_offset: *mut libc::off64_t,
    to: c_int,
    to_offset: *mut libc::off64_t,
    len: usize,
) -> Option<isize> {
    let (mut from_at, mut to_at) = (load(from_offset)?, load(to_offset)?);
    let is_copyable = section::run(|_| {
        let (from, to) = (Pin::of(from)?, Pin::of(to)?);
        let access = to.access();
        Some(from.access().read && access.write && !access.append && !std::ptr::eq(&*from, &*to))
    });
    let is_valid = |offset: Option<libc::off64_t>| {
        offset
            .is_none_or(|offset| offset >= 0 && offset <= libc::off64_t::MAX - len as libc::off64_t)
    };
    if is_copyable != Some(true)
        || libc::off64_t::try_from(len).is_err()
        || !is_valid(from_at)
        || !is_valid(to_at)
        || identical(from, to)
    {
        return None;
    }
    let len = len.min(TRANSFER_BYTES_MAX);
    let buffer = section::run(|_| {
        let mut buffer = Vec::new();
        buffer.try_reserve_exact(len.min(PART_BYTES)).ok()?;
        buffer.resize(len.min(PART_BYTES), 0u8);
        Some(buffer)
    });
    let Some(buffer) = buffer else { return Some(-libc::ENOMEM as isize) };
    let mut buffer = ManuallyDrop::new(buffer);
    let mut copied = 0;
    let mut last = 0;
    while copied < len {
        let part = buffer.len().min(len - copied);
        last = copy_part(from, &mut from_at, to, &mut to_at, &mut buffer[..part]);
        if last <= 0 {
            break;
        }
        copied += last as usize;
    }
    section::run(|_| drop(ManuallyDrop::into_inner(buffer)));
    if copied == 0 {
        return Some(last);
    }
    let is_stored = [store(from_offset, from_at), store(to_offset, to_at)];
    Some(if is_stored.contains(&false) { -libc::EFAULT as isize } else { copied as isize })
}

/// An offset of the program's, for a pointer that is not null. `None` if it can't be read: served
/// files have the fault handlers installed.
fn load(offset: *const libc::off64_t) -> Option<Option<libc::off64_t>> {
    if offset.is_null() {
        return Some(None);
    }
    let mut loaded: libc::off64_t = 0;
    // SAFETY: `loaded` has room; `offset` may be any address.
    let is_loaded = section::run(|_| unsafe {
        fault::copy_in((&raw mut loaded).cast(), offset.cast(), size_of::<libc::off64_t>())
    });
    is_loaded.then_some(Some(loaded))
}

/// Stores the program's offset. Whether that succeeded.
fn store(offset: *mut libc::off64_t, at: Option<libc::off64_t>) -> bool {
    let Some(at) = at else { return true };
    // SAFETY: the offset is there to be read; `offset` may be any address that the caller may write
    // to.
    section::run(|_| unsafe {
        fault::copy_out(offset.cast(), (&raw const at).cast(), size_of::<libc::off64_t>())
    })
}

/// Reads once, and writes all of it unless that fails. Returns the bytes moved, or, if there are
/// none, 0 at the end of the input and a negative errno for an error.
fn copy_part(
    from: c_int,
    from_at: &mut Option<libc::off64_t>,
    to: c_int,
    to_at: &mut Option<libc::off64_t>,
    buffer: &mut [u8],
) -> isize {
    let read = read(from, *from_at, buffer);
    if read <= 0 {
        return read;
    }
    let mut moved = 0;
    let mut failure = 0;
    while moved < read {
        let written = write(to, *to_at, &mut buffer[moved as usize..read as usize]);
        if written <= 0 {
            failure = written;
            break;
        }
        moved += written;
        if let Some(offset) = to_at {
            *offset += written as libc::off64_t;
        }
    }
    match from_at {
        Some(offset) => *offset += moved as libc::off64_t,
        None if moved < read => {
            // The bytes that were read and could not be written are read again next time.
            seek(from, (moved - read) as libc::off64_t, libc::SEEK_CUR);
        }
        None => {}
    }
    if moved > 0 { moved } else { failure }
}

fn read(fd: c_int, at: Option<libc::off64_t>, buffer: &mut [u8]) -> isize {
    let (start, len) = (buffer.as_mut_ptr(), buffer.len());
    let (place, offset) = place(at);
    // SAFETY: the buffer is ours, here and below.
    if let Outcome::Done(read) = unsafe { served_io::read(fd, Memory::One(start, len), place) } {
        return read;
    }
    // SAFETY: as above.
    let read = unsafe {
        match offset {
            Some(offset) => sys!(libc::SYS_pread64, fd, start, len, offset),
            None => sys!(libc::SYS_read, fd, start, len),
        }
    };
    served_io::count_passed(fd, Direction::Read, read);
    read
}

fn write(fd: c_int, at: Option<libc::off64_t>, buffer: &mut [u8]) -> isize {
    let (start, len) = (buffer.as_mut_ptr(), buffer.len());
    let (place, offset) = place(at);
    // SAFETY: the buffer is ours, here and below.
    if let Outcome::Done(written) = unsafe { served_io::write(fd, Memory::One(start, len), place) }
    {
        return written;
    }
    // SAFETY: as above.
    let written = unsafe {
        match offset {
            Some(offset) => sys!(libc::SYS_pwrite64, fd, start, len, offset),
            None => sys!(libc::SYS_write, fd, start, len),
        }
    };
    served_io::count_passed(fd, Direction::Write, written);
    written
}

fn place(at: Option<libc::off64_t>) -> (At, Option<libc::off64_t>) {
    match at {
        Some(offset) => (At::Byte(offset), Some(offset)),
        None => (At::Offset, None),
    }
}

/// Whether both are the same file: overlapping ranges are the kernel's to refuse.
fn identical(from: c_int, to: c_int) -> bool {
    let id = |fd| identity::identify(fd).map(|identity| identity.id);
    id(from) == id(to)
}
