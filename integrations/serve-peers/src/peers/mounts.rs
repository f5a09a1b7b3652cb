//! FUSE mounts, whose pages the kernel caches: rclone over HTTP, and JuiceFS over a directory.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::{Peer, first_word, timed};
use crate::process::{Done, Running, await_true, family};

pub struct Mount {
    name: String,
    /// Closed before the unmount.
    file: Option<File>,
    mount: PathBuf,
    server: Running,
    buffer: Vec<u8>,
}

impl Drop for Mount {
    fn drop(&mut self) {
        self.file = None;
        _ = Command::new("fusermount3").arg("-uz").arg(&self.mount).status();
    }
}

impl Mount {
    fn open(name: &str, mount: PathBuf, file: &str, server: Running) -> Done<Mount> {
        let mut own =
            Mount { name: name.into(), file: None, mount, server, buffer: vec![0; 1 << 20] };
        let path = own.mount.join(file);
        await_true(name, || path.exists())?;
        own.file = Some(File::open(path)?);
        Ok(own)
    }
}

/// Mounts the server at `port`.
pub fn rclone(dir: &Path, port: u16) -> Done<Mount> {
    let mount = dir.join("rclone");
    fs::create_dir_all(&mount)?;
    let mut command = Command::new("rclone");
    command.arg("mount").arg(format!(":http,url='http://127.0.0.1:{port}':")).arg(&mount);
    command.args(["--vfs-cache-mode", "full", "--read-only", "--attr-timeout", "1h"]);
    command.args(["--dir-cache-time", "1h", "--config", "/dev/null", "--cache-dir"]);
    command.arg(dir.join("rclone-cache")).stdout(Stdio::null()).stderr(Stdio::null());
    let server = Running::start(&mut command).map_err(|error| format!("rclone: {error}"))?;
    Mount::open("rclone mount, kernel's cache", mount, "measured/0", server)
}

pub fn juicefs(dir: &Path, object: &Path) -> Done<Mount> {
    let program = std::env::var("JUICEFS").unwrap_or("juicefs".into());
    let mount = dir.join("juicefs");
    fs::create_dir_all(&mount)?;
    let meta = format!("sqlite3://{}", dir.join("juicefs.db").display());
    let mut command = Command::new(&program);
    command.args(["format", "--storage", "file", "--trash-days", "0", "--bucket"]);
    command.arg(format!("{}/", dir.join("juicefs-store").display())).args([&meta, "measured"]);
    let made = command.stdout(Stdio::null()).stderr(Stdio::null()).status();
    if !made.map_err(|error| format!("{program}: {error}"))?.success() {
        return Err("juicefs format failed".into());
    }
    let mut command = Command::new(&program);
    command.args(["mount", "--no-usage-report", "--cache-size", "1024", "--cache-dir"]);
    command.arg(dir.join("juicefs-cache")).args([&meta]).arg(&mount);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let server = Running::start(&mut command)?;
    await_true("juicefs", || {
        fs::read_to_string("/proc/mounts")
            .is_ok_and(|text| text.contains(&format!(" {} ", mount.display())))
    })?;
    fs::copy(object, mount.join("0"))?;
    Mount::open("JuiceFS mount, kernel's cache", mount, "0", server)
}

impl Peer for Mount {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn read_all(&mut self, places: &[u64], len: usize, times: &mut Vec<u32>) -> Done<()> {
        let file = self.file.as_ref().ok_or("closed")?;
        let buffer = &mut self.buffer[..len];
        timed(places, times, |place| {
            file.read_exact_at(buffer, place)?;
            Ok(first_word(buffer))
        })
    }

    fn processes(&self) -> Vec<u32> {
        family(self.server.id())
    }
}
