//! The default size of the cache, large blocks of the heap whose allocation may fail, and moved mappings.

use std::alloc::{Layout, alloc_zeroed};
use std::io;

use rustix::mm::{MapFlags, MremapFlags, ProtFlags};

/// A block of that many zeros; ENOMEM where the heap has no room. The kernel supplies the pages at their first use.
pub(crate) fn try_zeros(len: usize) -> io::Result<Box<[u64]>> {
    if len == 0 {
        return Ok(Box::default());
    }
    let layout = Layout::array::<u64>(len).map_err(|_| no_memory())?;
    // SAFETY: the layout has a size.
    let block = unsafe { alloc_zeroed(layout) }.cast::<u64>();
    if block.is_null() {
        return Err(no_memory());
    }
    // SAFETY: a block of that layout, of which all is zero.
    Ok(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(block, len)) })
}

/// All of `items` in one block; ENOMEM where the heap has no room.
pub(crate) fn try_collect<T>(items: impl ExactSizeIterator<Item = T>) -> io::Result<Vec<T>> {
    let mut block = try_with_capacity(items.len())?;
    block.extend(items);
    Ok(block)
}

/// An empty vector with room for `len` items. ENOMEM if the system gives no memory for them.
pub(crate) fn try_with_capacity<T>(len: usize) -> io::Result<Vec<T>> {
    let mut block = Vec::new();
    block.try_reserve_exact(len).map_err(|_| no_memory())?;
    Ok(block)
}

pub(crate) fn no_memory() -> io::Error {
    io::Error::from_raw_os_error(libc::ENOMEM)
}

/// Moves a mapping to `at`, over another one. False: it failed, and the memory at `at` must not be used again.
///
/// By way of a temporary mapping, as a call that maps or copies to the target unmaps it before it finds that the limits
/// have no room.
///
/// # Safety
///
/// `mapping` and the `bytes` at `at` are mappings of the caller's. The target may be read concurrently, but not written.
pub(crate) unsafe fn move_mapping(mapping: *mut u8, bytes: usize, at: *mut u8) -> bool {
    // SAFETY: the caller's promise.
    let moved = unsafe {
        rustix::mm::mremap_fixed(mapping.cast(), bytes, bytes, MremapFlags::MAYMOVE, at.cast())
    };
    if moved.is_err() {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED_NOREPLACE;
        // SAFETY: the temporary mapping, which no other thread has, and a new mapping in the gap.
        unsafe {
            let _ = rustix::mm::munmap(mapping.cast(), bytes);
            let _ = rustix::mm::mmap_anonymous(at.cast(), bytes, ProtFlags::READ, flags);
        }
    }
    moved.is_ok()
}

/// A quarter of the machine's memory or of the cgroup's limit, whichever is less.
pub(crate) fn default_cache_bytes() -> u64 {
    let machine = machine_bytes();
    let limit = cgroup_limit_bytes().map_or(machine, |limit| limit.min(machine));
    limit / 4
}

fn machine_bytes() -> u64 {
    let info = rustix::system::sysinfo();
    info.totalram as u64 * u64::from(info.mem_unit.max(1))
}

/// The smallest limit of this process's cgroup and those above it, version 2 or 1.
fn cgroup_limit_bytes() -> Option<u64> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    groups
        .lines()
        .filter_map(|line| {
            let mut fields = line.splitn(3, ':');
            let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
            let (root, file) = match controllers {
                "" => ("/sys/fs/cgroup", "memory.max"),
                list if list.split(',').any(|name| name == "memory") => {
                    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")
                }
                _ => return None,
            };
            smallest_limit(root, path, file)
        })
        .min()
}

fn smallest_limit(root: &str, path: &str, file: &str) -> Option<u64> {
    let path = std::path::Path::new(path.trim_start_matches('/'));
    path.ancestors()
        .filter_map(|group| {
            let limit = std::path::Path::new(root).join(group).join(file);
            // "max" where there is no limit.
            std::fs::read_to_string(limit).ok()?.trim().parse::<u64>().ok()
        })
        .min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_is_a_quarter_at_most() {
        let bytes = default_cache_bytes();
        assert!(bytes > 0 && bytes <= machine_bytes() / 4);
    }

    #[test]
    fn the_smallest_limit_on_the_way_up_counts() {
        let dir = tempfile::tempdir().unwrap();
        let inner = dir.path().join("a/b");
        std::fs::create_dir_all(&inner).unwrap();
        std::fs::write(dir.path().join("a/memory.max"), "4096\n").unwrap();
        std::fs::write(inner.join("memory.max"), "max\n").unwrap();
        let root = dir.path().to_str().unwrap();
        assert_eq!(smallest_limit(root, "/a/b", "memory.max"), Some(4096));
        assert_eq!(smallest_limit(root, "/", "memory.max"), None);
    }
}
