//! Groups: frames that are committed and decommitted together.
//!
//! A system page may be larger than a frame (16 or 64 KiB on AArch64), and `madvise` works on whole
//! system pages: for a smaller range it affects the whole page, or fails. So frames are committed
//! and decommitted in groups: a frame that is no smaller than a system page, or as many frames as
//! fill a system page. All frames of a committed group count against the limit.
//!
//! - **GR1** A group is decommitted only when all of its frames are on the free list. If groups
//!   have several frames, each group has a count of its free frames. Then the free list is doubly
//!   linked, so that frames can be removed from any place.
//! - **GR2** A group whose count became full is added to the list of whole groups, once, until it
//!   is removed to be decommitted. Some of its frames may be in use again by then.
//!
//! Locks: the lock of the class's free frames, which the caller holds.

use std::sync::atomic::AtomicU8;
use std::sync::atomic::Ordering::Relaxed;

use crate::cache::frames::class::Class;
use crate::cache::frames::{Frames, FreeList};
use crate::units::{FrameIndex, UNIT_BYTES};

/// A flag in the count of a group: it is in the list of whole groups.
const LISTED: u8 = 1 << 7;

impl Frames {
    /// How many frames of `class` are committed together.
    pub(in crate::cache) fn group_frames(&self, class: Class) -> u32 {
        (self.system_page_bytes / class.bytes()).max(1) as u32
    }

    /// The number of free frames in the group of `frame`. `None`: a frame is a group.
    fn free_in_group(&self, frame: FrameIndex, class: Class) -> Option<&AtomicU8> {
        let group_units = self.system_page_bytes / UNIT_BYTES;
        (class.bytes() < self.system_page_bytes)
            .then(|| &self.free_in_group[frame.0 as usize / group_units])
    }

    /// The first frame of a group that was just committed. The others are put on the free list.
    pub(in crate::cache) fn open_group(
        &self,
        free: &mut FreeList,
        group: FrameIndex,
        class: Class,
    ) -> FrameIndex {
        for number in (1..self.group_frames(class)).rev() {
            self.link_warm(free, FrameIndex(group.0 + number * class.units()), class);
        }
        group
    }

    /// Puts a committed frame on the free list.
    pub(in crate::cache) fn link_warm(&self, free: &mut FreeList, frame: FrameIndex, class: Class) {
        let meta = self.queue_node(frame);
        meta.next.store(free.warm, Relaxed);
        if let Some(free_in_group) = self.free_in_group(frame, class) {
            meta.previous.store(0, Relaxed);
            if free.warm != 0 {
                self.queue_node(FrameIndex(free.warm)).previous.store(frame.0, Relaxed);
            }
            // Relaxed: under the lock of the class, as everything about the list.
            let mut count = free_in_group.load(Relaxed) + 1;
            if u32::from(count) == self.group_frames(class) {
                let group_units = (self.system_page_bytes / UNIT_BYTES) as u32;
                free.whole.push(frame.0 / group_units * group_units);
                count |= LISTED;
            }
            free_in_group.store(count, Relaxed);
        }
        free.warm = frame.0;
        self.free_frames(class).add_warm(1);
        self.free_frames(class).note_warm();
    }

    /// Takes a frame off the free list. If a frame is a group, it is the first one.
    pub(in crate::cache) fn unlink_warm(
        &self,
        free: &mut FreeList,
        frame: FrameIndex,
        class: Class,
    ) {
        self.free_frames(class).take_warm(1);
        let next = self.queue_node(frame).next.load(Relaxed);
        let Some(free_in_group) = self.free_in_group(frame, class) else {
            free.warm = next;
            return;
        };
        free_in_group.store(free_in_group.load(Relaxed) - 1, Relaxed);
        let previous = self.queue_node(frame).previous.load(Relaxed);
        match previous {
            0 => free.warm = next,
            at => self.queue_node(FrameIndex(at)).next.store(next, Relaxed),
        }
        if next != 0 {
            self.queue_node(FrameIndex(next)).previous.store(previous, Relaxed);
        }
    }

    /// Takes a group whose frames are all free off the free list, to be decommitted.
    pub(in crate::cache) fn take_whole_group(
        &self,
        free: &mut FreeList,
        class: Class,
    ) -> Option<FrameIndex> {
        let frames = self.group_frames(class);
        if frames == 1 {
            let first = (free.warm != 0).then_some(FrameIndex(free.warm))?;
            self.unlink_warm(free, first, class);
            return Some(first);
        }
        loop {
            let group = FrameIndex(free.whole.pop()?);
            let count = self.free_in_group(group, class).expect("of several frames");
            let free_frames = count.load(Relaxed) & !LISTED;
            count.store(free_frames, Relaxed);
            // Some were allocated since.
            if u32::from(free_frames) < frames {
                continue;
            }
            for number in 0..frames {
                self.unlink_warm(free, FrameIndex(group.0 + number * class.units()), class);
            }
            return Some(group);
        }
    }
}
