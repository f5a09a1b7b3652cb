//! What a keeper must not do, and what must not be done to it: with successors, strangers and hostile
//! clients.
//!
//! A keeper and the programs that it serves are processes of this test binary, in other roles, so that
//! each can be stopped and killed by itself. Tests with another user need to be root, and say so where
//! they are not.

#[path = "keeper_trust/actor.rs"]
mod actor;
mod common;
#[path = "keeper_trust/strangers.rs"]
mod strangers;

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
const STRANGER: u32 = 65_534;

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

/// Goal: what somebody writes to a file after its process died is not overwritten; what the process
/// had written is not lost either.
/// Incident: the keeper wrote its page over what a successor had written and synced.
#[test]
fn a_successor_is_not_overwritten() {
    let (_dir, path, mut keeper, mut writer) = kept("two");
    // So that the successor comes first.
    keeper.signal(libc::SIGSTOP);
    writer.kill();
    let successor = File::options().read(true).write(true).open(&path).unwrap();
    successor.write_all_at(&[2; PAGE], 0).unwrap();
    successor.sync_all().unwrap();
    keeper.signal(libc::SIGCONT);
    let report = keeper.hears("report");
    assert_eq!(std::fs::read(&path).unwrap(), [2; PAGE]);
    // Somebody else has to decide.
    let rescue = rescue_of(&report);
    assert_eq!(rescue.parent(), path.parent());
    assert_eq!(rescue.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    successor.write_all_at(&[3; 1], 100).unwrap();
    let refused = keeper::restore(&rescue, None, false).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::StaleNetworkFileHandle, "{refused}");
    assert_eq!(keeper::restore(&rescue, None, true).unwrap().bytes, 2 * PAGE as u64);
    assert_eq!(std::fs::read(&path).unwrap(), [1; 2 * PAGE]);
}

/// Goal: what others append to a file is not cut off when a process that has it open is killed.
/// Incident: the keeper set each file to the size that the process knew, dirty or not.
#[test]
fn what_others_append_stays() {
    let (_dir, path, mut keeper, mut writer) = kept("synced");
    let other = File::options().append(true).open(&path).unwrap();
    (&other).write_all(&[2; 1000]).unwrap();
    other.sync_all().unwrap();
    writer.kill();
    let report = keeper.hears("report");
    assert!(report.contains("failures: []"), "{report}");
    let expected = [vec![1; PAGE], vec![2; 1000]].concat();
    assert!(std::fs::read(&path).unwrap() == expected, "{report}");
}

/// Goal: a program that opens a file through Millpond after its process died finds what that had
/// written, however late the keeper is, and does not wait for a process that lives.
/// Incident: the successor read the old bytes, and its synced write was undone.
#[test]
fn who_opens_a_file_waits_for_its_keeper() {
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
        // The process lives: its pages are its own affair.
        drop(open());
        keeper.signal(libc::SIGSTOP);
        writer.kill();
        let (send, opened) = channel();
        let opener = std::thread::spawn(move || drop(send.send(open())));
        // It may look at the file now, or after the keeper has gone on: it finds the same.
        let early = opened.recv_timeout(Duration::from_millis(300)).ok();
        keeper.signal(libc::SIGCONT);
        let (_engine, file, bytes) = early.unwrap_or_else(|| opened.recv().unwrap());
        assert!(bytes == [1; PAGE], "{} bytes: the file was not written yet", bytes.len());
        file.write_all_at(&[2; PAGE], 0).unwrap();
        file.sync_all().unwrap();
        keeper.hears("report");
        opener.join().unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), [2; PAGE], "{mode:?}");
    }
}

/// Goal: two processes that have a file do not both leave it to a keeper.
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
    assert!(keepers[1].hears("report").contains("files: []"));
    first.kill();
    // What it finds was changed by somebody else.
    rescue_of(&keepers[0].hears("report"));
}

/// Goal: an engine talks to no stranger, and hands it nothing.
/// Incident: a process that bound a dead keeper's name was handed descriptors of files.
#[test]
fn a_stranger_is_no_keeper() {
    if !is_root() {
        return;
    }
    let address = format!("@millpond-test/{}", std::process::id());
    let mut impostor = Actor::start("impostor", &[&address], Some(STRANGER));
    let built = builder(&address).build();
    assert_eq!(built.unwrap_err().errno(), libc::EPERM);
    assert_eq!(impostor.hears("got"), "0");
    // Gone, and with it its hold on the address.
    drop(impostor);

    // The same after a keeper of ours has died.
    let dir = temp_dir();
    let path = dir.path().join("file");
    let mut keeper = Actor::start("keeper", &[&address], None);
    let mut writer = Actor::start("writer", &[&address, path.to_str().unwrap(), "stalled"], None);
    keeper.kill();
    let mut impostor = Actor::start("impostor", &[&address], Some(STRANGER));
    writer.tell("go on");
    writer.hears("written");
    assert_eq!(std::fs::read(path.with_extension("new")).unwrap(), [4; PAGE]);
    // Nobody has come, or he said nothing.
    writer.kill();
    drop(connect(&address));
    assert_eq!(impostor.hears("got"), "0");
}

/// Goal: strangers neither find a keeper's door nor, where they have it told, keep others from it.
#[test]
fn strangers_at_the_door() {
    if !is_root() {
        return;
    }
    let server = Server::bind(&Address::unique()).unwrap();
    let address = server.address().to_string();
    let stopper = server.stopper();
    let (send, reports) = channel();
    let thread = std::thread::spawn(move || server.serve(|report| send.send(report).unwrap()));
    let mut intruder = Actor::start("intruder", &[&address, "list"], Some(STRANGER));
    assert_eq!(intruder.hears("seen"), "Some(PermissionDenied) false");
    let _crowd = Actor::start("intruder", &[&address, "crowd"], Some(STRANGER));
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

/// Goal: a client that sends a keeper something that takes long to close keeps nobody else waiting.
/// Method: a connection that lingers, whose other end reads nothing, in a message that is no request.
/// Incident: descriptors were closed by the one thread that served.
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
    // So that the last to close it is not ourselves.
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
    // It has closed the descriptor, or is at it, when the next is answered.
    let mut answer = [0; 16];
    assert_eq!(rustix::io::read(&socket, &mut answer).unwrap(), 16);
    let mut writer = Actor::start("writer", &[&address, path.to_str().unwrap(), "dirty"], None);
    assert_eq!(std::fs::read(&path).unwrap(), [], "kept, and not written through");
    writer.kill();
    keeper.hears("report");
    assert_eq!(std::fs::read(&path).unwrap(), [1; PAGE]);
    drop(other_end);
}

/// Goal: a process that has become another user is still served, and speaks to its keeper.
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

/// Goal: the death of a keeper is noticed by the next write, which goes through.
/// Incident: a file that was handed over once counted as kept for ever.
#[test]
fn a_lost_keeper_is_noticed() {
    let (_dir, path, mut keeper, mut writer) = kept("bereft");
    keeper.kill();
    writer.tell("go on");
    writer.hears("written");
    writer.kill();
    let bytes = std::fs::read(&path).unwrap();
    assert!(bytes.len() == 2 * PAGE && bytes[PAGE..] == [2; PAGE], "the second write is lost");
}

/// Goal: a keeper that does not answer holds up a write for a while, and not for ever.
#[test]
fn a_stopped_keeper_is_not_waited_for() {
    let (_dir, path, keeper, mut writer) = kept("stalled");
    keeper.signal(libc::SIGSTOP);
    writer.tell("go on");
    writer.hears("written");
    assert_eq!(std::fs::read(path.with_extension("new")).unwrap(), [4; PAGE]);
}

/// Goal: after an engine has left its keeper, writes go through, of files that it had before, too.
/// Incident: they were acknowledged as kept, and a kill lost them.
#[test]
fn writes_go_through_after_leaving() {
    let (_dir, path, _keeper, mut writer) = kept("leaving");
    writer.kill();
    assert_eq!(std::fs::read(&path).unwrap(), [[3; PAGE], [2; PAGE]].concat());
}

/// Goal: a keeper's socket replaces one that nobody listens at, and nothing else.
/// Incident: a regular file at the path was deleted.
#[test]
fn a_door_is_not_made_over_a_file() {
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

/// Goal: space that was reserved ahead of a growing file does not stay after a kill.
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
    let report = keeper.hears("report");
    let metadata = path.metadata().unwrap();
    assert_eq!(metadata.len(), (8 << 20) + PAGE as u64, "{report}");
    let blocks = metadata.blocks() * 512;
    assert!(blocks <= metadata.len() + (64 << 10), "{blocks} bytes: {report}");
}

/// Goal: a file system that has no room costs nobody else his pages, and what it can't take is kept.
/// Method: two files on a small tmpfs, which is filled when the process is dead, and one elsewhere.
#[test]
fn what_has_no_room_is_kept() {
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
    // What was reserved for it goes to another, behind its back.
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
    let report = keeper.hears("report");
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

/// Goal: a rescue file that is not whole, or none, writes nothing.
#[test]
fn half_a_rescue_is_none() {
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
