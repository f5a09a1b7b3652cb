//! `fopen` and its kin.
//!
//! libc's streams read and write inside libc, where no hook sees them. So a stream on a file of
//! ours is one that libc calls back for: `fopencookie`, with functions that call our own `read`,
//! `write`, `lseek` and `close`. Two things differ from libc's own streams and are made up for:
//! `fileno` does not know such a stream's descriptor (ours does), and `freopen` refuses it (ours
//! does it). One can't be: libc gives such streams no wide characters. A program whose main
//! executable imports wide stream input gets libc's own streams, and those files are passed.
//!
//! The standard streams and streams on other files stay libc's own. So do all that `fopen` opens
//! without `--eager`.

use std::ffi::{CStr, c_char, c_int, c_void};

use libc::FILE;

use crate::files::seek::seek;
use crate::files::served_io::At;
use crate::files::table::{self, NumberState};
use crate::files::{process_locks, registry, streams, unserved, writeback_policy};
use crate::hooks::descriptor::{close, dup3};
use crate::hooks::io;
use crate::hooks::open::{before_open_by_libc, open_at};
use crate::hooks::process::release_to_libc;
use crate::page_cache;
use crate::runtime::cancel::point::without;
use crate::runtime::libc_calls;
use crate::runtime::link::format_link;
use crate::runtime::sys::{errno, fail, set_errno, sys, to_libc};
use crate::runtime::{config, section, thread};

#[repr(C)]
struct CookieFunctions {
    read: unsafe extern "C-unwind" fn(*mut c_void, *mut c_char, usize) -> isize,
    write: unsafe extern "C-unwind" fn(*mut c_void, *const c_char, usize) -> isize,
    seek: unsafe extern "C-unwind" fn(*mut c_void, *mut libc::off64_t, c_int) -> c_int,
    close: unsafe extern "C-unwind" fn(*mut c_void) -> c_int,
}

unsafe extern "C" {
    fn fopencookie(
        cookie: *mut c_void,
        mode: *const c_char,
        functions: CookieFunctions,
    ) -> *mut FILE;
    fn __fpurge(stream: *mut FILE);
}

/// The cookie is the descriptor itself.
fn fd_of(cookie: *mut c_void) -> c_int {
    cookie.addr() as c_int
}

unsafe extern "C-unwind" fn cookie_read(
    cookie: *mut c_void,
    buf: *mut c_char,
    len: usize,
) -> isize {
    // SAFETY: libc gives its stream's buffer.
    unsafe {
        let (fd, buf) = (fd_of(cookie), buf.cast());
        io::read_one(fd, buf, len, At::Offset, |fd, buf, len, _| libc_calls::read(fd, buf, len))
    }
}

unsafe extern "C-unwind" fn cookie_write(
    cookie: *mut c_void,
    buf: *const c_char,
    len: usize,
) -> isize {
    // SAFETY: libc gives its stream's buffer. It takes 0 for a failure, and wants no -1.
    unsafe {
        let (fd, buf) = (fd_of(cookie), buf.cast());
        io::write_one(fd, buf, len, At::Offset, |fd, buf, len, _| libc_calls::write(fd, buf, len))
            .max(0)
    }
}

unsafe extern "C-unwind" fn cookie_seek(
    cookie: *mut c_void,
    offset: *mut libc::off64_t,
    whence: c_int,
) -> c_int {
    // SAFETY: libc gives a pointer to the offset it wants, and to put the new one.
    unsafe {
        let moved = to_libc(seek(fd_of(cookie), *offset, whence)) as libc::off64_t;
        if moved < 0 {
            return -1;
        }
        *offset = moved;
    }
    0
}

unsafe extern "C-unwind" fn cookie_close(cookie: *mut c_void) -> c_int {
    // Where libc closes the number of its own streams, it is no cancellation point.
    // SAFETY: the stream owns its descriptor.
    without(|| unsafe { close(fd_of(cookie)) })
}

/// What `fopen`'s mode string asks of `open`.
struct StreamMode {
    flags: c_int,
    has_charset: bool,
}

impl StreamMode {
    /// `letters`: how many characters after the first glibc looks at, as [`FOPEN_LETTERS`].
    fn parse(mode: &CStr, letters: usize) -> Option<Self> {
        let text = mode.to_bytes();
        let has_charset = text.windows(5).any(|part| part == b",ccs=");
        let (access, mut flags) = match text.first()? {
            b'r' => (libc::O_RDONLY, 0),
            b'w' => (libc::O_WRONLY, libc::O_CREAT | libc::O_TRUNC),
            b'a' => (libc::O_WRONLY, libc::O_CREAT | libc::O_APPEND),
            _ => return None,
        };
        let mut access = access;
        for byte in text[1..].iter().take(letters) {
            match byte {
                b'+' => access = libc::O_RDWR,
                b'x' => flags |= libc::O_EXCL,
                b'e' => flags |= libc::O_CLOEXEC,
                _ => {}
            }
        }
        Some(Self { flags: access | flags, has_charset })
    }

    /// The same for `fopencookie`, which knows a `+` in second or third place only.
    fn plain(&self) -> &'static CStr {
        let is_updating = self.flags & libc::O_ACCMODE == libc::O_RDWR;
        match (self.flags & libc::O_APPEND != 0, self.flags & libc::O_CREAT != 0, is_updating) {
            (true, _, false) => c"a",
            (true, _, true) => c"a+",
            (false, true, false) => c"w",
            (false, true, true) => c"w+",
            (false, false, false) => c"r",
            (false, false, true) => c"r+",
        }
    }

    /// Streams that only append begin at the end of the file.
    fn seek_to_start(&self, fd: c_int) {
        let is_write_only = self.flags & libc::O_ACCMODE == libc::O_WRONLY;
        if self.flags & libc::O_APPEND != 0 && is_write_only {
            seek(fd, 0, libc::SEEK_END);
        }
    }
}

/// See [`StreamMode::parse`]; `freopen` reads as many.
const FOPEN_LETTERS: usize = 6;
const FDOPEN_LETTERS: usize = 4;

/// A stream on `fd`: one of ours if the file is, libc's own else.
unsafe fn make_stream(fd: c_int, mode: *const c_char, parsed: &StreamMode) -> *mut FILE {
    let is_file = matches!(table::get(fd), NumberState::File(_));
    let is_ours = is_file && !parsed.has_charset && !wide::is_used();
    if !is_ours {
        release_to_libc(fd);
        // SAFETY: the caller's duty.
        return unsafe { libc_calls::fdopen(fd, mode) };
    }
    let functions = CookieFunctions {
        read: cookie_read,
        write: cookie_write,
        seek: cookie_seek,
        close: cookie_close,
    };
    let cookie = std::ptr::without_provenance_mut(fd as usize);
    // SAFETY: the functions accept the cookie.
    let stream = unsafe { fopencookie(cookie, parsed.plain().as_ptr(), functions) };
    if !stream.is_null() {
        streams::insert(stream, fd);
    }
    stream
}

/// Before libc opens `path` for a stream of its own.
fn before_opening(path: *const c_char, mode: *const c_char) {
    if path.is_null() || mode.is_null() {
        return;
    }
    // SAFETY: the caller of the hook vouches for the text.
    if let Some(parsed) = StreamMode::parse(unsafe { CStr::from_ptr(mode) }, FOPEN_LETTERS) {
        before_open_by_libc(path, parsed.flags);
    }
}

/// A stream of libc's own.
unsafe fn open_by_libc(path: *const c_char, mode: *const c_char) -> *mut FILE {
    before_opening(path, mode);
    // SAFETY: the caller's duty.
    let stream = unsafe { libc_calls::fopen64(path, mode) };
    if !stream.is_null() {
        // SAFETY: just opened.
        forget_former(unsafe { libc_calls::fileno(stream) });
    }
    stream
}

pub unsafe fn fopen64(path: *const c_char, mode: *const c_char) -> *mut FILE {
    if thread::record().is_inside() || mode.is_null() || !config::is_eager() {
        // SAFETY: as the caller vouches to `fopen64`.
        return unsafe { open_by_libc(path, mode) };
    }
    // SAFETY: as the caller vouches to `fopen64`.
    let Some(parsed) = StreamMode::parse(unsafe { CStr::from_ptr(mode) }, FOPEN_LETTERS) else {
        set_errno(libc::EINVAL);
        return std::ptr::null_mut();
    };
    if parsed.has_charset {
        // Only libc converts characters.
        // SAFETY: as above.
        return unsafe { open_by_libc(path, mode) };
    }
    // SAFETY: as above.
    let fd = unsafe { open_at(libc::AT_FDCWD, path, parsed.flags, 0o666) };
    if fd < 0 {
        return std::ptr::null_mut();
    }
    parsed.seek_to_start(fd);
    // SAFETY: as above.
    let stream = unsafe { make_stream(fd, mode, &parsed) };
    if stream.is_null() {
        // SAFETY: opened above.
        without(|| unsafe { close(fd) });
    }
    stream
}

/// libc has opened a file of its own at `fd`: the state of the number is that of a file that was closed where no hook saw it.
fn forget_former(fd: c_int) {
    if page_cache::is_on() {
        page_cache::forget(fd);
    }
    if matches!(table::get(fd), NumberState::Unserved | NumberState::Left | NumberState::File(_))
        && !thread::record().is_inside()
    {
        section::run(|_| registry::lock().forget_lost(fd));
    }
}

pub unsafe fn fdopen(fd: c_int, mode: *const c_char) -> *mut FILE {
    // SAFETY: no memory involved.
    let flags = unsafe { sys!(libc::SYS_fcntl, fd, libc::F_GETFL) } as c_int;
    // SAFETY: as the caller vouches to `fdopen`.
    unsafe {
        let mode_text = (!mode.is_null()).then(|| CStr::from_ptr(mode));
        let parsed = mode_text.and_then(|mode| StreamMode::parse(mode, FDOPEN_LETTERS));
        match parsed {
            // The mode must not ask for more than the descriptor can do; libc returns the error.
            Some(parsed)
                if flags >= 0
                    && (flags & libc::O_ACCMODE == libc::O_RDWR
                        || parsed.flags & libc::O_ACCMODE == flags & libc::O_ACCMODE)
                    && parsed.flags & libc::O_APPEND == flags & libc::O_APPEND =>
            {
                make_stream(fd, mode, &parsed)
            }
            _ => {
                release_to_libc(fd);
                libc_calls::fdopen(fd, mode)
            }
        }
    }
}

/// Before libc closes the number `fd` of its stream.
unsafe fn before_libc_closes(stream: *mut FILE, fd: c_int) -> Option<writeback_policy::Closing> {
    if page_cache::is_on() && fd >= 0 {
        // SAFETY: the stream is open until libc closes it.
        unsafe { libc::fflush(stream) };
        page_cache::forget(fd);
        return None;
    }
    match table::get(fd) {
        NumberState::File(_) | NumberState::Claimed => {}
        slot @ (NumberState::Unserved | NumberState::Left) if !unserved::forget(fd, slot) => {}
        _ => return None,
    }
    // SAFETY: the stream is open until libc closes it.
    unsafe { libc::fflush(stream) };
    let closing = writeback_policy::before_close(fd);
    section::run(|_| registry::lock().forget(fd));
    closing
}

pub unsafe fn fclose(stream: *mut FILE) -> c_int {
    let mut closing = None;
    if !stream.is_null() && streams::lookup(stream, true).is_none() {
        // libc closes the number of its own streams by itself.
        // SAFETY: as the caller vouches to `fclose`.
        let fd = unsafe { libc_calls::fileno(stream) };
        // SAFETY: as above.
        closing = unsafe { before_libc_closes(stream, fd) };
    }
    // SAFETY: as above.
    let result = unsafe { libc_calls::fclose(stream) };
    process_locks::close_retired();
    match closing.and_then(writeback_policy::Closing::end) {
        Some(errno) if result == 0 => fail(errno) as c_int,
        _ => result,
    }
}

pub unsafe fn fileno(stream: *mut FILE) -> c_int {
    // SAFETY: as the caller vouches to `fileno`.
    let fd = unsafe { libc_calls::fileno(stream) };
    if fd >= 0 {
        return fd;
    }
    streams::lookup(stream, false).unwrap_or_else(|| fail(libc::EBADF) as c_int)
}

pub unsafe fn freopen64(path: *const c_char, mode: *const c_char, stream: *mut FILE) -> *mut FILE {
    let Some(old) = streams::lookup(stream, false) else {
        // SAFETY: as the caller vouches to `freopen64`.
        unsafe {
            let fd = libc_calls::fileno(stream);
            before_libc_closes(stream, fd);
            before_opening(path, mode);
            let stream = libc_calls::freopen64(path, mode, stream);
            process_locks::close_retired();
            return stream;
        }
    };
    // SAFETY: as above.
    unsafe { reopen_ours(path, mode, stream, old) }
}

/// Gives one of our streams another file, under its old number. The stream stays ours even if the
/// file is not: our functions pass files that are not served.
unsafe fn reopen_ours(
    path: *const c_char,
    mode: *const c_char,
    stream: *mut FILE,
    fd: c_int,
) -> *mut FILE {
    const NO_READS: c_int = 4;
    const NO_WRITES: c_int = 8;
    const APPENDING: c_int = 0x1000;
    // SAFETY: the caller vouches for stream, path and mode. A stream begins with its flags, three of which encode the mode.
    unsafe {
        libc::fflush(stream);
        let mut link = [0u8; 32];
        let path = if path.is_null() { format_link(fd, &mut link).as_ptr().cast() } else { path };
        let opened = StreamMode::parse(CStr::from_ptr(mode), FOPEN_LETTERS).map(|parsed| {
            let new = open_at(libc::AT_FDCWD, path, parsed.flags, 0o666);
            (parsed, new)
        });
        let is_bad_mode = opened.is_none();
        let Some((parsed, new)) = opened.filter(|(_, new)| *new >= 0) else {
            let told = if is_bad_mode { libc::EINVAL } else { errno() };
            fclose(stream);
            set_errno(told);
            return std::ptr::null_mut();
        };
        let flags = parsed.flags;
        parsed.seek_to_start(new);
        dup3(new, fd, flags & libc::O_CLOEXEC);
        without(|| close(new));
        __fpurge(stream);
        libc::clearerr(stream);
        let word = stream.cast::<c_int>();
        let mut bits = word.read() & !(NO_READS | NO_WRITES | APPENDING);
        match flags & libc::O_ACCMODE {
            libc::O_RDONLY => bits |= NO_WRITES,
            libc::O_WRONLY => bits |= NO_READS,
            _ => {}
        }
        if flags & libc::O_APPEND != 0 {
            bits |= APPENDING;
        }
        word.write(bits);
    }
    stream
}

mod wide {
    //! Whether the main executable reads or writes wide characters on streams: then it imports one
    //! of libc's functions for that.

    use std::sync::atomic::AtomicU32;
    use std::sync::atomic::Ordering::Relaxed;

    use crate::runtime::elf;

    const UNKNOWN: u32 = 0;
    const NO: u32 = 1;
    const YES: u32 = 2;
    static USED: AtomicU32 = AtomicU32::new(UNKNOWN);

    pub fn is_used() -> bool {
        match USED.load(Relaxed) {
            UNKNOWN => {
                let used = crate::runtime::section::run(|_| scan());
                USED.store(if used { YES } else { NO }, Relaxed);
                used
            }
            known => known == YES,
        }
    }

    /// Looks for the names among the strings of the executable's dynamic symbols.
    fn scan() -> bool {
        const NAMES: &[&[u8]] = &[
            b"fgetwc",
            b"getwc",
            b"fgetws",
            b"fputwc",
            b"putwc",
            b"fputws",
            b"fwide",
            b"fwprintf",
            b"vfwprintf",
            b"fwscanf",
            b"vfwscanf",
            b"ungetwc",
            b"fgetwc_unlocked",
            b"getwc_unlocked",
            b"fputwc_unlocked",
            b"putwc_unlocked",
            b"fgetws_unlocked",
            b"fputws_unlocked",
            b"__fwprintf_chk",
            b"__vfwprintf_chk",
            b"__fgetws_chk",
            b"__isoc99_fwscanf",
        ];
        let strings = elf::main_strings().unwrap_or_default();
        strings.split(|byte| *byte == 0).any(|name| NAMES.contains(&name))
    }
}
