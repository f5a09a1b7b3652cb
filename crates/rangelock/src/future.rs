//! The futures that `lock_async` and `lock_owned_async` return.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use crate::guard::{Guard, OwnedGuard};
use crate::lock::RangeLock;
use crate::range::{ByteRange, Mode};
use crate::raw::{RawRangeLock, Request};
use crate::wait::Notify;

/// State of a request.
enum RequestState<L: RawRangeLock> {
    /// Never polled: not in the queue.
    Idle,
    /// In the queue, or granted and not yet collected.
    Queued(L::Queued),
    /// The guard has been returned.
    Done,
}

impl<L: RawRangeLock> RequestState<L> {
    fn poll(
        &mut self,
        raw: &L,
        range: ByteRange,
        mode: Mode,
        cx: &mut Context<'_>,
    ) -> Poll<L::Held> {
        let answer = match self {
            RequestState::Idle => raw.request(range, mode, || Notify::task(cx.waker())),
            RequestState::Queued(_) => {
                // A clone that panics leaves the request in the queue, for `cancel` (callback.C3).
                let notify = Notify::task(cx.waker());
                let RequestState::Queued(queued) = std::mem::replace(self, RequestState::Done)
                else {
                    unreachable!("matched above")
                };
                raw.poll(range, mode, queued, || notify)
            }
            RequestState::Done => panic!("a lock future was polled after it was ready"),
        };
        match answer {
            Request::Granted(held) => {
                *self = RequestState::Done;
                Poll::Ready(held)
            }
            Request::Queued(queued) => {
                *self = RequestState::Queued(queued);
                Poll::Pending
            }
        }
    }

    fn cancel(&mut self, raw: &L, range: ByteRange, mode: Mode) {
        if let RequestState::Queued(queued) = std::mem::replace(self, RequestState::Done)
            && let Some(held) = raw.cancel(range, mode, queued)
        {
            raw.release(range, mode, held);
        }
    }
}

/// A request for a range of a borrowed lock.
pub(crate) struct Acquire<'a, L: RawRangeLock> {
    lock: &'a RangeLock<L>,
    range: ByteRange,
    mode: Mode,
    state: RequestState<L>,
}

impl<'a, L: RawRangeLock> Acquire<'a, L> {
    pub(crate) fn new(lock: &'a RangeLock<L>, range: ByteRange, mode: Mode) -> Self {
        Acquire { lock, range, mode, state: RequestState::Idle }
    }
}

impl<'a, L: RawRangeLock> Future for Acquire<'a, L> {
    type Output = Guard<'a, L>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let (lock, range, mode) = (self.lock, self.range, self.mode);
        let held = self.state.poll(lock.raw(), range, mode, cx);
        held.map(|held| Guard::new(lock, range, mode, held))
    }
}

impl<L: RawRangeLock> Drop for Acquire<'_, L> {
    fn drop(&mut self) {
        self.state.cancel(self.lock.raw(), self.range, self.mode);
    }
}

/// A request for a range of a lock; the request keeps the lock alive.
pub(crate) struct OwnedAcquire<L: RawRangeLock> {
    lock: Arc<RangeLock<L>>,
    range: ByteRange,
    mode: Mode,
    state: RequestState<L>,
}

impl<L: RawRangeLock> OwnedAcquire<L> {
    pub(crate) fn new(lock: Arc<RangeLock<L>>, range: ByteRange, mode: Mode) -> Self {
        OwnedAcquire { lock, range, mode, state: RequestState::Idle }
    }
}

impl<L: RawRangeLock> Future for OwnedAcquire<L> {
    type Output = OwnedGuard<L>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let (lock, range, mode) = (Arc::clone(&self.lock), self.range, self.mode);
        let held = self.state.poll(lock.raw(), range, mode, cx);
        held.map(|held| OwnedGuard::new(lock, range, mode, held))
    }
}

impl<L: RawRangeLock> Drop for OwnedAcquire<L> {
    fn drop(&mut self) {
        self.state.cancel(self.lock.raw(), self.range, self.mode);
    }
}
