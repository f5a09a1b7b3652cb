//! Closes connections whose close may block.
//!
//! A message that was not received may hold the last reference to a file, and the kernel closes that file
//! within the close of the connection. A lingering TCP socket, or a file of a FUSE server, blocks that
//! close for as long as its sender likes. So no thread that serves clients closes such a connection itself.
//!
//! - **CL1** At most [`THREADS_MAX`] threads close connections. Each ends when the queue is empty.
//! - **CL2** A connection is shut down before it is queued. Its peer sees the end at once, and can send
//!   nothing more.
//! - **CL3** With [`OPEN_MAX`] connections the closer is full, and the keeper accepts none until a close
//!   has returned. So untrusted processes can't exhaust the keeper's threads or its descriptors.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use rustix::net::Shutdown;

use crate::sync::MutexExt;
use crate::thread::spawn;

/// Chosen, not measured: more than one, as the first close may block.
const THREADS_MAX: usize = 4;
/// The maximum number of connections that are not closed yet. A quarter of the usual limit of descriptors
/// of a process.
const OPEN_MAX: usize = 256;

/// See the module header.
#[derive(Debug)]
pub(super) struct Closer {
    queue: Mutex<CloseQueue>,
    /// An eventfd of the keeper, which becomes readable when there is room again.
    has_room: Arc<OwnedFd>,
}

#[derive(Debug, Default)]
struct CloseQueue {
    sockets: VecDeque<OwnedFd>,
    /// The number of connections that are queued or being closed.
    open: usize,
    threads: usize,
}

impl Closer {
    pub(super) fn new(has_room: Arc<OwnedFd>) -> Arc<Closer> {
        Arc::new(Closer { queue: Mutex::default(), has_room })
    }

    /// CL3. True if no thread runs, so that the next connection starts one.
    pub(super) fn has_room(&self) -> bool {
        let queue = self.queue.acquire();
        queue.open < OPEN_MAX || queue.threads == 0
    }

    /// Ends a connection without waiting for its close.
    pub(super) fn hang_up(self: &Arc<Self>, socket: OwnedFd) {
        // CL2. Fails for a connection that its peer has ended.
        let _ = rustix::net::shutdown(&socket, Shutdown::Both);
        let mut queue = self.queue.acquire();
        queue.sockets.push_back(socket);
        queue.open += 1;
        if queue.threads == THREADS_MAX {
            return;
        }
        queue.threads += 1;
        drop(queue);
        let closer = Arc::clone(self);
        if spawn("millpond-close", move || closer.close_queued()).is_err() {
            // The connection stays queued until a thread can be started.
            self.queue.acquire().threads -= 1;
        }
    }

    fn close_queued(&self) {
        loop {
            let mut queue = self.queue.acquire();
            let Some(socket) = queue.sockets.pop_front() else {
                queue.threads -= 1;
                return;
            };
            drop(queue);
            drop(socket);
            let mut queue = self.queue.acquire();
            queue.open -= 1;
            let was_full = queue.open + 1 == OPEN_MAX;
            drop(queue);
            if was_full {
                let _ = rustix::io::write(&*self.has_room, &1u64.to_ne_bytes());
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::io::{IoSlice, Read, Write};
    use std::mem::MaybeUninit;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use rustix::event::EventfdFlags;
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

    use super::*;

    fn closer() -> Arc<Closer> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Closer::new(Arc::new(rustix::event::eventfd(0, flags).unwrap()))
    }

    /// A socket whose close blocks until `reader` is read from or closed: it lingers, with unsent data.
    fn lingering() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut lingering = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (reader, _) = listener.accept().unwrap();
        let patience = Some(Duration::from_secs(600));
        rustix::net::sockopt::set_socket_linger(&lingering, patience).unwrap();
        lingering.set_nonblocking(true).unwrap();
        while lingering.write(&[0; 4096]).is_ok() {}
        lingering.set_nonblocking(false).unwrap();
        (lingering, reader)
    }

    /// A connection that holds the last reference to `file`, and its peer.
    fn holding(file: TcpStream) -> (OwnedFd, UnixStream) {
        let (own, peer) = UnixStream::pair().unwrap();
        let fds = [file.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        let bytes = [IoSlice::new(&[7])];
        rustix::net::sendmsg(&peer, &bytes, &mut control, SendFlags::empty()).unwrap();
        (own.into(), peer)
    }

    /// Goal: blocking closes occupy neither the caller nor an unbounded number of threads, each peer sees
    /// the end at once, and a full closer has room again when the closes return.
    #[test]
    fn a_bounded_number_of_closes_block() {
        let closer = closer();
        let mut readers = Vec::new();
        for _ in 0..THREADS_MAX {
            let (file, reader) = lingering();
            let (socket, mut peer) = holding(file);
            closer.hang_up(socket);
            assert_eq!(peer.read(&mut [0]).unwrap_or(0), 0, "the peer sees the end");
            readers.push(reader);
        }
        let mut peers = Vec::new();
        while closer.has_room() {
            let (socket, peer) = UnixStream::pair().unwrap();
            closer.hang_up(socket.into());
            peers.push(peer);
        }
        assert_eq!(peers.len(), OPEN_MAX - THREADS_MAX, "no close has returned");
        assert_eq!(closer.queue.acquire().threads, THREADS_MAX);
        for mut peer in peers {
            assert_eq!(peer.read(&mut [0]).unwrap_or(0), 0, "a queued connection is shut down");
        }
        drop(readers);
        while closer.queue.acquire().threads > 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(closer.has_room());
        assert_eq!(rustix::io::read(&*closer.has_room, &mut [0; 8]), Ok(8), "the keeper is woken");
    }
}
