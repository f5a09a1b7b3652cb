//! A file system on a loop device that can be made to fail.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::common::{skip, temp_dir};

/// A kind of file system: how to make it, and how to mount it.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    pub name: &'static str,
    make: &'static [&'static str],
    mount: &'static str,
    image_bytes: u64,
    tmpfs_bytes: u64,
}

impl Kind {
    /// Without a journal, which would abort at its first failed write.
    pub const EXT4: Kind = Kind {
        name: "ext4",
        make: &["-q", "-b", "4096", "-O", "^has_journal"],
        mount: "noatime",
        image_bytes: 32 << 20,
        tmpfs_bytes: 6 << 20,
    };
    /// With a journal: the file system may turn read-only, and then no sync succeeds.
    pub const EXT4_JOURNAL: Kind = Kind {
        name: "ext4",
        make: &["-q", "-b", "4096", "-E", "lazy_itable_init=0,lazy_journal_init=0"],
        mount: "noatime",
        image_bytes: 32 << 20,
        tmpfs_bytes: 12 << 20,
    };
    pub const XFS: Kind = Kind {
        name: "xfs",
        make: &["-q", "-f"],
        mount: "noatime,nouuid",
        image_bytes: 320 << 20,
        tmpfs_bytes: 80 << 20,
    };
    pub const BTRFS: Kind = Kind {
        name: "btrfs",
        make: &["-q", "-f"],
        mount: "noatime",
        image_bytes: 160 << 20,
        tmpfs_bytes: 24 << 20,
    };
}

/// The image lies in the tmpfs at `outer`, and its file system is mounted at `inner`.
pub struct FailingDisk {
    kind: Kind,
    outer: PathBuf,
    inner: PathBuf,
    /// The loop device, once there is one.
    device: Option<String>,
    _dir: tempfile::TempDir,
}

fn run(program: &str, args: &[&str]) -> Result<String, String> {
    // The tools are in root's path.
    let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
    let output = Command::new(program).args(args).env("PATH", path).output();
    let output = output.map_err(|error| format!("{program}: {error}"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_string();
    match output.status.success() {
        true => Ok(text(&output.stdout)),
        false => Err(format!("{program} {args:?}: {}", text(&output.stderr))),
    }
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a path in UTF-8")
}

/// The file of a setting of `/dev/NAME`'s requests.
fn queue_setting(device: &str, setting: &str) -> String {
    format!("/sys/block/{}/queue/{setting}", device.trim_start_matches("/dev/"))
}

impl FailingDisk {
    /// `None`, with a skip, where permissions or programs are missing.
    #[track_caller]
    pub fn new(kind: Kind) -> Option<FailingDisk> {
        let dir = temp_dir();
        let (outer, inner) = (dir.path().join("outer"), dir.path().join("inner"));
        std::fs::create_dir(&outer).unwrap();
        std::fs::create_dir(&inner).unwrap();
        let size = format!("size={}", kind.tmpfs_bytes);
        let mut disk = FailingDisk { kind, outer, inner, device: None, _dir: dir };
        let made = run("mount", &["-t", "tmpfs", "-o", &size, "tmpfs", text(&disk.outer)])
            .and_then(|_| disk.make())
            .and_then(|()| disk.mount());
        match made {
            Ok(()) => Some(disk),
            Err(reason) => {
                skip(reason);
                None
            }
        }
    }

    fn make(&mut self) -> Result<(), String> {
        let image = self.image();
        File::create(&image).unwrap().set_len(self.kind.image_bytes).unwrap();
        let device = run("losetup", &["--find", "--show", text(&image)])?;
        // The loop driver takes a write for a whole one of which the tmpfs had space for a part. So no request
        // is longer than a page of the tmpfs.
        self.device = Some(device.clone());
        std::fs::write(queue_setting(&device, "max_sectors_kb"), "4")
            .map_err(|error| format!("{device}: requests of one page: {error}"))?;
        let make = format!("mkfs.{}", self.kind.name);
        run(&make, &[self.kind.make, &[&device]].concat()).map(drop)
    }

    fn image(&self) -> PathBuf {
        self.outer.join("image")
    }

    fn filler(&self) -> PathBuf {
        self.outer.join("filler")
    }

    fn mount(&self) -> Result<(), String> {
        let device = self.device.as_ref().expect("made");
        run("mount", &["-o", self.kind.mount, device, text(&self.inner)]).map(drop)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.inner.join(name)
    }

    /// Makes the device refuse writes of blocks that its image has no space for yet.
    pub fn fail(&mut self) {
        let mut filler = File::create(self.filler()).unwrap();
        while filler.write_all(&[9; 4096]).is_ok() {}
    }

    /// Makes the device accept all writes again.
    pub fn work(&mut self) {
        let _ = std::fs::remove_file(self.filler());
    }

    /// Mounts the file system afresh, so that only bytes of the device are left. All files on it are closed. False
    /// where it can't be unmounted: after its journal has aborted, the flusher keeps files that it can't write.
    pub fn try_remount(&mut self) -> bool {
        // A child that another test starts has our descriptors until it executes its program, and the flusher
        // tries to write a file again after seconds.
        for _ in 0..400 {
            match run("umount", &[text(&self.inner)]) {
                Ok(_) => {
                    self.mount().unwrap();
                    return true;
                }
                Err(error) if error.contains("busy") => {
                    std::thread::sleep(std::time::Duration::from_millis(20));
                }
                Err(error) => panic!("{error}"),
            }
        }
        File::create(self.path("probe")).expect_err("a file system that works can be unmounted");
        false
    }

    pub fn remount(&mut self) {
        assert!(self.try_remount(), "the file system has aborted");
    }

    /// The file `name` as a mount of a copy of the device shows it: as a power cut leaves it.
    pub fn after_power_cut(&self, name: &str) -> Option<Vec<u8>> {
        // Of two file systems with one identifier, btrfs takes the second for the first.
        if self.kind.name == "btrfs" {
            return None;
        }
        let dir = temp_dir();
        let (copy, point) = (dir.path().join("copy"), dir.path().join("point"));
        std::fs::create_dir(&point).unwrap();
        run("cp", &["--sparse=always", text(&self.image()), text(&copy)]).unwrap();
        let options = format!("loop,{}", self.kind.mount);
        run("mount", &["-o", &options, text(&copy), text(&point)]).unwrap();
        let found = std::fs::read(point.join(name));
        run("umount", &["--lazy", text(&point)]).unwrap();
        Some(found.unwrap())
    }
}

impl Drop for FailingDisk {
    fn drop(&mut self) {
        // Lazily: after a failure a file may still be open.
        let _ = run("umount", &["--lazy", text(&self.inner)]);
        if let Some(device) = &self.device {
            // The setting outlives the detachment, and would make the next user of the device slow.
            if let Ok(longest) = std::fs::read(queue_setting(device, "max_hw_sectors_kb")) {
                let _ = std::fs::write(queue_setting(device, "max_sectors_kb"), longest);
            }
            // Once nothing is mounted from it.
            let _ = run("losetup", &["--detach", device]);
        }
        let _ = run("umount", &["--lazy", text(&self.outer)]);
    }
}
