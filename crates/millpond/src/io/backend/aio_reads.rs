//! Direct background reads without a descriptor and without a thread for each, by Linux AIO.
//!
//! Many reads are in flight for tasks at a time; a few threads could not keep the device busy with
//! them. Any thread submits its reads to the kernel. One thread reaps them; it is started with the
//! first read and sleeps in the kernel.
//!
//! ```text
//!   start -> queue -> (end of the batch) submit: one system call for all
//!         -> the kernel -> reaper: io_getevents -> done(outcome), in a batch
//!         -> refused: one of the `readers`
//! ```
//!
//! - **AQ1** A submitted job is leaked. It has the segments and keeps their memory and the
//!   descriptor. Only the thread that reaps its completion takes it back.
//! - **AQ2** Jobs are counted before they are submitted, and until they have dropped all of their
//!   resources. The reaper ends only when it was stopped and no job is counted.
//! - **AQ3** The first thread that queues a read submits the queue at the end of its batch; threads
//!   that queue reads before that rely on it.
//!
//! Submitting may wait in the kernel for a short time, as for any AIO: for a place in the device's
//! queue, or for the file system to find the blocks.
//!
//! Locks: the state, a leaf, except while context and thread are created.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex};

use rustix::fs::MemfdFlags;

use crate::io::backend::aio::{AioRequest, Context, Event};
use crate::io::backend::descriptors::Descriptors;
use crate::io::backend::readers;
use crate::io::batch;
use crate::io::pool::Pool;
use crate::io::read_limit;
use crate::io::segment::Segment;
use crate::io::transfer::{BackgroundRead, Direction, Transfer};
use crate::sync::MutexExt;
use crate::thread::spawn;

/// Completions that are reaped together. Chosen, not measured.
const REAPED_MAX: usize = 64;
/// The number of the request that ends the reaper's sleep. Other requests have the address of their
/// job.
const NUDGE: u64 = 0;

/// The reads of an engine.
pub(crate) struct AioReads {
    state: Mutex<ReadsState>,
    readers: Arc<Pool>,
}

#[derive(Default)]
struct ReadsState {
    queue: Vec<AioRead>,
    /// Submitted, or about to be (AQ2).
    in_flight: usize,
    context: Option<Arc<Context>>,
    /// There is no context, or no thread.
    refused: bool,
    stopped: bool,
}

struct AioRead {
    descriptors: Arc<Descriptors>,
    read: BackgroundRead,
}

impl AioRead {
    fn transfer(&self) -> Transfer<'_> {
        self.read.transfer()
    }

    /// A thread reads if this cannot be a request, or is refused.
    fn read_on_thread(self, readers: &Arc<Pool>) {
        let AioRead { descriptors, read } = self;
        let attempt = move |read: Transfer<'_>| descriptors.try_one(&read);
        if let Err(read) = readers::start(readers, read, attempt) {
            read.done.end(Err(io::Error::from_raw_os_error(libc::ENOMEM)));
        }
    }
}

impl AioReads {
    pub(crate) fn new(readers: &Arc<Pool>) -> Arc<AioReads> {
        Arc::new(AioReads { state: Mutex::default(), readers: Arc::clone(readers) })
    }

    /// Starts a read of a file with direct reads.
    pub(crate) fn start(self: &Arc<Self>, descriptors: Arc<Descriptors>, read: BackgroundRead) {
        let job = AioRead { descriptors, read };
        let mut state = self.state.acquire();
        if state.refused {
            drop(state);
            return job.read_on_thread(&self.readers);
        }
        state.queue.push(job);
        let is_first = state.queue.len() == 1;
        drop(state);
        if is_first {
            let reads = Arc::clone(self);
            batch::defer(Box::new(move || reads.submit_queue()));
        }
    }

    /// The context, with a thread that reaps it. Created for the first read.
    fn context(self: &Arc<Self>) -> Option<Arc<Context>> {
        let mut state = self.state.acquire();
        if state.context.is_none() && !state.refused {
            // Created under the lock: a context without its thread would never be reaped.
            let made = Context::new(read_limit::READS_MAX).and_then(|context| {
                let context = Arc::new(context);
                let (reads, reaped) = (Arc::clone(self), Arc::clone(&context));
                spawn("millpond-reap", move || reads.reap(&reaped)).map(|()| context)
            });
            state.refused = made.is_err();
            state.context = made.ok();
        }
        state.context.clone()
    }

    /// Submits the queue (AQ3).
    fn submit_queue(self: &Arc<Self>) {
        let context = self.context();
        let mut state = self.state.acquire();
        let jobs = std::mem::take(&mut state.queue);
        state.in_flight += jobs.len();
        drop(state);
        let refused = match context {
            Some(context) => submit(&context, jobs),
            None => jobs,
        };
        if !refused.is_empty() {
            self.state.acquire().in_flight -= refused.len();
            refused.into_iter().for_each(|job| job.read_on_thread(&self.readers));
        }
    }

    fn reap(&self, context: &Context) {
        let mut events = [Event::default(); REAPED_MAX];
        loop {
            let came = context.wait(&mut events);
            let batch = batch::open();
            let mut ended = 0;
            for event in events[..came].iter().filter(|event| event.number != NUDGE) {
                let job = std::ptr::with_exposed_provenance_mut(event.number as usize);
                // SAFETY: AQ1: its completion was just reaped.
                let AioRead { descriptors, read } = *unsafe { Box::<AioRead>::from_raw(job) };
                // inode.CF1. Within the batch: a close may wait.
                drop(descriptors);
                read.done.end(event.outcome());
                ended += 1;
            }
            drop(batch);
            let mut state = self.state.acquire();
            state.in_flight -= ended;
            if state.stopped && state.in_flight == 0 {
                state.context = None;
                return;
            }
        }
    }

    /// Makes the reaper end when nothing is in flight.
    pub(crate) fn stop(&self) {
        let mut state = self.state.acquire();
        state.stopped = true;
        // Otherwise the reaper notices when it completes the last read.
        let context = state.context.clone().filter(|_| state.in_flight == 0);
        drop(state);
        if let Some(context) = context {
            // If there is no descriptor for it, the reaper continues to sleep.
            let _ = nudge(&context);
        }
    }
}

/// Ends the sleep of the thread that waits for `context`, by an empty read, which completes
/// immediately.
fn nudge(context: &Context) -> io::Result<usize> {
    let file = rustix::fs::memfd_create("millpond", MemfdFlags::CLOEXEC)?;
    // SAFETY: of zero length.
    let nothing = unsafe { [Segment::new(std::ptr::null_mut(), 0)] };
    let transfer = Transfer::new(Direction::Read, 0, &nothing);
    let request = AioRequest::new(&transfer, file.as_raw_fd(), 0);
    let mut block = request.block(NUDGE);
    // SAFETY: it names no memory.
    unsafe { context.submit(&[&raw mut block]) }
}

/// Submits jobs to the kernel. Returns those that it did not take.
fn submit(context: &Context, jobs: Vec<AioRead>) -> Vec<AioRead> {
    // Keeps the files that `inside` borrows from, as a job may have ended before this returns. No
    // other file (inode.CF1).
    let in_place = |job: &AioRead| job.descriptors.is_in_place();
    let files: Vec<Option<Arc<Descriptors>>> =
        jobs.iter().map(|job| in_place(job).then(|| Arc::clone(&job.descriptors))).collect();
    let mut inside = Vec::new();
    // Some requests contain their segments: they stay until all were submitted.
    let mut requests = Vec::with_capacity(jobs.len());
    let mut handed: Vec<*mut AioRead> = Vec::with_capacity(jobs.len());
    let mut refused = Vec::new();
    for (job, file) in jobs.into_iter().zip(&files) {
        let route = match file {
            Some(file) => file.direct_route(&job.transfer()).map(|(fd, flags, gate)| {
                inside.extend(gate);
                (fd, flags)
            }),
            None => job.descriptors.direct_route(&job.transfer()).map(|(fd, flags, _)| (fd, flags)),
        };
        let Some((fd, flags)) = route else {
            refused.push(job);
            continue;
        };
        let job = Box::into_raw(Box::new(job));
        // SAFETY: AQ1: leaked above, and not submitted yet.
        let transfer = unsafe { (*job).transfer() };
        requests.push(AioRequest::new(&transfer, fd, flags));
        handed.push(job);
    }
    let mut blocks: Vec<libc::iocb> = (requests.iter().zip(&handed))
        .map(|(request, job)| request.block(job.expose_provenance() as u64))
        .collect();
    let pointers: Vec<*mut libc::iocb> = blocks.iter_mut().map(std::ptr::from_mut).collect();
    let mut next = 0;
    while next < pointers.len() {
        // SAFETY: AQ1.
        match unsafe { context.submit(&pointers[next..]) } {
            Ok(submitted) => next += submitted,
            Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
            Err(_) => {
                // The error is about the first of the rest.
                // SAFETY: AQ1: leaked above, and not taken by the kernel.
                refused.push(*unsafe { Box::from_raw(handed[next]) });
                next += 1;
            }
        }
    }
    refused
}
