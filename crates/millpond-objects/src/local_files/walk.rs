//! Lists of files as objects.
//!
//! - **LL1** A list leaves out entries that are no objects: names with control characters or without UTF-8, names of staged files,
//!   sockets and devices, links to nothing, and links to a directory that the link is in, which would not end. It goes on after
//!   them.

use std::collections::VecDeque;
use std::fs::{self, DirEntry, Metadata, ReadDir};
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::{Path as FilePath, PathBuf};

use futures_util::stream::{self, BoxStream, StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{Error, ListResult, ObjectMeta, Result};

use crate::local_files::calls::{FileError, e_tag, wait_for};

/// The entries that are read at a time, by a thread that may wait.
const BATCH_LEN: usize = 1024;

enum Listed {
    Object(ObjectMeta),
    Folder(Folder),
}

/// A directory and the prefix that it is.
struct Folder {
    path: PathBuf,
    prefix: Path,
}

impl Folder {
    fn open(self) -> Result<Option<OpenFolder>> {
        match fs::read_dir(&self.path) {
            Ok(entries) => Ok(Some(OpenFolder { entries, folder: self })),
            Err(error) if is_nothing(&error) => Ok(None),
            Err(error) => Err(FileError::of("list", &self.prefix, error)),
        }
    }
}

struct OpenFolder {
    folder: Folder,
    entries: ReadDir,
}

impl OpenFolder {
    fn next(&mut self) -> Option<Result<Listed>> {
        loop {
            let failed = |error| FileError::of("list", &self.folder.prefix, error);
            match self.entries.next()?.and_then(|entry| entry_of(&entry, &self.folder)) {
                Ok(None) => (),
                Ok(Some(entry)) => return Some(Ok(entry)),
                Err(error) => return Some(Err(failed(error))),
            }
        }
    }
}

/// `None`: it is no object, and no directory with objects (LL1).
fn entry_of(entry: &DirEntry, folder: &Folder) -> io::Result<Option<Listed>> {
    let name = entry.file_name();
    let Some(name) = name.to_str() else { return Ok(None) };
    let Ok(location) = Path::parse(format!("{}/{name}", folder.prefix)) else { return Ok(None) };
    let (path, is_link) = (entry.path(), entry.file_type()?.is_symlink());
    let metadata = match fs::metadata(&path) {
        Ok(metadata) => metadata,
        Err(error) if is_link || is_nothing(&error) => return Ok(None),
        Err(error) => return Err(error),
    };
    if metadata.is_dir() {
        let is_around = is_link && is_in(&folder.path, &metadata);
        return Ok((!is_around).then_some(Listed::Folder(Folder { path, prefix: location })));
    }
    if !metadata.is_file() || is_staged(name) {
        return Ok(None);
    }
    Ok(Some(Listed::Object(ObjectMeta {
        location,
        last_modified: metadata.modified()?.into(),
        size: metadata.len(),
        e_tag: Some(e_tag(&metadata)),
        version: None,
    })))
}

fn is_nothing(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory)
}

/// Whether the way to `path` leads through the directory, or ends there.
fn is_in(path: &FilePath, directory: &Metadata) -> bool {
    let is_same = |one: Metadata| (one.dev(), one.ino()) == (directory.dev(), directory.ino());
    path.ancestors().any(|above| fs::metadata(above).is_ok_and(is_same))
}

/// Whether it is the name of a file that a write has not ended.
fn is_staged(name: &str) -> bool {
    let number = name.split_once('#').map(|(_, number)| number);
    number.is_some_and(|number| {
        !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
    })
}

/// All objects below a directory.
struct Walk {
    to_open: Option<Folder>,
    open: Vec<OpenFolder>,
    offset: Option<Path>,
}

impl Walk {
    fn try_next(&mut self) -> Result<Option<ObjectMeta>> {
        loop {
            if let Some(folder) = self.to_open.take() {
                self.open.extend(folder.open()?);
            }
            let Some(folder) = self.open.last_mut() else { return Ok(None) };
            match folder.next().transpose()? {
                None => drop(self.open.pop()),
                Some(Listed::Folder(folder)) => self.to_open = Some(folder),
                Some(Listed::Object(meta)) => {
                    let is_before = |offset: &Path| meta.location <= *offset;
                    if !self.offset.as_ref().is_some_and(is_before) {
                        return Ok(Some(meta));
                    }
                }
            }
        }
    }
}

/// The objects below `prefix`, which is the directory `path`, and after `offset`.
pub(super) fn list(
    path: PathBuf,
    prefix: Path,
    offset: Option<Path>,
) -> BoxStream<'static, Result<ObjectMeta>> {
    let walk = Walk { to_open: Some(Folder { path, prefix }), open: Vec::new(), offset };
    let batches = stream::try_unfold(Some(walk), |walk| async move {
        let Some(mut walk) = walk else { return Ok(None) };
        let read = move || {
            let mut batch = VecDeque::with_capacity(BATCH_LEN);
            while batch.len() < BATCH_LEN {
                match walk.try_next() {
                    Ok(Some(meta)) => batch.push_back(Ok(meta)),
                    Ok(None) => return (batch, None),
                    Err(error) => {
                        batch.push_back(Err(error));
                        return (batch, None);
                    }
                }
            }
            (batch, Some(walk))
        };
        let (batch, walk) = wait_for(read).await?;
        Ok::<_, Error>(Some((stream::iter(batch), walk)))
    });
    batches.try_flatten().boxed()
}

/// The objects and the directories in `prefix`, which is the directory `path`.
pub(super) async fn list_folder(path: PathBuf, prefix: Path) -> Result<ListResult> {
    let read = move || -> Result<ListResult> {
        let (mut common_prefixes, mut objects) = (Vec::new(), Vec::new());
        let mut folder = Folder { path, prefix }.open()?;
        while let Some(entry) = folder.as_mut().and_then(OpenFolder::next) {
            match entry? {
                Listed::Object(meta) => objects.push(meta),
                Listed::Folder(folder) => common_prefixes.push(folder.prefix),
            }
        }
        common_prefixes.sort();
        Ok(ListResult {
            common_prefixes,
            objects,
            #[cfg(feature = "object_store_0_14")]
            extensions: Default::default(),
        })
    };
    wait_for(read).await?
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    use object_store::local::LocalFileSystem;
    use object_store::{ObjectStore, ObjectStoreExt};

    use super::*;
    use crate::LocalFiles;

    /// Goal: lists have all objects and no other entry (LL1), each as `head` has it. Method: a directory with each kind of entry
    /// that is no object; `up` leads to a directory above, `around` into one below, from which `up` leads back.
    #[tokio::test]
    async fn lists_go_on_after_entries_that_are_no_objects() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        fs::create_dir_all(at("a/b/empty")).unwrap();
        for name in ["x", "a/y", "a/b/z", "a/p#1", "a/p#q", "two\nlines"] {
            fs::write(at(name), name).unwrap();
        }
        fs::write(root.path().join(OsStr::from_bytes(b"\xff")), "").unwrap();
        fs::create_dir(root.path().join(OsStr::from_bytes(b"\xfe"))).unwrap();
        let _socket = UnixListener::bind(at("socket")).unwrap();
        fs::write(root.path().join(OsStr::from_bytes(b"\xfe/below")), "").unwrap();
        let links = [
            ("self", "."),
            ("loop", "loop"),
            ("none", "/none"),
            ("below", "x/y"),
            ("a/b/up", ".."),
        ];
        for (link, target) in [links.as_slice(), &[("a/link", "../x"), ("around", "a/b")]].concat()
        {
            symlink(target, at(link)).unwrap();
        }
        let store = LocalFiles::new(LocalFileSystem::new_with_prefix(root.path()).unwrap());

        let sorted = |metas: Vec<ObjectMeta>| {
            let mut names: Vec<_> = metas.iter().map(|meta| meta.location.to_string()).collect();
            names.sort();
            names
        };
        let list = |prefix: &'static str| {
            let metas = store.list(Some(&Path::from(prefix)));
            async move { sorted(metas.try_collect().await.unwrap()) }
        };
        let in_a = ["a/b/z", "a/link", "a/p#q", "a/y"];
        // By `around`, the directory that `up` leads to is not one that the link is in.
        let around = ["around/up/link", "around/up/p#q", "around/up/y", "around/z"];
        let in_b = ["around/up/b/z"];
        assert_eq!(list("").await, [in_a.as_slice(), &in_b, &around, &["x"]].concat());
        assert_eq!(list("a").await, in_a);
        assert_eq!((list("x").await, list("none").await), (vec![], vec![]));
        let after = store.list_with_offset(None, &Path::from("around/up/y"));
        assert_eq!(sorted(after.try_collect().await.unwrap()), ["around/z", "x"]);

        let folders = |found: &ListResult| {
            found.common_prefixes.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        let found = store.list_with_delimiter(None).await.unwrap();
        assert_eq!(
            (folders(&found), sorted(found.objects)),
            (vec!["a".into(), "around".into()], vec!["x".into()])
        );
        let found = store.list_with_delimiter(Some(&Path::from("a/b"))).await.unwrap();
        assert_eq!(
            (folders(&found), sorted(found.objects)),
            (vec!["a/b/empty".into()], vec!["a/b/z".into()])
        );

        let metas: Vec<ObjectMeta> = store.list(None).try_collect().await.unwrap();
        for meta in metas {
            assert_eq!(store.head(&meta.location).await.unwrap(), meta);
        }
    }

    /// Goal: a list of more than a batch is whole, and a directory that can't be read is an error, not the end.
    #[tokio::test]
    async fn a_list_ends_at_its_end_or_with_an_error() {
        let root = tempfile::tempdir().unwrap();
        for number in 0..2 * BATCH_LEN + 1 {
            fs::write(root.path().join(number.to_string()), "").unwrap();
        }
        let folder = root.path().to_owned();
        let metas = list(folder, Path::default(), None).try_collect::<Vec<_>>().await.unwrap();
        assert_eq!(metas.len(), 2 * BATCH_LEN + 1);
        // A name that is too long.
        let long = root.path().join("n".repeat(300));
        let error = list(long.clone(), Path::from("long"), None).try_collect::<Vec<_>>().await;
        assert!(error.unwrap_err().to_string().contains("list of long: "));
        assert!(list_folder(long, Path::from("long")).await.is_err());
    }
}
