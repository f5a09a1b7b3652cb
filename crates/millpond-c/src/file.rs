//! Opening and closing files.

use std::ffi::{c_char, c_int};
use std::mem::offset_of;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use millpond::{Backing, File, OpenOptions, WriteMode};

use crate::call::{self, Failure, Outcome, call, fault, invalid, read_options, status, store};
use crate::engine::millpond_engine;
use crate::objects::{ENGINES, FILES};

/// A write reaches the kernel before it returns.
pub const MILLPOND_WRITE_THROUGH: u32 = 0;
/// A write stays in the cache. It reaches the kernel when it is old enough, when there are too many dirty
/// bytes, with a sync, or when the last handle of the file is closed. Use MILLPOND_BACKING_DIRECT with it:
/// otherwise each byte is cached twice.
pub const MILLPOND_WRITE_BACK: u32 = 1;

/// Through the kernel's page cache, as a second level.
pub const MILLPOND_BACKING_BUFFERED: u32 = 0;
/// O_DIRECT: the kernel caches nothing. Partial blocks at the edges of a write go through the kernel's
/// cache, coherently.
pub const MILLPOND_BACKING_DIRECT: u32 = 1;
/// O_DIRECT without a second open of the file, which would break a lease on it.
pub const MILLPOND_BACKING_DIRECT_IN_PLACE: u32 = 2;
/// Through the kernel's page cache, which is asked to drop the pages at once.
pub const MILLPOND_BACKING_UNCACHED: u32 = 3;
/// The kernel's page cache is the cache: reads copy from a mapping of it, while the file is written, too, and the
/// engine holds no second copy. A write is one system call. With MILLPOND_WRITE_THROUGH only.
///
/// A page that can't be read, or that another process cuts off, raises SIGBUS in the copy. The first such open installs
/// a handler that ends the copy and passes any other fault on to the handler of before. A handler that the program
/// installs later must call millpond_fault_resume_address. Threads that block SIGBUS read by system calls,
/// and must not begin to block it after their first read. Changes by other processes are visible at once; a read beside a write of another process
/// may be torn, as with `read(2)`. Only one process may append.
///
/// Reads are system calls of pages that the kernel does not have; on file systems other than ext4, XFS, btrfs, F2FS, JFS
/// and ReiserFS; with a limit of the address space (RLIMIT_AS); and on AArch64.
pub const MILLPOND_BACKING_MAPPED: u32 = 4;

/// For a file that is opened with O_DIRECT: unaligned requests are served through an aligned buffer.
pub const MILLPOND_OPEN_BOUNCE: u32 = 1;

/// An open file.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct millpond_file {
    /// 0: no file.
    pub id: u64,
}

/// Options for opening a file. Zero-initialised members take their defaults.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct millpond_open_options {
    /// `sizeof(struct millpond_open_options)`.
    pub size: usize,
    /// As for `open(2)`: O_RDONLY, O_WRONLY or O_RDWR, or'ed with any of O_CREAT, O_EXCL (with O_CREAT),
    /// O_TRUNC, O_APPEND, O_DSYNC, O_DIRECT, O_CLOEXEC (which is always set). `millpond_append` is the call
    /// that appends: `millpond_write` writes at its offset even with O_APPEND. O_RDONLY with O_TRUNC, which
    /// POSIX leaves undefined, is refused.
    ///
    /// O_DIRECT: reads and writes by this handle bypass the cache, between the caller's memory and the
    /// device. They are coherent with cached ones of other handles. Offsets, addresses and lengths must be
    /// aligned as the file system requires, mostly to 512 or 4096 bytes.
    pub flags: u32,
    /// Permission bits of a new file, before the umask. Default 0666.
    pub mode: u32,
    /// The page size: the unit of reads, of caching and of atomicity. A power of two from 4096 to 65536.
    /// Default 4096, or the page size of the file if it is already open; a different size is refused.
    pub page_bytes: u32,
    /// `MILLPOND_WRITE_...`. If the file is already open, the first opener's choice applies.
    pub write_mode: u32,
    /// `MILLPOND_BACKING_...`: how the engine accesses the file below its cache. If the file is already
    /// open, the first opener's choice applies.
    pub backing: u32,
    /// `MILLPOND_OPEN_...`, or'ed.
    pub extra: u32,
    /// A power cut tears no aligned block of this many bytes: a power of two from 4096 to the page size. 0: the default, no
    /// such promise. Needs MILLPOND_BACKING_DIRECT, O_RDWR, and a file system that writes such blocks as a whole:
    /// `millpond_untorn_bytes_max`. The page size is at least this, and the length of the file always a multiple of it:
    /// calls that would give it another length fail with -EINVAL. No other program may write to the file. If it
    /// is already open, the first opener's choice applies; a different size is refused.
    pub untorn_bytes: u32,
    /// Reserved; must be 0.
    pub reserved: u32,
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
            return Err(invalid("an unknown extra flag"));
        }
        if self.reserved != 0 {
            return Err(invalid("a reserved member that is not 0"));
        }
        let (read, write) = match flags & libc::O_ACCMODE {
            libc::O_RDONLY => (true, false),
            libc::O_WRONLY => (false, true),
            libc::O_RDWR => (true, true),
            _ => return Err(invalid("an unknown access mode")),
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
            .create_for_reading(true)
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
        if self.untorn_bytes != 0 {
            options = options.untorn(self.untorn_bytes);
        }
        options = options.write_mode(match self.write_mode {
            MILLPOND_WRITE_THROUGH => WriteMode::Through,
            MILLPOND_WRITE_BACK => WriteMode::Back,
            _ => return Err(invalid("an unknown write mode")),
        });
        Ok(options.backing(match self.backing {
            MILLPOND_BACKING_BUFFERED => Backing::Buffered,
            MILLPOND_BACKING_DIRECT => Backing::Direct,
            MILLPOND_BACKING_DIRECT_IN_PLACE => Backing::DirectInPlace,
            MILLPOND_BACKING_UNCACHED => Backing::Uncached,
            MILLPOND_BACKING_MAPPED => Backing::Mapped,
            _ => return Err(invalid("an unknown backing")),
        }))
    }
}

/// # Safety
///
/// `options` is NULL or valid for its size.
unsafe fn options_of(options: *const millpond_open_options) -> Outcome<OpenOptions> {
    let known_bytes_min = offset_of!(millpond_open_options, untorn_bytes);
    // SAFETY: our caller's promise; numbers.
    let options = unsafe { read_options(options, known_bytes_min) }?;
    options.to_options()
}

/// # Safety
///
/// `at` is valid for a write.
unsafe fn store_handle(file: File, at: *mut millpond_file) -> Outcome<()> {
    let id = FILES
        .insert(Arc::new(file))
        .map_err(|_| Failure::Refused(libc::EMFILE, "there are too many files"))?;
    // SAFETY: our caller's promise.
    unsafe { store(at, millpond_file { id }) }
}

/// Opens or creates the file at `path` with `options` (NULL: for reading), and stores its handle at `file`.
/// Only regular files can be opened.
///
/// Blocks as `open(2)` does, and while a keeper writes back dirty pages of the file from a dead process.
///
/// Returns 0, or the error of `open(2)` (-ENOENT, -EACCES, ...), or
/// -EBADF       there is no such engine
/// -EINVAL      the options contradict each other, or the file as already open; or direct I/O is unsupported
/// -E2BIG       an option that this version of the library does not know is not 0
/// -EFAULT      `path` or `file` is NULL
/// -EISDIR      it is a directory
/// -ENOTSUP     it is not a regular file; or `untorn_bytes` is set, and the file system, the device, the backing or the
///              engine's keeper can't do that: millpond_error_text() gives the reason
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
        unsafe { store_handle(opened, file) }
    })
}

/// `millpond_open` of an open descriptor, which must permit the access that `options` ask for. The options
/// that concern the cache apply, and O_TRUNC. The call duplicates the descriptor, so the caller may close
/// it. Its file offset is never used.
///
/// The kernel drops the POSIX locks (`F_SETLK`) of a process on a file when the process closes any
/// descriptor of that file. So `millpond_close` drops them, too. A call of this function that fails does
/// not, unless it fails to truncate (O_TRUNC) or to open the file again for direct I/O.
///
/// Returns as for `millpond_open`, and
/// -EBADF       also: `descriptor` is not open
/// -EINVAL      also: the descriptor does not permit the access that the options ask for
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
        // SAFETY: used during this call only; the kernel returns EBADF if it is not open.
        let theirs = unsafe { BorrowedFd::borrow_raw(descriptor) };
        let opened = engine.from_borrowed_fd(theirs, &options)?;
        // SAFETY: our caller's promise.
        unsafe { store_handle(opened, file) }
    })
}

/// Closes a file. The handle is invalid afterwards, even on an error.
///
/// Writes back the file's dirty pages, without making them durable, and blocks for that. Calls of other
/// threads on the file, requests in queues and views continue, and keep the file open. A call that begins
/// after this one has begun gets -EBADF.
///
/// Returns 0, or
/// -EBADF       there is no such file
/// -EDEADLK     called by a signal handler that interrupted another call of this thread; still open
/// or an error of a write that no sync has repaired yet, or of the write-back: the last report of it.
#[unsafe(no_mangle)]
pub extern "C" fn millpond_close(file: millpond_file) -> c_int {
    status(|| Ok(FILES.take(file.id)?.close_shared()?))
}

/// The largest `untorn_bytes` that the file system offers for the file.
///
/// Returns it, 0 if it offers none, or
/// -EBADF       there is no such file
#[unsafe(no_mangle)]
pub extern "C" fn millpond_untorn_bytes_max(file: millpond_file) -> i64 {
    call(|| Ok(i64::from(FILES.with(file.id, |file| file.untorn_bytes_max())??)))
}

/// The file's length, in bytes. Does not block, except with MILLPOND_BACKING_MAPPED: there the kernel is asked,
/// and a length that another process has changed waits for operations of this process.
///
/// Returns it, or
/// -EBADF       there is no such file
/// or, with MILLPOND_BACKING_MAPPED, the error of the kernel.
#[unsafe(no_mangle)]
pub extern "C" fn millpond_len(file: millpond_file) -> i64 {
    call(|| Ok(FILES.with(file.id, |file| file.len())?? as i64))
}
