//! A store of local files whose copies are files of their own.
//!
//! `LocalFileSystem` copies by a hard link: a program that writes to one of the two files then changes both, and a second copy
//! of the same object leaves a file with another name.

use std::fmt;
use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::path::{Path as FilePath, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::stream::BoxStream;
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{
    CopyMode, CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, PutMultipartOptions, PutOptions, PutPayload, PutResult, RenameOptions, Result,
};

#[derive(Debug)]
pub(crate) struct LocalFiles(pub(crate) Arc<LocalFileSystem>);

/// The name by which a server and a disk tier know the store.
impl fmt::Display for LocalFiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
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
        self.0.put_opts(location, payload, options).await
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.0.put_multipart_opts(location, options).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        self.0.get_opts(location, options).await
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        self.0.get_ranges(location, ranges).await
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        self.0.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.0.list(prefix)
    }

    fn list_with_offset(
        &self,
        prefix: Option<&Path>,
        offset: &Path,
    ) -> BoxStream<'static, Result<ObjectMeta>> {
        self.0.list_with_offset(prefix, offset)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.0.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        let (store, from, to) = (Arc::clone(&self.0), from.clone(), to.clone());
        let copied = tokio::task::spawn_blocking(move || copy(&store, &from, &to, options.mode));
        copied
            .await
            .unwrap_or_else(|error| Err(Error::Generic { store: "millpond", source: error.into() }))
    }

    async fn rename_opts(&self, from: &Path, to: &Path, options: RenameOptions) -> Result<()> {
        self.0.rename_opts(from, to, options).await
    }
}

/// Copies an object to a file of its own, as a whole or not at all. Waits for the disk.
fn copy(store: &LocalFileSystem, from: &Path, to: &Path, mode: CopyMode) -> Result<()> {
    let (source, target) = (store.path_to_filesystem(from)?, store.path_to_filesystem(to)?);
    copy_file(&source, &target, mode).map_err(|error| {
        let (path, cause) = (from.to_string(), Box::new(error));
        match (cause.kind(), mode) {
            (ErrorKind::NotFound, _) => Error::NotFound { path, source: cause },
            (ErrorKind::AlreadyExists, CopyMode::Create) => {
                Error::AlreadyExists { path: to.to_string(), source: cause }
            }
            _ => Error::Generic { store: "millpond", source: cause },
        }
    })
}

fn copy_file(source: &FilePath, target: &FilePath, mode: CopyMode) -> io::Result<()> {
    let mut data = OpenOptions::new().read(true).open(source)?;
    if data.metadata()?.is_dir() {
        return Err(ErrorKind::NotFound.into());
    }
    if let Some(folder) = target.parent() {
        fs::create_dir_all(folder)?;
    }
    let (staged, mut file) = stage(target)?;
    let copied = io::copy(&mut data, &mut file).and_then(|_| match mode {
        CopyMode::Overwrite => fs::rename(&staged, target),
        CopyMode::Create => fs::hard_link(&staged, target),
    });
    if copied.is_err() || matches!(mode, CopyMode::Create) {
        // The first error is that of the caller.
        let _ = fs::remove_file(&staged);
    }
    copied
}

/// A new file beside the target, with a name that lists leave out.
fn stage(target: &FilePath) -> io::Result<(PathBuf, fs::File)> {
    for number in 0u64.. {
        let mut name = target.as_os_str().to_owned();
        name.push(format!("#{number}"));
        match OpenOptions::new().write(true).create_new(true).open(&name) {
            Ok(file) => return Ok((name.into(), file)),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    unreachable!("a folder has fewer files")
}
