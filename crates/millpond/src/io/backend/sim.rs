//! A simulated device: `memory`, made slow, unordered and faulty by a seed.
//!
//! The faults of one file follow from the seed and the order in which its transfers come, so a
//! single-threaded test replays exactly.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::io::backend::memory::MemoryFile;
use crate::io::backend::threads::Pool;
use crate::io::backend::{Alignment, BackingFile, Seek};
use crate::io::request::{BackgroundRead, Transfer};

/// What a simulated device does to the transfers it is given.
#[derive(Debug, Clone)]
pub struct SimOptions {
    seed: u64,
    delay_us_max: u64,
    short_per_mille: u64,
    error_per_mille: u64,
    errors_on: Arc<AtomicBool>,
}

impl SimOptions {
    /// A device without faults; batches are carried out in an order that `seed` decides.
    #[must_use]
    pub fn new(seed: u64) -> SimOptions {
        SimOptions {
            seed,
            delay_us_max: 0,
            short_per_mille: 0,
            error_per_mille: 0,
            errors_on: Arc::new(AtomicBool::new(true)),
        }
    }

    /// Delays each transfer by up to that many microseconds.
    #[must_use]
    pub fn delay_us_max(mut self, delay_us_max: u64) -> SimOptions {
        self.delay_us_max = delay_us_max;
        self
    }

    /// Lets that many of 1,000 transfers move fewer bytes than asked for.
    #[must_use]
    pub fn short_per_mille(mut self, short_per_mille: u64) -> SimOptions {
        self.short_per_mille = short_per_mille;
        self
    }

    /// Lets that many of 1,000 transfers, and of the changes of the file's length and extents, fail
    /// with EIO, after having moved or changed any part of the bytes.
    #[must_use]
    pub fn error_per_mille(mut self, error_per_mille: u64) -> SimOptions {
        self.error_per_mille = error_per_mille;
        self
    }

    /// A switch for the errors, on at first; it works on all engines built from these options.
    #[must_use]
    pub fn errors_switch(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.errors_on)
    }
}

pub(crate) struct SimFile {
    memory: MemoryFile,
    options: SimOptions,
    random: Mutex<u64>,
    pool: Arc<Pool>,
}

impl SimFile {
    pub(crate) fn new(bytes: Vec<u8>, options: &SimOptions, pool: &Arc<Pool>) -> SimFile {
        SimFile {
            memory: MemoryFile::new(bytes, pool),
            options: options.clone(),
            random: Mutex::new(options.seed),
            pool: Arc::clone(pool),
        }
    }

    /// A number below `below`: SplitMix64 (Steele et al., OOPSLA 2014).
    fn random(&self, below: u64) -> u64 {
        let mut state = self.random.lock().expect("no panic under the lock");
        *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = *state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % below.max(1)
    }

    fn delay(&self) {
        if self.options.delay_us_max > 0 {
            let delay_us = self.random(self.options.delay_us_max + 1);
            std::thread::sleep(Duration::from_micros(delay_us));
        }
    }

    fn fails(&self) -> bool {
        self.random(1000) < self.options.error_per_mille && self.options.errors_on.load(Relaxed)
    }

    /// Does something to `len` bytes of the file, or to a part of them before it fails.
    fn act_on(&self, len: u64, act: impl FnOnce(u64) -> io::Result<()>) -> io::Result<()> {
        self.delay();
        if self.fails() {
            act(self.random(len))?;
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        act(len)
    }

    fn try_one(&self, transfer: &Transfer<'_>) -> io::Result<usize> {
        self.delay();
        let total: usize = transfer.segments.iter().map(|segment| segment.len()).sum();
        // Never nothing, unless the file ends: that would mean its end.
        let part = |below: u64| 1 + self.random(below.max(1)) as usize;
        if self.fails() {
            self.memory.transfer(transfer, part(total as u64) - 1)?;
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        let short = self.random(1000) < self.options.short_per_mille;
        let limit = if short { part(total as u64 - total.min(1) as u64) } else { total };
        self.memory.transfer(transfer, limit)
    }
}

impl BackingFile for SimFile {
    fn try_all(&self, batch: &mut [Transfer<'_>]) {
        let mut order: Vec<usize> = (0..batch.len()).collect();
        for last in (1..order.len()).rev() {
            order.swap(last, self.random(last as u64 + 1) as usize);
        }
        for at in order {
            let outcome = self.try_one(&batch[at]);
            batch[at].set(outcome);
        }
    }

    fn start(self: Arc<Self>, read: BackgroundRead) -> Result<(), BackgroundRead> {
        if self.random(1000) < self.options.short_per_mille {
            // A device that has no slot free.
            return Err(read);
        }
        let pool = Arc::clone(&self.pool);
        pool.start(self, read)
    }

    fn attach(&self, fd: OwnedFd, _read: bool, _write: bool) -> io::Result<Option<OwnedFd>> {
        Ok(Some(fd))
    }

    fn len(&self) -> io::Result<u64> {
        self.memory.len()
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        if self.fails() {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        self.memory.set_len(len)
    }

    fn punch(&self, offset: u64, len: u64) -> io::Result<()> {
        self.act_on(len, |part| self.memory.punch(offset, part))
    }

    fn zero(&self, offset: u64, len: u64) -> io::Result<()> {
        self.act_on(len, |part| self.memory.zero(offset, part))
    }

    fn allocate(&self, offset: u64, len: u64, keep_size: bool) -> io::Result<()> {
        self.act_on(len, |part| self.memory.allocate(offset, part, keep_size))
    }

    fn seek(&self, offset: u64, to: Seek) -> io::Result<Option<u64>> {
        if self.fails() {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        self.memory.seek(offset, to)
    }

    fn sync(&self, data_only: bool) -> io::Result<()> {
        self.memory.sync(data_only)
    }

    fn permits(&self, writing: bool) -> bool {
        self.memory.permits(writing)
    }

    fn read_alignment(&self) -> Alignment {
        Alignment::NONE
    }
}
