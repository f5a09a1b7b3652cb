//! FIFO queues of evictable pages, and the metadata in their queue nodes: owner, page and tags.
//!
//! See `queue_node`.
//!
//! Locks: all under the queues' lock (see `evict`), except [`ReadyPage::prepare`].

use std::sync::atomic::Ordering::Relaxed;

use crate::cache::frames::class::Class;
use crate::cache::frames::{CLASS_SHIFT, FrameMeta, Frames};
use crate::cache::table::FileCore;
use crate::units::{FrameIndex, PageIndex};

pub(in crate::cache) const QUEUE: u32 = 0b11;
pub(in crate::cache) const PREFETCHED: u32 = 1 << 2;
/// The page is in an insert batch: see `insert_batch`.
pub(in crate::cache) const BATCHED: u32 = 1 << 3;
/// The page is not linked in the queue of the other tag: it returns there when it becomes evictable
/// (evict.E2).
pub(in crate::cache) const UNQUEUED: u32 = 1 << 4;
/// A read missed and filled the page, and it has not left the small queue (see `admission`).
pub(in crate::cache) const MISSED: u32 = 1 << 5;

/// The name of a queue, in the tags of its nodes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::cache) enum QueueName {
    Window = 1,
    Small = 2,
    Main = 3,
}

/// A FIFO of queue nodes, linked through themselves.
#[derive(Default)]
pub(in crate::cache) struct Fifo {
    pub(in crate::cache) head: u32,
    tail: u32,
    pub(in crate::cache) frames: u64,
    pub(in crate::cache) bytes: u64,
    /// The bytes of UNQUEUED pages, which return to this queue.
    pub(in crate::cache) unqueued_bytes: u64,
}

impl Fifo {
    pub(in crate::cache) fn push(&mut self, frames: &Frames, name: QueueName, node: FrameIndex) {
        let meta = frames.meta(node);
        meta.set_tags(meta.tags() | name as u32);
        meta.next.store(0, Relaxed);
        meta.previous.store(self.tail, Relaxed);
        match self.tail {
            0 => self.head = node.0,
            tail => frames.meta(FrameIndex(tail)).next.store(node.0, Relaxed),
        }
        self.tail = node.0;
        self.frames += 1;
        self.bytes += class_of(meta).bytes() as u64;
    }

    /// Adds a page that is not linked: it is UNQUEUED.
    pub(in crate::cache) fn add_unqueued(&mut self, name: QueueName, meta: &FrameMeta) {
        meta.set_tags(meta.tags() | name as u32 | UNQUEUED);
        self.unqueued_bytes += class_of(meta).bytes() as u64;
    }

    /// Removes a page, whether it is linked or UNQUEUED.
    pub(in crate::cache) fn remove(&mut self, frames: &Frames, node: FrameIndex) {
        let meta = frames.meta(node);
        let tags = meta.tags();
        meta.set_tags(tags & !(QUEUE | UNQUEUED));
        if tags & UNQUEUED != 0 {
            self.unqueued_bytes -= class_of(meta).bytes() as u64;
            return;
        }
        let (previous, next) = (meta.previous.load(Relaxed), meta.next.load(Relaxed));
        match previous {
            0 => self.head = next,
            at => frames.meta(FrameIndex(at)).next.store(next, Relaxed),
        }
        match next {
            0 => self.tail = previous,
            at => frames.meta(FrameIndex(at)).previous.store(previous, Relaxed),
        }
        self.frames -= 1;
        self.bytes -= class_of(meta).bytes() as u64;
    }
}

/// A page that became READY.
pub(crate) struct ReadyPage<'a> {
    pub(crate) frame: FrameIndex,
    pub(crate) core: &'a FileCore,
    pub(crate) page: PageIndex,
    pub(crate) origin: PageOrigin,
}

/// The reason why a page was filled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PageOrigin {
    Missed,
    Prefetched,
    Written,
}

impl PageOrigin {
    fn tags(self) -> u32 {
        match self {
            PageOrigin::Missed => MISSED,
            PageOrigin::Prefetched => PREFETCHED,
            PageOrigin::Written => 0,
        }
    }
}

impl ReadyPage<'_> {
    /// Prepares the queue node for an insert batch. Returns the class of the frame.
    pub(crate) fn prepare(&self, frames: &Frames) -> Class {
        let core: *const FileCore = self.core;
        let meta = frames.queue_node(self.frame);
        meta.owner.store(core.cast_mut().cast(), Relaxed);
        let class = self.core.page_class();
        let tags = u32::from(class.tag()) << CLASS_SHIFT | BATCHED | self.origin.tags();
        meta.describe(self.page, tags);
        class
    }
}

pub(in crate::cache) fn class_of(meta: &FrameMeta) -> Class {
    Class::from_tag((meta.tags() >> CLASS_SHIFT) as u8)
}

pub(in crate::cache) fn queue_of(meta: &FrameMeta) -> QueueName {
    match meta.tags() & QUEUE {
        1 => QueueName::Window,
        2 => QueueName::Small,
        3 => QueueName::Main,
        _ => unreachable!("the node is in no queue"),
    }
}
