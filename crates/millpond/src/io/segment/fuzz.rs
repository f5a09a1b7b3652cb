//! A comparison of segment lists and positions in them with a flat model, driven by bytes: for a
//! fuzz target (`fuzz/fuzz_targets/segments.rs`), and for a test with random bytes.

use crate::io::segment::{Misalignment, SegmentIter};
use crate::io::segment_list::RawList;
use crate::io::transfer::{Direction, Transfer};

/// The next number; 0 at the end of the input.
fn take(input: &mut &[u8]) -> u64 {
    match input.split_first() {
        Some((&first, rest)) => {
            *input = rest;
            first.into()
        }
        None => 0,
    }
}

/// The addresses of all bytes, in order. The memory is not accessed.
fn addresses(iter: SegmentIter<'_>) -> Vec<usize> {
    let mut addresses = Vec::new();
    for piece in iter {
        assert!(piece.len() > 0, "an empty piece");
        addresses.extend((0..piece.len()).map(|at| piece.base() as usize + at));
    }
    addresses
}

/// Checks that `found` promises no more than the pieces keep, for all powers of two.
fn check_misalignment(found: Misalignment, iter: SegmentIter<'_>) {
    let (mut base, mut len) = (0, 0);
    for piece in iter {
        base |= piece.base() as usize as u32;
        len |= piece.len() as u32;
    }
    let bits = |word: u32| word.trailing_zeros();
    assert!(bits(found.base) <= bits(base) && bits(found.len) <= bits(len), "{found:?}");
}

/// Builds a list according to `input`, and goes through it.
pub fn segment_lists(mut input: &[u8]) {
    let input = &mut input;
    let unit = [1, 3, 16, 64][take(input) as usize % 4];
    let mut at = 4096;
    let mut iovecs = Vec::new();
    for _ in 0..take(input) % 40 {
        let (skip, len) = (take(input) as usize % 4 * unit, take(input) as usize % 8 * unit);
        let iov_base = std::ptr::without_provenance_mut(at + skip);
        iovecs.push(libc::iovec { iov_base, iov_len: len });
        at += skip + len;
    }
    // SAFETY: the memory is not accessed: only addresses are compared.
    let list = unsafe { RawList::from_iovecs(&iovecs) };
    let flat: Vec<usize> = (iovecs.iter())
        .flat_map(|iovec| (0..iovec.iov_len).map(|at| iovec.iov_base as usize + at))
        .collect();
    assert_eq!(list.total(), flat.len() as u64);
    let mut iter = list.iter();
    let (mut start, mut end) = (0, flat.len());
    while !input.is_empty() {
        let (kind, n) = (take(input), take(input) as usize * unit / 2);
        match kind % 7 {
            0 => {
                let n = n.min(end - start);
                iter.advance(n as u64);
                start += n;
            }
            1 => {
                let n = n.min(start);
                iter.rewind(n as u64);
                start -= n;
            }
            2 => {
                let first = iter.split(n as u64);
                let cut = end.min(start + n);
                check_misalignment(first.misalignment(), first);
                assert_eq!(addresses(first), flat[start..cut]);
                start = cut;
            }
            3 => {
                iter = iter.limited(n as u64);
                end = end.min(start + n);
            }
            4 => {
                let from = n.min(end - start);
                let part = iter.slice(from as u64, take(input));
                let part_end = (start + from + part.left() as usize).min(end);
                assert_eq!(addresses(part), flat[start + from..part_end]);
            }
            5 => {
                let front = iter.front(1 + n % 5);
                let mut taken = Vec::new();
                for piece in front.as_slice() {
                    taken.extend((0..piece.len()).map(|at| piece.base() as usize + at));
                }
                assert!(front.as_slice().len() <= 1 + n % 5);
                assert_eq!(taken.is_empty(), start == end);
                assert_eq!(taken, flat[start..start + taken.len()]);
                assert!(start + taken.len() <= end);
            }
            _ => {
                let mut transfer = Transfer::new(Direction::Read, 7, iter);
                transfer.moved = n.min(end - start) as u64;
                let rest = transfer.rest();
                assert_eq!(rest.offset, 7 + transfer.moved);
                assert_eq!(addresses(rest.segments), flat[start + transfer.moved as usize..end]);
            }
        }
        check_misalignment(iter.misalignment(), iter);
        assert_eq!(iter.left(), (end - start) as u64);
        assert_eq!(addresses(iter), flat[start..end]);
    }
}
