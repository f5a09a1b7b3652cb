//! Requests, speed and memory of four readers: with and without `millpond serve`, and with and without SlateDB's own caches
//! in each process. The first round is that of new processes. Before the second one each process reads all blocks once, if the
//! variant has a cache.

use crate::common::{Done, RequestLog, Requests, Serve, Worker};
use crate::reader::ReadReport;

#[derive(clap::Args)]
pub struct MeasureArgs {
    /// Keys, of about 420 bytes each
    #[arg(long, default_value_t = 50_000)]
    keys: u64,
    /// Reads of each process in each of two rounds
    #[arg(long, default_value_t = 1_500)]
    reads: u64,
    /// The same without a cache
    #[arg(long, default_value_t = 60)]
    uncached_reads: u64,
    /// Repetitions of each variant
    #[arg(long, default_value_t = 4)]
    turns: usize,
}

const READERS: u64 = 4;
const MEMORY_BYTES: u64 = 512 << 20;

/// SlateDB's own cache of a reader.
#[derive(Clone, Copy, PartialEq)]
enum OwnCache {
    None,
    Memory,
    /// Of parts of objects; the kernel caches its files.
    Disk,
}

/// A variant: its name, whether it has a server, and SlateDB's own cache.
const VARIANTS: [(&str, bool, OwnCache); 5] = [
    ("the store alone", false, OwnCache::None),
    ("`SharedStore`", true, OwnCache::None),
    ("SlateDB's cache on disk in each process", false, OwnCache::Disk),
    ("SlateDB's cache in memory in each process", false, OwnCache::Memory),
    ("the same over `SharedStore`", true, OwnCache::Memory),
];

#[derive(Default)]
struct Results {
    /// Per second, of all processes, by round.
    speeds: [Vec<f64>; 2],
    requests: [Vec<Requests>; 2],
    /// Of the readers and the server, after both rounds.
    memory_mib: Vec<f64>,
}

fn load(keys: u64) -> Done<()> {
    let (keys, table_bytes) = (keys.to_string(), (16 << 20).to_string());
    let mut writer =
        Worker::start(&["writer", "--keys", &keys, "--table-bytes", &table_bytes], &[])?;
    writer.answer()?;
    writer.ask("close")?;
    Ok(())
}

fn measure(
    args: &MeasureArgs,
    variant: usize,
    log: &mut RequestLog,
    into: &mut Results,
) -> Done<()> {
    let (_, has_server, own_cache) = VARIANTS[variant];
    let has_cache = has_server || own_cache != OwnCache::None;
    let reads = if has_cache { args.reads } else { args.uncached_reads };
    let server = has_server.then(|| Serve::start(MEMORY_BYTES, &["--freshness", "immutable"]));
    let server = server.transpose()?;
    let socket = server.as_ref().map(|server| server.socket().display().to_string());
    let keys = args.keys.to_string();
    let disk = tempfile::tempdir()?;
    let start = |seed: u64| {
        let dir = disk.path().join(seed.to_string()).display().to_string();
        let seed = seed.to_string();
        let mut arguments = vec!["reader", "--keys", &keys, "--seed", &seed];
        arguments.extend(socket.iter().flat_map(|socket| ["--socket", socket]));
        if own_cache != OwnCache::Memory {
            arguments.push("--uncached");
        }
        if own_cache == OwnCache::Disk {
            arguments.extend(["--disk-cache", &dir]);
        }
        Worker::start(&arguments, &[])
    };
    let mut readers = (0..READERS).map(start).collect::<Done<Vec<_>>>()?;
    for reader in &mut readers {
        reader.answer()?;
    }
    log.take()?;
    for round in 0..2 {
        if round == 1 && has_cache {
            for reader in &mut readers {
                reader.send("blocks")?;
            }
            for reader in &mut readers {
                reader.answer()?;
            }
            log.take()?;
        }
        for reader in &mut readers {
            reader.send(&reads.to_string())?;
        }
        let mut speed = 0.0;
        for reader in &mut readers {
            let report: ReadReport = serde_json::from_str(&reader.answer()?)?;
            if has_server && (report.fallbacks > 0 || !report.is_attached) {
                return Err(format!("a reader has bypassed the server: {report:?}").into());
            }
            speed += reads as f64 / report.seconds;
        }
        into.speeds[round].push(speed);
        into.requests[round].push(log.take()?);
    }
    let server = server.as_ref().map(Serve::proportional_mib);
    let all = readers.iter().map(Worker::proportional_mib).chain(server);
    into.memory_mib.push(all.sum::<Done<f64>>()?);
    Ok(())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let (low, high) = ((values.len() - 1) / 2, values.len() / 2);
    (values[low] + values[high]) / 2.0
}

/// The median, and the least and the largest value in parentheses.
fn with_range(values: Vec<f64>) -> String {
    let least = values.iter().copied().fold(f64::MAX, f64::min);
    let most = values.iter().copied().fold(f64::MIN, f64::max);
    format!("{:.0} ({least:.0} to {most:.0})", median(values))
}

pub fn run(args: &MeasureArgs) -> Done<()> {
    let mut log = RequestLog::from_environment()?;
    load(args.keys)?;
    let mut all: [Results; VARIANTS.len()] = Default::default();
    for turn in 0..args.turns {
        for place in 0..VARIANTS.len() {
            // A B C D E, E D C B A.
            let variant = if turn % 2 == 0 { place } else { VARIANTS.len() - 1 - place };
            measure(args, variant, &mut log, &mut all[variant])?;
            eprintln!("turn {turn}: {}", VARIANTS[variant].0);
        }
    }
    println!(
        "{READERS} readers, {} random keys of {} each in a round, {} without a cache; medians of {} turns\n",
        args.reads, args.keys, args.uncached_reads, args.turns
    );
    println!(
        "| | first round: reads/s | requests | second round: reads/s | requests | memory, MiB |"
    );
    println!("|---|---|---|---|---|---|");
    for ((name, ..), results) in VARIANTS.iter().zip(all) {
        let [first, second] = results.speeds.map(with_range);
        let of_round = |round: Vec<Requests>| {
            median(round.iter().map(|requests| requests.reads() as f64).collect())
        };
        let requests = results.requests.map(of_round);
        println!(
            "| {name} | {first} | {:.0} | {second} | {:.0} | {:.0} |",
            requests[0],
            requests[1],
            median(results.memory_mib)
        );
    }
    Ok(())
}
