//! A store of local files: copies are files of their own, writes keep access rights, and lists skip entries that are no objects.

mod calls;
mod replacement;
mod walk;

use std::fmt;
use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::ops::Range;
use std::os::fd::IntoRawFd;
use std::path::{Path as FilePath, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::stream::{self, BoxStream, StreamExt};
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{
    CopyMode, CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, PutMode, PutMultipartOptions, PutOptions, PutPayload, PutResult, RenameOptions,
    Result,
};

use crate::local_files::calls::wait_for;

/// A cancelled copy ends after so many bytes. Untuned.
const COPY_STEP_BYTES: u64 = 16 << 20;

/// A [`LocalFileSystem`] for directories that other programs use, too.
///
/// - **Copies** are files of their own. `LocalFileSystem` copies by a hard link: a program that writes to one of the two files
///   then changes both, they have one ETag, and a second copy of the same object leaves a file with another name. A copy has the
///   permissions of its source. If the source changes during the copy, the copy fails and the target is as before. A future
///   that is dropped ends its copy within 16 MiB. A copy is not synced, also by a store with `with_fsync`.
/// - **Writes** over a file keep its permissions, and its owner and group as far as the process may. If it may not, or if the
///   file has an access control list, its group gets no more than all other users have. A write over a symbolic link is one
///   over its target.
/// - **Lists** go on after entries that are no objects: names with control characters or without UTF-8, sockets and
///   devices, links to nothing, and links to a directory that the link is in. `LocalFileSystem` ends a list at such an entry with an error.
///
/// # Examples
///
/// ```
/// use millpond_objects::LocalFiles;
/// use object_store::{ObjectStoreExt, local::LocalFileSystem, path::Path};
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = tempfile::tempdir()?;
///
/// let store = LocalFiles::new(LocalFileSystem::new_with_prefix(folder.path())?);
/// let (pond, copy) = (Path::from("pond"), Path::from("copy"));
/// store.put(&pond, "water lilies".into()).await?;
/// store.copy(&pond, &copy).await?;
/// assert_ne!(store.head(&pond).await?.e_tag, store.head(&copy).await?.e_tag);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct LocalFiles {
    files: LocalFileSystem,
    is_synced: bool,
}

impl LocalFiles {
    /// The same files.
    #[must_use]
    pub fn new(files: LocalFileSystem) -> LocalFiles {
        // It offers no other way to find out.
        let is_synced = format!("{files:?}").contains("fsync: true");
        LocalFiles { files, is_synced }
    }

    /// The directory of a prefix.
    fn folder(&self, prefix: Option<&Path>) -> Result<PathBuf> {
        let mut folder = self.files.path_to_filesystem(&Path::from("name"))?;
        folder.pop();
        let prefix: &str = prefix.map_or("", AsRef::as_ref);
        // A push of an empty name would add a slash.
        if !prefix.is_empty() {
            folder.push(prefix);
        }
        Ok(folder)
    }

    fn list_after(
        &self,
        prefix: Option<&Path>,
        offset: Option<&Path>,
    ) -> BoxStream<'static, Result<ObjectMeta>> {
        match self.folder(prefix) {
            Ok(folder) => walk::list(folder, prefix.cloned().unwrap_or_default(), offset.cloned()),
            Err(error) => stream::iter([Err(error)]).boxed(),
        }
    }
}

/// The same name as that of the `LocalFileSystem`: a server and a disk tier know the store by it.
impl fmt::Display for LocalFiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.files.fmt(f)
    }
}

#[async_trait]
impl ObjectStore for LocalFiles {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> Result<PutResult> {
        if options.mode == PutMode::Overwrite && options.attributes.is_empty() {
            let target = self.files.path_to_filesystem(location)?;
            let data = payload.clone();
            if let Some(put) = replacement::put(location, target, data, self.is_synced).await? {
                return Ok(put);
            }
        }
        self.files.put_opts(location, payload, options).await
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        if options.attributes.is_empty() {
            let target = self.files.path_to_filesystem(location)?;
            if let Some(upload) =
                replacement::begin_upload(location, target, self.is_synced).await?
            {
                return Ok(upload);
            }
        }
        self.files.put_multipart_opts(location, options).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        self.files.get_opts(location, options).await
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        self.files.get_ranges(location, ranges).await
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        self.files.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.list_after(prefix, None)
    }

    fn list_with_offset(
        &self,
        prefix: Option<&Path>,
        offset: &Path,
    ) -> BoxStream<'static, Result<ObjectMeta>> {
        self.list_after(prefix, Some(offset))
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        walk::list_folder(self.folder(prefix)?, prefix.cloned().unwrap_or_default()).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        let is_cancelled = Arc::new(AtomicBool::new(false));
        let _cancel = CancelOnDrop(Arc::clone(&is_cancelled));
        let (files, from, to) = (self.files.clone(), from.clone(), to.clone());
        wait_for(move || copy(&files, &from, &to, options.mode, &is_cancelled)).await?
    }

    async fn rename_opts(&self, from: &Path, to: &Path, options: RenameOptions) -> Result<()> {
        self.files.rename_opts(from, to, options).await
    }
}

/// Tells the thread of a copy that its result is not wanted any more.
struct CancelOnDrop(Arc<AtomicBool>);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        // Relaxed: the copy passes on no other data.
        self.0.store(true, Relaxed);
    }
}

/// An error of a copy, which names both objects. The kernel's error is its source.
#[derive(Debug)]
struct CopyError {
    from: Path,
    to: Path,
    error: io::Error,
}

impl fmt::Display for CopyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "copy of {} to {}: {}", self.from, self.to, self.error)
    }
}

impl std::error::Error for CopyError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.error)
    }
}

/// Copies an object to a file of its own, as a whole or not at all. Waits for the disk.
fn copy(
    files: &LocalFileSystem,
    from: &Path,
    to: &Path,
    mode: CopyMode,
    is_cancelled: &AtomicBool,
) -> Result<()> {
    let (source, target) = (files.path_to_filesystem(from)?, files.path_to_filesystem(to)?);
    let not_found = |source: Box<io::Error>| Error::NotFound { path: from.to_string(), source };
    let failed = |error: io::Error| {
        let source = CopyError { from: from.clone(), to: to.clone(), error };
        Error::Generic { store: crate::NAME, source: source.into() }
    };
    let data = OpenOptions::new().read(true).open(source).map_err(|error| match error.kind() {
        ErrorKind::NotFound => not_found(error.into()),
        _ => failed(error),
    })?;
    if data.metadata().map_err(failed)?.is_dir() {
        return Err(not_found(Box::new(ErrorKind::IsADirectory.into())));
    }
    write_copy(&data, &target, mode, is_cancelled).map_err(|error| match (error.kind(), mode) {
        (ErrorKind::AlreadyExists, CopyMode::Create) => {
            Error::AlreadyExists { path: to.to_string(), source: error.into() }
        }
        _ => failed(error),
    })
}

fn write_copy(
    data: &fs::File,
    target: &FilePath,
    mode: CopyMode,
    is_cancelled: &AtomicBool,
) -> io::Result<()> {
    let (staged, file) = replacement::stage(target, 0o666)?;
    let copied = copy_bytes(data, file, is_cancelled).and_then(|()| match mode {
        CopyMode::Overwrite => fs::rename(&staged, target),
        CopyMode::Create => fs::hard_link(&staged, target),
    });
    if copied.is_err() || matches!(mode, CopyMode::Create) {
        // The first error is that of the caller.
        let _ = fs::remove_file(&staged);
    }
    copied
}

/// Copies all bytes of `data`, and closes `file`.
fn copy_bytes(data: &fs::File, file: fs::File, is_cancelled: &AtomicBool) -> io::Result<()> {
    let before = data.metadata()?;
    file.set_permissions(before.permissions())?;
    let mut copied = 0;
    loop {
        let step = io::copy(&mut data.take(COPY_STEP_BYTES), &mut &file)?;
        copied += step;
        // Relaxed: as in `CancelOnDrop`.
        if is_cancelled.load(Relaxed) {
            return Err(io::Error::other("the copy was cancelled"));
        }
        if step < COPY_STEP_BYTES {
            break;
        }
    }
    let after = data.metadata()?;
    let (len_before, len) = (before.len(), after.len());
    if copied != len || len != len_before || before.modified()? != after.modified()? {
        let what = format!(
            "the source changed during the copy: {len_before} bytes long before, {len} after, {copied} copied"
        );
        return Err(io::Error::other(what));
    }
    // A network file system may report failed writes no earlier than here.
    // SAFETY: the descriptor is this file's, and nothing uses it afterwards.
    unsafe { rustix::io::try_close(file.into_raw_fd()) }?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use object_store::ObjectStoreExt;

    use super::*;

    fn store() -> (tempfile::TempDir, LocalFiles) {
        let folder = tempfile::tempdir().unwrap();
        let files = LocalFileSystem::new_with_prefix(folder.path()).unwrap();
        (folder, LocalFiles::new(files))
    }

    fn names(folder: &FilePath) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// Goal: a copy whose source changes length, or that is cancelled, leaves the target and no other file. Method: the
    /// source is longer than a step; the flag is set, and the recorded length differs, before the copy begins.
    #[test]
    fn a_copy_is_whole_or_nothing() {
        let (folder, _) = store();
        let (from, to) = (folder.path().join("from"), folder.path().join("to"));
        fs::write(&from, vec![1; 2 * COPY_STEP_BYTES as usize + 1]).unwrap();
        fs::write(&to, "before").unwrap();
        let data = fs::File::open(&from).unwrap();
        let cancelled = write_copy(&data, &to, CopyMode::Overwrite, &AtomicBool::new(true));
        assert!(cancelled.unwrap_err().to_string().contains("cancelled"));
        // The descriptor has passed one step: as if the source had been shorter by it.
        let short = write_copy(&data, &to, CopyMode::Overwrite, &AtomicBool::new(false));
        let error = short.unwrap_err().to_string();
        assert!(error.contains("16777217 copied"), "{error}");
        assert_eq!(
            (fs::read(&to).unwrap(), names(folder.path())),
            ("before".into(), vec!["from".into(), "to".into()])
        );
    }

    /// Goal: the file of a copy in progress is no object, whichever name the target has.
    #[tokio::test]
    async fn staged_names_are_no_objects() {
        let (folder, store) = store();
        for (name, staged) in [("pond", "pond#0"), ("pond#lily", "pond#1"), ("#", "#0")] {
            let target = folder.path().join(name);
            let (path, _file) = replacement::stage(&target, 0o600).unwrap();
            assert_eq!(path, folder.path().join(staged));
            assert!(store.head(&Path::from(staged)).await.is_err());
        }
        assert!(store.list_with_delimiter(None).await.unwrap().objects.is_empty());
    }

    /// Goal: a copy has the mode of its source, and an error names both objects and has the kernel's error as a source.
    #[tokio::test]
    async fn copies_have_their_mode_and_errors_have_names() {
        let (folder, store) = store();
        let [pond, copy, below] = ["pond", "copy", "pond/lily"].map(Path::from);
        store.put(&pond, "water".into()).await.unwrap();
        let mode = fs::Permissions::from_mode(0o640);
        fs::set_permissions(folder.path().join("pond"), mode).unwrap();
        store.copy(&pond, &copy).await.unwrap();
        let metadata = fs::metadata(folder.path().join("copy")).unwrap();
        assert_eq!(metadata.permissions().mode() & 0o777, 0o640);
        for result in
            [store.copy(&pond, &below).await, store.copy_if_not_exists(&pond, &below).await]
        {
            let Error::Generic { source, .. } = result.unwrap_err() else { panic!("another kind") };
            assert!(source.to_string().starts_with("copy of pond to pond/lily: "), "{source}");
            assert!(source.source().unwrap().downcast_ref::<io::Error>().is_some());
        }
    }
}
