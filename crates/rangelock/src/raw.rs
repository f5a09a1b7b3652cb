//! The seam between the guards and the implementations: [`RawRangeLock`].
//!
//! An implementation grants, queues, cancels and releases; everything that a caller sees
//! (guards, blocking, timeouts, futures) is written once, over this trait, in `lock`,
//! `guard` and `future`.

use std::fmt::Debug;
use std::time::Duration;

use crate::range::{ByteRange, Mode};
use crate::wait::Notify;

/// The answer to a request that may queue.
#[derive(Debug)]
pub enum Request<H, W> {
    /// Granted at once.
    Granted(H),
    /// Queued behind conflicting requests; `Notify` will be told when it is granted.
    Queued(W),
}

/// A byte-range lock without guards.
///
/// Implemented by [`Striped`](crate::Striped), and by the locks that it is compared with.
///
/// Contract: a `Held` or a `Queued` is passed back exactly once (to `release`, `cancel`,
/// or to a `poll` that grants), with the lock, the range and the mode that it came from.
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
    /// What a guard remembers about its place in the lock.
    type Held: Debug + Send + Sync + Unpin;
    /// What a waiting request remembers.
    type Queued: Debug + Send + Sync + Unpin;

    /// A short name, for tables.
    const NAME: &'static str;

    /// Grants or queues.
    fn request(
        &self,
        range: ByteRange,
        mode: Mode,
        notify: impl FnOnce() -> Notify,
    ) -> Request<Self::Held, Self::Queued>;

    /// Grants if nothing conflicting is held or waits.
    fn try_request(&self, range: ByteRange, mode: Mode) -> Option<Self::Held>;

    /// Grants if that takes no queue: what a blocking request spins on before it queues.
    #[inline]
    fn claim(&self, range: ByteRange, mode: Mode) -> Option<Self::Held> {
        let _ = (range, mode);
        None
    }

    /// Whether spinning on `claim` would be unfair to requests that wait already, or futile: a hint.
    fn is_crowded(&self) -> bool {
        true
    }

    /// How long a thread that waits may sleep until it has to `expire`; else until it is told.
    fn patience(queued: &Self::Queued) -> Option<Duration>;

    /// For how long, at least, a grant waits for its task; see
    /// [`OFFER_GRACE`](crate::OFFER_GRACE).
    fn set_offer_grace(&self, grace: Duration);

    /// Ends what tasks were offered and have not taken in time.
    fn expire(&self);

    /// Collects the grant of a queued request, or replaces what to wake.
    fn poll(
        &self,
        range: ByteRange,
        mode: Mode,
        queued: Self::Queued,
        notify: impl FnOnce() -> Notify,
    ) -> Request<Self::Held, Self::Queued>;

    /// Takes a request off the queue. If it had been granted already, gives it back as held.
    fn cancel(&self, range: ByteRange, mode: Mode, queued: Self::Queued) -> Option<Self::Held>;

    /// Ends a hold and grants what waited for it.
    fn release(&self, range: ByteRange, mode: Mode, held: Self::Held);

    /// Shared to exclusive, if no other holder overlaps and nobody ahead waits.
    fn try_upgrade(&self, range: ByteRange, held: &mut Self::Held) -> bool;

    /// Exclusive to shared; grants what waited for that.
    fn downgrade(&self, range: ByteRange, held: &mut Self::Held);
}
