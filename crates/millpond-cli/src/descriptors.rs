//! The limit of descriptors.

use rustix::process::{Resource, Rlimit};

/// Raises the limit of this process as far as it may.
pub fn use_all() {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let _ =
        rustix::process::setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}
