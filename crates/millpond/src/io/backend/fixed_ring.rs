//! A ring with registered files and buffers, for the direct requests of one thread.
//!
//! For registered objects the kernel takes the reference of a file, and looks up the pages of a
//! buffer, once instead of for each request. Files are registered while their requests are in
//! progress, buffer regions for the lifetime of the ring. Objects that cannot be registered, for
//! want of room or of locked memory (`RLIMIT_MEMLOCK`), are used unregistered.
//!
//! - **X1** The memory, segments and descriptor of a request stay until the request was reaped
//!   (ring.R1); the caller guarantees that.
//! - **X3** A registered descriptor is used only for the back end's file that it was registered for: the
//!   descriptor's number may be another file's after a close. Files that were closed are unregistered when
//!   another one is registered.
//! - **X2** A registered region stays mapped: the ring has a reference to it. Regions without other
//!   references are released when another one is registered, as they count against the limit.

use std::collections::VecDeque;
use std::io;
use std::os::fd::RawFd;
use std::sync::{Arc, Weak};

use io_uring::{squeue, types};

use crate::buffers::{Region, RegionId};
use crate::io::backend::BackingFile;
use crate::io::backend::entry::entry;
use crate::io::backend::local_ring::LocalRing;
use crate::io::transfer::Transfer;

/// The maximum number of files and of buffer regions that a pipeline registers. Untuned.
const FILES_MAX: usize = 32;
const REGIONS_MAX: usize = 1024;
/// Requests that are submitted in one system call, so that the device has work while the next ones
/// are prepared: completions arrive many at a time. The measurement is in `docs/benchmarks.md`
/// (`no-copy`).
const SUBMITTED_TOGETHER: usize = 4;

/// The number of a request, and its outcome.
pub(crate) type RingCompletion = (u32, io::Result<usize>);

pub(crate) struct FixedRing {
    ring: LocalRing,
    /// By index.
    files: Vec<RegisteredFile>,
    can_register_files: bool,
    regions: Vec<Registered>,
    can_register_regions: bool,
    pub(crate) registered_bytes: u64,
    pub(crate) refused_bytes: u64,
    /// The index of the region looked up last.
    last: usize,
    /// Entries pushed since the last submission.
    unsubmitted: usize,
}

/// A file's descriptor, at its index; -1: none.
struct RegisteredFile {
    fd: RawFd,
    /// Keeps its address from being reused by another file (X3).
    backing: Weak<dyn BackingFile>,
}

impl RegisteredFile {
    fn is(&self, backing: &Arc<dyn BackingFile>) -> bool {
        std::ptr::addr_eq(self.backing.as_ptr(), Arc::as_ptr(backing))
    }
}

/// A region, at its index.
enum Registered {
    Free,
    Known {
        id: RegionId,
        region: Arc<Region>,
    },
    /// The kernel refused to register it. (The reference keeps its address from being reused by
    /// another region.)
    Refused {
        id: RegionId,
        region: Weak<Region>,
        bytes: u64,
    },
}

impl Registered {
    fn is(&self, wanted: RegionId) -> bool {
        match self {
            Registered::Free => false,
            Registered::Known { id, .. } | Registered::Refused { id, .. } => *id == wanted,
        }
    }
}

impl FixedRing {
    pub(crate) fn new(depth: u32) -> io::Result<FixedRing> {
        let ring = LocalRing::new(depth.next_power_of_two())?;
        let can_register_files = ring.submitter().register_files_sparse(FILES_MAX as u32).is_ok();
        let can_register_regions =
            ring.submitter().register_buffers_sparse(REGIONS_MAX as u32).is_ok();
        Ok(FixedRing {
            ring,
            files: Vec::with_capacity(FILES_MAX),
            can_register_files,
            regions: Vec::new(),
            can_register_regions,
            registered_bytes: 0,
            refused_bytes: 0,
            last: 0,
            unsubmitted: 0,
        })
    }

    /// Queues a transfer with the number `number`. There is room: no more may be in progress than
    /// the ring was created for.
    ///
    /// # Safety
    ///
    /// X1, for the transfer's memory and `fd`, a descriptor of `backing`; `region`, if there is one, contains
    /// all of the memory, and a buffer of it is alive.
    pub(crate) unsafe fn push(
        &mut self,
        number: u32,
        (fd, flags): (RawFd, i32),
        backing: &Arc<dyn BackingFile>,
        transfer: &Transfer<'_>,
        region: Option<RegionId>,
    ) {
        let (fd, fixed) = match self.file_index(fd, backing) {
            Some(index) => (types::Fd(index as RawFd), squeue::Flags::FIXED_FILE),
            None => (types::Fd(fd), squeue::Flags::empty()),
        };
        // SAFETY: guaranteed by the caller.
        let buffer = region.and_then(|id| unsafe { self.region_index(id) });
        // SAFETY: X1.
        unsafe { self.ring.push(number, entry(fd, flags, transfer, buffer).flags(fixed)) };
        self.unsubmitted += 1;
        if self.unsubmitted == SUBMITTED_TOGETHER {
            self.unsubmitted = 0;
            self.ring.enter(0);
        }
    }

    /// Whether it accepts no more requests: nothing may be pushed any more.
    #[inline]
    pub(crate) fn is_broken(&self) -> bool {
        self.ring.is_broken()
    }

    /// Submits queued requests, waits until `min` have ended, and returns all that have.
    pub(crate) fn wait(&mut self, min: usize, ended: &mut VecDeque<RingCompletion>) {
        self.unsubmitted = 0;
        self.ring.wait(min, None, |number, outcome| ended.push_back((number, outcome)));
    }

    /// Unregisters the files; none of their requests may be in progress.
    pub(crate) fn release_files(&mut self) {
        if !self.files.is_empty() {
            let none = [-1; FILES_MAX];
            let _ = self.ring.submitter().register_files_update(0, &none[..self.files.len()]);
            self.files.clear();
        }
    }

    #[inline]
    fn file_index(&mut self, fd: RawFd, backing: &Arc<dyn BackingFile>) -> Option<usize> {
        // X3.
        let known = self.files.iter().position(|known| known.fd == fd && known.is(backing));
        if known.is_some() || !self.can_register_files {
            return known;
        }
        self.register_file(fd, backing)
    }

    #[cold]
    fn register_file(&mut self, fd: RawFd, backing: &Arc<dyn BackingFile>) -> Option<usize> {
        let submitter = self.ring.submitter();
        let mut free = None;
        for (index, known) in self.files.iter_mut().enumerate() {
            // A file without references has no request that is not submitted yet (X1), so none that names the index.
            if known.fd != -1 && known.backing.strong_count() == 0 {
                if submitter.register_files_update(index as u32, &[-1]).is_err() {
                    continue;
                }
                known.fd = -1;
            }
            if known.fd == -1 {
                free = free.or(Some(index));
            }
        }
        let index = free.unwrap_or(self.files.len());
        if index == FILES_MAX || submitter.register_files_update(index as u32, &[fd]).is_err() {
            return None;
        }
        let registered = RegisteredFile { fd, backing: Arc::downgrade(backing) };
        match self.files.get_mut(index) {
            Some(place) => *place = registered,
            None => self.files.push(registered),
        }
        Some(index)
    }

    /// # Safety
    ///
    /// A buffer of the region must be alive.
    #[inline]
    unsafe fn region_index(&mut self, id: RegionId) -> Option<u16> {
        if self.regions.get(self.last).is_none_or(|known| !known.is(id)) {
            self.last = match self.regions.iter().position(|known| known.is(id)) {
                Some(known) => known,
                // SAFETY: guaranteed by the caller.
                None => unsafe { self.register(id)? },
            };
        }
        matches!(self.regions[self.last], Registered::Known { .. }).then_some(self.last as u16)
    }

    /// # Safety
    ///
    /// As for [`FixedRing::region_index`].
    #[cold]
    unsafe fn register(&mut self, id: RegionId) -> Option<usize> {
        if !self.can_register_regions {
            return None;
        }
        self.give_up_regions();
        let free = self.regions.iter().position(|known| matches!(known, Registered::Free));
        let place = match free {
            Some(place) => place,
            None if self.regions.len() == REGIONS_MAX => return None,
            None => {
                self.regions.push(Registered::Free);
                self.regions.len() - 1
            }
        };
        // SAFETY: guaranteed by the caller.
        let region = unsafe { id.region() };
        let bytes = region.len() as u64;
        // SAFETY: X2: the region is kept while it is registered.
        let registered = unsafe {
            let iovec = [region.as_iovec()];
            self.ring.submitter().register_buffers_update(place as u32, &iovec, None)
        };
        self.regions[place] = match registered {
            Ok(()) => {
                self.registered_bytes += bytes;
                Registered::Known { id, region }
            }
            Err(_) => {
                self.refused_bytes += bytes;
                Registered::Refused { id, region: Arc::downgrade(&region), bytes }
            }
        };
        Some(place)
    }

    /// Releases regions of which no buffer is left: no request can use them.
    fn give_up_regions(&mut self) {
        for (place, known) in self.regions.iter_mut().enumerate() {
            match known {
                Registered::Known { region, .. } if Arc::strong_count(region) == 1 => {
                    let none = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }];
                    // SAFETY: no memory.
                    let given_up = unsafe {
                        self.ring.submitter().register_buffers_update(place as u32, &none, None)
                    };
                    if given_up.is_ok() {
                        self.registered_bytes -= region.len() as u64;
                        *known = Registered::Free;
                    }
                }
                Registered::Refused { region, bytes, .. } if region.strong_count() == 0 => {
                    self.refused_bytes -= *bytes;
                    *known = Registered::Free;
                }
                _ => {}
            }
        }
    }
}
