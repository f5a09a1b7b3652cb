//! A lane: one kind of load, in rounds. A round starts workers, may kill them, and checks the files that
//! they left.
//!
//! ```text
//! round: keeper? -> worker -> killed, or its keeper is, or both, or neither -> keeper ends -> check -> repair
//! ```
//!
//! The content of the kernel's file after a round, for each slot:
//!
//! | | at least | at most |
//! |---|---|---|
//! | the worker has ended; or was killed in mode through, or with a keeper that survived | done | begun |
//! | it was killed in mode back, and had no keeper, or one that was killed before | synced | begun |
//!
//! A slot that was being written may have pages of both versions.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::ledger::{Count, Ledger, Word};
use super::slots::{SHAPES, SlotLayout, SlotRandom};
use super::verdict::SoakCounts;
use crate::failure::{Context, FAILED, Failure, Result};
use crate::millpond_command::millpond;

/// A worker that has not ended this long after its time hangs.
const PATIENCE: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(3);
/// Memory other than the cache: the program, stacks, the allocator. Chosen, not measured.
const NON_CACHE_BYTES: u64 = 64 << 20;
const LEDGER: &str = "ledger";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LaneKind {
    /// The library; the options of the worker, and whether it has a keeper.
    Library { words: &'static [&'static str], has_keeper: bool },
    /// A program under `millpond run`, with these options.
    Program { words: &'static [&'static str], random_hand_over: bool },
    /// A load that checks itself, and is not killed.
    Alone { words: &'static [&'static str] },
}

/// `--atomic` states which reads are atomic; under `run`, reads of files that are served from their open on
/// are.
pub const LANES: &[(&str, LaneKind)] = &[
    (
        "through",
        LaneKind::Library { words: &["--library", "through", "--atomic"], has_keeper: false },
    ),
    ("back", LaneKind::Library { words: &["--library", "back", "--atomic"], has_keeper: false }),
    ("keeper", LaneKind::Library { words: &["--library", "back", "--atomic"], has_keeper: true }),
    ("direct", LaneKind::Library { words: &["--library", "direct", "--atomic"], has_keeper: true }),
    ("run", LaneKind::Program { words: &["--eager"], random_hand_over: false }),
    (
        "run-back",
        LaneKind::Program { words: &["--eager", "--mode", "back"], random_hand_over: false },
    ),
    ("run-random", LaneKind::Program { words: &["--mode", "back"], random_hand_over: true }),
    ("extents", LaneKind::Alone { words: &["extents"] }),
    ("faults", LaneKind::Alone { words: &["faults"] }),
];

pub struct Lane<'s> {
    pub name: &'static str,
    pub kind: LaneKind,
    pub dir: PathBuf,
    pub seed: u64,
    pub cache_bytes: u64,
    pub end: Instant,
    pub is_over: &'s AtomicBool,
    pub tally: &'s SoakCounts,
}

/// The fate of a worker and its keeper.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Fate {
    worker_dies: bool,
    keeper_dies: bool,
}

/// Killed when dropped, so that no process stays behind.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Process {
    fn signal(&self, signal: Signal) {
        let _ = kill_process(Pid::from_child(&self.0), signal);
    }
}

/// Not a failure: all lanes receive the interruption.
pub fn interruption() -> Failure {
    Failure::new(FAILED, "interrupted")
}

impl Lane<'_> {
    /// Runs until the time is up, or a check fails.
    pub fn run(&self) -> Result<()> {
        let data = self.dir.join("data");
        std::fs::create_dir_all(&data).context(data.display())?;
        let mut random = SlotRandom(self.seed);
        let checked = match self.kind {
            LaneKind::Alone { .. } => None,
            _ => Some(self.create_files(&data)?),
        };
        while Instant::now() < self.end && !self.is_over.load(Relaxed) {
            let seed = (random.next() << 32) | (self.seed & 0xFFFF_FFFF);
            let outcome = match &checked {
                None => self.run_alone(&data, seed),
                Some(ledger) => self.round(&data, ledger, seed, &mut random),
            };
            outcome.map_err(|failure| {
                let message = format!("lane {}, seed {seed}: {}", self.name, failure.message);
                Failure::new(FAILED, message)
            })?;
            self.tally.rounds.fetch_add(1, Relaxed);
        }
        Ok(())
    }

    fn create_files(&self, data: &Path) -> Result<Ledger> {
        for shape in &SHAPES {
            let path = data.join(shape.name);
            let file = File::create_new(&path).context(path.display())?;
            file.set_len((shape.slots * shape.slot_bytes) as u64).context(path.display())?;
        }
        Ledger::create(&self.dir.join(LEDGER)).context("the ledger")
    }

    fn stderr_path(&self) -> PathBuf {
        self.dir.join("said")
    }

    /// The command of a worker, with the options of `run`, if it runs under it.
    fn worker(&self, under: &[&str], words: &[&str], data: &Path, seed: u64) -> Result<Command> {
        let own = std::env::current_exe().context("finding this program")?;
        let mut command;
        if under.is_empty() {
            command = Command::new(&own);
        } else {
            command = Command::new(millpond()?);
            command.args(["run", "--quiet"]).args(under);
            if under.contains(&"back") {
                command.arg("--cache").arg(self.cache_bytes.to_string());
            }
            command.arg("--path").arg(data).arg("--").arg(&own);
        }
        command.arg("soak-worker").args(words).arg("--data").arg(data);
        command.arg("--seed").arg(seed.to_string());
        let said = File::options().create(true).append(true).open(self.stderr_path());
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command.stderr(said.context("creating a file for a worker's output")?);
        Ok(command)
    }

    fn run_alone(&self, data: &Path, seed: u64) -> Result<()> {
        let LaneKind::Alone { words } = self.kind else { unreachable!("checked by the caller") };
        let millis = self.millis(&mut SlotRandom(seed));
        let mut command = self.worker(&[], words, data, seed)?;
        command.args(["--millis", &millis.to_string()]);
        let mut worker = Process(command.spawn().context("a worker")?);
        let (status, _) = self.await_end(&mut worker, millis, &mut |_| Ok(()))?;
        self.check_exit(status, false)
    }

    fn millis(&self, random: &mut SlotRandom) -> u64 {
        let left = self.end.saturating_duration_since(Instant::now()).as_millis() as u64;
        (200 + random.below(4000) as u64).min(left.max(100))
    }

    fn fate(&self, random: &mut SlotRandom) -> Fate {
        let has_keeper = matches!(self.kind, LaneKind::Library { has_keeper: true, .. });
        Fate { worker_dies: random.below(10) < 7, keeper_dies: has_keeper && random.below(10) < 3 }
    }

    fn round(
        &self,
        data: &Path,
        ledger: &Ledger,
        seed: u64,
        random: &mut SlotRandom,
    ) -> Result<()> {
        let (fate, millis) = (self.fate(random), self.millis(random));
        let address = self.dir.join("keeper");
        let mut keeper = match self.kind {
            LaneKind::Library { has_keeper: true, .. } => Some(self.keeper(&address)?),
            _ => None,
        };
        let mut command = match self.kind {
            LaneKind::Library { words, has_keeper } => {
                let mut command = self.worker(&[], &[&["slots"], words].concat(), data, seed)?;
                if has_keeper {
                    command.arg("--keeper").arg(&address);
                }
                command
            }
            LaneKind::Program { words, random_hand_over } => {
                let atomic: &[&str] = if random_hand_over { &[] } else { &["--atomic"] };
                let mut command = self.worker(words, &[&["slots"], atomic].concat(), data, seed)?;
                if random_hand_over {
                    command.env("MILLPOND_HAND_OVER", (seed >> 32).to_string());
                }
                command
            }
            LaneKind::Alone { .. } => unreachable!("these loads have no rounds"),
        };
        command.arg("--ledger").arg(self.dir.join(LEDGER));
        command.args(["--millis", &millis.to_string()]);
        command.args(["--cache-bytes", &self.cache_bytes.to_string()]);
        ledger.set_count(Count::Pid, 0).context("the ledger")?;
        let mut worker = Process(command.spawn().context("a worker")?);
        let begun = Instant::now();
        let moment =
            |random: &mut SlotRandom| Duration::from_millis(random.below(millis as usize) as u64);
        let (worker_at, keeper_at) = (moment(random), moment(random));
        let (mut keeper_died, mut worker_killed) = (None, false);
        let (status, resident) = self.await_end(&mut worker, millis, &mut |worker| {
            let elapsed = begun.elapsed();
            let has_begun = ledger.count(Count::Pid).context("the ledger")? != 0;
            if fate.keeper_dies && keeper_died.is_none() && has_begun && elapsed >= keeper_at {
                drop(keeper.take());
                keeper_died = Some(elapsed);
                self.tally.keeper_kills.fetch_add(1, Relaxed);
            }
            if fate.worker_dies && !worker_killed && elapsed >= worker_at {
                worker_killed = self.kill(worker, ledger)?;
            }
            Ok(())
        })?;
        self.check_exit(status, worker_killed)?;
        if let LaneKind::Library { .. } = self.kind {
            self.tally.resident(resident);
            if resident > self.cache_bytes + NON_CACHE_BYTES {
                let message =
                    format!("{resident} bytes resident, of a cache of {}", self.cache_bytes);
                return Err(Failure::new(FAILED, message));
            }
        }
        let kept = keeper.is_some();
        if let Some(mut keeper) = keeper.take() {
            // The keeper ends when it has written the dirty pages.
            keeper.signal(Signal::TERM);
            keeper.0.wait().context("the keeper's end")?;
        }
        let _ = std::fs::remove_file(&address);
        let survives = match self.kind {
            LaneKind::Library { words, .. } => kept || words.contains(&"through"),
            _ => true,
        };
        let least = if survives || !worker_killed { Word::Done } else { Word::Synced };
        self.check(data, ledger, least)
    }

    fn keeper(&self, address: &Path) -> Result<Process> {
        let _ = std::fs::remove_file(address);
        let mut command = Command::new(millpond()?);
        command.arg("keeper").arg(address).stderr(Stdio::null());
        // The socket of a keeper that was killed.
        let _ = std::fs::remove_file(address);
        let keeper = Process(command.spawn().context("a keeper")?);
        let begun = Instant::now();
        // The socket has its name when the keeper listens.
        while !address.exists() {
            if begun.elapsed() > PATIENCE {
                return Err(Failure::new(FAILED, "the keeper has not started to listen"));
            }
            std::thread::sleep(PAUSE);
        }
        Ok(keeper)
    }

    /// False: the worker has not begun.
    fn kill(&self, worker: &Process, ledger: &Ledger) -> Result<bool> {
        let pid = ledger.count(Count::Pid).context("the ledger")?;
        let Some(pid) = Pid::from_raw(pid as i32) else { return Ok(false) };
        // Under `run` it may be a grandchild.
        if let LaneKind::Library { .. } = self.kind {
            worker.signal(Signal::KILL);
        } else {
            let _ = kill_process(pid, Signal::KILL);
        }
        self.tally.kills.fetch_add(1, Relaxed);
        Ok(true)
    }

    /// The exit status, and the maximum of the resident memory.
    fn await_end(
        &self,
        worker: &mut Process,
        millis: u64,
        each_time: &mut dyn FnMut(&Process) -> Result<()>,
    ) -> Result<(ExitStatus, u64)> {
        let limit = Instant::now() + Duration::from_millis(millis) + PATIENCE;
        let mut resident = 0;
        loop {
            if let Some(status) = worker.0.try_wait().context("waiting for a worker")? {
                return Ok((status, resident));
            }
            resident = resident.max(resident_bytes(worker.0.id()).unwrap_or(0));
            each_time(worker)?;
            if Instant::now() > limit {
                let words = self.stderr_tail();
                return Err(Failure::new(FAILED, format!("a worker hangs\n{words}")));
            }
            if self.is_over.load(Relaxed) && Instant::now() + PATIENCE > limit {
                return Err(interruption());
            }
            std::thread::sleep(PAUSE);
        }
    }

    fn stderr_tail(&self) -> String {
        let said = std::fs::read(self.stderr_path()).unwrap_or_default();
        let from = said.len().saturating_sub(4096);
        String::from_utf8_lossy(&said[from..]).trim_end().to_string()
    }

    fn check_exit(&self, status: ExitStatus, was_killed: bool) -> Result<()> {
        use std::os::unix::process::ExitStatusExt;
        // `run` exits as its program does.
        let is_killed = was_killed && status.signal() == Some(Signal::KILL.as_raw());
        if status.success() || is_killed {
            return Ok(());
        }
        let words = self.stderr_tail();
        Err(Failure::new(FAILED, format!("a worker failed, {status}\n{words}")))
    }

    /// Checks each slot; slots that were being written, or were lost, are written again.
    fn check(&self, data: &Path, ledger: &Ledger, least: Word) -> Result<()> {
        for (number, shape) in SHAPES.iter().enumerate() {
            let path = data.join(shape.name);
            let file = File::options().read(true).write(true).open(&path);
            let file = file.context(path.display())?;
            let mut all = vec![0; shape.slots * shape.slot_bytes];
            file.read_exact_at(&mut all, 0).context(path.display())?;
            for (slot, bytes) in all.chunks(shape.slot_bytes).enumerate() {
                let word = |word| ledger.get(number, slot, word);
                let versions = (|| io::Result::Ok((word(least)?, word(Word::Begun)?)))();
                let (least, begun) = versions.context("the ledger")?;
                self.check_slot(shape, slot, least, begun, bytes)?;
                if shape.version(self.seed & 0xFFFF_FFFF, slot, bytes) != Ok(begun)
                    || least != begun
                {
                    self.repair(&file, ledger, number, slot, begun + 1).context(path.display())?;
                }
            }
        }
        self.tally.checks.fetch_add(1, Relaxed);
        Ok(())
    }

    fn check_slot(
        &self,
        shape: &SlotLayout,
        slot: usize,
        least: u64,
        begun: u64,
        bytes: &[u8],
    ) -> Result<()> {
        let seed = self.seed & 0xFFFF_FFFF;
        let place = format!("MISMATCH in {}, slot {slot}", shape.name);
        let wanted = format!("wanted {least} to {begun}");
        match shape.version(seed, slot, bytes) {
            Ok(version) if (least..=begun).contains(&version) => Ok(()),
            Ok(version) => {
                let at = shape.offset(slot);
                Err(Failure::new(FAILED, format!("{place}, at {at}: version {version}, {wanted}")))
            }
            Err(_) => shape.torn(seed, slot, least..=begun, bytes).map_err(|wrong| {
                let at = wrong.offset;
                Failure::new(
                    FAILED,
                    format!("{place}: the page at {at} has no valid version, {wanted}"),
                )
            }),
        }
    }

    fn repair(
        &self,
        file: &File,
        ledger: &Ledger,
        number: usize,
        slot: usize,
        version: u64,
    ) -> io::Result<()> {
        let shape = &SHAPES[number];
        let mut bytes = vec![0; shape.slot_bytes];
        shape.fill(self.seed & 0xFFFF_FFFF, slot, version, &mut bytes);
        file.write_all_at(&bytes, shape.offset(slot))?;
        for word in [Word::Begun, Word::Done, Word::Synced] {
            ledger.set(number, slot, word, version)?;
        }
        Ok(())
    }
}

/// The resident memory of a process, from the kernel.
fn resident_bytes(pid: u32) -> io::Result<u64> {
    let statm = std::fs::read_to_string(format!("/proc/{pid}/statm"))?;
    let pages = statm.split(' ').nth(1).and_then(|pages| pages.parse().ok()).unwrap_or(0u64);
    Ok(pages * rustix::param::page_size() as u64)
}
