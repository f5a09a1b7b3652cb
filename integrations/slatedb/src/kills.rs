//! Readers and the server are killed beside a writer.

use std::time::Duration;

use crate::common::{Done, Serve, Worker};
use crate::reader::ReadReport;

#[derive(clap::Args)]
pub struct KillsArgs {
    /// Generations that are written, with one kill beside each
    #[arg(long, default_value_t = 60)]
    generations: u64,
    #[arg(long, default_value_t = 20_000)]
    keys: u64,
    /// Reads of each reader beside each generation
    #[arg(long, default_value_t = 300)]
    reads: u64,
}

const READERS: usize = 4;
const MEMORY_BYTES: u64 = 64 << 20;
/// Small, so that tables are written and compacted often.
const TABLE_BYTES: usize = 1 << 20;

struct Run<'a> {
    args: &'a KillsArgs,
    server: Serve,
    writer: Worker,
    readers: Vec<Worker>,
    /// The latest generation that is durable.
    durable: u64,
    started: u64,
}

impl Run<'_> {
    /// Starts a reader. All durable generations are visible to it. `checkpoint`: reads that, and nothing later.
    fn reader(&mut self, checkpoint: Option<&str>) -> Done<Worker> {
        self.started += 1;
        let socket = self.server.socket().display().to_string();
        let (keys, seed) = (self.args.keys.to_string(), self.started.to_string());
        let durable = self.durable.to_string();
        let mut arguments = vec!["reader", "--socket", &socket, "--keys", &keys];
        arguments.extend(["--seed", &seed, "--at-least", &durable]);
        if let Some(checkpoint) = checkpoint {
            arguments.extend(["--checkpoint", checkpoint]);
        }
        // SlateDB's own cache would hide the server's.
        arguments.push("--uncached");
        Worker::start(&arguments, &[])
    }

    /// Kills a reader during its reads, and starts another.
    fn kill_reader(&mut self, at: usize) -> Done<()> {
        self.readers[at].send(&self.args.reads.to_string())?;
        std::thread::sleep(Duration::from_millis(self.started * 13 % 100));
        let mut next = self.reader(None)?;
        std::mem::swap(&mut self.readers[at], &mut next);
        next.kill()?;
        self.readers[at].answer()?;
        Ok(())
    }

    /// Has the readers read, and the writer write the next generation at the same time.
    fn step(&mut self, during: impl FnOnce(&mut Self) -> Done<()>) -> Done<Vec<ReadReport>> {
        let reads = self.args.reads.to_string();
        self.writer.send("write")?;
        for reader in &mut self.readers {
            reader.send(&reads)?;
        }
        during(self)?;
        let reports = self
            .readers
            .iter_mut()
            .map(|reader| -> Done<ReadReport> { Ok(serde_json::from_str(&reader.answer()?)?) });
        let reports = reports.collect::<Done<_>>()?;
        self.durable = self.writer.answer()?.parse()?;
        Ok(reports)
    }

    /// A reader of a checkpoint sees its generation, and no later one.
    fn read_checkpoint(&mut self) -> Done<()> {
        let answer = self.writer.ask("checkpoint")?;
        let (generation, id) = answer.split_once(' ').ok_or("no checkpoint")?;
        self.durable = generation.parse()?;
        let mut pinned = self.reader(Some(id))?;
        pinned.answer()?;
        self.step(|run| {
            pinned.ask(&run.args.reads.to_string())?;
            Ok(())
        })?;
        pinned.ask(&self.args.reads.to_string())?;
        Ok(())
    }
}

/// Reads the store itself: all that was written is there.
fn read_store(args: &KillsArgs, durable: u64) -> Done<()> {
    let (keys, durable) = (args.keys.to_string(), durable.to_string());
    let arguments = ["reader", "--keys", &keys, "--seed", "0", "--at-least", &durable];
    let mut reader = Worker::start(&arguments, &[])?;
    reader.answer()?;
    reader.ask(&keys)?;
    Ok(())
}

pub fn run(args: &KillsArgs) -> Done<()> {
    let server = Serve::start(MEMORY_BYTES, &["--freshness", "immutable"])?;
    let socket = server.socket().display().to_string();
    let (keys, table_bytes) = (args.keys.to_string(), TABLE_BYTES.to_string());
    let mut writer = Worker::start(
        &["writer", "--socket", &socket, "--keys", &keys, "--table-bytes", &table_bytes],
        &[],
    )?;
    writer.answer()?;
    let mut run = Run { args, server, writer, readers: Vec::new(), durable: 0, started: 0 };
    for _ in 0..READERS {
        let mut reader = run.reader(None)?;
        reader.answer()?;
        run.readers.push(reader);
    }
    let (mut killed_readers, mut killed_servers, mut checkpoints) = (0, 0, 0);
    while run.durable < args.generations {
        match run.durable % 4 {
            0 => {
                run.step(|run| run.server.restart())?;
                killed_servers += 1;
            }
            2 => {
                run.read_checkpoint()?;
                checkpoints += 1;
            }
            _ => {
                let at = run.started as usize % READERS;
                run.kill_reader(at)?;
                run.step(|_| Ok(()))?;
                killed_readers += 1;
            }
        }
    }
    // Readers find the last server again.
    for _ in 0..100 {
        let reports = run.step(|_| Ok(()))?;
        if reports.iter().all(|report| report.is_attached) {
            let fallbacks: u64 = reports.iter().map(|report| report.fallbacks).sum();
            println!(
                "{} generations, {killed_readers} readers and {killed_servers} servers killed, {checkpoints} checkpoints read; \
                 {fallbacks} reads of the last readers while no server answered",
                run.durable
            );
            run.writer.ask("close")?;
            return read_store(args, run.durable);
        }
    }
    Err("readers do not find the server after its restart".into())
}
