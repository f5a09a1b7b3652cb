//! Names of the machine's processor and file systems, for the heading of results.

use std::fs;
use std::path::Path;

/// The model of the processor, or `unknown`.
#[must_use]
pub fn processor_name() -> String {
    value_of("/proc/cpuinfo", &["model name", "CPU part", "uarch"])
}

/// The value of the first of `names` that a file of `name: value` lines contains, or `unknown`.
#[must_use]
pub fn value_of(file: &str, names: &[&str]) -> String {
    let text = fs::read_to_string(file).unwrap_or_default();
    let lines = || text.lines().filter_map(|line| line.split_once(':'));
    names
        .iter()
        .find_map(|name| lines().find(|(key, _)| key.trim() == *name))
        .map_or_else(|| "unknown".into(), |(_, value)| value.trim().to_owned())
}

/// The type of the file system that holds `dir`.
#[must_use]
pub fn file_system_name(dir: &Path) -> String {
    // From linux/magic.h.
    let name = match rustix::fs::statfs(dir).map(|statfs| statfs.f_type as u64) {
        Ok(0xef53) => "ext2/3/4",
        Ok(0x5846_5342) => "xfs",
        Ok(0x9123_683e) => "btrfs",
        Ok(0x0102_1994) => "tmpfs",
        Ok(0x794c_7630) => "overlayfs",
        Ok(0x6969) => "nfs",
        Ok(0x2fc1_2fc1) => "zfs",
        Ok(other) => return format!("type {other:#x}"),
        Err(_) => "unknown",
    };
    name.into()
}
