//! Fuzz target: calls of the C library in any order, with valid, closed, mistyped and invented handles:
//! `cargo +nightly fuzz run calls`.
//!
//! Goal: no call crashes or panics, and a call with a bad handle fails without an effect. Method: the
//! target records all handles of an input and their state. Each call picks one of them, or a number. Memory
//! that requests use outlives all of them.

#![no_main]

use std::cell::UnsafeCell;
use std::collections::HashMap;
use std::ffi::{CString, c_char, c_int, c_void};
use std::ptr::null_mut;

use arbitrary::{Arbitrary, Unstructured};
use libfuzzer_sys::{arbitrary, fuzz_target};
// Links the functions declared below.
use millpond_c as _;

/// A handle; in C each type of handle is a struct of one number.
type Id = u64;

#[repr(C)]
#[derive(Default)]
struct EngineOptions {
    size: usize,
    cache_bytes: u64,
    dirty_bytes_max: u64,
    dirty_age_max_ms: u64,
    readahead_bytes_max: u64,
    reads_in_flight_max: u32,
    backend: u32,
    flags: u32,
    reserved: u32,
    keeper: usize,
}

#[repr(C)]
#[derive(Default, Clone, Copy)]
struct OpenOptions {
    size: usize,
    flags: u32,
    mode: u32,
    page_bytes: u32,
    write_mode: u32,
    backing: u32,
    extra: u32,
    untorn_bytes: u32,
    reserved: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct View {
    data: *const c_void,
    len: usize,
    id: Id,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Request {
    file: Id,
    user_data: u64,
    offset: u64,
    memory: *mut c_void,
    len: usize,
    op: u32,
    flags: u32,
    reserved: [u64; 2],
}

#[repr(C)]
struct Lane {
    number: usize,
    result: i64,
    request: Request,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Completion {
    user_data: u64,
    result: i64,
}

unsafe extern "C" {
    fn millpond_engine_create(options: *const EngineOptions, engine: *mut Id) -> c_int;
    fn millpond_engine_destroy(engine: Id) -> c_int;
    fn millpond_engine_cache_bytes(engine: Id) -> i64;
    fn millpond_engine_set_hit_path(engine: Id, on: c_int) -> c_int;
    fn millpond_engine_leave_keeper(engine: Id) -> c_int;
    fn millpond_engine_back_end(engine: Id, text: *mut c_char, bytes: usize) -> c_int;
    fn millpond_engine_dump(engine: Id, text: *mut c_char, bytes: usize) -> c_int;
    fn millpond_engine_stats(engine: Id, stats: *mut [u64; 17]) -> c_int;
    fn millpond_open(
        engine: Id,
        path: *const c_char,
        options: *const OpenOptions,
        file: *mut Id,
    ) -> c_int;
    fn millpond_open_descriptor(
        engine: Id,
        fd: c_int,
        options: *const OpenOptions,
        file: *mut Id,
    ) -> c_int;
    fn millpond_close(file: Id) -> c_int;
    fn millpond_len(file: Id) -> i64;
    fn millpond_read(file: Id, memory: *mut c_void, len: usize, offset: u64) -> i64;
    fn millpond_try_read(file: Id, memory: *mut c_void, len: usize, offset: u64) -> i64;
    fn millpond_write(file: Id, memory: *const c_void, len: usize, offset: u64) -> i64;
    fn millpond_append(file: Id, memory: *const c_void, len: usize, offset: *mut u64) -> i64;
    fn millpond_readv(file: Id, vectors: *const libc::iovec, count: c_int, offset: u64) -> i64;
    fn millpond_writev(file: Id, vectors: *const libc::iovec, count: c_int, offset: u64) -> i64;
    fn millpond_advise(file: Id, offset: u64, len: u64, advice: u32) -> c_int;
    fn millpond_truncate(file: Id, len: u64) -> c_int;
    fn millpond_punch_hole(file: Id, offset: u64, len: u64) -> c_int;
    fn millpond_zero_range(file: Id, offset: u64, len: u64) -> c_int;
    fn millpond_invalidate(file: Id, offset: u64, len: u64) -> c_int;
    fn millpond_seek_data(file: Id, offset: u64) -> i64;
    fn millpond_seek_hole(file: Id, offset: u64) -> i64;
    fn millpond_sync(file: Id) -> c_int;
    fn millpond_sync_range(file: Id, offset: u64, len: u64) -> c_int;
    fn millpond_write_back(file: Id) -> c_int;
    fn millpond_persist(file: Id, from: *const c_char, to: *const c_char, flags: u32) -> c_int;
    fn millpond_view_take(file: Id, offset: u64, len: usize, view: *mut View) -> c_int;
    fn millpond_view_release(view: *mut View) -> c_int;
    fn millpond_queue_create(engine: Id, capacity: usize, queue: *mut Id) -> c_int;
    fn millpond_queue_destroy(queue: Id) -> c_int;
    fn millpond_queue_submit(queue: Id, requests: *const Request, count: usize) -> i64;
    fn millpond_queue_wait(
        queue: Id,
        done: *mut Completion,
        min: usize,
        max: usize,
        timeout_ns: i64,
    ) -> i64;
    fn millpond_queue_cancel(queue: Id, user_data: u64) -> c_int;
    fn millpond_queue_eventfd(queue: Id) -> c_int;
    fn millpond_queue_counts(queue: Id, ready: *mut usize, in_flight: *mut usize) -> c_int;
    fn millpond_pipeline_run(
        engine: Id,
        depth: usize,
        step: Option<unsafe extern "C" fn(context: *mut c_void, lane: *mut Lane) -> c_int>,
        context: *mut c_void,
    ) -> c_int;
    fn millpond_buffers_alloc(
        engine: Id,
        count: usize,
        bytes: usize,
        memory: *mut *mut c_void,
    ) -> c_int;
    fn millpond_buffers_free(memory: *const *mut c_void, count: usize) -> c_int;
    fn millpond_error_text(text: *mut c_char, bytes: usize) -> c_int;
}

const MEMORY_BYTES: usize = 64 << 10;
/// The maximum length of files.
const FILE_BYTES: u64 = 1 << 20;

/// The memory of all requests; it is never read here. Aligned for direct I/O.
#[repr(align(4096))]
struct Memory(UnsafeCell<[u8; MEMORY_BYTES]>);
// SAFETY: only its address is used here.
unsafe impl Sync for Memory {}
static MEMORY: Memory = Memory(UnsafeCell::new([7; MEMORY_BYTES]));

#[derive(Clone, Copy, PartialEq, Debug)]
enum Kind {
    Engine,
    File,
    Queue,
    View,
}

/// The handles of an input so far.
#[derive(Default)]
struct Given {
    /// In order, with the closed ones.
    ids: Vec<Id>,
    live: HashMap<Id, Kind>,
    buffers: Vec<*mut c_void>,
}

impl Given {
    fn add(&mut self, id: Id, kind: Kind) {
        assert!(
            id != 0 && self.live.insert(id, kind).is_none() && !self.ids.contains(&id),
            "given out twice"
        );
        self.ids.push(id);
    }

    /// A handle, mostly a recorded one.
    fn pick(&self, input: &mut Unstructured) -> arbitrary::Result<Id> {
        let place = usize::from(u8::arbitrary(input)?);
        match self.ids.get(place % (self.ids.len() + 1)) {
            Some(&id) => Ok(id),
            None if place & 1 == 0 => Ok(0),
            None => u64::arbitrary(input),
        }
    }

    /// Checks the result of a call on `id`; returns whether it succeeded. With a bad handle it must fail.
    fn check(&self, id: Id, kind: Kind, result: i64) -> bool {
        assert_ne!(result, -i64::from(libc::ENOTRECOVERABLE), "a fault inside");
        let is_live = self.live.get(&id) == Some(&kind);
        assert!(is_live || result < 0, "{kind:?} {id:#x} is none, and the call returned {result}");
        result >= 0
    }
}

fn offset(input: &mut Unstructured) -> arbitrary::Result<u64> {
    let far = [u64::MAX, i64::MAX as u64, i64::MAX as u64 - 4096, 1 << 63];
    match u8::arbitrary(input)? {
        0..8 => Ok(far[usize::from(u8::arbitrary(input)?) % far.len()]),
        8..64 => u64::arbitrary(input),
        _ => Ok(u64::arbitrary(input)? % FILE_BYTES),
    }
}

/// An offset for a write, small enough to bound the file's length.
fn near(input: &mut Unstructured) -> arbitrary::Result<u64> {
    Ok(u64::arbitrary(input)? % FILE_BYTES)
}

/// Memory of a length, or NULL, now and then.
fn memory(input: &mut Unstructured) -> arbitrary::Result<(*mut c_void, usize)> {
    let len = usize::from(u16::arbitrary(input)?);
    let address = if u8::arbitrary(input)? < 8 { null_mut() } else { MEMORY.0.get().cast() };
    Ok((address, len))
}

fn vectors(input: &mut Unstructured) -> arbitrary::Result<Vec<libc::iovec>> {
    let count = u8::arbitrary(input)? % 5;
    (0..count)
        .map(|_| memory(input).map(|(iov_base, iov_len)| libc::iovec { iov_base, iov_len }))
        .collect()
}

/// One of a few paths; the last one is the directory.
fn path(number: u8) -> CString {
    // In memory, where syncs are cheap.
    let dir =
        std::path::Path::new("/dev/shm").join(format!("millpond-c-fuzz-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let path = if number % 4 == 3 { dir } else { dir.join((number % 4).to_string()) };
    CString::new(path.into_os_string().into_encoded_bytes()).unwrap()
}

fn open_options(input: &mut Unstructured) -> arbitrary::Result<OpenOptions> {
    let flags = [libc::O_RDONLY, libc::O_WRONLY, libc::O_RDWR, libc::O_RDWR | libc::O_CREAT];
    let extra = [
        0,
        0,
        0,
        libc::O_DIRECT,
        libc::O_DSYNC,
        libc::O_TRUNC | libc::O_CREAT,
        libc::O_EXCL,
        1 << 30,
    ];
    let choice = u8::arbitrary(input)?;
    let mut options =
        OpenOptions { size: size_of::<OpenOptions>(), mode: 0o600, ..OpenOptions::default() };
    options.flags = (flags[usize::from(choice & 3)] | extra[usize::from(choice >> 2 & 7)]) as u32;
    options.write_mode = u32::from(u8::arbitrary(input)? % 3);
    options.backing = u32::from(u8::arbitrary(input)? % 5);
    options.page_bytes = [0, 0, 0, 4096, 65536, 5000, 1 << 31, 1][usize::from(choice >> 5)];
    options.untorn_bytes = [0, 0, 0, 4096, 65536, 5000][usize::from(u8::arbitrary(input)? % 6)];
    if choice == 77 {
        options.size = usize::from(u8::arbitrary(input)?) % options.size;
    }
    Ok(options)
}

fn of_engine(given: &mut Given, input: &mut Unstructured) -> arbitrary::Result<()> {
    let id = given.pick(input)?;
    let mut stats = [0u64; 17];
    // SAFETY: the memory is valid and has the stated length.
    let result = unsafe {
        match u8::arbitrary(input)? % 11 {
            0 => millpond_engine_cache_bytes(id),
            10 => millpond_engine_dump(
                id,
                MEMORY.0.get().cast(),
                usize::from(u8::arbitrary(input)?),
            )
            .into(),
            1 => millpond_engine_set_hit_path(id, c_int::from(bool::arbitrary(input)?)).into(),
            2 => millpond_engine_leave_keeper(id).into(),
            3 => millpond_engine_back_end(
                id,
                MEMORY.0.get().cast(),
                usize::from(u8::arbitrary(input)?),
            )
            .into(),
            4 => {
                stats[0] =
                    if bool::arbitrary(input)? { 17 * 8 } else { u8::arbitrary(input)?.into() };
                stats[0] = stats[0].min(17 * 8);
                millpond_engine_stats(id, &mut stats).into()
            }
            5 => {
                let mut pieces = [null_mut(); 4];
                let count = usize::from(u8::arbitrary(input)?) % 5;
                let result = millpond_buffers_alloc(
                    id,
                    count,
                    usize::from(u16::arbitrary(input)?),
                    pieces.as_mut_ptr(),
                );
                if result == 0 {
                    given.buffers.extend(&pieces[..count]);
                }
                result.into()
            }
            6 => {
                let mut queue = 0;
                let result =
                    millpond_queue_create(id, usize::from(u8::arbitrary(input)?), &mut queue);
                if given.check(id, Kind::Engine, result.into()) {
                    given.add(queue, Kind::Queue);
                }
                result.into()
            }
            7 | 8 => pipeline(given, id, input)?,
            _ => {
                let result = millpond_engine_destroy(id);
                if given.check(id, Kind::Engine, result.into()) {
                    given.live.remove(&id);
                }
                return Ok(());
            }
        }
    };
    given.check(id, Kind::Engine, result);
    Ok(())
}

fn of_file(given: &mut Given, input: &mut Unstructured) -> arbitrary::Result<()> {
    let id = given.pick(input)?;
    // SAFETY: the memory is valid and has the stated length.
    let result: i64 = unsafe {
        match u8::arbitrary(input)? % 23 {
            0 => millpond_len(id),
            1 | 2 => {
                let (address, len) = memory(input)?;
                millpond_read(id, address, len, offset(input)?)
            }
            3 => {
                let (address, len) = memory(input)?;
                millpond_try_read(id, address, len, offset(input)?)
            }
            4 | 5 => {
                let (address, len) = memory(input)?;
                millpond_write(id, address, len, near(input)?)
            }
            6 => {
                let (address, len) = memory(input)?;
                millpond_append(id, address, len, null_mut())
            }
            7 => {
                let vectors = vectors(input)?;
                millpond_readv(id, vectors.as_ptr(), vectors.len() as c_int, offset(input)?)
            }
            8 => {
                let vectors = vectors(input)?;
                millpond_writev(id, vectors.as_ptr(), vectors.len() as c_int, near(input)?)
            }
            9 => millpond_readv(id, null_mut(), c_int::from(i8::arbitrary(input)?), 0),
            10 => millpond_advise(
                id,
                offset(input)?,
                offset(input)?,
                u32::from(u8::arbitrary(input)? % 9),
            )
            .into(),
            11 => millpond_truncate(id, near(input)?).into(),
            12 => millpond_punch_hole(id, offset(input)?, offset(input)?).into(),
            13 => millpond_zero_range(id, offset(input)?, offset(input)?).into(),
            14 => millpond_invalidate(id, offset(input)?, offset(input)?).into(),
            15 => millpond_seek_data(id, offset(input)?),
            16 => millpond_seek_hole(id, offset(input)?),
            17 => millpond_sync(id).into(),
            18 => millpond_sync_range(id, offset(input)?, offset(input)?).into(),
            19 => millpond_write_back(id).into(),
            20 => millpond_persist(
                id,
                path(u8::arbitrary(input)?).as_ptr(),
                path(u8::arbitrary(input)?).as_ptr(),
                u32::from(u8::arbitrary(input)? % 3),
            )
            .into(),
            21 => {
                let mut view = View { data: null_mut(), len: 0, id: 0 };
                let result = millpond_view_take(
                    id,
                    offset(input)?,
                    usize::from(u16::arbitrary(input)?),
                    &mut view,
                );
                if given.check(id, Kind::File, result.into()) {
                    given.add(view.id, Kind::View);
                }
                result.into()
            }
            _ => {
                let result = millpond_close(id);
                // The file is closed even on an error.
                given.check(id, Kind::File, result.into());
                if given.live.get(&id) == Some(&Kind::File) {
                    given.live.remove(&id);
                }
                return Ok(());
            }
        }
    };
    given.check(id, Kind::File, result);
    Ok(())
}

fn request(given: &Given, input: &mut Unstructured) -> arbitrary::Result<Request> {
    let (memory, len) = memory(input)?;
    let mut op = u32::from(u8::arbitrary(input)? % 8);
    // The array of vectors would have to exist: submit an empty one.
    let is_vectored = op == 3 || op == 4;
    let is_sync = op == 5 || op == 6;
    op |= u32::from(u8::arbitrary(input)? < 4) << 20;
    let (memory, len) = if is_vectored || is_sync { (null_mut(), 0) } else { (memory, len) };
    let offset = if is_sync { 0 } else { near(input)? };
    let (file, user_data) = (given.pick(input)?, u64::arbitrary(input)? % 8);
    let flags = u32::from(u8::arbitrary(input)? < 4);
    Ok(Request { file, user_data, offset, memory, len, op, flags, reserved: [0; 2] })
}

/// The script of a pipeline, and the handle to close while it runs.
struct Run {
    requests: Vec<Request>,
    close: Option<(usize, Id)>,
}

/// # Safety
///
/// `run` is a [`Run`].
unsafe extern "C" fn next_request(run: *mut c_void, lane: *mut Lane) -> c_int {
    // SAFETY: one thread calls, with the `Run` that it passed.
    let (run, lane) = unsafe { (&mut *run.cast::<Run>(), &mut *lane) };
    assert_ne!(lane.result, -i64::from(libc::ENOTRECOVERABLE), "a fault inside");
    assert!(lane.result <= MEMORY_BYTES as i64 || lane.request.op == 0);
    if let Some((_, id)) = run.close.take_if(|(left, _)| run.requests.len() <= *left) {
        // SAFETY: no memory.
        unsafe { millpond_close(id) };
    }
    let Some(request) = run.requests.pop() else { return 0 };
    lane.request = request;
    1
}

fn pipeline(given: &mut Given, id: Id, input: &mut Unstructured) -> arbitrary::Result<i64> {
    let mut run = Run { requests: Vec::new(), close: None };
    for _ in 0..u8::arbitrary(input)? % 12 {
        let mut request = request(given, input)?;
        if u8::arbitrary(input)? < 200 {
            // Whole blocks, of the file that is open for direct I/O.
            (request.file, request.op) = (given.ids[DIRECT], 1 + request.op % 2);
            (request.offset, request.len) = (request.offset & !4095, request.len & !4095);
        }
        run.requests.push(request);
    }
    if u8::arbitrary(input)? < 16 {
        let file = given.pick(input)?;
        if given.live.get(&file) == Some(&Kind::File) {
            run.close = Some((usize::from(u8::arbitrary(input)? % 12), file));
        }
    }
    let to_close = run.close;
    let depth = usize::from(u8::arbitrary(input)? % 10);
    // SAFETY: the step's context is a `Run`, and the lent memory is static.
    let result =
        unsafe { millpond_pipeline_run(id, depth, Some(next_request), (&raw mut run).cast()) };
    if let (Some((_, file)), None) = (to_close, run.close) {
        given.live.remove(&file);
    }
    Ok(result.into())
}

fn of_queue(given: &mut Given, input: &mut Unstructured) -> arbitrary::Result<()> {
    let id = given.pick(input)?;
    let mut counts = [0usize; 2];
    // SAFETY: the memory is valid and has the stated length; lent memory is static.
    let result: i64 = unsafe {
        match u8::arbitrary(input)? % 6 {
            0 | 1 => {
                let mut requests = Vec::new();
                for _ in 0..u8::arbitrary(input)? % 6 {
                    requests.push(request(given, input)?);
                }
                millpond_queue_submit(id, requests.as_ptr(), requests.len())
            }
            2 => {
                let mut done = [Completion::default(); 8];
                let (min, max) = (
                    usize::from(u8::arbitrary(input)? % 3),
                    usize::from(u8::arbitrary(input)? % 9),
                );
                let result = millpond_queue_wait(id, done.as_mut_ptr(), min, max, 1_000_000);
                let told = &done[..usize::try_from(result).unwrap_or(0)];
                assert!(
                    told.iter().all(|one| one.result != -i64::from(libc::ENOTRECOVERABLE)),
                    "a fault inside"
                );
                result
            }
            3 => millpond_queue_cancel(id, u64::arbitrary(input)? % 8).into(),
            4 => millpond_queue_eventfd(id).into(),
            _ => millpond_queue_counts(id, &mut counts[0], &mut counts[1]).into(),
        }
    };
    given.check(id, Kind::Queue, result);
    Ok(())
}

fn step(given: &mut Given, input: &mut Unstructured) -> arbitrary::Result<()> {
    let id = given.pick(input)?;
    // SAFETY: the memory is valid and has the stated length.
    unsafe {
        match u8::arbitrary(input)? % 16 {
            0 => {
                let sizes = [0, 1 << 14, 1 << 16, 1 << 20, 1000, u64::MAX];
                let cache_bytes = sizes[usize::from(u8::arbitrary(input)?) % sizes.len()];
                // The default would be a quarter of the machine's memory.
                let cache_bytes = if cache_bytes == 0 { 1 << 18 } else { cache_bytes };
                let whole = size_of::<EngineOptions>();
                let cut = usize::from(u8::arbitrary(input)?) % (whole + 1);
                let size = if u8::arbitrary(input)? < 8 { cut } else { whole };
                let mut options = EngineOptions { size, cache_bytes, ..EngineOptions::default() };
                options.backend = u32::from(u8::arbitrary(input)? % 4);
                options.flags = u32::from(u8::arbitrary(input)? % 8);
                options.reserved = u32::from(u8::arbitrary(input)? < 4);
                let mut engine = 0;
                let result = millpond_engine_create(&options, &mut engine);
                assert_ne!(result, -libc::ENOTRECOVERABLE, "a fault inside");
                if result == 0 {
                    given.add(engine, Kind::Engine);
                }
            }
            1 | 2 => {
                let options = open_options(input)?;
                let mut file = 0;
                let result = if bool::arbitrary(input)? {
                    millpond_open(id, path(u8::arbitrary(input)?).as_ptr(), &options, &mut file)
                } else {
                    // Standard input, and numbers that are not descriptors.
                    millpond_open_descriptor(
                        id,
                        c_int::from(i8::arbitrary(input)?.min(0)) * 1000,
                        &options,
                        &mut file,
                    )
                };
                if given.check(id, Kind::Engine, result.into()) {
                    given.add(file, Kind::File);
                }
            }
            3 => {
                let mut view = View { data: null_mut(), len: 0, id };
                if given.check(id, Kind::View, millpond_view_release(&mut view).into()) {
                    given.live.remove(&id);
                    assert_eq!(view.id, 0);
                }
            }
            4 => {
                if given.check(id, Kind::Queue, millpond_queue_destroy(id).into()) {
                    given.live.remove(&id);
                }
            }
            5 => {
                let place = usize::from(u8::arbitrary(input)?);
                let known = given.buffers.get(place).copied();
                let memory =
                    known.unwrap_or(std::ptr::without_provenance_mut(usize::arbitrary(input)?));
                let result = millpond_buffers_free(&memory, 1);
                assert_eq!(result == 0, known.is_some());
                if known.is_some() {
                    given.buffers.swap_remove(place);
                }
            }
            6 => {
                let len = usize::from(u8::arbitrary(input)?);
                assert!(millpond_error_text(MEMORY.0.get().cast(), len) >= 0);
            }
            7 => of_engine(given, input)?,
            8..12 => of_queue(given, input)?,
            _ => of_file(given, input)?,
        }
    }
    Ok(())
}

/// The index of the file that [`begin`] opens for direct I/O.
const DIRECT: usize = 2;

/// One object of each kind, so that calls find valid handles.
fn begin() -> Given {
    let mut given = Given::default();
    let mut of_engine = EngineOptions { size: size_of::<EngineOptions>(), ..Default::default() };
    // With the backend of threads: rings are many times slower to set up and to release.
    (of_engine.cache_bytes, of_engine.backend) = (1 << 16, 2);
    let flags = (libc::O_RDWR | libc::O_CREAT) as u32;
    let of_file = OpenOptions {
        size: size_of::<OpenOptions>(),
        flags,
        mode: 0o600,
        ..OpenOptions::default()
    };
    let of_direct = OpenOptions { flags: flags | libc::O_DIRECT as u32, ..of_file };
    let (mut engine, mut file, mut direct, mut queue) = (0, 0, 0, 0);
    // SAFETY: all memory is there.
    unsafe {
        assert_eq!(millpond_engine_create(&of_engine, &mut engine), 0);
        assert_eq!(millpond_open(engine, path(0).as_ptr(), &of_file, &mut file), 0);
        assert_eq!(millpond_open(engine, path(1).as_ptr(), &of_direct, &mut direct), 0);
        assert_eq!(millpond_queue_create(engine, 4, &mut queue), 0);
    }
    given.add(engine, Kind::Engine);
    given.add(file, Kind::File);
    given.add(direct, Kind::File);
    given.add(queue, Kind::Queue);
    given
}

fuzz_target!(|bytes: &[u8]| {
    let (mut given, mut input) = (begin(), Unstructured::new(bytes));
    while !input.is_empty() && step(&mut given, &mut input).is_ok() {}
    // In any order: a view may outlive its file, a file its engine.
    for (id, kind) in std::mem::take(&mut given.live) {
        // SAFETY: no memory.
        let result = unsafe {
            match kind {
                Kind::Engine => millpond_engine_destroy(id),
                Kind::File => millpond_close(id).min(0),
                Kind::Queue => millpond_queue_destroy(id),
                Kind::View => millpond_view_release(&mut View { data: null_mut(), len: 0, id }),
            }
        };
        // A close returns the error of failed writes.
        assert!(
            result == 0 || kind == Kind::File && result != -libc::EBADF,
            "{kind:?} {id:#x}: {result}"
        );
    }
    // SAFETY: allocated, and not in use.
    assert_eq!(unsafe { millpond_buffers_free(given.buffers.as_ptr(), given.buffers.len()) }, 0);
});
