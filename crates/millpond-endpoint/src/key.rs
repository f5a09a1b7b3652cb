//! The access key of an endpoint: an AWS credentials file that only its user can read.
//!
//! The first start generates the key; later starts read it. Clients can be pointed at the same file
//! (`AWS_SHARED_CREDENTIALS_FILE`).

use std::fs::{DirBuilder, File};
use std::io::{Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, fstat, linkat, openat, unlinkat};
use rustix::io::Errno;
use s3s::auth::SecretKey;

use crate::Error;

/// A longer file is no credentials file.
const FILE_BYTES_MAX: u64 = 64 << 10;
/// 32 characters, so that each random byte chooses one without bias.
const ACCESS_CHARACTERS: &[u8; 32] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567";
const SECRET_CHARACTERS: &[u8; 64] =
    b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

#[derive(Debug, Clone)]
pub(crate) struct AccessKey {
    pub(crate) id: String,
    pub(crate) secret: SecretKey,
}

/// `$XDG_RUNTIME_DIR/millpond/credentials`; for root `/run/millpond/credentials`, where the environment names no directory. The
/// rule is that of the socket of `millpond serve`.
pub(crate) fn default_path() -> Result<PathBuf, Error> {
    let named = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let named = named.filter(|directory| directory.is_absolute());
    let of_root = || rustix::process::geteuid().is_root().then(|| PathBuf::from("/run"));
    match named.or_else(of_root) {
        Some(directory) => Ok(directory.join("millpond/credentials")),
        None => Err(Error::KeyFile {
            path: PathBuf::from("$XDG_RUNTIME_DIR/millpond/credentials"),
            reason: "XDG_RUNTIME_DIR is not set to an absolute path: give the path of the file"
                .into(),
        }),
    }
}

impl AccessKey {
    /// Reads the key, or generates it if the file does not exist. Creates the directory of the file.
    pub(crate) fn open(path: &Path) -> Result<Self, Error> {
        let failed = |reason: String| Error::KeyFile { path: path.into(), reason };
        let name = path.file_name().ok_or_else(|| failed("the path names no file".into()))?;
        let parent = match path.parent() {
            Some(parent) if parent != Path::new("") => parent,
            _ => Path::new("."),
        };
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(parent)
            .map_err(|error| failed(format!("its directory can't be created: {error}")))?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = rustix::fs::open(parent, flags, Mode::empty())
            .map_err(|error| failed(format!("its directory can't be opened: {error}")))?;
        let dir = File::from(dir);
        check_private(&dir, parent, "700")?;
        loop {
            let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
            match openat(&dir, name, flags, Mode::empty()) {
                Ok(file) => return Self::read(&File::from(file), path),
                Err(Errno::NOENT) => match Self::create(&dir, name.as_ref()) {
                    // On EXIST another endpoint has just created the file, and its key is read.
                    Ok(()) | Err(Errno::EXIST) => {}
                    Err(error) => return Err(failed(format!("it can't be created: {error}"))),
                },
                Err(Errno::LOOP) => {
                    return Err(failed("it is a symbolic link, which is not followed".into()));
                }
                Err(error) => return Err(failed(format!("it can't be opened: {error}"))),
            }
        }
    }

    fn read(file: &File, path: &Path) -> Result<Self, Error> {
        let failed = |reason: String| Error::KeyFile { path: path.into(), reason };
        check_private(file, path, "600")?;
        let mut text = String::new();
        file.take(FILE_BYTES_MAX)
            .read_to_string(&mut text)
            .map_err(|error| failed(format!("it can't be read: {error}")))?;
        let value = |name: &str| {
            let mut lines = text.lines().filter_map(|line| line.split_once('='));
            let found = lines.find(|(key, _)| key.trim() == name).map(|(_, value)| value.trim());
            found.filter(|value| !value.is_empty()).ok_or_else(|| {
                failed(format!("it has no line `{name} = ...`: remove it to get a new key"))
            })
        };
        let (id, secret) = (value("aws_access_key_id")?, value("aws_secret_access_key")?);
        Ok(Self { id: id.into(), secret: SecretKey::from(secret) })
    }

    /// Writes a new key to a file of another name, and links it to its own when it is complete.
    fn create(dir: &File, name: &Path) -> Result<(), Errno> {
        let mut random = [0; 16 + 43];
        let mut filled = 0;
        while filled < random.len() {
            let flags = rustix::rand::GetRandomFlags::empty();
            filled += rustix::rand::getrandom(&mut random[filled..], flags)?;
        }
        let (id, secret) = random.split_at(16);
        let id: String =
            id.iter().map(|byte| ACCESS_CHARACTERS[usize::from(byte % 32)] as char).collect();
        let secret: String =
            secret.iter().map(|byte| SECRET_CHARACTERS[usize::from(byte % 64)] as char).collect();
        let text = format!(
            "# The access key of Millpond's S3 endpoint.\n[default]\n\
             aws_access_key_id = MILL{id}\naws_secret_access_key = {secret}\n"
        );
        let scratch = format!(".{}.{}", name.display(), &id[..8]);
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let file = openat(dir, &scratch, flags, Mode::RUSR | Mode::WUSR)?;
        let written = File::from(file)
            .write_all(text.as_bytes())
            .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO));
        let linked = written.and_then(|()| linkat(dir, &scratch, dir, name, AtFlags::empty()));
        let removed = unlinkat(dir, &scratch, AtFlags::empty());
        linked.and(removed)
    }
}

/// Refuses a file or directory of another user, and permissions of the group or of others.
fn check_private(file: &File, path: &Path, mode: &str) -> Result<(), Error> {
    let failed = |reason: String| Error::KeyFile { path: path.into(), reason };
    let stat = fstat(file).map_err(|error| failed(format!("it can't be examined: {error}")))?;
    let wanted = if mode == "700" { FileType::Directory } else { FileType::RegularFile };
    if FileType::from_raw_mode(stat.st_mode) != wanted {
        return Err(failed(format!("{} is no {wanted:?}", path.display())));
    }
    let user = rustix::process::geteuid();
    if stat.st_uid != user.as_raw() {
        let (owner, user) = (stat.st_uid, user.as_raw());
        return Err(failed(format!("it belongs to user {owner}, and this is user {user}")));
    }
    if stat.st_mode & 0o077 != 0 {
        let (now, path) = (stat.st_mode & 0o777, path.display());
        return Err(failed(format!(
            "other users have permissions on it (mode {now:o}): `chmod {mode} {path}`"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn set_mode(path: &Path, mode: u32) {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn the_key_is_generated_once_and_private() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("new/credentials");
        let key = AccessKey::open(&path).unwrap();
        assert_eq!((key.id.len(), key.secret.expose().len()), (20, 43));
        let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&path), mode(path.parent().unwrap())), (0o600, 0o700));
        assert_eq!(
            path.parent().unwrap().read_dir().unwrap().count(),
            1,
            "no scratch file is left"
        );
        let again = AccessKey::open(&path).unwrap();
        assert_eq!((&again.id, again.secret.expose()), (&key.id, key.secret.expose()));
        let other = AccessKey::open(&dir.path().join("new/other")).unwrap();
        assert!(other.id != key.id && other.secret.expose() != key.secret.expose());
    }

    #[test]
    fn a_key_that_others_can_read_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("new/credentials");
        AccessKey::open(&path).unwrap();
        let refused = || AccessKey::open(&path).unwrap_err().to_string();
        set_mode(&path, 0o640);
        assert!(refused().contains("mode 640") && refused().contains("chmod 600"), "{}", refused());
        set_mode(&path, 0o600);
        set_mode(path.parent().unwrap(), 0o755);
        assert!(refused().contains("chmod 700"), "{}", refused());
        set_mode(path.parent().unwrap(), 0o700);
        AccessKey::open(&path).unwrap();
        std::fs::write(&path, "[default]\naws_access_key_id = A\n").unwrap();
        assert!(refused().contains("aws_secret_access_key"), "{}", refused());
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", &path).unwrap();
        assert!(refused().contains("symbolic link"), "{}", refused());
    }

    #[test]
    fn the_debug_output_hides_the_secret() {
        let dir = tempfile::tempdir().unwrap();
        let key = AccessKey::open(&dir.path().join("new/credentials")).unwrap();
        assert!(!format!("{key:?}").contains(key.secret.expose()));
    }
}
