//! A memory limit of this process while the kernel's page cache is measured: pages that the kernel
//! caches during that time count in it.
//!
//! The process moves into a memory cgroup and back. Earlier memory, including Millpond's frames,
//! stays counted in the home group. The new group lies below the process's group (version 1), or
//! beside it (version 2, where a group with processes has no children).

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// A memory cgroup; removed on drop.
#[derive(Debug)]
pub struct Limit {
    group: PathBuf,
    /// The home group of the process.
    home: PathBuf,
}

/// The present limit of this process, if any: its group, and its home group.
static CURRENT: Mutex<Option<(PathBuf, PathBuf)>> = Mutex::new(None);

/// Ends the limit from any thread, before the process ends.
pub fn leave() {
    let current = CURRENT.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some((group, home)) = current {
        let _ = remove_group(&group, &home);
    }
}

/// This process is under the limit for as long as this lives.
pub struct Limited<'a>(&'a Limit);

impl Limit {
    /// A group that may have `bytes` of memory; the error says why there is none.
    pub fn new(bytes: u64) -> Result<Limit, String> {
        let mounts = fs::read_to_string("/proc/self/mounts").map_err(|error| error.to_string())?;
        let groups = fs::read_to_string("/proc/self/cgroup").map_err(|error| error.to_string())?;
        let (home, version) = find(&mounts, &groups).ok_or(
            "no memory cgroup: the controller is mounted nowhere, or not for this process",
        )?;
        let name = format!("millpond-bench-{}", process::id());
        let (group, file) = match version {
            1 => (home.join(name), "memory.limit_in_bytes"),
            _ => (home.parent().unwrap_or(&home).join(name), "memory.max"),
        };
        let parent = group.parent().unwrap_or(&group);
        remove_stale(parent);
        let failed = |what: &Path, error: io::Error| {
            format!("no memory cgroup: {}: {error}", what.display())
        };
        fs::create_dir(&group).map_err(|error| failed(&group, error))?;
        let current = Some((group.clone(), home.clone()));
        *CURRENT.lock().unwrap_or_else(PoisonError::into_inner) = current;
        let limit = Limit { group, home };
        let knob = limit.group.join(file);
        fs::write(&knob, bytes.to_string()).map_err(|error| match error.kind() {
            // Version 2, where the parent does not hand the controller down.
            io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied => {
                format!(
                    "no memory cgroup: {}: the memory controller is not enabled",
                    knob.display()
                )
            }
            _ => failed(&knob, error),
        })?;
        // Whether moving there is permitted.
        drop(limit.enter().map_err(|error| failed(&limit.group, error))?);
        Ok(limit)
    }

    pub fn enter(&self) -> io::Result<Limited<'_>> {
        move_to(&self.group)?;
        Ok(Limited(self))
    }

    /// Drops the pages that the kernel cached under the limit.
    pub fn empty(&self) {
        // Version 1 only; otherwise the remaining pages are reclaimed as usual.
        let _ = fs::write(self.group.join("memory.force_empty"), "0");
    }
}

impl Drop for Limited<'_> {
    fn drop(&mut self) {
        if let Err(error) = move_to(&self.0.home) {
            eprintln!("leaving the memory cgroup: {}: {error}", self.0.home.display());
        }
    }
}

impl Drop for Limit {
    fn drop(&mut self) {
        self.empty();
        *CURRENT.lock().unwrap_or_else(PoisonError::into_inner) = None;
        if let Err(error) = remove_group(&self.group, &self.home) {
            eprintln!("removing {}: {error}", self.group.display());
        }
    }
}

fn move_to(group: &Path) -> io::Result<()> {
    fs::write(group.join("cgroup.procs"), process::id().to_string())
}

/// Moves each process of `group` to `home` and removes the group. Another thread may have started a
/// program under the limit: the kernel removes only an empty group.
fn remove_group(group: &Path, home: &Path) -> io::Result<()> {
    let mut attempts = 0;
    loop {
        for pid in fs::read_to_string(group.join("cgroup.procs"))?.lines() {
            // A process that exits during the loop needs no move.
            let _ = fs::write(home.join("cgroup.procs"), pid);
        }
        match fs::remove_dir(group) {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy && attempts < 100 => {
                attempts += 1;
                thread::sleep(Duration::from_millis(10));
            }
            removed => return removed,
        }
    }
}

/// Groups of runs that were killed.
fn remove_stale(parent: &Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let pid = name.to_str().and_then(|name| name.strip_prefix("millpond-bench-"));
        if pid.is_some_and(|pid| !Path::new("/proc").join(pid).exists()) {
            let _ = fs::remove_dir(entry.path());
        }
    }
}

/// The memory cgroup that this process is in, and its version.
fn find(mounts: &str, groups: &str) -> Option<(PathBuf, u32)> {
    let mounted = |fs_type: &str, option: &str| {
        mounts.lines().find_map(|line| {
            let mut fields = line.split(' ').skip(1);
            let (at, kind, options) = (fields.next()?, fields.next()?, fields.next()?);
            let fits = option.is_empty() || options.split(',').any(|one| one == option);
            (kind == fs_type && fits).then(|| PathBuf::from(at))
        })
    };
    let group = |wanted: &dyn Fn(&str) -> bool| {
        groups.lines().find_map(|line| {
            let mut fields = line.splitn(3, ':').skip(1);
            let (controllers, path) = (fields.next()?, fields.next()?);
            wanted(controllers).then(|| path.trim_start_matches('/').to_owned())
        })
    };
    if let Some(root) = mounted("cgroup", "memory") {
        let path = group(&|controllers| controllers.split(',').any(|one| one == "memory"))?;
        return Some((root.join(path), 1));
    }
    let root = mounted("cgroup2", "")?;
    Some((root.join(group(&str::is_empty)?), 2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_group_is_found_in_either_version() {
        let mounts = "x / ext4 rw 0 0\ncgroup /cg/memory cgroup rw,relatime,memory 0 0\n";
        let groups = "9:name=systemd:/\n4:cpu,memory:/a/b\n0::/\n";
        assert_eq!(find(mounts, groups), Some(("/cg/memory/a/b".into(), 1)));
        let mounts = "cgroup2 /sys/fs/cgroup cgroup2 rw,nsdelegate 0 0\n";
        let groups = "0::/user.slice/run.scope\n";
        assert_eq!(find(mounts, groups), Some(("/sys/fs/cgroup/user.slice/run.scope".into(), 2)));
        assert_eq!(find("", groups), None);
    }

    /// Goal: a limit leaves no group behind, also when a program that started under it still runs.
    #[test]
    fn nothing_stays_behind() {
        match Limit::new(64 << 20) {
            Ok(limit) => {
                let group = limit.group.clone();
                let limited = limit.enter().unwrap();
                let mut child = process::Command::new("sleep").arg("60").spawn().unwrap();
                drop(limited);
                drop(limit);
                assert!(!group.exists());
                child.kill().unwrap();
                child.wait().unwrap();
            }
            Err(reason) => println!("skipped: {reason}"),
        }
    }
}
