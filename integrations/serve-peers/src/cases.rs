//! Requests, memory and wake-ups of several processes with one server.

use std::time::{Duration, Instant};

use crate::measure::{median, with_quartiles};
use crate::process::{Done, Worker, kib, processor_ns, shared_memory_bytes, waits};

const MIB: u64 = 1 << 20;
const CLIENTS: usize = 8;
const DELAY_US: u64 = 3000;

#[derive(Clone, Copy)]
struct Load {
    objects: u64,
    object_bytes: u64,
    delay_us: u64,
}

struct Machine {
    dir: tempfile::TempDir,
    load: Load,
}

impl Machine {
    fn new(objects: u64, object_bytes: u64, delay_us: u64) -> Done<Machine> {
        let load = Load { objects, object_bytes, delay_us };
        Ok(Machine { dir: tempfile::tempdir()?, load })
    }

    fn socket(&self) -> String {
        self.dir.path().join("socket").display().to_string()
    }

    fn server(&self, memory: u64) -> Done<Worker> {
        let Load { object_bytes, delay_us, .. } = self.load;
        Worker::start(&words(&[
            ("serve", &self.socket()),
            ("--memory", &memory.to_string()),
            ("--object-bytes", &object_bytes.to_string()),
            ("--delay-us", &delay_us.to_string()),
        ]))
    }

    /// A reader, with a cache of its own if `memory` is given.
    fn reader(&self, memory: Option<u64>, seed: usize) -> Done<Worker> {
        let Load { objects, object_bytes, delay_us } = self.load;
        let from = match memory {
            Some(memory) => ("--memory", memory.to_string()),
            None => ("--socket", self.socket()),
        };
        let mut arguments = vec!["work".to_owned()];
        arguments.extend([from.0.to_owned(), from.1]);
        arguments.extend(words(&[
            ("--objects", &objects.to_string()),
            ("--object-bytes", &object_bytes.to_string()),
            ("--delay-us", &delay_us.to_string()),
            ("--seed", &(seed + 1).to_string()),
        ]));
        Worker::start(&arguments)
    }

    fn readers(&self, memory: Option<u64>) -> Done<Vec<Worker>> {
        (0..CLIENTS).map(|seed| self.reader(memory, seed)).collect()
    }
}

fn words(pairs: &[(&str, &str)]) -> Vec<String> {
    let split = |(name, value): &(&str, &str)| match *name {
        "serve" => vec!["serve".to_owned(), "--socket".to_owned(), (*value).to_owned()],
        name => vec![name.to_owned(), (*value).to_owned()],
    };
    pairs.iter().flat_map(split).collect()
}

/// Has all readers do the same at once. Returns their times in microseconds.
fn together(readers: &mut [Worker], command: &str) -> Done<Vec<f64>> {
    for reader in &mut *readers {
        reader.send(command)?;
    }
    readers.iter_mut().map(|reader| -> Done<f64> { Ok(reader.answer()?.parse()?) }).collect()
}

fn requests(readers: &mut [Worker]) -> Done<f64> {
    readers.iter_mut().map(|reader| reader.ask("requests")).sum()
}

/// Eight processes with one working set, started together: requests to the store, and memory.
fn one_working_set(rounds: usize) -> Done<()> {
    for (command, name) in [("whole", "whole objects"), ("scan", "reads of 64 KiB, in order")] {
        one_working_set_by(rounds, command, name)?;
    }
    Ok(())
}

fn one_working_set_by(rounds: usize, command: &str, name: &str) -> Done<()> {
    let limit = 128 * MIB;
    let (mut ratios, mut memory, mut tables) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        let machine = Machine::new(60, MIB, DELAY_US)?;
        let one = {
            let mut server = machine.server(limit)?;
            machine.reader(None, 0)?.ask(command)?;
            server.ask("requests")?
        };
        let mut server = machine.server(limit)?;
        let mut readers = machine.readers(None)?;
        together(&mut readers, command)?;
        let all = server.ask("requests")? + requests(&mut readers)?;
        ratios.push(all / one);
        let ids = readers.iter().map(|reader| reader.process.id()).chain([server.process.id()]);
        let ids: Vec<u32> = ids.collect();
        let sum = |file: &str, name: &str| ids.iter().map(|id| kib(*id, file, name)).sum::<u64>();
        memory.push((sum("smaps_rollup", "Pss") as f64) / 1024.0);
        tables.push(sum("status", "VmPTE") as f64 / 1024.0);
    }
    let allowed = limit / MIB + 8 * CLIENTS as u64;
    println!("{CLIENTS} processes, one working set of 60 MiB, started together, {name}:");
    println!(
        "  requests over those of one process: {} (target at most 1.05)",
        with_quartiles(&ratios)
    );
    println!(
        "  proportional memory with the server: {} MiB (target at most {allowed})",
        with_quartiles(&memory)
    );
    println!("  page tables, not in it: {} MiB", with_quartiles(&tables));
    Ok(())
}

/// Requests of eight processes with a server, and with eight caches of the same memory together, once the caches are full.
fn same_memory(rounds: usize) -> Done<()> {
    let total = 512 * MIB;
    let mut ratios = Vec::new();
    for _ in 0..rounds {
        // 2 GiB of objects.
        let machine = Machine::new(32 << 10, 64 << 10, 100)?;
        let reads = "zipf 12000";
        let shared = {
            let mut server = machine.server(total)?;
            let mut readers = machine.readers(None)?;
            let mut counts = [0.0; 3];
            for count in &mut counts {
                together(&mut readers, reads)?;
                *count = server.ask("requests")? + requests(&mut readers)?;
            }
            counts[2] - counts[1]
        };
        let mut readers = machine.readers(Some(total / CLIENTS as u64))?;
        let mut counts = [0.0; 3];
        for count in &mut counts {
            together(&mut readers, reads)?;
            *count = requests(&mut readers)?;
        }
        ratios.push(shared / (counts[2] - counts[1]));
    }
    println!("{CLIENTS} processes, the same total memory, a quarter of the objects, Zipf 0.8:");
    println!(
        "  requests over those of private caches, third round: {} (target at most 0.333)",
        with_quartiles(&ratios)
    );
    Ok(())
}

/// Reads all objects in order. Returns the time and the processor time in milliseconds.
fn scan_ms(reader: &mut Worker) -> Done<[f64; 2]> {
    let before = processor_ns(reader.process.id());
    let time_us = reader.ask("scan")?;
    let processor = processor_ns(reader.process.id()).saturating_sub(before);
    Ok([time_us / 1e3, processor as f64 / 1e6])
}

/// The first round of a new process over a later round of one that has read all. The server's memory has huge pages where
/// the machine offers them.
fn new_process(rounds: usize) -> Done<()> {
    println!(
        "a second, new process, 64 KiB reads: its first round over a warm one (target at most 1.2)"
    );
    for mib in [64, 512] {
        let machine = Machine::new(mib, MIB, 300)?;
        let _server = machine.server((mib + mib / 4 + 64) * MIB)?;
        let mut first = machine.reader(None, 0)?;
        first.ask("scan")?;
        let (mut news, mut warms) = (Vec::new(), Vec::new());
        for _ in 0..rounds.max(4) {
            warms.push(scan_ms(&mut first)?);
            news.push(scan_ms(&mut machine.reader(None, 1)?)?);
            news.push(scan_ms(&mut machine.reader(None, 2)?)?);
            warms.push(scan_ms(&mut first)?);
        }
        for (kind, name) in ["time", "processor time"].into_iter().enumerate() {
            let of_kind = |all: &[[f64; 2]]| all.iter().map(|one| one[kind]).collect::<Vec<_>>();
            let (news, warms) = (of_kind(&news), of_kind(&warms));
            // Of a round: those of two processes, between two of the other one.
            let pairs = news.chunks(2).zip(warms.chunks(2));
            let ratios = pairs.map(|(new, warm)| (new[0] + new[1]) / (warm[0] + warm[1]));
            println!(
                "  {mib} MiB, {name}: {}; {:.1} ms over {:.1} ms",
                with_quartiles(&ratios.collect::<Vec<_>>()),
                median(&news),
                median(&warms)
            );
        }
    }
    Ok(())
}

/// The server's memory after its limit is halved, while eight clients read.
fn lower_limit() -> Done<()> {
    let limit = 512 * MIB;
    let machine = Machine::new(480, MIB, 100)?;
    let server = machine.server(limit)?;
    let mut readers = machine.readers(None)?;
    readers[0].ask("scan")?;
    together(&mut readers, "scan")?;
    let full = shared_memory_bytes(server.process.id());
    let mut control = machine.reader(None, 99)?;
    for reader in &mut readers {
        reader.send("random 9000")?;
    }
    std::thread::sleep(Duration::from_millis(500));
    let started = Instant::now();
    let reached = control.ask(&format!("limit {}", limit / 2))?;
    let answered = started.elapsed();
    let (mut below, mut highest) = (None, 0);
    while started.elapsed() < Duration::from_secs(7) {
        let now = shared_memory_bytes(server.process.id());
        if now <= limit / 2 {
            below.get_or_insert(started.elapsed());
        }
        if started.elapsed() > Duration::from_secs(2) {
            highest = highest.max(now);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    for reader in &mut readers {
        reader.answer()?;
    }
    println!(
        "the limit is halved with {CLIENTS} clients that read (target: within 2 s, and stays):"
    );
    println!(
        "  from {} MiB, limit {} MiB, answered after {answered:?}",
        full / MIB,
        reached as u64 / MIB
    );
    println!("  below it after {below:?}; highest from 2 s to 7 s: {} MiB", highest / MIB);
    Ok(())
}

/// Wake-ups of idle processes.
fn idle() -> Done<()> {
    let machine = Machine::new(60, MIB, DELAY_US)?;
    let server = machine.server(128 * MIB)?;
    let mut readers = machine.readers(None)?;
    together(&mut readers, "scan")?;
    // A client's thread sleeps without a timer from the second second on. The threads of the store's delay end after ten.
    std::thread::sleep(Duration::from_secs(13));
    let all =
        |readers: &[Worker]| -> u64 { readers.iter().map(|one| waits(one.process.id())).sum() };
    let before = (waits(server.process.id()), all(&readers));
    std::thread::sleep(Duration::from_secs(10));
    let after = (waits(server.process.id()), all(&readers));
    println!(
        "idle for 10 s: wake-ups of the server {}, of {CLIENTS} clients {} (target 0)",
        after.0.saturating_sub(before.0),
        after.1.saturating_sub(before.1)
    );
    Ok(())
}

pub fn run(rounds: usize, only: &str) -> Done<()> {
    let cases: [(&str, &dyn Fn() -> Done<()>); 5] = [
        ("set", &|| one_working_set(rounds)),
        ("memory", &|| same_memory(rounds)),
        ("new", &|| new_process(rounds)),
        ("limit", &lower_limit),
        ("idle", &idle),
    ];
    for (name, case) in cases {
        if name.contains(only) {
            case()?;
        }
    }
    Ok(())
}
