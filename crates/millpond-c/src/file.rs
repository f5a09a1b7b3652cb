//! Opening and closing files.

use std::ffi::{c_char, c_int};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use millpond::{Backing, File, OpenOptions, WriteMode};

use crate::call::{self, Failure, Outcome, call, fault, invalid, sized, status, store};
use crate::engine::millpond_engine;
use crate::objects::{ENGINES, FILES};

/// A write reaches the kernel before it returns.
pub const MILLPOND_WRITE_THROUGH: u32 = 0;
/// A write stays in the cache, and reaches the kernel by age, by amount, with a sync, or when the last
/// handle of the file is closed. Goes best with MILLPOND_BACKING_DIRECT: else each byte is cached twice.
pub const MILLPOND_WRITE_BACK: u32 = 1;

/// Through the kernel's page cache, which is then a second level.
pub const MILLPOND_BACKING_BUFFERED: u32 = 0;
/// O_DIRECT: the kernel caches nothing. What is not a whole block at an edge of a write goes through the
/// kernel's cache, coherently.
pub const MILLPOND_BACKING_DIRECT: u32 = 1;
/// O_DIRECT without opening the file a second time, which would break a lease on it.
pub const MILLPOND_BACKING_DIRECT_IN_PLACE: u32 = 2;
/// Through the kernel's page cache, which is asked to forget at once what it took or gave.
pub const MILLPOND_BACKING_UNCACHED: u32 = 3;

/// Of a file that is opened with O_DIRECT: what is not aligned is served, too, by way of a buffer that is.
pub const MILLPOND_OPEN_BOUNCE: u32 = 1;

/// An open file.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct millpond_file {
    /// 0 is no file.
    pub id: u64,
}

/// How a file is opened. All that is 0 is as if not said.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct millpond_open_options {
    /// `sizeof(struct millpond_open_options)`.
    pub size: usize,
    /// As for `open(2)`: O_RDONLY, O_WRONLY or O_RDWR, or'ed with any of O_CREAT, O_EXCL (with O_CREAT),
    /// O_TRUNC, O_APPEND, O_DSYNC, O_DIRECT, O_CLOEXEC (which is always set). `millpond_append` is the
    /// call that appends: with O_APPEND `millpond_write` keeps writing where it was told to.
    ///
    /// O_DIRECT: reads and writes by this handle go past the cache, between the caller's memory and the
    /// device, and see, and are seen by, everyone's cached ones. Offsets, addresses and lengths must be
    /// aligned as the file system wants it, mostly to 512 or 4096 bytes.
    pub flags: u32,
    /// Permission bits of a file that is created, before the umask. Default 0666.
    pub mode: u32,
    /// What of the file is read, cached and seen as one piece: a power of two from 4096 to 65536. Default
    /// 4096, or that of the file where it is open already; another one than that is refused.
    pub page_bytes: u32,
    /// `MILLPOND_WRITE_...`. Where the file is open already, the first opener's choice stands.
    pub write_mode: u32,
    /// `MILLPOND_BACKING_...`: how the engine reaches the file below its cache. Where the file is open
    /// already, the first opener's choice stands.
    pub backing: u32,
    /// `MILLPOND_OPEN_...`, or'ed.
    pub extra: u32,
}

impl millpond_open_options {
    fn to_options(self) -> Outcome<OpenOptions> {
        let flags = self.flags as c_int;
        let known = libc::O_ACCMODE
            | libc::O_CREAT
            | libc::O_EXCL
            | libc::O_TRUNC
            | libc::O_APPEND
            | libc::O_DSYNC
            | libc::O_DIRECT
            | libc::O_CLOEXEC
            | libc::O_LARGEFILE;
        if flags & !known != 0 {
            return Err(invalid("an open flag that is not supported"));
        }
        if self.extra & !MILLPOND_OPEN_BOUNCE != 0 {
            return Err(invalid("an extra flag that there is not"));
        }
        let (read, write) = match flags & libc::O_ACCMODE {
            libc::O_RDONLY => (true, false),
            libc::O_WRONLY => (false, true),
            libc::O_RDWR => (true, true),
            _ => return Err(invalid("an access mode that there is not")),
        };
        let has = |flag: c_int| flags & flag != 0;
        if has(libc::O_EXCL) && !has(libc::O_CREAT) {
            return Err(invalid("O_EXCL without O_CREAT"));
        }
        let mut options = OpenOptions::new()
            .read(read)
            .write(write)
            .append(write && has(libc::O_APPEND))
            .create(has(libc::O_CREAT))
            .create_new(has(libc::O_EXCL))
            .truncate(has(libc::O_TRUNC))
            .dsync(has(libc::O_DSYNC))
            .direct(has(libc::O_DIRECT))
            .bounce(self.extra & MILLPOND_OPEN_BOUNCE != 0);
        if self.mode != 0 {
            options = options.mode(self.mode);
        }
        if self.page_bytes != 0 {
            options = options.page_bytes(self.page_bytes);
        }
        options = options.write_mode(match self.write_mode {
            MILLPOND_WRITE_THROUGH => WriteMode::Through,
            MILLPOND_WRITE_BACK => WriteMode::Back,
            _ => return Err(invalid("a write mode that there is not")),
        });
        Ok(options.backing(match self.backing {
            MILLPOND_BACKING_BUFFERED => Backing::Buffered,
            MILLPOND_BACKING_DIRECT => Backing::Direct,
            MILLPOND_BACKING_DIRECT_IN_PLACE => Backing::DirectInPlace,
            MILLPOND_BACKING_UNCACHED => Backing::Uncached,
            _ => return Err(invalid("a backing that there is not")),
        }))
    }
}

/// # Safety
///
/// `options` is NULL or valid for its size.
unsafe fn options_of(options: *const millpond_open_options) -> Outcome<OpenOptions> {
    // SAFETY: our caller's promise; numbers.
    let options = unsafe { sized(options, size_of::<millpond_open_options>()) }?;
    options.to_options()
}

/// # Safety
///
/// `at` is valid for a write.
unsafe fn give(file: File, at: *mut millpond_file) -> Outcome<()> {
    let id = FILES
        .insert(Arc::new(file))
        .map_err(|_| Failure::Refused(libc::EMFILE, "there are too many files"))?;
    // SAFETY: our caller's promise.
    unsafe { store(at, millpond_file { id }) }
}

/// Opens the file at `path`, or creates it, as `options` say (NULL: for reading), and stores its handle at
/// `file`. Only regular files can be opened.
///
/// Blocks as `open(2)` does, and while a keeper writes what a dead process left of the file.
///
/// Returns 0, or what `open(2)` said (-ENOENT, -EACCES, ...), or
/// -EBADF       there is no such engine
/// -EINVAL      options that contradict each other, or the file as it is open already; no direct I/O here
/// -E2BIG       an option that this version of the library does not know is not 0
/// -EFAULT      `path` or `file` is NULL
/// -EISDIR      a directory
/// -ENOTSUP     no regular file
/// -ENOBUFS     the memory limit has no room for another file
/// -EMFILE      there are 1,048,576 files, or the system has no descriptor
///
/// # Safety
///
/// `path` is NULL or a string, `options` NULL or valid for its size, `file` NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millpond_open(
    engine: millpond_engine,
    path: *const c_char,
    options: *const millpond_open_options,
    file: *mut millpond_file,
) -> c_int {
    status(|| {
        let engine = ENGINES.get(engine.id)?;
        // SAFETY: our caller's promise.
        let (path, options) = unsafe { (call::path(path)?, options_of(options)?) };
        if file.is_null() {
            return Err(fault("the address for the file is NULL"));
        }
        let opened = engine.open(path, &options)?;
        // SAFETY: our caller's promise.
        unsafe { give(opened, file) }
    })
}

/// `millpond_open` of a descriptor, which must permit what `options` ask for; of these those about the
/// cache count, and O_TRUNC. The descriptor stays the caller's, who may close it: it is duplicated. Its
/// offset is never used.
///
/// POSIX locks that the process has on the file (`F_SETLK`) are dropped when any descriptor of it is closed:
/// by `millpond_close`, too, but not by a call of this one that fails, unless it fails to truncate (O_TRUNC) or
/// to open the file once more for direct I/O.
///
/// Returns as for `millpond_open`, and
/// -EBADF       also: `descriptor` is not open
/// -EINVAL      also: the descriptor does not permit what the options ask for
///
/// # Safety
///
/// As for `millpond_open`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millpond_open_descriptor(
    engine: millpond_engine,
    descriptor: c_int,
    options: *const millpond_open_options,
    file: *mut millpond_file,
) -> c_int {
    status(|| {
        let engine = ENGINES.get(engine.id)?;
        // SAFETY: our caller's promise.
        let options = unsafe { options_of(options) }?;
        if file.is_null() {
            return Err(fault("the address for the file is NULL"));
        }
        if descriptor < 0 {
            return Err(Failure::Refused(libc::EBADF, "the descriptor is negative"));
        }
        // SAFETY: looked at for this call only, and if it is not open the kernel says so.
        let theirs = unsafe { BorrowedFd::borrow_raw(descriptor) };
        let opened = engine.from_borrowed_fd(theirs, &options)?;
        // SAFETY: our caller's promise.
        unsafe { give(opened, file) }
    })
}

/// Closes a file: its handle is of nothing from then on, whatever is returned.
///
/// Writes back what waits in the cache, without making it durable, and blocks for that. Calls on the file
/// that other threads are in, requests of queues and views go on, and the file stays open for them. A call
/// that begins after this one has begun gets -EBADF.
///
/// Returns 0, or
/// -EBADF       there is no such file
/// -EDEADLK     called by a signal handler that interrupted another call of this thread; still open
/// or an error of a write that no sync has mended yet, or of writing back: it is the last chance to hear
/// of it.
#[unsafe(no_mangle)]
pub extern "C" fn millpond_close(file: millpond_file) -> c_int {
    status(|| Ok(FILES.take(file.id)?.close_shared()?))
}

/// The file's length, in bytes. Never blocks.
///
/// Returns it, or
/// -EBADF       there is no such file
#[unsafe(no_mangle)]
pub extern "C" fn millpond_len(file: millpond_file) -> i64 {
    call(|| Ok(FILES.with(file.id, |file| file.len())?? as i64))
}
