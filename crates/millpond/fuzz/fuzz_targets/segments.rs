//! Lists of segments, how they are made and split: `cargo +nightly fuzz run segments`.
//!
//! Half of an input makes a list and walks through it, beside a flat model of its addresses. The
//! other half are operations on a file in memory, direct and cached, whose slices are cut in many
//! places, some of them empty; a vector of bytes says what each must show.

#![no_main]

use std::io::{IoSlice, IoSliceMut};
use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;
use millpond::direct::{DirectRequest, SegmentList};
use millpond::{BackendChoice, Engine, File, OpenOptions};

const FILE_BYTES: usize = 64 << 10;

struct Bench {
    engine: Engine,
    cached: File,
    direct: File,
}

fn bench() -> &'static Bench {
    static BENCH: OnceLock<Bench> = OnceLock::new();
    BENCH.get_or_init(|| {
        let engine =
            Engine::builder().cache_bytes(64 << 10).backend(BackendChoice::Memory).build().unwrap();
        let path = std::env::temp_dir().join(format!("millpond-fuzz-{}", std::process::id()));
        let options = OpenOptions::new().read(true).write(true).create(true);
        let cached = engine.open(&path, &options).unwrap();
        let direct = engine.open(&path, &options.direct(true).bounce(true)).unwrap();
        std::fs::remove_file(path).unwrap();
        Bench { engine, cached, direct }
    })
}

/// Where to cut `len` bytes.
fn cuts(len: usize, input: &[u8]) -> Vec<usize> {
    let mut cuts: Vec<usize> = input.iter().map(|&byte| byte as usize * len / 255).collect();
    cuts.extend([0, len]);
    cuts.sort_unstable();
    cuts
}

fn files(input: &[u8]) {
    let Bench { engine, cached, direct } = bench();
    let mut model: Vec<u8> = Vec::new();
    cached.truncate(0).unwrap();
    for (number, step) in input.chunks(16).enumerate() {
        let Some((head, places)) = step.split_at_checked(5) else { break };
        let at = (usize::from(head[1]) << 8 | usize::from(head[2])) % FILE_BYTES;
        let len = (usize::from(head[3]) << 8 | usize::from(head[4])).min(FILE_BYTES - at);
        let cuts = cuts(len, places);
        let mut memory = vec![number as u8 + 1; len];
        match head[0] % 5 {
            kind @ (0 | 1) => {
                memory.iter_mut().enumerate().for_each(|(at, byte)| *byte ^= at as u8);
                let slices: Vec<_> =
                    cuts.windows(2).map(|pair| IoSlice::new(&memory[pair[0]..pair[1]])).collect();
                let file = if head[0] & 8 == 0 { direct } else { cached };
                if kind == 0 {
                    assert_eq!(file.write_vectored_at(&slices, at as u64).unwrap(), len);
                } else {
                    let list = SegmentList::from_io_slices(&slices);
                    assert!(list.slices().all(|slice| !slice.is_empty()));
                    let mut request = Some(DirectRequest::write(direct, list, at as u64));
                    engine.pipeline(2).unwrap().run(|lane| {
                        if let Some((_, outcome)) = lane.into_ended() {
                            assert_eq!(outcome.unwrap(), len);
                        }
                        request.take()
                    });
                }
                if len > 0 {
                    model.resize(model.len().max(at + len), 0);
                    model[at..at + len].copy_from_slice(&memory);
                }
            }
            kind @ (2 | 3) => {
                let mut rest = &mut memory[..];
                let mut slices = Vec::new();
                for pair in cuts.windows(2) {
                    let (piece, after) = rest.split_at_mut(pair[1] - pair[0]);
                    slices.push(IoSliceMut::new(piece));
                    rest = after;
                }
                let file = if head[0] & 8 == 0 { direct } else { cached };
                let mut moved = 0;
                if kind == 2 {
                    moved = file.read_vectored_at(&mut slices, at as u64).unwrap();
                } else {
                    let list = SegmentList::from_io_slices_mut(&mut slices);
                    let mut request = Some(DirectRequest::read(direct, list, at as u64));
                    engine.pipeline(1).unwrap().run(|lane| {
                        moved = lane.into_ended().map_or(moved, |(_, outcome)| outcome.unwrap());
                        request.take()
                    });
                }
                let end = model.len().min(at + len);
                assert_eq!(&memory[..moved], &model[at.min(end)..end]);
            }
            _ => {
                cached.truncate(at as u64).unwrap();
                model.resize(at, 0);
            }
        }
    }
}

fuzz_target!(|input: &[u8]| {
    let Some((&which, input)) = input.split_first() else { return };
    match which % 2 {
        0 => millpond::fuzz_segment_lists(input),
        _ => files(input),
    }
});
