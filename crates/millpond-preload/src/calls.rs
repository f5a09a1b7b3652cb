//! The table of calls that the library replaces, and how each is carried out.
//!
//! One row makes the exported function with its other names (`hooks/exports`), libc's own behind it
//! (`runtime/libc_calls`), the arm of `syscall(2)` (`hooks/by_number`), and a row of the tests. No other
//! list has the set of calls. `calls!(row)` passes every row to the macro
//! `row!`. The forms:
//!
//! ```text
//! CLASS fn NAME/ALIAS..(arguments) -> result => replacement, else MISSING, number SYS_.., x86 ..
//! CLASS fn NAME/ALIAS..(arguments) -> result; after work before libc's own, else MISSING, ..
//! CLASS number SYS_.. (arguments) => replacement: if libc has no function, or a different one
//! CLASS number SYS_.. (arguments); after work before the kernel's own; `x86` as above
//! CLASS variadic NAME => work before the call: a function of the first argument
//! CLASS routed NAME/ALIAS.. => a function that chooses the function to continue with all arguments
//! ```
//!
//! `else` marks that libc's own is called, and has the result, with ENOSYS, if libc has none.
//! Numbers after `x86` are those that newer architectures lack. Names are resolved where the
//! rows are used.
//!
//! The classes, by what mode back does:
//!
//! - `served`: by the engine, if the file is served.
//! - `settled`: by the kernel, after the cached writes were written back, or the kernel got the offset.
//! - `passed`: by the kernel, after the file was left to it.
//! - `watched`: no file is read or written, but the library has to track the call.
//!
//! libc functions that are not in this table are listed in `tests/programs/other_functions.txt`, with reasons;
//! system calls, in `tests/programs/other_system_calls.txt`.

#[rustfmt::skip]
macro_rules! calls {
    ($row:ident) => {
        // read, write: `io`
        $row! { served fn read/__read(fd: c_int, buf: *mut c_void, len: usize) -> isize
            => io::read_one(fd, buf, len, At::Offset,
                |fd, buf, len, _| libc_calls::read(fd, buf, len)),
            else -1, number SYS_read }
        $row! { served fn pread64/pread/__pread64(fd: c_int, buf: *mut c_void, len: usize,
            offset: Off) -> isize
            => io::read_one(fd, buf, len, At::Byte(offset),
                |fd, buf, len, offset| libc_calls::pread64(fd, buf, len, offset)), else -1, number SYS_pread64 }
        $row! { served fn __read_chk(fd: c_int, buf: *mut c_void, len: usize,
            buf_len: usize) -> isize
            => { io::check(len, buf_len);
                io::read_one(fd, buf, len, At::Offset,
                |fd, buf, len, _| libc_calls::read(fd, buf, len)) } }
        $row! { served fn __pread64_chk/__pread_chk(fd: c_int, buf: *mut c_void, len: usize,
            offset: Off, buf_len: usize) -> isize
            => { io::check(len, buf_len);
                io::read_one(fd, buf, len, At::Byte(offset),
                |fd, buf, len, offset| libc_calls::pread64(fd, buf, len, offset)) } }
        $row! { served fn write/__write(fd: c_int, buf: *const c_void, len: usize) -> isize
            => io::write_one(fd, buf, len, At::Offset,
                |fd, buf, len, _| libc_calls::write(fd, buf, len)),
            else -1, number SYS_write }
        $row! { served fn pwrite64/pwrite/__pwrite64(fd: c_int, buf: *const c_void, len: usize,
            offset: Off) -> isize
            => io::write_one(fd, buf, len, At::Byte(offset),
                |fd, buf, len, offset| libc_calls::pwrite64(fd, buf, len, offset)), else -1, number SYS_pwrite64 }
        $row! { served fn readv(fd: c_int, vectors: Vectors, count: c_int) -> isize
            => io::read(fd, io::many(vectors, count), At::Offset,
                move || libc_calls::readv(fd, vectors, count)), else -1, number SYS_readv }
        $row! { served fn writev(fd: c_int, vectors: Vectors, count: c_int) -> isize
            => io::write(fd, io::many(vectors, count), At::Offset,
                move || libc_calls::writev(fd, vectors, count)), else -1, number SYS_writev }
        // A file's offset has 64 bits: the system call's word of its upper half is ignored.
        $row! { served fn preadv64/preadv(fd: c_int, vectors: Vectors, count: c_int,
            offset: Off) -> isize
            => io::read(fd, io::many(vectors, count), At::Byte(offset),
                move || libc_calls::preadv64(fd, vectors, count, offset)), else -1, number SYS_preadv }
        $row! { served fn pwritev64/pwritev(fd: c_int, vectors: Vectors, count: c_int,
            offset: Off) -> isize
            => io::write(fd, io::many(vectors, count), At::Byte(offset),
                move || libc_calls::pwritev64(fd, vectors, count, offset)), else -1, number SYS_pwritev }
        $row! { served fn preadv64v2/preadv2(fd: c_int, vectors: Vectors, count: c_int,
            offset: Off, flags: c_int) -> isize
            => io::preadv2(fd, vectors, count, offset, flags), else -1 }
        $row! { served fn pwritev64v2/pwritev2(fd: c_int, vectors: Vectors, count: c_int,
            offset: Off, flags: c_int) -> isize
            => io::pwritev2(fd, vectors, count, offset, flags), else -1 }
        $row! { served number SYS_preadv2 (fd: c_int, vectors: Vectors, count: c_int, offset: Off,
            _upper: usize, flags: c_int)
            => io::preadv2(fd, vectors, count, offset, flags) }
        $row! { served number SYS_pwritev2 (fd: c_int, vectors: Vectors, count: c_int, offset: Off,
            _upper: usize, flags: c_int)
            => io::pwritev2(fd, vectors, count, offset, flags) }

        // open: `open`
        $row! { served fn openat64/openat(dir: c_int, path: Text, flags: c_int,
            mode: Mode) -> c_int
            => open::open_at(dir, path, flags, mode), else -1, number SYS_openat }
        $row! { served fn open64/open/__open64/__open(path: Text, flags: c_int,
            mode: Mode) -> c_int
            => open::open_at(HERE, path, flags, mode), x86 SYS_open }
        $row! { served fn creat64/creat(path: Text, mode: Mode) -> c_int
            => open::open_at(HERE, path, open::CREATE, mode), x86 SYS_creat }
        $row! { served fn __openat64_2/__openat_2(dir: c_int, path: Text, flags: c_int) -> c_int
            => open::fortified(dir, path, flags) }
        $row! { served fn __open64_2/__open_2(path: Text, flags: c_int) -> c_int
            => open::fortified(HERE, path, flags) }
        $row! { served number SYS_openat2 (dir: c_int, path: Text, how: *const u64, bytes: usize)
            => open::open_at2(dir, path, how, bytes) }
        $row! { served fn mkostemps64/mkostemps(template: *mut c_char, suffix_len: c_int,
            flags: c_int) -> c_int
            => open::make_temporary(template, suffix_len, flags), else -1 }
        $row! { served fn mkostemp64/mkostemp(template: *mut c_char, flags: c_int) -> c_int
            => open::make_temporary(template, 0, flags) }
        $row! { served fn mkstemps64/mkstemps(template: *mut c_char, suffix_len: c_int) -> c_int
            => open::make_temporary(template, suffix_len, 0) }
        $row! { served fn mkstemp64/mkstemp(template: *mut c_char) -> c_int
            => open::make_temporary(template, 0, 0) }
        $row! { served fn open_by_handle_at(mount: c_int, handle: *mut c_void,
            flags: c_int) -> c_int
            => open::open_by_handle_at(mount, handle, flags),
            else -1, number SYS_open_by_handle_at }
        $row! { passed fn pidfd_getfd(process: c_int, fd: c_int, flags: u32) -> c_int
            => open::pidfd_getfd(process, fd, flags), else -1, number SYS_pidfd_getfd }

        // The descriptor itself: `descriptor`
        $row! { served fn close/__close(fd: c_int) -> c_int
            => descriptor::close(fd), else -1, number SYS_close }
        $row! { served fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int
            => descriptor::close_range(first, last, flags), number SYS_close_range }
        $row! { served fn closefrom(first: c_int) -> () => descriptor::closefrom(first) }
        $row! { served fn dup(fd: c_int) -> c_int => descriptor::dup(fd), number SYS_dup }
        $row! { served fn dup2/__dup2(fd: c_int, new: c_int) -> c_int
            => descriptor::dup2(fd, new), x86 SYS_dup2 }
        $row! { served fn dup3(fd: c_int, new: c_int, flags: c_int) -> c_int
            => descriptor::dup3(fd, new, flags), number SYS_dup3 }
        $row! { watched fn login_tty(fd: c_int) -> c_int
            ; after descriptor::before_login_tty(fd), else -1 }
        $row! { watched fn fdopendir(fd: c_int) -> *mut c_void
            ; after descriptor::before_fdopendir(fd), else null_mut() }
        $row! { served fn fcntl64/fcntl/__fcntl(fd: c_int, command: c_int, arg: usize) -> c_int
            => descriptor::fcntl64(fd, command, arg), else -1, number SYS_fcntl }
        $row! { settled fn flock(fd: c_int, operation: c_int) -> c_int
            => descriptor::flock(fd, operation), else -1, number SYS_flock }
        $row! { settled fn lockf64/lockf(fd: c_int, command: c_int, len: Off) -> c_int
            ; after descriptor::before_lockf(fd), else -1 }
        $row! { served fn lseek64/lseek/__lseek/llseek(fd: c_int, offset: Off,
            whence: c_int) -> Off
            => descriptor::lseek64(fd, offset, whence), number SYS_lseek }

        // Calls that only the kernel carries out: `kernel`
        $row! { passed fn mmap64/mmap(address: *mut c_void, len: usize, prot: c_int, flags: c_int,
            fd: c_int, offset: Off) -> *mut c_void
            => kernel::mmap64(address, len, prot, flags, fd, offset), number SYS_mmap }
        $row! { passed fn truncate64/truncate(path: Text, len: Off) -> c_int
            => kernel::truncate64(path, len), else -1, number SYS_truncate }
        $row! { settled fn ftruncate64/ftruncate(fd: c_int, len: Off) -> c_int
            => kernel::ftruncate64(fd, len), number SYS_ftruncate }
        $row! { settled fn fallocate64/fallocate(fd: c_int, mode: c_int, offset: Off,
            len: Off) -> c_int
            => kernel::fallocate64(fd, mode, offset, len), else -1, number SYS_fallocate }
        $row! { settled fn posix_fallocate64/posix_fallocate(fd: c_int, offset: Off,
            len: Off) -> c_int
            => kernel::posix_fallocate64(fd, offset, len), else libc::ENOSYS }
        $row! { watched fn posix_fadvise64/posix_fadvise(fd: c_int, offset: Off, len: Off,
            advice: c_int) -> c_int
            ; after kernel::before_fadvise(fd, offset, len, advice), else libc::ENOSYS, number SYS_fadvise64 }
        $row! { passed fn ioctl(fd: c_int, request: c_ulong, arg: usize) -> c_int
            => kernel::ioctl(fd, request, arg), else -1, number SYS_ioctl }
        $row! { passed fn copy_file_range(from: c_int, from_offset: *mut Off, to: c_int,
            to_offset: *mut Off, len: usize, flags: u32) -> isize
            => kernel::copy_file_range(from, from_offset, to, to_offset, len, flags),
            else -1, number SYS_copy_file_range }
        $row! { passed fn sendfile64/sendfile(to: c_int, from: c_int, offset: *mut Off,
            len: usize) -> isize
            => kernel::sendfile64(to, from, offset, len), else -1, number SYS_sendfile }
        $row! { passed fn splice(from: c_int, from_offset: *mut Off, to: c_int,
            to_offset: *mut Off, len: usize, flags: u32) -> isize
            => kernel::splice(from, from_offset, to, to_offset, len, flags),
            else -1, number SYS_splice }
        $row! { passed fn sendmsg(socket: c_int, message: *const libc::msghdr,
            flags: c_int) -> isize
            ; after kernel::before_sendmsg(message), else -1, number SYS_sendmsg }
        $row! { passed fn sendmmsg(socket: c_int, messages: *mut libc::mmsghdr, count: u32,
            flags: c_int) -> c_int
            ; after kernel::before_sendmmsg(messages, count), else -1, number SYS_sendmmsg }
        $row! { passed fn aio_read64/aio_read(block: *mut c_void) -> c_int
            ; after kernel::release_to_aio(block), else -1 }
        $row! { passed fn aio_fsync64/aio_fsync(operation: c_int, block: *mut c_void) -> c_int
            ; after kernel::release_to_aio(block), else -1 }
        $row! { passed fn aio_write64/aio_write(block: *mut c_void) -> c_int
            ; after kernel::release_to_aio(block), else -1 }
        $row! { passed fn lio_listio64/lio_listio(mode: c_int, list: *const *mut c_void,
            count: c_int, event: *mut c_void) -> c_int
            ; after kernel::before_lio_listio(list, count), else -1 }
        $row! { passed fn vdprintf(fd: c_int, format: Text, args: *mut c_void) -> c_int
            ; after release_to_libc(fd), else -1 }
        $row! { passed fn __vdprintf_chk(fd: c_int, flag: c_int, format: Text,
            args: *mut c_void) -> c_int
            ; after release_to_libc(fd), else -1 }
        $row! { passed variadic dprintf => release_to_libc }
        $row! { passed variadic __dprintf_chk => release_to_libc }
        $row! { passed fn backtrace_symbols_fd/__backtrace_symbols_fd(addresses: *const *mut c_void,
            count: c_int, fd: c_int) -> ()
            ; after release_to_libc(fd), else () }

        // Size, times, durability: `stat`. Names with a version are what programs were linked to
        // before glibc 2.33.
        $row! { settled fn fstatat64/fstatat(dir: c_int, path: Text, buf: Stat,
            flags: c_int) -> c_int
            => stat::fstatat64(dir, path, buf, flags), number SYS_newfstatat }
        $row! { settled fn fstat64/fstat(fd: c_int, buf: Stat) -> c_int
            => stat::fstat64(fd, buf), number SYS_fstat }
        $row! { settled fn stat64/stat(path: Text, buf: Stat) -> c_int
            => stat::fstatat64(HERE, path, buf, 0), x86 SYS_stat }
        $row! { settled fn lstat64/lstat(path: Text, buf: Stat) -> c_int
            => stat::fstatat64(HERE, path, buf, NOFOLLOW), x86 SYS_lstat }
        $row! { settled fn __xstat64/__xstat(_version: c_int, path: Text, buf: Stat) -> c_int
            => stat::fstatat64(HERE, path, buf, 0) }
        $row! { settled fn __lxstat64/__lxstat(_version: c_int, path: Text, buf: Stat) -> c_int
            => stat::fstatat64(HERE, path, buf, NOFOLLOW) }
        $row! { settled fn __fxstat64/__fxstat(_version: c_int, fd: c_int, buf: Stat) -> c_int
            => stat::fstat64(fd, buf) }
        $row! { settled fn __fxstatat64/__fxstatat(_version: c_int, dir: c_int, path: Text,
            buf: Stat, flags: c_int) -> c_int
            => stat::fstatat64(dir, path, buf, flags) }
        $row! { settled fn statx(dir: c_int, path: Text, flags: c_int, mask: u32,
            buf: *mut libc::statx) -> c_int
            => stat::statx(dir, path, flags, mask, buf), number SYS_statx }
        // They look at every file of a tree.
        $row! { settled fn ftw64/ftw(path: Text, visit: *const c_void, fds: c_int) -> c_int
            ; after settle_all(), else -1 }
        $row! { settled fn nftw64/nftw(path: Text, visit: *const c_void, fds: c_int,
            flags: c_int) -> c_int
            ; after settle_all(), else -1 }
        $row! { settled fn fts64_open/fts_open(paths: Argv, options: c_int,
            compare: *const c_void) -> *mut c_void
            ; after settle_all(), else null_mut() }
        $row! { settled fn fts64_read/fts_read(tree: *mut c_void) -> *mut c_void
            ; after settle_all(), else null_mut() }
        $row! { settled fn fts64_children/fts_children(tree: *mut c_void, options: c_int) -> *mut c_void
            ; after settle_all(), else null_mut() }
        $row! { served fn fsync(fd: c_int) -> c_int
            => stat::sync(fd, false, || libc_calls::fsync(fd)), else -1, number SYS_fsync }
        $row! { served fn fdatasync(fd: c_int) -> c_int
            => stat::sync(fd, true, || libc_calls::fdatasync(fd)), else -1, number SYS_fdatasync }
        $row! { settled fn sync() -> (); after settle_all(), else (), number SYS_sync }
        $row! { settled fn syncfs(fd: c_int) -> c_int
            ; after settle_all(), else -1, number SYS_syncfs }
        $row! { settled fn sync_file_range(fd: c_int, offset: Off, len: Off, flags: u32) -> c_int
            => stat::sync_file_range(fd, offset, len, flags), else -1, number SYS_sync_file_range }

        // Metadata that a later write-back would change: `metadata`
        $row! { settled fn fchmod(fd: c_int, mode: Mode) -> c_int
            ; after settle_rights(fd), else -1, number SYS_fchmod }
        $row! { settled fn chmod(path: Text, mode: Mode) -> c_int
            ; after settle_rights_at(HERE, path, 0), else -1, x86 SYS_chmod }
        $row! { settled fn lchmod(path: Text, mode: Mode) -> c_int
            ; after settle_rights_at(HERE, path, NOFOLLOW), else -1 }
        $row! { settled fn fchmodat(dir: c_int, path: Text, mode: Mode, flags: c_int) -> c_int
            ; after settle_rights_at(dir, path, flags), else -1, number SYS_fchmodat2 }
        $row! { settled number SYS_fchmodat (dir: c_int, path: Text)
            ; after settle_rights_at(dir, path, 0) }
        $row! { settled fn fchown(fd: c_int, owner: u32, group: u32) -> c_int
            ; after settle_rights(fd), else -1, number SYS_fchown }
        $row! { settled fn chown(path: Text, owner: u32, group: u32) -> c_int
            ; after settle_rights_at(HERE, path, 0), else -1, x86 SYS_chown }
        $row! { settled fn lchown(path: Text, owner: u32, group: u32) -> c_int
            ; after settle_rights_at(HERE, path, NOFOLLOW), else -1, x86 SYS_lchown }
        $row! { settled fn fchownat(dir: c_int, path: Text, owner: u32, group: u32,
            flags: c_int) -> c_int
            ; after settle_rights_at(dir, path, flags), else -1, number SYS_fchownat }
        $row! { settled fn futimens(fd: c_int, times: Bytes) -> c_int; after flush_before_kernel_call(fd), else -1 }
        $row! { settled fn futimes(fd: c_int, times: Bytes) -> c_int; after flush_before_kernel_call(fd), else -1 }
        $row! { settled fn utimensat(dir: c_int, path: Text, times: Bytes, flags: c_int) -> c_int
            ; after settle_at(dir, path, flags), else -1, number SYS_utimensat }
        $row! { settled fn futimesat(dir: c_int, path: Text, times: Bytes) -> c_int
            ; after settle_at(dir, path, 0), else -1, x86 SYS_futimesat }
        $row! { settled fn utimes(path: Text, times: Bytes) -> c_int
            ; after settle_at(HERE, path, 0), else -1, x86 SYS_utimes }
        $row! { settled fn lutimes(path: Text, times: Bytes) -> c_int
            ; after settle_at(HERE, path, NOFOLLOW), else -1 }
        $row! { settled fn utime(path: Text, times: Bytes) -> c_int
            ; after settle_at(HERE, path, 0), else -1, x86 SYS_utime }
        $row! { settled fn fsetxattr(fd: c_int, name: Text, value: Bytes, len: usize,
            flags: c_int) -> c_int
            ; after settle_rights(fd), else -1, number SYS_fsetxattr }
        $row! { settled fn setxattr(path: Text, name: Text, value: Bytes, len: usize,
            flags: c_int) -> c_int
            ; after settle_rights_at(HERE, path, 0), else -1, number SYS_setxattr }
        $row! { settled fn lsetxattr(path: Text, name: Text, value: Bytes, len: usize,
            flags: c_int) -> c_int
            ; after settle_rights_at(HERE, path, NOFOLLOW), else -1, number SYS_lsetxattr }
        $row! { settled fn fremovexattr(fd: c_int, name: Text) -> c_int
            ; after settle_rights(fd), else -1, number SYS_fremovexattr }
        $row! { settled fn removexattr(path: Text, name: Text) -> c_int
            ; after settle_rights_at(HERE, path, 0), else -1, number SYS_removexattr }
        $row! { settled fn lremovexattr(path: Text, name: Text) -> c_int
            ; after settle_rights_at(HERE, path, NOFOLLOW), else -1, number SYS_lremovexattr }
        $row! { settled number SYS_setxattrat SYS_removexattrat (dir: c_int, path: Text,
            flags: c_int)
            ; after settle_rights_at(dir, path, flags) }
        $row! { settled number SYS_file_setattr (dir: c_int, path: Text, _attributes: usize,
            _bytes: usize, flags: c_int)
            ; after settle_rights_at(dir, path, flags) }
        $row! { settled fn link(old: Text, new: Text) -> c_int
            ; after settle_at(HERE, old, NOFOLLOW), else -1, x86 SYS_link }
        $row! { settled fn linkat(old_dir: c_int, old: Text, new_dir: c_int, new: Text,
            flags: c_int) -> c_int
            ; after settle_at(old_dir, old, flags & EMPTY_PATH), else -1, number SYS_linkat }
        $row! { settled fn rename(old: Text, new: Text) -> c_int
            ; after settle_at(HERE, old, NOFOLLOW), else -1, x86 SYS_rename }
        $row! { settled fn renameat(old_dir: c_int, old: Text, new_dir: c_int, new: Text) -> c_int
            ; after settle_at(old_dir, old, NOFOLLOW), else -1, number SYS_renameat }
        $row! { settled fn renameat2(old_dir: c_int, old: Text, new_dir: c_int, new: Text,
            flags: u32) -> c_int
            ; after settle_both(old_dir, old, new_dir, new, flags), else -1, number SYS_renameat2 }
        // From then on the kernel reads or writes the file by itself.
        $row! { settled fn swapon(path: Text, flags: c_int) -> c_int
            ; after settle_at(HERE, path, 0), else -1, number SYS_swapon }
        $row! { settled fn acct(path: Text) -> c_int
            ; after settle_at(HERE, path, 0), else -1, number SYS_acct }
        $row! { settled number SYS_finit_module (fd: c_int); after flush_before_kernel_call(fd) }
        $row! { settled number SYS_kexec_file_load (kernel: c_int, initial: c_int)
            ; after { flush_before_kernel_call(kernel); flush_before_kernel_call(initial) } }

        // Streams: `stdio`
        $row! { passed fn fopen64/fopen/_IO_fopen(path: Text, mode: Text) -> *mut FILE
            => stdio::fopen64(path, mode), else null_mut() }
        $row! { passed fn fdopen/_IO_fdopen(fd: c_int, mode: Text) -> *mut FILE
            ; after release_to_libc(fd), else null_mut() }
        $row! { passed fn freopen64/freopen(path: Text, mode: Text, stream: *mut FILE) -> *mut FILE
            => stdio::freopen64(path, mode, stream), else null_mut() }
        $row! { passed fn fclose/_IO_fclose(stream: *mut FILE) -> c_int
            => stdio::fclose(stream), else -1 }

        // Linux AIO: `aio`
        $row! { served fn io_setup(capacity: c_int, handle: *mut Handle) -> c_int
            => aio::io_setup(capacity, handle) }
        $row! { served fn io_destroy/io_queue_release(handle: Handle) -> c_int
            => aio::io_destroy(handle) }
        $row! { served fn io_submit(handle: Handle, count: c_long,
            blocks: *const *mut Iocb) -> c_int
            => aio::io_submit(handle, count, blocks) }
        $row! { served fn io_cancel(handle: Handle, block: *mut Iocb, result: *mut Event) -> c_int
            => aio::io_cancel(handle, block, result) }
        $row! { served fn io_getevents(handle: Handle, min: c_long, max: c_long,
            events: *mut Event, timeout: *const libc::timespec) -> c_int
            => aio::get_events(handle, min, max, events, timeout, None) }
        $row! { served fn io_pgetevents(handle: Handle, min: c_long, max: c_long,
            events: *mut Event, timeout: *const libc::timespec,
            set: *const libc::sigset_t) -> c_int
            => aio::io_pgetevents(handle, min, max, events, timeout, set) }
        $row! { served fn io_queue_init(capacity: c_int, handle: *mut Handle) -> c_int
            => aio::io_queue_init(capacity, handle) }
        $row! { served fn io_queue_run(handle: Handle) -> c_int => aio::io_queue_run(handle) }
        $row! { served fn io_queue_wait(handle: Handle, timeout: *const libc::timespec) -> c_int
            => aio::get_events(handle, 0, 0, null_mut(), timeout, None) }
        $row! { served number SYS_io_setup (capacity: c_int, handle: *mut Handle)
            => to_libc(aio::io_setup(capacity, handle) as isize) }
        $row! { served number SYS_io_destroy (handle: Handle)
            => to_libc(aio::io_destroy(handle) as isize) }
        $row! { served number SYS_io_submit (handle: Handle, count: c_long,
            blocks: *const *mut Iocb)
            => to_libc(aio::io_submit(handle, count, blocks) as isize) }
        $row! { served number SYS_io_cancel (handle: Handle, block: *mut Iocb, result: *mut Event)
            => to_libc(aio::io_cancel(handle, block, result) as isize) }
        $row! { served number SYS_io_getevents (handle: Handle, min: c_long, max: c_long,
            events: *mut Event, timeout: *const libc::timespec)
            => to_libc(aio::get_events(handle, min, max, events, timeout, None) as isize) }
        $row! { served number SYS_io_pgetevents (handle: Handle, min: c_long, max: c_long,
            events: *mut Event, timeout: *const libc::timespec, signals: usize)
            => to_libc(aio::get_events(handle, min, max, events, timeout, Some(signals)) as isize) }

        // io_uring: only the kernel sees its requests. liburing makes its system calls directly, without
        // libc; so the functions that set a ring up are replaced.
        $row! { passed fn io_uring_queue_init(entries: u32, ring: *mut c_void, flags: u32) -> c_int
            ; after release_all_files(), else -libc::ENOSYS }
        $row! { passed fn io_uring_queue_init_params(entries: u32, ring: *mut c_void,
            params: *mut c_void) -> c_int
            ; after release_all_files(), else -libc::ENOSYS }
        $row! { passed fn io_uring_queue_init_mem(entries: u32, ring: *mut c_void,
            params: *mut c_void, memory: *mut c_void, bytes: usize) -> c_int
            ; after release_all_files(), else -libc::ENOSYS }
        $row! { passed fn io_uring_setup(entries: u32, params: *mut c_void) -> c_int
            ; after release_all_files(), else -libc::ENOSYS, number SYS_io_uring_setup }
        $row! { passed number SYS_io_uring_enter SYS_io_uring_register (); after release_all_files() }

        // Processes: `process`
        $row! { passed routed vfork/__vfork => vfork::route_vfork }
        // It returns twice from one frame, which libc's `syscall` does not keep. So the child gets its own memory.
        $row! { passed x86 SYS_vfork () => libc::fork() }
        $row! { passed fn _Fork() -> libc::pid_t
            => fork_by(|| libc_calls::_Fork() as isize) as libc::pid_t, else -1 }
        $row! { passed x86 SYS_fork () => clone::fork() }
        $row! { passed number SYS_clone (flags: usize, _stack: usize, c: usize, d: usize, e: usize)
            => clone::clone(flags, c, d, e) }
        $row! { passed number SYS_clone3 (args: usize, bytes: usize) => clone::clone3(args, bytes) }
        $row! { passed routed clone/__clone => clone::route_clone }
        $row! { passed fn unshare(flags: c_int) -> c_int
            ; after process::before_unshare(flags), else -1, number SYS_unshare }
        // Calls before which the library retires from the program: `retirement`.
        $row! { passed fn prctl(option: c_int, a: usize, b: usize, c: usize, d: usize) -> c_int
            ; after process::before_prctl(option), else -1, number SYS_prctl }
        $row! { passed number SYS_seccomp (); after retirement::retire() }
        $row! { passed fn mlockall(flags: c_int) -> c_int
            => retirement::lock_memory(|| libc_calls::mlockall(flags)), else -1, number SYS_mlockall }
        $row! { passed number SYS_exit (); after process::before_thread_exit() }
        $row! { passed fn execve(path: Text, argv: Argv, env: Argv) -> c_int
            => process::exec(|| libc_calls::execve(path, argv, env)), else -1, number SYS_execve }
        $row! { passed fn execv(path: Text, argv: Argv) -> c_int
            => process::exec(|| libc_calls::execv(path, argv)), else -1 }
        $row! { passed fn execvp(path: Text, argv: Argv) -> c_int
            => process::exec(|| libc_calls::execvp(path, argv)), else -1 }
        $row! { passed fn execvpe(path: Text, argv: Argv, env: Argv) -> c_int
            => process::exec(|| libc_calls::execvpe(path, argv, env)), else -1 }
        $row! { passed fn fexecve(fd: c_int, argv: Argv, env: Argv) -> c_int
            => process::exec(|| libc_calls::fexecve(fd, argv, env)), else -1 }
        $row! { passed fn execveat(dir: c_int, path: Text, argv: Argv, env: Argv,
            flags: c_int) -> c_int
            => process::exec(|| libc_calls::execveat(dir, path, argv, env, flags)),
            else -1, number SYS_execveat }
        $row! { passed variadic execl => process::before_exec }
        $row! { passed variadic execle => process::before_exec }
        $row! { passed variadic execlp => process::before_exec }
        $row! { passed fn posix_spawn(pid: *mut libc::pid_t, path: Text, actions: Bytes,
            attributes: Bytes, argv: Argv, env: Argv) -> c_int
            ; after process::release_inherited_files(), else libc::ENOSYS }
        $row! { passed fn posix_spawnp(pid: *mut libc::pid_t, path: Text, actions: Bytes,
            attributes: Bytes, argv: Argv, env: Argv) -> c_int
            ; after process::release_inherited_files(), else libc::ENOSYS }
        $row! { passed fn posix_spawn_file_actions_adddup2(actions: *mut c_void, fd: c_int,
            new: c_int) -> c_int
            ; after process::release_spawned(fd), else libc::ENOSYS }
        $row! { passed fn system(command: Text) -> c_int
            ; after { point(); process::release_inherited_files() }, else -1 }
        $row! { passed fn popen/_IO_popen(command: Text, mode: Text) -> *mut FILE
            ; after process::release_inherited_files(), else null_mut() }
        // Runs a shell for each `$(...)`.
        $row! { passed fn wordexp(words: Text, expanded: *mut c_void, flags: c_int) -> c_int
            ; after process::release_inherited_files(), else -1 }
        $row! { settled fn _exit/_Exit(status: c_int) -> !
            => process::_exit(status), number SYS_exit_group }
        $row! { settled fn quick_exit(status: c_int) -> !
            ; after process::before_quick_exit(), else std::process::abort() }
        $row! { watched fn pthread_create(thread: *mut libc::pthread_t,
            attributes: *const libc::pthread_attr_t, start: Start, argument: *mut c_void) -> c_int
            => process::pthread_create(thread, attributes, start, argument), else libc::EAGAIN }

        // Changes of the process's access rights: `multi_open`
        $row! { passed fn setuid(user: Id) -> c_int
            ; after before_rights(), else -1, number SYS_setuid }
        $row! { passed fn setgid(group: Id) -> c_int
            ; after before_rights(), else -1, number SYS_setgid }
        $row! { passed fn setreuid(real: Id, user: Id) -> c_int
            ; after before_rights(), else -1, number SYS_setreuid }
        $row! { passed fn setregid(real: Id, group: Id) -> c_int
            ; after before_rights(), else -1, number SYS_setregid }
        $row! { passed fn setresuid(real: Id, user: Id, saved: Id) -> c_int
            ; after before_rights(), else -1, number SYS_setresuid }
        $row! { passed fn setresgid(real: Id, group: Id, saved: Id) -> c_int
            ; after before_rights(), else -1, number SYS_setresgid }
        $row! { passed fn setfsuid(user: Id) -> c_int
            ; after before_rights(), else -1, number SYS_setfsuid }
        $row! { passed fn setfsgid(group: Id) -> c_int
            ; after before_rights(), else -1, number SYS_setfsgid }
        $row! { passed fn setgroups(count: usize, groups: Bytes) -> c_int
            ; after before_rights(), else -1, number SYS_setgroups }
        $row! { passed fn chroot(path: Text) -> c_int
            ; after before_rights(), else -1, number SYS_chroot }
        $row! { passed fn setns(fd: c_int, kind: c_int) -> c_int
            ; after process::before_setns(fd), else -1, number SYS_setns }
        $row! { passed fn capset(header: Bytes, sets: Bytes) -> c_int
            ; after before_rights(), else -1, number SYS_capset }
        $row! { passed fn seteuid(user: Id) -> c_int
            ; after before_rights(), else -1 }
        $row! { passed fn setegid(group: Id) -> c_int
            ; after before_rights(), else -1 }
        $row! { passed fn initgroups(user: Text, group: Id) -> c_int
            ; after before_rights(), else -1 }

        // Requests to end a thread: `cancel`
        $row! { watched fn pthread_cancel(thread: libc::pthread_t) -> c_int
            => cancel::pthread_cancel(thread), else libc::ESRCH }
        $row! { passed fn pthread_setcanceltype(kind: c_int, old: *mut c_int) -> c_int
            ; after cancel::before_type(kind), else libc::EINVAL }

        // Handlers of signals: `signal`
        $row! { watched fn sigaction/__sigaction(signal: c_int, new: *const libc::sigaction,
            old: *mut libc::sigaction) -> c_int
            => signal::sigaction(signal, new, old), else -1 }
        $row! { watched fn signal/bsd_signal/ssignal(number: c_int,
            handler: sighandler_t) -> sighandler_t
            => signal::set_plain(number, handler, libc::SA_RESTART,
                |handler| libc_calls::signal(number, handler)), else libc::SIG_ERR }
        $row! { watched fn __sysv_signal/sysv_signal(number: c_int,
            handler: sighandler_t) -> sighandler_t
            => signal::set_plain(number, handler, libc::SA_RESETHAND | libc::SA_NODEFER,
                |handler| libc_calls::__sysv_signal(number, handler)), else libc::SIG_ERR }
        $row! { watched fn sigset(number: c_int, handler: sighandler_t) -> sighandler_t
            => signal::sigset(number, handler), else libc::SIG_ERR }
        $row! { watched fn sigaltstack(new: *const libc::stack_t, old: *mut libc::stack_t) -> c_int
            => signal::sigaltstack(new, old), else -1, number SYS_sigaltstack }
        // Whether a thread has faults open: `page_cache`.
        $row! { watched fn pthread_sigmask(how: c_int, new: Bytes, old: *mut c_void) -> c_int
            => signal::note_mask(|| libc_calls::pthread_sigmask(how, new, old)), else libc::ENOSYS }
        $row! { watched fn sigprocmask(how: c_int, new: Bytes, old: *mut c_void) -> c_int
            => signal::note_mask(|| libc_calls::sigprocmask(how, new, old)), else -1 }
        $row! { watched number SYS_rt_sigprocmask (); after signal::forget_mask() }
        $row! { watched routed longjmp => signal::route_longjmp }
        $row! { watched routed _longjmp => signal::route__longjmp }
        $row! { watched routed siglongjmp => signal::route_siglongjmp }
        $row! { watched routed __longjmp_chk => signal::route___longjmp_chk }
        $row! { watched fn sigignore(number: c_int) -> c_int => signal::sigignore(number), else -1 }

        // Other ways to all of these: `lookup`, `by_number`
        $row! { watched routed dlsym => lookup::route_dlsym }
        $row! { watched routed dlvsym => lookup::route_dlvsym }
        $row! { passed routed dlopen => lookup::route_dlopen }
        $row! { passed routed dlmopen => lookup::route_dlmopen }
        $row! { watched routed syscall => by_number::route }
    };
}
