//! The stored state of one file on a simulated device, and its state after a power cut.
//!
//! *Durable*: the bytes that a successful sync covered. *Pending*: for each sector that changed since, its
//! later contents, in order. *Image*: the bytes that reads return.
//!
//! ```text
//!   write, set_len -> pending -> sync -> durable
//!                             -> failed sync -> durable, pending or lost, sector by sector
//!   crash: each sector durable or any one of its pending versions; the size durable or any set since
//! ```
//!
//! - **SD1** Sizes change in order, as in a journal: a crash that finds the size of some moment finds every
//!   truncate up to then, and every hole that was punched. Such a version of a sector replaces all older
//!   ones; a failed sync loses none, and no size.
//! - **SD2** Versions of a sector that are never needed separately may be merged: the older one is dropped,
//!   as if the device had overwritten it before storing it. So histories stay short.
//! - **SD3** A sync covers the writes that ended before it began; whether it covers others is undefined.

use std::collections::BTreeMap;
use std::io;

use crate::io::transfer::{Direction, Transfer};
use crate::sim::memory_backend;

pub(crate) const SECTOR_BYTES: usize = 512;
/// The number of versions kept of a sector (SD2).
const VERSIONS_MAX: usize = 6;
/// The number of sizes kept in addition to the durable one.
const SIZES_MAX: usize = 64;

type Sector = [u8; SECTOR_BYTES];

/// The number of a change: later ones have greater numbers.
pub(crate) type Moment = u64;

struct Version {
    /// The sector has had these contents, or later ones, since this moment (SD2).
    moment: Moment,
    /// The moment of the write.
    written: Moment,
    /// Whether a truncate made it (SD1).
    cut: bool,
    bytes: Box<Sector>,
}

pub(crate) struct Disk {
    image: Vec<u8>,
    /// Sectors up to the largest length that was ever durable; zero beyond.
    durable: Vec<u8>,
    durable_len: u64,
    pending: BTreeMap<usize, Vec<Version>>,
    sizes: Vec<(Moment, u64)>,
    now: Moment,
    len_max: u64,
    /// Whether the test needs more than the image.
    kept: bool,
}

impl Disk {
    pub(crate) fn new(bytes: Vec<u8>, kept: bool) -> Disk {
        Disk {
            durable: if kept { bytes.clone() } else { Vec::new() },
            durable_len: bytes.len() as u64,
            len_max: bytes.len() as u64,
            image: bytes,
            pending: BTreeMap::new(),
            sizes: Vec::new(),
            now: 0,
            kept,
        }
    }

    pub(crate) fn image(&self) -> &[u8] {
        &self.image
    }

    pub(crate) fn len(&self) -> u64 {
        self.image.len() as u64
    }

    /// The greatest length that the file ever had.
    pub(crate) fn len_max(&self) -> u64 {
        self.len_max
    }

    pub(crate) fn now(&self) -> Moment {
        self.now
    }

    /// The bytes that a power cut can't lose.
    pub(crate) fn durable(&self) -> Vec<u8> {
        let mut bytes = self.durable.clone();
        bytes.resize(self.durable_len as usize, 0);
        bytes
    }

    /// Moves at most `limit` bytes; they are pending, also for a durable write.
    pub(crate) fn transfer(&mut self, transfer: &Transfer<'_>, limit: usize) -> io::Result<usize> {
        let old_len = self.len();
        let moved = memory_backend::move_bytes(&mut self.image, transfer, limit)?;
        if transfer.direction == Direction::Write && moved > 0 && self.kept {
            self.now += 1;
            let (from, to) = (transfer.offset as usize, transfer.offset as usize + moved);
            for sector in from / SECTOR_BYTES..to.div_ceil(SECTOR_BYTES) {
                self.push(sector, false);
            }
            self.resized(old_len);
        }
        Ok(moved)
    }

    /// The second half of a durable write of `len` bytes, which ended at `moment`: makes its versions
    /// durable, except lost ones.
    pub(crate) fn sync_range(&mut self, moment: Moment, offset: u64, len: usize) {
        let (from, to) = (offset as usize, offset as usize + len);
        self.commit(moment, from / SECTOR_BYTES..to.div_ceil(SECTOR_BYTES));
    }

    pub(crate) fn set_len(&mut self, len: u64) -> io::Result<()> {
        let old_len = self.len();
        memory_backend::set_len(&mut self.image, len)?;
        if self.kept && len != old_len {
            self.now += 1;
            for sector in len as usize / SECTOR_BYTES..(old_len as usize).div_ceil(SECTOR_BYTES) {
                self.push(sector, true);
            }
            self.resized(old_len);
        }
        Ok(())
    }

    /// Makes the bytes of a range zero, up to the end of the file. Like a truncate, a journal keeps it.
    pub(crate) fn clear(&mut self, offset: u64, len: u64) {
        memory_backend::clear(&mut self.image, offset, len);
        let end = offset.saturating_add(len).min(self.len()) as usize;
        let offset = offset as usize;
        if self.kept && offset < end {
            self.now += 1;
            for sector in offset / SECTOR_BYTES..end.div_ceil(SECTOR_BYTES) {
                self.push(sector, true);
            }
            self.note_size();
        }
    }

    fn resized(&mut self, old_len: u64) {
        if self.len() != old_len {
            self.len_max = self.len_max.max(self.len());
            self.note_size();
        }
    }

    /// Records a moment of the journal: the size, and the truncates up to now.
    fn note_size(&mut self) {
        self.sizes.push((self.now, self.len()));
        if self.sizes.len() > SIZES_MAX {
            let (gone, _) = self.sizes.remove(0);
            self.sizes[0].0 = gone;
        }
    }

    /// Records a sector's contents in the image as its newest version.
    fn push(&mut self, sector: usize, cut: bool) {
        let bytes = Box::new(sector_of(&self.image, sector));
        let versions = self.pending.entry(sector).or_default();
        versions.push(Version { moment: self.now, written: self.now, cut, bytes });
        if versions.len() > VERSIONS_MAX {
            let gone = versions.remove(0);
            versions[0].moment = gone.moment;
            versions[0].cut |= gone.cut;
        }
    }

    /// A successful sync: makes all writes that ended up to `moment` durable.
    pub(crate) fn sync(&mut self, moment: Moment) {
        self.commit(moment, 0..usize::MAX);
    }

    /// Makes the sizes up to `moment` durable, and their truncates; and all writes to `sectors` up to
    /// `moment`.
    fn commit(&mut self, moment: Moment, sectors: std::ops::Range<usize>) {
        let (durable, pending) = (&mut self.durable, &mut self.pending);
        pending.retain(|&sector, versions| {
            let covered = versions.iter().rposition(|version| {
                version.moment <= moment && (version.cut || sectors.contains(&sector))
            });
            if let Some(last) = covered {
                store(durable, sector, &versions[last].bytes);
                versions.drain(..=last);
            }
            !versions.is_empty()
        });
        let count = self.sizes.partition_point(|&(when, _)| when <= moment);
        if let Some(&(_, len)) = self.sizes[..count].last() {
            self.durable_len = len;
        }
        self.sizes.drain(..count);
    }

    /// A failed sync: each sector that it should have covered, by SD3, is stored, stays pending, or is
    /// lost. Some of the lost sectors read as old; others read as if they were stored, as from pages that a
    /// kernel marked clean.
    pub(crate) fn fail_sync(&mut self, moment: Moment, mut random: impl FnMut(u64) -> u64) {
        let (durable, image) = (&mut self.durable, &mut self.image);
        self.pending.retain(|&sector, versions| {
            let fate = random(4);
            if fate == 0 || versions.iter().any(|version| version.written > moment) {
                return true;
            }
            let cut = versions.iter().rposition(|version| version.cut);
            let left = if let Some(cut) = cut {
                // SD1: the truncate stays, and the older versions with it.
                versions.truncate(cut + 1);
                *versions[cut].bytes
            } else {
                let chosen = random(versions.len() as u64 + 1) as usize;
                if let Some(chosen) = chosen.checked_sub(1) {
                    store(durable, sector, &versions[chosen].bytes);
                }
                versions.clear();
                sector_of(durable, sector)
            };
            if fate > 1 {
                let from = (sector * SECTOR_BYTES).min(image.len());
                let to = (from + SECTOR_BYTES).min(image.len());
                image[from..to].copy_from_slice(&left[..to - from]);
            }
            !versions.is_empty()
        });
    }

    /// The state after a power cut.
    pub(crate) fn crash(&self, mut random: impl FnMut(u64) -> u64) -> Vec<u8> {
        let chosen = random(self.sizes.len() as u64 + 1) as usize;
        let (moment, len) = match chosen.checked_sub(1) {
            Some(chosen) => self.sizes[chosen],
            None => (0, self.durable_len),
        };
        let mut bytes = self.durable.clone();
        for (&sector, versions) in &self.pending {
            // SD1: no version older than the last stored truncate, and none newer than the next.
            let is_stored = |version: &Version| version.moment <= moment;
            let cut = versions.iter().rposition(|version| version.cut && is_stored(version));
            let next = versions.iter().position(|version| version.cut && !is_stored(version));
            let first = cut.unwrap_or(0);
            let count = next.unwrap_or(versions.len()) - first;
            let or_old = u64::from(cut.is_none());
            let chosen = random(count as u64 + or_old);
            if let Some(chosen) = chosen.checked_sub(or_old) {
                store(&mut bytes, sector, &versions[first + chosen as usize].bytes);
            }
        }
        bytes.resize(len as usize, 0);
        bytes
    }
}

fn sector_of(bytes: &[u8], sector: usize) -> Sector {
    let from = (sector * SECTOR_BYTES).min(bytes.len());
    let to = (from + SECTOR_BYTES).min(bytes.len());
    let mut contents = [0; SECTOR_BYTES];
    contents[..to - from].copy_from_slice(&bytes[from..to]);
    contents
}

fn store(bytes: &mut Vec<u8>, sector: usize, contents: &Sector) {
    let from = sector * SECTOR_BYTES;
    if bytes.len() < from + SECTOR_BYTES {
        bytes.resize(from + SECTOR_BYTES, 0);
    }
    bytes[from..from + SECTOR_BYTES].copy_from_slice(contents);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::segment::Segment;

    fn write(disk: &mut Disk, offset: u64, bytes: &[u8], durable: bool) {
        let mut bytes = bytes.to_vec();
        // SAFETY: memory of `bytes`, which outlives the transfer.
        let segments = [unsafe { Segment::new(bytes.as_mut_ptr(), bytes.len()) }];
        let transfer = Transfer { durable, ..Transfer::new(Direction::Write, offset, &segments) };
        assert_eq!(disk.transfer(&transfer, usize::MAX).unwrap(), bytes.len());
        if durable {
            disk.sync_range(disk.now(), offset, bytes.len());
        }
    }

    fn random(seed: u64) -> impl FnMut(u64) -> u64 {
        let mut state = seed;
        move |below| crate::sim::random::split_mix(&mut state) % below.max(1)
    }

    /// The states after 2,000 crashes.
    fn crashes(disk: &Disk) -> std::collections::BTreeSet<Vec<u8>> {
        (0..2000).map(|seed| disk.crash(random(seed))).collect()
    }

    #[test]
    fn a_crash_keeps_any_version_of_each_sector() {
        let mut disk = Disk::new(vec![1; 2 * SECTOR_BYTES], true);
        write(&mut disk, 0, &[2; 2 * SECTOR_BYTES], false);
        write(&mut disk, 0, &[3; SECTOR_BYTES], false);
        let seen = crashes(&disk);
        for first in 1..=3 {
            for second in 1..=2 {
                assert!(seen.contains(&[[first; SECTOR_BYTES], [second; SECTOR_BYTES]].concat()));
            }
        }
        assert_eq!(seen.len(), 6);
        assert_eq!(disk.durable(), [1; 2 * SECTOR_BYTES]);
        disk.sync(disk.now());
        assert_eq!(crashes(&disk).len(), 1);
        assert_eq!(disk.durable(), disk.image());
    }

    #[test]
    fn a_sync_covers_what_ended_before_it_began() {
        let mut disk = Disk::new(vec![1; 100], true);
        write(&mut disk, 0, &[2; 100], false);
        let began = disk.now();
        write(&mut disk, 50, &[3; 100], false);
        disk.sync(began);
        assert_eq!(disk.durable(), [2; 100]);
        let seen = crashes(&disk);
        assert!(seen.contains(&vec![2; 100]) && seen.contains(disk.image()));
        // The size is on the disk, the bytes are not.
        assert!(seen.contains(&[vec![2; 100], vec![0; 50]].concat()), "{seen:?}");
    }

    #[test]
    fn a_durable_write_makes_its_bytes_and_the_size_durable() {
        let mut disk = Disk::new(Vec::new(), true);
        write(&mut disk, 0, &[1; 2048], false);
        write(&mut disk, 512, &[2; 512], true);
        let seen = crashes(&disk);
        assert!(seen.iter().all(|left| left.len() == 2048 && left[512..1024] == [2; 512]));
        assert_eq!(seen.len(), 8, "three other sectors, there or not");
    }

    #[test]
    fn what_was_cut_does_not_come_back_with_a_later_size() {
        let mut disk = Disk::new(vec![1; 1024], true);
        disk.set_len(100).unwrap();
        disk.set_len(1024).unwrap();
        let cut = [vec![1; 100], vec![0; 924]].concat();
        let allowed = [vec![1; 1024], vec![1; 100], cut.clone()];
        assert_eq!(crashes(&disk), allowed.into());
        write(&mut disk, 600, &[2; 10], false);
        disk.fail_sync(disk.now(), random(1));
        disk.sync(disk.now());
        assert_eq!(disk.durable()[..600], cut[..600]);
        assert_eq!(disk.len_max(), 1024);
    }

    #[test]
    fn what_was_cleared_is_kept_or_not_but_not_lost() {
        let mut disk = Disk::new(vec![1; 1024], true);
        disk.clear(500, 5000);
        let cleared = [vec![1; 500], vec![0; 524]].concat();
        assert_eq!(crashes(&disk), [vec![1; 1024], cleared.clone()].into());
        disk.fail_sync(disk.now(), random(1));
        disk.sync(disk.now());
        assert_eq!(disk.durable(), cleared);
    }

    #[test]
    fn what_a_failed_sync_lost_stays_lost() {
        let (mut lost, mut hidden, mut kept) = (0, 0, 0);
        for seed in 0..200 {
            let mut disk = Disk::new(vec![1; 512], true);
            write(&mut disk, 0, &[2; 512], false);
            disk.fail_sync(disk.now(), random(seed));
            let read = disk.image()[0];
            disk.sync(disk.now());
            match (read, disk.durable()[0]) {
                (1, 1) => lost += 1,
                (2, 1) => hidden += 1,
                (2, 2) => kept += 1,
                other => panic!("{other:?}"),
            }
            // Until it is written again.
            write(&mut disk, 0, &[2; 512], false);
            disk.sync(disk.now());
            assert_eq!(disk.durable(), [2; 512]);
        }
        assert!(lost > 10 && hidden > 10 && kept > 10, "{lost} {hidden} {kept}");
    }

    #[test]
    fn a_failed_sync_spares_what_was_written_after_it_began() {
        for seed in 0..50 {
            let mut disk = Disk::new(vec![1; 512], true);
            let began = disk.now();
            write(&mut disk, 0, &[2; 512], false);
            disk.fail_sync(began, random(seed));
            disk.sync(disk.now());
            assert_eq!(disk.durable(), [2; 512]);
        }
    }

    #[test]
    fn histories_are_short_and_lose_nothing_that_was_synced() {
        let mut disk = Disk::new(Vec::new(), true);
        for round in 0..1000u64 {
            write(&mut disk, round * 16, &[round as u8; 32], false);
            write(&mut disk, 0, &[round as u8; 8], false);
            if round % 100 == 50 {
                let began = disk.now();
                let before = disk.image().to_vec();
                for _ in 0..20 {
                    write(&mut disk, 0, &[round as u8; 8], false);
                }
                disk.sync(began);
                assert_eq!(disk.durable(), before);
            }
        }
        assert!(disk.pending.values().all(|versions| versions.len() <= VERSIONS_MAX));
        assert!(disk.sizes.len() <= SIZES_MAX);
    }
}
