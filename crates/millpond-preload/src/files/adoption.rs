//! Adoption: a file that has shown use is taken over from the kernel, and what follows is served.
//!
//! After the call that was the last of those that are wanted (`watch`), by its thread, in a section:
//!
//! ```text
//! what is it: regular, in a served directory, its flags      nobody is kept waiting yet
//! registry: claim its one number; no call in flight on it    in_flight.I1, I2, I5
//!           its flags are what they were
//!           the lease, the engine's handle                   registry.R4; or `several`
//!           the kernel's offset; slot -> the description
//! ```
//!
//! - **N1** It is a try. Where it fails for a reason that may pass, it is done again after more use:
//!   [`POSTPONED`] times as much. Where it fails for one that does not, the number is left to the
//!   kernel for good.
//! - **N2** What was noted while the kernel had it goes along: locks end with the program's last
//!   number; of a file that is mapped no write waits.
//! - **N3** A file that was served before is adopted anew only when its description of then has
//!   ended: a request that was under way there may still write.
//! - **N4** What a keeper still has to write for a dead process it has open for writing: no lease is had
//!   before it is done.
//! - **N5** A file that others open is given back (`Registry::pass_file`), and so is one that is
//!   missed and not hit, or written in mode through: [`note_slow`]. Then it is watched again, and
//!   needs eight times the use.
//!
//! Streams of libc's are not watched: they read and write inside libc. They have a buffer, so what
//! is read again in small pieces is read there; only who seeks in a file at random by a stream could
//! gain, and `--eager` serves him.

use std::os::fd::RawFd;

use crate::files::claim::Claim;
use crate::files::description::Description;
use crate::files::identity::status_flags;
use crate::files::registry;
use crate::files::table::{self, Known};
use crate::files::watch::POSTPONED;
use crate::files::{identity, watch};
use crate::report::reason::Reason;
use crate::runtime::sys::{errno, set_errno};
use crate::runtime::thread::record;
use crate::runtime::{config, handlers, section};

/// Tries to adopt the file behind `fd`, which has shown use. Between two calls.
#[cold]
pub fn try_adopt(fd: RawFd) {
    if record().is_inside() {
        return;
    }
    let errno = errno();
    section::run(|record| {
        handlers::look_for_others();
        let Some(watch) = watch::of(fd) else { return };
        if record.is_calling(&[fd]) {
            // In a handler that has interrupted such a call.
            watch.postpone(1, None);
            return;
        }
        match try_inside(fd) {
            Ok(()) => {}
            Err(Refused::Later(reason)) => watch.postpone(POSTPONED, reason),
            Err(Refused::Left(reason)) => registry::lock().leave(fd, reason),
            Err(Refused::Foreign) => {
                // Not a file of ours, as long as the number is open.
                table::try_change(fd, Known::Watched, Known::Foreign);
            }
        }
    });
    set_errno(errno);
}

/// Why a file was not adopted.
enum Refused {
    Foreign,
    Left(Reason),
    Later(Option<Reason>),
}

fn try_inside(fd: RawFd) -> Result<(), Refused> {
    let identity = identity::identify(fd).ok_or(Refused::Later(None))?;
    if !identity.is_regular || !identity::is_in_served_directory(fd) {
        return Err(Refused::Foreign);
    }
    let flags = status_flags(fd);
    if flags < 0 {
        return Err(Refused::Later(None));
    }
    if !identity::is_local(fd) {
        return Err(Refused::Left(Reason::FileSystem));
    }
    let claim = Claim { fd, id: identity.id, flags };
    registry::lock().adopt_watched(&claim).map_err(|reason| match reason {
        None => Refused::Later(None),
        Some(reason) if is_passing(reason) => Refused::Later(Some(reason)),
        Some(reason) => Refused::Left(reason),
    })
}

/// Whether what stands in the way may go.
fn is_passing(reason: Reason) -> bool {
    matches!(
        reason,
        Reason::OpenElsewhere
            | Reason::Forked
            | Reason::OpenTwice
            | Reason::Locked
            | Reason::Mapped
            | Reason::Descriptors
    )
}

/// Before the first asynchronous request on the file behind `fd`, of which the kernel would not say
/// when it has ended: adopts it, or leaves it to the kernel for good. In a section.
pub fn decide(fd: RawFd) {
    if matches!(table::get(fd), Known::Claimed) {
        drop(registry::lock());
    }
    let is_new = watch::of(fd).is_some_and(|watch| watch.reason() == Reason::Once);
    match if is_new { try_inside(fd) } else { Err(Refused::Later(None)) } {
        Ok(()) => {}
        Err(Refused::Left(reason) | Refused::Later(Some(reason))) => {
            registry::lock().leave(fd, reason);
        }
        Err(Refused::Foreign | Refused::Later(None)) => {
            registry::lock().leave(fd, Reason::Changed);
        }
    }
}

/// After a call on a served description that was not a hit; `has_hit`: its thread had one since the last
/// such call. In a section, without its offset. N5.
pub fn note_slow(description: &Description, has_hit: bool) {
    if !config::is_eager() && (description.note_slow(has_hit) || is_unlucky()) {
        // The call's own section has signals open.
        section::run(|_| registry::lock().give_back(description));
    }
}

/// For tests.
fn is_unlucky() -> bool {
    config::is_random() && watch::random().is_multiple_of(64)
}
