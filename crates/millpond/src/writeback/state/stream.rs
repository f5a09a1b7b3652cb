//! Early write-back of sequential dirty runs, which keeps the device busy and shortens the final
//! sync.
//!
//! A stream consists of pages that consecutive writes dirty, each write beginning where the
//! previous one ended. A stream shorter than an eighth of the dirty limit is not written early, as
//! it may be overwritten.

use crate::units::PageIndex;

/// Pages that writes have dirtied in order.
#[derive(Default)]
pub(crate) struct Stream {
    /// The pages from here to `end` have not been written back yet.
    behind: PageIndex,
    end: PageIndex,
    /// A part of the stream has been written back.
    runs: bool,
}

impl Stream {
    /// Records a write. Returns whether enough pages have accumulated for write-back.
    pub(crate) fn advance(
        &mut self,
        first: PageIndex,
        last: PageIndex,
        least: u64,
        batch: u64,
    ) -> bool {
        if first != self.end && first + 1 != self.end {
            *self = Stream { behind: first, end: first, runs: false };
        }
        // The page in which the previous write ended may have been written back since.
        self.behind = self.behind.min(first);
        self.end = last + 1;
        self.is_due(least, batch)
    }

    pub(crate) fn is_due(&self, least: u64, batch: u64) -> bool {
        self.end - self.behind >= if self.runs { batch } else { least.max(batch) }
    }

    /// Takes the first and the last page to be written back, if there are enough pages.
    pub(crate) fn take(&mut self, least: u64, batch: u64) -> Option<(PageIndex, PageIndex)> {
        self.is_due(least, batch).then(|| {
            self.runs = true;
            let first = std::mem::replace(&mut self.behind, self.end);
            (first, self.end - 1)
        })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Goal: writes in order are a stream, also if they end within pages.
    #[test]
    fn streams_of_any_length_of_writes() {
        for len in [100u64, 4096, 5000, 10_000] {
            let mut stream = Stream::default();
            let (mut taken, mut next) = (PageIndex::FIRST, PageIndex::FIRST);
            for number in 0..1 << 20 {
                let first = PageIndex::of_byte(number * len, 12);
                let last = PageIndex::of_byte((number + 1) * len - 1, 12);
                if last < next && first == last {
                    // A page that is dirty already is not recorded again.
                    continue;
                }
                next = last + 1;
                if stream.advance(first, last, 64, 16)
                    && let Some((first, last)) = stream.take(64, 16)
                {
                    assert!(
                        first <= taken && last >= taken,
                        "{first:?}..={last:?} after {taken:?}"
                    );
                    taken = last + 1;
                }
                if taken.0 > 1000 {
                    break;
                }
            }
            assert!(taken.0 > 1000, "writes of {len} are no stream");
        }
        let mut stream = Stream::default();
        let mut random = 1u64;
        assert!((0..1000).all(|_| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let page = PageIndex(random >> 33);
            !stream.advance(page, page, 64, 16)
        }));
    }
}
