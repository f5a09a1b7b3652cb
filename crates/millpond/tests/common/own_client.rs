//! Clients of a shared cache.

use std::os::fd::OwnedFd;

use millpond::internals::shared::{
    AttachedClient, ClientMemory, MemoryChoice, SharedCache, SharedClient,
};
use rustix::process::{Pid, PidfdFlags};

/// Small pages, or a directory of a tmpfs, which may be mounted with `huge=`: MILLPOND_TEST_SHARED_MEMORY.
pub fn memory() -> MemoryChoice {
    let directory = std::env::var_os("MILLPOND_TEST_SHARED_MEMORY");
    directory.map_or(MemoryChoice::Small, |at| MemoryChoice::Directory(at.into()))
}

pub fn pidfd(id: u32) -> OwnedFd {
    let id = Pid::from_raw(id as i32).unwrap();
    rustix::process::pidfd_open(id, PidfdFlags::empty()).unwrap()
}

/// A client in this process.
pub fn own_client(cache: &SharedCache) -> (SharedClient, AttachedClient) {
    let memory = ClientMemory::create().unwrap();
    let attached = cache.attach(memory.descriptor(), pidfd(std::process::id())).unwrap();
    let descriptor = attached.descriptor().try_clone_to_owned().unwrap();
    (SharedClient::map(memory, &descriptor).unwrap(), attached)
}
