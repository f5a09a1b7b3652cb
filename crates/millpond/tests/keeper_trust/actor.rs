//! Processes of this test binary in other roles.

use super::*;

/// A process in another role; killed when dropped.
pub struct Actor {
    pub child: Child,
    pub said: BufReader<ChildStdout>,
}

impl Actor {
    /// Starts an actor, as another user if `uid` is set; returns when it has reported that it is
    /// ready.
    pub fn start(role: &str, arguments: &[&str], uid: Option<u32>) -> Actor {
        // By descriptor: the other user may have no access to this program's directory.
        let program = File::open("/proc/self/exe").unwrap();
        let mut command = Command::new(format!("/proc/self/fd/{}", program.as_raw_fd()));
        command.args(["actor::role", "--exact", "--ignored", "--nocapture", "--test-threads=1"]);
        command.env(ROLE, [&[role], arguments].concat().join("|"));
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        if let Some(uid) = uid {
            command.uid(uid).gid(uid);
        }
        let mut child = command.spawn().unwrap();
        let said = BufReader::new(child.stdout.take().unwrap());
        let mut actor = Actor { child, said };
        actor.wait_for("ready");
        actor
    }

    /// Waits for a line with that beginning, and returns the rest of it.
    pub fn wait_for(&mut self, beginning: &str) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert_ne!(
                self.said.read_line(&mut line).unwrap(),
                0,
                "it ended, without {beginning:?}"
            );
            // The test harness prints text before the line.
            if let Some(at) = line.find(beginning) {
                return line[at + beginning.len()..].trim().to_string();
            }
        }
    }

    pub fn signal(&self, signal: i32) {
        // SAFETY: a child of ours that has not been waited for.
        unsafe { libc::kill(self.child.id() as i32, signal) };
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Sends a line, which makes the actor go on.
    pub fn send_line(&mut self, line: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{line}").unwrap();
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        self.signal(libc::SIGCONT);
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A directory with a keeper's address, the path of a file in it, the keeper, and a writer of kind
/// `what`.
pub fn kept(what: &str) -> (tempfile::TempDir, PathBuf, Actor, Actor) {
    let dir = temp_dir();
    let path = dir.path().join("file");
    let address = address_in(dir.path());
    let keeper = Actor::start("keeper", &[&address], None);
    let writer = Actor::start("writer", &[&address, path.to_str().unwrap(), what], None);
    (dir, path, keeper, writer)
}

pub fn say(line: &str) {
    println!("\n{line}");
    std::io::stdout().flush().unwrap();
}

pub fn read_line() -> String {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    line.trim().to_string()
}

pub fn builder(address: &str) -> EngineBuilder {
    let builder = Engine::builder().cache_bytes(16 << 20).backend(BackendChoice::Threads);
    builder.keeper(address.parse().unwrap())
}

/// The other roles.
#[test]
#[ignore = "a role, in which others start this program"]
pub fn role() {
    let role = std::env::var(ROLE).unwrap();
    let arguments: Vec<&str> = role.split('|').collect();
    match arguments[..] {
        ["keeper", address] => keeper_role(address),
        ["writer", address, path, what] => writer_role(address, Path::new(path), what),
        ["impostor", address] => impostor_role(address),
        ["intruder", address, how] => intruder_role(address, how),
        ["turncoat", address, path] => user_change_role(address, Path::new(path)),
        ["lingerer", name, count] => other_users::lingerer_role(name, count.parse().unwrap()),
        ["squatter", name] => other_users::squatter_role(name),
        ["address", directory] => other_users::address_role(directory),
        _ => panic!("{role}"),
    }
}

/// The keeper: prints its reports of dead processes.
pub fn keeper_role(address: &str) {
    let address: Address = address.parse().unwrap();
    let server = Server::bind(&address).unwrap();
    say("ready");
    server.serve(|report| say(&format!("report {report:?}"))).unwrap();
}

/// Writes to a file in mode back, and does not end.
pub fn writer_role(address: &str, path: &Path, what: &str) {
    let engine = builder(address).build().unwrap();
    let file = engine.open(path, &write_back()).unwrap();
    let page = |with: u8| vec![with; PAGE];
    match what {
        "dirty" => file.write_all_at(&page(1), 0).unwrap(),
        "two" => file.write_all_at(&[page(1), page(1)].concat(), 0).unwrap(),
        "synced" => {
            file.write_all_at(&page(1), 0).unwrap();
            file.sync_all().unwrap();
        }
        "grown" => {
            for at in 0..64 {
                file.write_all_at(&vec![1; 128 << 10], at * (128 << 10)).unwrap();
            }
            file.sync_all().unwrap();
            file.write_all_at(&page(2), 8 << 20).unwrap();
        }
        // The keeper is killed between these two steps.
        "bereft" => {
            file.write_all_at(&page(1), 0).unwrap();
            assert!(!engine.has_lost_keeper());
            say("ready");
            read_line();
            assert!(engine.has_lost_keeper() && engine.stats().has_lost_keeper);
            file.write_all_at(&page(2), PAGE as u64).unwrap();
            return sleep_until_killed("written");
        }
        "leaving" => {
            file.write_all_at(&page(1), 0).unwrap();
            engine.detach_keeper();
            assert!(!engine.has_lost_keeper());
            assert_eq!(std::fs::read(path).unwrap(), page(1));
            file.write_all_at(&page(2), PAGE as u64).unwrap();
            file.write_all_at(&page(3), 0).unwrap();
        }
        // The keeper is stopped.
        "stalled" => {
            say("ready");
            read_line();
            let other = engine.open(path.with_extension("new"), &write_back()).unwrap();
            other.write_all_at(&page(4), 0).unwrap();
            return sleep_until_killed("written");
        }
        _ => panic!("{what}"),
    }
    sleep_until_killed("ready");
}

pub fn sleep_until_killed(line: &str) {
    say(line);
    loop {
        std::thread::sleep(Duration::from_secs(1000));
    }
}

pub fn connect(address: &str) -> std::io::Result<OwnedFd> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    let at = match address.strip_prefix('@') {
        Some(name) => SocketAddrUnix::new_abstract_name(name.as_bytes())?,
        None => SocketAddrUnix::new(address)?,
    };
    rustix::net::connect(&socket, &at)?;
    Ok(socket)
}

/// Listens at a keeper's address, accepts all messages, and never answers.
pub fn impostor_role(address: &str) {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
    let flags = SocketFlags::CLOEXEC;
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    let name = address.strip_prefix('@').unwrap();
    rustix::net::bind(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap())
        .unwrap();
    rustix::net::listen(&socket, 16).unwrap();
    say("ready");
    let visitor = rustix::net::accept(&socket).unwrap();
    let mut bytes = [0; 64];
    let count = rustix::io::read(&visitor, &mut bytes).unwrap_or(0);
    say(&format!("got {count}"));
    read_line();
}

/// Connects to a keeper's socket.
pub fn intruder_role(address: &str, how: &str) {
    match how {
        "list" => {
            let directory = Path::new(address).parent().unwrap();
            let listed =
                std::fs::read_dir(directory.parent().unwrap()).err().map(|error| error.kind());
            let shown = std::fs::read_to_string("/proc/net/unix").unwrap();
            let secret = directory.file_name().unwrap().to_str().unwrap();
            say("ready");
            say(&format!("seen {listed:?} {}", shown.contains(secret)));
        }
        // The socket is found nevertheless.
        "crowd" => {
            let sockets: Vec<_> = (0..600).filter_map(|_| connect(address).ok()).collect();
            // The keeper accepts nothing of it.
            let message = [0u64; 8].map(u64::to_ne_bytes).concat();
            let sent = sockets.iter().filter(|socket| rustix::io::write(socket, &message).is_ok());
            let _ = sent.count();
            sleep_until_killed("ready");
        }
        _ => panic!("{how}"),
    }
}

/// Changes its user after it has built an engine.
pub fn user_change_role(address: &str, path: &Path) {
    let engine = builder(address).build().unwrap();
    let file = engine.open(path, &write_back()).unwrap();
    // SAFETY: no memory involved.
    unsafe {
        assert_eq!(libc::setresgid(OTHER_USER, OTHER_USER, OTHER_USER), 0);
        assert_eq!(libc::setresuid(OTHER_USER, OTHER_USER, OTHER_USER), 0);
    }
    file.write_all_at(&[7; PAGE], 0).unwrap();
    let at_once = std::fs::metadata(path).map_or(0, |metadata| metadata.len());
    sleep_until_killed(&format!("ready {at_once}"));
}
