use std::collections::VecDeque;
use std::sync::Arc;
pub use std::sync::mpsc::{RecvError, RecvTimeoutError, SendError, TryRecvError};
use std::time::Duration;

use crate::locks::{Condvar, Mutex, MutexGuard};
use crate::scheduler;
use crate::time::nanos;

struct Queue<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
}

struct State<T> {
    values: VecDeque<T>,
    senders: usize,
    is_received: bool,
}

impl<T> Queue<T> {
    fn state(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().expect("no panic under the lock")
    }
}

/// As std's.
#[must_use]
pub fn channel<T>() -> (Sender<T>, Receiver<T>) {
    let state = State { values: VecDeque::new(), senders: 1, is_received: true };
    let queue = Arc::new(Queue { state: Mutex::new(state), changed: Condvar::new() });
    (Sender(Arc::clone(&queue)), Receiver(queue))
}

/// As std's.
pub struct Sender<T>(Arc<Queue<T>>);

impl<T> Sender<T> {
    /// As std's.
    ///
    /// # Errors
    ///
    /// As std's.
    pub fn send(&self, value: T) -> Result<(), SendError<T>> {
        let mut state = self.0.state();
        if !state.is_received {
            return Err(SendError(value));
        }
        state.values.push_back(value);
        drop(state);
        self.0.changed.notify_one();
        Ok(())
    }
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Sender<T> {
        self.0.state().senders += 1;
        Sender(Arc::clone(&self.0))
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        self.0.state().senders -= 1;
        self.0.changed.notify_all();
    }
}

/// As std's.
pub struct Receiver<T>(Arc<Queue<T>>);

impl<T> Receiver<T> {
    /// As std's.
    ///
    /// # Errors
    ///
    /// As std's.
    pub fn recv(&self) -> Result<T, RecvError> {
        let mut state = self.0.state();
        loop {
            match state.values.pop_front() {
                Some(value) => return Ok(value),
                None if state.senders == 0 => return Err(RecvError),
                None => state = self.0.changed.wait(state).expect("no panic under the lock"),
            }
        }
    }

    /// As std's.
    ///
    /// # Errors
    ///
    /// As std's.
    pub fn try_recv(&self) -> Result<T, TryRecvError> {
        let mut state = self.0.state();
        match state.values.pop_front() {
            Some(value) => Ok(value),
            None if state.senders == 0 => Err(TryRecvError::Disconnected),
            None => Err(TryRecvError::Empty),
        }
    }

    /// As std's.
    ///
    /// # Errors
    ///
    /// As std's.
    pub fn recv_timeout(&self, limit: Duration) -> Result<T, RecvTimeoutError> {
        let until = scheduler::now().saturating_add(nanos(limit));
        let mut state = self.0.state();
        loop {
            if let Some(value) = state.values.pop_front() {
                return Ok(value);
            }
            if state.senders == 0 {
                return Err(RecvTimeoutError::Disconnected);
            }
            let left = until.saturating_sub(scheduler::now());
            if left == 0 {
                return Err(RecvTimeoutError::Timeout);
            }
            let waited = self.0.changed.wait_timeout(state, Duration::from_nanos(left));
            state = waited.expect("no panic under the lock").0;
        }
    }

    /// As std's.
    pub fn iter(&self) -> impl Iterator<Item = T> + '_ {
        std::iter::from_fn(|| self.recv().ok())
    }

    /// As std's.
    pub fn try_iter(&self) -> impl Iterator<Item = T> + '_ {
        std::iter::from_fn(|| self.try_recv().ok())
    }
}

impl<T> Drop for Receiver<T> {
    fn drop(&mut self) {
        self.0.state().is_received = false;
    }
}

/// As std's.
pub struct IntoIter<T>(Receiver<T>);

impl<T> Iterator for IntoIter<T> {
    type Item = T;

    fn next(&mut self) -> Option<T> {
        self.0.recv().ok()
    }
}

impl<T> IntoIterator for Receiver<T> {
    type Item = T;
    type IntoIter = IntoIter<T>;

    fn into_iter(self) -> IntoIter<T> {
        IntoIter(self)
    }
}
