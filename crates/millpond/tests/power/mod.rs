//! A file system on a disk whose power can be cut: ext4, or the one that `MILLPOND_TEST_FS` names,
//! xfs or btrfs.
//!
//! [`Disk`] is a file system over a [`recorder`]. [`Disk::cut`] takes the contents that the disk
//! would have if the power failed now, and mounts a copy of them, with the journal's recovery. The
//! running file system does not notice, so one test may cut many times.
//!
//! Mounts are in a namespace of the test's thread and its children, so none outlives the test.

#![allow(dead_code, reason = "each test file uses a part of it")]

pub mod recorder;

use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use recorder::{CONTROL, DEVICE, IMAGE, ROLE};

/// A kind of file system: its mkfs command, its disk size, and its mount options before and after a
/// cut.
pub struct FileSystem {
    name: &'static str,
    mkfs: &'static [&'static str],
    package: &'static str,
    disk_bytes: u64,
    /// Whether the file system overwrites data blocks in place.
    pub overwrites: bool,
    /// Whether it can be read when its journal can't be written.
    pub outlives_errors: bool,
    /// Mount options without periodic commits, which could make a test pass.
    used: &'static str,
    survived: &'static str,
}

const FILE_SYSTEMS: [FileSystem; 3] = [
    FileSystem {
        name: "ext4",
        mkfs: &[
            "mkfs.ext4",
            "-q",
            "-F",
            "-b",
            "4096",
            "-E",
            "lazy_itable_init=0,lazy_journal_init=0,nodiscard",
        ],
        package: "e2fsprogs",
        disk_bytes: 32 << 20,
        overwrites: true,
        outlives_errors: true,
        used: "commit=3600",
        survived: "errors=remount-ro",
    },
    // A disk below the recommended size, and two file systems of one UUID.
    FileSystem {
        name: "xfs",
        mkfs: &["mkfs.xfs", "-q", "-f", "-K", "--unsupported"],
        package: "xfsprogs",
        disk_bytes: 64 << 20,
        overwrites: true,
        outlives_errors: false,
        used: "nouuid",
        survived: "nouuid",
    },
    FileSystem {
        name: "btrfs",
        mkfs: &["mkfs.btrfs", "-q", "-f", "-K", "-M", "-m", "single", "-d", "single"],
        package: "btrfs-progs",
        disk_bytes: 64 << 20,
        overwrites: false,
        outlives_errors: true,
        used: "commit=3600,nodiscard",
        survived: "nodiscard",
    },
];

pub fn file_system() -> &'static FileSystem {
    file_system_of(&std::env::var("MILLPOND_TEST_FS").unwrap_or_else(|_| "ext4".into()))
}

fn file_system_of(name: &str) -> &'static FileSystem {
    let known = FILE_SYSTEMS.iter().find(|known| known.name == name);
    known.unwrap_or_else(|| panic!("MILLPOND_TEST_FS={name}: ext4, xfs or btrfs"))
}

/// The fate of writes that the disk has acknowledged, but was not asked to flush.
#[derive(Clone, Copy, Debug)]
pub enum Unflushed {
    Lost,
    /// A random part of the sectors is stored, by a seed: a disk may write in any order.
    Some(u64),
}

/// A file system whose disk can lose power.
pub struct Disk {
    system: &'static FileSystem,
    dir: tempfile::TempDir,
    recorder: Child,
    control: BufReader<UnixStream>,
    cuts: u32,
}

/// The file system after a power cut.
pub struct Survivor {
    mount_point: PathBuf,
}

/// The reason why this machine can have no [`Disk`], if any.
fn missing(system: &FileSystem) -> Option<String> {
    // SAFETY: takes nothing and can't fail.
    if unsafe { libc::geteuid() } != 0 {
        return Some("mounting needs root".into());
    }
    if let Some(path) =
        ["/dev/fuse", "/dev/loop-control"].into_iter().find(|path| !Path::new(path).exists())
    {
        return Some(format!("there is no {path}"));
    }
    let file_systems = fs::read_to_string("/proc/filesystems").unwrap_or_default();
    let is_known = |name: &str| file_systems.lines().any(|line| line.ends_with(name));
    let FileSystem { name, mkfs, package, .. } = system;
    if let Some(name) = [*name, "fuse"].into_iter().find(|name| !is_known(&format!("\t{name}"))) {
        return Some(format!("the kernel has no {name}"));
    }
    let version = command(mkfs[0]).arg("-V").stdout(Stdio::null()).stderr(Stdio::null()).status();
    if version.is_err() {
        return Some(format!("{} is missing: install the package {package}", mkfs[0]));
    }
    let Ok(free) = command("losetup").arg("-f").output() else {
        return Some("losetup is missing: install the package mount".into());
    };
    if !Path::new(String::from_utf8_lossy(&free.stdout).trim()).exists() {
        return Some("there is no free loop device".into());
    }
    own_mounts().err().map(|error| format!("no mount namespace: {error}"))
}

/// Gives this thread and its children a mount namespace of their own.
fn own_mounts() -> io::Result<()> {
    let (none, flags) = (std::ptr::null(), libc::MS_REC | libc::MS_PRIVATE);
    // SAFETY: `unshare` takes no memory. Of `mount`, the path ends with a zero byte; the rest may be
    // null for a change of propagation.
    let is_done = unsafe {
        libc::unshare(libc::CLONE_NEWNS) == 0
            && libc::mount(none, c"/".as_ptr(), none, flags, none.cast()) == 0
    };
    if is_done { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The tools are in root's path.
fn command(program: &str) -> Command {
    let mut command = Command::new(program);
    let path = std::env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("{path}:/usr/sbin:/sbin"));
    command
}

fn run(program: &str, args: &[&str]) {
    let output = command(program).args(args).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {args:?}: {said}");
}

fn mount(system: &FileSystem, image: &Path, mount_point: &Path, options: &str) {
    fs::create_dir(mount_point).unwrap();
    let options = format!("loop,noatime,{options}");
    let (image, mount_point) = (image.to_str().unwrap(), mount_point.to_str().unwrap());
    run("mount", &["-t", system.name, "-o", &options, image, mount_point]);
}

/// A child that another test thread forks has our descriptors until it calls exec, so the file
/// system may be busy at the first attempt.
fn unmount(mount_point: &Path) {
    const TRIES: usize = 1000;
    for _ in 0..TRIES {
        let unmounted = command("umount").arg(mount_point).output().unwrap();
        if unmounted.status.success() {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    // Not a panic, which in a panic would hide the first one.
    eprintln!("can't unmount {}", mount_point.display());
}

impl Disk {
    /// A disk with an empty file system, mounted; `None`, with a skip, where that is not possible.
    /// `recorder` is the test of this binary that calls [`recorder::run`].
    #[track_caller]
    pub fn start(recorder: &str) -> Option<Disk> {
        Disk::start_on(file_system(), recorder)
    }

    /// The same with XFS.
    #[track_caller]
    pub fn start_xfs(recorder: &str) -> Option<Disk> {
        Disk::start_on(file_system_of("xfs"), recorder)
    }

    #[track_caller]
    fn start_on(system: &'static FileSystem, recorder: &str) -> Option<Disk> {
        if let Some(reason) = missing(system) {
            crate::common::skip(format_args!("a disk whose power can be cut: {reason}"));
            return None;
        }
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let image = dir.path().join(IMAGE);
        let FileSystem { mkfs, disk_bytes, used, .. } = system;
        fs::File::create(&image).unwrap().set_len(*disk_bytes).unwrap();
        run(mkfs[0], &[&mkfs[1..], &[image.to_str().unwrap()]].concat());
        fs::File::create(dir.path().join(DEVICE)).unwrap();

        let listener = UnixListener::bind(dir.path().join(CONTROL)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let mut recorder = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", recorder, "--nocapture", "--include-ignored"])
            .env(ROLE, dir.path())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let control = loop {
            match listener.accept() {
                Ok((control, _)) => break control,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let ended = recorder.try_wait().unwrap();
                    assert!(ended.is_none(), "the recorder has ended: {ended:?}");
                    std::thread::sleep(Duration::from_millis(5));
                }
                Err(error) => panic!("control socket: {error}"),
            }
        };
        control.set_nonblocking(false).unwrap();
        let control = BufReader::new(control);
        let mut disk = Disk { system, dir, recorder, control, cuts: 0 };
        assert_eq!(disk.answer(), "ready");
        mount(system, &disk.dir.path().join(DEVICE), &disk.mount_point(), used);
        Some(disk)
    }

    fn mount_point(&self) -> PathBuf {
        self.dir.path().join("mounted")
    }

    /// A path in the file system.
    pub fn path(&self, name: &str) -> PathBuf {
        self.mount_point().join(name)
    }

    fn answer(&mut self) -> String {
        let mut line = String::new();
        self.control.read_line(&mut line).unwrap();
        assert!(line.ends_with('\n'), "the recorder has ended");
        line.trim().to_string()
    }

    fn send(&mut self, line: &str) {
        self.control.get_mut().write_all(format!("{line}\n").as_bytes()).unwrap();
        assert_eq!(self.answer(), "done");
    }

    /// Makes the disk fail all writes and flushes from now on.
    pub fn fail(&mut self) {
        self.send("fail");
    }

    /// Mounts a copy of the contents that the disk has if the power fails now.
    pub fn cut(&mut self, unflushed: Unflushed) -> Survivor {
        let image = self.dir.path().join("left");
        let seed = match unflushed {
            Unflushed::Lost => String::new(),
            Unflushed::Some(seed) => format!(" {seed}"),
        };
        self.send(&format!("cut {}{seed}", image.display()));
        let mount_point = self.dir.path().join("survivor");
        mount(self.system, &image, &mount_point, self.system.survived);
        self.cuts += 1;
        Survivor { mount_point }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // `scripts/long` adds them up.
        println!("power cuts on {}: {}", self.system.name, self.cuts);
        unmount(&self.mount_point());
        unmount(&self.dir.path().join(DEVICE));
        let _ = self.control.get_ref().shutdown(std::net::Shutdown::Both);
        let _ = self.recorder.wait();
    }
}

impl Survivor {
    /// The bytes of a file, if it is there.
    pub fn read(&self, name: &str) -> Option<Vec<u8>> {
        match fs::read(self.mount_point.join(name)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            read => Some(read.unwrap()),
        }
    }
}

impl Drop for Survivor {
    fn drop(&mut self) {
        unmount(&self.mount_point);
        let _ = fs::remove_dir(&self.mount_point);
    }
}
