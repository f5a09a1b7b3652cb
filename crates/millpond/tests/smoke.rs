//! Written bytes are read back, through every back end and page size.

mod common;

use millpond::sim::SimOptions;
use millpond::{BackendChoice, Backing, Engine, OpenOptions};

#[test]
fn written_bytes_are_read_back() {
    let dir = common::temp_dir();
    let mut back_ends = vec![
        BackendChoice::Auto,
        BackendChoice::Threads,
        BackendChoice::Memory,
        BackendChoice::Sim(SimOptions::new(1).short_per_mille(300)),
    ];
    if common::has_uring() {
        back_ends.push(BackendChoice::Uring);
    }
    for (number, backend) in back_ends.into_iter().enumerate() {
        for backing in [Backing::Buffered, Backing::Mapped, Backing::Direct, Backing::DirectInPlace]
        {
            for page_bytes in [4096, 16384, 65536] {
                let path = dir.path().join(format!("{number}-{backing:?}-{page_bytes}"));
                let engine = Engine::builder()
                    .cache_bytes(1 << 20)
                    .backend(backend.clone())
                    .build()
                    .unwrap();
                let options = OpenOptions::new()
                    .read(true)
                    .write(true)
                    .create(true)
                    .backing(backing)
                    .page_bytes(page_bytes);
                let file = engine.open(&path, &options).unwrap();
                let bytes: Vec<u8> = (0..3_000_000u32).map(|i| (i * 7 + i / 251) as u8).collect();
                file.write_all_at(&bytes[..1000], 0).unwrap();
                file.write_all_at(&bytes[1000..], 1000).unwrap();
                let mut back = vec![0; bytes.len() + 10];
                for _ in 0..2 {
                    assert_eq!(file.read_at(&mut back, 0).unwrap(), bytes.len());
                    assert!(back[..bytes.len()] == bytes);
                }
                for at in (0..bytes.len()).step_by(777) {
                    let n = file.read_at(&mut back[..777], at as u64).unwrap();
                    assert_eq!(back[..n], bytes[at..(at + 777).min(bytes.len())]);
                }
                file.write_at(b"xyz", 4095).unwrap();
                assert_eq!(&*file.view(4095, 1).unwrap(), b"x");
                file.read_at(&mut back[..5], 4094).unwrap();
                assert_eq!(&back[1..4], b"xyz");
                file.truncate(4097).unwrap();
                assert_eq!(file.read_at(&mut back[..5], 4094).unwrap(), 3);
                file.truncate(10000).unwrap();
                assert_eq!(file.read_at(&mut back[..50], 4094).unwrap(), 50);
                assert_eq!(&back[1..6], b"xy\0\0\0");
                println!("{:?}", engine.stats());
            }
        }
    }
}
