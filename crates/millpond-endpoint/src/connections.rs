//! The open connections of a listener, and which of them is closed when there are too many.
//!
//! A connection is idle while it waits for a request's head, and busy from there to the end of the response. Requests
//! without a valid signature are answered at once, so only the endpoint's user keeps connections busy. At the limit the
//! connection that has been idle for the longest time is closed: idle connections of others keep no one out.
//!
//! Any user of the machine can open a connection by TCP. Until it has brought a request with a valid signature, it is one of few,
//! it serves one request, and its age is limited. A client with many threads opens many connections before it sends on any of
//! them, so a connection without a signature is not closed before it has had time for a request: the next one waits.
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
use std::time::{Duration, Instant};

use tokio::sync::Notify;

/// A younger connection without a signature is not closed to make room. Chosen.
pub(crate) const CLOSE_AGE_MIN: Duration = Duration::from_secs(1);

const IDLE: u32 = 0;
const CLOSED: u32 = u32::MAX;

#[derive(Debug)]
pub(crate) struct Connections {
    limit: usize,
    unsigned_limit: usize,
    close_age_min: Duration,
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
    pub(crate) fn new(limit: usize, unsigned_limit: usize, close_age_min: Duration) -> Arc<Self> {
        let (limit, unsigned_limit) = (limit.max(1), unsigned_limit.max(1));
        let (open, changed) = (Mutex::default(), Notify::new());
        Arc::new(Self { limit, unsigned_limit, close_age_min, open, changed })
    }

    /// Registers a connection. At the limit, closes the one that has been idle for the longest time, or waits until one
    /// is idle, has a signature, is old enough, or ends.
    pub(crate) async fn open(self: &Arc<Self>) -> OpenConnection {
        loop {
            let changed = self.changed.notified();
            match self.try_open() {
                Ok(connection) => return connection,
                Err(None) => changed.await,
                // In both cases the next attempt looks at all connections.
                Err(Some(pause)) => drop(tokio::time::timeout(pause, changed).await),
            }
        }
    }

    /// `Err`: there is no room, and after the pause, if any, a connection is old enough to be closed.
    fn try_open(self: &Arc<Self>) -> Result<OpenConnection, Option<Duration>> {
        let mut open = lock(&self.open);
        let unsigned = open.values().filter(|state| !state.is_signed()).count();
        let too_many_unsigned = unsigned >= self.unsigned_limit;
        if open.len() >= self.limit || too_many_unsigned {
            let age = |(&number, state): (&u64, &Arc<ConnectionState>)| {
                (state.is_signed(), *lock(&state.idle_since), number)
            };
            let mut by_age: Vec<_> = open.iter().map(age).collect();
            by_age.sort_unstable();
            let closed = 'find: {
                for (is_signed, idle_since, number) in by_age {
                    if is_signed && too_many_unsigned {
                        break;
                    }
                    let age = idle_since.elapsed();
                    if !is_signed && age < self.close_age_min {
                        return Err(Some(self.close_age_min - age));
                    }
                    if open[&number].try_close() {
                        break 'find number;
                    }
                }
                return Err(None);
            };
            open.remove(&closed);
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
        Ok(OpenConnection { number, state })
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
        if !self.is_signed.swap(true, Relaxed) {
            // There is room for another one without.
            self.connections.changed.notify_one();
        }
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
        let connections = Connections::new(2, 2, Duration::ZERO);
        let first = connections.open().await;
        let second = connections.open().await;
        let request = first.state.start_request().unwrap();
        let third = connections.open().await;
        second.state.closed().await;
        assert!(second.state.start_request().is_none(), "it is being closed");
        let busy = third.state.start_request().unwrap();
        assert!(connections.try_open().is_err(), "both are busy");
        drop(second);
        assert!(connections.try_open().is_err(), "the closed connection does not count twice");
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
        let connections = Connections::new(4, 2, Duration::ZERO);
        let signed = connections.open().await;
        signed.state.note_signature();
        let first = connections.open().await;
        let second = connections.open().await;
        let third = connections.open().await;
        first.state.closed().await;
        let both = [&second, &third].map(|open| open.state.start_request().unwrap());
        assert!(connections.try_open().is_err(), "a signed one makes no room for them");
        second.state.note_signature();
        let fourth = connections.open().await;
        drop(both);
        // At the limit of all, an older signed connection stays.
        let fifth = connections.open().await;
        third.state.closed().await;
        assert!(signed.state.start_request().is_some());
        drop((fourth, fifth));
    }

    /// Goal: a burst of connections closes none of them before it could bring its signature.
    #[tokio::test]
    async fn a_new_connection_is_not_closed_for_the_next_one() {
        let connections = Connections::new(8, 2, Duration::from_secs(3600));
        let first = connections.open().await;
        let second = connections.open().await;
        let waiting = tokio::spawn({
            let connections = Arc::clone(&connections);
            async move { connections.open().await }
        });
        tokio::task::yield_now().await;
        assert!(first.state.start_request().is_some() && second.state.start_request().is_some());
        assert!(!waiting.is_finished());
        second.state.note_signature();
        let third = waiting.await.unwrap();
        let pause = connections.try_open().unwrap_err();
        assert!(pause.is_some_and(|pause| pause > Duration::from_secs(3000)), "{pause:?}");
        // Signed connections wait for requests of their own, and are closed at the limit of all.
        let few = Connections::new(1, 1, Duration::from_secs(3600));
        let signed = few.open().await;
        signed.state.note_signature();
        let next = few.open().await;
        signed.state.closed().await;
        drop((first, second, third, next));
    }

    #[tokio::test]
    async fn an_old_connection_makes_room() {
        let connections = Connections::new(8, 1, Duration::from_millis(20));
        let first = connections.open().await;
        let second = connections.open().await;
        first.state.closed().await;
        drop(second);
    }
}
