//! An error of write-back.

use std::io;

use crate::error::{Error, Op};

/// An error that outlives the call that met it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WritebackFailure {
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) errno: i32,
}

impl WritebackFailure {
    pub(crate) const UNKNOWN: WritebackFailure =
        WritebackFailure { offset: 0, len: 0, errno: libc::EIO };

    pub(crate) fn new(offset: u64, len: u64, error: &io::Error) -> WritebackFailure {
        WritebackFailure { offset, len, errno: error.raw_os_error().unwrap_or(libc::EIO) }
    }

    pub(crate) fn source(&self) -> io::Error {
        io::Error::from_raw_os_error(self.errno)
    }

    /// Whether the backend refused a durable transfer with this error and lost nothing: a refused
    /// write is not followed by a sync. Some errors come from refused writes and from syncs, for
    /// example when missing space is noticed only at write-back. For these errors `repeat` writes
    /// the bytes again: bytes that were accepted before are accepted again.
    pub(crate) fn is_refusal(&self, repeat: impl FnOnce() -> bool) -> bool {
        use libc::{EBADF, EDQUOT, EFAULT, EFBIG, EINVAL, ENOSPC, EOPNOTSUPP, EPERM, ETXTBSY};
        match self.errno {
            EBADF | EFAULT | EFBIG | EINVAL | EOPNOTSUPP | EPERM | ETXTBSY => true,
            ENOSPC | EDQUOT => !repeat(),
            _ => false,
        }
    }

    pub(crate) fn error(&self, op: Op) -> Error {
        Error::io(op, self.offset, self.len, self.source())
    }
}
