//! The server: one thread that waits for engines, for their deaths, and for a stop.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::io::retry_on_intr;

use crate::recovery::keeper::clients::Keeper;
use crate::recovery::keeper::listen;
use crate::recovery::keeper::replay::PATIENCE;
use crate::recovery::keeper::report::Report;
use crate::recovery::wire::{self, Address};

/// A keeper that listens, and serves in the thread that calls [`Server::serve`].
///
/// # Examples
///
/// ```
/// use millpond::keeper::{Address, Server};
///
/// let server = Server::bind(&Address::unique())?;
/// let (address, stopper) = (server.address().clone(), server.stopper());
/// let keeper = std::thread::spawn(move || server.serve(|report| println!("{report}")));
/// let engine = millpond::Engine::builder().cache_bytes(1 << 20).keeper(address).build().unwrap();
/// drop(engine);
/// stopper.stop_when_idle();
/// keeper.join().unwrap()?;
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct Server {
    pub(super) address: Address,
    pub(super) listener: OwnedFd,
    pub(super) stop: Arc<Stop>,
    /// Paths to remove at the end: the socket's, and its directory if the server has created that.
    pub(super) made: Vec<PathBuf>,
    /// Readable when there is another reason to stop: the parent's pidfd, or a pipe from a signal handler.
    pub(super) until: Option<OwnedFd>,
    patience: Duration,
}

/// Stops a [`Server`], from any thread.
#[derive(Debug, Clone)]
pub struct Stopper(Arc<Stop>);

#[derive(Debug)]
pub(super) struct Stop {
    asked: AtomicBool,
    pub(super) wake: OwnedFd,
}

impl Stopper {
    /// Makes [`Server::serve`] return once no process uses the keeper any more, which is at once if none
    /// does. Until then it continues to serve, new processes too.
    pub fn stop_when_idle(&self) {
        // Release: pairs with the Acquire of `serve`. Argued: a flag that publishes no other data.
        self.0.asked.store(true, Release);
        let _ = rustix::io::write(&self.0.wake, &1u64.to_ne_bytes());
    }
}

impl Server {
    /// Listens at `address`. Replaces a socket that a keeper left behind; any other file is kept. Creates
    /// the directory of an address of [`Address::unique`].
    ///
    /// # Errors
    ///
    /// The error of `bind(2)`; EADDRINUSE if a keeper listens there, or the path is not a socket.
    pub fn bind(address: &Address) -> io::Result<Server> {
        let listener = wire::socket()?;
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let stop = Arc::new(Stop { asked: AtomicBool::new(false), wake });
        let address = address.clone();
        let made = Vec::new();
        // If a later step fails, the created paths are removed.
        let mut server = Server { address, listener, stop, made, until: None, patience: PATIENCE };
        let Server { address, listener, made, .. } = &mut server;
        listen::bind(listener, address, made)?;
        Ok(server)
    }

    /// The address where it listens.
    #[must_use]
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// A handle that stops it.
    #[must_use]
    pub fn stopper(&self) -> Stopper {
        Stopper(Arc::clone(&self.stop))
    }

    /// How long failing writes are retried, for each file. Default 5 seconds.
    #[must_use]
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// Serves until it is stopped and no process uses it any more; blocks. Reports each engine whose
    /// process died, and each that ended with files still handed over.
    ///
    /// `on_report` is called by the serving thread, which serves no request during the call: it should not
    /// block, and must not open files that programs have with this keeper.
    ///
    /// The server does not depend on signals of the process, except SIGXFSZ: a process with a file size
    /// limit should ignore that one.
    ///
    /// # Errors
    ///
    /// The error of `poll(2)` or `accept(2)`, if it can't continue.
    pub fn serve(self, mut on_report: impl FnMut(Report)) -> io::Result<()> {
        let mut keeper = Keeper::new(self.patience)?;
        let mut until = self.until.as_ref();
        loop {
            // Acquire: pairs with the Release of `stop_when_idle`. Argued: there.
            let stopping =
                self.stop.asked.load(Acquire) || (self.until.is_some() && until.is_none());
            // closer.CL3: `told` becomes readable when there is room.
            let accepts = if keeper.closer.has_room() { PollFlags::IN } else { PollFlags::empty() };
            let mut polled = vec![
                PollFd::new(&self.listener, accepts),
                PollFd::new(&*keeper.told, PollFlags::IN),
                PollFd::new(&keeper.marks, accepts),
            ];
            // While stopping, both would stay readable.
            if !stopping {
                polled.push(PollFd::new(&self.stop.wake, PollFlags::IN));
                polled.extend(until.map(|until| PollFd::new(until, PollFlags::IN)));
            }
            let fixed = polled.len();
            let connections = keeper.connections.iter().map(|connection| &connection.socket);
            let processes = keeper.clients.iter().map(|client| &client.process);
            polled.extend(connections.chain(processes).map(|fd| PollFd::new(fd, PollFlags::IN)));
            let idle = stopping && polled.len() == fixed && keeper.under_way == 0;
            let timeout = Timespec { tv_sec: 0, tv_nsec: 0 };
            retry_on_intr(|| rustix::event::poll(&mut polled, idle.then_some(&timeout)))?;
            let ready: Vec<bool> = polled.iter().map(|fd| !fd.revents().is_empty()).collect();
            drop(polled);
            if idle && !ready[0] {
                keeper.end(self.listener.as_fd());
                return Ok(());
            }
            if !stopping && until.is_some() && ready[4] {
                until = None;
            }
            let asked = &ready[fixed..fixed + keeper.connections.len()];
            // Before any answer: a client may take an answer as a statement about dead processes.
            keeper.bury_dead(&mut on_report)?;
            if ready[1] {
                keeper.process_messages(&mut on_report);
            }
            keeper.converse(asked, &mut on_report);
            if ready[2] {
                keeper.let_pass(&mut on_report)?;
            }
            if ready[0] {
                keeper.accept(self.listener.as_fd())?;
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        for path in self.made.drain(..) {
            let _ = match path.is_dir() {
                true => std::fs::remove_dir(path),
                false => std::fs::remove_file(path),
            };
        }
    }
}
