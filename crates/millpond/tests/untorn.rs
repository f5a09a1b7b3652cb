//! Files with untorn blocks, on XFS: which opens are refused, contents by every operation, and errors.
//! `untorn_power` tests the blocks after a power cut.

mod common;

use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use millpond::direct::{DirectRequest, SegmentList};
use millpond::keeper::{Address, Server};
use millpond::{AsyncFile, BackendChoice, Backing, Engine, Error, File, OpenOptions, WriteMode};

use common::mount::Mount;
use common::requests::each;
use common::{Random, block_on, engine, has_uring, read_write, scaled, temp_dir};

const BLOCK: usize = 16384;
const DISK_BYTES: u64 = 320 << 20;

fn untorn(mode: WriteMode) -> OpenOptions {
    read_write().backing(Backing::Direct).write_mode(mode).untorn(BLOCK as u32)
}

fn back_ends() -> Vec<(&'static str, BackendChoice)> {
    let mut all = vec![("threads", BackendChoice::Threads)];
    if has_uring() {
        all.push(("uring", BackendChoice::Uring));
    }
    all
}

/// How a thread's system calls that write are answered, by seccomp.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Refused {
    /// Those with `RWF_ATOMIC`, with EOPNOTSUPP.
    Atomic,
    /// All others, with EPERM.
    Plain,
}

/// Has the kernel refuse those writes of the calling thread until the thread ends.
fn refuse_writes(refused: Refused) {
    const RWF_ATOMIC: u32 = 0x40;
    const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const HAS_BITS: u16 = (libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    // The low half of the sixth argument in `seccomp_data`.
    const FLAGS_AT: u32 = 16 + 5 * 8;
    let op = |code: u16, k: u32, jt: u8, jf: u8| libc::sock_filter { code, jt, jf, k };
    let error = |errno: i32| libc::SECCOMP_RET_ERRNO | errno as u32;
    let (atomic, plain) = match refused {
        Refused::Atomic => (error(libc::EOPNOTSUPP), libc::SECCOMP_RET_ALLOW),
        Refused::Plain => (libc::SECCOMP_RET_ALLOW, error(libc::EPERM)),
    };
    let mut program = [
        op(LOAD, 0, 0, 0),
        op(EQUAL, libc::SYS_pwritev2 as u32, 2, 0),
        op(EQUAL, libc::SYS_pwrite64 as u32, 3, 0),
        op(RETURN, libc::SECCOMP_RET_ALLOW, 0, 0),
        op(LOAD, FLAGS_AT, 0, 0),
        op(HAS_BITS, RWF_ATOMIC, 1, 0),
        op(RETURN, plain, 0, 0),
        op(RETURN, atomic, 0, 0),
    ];
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: the program outlives the calls, of which the kernel copies it.
    let done = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const filter) == 0
    };
    assert!(done, "seccomp: {}", std::io::Error::last_os_error());
}

/// Runs `body` on a thread of its own, of which the kernel refuses those writes.
fn with_refused(refused: Refused, body: impl FnOnce() + Send) {
    std::thread::scope(|scope| {
        let thread = scope.spawn(move || {
            refuse_writes(refused);
            body();
        });
        if let Err(panic) = thread.join() {
            std::panic::resume_unwind(panic);
        }
    });
}

#[track_caller]
fn is_unsupported(engine: &Engine, path: &std::path::Path, options: &OpenOptions, named: &str) {
    match engine.open(path, options) {
        Err(error @ Error::Unsupported { .. }) => {
            let text = error.to_string();
            assert!(text.contains(named), "{text:?} does not name {named:?}");
            assert_eq!(error.errno(), libc::EOPNOTSUPP);
        }
        other => panic!("{named}: {other:?}"),
    }
}

/// Goal: UT1, UT2: an open that can't promise whole blocks fails, and names the requirement.
#[test]
fn opens_that_cannot_promise_whole_blocks_are_refused() {
    let engine = engine(4 << 20, BackendChoice::Threads);
    let options = untorn(WriteMode::Back);
    for other in [Backing::Buffered, Backing::DirectInPlace, Backing::Uncached] {
        let path = temp_dir().path().join("unused");
        is_unsupported(&engine, &path, &options.clone().backing(other), "Backing::Direct");
    }
    let mapped = options.clone().backing(Backing::Mapped).write_mode(WriteMode::Through);
    is_unsupported(&engine, &temp_dir().path().join("unused"), &mapped, "Backing::Direct");
    for bytes in [0, 512, 12288, 131_072] {
        let error = engine.open("/nowhere", &options.clone().untorn(bytes)).unwrap_err();
        assert!(matches!(error, Error::InvalidInput { .. }), "{bytes}: {error}");
    }
    let error = engine.open("/nowhere", &options.clone().page_bytes(4096)).unwrap_err();
    assert!(error.to_string().contains("page size, 4096 at most"), "{error}");
    if let Some(tmpfs) = Mount::tmpfs(16 << 20) {
        is_unsupported(&engine, &tmpfs.point.join("file"), &options, "mkfs.xfs -m reflink=1");
    }
    if let Some(ext4) = Mount::ext4(32 << 20) {
        let path = ext4.point.join("file");
        is_unsupported(&engine, &path, &options, "atomic_write_unit_max_bytes");
        let plain = engine.open(&path, &read_write()).unwrap();
        assert_eq!(plain.untorn_bytes_max().unwrap(), 0);
    }
    let Some(xfs) = Mount::xfs(DISK_BYTES) else { return };
    let path = xfs.point.join("file");
    let write_only = OpenOptions::new().write(true).backing(Backing::Direct).untorn(BLOCK as u32);
    std::fs::write(&path, [0; BLOCK]).unwrap();
    is_unsupported(&engine, &path, &write_only, "open for reading");
    std::fs::write(&path, [0; BLOCK + 4096]).unwrap();
    is_unsupported(&engine, &path, &options, "not a multiple");
    // A file that is emptied has no such end.
    engine.open(&path, &options.clone().truncate(true)).unwrap();
    let file = engine.open(&path, &options).unwrap();
    assert_eq!(file.untorn_bytes_max().unwrap(), 65536);
    let error = engine.open(&path, &options.clone().untorn(4096)).unwrap_err();
    assert!(error.to_string().contains("blocks of 16384"), "{error}");
    let plain = engine.open(xfs.point.join("plain"), &read_write()).unwrap();
    let error = engine.open(xfs.point.join("plain"), &options).unwrap_err();
    assert!(error.to_string().contains("without untorn"), "{error}");
    drop(plain);
}

/// Goal: an engine with a keeper refuses such files: the keeper would write plain pages.
#[test]
fn an_engine_with_a_keeper_refuses_them() {
    let Some(xfs) = Mount::xfs(DISK_BYTES) else { return };
    let server = Server::bind(&Address::unique()).unwrap();
    let address = server.address().clone();
    let stopper = server.stopper();
    let thread = std::thread::spawn(move || server.serve(drop));
    let engine = Engine::builder().cache_bytes(4 << 20).keeper(address).build().unwrap();
    is_unsupported(&engine, &xfs.point.join("file"), &untorn(WriteMode::Back), "keeper");
    drop(engine);
    stopper.stop_when_idle();
    thread.join().unwrap().unwrap();
}

/// Goal: UT2: no operation gives the file a length that is not a multiple of the block.
#[test]
fn the_length_is_a_multiple_of_the_block() {
    let Some(xfs) = Mount::xfs(DISK_BYTES) else { return };
    let engine = engine(4 << 20, BackendChoice::Threads);
    for mode in [WriteMode::Through, WriteMode::Back] {
        let path = xfs.point.join(format!("{mode:?}"));
        let file = engine.open(&path, &untorn(mode)).unwrap();
        let direct = engine.open(&path, &untorn(mode).direct(true).bounce(true)).unwrap();
        file.write_all_at(&[1; 2 * BLOCK], 0).unwrap();
        let refused = |outcome: Result<(), Error>| {
            let error = outcome.unwrap_err();
            assert!(matches!(error, Error::InvalidInput { .. }), "{error}");
            assert_eq!(file.len().unwrap(), 2 * BLOCK as u64);
        };
        for handle in [&file, &direct] {
            refused(handle.write_at(&[2; 5000], 2 * BLOCK as u64).map(drop));
            refused(handle.write_at(&[2; 5000], 2 * BLOCK as u64 - 100).map(drop));
            refused(handle.append(&[2; 100]).map(drop));
            refused(handle.truncate(BLOCK as u64 + 4096));
            refused(handle.allocate(0, 2 * BLOCK as u64 + 1));
        }
        let asynchronous = AsyncFile::from(engine.open(&path, &untorn(mode)).unwrap());
        refused(block_on(asynchronous.write_at(&[2; 5000], 2 * BLOCK as u64)).map(drop));
        drop(asynchronous);
        file.append(&[3; BLOCK]).unwrap();
        // With a hole before it.
        file.write_all_at(&[4; 100], 5 * BLOCK as u64 - 100).unwrap();
        file.allocate(5 * BLOCK as u64, BLOCK as u64).unwrap();
        file.sync_all().unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 6 * BLOCK as u64);
        file.truncate(BLOCK as u64).unwrap();
        file.truncate(4 * BLOCK as u64).unwrap();
        drop((file, direct));
        let mut expected = vec![0; 4 * BLOCK];
        expected[..BLOCK].fill(1);
        assert!(std::fs::read(&path).unwrap() == expected, "{mode:?}");
    }
}

/// Goal: UT8: overwrites reserve no space beside the blocks. Method: one block of every 128 KiB is overwritten, of
/// which XFS would allocate the whole by default.
#[test]
fn overwrites_reserve_no_space_beside_the_blocks() {
    let Some(xfs) = Mount::xfs(DISK_BYTES) else { return };
    let engine = engine(4 << 20, BackendChoice::Threads);
    let (path, bytes) = (xfs.point.join("file"), 32 << 20);
    std::fs::write(&path, vec![1; bytes]).unwrap();
    let file = engine.open(&path, &untorn(WriteMode::Through)).unwrap();
    file.sync_all().unwrap();
    let free = || {
        let system = rustix::fs::statvfs(&xfs.point).unwrap();
        system.f_bfree * system.f_frsize
    };
    let before = free();
    for at in (0..bytes).step_by(128 << 10) {
        file.write_all_at(&[2; BLOCK], at as u64).unwrap();
    }
    file.sync_all().unwrap();
    let reserved = before.saturating_sub(free());
    assert!(reserved < bytes as u64 / 4, "{reserved} bytes");
}

/// Goal: UT8: a hint that the file has stays.
#[test]
fn a_hint_of_the_owner_stays() {
    let Some(xfs) = Mount::xfs(DISK_BYTES) else { return };
    let engine = engine(4 << 20, BackendChoice::Threads);
    let path = xfs.point.join("file");
    std::fs::write(&path, []).unwrap();
    let hint = |command: &str| {
        let output = std::process::Command::new("xfs_io").args(["-c", command]).arg(&path).output();
        String::from_utf8(output.unwrap().stdout).unwrap().split(' ').next().unwrap().to_owned()
    };
    for (given, expected) in [("0", "[16384]"), ("65536", "[65536]")] {
        hint(&format!("cowextsize {given}"));
        drop(engine.open(&path, &untorn(WriteMode::Back)).unwrap());
        assert_eq!(hint("cowextsize"), expected);
    }
}

/// A file, the handles by which it is changed, and its expected contents.
struct Model<'e> {
    engine: &'e Engine,
    cached: File,
    direct: File,
    expected: Vec<u8>,
    random: Random,
}

impl Model<'_> {
    /// A range of the file, or one that ends with a block beyond its end.
    fn range(&mut self, bytes_max: usize) -> (usize, usize) {
        let at = self.random.below(40 * BLOCK as u64) as usize;
        let len = 1 + self.random.below([300, 2 * BLOCK as u64, 200_000][at % 3]) as usize;
        let end = (at + len).min(bytes_max);
        let at = at.min(end - 1);
        if self.random.chance(400) {
            return (at / BLOCK * BLOCK, end.next_multiple_of(BLOCK));
        }
        (at, if end > self.expected.len() { end.next_multiple_of(BLOCK) } else { end })
    }

    fn write(&mut self) {
        let (at, end) = self.range(45 * BLOCK);
        let src: Vec<u8> = (at..end).map(|_| self.random.next() as u8).collect();
        let is_aligned = at % BLOCK == 0 && end % BLOCK == 0;
        match self.random.below(6) {
            0 => self.direct.write_all_at(&src, at as u64).unwrap(),
            1 if is_aligned => {
                let mut buffers = self.engine.alloc_buffers(1, src.len()).unwrap();
                buffers[0].copy_from_slice(&src);
                let mut list = Some(SegmentList::from_buffers(buffers));
                each(&mut self.engine.pipeline(2).unwrap(), |done| {
                    if let Some(done) = done {
                        assert_eq!(done.outcome.unwrap(), end - at);
                    }
                    Some(DirectRequest::write(&self.direct, list.take()?, at as u64))
                });
            }
            2 => {
                assert_eq!(self.cached.write_at_dsync(&src, at as u64).unwrap(), src.len());
            }
            _ => self.cached.write_all_at(&src, at as u64).unwrap(),
        }
        self.grow(end);
        self.expected[at..end].copy_from_slice(&src);
    }

    fn grow(&mut self, end: usize) {
        let len = self.expected.len().max(end);
        self.expected.resize(len, 0);
    }

    fn step(&mut self) {
        match self.random.below(12) {
            0 => {
                let (at, end) = self.range(45 * BLOCK);
                self.cached.punch_hole(at as u64, (end - at) as u64).unwrap();
                self.clear(at, end);
            }
            1 => {
                let (at, end) = self.range(45 * BLOCK);
                self.direct.zero_range(at as u64, (end - at) as u64).unwrap();
                self.clear(at, end);
            }
            2 => {
                let blocks = self.random.below(40) as usize;
                self.cached.truncate((blocks * BLOCK) as u64).unwrap();
                self.expected.resize(blocks * BLOCK, 0);
            }
            3 => {
                let (at, end) = self.range(45 * BLOCK);
                self.cached.allocate(at as u64, (end - at) as u64).unwrap();
                self.grow(end);
            }
            4 => self.cached.sync_data().unwrap(),
            _ => self.write(),
        }
    }

    fn clear(&mut self, at: usize, end: usize) {
        let len = self.expected.len();
        self.expected[at.min(len)..end.min(len)].fill(0);
    }

    fn check(&self, what: &str) {
        for handle in [&self.cached, &self.direct] {
            let mut found = vec![9; self.expected.len() + 100];
            let mut done = 0;
            loop {
                match handle.read_at(&mut found[done..], done as u64).unwrap() {
                    0 => break,
                    moved => done += moved,
                }
            }
            found.truncate(done);
            assert_eq!(found.len(), self.expected.len(), "{what}");
            let wrong = found.iter().zip(&self.expected).position(|(a, b)| a != b);
            assert_eq!(wrong, None, "{what}");
        }
    }
}

/// Goal: contents by every way of changing such a file, with pages of one and of several blocks; and UB1: the kernel
/// gets no plain write.
/// Method: random operations beside a model. With calls, the kernel refuses plain writes of the thread.
#[test]
fn contents_are_right_and_no_write_is_plain() {
    let Some(xfs) = Mount::xfs(DISK_BYTES) else { return };
    let mut random = Random::from_environment();
    for (name, backend) in back_ends() {
        for (mode, page_bytes) in [
            (WriteMode::Through, BLOCK as u32),
            (WriteMode::Back, BLOCK as u32),
            (WriteMode::Through, 65536),
            (WriteMode::Back, 65536),
        ] {
            let what = format!("{name}-{mode:?}-{page_bytes}");
            let (path, fork) = (xfs.point.join(&what), random.fork());
            let body = || {
                // Small: writes find no frame at times.
                let engine = engine(1 << 20, backend.clone());
                let options = untorn(mode).page_bytes(page_bytes);
                let cached = engine.open(&path, &options).unwrap();
                let direct = engine.open(&path, &options.direct(true).bounce(true)).unwrap();
                let engine = &engine;
                let expected = Vec::new();
                let mut model = Model { engine, cached, direct, expected, random: fork };
                for number in 0..scaled(250) {
                    model.step();
                    if number % 10 == 9 {
                        model.check(&what);
                    }
                }
                model.cached.sync_all().unwrap();
                assert!(std::fs::read(&path).unwrap() == model.expected, "{what}: beneath");
            };
            match name {
                "threads" => with_refused(Refused::Plain, body),
                _ => body(),
            }
        }
    }
}

/// Goal: UT7: a block that the kernel refuses after the open fails the write, or each sync; it is not written in
/// another way.
#[test]
fn a_refused_block_is_an_error_until_the_kernel_takes_it() {
    let Some(xfs) = Mount::xfs(DISK_BYTES) else { return };
    let engine = engine(4 << 20, BackendChoice::Threads);
    for mode in [WriteMode::Through, WriteMode::Back] {
        let path = xfs.point.join(format!("{mode:?}"));
        let file = engine.open(&path, &untorn(mode)).unwrap();
        file.write_all_at(&[1; 2 * BLOCK], 0).unwrap();
        file.sync_all().unwrap();
        with_refused(Refused::Atomic, || {
            let is_refused = |outcome: Result<(), Error>| {
                assert_eq!(outcome.unwrap_err().errno(), libc::EOPNOTSUPP, "{mode:?}");
            };
            match mode {
                WriteMode::Through => {
                    is_refused(file.write_at(&[2; BLOCK], 0).map(drop));
                    is_refused(file.write_at_dsync(&[2; 100], 0).map(drop));
                }
                _ => {
                    file.write_all_at(&[2; BLOCK], 0).unwrap();
                    is_refused(file.sync_data());
                    is_refused(file.sync_data());
                    is_refused(file.write_back());
                }
            }
        });
        let beneath = || {
            let mut bytes = [0; 2 * BLOCK];
            std::fs::File::open(&path).unwrap().read_exact_at(&mut bytes, 0).unwrap();
            bytes
        };
        assert!(beneath() == [1; 2 * BLOCK], "{mode:?}: written all the same");
        let mut cached = [0; BLOCK];
        file.read_exact_at(&mut cached, 0).unwrap();
        let expected = if mode == WriteMode::Through { 1 } else { 2 };
        assert!(cached == [expected; BLOCK], "{mode:?}");
        // Now the kernel takes it.
        file.sync_data().unwrap();
        assert!(beneath()[..BLOCK] == [expected; BLOCK], "{mode:?}");
    }
}

/// Goal: a full disk fails the write, which syncs nothing, and leaves the file's length and blocks whole.
#[test]
fn a_full_disk_fails_the_write() {
    let Some(xfs) = Mount::xfs(DISK_BYTES) else { return };
    for (name, backend) in back_ends() {
        let engine = engine(4 << 20, backend);
        let path = xfs.point.join(name);
        let file = engine.open(&path, &untorn(WriteMode::Through)).unwrap();
        file.write_all_at(&[1; 4 * BLOCK], 0).unwrap();
        file.sync_all().unwrap();
        let filler = xfs.point.join("filler");
        xfs.fill_up(&filler);
        xfs.fill_up(&filler);
        let src = vec![2; 64 * BLOCK];
        let error = loop {
            let len = file.len().unwrap();
            match file.write_at(&src, len) {
                Ok(moved) => assert_eq!(moved % BLOCK, 0),
                Err(error) => break error,
            }
        };
        assert_eq!(error.errno(), libc::ENOSPC, "{name}: {error}");
        let len = file.len().unwrap();
        assert_eq!((len % BLOCK as u64, std::fs::metadata(&path).unwrap().len()), (0, len));
        std::fs::remove_file(&filler).unwrap();
        // XFS frees the blocks of a removed file in the background.
        let deadline = Instant::now() + Duration::from_secs(30);
        while xfs.free_blocks() < 1 << 12 && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
        file.write_all_at(&src, len).unwrap();
        file.sync_all().unwrap();
    }
}

/// Goal: blocks of several threads arrive whole at readers past the cache.
#[test]
fn direct_readers_beside_write_back_see_whole_blocks() {
    let Some(xfs) = Mount::xfs(DISK_BYTES) else { return };
    const BLOCKS: u64 = 16;
    for (name, backend) in back_ends() {
        let engine = engine(4 << 20, backend);
        let path = xfs.point.join(name);
        let file = engine.open(&path, &untorn(WriteMode::Back)).unwrap();
        file.write_all_at(&vec![0; BLOCKS as usize * BLOCK], 0).unwrap();
        file.sync_all().unwrap();
        let direct = engine.open(&path, &untorn(WriteMode::Back).direct(true).bounce(true));
        let direct = direct.unwrap();
        std::thread::scope(|scope| {
            for writer in 0..3u64 {
                let file = &file;
                scope.spawn(move || {
                    let mut random = Random(writer);
                    for round in 0..scaled(60) {
                        let offset = random.below(BLOCKS) * BLOCK as u64;
                        file.write_all_at(&[round as u8; BLOCK], offset).unwrap();
                        if round % 4 == 0 {
                            file.sync_data().unwrap();
                        }
                    }
                });
            }
            let mut random = Random(9);
            let mut found = vec![0; BLOCK];
            for _ in 0..scaled(200) {
                let offset = random.below(BLOCKS) * BLOCK as u64;
                direct.read_exact_at(&mut found, offset).unwrap();
                assert!(found.iter().all(|byte| *byte == found[0]), "{name}: torn");
            }
        });
    }
}
