//! Reads and writes that the lock-free hit did not settle.
//!
//! Each runs in a section, holds a pin on the description, and locks the offset if it uses it. The
//! outcome is either settled here, or left to the kernel: because the file is passed, because the
//! call is one that only the kernel can refuse as the kernel would, or because the engine could
//! not do it (the caller's memory faulted, no frame was free). That is always possible: writes are
//! through, or made to be, so the kernel has every byte; after a write that went past the engine, what the engine
//! has cached of the range is dropped.

use std::os::fd::RawFd;
use std::sync::Arc;

use millpond::{Error, File, ReadDone};

use crate::aio_context::Ending;
use crate::description::{Access, Description, Pin};
use crate::offset::{IN_KERNEL, OFFSET_END};
use crate::real::sys;
use crate::report::{self, Reason};
use crate::section;
use crate::table::{self, Slot};
use crate::thread::Record;
use crate::{identity, registry};

/// The kernel transfers at most this much in one call, and so do we.
pub const TRANSFER_BYTES_MAX: usize = 0x7fff_f000;
const IOV_MAX: usize = 1024;

/// What became of a call.
#[derive(Clone, Copy)]
pub enum Outcome {
    /// The result in the kernel's form: bytes, or a negative errno.
    Settled(isize),
    /// For the kernel; bytes count as passed for this reason, if the file counts.
    Kernel(Option<Reason>),
}

/// Where in the file.
#[derive(Clone, Copy)]
pub enum At {
    /// The description's offset, which moves.
    Offset,
    /// This byte.
    Byte(i64),
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    Read,
    Write,
}

/// The caller's memory, as it came.
#[derive(Clone, Copy)]
pub enum Memory {
    One(*mut u8, usize),
    Many(*const libc::iovec, usize),
}

/// The vectors of a call, copied so that they can't change under way.
enum Segments {
    One(*mut u8, usize),
    Many(Vec<libc::iovec>),
}

/// A lock-free read that hits; the fast half of `read` and `pread`.
///
/// # Safety
///
/// As `read`: `dst` is the caller's to give; it may be any address.
#[inline]
pub unsafe fn try_hit(fd: RawFd, dst: *mut u8, len: usize, at: At) -> Option<usize> {
    let record = crate::thread::record();
    if !record.is_warm() {
        return None;
    }
    record.enter();
    // SAFETY: the caller's duty.
    let done = unsafe { try_hit_inner(fd, dst, len, at) };
    record.exit();
    if let Some(bytes) = done {
        record.count_served(bytes as u64);
    }
    done
}

/// The same in a section, by a thread that the engine may not know yet.
unsafe fn try_first_hit(fd: RawFd, memory: Memory, at: At, record: &Record) -> Option<usize> {
    let Memory::One(dst, len) = memory else { return None };
    if record.is_warm() {
        return None;
    }
    table::description(fd)?.hit()?.prepare_thread();
    record.request().warm_up();
    // SAFETY: the caller's duty.
    unsafe { try_hit_inner(fd, dst, len, at) }
}

#[inline]
unsafe fn try_hit_inner(fd: RawFd, dst: *mut u8, len: usize, at: At) -> Option<usize> {
    let description = table::description(fd)?;
    if len > TRANSFER_BYTES_MAX {
        return None;
    }
    match at {
        At::Byte(offset) => {
            let offset = u64::try_from(offset).ok()?;
            let file = description.hit()?;
            // SAFETY: the caller's duty; a fault in `dst` gives None (see `fault`).
            unsafe { file.try_read_hit_raw(dst, len, offset) }
        }
        At::Offset => loop {
            let offset = description.offset.peek()?;
            // After the offset: one that `pass` left behind is met by no file.
            let file = description.hit()?;
            // SAFETY: as above.
            let bytes = unsafe { file.try_read_hit_raw(dst, len, offset) }?;
            let end = offset + bytes as u64;
            if end >= OFFSET_END {
                return None;
            }
            if description.offset.try_advance(offset, end) {
                return Some(bytes);
            }
        },
    }
}

/// A read by the slow path.
///
/// # Safety
///
/// As `readv`: the memory is the caller's to give; it may be any address.
#[cold]
pub unsafe fn read(fd: RawFd, memory: Memory, at: At) -> Outcome {
    let Some(record) = enterable(fd) else { return Outcome::Kernel(None) };
    if record.is_inside() {
        return Outcome::Kernel(None);
    }
    section::run(|record| {
        let pin = match find(fd) {
            Ok(pin) => pin,
            Err(reason) => return Outcome::Kernel(reason),
        };
        // SAFETY: the caller's duty.
        let outcome = unsafe {
            match try_first_hit(fd, memory, at, record) {
                Some(bytes) => Ok(bytes),
                None => transfer(&pin, memory, at, Direction::Read),
            }
        };
        settle(record, outcome)
    })
}

/// A write.
///
/// # Safety
///
/// As `writev`: the memory is the caller's to give; it may be any address.
pub unsafe fn write(fd: RawFd, memory: Memory, at: At) -> Outcome {
    let Some(record) = enterable(fd) else { return Outcome::Kernel(None) };
    if record.is_inside() {
        return Outcome::Kernel(None);
    }
    section::run(|record| {
        let pin = match find(fd) {
            Ok(pin) => pin,
            Err(reason) => return Outcome::Kernel(reason),
        };
        // SAFETY: the caller's duty.
        let outcome = unsafe { transfer(&pin, memory, at, Direction::Write) };
        settle(record, outcome)
    })
}

/// The thread's record, if `fd` is worth a closer look.
fn enterable(fd: RawFd) -> Option<&'static Record> {
    match table::get(fd) {
        Slot::Foreign | Slot::Internal => None,
        Slot::Unknown | Slot::File(_) => Some(crate::thread::record()),
    }
}

/// The description at `fd`, pinned. Finds out what an unknown number is.
fn find(fd: RawFd) -> Result<Pin, Option<Reason>> {
    loop {
        if let Some(pin) = Pin::of(fd) {
            return if pin.is_served() { Ok(pin) } else { Err(Some(pin.reason())) };
        }
        // Somebody else may have described it meanwhile, and the kernel does not have it then.
        if !describe(fd) {
            return Err(None);
        }
    }
}

/// Describes a number that was not seen opened: a regular file in a served directory is counted as
/// passed, anything else is foreign. In a section. Whether there was something to do.
#[cold]
pub fn describe(fd: RawFd) -> bool {
    if !matches!(table::get(fd), Slot::Unknown) || !table::is_initialised() {
        return false;
    }
    let Some(identity) = identity::identify(fd) else { return false };
    if !identity.is_regular || !identity::is_in_served_directory(fd) {
        table::note_foreign(fd);
        return true;
    }
    // SAFETY: no memory involved.
    let flags = unsafe { sys!(libc::SYS_fcntl, fd, libc::F_GETFL) };
    let mut registry = registry::lock();
    if matches!(table::get(fd), Slot::Unknown) && flags >= 0 {
        let access = Access::of_flags(flags as i32);
        registry.before_open(identity.id, access, false);
        registry.adopt(fd, identity.id, flags as i32, Some(Reason::Inherited));
    }
    flags >= 0
}

fn settle(record: &Record, result: Result<usize, Step>) -> Outcome {
    match result {
        Ok(bytes) => {
            record.count_served(bytes as u64);
            Outcome::Settled(bytes as isize)
        }
        Err(Step::Fail(errno)) => Outcome::Settled(-(errno as isize)),
        Err(Step::Passed(bytes)) => {
            report::count_bytes_passed(Reason::Engine, bytes);
            Outcome::Settled(bytes)
        }
        Err(Step::Kernel(reason)) => Outcome::Kernel(Some(reason)),
    }
}

/// How a transfer went, when not through the engine.
enum Step {
    /// This errno.
    Fail(i32),
    /// The kernel did it in our place, with this result.
    Passed(isize),
    /// The kernel has the file since a moment ago.
    Kernel(Reason),
}

unsafe fn transfer(
    description: &Description,
    memory: Memory,
    at: At,
    direction: Direction,
) -> Result<usize, Step> {
    let file = description.file().ok_or(Step::Kernel(Reason::Engine))?;
    let access = description.access();
    if (direction == Direction::Read && !access.read)
        || (direction == Direction::Write && !access.write)
    {
        return Err(Step::Fail(libc::EBADF));
    }
    if let At::Byte(offset) = at
        && offset < 0
    {
        return Err(Step::Fail(libc::EINVAL));
    }
    // SAFETY: the caller's duty.
    let segments = unsafe { Segments::of(memory) }.map_err(Step::Fail)?;
    let append = direction == Direction::Write && access.append;
    match at {
        At::Byte(offset) => {
            // SAFETY: the caller's duty.
            unsafe { segments.transfer(description, file, offset as u64, direction, append) }
                .map(|(_, bytes)| bytes)
        }
        At::Offset => {
            let locked = description.offset.lock();
            if !description.is_served() {
                description.offset.unlock(locked);
                return Err(Step::Kernel(description.reason()));
            }
            let is_kernels = locked == IN_KERNEL;
            let offset = if is_kernels {
                registry::kernel_offset(description.kernel_fd()).max(0) as u64
            } else {
                locked
            };
            // SAFETY: the caller's duty.
            let result = unsafe { segments.transfer(description, file, offset, direction, append) };
            let moved = match &result {
                Ok((start, bytes)) => start + *bytes as u64,
                Err(Step::Passed(bytes)) if *bytes > 0 && append => file.len().unwrap_or(offset),
                Err(Step::Passed(bytes)) if *bytes > 0 => offset + *bytes as u64,
                Err(_) => offset,
            };
            let moved = moved.min(OFFSET_END - 1);
            if is_kernels && moved != offset {
                registry::push_offset(description.kernel_fd(), moved);
                description.add_moved_in_kernel(moved.saturating_sub(offset));
            }
            description.offset.unlock(if is_kernels { locked } else { moved });
            result.map(|(_, bytes)| bytes)
        }
    }
}

impl Segments {
    fn bytes(&self) -> usize {
        match self {
            Segments::One(_, len) => *len,
            Segments::Many(vectors) => vectors.iter().map(|vector| vector.iov_len).sum(),
        }
    }

    unsafe fn of(memory: Memory) -> Result<Self, i32> {
        match memory {
            Memory::One(start, len) => Ok(Segments::One(start, len)),
            Memory::Many(_, count) if count > IOV_MAX => Err(libc::EINVAL),
            Memory::Many(vectors, count) => {
                let mut copy: Vec<libc::iovec> = Vec::with_capacity(count);
                // SAFETY: `copy` has room for `count` vectors; `vectors` may be any address.
                unsafe {
                    if !crate::fault::copy_in(
                        copy.as_mut_ptr().cast(),
                        vectors.cast(),
                        count * size_of::<libc::iovec>(),
                    ) {
                        return Err(libc::EFAULT);
                    }
                    copy.set_len(count);
                }
                let mut left = TRANSFER_BYTES_MAX;
                for vector in &mut copy {
                    if vector.iov_len > isize::MAX as usize {
                        return Err(libc::EINVAL);
                    }
                    vector.iov_len = vector.iov_len.min(left);
                    left -= vector.iov_len;
                }
                Ok(Segments::Many(copy))
            }
        }
    }

    /// Reads or writes through the engine, or through the kernel where the engine can't. Returns
    /// where the bytes begin, and how many.
    unsafe fn transfer(
        &self,
        description: &Description,
        file: &File,
        offset: u64,
        direction: Direction,
        append: bool,
    ) -> Result<(u64, usize), Step> {
        // SAFETY: the caller's duty; the engine reports memory that faults as `Error::Fault`.
        let result = unsafe {
            match (self, direction, append) {
                // The kernel clips the length, but not before it has checked the whole range.
                (Segments::One(_, len), _, _) if *len > TRANSFER_BYTES_MAX => None,
                (Segments::One(start, len), Direction::Read, _) => {
                    Some(file.read_raw_at(*start, *len, offset).map(|bytes| (offset, bytes)))
                }
                (Segments::Many(vectors), Direction::Read, _) => {
                    Some(file.read_vectored_raw_at(vectors, offset).map(|bytes| (offset, bytes)))
                }
                (Segments::One(start, len), Direction::Write, false) => {
                    Some(file.write_raw_at(*start, *len, offset).map(|bytes| (offset, bytes)))
                }
                (Segments::Many(vectors), Direction::Write, false) => {
                    Some(file.write_vectored_raw_at(vectors, offset).map(|bytes| (offset, bytes)))
                }
                (Segments::One(start, len), Direction::Write, true) => {
                    Some(file.append_raw(*start, *len))
                }
                (Segments::Many(vectors), Direction::Write, true) => {
                    Some(file.append_vectored_raw(vectors))
                }
            }
        };
        match result {
            Some(Ok(done)) => Ok(done),
            Some(Err(Error::Io { source, .. })) if direction == Direction::Write => {
                Err(Step::Fail(source.raw_os_error().unwrap_or(libc::EIO)))
            }
            // The kernel answers as the kernel does: EFAULT after the bytes that fit, EINVAL, EFBIG.
            _ => {
                if let Some(file) = description.late_file() {
                    // What fails to be written back stays cached, and is told by a sync.
                    let _ = file.begin_through();
                }
                // SAFETY: the kernel checks the addresses.
                let bytes = unsafe { self.through_kernel(description, offset, direction) };
                if direction == Direction::Write && bytes > 0 {
                    let start = if append { 0 } else { offset };
                    let len = if append { i64::MAX as u64 } else { bytes as u64 };
                    // If it fails, stale bytes would stay: then nobody may be served them.
                    if file.invalidate(start, len).is_err() {
                        description.stop_hits();
                    }
                }
                if let Some(file) = description.late_file() {
                    file.end_through();
                }
                Err(Step::Passed(bytes))
            }
        }
    }

    /// The same transfer as one system call on the engine's duplicate.
    unsafe fn through_kernel(
        &self,
        description: &Description,
        offset: u64,
        direction: Direction,
    ) -> isize {
        let fd = description.kernel_fd();
        // SAFETY: the kernel checks the addresses.
        unsafe {
            match (self, direction) {
                (Segments::One(start, len), Direction::Read) => {
                    sys!(libc::SYS_pread64, fd, *start, *len, offset)
                }
                (Segments::One(start, len), Direction::Write) => {
                    sys!(libc::SYS_pwrite64, fd, *start, *len, offset)
                }
                (Segments::Many(vectors), Direction::Read) => {
                    sys!(libc::SYS_preadv, fd, vectors.as_ptr(), vectors.len(), offset, 0)
                }
                (Segments::Many(vectors), Direction::Write) => {
                    sys!(libc::SYS_pwritev, fd, vectors.as_ptr(), vectors.len(), offset, 0)
                }
            }
        }
    }
}

/// A request for a served file that ends later (`aio`). It holds its description, and its vectors are
/// copies.
pub struct Request {
    pin: Pin,
    segments: Segments,
    offset: u64,
    direction: Direction,
    /// Of a write in mode back: durable, and if so, whether but for the file's times.
    durable: Option<bool>,
}

// SAFETY: the memory is valid, for whatever thread, until the request has ended: see `Request::prepare`.
unsafe impl Send for Request {}

/// Why there is no [`Request`].
pub enum Unserved {
    /// What the kernel says of it.
    Fail(i32),
    /// It is for the kernel; bytes count as passed for this reason, if the file counts.
    Kernel(Option<Reason>),
}

impl Request {
    /// What `preadv2` or `pwritev2` are asked for, if the file is served. In a section, and perhaps in
    /// [`File::start_together`].
    ///
    /// # Safety
    ///
    /// The memory is the caller's to give until the request has ended; it may be any address.
    pub unsafe fn prepare(
        fd: RawFd,
        memory: Memory,
        offset: i64,
        direction: Direction,
        flags: i32,
    ) -> Result<Self, Unserved> {
        const DURABLE: i32 = libc::RWF_DSYNC | libc::RWF_SYNC;
        if enterable(fd).is_none() {
            return Err(Unserved::Kernel(None));
        }
        if matches!(table::get(fd), Slot::Unknown) {
            // To describe it the registry is locked.
            File::start_now();
        }
        let pin = find(fd).map_err(Unserved::Kernel)?;
        let access = pin.access();
        let is_durable =
            direction == Direction::Write && flags & !DURABLE == 0 && pin.late_file().is_some();
        if flags != 0 && !is_durable {
            // Passing waits for the file's reads.
            File::start_now();
            registry::lock().pass_fd(fd, Reason::Changed);
            return Err(Unserved::Kernel(Some(Reason::Changed)));
        }
        if pin.file().is_none() {
            return Err(Unserved::Kernel(Some(Reason::Engine)));
        }
        let is_permitted = if direction == Direction::Read { access.read } else { access.write };
        if !is_permitted {
            return Err(Unserved::Fail(libc::EBADF));
        }
        let from = u64::try_from(offset).map_err(|_| Unserved::Fail(libc::EINVAL))?;
        if let Memory::One(_, len) = memory
            && offset.checked_add_unsigned(len as u64).is_none()
        {
            return Err(Unserved::Fail(libc::EINVAL));
        }
        let memory = match memory {
            Memory::One(start, len) => Memory::One(start, len.min(TRANSFER_BYTES_MAX)),
            many => many,
        };
        // SAFETY: the caller's duty.
        let segments = unsafe { Segments::of(memory) }.map_err(Unserved::Fail)?;
        if offset.checked_add_unsigned(segments.bytes() as u64).is_none() {
            return Err(Unserved::Fail(libc::EINVAL));
        }
        let durable = (flags != 0).then_some(flags & libc::RWF_SYNC == 0);
        Ok(Self { pin, segments, offset: from, direction, durable })
    }

    /// For [`Request::sync`], if there may be something that waits. In a section.
    pub fn to_sync(fd: RawFd) -> Option<Self> {
        let pin = Pin::of(fd)?;
        pin.late_file()?;
        let segments = Segments::One(std::ptr::null_mut(), 0);
        Some(Self { pin, segments, offset: 0, direction: Direction::Write, durable: None })
    }

    pub fn direction(&self) -> Direction {
        self.direction
    }

    pub fn bytes(&self) -> usize {
        self.segments.bytes()
    }

    /// Whether it is a write of whole pages, at most so many bytes, that is not to be durable: one that
    /// needs nothing from the device.
    pub fn is_write_of_pages(&self, bytes_max: usize) -> bool {
        const PAGE_BYTES: u64 = 4096;
        let bytes = self.bytes();
        self.direction == Direction::Write
            && self.durable.is_none()
            && !self.pin.access().append
            && bytes <= bytes_max
            && (self.offset | bytes as u64).is_multiple_of(PAGE_BYTES)
    }

    /// Carries it out, waiting for what it needs; the result in the kernel's form. In a section.
    ///
    /// # Safety
    ///
    /// It was prepared so.
    pub unsafe fn carry_out(&self) -> isize {
        let description = &*self.pin;
        let append = self.direction == Direction::Write && description.access().append;
        let file = description.file().filter(|_| description.is_served());
        // SAFETY: the caller's duty.
        let moved = unsafe {
            match file {
                Some(file) => {
                    let moved = self.segments.transfer(
                        description,
                        file,
                        self.offset,
                        self.direction,
                        append,
                    );
                    match settle(crate::thread::record(), moved.map(|(_, bytes)| bytes)) {
                        Outcome::Settled(result) => result,
                        Outcome::Kernel(_) => -(libc::EIO as isize),
                    }
                }
                // Passed since: D3 of `description`.
                None => self.segments.through_kernel(description, self.offset, self.direction),
            }
        };
        match self.durable {
            Some(data_only) if moved > 0 => match self.sync(data_only) {
                0 => moved,
                failed => failed,
            },
            _ => moved,
        }
    }

    /// `fsync` or `fdatasync` of what may wait. In a section.
    pub fn sync(&self, data_only: bool) -> isize {
        let synced = self
            .pin
            .late_file()
            .map_or(Ok(()), |file| if data_only { file.sync_data() } else { file.sync_all() });
        synced.map_or_else(|error| -(error.errno() as isize), |()| 0)
    }

    /// Has a thread of the engine do `work`, which may wait, and tell its result. In a section.
    pub fn aside(self, ending: Ending, work: impl FnOnce(&Self) -> isize + Send + 'static) {
        let Some(aside) = self.pin.file().map(File::aside) else {
            return ending.end(-(libc::EBADF as isize));
        };
        aside.run(Box::new(move || {
            section::run(|_| {
                let result = work(&self);
                // Before it is told: a file that was closed meanwhile is closed then.
                drop(self);
                ending.end(result);
            });
        }));
    }

    /// A read that does not wait: its result if it hits; else `ending` is told. In a section.
    ///
    /// # Safety
    ///
    /// It was prepared so.
    pub unsafe fn start(self, ending: Ending) -> Option<(Ending, isize)> {
        let Some(file) = self.pin.shared_file().map(Arc::clone) else {
            return Some((ending, -(libc::EBADF as isize)));
        };
        file.prepare_thread();
        let offset = self.offset;
        let vectors = match &self.segments {
            Segments::One(start, len) => {
                // SAFETY: the caller's duty; a fault gives None.
                if let Some(bytes) = unsafe { file.try_read_hit_raw(*start, *len, offset) } {
                    crate::thread::record().count_served(bytes as u64);
                    return Some((ending, bytes as isize));
                }
                vec![libc::iovec { iov_base: start.cast(), iov_len: *len }]
            }
            Segments::Many(vectors) => vectors.clone(),
        };
        let mut parts = Some((self, ending));
        let done = || -> ReadDone {
            let (request, ending) = parts.take().expect("called once");
            Box::new(move |result| request.told(ending, result))
        };
        // SAFETY: the caller's duty.
        let result = unsafe { file.start_read_raw(&vectors, offset, done) }?;
        let (request, ending) = parts.take().expect("not told otherwise");
        match result {
            Ok(bytes) => {
                crate::thread::record().count_served(bytes as u64);
                Some((ending, bytes as isize))
            }
            Err(error) => {
                request.told(ending, Err(error));
                None
            }
        }
    }

    /// A read has ended, on whatever thread: nothing here may wait.
    fn told(self, ending: Ending, result: millpond::Result<usize>) {
        let Ok(bytes) = result else {
            // The kernel answers as the kernel does.
            // SAFETY: it was prepared so.
            return self.aside(ending, |request| unsafe { request.carry_out() });
        };
        let aside = self.pin.file().map(File::aside);
        if let (Err(last), Some(aside)) = (self.pin.try_give_up(), aside) {
            aside.run(Box::new(move || section::run(|_| drop(last))));
        }
        crate::thread::record().count_served(bytes as u64);
        ending.end(bytes as isize);
    }
}
