//! System calls of a hit, wake-ups of idle processes, and memory: of a lower limit, and of a server that is gone.

mod common;

use std::collections::BTreeMap;
use std::io::Write;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use millpond::internals::shared::ClientMemory;
use millpond_objects::Freshness;
use millpond_serve::SharedStore;
use millpond_serve::protocol::{Greeting, Hello, PROTOCOL_VERSION};
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketType,
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use common::{
    Far, Killed, SharedDisk, TestServer, block_on, content, name_of, role_in, start_role, temp_dir,
    version_in, wait_until, words_of,
};

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
/// Method: seccomp turns each call of the reading thread into a signal, which is counted. In another process, as the filter
/// would stay.
#[test]
fn hits_make_no_system_call() {
    const TEST: &str = "hits_make_no_system_call";
    static IS_DONE: AtomicBool = AtomicBool::new(false);
    if role_in(TEST).is_none() {
        let dir = temp_dir();
        let mut child = Killed(start_role(TEST, "all", dir.path()));
        wait_until(Duration::from_secs(60), "the child has ended", || {
            child.0.try_wait().unwrap().is_some()
        });
        assert!(child.0.wait().unwrap().success());
        return;
    }
    for freshness in [Freshness::Immutable, Freshness::MaxAge(Duration::from_secs(1000))] {
        IS_DONE.store(false, SeqCst);
        CALLS.store(0, SeqCst);
        let dir = temp_dir();
        let far = Far::default();
        let socket = dir.path().join("socket");
        let store: Arc<dyn ObjectStore> = Arc::new(far.clone());
        let _server = TestServer::start(Arc::clone(&store), &socket, freshness);
        let client = SharedStore::new(store, &socket);
        let path = Path::from("pond");
        let bytes = content(1, 1 << 20);
        block_on(async {
            far.store.put(&path, bytes.clone().into()).await.unwrap();
            client.get_range(&path, 0..1 << 20).await.unwrap();
        });
        let reader = client.clone();
        std::thread::spawn(move || {
            let client = reader;
            let read = |round: u64| {
                let start = round * 7919 * 64 % ((1 << 20) - 40_000);
                let len = [64, 4096, 40_000][round as usize % 3];
                let read = client.get_range(&path, start..start + len).now_or_never();
                let read = read.expect("a hit does not wait").unwrap();
                assert!(read[..] == bytes[start as usize..][..len as usize]);
            };
            // The first reads take a slot, and memory from the system.
            (0..1000).for_each(read);
            count_calls();
            (0..20_000).for_each(read);
            assert_eq!(CALLS.load(SeqCst), 0);
            // SAFETY: takes no memory.
            unsafe { libc::getpid() };
            IS_DONE.store(true, SeqCst);
            // The end of a thread would be a call.
            loop {
                std::hint::spin_loop();
            }
        });
        wait_until(Duration::from_secs(20), "the thread is done", || IS_DONE.load(SeqCst));
        assert_eq!(CALLS.load(SeqCst), 1, "the call that was made is counted");
        assert_eq!(client.stats().hits, 21_000);
    }
    // The spinning threads end with the process.
    std::process::exit(0);
}

/// The voluntary context switches of each thread but the caller's.
fn sleeps() -> BTreeMap<String, u64> {
    let own = rustix::thread::gettid().as_raw_nonzero().to_string();
    let mut all = BTreeMap::new();
    for task in std::fs::read_dir("/proc/self/task").unwrap() {
        let task = task.unwrap();
        let id = task.file_name().into_string().unwrap();
        let Ok(status) = std::fs::read_to_string(task.path().join("status")) else { continue };
        if id == own {
            continue;
        }
        let line = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        let count = line("voluntary_ctxt_switches:").trim().parse().unwrap();
        all.insert(format!("{id} {}", line("Name:").trim()), count);
    }
    all
}

/// Goal: no thread of an idle server or client wakes up.
#[test]
fn idle_processes_do_not_wake_up() {
    const TEST: &str = "idle_processes_do_not_wake_up";
    if role_in(TEST).is_none() {
        let dir = temp_dir();
        let mut child = Killed(start_role(TEST, "all", dir.path()));
        assert!(child.0.wait().unwrap().success());
        return;
    }
    let dir = temp_dir();
    let far = Far::default();
    let socket = dir.path().join("socket");
    let store: Arc<dyn ObjectStore> = Arc::new(far.clone());
    let _server = TestServer::start(Arc::clone(&store), &socket, Freshness::Immutable);
    let client = SharedStore::new(store, &socket);
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let runtime = builder.worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let path = Path::from("pond");
        client.put(&path, content(1, 100_000).into()).await.unwrap();
        client.get(&path).await.unwrap().bytes().await.unwrap();
    });
    // The silence of a server is noticed by then, and its timer is off.
    std::thread::sleep(Duration::from_millis(2500));
    let before = sleeps();
    std::thread::sleep(Duration::from_secs(3));
    let after = sleeps();
    let woken: Vec<_> = after
        .iter()
        .filter_map(|(thread, count)| Some((thread, count - before.get(thread)?)))
        .filter(|(_, count)| *count > 0)
        .collect();
    assert!(after.keys().any(|thread| thread.contains("millpond-client")), "{after:?}");
    assert!(woken.is_empty(), "{woken:?}");
}

/// Goal: the mapping of a server that is gone ends, although the client goes on.
#[test]
fn the_memory_of_a_server_that_is_gone_is_unmapped() {
    const TEST: &str = "the_memory_of_a_server_that_is_gone_is_unmapped";
    if let Some((_, dir)) = role_in(TEST) {
        let disk = SharedDisk::open(&dir, Duration::ZERO);
        let client = SharedStore::new(disk as Arc<dyn ObjectStore>, dir.join("socket"));
        let maps = || {
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            ["millpond-shared", "millpond-validity", "millpond-client"]
                .map(|name| maps.lines().filter(|line| line.contains(name)).count())
        };
        block_on(async {
            let read = async || {
                let read = client.get_range(&name_of(1), 0..4096).await.unwrap();
                version_in(&read, 1);
            };
            read().await;
            read().await;
            assert!(maps().iter().all(|count| *count > 0), "{:?}", maps());
            std::fs::write(dir.join("mapped"), "").unwrap();
            let started = Instant::now();
            while maps() != [0; 3] {
                assert!(started.elapsed() < Duration::from_secs(10), "{:?}", maps());
                read().await;
            }
            assert!(!client.stats().is_attached && client.stats().hits > 0);
        });
        return;
    }
    let dir = temp_dir();
    let disk = SharedDisk::open(dir.path(), Duration::ZERO);
    block_on(async {
        disk.put(&name_of(1), words_of(1, 1, 80_000).into()).await.unwrap();
    });
    let server = TestServer::start(disk, &dir.path().join("socket"), Freshness::Immutable);
    let mut client = Killed(start_role(TEST, "client", dir.path()));
    wait_until(Duration::from_secs(20), "the client has mapped it", || {
        dir.path().join("mapped").exists()
    });
    server.stop();
    assert!(client.0.wait().unwrap().success());
}

/// Connects and greets. Returns the socket, which keeps the connection, the greeting and the descriptors with it.
fn greeted_with(socket_path: &std::path::Path) -> (OwnedFd, Greeting, Vec<OwnedFd>) {
    let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    rustix::net::connect(&socket, &SocketAddrUnix::new(socket_path).unwrap()).unwrap();
    let own = ClientMemory::create().unwrap();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = [own.descriptor().as_fd()];
    assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
    let hello = Hello { version: PROTOCOL_VERSION, store_name: None }.encode().unwrap();
    let parts = [std::io::IoSlice::new(&hello)];
    // A server that refuses has closed the connection, maybe.
    _ = rustix::net::sendmsg(&socket, &parts, &mut control, SendFlags::NOSIGNAL);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut buffer = [0; 4096];
    let mut receive = || {
        let mut parts = [std::io::IoSliceMut::new(&mut buffer)];
        rustix::net::recvmsg(&socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC)
    };
    // The kernel reports once that the server has not read the hello.
    let received = receive().or_else(|_| receive()).unwrap();
    let rights = control.drain().filter_map(|one| match one {
        RecvAncillaryMessage::ScmRights(rights) => Some(rights),
        _ => None,
    });
    let descriptors = rights.flatten().collect();
    (socket, Greeting::decode(&buffer[..received.bytes]).unwrap(), descriptors)
}

fn greeted(socket_path: &std::path::Path) -> (OwnedFd, Greeting) {
    let (socket, greeting, _) = greeted_with(socket_path);
    (socket, greeting)
}

/// The cache's memory, by the descriptor that a client gets. The socket keeps the connection.
fn memory_of(socket_path: &std::path::Path) -> (OwnedFd, OwnedFd) {
    let (socket, _, mut descriptors) = greeted_with(socket_path);
    (descriptors.remove(0), socket)
}

/// Goal: a server without descriptors for another client refuses it with the reason, and serves the others. A client that
/// was refused reads from its store, and is served when another one has left.
#[test]
fn clients_beyond_the_descriptors_are_refused() {
    const TEST: &str = "clients_beyond_the_descriptors_are_refused";
    const LIMIT: u64 = 160;
    if let Some((_, dir)) = role_in(TEST) {
        let limit = getrlimit(Resource::Nofile);
        setrlimit(Resource::Nofile, Rlimit { current: Some(LIMIT), ..limit }).unwrap();
        let disk = SharedDisk::open(&dir, Duration::ZERO);
        let _server = TestServer::start(disk, &dir.join("socket"), Freshness::Immutable);
        wait_until(Duration::from_secs(60), "the end of the first part", || {
            dir.join("exhaust").exists()
        });
        let any = std::fs::File::open("/dev/null").unwrap();
        let mut exhausted = std::fs::File::create(dir.join("exhausted")).unwrap();
        let mut all = Vec::new();
        // The server may still be closing some.
        let mut refused = 0;
        while refused < 50 {
            match any.try_clone() {
                Ok(one) => {
                    all.push(one);
                    refused = 0;
                }
                Err(_) => {
                    refused += 1;
                    std::thread::sleep(Duration::from_millis(10));
                }
            }
        }
        exhausted.write_all(b"1").unwrap();
        loop {
            std::thread::park();
        }
    }
    let refusal = |socket: &std::path::Path| -> Option<String> {
        let (connection, greeting) = greeted(socket);
        match greeting {
            Greeting::Refused(why) => Some(why),
            Greeting::Welcome(_) => {
                drop(connection);
                None
            }
        }
    };
    let dir = temp_dir();
    let socket = dir.path().join("socket");
    let server = Killed(start_role(TEST, "server", dir.path()));
    let descriptors = format!("/proc/{}/fd", server.0.id());
    let descriptors = || std::fs::read_dir(&descriptors).unwrap().count();
    let disk = SharedDisk::open(dir.path(), Duration::ZERO);
    block_on(async { disk.put(&name_of(1), words_of(1, 1, 80_000).into()).await.unwrap() });
    wait_until(Duration::from_secs(20), "the server listens", || {
        std::os::unix::net::UnixStream::connect(&socket)
            .is_err_and(|error| error.raw_os_error() == Some(libc::EPROTOTYPE))
    });
    let store = Arc::clone(&disk) as Arc<dyn ObjectStore>;
    let served = SharedStore::new(Arc::clone(&store), &socket);
    let left = SharedStore::new(store, &socket);
    block_on(async {
        assert!(served.attach().await);
        let with_one_client = descriptors();
        let mut connections = Vec::new();
        let why = loop {
            let (connection, greeting) = greeted(&socket);
            match greeting {
                Greeting::Welcome(_) => connections.push(connection),
                Greeting::Refused(why) => break why,
            }
        };
        assert!(why.contains("RLIMIT_NOFILE) is 160"), "{why}");
        // Two descriptors of the server for each.
        let taken = connections.len() as u64;
        assert!((LIMIT / 4..LIMIT / 2).contains(&taken), "{taken}");
        for client in [&served, &left] {
            let read = client.get_range(&name_of(1), 0..4096).await.unwrap();
            version_in(&read, 1);
        }
        assert_eq!((served.stats().fallbacks, left.stats().fallbacks), (0, 1));
        drop(connections);
        wait_until(Duration::from_secs(5), "there is room again", || refusal(&socket).is_none());
        // Else descriptors would become free after the others are in use.
        wait_until(Duration::from_secs(20), "the server has closed the connections", || {
            descriptors() <= with_one_client
        });
        std::fs::write(dir.path().join("exhaust"), "").unwrap();
        wait_until(Duration::from_secs(20), "no descriptor is left", || {
            std::fs::metadata(dir.path().join("exhausted")).is_ok_and(|file| file.len() > 0)
        });
        for _ in 0..20 {
            assert!(refusal(&socket).is_some_and(|why| why.contains("RLIMIT_NOFILE")));
        }
        served.get_range(&name_of(1), 0..4096).await.unwrap();
        assert_eq!(served.stats().fallbacks, 0);
    });
}

/// Goal: when the limit is halved while clients read, the resident memory falls within two seconds and stays.
#[test]
fn a_lower_limit_is_reached_beside_clients() {
    const TEST: &str = "a_lower_limit_is_reached_beside_clients";
    const OBJECTS: u64 = 30;
    const BYTES: u64 = 2 << 20;
    if let Some((role, dir)) = role_in(TEST) {
        let disk = SharedDisk::open(&dir, Duration::ZERO);
        let client = SharedStore::new(disk as Arc<dyn ObjectStore>, dir.join("socket"));
        let mut random = common::Random(role.parse().unwrap());
        block_on(async {
            loop {
                let (object, start) = (random.below(OBJECTS), random.below(BYTES / 8 - 5000) * 8);
                let read = client.get_range(&name_of(object), start..start + 16384).await;
                version_in(&read.unwrap(), object);
            }
        });
    }
    let dir = temp_dir();
    let socket = dir.path().join("socket");
    let disk = SharedDisk::open(dir.path(), Duration::ZERO);
    block_on(async {
        for object in 0..OBJECTS {
            disk.put(&name_of(object), words_of(object, 1, BYTES).into()).await.unwrap();
        }
    });
    let limit = 64 << 20;
    let store = Arc::clone(&disk) as Arc<dyn ObjectStore>;
    let server = TestServer::with_memory(Arc::clone(&store), &socket, Freshness::Immutable, limit);
    let client = SharedStore::new(store, &socket);
    block_on(async {
        for object in 0..OBJECTS {
            client.get(&name_of(object)).await.unwrap().bytes().await.unwrap();
        }
    });
    let clients: Vec<_> =
        (1..=8).map(|seed| Killed(start_role(TEST, &seed.to_string(), dir.path()))).collect();
    wait_until(Duration::from_secs(30), "all are attached", || server.handle.clients() == 9);
    let (cache, _socket) = memory_of(&socket);
    let resident = || rustix::fs::fstat(&cache).unwrap().st_blocks as u64 * 512;
    let before = resident();
    let started = Instant::now();
    let reached = block_on(client.set_memory_bytes(limit / 2)).unwrap();
    assert_eq!(reached, Some(limit / 2));
    wait_until(Duration::from_secs(2), "memory falls", || resident() <= limit / 2);
    println!("{before} bytes fell to {} in {:?}", resident(), started.elapsed());
    assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
    for _ in 0..50 {
        std::thread::sleep(Duration::from_millis(20));
        assert!(resident() <= limit / 2, "{}", resident());
    }
    assert!(before > limit / 2, "{before}");
    for mut client in clients {
        assert!(client.0.try_wait().unwrap().is_none(), "wrong bytes");
    }
}
