//! Times for the age of versions: an object may be replaced while the system is suspended.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// A time since the boot, which goes on while the system is suspended (`CLOCK_BOOTTIME`), unlike [`std::time::Instant`].
///
/// # Examples
///
/// ```
/// # #[cfg(feature = "shared")] {
/// use millpond_objects::serving::BootTime;
///
/// let began = BootTime::now();
/// assert!(began.elapsed() <= began.elapsed());
/// # }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct BootTime(Duration);

impl BootTime {
    /// Now.
    #[must_use]
    pub fn now() -> BootTime {
        let now = clock_gettime(ClockId::Boottime);
        // Neither is negative: the clock begins with the boot.
        BootTime(Duration::new(now.tv_sec.cast_unsigned(), now.tv_nsec as u32))
    }

    /// The time since then.
    #[must_use]
    pub fn elapsed(self) -> Duration {
        BootTime::now().0.saturating_sub(self.0)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    /// Exit statuses of the child.
    const RIGHT: i32 = 0;
    const WRONG: i32 = 1;
    const SKIPPED: i32 = 2;

    /// The exit status of a child.
    fn status_of_child(body: impl FnOnce() -> i32) -> i32 {
        // SAFETY: the bodies make system calls, and take memory at most, which glibc allows.
        unsafe {
            let child = libc::fork();
            if child == 0 {
                libc::_exit(body());
            }
            let mut status = 0;
            assert_eq!(libc::waitpid(child, &mut status, 0), child);
            if libc::WIFEXITED(status) { libc::WEXITSTATUS(status) } else { WRONG }
        }
    }

    /// Incident: a version was served beyond its age after the system had been suspended, as `Instant` stands still then.
    /// Method: in a time namespace whose clock of the boot is 100 s ahead, and no other.
    #[test]
    fn a_suspended_system_makes_versions_older() {
        let (began, instant) = (BootTime::now(), Instant::now());
        let status = status_of_child(|| {
            // SAFETY: of this child's children alone.
            let is_unshared = unsafe { libc::unshare(libc::CLONE_NEWTIME) } == 0;
            let offsets = "/proc/self/timens_offsets";
            if !is_unshared || std::fs::write(offsets, "boottime 100 0\n").is_err() {
                return SKIPPED;
            }
            status_of_child(|| {
                let (by_boot, by_instant) = (began.elapsed(), instant.elapsed());
                let is_right = by_boot >= by_instant + Duration::from_secs(99);
                if is_right { RIGHT } else { WRONG }
            })
        });
        match status {
            SKIPPED => println!("skipped: no time namespace"),
            status => assert_eq!(status, RIGHT),
        }
    }
}
