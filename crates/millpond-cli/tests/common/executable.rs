use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Creates an executable for a test in `dir`.
///
/// A separate process writes it. While a thread of this process writes, a fork by another thread has the
/// file open for writing until its exec, and during that time the file can't be executed (`ETXTBSY`).
pub fn executable(dir: &Path, name: &str, contents: &[u8]) -> PathBuf {
    let path = dir.join(name);
    let source = dir.join(format!("{name}.source"));
    fs::write(&source, contents).unwrap();
    let status = Command::new("install").args(["-m", "755"]).arg(&source).arg(&path).status();
    assert!(status.unwrap().success(), "install {}", path.display());
    fs::remove_file(source).unwrap();
    path
}
