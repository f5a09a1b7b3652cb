//! Requests and speed of four readers: with and without `millpond serve`, and with and without SlateDB's own cache in each
//! process.

use crate::common::{Done, RequestLog, Requests, Serve, Worker};
use crate::reader::ReadReport;

#[derive(clap::Args)]
pub struct MeasureArgs {
    /// Keys, of about 420 bytes each
    #[arg(long, default_value_t = 200_000)]
    keys: u64,
    /// Reads of each process in each of two rounds
    #[arg(long, default_value_t = 5_000)]
    reads: u64,
    /// Repetitions of each variant
    #[arg(long, default_value_t = 4)]
    turns: usize,
}

const READERS: u64 = 4;
const MEMORY_BYTES: u64 = 512 << 20;

/// A variant: its name, whether it has a server, and whether SlateDB's own cache is off.
const VARIANTS: [(&str, bool, bool); 4] = [
    ("the store", false, true),
    ("SharedStore", true, true),
    ("SlateDB's cache in each process", false, false),
    ("SlateDB's cache over SharedStore", true, false),
];

#[derive(Default)]
struct Results {
    /// Per second, of all processes, by round.
    speeds: [Vec<f64>; 2],
    requests: [Vec<Requests>; 2],
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
    let (_, has_server, uncached) = VARIANTS[variant];
    let server = has_server.then(|| Serve::start(MEMORY_BYTES, &["--freshness", "immutable"]));
    let server = server.transpose()?;
    let socket = server.as_ref().map(|server| server.socket().display().to_string());
    let keys = args.keys.to_string();
    let start = |seed: u64| {
        let seed = seed.to_string();
        let mut arguments = vec!["reader", "--keys", &keys, "--seed", &seed];
        arguments.extend(socket.iter().flat_map(|socket| ["--socket", socket]));
        arguments.extend(uncached.then_some("--uncached"));
        Worker::start(&arguments, &[])
    };
    let mut readers = (0..READERS).map(start).collect::<Done<Vec<_>>>()?;
    for reader in &mut readers {
        reader.answer()?;
    }
    log.take()?;
    for round in 0..2 {
        for reader in &mut readers {
            reader.send(&args.reads.to_string())?;
        }
        let mut speed = 0.0;
        for reader in &mut readers {
            let report: ReadReport = serde_json::from_str(&reader.answer()?)?;
            if has_server && (report.fallbacks > 0 || !report.is_attached) {
                return Err(format!("a reader has bypassed the server: {report:?}").into());
            }
            speed += args.reads as f64 / report.seconds;
        }
        into.speeds[round].push(speed);
        into.requests[round].push(log.take()?);
    }
    Ok(())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

pub fn run(args: &MeasureArgs) -> Done<()> {
    let mut log = RequestLog::from_environment()?;
    load(args.keys)?;
    let mut all: [Results; VARIANTS.len()] = Default::default();
    for turn in 0..args.turns {
        for place in 0..VARIANTS.len() {
            // A B C D, D C B A.
            let variant = if turn % 2 == 0 { place } else { VARIANTS.len() - 1 - place };
            measure(args, variant, &mut log, &mut all[variant])?;
        }
    }
    println!(
        "{READERS} readers, {} random keys of {} each in a round; medians of {} turns\n",
        args.reads, args.keys, args.turns
    );
    println!(
        "| | first round: reads/s | requests for tables | second round: reads/s | requests for tables | range of the second |\n|---|---|---|---|---|---|"
    );
    for ((name, ..), results) in VARIANTS.iter().zip(all) {
        let [first, second] = results.speeds;
        let least = second.iter().copied().fold(f64::MAX, f64::min);
        let most = second.iter().copied().fold(f64::MIN, f64::max);
        let requests = results
            .requests
            .map(|round| median(round.iter().map(|one| one.reads() as f64).collect()));
        println!(
            "| {name} | {:.0} | {:.0} | {:.0} | {:.0} | {least:.0}-{most:.0} |",
            median(first),
            requests[0],
            median(second),
            requests[1]
        );
    }
    Ok(())
}
