//! Measures how long evictions delay other threads: the cache is full of pages that were read
//! twice. Then one thread reads pages that miss, while another one overwrites cached pages. Prints
//! the time of both, and the processor time of misses, as their wall time on a busy machine depends
//! on the scheduler.
//!
//! `eviction_stalls DIR [CACHE_MIB]...`; the files are sparse and need no space.

use std::error::Error;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use millpond::{Advice, BackendChoice, Engine, File, OpenOptions, WriteMode};

const PAGE: u64 = 4096;
const OVERWRITTEN_PAGES: u64 = 256;
const MISSES: u64 = 100_000;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let dir = arguments.next().ok_or("which directory?")?;
    let mut sizes = arguments.map(|mib| mib.parse()).collect::<Result<Vec<u64>, _>>()?;
    if sizes.is_empty() {
        sizes = vec![256, 1024];
    }
    for mib in sizes {
        measure(Path::new(&dir), mib << 20)?;
    }
    Ok(())
}

fn measure(dir: &Path, cache_bytes: u64) -> Result<(), Box<dyn Error>> {
    let dir = dir.join("eviction-stalls");
    std::fs::create_dir_all(&dir)?;
    // Nothing but the cache takes time.
    let engine = Engine::builder().cache_bytes(cache_bytes).backend(BackendChoice::Null).build()?;
    let open = |name: &str, pages: u64| -> Result<File, Box<dyn Error>> {
        let path = dir.join(name);
        std::fs::File::create(&path)?.set_len(pages * PAGE)?;
        let options = OpenOptions::new().read(true).write(true).write_mode(WriteMode::Through);
        let file = engine.open(path, &options)?;
        file.advise(0, 0, Advice::Random)?;
        Ok(file)
    };
    let pages = cache_bytes / PAGE * 96 / 100;
    let (hot, cold) = (open("hot", pages)?, open("cold", MISSES)?);
    let overwritten = open("overwritten", OVERWRITTEN_PAGES)?;
    for _ in 0..2 {
        for page in 0..OVERWRITTEN_PAGES {
            overwritten.read_at(&mut [0; PAGE as usize], page * PAGE)?;
        }
        for page in 0..pages {
            hot.read_at(&mut [0; PAGE as usize], page * PAGE)?;
        }
    }
    let before = engine.stats();
    let stop = AtomicBool::new(false);
    let (misses, writes) = std::thread::scope(|scope| -> Result<_, Box<dyn Error>> {
        let writer = scope.spawn(|| {
            let mut times = Vec::new();
            for number in 0.. {
                if stop.load(Relaxed) {
                    break;
                }
                let begun = Instant::now();
                let offset = number % OVERWRITTEN_PAGES * PAGE;
                overwritten.write_all_at(&[1; PAGE as usize], offset)?;
                times.push(begun.elapsed());
            }
            Ok::<_, millpond::Error>(times)
        });
        std::thread::sleep(Duration::from_millis(20));
        let (mut times, mut processor_times) = (Vec::new(), Vec::new());
        for page in 0..MISSES {
            let (begun, processor_begun) = (Instant::now(), processor_time());
            cold.read_at(&mut [0; PAGE as usize], page * PAGE)?;
            processor_times.push(processor_time() - processor_begun);
            times.push(begun.elapsed());
        }
        stop.store(true, Relaxed);
        Ok(([times, processor_times], writer.join().expect("no panic")?))
    })?;
    let [misses, misses_processor] = misses;
    let evictions = engine.stats().evictions - before.evictions;
    println!("{} MiB, {evictions} evictions", cache_bytes >> 20);
    let rows = [
        ("misses", misses),
        ("misses, processor's time", misses_processor),
        ("overwrites beside them", writes),
    ];
    for (what, mut times) in rows {
        times.sort();
        let at = |part: f64| times[(times.len() as f64 * part) as usize];
        let longest = &times[times.len() - 3..];
        println!(
            "  {} {what}: p50 {:?}, p99 {:?}, p99.99 {:?}, longest {longest:?}",
            times.len(),
            at(0.5),
            at(0.99),
            at(0.9999)
        );
    }
    std::fs::remove_dir_all(dir)?;
    Ok(())
}

/// That the calling thread has had.
fn processor_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: valid for the write.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
