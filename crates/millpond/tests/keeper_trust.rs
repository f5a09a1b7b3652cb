//! The trust between a keeper and its clients: successors of a dead process, unrelated processes,
//! and hostile clients.
//!
//! A keeper and the programs that it serves are processes of this test binary, in other roles, so
//! that each can be stopped and killed separately. Tests with another user need root, and are
//! reported as skipped without it.

#[path = "keeper_trust/actor.rs"]
mod actor;
mod common;
#[path = "keeper_trust/other_users.rs"]
mod other_users;

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use millpond::keeper::{self, Address, Server};
use millpond::{BackendChoice, Engine, EngineBuilder, OpenOptions, WriteMode};

use actor::{Actor, builder, connect, kept};
use common::{temp_dir, write_back};

const ROLE: &str = "MILLPOND_TEST_TRUST_ROLE";
const PAGE: usize = 4096;
/// Nobody in particular.
const OTHER_USER: u32 = 65_534;

#[track_caller]
fn is_root() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        common::skip("needs to be root, to have another user");
    }
    is_root
}

fn address_in(dir: &Path) -> String {
    dir.join("door").to_str().unwrap().to_string()
}

/// The rescue file that a report names.
fn rescue_of(report: &str) -> PathBuf {
    let (_, rest) =
        report.split_once("rescue: Some(\"").unwrap_or_else(|| panic!("none: {report}"));
    PathBuf::from(rest.split('"').next().unwrap())
}

/// Goal: the keeper does not overwrite bytes that another process wrote after its client died. The
/// client's bytes are not lost, either.
/// Incident: the keeper wrote its page over bytes that a successor had written and synced.
#[test]
fn a_successor_is_not_overwritten() {
    let (_dir, path, mut keeper, mut writer) = kept("two");
    // So that the successor runs before the keeper.
    keeper.signal(libc::SIGSTOP);
    writer.kill();
    let successor = File::options().read(true).write(true).open(&path).unwrap();
    successor.write_all_at(&[2; PAGE], 0).unwrap();
    successor.sync_all().unwrap();
    keeper.signal(libc::SIGCONT);
    let report = keeper.wait_for("report");
    assert_eq!(std::fs::read(&path).unwrap(), [2; PAGE]);
    // The user has to choose between the two versions.
    let rescue = rescue_of(&report);
    assert_eq!(rescue.parent(), path.parent());
    assert_eq!(rescue.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    successor.write_all_at(&[3; 1], 100).unwrap();
    let refused = keeper::restore(&rescue, None, false).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::StaleNetworkFileHandle, "{refused}");
    assert_eq!(keeper::restore(&rescue, None, true).unwrap().bytes, 2 * PAGE as u64);
    assert_eq!(std::fs::read(&path).unwrap(), [1; 2 * PAGE]);
}

/// Goal: bytes that another process appends are not cut off when a process that has the file open
/// is killed.
/// Incident: the keeper set each file to the size that the process had recorded, dirty or not.
#[test]
fn appends_of_other_processes_stay() {
    let (_dir, path, mut keeper, mut writer) = kept("synced");
    let other = File::options().append(true).open(&path).unwrap();
    (&other).write_all(&[2; 1000]).unwrap();
    other.sync_all().unwrap();
    writer.kill();
    let report = keeper.wait_for("report");
    assert!(report.contains("failures: []"), "{report}");
    let expected = [vec![1; PAGE], vec![2; 1000]].concat();
    assert!(std::fs::read(&path).unwrap() == expected, "{report}");
}

/// Goal: a program that opens a file through Millpond after its writer died finds the writer's
/// bytes, however late the keeper is. It does not wait for a writer that lives.
/// Incident: the successor read the old bytes, and its synced write was undone.
#[test]
fn an_open_waits_for_the_files_keeper() {
    for mode in [WriteMode::Through, WriteMode::Back] {
        let (_dir, path, mut keeper, mut writer) = kept("dirty");
        let options = OpenOptions::new().read(true).write(true).write_mode(mode);
        let open = {
            let (path, options) = (path.clone(), options.clone());
            move || {
                let engine = common::engine(1 << 20, BackendChoice::Threads);
                let file = engine.open(&path, &options).unwrap();
                let mut bytes = vec![0; PAGE];
                let count = file.read_at(&mut bytes, 0).unwrap();
                bytes.truncate(count);
                (engine, file, bytes)
            }
        };
        // The writer lives, so an open does not wait for its pages.
        drop(open());
        keeper.signal(libc::SIGSTOP);
        writer.kill();
        let (send, opened) = channel();
        let opener = std::thread::spawn(move || drop(send.send(open())));
        // An open before the keeper continues, or after it, finds the same bytes.
        let early = opened.recv_timeout(Duration::from_millis(300)).ok();
        keeper.signal(libc::SIGCONT);
        let (_engine, file, bytes) = early.unwrap_or_else(|| opened.recv().unwrap());
        assert!(bytes == [1; PAGE], "{} bytes: the file was not written yet", bytes.len());
        file.write_all_at(&[2; PAGE], 0).unwrap();
        file.sync_all().unwrap();
        keeper.wait_for("report");
        opener.join().unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), [2; PAGE], "{mode:?}");
    }
}

/// Goal: of two processes that have a file open, only one hands it to a keeper.
#[test]
fn a_file_has_one_keeper() {
    let dir = temp_dir();
    let path = dir.path().join("file");
    let addresses = ["one", "two"].map(|name| dir.path().join(name).to_str().unwrap().to_string());
    let mut keepers = addresses.each_ref().map(|at| Actor::start("keeper", &[at], None));
    let text = path.to_str().unwrap();
    let mut first = Actor::start("writer", &[&addresses[0], text, "dirty"], None);
    assert_eq!(std::fs::read(&path).unwrap(), []);
    let mut second = Actor::start("writer", &[&addresses[1], text, "dirty"], None);
    assert_eq!(std::fs::read(&path).unwrap(), [1; PAGE], "it went through");
    second.kill();
    assert!(keepers[1].wait_for("report").contains("files: []"));
    first.kill();
    // Another process has changed the file in the meantime.
    rescue_of(&keepers[0].wait_for("report"));
}

/// Goal: an engine does not send anything to a process that is no keeper.
/// Incident: a process that bound a dead keeper's name received descriptors of files.
#[test]
fn an_impostor_is_not_used_as_keeper() {
    if !is_root() {
        return;
    }
    let address = format!("@millpond-test/{}", std::process::id());
    let mut impostor = Actor::start("impostor", &[&address], Some(OTHER_USER));
    let built = builder(&address).build();
    assert_eq!(built.unwrap_err().errno(), libc::EPERM);
    assert_eq!(impostor.wait_for("got"), "0");
    // Killed, which frees its address.
    drop(impostor);

    // The same after a real keeper has died.
    let dir = temp_dir();
    let path = dir.path().join("file");
    let mut keeper = Actor::start("keeper", &[&address], None);
    let mut writer = Actor::start("writer", &[&address, path.to_str().unwrap(), "stalled"], None);
    keeper.kill();
    let mut impostor = Actor::start("impostor", &[&address], Some(OTHER_USER));
    writer.send_line("go on");
    writer.wait_for("written");
    assert_eq!(std::fs::read(path.with_extension("new")).unwrap(), [4; PAGE]);
    // No process has connected, or it has sent nothing.
    writer.kill();
    drop(connect(&address));
    assert_eq!(impostor.wait_for("got"), "0");
}

/// Goal: unrelated processes can't find a keeper's socket. If they have its address, they can't
/// keep clients from it.
#[test]
fn unrelated_processes_at_the_socket() {
    if !is_root() {
        return;
    }
    let server = Server::bind(&Address::unique()).unwrap();
    let address = server.address().to_string();
    let stopper = server.stopper();
    let (send, reports) = channel();
    let thread = std::thread::spawn(move || server.serve(|report| send.send(report).unwrap()));
    let mut intruder = Actor::start("intruder", &[&address, "list"], Some(OTHER_USER));
    assert_eq!(intruder.wait_for("seen"), "Some(PermissionDenied) false");
    let _crowd = Actor::start("intruder", &[&address, "crowd"], Some(OTHER_USER));
    let dir = temp_dir();
    let path = dir.path().join("file");
    let mut writer = Actor::start("writer", &[&address, path.to_str().unwrap(), "dirty"], None);
    assert_eq!(std::fs::read(&path).unwrap(), [], "kept, and not written through");
    writer.kill();
    assert_eq!(reports.recv().unwrap().pages(), 1);
    assert_eq!(std::fs::read(&path).unwrap(), [1; PAGE]);
    stopper.stop_when_idle();
    thread.join().unwrap().unwrap();
    let outer = Path::new(&address).parent().and_then(Path::parent).unwrap();
    assert!(!outer.exists(), "the door is gone");
}

/// Goal: a client that sends the keeper a descriptor that takes long to close does not delay other
/// clients.
/// Method: a connection that lingers, whose other end reads nothing, in a message that is no
/// request.
/// Incident: the keeper's only serving thread closed descriptors.
#[test]
fn a_descriptor_that_takes_long_to_close() {
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
    let dir = temp_dir();
    let path = dir.path().join("file");
    let address = address_in(dir.path());
    let mut keeper = Actor::start("keeper", &[&address], None);
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut lingering = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (other_end, _) = listener.accept().unwrap();
    let for_long = Some(Duration::from_secs(600));
    rustix::net::sockopt::set_socket_linger(&lingering, for_long).unwrap();
    lingering.set_nonblocking(true).unwrap();
    while lingering.write(&[0; PAGE]).is_ok() {}
    lingering.set_nonblocking(false).unwrap();
    // So that this process is not the last to close it.
    keeper.signal(libc::SIGSTOP);
    let socket = connect(&address).unwrap();
    let fds = [lingering.as_fd()];
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    let bytes = [std::io::IoSlice::new(&[7; 64])];
    rustix::net::sendmsg(&socket, &bytes, &mut control, SendFlags::empty()).unwrap();
    drop(lingering);
    keeper.signal(libc::SIGCONT);
    // When the next request is answered, the keeper has closed the descriptor or is closing it.
    let mut answer = [0; 16];
    assert_eq!(rustix::io::read(&socket, &mut answer).unwrap(), 16);
    let mut writer = Actor::start("writer", &[&address, path.to_str().unwrap(), "dirty"], None);
    assert_eq!(std::fs::read(&path).unwrap(), [], "kept, and not written through");
    writer.kill();
    keeper.wait_for("report");
    assert_eq!(std::fs::read(&path).unwrap(), [1; PAGE]);
    drop(other_end);
}

/// Goal: a process that has changed its user is still served by its keeper.
#[test]
fn a_client_becomes_another_user() {
    if !is_root() {
        return;
    }
    let server = Server::bind(&Address::unique()).unwrap();
    let address = server.address().to_string();
    let stopper = server.stopper();
    let (send, reports) = channel();
    let thread = std::thread::spawn(move || server.serve(|report| send.send(report).unwrap()));
    let dir = temp_dir();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let path = dir.path().join("file");
    let mut client = Actor::start("turncoat", &[&address, path.to_str().unwrap()], None);
    client.kill();
    let report = reports.recv().unwrap();
    assert_eq!((report.pages(), report.is_complete()), (1, true), "{report}");
    assert_eq!(std::fs::read(&path).unwrap(), [7; PAGE]);
    stopper.stop_when_idle();
    thread.join().unwrap().unwrap();
}

/// Goal: the write after a keeper's death notices it and goes through.
/// Incident: a file that was handed over once counted as protected for the rest of its life.
#[test]
fn a_lost_keeper_is_noticed() {
    let (_dir, path, mut keeper, mut writer) = kept("bereft");
    keeper.kill();
    writer.send_line("go on");
    writer.wait_for("written");
    writer.kill();
    let bytes = std::fs::read(&path).unwrap();
    assert!(bytes.len() == 2 * PAGE && bytes[PAGE..] == [2; PAGE], "the second write is lost");
}

/// Goal: a keeper that does not answer delays a write for a limited time only.
#[test]
fn a_stopped_keeper_is_not_waited_for() {
    let (_dir, path, keeper, mut writer) = kept("stalled");
    keeper.signal(libc::SIGSTOP);
    writer.send_line("go on");
    writer.wait_for("written");
    assert_eq!(std::fs::read(path.with_extension("new")).unwrap(), [4; PAGE]);
}

/// Goal: after an engine has left its keeper, writes go through, also of files that were open
/// before.
/// Incident: they were acknowledged as protected, and a kill lost them.
#[test]
fn writes_go_through_after_leaving() {
    let (_dir, path, _keeper, mut writer) = kept("leaving");
    writer.kill();
    assert_eq!(std::fs::read(&path).unwrap(), [[3; PAGE], [2; PAGE]].concat());
}

/// Goal: a keeper's socket replaces a socket without a listener, and no other file.
/// Incident: a regular file at the path was deleted.
#[test]
fn a_socket_does_not_replace_a_file() {
    let dir = temp_dir();
    let address = address_in(dir.path());
    let in_the_way = |address: &str| {
        let bound = Server::bind(&address.parse().unwrap());
        assert_eq!(bound.unwrap_err().raw_os_error(), Some(libc::EADDRINUSE));
    };
    std::fs::write(&address, "precious").unwrap();
    in_the_way(&address);
    assert_eq!(std::fs::read(&address).unwrap(), b"precious");
    std::fs::remove_file(&address).unwrap();
    let server = Server::bind(&address.parse().unwrap()).unwrap();
    in_the_way(&address);
    drop(server);
    assert!(!Path::new(&address).exists());
}

/// Goal: blocks that were reserved ahead of a growing file are released after a kill.
#[test]
fn reserved_space_is_given_back() {
    let (_dir, path, mut keeper, mut writer) = kept("grown");
    let reserved = path.metadata().unwrap().blocks() * 512;
    if reserved < (8 << 20) + (128 << 10) {
        return common::skip(format_args!(
            "{reserved} bytes: the file system has nothing reserved ahead"
        ));
    }
    writer.kill();
    let report = keeper.wait_for("report");
    let metadata = path.metadata().unwrap();
    assert_eq!(metadata.len(), (8 << 20) + PAGE as u64, "{report}");
    let blocks = metadata.blocks() * 512;
    assert!(blocks <= metadata.len() + (64 << 10), "{blocks} bytes: {report}");
}

/// Goal: a full file system does not cost other files their pages, and pages that it has no space
/// for are stored in a rescue file.
/// Method: two files on a small tmpfs, which is filled when the process is dead, and one elsewhere.
#[test]
fn pages_without_space_go_to_a_rescue_file() {
    if !is_root() {
        return;
    }
    let dir = temp_dir();
    let small = dir.path().join("small");
    std::fs::create_dir(&small).unwrap();
    let mounted =
        Command::new("mount").args(["-t", "tmpfs", "-o", "size=64k", "none"]).arg(&small).status();
    if !mounted.is_ok_and(|status| status.success()) {
        return common::skip("can't mount a file system");
    }
    let unmount = Unmount(small.clone());
    let path = small.join("file");
    let address = address_in(dir.path());
    let mut keeper = Actor::start("keeper", &[&address], None);
    let mut writer = Actor::start("writer", &[&address, path.to_str().unwrap(), "two"], None);
    keeper.signal(libc::SIGSTOP);
    writer.kill();
    // Another file takes the space that was reserved for the page.
    let file = File::options().write(true).open(&path).unwrap();
    let times = (file.metadata().unwrap().mtime(), file.metadata().unwrap().mtime_nsec());
    rustix::fs::ftruncate(&file, 0).unwrap();
    let to = rustix::fs::Timespec { tv_sec: times.0, tv_nsec: times.1 };
    let times = rustix::fs::Timestamps { last_access: to, last_modification: to };
    rustix::fs::futimens(&file, &times).unwrap();
    drop(file);
    let mut filler = File::create(small.join("filler")).unwrap();
    while filler.write(&[0; PAGE]).is_ok() {}
    drop(filler);
    keeper.signal(libc::SIGCONT);
    let report = keeper.wait_for("report");
    assert!(report.contains("writing") && report.contains("code: 28"), "{report}");
    let rescue = rescue_of(&report);
    assert!(!rescue.starts_with(&small), "there is no room: {rescue:?}");
    std::fs::remove_file(small.join("filler")).unwrap();
    let restored = keeper::restore(&rescue, None, true);
    std::fs::remove_file(&rescue).unwrap();
    assert_eq!(restored.unwrap().bytes, 2 * PAGE as u64);
    assert_eq!(std::fs::read(&path).unwrap(), [1; 2 * PAGE]);
    drop(unmount);
}

struct Unmount(PathBuf);

impl Drop for Unmount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

/// Goal: an incomplete or missing rescue file causes no write.
#[test]
fn an_incomplete_rescue_file_is_refused() {
    let dir = temp_dir();
    let path = dir.path().join("file");
    std::fs::write(&path, [5; 100]).unwrap();
    let whole = "millpond rescue 1\npath: \ndevice: 1\ninode: 2\nsize: 3\nchanged: 4\nlength: 5\n\
                 process: 6\n\nat 0 4\nabcd\nend\n";
    let rescue = dir.path().join("rescue");
    for end in 0..whole.len() {
        std::fs::write(&rescue, &whole[..end]).unwrap();
        let refused = keeper::restore(&rescue, Some(&path), true).unwrap_err();
        assert_eq!(refused.kind(), std::io::ErrorKind::InvalidData, "{end} bytes");
        assert_eq!(std::fs::read(&path).unwrap(), [5; 100]);
    }
    std::fs::write(&rescue, whole).unwrap();
    assert_eq!(keeper::restore(&rescue, Some(&path), true).unwrap().bytes, 4);
    let mut bytes = [0; 5];
    File::open(&path).unwrap().read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"abcd\x05");
}
