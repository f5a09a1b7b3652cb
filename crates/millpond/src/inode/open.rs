//! How a file is opened: found, or made and entered.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use crate::error::{Error, Op, Result};
use crate::fault;
use crate::file_id::FileId;
use crate::inode::registry::Found;
use crate::inode::{CachedFile, Shared, length, registry, untorn};
use crate::io::backend::{BackingFile, OpenedFor};
use crate::options::{Backing, OpenOptions, PAGE_BYTES_MIN};
use crate::recovery::mark;
use crate::sync::MutexExt;
use crate::units::kernel_page_bytes;

/// A descriptor to open a file by.
pub(crate) enum GivenDescriptor<'a> {
    /// Opened by the engine: no other descriptor shares the file description.
    Opened(OwnedFd),
    Owned(OwnedFd),
    /// Duplicated when no later step can fail: closing a duplicate drops the process's POSIX locks on the file
    /// (`fcntl(2)`).
    Borrowed(BorrowedFd<'a>),
}

impl AsFd for GivenDescriptor<'_> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            GivenDescriptor::Opened(fd) | GivenDescriptor::Owned(fd) => fd.as_fd(),
            GivenDescriptor::Borrowed(fd) => *fd,
        }
    }
}

impl GivenDescriptor<'_> {
    fn into_owned(self) -> io::Result<OwnedFd> {
        match self {
            GivenDescriptor::Opened(fd) | GivenDescriptor::Owned(fd) => Ok(fd),
            GivenDescriptor::Borrowed(fd) => fd.try_clone_to_owned(),
        }
    }
}

impl CachedFile {
    /// Finds or makes the cached file of `fd`. Also returns the descriptor where the file does not need it. The
    /// handle keeps it then, as closing it could drop the process's POSIX locks.
    pub(crate) fn open(
        shared: &Arc<Shared>,
        fd: GivenDescriptor<'_>,
        options: &OpenOptions,
    ) -> Result<(Arc<CachedFile>, Option<OwnedFd>)> {
        if shared.cache.frames.are_the_parents() {
            return Err(Error::Forked { op: Op::Open });
        }
        if options.backing == Backing::Mapped {
            fault::install_handler().map_err(|error| Error::io(Op::Open, 0, 0, error))?;
        }
        let failed = |source: io::Error| Error::io(Op::Open, 0, 0, source);
        let stat = rustix::fs::fstat(&fd).map_err(|error| failed(error.into()))?;
        match rustix::fs::FileType::from_raw_mode(stat.st_mode) {
            rustix::fs::FileType::RegularFile => {}
            kind => {
                let directory = kind == rustix::fs::FileType::Directory;
                return Err(Error::NotRegular { directory });
            }
        }
        let id = FileId::of(&stat);
        let file = match registry().find(id) {
            Found::Open(known) => {
                let page_bytes = known.core().page_bytes() as u32;
                if options.page_bytes.is_some_and(|bytes| bytes != page_bytes) {
                    let what =
                        format!("the file is open already, with pages of {page_bytes} bytes");
                    return Err(Error::InvalidInput { op: Op::Open, what });
                }
                untorn::check_known(&known, options)?;
                known
            }
            // From here until the file is entered, no other thread opens it.
            Found::Place(place) => {
                if shared.backend.has_files() {
                    length::check(fd.as_fd(), &stat, options.read).map_err(failed)?;
                }
                untorn::check(shared, fd.as_fd(), options)?;
                // The first opener has waited.
                if shared.backend.has_files() && !options.awaited {
                    let waited = shared.marks.await_written(&stat, mark::PATIENCE);
                    waited.map_err(failed)?;
                }
                let backing = shared.backend.open(fd.as_fd(), id, options.backing, options.untorn);
                let backing = backing.map_err(failed)?;
                let page_bytes = page_bytes_of(options, kernel_page_bytes())?;
                // Read only now: the last handle of the file may have changed it since `stat`.
                let size = match backing.len() {
                    Ok(size) => size,
                    Err(_) => {
                        rustix::fs::fstat(&fd).map_err(|error| failed(error.into()))?.st_size as u64
                    }
                };
                let file = Self::new(shared, backing, id, size, page_bytes, options)?;
                file.writeback.inherit(id, fd.as_fd());
                place.enter(&file);
                file
            }
        };
        let attaching = file.attaching.acquire();
        let opened = OpenedFor {
            read: options.read,
            write: options.writable(),
            direct: options.direct,
            is_own: matches!(fd, GivenDescriptor::Opened(_)),
        };
        file.backing.prepare(fd.as_fd(), opened).map_err(failed)?;
        let fd = fd.into_owned().map_err(failed)?;
        let kept = file.backing.attach(fd, opened).map_err(failed)?;
        if let (Some(bytes), true) = (file.untorn, options.writable()) {
            if let Some(fd) = file.backing.descriptor(true) {
                untorn::hint_extents(fd, bytes);
            }
            // untorn.UT6. It also determines the durable end (untorn_blocks.UB2).
            file.backing.sync(false).map_err(failed)?;
        }
        drop(attaching);
        if options.writable() {
            file.space.forget_blocks_over_limit();
        }
        Ok((file, kept))
    }

    /// A file that is not in the registry, on any back end.
    pub(crate) fn on(
        shared: &Arc<Shared>,
        backing: Arc<dyn BackingFile>,
        options: &OpenOptions,
    ) -> Result<Arc<CachedFile>> {
        use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
        static INODE: AtomicUsize = AtomicUsize::new(0);
        // Relaxed: only the number's uniqueness counts.
        let inode = INODE.fetch_add(1, Relaxed) as u64;
        let id = FileId { device: u64::MAX, inode };
        let size = backing.len().map_err(|error| Error::io(Op::Open, 0, 0, error))?;
        let page_bytes = options.page_bytes.unwrap_or(PAGE_BYTES_MIN);
        Self::new(shared, backing, id, size, page_bytes, options)
    }
}

/// The page size of a file that `options` open. With direct backing a page is at least one of the kernel's: the last
/// bytes of a file go through the kernel's cache, and a page there that a direct write also covers would
/// hold old bytes of it.
fn page_bytes_of(options: &OpenOptions, kernel_page_bytes: u64) -> Result<u32> {
    let least = match options.backing {
        Backing::Direct | Backing::DirectInPlace => PAGE_BYTES_MIN.max(kernel_page_bytes as u32),
        _ => PAGE_BYTES_MIN,
    };
    let least = least.max(options.untorn.unwrap_or(0));
    match options.page_bytes {
        Some(bytes) if bytes < least => {
            let what = format!(
                "pages of {bytes} bytes with direct backing: the kernel's pages have {least} bytes"
            );
            Err(Error::InvalidInput { op: Op::Open, what })
        }
        chosen => Ok(chosen.unwrap_or(least)),
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Goal: where the kernel's pages are larger than 4 KiB, no page of the kernel holds bytes of two pages of a file
    /// with direct backing.
    #[test]
    fn direct_backing_has_pages_of_the_kernels_size_at_least() {
        let direct = OpenOptions::new().read(true).backing(Backing::Direct);
        let buffered = OpenOptions::new().read(true);
        assert_eq!(page_bytes_of(&direct, 16384).unwrap(), 16384);
        assert_eq!(page_bytes_of(&direct, 4096).unwrap(), 4096);
        assert_eq!(page_bytes_of(&buffered, 65536).unwrap(), 4096);
        assert_eq!(page_bytes_of(&direct.clone().page_bytes(65536), 16384).unwrap(), 65536);
        assert_eq!(page_bytes_of(&buffered.page_bytes(8192), 65536).unwrap(), 8192);
        let refused = page_bytes_of(&direct.page_bytes(4096), 16384);
        assert!(matches!(refused, Err(Error::InvalidInput { .. })), "{refused:?}");
    }
}
