//! Which kind of shared memory a machine offers: with huge pages, or without.
//!
//! A hit of a random page in a large cache takes up to a third longer with small pages, as each walk through the page
//! tables misses the processor's caches. Shared memory gets huge pages where the administrator has allowed it: by the
//! setting `shmem_enabled` of transparent huge pages, or by a tmpfs that is mounted with `huge=advise`. A pool of hugetlb pages
//! is not used: its memory can be given back in pieces of 2 MiB only.
//!
//! Locks: none.

use std::fmt;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};

const HUGE_PAGES: &str = "/sys/kernel/mm/transparent_hugepage";
/// Of the f_type of `statfs`.
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// Which memory a shared cache is to use.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum MemoryChoice {
    /// Memory with huge pages, if the machine offers it.
    #[default]
    Auto,
    /// Small pages.
    Small,
    /// A file without a name in this directory of a tmpfs.
    Directory(PathBuf),
}

/// The memory that a shared cache uses.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum MemoryKind {
    /// Shared memory that gets huge pages on request.
    ShmemHuge,
    /// A file of a tmpfs with huge pages, at this path.
    TmpfsHuge(PathBuf),
    /// Small pages.
    Small,
}

impl MemoryKind {
    /// Whether it may have huge pages.
    #[must_use]
    pub fn may_be_huge(&self) -> bool {
        *self != MemoryKind::Small
    }

    /// A command for the administrator that would make hits faster.
    #[must_use]
    pub fn advice(&self) -> Option<&'static str> {
        let command = "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled";
        (!self.may_be_huge()).then_some(command)
    }
}

impl fmt::Display for MemoryKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MemoryKind::ShmemHuge => f.write_str("shared memory with huge pages (shmem_enabled)"),
            MemoryKind::TmpfsHuge(at) => {
                write!(f, "a tmpfs with huge pages, at {}", at.display())
            }
            MemoryKind::Small => f.write_str("shared memory with small pages"),
        }
    }
}

/// A file of shared memory, which no process can open for writing, and its kind.
pub(crate) fn create_file(
    choice: &MemoryChoice,
    bytes: u64,
    limit_bytes: u64,
) -> io::Result<(OwnedFd, MemoryKind)> {
    match choice {
        MemoryChoice::Directory(at) => {
            let named = |error: io::Error| {
                let what = format!("the shared memory in {}: {error}", at.display());
                io::Error::new(error.kind(), what)
            };
            let file = in_directory(at, bytes, limit_bytes).map_err(named)?;
            let is_huge =
                huge_mounts().is_some_and(|all| all.iter().any(|one| at.starts_with(one)));
            let kind = if is_huge { MemoryKind::TmpfsHuge(at.clone()) } else { MemoryKind::Small };
            Ok((file, kind))
        }
        MemoryChoice::Auto if memfds_may_be_huge() => Ok((memfd(bytes)?, MemoryKind::ShmemHuge)),
        MemoryChoice::Auto => {
            let has_room = |at: &PathBuf| room_in(at).is_ok_and(|room| room > limit_bytes);
            for at in huge_mounts().unwrap_or_default().into_iter().filter(has_room) {
                if let Ok(file) = on_tmpfs(&at, bytes) {
                    return Ok((file, MemoryKind::TmpfsHuge(at)));
                }
            }
            Ok((memfd(bytes)?, MemoryKind::Small))
        }
        MemoryChoice::Small => Ok((memfd(bytes)?, MemoryKind::Small)),
    }
}

/// Sparse, and of a fixed length. No seal against writes: with one, memory can't be given back.
fn memfd(bytes: u64) -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let memory = rustix::fs::memfd_create("millpond-shared", flags)?;
    set_up(&memory, bytes)?;
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&memory, seals)?;
    Ok(memory)
}

fn in_directory(at: &Path, bytes: u64, limit_bytes: u64) -> io::Result<OwnedFd> {
    let file = on_tmpfs(at, bytes)?;
    let room = room_in(at)?;
    if room <= limit_bytes {
        let what = format!(
            "the tmpfs has {room} bytes left, and the cache is to have {limit_bytes}: mount it with a larger size"
        );
        return Err(io::Error::new(io::ErrorKind::StorageFull, what));
    }
    Ok(file)
}

/// The bytes that a tmpfs has left. The mount has a limit of its own, beyond which a store would be a SIGBUS.
///
/// The memory can't be reserved: `fallocate` on a tmpfs takes it at once, and a cache takes it as it grows.
fn room_in(at: &Path) -> io::Result<u64> {
    let is = rustix::fs::statvfs(at)?;
    // Mounted with `size=0`, it has no limit.
    Ok(if is.f_blocks == 0 { u64::MAX } else { is.f_bavail * is.f_frsize })
}

fn on_tmpfs(at: &Path, bytes: u64) -> io::Result<OwnedFd> {
    if i128::from(rustix::fs::statfs(at)?.f_type) != i128::from(TMPFS_MAGIC) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a tmpfs"));
    }
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC | OFlags::EXCL;
    let memory = rustix::fs::open(at, flags, Mode::RUSR)?;
    set_up(&memory, bytes)?;
    Ok(memory)
}

fn set_up(memory: &OwnedFd, bytes: u64) -> io::Result<()> {
    // Beyond this limit `ftruncate` would end the process by SIGXFSZ.
    let most = rustix::process::getrlimit(rustix::process::Resource::Fsize).current;
    if most.is_some_and(|most| most < bytes) {
        return Err(io::Error::from_raw_os_error(libc::EFBIG));
    }
    // Descriptors of clients are opened by way of /proc, and so can't be opened for writing (shared.SH1).
    rustix::fs::fchmod(memory, Mode::RUSR)?;
    rustix::fs::ftruncate(memory, bytes)?;
    Ok(())
}

/// Whether memfds get huge pages on request.
fn memfds_may_be_huge() -> bool {
    let all = fs::read_to_string(format!("{HUGE_PAGES}/shmem_enabled")).unwrap_or_default();
    // Since Linux 6.11 each size has a setting of its own.
    let own = fs::read_to_string(format!("{HUGE_PAGES}/hugepages-2048kB/shmem_enabled"));
    match own.as_deref().map_or("inherit", chosen) {
        "inherit" => are_on_request(chosen(&all)),
        own => are_on_request(own) && chosen(&all) != "deny",
    }
}

/// Huge pages on request only. With the other settings khugepaged makes huge pages of ranges with holes in them, through
/// the mapping of any client, and so fills memory that was given back.
fn are_on_request(setting: &str) -> bool {
    setting == "advise"
}

/// The word in brackets.
fn chosen(settings: &str) -> &str {
    settings.split_once('[').and_then(|(_, rest)| rest.split_once(']')).map_or("", |(one, _)| one)
}

/// Where a tmpfs with huge pages is mounted.
fn huge_mounts() -> Option<Vec<PathBuf>> {
    Some(huge_mounts_in(&fs::read_to_string("/proc/self/mountinfo").ok()?))
}

fn huge_mounts_in(mounts: &str) -> Vec<PathBuf> {
    let mount = |line: &str| {
        let (first, second) = line.split_once(" - ")?;
        let at = first.split(' ').nth(4)?;
        let mut fields = second.split(' ');
        let is_tmpfs = fields.next()? == "tmpfs";
        let options = fields.nth(1)?;
        let is_huge =
            options.split(',').any(|one| one.strip_prefix("huge=").is_some_and(are_on_request));
        // Blanks in a path are escaped.
        (is_tmpfs && is_huge && !at.contains('\\')).then(|| PathBuf::from(at))
    };
    mounts.lines().filter_map(mount).collect()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_chosen_setting_is_in_brackets() {
        assert_eq!(chosen("always within_size advise [never] deny force\n"), "never");
        assert_eq!(chosen("always [advise] never\n"), "advise");
        assert!(are_on_request("advise") && !are_on_request("always") && !are_on_request(""));
    }

    #[test]
    fn mounts_with_huge_pages_are_found() {
        let mounts = "22 1 0:21 / /dev/shm rw,nosuid shared:3 - tmpfs tmpfs rw,size=100k\n\
            30 1 0:25 / /mnt/huge rw,noatime - tmpfs none rw,huge=advise\n\
            31 1 0:26 / /mnt/not rw - tmpfs none rw,huge=always\n\
            32 1 0:27 / /mnt/a\\040b rw - tmpfs none rw,huge=advise\n\
            33 1 8:1 / / rw - ext4 /dev/sda rw,huge=advise\n";
        assert_eq!(huge_mounts_in(mounts), [PathBuf::from("/mnt/huge")]);
    }
}
