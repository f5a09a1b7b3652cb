//! Writes over files: the new bytes are staged in a file of their own, which then takes the place and the access rights of the
//! old one.
//!
//! - **LR1** No other user gains access by a write. The staged file is its writer's alone until it has the old file's mode, and
//!   where the owner, the group or an access control list can't be kept, the group gets no more than all others have.

use std::fs::{self, File, Metadata, OpenOptions, Permissions};
use std::io::{self, ErrorKind};
use std::os::fd::IntoRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path as FilePath, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use object_store::path::Path;
use object_store::{Error, MultipartUpload, PutPayload, PutResult, Result, UploadPart};
use rustix::io::Errno;

use crate::local_files::calls::{FileError, e_tag, wait_for};

/// A store that removes empty folders may remove a new one again before it has a file. Untuned.
const FOLDER_TRIES_MAX: u32 = 100;
/// The kernel follows as many links.
const LINKS_MAX: u32 = 40;
const ACCESS_LIST: &str = "system.posix_acl_access";

/// The new content of a file, until [`Replacement::publish`].
#[derive(Debug)]
struct Replacement {
    /// `None`: it has its place.
    staged: Option<PathBuf>,
    file: File,
    target: PathBuf,
    is_synced: bool,
}

impl Replacement {
    /// `None`: there is neither a file nor a link.
    fn begin(target: &FilePath, is_synced: bool) -> io::Result<Option<Replacement>> {
        if let Err(error) = fs::symlink_metadata(target) {
            return if is_absent(&error) { Ok(None) } else { Err(error) };
        }
        let target = resolve(target)?;
        let is_new = fs::symlink_metadata(&target).is_err_and(|error| is_absent(&error));
        let (staged, file) = stage(&target, if is_new { 0o666 } else { 0o600 })?;
        Ok(Some(Replacement { staged: Some(staged), file, target, is_synced }))
    }

    fn write(&self, data: &PutPayload, mut offset: u64) -> io::Result<()> {
        for bytes in data.iter() {
            self.file.write_all_at(bytes, offset)?;
            offset += bytes.len() as u64;
        }
        Ok(())
    }

    fn publish(mut self) -> io::Result<PutResult> {
        match fs::metadata(&self.target) {
            Ok(old) => self.keep_access(&old)?,
            Err(error) if is_absent(&error) => (),
            Err(error) => return Err(error),
        }
        if self.is_synced {
            self.file.sync_all()?;
        }
        let e_tag = Some(e_tag(&self.file.metadata()?));
        // A network file system may report failed writes no earlier than here.
        // SAFETY: the descriptor is this clone's, and nothing uses it afterwards.
        unsafe { rustix::io::try_close(self.file.try_clone()?.into_raw_fd()) }?;
        if let Some(staged) = &self.staged {
            fs::rename(staged, &self.target)?;
        }
        self.staged = None;
        if let Some(folder) = self.target.parent().filter(|_| self.is_synced) {
            File::open(folder)?.sync_all()?;
        }
        Ok(PutResult {
            e_tag,
            version: None,
            #[cfg(feature = "object_store_0_14")]
            extensions: Default::default(),
        })
    }

    /// Gives the staged file the access rights of the old one (LR1).
    fn keep_access(&self, old: &Metadata) -> io::Result<()> {
        let (file, own) = (&self.file, self.file.metadata()?);
        let (keeps_user, mut keeps_group) = (own.uid() == old.uid(), own.gid() == old.gid());
        if !keeps_user && fchown(file, Some(old.uid()), Some(old.gid())).is_ok() {
            keeps_group = true;
        } else if !keeps_group {
            // Not permitted to users that are not in the group.
            keeps_group = fchown(file, None, Some(old.gid())).is_ok();
        }
        // A list is longer than the buffer.
        let found = rustix::fs::getxattr(&self.target, ACCESS_LIST, &mut [0; 1]);
        if matches!(found, Ok(1..) | Err(Errno::RANGE)) {
            // Then the mode has the list's mask in place of the group's rights.
            keeps_group = false;
        }
        // The folder may have given one to the staged file.
        let _ = rustix::fs::fremovexattr(file, ACCESS_LIST);
        // Without the bits that set a user or a group, which a write drops as well.
        let mut mode = old.mode() & 0o777;
        if !keeps_group {
            mode &= !0o070 | (mode & 0o007) << 3;
        }
        file.set_permissions(Permissions::from_mode(mode))
    }
}

impl Drop for Replacement {
    fn drop(&mut self) {
        if let Some(staged) = self.staged.take() {
            // The first error is that of the caller.
            let _ = fs::remove_file(staged);
        }
    }
}

fn is_absent(error: &io::Error) -> bool {
    error.kind() == ErrorKind::NotFound
}

/// The file that a write to this path changes, which may be new. Links in its last part are followed.
fn resolve(path: &FilePath) -> io::Result<PathBuf> {
    let mut path = path.to_owned();
    for _ in 0..LINKS_MAX {
        match fs::read_link(&path) {
            Ok(target) => path = path.parent().unwrap_or(FilePath::new("/")).join(target),
            // No link, or nothing.
            Err(error) if error.kind() == ErrorKind::InvalidInput || is_absent(&error) => {
                return Ok(path);
            }
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::from_raw_os_error(libc::ELOOP))
}

/// A new file beside the target, with a name that lists leave out: a `#`, and then digits alone.
pub(super) fn stage(target: &FilePath, mode: u32) -> io::Result<(PathBuf, File)> {
    let name = target.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let plain = name.split('#').next().unwrap_or_default();
    let (mut number, mut tries) = (0u64, 0);
    loop {
        let staged = target.with_file_name(format!("{plain}#{number}"));
        match OpenOptions::new().write(true).create_new(true).mode(mode).open(&staged) {
            Ok(file) => return Ok((staged, file)),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => number += 1,
            Err(error) if is_absent(&error) && tries < FOLDER_TRIES_MAX => {
                tries += 1;
                let Some(folder) = target.parent() else { return Err(error) };
                // Something else with the folder's name is no object with the target's.
                let is_other = |error: &io::Error| error.kind() == ErrorKind::AlreadyExists;
                fs::create_dir_all(folder).map_err(|error| {
                    if is_other(&error) { ErrorKind::NotADirectory.into() } else { error }
                })?;
            }
            Err(error) => return Err(error),
        }
    }
}

/// Writes over a file or a link. `None`: there is neither, and nothing was written.
pub(super) async fn put(
    location: &Path,
    target: PathBuf,
    data: PutPayload,
    is_synced: bool,
) -> Result<Option<PutResult>> {
    let write = move || {
        let Some(replacement) = Replacement::begin(&target, is_synced)? else { return Ok(None) };
        replacement.write(&data, 0)?;
        replacement.publish().map(Some)
    };
    let written = wait_for(write).await?;
    written.map_err(|error| FileError::of("write", location, error))
}

/// Begins a write over a file or a link in parts. `None`: there is neither.
pub(super) async fn begin_upload(
    location: &Path,
    target: PathBuf,
    is_synced: bool,
) -> Result<Option<Box<dyn MultipartUpload>>> {
    let begun = wait_for(move || Replacement::begin(&target, is_synced)).await?;
    let begun = begun.map_err(|error| FileError::of("write", location, error))?;
    Ok(begun.map(|replacement| -> Box<dyn MultipartUpload> {
        let content = Arc::new(Mutex::new(Some(replacement)));
        Box::new(ReplacementUpload { location: location.clone(), content, offset: 0 })
    }))
}

#[derive(Debug)]
struct ReplacementUpload {
    location: Path,
    /// `None` at the end.
    content: Arc<Mutex<Option<Replacement>>>,
    /// That of the next part.
    offset: u64,
}

impl ReplacementUpload {
    fn ended(location: &Path) -> Error {
        FileError::of("write", location, io::Error::other("the upload has ended"))
    }

    fn take(&self) -> Result<Replacement> {
        let content = self.content.lock().unwrap_or_else(PoisonError::into_inner).take();
        content.ok_or_else(|| Self::ended(&self.location))
    }
}

#[async_trait]
impl MultipartUpload for ReplacementUpload {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        let (content, location) = (Arc::clone(&self.content), self.location.clone());
        let offset = self.offset;
        self.offset += data.content_length() as u64;
        Box::pin(async move {
            let write = move || {
                let content = content.lock().unwrap_or_else(PoisonError::into_inner);
                content.as_ref().map(|content| content.write(&data, offset))
            };
            let written = wait_for(write).await?.ok_or_else(|| Self::ended(&location))?;
            written.map_err(|error| FileError::of("write", &location, error))
        })
    }

    async fn complete(&mut self) -> Result<PutResult> {
        let content = self.take()?;
        let published = wait_for(move || content.publish()).await?;
        published.map_err(|error| FileError::of("write", &self.location, error))
    }

    async fn abort(&mut self) -> Result<()> {
        self.take().map(drop)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use object_store::local::LocalFileSystem;
    use object_store::{ObjectStore, ObjectStoreExt, PutMode};

    use super::*;
    use crate::LocalFiles;

    const KINDS: [bool; 2] = [false, true];

    fn store() -> (tempfile::TempDir, LocalFiles) {
        let folder = tempfile::tempdir().unwrap();
        let files = LocalFileSystem::new_with_prefix(folder.path()).unwrap();
        (folder, LocalFiles::new(files))
    }

    async fn write(store: &LocalFiles, name: &str, in_parts: bool) -> Result<PutResult> {
        let name = Path::from(name);
        if !in_parts {
            return store.put(&name, "water lilies".into()).await;
        }
        let mut upload = store.put_multipart(&name).await?;
        let parts = [upload.put_part("water ".into()), upload.put_part("lilies".into())];
        for part in parts.into_iter().rev() {
            part.await?;
        }
        upload.complete().await
    }

    fn mode(path: &FilePath) -> u32 {
        fs::metadata(path).unwrap().mode() & 0o7777
    }

    /// Goal: a write over a file leaves its access rights, and no other file (LR1). Its ETag is that of the object.
    #[tokio::test]
    async fn writes_keep_the_mode() {
        let (folder, store) = store();
        let path = folder.path().join("pond");
        for (before, after) in
            [(0o600, 0o600), (0o640, 0o640), (0o777, 0o777), (0o444, 0o444), (0o4755, 0o755)]
        {
            for in_parts in KINDS {
                fs::write(&path, "a longer text than the new one").unwrap();
                fs::set_permissions(&path, Permissions::from_mode(before)).unwrap();
                let put = write(&store, "pond", in_parts).await.unwrap();
                assert_eq!(
                    (mode(&path), &*fs::read(&path).unwrap()),
                    (after, &b"water lilies"[..])
                );
                assert_eq!(store.head(&Path::from("pond")).await.unwrap().e_tag, put.e_tag);
                assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
                fs::remove_file(&path).unwrap();
            }
        }
        let staged = stage(&path, 0o600).unwrap().0;
        assert_eq!(mode(&staged), 0o600);
    }

    /// Goal: a process that may set them, such as one of root, keeps the owner and the group. Method: other processes can't give the
    /// file away first, so for them it is their own.
    #[tokio::test]
    async fn writes_keep_the_owner() {
        let (folder, store) = store();
        let path = folder.path().join("pond");
        fs::write(&path, "").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o660)).unwrap();
        let is_root = fchown(File::open(&path).unwrap(), Some(1234), Some(1235)).is_ok();
        let before = fs::metadata(&path).unwrap();
        for in_parts in KINDS {
            write(&store, "pond", in_parts).await.unwrap();
            let after = fs::metadata(&path).unwrap();
            assert_eq!((after.uid(), after.gid()), (before.uid(), before.gid()));
            assert_eq!((after.mode() & 0o777, is_root), (0o660, after.uid() == 1234));
        }
    }

    /// Goal: without the old file's list the group has no more than all others. Method: a list for one more user, whose mask
    /// the mode has in place of the group's own rights.
    #[tokio::test]
    async fn a_write_over_a_file_with_an_access_list_widens_nothing() {
        let (folder, store) = store();
        let path = folder.path().join("pond");
        fs::write(&path, "").unwrap();
        let mut list = 2u32.to_le_bytes().to_vec();
        // The tags of <linux/posix_acl.h>: the owner, a user, the group, the mask, others.
        for (tag, rights, user) in [
            (1u16, 6u16, u32::MAX),
            (2, 6, 1234),
            (4, 0, u32::MAX),
            (16, 6, u32::MAX),
            (32, 0, u32::MAX),
        ] {
            list.extend(tag.to_le_bytes());
            list.extend(rights.to_le_bytes());
            list.extend(user.to_le_bytes());
        }
        let flags = rustix::fs::XattrFlags::empty();
        if let Err(error) = rustix::fs::setxattr(&path, ACCESS_LIST, &list, flags) {
            eprintln!("SKIPPED: no access control lists in {}: {error}", folder.path().display());
            return;
        }
        assert_eq!(mode(&path), 0o660);
        write(&store, "pond", false).await.unwrap();
        assert_eq!(mode(&path), 0o600);
    }

    /// Goal: a write over a link is one over its target, which may be absent, and a loop of links is an error.
    #[tokio::test]
    async fn writes_follow_links() {
        let (folder, store) = store();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir(at("below")).unwrap();
        symlink("below/second", at("first")).unwrap();
        symlink("../target", at("below/second")).unwrap();
        symlink("loop", at("loop")).unwrap();
        for in_parts in KINDS {
            for mode_before in [None, Some(0o600)] {
                if let Some(mode) = mode_before {
                    fs::set_permissions(at("target"), Permissions::from_mode(mode)).unwrap();
                }
                write(&store, "first", in_parts).await.unwrap();
                assert_eq!(fs::read(at("target")).unwrap(), b"water lilies");
                let is_link = |name| fs::symlink_metadata(at(name)).unwrap().is_symlink();
                assert!(is_link("first") && is_link("below/second"));
                assert_eq!(mode(&at("target")) == 0o600, mode_before.is_some());
            }
            fs::remove_file(at("target")).unwrap();
            let error = write(&store, "loop", in_parts).await.unwrap_err();
            assert!(error.to_string().contains("write of loop: "), "{error}");
        }
        assert!(
            store.put_opts(&Path::from("first"), "".into(), PutMode::Create.into()).await.is_err()
        );
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3);
    }

    /// Goal: an upload that is aborted or dropped leaves the file, and no other one; later calls of it fail.
    #[tokio::test]
    async fn an_ended_upload_leaves_the_file() {
        let (folder, store) = store();
        let pond = Path::from("pond");
        store.put(&pond, "before".into()).await.unwrap();
        for aborts in KINDS {
            let mut upload = store.put_multipart(&pond).await.unwrap();
            upload.put_part("after".into()).await.unwrap();
            if aborts {
                upload.abort().await.unwrap();
                assert!(upload.put_part("after".into()).await.is_err());
                assert!(upload.complete().await.is_err() && upload.abort().await.is_err());
            }
        }
        assert_eq!(fs::read(folder.path().join("pond")).unwrap(), b"before");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    /// Goal: a store with `with_fsync` is known as one.
    #[cfg(feature = "object_store_0_14")]
    #[test]
    fn synced_stores_are_known() {
        let is_synced = |syncs| {
            let store = LocalFiles::new(LocalFileSystem::new().with_fsync(syncs));
            format!("{store:?}").contains("is_synced: true")
        };
        assert!(is_synced(true) && !is_synced(false));
    }
}
