//! Goal: other users of the machine can't affect the paths that the commands open, create or load.
//!
//! Method: a table of paths and of entries that another user can have made, each with its expected outcome;
//! chains of directories with random owners, modes and links, next to an oracle that checks each of them; a
//! link that another user flips while programs start. The other user has number 65534, so most cases need
//! root. `MILLPOND_TEST_SEED` replays the random ones.

#[allow(dead_code, reason = "the words of the header are of use here")]
#[path = "../../millpond-preload/src/report/layout.rs"]
mod layout;
#[path = "../../millpond/tests/common/skip.rs"]
mod skip;

use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

const MILLPOND: &str = env!("CARGO_BIN_EXE_millpond");
const STRANGER: u32 = 65_534;
/// The variables that name a directory for the library, or for a keeper's socket.
const PLACES: [&str; 3] = ["XDG_RUNTIME_DIR", "TMPDIR", "HOME"];

#[track_caller]
fn is_root() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        skip::skip("needs to be root, to have another user");
    }
    is_root
}

/// `millpond` with none of the variables that name directories.
fn millpond() -> Command {
    let mut command = Command::new(MILLPOND);
    for name in PLACES {
        command.env_remove(name);
    }
    command.current_dir("/");
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A Python program of the other user.
fn stranger(script: &str) -> Command {
    let mut command = Command::new("python3");
    command.args(["-c", script]).uid(STRANGER).gid(STRANGER).current_dir("/");
    command
}

/// A directory that any user may pass, in one with a sticky bit.
fn place() -> tempfile::TempDir {
    let dir = tempfile::Builder::new().prefix("others-").tempdir_in("/tmp").unwrap();
    fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
    dir
}

/// The reason why another user can replace the target of `path`; the oracle of these tests. The path is
/// walked by name, so a link on it is a reason, too.
fn distrust(path: &Path) -> Option<String> {
    for directory in path.parent()?.ancestors() {
        let metadata = match fs::symlink_metadata(directory) {
            // The keeper has ended and removed its directories.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            found => found.unwrap(),
        };
        let is_open = metadata.mode() & 0o022 != 0 && metadata.mode() & 0o1000 == 0;
        if !metadata.is_dir() || metadata.uid() != 0 || is_open {
            let (uid, mode) = (metadata.uid(), metadata.mode());
            return Some(format!("{}: user {uid}, mode {mode:o}", directory.display()));
        }
    }
    None
}

/// The library of a run, and the socket of its keeper; `None` if the library is not built into the program.
fn places_of_a_run(variables: &[(&str, &Path)]) -> Option<[PathBuf; 2]> {
    let mut command = millpond();
    command.args(["run", "--quiet", "--mode", "back", "--path", "/usr", "--", "/bin/sh", "-c"]);
    command.arg("echo $LD_PRELOAD; echo $MILLPOND_KEEPER");
    command.envs(variables.iter().copied());
    let output = command.output().unwrap();
    let told = text(&output.stderr);
    if told.contains("built without its preload library") {
        skip::skip("this program was built without its preload library");
        return None;
    }
    assert!(output.status.success(), "{variables:?}: {told}");
    let lines = text(&output.stdout);
    let mut lines = lines.lines().map(PathBuf::from);
    Some([lines.next().unwrap(), lines.next().unwrap()])
}

#[track_caller]
fn assert_trusted(path: &Path, case: &str) {
    assert_eq!(distrust(path), None, "{case}: {}", path.display());
}

/// The library, from a safe directory.
fn library() -> Option<Vec<u8>> {
    let dir = place();
    let [library, _] = places_of_a_run(&[("TMPDIR", dir.path())])?;
    assert!(library.starts_with(dir.path()), "a safe place is used: {}", library.display());
    Some(fs::read(library).unwrap())
}

fn fifo(path: &Path) {
    let mode = rustix::fs::Mode::from_bits_retain(0o666);
    rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
}

/// Makes the entry at a path.
type Put = fn(&Path);

/// Entries that the other user can have made in place of a directory or a file.
const SURROUNDINGS: [(&str, Put); 7] = [
    ("a directory of another user", |path| {
        fs::create_dir(path).unwrap();
        chown(path, Some(STRANGER), None).unwrap();
    }),
    ("a directory that others may write to", |path| {
        fs::create_dir(path).unwrap();
        fs::set_permissions(path, Permissions::from_mode(0o777)).unwrap();
    }),
    ("a link to a directory of another user", |path| {
        let behind = path.with_extension("behind");
        fs::create_dir(&behind).unwrap();
        chown(&behind, Some(STRANGER), None).unwrap();
        symlink(behind, path).unwrap();
    }),
    ("a link that leads nowhere", |path| symlink("/no/such", path).unwrap()),
    ("a link to itself", |path| symlink(path, path).unwrap()),
    ("a FIFO", fifo),
    ("a file", |path| {
        fs::write(path, "planted").unwrap();
        fs::set_permissions(path, Permissions::from_mode(0o666)).unwrap();
    }),
];

/// Goal: library and keeper's socket are where no other user can replace them, even with entries in place of
/// the directories that the environment names, at each level.
/// Incident: two levels were checked, and links were followed.
#[test]
fn the_library_and_the_socket_have_trusted_places() {
    if !is_root() {
        return;
    }
    let Some(library) = library() else { return };
    for name in PLACES {
        for (what, put) in SURROUNDINGS {
            for levels in 0..3 {
                let dir = place();
                let hostile = dir.path().join("hostile");
                put(&hostile);
                let named = (0..levels).fold(hostile.clone(), |path, _| path.join("own"));
                let _ = fs::create_dir_all(named.join(".cache"));
                let case = format!("{name}: {what}, {levels} levels above");
                let [loaded, socket] = places_of_a_run(&[(name, &named)]).unwrap();
                assert_trusted(&loaded, &case);
                assert_trusted(&socket, &case);
                assert!(fs::read(loaded).unwrap() == library, "{case}");
            }
        }
    }
}

/// Goal: an entry that another user made in place of the library's directory, or of the library, is never loaded.
#[test]
fn planted_libraries_are_not_loaded() {
    if !is_root() {
        return;
    }
    let Some(library) = library() else { return };
    let name = {
        let dir = place();
        let [loaded, _] = places_of_a_run(&[("TMPDIR", dir.path())]).unwrap();
        loaded.file_name().unwrap().to_owned()
    };
    for (what, put) in SURROUNDINGS {
        let dir = place();
        put(&dir.path().join("millpond-0"));
        let [loaded, _] = places_of_a_run(&[("TMPDIR", dir.path())]).unwrap();
        assert!(!loaded.starts_with(dir.path()), "{what}: {}", loaded.display());
        assert!(fs::read(loaded).unwrap() == library, "{what}");
    }
    let planted = vec![0; library.len()];
    for (what, put) in [
        ("a file", (|path, planted| fs::write(path, planted).unwrap()) as fn(&Path, &[u8])),
        ("a link", |path, planted| {
            fs::write(path.with_extension("behind"), planted).unwrap();
            symlink(path.with_extension("behind"), path).unwrap();
        }),
        ("a hard link to a file of another user", |path, planted| {
            let behind = path.with_extension("behind");
            fs::write(&behind, planted).unwrap();
            chown(&behind, Some(STRANGER), None).unwrap();
            fs::hard_link(behind, path).unwrap();
        }),
        ("a FIFO", |path, _| fifo(path)),
    ] {
        let dir = place();
        let own = dir.path().join("millpond-0");
        fs::create_dir(&own).unwrap();
        put(&own.join(&name), &planted);
        let [loaded, _] = places_of_a_run(&[("TMPDIR", dir.path())]).unwrap();
        assert_eq!(loaded, own.join(&name), "{what}");
        assert!(fs::symlink_metadata(&loaded).unwrap().is_file(), "{what}");
        assert!(fs::read(loaded).unwrap() == library, "{what}");
    }
}

/// SplitMix64, seeded by MILLPOND_TEST_SEED or the clock.
struct Random(u64);

impl Random {
    fn from_environment() -> Self {
        let seed = std::env::var("MILLPOND_TEST_SEED").ok().and_then(|seed| seed.parse().ok());
        let now = std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64;
        let seed = seed.unwrap_or(now);
        println!("MILLPOND_TEST_SEED={seed}");
        Self(seed)
    }

    fn below(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % below
    }
}

fn scale() -> f64 {
    std::env::var("MILLPOND_TEST_SCALE").ok().and_then(|scale| scale.parse().ok()).unwrap_or(1.0)
}

/// Goal: the same for chains of directories with random owners, modes and links; a chain that is safe is used.
#[test]
fn random_chains_of_directories() {
    if !is_root() || library().is_none() {
        return;
    }
    let mut random = Random::from_environment();
    for number in 0..(30.0 * scale()) as u32 {
        let dir = place();
        let mut path = dir.path().to_owned();
        let mut chain = String::new();
        for level in 0..1 + random.below(4) {
            let made = path.join(format!("level-{level}"));
            fs::create_dir(&made).unwrap();
            let mode = [0o755, 0o700, 0o711, 0o755, 0o775, 0o757, 0o1777][random.below(7) as usize];
            let owner = if random.below(4) == 0 { STRANGER } else { 0 };
            fs::set_permissions(&made, Permissions::from_mode(mode)).unwrap();
            chown(&made, Some(owner), None).unwrap();
            chain += &format!("/{mode:o},{owner}");
            path = made;
            if random.below(3) == 0 {
                let link = path.with_extension("link");
                symlink(&path, &link).unwrap();
                chain += "(link)";
                path = link;
            }
        }
        let resolved = path.canonicalize().unwrap();
        let is_safe = distrust(&resolved.join("millpond-0")).is_none();
        let [loaded, socket] = places_of_a_run(&[("TMPDIR", &path)]).unwrap();
        let case = format!("chain {number}: {chain}");
        assert_trusted(&loaded, &case);
        assert_trusted(&socket, &case);
        assert_eq!(loaded.starts_with(&resolved), is_safe, "{case}: {}", loaded.display());
        // A path that is too long for a socket is safe, too, and not used.
        assert!(is_safe || !socket.starts_with(&resolved), "{case}: {}", socket.display());
    }
}

/// Goal: a link that another user changes while a program starts has no effect after it was checked.
#[test]
fn a_link_that_is_flipped_while_programs_start() {
    if !is_root() || library().is_none() {
        return;
    }
    let dir = place();
    let theirs = dir.path().join("theirs");
    fs::create_dir_all(dir.path().join("safe/millpond")).unwrap();
    fs::create_dir(&theirs).unwrap();
    chown(&theirs, Some(STRANGER), None).unwrap();
    let script = "import os, sys\n\
        os.chdir(sys.argv[1]); os.makedirs('evil/millpond')\n\
        os.symlink('../safe', 'one'); os.symlink('evil', 'two'); os.symlink('evil', 'link')\n\
        print('ready', flush=True)\n\
        while True:\n\
        \x20   for to in 'one', 'two': os.symlink(os.readlink(to), 'new'); os.rename('new', 'link')\n";
    let mut flipping = stranger(script);
    let mut flipping = flipping.arg(&theirs).stdout(Stdio::piped()).spawn().map(Ended).unwrap();
    let mut line = String::new();
    BufReader::new(flipping.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    for _ in 0..(20.0 * scale()) as u32 {
        let [loaded, socket] =
            places_of_a_run(&[("XDG_RUNTIME_DIR", &theirs.join("link"))]).unwrap();
        assert_trusted(&loaded, "flipped");
        assert_trusted(&socket, "flipped");
    }
}

/// Goal: with a mask of 0, no file, directory or socket is writable for other users, except the keeper's
/// socket.
#[test]
fn an_open_mask_opens_nothing() {
    if !is_root() {
        return;
    }
    let dir = place();
    let mut command = Command::new("/bin/sh");
    for name in PLACES {
        command.env_remove(name);
    }
    command.args([
        "-c",
        "umask 0; exec \"$@\"",
        "sh",
        MILLPOND,
        "run",
        "--quiet",
        "--mode",
        "back",
    ]);
    command.args(["--path", "/usr", "--", "/bin/sh", "-c"]);
    command.arg("find \"$TMPDIR\" -mindepth 1 ! -type s -perm /022; find \"$TMPDIR\" -type s");
    let output = command.env("TMPDIR", dir.path()).current_dir("/").output().unwrap();
    if text(&output.stderr).contains("built without its preload library") {
        return skip::skip("this program was built without its preload library");
    }
    let found = text(&output.stdout);
    assert!(found.lines().count() == 1 && found.trim().ends_with("/door"), "{found}");
}

/// Goal: a keeper replaces only a dead socket, and waits for no lock of another user.
#[test]
fn a_keepers_address_is_taken() {
    if !is_root() {
        return;
    }
    for (what, put) in SURROUNDINGS {
        let dir = place();
        let address = dir.path().join("door");
        put(&address);
        let before = fs::symlink_metadata(&address).unwrap().ino();
        let output = millpond().arg("keeper").arg(&address).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{what}: {}", text(&output.stderr));
        assert_eq!(fs::symlink_metadata(&address).unwrap().ino(), before, "{what}");
        let left = fs::read_dir(dir.path()).unwrap().flatten().map(|entry| entry.file_name());
        let left: Vec<_> = left.filter(|name| name.to_str().unwrap().starts_with('.')).collect();
        assert!(left.is_empty(), "{what}: {left:?}");
    }
    // A listening socket of another user.
    let dir = place();
    fs::set_permissions(dir.path(), Permissions::from_mode(0o1777)).unwrap();
    let address = dir.path().join("door");
    let script = "import fcntl, os, socket, sys, time\n\
        door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); door.bind(sys.argv[1]); door.listen()\n\
        fcntl.flock(os.open(os.path.dirname(sys.argv[1]), 0), fcntl.LOCK_EX)\n\
        print('ready', flush=True); time.sleep(1000)\n";
    let mut squatter = stranger(script);
    let mut squatter = squatter.arg(&address).stdout(Stdio::piped()).spawn().map(Ended).unwrap();
    let mut line = String::new();
    BufReader::new(squatter.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let output = millpond().arg("keeper").arg(&address).output().unwrap();
    assert!(text(&output.stderr).contains("in use"), "{}", text(&output.stderr));
    // In another directory there is no lock, though this one is locked.
    let other = dir.path().join("other");
    let mut keeper = millpond().arg("keeper").arg(&other).spawn().map(Ended).unwrap();
    while !other.exists() {
        assert!(keeper.0.try_wait().unwrap().is_none(), "the keeper ended");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}

/// Goal: `millpond rescue` refuses to write bytes of another user to a file that is not that user's, with
/// the reason.
#[test]
fn a_rescue_file_of_another_user_is_refused() {
    if !is_root() {
        return;
    }
    let dir = place();
    let target = dir.path().join("pass\x1b[2Jwd");
    fs::write(&target, "root:x:0:0\n").unwrap();
    let metadata = target.metadata().unwrap();
    let changed = metadata.mtime() * 1_000_000_000 + metadata.mtime_nsec();
    let (device, inode) = (metadata.dev(), metadata.ino());
    let name = target.to_str().unwrap().replace('\x1b', "\\x1b");
    let rescue = dir.path().join("db.rescue-4711-0badcafe");
    fs::write(
        &rescue,
        format!(
            "millpond rescue 1\npath: {name}\ndevice: {device}\ninode: {inode}\nsize: 11\n\
             changed: {changed}\nlength: 11\nprocess: 1\n\nat 0 11\nevil::0:0:\n\nend\n"
        ),
    )
    .unwrap();
    chown(&rescue, Some(STRANGER), None).unwrap();
    let run =
        |options: &[&str]| millpond().arg("rescue").arg(&rescue).args(options).output().unwrap();
    let refused = run(&[]);
    let told = text(&refused.stderr);
    assert_eq!(refused.status.code(), Some(1), "{told}");
    assert!(told.contains("belongs to user 65534") && told.contains("--force"), "{told}");
    assert!(!told.contains('\x1b'), "{told:?}");
    assert_eq!(fs::read(&target).unwrap(), b"root:x:0:0\n");
    let forced = run(&["--force"]);
    assert!(forced.status.success() && !text(&forced.stdout).contains('\x1b'), "{forced:?}");
    assert_eq!(fs::read(&target).unwrap(), b"evil::0:0:\n");
}

/// Goal: file names are printed to a terminal without control characters.
/// Incident: `--explain` printed them unchanged.
#[test]
fn names_of_files_are_printable() {
    let dir = tempfile::tempdir().unwrap();
    let name = "a\x1b]0;title\x07\nmillpond: forged";
    fs::write(dir.path().join(name), "contents").unwrap();
    let mut command = millpond();
    command.args(["run", "--explain", "--", "cat", name]).current_dir(dir.path());
    let output = command.output().unwrap();
    let told = text(&output.stderr);
    if told.contains("built without its preload library") {
        return skip::skip("this program was built without its preload library");
    }
    assert_eq!(output.stdout, b"contents", "{told}");
    assert!(told.contains("a?]0;title??millpond: forged"), "{told:?}");
    assert!(!told.chars().any(|c| c.is_control() && c != '\n'), "{told:?}");
}

/// Another user's memory files with the names that `millpond top` searches for: full of rows, without text,
/// malformed.
const MEMORY_FILES: &str = "import os, resource, struct, sys, time\n\
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n\
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))\n\
    form, row, size = (int(word) for word in sys.argv[1:4])\n\
    for number in range(40):\n\
    \x20   file = os.memfd_create('millpond-accounts'); os.truncate(file, size)\n\
    \x20   os.pwrite(file, struct.pack('=3Q', form, 0, 2**64 - 1), 0)\n\
    \x20   for at in range(1, 100): os.pwrite(file, struct.pack('=2Q', row, 0xffffffff00ffffff), 64 * at)\n\
    for number in range(200):\n\
    \x20   file = os.memfd_create('millpond-stats')\n\
    \x20   os.write(file, b'millpond-stats 1 1048576 0\\n' + bytes(4096))\n\
    print('ready', flush=True); sys.stdin.read()\n";

/// Goal: `millpond top` of root reads a bounded number of bytes from another user's files.
/// Incident: it read 64 MiB of each such file, and kept all names in them.
#[test]
fn top_reads_a_bounded_amount_of_another_users_memory() {
    if !is_root() {
        return;
    }
    let mut hostile = stranger(MEMORY_FILES);
    hostile.args([layout::FORM_MARK, layout::ROW_MARK, layout::FILE_BYTES].map(|n| n.to_string()));
    hostile.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut hostile = hostile.spawn().map(Ended).unwrap();
    let mut line = String::new();
    BufReader::new(hostile.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let trace = place();
    let log = trace.path().join("strace");
    let pid = hostile.0.id();
    let mut top = Command::new("strace");
    top.args(["-f", "-e", "trace=pread64", "-o"]).arg(&log).arg(MILLPOND).args(["top", "--json"]);
    let output = match top.output() {
        Ok(output) => output,
        Err(error) => return skip::skip(format_args!("strace: {error}")),
    };
    assert!(output.status.success(), "{}", text(&output.stderr));
    let runs: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let of_them = runs["engines"].as_array().unwrap().iter().filter(|one| one["pid"] == pid);
    assert_eq!(of_them.count(), 0, "the first file takes all that is read");
    let log = fs::read_to_string(&log).unwrap();
    let moved = log.lines().filter_map(|line| line.rsplit_once(" = ")?.1.parse::<u64>().ok());
    let moved: u64 = moved.sum();
    // Other engines of this machine are read, too.
    assert!(moved < 256 << 20, "{moved} bytes were read");
}

/// Goal: a file that the user names on the command line is opened as a shell would, and the document states
/// it.
#[test]
fn a_report_is_opened_as_by_a_shell() {
    let dir = tempfile::tempdir().unwrap();
    let (link, behind) = (dir.path().join("link"), dir.path().join("behind"));
    fs::write(&behind, "older and longer than any report would be".repeat(100)).unwrap();
    symlink(&behind, &link).unwrap();
    let mut command = millpond();
    command.args(["run", "--stats", "--report"]).arg(&link).args(["--", "true"]);
    let output: Output = command.current_dir(dir.path()).output().unwrap();
    if text(&output.stderr).contains("built without its preload library") {
        return skip::skip("this program was built without its preload library");
    }
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(fs::read_to_string(&behind).unwrap().starts_with("millpond: "));
    let limits = include_str!("../../../docs/run-internals.md");
    assert!(limits.contains("`--report FILE` opens FILE as a shell opens `> FILE`"));
}

/// The sources that open, create or look up a path, and why each is safe. A source that is not listed fails
/// the test below, so that its author thinks of other users.
const SOURCES: [(&str, &str); 45] = [
    ("millpond-cli/src/demo/cold_reads.rs", "/proc/self"),
    ("millpond-cli/src/demo/kill.rs", "the command's own program; /proc of its parent"),
    ("millpond-cli/src/manual.rs", "named by the user, as by a shell"),
    (
        "millpond-cli/src/run/explain.rs",
        "--report: named by the user, as by a shell; a memory file",
    ),
    ("millpond-cli/src/run/kept.rs", "/dev/tty; /proc/self"),
    ("millpond-cli/src/run/mod.rs", "--path: resolved"),
    ("millpond-cli/src/run/preload.rs", "the_library_and_the_socket_have_trusted_places"),
    ("millpond-cli/src/run/program.rs", "the program and its interpreters, as by a shell"),
    (
        "millpond-cli/src/run/unused_libraries.rs",
        "the_library_and_the_socket_have_trusted_places; of other users only maps in /proc",
    ),
    ("millpond-cli/src/serve/endpoint_file.rs", "beside the socket: no other user may write there"),
    ("millpond-cli/src/top/engines.rs", "top_reads_a_bounded_amount_of_another_users_memory"),
    ("millpond/src/cache/shared/client_block.rs", "a memory file"),
    ("millpond/src/cache/shared/shared_memory.rs", "/proc/self"),
    ("millpond/src/huge_memory.rs", "a memory file or an unnamed one; /sys and /proc/self"),
    (
        "millpond-endpoint/src/key.rs",
        "the owner and mode of the file and its directory are checked",
    ),
    ("millpond-endpoint/src/listeners.rs", "mode 600; removed by device and inode"),
    ("millpond-endpoint/src/uploads/mod.rs", "an unnamed file"),
    ("millpond-endpoint/src/uploads/spool.rs", "an unnamed file; mode 600"),
    ("millpond-serve/src/socket.rs", "the owner and mode of the directory are checked"),
    ("millpond-preload/src/hooks/descriptor.rs", "/proc/self"),
    ("millpond-preload/src/calls.rs", "the table of calls"),
    ("millpond-preload/src/files/forked.rs", "/proc/self"),
    ("millpond-preload/src/files/reopen.rs", "the program's own open"),
    ("millpond-preload/src/files/unshare.rs", "/proc/self"),
    ("millpond-preload/src/files/process_locks.rs", "/proc"),
    ("millpond-preload/src/hooks/open.rs", "the program's own open"),
    ("millpond-preload/src/report/lines.rs", "/proc/self"),
    ("millpond-preload/src/report/shared_files.rs", "checked by device and inode"),
    ("millpond/src/api/engine.rs", "the caller's path; a FIFO is not waited for"),
    ("millpond/src/api/persist.rs", "the caller's path"),
    ("millpond/src/api/publish.rs", "a memory file"),
    ("millpond/src/io/backend/aio_reads.rs", "a memory file"),
    ("millpond/src/io/backend/descriptors.rs", "a memory file"),
    ("millpond/src/io/backend/descriptors/reopen.rs", "/proc/self"),
    ("millpond/src/io/backend/local_ring.rs", "/proc/self"),
    ("millpond/src/memory.rs", "/proc and the cgroup's files"),
    ("millpond/src/recovery/client.rs", "a memory file"),
    ("millpond/src/recovery/keeper/clients.rs", "/proc/self"),
    ("millpond/src/recovery/keeper/liveness.rs", "a memory file; /proc/self"),
    ("millpond/src/recovery/keeper/listen.rs", "a_keepers_address_is_taken"),
    ("millpond/src/recovery/keeper/rescue.rs", "a_rescue_file_of_another_user_is_refused"),
    ("millpond/src/recovery/keeper/server.rs", "the socket that it made"),
    ("millpond/src/recovery/keeper/target.rs", "/proc/self"),
    ("millpond/src/recovery/keeper/trusted_directory.rs", "the check itself"),
    ("millpond/src/recovery/layout.rs", "/proc"),
];

/// Whether a line opens, creates or looks up a path.
fn names_a_path(line: &str) -> bool {
    const CALLS: [&str; 17] = [
        "File::open(",
        "File::create(",
        "fs::open(",
        "fs::openat(",
        "openat2(",
        "fs::read(",
        "fs::write(",
        "read_to_string(",
        "read_dir(",
        "read_link(",
        "create_dir",
        "DirBuilder",
        "fs::rename(",
        "remove_file(",
        "canonicalize(",
        "SYS_openat",
        "memfd_create(",
    ];
    !line.trim_start().starts_with("//") && CALLS.iter().any(|call| line.contains(call))
}

/// The sources below `directory`, except tests, and those of them that name a path.
fn sources(directory: &Path, found: &mut Vec<PathBuf>) {
    const LEFT_OUT: [&str; 2] = ["tests", "sim"];
    for entry in fs::read_dir(directory).unwrap().flatten() {
        let path = entry.path();
        let name = path.file_stem().unwrap().to_str().unwrap();
        if LEFT_OUT.contains(&name) || name.ends_with("_tests") {
            continue;
        }
        if path.is_dir() {
            sources(&path, found);
            continue;
        }
        let source = fs::read_to_string(&path).unwrap();
        let production = source.split("mod tests {").next().unwrap();
        if production.lines().any(names_a_path) {
            found.push(path);
        }
    }
}

/// Goal: each source that opens, creates or looks up a path has an entry in the table above that states its
/// protection.
#[test]
fn each_source_that_names_a_path_is_in_the_table() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut found = Vec::new();
    for name in
        ["millpond", "millpond-cli", "millpond-endpoint", "millpond-preload", "millpond-serve"]
    {
        sources(&crates.join(name).join("src"), &mut found);
    }
    let listed: Vec<_> = SOURCES.iter().map(|(source, _)| crates.join(source)).collect();
    let missing: Vec<_> = found.iter().filter(|path| !listed.contains(path)).collect();
    assert!(missing.is_empty(), "add to the table, with what keeps other users out: {missing:?}");
    let gone: Vec<_> = listed.iter().filter(|path| !found.contains(path)).collect();
    assert!(gone.is_empty(), "these name no path any more: {gone:?}");
}
