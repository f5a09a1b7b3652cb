//! A keeper with lying clients: `cargo +nightly fuzz run keeper`.
//!
//! Half of an input are messages, with descriptors of files and of memory, from this process. The
//! other half is a program that has dirty pages, overwrites the tables that it shares with its
//! keeper, and is killed. The keeper may write any bytes to that program's own file, and none to
//! another file. It neither ends nor hangs: a program that comes afterwards is served.

#![no_main]

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use millpond::keeper::{Address, Server};
use millpond::{BackendChoice, Engine, OpenOptions, WriteMode};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketType,
};

/// In the environment of the program that lies: where its keeper is and its files are.
const ROLE: &str = "MILLPOND_FUZZ_LIAR";
const PAGE: usize = 4096;
const WORD: usize = 8;

struct Bench {
    address: Address,
    dir: PathBuf,
}

fn bench() -> &'static Bench {
    static BENCH: OnceLock<Bench> = OnceLock::new();
    BENCH.get_or_init(|| {
        if let Ok(role) = std::env::var(ROLE) {
            lie(&role);
        }
        let server = Server::bind(&Address::unique()).unwrap();
        let address = server.address().clone();
        std::thread::spawn(move || {
            let served = server.serve(|_| {});
            panic!("the keeper has ended: {served:?}");
        });
        let dir = std::env::temp_dir().join(format!("millpond-fuzz-keeper-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        Bench { address, dir }
    })
}

/// The program: one dirty file, tables as the input says, and its end.
fn lie(role: &str) -> ! {
    let (address, path) = role.split_once('|').unwrap();
    let mut lies = Vec::new();
    std::io::stdin().read_to_end(&mut lies).unwrap();
    let builder = Engine::builder().cache_bytes(1 << 20).backend(BackendChoice::Threads);
    let engine = builder.keeper(address.parse().unwrap()).build().unwrap();
    let options = OpenOptions::new().read(true).write(true).write_mode(WriteMode::Back);
    let file = engine.open(path, &options).unwrap();
    file.write_all_at(&[7; 3 * PAGE], 0).unwrap();
    scribble(&lies);
    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL)
        .unwrap();
    unreachable!("killed");
}

/// Words of the shared memory, by their numbers.
fn scribble(lies: &[u8]) {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let ranges = maps.lines().filter(|line| line.contains("memfd:") && line.contains("rw-s"));
    let starts = ranges.filter_map(|line| u64::from_str_radix(line.split('-').next()?, 16).ok());
    let Some(start) = starts.min() else { return };
    let memory = File::options().write(true).open("/proc/self/mem").unwrap();
    for lie in lies.chunks_exact(3 + WORD) {
        // The header, op slots, entries and the first records are in the first 64 KiB.
        let word = u64::from(u16::from_le_bytes([lie[0], lie[1]])) % ((64 << 10) / WORD as u64);
        let place = start + word * WORD as u64;
        let mut value = u64::from_le_bytes(lie[3..].try_into().unwrap());
        // Few numbers are near the truth by chance.
        if lie[2] & 1 == 1 {
            value &= 0xFFFF;
        }
        let _ = memory.write_all_at(&value.to_le_bytes(), place);
    }
}

fn connect(address: &Address) -> Option<rustix::fd::OwnedFd> {
    let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).ok()?;
    let name = address.to_string();
    let to = match name.strip_prefix('@') {
        Some(name) => rustix::net::SocketAddrUnix::new_abstract_name(name.as_bytes()),
        None => rustix::net::SocketAddrUnix::new(&*name),
    };
    rustix::net::connect(&socket, &to.ok()?).ok()?;
    Some(socket)
}

/// A message of words, which begins as a right one does if it says so.
fn send(bench: &Bench, message: &[u8], stranger: &File) {
    let Some((&how, rest)) = message.split_first() else { return };
    let Some(socket) = connect(&bench.address) else { panic!("nobody listens") };
    let mut words = rest.to_vec();
    if how & 1 == 1 {
        words.resize(8 * WORD, 0);
        words[..WORD].copy_from_slice(b"MPKEEP02");
        words[WORD..2 * WORD].copy_from_slice(&u64::from(how >> 1 & 7).to_le_bytes());
    }
    let memory = rustix::fs::memfd_create("fuzz", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let memory = File::from(memory);
    memory.write_all_at(rest, 0).unwrap();
    memory.set_len((usize::from(how) * PAGE) as u64).unwrap();
    let own = rustix::process::pidfd_open(
        rustix::process::getpid(),
        rustix::process::PidfdFlags::empty(),
    );
    let own = own.unwrap();
    let all: [BorrowedFd<'_>; 3] = [memory.as_fd(), own.as_fd(), stranger.as_fd()];
    let fds = &all[..usize::from(how >> 4) % 4];
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(fds)));
    }
    let parts = [std::io::IoSlice::new(&words)];
    let _ = rustix::net::sendmsg(&socket, &parts, &mut ancillary, SendFlags::NOSIGNAL);
    // An answer, or the end of the connection; a message that is none has neither at once.
    let limit = Some(Duration::from_millis(20));
    let _ = rustix::net::sockopt::set_socket_timeout(
        &socket,
        rustix::net::sockopt::Timeout::Recv,
        limit,
    );
    let _ = rustix::net::recv(&socket, &mut [0; 64][..], rustix::net::RecvFlags::empty());
}

fn liar(bench: &Bench, lies: &[u8], path: &Path) {
    let mut program = Command::new(std::env::current_exe().unwrap());
    program.env(ROLE, format!("{}|{}", bench.address, path.display()));
    // libFuzzer runs a target with an empty input once.
    program.arg("-runs=0").stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut program = program.spawn().unwrap();
    program.stdin.take().unwrap().write_all(lies).unwrap();
    let done = program.wait_with_output().unwrap();
    assert_eq!(done.status.signal(), Some(9), "{}", String::from_utf8_lossy(&done.stderr));
}

fuzz_target!(|input: &[u8]| {
    let bench = bench();
    let (own, other) = (bench.dir.join("own"), bench.dir.join("other"));
    std::fs::write(&own, [1; 2 * PAGE]).unwrap();
    std::fs::write(&other, [2; 2 * PAGE]).unwrap();
    let stranger = File::open(&other).unwrap();
    match input.split_first() {
        Some((how, rest)) if how & 3 != 0 => {
            rest.chunks(1 + 8 * WORD).for_each(|message| send(bench, message, &stranger));
        }
        Some((_, rest)) => liar(bench, rest, &own),
        None => {}
    }
    // An honest client is served, and no other file has changed.
    liar(bench, &[], &own);
    let written = File::open(&own).unwrap();
    millpond::keeper::await_written(written.as_fd(), Duration::from_secs(10)).unwrap();
    let mut bytes = [0; 3 * PAGE];
    written.read_exact_at(&mut bytes, 0).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 7), "not written");
    assert_eq!(std::fs::read(&other).unwrap(), [2; 2 * PAGE]);
});
