//! The state of a guard: where its range is held, packed into two words.
//!
//! Two words are passed and returned in registers. An enum of the same contents would go through memory between lock and
//! unlock, read in other sizes than it was written in, which stalls store forwarding.
//!
//! ```text
//! Single: address of the stripe | slot << 4 | log2 of the table   word that `control` became
//! Front:  FRONT                                                   slots << 8 | log2 of the table
//! Queue:  QUEUE                                                   number of the ticket
//! Whole:  WHOLE                                                   0
//! ```
//!
//! - H1. Stripes are aligned to 128 bytes, and a slot and the log2 of a table fit into the low bits. No stripe has an
//!   address below 128.

use std::ptr::{self, NonNull};

use crate::front::stripe::{Claimed, SLOTS, Stripe};
use crate::front::table::LOG2_MAX;
use crate::queue::Ticket;

const TAG: usize = align_of::<Stripe>() - 1;
const SLOT_SHIFT: u32 = 4;
const LOG2: usize = (1 << SLOT_SHIFT) - 1;
const _: () = assert!(LOG2_MAX as usize <= LOG2 && SLOTS << SLOT_SHIFT <= TAG);

const FRONT: usize = 1;
const QUEUE: usize = 2;
const WHOLE: usize = 3;

/// Where a guard's range is held, packed.
#[derive(Debug)]
pub struct Held {
    tagged: NonNull<Stripe>,
    data: u64,
}

// SAFETY: the address is only dereferenced as a shared stripe, which is `Sync`.
unsafe impl Send for Held {}
// SAFETY: as above.
unsafe impl Sync for Held {}

/// Where a guard's range is held, unpacked.
#[derive(Debug)]
pub(super) enum HoldLocation {
    /// In a table of 2^`log2` stripes; `slots` has `SLOT_BITS` for each piece.
    Front {
        log2: u8,
        slots: u32,
    },
    Queue(Ticket),
    Whole,
}

impl Held {
    /// The state for a range that is a single piece.
    #[inline(always)]
    pub(super) fn single(stripe: &Stripe, log2: u32, claimed: Claimed) -> Held {
        let tag = (claimed.slot << SLOT_SHIFT | log2) as usize;
        let tagged = NonNull::from(stripe).map_addr(|address| address | tag);
        Held { tagged, data: claimed.control }
    }

    /// The state for a holder in the counter.
    #[inline(always)]
    pub(super) fn whole() -> Held {
        Held::tagged(WHOLE, 0)
    }

    #[inline(always)]
    pub(super) fn is_whole(&self) -> bool {
        self.tagged.addr().get() == WHOLE
    }

    #[inline(always)]
    fn tagged(tag: usize, data: u64) -> Held {
        let tagged = NonNull::new(ptr::without_provenance_mut(tag)).expect("tags are not 0");
        Held { tagged, data }
    }

    fn tag(&self) -> usize {
        self.tagged.addr().get() & TAG
    }

    /// The stripe, if the range is a single piece.
    #[inline(always)]
    pub(super) fn as_single(&self) -> Option<(NonNull<Stripe>, Claimed)> {
        let stripe = self.tagged.as_ptr().map_addr(|address| address & !TAG);
        let slot = (self.tag() >> SLOT_SHIFT) as u32;
        // Null if there is only a tag (H1).
        Some((NonNull::new(stripe)?, Claimed { slot, control: self.data }))
    }

    /// Unpacks the state. The caller still passes back a ticket only once.
    pub(super) fn location(&self) -> HoldLocation {
        if let Some((_, Claimed { slot, .. })) = self.as_single() {
            return HoldLocation::Front { log2: (self.tag() & LOG2) as u8, slots: slot };
        }
        match self.tag() {
            FRONT => HoldLocation::Front { log2: self.data as u8, slots: (self.data >> 8) as u32 },
            QUEUE => HoldLocation::Queue(Ticket::from_number(self.data as u32)),
            _ => HoldLocation::Whole,
        }
    }
}

impl From<HoldLocation> for Held {
    fn from(location: HoldLocation) -> Held {
        match location {
            HoldLocation::Front { log2, slots } => {
                Held::tagged(FRONT, u64::from(slots) << 8 | u64::from(log2))
            }
            HoldLocation::Queue(ticket) => Held::tagged(QUEUE, u64::from(ticket.into_number())),
            HoldLocation::Whole => Held::whole(),
        }
    }
}
