//! The errors of operations, with the bytes concerned and the errno of each.

use std::fmt;
use std::io;

/// The result of an operation of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// The operation that an [`Error`] belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Op {
    /// Building an engine.
    Build,
    /// Opening a file, or adopting a descriptor.
    Open,
    /// Reading bytes.
    Read,
    /// Borrowing cached bytes.
    View,
    /// Writing bytes.
    Write,
    /// Changing the file's length.
    Truncate,
    /// Punching a hole.
    Punch,
    /// Making a range zero.
    Zero,
    /// Reserving space.
    Allocate,
    /// Looking for data or a hole.
    Seek,
    /// Asking for the file's length or identity.
    Stat,
    /// Forcing written bytes to the device.
    Sync,
    /// Giving the cache a hint.
    Advise,
    /// Closing a handle.
    Close,
    /// Making a completion queue, or waiting for its completions.
    Wait,
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Op::Build => "build",
            Op::Open => "open",
            Op::Read => "read",
            Op::View => "view",
            Op::Write => "write",
            Op::Truncate => "truncate",
            Op::Punch => "punch",
            Op::Zero => "zero",
            Op::Allocate => "allocate",
            Op::Seek => "seek",
            Op::Stat => "stat",
            Op::Sync => "sync",
            Op::Advise => "advise",
            Op::Close => "close",
            Op::Wait => "wait",
        })
    }
}

/// The step at which [`crate::File::persist`] failed. The steps before it are done, and the steps after it are not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum PersistStep {
    /// Opening the directories, and checking that `from` is a name of the file (EINVAL). Nothing has been done.
    Lookup,
    /// The sync of the file, which failed as [`crate::File::sync_all`] does. Nothing was renamed.
    Sync,
    /// The rename. All names are as they were. The file's bytes are durable, but its name `from` may
    /// not be.
    Rename,
    /// The sync of a directory. The file has the name `to` for all processes. After a power cut, `to` may be as it
    /// was before, or this file with all its bytes, and this file may have its old name as well. `persist(to, to)`
    /// tries this step again. But a file system that failed the step may have dropped the data that it could not
    /// store, and then reports success.
    SyncDirectory,
}

impl fmt::Display for PersistStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            PersistStep::Lookup => "looking for the file; nothing is changed",
            PersistStep::Sync => "sync of the file; it is not renamed",
            PersistStep::Rename => "rename; the file is durable, and has its old name",
            PersistStep::SyncDirectory => {
                "sync of the directory; the file is durable and renamed, its new name may be lost"
            }
        })
    }
}

/// The reason why an operation failed. [`Error::errno`] gives its POSIX errno.
///
/// # Examples
///
/// ```
/// use millpond::{Engine, Error, Op, OpenOptions};
///
/// # let engine = Engine::builder().cache_bytes(1 << 20).build()?;
/// # let dir = tempfile::tempdir().unwrap();
/// let error = engine.open(dir.path(), &OpenOptions::new().read(true)).unwrap_err();
/// assert!(matches!(error, Error::NotRegular { directory: true }));
/// assert_eq!(error.errno(), libc::EISDIR);
/// match engine.open("/no/such/file", &OpenOptions::new().read(true)) {
///     Err(Error::Io { op: Op::Open, source, .. }) => println!("not there: {source}"),
///     other => drop(other?),
/// }
/// # Ok::<(), millpond::Error>(())
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// The back end failed `op` on `len` bytes at byte `offset`. The engine reports EAGAIN, EINTR and ECANCELED only
    /// after retries for about a third of a second.
    Io {
        /// The operation that failed.
        op: Op,
        /// First byte concerned.
        offset: u64,
        /// Number of bytes concerned; 0 where the operation has none.
        len: u64,
        /// The error of the back end.
        source: io::Error,
    },
    /// `offset + len` is past the largest file offset, `i64::MAX`.
    InvalidRange {
        /// The operation that was refused.
        op: Op,
        /// First byte asked for.
        offset: u64,
        /// Number of bytes asked for.
        len: u64,
    },
    /// An option or argument that can't be honoured; `what` names it and the limit.
    InvalidInput {
        /// The operation that was refused.
        op: Op,
        /// The argument, its value and the accepted values.
        what: String,
    },
    /// The file, its file system or its device can't do what an option asks for (EOPNOTSUPP).
    Unsupported {
        /// The operation that was refused.
        op: Op,
        /// The option, the reason, and the file system, mount options or device that would do it.
        what: String,
    },
    /// Direct I/O that is not aligned as the file system wants it: `what` must be a multiple of
    /// `limit_bytes` (EINVAL).
    Unaligned {
        /// The operation that was refused.
        op: Op,
        /// First byte asked for.
        offset: u64,
        /// Number of bytes asked for.
        len: u64,
        /// The misaligned item: the offset, or the length or the memory of a segment.
        what: &'static str,
        /// The required alignment, in bytes.
        limit_bytes: u32,
    },
    /// The handle was not opened for `op` (EBADF), which concerned `len` bytes at `offset`.
    NotPermitted {
        /// The operation that was refused.
        op: Op,
        /// First byte asked for.
        offset: u64,
        /// Number of bytes asked for.
        len: u64,
    },
    /// The file or engine is the parent's, and this process is a child of fork (EBADF): the cache is not inherited. A
    /// child opens files on engines that it builds itself.
    Forked {
        /// The operation that was refused.
        op: Op,
    },
    /// Only regular files can be cached. The errno is EISDIR for a directory.
    NotRegular {
        /// Whether it was a directory.
        directory: bool,
    },
    /// The caller's memory could not be read or written (EFAULT) during `op`.
    ///
    /// Only the raw-pointer operations return it, and only where a handler of memory faults
    /// consults [`crate::fault`].
    Fault {
        /// The operation that was cut short.
        op: Op,
        /// First byte asked for.
        offset: u64,
        /// Number of bytes asked for.
        len: u64,
    },
    /// A sync failed, and some of the bytes written since the last successful sync have left the cache since. They
    /// can't be written again, and may not be on the device; reads of them may return older bytes. Every sync returns
    /// this error, and so does [`crate::File::close`], until the last handle of the file is dropped.
    Lost {
        /// The error of the back end at the failed sync.
        source: io::Error,
    },
    /// [`crate::File::persist`] did not complete.
    Persist {
        /// The failed step, which implies the changes made so far, and which of them are durable.
        step: PersistStep,
        /// The error of the kernel or the back end.
        source: io::Error,
    },
    /// Not all requested bytes are cached (EAGAIN), and the call never waits.
    WouldBlock {
        /// The operation that would have had to wait.
        op: Op,
        /// First byte asked for.
        offset: u64,
        /// Number of bytes asked for.
        len: u64,
    },
    /// The memory limit leaves no frame for `op`: too much of the cache is pinned by views, or
    /// taken by open files.
    NoBuffers {
        /// The operation that found no memory.
        op: Op,
    },
}

impl Error {
    /// The errno of this error, as POSIX names it, positive.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Error::Io { source, .. } | Error::Lost { source } | Error::Persist { source, .. } => {
                match source.kind() {
                    io::ErrorKind::Unsupported => source.raw_os_error().unwrap_or(libc::EOPNOTSUPP),
                    io::ErrorKind::InvalidInput => source.raw_os_error().unwrap_or(libc::EINVAL),
                    io::ErrorKind::ResourceBusy => source.raw_os_error().unwrap_or(libc::EBUSY),
                    _ => source.raw_os_error().unwrap_or(libc::EIO),
                }
            }
            Error::InvalidRange { .. } | Error::InvalidInput { .. } | Error::Unaligned { .. } => {
                libc::EINVAL
            }
            Error::Unsupported { .. } => libc::EOPNOTSUPP,
            Error::NotPermitted { .. } | Error::Forked { .. } => libc::EBADF,
            Error::NotRegular { directory: true } => libc::EISDIR,
            Error::NotRegular { directory: false } => libc::ENOTSUP,
            Error::Fault { .. } => libc::EFAULT,
            Error::WouldBlock { .. } => libc::EAGAIN,
            Error::NoBuffers { .. } => libc::ENOBUFS,
        }
    }

    pub(crate) fn io(op: Op, offset: u64, len: u64, source: impl Into<io::Error>) -> Self {
        Error::Io { op, offset, len, source: source.into() }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Io { op, offset, len, source } => {
                write!(f, "{op} of {len} bytes at offset {offset}: {source}")
            }
            Error::InvalidRange { op, offset, len } => write!(
                f,
                "{op} of {len} bytes at offset {offset}: past the largest file offset, {}",
                i64::MAX
            ),
            Error::InvalidInput { op, what } | Error::Unsupported { op, what } => {
                write!(f, "{op}: {what}")
            }
            Error::Unaligned { op, offset, len, what, limit_bytes } => write!(
                f,
                "direct {op} of {len} bytes at offset {offset}: the {what} is not a multiple of \
                 {limit_bytes}"
            ),
            Error::NotPermitted { op, offset, len } => {
                write!(f, "{op} of {len} bytes at offset {offset}: the file is not open for this")
            }
            Error::Forked { op } => {
                write!(f, "{op}: the file or engine is that of the process that forked this one")
            }
            Error::NotRegular { directory: true } => f.write_str("open: is a directory"),
            Error::NotRegular { directory: false } => f.write_str("open: not a regular file"),
            Error::Fault { op, offset, len } => write!(
                f,
                "{op} of {len} bytes at offset {offset}: the caller's memory can't be accessed"
            ),
            Error::Lost { source } => write!(
                f,
                "sync: written bytes may be lost, as an earlier sync failed and they are no longer \
                 cached: {source}"
            ),
            Error::Persist { step, source } => write!(f, "persist: {step}: {source}"),
            Error::WouldBlock { op, offset, len } => {
                write!(f, "{op} of {len} bytes at offset {offset}: not all are cached")
            }
            Error::NoBuffers { op } => {
                write!(f, "{op}: the memory limit leaves no free page frame")
            }
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Io { source, .. } | Error::Lost { source } | Error::Persist { source, .. } => {
                Some(source)
            }
            _ => None,
        }
    }
}

impl From<Error> for io::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Io { source, .. } | Error::Lost { source } | Error::Persist { source, .. } => {
                source
            }
            other => io::Error::from_raw_os_error(other.errno()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_name_operation_offset_and_length() {
        let error = Error::io(Op::Read, 4096, 512, io::Error::from_raw_os_error(libc::EIO));
        let text = error.to_string();
        assert!(text.contains("read") && text.contains("4096") && text.contains("512"), "{text}");
        assert_eq!(error.errno(), libc::EIO);
        let error = Error::InvalidRange { op: Op::Write, offset: u64::MAX, len: 1 };
        assert!(error.to_string().starts_with("write of 1 bytes at offset 1844674407370955161"));
        assert_eq!(error.errno(), libc::EINVAL);
    }
}
