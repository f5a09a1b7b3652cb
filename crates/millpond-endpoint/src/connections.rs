//! The open connections of a listener, and which of them is closed when there are too many.
//!
//! A connection is idle while it waits for a request's head, and busy from there to the end of the response. Requests
//! without a valid signature are answered at once, so only the endpoint's user keeps connections busy. At the limit the
//! connection that has been idle for the longest time is closed: idle connections of others keep no one out.
//!
//! Any user of the machine can open a connection by TCP. Until it has brought a request with a valid signature, it is one of few,
//! it serves one request, and its age is limited.
//!
//! ```text
//! IDLE -> start_request -> busy: the number of requests -> (the last RequestGuard dropped) -> IDLE
//! IDLE -> try_close -> CLOSED
//! unsigned -> note_signature -> signed
//! ```

use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::sync::Notify;

const IDLE: u32 = 0;
const CLOSED: u32 = u32::MAX;

#[derive(Debug)]
pub(crate) struct Connections {
    limit: usize,
    unsigned_limit: usize,
    open: Mutex<BTreeMap<u64, Arc<ConnectionState>>>,
    changed: Notify,
}

/// Whether a connection may be closed. Relaxed accesses: they order no other memory.
#[derive(Debug)]
pub(crate) struct ConnectionState {
    state: AtomicU32,
    is_signed: AtomicBool,
    idle_since: Mutex<Instant>,
    closed: Notify,
    connections: Arc<Connections>,
}

/// An open connection; dropped with it.
#[derive(Debug)]
pub(crate) struct OpenConnection {
    number: u64,
    pub(crate) state: Arc<ConnectionState>,
}

/// Keeps a connection busy.
#[derive(Debug)]
pub(crate) struct RequestGuard(Arc<ConnectionState>);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Connections {
    /// `unsigned_limit`: the most connections without a valid signature.
    pub(crate) fn new(limit: usize, unsigned_limit: usize) -> Arc<Self> {
        let (limit, unsigned_limit) = (limit.max(1), unsigned_limit.max(1));
        let (open, changed) = (Mutex::default(), Notify::new());
        Arc::new(Self { limit, unsigned_limit, open, changed })
    }

    /// Registers a connection. At the limit, closes the one that has been idle for the longest time, or waits until one
    /// is idle or ends.
    pub(crate) async fn open(self: &Arc<Self>) -> OpenConnection {
        loop {
            let changed = self.changed.notified();
            if let Some(connection) = self.try_open() {
                return connection;
            }
            changed.await;
        }
    }

    fn try_open(self: &Arc<Self>) -> Option<OpenConnection> {
        let mut open = lock(&self.open);
        let unsigned = open.values().filter(|state| !state.is_signed()).count();
        let too_many_unsigned = unsigned >= self.unsigned_limit;
        if open.len() >= self.limit || too_many_unsigned {
            let age = |(&number, state): (&u64, &Arc<ConnectionState>)| {
                (state.is_signed(), *lock(&state.idle_since), number)
            };
            let mut by_age: Vec<_> = open.iter().map(age).collect();
            by_age.sort_unstable();
            let may_close = |is_signed: bool| !(is_signed && too_many_unsigned);
            let closed = by_age
                .into_iter()
                .find(|&(is_signed, _, number)| may_close(is_signed) && open[&number].try_close());
            open.remove(&closed?.2);
        }
        let state = Arc::new(ConnectionState {
            state: AtomicU32::new(IDLE),
            is_signed: AtomicBool::new(false),
            idle_since: Mutex::new(Instant::now()),
            closed: Notify::new(),
            connections: Arc::clone(self),
        });
        let number = open.last_key_value().map_or(0, |(last, _)| last + 1);
        open.insert(number, Arc::clone(&state));
        Some(OpenConnection { number, state })
    }
}

impl ConnectionState {
    fn try_close(&self) -> bool {
        let closed = self.state.compare_exchange(IDLE, CLOSED, Relaxed, Relaxed).is_ok();
        if closed {
            self.closed.notify_one();
        }
        closed
    }

    /// Marks the connection as busy; None if it is being closed.
    pub(crate) fn start_request(self: &Arc<Self>) -> Option<RequestGuard> {
        let more = |requests| (requests != CLOSED).then(|| requests + 1);
        let started = self.state.fetch_update(Relaxed, Relaxed, more).is_ok();
        started.then(|| RequestGuard(Arc::clone(self)))
    }

    /// A request with a valid signature has come.
    pub(crate) fn note_signature(&self) {
        self.is_signed.store(true, Relaxed);
    }

    pub(crate) fn is_signed(&self) -> bool {
        self.is_signed.load(Relaxed)
    }

    /// Waits until the connection has to be closed.
    pub(crate) async fn closed(&self) {
        self.closed.notified().await;
    }
}

impl Drop for RequestGuard {
    fn drop(&mut self) {
        // The age of a connection without a signature counts from its start.
        if self.0.is_signed() {
            *lock(&self.0.idle_since) = Instant::now();
        }
        self.0.state.fetch_sub(1, Relaxed);
        self.0.connections.changed.notify_one();
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        let connections = &self.state.connections;
        let mut open = lock(&connections.open);
        // A closed connection was removed before, and its number may be another's.
        if open.get(&self.number).is_some_and(|state| Arc::ptr_eq(state, &self.state)) {
            open.remove(&self.number);
        }
        drop(open);
        connections.changed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_connection_that_is_idle_for_longest_is_closed() {
        let connections = Connections::new(2, 2);
        let first = connections.open().await;
        let second = connections.open().await;
        let request = first.state.start_request().unwrap();
        let third = connections.open().await;
        second.state.closed().await;
        assert!(second.state.start_request().is_none(), "it is being closed");
        let busy = third.state.start_request().unwrap();
        assert!(connections.try_open().is_none(), "both are busy");
        drop(second);
        assert!(connections.try_open().is_none(), "the closed connection does not count twice");
        let waiting = tokio::spawn({
            let connections = Arc::clone(&connections);
            async move { connections.open().await }
        });
        tokio::task::yield_now().await;
        drop(request);
        let fourth = waiting.await.unwrap();
        first.state.closed().await;
        drop((busy, third, fourth, first));
        assert!(lock(&connections.open).is_empty());
    }
    #[tokio::test]
    async fn connections_without_a_signature_are_few() {
        let connections = Connections::new(4, 2);
        let signed = connections.open().await;
        signed.state.note_signature();
        let first = connections.open().await;
        let second = connections.open().await;
        let third = connections.open().await;
        first.state.closed().await;
        let both = [&second, &third].map(|open| open.state.start_request().unwrap());
        assert!(connections.try_open().is_none(), "a signed one makes no room for them");
        second.state.note_signature();
        let fourth = connections.open().await;
        drop(both);
        // At the limit of all, an older signed connection stays.
        let fifth = connections.open().await;
        third.state.closed().await;
        assert!(signed.state.start_request().is_some());
        drop((fourth, fifth));
    }
}
