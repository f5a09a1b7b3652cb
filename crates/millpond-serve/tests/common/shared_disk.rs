//! A store that several processes use: local files, whose requests are counted in a file, and objects that say which
//! version they are.

use std::fmt;
use std::fs::File;
use std::io::Write;
use std::path::{Path as FilePath, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::stream::BoxStream;
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};

/// The store, which has one name in all processes.
#[derive(Debug)]
pub struct SharedDisk {
    files: LocalFileSystem,
    log: File,
    log_path: PathBuf,
    delay: Duration,
}

impl SharedDisk {
    pub fn open(dir: &FilePath, delay: Duration) -> Arc<SharedDisk> {
        let objects = dir.join("objects");
        std::fs::create_dir_all(&objects).unwrap();
        let log_path = dir.join("requests");
        let log = File::options().append(true).create(true).open(&log_path).unwrap();
        let files = LocalFileSystem::new_with_prefix(objects).unwrap();
        Arc::new(SharedDisk { files, log, log_path, delay })
    }

    /// The reads of all processes so far.
    pub fn requests(&self) -> u64 {
        std::fs::metadata(&self.log_path).unwrap().len()
    }
}

impl fmt::Display for SharedDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("shared disk")
    }
}

#[async_trait]
impl ObjectStore for SharedDisk {
    async fn put_opts(&self, at: &Path, bytes: PutPayload, opts: PutOptions) -> Result<PutResult> {
        self.files.put_opts(at, bytes, opts).await
    }

    async fn put_multipart_opts(
        &self,
        at: &Path,
        opts: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.files.put_multipart_opts(at, opts).await
    }

    async fn get_opts(&self, at: &Path, options: GetOptions) -> Result<GetResult> {
        (&self.log).write_all(b".").unwrap();
        if !self.delay.is_zero() {
            tokio::time::sleep(self.delay).await;
        }
        self.files.get_opts(at, options).await
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        self.files.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.files.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.files.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.files.copy_opts(from, to, options).await
    }
}

/// The bytes of an object: in each word the object and the version.
pub fn words_of(object: u64, version: u32, len: u64) -> Vec<u8> {
    let word = object << 32 | u64::from(version);
    word.to_le_bytes().repeat((len / 8) as usize)
}

/// The version of bytes that begin with a word. Panics if they are not all of one version of the object.
pub fn version_in(bytes: &[u8], object: u64) -> u32 {
    let first = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    let torn = bytes.chunks_exact(8).position(|word| word != first.to_le_bytes());
    assert_eq!(torn, None, "object {object} is torn in {} bytes", bytes.len());
    assert_eq!(first >> 32, object, "bytes of another object");
    first as u32
}

pub fn name_of(object: u64) -> Path {
    Path::from(format!("set/object-{object}"))
}
