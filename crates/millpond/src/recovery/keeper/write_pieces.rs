//! Splits the pages to write into pieces that are contiguous in the file and in a frame.

use std::io;
use std::ops::Range;

use crate::memory::try_with_capacity;
use crate::recovery::keeper::client_memory::Memory;
use crate::recovery::keeper::orphaned_pages::DirtyPage;
use crate::recovery::keeper::target::BUFFER_BYTES;
use crate::recovery::layout::Layout;
use crate::units::{PAGE_BYTES_MAX, UNIT_SHIFT};

/// Bytes to write: at `offset` of the file, from `from` of the mapping.
#[derive(Clone)]
pub(super) struct Piece {
    pub(super) offset: u64,
    pub(super) from: u64,
    pub(super) len: usize,
}

/// The number of pages that the pieces lie in; they are in order.
pub(super) fn count_pages(pieces: &[Piece], page_shift: u32) -> u64 {
    let page = |piece: &Piece| piece.offset >> page_shift;
    pieces.chunk_by(|one, next| page(one) == page(next)).count() as u64
}

/// Selects the parts of pages to write (replay.RP2).
pub(super) struct Clip {
    pub(super) size: u64,
    pub(super) hole: Range<u64>,
}

impl Clip {
    /// The parts of the pages to write, in the file's order; and whether some pages are invalid: beyond a
    /// file's maximum, or with frames outside the mapping. ENOMEM where the heap has no room for the list.
    pub(super) fn pieces(
        &self,
        pages: &[DirtyPage],
        page_shift: u32,
        layout: Layout,
    ) -> io::Result<(Vec<Piece>, bool)> {
        let page_bytes = 1u64 << page_shift;
        let units = (page_bytes >> UNIT_SHIFT) as u32;
        // One page may have a part on each side of the hole.
        let (mut pieces, mut strange) = (try_with_capacity(pages.len() + 1)?, false);
        for dirty in pages {
            let within = dirty.page.0.checked_mul(page_bytes).filter(|&at| at <= i64::MAX as u64);
            let fits = dirty.frame.checked_add(units).is_some_and(|end| end <= layout.units);
            let (Some(start), true) = (within, fits) else {
                strange = true;
                continue;
            };
            let frame_at = layout.frames_at() as u64 + (u64::from(dirty.frame) << UNIT_SHIFT);
            pieces.extend(self.page(start, start + page_bytes, frame_at));
        }
        Ok((pieces, strange))
    }

    /// The parts to write of the page from `start` to `end`, whose frame lies at `frame_at`.
    fn page(
        &self,
        start: u64,
        end: u64,
        frame_at: u64,
    ) -> impl Iterator<Item = Piece> + Clone + use<> {
        let end = end.min(self.size);
        let hole = &self.hole;
        let parts = [
            start..if hole.is_empty() { end } else { end.min(hole.start) },
            if hole.is_empty() { end } else { start.max(hole.end) }..end,
        ];
        parts.into_iter().filter(|part| !part.is_empty()).map(move |part| Piece {
            offset: part.start,
            from: frame_at + (part.start - start),
            len: (part.end - part.start) as usize,
        })
    }
}

/// Bytes that are contiguous in the file.
pub(super) struct Batch {
    pub(super) at: u64,
    pub(super) bytes: Vec<u8>,
}

impl Batch {
    /// A batch with room for [`BUFFER_BYTES`], or for a single page if memory is short.
    pub(super) fn new() -> Batch {
        let mut bytes = Vec::new();
        if bytes.try_reserve_exact(BUFFER_BYTES).is_err() {
            bytes.reserve_exact(PAGE_BYTES_MAX as usize);
        }
        Batch { at: 0, bytes }
    }

    pub(super) fn takes(&self, piece: &Piece) -> bool {
        let len = self.bytes.len();
        let has_room = len + piece.len <= self.bytes.capacity();
        len == 0 || (self.at + len as u64 == piece.offset && has_room)
    }

    pub(super) fn take(&mut self, piece: &Piece, memory: &Memory) -> io::Result<()> {
        let from = self.bytes.len();
        if from == 0 {
            self.at = piece.offset;
        }
        self.bytes.resize(from + piece.len, 0);
        let read = memory.read(&mut self.bytes[from..], piece.from);
        if read.is_err() {
            self.bytes.truncate(from);
        }
        read
    }
}
