//! The description of a running endpoint: a JSON file beside the server's socket, for programs of the same user.
//!
//! The file has the access key, so it has mode 600. The server holds a lock on it (flock) as long as it lives. The kernel
//! drops the lock when the process ends, so a reader recognizes the file of a server that was killed.
//!
//! - **EF1** The file appears complete and locked: it is written and locked under another name, and renamed.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use serde::{Deserialize, Serialize};

/// The version of the format. A reader refuses others.
const VERSION: u32 = 1;
/// A longer file is no description.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// How programs reach an endpoint.
#[derive(Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct Description {
    pub version: u32,
    /// None: it listens on a Unix socket only.
    pub url: Option<String>,
    pub socket: Option<PathBuf>,
    /// The bucket of the first store.
    pub bucket: String,
    pub buckets: Vec<DescribedBucket>,
    pub region: String,
    pub access_key_id: String,
    pub secret_access_key: String,
}

#[derive(Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct DescribedBucket {
    pub name: String,
    /// The URL of its store.
    pub store: String,
}

/// The file of the server that listens at `socket`.
pub fn path_beside(socket: &Path) -> PathBuf {
    let mut name = OsString::from(socket);
    name.push(".endpoint.json");
    name.into()
}

/// The file of a running endpoint, locked. Removes it when it is dropped.
#[derive(Debug)]
pub struct EndpointFile {
    path: PathBuf,
    file: File,
}

impl EndpointFile {
    /// Writes the file beside the socket, in place of the one of an earlier server. The caller listens at `socket`.
    pub fn write(socket: &Path, description: &Description) -> io::Result<EndpointFile> {
        let path = path_beside(socket);
        let mut scratch = OsString::from(&path);
        scratch.push(format!(".{}", std::process::id()));
        let scratch = PathBuf::from(scratch);
        remove(&scratch)?;
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let file = rustix::fs::open(&scratch, flags, Mode::RUSR | Mode::WUSR)?;
        let mut file = File::from(file);
        let text = serde_json::to_string_pretty(description)? + "\n";
        // EF1.
        let placed = flock(&file, FlockOperation::NonBlockingLockExclusive)
            .map_err(io::Error::from)
            .and_then(|()| file.write_all(text.as_bytes()))
            .and_then(|()| std::fs::rename(&scratch, &path));
        if placed.is_err() {
            _ = std::fs::remove_file(&scratch);
        }
        placed.map(|()| EndpointFile { path, file })
    }

    /// Removes the file of an earlier server. The caller listens at `socket`.
    pub fn remove_stale(socket: &Path) -> io::Result<()> {
        remove(&path_beside(socket))
    }
}

impl Drop for EndpointFile {
    fn drop(&mut self) {
        let identity = |meta: std::fs::Metadata| (meta.dev(), meta.ino());
        let own = self.file.metadata().map(identity);
        let found = self.path.symlink_metadata().map(identity);
        if own.is_ok_and(|own| found.is_ok_and(|found| own == found)) {
            _ = std::fs::remove_file(&self.path);
        }
    }
}

fn remove(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Reads the description of the endpoint of the running server at `socket`.
pub fn read(socket: &Path) -> io::Result<Description> {
    let path = path_beside(socket);
    let shown = path.display();
    let other = |what: String| io::Error::other(format!("{shown}: {what}"));
    let absent = "no server with an endpoint runs";
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = match rustix::fs::open(&path, flags, Mode::empty()) {
        Ok(file) => File::from(file),
        Err(rustix::io::Errno::NOENT) => return Err(other(format!("{absent}: no such file"))),
        Err(error) => return Err(other(error.to_string())),
    };
    let meta = file.metadata()?;
    let user = rustix::process::geteuid().as_raw();
    if !meta.is_file() || meta.uid() != user || meta.mode() & 0o077 != 0 {
        return Err(other("it is no file of this user that others can't read".into()));
    }
    match flock(&file, FlockOperation::NonBlockingLockShared) {
        Err(rustix::io::Errno::WOULDBLOCK) => {}
        Ok(()) => {
            return Err(other(format!("{absent}: the file is one of a server that was killed")));
        }
        Err(error) => return Err(other(error.to_string())),
    }
    let mut text = String::new();
    (&file).take(FILE_BYTES_MAX).read_to_string(&mut text)?;
    let description: Description =
        serde_json::from_str(&text).map_err(|error| other(error.to_string()))?;
    if description.version != VERSION {
        return Err(other(format!("its version is {}, and not {VERSION}", description.version)));
    }
    Ok(description)
}

impl Description {
    pub fn new(url: Option<String>, socket: Option<PathBuf>, key: (&str, &str)) -> Description {
        Description {
            version: VERSION,
            url,
            socket,
            bucket: String::new(),
            buckets: Vec::new(),
            region: "us-east-1".into(),
            access_key_id: key.0.into(),
            secret_access_key: key.1.into(),
        }
    }

    pub fn add_bucket(&mut self, name: &str, store: &str) {
        if self.buckets.is_empty() {
            name.clone_into(&mut self.bucket);
        }
        self.buckets.push(DescribedBucket { name: name.into(), store: store.into() });
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn described() -> Description {
        let mut description =
            Description::new(Some("http://127.0.0.1:1".into()), None, ("id", "secret"));
        description.add_bucket("data", "s3://data");
        description.add_bucket("more", "s3://more");
        description
    }

    #[test]
    fn a_description_is_private_and_ends_with_its_server() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("s");
        assert!(read(&socket).unwrap_err().to_string().contains("no server with an endpoint"));
        let file = EndpointFile::write(&socket, &described()).unwrap();
        let path = path_beside(&socket);
        assert_eq!(path, dir.path().join("s.endpoint.json"));
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(read(&socket).unwrap(), described());
        assert_eq!(described().bucket, "data");
        // A later server has replaced it.
        let second = EndpointFile::write(&socket, &described()).unwrap();
        drop(file);
        read(&socket).unwrap();
        drop(second);
        assert!(!path.exists());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing else is left");
    }

    #[test]
    fn files_that_are_no_description_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("s");
        let path = path_beside(&socket);
        let error = || read(&socket).unwrap_err().to_string();
        std::mem::drop(EndpointFile::write(&socket, &described()).unwrap());
        std::fs::write(&path, serde_json::to_string(&described()).unwrap()).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o644)).unwrap();
        assert!(error().contains("others can't read"), "{}", error());
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
        assert!(error().contains("was killed"), "{}", error());
        let locked = File::open(&path).unwrap();
        flock(&locked, FlockOperation::NonBlockingLockExclusive).unwrap();
        read(&socket).unwrap();
        std::fs::write(&path, "{}").unwrap();
        assert!(error().contains("version"), "{}", error());
        let other = Description { version: 2, ..described() };
        std::fs::write(&path, serde_json::to_string(&other).unwrap()).unwrap();
        assert!(error().contains("its version is 2"), "{}", error());
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/dev/null", &path).unwrap();
        assert!(read(&socket).is_err());
    }
}
