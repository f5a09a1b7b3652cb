//! The queue: held and waiting requests in their order, under one mutex.
//!
//! - C1. An entry has a sequence number; a waiting entry counts its *blockers*: the entries
//!   before it that overlap and conflict. It waits exactly while that count is not zero.
//! - C2. Whoever removes an entry (release, cancel), or weakens one (downgrade), takes it out of
//!   the count of every later waiting entry that counted it, and grants those that reach zero.
//! - C3. Grants are told after the mutex is released; an entry stays valid, since only its
//!   owner removes it.

use crate::raw::Request;
use crate::wait::Notify;
use crate::{ByteRange, Mode};

/// An entry of the queue; its owner passes it back exactly once.
#[derive(Debug)]
pub struct Ticket(u32);

#[derive(Debug)]
struct Entry {
    range: ByteRange,
    mode: Mode,
    sequence: u64,
    blockers: u32,
    notify: Option<Notify>,
    live: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Core {
    entries: Vec<Entry>,
    free: Vec<u32>,
    sequence: u64,
}

pub(crate) type Told = Vec<Notify>;

impl Core {
    pub(crate) fn insert(
        &mut self,
        range: ByteRange,
        mode: Mode,
        notify: Option<impl FnOnce() -> Notify>,
    ) -> Option<Request<Ticket, Ticket>> {
        let conflicts =
            |e: &&Entry| e.live && e.range.overlaps(range) && e.mode.conflicts_with(mode);
        let blockers = self.entries.iter().filter(conflicts).count() as u32;
        let notify = if blockers == 0 { None } else { Some(notify?()) };
        self.sequence += 1;
        let entry = Entry { range, mode, sequence: self.sequence, blockers, notify, live: true };
        let slot = match self.free.pop() {
            Some(slot) => {
                self.entries[slot as usize] = entry;
                slot
            }
            None => {
                self.entries.push(entry);
                self.entries.len() as u32 - 1
            }
        };
        let ticket = Ticket(slot);
        Some(if blockers == 0 { Request::Granted(ticket) } else { Request::Queued(ticket) })
    }

    pub(crate) fn poll(
        &mut self,
        ticket: Ticket,
        notify: impl FnOnce() -> Notify,
    ) -> Request<Ticket, Ticket> {
        let entry = &mut self.entries[ticket.0 as usize];
        if entry.blockers == 0 {
            entry.notify = None;
            return Request::Granted(ticket);
        }
        entry.notify = Some(notify());
        Request::Queued(ticket)
    }

    pub(crate) fn is_waiting(&self, ticket: &Ticket) -> bool {
        self.entries[ticket.0 as usize].blockers != 0
    }

    pub(crate) fn remove(&mut self, ticket: Ticket, told: &mut Told) {
        let slot = ticket.0 as usize;
        let (range, mode, sequence) =
            (self.entries[slot].range, self.entries[slot].mode, self.entries[slot].sequence);
        self.entries[slot].live = false;
        self.entries[slot].notify = None;
        self.free.push(ticket.0);
        for e in self.entries.iter_mut() {
            if e.live
                && e.blockers > 0
                && e.sequence > sequence
                && e.range.overlaps(range)
                && e.mode.conflicts_with(mode)
            {
                e.blockers -= 1;
                if e.blockers == 0 {
                    told.extend(e.notify.take());
                }
            }
        }
    }

    pub(crate) fn try_upgrade(&mut self, ticket: &Ticket) -> bool {
        let slot = ticket.0 as usize;
        let (range, sequence) = (self.entries[slot].range, self.entries[slot].sequence);
        let blocked = self.entries.iter().enumerate().any(|(i, e)| {
            i != slot
                && e.live
                && e.range.overlaps(range)
                && (e.blockers == 0 || e.sequence < sequence)
        });
        if blocked {
            return false;
        }
        self.entries[slot].mode = Mode::Exclusive;
        for e in self.entries.iter_mut() {
            if e.live && e.blockers > 0 && e.mode == Mode::Shared && e.range.overlaps(range) {
                e.blockers += 1;
            }
        }
        true
    }

    pub(crate) fn downgrade(&mut self, ticket: &Ticket, told: &mut Told) {
        let slot = ticket.0 as usize;
        let (range, sequence) = (self.entries[slot].range, self.entries[slot].sequence);
        self.entries[slot].mode = Mode::Shared;
        for e in self.entries.iter_mut() {
            if e.live
                && e.blockers > 0
                && e.sequence > sequence
                && e.mode == Mode::Shared
                && e.range.overlaps(range)
            {
                e.blockers -= 1;
                if e.blockers == 0 {
                    told.extend(e.notify.take());
                }
            }
        }
    }
}
