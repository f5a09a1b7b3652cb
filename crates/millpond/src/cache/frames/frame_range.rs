//! The range of addresses that frames lie in, as a reader of cached bytes needs it.
//!
//! An engine has one range, and each process that reads its shared cache maps the same memory as another range (see
//! `shared`). An index means the same frame in all of them.
//!
//! Locks: none.

use crate::units::{FrameIndex, UNIT_SHIFT};

/// The first frame's address, and the number of units that follow. The memory is readable for as long as the value is
/// in use, and so are the 64 KiB behind it: a late reader may take the last unit for a page of the largest class.
pub(crate) struct FrameRange {
    pub(in crate::cache) base: *mut u8,
    pub(in crate::cache) units: u32,
}

impl FrameRange {
    /// # Safety
    ///
    /// The memory is readable while the value is in use, `base` is aligned to a chunk, and no address in the range is
    /// written except through atomics, by owners of a frame, or by another process.
    pub(crate) unsafe fn new(base: *mut u8, units: u32) -> FrameRange {
        FrameRange { base, units }
    }

    /// The first byte of `frame`. `None`: no frame has this index (a late reader can see any
    /// value).
    #[inline]
    pub(crate) fn address(&self, frame: FrameIndex) -> Option<*mut u8> {
        // SAFETY: the offset lies within the reservation.
        (frame.0 < self.units).then(|| unsafe { self.base.add((frame.0 as usize) << UNIT_SHIFT) })
    }

    /// [`FrameRange::address`] of `frame`, computed ahead from a prediction, which costs nothing if it
    /// is wrong.
    ///
    /// `frame` comes from a page word, which for a random page has to be loaded from memory, and
    /// the copy would have to wait for it. If the prediction is right, this is a branch on the
    /// word, not a use of its value: the processor predicts the branch and copies from the
    /// predicted frame before the word has arrived.
    #[inline]
    pub(crate) fn address_predicted(
        &self,
        frame: FrameIndex,
        predicted: FrameIndex,
    ) -> Option<*mut u8> {
        let Some(predicted_address) = self.address(predicted).map(opaque) else {
            return self.address(frame);
        };
        if frame == predicted { Some(opaque(predicted_address)) } else { self.address(frame) }
    }
}

/// The same address, hidden from the compiler: it cannot derive the address from a value that it
/// was compared with, nor turn the branch around this into a conditional move.
#[inline]
fn opaque(at: *mut u8) -> *mut u8 {
    at.map_addr(|mut address| {
        // SAFETY: no instruction at all.
        unsafe {
            std::arch::asm!("/* {0} */", inout(reg) address, options(nomem, nostack, preserves_flags));
        }
        address
    })
}
