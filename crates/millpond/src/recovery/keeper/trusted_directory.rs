//! Trusted directories: no other user can replace their entries.
//!
//! A path that is looked up again later (by the dynamic loader, or by a client of a keeper) leads to the same file only
//! if no other user can rename a directory on it or change a symbolic link on it. `millpond run` includes
//! this file by its path.
//!
//! - **TD1** The path has no symbolic link, and each directory on it, from the root down, belongs to root or to the
//!   calling user. Only its owner can write in it, or its sticky bit is set. The order matters: the
//!   entries of a directory that passed the check are stable, so no later rename invalidates the next check.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The path of `directory` without symbolic links, if TD1 holds for it; else the reason.
pub fn resolve(directory: &Path) -> Result<PathBuf, String> {
    let resolved = fs::canonicalize(directory).map_err(|error| error.to_string())?;
    let mut from_root: Vec<&Path> = resolved.ancestors().collect();
    from_root.reverse();
    from_root.into_iter().try_for_each(check)?;
    Ok(resolved)
}

/// TD1 for one directory.
fn check(directory: &Path) -> Result<(), String> {
    let name = directory.display();
    // A link that was put here since the path was resolved is not followed.
    let metadata = fs::symlink_metadata(directory).map_err(|error| format!("{name}: {error}"))?;
    if !metadata.is_dir() {
        return Err(format!("{name} is not a directory"));
    }
    let user = rustix::process::geteuid().as_raw();
    if ![0, user].contains(&metadata.uid()) {
        return Err(format!("{name} belongs to user {}", metadata.uid()));
    }
    let (is_shared, is_sticky) = (metadata.mode() & 0o022 != 0, metadata.mode() & 0o1000 != 0);
    if is_shared && !is_sticky {
        return Err(format!("other users may rename files in {name}"));
    }
    Ok(())
}
