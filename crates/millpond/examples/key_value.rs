//! A key-value store: a log of records, and where each key's newest one lies, in memory.
//!
//! `cargo run --release --example key_value [DIR]`
//!
//! What it shows: appends that many threads make at once, each at a place of its own ([`File::append`]); reads
//! of cached records without a lock; one sync for many puts; an end that a crash tore, cut off when
//! the log is opened again.

use std::collections::HashMap;
use std::error::Error;
use std::path::Path;
use std::sync::RwLock;

use millpond::{Engine, File, OpenOptions, WriteMode};

/// Lengths of key and value, and the checksum of both.
const HEAD_BYTES: usize = 16;
const KEY_BYTES_MAX: usize = 1 << 16;
const VALUE_BYTES_MAX: usize = 1 << 24;

pub struct Store {
    log: File,
    /// Where the value of a key is, and how long it is.
    places: RwLock<HashMap<Vec<u8>, (u64, usize)>>,
}

impl Store {
    pub fn open(engine: &Engine, path: &Path) -> millpond::Result<Store> {
        let options = OpenOptions::new().read(true).write(true).create(true);
        let log = engine.open(path, &options.write_mode(WriteMode::Back))?;
        let (mut places, mut at) = (HashMap::new(), 0);
        while let Some((key, value_len)) = record(&log, at)? {
            let value_at = at + (HEAD_BYTES + key.len()) as u64;
            places.insert(key, (value_at, value_len));
            at = value_at + value_len as u64;
        }
        // A partial record, left by a crash.
        log.truncate(at)?;
        Ok(Store { log, places: RwLock::new(places) })
    }

    /// Durable after the next [`Store::sync`].
    pub fn put(&self, key: &[u8], value: &[u8]) -> Result<(), Box<dyn Error + Send + Sync>> {
        if key.len() > KEY_BYTES_MAX || value.len() > VALUE_BYTES_MAX {
            return Err("a key or a value that is too long".into());
        }
        let mut record = Vec::with_capacity(HEAD_BYTES + key.len() + value.len());
        record.extend_from_slice(&(key.len() as u32).to_le_bytes());
        record.extend_from_slice(&(value.len() as u32).to_le_bytes());
        record.extend_from_slice(&checksum(key, value).to_le_bytes());
        record.extend_from_slice(key);
        record.extend_from_slice(value);
        // Of two puts of a key at once, the one that comes later in the log is the newer, here as there.
        let value_at = self.log.append(&record)? + (HEAD_BYTES + key.len()) as u64;
        let mut places = self.places.write().unwrap();
        let place = places.entry(key.to_vec()).or_default();
        if value_at > place.0 {
            *place = (value_at, value.len());
        }
        Ok(())
    }

    pub fn get(&self, key: &[u8]) -> millpond::Result<Option<Vec<u8>>> {
        let Some((at, len)) = self.places.read().unwrap().get(key).copied() else {
            return Ok(None);
        };
        let mut value = vec![0; len];
        self.log.read_exact_at(&mut value, at)?;
        Ok(Some(value))
    }

    pub fn sync(&self) -> millpond::Result<()> {
        self.log.sync_data()
    }
}

/// The key and the length of the value of the record at `at`; `None`: there is no whole one.
fn record(log: &File, at: u64) -> millpond::Result<Option<(Vec<u8>, usize)>> {
    let mut head = [0; HEAD_BYTES];
    if log.read_at(&mut head, at)? < HEAD_BYTES {
        return Ok(None);
    }
    let len = |at: usize| u32::from_le_bytes(head[at..at + 4].try_into().unwrap()) as usize;
    let (key_len, value_len) = (len(0), len(4));
    if key_len > KEY_BYTES_MAX || value_len > VALUE_BYTES_MAX {
        return Ok(None);
    }
    let mut key = vec![0; key_len + value_len];
    if log.read_at(&mut key, at + HEAD_BYTES as u64)? < key.len() {
        return Ok(None);
    }
    let value = key.split_off(key_len);
    let is_whole = head[8..] == checksum(&key, &value).to_le_bytes();
    Ok(is_whole.then_some((key, value_len)))
}

/// FNV-1a of 64 bits, with the lengths.
fn checksum(key: &[u8], value: &[u8]) -> u64 {
    let lens = [key.len() as u64, value.len() as u64].map(u64::to_le_bytes).concat();
    let bytes = lens.iter().chain(key).chain(value);
    bytes.fold(0xCBF2_9CE4_8422_2325, |sum, &byte| {
        (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3)
    })
}

fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let dir = std::env::args_os().nth(1).map_or_else(std::env::temp_dir, Into::into);
    run(&dir)
}

pub fn run(dir: &Path) -> Result<(), Box<dyn Error + Send + Sync>> {
    const KEYS: u32 = 5_000;
    const THREADS: u32 = 4;
    let path = dir.join(format!("millpond-example-{}.log", std::process::id()));
    let engine = Engine::builder().cache_bytes(16 << 20).build()?;
    let store = Store::open(&engine, &path)?;
    std::thread::scope(|threads| {
        for thread in 0..THREADS {
            let store = &store;
            threads.spawn(move || {
                for number in (thread..KEYS).step_by(THREADS as usize) {
                    let value = vec![number as u8; 100 + number as usize % 900];
                    store.put(&number.to_le_bytes(), &value).unwrap();
                }
            });
        }
    });
    store.put(b"last", b"torn")?;
    store.sync()?;
    drop(store);
    // A crash that leaves half of the last record.
    let log = std::fs::OpenOptions::new().write(true).open(&path)?;
    log.set_len(log.metadata()?.len() - 2)?;
    let store = Store::open(&engine, &path)?;
    for number in 0..KEYS {
        let value = store.get(&number.to_le_bytes())?.ok_or("a key is gone")?;
        assert_eq!(value, vec![number as u8; 100 + number as usize % 900]);
    }
    assert_eq!(store.get(b"last")?, None, "half of a record");
    let stats = engine.stats();
    println!("{KEYS} values from {}: {} hits, {} misses", path.display(), stats.hits, stats.misses);
    drop(store);
    std::fs::remove_file(&path)?;
    Ok(())
}
