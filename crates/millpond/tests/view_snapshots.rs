//! A view keeps its bytes beside each change of the file.

mod common;

use std::io::IoSlice;
use std::time::Duration;

use millpond::{Advice, BackendChoice, Backing, File, WriteMode};

use common::{cache_for, engine, read_write, temp_dir, within};

const PAGE: usize = 4096;
const PAGES: usize = 5;
/// The last page is not full.
const LEN: usize = PAGES * PAGE - 1000;

/// A change of the file, and the same change of its expected bytes.
struct Change {
    name: &'static str,
    make: fn(&File),
    expect: fn(&mut Vec<u8>),
}

const CHANGES: [Change; 12] = [
    Change {
        name: "a write of one page",
        make: |file| file.write_all_at(&[1; PAGE], 0).unwrap(),
        expect: |bytes| bytes[..PAGE].fill(1),
    },
    Change {
        name: "a write of a part of a page",
        make: |file| file.write_all_at(&[2; 100], 50).unwrap(),
        expect: |bytes| bytes[50..150].fill(2),
    },
    Change {
        name: "a write of several pages",
        make: |file| file.write_all_at(&[3; 3 * PAGE], 1).unwrap(),
        expect: |bytes| bytes[1..][..3 * PAGE].fill(3),
    },
    Change {
        name: "a write of several segments",
        make: |file| {
            let all = [IoSlice::new(&[4; PAGE]), IoSlice::new(&[5; 2 * PAGE])];
            assert_eq!(file.write_vectored_at(&all, 0).unwrap(), 3 * PAGE);
        },
        expect: |bytes| {
            bytes[..PAGE].fill(4);
            bytes[PAGE..3 * PAGE].fill(5);
        },
    },
    Change {
        name: "a durable write",
        make: |file| assert_eq!(file.write_at_dsync(&[6; 2 * PAGE], 0).unwrap(), 2 * PAGE),
        expect: |bytes| bytes[..2 * PAGE].fill(6),
    },
    Change {
        name: "an append to the last page",
        make: |file| assert_eq!(file.append(&[7; 100]).unwrap(), LEN as u64),
        expect: |bytes| bytes.extend([7; 100]),
    },
    Change {
        name: "a write that lengthens the file",
        make: |file| file.write_all_at(&[8; 2 * PAGE], (PAGES * PAGE) as u64 - 2000).unwrap(),
        expect: |bytes| {
            bytes.resize(PAGES * PAGE - 2000, 0);
            bytes.extend([8; 2 * PAGE]);
        },
    },
    Change {
        name: "a cut inside a page",
        make: |file| file.truncate(PAGE as u64 + 10).unwrap(),
        expect: |bytes| bytes.truncate(PAGE + 10),
    },
    Change {
        name: "a cut inside a page, and a longer file",
        make: |file| {
            file.truncate(PAGE as u64 + 10).unwrap();
            file.truncate(LEN as u64).unwrap();
        },
        expect: |bytes| bytes[PAGE + 10..].fill(0),
    },
    Change {
        name: "a hole over parts of pages",
        make: |file| file.punch_hole(100, 2 * PAGE as u64).unwrap(),
        expect: |bytes| bytes[100..][..2 * PAGE].fill(0),
    },
    Change {
        name: "zeros over parts of pages",
        make: |file| file.zero_range(100, 2 * PAGE as u64).unwrap(),
        expect: |bytes| bytes[100..][..2 * PAGE].fill(0),
    },
    Change {
        name: "pages that leave the cache, are read again and written",
        make: |file| {
            file.sync_all().unwrap();
            file.advise(0, 0, Advice::DontNeed).unwrap();
            file.read_exact_at(&mut [0; 3 * PAGE], 0).unwrap();
            file.write_all_at(&[9; 3 * PAGE], 0).unwrap();
        },
        expect: |bytes| bytes[..3 * PAGE].fill(9),
    },
];

/// Goal: no change of a file shows in a view of before.
/// Method: a view of each page, a change, and then the bytes of the views and of the file. Pages are clean or dirty
/// when the views are made.
#[test]
fn a_view_keeps_its_bytes() {
    within(Duration::from_secs(60), "changes beside views", || {
        for (mode, backing) in [
            (WriteMode::Back, Backing::Buffered),
            (WriteMode::Through, Backing::Buffered),
            (WriteMode::Through, Backing::Mapped),
        ] {
            for is_written in [false, true] {
                CHANGES.iter().for_each(|change| beside_views(change, mode, backing, is_written));
            }
        }
    });
}

fn beside_views(change: &Change, mode: WriteMode, backing: Backing, is_written: bool) {
    let case = format!("{}, {mode:?}, {backing:?}, written {is_written}", change.name);
    let dir = temp_dir();
    let path = dir.path().join("file");
    let mut bytes: Vec<u8> = (0..LEN).map(|at| (at % 251) as u8 | 0x80).collect();
    std::fs::write(&path, &bytes).unwrap();
    let engine = engine(cache_for(64, PAGE as u64), BackendChoice::Threads);
    let file = engine.open(&path, &read_write().write_mode(mode).backing(backing)).unwrap();
    if is_written {
        bytes.iter_mut().for_each(|byte| *byte ^= 0x55);
        file.write_all_at(&bytes, 0).unwrap();
    }
    let views: Vec<_> =
        (0..PAGES).map(|page| file.view((page * PAGE) as u64, PAGE).expect("a view")).collect();
    let check = |when: &str| {
        for (view, expected) in views.iter().zip(bytes.chunks(PAGE)) {
            assert!(**view == *expected, "{case}: a view has other bytes {when}");
        }
    };
    check("before the change");
    (change.make)(&file);
    check("after the change");
    let mut expected = bytes.clone();
    (change.expect)(&mut expected);
    let mut read = vec![0; expected.len() + 1];
    let len = file.read_at(&mut read, 0).unwrap();
    assert!(read[..len] == expected[..], "{case}: the file has other bytes");
    file.sync_all().unwrap();
    check("after the sync");
    drop(views);
    assert!(std::fs::read(&path).unwrap() == expected, "{case}: the back end has other bytes");
}
