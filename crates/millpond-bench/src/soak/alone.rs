//! Single-threaded loads with a known result: a file whose extents change, and a device that fails.

use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use millpond::sim::SimOptions;
use millpond::{BackendChoice, Backing, Engine, Error, File, OpenOptions, WriteMode};

use super::slots::SlotRandom;
use crate::failure::{Context, FAILED, Failure, Result};

const FILE_BYTES: usize = 1 << 20;
/// The number of operations per round. The next round uses another file, with other options.
const OPERATIONS: usize = 2000;
const CACHES: [u64; 3] = [128 << 10, 512 << 10, 4 << 20];

#[derive(Debug, Clone, clap::Args)]
pub struct Alone {
    #[arg(long)]
    pub data: PathBuf,
    #[arg(long)]
    pub seed: u64,
    #[arg(long, default_value_t = 1000)]
    pub millis: u64,
    /// Run only the round of this seed, as a failure names it
    #[arg(long)]
    pub round: Option<u64>,
}

/// Runs rounds until the time is up. Returns the number of operations.
fn rounds(alone: &Alone, mut round: impl FnMut(u64, &mut SlotRandom) -> Result<()>) -> Result<()> {
    if let Some(seed) = alone.round {
        return round(seed, &mut SlotRandom(seed));
    }
    let mut random = SlotRandom(alone.seed);
    let end = Instant::now() + Duration::from_millis(alone.millis);
    while Instant::now() < end {
        let seed = random.next();
        round(seed, &mut SlotRandom(seed))
            .map_err(|failure| Failure::new(FAILED, format!("seed {seed}: {}", failure.message)))?;
    }
    Ok(())
}

fn mismatch(what: &str, offset: usize) -> Failure {
    Failure::new(FAILED, format!("MISMATCH: {what}, byte {offset}"))
}

/// Fails at the first byte of a part of a file that differs.
fn check_same(what: &str, found: &[u8], right: &[u8], offset: usize) -> Result<()> {
    if found.len() != right.len() {
        let why = format!("{what}: {} bytes, wanted {}", found.len(), right.len());
        return Err(mismatch(&why, offset));
    }
    match found.iter().zip(right).position(|(found, right)| found != right) {
        None => Ok(()),
        Some(at) => Err(mismatch(what, offset + at)),
    }
}

/// Writes, holes, zeros, reserved space and truncates, concurrent with reads of all kinds.
pub fn extents(alone: &Alone) -> Result<()> {
    rounds(alone, |seed, random| {
        let path = alone.data.join(format!("extents-{seed:x}"));
        let outcome = extents_of(&path, random);
        if outcome.is_ok() {
            std::fs::remove_file(&path).context(path.display())?;
        }
        outcome
    })
}

fn extents_of(path: &std::path::Path, random: &mut SlotRandom) -> Result<()> {
    let engine = Engine::builder()
        .cache_bytes(CACHES[random.below(CACHES.len())])
        .build()
        .context("the engine")?;
    let mode = if random.one_in(2) { WriteMode::Back } else { WriteMode::Through };
    let backing = if random.one_in(3) { Backing::Direct } else { Backing::Buffered };
    let options = OpenOptions::new().read(true).write(true).create(true).write_mode(mode);
    let pages = [4096, 16384];
    let options = options.backing(backing).page_bytes(pages[random.below(2)]);
    let file = engine.open(path, &options).context(path.display())?;
    let mut model: Vec<u8> = Vec::new();
    for _ in 0..OPERATIONS {
        let offset = random.below(FILE_BYTES);
        let most = if random.one_in(4) { 100_000 } else { 5000 };
        let len = (1 + random.below(most)).min(FILE_BYTES - offset);
        extent(&file, &mut model, offset, len, random)?;
    }
    file.close().context("close")?;
    let found = std::fs::read(path).context(path.display())?;
    check_same("in the kernel, after the close", &found, &model, 0)
}

fn extent(
    file: &File,
    model: &mut Vec<u8>,
    offset: usize,
    len: usize,
    random: &mut SlotRandom,
) -> Result<()> {
    let (at, bytes) = (offset as u64, len as u64);
    let inside = offset.min(model.len())..(offset + len).min(model.len());
    let grow = |model: &mut Vec<u8>| model.resize(model.len().max(offset + len), 0);
    match random.below(20) {
        0 => {
            file.truncate(at).context("truncate")?;
            model.resize(offset, 0);
        }
        1 => {
            if done(file.punch_hole(at, bytes), "punch")? {
                model[inside].fill(0);
            }
        }
        2 => {
            file.zero_range(at, bytes).context("zero")?;
            model[inside].fill(0);
        }
        3 => {
            if done(file.allocate(at, bytes), "allocate")? {
                grow(model);
            }
        }
        4 => file.sync_data().context("sync")?,
        5 => file.write_back().context("write-back")?,
        6 => {
            let len = file.len().context("length")?;
            if len != model.len() as u64 {
                return Err(mismatch(&format!("length {len}"), model.len()));
            }
        }
        7 => {
            let src: Vec<u8> = std::iter::repeat_n(random.next() as u8, len.min(3000)).collect();
            let place = file.append(&src).context("append")?;
            if place != model.len() as u64 {
                return Err(mismatch(&format!("appended at {place}"), model.len()));
            }
            model.extend(src);
            // Keep the file's length bounded.
            if model.len() > FILE_BYTES {
                file.truncate(FILE_BYTES as u64).context("truncate")?;
                model.truncate(FILE_BYTES);
            }
        }
        8..=12 => {
            let with = random.next();
            let src: Vec<u8> = (0..len).map(|n| (with >> (n % 8 * 8)) as u8).collect();
            file.write_all_at(&src, at).context("write")?;
            grow(model);
            model[offset..offset + len].copy_from_slice(&src);
        }
        _ => {
            let mut dst = vec![0xA5; len];
            let read = file.read_at(&mut dst, at).context("read")?;
            check_same("read", &dst[..read], &model[inside], offset)?;
        }
    }
    Ok(())
}

/// Whether it was done; some file systems do not support it.
fn done(outcome: millpond::Result<()>, what: &str) -> Result<bool> {
    match outcome {
        Err(error) if error.errno() == rustix::io::Errno::OPNOTSUPP.raw_os_error() => Ok(false),
        outcome => outcome.map(|()| true).context(what),
    }
}

/// A simulated device that fails, is slow, and moves fewer bytes than asked. No read returns a wrong byte,
/// and a successful sync has made all writes durable.
pub fn faults(alone: &Alone) -> Result<()> {
    rounds(alone, |seed, random| {
        let path = alone.data.join(format!("faults-{seed:x}"));
        std::fs::write(&path, []).context(path.display())?;
        let outcome = faults_of(&path, seed, random);
        std::fs::remove_file(&path).context(path.display())?;
        outcome
    })
}

const SLOT_BYTES: usize = 3000;
const SLOTS: usize = 200;

fn faults_of(path: &std::path::Path, seed: u64, random: &mut SlotRandom) -> Result<()> {
    let mut options = SimOptions::new(seed).short_per_mille(100);
    if random.one_in(2) {
        options = options.delay_us_max(200);
    }
    if random.one_in(2) {
        options = options.error_per_mille(20);
    }
    if random.one_in(3) {
        options = options.fail_every_kth_write(1 + random.next() % 40, 28); // ENOSPC
    }
    if random.one_in(3) {
        options = options.fail_every_kth_sync(1 + random.next() % 5);
    }
    let (device, errors) = (options.device(), options.errors_switch());
    let engine = Engine::builder()
        .cache_bytes(CACHES[random.below(CACHES.len())])
        .backend(BackendChoice::Sim(options))
        .build()
        .context("the engine")?;
    let mode = if random.one_in(2) { WriteMode::Back } else { WriteMode::Through };
    let options = OpenOptions::new().read(true).write(true).write_mode(mode);
    let file = engine.open(path, &options).context(path.display())?;
    errors.store(false, Relaxed);
    file.truncate((SLOTS * SLOT_BYTES) as u64).context("truncate")?;
    errors.store(true, Relaxed);
    let mut slots = vec![Slot::Is(0); SLOTS];
    // The number of failed syncs, the engine's own included, when a slot was written. After a later
    // failure, an evicted slot may be older, as the next sync reports, until a sync succeeds or the slot is
    // written again.
    let mut written = [0; SLOTS];
    let mut is_lost = false;
    for number in 0..400 {
        let slot = random.below(SLOTS);
        let offset = (slot * SLOT_BYTES) as u64;
        match random.below(10) {
            0 => match file.sync_data() {
                Ok(()) => {
                    durable(&slots, &device.durable())?;
                    written.fill(device.failed_syncs());
                }
                Err(error) => is_lost |= matches!(error, Error::Lost { .. }),
            },
            1..=4 => {
                let byte = number as u8 | 1;
                written[slot] = device.failed_syncs();
                let outcome = file.write_all_at(&[byte; SLOT_BYTES], offset);
                slots[slot] = if outcome.is_ok() { Slot::Is(byte) } else { Slot::Unknown };
            }
            _ => {
                let mut bytes = [0xA5; SLOT_BYTES];
                if file.read_exact_at(&mut bytes, offset).is_ok()
                    && device.failed_syncs() == written[slot]
                    && let Slot::Is(byte) = slots[slot]
                {
                    check_same("read", &bytes, &[byte; SLOT_BYTES], slot * SLOT_BYTES)?;
                }
            }
        }
    }
    // When the device works again, new writes are durable.
    errors.store(false, Relaxed);
    for (slot, known) in slots.iter_mut().enumerate() {
        if is_lost || *known == Slot::Unknown {
            file.write_all_at(&[7; SLOT_BYTES], (slot * SLOT_BYTES) as u64).context("write")?;
            *known = Slot::Is(7);
        }
    }
    match file.sync_data() {
        Ok(()) => durable(&slots, &device.durable())?,
        Err(Error::Lost { .. }) => {}
        // The error of an earlier sync.
        Err(_) if file.sync_data().is_ok() => durable(&slots, &device.durable())?,
        Err(_) => {}
    }
    match device.violations().as_slice() {
        [] => Ok(()),
        [first, ..] => Err(Failure::new(FAILED, format!("MISMATCH: the device says: {first}"))),
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Slot {
    /// All bytes have this value.
    Is(u8),
    /// A write of it failed.
    Unknown,
}

fn durable(slots: &[Slot], found: &[u8]) -> Result<()> {
    for (number, slot) in slots.iter().enumerate() {
        let at = number * SLOT_BYTES;
        let Slot::Is(byte) = slot else { continue };
        let Some(found) = found.get(at..at + SLOT_BYTES) else {
            return Err(mismatch("not durable after a sync", at));
        };
        check_same("not durable after a sync", found, &[*byte; SLOT_BYTES], at)?;
    }
    Ok(())
}
