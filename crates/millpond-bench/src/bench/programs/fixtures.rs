//! The files that the programs use: created on first use, the same each time; removed at the end,
//! and large files as soon as they are not used any more.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{self, Command, Stdio};

use super::job::remove;
use crate::bench::data::Random;
use crate::failure::{Context, FAILED, Failure, Result};
use crate::millpond_command::find_program;

const NAME: &str = "millpond-bench-programs-";

/// A directory for everything, removed on drop.
#[derive(Debug)]
pub struct WorkDirectory {
    pub path: PathBuf,
}

impl WorkDirectory {
    pub fn new(dir: &Path) -> Result<Self> {
        remove_stale(dir);
        let path = dir.join(format!("{NAME}{}", process::id()));
        fs::create_dir(&path).context(path.display())?;
        Ok(Self { path })
    }

    pub fn at(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }
}

impl Drop for WorkDirectory {
    fn drop(&mut self) {
        if let Err(error) = remove(&self.path) {
            eprintln!("cleaning up: {}: {error}", self.path.display());
        }
    }
}

/// Removes the files of a benchmark that was killed.
fn remove_stale(dir: &Path) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some(pid) = name.strip_prefix(NAME) else { continue };
        if !Path::new("/proc").join(pid).exists() {
            drop(WorkDirectory { path: entry.path() });
        }
    }
}

/// A program, or the reason why there is none.
pub fn program(name: &str, package: &str) -> std::result::Result<PathBuf, String> {
    find_program(name)
        .ok_or_else(|| format!("{name} is not installed; Debian's package is {package}"))
}

/// Runs a command that creates files; it must succeed.
pub fn make(command: &mut Command) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output().context(&name)?;
    if !output.status.success() {
        let complaint = String::from_utf8_lossy(&output.stderr);
        let message = format!("{name}: {}: {}", output.status, complaint.trim());
        return Err(Failure::new(FAILED, message));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Syncs new files, so that no write-back runs during the measurement.
pub fn settle(dir: &Path) -> Result<()> {
    let synced = fs::File::open(dir).and_then(|dir| Ok(rustix::fs::syncfs(&dir)?));
    synced.context(format!("syncing {}", dir.display()))
}

/// Files that a directory holds at most.
const PER_DIRECTORY: usize = 100;
/// Sizes are at random up to twice the mean, which makes 60 MB of 10,000 files.
const MEAN_BYTES: u32 = 6000;

/// A tree of `count` files of text. One line in some hundreds has the word `needle`.
pub fn tree(root: &Path, count: usize) -> io::Result<()> {
    for index in 0..count {
        let dir = root.join(format!("{:03}", index / PER_DIRECTORY));
        if index % PER_DIRECTORY == 0 {
            fs::create_dir_all(&dir)?;
        }
        fs::write(dir.join(format!("{index:05}.txt")), text(index as u64))?;
    }
    Ok(())
}

fn text(seed: u64) -> String {
    const WORDS: [&str; 8] = ["mill", "pond", "water", "wheel", "stone", "grain", "sluice", "race"];
    let mut random = Random::seeded(seed);
    let bytes = random.below(2 * MEAN_BYTES) as usize;
    let mut text = String::with_capacity(bytes + 64);
    while text.len() < bytes {
        for _ in 0..8 {
            text += WORDS[random.below(WORDS.len() as u32) as usize];
            text.push(' ');
        }
        let number = random.below(1 << 20);
        text += &format!("{number:06x}{}\n", if number < 4096 { " needle" } else { "" });
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::programs::produced::{Produced, files_below};

    #[test]
    fn trees_are_the_same_each_time() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("tree");
        let make = || {
            tree(&root, 120).unwrap();
            let files = files_below(&root).unwrap();
            assert_eq!(files.len(), 120);
            let bytes: u64 = files.iter().map(|file| fs::metadata(file).unwrap().len()).sum();
            assert!((120 * 5000..120 * 7000).contains(&bytes), "{bytes}");
            assert!(files.iter().any(|file| fs::read_to_string(file).unwrap().contains("needle")));
            let made = Produced::of(std::slice::from_ref(&root), false).unwrap();
            remove(&root).unwrap();
            made
        };
        assert_eq!(make().difference(&make()), None);
    }

    #[test]
    fn what_a_killed_run_left_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        // No process has so high a number.
        let stale = dir.path().join(format!("{NAME}99999999"));
        fs::create_dir_all(stale.join("tree")).unwrap();
        let work_dir = WorkDirectory::new(dir.path()).unwrap();
        assert!(!stale.exists() && work_dir.path.exists());
        drop(work_dir);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_program_that_is_missing_is_named_with_its_package() {
        assert!(program("sh", "dash").is_ok());
        let reason = program("no-such-program", "some-package").unwrap_err();
        assert!(reason.contains("no-such-program") && reason.contains("some-package"), "{reason}");
    }
}
