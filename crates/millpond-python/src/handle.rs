//! The open handle of a `millpond.File`, and how a child of fork opens the file again.

use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use millpond::{Advice, Backing, OpenOptions};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::engine::Engine;
use crate::error;
use crate::process;

/// The permissions of a mode as `"r+b"`, and the effect of its first open.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Access {
    pub(crate) readable: bool,
    pub(crate) writable: bool,
    pub(crate) appends: bool,
    creation: Creation,
    /// The bytes of a block that a power cut does not tear.
    pub(crate) untorn: Option<u32>,
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Creation {
    Existing,
    Create,
    CreateNew,
    Truncate,
}

impl Access {
    pub(crate) fn parse(mode: &str) -> PyResult<Access> {
        let invalid =
            |why: &str| Err(PyValueError::new_err(format!("invalid mode: {mode:?}{why}")));
        let (mut kind, mut plus, mut binary) = (None, false, false);
        for letter in mode.chars() {
            match letter {
                'r' | 'w' | 'a' | 'x' if kind.is_none() => kind = Some(letter),
                '+' if !plus => plus = true,
                'b' if !binary => binary = true,
                't' => return invalid(": files are binary; wrap one in io.TextIOWrapper for text"),
                _ => return invalid(""),
            }
        }
        let (readable, creation) = match kind {
            Some('r') => (true, Creation::Existing),
            Some('w') => (plus, Creation::Truncate),
            Some('a') => (plus, Creation::Create),
            Some('x') => (plus, Creation::CreateNew),
            _ => return invalid(": one of r, w, a and x is needed"),
        };
        let writable = plus || kind != Some('r');
        Ok(Access { readable, writable, appends: kind == Some('a'), creation, untorn: None })
    }

    /// The same with untorn blocks of that many bytes, if any.
    pub(crate) fn with_untorn(self, untorn: Option<u32>) -> Access {
        Access { untorn, ..self }
    }

    /// The same permissions for a file that is there already, which is not changed by opening it.
    pub(crate) fn of_existing(self) -> Access {
        Access { creation: Creation::Existing, ..self }
    }

    /// The mode as `io.FileIO.mode` gives it.
    pub(crate) fn name(self) -> &'static str {
        match (self.creation, self.appends, self.readable, self.writable) {
            (Creation::CreateNew, _, true, _) => "xb+",
            (Creation::CreateNew, _, false, _) => "xb",
            (_, true, true, _) => "ab+",
            (_, true, false, _) => "ab",
            (_, _, true, true) => "rb+",
            (_, _, true, false) => "rb",
            (_, _, false, _) => "wb",
        }
    }

    fn options(self) -> OpenOptions {
        let options = OpenOptions::new().read(self.readable).append(self.appends);
        let mut options = options.write(self.writable && !self.appends);
        if let Some(bytes) = self.untorn {
            options = options.backing(Backing::Direct).untorn(bytes);
        }
        match self.creation {
            Creation::Existing => options,
            Creation::Create => options.create(true),
            Creation::CreateNew => options.create_new(true),
            Creation::Truncate => options.create(true).truncate(true),
        }
    }
}

/// Device and inode of a file.
pub(crate) type Identity = (u64, u64);

/// An open file of this process.
pub(crate) struct Handle {
    pub(crate) file: Arc<millpond::File>,
    pub(crate) identity: Identity,
    generation: u64,
    /// A descriptor of the file, which a child of fork inherits.
    fd: RawFd,
}

impl Handle {
    /// May wait, and may run detached from the interpreter. Errors name the file `shown`.
    pub(crate) fn open(
        engine: &millpond::Engine,
        path: &Path,
        shown: &Path,
        access: Access,
        atomic: bool,
    ) -> PyResult<Handle> {
        let opened = engine.open(path, &access.options());
        let file = opened.map_err(|error| error::of_engine(&error, Some(shown)))?;
        if !atomic {
            let advised = file.advise(0, 0, Advice::TornReads);
            advised.map_err(|error| error::of_engine(&error, Some(shown)))?;
        }
        let stat = rustix::fs::fstat(&file)
            .map_err(|errno| error::os_error(errno.raw_os_error(), errno, Some(shown)))?;
        Ok(Handle {
            identity: (stat.st_dev, stat.st_ino),
            generation: process::generation(),
            fd: file.as_fd().as_raw_fd(),
            file: Arc::new(file),
        })
    }

    pub(crate) fn is_of_this_process(&self) -> bool {
        self.generation == process::generation()
    }

    /// The same file, opened in an engine of this process: by its path, or by the inherited descriptor if the file was
    /// renamed or removed. Any other file that has the path or the descriptor by now is refused with ESTALE.
    pub(crate) fn reopen(
        &self,
        engine: &Engine,
        path: &Path,
        access: Access,
        atomic: bool,
    ) -> PyResult<Handle> {
        let engine = engine.get()?;
        let (shown, by_descriptor) = (path, PathBuf::from(format!("/proc/self/fd/{}", self.fd)));
        for path in [path, &by_descriptor] {
            // Looked at first, as opening another file, such as a device, could have an effect.
            let found = rustix::fs::stat(path).map(|stat| (stat.st_dev, stat.st_ino));
            if found != Ok(self.identity) {
                continue;
            }
            let handle = Handle::open(&engine, path, shown, access.of_existing(), atomic)?;
            if handle.identity == self.identity {
                return Ok(handle);
            }
        }
        let text = "the file that was open before the fork can't be found any more";
        Err(error::os_error(libc::ESTALE, text, Some(shown)))
    }
}
