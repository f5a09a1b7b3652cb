//! The clients of a server.
//!
//! Locks: the list; nothing is called under it. It is acquired under the queues' lock.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};

use crate::cache::shared::attempts::{self, AttemptCount};
use crate::cache::shared::client_block::{MappedBlock, THREADS_MAX};
use crate::sync::MutexExt;
use crate::units::FrameIndex;

/// For so long the server waits for the end of attempts: longer than the longest takes. Chosen, not measured.
const PATIENCE: Duration = Duration::from_micros(100);

/// A client.
pub(crate) struct ClientEntry {
    block: MappedBlock,
    /// A pidfd of its process.
    process: Arc<OwnedFd>,
    /// The numbers of the last pushes that were seen. Locked under the queues' lock, or not contended.
    last_pushes: Mutex<[u64; THREADS_MAX]>,
}

impl ClientEntry {
    /// Maps a client's memory. `process`: a pidfd of the client.
    pub(crate) fn new(memory: &OwnedFd, process: Arc<OwnedFd>) -> io::Result<Arc<ClientEntry>> {
        let block = MappedBlock::of_client(memory)?;
        Ok(Arc::new(ClientEntry { block, process, last_pushes: Mutex::new([0; THREADS_MAX]) }))
    }

    fn is_dead(&self) -> bool {
        let mut process = [PollFd::new(&self.process, PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut process, Some(&now)).is_ok_and(|ready| ready > 0)
    }

    /// Whether the client has ended the attempts that are under way, before the deadline.
    fn is_quiet(&self, deadline: Instant) -> bool {
        let is_quiet = |count: &AttemptCount| {
            let Some(attempt) = count.under_way() else { return true };
            while !count.has_ended(attempt) {
                if Instant::now() >= deadline {
                    return false;
                }
                std::hint::spin_loop();
            }
            true
        };
        self.block.block().attempts().all(is_quiet)
    }
}

/// The clients.
#[derive(Default)]
pub(crate) struct ClientList {
    clients: Mutex<Arc<[Arc<ClientEntry>]>>,
}

impl ClientList {
    fn all(&self) -> Arc<[Arc<ClientEntry>]> {
        Arc::clone(&self.clients.acquire())
    }

    /// From now on the client's attempts count. Called before the client has the memory.
    pub(crate) fn attach(&self, client: &Arc<ClientEntry>) {
        let mut clients = self.clients.acquire();
        *clients = clients.iter().chain([client]).cloned().collect();
    }

    /// The client's process is gone, or will not read again.
    pub(crate) fn detach(&self, client: &Arc<ClientEntry>) {
        let mut clients = self.clients.acquire();
        *clients = clients.iter().filter(|one| !Arc::ptr_eq(one, client)).cloned().collect();
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.all().is_empty()
    }

    /// Waits a little for the end of attempts that may have found frames which left their pages before the call
    /// (shared.SH4).
    pub(crate) fn await_quiet(&self) {
        let clients = self.all();
        attempts::begin_look();
        let deadline = Instant::now() + PATIENCE;
        for client in clients.iter().filter(|client| !client.is_quiet(deadline)) {
            if client.is_dead() {
                self.detach(client);
            }
        }
    }

    /// Calls `visit` with the frames that clients have read since the last call (shared.SH3). The numbers are the
    /// clients', so they may be any.
    pub(crate) fn drain_touched(&self, mut visit: impl FnMut(FrameIndex)) {
        for client in &*self.all() {
            let mut last_pushes = client.last_pushes.acquire();
            for (ring, last) in client.block.block().rings().zip(&mut *last_pushes) {
                *last = ring.drain(*last, &mut visit);
            }
        }
    }
}
