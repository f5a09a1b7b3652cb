//! The files that a program created, to compare the kernel with `millpond run`.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hasher};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The files below some paths, by name.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Produced(BTreeMap<PathBuf, Entry>);

#[derive(Debug, PartialEq, Eq)]
struct Entry {
    mode: u32,
    bytes: u64,
    hash: u64,
    /// Seconds, where the program is one that sets them.
    modified: Option<i64>,
}

impl Produced {
    /// Reads all files. Contents that differ from run to run are left out: modification times
    /// unless `times` is set, and git's copies of them.
    pub fn of(paths: &[PathBuf], times: bool) -> io::Result<Self> {
        let mut entries = BTreeMap::new();
        for path in paths {
            for file in files_below(path)? {
                if !file.components().any(|part| part.as_os_str() == ".git") {
                    entries.insert(file.clone(), entry(&file, times)?);
                }
            }
        }
        Ok(Self(entries))
    }

    /// The first difference between `other` and this.
    pub fn difference(&self, other: &Self) -> Option<String> {
        let names = self.0.keys().chain(other.0.keys());
        let name = names.filter(|name| self.0.get(*name) != other.0.get(*name)).min()?;
        Some(format!("{}: {:?}, not {:?}", name.display(), other.0.get(name), self.0.get(name)))
    }
}

fn entry(path: &Path, times: bool) -> io::Result<Entry> {
    let metadata = fs::symlink_metadata(path)?;
    let mut hasher = DefaultHasher::new();
    let bytes = each_chunk(path, |chunk| hasher.write(chunk))?;
    let modified = times.then(|| metadata.mtime());
    Ok(Entry { mode: metadata.mode(), bytes, hash: hasher.finish(), modified })
}

/// The regular files below `path`, or `path` itself, in order.
pub fn files_below(path: &Path) -> io::Result<Vec<PathBuf>> {
    let kind = fs::symlink_metadata(path)?.file_type();
    if !kind.is_dir() {
        return Ok(if kind.is_file() { vec![path.to_owned()] } else { Vec::new() });
    }
    let mut files = Vec::new();
    let mut names = fs::read_dir(path)?.collect::<io::Result<Vec<_>>>()?;
    names.sort_by_key(fs::DirEntry::file_name);
    for name in names {
        files.extend(files_below(&name.path())?);
    }
    Ok(files)
}

/// Reads `path` to its end; returns its length.
pub fn each_chunk(path: &Path, mut see: impl FnMut(&[u8])) -> io::Result<u64> {
    let (mut file, mut buffer, mut bytes) = (File::open(path)?, vec![0; 1 << 16], 0);
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(bytes),
            len => {
                see(&buffer[..len]);
                bytes += len as u64;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_found() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let look = || Produced::of(&[dir.path().to_owned()], true).unwrap();
        fs::create_dir(at("sub")).unwrap();
        fs::create_dir(at(".git")).unwrap();
        fs::write(at("sub/a"), "one").unwrap();
        let before = look();
        fs::write(at(".git/index"), "times").unwrap();
        assert_eq!(before.difference(&look()), None);
        fs::write(at("sub/a"), "two").unwrap();
        assert!(before.difference(&look()).unwrap().contains("sub/a"));
        fs::write(at("sub/a"), "one").unwrap();
        File::open(at("sub/a")).unwrap().set_modified(std::time::UNIX_EPOCH).unwrap();
        assert!(before.difference(&look()).unwrap().contains("modified: Some(0)"));
        fs::remove_file(at("sub/a")).unwrap();
        assert!(before.difference(&look()).unwrap().contains("None, not Some"));
    }
}
