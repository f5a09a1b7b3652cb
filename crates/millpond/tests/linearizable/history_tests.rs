//! Histories made by hand, which are known to be linearizable or not.

use crate::history::{Call, History, Op, Outcome, TORN, ZERO, stamp};

/// Goal: the checker accepts linearizable histories and rejects all others.
/// Method: each history in a valid form, and with the smallest change that makes it invalid.
#[test]
fn the_checker_knows_good_histories_from_bad_ones() {
    let old = |part| stamp(1, part);
    let new = |part| stamp(2, part);
    let fine = |calls: &[_]| assert!(by_hand(calls).is_none(), "{:?}", by_hand(calls));
    // Not linearizable; `needed` calls are enough to show it.
    let wrong = |calls: &[_], needed: usize| {
        let found = by_hand(calls).expect("a violation");
        let shown: Vec<String> = found.iter().map(ToString::to_string).collect();
        assert_eq!(found.len(), needed, "{shown:#?}");
    };
    let append = |value, at: usize| {
        (Op::Append { len: 1, value }, Outcome::Wrote { at: at * 10, bytes: 10 })
    };

    // During a write a read may see all of it or nothing; a later read does not go back.
    let (put, put_done) = write(1, 2, 2);
    let during = |cells: [&[u16]; 2]| {
        let [first, second] = cells.map(saw);
        [
            (0, 0, 9, put, put_done.clone()),
            (1, 1, 2, read(1, 2), first),
            (1, 3, 4, read(1, 2), second),
            // Not part of the contradiction.
            (2, 5, 6, Op::Len, Outcome::Len(40)),
        ]
    };
    fine(&during([&[old(1), old(2)], &[old(1), old(2)]]));
    fine(&during([&[old(1), old(2)], &[new(0), new(1)]]));
    fine(&during([&[new(0), new(1)], &[new(0), new(1)]]));
    wrong(&during([&[new(0), new(1)], &[old(1), old(2)]]), 3);
    wrong(&during([&[new(0), old(2)], &[new(0), new(1)]]), 2);
    wrong(&during([&[TORN, new(1)], &[new(0), new(1)]]), 2);
    wrong(&during([&[old(2), old(1)], &[new(0), new(1)]]), 1);

    // After the write has returned all reads see it.
    let after =
        |cells: &[u16]| [(0, 0, 1, put, put_done.clone()), (1, 2, 3, read(0, 4), saw(cells))];
    fine(&after(&[old(0), new(0), new(1), old(3)]));
    wrong(&after(&[old(0), old(1), old(2), old(3)]), 2);

    // Two readers of two writers agree on the order of the writes.
    let (put_3, put_3_done) = write(3, 1, 3);
    let two = |seen: [[u16; 2]; 2]| {
        let pair = |seen: [u16; 2]| saw(&seen);
        let [one, other] = seen.map(pair);
        let (put, done) = write(2, 1, 2);
        [
            (0, 0, 9, put, done),
            (1, 1, 10, put_3, put_3_done.clone()),
            (2, 2, 3, read(2, 2), one),
            (3, 4, 5, read(2, 2), other),
        ]
    };
    let three = stamp(3, 0);
    fine(&two([[new(0), old(3)], [new(0), three]]));
    wrong(&two([[new(0), old(3)], [old(2), three]]), 4);

    // No two appends at one offset, no gap, none lost.
    let appends = |one, other, len| {
        let ((first, first_at), (second, second_at)) = (append(2, one), append(3, other));
        [
            (0, 0, 3, first, first_at),
            (1, 1, 2, second, second_at),
            (2, 4, 5, Op::Len, Outcome::Len(len)),
        ]
    };
    fine(&appends(4, 5, 60));
    fine(&appends(5, 4, 60));
    wrong(&appends(4, 4, 60), 2);
    wrong(&appends(5, 6, 60), 1);
    wrong(&appends(4, 5, 50), 2);

    // Bytes that were cut off do not come back when the file grows.
    let regrown = |seen: u16| {
        [
            (0, 0, 1, Op::Truncate { len: 2 }, Outcome::Done),
            (0, 2, 3, Op::Truncate { len: 4 }, Outcome::Done),
            (1, 4, 5, read(1, 3), saw(&[old(1), seen, ZERO])),
        ]
    };
    fine(&regrown(ZERO));
    wrong(&regrown(old(2)), 1);

    // A read at the end of a growing file returns all of the appended bytes or none.
    let growing = |bytes: usize, cells: &[u16]| {
        let seen = Outcome::Read { bytes, cells: cells.to_vec() };
        let (put, done) = write(3, 3, 2);
        [(0, 0, 5, put, done), (1, 1, 2, read(3, 3), seen)]
    };
    fine(&growing(10, &[old(3)]));
    fine(&growing(30, &[new(0), new(1), new(2)]));
    wrong(&growing(20, &[new(0), new(1)]), 2);
    wrong(&growing(10, &[new(0)]), 2);
    wrong(&growing(30, &[old(3), ZERO, ZERO]), 1);

    // Holes: all or nothing, and the length stays.
    let punched = |cells: [u16; 2], len| {
        [
            (0, 0, 9, Op::Clear { at: 2, len: 5 }, Outcome::Done),
            (1, 1, 2, read(2, 2), saw(&cells)),
            (1, 3, 4, Op::Len, Outcome::Len(len)),
        ]
    };
    fine(&punched([ZERO, ZERO], 40));
    fine(&punched([old(2), old(3)], 40));
    wrong(&punched([ZERO, old(3)], 40), 1);
    wrong(&punched([ZERO, ZERO], 70), 1);

    // A failed operation has happened, in part or not at all; once a read has shown which, it
    // stays.
    let failed = |first: [u16; 2], second: [u16; 2]| {
        [
            (0, 0, 1, put, Outcome::Failed),
            (1, 2, 3, read(1, 2), saw(&first)),
            (1, 4, 5, read(1, 2), saw(&second)),
        ]
    };
    fine(&failed([old(1), old(2)], [old(1), old(2)]));
    fine(&failed([new(0), old(2)], [new(0), old(2)]));
    fine(&failed([new(0), TORN], [new(0), TORN]));
    wrong(&failed([old(1), old(2)], [new(0), new(1)]), 3);
    wrong(&failed([new(1), old(2)], [new(0), old(2)]), 2);
    // A failed truncation changes nothing; a failed append may have left a part.
    fine(&[
        (0, 0, 1, Op::Truncate { len: 1 }, Outcome::Failed),
        (0, 2, 3, Op::Append { len: 2, value: 2 }, Outcome::Failed),
        (0, 2, 3, Op::Adopt, Outcome::Done),
        (1, 4, 5, Op::Len, Outcome::Len(47)),
        (1, 6, 7, Op::Append { len: 1, value: 3 }, Outcome::Wrote { at: 47, bytes: 10 }),
        (1, 8, 9, Op::Len, Outcome::Len(57)),
    ]);
    wrong(
        &[
            (0, 0, 1, Op::Truncate { len: 1 }, Outcome::Failed),
            (1, 4, 5, Op::Len, Outcome::Len(10)),
        ],
        1,
    );
}

/// A history on four cells of two pages, whose calls are given as (thread, invoked, returned, ..).
fn by_hand(calls: &[(usize, u64, u64, Op, Outcome)]) -> Option<Vec<Call>> {
    let calls = calls.iter().map(|&(thread, invoked, returned, op, ref outcome)| Call {
        thread,
        invoked,
        returned,
        op,
        outcome: outcome.clone(),
        how: "by hand".into(),
    });
    let initial = (0..4).map(|part| stamp(1, part)).collect();
    History { cell_bytes: 10, initial, calls: calls.collect() }.violation()
}

fn read(at: usize, len: usize) -> Op {
    Op::Read { at, len, limit_bytes: len * 10 }
}

fn saw(cells: &[u16]) -> Outcome {
    Outcome::Read { bytes: cells.len() * 10, cells: cells.to_vec() }
}

fn write(at: usize, len: usize, value: u8) -> (Op, Outcome) {
    (Op::Write { at, len, value }, Outcome::Wrote { at: at * 10, bytes: len * 10 })
}
