//! Having a file served: the engine, a duplicate of the program's descriptor for it, and the lease
//! that protects both.

use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use millpond::{BackendChoice, Backing, Engine, EngineBuilder, File, OpenOptions, WriteMode};

use crate::files::identity::{self, FileId};
use crate::files::lease::{self, Broken};
use crate::files::open_file::Access;
use crate::files::pin::Closed;
use crate::files::table::{self, NumberState};
use crate::files::{mode_back, pending_close, pressure, process_locks};
use crate::report::reason::Reason;
use crate::report::{accounts, counts, lines};
use crate::runtime::sys::sys;
use crate::runtime::thread::record;
use crate::runtime::{config, fault, handlers};

/// A file that the program has just opened.
pub struct Opened {
    pub fd: RawFd,
    pub id: FileId,
    pub access: Access,
    /// It has no other description here.
    pub is_first: bool,
}

/// The process's engine, which is made for the first file.
pub struct Serving {
    engine: Option<Engine>,
}

impl Serving {
    pub const fn new() -> Self {
        Self { engine: None }
    }

    pub fn made(&self) -> Option<&Engine> {
        self.engine.as_ref()
    }

    /// Gives the engine up.
    pub fn end(&mut self) {
        self.engine = None;
    }

    /// Says, once, if there was a keeper and it died.
    pub fn tell_lost_keeper(&self) {
        static IS_TOLD: AtomicBool = AtomicBool::new(false);
        let is_lost = self.engine.as_ref().is_some_and(Engine::has_lost_keeper);
        if is_lost && !IS_TOLD.swap(true, Relaxed) {
            lines::warn_lost_keeper();
        }
    }

    /// Has the engine open the file: its duplicate, which carries the lease, and the file. The
    /// registry is locked.
    pub fn serve(
        &mut self,
        opened: &Opened,
        broken: Broken,
        closed: &mut Closed,
    ) -> Result<(RawFd, File), Reason> {
        let Opened { fd, id, access, is_first } = *opened;
        let engine = self.engine()?;
        // Asked again: it may be the first file, and no keeper there.
        if access.write && !mode_back::is_kept() {
            return Err(Reason::Engine);
        }
        fault::install();
        handlers::find_foreign_handlers();
        let first = config::get().internal_fd_min;
        // SAFETY: duplicating a descriptor touches no memory.
        let copy = unsafe { sys!(libc::SYS_fcntl, fd, libc::F_DUPFD_CLOEXEC, first) } as RawFd;
        if copy < 0 {
            return Err(Reason::Descriptors);
        }
        process_locks::adopt(copy).ok_or(Reason::Descriptors)?;
        // SAFETY: the duplicate was made above.
        let owned = unsafe { OwnedFd::from_raw_fd(copy) };
        // `registry.R4`: the lease first.
        take_lease(copy, opened, broken, closed)?;
        // Plain direct backing opens the file again, which a write lease of our own would keep
        // waiting.
        let backing = match config::get().backing {
            Backing::Direct if access.write => Backing::DirectInPlace,
            Backing::Direct if !identity::knows_direct(fd) => Backing::Buffered,
            backing => backing,
        };
        let options = OpenOptions::new()
            .read(access.read)
            .write(access.write)
            .append(access.append)
            // By who opened the file, outside of the registry's lock.
            .awaited(true)
            .write_mode(if access.write { WriteMode::Back } else { WriteMode::Through })
            .backing(backing);
        // The number that the engine's own description will get, if it opens one.
        let next =
            (backing == Backing::Direct).then(|| (copy + 1..).find(|fd| !is_open(*fd))).flatten();
        match engine.from_fd(owned, &options) {
            Ok(file) => {
                if let Some(next) = next
                    && identity::identify(next).is_some_and(|opened| opened.id == id)
                {
                    table::set(next, NumberState::Internal);
                }
                if is_first && file.invalidate(0, i64::MAX as u64).is_err() {
                    lease::release_lease(copy);
                    return Err(Reason::Engine);
                }
                if config::get().backing == Backing::Direct && !file.is_direct() {
                    counts::count_file_undirected();
                }
                Ok((copy, file))
            }
            Err(_) => {
                // The engine has closed the duplicate, but the lease is on the description, which
                // the program's own descriptor keeps.
                lease::release_lease(fd);
                Err(Reason::Engine)
            }
        }
    }

    fn engine(&mut self) -> Result<Engine, Reason> {
        if let Some(engine) = &self.engine {
            return Ok(engine.clone());
        }
        // Plain positional reads by the caller: no ring descriptors among the program's numbers,
        // and with the kernel's cache below they are as quick.
        let mut builder =
            Engine::builder().backend(BackendChoice::Threads).hit_path(config::get().hit_path);
        if let Some(bytes) = config::get().cache_bytes {
            builder = builder.cache_bytes(bytes);
        }
        if accounts::is_kept() {
            builder = builder.published_from(config::get().internal_fd_min);
        }
        let engine = build(builder).map_err(|_| Reason::Engine)?;
        pressure::begin(&engine, engine.cache_bytes());
        self.engine = Some(engine.clone());
        Ok(engine)
    }
}

/// Takes the lease; waits a moment where it is our own last description of the file that
/// stands in the way: a read on another thread, or read-ahead, may not be done with it yet.
fn take_lease(
    fd: RawFd,
    opened: &Opened,
    broken: Broken,
    closed: &mut Closed,
) -> Result<(), Reason> {
    const TRIES_MAX: usize = 500;
    const PAUSE: Duration = Duration::from_micros(200);
    for _ in 0..TRIES_MAX {
        let taken = lease::take(fd, opened.access, broken);
        if taken != Err(Reason::OpenElsewhere) {
            return taken;
        }
        // `has` first, because it ends closed descriptions.
        let is_ours = closed.has(opened.id)
            || pending_close::is_lingering(opened.id)
            || pending_close::is_leaving(opened.id);
        // In a handler that interrupted a hit, what we would wait for is ourselves.
        if !is_ours || record().is_reading() {
            break;
        }
        std::thread::sleep(PAUSE);
    }
    lease::take(fd, opened.access, broken)
}

fn is_open(fd: RawFd) -> bool {
    // SAFETY: no memory involved.
    unsafe { sys!(libc::SYS_fcntl, fd, libc::F_GETFD) >= 0 }
}

/// An engine with the keeper, if there should be one; without, no file is served that may be written.
fn build(builder: EngineBuilder) -> millpond::Result<Engine> {
    let config = config::get();
    if let (WriteMode::Back, Some(keeper)) = (config.mode, &config.keeper) {
        if let Ok(address) = keeper.parse()
            && let Ok(engine) = builder.clone().keeper(address).build()
        {
            return Ok(engine);
        }
        mode_back::note_keeper_refusal();
    }
    builder.build()
}
