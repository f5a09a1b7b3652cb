use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A program of a test's own, in `dir`.
///
/// Written by another process: while a thread of this one writes, another's fork has the file
/// open for writing until it executes, and until then nobody executes it (`ETXTBSY`).
pub fn executable(dir: &Path, name: &str, contents: &[u8]) -> PathBuf {
    let path = dir.join(name);
    let source = dir.join(format!("{name}.source"));
    fs::write(&source, contents).unwrap();
    let status = Command::new("install").args(["-m", "755"]).arg(&source).arg(&path).status();
    assert!(status.unwrap().success(), "install {}", path.display());
    fs::remove_file(source).unwrap();
    path
}
