//! The table of warm reads.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use crate::measure::{digits, median, quantile, sorted, with_quartiles};
use crate::peers::{LENGTHS, OBJECT, Peer, foyer, http, lmdb, memcached, mounts, own};
use crate::process::{Done, Running, Worker, processor_ns};
use crate::synthetic_store::content;

/// One object, whose reads are at random.
pub const OBJECT_BYTES: u64 = 64 << 20;
const MEMORY_BYTES: u64 = 192 << 20;
/// The time of one side of a round.
const TURN_SECONDS: f64 = 0.1;
/// Places are not repeated in an order that a processor can predict.
const PLACES: usize = 1 << 14;

#[derive(Default)]
struct Side {
    /// For each round, in microseconds.
    medians: Vec<f64>,
    processor: Vec<f64>,
}

/// Multiples of `len` in a random order.
fn places(len: usize) -> Vec<u64> {
    let (mut state, all) = (7u64, OBJECT_BYTES / len as u64);
    let next = |_| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % all * len as u64
    };
    (0..PLACES).map(next).collect()
}

/// The time between two looks at the clock, which each read has once.
fn clock_us() -> f64 {
    let mut times = Vec::new();
    for _ in 0..10_000 {
        let started = Instant::now();
        times.push(started.elapsed().as_nanos() as f64 / 1e3);
    }
    median(&times)
}

fn own_processor_ns() -> u64 {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::uninit();
    // SAFETY: the call fills the whole structure, and can't fail with these arguments.
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr());
        usage.assume_init()
    };
    let ns = |time: libc::timeval| time.tv_sec as u64 * 1_000_000_000 + time.tv_usec as u64 * 1000;
    ns(usage.ru_utime) + ns(usage.ru_stime)
}

fn all_processor_ns(peer: &dyn Peer) -> u64 {
    own_processor_ns() + peer.processes().into_iter().map(processor_ns).sum::<u64>()
}

struct Turn<'p> {
    peer: &'p mut dyn Peer,
    places: &'p [u64],
    len: usize,
}

impl Turn<'_> {
    /// The median and the processor time of a read, in microseconds.
    fn run(&mut self, reads: usize) -> Done<(f64, f64)> {
        let mut times = Vec::with_capacity(reads + self.places.len());
        let before = all_processor_ns(&*self.peer);
        while times.len() < reads {
            let left = (reads - times.len()).min(self.places.len());
            self.peer.read_all(&self.places[..left], self.len, &mut times)?;
        }
        let spent = all_processor_ns(&*self.peer) - before;
        let times: Vec<f64> = times.iter().map(|ns| f64::from(*ns) / 1e3).collect();
        Ok((median(&times), spent as f64 / 1e3 / times.len() as f64))
    }
}

/// The engines, and the origin of rclone if nginx is not among them.
type Started = (Vec<Box<dyn Peer>>, Option<Running>);

fn start_all(only: &str, dir: &Path, server: &(String, u32)) -> Done<Started> {
    let mut all: Vec<Box<dyn Peer>> = Vec::new();
    let mut add = |name: &str, start: &mut dyn FnMut() -> Done<Box<dyn Peer>>| {
        if !name.contains(only) {
            return;
        }
        match start() {
            Ok(peer) => all.push(peer),
            Err(error) => println!("not measured: {name}: {error}"),
        }
    };
    let socket = Path::new(&server.0);
    add("own: SharedStore", &mut || {
        Ok(Box::new(own::Store::shared(socket, server.1, OBJECT_BYTES)?))
    });
    add("own: engine", &mut || Ok(Box::new(own::EngineInterface::attach(socket, server.1)?)));
    add("own: CachedStore", &mut || Ok(Box::new(own::Store::private(OBJECT_BYTES, MEMORY_BYTES)?)));
    add("foyer", &mut || Ok(Box::new(foyer::Foyer::new(OBJECT_BYTES, MEMORY_BYTES))));
    add("LMDB", &mut || {
        let at = dir.join("lmdb");
        fs::create_dir_all(&at)?;
        let written = Command::new(std::env::current_exe()?).arg("write-lmdb").arg(&at).status()?;
        if !written.success() {
            return Err("the environment could not be written".into());
        }
        Ok(Box::new(lmdb::Lmdb::attach(&at)?))
    });
    add("memcached", &mut || Ok(Box::new(memcached::Memcached::start(dir, OBJECT_BYTES)?)));
    let files = dir.join("files");
    let started = http::start_nginx(dir, &files);
    let (mut nginx, port) = match started {
        Ok((server, port)) => (Some(server), port),
        Err(error) => {
            println!("not measured: nginx, rclone: {error}");
            (None, 0)
        }
    };
    if nginx.is_some() {
        add("nginx", &mut || Ok(Box::new(http::nginx(dir, nginx.take().ok_or("taken")?)?)));
    }
    add("rclone", &mut || Ok(Box::new(mounts::rclone(dir, port)?)));
    add("juicefs", &mut || Ok(Box::new(mounts::juicefs(dir, &files.join("measured/0"))?)));
    add("cachey", &mut || Ok(Box::new(http::cachey(dir, &files)?)));
    Ok((all, nginx))
}

pub fn run(rounds: usize, only: &str, dir: &Path) -> Done<()> {
    let dir = tempfile::Builder::new().prefix("peers").tempdir_in(dir)?;
    fs::create_dir_all(dir.path().join("files/measured"))?;
    fs::write(dir.path().join("files/measured/0"), content(OBJECT, 0..OBJECT_BYTES))?;
    let socket = dir.path().join("s/socket").display().to_string();
    let arguments = ["serve", "--socket", &socket, "--memory", &MEMORY_BYTES.to_string()];
    let mut arguments: Vec<String> = arguments.map(String::from).into();
    arguments.extend(
        ["--object-bytes", &OBJECT_BYTES.to_string(), "--delay-us", "3000"].map(String::from),
    );
    let server = Worker::start(&arguments)?;
    let (mut peers, _origin) = start_all(only, dir.path(), &(socket, server.process.id()))?;
    let clock = clock_us();
    println!("the clock takes {clock:.3} us, which p50 excludes; {rounds} rounds\n");
    let mut table: Vec<Vec<Side>> = Vec::new();
    for len in LENGTHS {
        let places = places(len);
        let mut sides: Vec<Side> = peers.iter().map(|_| Side::default()).collect();
        let mut reads = Vec::new();
        for peer in &mut peers {
            // All places are read before the measurement.
            let every: Vec<u64> = (0..OBJECT_BYTES).step_by(len).collect();
            let mut times = Vec::new();
            peer.read_all(&every, len, &mut times)?;
            let (p50, _) = Turn { peer: &mut **peer, places: &places, len }.run(500)?;
            reads.push(((TURN_SECONDS * 1e6 / p50) as usize).clamp(50, 200_000));
        }
        for round in 0..rounds {
            for at in 0..peers.len() {
                let at = if round % 2 == 0 { at } else { peers.len() - 1 - at };
                let mut turn = Turn { peer: &mut *peers[at], places: &places, len };
                let (p50, processor) = turn.run(reads[at])?;
                sides[at].medians.push((p50 - clock).max(0.001));
                sides[at].processor.push(processor);
            }
        }
        table.push(sides);
    }
    print_table(&peers, &table);
    Ok(())
}

fn print_table(peers: &[Box<dyn Peer>], table: &[Vec<Side>]) {
    println!(
        "p50 / processor time of a read, servers included, in microseconds (quartiles of the rounds)\n"
    );
    println!("| | 4 KiB | 64 KiB | 1 MiB |\n|---|---|---|---|");
    for (at, peer) in peers.iter().enumerate() {
        let cells = table.iter().map(|sides| {
            let side = &sides[at];
            format!("{} / {}", with_quartiles(&side.medians), with_quartiles(&side.processor))
        });
        println!("| {} | {} |", peer.name(), cells.collect::<Vec<_>>().join(" | "));
    }
    let is_own = |peer: &dyn Peer| peer.name().starts_with("millpond serve");
    for own in (0..peers.len()).filter(|own| is_own(&*peers[*own])) {
        println!("\n{} over each other, p50 / processor time:\n", peers[own].name());
        for (at, peer) in peers.iter().enumerate() {
            let cells = table.iter().map(|sides| {
                let ratio = |of: &dyn Fn(&Side) -> Vec<f64>| {
                    let pairs = of(&sides[own]).into_iter().zip(of(&sides[at]));
                    let all = sorted(pairs.map(|(own, peer)| own / peer.max(1e-9)).collect());
                    let [low, middle, high] =
                        [0.25, 0.5, 0.75].map(|part| digits(quantile(&all, part)));
                    format!("{middle} ({low}-{high})")
                };
                format!(
                    "{} / {}",
                    ratio(&|side| side.medians.clone()),
                    ratio(&|side| side.processor.clone())
                )
            });
            println!("| {} | {} |", peer.name(), cells.collect::<Vec<_>>().join(" | "));
        }
    }
}
