//! [`RawRangeLock`]: the interface between guards and lock implementations.
//!
//! An implementation grants, queues, cancels and releases requests. Guards, blocking, timeouts and futures are implemented
//! once, over this trait, in `lock`, `guard` and `future`.

use std::fmt::Debug;
use std::time::Duration;

use crate::range::{ByteRange, Mode};
use crate::wait::Notify;

/// Outcome of a request that may queue.
#[derive(Debug)]
pub enum Request<H, W> {
    /// Granted at once.
    Granted(H),
    /// Queued behind conflicting requests; its [`Notify`] is woken at the grant.
    Queued(W),
}

/// A byte-range lock without guards.
///
/// Implemented by [`Striped`](crate::Striped), and by the locks it is compared with.
///
/// Contract: each `Held` and each `Queued` is passed back exactly once (to `release`, to `cancel`, or to a `poll` that
/// grants), with the same lock, range and mode.
///
/// # Examples
///
/// ```
/// use millpond_rangelock::{ByteRange, Mode, RangeLock, RawRangeLock, Striped};
///
/// fn holds<L: RawRangeLock>(lock: &RangeLock<L>) -> bool {
///     let guard = lock.lock(ByteRange::ALL, Mode::Exclusive);
///     lock.try_lock(guard.range(), Mode::Shared).is_none()
/// }
///
/// assert!(holds(&RangeLock::<Striped>::with_raw()), "{}", Striped::NAME);
/// ```
pub trait RawRangeLock: Default + Debug + Send + Sync + 'static {
    /// State of a guard: where the lock holds its range.
    type Held: Debug + Send + Sync + Unpin;
    /// State of a waiting request.
    type Queued: Debug + Send + Sync + Unpin;

    /// A short name, for tables.
    const NAME: &'static str;

    /// Grants a request or queues it.
    fn request(
        &self,
        range: ByteRange,
        mode: Mode,
        notify: impl FnOnce() -> Notify,
    ) -> Request<Self::Held, Self::Queued>;

    /// Grants a request if no conflicting request is held or waits.
    fn try_request(&self, range: ByteRange, mode: Mode) -> Option<Self::Held>;

    /// Grants a request if this does not involve the queue. A blocking request spins on it before it queues.
    #[inline]
    fn claim(&self, range: ByteRange, mode: Mode) -> Option<Self::Held> {
        let _ = (range, mode);
        None
    }

    /// Whether spinning on `claim` would be unfair to waiting requests, or futile: a hint.
    fn is_crowded(&self) -> bool {
        true
    }

    /// Time that a waiting thread may sleep before it has to call `expire`. `None`: it sleeps until it is woken.
    fn patience(queued: &Self::Queued) -> Option<Duration>;

    /// Sets the minimum time that a grant waits for its task; see [`OFFER_GRACE`](crate::OFFER_GRACE).
    fn set_offer_grace(&self, grace: Duration);

    /// Lets the grants lapse that tasks have not taken in time.
    fn expire(&self);

    /// Takes the grant of a queued request, or replaces its waker.
    fn poll(
        &self,
        range: ByteRange,
        mode: Mode,
        queued: Self::Queued,
        notify: impl FnOnce() -> Notify,
    ) -> Request<Self::Held, Self::Queued>;

    /// Removes a request from the queue. If it is already granted, returns it as held.
    fn cancel(&self, range: ByteRange, mode: Mode, queued: Self::Queued) -> Option<Self::Held>;

    /// Releases a hold and grants the requests that waited only for it.
    fn release(&self, range: ByteRange, mode: Mode, held: Self::Held);

    /// Shared to exclusive, if no other hold overlaps and no earlier request waits.
    fn try_upgrade(&self, range: ByteRange, held: &mut Self::Held) -> bool;

    /// Exclusive to shared; grants the shared requests that waited only for it.
    fn downgrade(&self, range: ByteRange, held: &mut Self::Held);
}
