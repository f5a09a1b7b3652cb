//! Self-describing test data: a reader can check each slot.
//!
//! A file is divided into slots of one size. A slot has a version, 0 at first, when it is all zeros. Its
//! bytes are computed from seed, file, slot and version; the version comes first. Pages of one slot may
//! have different versions only after a kill in the middle of a write.

/// Writes to the kernel are cut at page bounds, if the process is killed.
const PAGE_BYTES: usize = 4096;
const VERSION_BYTES: usize = 8;

/// SplitMix64 (Steele et al., OOPSLA 2014).
#[derive(Debug, Clone)]
pub struct SlotRandom(pub u64);

impl SlotRandom {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, below: usize) -> usize {
        (self.next() % below as u64) as usize
    }

    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

/// The layout of a file of slots.
#[derive(Debug, Clone, Copy)]
pub struct SlotLayout {
    pub name: &'static str,
    pub slots: usize,
    pub slot_bytes: usize,
}

/// Smaller than a page, one page, and across page bounds; together more than the caches of a soak.
pub const SHAPES: [SlotLayout; 3] = [
    SlotLayout { name: "records", slots: 4096, slot_bytes: 512 },
    SlotLayout { name: "pages", slots: 1024, slot_bytes: 4096 },
    SlotLayout { name: "blobs", slots: 300, slot_bytes: 10_000 },
];

impl SlotLayout {
    pub fn offset(&self, slot: usize) -> u64 {
        (slot * self.slot_bytes) as u64
    }

    /// Fills in the bytes of a version.
    pub fn fill(&self, seed: u64, slot: usize, version: u64, bytes: &mut [u8]) {
        if version == 0 {
            return bytes.fill(0);
        }
        let of_file = self.slot_bytes as u64;
        let mut random = SlotRandom(
            seed ^ of_file.rotate_left(48) ^ (slot as u64).rotate_left(24) ^ version.rotate_left(8),
        );
        for part in bytes.chunks_mut(8) {
            part.copy_from_slice(&random.next().to_le_bytes()[..part.len()]);
        }
        bytes[..VERSION_BYTES].copy_from_slice(&version.to_le_bytes());
    }

    /// The version of a slot, if all its bytes are of one version.
    pub fn version(&self, seed: u64, slot: usize, bytes: &[u8]) -> Result<u64, Wrong> {
        let version = u64::from_le_bytes(bytes[..VERSION_BYTES].try_into().expect("8 bytes"));
        let mut right = vec![0; self.slot_bytes];
        self.fill(seed, slot, version, &mut right);
        match bytes.iter().zip(&right).position(|(found, right)| found != right) {
            None => Ok(version),
            Some(at) => Err(Wrong { offset: self.offset(slot) + at as u64, version }),
        }
    }

    /// Whether each page has a version in `versions`, maybe different ones. Returns the first byte of a
    /// page without one.
    pub fn torn(
        &self,
        seed: u64,
        slot: usize,
        versions: std::ops::RangeInclusive<u64>,
        bytes: &[u8],
    ) -> Result<(), Wrong> {
        let mut wrong = vec![true; self.slot_bytes];
        let mut right = vec![0; self.slot_bytes];
        for version in versions {
            self.fill(seed, slot, version, &mut right);
            for (range, is_wrong) in self.pages(slot).zip(&mut wrong) {
                *is_wrong &= bytes[range.clone()] != right[range];
            }
        }
        match self.pages(slot).zip(wrong).find(|(_, is_wrong)| *is_wrong) {
            None => Ok(()),
            Some((range, _)) => {
                Err(Wrong { offset: self.offset(slot) + range.start as u64, version: 0 })
            }
        }
    }

    /// The parts of a slot in each page of the file.
    fn pages(&self, slot: usize) -> impl Iterator<Item = std::ops::Range<usize>> {
        let (begin, len) = (self.offset(slot) as usize, self.slot_bytes);
        let mut at = 0;
        std::iter::from_fn(move || {
            let end = len.min((begin + at) / PAGE_BYTES * PAGE_BYTES + PAGE_BYTES - begin);
            let range = at..end;
            at = end;
            (!range.is_empty()).then_some(range)
        })
    }
}

/// The first byte that belongs to no permitted version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wrong {
    /// Its offset in the file.
    pub offset: u64,
    /// The version in the slot's first bytes.
    pub version: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_told_and_mixtures_found() {
        for shape in SHAPES {
            let mut bytes = vec![1; shape.slot_bytes];
            for version in [0, 1, 77] {
                shape.fill(5, 3, version, &mut bytes);
                assert_eq!(shape.version(5, 3, &bytes), Ok(version));
                assert!(version == 0 || shape.version(5, 4, &bytes).is_err(), "another's bytes");
            }
            let last = shape.slot_bytes - 1;
            bytes[last] ^= 1;
            let wrong = Wrong { offset: shape.offset(3) + last as u64, version: 77 };
            assert_eq!(shape.version(5, 3, &bytes), Err(wrong));
            assert!(shape.torn(5, 3, 76..=77, &bytes).is_err());
        }
    }

    #[test]
    fn pages_of_two_versions_are_torn_and_no_more() {
        let blobs = SHAPES[2];
        let (mut old, mut new) = (vec![0; blobs.slot_bytes], vec![0; blobs.slot_bytes]);
        blobs.fill(5, 1, 7, &mut old);
        blobs.fill(5, 1, 8, &mut new);
        // Slot 1 begins at 10,000: its first part ends with the page, at 12,288.
        let at = 12_288 - 10_000;
        let mut torn = [&old[..at], &new[at..]].concat();
        assert!(blobs.version(5, 1, &torn).is_err());
        assert_eq!(blobs.torn(5, 1, 7..=8, &torn), Ok(()));
        assert!(blobs.torn(5, 1, 8..=8, &torn).is_err());
        torn[at] = old[at];
        torn[at + 1] = old[at + 1];
        torn[at + 2] = !new[at + 2];
        assert_eq!(blobs.torn(5, 1, 7..=8, &torn).unwrap_err().offset, 12_288);
    }
}
