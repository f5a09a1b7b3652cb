//! Tests of the iterator against a flat model: the addresses of all bytes in order.

use proptest::prelude::*;

use super::*;

/// Segments of one block of memory, which is not accessed.
fn segments(lens: &[usize]) -> Vec<Segment<'static>> {
    let mut at = 4096;
    let make = |&len: &usize| {
        at += 16 + len;
        // SAFETY: the memory is not accessed: the tests compare addresses.
        unsafe { Segment::new(std::ptr::without_provenance_mut(at - len), len) }
    };
    lens.iter().map(make).collect()
}

fn addresses(pieces: impl Iterator<Item = Segment<'static>>) -> Vec<usize> {
    pieces.flat_map(|piece| (0..piece.len()).map(move |at| piece.base() as usize + at)).collect()
}

fn leak(segments: Vec<Segment<'static>>) -> &'static [Segment<'static>] {
    segments.leak()
}

#[derive(Debug, Clone)]
enum Step {
    Advance(u64),
    Rewind(u64),
    Split(u64),
    Limit(u64),
    /// Takes the bytes of one call with that many segments, and that many bytes fewer.
    Front(usize, u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0..40u64).prop_map(Step::Advance),
        (0..40u64).prop_map(Step::Rewind),
        (0..60u64).prop_map(Step::Split),
        (0..200u64).prop_map(Step::Limit),
        (1..4usize, 0..20u64).prop_map(|(count, short)| Step::Front(count, short)),
    ]
}

proptest! {
    /// Goal: after any operation on a position, it yields the bytes of the model.
    #[test]
    fn agrees_with_a_flat_model(
        lens in proptest::collection::vec(0..24usize, 0..12),
        steps in proptest::collection::vec(step(), 0..24),
    ) {
        let list = leak(segments(&lens));
        let flat = addresses(list.iter().copied());
        let mut iter = SegmentIter::from(list);
        let (mut start, mut end) = (0, flat.len());
        for step in steps {
            match step {
                Step::Advance(bytes) => {
                    let bytes = bytes.min(iter.left());
                    iter.advance(bytes);
                    start += bytes as usize;
                }
                Step::Rewind(bytes) => {
                    let bytes = bytes.min(start as u64);
                    iter.rewind(bytes);
                    start -= bytes as usize;
                }
                Step::Split(bytes) => {
                    let first = iter.split(bytes);
                    let cut = end.min(start + bytes as usize);
                    prop_assert_eq!(addresses(first), &flat[start..cut]);
                    start = cut;
                }
                Step::Limit(bytes) => {
                    iter = iter.limited(bytes);
                    end = end.min(start + bytes as usize);
                }
                Step::Front(count, short) => {
                    let front = iter.front(count);
                    let front = front.as_slice();
                    prop_assert!(front.len() <= count);
                    let taken = addresses(front.iter().copied());
                    prop_assert_eq!(taken.is_empty(), iter.left() == 0);
                    prop_assert_eq!(&taken[..], &flat[start..start + taken.len()]);
                    let moved = (taken.len() as u64).saturating_sub(short);
                    iter.advance(moved);
                    start += moved as usize;
                }
            }
            prop_assert_eq!(iter.left(), (end - start) as u64);
            prop_assert_eq!(addresses(iter), &flat[start..end]);
        }
    }

    /// Goal: the reported alignment is that of the pieces.
    #[test]
    fn misalignment_is_that_of_the_pieces(
        lens in proptest::collection::vec((1..4usize).prop_map(|blocks| blocks * 512), 1..6),
        from in 0..4u64,
        odd in 0..2u64,
        len in 0..6u64,
    ) {
        let mut at = 0;
        let make = |&len: &usize| {
            at += 8192;
            // SAFETY: as in `segments`.
            unsafe { Segment::new(std::ptr::without_provenance_mut(at), len) }
        };
        let list = leak(lens.iter().map(make).collect());
        let all = SegmentIter::from(list);
        let from = (from * 512 + odd * 7).min(all.left());
        let iter = all.slice(from, len * 512);
        let is_aligned = |misalignment: Misalignment| {
            (misalignment.base | misalignment.len) & 511 == 0
        };
        let pieces: Vec<_> = iter.collect();
        // It may promise less for an empty rest.
        if iter.left() > 0 {
            prop_assert_eq!(
                is_aligned(iter.misalignment()),
                is_aligned(Misalignment::of(&pieces))
            );
        }
    }
}

/// Goal: the checks of the fuzz target run without a fuzzer as well.
#[test]
fn random_input_of_the_fuzz_target() {
    let mut state = 1u64;
    for _ in 0..300 {
        let mut input = [0; 160];
        for byte in &mut input {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            *byte = (state >> 56) as u8;
        }
        fuzz::segment_lists(&input);
    }
}

#[test]
fn many_segments_go_down_as_they_came() {
    let list = leak(segments(&[512; 3000]));
    let mut iter = SegmentIter::from(list);
    for first in (0..3000).step_by(1024) {
        let Front::Many(front) = iter.front(1024) else { panic!("whole segments") };
        assert!(std::ptr::eq(front.as_ptr(), &list[first]), "copied");
        let bytes = front.len() as u64 * 512;
        iter.advance(bytes);
    }
    assert_eq!(iter.left(), 0);
}

#[test]
#[should_panic(expected = "5 bytes of 4")]
fn advancing_too_far_is_refused() {
    SegmentIter::from(leak(segments(&[4]))).advance(5);
}

#[test]
#[should_panic(expected = "before the first")]
fn rewinding_too_far_is_refused() {
    let mut iter = SegmentIter::from(leak(segments(&[4, 4])));
    iter.advance(6);
    iter.rewind(7);
}
