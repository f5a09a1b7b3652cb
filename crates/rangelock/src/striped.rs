//! The implementation behind [`RangeLock`](crate::RangeLock).

use crate::core::{Core, Ticket};
use crate::raw::{RawRangeLock, Request};
use crate::sync::{Mutex, lock};
use crate::wait::Notify;
use crate::{ByteRange, Mode};

/// Our own byte-range lock, the default of [`RangeLock`](crate::RangeLock).
#[derive(Debug)]
pub struct Striped {
    core: Mutex<Core>,
}

impl Default for Striped {
    fn default() -> Striped {
        Striped { core: Mutex::new(Core::default()) }
    }
}

impl RawRangeLock for Striped {
    type Held = Ticket;
    type Queued = Ticket;

    const NAME: &'static str = "striped";

    fn request(
        &self,
        range: ByteRange,
        mode: Mode,
        notify: impl FnOnce() -> Notify,
    ) -> Request<Ticket, Ticket> {
        lock(&self.core).insert(range, mode, Some(notify)).expect("queued or granted")
    }

    fn try_request(&self, range: ByteRange, mode: Mode) -> Option<Ticket> {
        match lock(&self.core).insert(range, mode, None::<fn() -> Notify>)? {
            Request::Granted(held) => Some(held),
            Request::Queued(_) => None,
        }
    }

    fn poll(
        &self,
        _range: ByteRange,
        _mode: Mode,
        queued: Ticket,
        notify: impl FnOnce() -> Notify,
    ) -> Request<Ticket, Ticket> {
        lock(&self.core).poll(queued, notify)
    }

    fn cancel(&self, _range: ByteRange, _mode: Mode, queued: Ticket) -> Option<Ticket> {
        let mut told = Vec::new();
        {
            let mut core = lock(&self.core);
            if !core.is_waiting(&queued) {
                return Some(queued);
            }
            core.remove(queued, &mut told);
        }
        told.into_iter().for_each(Notify::tell);
        None
    }

    fn release(&self, _range: ByteRange, _mode: Mode, held: Ticket) {
        let mut told = Vec::new();
        lock(&self.core).remove(held, &mut told);
        told.into_iter().for_each(Notify::tell);
    }

    fn try_upgrade(&self, _range: ByteRange, held: &mut Ticket) -> bool {
        lock(&self.core).try_upgrade(held)
    }

    fn downgrade(&self, _range: ByteRange, held: &mut Ticket) {
        let mut told = Vec::new();
        lock(&self.core).downgrade(held, &mut told);
        told.into_iter().for_each(Notify::tell);
    }
}
