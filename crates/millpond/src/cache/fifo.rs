//! What is known about a page that can be evicted, in the metadata of its frame: whose it is, and its
//! place in a FIFO of frames.
//!
//! Locks: all is done under the queues' (see `evict`), but for [`Arrival::note`].

use std::sync::atomic::Ordering::{Relaxed, Release};

use crate::cache::class::Class;
use crate::cache::frame::{CLASS_SHIFT, FrameMeta, Frames};
use crate::cache::table::FileCore;
use crate::units::{FrameIndex, PageIndex};

pub(super) const QUEUE: u32 = 0b11;
pub(super) const PREFETCHED: u32 = 1 << 2;
/// Of a page that is to be put into a queue: see `newcomers`.
pub(super) const NEWCOMER: u32 = 1 << 3;
/// Of a newcomer: write-back keeps it.
pub(super) const KEPT: u32 = 1 << 4;

/// The name of a queue, in the tags of its frames.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum QueueName {
    Young = 1,
    Small = 2,
    Main = 3,
}

/// A FIFO of frames, linked through their metadata.
#[derive(Default)]
pub(super) struct Queue {
    pub(super) head: u32,
    tail: u32,
    pub(super) frames: u64,
    pub(super) bytes: u64,
}

impl Queue {
    pub(super) fn push(&mut self, frames: &Frames, name: QueueName, frame: FrameIndex) {
        let meta = frames.meta(frame);
        meta.tags.store(meta.tags.load(Relaxed) | name as u32, Relaxed);
        meta.next.store(0, Relaxed);
        meta.previous.store(self.tail, Relaxed);
        match self.tail {
            0 => self.head = frame.0,
            tail => frames.meta(FrameIndex(tail)).next.store(frame.0, Relaxed),
        }
        self.tail = frame.0;
        self.frames += 1;
        self.bytes += class_of(meta).bytes() as u64;
    }

    pub(super) fn unlink(&mut self, frames: &Frames, frame: FrameIndex) {
        let meta = frames.meta(frame);
        let (previous, next) = (meta.previous.load(Relaxed), meta.next.load(Relaxed));
        self.link(frames, previous, (next, previous), next);
        self.frames -= 1;
        self.bytes -= class_of(meta).bytes() as u64;
        meta.tags.store(meta.tags.load(Relaxed) & !QUEUE, Relaxed);
    }

    /// Gives the place of `old` to `new`, the fresh frame of the same page.
    pub(super) fn replace(&mut self, frames: &Frames, old: FrameIndex, new: FrameIndex) {
        let (from, to) = (frames.meta(old), frames.meta(new));
        let (previous, next) = (from.previous.load(Relaxed), from.next.load(Relaxed));
        let tags = from.tags.load(Relaxed);
        to.owner.store(from.owner.load(Relaxed), Relaxed);
        to.page.store(from.page.load(Relaxed), Relaxed);
        to.tags.store(tags, Relaxed);
        to.previous.store(previous, Relaxed);
        to.next.store(next, Relaxed);
        self.link(frames, previous, (new.0, new.0), next);
        from.tags.store(tags & !QUEUE, Relaxed);
    }

    /// What comes after `previous`, and before `next`.
    fn link(&mut self, frames: &Frames, previous: u32, (after, before): (u32, u32), next: u32) {
        match previous {
            0 => self.head = after,
            at => frames.meta(FrameIndex(at)).next.store(after, Relaxed),
        }
        match next {
            0 => self.tail = before,
            at => frames.meta(FrameIndex(at)).previous.store(before, Relaxed),
        }
    }
}

/// A page that became READY.
pub(crate) struct Arrival<'a> {
    pub(crate) frame: FrameIndex,
    pub(crate) core: &'a FileCore,
    pub(crate) page: PageIndex,
    pub(crate) prefetched: bool,
    /// By write-back.
    pub(crate) kept: bool,
}

impl Arrival<'_> {
    /// Makes it a newcomer; the class of its frame.
    pub(crate) fn note(&self, frames: &Frames) -> Class {
        let core: *const FileCore = self.core;
        let meta = frames.meta(self.frame);
        meta.owner.store(core.cast_mut().cast(), Relaxed);
        meta.page.store(self.page.0, Relaxed);
        let class = Class::page(self.core.page_shift);
        let prefetched = if self.prefetched { PREFETCHED } else { 0 };
        let kept = if self.kept { KEPT } else { 0 };
        let tags = u32::from(class.tag()) << CLASS_SHIFT | NEWCOMER | prefetched | kept;
        // Release: owner and page are seen with it (newcomers.N2).
        meta.tags.store(tags, Release);
        class
    }
}

/// Has the processor fetch what [`Queue::replace`] will want of the neighbours, so that the
/// lock is not held for it. They may be others by then.
pub(super) fn prefetch(frames: &Frames, frame: FrameIndex) {
    let meta = frames.meta(frame);
    for link in [&meta.previous, &meta.next] {
        let neighbour = FrameIndex(link.load(Relaxed));
        if frames.address(neighbour).is_some() {
            std::hint::black_box(frames.meta(neighbour).tags.load(Relaxed));
        }
    }
}

pub(super) fn class_of(meta: &FrameMeta) -> Class {
    Class::from_tag((meta.tags.load(Relaxed) >> CLASS_SHIFT) as u8)
}

pub(super) fn queue_of(meta: &FrameMeta) -> QueueName {
    match meta.tags.load(Relaxed) & QUEUE {
        1 => QueueName::Young,
        2 => QueueName::Small,
        3 => QueueName::Main,
        _ => unreachable!("the frame is in no queue"),
    }
}
