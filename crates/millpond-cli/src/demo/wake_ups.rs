//! Wake-ups: a thread waits for batches of 32 completions, which arrive at 20,000 a second.
//!
//! The kernel's side is Linux AIO, whose `io_getevents` takes a minimum, too. The figure is how often the
//! waiting thread went to sleep for 100 completions.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::{Duration, Instant};

use millpond::queue::{Queue, Request};
use millpond::{Engine, OpenOptions};
use millpond_bench_peers::{Aio, Usage};
use rustix::fs::OFlags;

use super::scratch::{MIB, Scratch};
use super::slices::compare;
use super::table::Table;
use crate::failure::{Context, Result};

const FILE_BYTES: u64 = MIB;
const BLOCK_BYTES: u32 = 4096;
const BATCH: usize = 32;
const CAPACITY: usize = 256;
const PER_SECOND: u32 = 20_000;
const SLICE: Duration = Duration::from_millis(150);
const ROUNDS: usize = 2;
/// A limit for the waits at the end of a slice.
const TIMEOUT: Duration = Duration::from_millis(20);

pub fn run(scratch: &Scratch, table: &mut Table) -> Result<()> {
    let file = scratch.create(FILE_BYTES, BLOCK_BYTES as usize)?;
    let kernel = file.open(OFlags::empty()).context("opening the file")?;
    let what = "sleeps of a waiter for batches of 32, per 100 completions";
    let aio = match Aio::new(kernel, CAPACITY as u32, BLOCK_BYTES) {
        Ok(aio) => aio,
        Err(error) => {
            table.add_note(format!(
                "{what}: not measured, as the kernel refuses Linux AIO: {error}"
            ));
            return Ok(());
        }
    };
    let engine = Engine::builder().cache_bytes(8 * MIB).build().context("building an engine")?;
    let opened = engine.open(file.path(), &OpenOptions::new().read(true));
    let millpond = Arc::new(opened.context("opening the file in Millpond")?);
    millpond.read_at(&mut vec![0; FILE_BYTES as usize], 0).context("reading the file")?;
    let queue = engine.queue(CAPACITY).context("creating a queue")?;
    let own = QueueSource { queue, file: millpond };
    let compared = compare(
        ROUNDS,
        || slice(&aio).map(|sleeps| [sleeps]),
        || slice(&own).map(|sleeps| [sleeps]),
    )?;
    let [kernel, own] = [compared.kernel[0], compared.millpond[0]];
    table.add_less(what, format!("{kernel:.1}"), format!("{own:.1}"), kernel / own.max(0.1));
    Ok(())
}

/// A source of completions.
trait CompletionSource: Sync {
    /// Submits a read of a cached block; `false` if there is no room.
    fn submit_one(&self, offset: u64) -> io::Result<bool>;

    /// Waits for `min` completions; returns how many arrived within [`TIMEOUT`].
    fn wait(&self, min: usize) -> io::Result<usize>;
}

struct QueueSource {
    queue: Queue,
    file: Arc<millpond::File>,
}

impl CompletionSource for QueueSource {
    fn submit_one(&self, offset: u64) -> io::Result<bool> {
        let request = Request::read(&self.file, vec![0; BLOCK_BYTES as usize], offset);
        Ok(self.queue.submit(request).is_ok())
    }

    fn wait(&self, min: usize) -> io::Result<usize> {
        Ok(self.queue.wait(min, min, Some(TIMEOUT))?.len())
    }
}

impl CompletionSource for Aio {
    fn submit_one(&self, offset: u64) -> io::Result<bool> {
        match self.submit(offset) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn wait(&self, min: usize) -> io::Result<usize> {
        match Aio::wait(self, min, min, TIMEOUT) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(0),
            other => other,
        }
    }
}

/// How often the waiting thread slept for 100 completions.
fn slice(source: &impl CompletionSource) -> io::Result<f64> {
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let waiter = scope.spawn(|| -> io::Result<(u64, usize)> {
            let (before, mut completions) = (Usage::of_thread(), 0);
            while !over.load(Relaxed) {
                completions += source.wait(BATCH)?;
            }
            Ok((Usage::of_thread().since(before).sleeps, completions))
        });
        let submitted = submit_at_rate(source);
        over.store(true, Relaxed);
        let (sleeps, completions) = waiter.join().expect("the waiting thread")?;
        submitted?;
        // The last slice's remainder belongs to no batch.
        while source.wait(1)? > 0 {}
        Ok(100.0 * sleeps as f64 / completions.max(1) as f64)
    })
}

fn submit_at_rate(source: &impl CompletionSource) -> io::Result<()> {
    let (started, gap) = (Instant::now(), Duration::from_secs(1) / PER_SECOND);
    let mut submitted = 0;
    while started.elapsed() < SLICE {
        let block = submitted % (FILE_BYTES as u32 / BLOCK_BYTES);
        if started.elapsed() < gap * submitted {
            // A sleep would make the rate depend on timer slack.
            std::hint::spin_loop();
        } else if source.submit_one(u64::from(block) * u64::from(BLOCK_BYTES))? {
            submitted += 1;
        } else {
            thread::yield_now();
        }
    }
    Ok(())
}
