//! A cache that other processes read: hits beside a server's overwrites, evictions and changes of the limit. The protocol
//! is in the header of `cache/shared`.

mod common;

use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{Duration, Instant};

use millpond::internals::shared::{
    AttachedClient, ClientMemory, MemoryChoice, SharedCache, SharedClient, SharedFile, SharedReader,
};
use millpond::{Advice, BackendChoice, Engine, Error, File};

use common::own_client::{memory, own_client, pidfd};
use common::{Random, builder, in_own_process, read_write, scaled, skip, stress_time, temp_dir};

const PAGE: u64 = 4096;
/// The bytes of one write, and of one read.
const BLOCK: usize = 4 * PAGE as usize;
const CLIENT_OF: &str = "MILLPOND_TEST_CLIENT";

fn server(cache_bytes: u64, backend: BackendChoice) -> (Engine, SharedCache) {
    let engine = builder(cache_bytes, backend).shared(memory()).build().unwrap();
    let cache = engine.shared_cache().unwrap();
    (engine, cache)
}

/// The resident bytes of the cache's memory.
fn resident(attached: &AttachedClient) -> u64 {
    rustix::fs::fstat(attached.descriptor()).unwrap().st_blocks as u64 * 512
}

fn filled(path: &std::path::Path, engine: &Engine, blocks: u64, tag: u32) -> File {
    let file = engine.open(path, &read_write()).unwrap();
    file.advise(0, 0, Advice::Random).unwrap();
    for block in 0..blocks {
        file.write_all_at(&block_of(tag, block, 0), block * BLOCK as u64).unwrap();
    }
    file
}

/// The bytes of a block: in each word the file, the block and the version.
fn block_of(tag: u32, block: u64, version: u32) -> Vec<u8> {
    let word = u64::from(version) | block << 32 | u64::from(tag) << 56;
    word.to_ne_bytes().repeat(BLOCK / 8)
}

/// The version of a block that was read. Panics if the bytes are not all of one.
fn version_of(bytes: &[u8], tag: u32, block: u64) -> u32 {
    let first = u64::from_ne_bytes(bytes[..8].try_into().unwrap());
    let torn = bytes.chunks_exact(8).position(|word| word != first.to_ne_bytes());
    assert_eq!(torn, None, "block {block} is torn");
    let version = first as u32;
    assert_eq!(first, u64::from(version) | block << 32 | u64::from(tag) << 56, "of another block");
    version
}

#[test]
fn a_client_hits_what_its_server_has() {
    let dir = temp_dir();
    let (engine, cache) = server(16 << 20, BackendChoice::Threads);
    let file = filled(&dir.path().join("file"), &engine, 64, 1);
    let (client, _attached) = own_client(&cache);
    let reader = client.reader().unwrap();
    let shared = file.shared_file().unwrap();
    let mut bytes = vec![0; BLOCK];
    for block in 0..64 {
        let at = block * BLOCK as u64;
        assert_eq!(reader.try_read(shared, &mut bytes, at), Some(BLOCK));
        assert_eq!(version_of(&bytes, 1, block), 0);
        // A part of a page, and of two.
        assert_eq!(reader.try_read(shared, &mut bytes[..64], at + 64), Some(64));
        assert_eq!(reader.try_read(shared, &mut bytes[..64], at + PAGE - 32), Some(64));
    }
    assert_eq!(reader.hits(), (3 * 64, 64 * (BLOCK as u64 + 128)));
    // At the end, across it and beyond it.
    let end = 64 * BLOCK as u64;
    assert_eq!(reader.try_read(shared, &mut bytes, end - 100), Some(100));
    assert_eq!(reader.try_read(shared, &mut bytes, end), Some(0));
    assert_eq!(reader.try_read(shared, &mut bytes, end + 99), Some(0));
    assert_eq!(reader.try_read(shared, &mut bytes, u64::MAX), None);
    file.write_all_at(&block_of(1, 7, 9), 7 * BLOCK as u64).unwrap();
    assert_eq!(reader.try_read(shared, &mut bytes, 7 * BLOCK as u64), Some(BLOCK));
    assert_eq!(version_of(&bytes, 1, 7), 9, "an overwrite is seen at once");
    file.truncate(10 * BLOCK as u64).unwrap();
    assert_eq!(reader.try_read(shared, &mut bytes, 10 * BLOCK as u64), Some(0));
    assert_eq!(SharedFile::from_words(shared.to_words()), shared);
    drop(file);
    assert_eq!(reader.try_read(shared, &mut bytes, 0), None, "the file is closed");
    assert_eq!(reader.try_read(shared, &mut bytes, end), None, "and has no end");
}

/// Goal: a blob of the server's is read as a file is, with pages of any size.
#[test]
fn a_client_reads_blobs() {
    let (engine, cache) = server(16 << 20, BackendChoice::Threads);
    let (client, _attached) = own_client(&cache);
    let reader = client.reader().unwrap();
    for page_bytes in [4096, 16384, 65536] {
        let all: Vec<u8> = (0..300_000u32).map(|at| (at / 7) as u8).collect();
        let blob = engine.blob(all.len() as u64, page_bytes).unwrap();
        let shared = blob.shared_file().unwrap();
        let mut bytes = vec![0; 100_000];
        assert_eq!(reader.try_read(shared, &mut bytes, 1000), None);
        for fill in blob.claim(0..all.len() as u64).fills {
            let range = fill.range();
            fill.bring(&all[range.start as usize..range.end as usize]);
        }
        assert_eq!(reader.try_read(shared, &mut bytes, 1000), Some(100_000));
        assert_eq!(bytes, all[1000..101_000]);
        blob.forget(0..all.len() as u64);
        assert_eq!(reader.try_read(shared, &mut bytes, 1000), None);
    }
}

#[test]
fn a_private_cache_has_no_clients() {
    let engine = builder(1 << 20, BackendChoice::Threads).build().unwrap();
    assert!(engine.shared_cache().is_none());
    let blob = engine.blob(5000, 4096).unwrap();
    assert_eq!(blob.shared_file(), None);
}

/// Goal: the server refuses memory of a client that could make it fault.
#[test]
fn memory_of_no_client_is_refused() {
    let (_engine, cache) = server(1 << 20, BackendChoice::Threads);
    let flags = rustix::fs::MemfdFlags::ALLOW_SEALING;
    let unsealed = rustix::fs::memfd_create("unsealed", flags).unwrap();
    let length = rustix::fs::fstat(ClientMemory::create().unwrap().descriptor()).unwrap().st_size;
    rustix::fs::ftruncate(&unsealed, length as u64).unwrap();
    let attach = |memory: &OwnedFd| cache.attach(memory, pidfd(std::process::id())).map(drop);
    assert!(attach(&unsealed).is_err());
    let short = rustix::fs::memfd_create("short", flags).unwrap();
    rustix::fs::fcntl_add_seals(&short, rustix::fs::SealFlags::SHRINK).unwrap();
    let error = attach(&short).unwrap_err().to_string();
    assert!(error.contains("has 0 bytes") && error.contains(&format!("has {length}")), "{error}");
    let file: OwnedFd = std::fs::File::open("/proc/self/exe").unwrap().into();
    assert!(attach(&file).is_err());
    // The client refuses descriptors of other files.
    let not_a_cache = rustix::fs::memfd_create("zeros", flags).unwrap();
    rustix::fs::ftruncate(&not_a_cache, 8 << 20).unwrap();
    assert!(SharedClient::map(ClientMemory::create().unwrap(), &not_a_cache).is_err());
    assert!(SharedClient::map(ClientMemory::create().unwrap(), &file).is_err());
}

/// Incident: a server in a directory of a tmpfs that has no room died by SIGBUS. And an error did not name the directory.
#[test]
fn a_directory_without_room_is_refused() {
    let error = |at: &str, cache_bytes: u64| {
        let memory = MemoryChoice::Directory(at.into());
        let built = builder(cache_bytes, BackendChoice::Threads).shared(memory).build();
        built.map(drop).unwrap_err().to_string()
    };
    let nowhere = error("/no/such/directory", 1 << 20);
    assert!(nowhere.contains("/no/such/directory: No such file"), "{nowhere}");
    let root = error("/proc", 1 << 20);
    assert!(root.contains("/proc: not a tmpfs"), "{root}");
    let shm = rustix::fs::statvfs("/dev/shm").unwrap();
    let room = shm.f_bavail * shm.f_frsize;
    let asked = room + (64 << 20);
    if room == 0 || asked > 1 << 40 {
        return skip("/dev/shm has no limit");
    }
    let full = error("/dev/shm", asked);
    assert!(full.contains("in /dev/shm: the tmpfs has "), "{full}");
    assert!(full.contains(&format!("is to have {asked}")), "{full}");
}

/// Goal: 64 threads of a client read, the next gets no slot, and a slot returns.
#[test]
fn slots_are_bounded_and_return() {
    let (_engine, cache) = server(1 << 20, BackendChoice::Threads);
    let (client, _attached) = own_client(&cache);
    let mut all: Vec<SharedReader> = (0..64).map(|_| client.reader().unwrap()).collect();
    assert!(client.reader().is_none());
    all.pop();
    all.push(client.reader().unwrap());
    assert!(client.reader().is_none());
}

/// The status of a child of fork that runs `body`.
fn status_of_child(body: impl FnOnce() -> i32) -> i32 {
    // SAFETY: the tests' bodies make system calls and access memory only.
    unsafe {
        let child = libc::fork();
        if child == 0 {
            libc::_exit(body());
        }
        let mut status = 0;
        assert_eq!(libc::waitpid(child, &mut status, 0), child);
        assert!(libc::WIFEXITED(status), "{status:x}");
        libc::WEXITSTATUS(status)
    }
}

/// Goal: a client can't write to the cache: not by a store, not by mprotect, not by another mapping, not by a write.
#[test]
fn a_client_cannot_write() {
    in_own_process("a_client_cannot_write", Duration::from_secs(60), || {
        let (_engine, cache) = server(1 << 20, BackendChoice::Threads);
        let (client, attached) = own_client(&cache);
        let (at, bytes) = client.mapped();
        let fd = attached.descriptor().as_raw_fd();
        let write = libc::PROT_READ | libc::PROT_WRITE;
        let error = || std::io::Error::last_os_error().raw_os_error();
        // SAFETY: the calls fail; a mapping that does not would be one of its own.
        unsafe {
            assert_eq!(libc::mprotect(at.cast_mut().cast(), bytes, write), -1);
            assert_eq!(error(), Some(libc::EACCES));
            let flags = libc::MAP_SHARED;
            let mapped = libc::mmap(std::ptr::null_mut(), bytes, write, flags, fd, 0);
            assert_eq!((mapped, error()), (libc::MAP_FAILED, Some(libc::EACCES)));
            assert_eq!(libc::pwrite(fd, [1u8].as_ptr().cast(), 1, 0), -1);
            assert_eq!(error(), Some(libc::EBADF));
            assert_eq!(libc::ftruncate(fd, 0), -1);
            let hole = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            assert_eq!(libc::fallocate(fd, hole, 0, 4096), -1);
        }
        let mode = rustix::fs::fstat(attached.descriptor()).unwrap().st_mode;
        assert_eq!(mode & 0o777, 0o400, "opened again by its name in /proc, it can't be written");
        // A store, by the kernel.
        let zeros = std::fs::File::open("/dev/zero").unwrap();
        // SAFETY: the call fails, as the memory can't be written.
        let stored = unsafe { libc::read(zeros.as_raw_fd(), at.cast_mut().cast(), 1) };
        assert_eq!((stored, error()), (-1, Some(libc::EFAULT)));
    });
}

/// System calls of the thread that [`count_calls`] watches.
static CALLS: AtomicU64 = AtomicU64::new(0);

extern "C" fn count_call(_: libc::c_int) {
    CALLS.fetch_add(1, SeqCst);
}

/// From now on each system call of the calling thread is counted, and not made.
fn count_calls() {
    let jump =
        |code: u32, k: u32, jt: u8, jf: u8| libc::sock_filter { code: code as u16, jt, jf, k };
    let answer = |answer: u32| jump(libc::BPF_RET | libc::BPF_K, answer, 0, 0);
    let program = [
        // The number of the call.
        jump(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        jump(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, libc::SYS_rt_sigreturn as u32, 0, 1),
        answer(libc::SECCOMP_RET_ALLOW),
        answer(libc::SECCOMP_RET_TRAP),
    ];
    let program = libc::sock_fprog { len: 4, filter: program.as_ptr().cast_mut() };
    // SAFETY: the arguments are valid for the calls.
    unsafe {
        libc::signal(libc::SIGSYS, count_call as *const () as libc::sighandler_t);
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let set = libc::SECCOMP_SET_MODE_FILTER;
        assert_eq!(libc::syscall(libc::SYS_seccomp, set, 0, &raw const program), 0);
    }
}

/// Goal: a hit makes no system call.
/// Method: seccomp turns each call of the reading thread into a signal, which is counted.
#[test]
fn hits_make_no_system_call() {
    in_own_process("hits_make_no_system_call", Duration::from_secs(120), || {
        static IS_DONE: AtomicBool = AtomicBool::new(false);
        let dir = temp_dir();
        let (engine, cache) = server(16 << 20, BackendChoice::Threads);
        let file = filled(&dir.path().join("file"), &engine, 256, 1);
        let shared = file.shared_file().unwrap();
        let (client, _attached) = own_client(&cache);
        let reader = client.reader().unwrap();
        std::thread::spawn(move || {
            let end = 256 * BLOCK as u64;
            let mut bytes = vec![0; 2 * BLOCK];
            count_calls();
            for round in 0..200_000u64 {
                let at = round * 7919 * 64 % (end - 2 * BLOCK as u64);
                let len = [64, 4096, 2 * BLOCK][round as usize % 3];
                assert_eq!(reader.try_read(shared, &mut bytes[..len], at), Some(len));
            }
            assert_eq!(reader.try_read(shared, &mut bytes, end), Some(0));
            assert_eq!(CALLS.load(SeqCst), 0);
            // SAFETY: takes no memory.
            unsafe { libc::getpid() };
            IS_DONE.store(true, SeqCst);
            // The end of a thread would be a call.
            loop {
                std::hint::spin_loop();
            }
        });
        let started = Instant::now();
        while !IS_DONE.load(SeqCst) {
            assert!(started.elapsed() < Duration::from_secs(100), "the thread has failed");
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(CALLS.load(SeqCst), 1, "the call that was made is counted");
    });
}

/// A client in another process, which runs the same test as its server, and a socket to it.
struct ClientProcess {
    child: Child,
    socket: BufReader<UnixStream>,
    attached: AttachedClient,
}

impl ClientProcess {
    /// Starts the client of `test`, and sends it the cache.
    fn start(test: &str, cache: &SharedCache) -> ClientProcess {
        let (own, of_client) = UnixStream::pair().unwrap();
        let child = Command::new(std::env::current_exe().unwrap())
            .args([test, "--exact", "--nocapture", "--include-ignored", "--test-threads=1"])
            .env(CLIENT_OF, test)
            .stdin(Stdio::from(OwnedFd::from(of_client)))
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let mut socket = BufReader::new(own);
        let number = receive(&mut socket)[0];
        let memory = std::fs::File::open(format!("/proc/{}/fd/{number}", child.id())).unwrap();
        let attached = cache.attach(&memory.into(), pidfd(child.id())).unwrap();
        send(&mut socket, &[attached.descriptor().as_raw_fd() as u64]);
        ClientProcess { child, socket, attached }
    }

    fn send(&mut self, words: &[u64]) {
        send(&mut self.socket, words);
    }

    fn receive(&mut self) -> Vec<u64> {
        receive(&mut self.socket)
    }
}

fn send(socket: &mut BufReader<UnixStream>, words: &[u64]) {
    let text: Vec<String> = words.iter().map(u64::to_string).collect();
    socket.get_mut().write_all(format!("{}\n", text.join(" ")).as_bytes()).unwrap();
}

fn receive(socket: &mut BufReader<UnixStream>) -> Vec<u64> {
    let mut line = String::new();
    socket.read_line(&mut line).unwrap();
    line.split_whitespace().map(|word| word.parse().unwrap()).collect()
}

/// In the client's process: maps the cache, and returns the socket. `None`: this is the server.
fn as_client_of(test: &str) -> Option<(SharedClient, BufReader<UnixStream>)> {
    if std::env::var(CLIENT_OF).is_ok_and(|of| of == test) {
        // SAFETY: the descriptor is the socket of `ClientProcess::start`, and no other code uses it.
        let mut socket = BufReader::new(unsafe { UnixStream::from_raw_fd(0) });
        let memory = ClientMemory::create().unwrap();
        send(&mut socket, &[memory.descriptor().as_raw_fd() as u64]);
        let number = receive(&mut socket)[0];
        let server = std::os::unix::process::parent_id();
        let cache = std::fs::File::open(format!("/proc/{server}/fd/{number}")).unwrap();
        return Some((SharedClient::map(memory, &cache.into()).unwrap(), socket));
    }
    None
}

const BLOCKS: u64 = 512;

/// A block; half of the time one of the first four, so that reads meet writes.
fn any_block(random: &mut Random) -> u64 {
    let most = if random.chance(500) { 4 } else { BLOCKS };
    random.below(most)
}

/// Reads blocks of two files until the server says stop, and checks their bytes. Sends the reads that hit.
fn check_blocks(client: &SharedClient, socket: &mut BufReader<UnixStream>) {
    let words = receive(socket);
    let files = [0, 1].map(|at| SharedFile::from_words([words[2 * at], words[2 * at + 1]]));
    socket.get_ref().set_nonblocking(true).unwrap();
    let stop = AtomicBool::new(false);
    let hits: u64 = std::thread::scope(|scope| {
        let threads = [1, 2].map(|seed| {
            let (stop, files) = (&stop, &files);
            scope.spawn(move || {
                let reader = client.reader().unwrap();
                let mut random = Random(seed);
                let mut bytes = vec![0; BLOCK];
                let mut newest = vec![[0; 2]; BLOCKS as usize];
                while !stop.load(SeqCst) {
                    let (which, block) = (random.below(2) as usize, any_block(&mut random));
                    let at = block * BLOCK as u64;
                    // Also with a part of the block.
                    let from = random.below(4) * PAGE * (seed - 1);
                    let into = &mut bytes[from as usize..];
                    match reader.try_read(files[which], into, at + from) {
                        // A cut before the block, in the second file.
                        None | Some(0) => continue,
                        Some(read) => assert_eq!(read, BLOCK - from as usize),
                    }
                    if from > 0 {
                        let (first, rest) = bytes.split_at_mut(from as usize);
                        first.copy_from_slice(&rest[..8].repeat(first.len() / 8));
                    }
                    let zeros = which == 1 && bytes.iter().all(|byte| *byte == 0);
                    if !zeros {
                        let version = version_of(&bytes, which as u32 + 1, block);
                        let newest = &mut newest[block as usize][which];
                        assert!(version >= *newest, "block {block}: {version} after {newest}");
                        *newest = version;
                    }
                }
                reader.hits().0
            })
        });
        while socket.fill_buf().is_err() {
            std::thread::sleep(Duration::from_millis(1));
        }
        stop.store(true, SeqCst);
        threads.map(|thread| thread.join().unwrap()).iter().sum()
    });
    send(socket, &[hits]);
}

/// Goal: the bytes of a client's read are of one version, and never older than those of its reads before, during all
/// operations of the server.
/// Method: a process that reads blocks of two files, beside a server that overwrites, evicts, cuts and extends, changes
/// its limit, and closes and opens other files.
#[test]
fn another_process_reads_one_version() {
    const TEST: &str = "another_process_reads_one_version";
    if let Some((client, mut socket)) = as_client_of(TEST) {
        return check_blocks(&client, &mut socket);
    }
    let mut random = Random::from_environment();
    let dir = temp_dir();
    // Room for two thirds of the files.
    let limit = BLOCKS * BLOCK as u64 * 4 / 3;
    let (engine, cache) = server(limit, BackendChoice::Threads);
    let files =
        [1, 2].map(|tag| filled(&dir.path().join(format!("file {tag}")), &engine, BLOCKS, tag));
    let mut client = ClientProcess::start(TEST, &cache);
    let words: Vec<u64> =
        files.iter().flat_map(|file| file.shared_file().unwrap().to_words()).collect();
    client.send(&words);
    let mut versions = [[0u32; 2]; BLOCKS as usize];
    let mut bytes = vec![0; 4 * BLOCK];
    let until = Instant::now() + stress_time(4.0);
    let mut actions = 0u64;
    while Instant::now() < until {
        actions += 1;
        let (which, block) = (random.below(2) as usize, any_block(&mut random));
        let file = &files[which];
        let at = block * BLOCK as u64;
        match random.below(1000) {
            0..400 => {
                let version = &mut versions[block as usize][which];
                *version += 1;
                file.write_all_at(&block_of(which as u32 + 1, block, *version), at).unwrap();
            }
            400..950 => _ = file.read_at(&mut bytes, at).unwrap(),
            950..960 => file.advise(at, 8 * BLOCK as u64, Advice::DontNeed).unwrap(),
            960..970 => {
                // The second file only: its blocks read as zeros until they are written again.
                let cut = (block | 63) * BLOCK as u64;
                files[1].truncate(cut).unwrap();
                files[1].truncate(BLOCKS * BLOCK as u64).unwrap();
            }
            970..980 => {
                // Another file gets cores and frames.
                let path = dir.path().join("another");
                drop(filled(&path, &engine, 8, 3));
            }
            980..983 => {
                let lower = limit / 2 + random.below(limit / 2);
                engine.set_cache_bytes(lower).unwrap();
                engine.set_cache_bytes(limit).unwrap();
            }
            _ => file.sync_data().unwrap(),
        }
    }
    client.send(&[0]);
    let hits = client.receive()[0];
    println!("{hits} hits beside {actions} actions");
    assert!(client.child.wait().unwrap().success());
    assert!(hits > 1000, "{hits} hits");
    // The client's last reads may have been late.
    engine.set_cache_bytes(limit).unwrap();
    assert!(resident(&client.attached) <= limit, "{} of {limit}", resident(&client.attached));
}

/// Goal: a client that dies at any moment leaves nothing behind: the server's memory comes back, and other clients'
/// bytes stay right.
/// Method: clients are killed while they read; then the limit is lowered.
#[test]
fn killed_clients_leave_nothing() {
    const TEST: &str = "killed_clients_leave_nothing";
    if let Some((client, mut socket)) = as_client_of(TEST) {
        return check_blocks(&client, &mut socket);
    }
    let mut random = Random::from_environment();
    let dir = temp_dir();
    let limit = BLOCKS * BLOCK as u64 * 3;
    let (engine, cache) = server(limit, BackendChoice::Threads);
    let files =
        [1, 2].map(|tag| filled(&dir.path().join(format!("file {tag}")), &engine, BLOCKS, tag));
    let words: Vec<u64> =
        files.iter().flat_map(|file| file.shared_file().unwrap().to_words()).collect();
    let (own, attached) = own_client(&cache);
    let reader = own.reader().unwrap();
    let (mut bytes, mut versions) = (vec![0; BLOCK], [0u32; BLOCKS as usize]);
    let kills = scaled(100);
    for _ in 0..kills {
        let mut client = ClientProcess::start(TEST, &cache);
        client.send(&words);
        let until = Instant::now() + Duration::from_micros(random.below(6000));
        while Instant::now() < until {
            let block = random.below(BLOCKS);
            let at = block * BLOCK as u64;
            versions[block as usize] += 1;
            files[0].write_all_at(&block_of(1, block, versions[block as usize]), at).unwrap();
            assert_eq!(
                reader.try_read(files[0].shared_file().unwrap(), &mut bytes, at),
                Some(BLOCK)
            );
            assert_eq!(version_of(&bytes, 1, block), versions[block as usize]);
        }
        client.child.kill().unwrap();
        // Half of them die before the server knows, and it finds that out itself.
        if random.chance(500) {
            client.child.wait().unwrap();
            drop(client);
            continue;
        }
        let lower = limit / 2;
        files.iter().for_each(|file| file.sync_data().unwrap());
        assert_eq!(reach(&engine, lower), lower);
        assert!(resident(&client.attached) <= lower, "{} of {lower}", resident(&client.attached));
        engine.set_cache_bytes(limit).unwrap();
        files.iter().for_each(|file| drop(file.read_at(&mut vec![0; 1 << 20], 0)));
        for block in 0..BLOCKS {
            files[0].read_exact_at(&mut bytes, block * BLOCK as u64).unwrap();
        }
        client.child.wait().unwrap();
    }
    drop(attached);
}

/// Lowers the limit until it is reached. Returns the limit.
fn reach(engine: &Engine, lower: u64) -> u64 {
    let until = Instant::now() + Duration::from_secs(20);
    loop {
        let limit = engine.set_cache_bytes(lower).unwrap();
        if limit == lower || Instant::now() > until {
            return limit;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Goal: a client that is stopped, maybe in an attempt, keeps the server from nothing: a lower limit is reached, files are
/// opened, and reads and writes go on. The limit holds when the client goes on.
#[test]
fn a_stopped_client_holds_nothing_up() {
    const TEST: &str = "a_stopped_client_holds_nothing_up";
    if let Some((client, mut socket)) = as_client_of(TEST) {
        return check_blocks(&client, &mut socket);
    }
    let dir = temp_dir();
    let limit = BLOCKS * BLOCK as u64 * 3;
    let (engine, cache) = server(limit, BackendChoice::Threads);
    let files =
        [1, 2].map(|tag| filled(&dir.path().join(format!("file {tag}")), &engine, BLOCKS, tag));
    let words: Vec<u64> =
        files.iter().flat_map(|file| file.shared_file().unwrap().to_words()).collect();
    let mut client = ClientProcess::start(TEST, &cache);
    client.send(&words);
    let id = client.child.id() as libc::pid_t;
    // SAFETY: a signal to a child of this process.
    let signal = |signal| assert_eq!(unsafe { libc::kill(id, signal) }, 0);
    let mut lower = limit;
    for _ in 0..100 {
        std::thread::sleep(Duration::from_millis(2));
        signal(libc::SIGSTOP);
        files.iter().for_each(|file| file.sync_data().unwrap());
        lower -= 128 << 10;
        assert_eq!(reach(&engine, lower), lower);
        drop(engine.open(dir.path().join("another"), &read_write()).unwrap());
        let mut bytes = vec![0; BLOCK];
        for block in 0..16 {
            files[0].read_exact_at(&mut bytes, block * BLOCK as u64).unwrap();
            assert_eq!(version_of(&bytes, 1, block), 0);
            files[1].write_all_at(&block_of(2, block, 0), block * BLOCK as u64).unwrap();
        }
        signal(libc::SIGCONT);
    }
    client.send(&[0]);
    client.receive();
    assert!(client.child.wait().unwrap().success());
    engine.set_cache_bytes(lower).unwrap();
    assert!(resident(&client.attached) <= lower, "{} of {lower}", resident(&client.attached));
}

/// Goal: the policy knows what clients read: their hit rate is that of reads in the server.
/// Method: one trace, Zipf-like beside a scan, on three caches: a private one, a shared one with a client, and a shared
/// one that has detached its client and so does not see the ring.
#[test]
fn the_policy_sees_what_clients_read() {
    const PAGES: u64 = 2048;
    let dir = temp_dir();
    let path = dir.path().join("file");
    std::fs::File::create(&path).unwrap().set_len(64 * PAGES * PAGE).unwrap();
    let trace = |page: &mut dyn FnMut(u64)| {
        let mut random = Random(5);
        for at in 0..24 * PAGES {
            // The cube of a uniform number prefers small ones.
            let uniform = random.below(1 << 20) as f64 / f64::from(1 << 20);
            page((uniform.powi(3) * (2 * PAGES) as f64) as u64);
            page(8 * PAGES + at % (50 * PAGES));
        }
    };
    let hit_rate = |shared: bool, seen: bool| {
        let built = builder(PAGES * PAGE, BackendChoice::Null);
        let built = if shared { built.shared(memory()) } else { built };
        let engine = built.build().unwrap();
        let file = engine.open(&path, &read_write()).unwrap();
        file.advise(0, 0, Advice::Random).unwrap();
        let mut bytes = vec![0; PAGE as usize];
        let (mut hits, mut reads) = (0u32, 0u32);
        let cache = engine.shared_cache();
        let client = cache.as_ref().map(own_client);
        let shared_file = file.shared_file();
        let reader = client.as_ref().map(|(client, _)| client.reader().unwrap());
        let client = client.map(|(client, attached)| (client, seen.then_some(attached)));
        trace(&mut |page| {
            reads += 1;
            let hit = match &reader {
                Some(reader) => reader.try_read(shared_file.unwrap(), &mut bytes, page * PAGE),
                // SAFETY: `bytes` is valid for writes of its length.
                None => unsafe {
                    file.raw().try_read_hit(bytes.as_mut_ptr(), bytes.len(), page * PAGE)
                },
            };
            match hit {
                Some(_) => hits += 1,
                None => file.read_exact_at(&mut bytes, page * PAGE).unwrap(),
            }
        });
        drop(client);
        f64::from(hits) / f64::from(reads)
    };
    let (own, client, unseen) =
        (hit_rate(false, false), hit_rate(true, true), hit_rate(true, false));
    println!("hit rates: private {own:.4}, client {client:.4}, unseen {unseen:.4}");
    assert!(client > own - 0.005, "client {client:.4}, private {own:.4}");
    assert!(unseen < own - 0.02, "without the rings {unseen:.4}, private {own:.4}");
}

/// Goal: a child of fork of the server finds an empty cache that it can't use, and its parent's stays as it is; a child
/// of a client reads nothing.
#[test]
fn children_of_fork_have_no_part_in_it() {
    in_own_process("children_of_fork_have_no_part_in_it", Duration::from_secs(60), || {
        let dir = temp_dir();
        let (engine, cache) = server(16 << 20, BackendChoice::Threads);
        let file = filled(&dir.path().join("file"), &engine, 64, 1);
        let (client, _attached) = own_client(&cache);
        let reader = client.reader().unwrap();
        let shared = file.shared_file().unwrap();
        let mut bytes = vec![0; BLOCK];
        // Incident: a child kept the memory of a server that was gone.
        let status = status_of_child(|| {
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            i32::from(maps.contains("millpond-shared"))
        });
        assert_eq!(status, 0);
        let status = status_of_child(|| {
            // The child's own memory, where the cache was.
            let at = client.mapped().0.cast_mut();
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
            let access = libc::PROT_READ | libc::PROT_WRITE;
            // SAFETY: new memory, which no other code uses. The client and the reader are not used again in the child.
            unsafe {
                if libc::mmap(at.cast(), 4096, access, flags, -1, 0) != at.cast() {
                    return 1;
                }
                at.write_volatile(7);
                drop((std::ptr::read(&reader), std::ptr::read(&client)));
                i32::from(at.read_volatile() != 7)
            }
        });
        assert_eq!(status, 0);
        let status = status_of_child(|| {
            let refused = matches!(file.read_at(&mut bytes, 0), Err(Error::Forked { .. }));
            let reads_nothing = reader.try_read(shared, &mut bytes, 0).is_none();
            i32::from(!(refused && reads_nothing && client.reader().is_none()))
        });
        assert_eq!(status, 0);
        assert_eq!(reader.try_read(shared, &mut bytes, 0), Some(BLOCK));
        assert_eq!(version_of(&bytes, 1, 0), 0);
        file.read_exact_at(&mut bytes, BLOCK as u64).unwrap();
        assert_eq!(version_of(&bytes, 1, 1), 0);
    });
}
