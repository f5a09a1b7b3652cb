//! The bytes of a multipart upload's parts: a file without a name, whose space is freed with the parts.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use bytes::{Bytes, BytesMut};
use rustix::fs::{FallocateFlags, Mode, OFlags, fallocate};
use s3s::{S3Error, S3Result, s3_error};

use crate::body::Pieces;

/// Space on disk for the parts of all uploads. Relaxed accesses: the counter orders no other memory.
#[derive(Debug)]
pub(crate) struct SpoolSpace {
    used: AtomicU64,
    limit: u64,
}

impl SpoolSpace {
    pub(crate) fn new(limit: u64) -> Arc<Self> {
        Arc::new(Self { used: AtomicU64::new(0), limit })
    }

    fn try_take(&self, bytes: u64) -> bool {
        let add = |used: u64| used.checked_add(bytes).filter(|&used| used <= self.limit);
        self.used.fetch_update(Relaxed, Relaxed, add).is_ok()
    }

    #[cfg(test)]
    pub(crate) fn used(&self) -> u64 {
        self.used.load(Relaxed)
    }
}

/// The file of an upload. Parts are appended in pieces, so parts that arrive together alternate.
#[derive(Debug)]
pub(crate) struct SpoolFile {
    file: File,
    end: AtomicU64,
    space: Arc<SpoolSpace>,
}

impl SpoolFile {
    pub(crate) fn create(dir: &Path, space: &Arc<SpoolSpace>) -> io::Result<Arc<Self>> {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let file = match rustix::fs::open(dir, flags, Mode::RUSR | Mode::WUSR) {
            Ok(file) => File::from(file),
            // Not every file system has files without a name.
            Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::ISDIR) => named_file(dir)?,
            Err(error) => return Err(error.into()),
        };
        Ok(Arc::new(Self { file, end: AtomicU64::new(0), space: Arc::clone(space) }))
    }
}

/// Creates a file and removes its name at once.
fn named_file(dir: &Path) -> io::Result<File> {
    let mut random = [0; 16];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
    let path = dir.join(format!(".millpond-upload-{:032x}", u128::from_ne_bytes(random)));
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
    let file = rustix::fs::open(&path, flags, Mode::RUSR | Mode::WUSR)?;
    std::fs::remove_file(&path)?;
    Ok(File::from(file))
}

/// Ranges of the file with the bytes of one part, in order. Freed when it is dropped.
#[derive(Debug)]
pub(crate) struct SpooledBytes {
    file: Arc<SpoolFile>,
    extents: Vec<(u64, u64)>,
}

impl SpooledBytes {
    pub(crate) fn new(file: &Arc<SpoolFile>) -> Self {
        Self { file: Arc::clone(file), extents: Vec::new() }
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.extents.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Appends bytes to the part.
    pub(crate) async fn append(&mut self, bytes: Bytes) -> S3Result<()> {
        let length = bytes.len() as u64;
        if length == 0 {
            return Ok(());
        }
        if !self.file.space.try_take(length) {
            let limit = self.file.space.limit;
            return Err(s3_error!(
                ServiceUnavailable,
                "multipart uploads take all {limit} bytes of their limit"
            ));
        }
        let offset = self.file.end.fetch_add(length, Relaxed);
        // Registered first, so that the space is given back in any case.
        match self.extents.last_mut() {
            Some((start, bytes)) if *start + *bytes == offset => *bytes += length,
            _ => self.extents.push((offset, length)),
        }
        let file = Arc::clone(&self.file);
        blocking(move || file.file.write_all_at(&bytes, offset)).await
    }
}

impl Drop for SpooledBytes {
    fn drop(&mut self) {
        for &(offset, bytes) in &self.extents {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            // Without holes in this file system the space is free when the upload ends.
            let _ = fallocate(&self.file.file, flags, offset, bytes);
            self.file.space.used.fetch_sub(bytes, Relaxed);
        }
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> S3Result<T> {
    let done = tokio::task::spawn_blocking(work).await.map_err(S3Error::internal_error)?;
    done.map_err(|error| {
        s3_error!(InternalError, "a part of the upload can't be stored or read: {error}")
    })
}

/// Reads parts in order.
#[derive(Debug)]
pub(crate) struct SpooledParts {
    /// The rest of the ranges, in reverse order.
    extents: Vec<(Arc<SpooledBytes>, u64, u64)>,
}

impl SpooledParts {
    pub(crate) fn new(parts: &[Arc<SpooledBytes>]) -> Self {
        let ranges = parts.iter().flat_map(|part| {
            part.extents.iter().map(|&(offset, bytes)| (Arc::clone(part), offset, bytes))
        });
        let mut extents: Vec<_> = ranges.collect();
        extents.reverse();
        Self { extents }
    }
}

impl Pieces for SpooledParts {
    async fn piece(&mut self, bytes: usize) -> S3Result<(Bytes, bool)> {
        let mut wanted = bytes as u64;
        let mut ranges = Vec::new();
        while wanted > 0
            && let Some((part, offset, length)) = self.extents.pop()
        {
            let taken = wanted.min(length);
            if taken < length {
                self.extents.push((Arc::clone(&part), offset + taken, length - taken));
            }
            ranges.push((part, offset, taken));
            wanted -= taken;
        }
        let piece = blocking(move || {
            let total: u64 = ranges.iter().map(|(_, _, length)| length).sum();
            let mut piece = BytesMut::zeroed(total as usize);
            let mut at = 0;
            for (part, offset, length) in ranges {
                let end = at + length as usize;
                part.file.file.read_exact_at(&mut piece[at..end], offset)?;
                at = end;
            }
            Ok(piece.freeze())
        });
        Ok((piece.await?, self.extents.is_empty()))
    }

    fn verify(&mut self) -> S3Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn parts_that_arrive_together_are_read_in_order() {
        let space = SpoolSpace::new(100);
        let file = SpoolFile::create(&std::env::temp_dir(), &space).unwrap();
        let (mut first, mut second) = (SpooledBytes::new(&file), SpooledBytes::new(&file));
        for (part, text) in [(1, "ab"), (2, "xy"), (2, "z"), (1, "c"), (1, "de"), (2, "")] {
            let part = if part == 1 { &mut first } else { &mut second };
            part.append(Bytes::from_static(text.as_bytes())).await.unwrap();
        }
        assert_eq!((first.bytes(), second.bytes(), space.used()), (5, 3, 8));
        let refused = second.append(vec![0; 93].into()).await.unwrap_err();
        assert!(refused.message().unwrap().contains("100 bytes"), "{refused}");
        let parts = [Arc::new(first), Arc::new(second)];
        for size in [1, 3, 7, 8, 9] {
            let mut reader = SpooledParts::new(&parts);
            let mut found = Vec::new();
            loop {
                let (piece, ended) = reader.piece(size).await.unwrap();
                assert!(piece.len() == size || ended);
                found.extend_from_slice(&piece);
                if ended {
                    break;
                }
            }
            assert_eq!(found, b"abcdexyz", "{size}");
        }
        drop(parts);
        assert_eq!(space.used(), 0);
    }

    #[test]
    fn a_named_file_leaves_no_name() {
        let dir = tempfile::tempdir().unwrap();
        named_file(dir.path()).unwrap().write_all_at(b"a", 0).unwrap();
        assert_eq!(dir.path().read_dir().unwrap().count(), 0);
    }
}
