//! The nearest of a million vectors that lie in a file larger than the cache, many reads in flight.
//!
//! `cargo run --release --example vector_search [DIR]`
//!
//! An index of lists (IVF): the file has the vectors of each cluster in a row; the clusters' centres are in memory.
//! A search reads the lists whose centres are nearest. All reads of a batch of searches go into one
//! [`Queue`]: one thread keeps the device busy, and lists that are asked for often are cached.

use std::collections::HashMap;
use std::error::Error;
use std::path::Path;
use std::sync::Arc;

use millpond::queue::{Queue, Request};
use millpond::{Advice, Engine, File, OpenOptions};

const DIMENSIONS: usize = 32;
const VECTOR_BYTES: usize = DIMENSIONS * 4;
const CLUSTERS: usize = 256;
/// Lists that a search reads.
const PROBES: usize = 8;
const IN_FLIGHT: usize = 32;

type Vector = [f32; DIMENSIONS];

struct Index {
    file: Arc<File>,
    centres: Vec<Vector>,
    /// Vectors of a list.
    list: usize,
}

/// A vector of the list that it is in, and how far it is.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Found {
    list: usize,
    place: usize,
    distance: f32,
}

fn distance(one: &Vector, other: &Vector) -> f32 {
    one.iter().zip(other).map(|(one, other)| (one - other) * (one - other)).sum()
}

impl Index {
    /// The lists whose centres are nearest to `query`.
    fn nearest_lists(&self, query: &Vector) -> Vec<usize> {
        let mut lists: Vec<usize> = (0..CLUSTERS).collect();
        let far = |&list: &usize| distance(&self.centres[list], query);
        lists.sort_by(|one, other| far(one).total_cmp(&far(other)));
        lists.truncate(PROBES);
        lists
    }

    /// For each query the nearest vector of the lists that are read for it.
    fn search(&self, queue: &Queue, queries: &[Vector]) -> millpond::Result<Vec<Found>> {
        let mut wanted: HashMap<usize, Vec<usize>> = HashMap::new();
        for (number, query) in queries.iter().enumerate() {
            for list in self.nearest_lists(query) {
                wanted.entry(list).or_default().push(number);
            }
        }
        let none = Found { list: 0, place: 0, distance: f32::INFINITY };
        let mut found = vec![none; queries.len()];
        let list_bytes = self.list * VECTOR_BYTES;
        let mut left: Vec<usize> = wanted.keys().copied().collect();
        let mut spare: Vec<Vec<u8>> = (0..IN_FLIGHT).map(|_| vec![0; list_bytes]).collect();
        let (mut requests, mut in_flight) = (Vec::new(), 0);
        loop {
            while !spare.is_empty()
                && let Some(list) = left.pop()
            {
                let memory = spare.pop().expect("looked at above");
                let read = Request::read(&self.file, memory, (list * list_bytes) as u64);
                requests.push(read.user_data(list as u64));
            }
            if in_flight + requests.len() == 0 {
                return Ok(found);
            }
            in_flight += requests.len();
            let (ended, rest) = queue.submit_and_wait(requests, 1, IN_FLIGHT, None)?;
            in_flight -= rest.len();
            requests = rest;
            for read in ended {
                in_flight -= 1;
                let list = read.user_data() as usize;
                let (result, memory) = read.into_parts();
                assert_eq!(result?, list_bytes, "the file ends early");
                for (place, bytes) in memory.chunks_exact(VECTOR_BYTES).enumerate() {
                    let vector = from_bytes(bytes);
                    for &query in &wanted[&list] {
                        let distance = distance(&vector, &queries[query]);
                        if distance < found[query].distance {
                            found[query] = Found { list, place, distance };
                        }
                    }
                }
                spare.push(memory);
            }
        }
    }
}

fn from_bytes(bytes: &[u8]) -> Vector {
    let mut vector = [0.0; DIMENSIONS];
    for (value, bytes) in vector.iter_mut().zip(bytes.chunks_exact(4)) {
        *value = f32::from_le_bytes(bytes.try_into().expect("4 bytes"));
    }
    vector
}

/// Numbers from 0 to 1, the same each time (SplitMix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        ((mixed ^ (mixed >> 27)) >> 40) as f32 / (1 << 24) as f32
    }

    fn near(&mut self, centre: &Vector, spread: f32) -> Vector {
        centre.map(|value| value + (self.next() - 0.5) * spread)
    }
}

fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let dir = std::env::args_os().nth(1).map_or_else(std::env::temp_dir, Into::into);
    run(&dir)
}

pub fn run(dir: &Path) -> Result<(), Box<dyn Error + Send + Sync>> {
    // 16 MiB of vectors, and a quarter of that as cache; with --release a million vectors.
    let list = if cfg!(debug_assertions) { 512 } else { 4096 };
    let path = dir.join(format!("millpond-example-{}.vectors", std::process::id()));
    let mut random = Random(1);
    let centres: Vec<Vector> =
        (0..CLUSTERS).map(|_| random.near(&[0.0; DIMENSIONS], 2.0)).collect();
    let bytes = CLUSTERS * list * VECTOR_BYTES;
    let engine = Engine::builder().cache_bytes(bytes as u64 / 4).build()?;
    let options = OpenOptions::new().read(true).write(true).create(true);
    let file = Arc::new(engine.open(&path, &options)?);
    for (number, centre) in centres.iter().enumerate() {
        let list: Vec<u8> =
            (0..list).flat_map(|_| random.near(centre, 0.5)).flat_map(f32::to_le_bytes).collect();
        file.write_all_at(&list, (number * list.len()) as u64)?;
    }
    file.advise(0, 0, Advice::Random)?;
    let index = Index { file, centres, list };
    let queue = engine.queue(IN_FLIGHT)?;
    // Each query is a vector of the file, moved a little: that is the one to be found.
    let mut expected = Vec::new();
    let mut queries = Vec::new();
    for number in 0..200 {
        let (list, place) = (number * 37 % CLUSTERS, number * 101 % index.list);
        let mut bytes = [0; VECTOR_BYTES];
        index
            .file
            .read_exact_at(&mut bytes, ((list * index.list + place) * VECTOR_BYTES) as u64)?;
        queries.push(random.near(&from_bytes(&bytes), 0.01));
        expected.push((list, place));
    }
    let found = index.search(&queue, &queries)?;
    let right = found.iter().zip(&expected).filter(|(found, at)| (found.list, found.place) == **at);
    let right = right.count();
    let stats = engine.stats();
    println!(
        "{right} of {} nearest vectors found in {} MiB with {} MiB of memory: {} hits, {} fills",
        queries.len(),
        bytes >> 20,
        engine.cache_bytes() >> 20,
        stats.hits,
        stats.fills
    );
    assert_eq!(right, queries.len());
    assert!(stats.memory_bytes <= engine.cache_bytes());
    drop(index);
    std::fs::remove_file(&path)?;
    Ok(())
}
