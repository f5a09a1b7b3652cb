//! A ring of one thread that waits for its submissions: several transfers at once.
//!
//! It is empty whenever its thread does something else, so no other thread has to reap it. For the
//! rules of rings see [`ring`](crate::io::backend::ring). After a failed submission the state is
//! unknown: the kernel may have taken any part of the queue, and nothing is removed from it.

use std::collections::VecDeque;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd;
use std::time::Instant;

use io_uring::{IoUring, Submitter, opcode, squeue, types};
use rustix::fs::{Mode, OFlags};

use crate::io::backend::ring::{CHECK_AFTER, PAUSE, is_broken, new_ring, outcome};

/// The user data of a request to cancel all others.
const CANCEL: u64 = u64::MAX;

pub(crate) struct LocalRing {
    ring: ManuallyDrop<IoUring>,
    /// Entries pushed since the submission queue was last found empty.
    queued: VecDeque<u32>,
    /// The error that broke the ring (ring.R3).
    broken: Option<i32>,
}

impl Drop for LocalRing {
    fn drop(&mut self) {
        if self.broken.is_none() {
            // SAFETY: it is not used again.
            unsafe { ManuallyDrop::drop(&mut self.ring) };
        }
    }
}

impl LocalRing {
    /// A ring with room for `entries` transfers.
    pub(crate) fn new(entries: u32) -> io::Result<LocalRing> {
        Ok(LocalRing {
            ring: ManuallyDrop::new(new_ring(entries, 2 * entries)?),
            queued: VecDeque::with_capacity(2 * entries as usize),
            broken: None,
        })
    }

    pub(crate) fn submitter(&self) -> Submitter<'_> {
        self.ring.submitter()
    }

    /// Whether it accepts no more entries: nothing may be pushed any more.
    #[inline]
    pub(crate) fn is_broken(&self) -> bool {
        self.broken.is_some()
    }

    /// Queues an entry with the number `number`. There is room: no more may be in progress than the
    /// ring was created for.
    ///
    /// # Safety
    ///
    /// ring.R1, for all that the entry names, including its descriptor.
    #[inline]
    pub(crate) unsafe fn push(&mut self, number: u32, entry: squeue::Entry) {
        // SAFETY: guaranteed by the caller.
        unsafe { self.ring.submission().push(&entry.user_data(number.into())) }
            .expect("room for all");
        self.queued.push_back(number);
    }

    /// Submits queued entries, and waits until `min` have ended, or the ring is found broken.
    #[inline]
    pub(crate) fn enter(&mut self, min: usize) {
        let entered = self.ring.submit_and_wait(min);
        self.note(entered);
    }

    /// The same, but returns after [`CHECK_AFTER`] at the latest.
    fn enter_for_a_while(&mut self, min: usize) {
        let limit = types::Timespec::from(CHECK_AFTER);
        let args = types::SubmitArgs::new().timespec(&limit);
        let entered = self.ring.submitter().submit_with_args(min, &args);
        self.note(entered);
    }

    #[inline]
    fn note(&mut self, entered: io::Result<usize>) {
        match entered {
            Err(error) if is_broken(&error) => self.broken = error.raw_os_error(),
            // Other errors mean that submitting or waiting was interrupted, or that memory was
            // short temporarily: queued entries and entries in progress are not affected (ring.R1).
            _ => {
                if self.ring.submission().is_empty() {
                    self.queued.clear();
                }
            }
        }
    }

    /// Submits queued entries, waits until `min` have ended, and returns all that have. Entries
    /// that a broken ring has not taken end as cancelled, to be tried in another way; entries in
    /// progress are polled.
    ///
    /// `is_intact` (ring.R4): whether the descriptors of all entries still refer to their files. If
    /// one does not, and nothing ends for long, all end as cancelled. `None`: the files are
    /// registered.
    pub(crate) fn wait(
        &mut self,
        min: usize,
        is_intact: Option<&dyn Fn() -> bool>,
        mut end: impl FnMut(u32, io::Result<usize>),
    ) {
        let (mut ended, mut waits_since) = (0, None);
        loop {
            // Ended requests are not in the queue any more, and the kernel counts those in it.
            match (self.broken, is_intact) {
                (Some(_), _) => {}
                (None, Some(_)) if min > ended => self.enter_for_a_while(min - ended),
                (None, _) => self.enter(min - ended),
            }
            for done in self.ring.completion() {
                if done.user_data() == CANCEL {
                    continue;
                }
                waits_since = None;
                end(done.user_data() as u32, outcome(done.result()));
                ended += 1;
            }
            if self.broken.is_some() {
                let untaken = self.ring.submission().len().min(self.queued.len());
                for number in self.queued.drain(self.queued.len() - untaken..) {
                    end(number, Err(io::Error::from_raw_os_error(libc::ECANCELED)));
                    ended += 1;
                }
                self.queued.clear();
            }
            if ended >= min {
                return;
            }
            if self.broken.is_some() {
                std::thread::sleep(PAUSE);
            } else if waits_since.get_or_insert_with(Instant::now).elapsed() >= CHECK_AFTER {
                waits_since = None;
                if is_intact.is_some_and(|is_intact| !is_intact()) {
                    self.cancel_all();
                }
            }
        }
    }

    /// Cancels all entries (ring.R4). Before Linux 5.19 the kernel refuses that.
    #[cold]
    fn cancel_all(&mut self) {
        let cancel = opcode::AsyncCancel2::new(types::CancelBuilder::any()).build();
        // SAFETY: it names no memory. If there is no room, the queue has not been taken; then it is
        // tried again.
        let _ = unsafe { self.ring.submission().push(&cancel.user_data(CANCEL)) };
    }
}

/// Sets up a ring and reads a byte through it.
///
/// # Errors
///
/// The system's error: EPERM or ENOSYS if io_uring is forbidden. Of kind `Unsupported` before Linux 5.11.
pub(crate) fn probe() -> io::Result<()> {
    let mut ring = LocalRing::new(2)?;
    // The timeouts of ring.R4.
    if !ring.ring.params().is_feature_ext_arg() {
        let what = "its waits have no timeout before Linux 5.11";
        return Err(io::Error::new(io::ErrorKind::Unsupported, what));
    }
    let file = rustix::fs::open("/proc/self/exe", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    let mut byte = [0u8; 1];
    let read = opcode::Read::new(types::Fd(file.as_raw_fd()), byte.as_mut_ptr(), 1).build();
    // SAFETY: ring.R1: `byte` and `file` live until `wait` has seen the end of it.
    unsafe { ring.push(0, read) };
    let mut outcome = Ok(0);
    ring.wait(1, None, |_, it| outcome = it);
    // It was just created: its descriptor still refers to it.
    match (ring.broken.take(), outcome) {
        (Some(errno), _) => Err(io::Error::from_raw_os_error(errno)),
        (None, Ok(1)) => Ok(()),
        (None, Ok(_)) => Err(io::ErrorKind::UnexpectedEof.into()),
        (None, Err(error)) => Err(error),
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::io::Write;
    use std::os::unix::thread::JoinHandleExt;
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    extern "C" fn nothing(_: libc::c_int) {}

    /// Goal: after a signal interrupts a wait for several requests, the thread does not wait for
    /// more than are in progress. Method: one of two reads has ended when the signal arrives.
    #[test]
    fn an_interrupted_wait_goes_on_for_the_rest() {
        if let Err(error) = probe() {
            return crate::skip::skip(format_args!("no io_uring: {error}"));
        }
        // SAFETY: a handler that does nothing; without SA_RESTART.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = nothing as *const () as usize;
            libc::sigaction(libc::SIGUSR2, &action, std::ptr::null_mut());
        }
        let (first, mut first_in) = std::io::pipe().unwrap();
        let (second, mut second_in) = std::io::pipe().unwrap();
        let (tell, told) = mpsc::channel();
        let waiter = std::thread::spawn(move || {
            let mut ring = LocalRing::new(2).unwrap();
            let mut bytes = [0u8; 2];
            for (number, pipe) in [&first, &second].into_iter().enumerate() {
                let fd = types::Fd(pipe.as_raw_fd());
                let read = opcode::Read::new(fd, &raw mut bytes[number], 1).build();
                // SAFETY: ring.R1: pipes and bytes outlive the wait for both.
                unsafe { ring.push(number as u32, read) };
            }
            let mut ended = Vec::new();
            let end = |number, outcome: io::Result<usize>| ended.push((number, outcome.unwrap()));
            ring.wait(2, None, end);
            tell.send(ended).unwrap();
        });
        first_in.write_all(b"1").unwrap();
        let deadline = std::time::Instant::now() + Duration::from_secs(60);
        // It is unknown when the waiter sleeps: signals until it certainly did.
        for _ in 0..50 {
            // SAFETY: the thread has not been joined.
            unsafe { libc::pthread_kill(waiter.as_pthread_t(), libc::SIGUSR2) };
            std::thread::sleep(Duration::from_millis(2));
        }
        second_in.write_all(b"2").unwrap();
        let ended = told.recv_timeout(deadline - std::time::Instant::now());
        assert_eq!(ended.expect("it waits for a third"), [(0, 1), (1, 1)]);
        waiter.join().unwrap();
    }

    /// Goal: an entry whose descriptor now refers to a pipe without writes is not waited for
    /// forever; an entry that only takes long is waited for (ring.R4). Method: reads of a pipe. (A
    /// program closed all of its descriptors; a ring that was created then got the number of a file
    /// that was just being read, and the read waited for that ring.)
    #[test]
    fn an_entry_of_a_replaced_descriptor_is_cancelled() {
        if let Err(error) = probe() {
            return crate::skip::skip(format_args!("no io_uring: {error}"));
        }
        for is_intact in [false, true] {
            let (pipe, mut writer) = std::io::pipe().unwrap();
            let (tell, told) = mpsc::channel();
            let waiter = std::thread::spawn(move || {
                let mut ring = LocalRing::new(2).unwrap();
                let mut byte = 0u8;
                let read = opcode::Read::new(types::Fd(pipe.as_raw_fd()), &raw mut byte, 1).build();
                // SAFETY: ring.R1: pipe and byte outlive the wait.
                unsafe { ring.push(0, read) };
                let looks = std::cell::Cell::new(0);
                let look = || {
                    looks.set(looks.get() + 1);
                    is_intact
                };
                let mut ended = None;
                ring.wait(1, Some(&look), |_, outcome| ended = Some(outcome));
                tell.send((ended.unwrap(), looks.get())).unwrap();
            });
            if is_intact {
                std::thread::sleep(3 * CHECK_AFTER);
                writer.write_all(b"1").unwrap();
            }
            let (outcome, looks) = told.recv_timeout(Duration::from_secs(60)).expect("it waits");
            match outcome {
                Ok(moved) => assert!(is_intact && moved == 1),
                Err(error) => {
                    assert!(!is_intact, "{error}");
                    assert_eq!(error.raw_os_error(), Some(libc::ECANCELED));
                }
            }
            assert!(looks > 0, "not checked");
            waiter.join().unwrap();
        }
    }
}
