//! Peers that are no clients, or bad ones: they harm their own connection only.

mod common;

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::Path as FilePath;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use millpond::internals::shared::ClientMemory;
use millpond_objects::Freshness;
use millpond_serve::SharedStore;
use millpond_serve::protocol::{
    Conditions, Greeting, HELLO_BYTES_MAX, Hello, PROTOCOL_VERSION, ReadMessage, Reply, Request,
};
use object_store::path::Path;
use object_store::{GetRange, ObjectStore, ObjectStoreExt};
use proptest::prelude::*;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketType,
};

use common::{Far, TestServer, block_on, content, skip, temp_dir, wait_until};

/// A blocking socket to the server.
fn connect(path: &FilePath) -> OwnedFd {
    let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    let timeout = Some(Duration::from_secs(10));
    for which in [rustix::net::sockopt::Timeout::Recv, rustix::net::sockopt::Timeout::Send] {
        rustix::net::sockopt::set_socket_timeout(&socket, which, timeout).unwrap();
    }
    rustix::net::connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    socket
}

fn send(socket: &OwnedFd, message: &[u8]) -> io::Result<usize> {
    Ok(rustix::net::send(socket, message, SendFlags::NOSIGNAL)?)
}

/// The next message; empty at the end.
fn receive(socket: &OwnedFd) -> Vec<u8> {
    let mut buffer = vec![0; 256 << 10];
    // Children of other tests send signals.
    let receive = || rustix::net::recv(socket, &mut *buffer, RecvFlags::empty());
    match rustix::io::retry_on_intr(receive) {
        Ok((len, _)) => buffer[..len].to_vec(),
        Err(rustix::io::Errno::CONNRESET) => Vec::new(),
        Err(error) => panic!("{error}"),
    }
}

fn hello(socket: &OwnedFd, version: u32, descriptors: &[&OwnedFd]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors: Vec<_> = descriptors.iter().map(|one| one.as_fd()).collect();
    if !descriptors.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
    }
    let message = Hello { version, store_name: Some(Far::default().to_string()) }.encode().unwrap();
    let parts = [io::IoSlice::new(&message)];
    rustix::net::sendmsg(socket, &parts, &mut control, SendFlags::NOSIGNAL).unwrap();
}

/// An attached connection, of which the test has the socket.
fn attached(path: &FilePath) -> (OwnedFd, ClientMemory) {
    let (socket, memory) = (connect(path), ClientMemory::create().unwrap());
    hello(&socket, PROTOCOL_VERSION, &[memory.descriptor()]);
    let greeting = Greeting::decode(&receive(&socket)).unwrap();
    assert!(matches!(greeting, Greeting::Welcome(_)), "{greeting:?}");
    (socket, memory)
}

#[track_caller]
fn is_refused(socket: &OwnedFd, why: &str) {
    let greeting = Greeting::decode(&receive(socket)).unwrap();
    let Greeting::Refused(text) = greeting else { panic!("{greeting:?}") };
    assert!(text.contains(why), "{text}");
    assert!(receive(socket).is_empty(), "the connection has ended");
}

fn far_with(bytes: u64) -> (Far, Arc<dyn ObjectStore>, Path) {
    let (far, path) = (Far::default(), Path::from("pond"));
    let put = far.store.put(&path, content(1, bytes as usize).into());
    block_on(async { put.await.unwrap() });
    (far.clone(), Arc::new(far), path)
}

#[test]
fn peers_without_a_right_greeting_are_refused() {
    let (dir, (_, store, _)) = (temp_dir(), far_with(100));
    let path = dir.path().join("socket");
    let server = TestServer::start(store, &path, Freshness::Immutable);
    // Version 3 had client memory of two lengths.
    for version in [3, PROTOCOL_VERSION + 1] {
        let socket = connect(&path);
        hello(&socket, version, &[]);
        is_refused(
            &socket,
            &format!(
                "version {PROTOCOL_VERSION} of the protocol, and the client version {version}"
            ),
        );
    }
    let socket = connect(&path);
    hello(&socket, PROTOCOL_VERSION, &[]);
    is_refused(&socket, "0 descriptors");
    let file: OwnedFd = std::fs::File::open("/proc/self/exe").unwrap().into();
    let socket = connect(&path);
    hello(&socket, PROTOCOL_VERSION, &[&file]);
    is_refused(&socket, "can't be attached");
    for count in [2, 4] {
        let socket = connect(&path);
        hello(&socket, PROTOCOL_VERSION, &vec![&file; count]);
        is_refused(&socket, "descriptors");
    }
    // Of a store that the server does not have.
    let socket = connect(&path);
    let other = Hello { version: PROTOCOL_VERSION, store_name: Some("other".repeat(3000)) };
    send(&socket, &other.encode().unwrap()).unwrap();
    is_refused(&socket, "the server caches far, and this client's store is other");
    let socket = connect(&path);
    send(&socket, b"GET / HTTP/1.1\r\n\r\n").unwrap();
    is_refused(&socket, "bad magic number");
    let socket = connect(&path);
    send(&socket, &[7; HELLO_BYTES_MAX + 1]).unwrap();
    assert!(receive(&socket).is_empty(), "too long");
    wait_until(Duration::from_secs(5), "all are counted", || server.handle.refused() == 9);
    assert_eq!((server.handle.attached(), server.handle.clients()), (0, 0));
}

/// Goal: a process of another user is refused, even if the mode of the socket allows it to connect.
/// Method: a child of fork takes another user, if this process is root.
#[test]
fn another_user_is_refused() {
    if !rustix::process::geteuid().is_root() {
        return skip("only root may take another user");
    }
    // Not below a directory that the other user can't search.
    let dir = tempfile::tempdir_in("/tmp").unwrap();
    let mode = |path: &FilePath, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    mode(dir.path(), 0o755);
    let path = dir.path().join("socket");
    let (_, store, _) = far_with(100);
    let server = TestServer::start(store, &path, Freshness::Immutable);
    let as_other = |body: &dyn Fn() -> i32| {
        // SAFETY: the child makes system calls, and takes memory, which glibc allows.
        unsafe {
            let child = libc::fork();
            if child == 0 {
                // Only this process, not the other one that glibc would ask all threads for.
                let changed = libc::syscall(libc::SYS_setresuid, 65534, 65534, 65534);
                libc::_exit(if changed == 0 { body() } else { 98 });
            }
            let mut status = 0;
            assert_eq!(libc::waitpid(child, &mut status, 0), child);
            assert!(libc::WIFEXITED(status), "{status:x}");
            libc::WEXITSTATUS(status)
        }
    };
    let address = SocketAddrUnix::new(&path).unwrap();
    let connect_to = || {
        let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        rustix::net::connect(&socket, &address).map(|()| socket)
    };
    let is_denied = || matches!(connect_to(), Err(rustix::io::Errno::ACCESS));
    assert_eq!(as_other(&|| i32::from(!is_denied())), 0);
    mode(&path, 0o666);
    let status = as_other(&|| {
        let Ok(socket) = connect_to() else { return 1 };
        match Greeting::decode(&receive(&socket)) {
            Ok(Greeting::Refused(why)) if why.contains("user 65534") => 0,
            _ => 2,
        }
    });
    assert_eq!(status, 0);
    // The server counts after it has answered.
    wait_until(Duration::from_secs(1), "it is counted", || server.handle.refused() == 1);
    assert_eq!(server.handle.attached(), 0);
}

/// Goal: a client uses no server of another user, who may have taken the path of the socket first.
#[test]
fn a_server_of_another_user_is_not_used() {
    if !rustix::process::geteuid().is_root() {
        return skip("only root may take another user");
    }
    let dir = temp_dir();
    let path = dir.path().join("socket");
    let address = SocketAddrUnix::new(&path).unwrap();
    let listens = || {
        let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        rustix::net::bind(&socket, &address).unwrap();
        // SAFETY: the call changes the user of this thread alone, which ends soon.
        let changed = unsafe { libc::syscall(libc::SYS_setresuid, 65534, 65534, 65534) };
        assert_eq!(changed, 0);
        rustix::net::listen(&socket, 5).unwrap();
        socket
    };
    let _socket = std::thread::scope(|scope| scope.spawn(listens).join().unwrap());
    let refused = millpond_serve::set_server_memory(&path, 1 << 30).unwrap_err();
    assert!(refused.to_string().contains("is of user 65534"), "{refused}");
    let (_, store, object) = far_with(100);
    let client = SharedStore::new(store, &path);
    block_on(async {
        let started = Instant::now();
        assert!(!client.attach().await);
        assert!(started.elapsed() < Duration::from_millis(500), "it is not greeted");
        assert!(client.get_range(&object, 0..50).await.unwrap()[..] == content(1, 100)[..50]);
    });
}

/// Goal: any message from an attached peer is answered, or ends that connection; others go on.
#[test]
fn garbage_ends_its_own_connection() {
    let (dir, (_, store, object)) = (temp_dir(), far_with(100_000));
    let path = dir.path().join("socket");
    let server = TestServer::start(Arc::clone(&store), &path, Freshness::Immutable);
    let client = SharedStore::new(store, &path);
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        cases: 200,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    let message = prop_oneof![
        proptest::collection::vec(any::<u8>(), 1..200),
        // A right kind before garbage.
        (1u8..8, proptest::collection::vec(any::<u8>(), 0..60)).prop_map(|(kind, rest)| {
            let mut message = vec![kind, 1, 0, 0, 0, 0, 0, 0, 0];
            message.extend(rest);
            message
        }),
        // A right message that is cut.
        (0usize..60).prop_map(|len| {
            let backwards = std::ops::Range { start: 9, end: 3 };
            let read = ReadMessage {
                location: "pond".into(),
                ranges: vec![
                    Some(GetRange::Bounded(0..u64::MAX)),
                    Some(GetRange::Bounded(backwards)),
                ],
                conditions: Conditions { if_match: Some("tag".into()), ..Conditions::default() },
                held: Some((u32::MAX, u64::MAX)),
                wants_bytes: true,
            };
            let mut message = Request::Read(read).encode(u64::MAX).unwrap();
            message.truncate(message.len().saturating_sub(len).max(1));
            message
        }),
    ];
    let messages = proptest::collection::vec(message, 1..6);
    let outcome = runner.run(&messages, |messages| {
        let (socket, _memory) = attached(&path);
        for message in &messages {
            if send(&socket, message).is_err() {
                break;
            }
        }
        // A sign of life, or the end.
        _ = send(&socket, &Request::Ping.encode(77).unwrap());
        loop {
            let reply = receive(&socket);
            if reply.is_empty() {
                break;
            }
            let (number, _) = Reply::decode(&reply).unwrap();
            if number == 77 {
                break;
            }
        }
        Ok(())
    });
    outcome.unwrap();
    // Longer than any message.
    let (socket, _memory) = attached(&path);
    send(&socket, &vec![1; 100_000]).unwrap();
    assert!(receive(&socket).is_empty());
    block_on(async {
        let read = client.get_range(&object, 7..5000).await.unwrap();
        assert!(read[..] == content(1, 100_000)[7..5000]);
    });
    drop(socket);
    wait_until(Duration::from_secs(1), "only the client is left", || server.handle.clients() == 1);
}

/// Goal: a panic of the server's store is an error of its request, and the connection goes on.
#[test]
fn a_panic_of_the_store_is_an_error() {
    let (dir, (far, store, object)) = (temp_dir(), far_with(1000));
    let path = dir.path().join("socket");
    let _server = TestServer::start(store, &path, Freshness::Immutable);
    let (socket, _memory) = attached(&path);
    let read = ReadMessage {
        location: object.to_string(),
        ranges: vec![Some(GetRange::Bounded(0..1000))],
        ..ReadMessage::default()
    };
    let reply_to = |number| {
        send(&socket, &Request::Read(read.clone()).encode(number).unwrap()).unwrap();
        let reply = receive(&socket);
        let (of, reply) = Reply::decode(&reply).unwrap();
        assert_eq!(of, number);
        format!("{reply:?}")
    };
    far.faults.panics.store(true, Relaxed);
    let failed = reply_to(1);
    assert!(failed.starts_with("Failed") && failed.contains("the store panics"), "{failed}");
    far.faults.panics.store(false, Relaxed);
    let found = reply_to(2);
    assert!(found.starts_with("Object"), "{found}");
}

/// Goal: a client that asks for much and reads nothing is cut off, and delays no other client.
#[test]
fn a_client_that_does_not_read_is_cut_off() {
    let bytes = 3 << 20;
    let (dir, (_, store, object)) = (temp_dir(), far_with(bytes));
    let path = dir.path().join("socket");
    let server = TestServer::start(Arc::clone(&store), &path, Freshness::Immutable);
    let (socket, _memory) = attached(&path);
    let client = SharedStore::new(store, &path);
    let timeout = Some(Duration::from_millis(50));
    let which = rustix::net::sockopt::Timeout::Send;
    rustix::net::sockopt::set_socket_timeout(&socket, which, timeout).unwrap();
    let mut sent = 0;
    for number in 0..20_000 {
        let read = ReadMessage {
            location: object.to_string(),
            ranges: vec![Some(GetRange::Bounded(0..bytes))],
            wants_bytes: true,
            ..ReadMessage::default()
        };
        match send(&socket, &Request::Read(read).encode(number).unwrap()) {
            Ok(_) => sent += 1,
            Err(_) => break,
        }
    }
    println!("{sent} requests were taken");
    assert!((100..20_000).contains(&sent), "the number of requests in flight is bounded: {sent}");
    let started = Instant::now();
    let mut reads = 0;
    block_on(async {
        assert!(client.attach().await);
        // The server counts a client after it has greeted it.
        wait_until(Duration::from_secs(1), "both are attached", || server.handle.clients() == 2);
        while server.handle.clients() == 2 {
            assert!(started.elapsed() < Duration::from_secs(12), "it was not cut off");
            let before = Instant::now();
            let from = reads * 40_000 % 2_000_000;
            client.get_range(&object, from..from + 100_000).await.unwrap();
            client.forget(&object).await;
            assert!(before.elapsed() < Duration::from_secs(1), "{:?}", before.elapsed());
            reads += 1;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    println!("{reads} reads of another client, {:?}", started.elapsed());
    assert!(reads > 50 && client.stats().fallbacks == 0, "{reads}");
}

/// Goal: decoders return an error or a message, for any bytes, and a message that was encoded is decoded as itself.
#[test]
fn messages_survive_the_way() {
    let config = || ProptestConfig { failure_persistence: None, ..ProptestConfig::default() };
    proptest!(config(), |(bytes in proptest::collection::vec(any::<u8>(), 0..300))| {
        _ = Hello::decode(&bytes);
        _ = Greeting::decode(&bytes);
        if let Ok((number, request)) = Request::decode(&bytes) {
            let encoded = request.encode(number).unwrap();
            prop_assert_eq!(Request::decode(&encoded).unwrap(), (number, request));
        }
        if let Ok((number, reply)) = Reply::decode(&bytes) {
            let encoded = reply.encode(number).unwrap();
            prop_assert_eq!(Reply::decode(&encoded).unwrap(), (number, reply));
        }
    });
    let range = prop_oneof![
        Just(None),
        any::<(u64, u64)>().prop_map(|(start, end)| Some(GetRange::Bounded(start..end))),
        any::<u64>().prop_map(|at| Some(GetRange::Offset(at))),
        any::<u64>().prop_map(|len| Some(GetRange::Suffix(len))),
    ];
    let tags = (any::<Option<String>>(), any::<Option<String>>());
    proptest!(config(), |(location in any::<String>(), range in range, tags in tags,
        held in any::<Option<(u32, u64)>>(), number in any::<u64>())| {
        let (if_match, if_none_match) = tags;
        let modified = chrono::DateTime::from_timestamp(number as i64 % 1_000_000, 7);
        let conditions = Conditions {
            if_match, if_none_match, if_modified_since: modified, if_unmodified_since: None,
        };
        let read = ReadMessage {
            location, ranges: vec![range], conditions, held, wants_bytes: held.is_none(),
        };
        let request = Request::Read(read);
        let encoded = request.encode(number).unwrap();
        prop_assert_eq!(Request::decode(&encoded).unwrap(), (number, request));
        for len in 0..encoded.len() {
            prop_assert!(Request::decode(&encoded[..len]).is_err());
        }
    });
}
