//! Attacks of other users on a keeper: connections that block, replaced sockets, forged rescue
//! files.

use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::{chown, symlink};

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use super::*;

/// Connections with a message that holds a socket whose close blocks: more than a keeper closes at once.
const BLOCKING: usize = 12;

/// A TCP socket whose close blocks for ten minutes, or until the second one is closed.
fn lingering() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut lingering = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (reader, _) = listener.accept().unwrap();
    let patience = Some(Duration::from_secs(600));
    rustix::net::sockopt::set_socket_linger(&lingering, patience).unwrap();
    lingering.set_nonblocking(true).unwrap();
    while lingering.write(&[0; PAGE]).is_ok() {}
    lingering.set_nonblocking(false).unwrap();
    (lingering, reader)
}

/// Sends a lingering socket over each of `count` connections to `name`. Closes its own descriptors
/// of them on command, so that the unread messages hold the last references.
pub fn lingerer_role(name: &str, count: usize) {
    let mut kept = Vec::new();
    let mut refused = 0;
    for _ in 0..count {
        let (file, reader) = lingering();
        let socket = connect(name).unwrap();
        let fds = [file.as_fd()];
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        let bytes = [std::io::IoSlice::new(&[7])];
        let flags = SendFlags::NOSIGNAL;
        refused += usize::from(rustix::net::sendmsg(&socket, &bytes, &mut control, flags).is_err());
        // The keeper must hold the last reference: a close here would block this process.
        kept.push((socket, reader, file));
    }
    actor::say(&format!("ready {refused}"));
    actor::read_line();
    let (sockets, files): (Vec<_>, Vec<_>) =
        kept.into_iter().map(|(socket, reader, file)| ((socket, reader), file)).unzip();
    // Where the kernel has refused the descriptors, the close of the last reference would block here.
    if refused == 0 {
        drop(files)
    } else {
        std::mem::forget(files)
    }
    actor::say("dropped");
    actor::sleep_until_killed("waiting");
    drop(sockets);
}

/// Listens at `name`, with a backlog that it has filled itself, and has a datagram socket of that name, as a mark has.
pub fn squatter_role(name: &str) {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
    let socket_of =
        |kind, flags| rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None).unwrap();
    let socket = |flags| socket_of(SocketType::SEQPACKET, flags);
    let address = SocketAddrUnix::new_abstract_name(name.trim_start_matches('@').as_bytes());
    let (listener, address) = (socket(SocketFlags::CLOEXEC), address.unwrap());
    rustix::net::bind(&listener, &address).unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    let datagram = socket_of(SocketType::DGRAM, SocketFlags::CLOEXEC);
    rustix::net::bind(&datagram, &address).unwrap();
    let mut filling = Vec::new();
    loop {
        let one = socket(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK);
        match rustix::net::connect(&one, &address) {
            Ok(()) => filling.push(one),
            Err(error) => break assert_eq!(error, rustix::io::Errno::AGAIN),
        }
    }
    actor::sleep_until_killed("ready");
}

/// Prints the address that a keeper would use with this `TMPDIR` and no runtime directory.
pub fn address_role(directory: &str) {
    // SAFETY: the only thread of this process that uses the environment.
    unsafe {
        std::env::set_var("TMPDIR", directory);
        std::env::remove_var("XDG_RUNTIME_DIR");
    }
    actor::say(&format!("ready {}", Address::unique()));
    actor::say(&format!("address {}", Address::unique()));
    actor::sleep_until_killed("waiting");
}

/// The threads of a process that close connections.
fn closing_threads(pid: u32) -> usize {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    let name = |path: PathBuf| std::fs::read_to_string(path.join("comm")).unwrap_or_default();
    tasks.filter(|task| name(task.path()).trim() == "millpond-close").count()
}

/// Goal: another user who connects to the mark of a file blocks neither the keeper nor an open of the file.
/// Incident: the one thread of the keeper closed such connections, and with one a socket that lingered. Opens of the file
/// waited for minutes, and read bytes from before the program was killed.
#[test]
fn connections_to_a_mark_block_no_keeper() {
    if !is_root() {
        return;
    }
    let (_dir, path, mut keeper, mut writer) = kept("dirty");
    let stat = path.metadata().unwrap();
    let mark = format!("@millpond-kept/{:x}/{:x}", stat.dev(), stat.ino());
    let count = BLOCKING.to_string();
    keeper.signal(libc::SIGSTOP);
    let mut stranger = Actor::start("lingerer", &[&mark, &count], Some(OTHER_USER));
    stranger.send_line("drop them");
    stranger.wait_for("dropped");
    keeper.signal(libc::SIGCONT);
    // The process lives: an open does not wait.
    let opened = File::open(&path).unwrap();
    keeper::await_written(opened.as_fd(), Duration::from_secs(60)).unwrap();
    writer.kill();
    assert!(keeper.wait_for("report").contains("pages: 1"));
    assert_eq!(std::fs::read(&path).unwrap(), [1; PAGE]);
}

/// Goal: another user who listens at the name of a file's mark and fills the backlog does not make opens of the file wait.
/// Incident: an open waited for 60 s, and failed then.
#[test]
fn a_full_backlog_of_another_user_does_not_delay_an_open() {
    if !is_root() {
        return;
    }
    let dir = temp_dir();
    let path = dir.path().join("file");
    std::fs::write(&path, [1; PAGE]).unwrap();
    let stat = path.metadata().unwrap();
    let mark = format!("@millpond-kept/{:x}/{:x}", stat.dev(), stat.ino());
    let _squatter = Actor::start("squatter", &[&mark], Some(OTHER_USER));
    let engine = common::engine(1 << 20, BackendChoice::Threads);
    let started = Instant::now();
    let file = engine.open(&path, &write_back()).unwrap();
    let opened = File::open(&path).unwrap();
    keeper::await_written(opened.as_fd(), Duration::from_secs(60)).unwrap();
    assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
    drop(file);
    // The file's owner is trusted to have a reason.
    std::os::unix::fs::chown(&path, Some(OTHER_USER), None).unwrap();
    let refused = keeper::await_written(opened.as_fd(), Duration::from_millis(300)).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ResourceBusy, "{refused}");
}

/// Goal: a keeper at a name that any user may connect to serves its own user beside connections that block, and starts a
/// bounded number of threads for them.
/// Incident: a thread was started for each connection of another user.
#[test]
fn connections_to_the_socket_block_a_bounded_number_of_threads() {
    if !is_root() {
        return;
    }
    let dir = temp_dir();
    let path = dir.path().join("file");
    let address = format!("@millpond-test/door/{}", std::process::id());
    let mut keeper = Actor::start("keeper", &[&address], None);
    keeper.signal(libc::SIGSTOP);
    let count = BLOCKING.to_string();
    let mut stranger = Actor::start("lingerer", &[&address, &count], Some(OTHER_USER));
    stranger.send_line("drop them");
    stranger.wait_for("dropped");
    keeper.signal(libc::SIGCONT);
    let mut writer = Actor::start("writer", &[&address, path.to_str().unwrap(), "dirty"], None);
    assert_eq!(std::fs::read(&path).unwrap(), [], "kept, and not written through");
    // The keeper may not have taken the connections yet.
    let started = Instant::now();
    while closing_threads(keeper.child.id()) == 0 {
        assert!(started.elapsed() < Duration::from_secs(60), "no thread closes a connection");
        std::thread::sleep(Duration::from_millis(10));
    }
    let threads = closing_threads(keeper.child.id());
    assert!(threads <= 4, "{threads} threads close {BLOCKING} connections");
    writer.kill();
    assert!(keeper.wait_for("report").contains("pages: 1"));
    assert_eq!(std::fs::read(&path).unwrap(), [1; PAGE]);
}

/// Goal: a keeper's socket is not created below a directory, at any level, in which another user
/// could replace it.
#[test]
fn a_keepers_socket_is_below_trusted_directories() {
    if !is_root() {
        return;
    }
    for levels in 0..4 {
        let dir = tempfile::tempdir().unwrap();
        let foreign = dir.path().join("foreign");
        let own = (0..levels).fold(foreign.clone(), |path, level| path.join(level.to_string()));
        std::fs::create_dir_all(&own).unwrap();
        let address_in = |own: &Path| {
            let mut actor = Actor::start("address", &[own.to_str().unwrap()], None);
            actor.wait_for("address")
        };
        let trusted = address_in(&own);
        assert!(trusted.starts_with(own.canonicalize().unwrap().to_str().unwrap()), "{trusted}");
        let link = dir.path().join("link");
        symlink(&own, &link).unwrap();
        let resolved = address_in(&link);
        assert!(resolved.starts_with(own.canonicalize().unwrap().to_str().unwrap()), "{resolved}");
        chown(&foreign, Some(OTHER_USER), None).unwrap();
        let address = address_in(&own);
        assert!(!address.contains("foreign"), "{levels} levels below: {address}");
        chown(&foreign, Some(0), None).unwrap();
        std::fs::set_permissions(&foreign, PermissionsExt::from_mode(0o777)).unwrap();
        let address = address_in(&own);
        assert!(!address.contains("foreign"), "{levels} levels below: {address}");
    }
}

/// A rescue file of user `owner` for the present file `path`, which replaces its first bytes.
fn rescue_for(dir: &Path, path: &Path, owner: u32) -> PathBuf {
    let stat = path.metadata().unwrap();
    let changed = stat.mtime() * 1_000_000_000 + stat.mtime_nsec();
    let text = format!(
        "millpond rescue 1\npath: {}\ndevice: {}\ninode: {}\nsize: 4\nchanged: {changed}\n\
         length: {}\nprocess: 1\n\nat 0 4\nevil\nend\n",
        path.display(),
        stat.dev(),
        stat.ino(),
        stat.len()
    );
    let rescue = dir.join(format!("rescue-{owner}"));
    std::fs::write(&rescue, text).unwrap();
    std::fs::set_permissions(&rescue, PermissionsExt::from_mode(0o600)).unwrap();
    chown(&rescue, Some(owner), None).unwrap();
    rescue
}

/// Goal: the bytes of a rescue file go only into a file of the user who wrote it, unless the caller insists.
/// Incident: root ran `millpond rescue` on a file of another user, who had put down the path of a file of root's.
#[test]
fn a_rescue_file_of_another_user_is_refused() {
    if !is_root() {
        return;
    }
    for (rescue_owner, target_owner, mode, is_refused) in [
        (OTHER_USER, 0, 0o600, true),
        (OTHER_USER, OTHER_USER - 1, 0o600, true),
        (OTHER_USER, OTHER_USER, 0o600, false),
        (OTHER_USER, OTHER_USER, 0o666, true),
        (0, OTHER_USER, 0o600, false),
        (0, 0, 0o600, false),
        (0, 0, 0o620, true),
    ] {
        let dir = temp_dir();
        let path = dir.path().canonicalize().unwrap().join("target");
        std::fs::write(&path, "precious").unwrap();
        chown(&path, Some(target_owner), None).unwrap();
        let rescue = rescue_for(dir.path(), &path, rescue_owner);
        std::fs::set_permissions(&rescue, PermissionsExt::from_mode(mode)).unwrap();
        let case = format!("{rescue_owner} {mode:o} onto {target_owner}");
        for target in [None, Some(&*path)] {
            let restored = keeper::restore(&rescue, target, false);
            if is_refused {
                let refused = restored.unwrap_err();
                assert_eq!(refused.kind(), std::io::ErrorKind::PermissionDenied, "{case}");
                assert!(refused.to_string().contains("rescue file"), "{refused}");
                assert_eq!(std::fs::read(&path).unwrap(), b"precious", "{case}");
                continue;
            }
            assert_eq!(restored.unwrap().bytes, 4, "{case}");
            break;
        }
        keeper::restore(&rescue, None, true).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"evilious", "{case}: forced");
    }
}

/// Goal: a rescue file, and the file that it names, are regular files, and no link leads to the latter.
#[test]
fn a_rescue_follows_no_link_and_waits_for_no_fifo() {
    let dir = temp_dir();
    let place = dir.path().canonicalize().unwrap();
    let path = place.join("target");
    std::fs::write(&path, "precious").unwrap();
    let rescue = rescue_for(&place, &path, rustix::process::geteuid().as_raw());
    let fifo = place.join("fifo");
    let mode = rustix::fs::Mode::RWXU;
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    for (rescue, target) in [(&fifo, None), (&rescue, Some(&*fifo)), (&place, None)] {
        let refused = keeper::restore(rescue, target, true).unwrap_err();
        assert_eq!(refused.kind(), std::io::ErrorKind::InvalidInput, "{refused}");
    }
    let behind = place.join("behind");
    std::fs::rename(&path, &behind).unwrap();
    symlink(&behind, &path).unwrap();
    keeper::restore(&rescue, None, true).unwrap_err();
    assert_eq!(std::fs::read(&behind).unwrap(), b"precious");
    // The caller may name it.
    assert_eq!(keeper::restore(&rescue, Some(&path), true).unwrap().bytes, 4);
    assert_eq!(std::fs::read(&behind).unwrap(), b"evilious");
}
